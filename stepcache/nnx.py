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
from collections.abc import Callable
from typing import Any, Generic, ParamSpec, TypeVar, overload

import jax
from flax import nnx
from flax.nnx import graphlib
from flax.nnx.extract import NodeStates
from flax.nnx.transforms.compilation import JitWrapped, StateSharding

from stepcache import jaxcompat
from stepcache.calls.context import current_scope, in_mesh_of
from stepcache.calls.layers import function_name
from stepcache.errors import OptionError
from stepcache.modules.module_step import ModuleStepBase
from stepcache.modules.nnx_graph import GraphCall, OverGraphs
from stepcache.modules.nnx_plan import CallPlans, planned
from stepcache.step import Step, reduced
from stepcache.step import step as step_over_arrays

P = ParamSpec("P")
R = TypeVar("R")

# Bound once, so that a program which replaces `nnx.jit` cannot make a step call itself.
_nnx_jit = nnx.jit
_KEYWORDS = tuple(inspect.signature(nnx.jit).parameters)[1:]
_OF_NNX, _OF_STEP = ("graph", "graph_updates"), ("batch", "pad")
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
        is_placed = any(of_jax.get(name) is not None for name in _PLACING)
        self._is_by_nnx = is_placed or not isinstance(self._by_nnx, JitWrapped)
        if self._is_by_nnx:
            self._step = _put_under(self._by_nnx, of_jax)
        else:
            self._step = step_over_arrays(OverGraphs(fun), **of_jax)
        self._plans = CallPlans()

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> R:
        if self._is_by_nnx or jaxcompat.is_tracing() or _is_in_cached_partial():
            return self._by_nnx(*args, **kwargs)
        plan = self._plans.find(args, kwargs)
        if plan is not None:
            return plan.run(self._step, args, kwargs)
        call = GraphCall(args, kwargs)
        if not call.is_direct:
            return self._by_nnx(*args, **kwargs)
        plan = planned(args, kwargs, call)  # Before the call: what changes meanwhile is seen later.
        outcome = self._step(*call.args, **call.kwargs)
        outputs = call.finish(outcome)
        if plan is not None and call.keeps_structure(outcome):
            self._plans.add(plan)
        return outputs

    def _shown(self, args: tuple, kwargs: dict[str, Any]) -> tuple[tuple, dict[str, Any]]:
        if self._is_by_nnx:
            what = "a step that nnx.jit serves does not support this"
            hint = "a session's Rules place modules by their paths"
            got = "in_shardings, out_shardings, graph=False or graph_updates=False"
            raise OptionError(what, where=function_name(self.__wrapped__), got=got, hint=hint)
        call = GraphCall(args, kwargs)
        return call.args, call.kwargs

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


def _is_in_cached_partial() -> bool:
    return graphlib.GRAPH_CONTEXT.tmp_static_cache is not None


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

    Programs are cached and explained as those of `stepcache.step`: a miss names the attribute, such
    as `model.layers[3].kernel`. A call with the same modules as before takes little more time than
    `jax.jit` over a list of their arrays, because it reads and writes only the values of variables.

    `nnx.jit` itself serves functions with `in_shardings`, `out_shardings`, `graph=False` or
    `graph_updates=False`, with a step in the place of its `jax.jit`: programs are cached, but each
    call takes `nnx.jit`'s time, and there is no `warm` and no `explain`. It also serves calls
    inside a transformation, under `nnx.cached_partial`, and with references.

    Args:
        fun: the function; omitted in `@step(...)`.
        **options: keywords of `nnx.jit`; `batch` and `pad`, as in `stepcache.step`.

    Returns:
        A `ModuleStep`, with the methods of both `nnx.jit` and `stepcache.step`.

    Raises:
        OptionError: `carry`, `pack`, or an unknown keyword.
    """
    if "carry" in options:
        what = "modules are not carried: they are updated in place"
        hint = "remove carry; donate_argnames frees the memory of the old values"
        got = f"carry={options['carry']!r}"
        raise OptionError(what, where="stepcache.nnx.step", got=got, hint=hint)
    if "pack" in options:
        what = "variables of modules are no longer packed between calls"
        hint = "sc.Variables(tree, pack=True) packs a tree that a step takes, such as nnx.state's"
        raise OptionError(what, where="stepcache.nnx.step", got="pack", hint=hint)
    for name in options:
        if name not in (*_KEYWORDS, *_OF_STEP):
            raise OptionError(
                f"stepcache.nnx.step has no keyword {name!r}",
                expected=f"batch, pad, or a keyword of nnx.jit: {', '.join(_KEYWORDS)}",
            )
    if fun is None:
        return functools.partial(step, **options)
    return ModuleStep(fun, options)
