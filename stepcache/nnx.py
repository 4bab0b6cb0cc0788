"""`step`, a drop-in for `flax.nnx.jit`: takes modules as arguments, and updates them in place.

    from stepcache import nnx as snnx

    @snnx.step
    def train_step(model, optimizer, metrics, batch):
        loss, grads = nnx.value_and_grad(loss_fn)(model, batch)
        optimizer.update(model, grads)
        metrics.update(loss=loss)

Calls that stepcache does not support go to `nnx.jit`.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Sequence
from typing import Any, Generic, ParamSpec, TypeVar, overload

import jax
from flax import nnx
from flax.nnx import graphlib
from flax.nnx.extract import NodeStates
from flax.nnx.transforms.compilation import JitWrapped, StateSharding

from stepcache import jaxcompat
from stepcache.calls.context import current_scope, in_mesh_of
from stepcache.calls.layers import function_name
from stepcache.errors import OptionError, StepCacheWarning, warn
from stepcache.modules.module_step import ModuleStepBase
from stepcache.modules.nnx_graph import GraphCall, OverGraphs
from stepcache.modules.nnx_held import Held, hold_all, put, show_held, watch_for_looks
from stepcache.modules.nnx_packing import OverPacked
from stepcache.modules.nnx_plan import CallPlans, Unplanned, planned
from stepcache.modules.nnx_tree import OverTrees, TreeCall
from stepcache.step import Step, as_tuple, reduced
from stepcache.step import step as step_over_arrays

P = ParamSpec("P")
R = TypeVar("R")

# Bound once, so that a program which replaces `nnx.jit` cannot make a step call itself.
_nnx_jit = nnx.jit
_KEYWORDS = tuple(inspect.signature(nnx.jit).parameters)[1:]
_OF_NNX, _OF_STEP = ("graph", "graph_updates"), ("batch", "pad", "pack")
_PLACING = ("in_shardings", "out_shardings")


class ModuleStep(ModuleStepBase, Generic[P, R]):
    """A function under `stepcache.nnx.step`: called like the function, on modules as they are."""

    __wrapped__: Callable[P, R]
    _made_by = "stepcache.nnx.step"

    def __init__(self, fun: Callable[P, R], options: dict[str, Any]):
        of_nnx = {name: value for name, value in options.items() if name not in _OF_STEP}
        self._by_nnx = _nnx_jit(fun, **of_nnx)  # Judges the options, and raises as it does.
        functools.update_wrapper(self, fun)
        self._options = options
        of_jax = {name: value for name, value in options.items() if name not in _OF_NNX}
        self._packs = of_jax.pop("pack", False)
        self._call_kind: type[GraphCall | TreeCall] | None = None
        if any(of_jax.get(name) is not None for name in _PLACING):
            self._step = _put_under(self._by_nnx, of_jax)
        elif isinstance(self._by_nnx, JitWrapped):
            self._call_kind = GraphCall
            over = OverPacked if self._packs else OverGraphs
            self._step = step_over_arrays(over(fun, function_name(fun)), **of_jax)
        elif not self._by_nnx.graph:
            self._call_kind = TreeCall
            over = OverTrees(fun, function_name(fun), *_donated(fun, of_jax))
            self._step = step_over_arrays(over, **of_jax)
        else:
            self._step = _put_under(self._by_nnx, of_jax)
        self._plans = CallPlans()
        if self._packs:
            self._check_packing()

    def _check_packing(self) -> None:
        if self._call_kind is not GraphCall:
            what = "pack=True needs the default mode of nnx.jit"
            got = "in_shardings, out_shardings, graph=False or graph_updates=False"
            raise OptionError(what, where=function_name(self.__wrapped__), got=got)
        watch_for_looks()

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> R:
        if self._is_left_to_nnx():
            return self._by_nnx(*args, **kwargs)
        plan = self._plans.find(args, kwargs)
        if plan is not None and (not plan.held or _places_nothing()):
            try:
                return plan.run(self._step, args, kwargs)
            except Unplanned:
                self._plans.drop(plan)
        call = self._taken(args, kwargs)
        if not call.is_direct:
            return self._by_nnx(*args, **kwargs)
        if self._packs and isinstance(call, GraphCall) and _places_nothing():
            hold_all(call)
        plan = planned(args, kwargs, call)
        outcome = self._step(*call.args, **call.kwargs)
        outputs = outcome.outputs if put(call.held, outcome) else call.finish(outcome)
        if plan is not None and call.keeps_structure(outcome):
            self._plans.add(plan)
        elif call.held:
            self._stop_packing(call.held)
        return outputs

    def _is_left_to_nnx(self) -> bool:
        if self._call_kind is None or jaxcompat.is_tracing():
            return True
        return graphlib.GRAPH_CONTEXT.tmp_static_cache is not None  # For `nnx.cached_partial`.

    def _taken(self, args: tuple, kwargs: dict[str, Any]) -> GraphCall | TreeCall:
        if self._call_kind is None:
            what = "a step that goes to nnx.jit does not support this"
            hint = "a session's Rules place modules by their paths"
            got = "in_shardings, out_shardings, or graph=True with graph_updates=False"
            raise OptionError(what, where=function_name(self.__wrapped__), got=got, hint=hint)
        return self._call_kind(args, kwargs)

    def _shown(self, args: tuple, kwargs: dict[str, Any]) -> tuple[tuple, dict[str, Any]]:
        call = self._taken(args, kwargs)
        if self._packs and isinstance(call, GraphCall) and _places_nothing():
            show_held(call)
        return call.args, call.kwargs

    def _stop_packing(self, held: Sequence[Held]) -> None:
        self._packs = False
        for each in held:
            each.release()
        warn(
            f"{function_name(self.__wrapped__)} changes more of its modules than the values of "
            "their variables, or takes modules inside other arguments: nothing is packed",
            StepCacheWarning,
        )

    def __get__(self, instance: Any, owner: type | None = None) -> Any:
        return self if instance is None else functools.partial(self, instance)

    def __reduce__(self):
        return reduced(self, ModuleStep, self.__wrapped__, self._options)

    def trace(self, *args: P.args, **kwargs: P.kwargs) -> Any:
        """Traces the function for these arguments, as `nnx.jit` does."""
        with in_mesh_of(current_scope()):
            return self._by_nnx.trace(*args, **kwargs)

    def lower(self, *args: P.args, **kwargs: P.kwargs) -> Any:
        """Traces and lowers the function for these arguments, as `nnx.jit` does."""
        with in_mesh_of(current_scope()):
            return self._by_nnx.lower(*args, **kwargs)

    def eval_shape(self, *args: P.args, **kwargs: P.kwargs) -> Any:
        """The outputs, with `jax.ShapeDtypeStruct` in the place of arrays."""
        with in_mesh_of(current_scope()):
            return self._by_nnx.eval_shape(*args, **kwargs)

    def clear_cache(self) -> None:
        """Drops the step's programs and traces; the next call builds anew."""
        self._plans.clear()
        self._step.clear_cache()


def _places_nothing() -> bool:
    """Whether arrays stay where they are: only then may they share buffers."""
    scope = current_scope()
    return scope.placer is None and scope.target is None


def _donated(fun: Callable, options: dict[str, Any]) -> tuple[set[int], set[str]]:
    """The donated arguments, by number and by name: either way, however they are passed."""
    given = (options.get(name) for name in ("donate_argnums", "donate_argnames"))
    numbers, names = map(set, map(as_tuple, given))
    for number, name in enumerate(inspect.signature(fun).parameters):
        if number in numbers or name in names:
            numbers.add(number)
            names.add(name)
    return numbers, names


def _put_under(by_nnx: Any, options: dict[str, Any]) -> Step:
    """Has nnx's wrapper run its function through a step, with the options as nnx converts them."""
    inner = by_nnx.jitted_fn.__wrapped__
    if type(by_nnx) is JitWrapped:
        states = jax.tree.map(_for_parts, by_nnx.in_shardings)
        options = {
            **options,
            "in_shardings": by_nnx.jax_in_shardings,
            "out_shardings": (states, by_nnx.kwarg_shardings, by_nnx.jax_out_shardings),
        }
    else:
        updates = inner.update_shardings
        options = {**options, "out_shardings": (options.get("out_shardings"), list(updates))}
    made: Step = step_over_arrays(inner, **options)
    vars(by_nnx)["jitted_fn"] = made
    return made


def _for_parts(sharding: Any) -> Any:
    if not isinstance(sharding, StateSharding):
        return sharding
    return NodeStates.from_prefixes(sharding.shardings, metadata=sharding)


@overload
def step(fun: Callable[P, R], /, **options: Any) -> ModuleStep[P, R]: ...
@overload
def step(**options: Any) -> Callable[[Callable[P, R]], ModuleStep[P, R]]: ...
def step(fun: Any = None, /, **options: Any) -> Any:
    """Compiles a function over nnx modules once for each signature and mesh; updates them in place.

    A drop-in for `nnx.jit`: `@step`, `@step(...)` and `step(fun, ...)` take every keyword of
    `nnx.jit`, with the same meaning, and raise its errors. Changes that the function makes to
    modules, optimizers, metrics and `Rngs` are seen outside. Shared variables stay shared.

        @snnx.step
        def train_step(model, optimizer, batch): ...

        for batch in batches:
            loss = train_step(model, optimizer, batch)

    Programs are cached and explained as those of `stepcache.step`: a second start of a script
    traces nothing, and a miss names the attribute, such as `model.layers[3].kernel`. A call with
    the same modules as before takes little more time than `jax.jit` over a list of their arrays,
    because it reads and writes only the values of variables; with `graph=False`, too.

    With `pack=True`, small variables are in a few buffers between calls, and get their values when
    they are read. A call takes 1 µs less for each, but XLA compiles some milliseconds longer for
    each. This pays for small steps that run tens of thousands of times.

    These are passed to `nnx.jit`: functions with `in_shardings` or `out_shardings`, and those with
    `graph=True, graph_updates=False`, which are traced at each start; calls inside a
    transformation, under `nnx.cached_partial`, and with references.

    Args:
        fun: the function; omitted in `@step(...)`.
        **options: keywords of `nnx.jit`; `batch` and `pad`, as in `stepcache.step`; and `pack`.

    Returns:
        A `ModuleStep`, with the methods of both `nnx.jit` and `stepcache.step`.

    Raises:
        OptionError: `carry`; an unknown keyword; or `pack` outside of the default mode.
    """
    if "carry" in options:
        what = "modules are not carried: they are updated in place"
        hint = "remove carry; donate_argnames frees the memory of the old values"
        got = f"carry={options['carry']!r}"
        raise OptionError(what, where="stepcache.nnx.step", got=got, hint=hint)
    for name in options:
        if name not in (*_KEYWORDS, *_OF_STEP):
            raise OptionError(
                f"stepcache.nnx.step has no keyword {name!r}",
                expected=f"batch, pad, pack, or a keyword of nnx.jit: {', '.join(_KEYWORDS)}",
            )
    if fun is None:
        return functools.partial(step, **options)
    return ModuleStep(fun, options)
