"""`step`, a drop-in for `equinox.filter_jit`: arrays are traced, and everything else is static.

    from stepcache import equinox as seqx

    @seqx.step
    def make_step(model, opt_state, batch):
        loss, grads = eqx.filter_value_and_grad(loss_fn)(model, batch)
        updates, opt_state = optimizer.update(grads, opt_state)
        return eqx.apply_updates(model, updates), opt_state, loss

It is `eqx.filter_jit` itself, with a step in the place of its `jax.jit`.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, Generic, ParamSpec, TypeVar, overload

import equinox as eqx
import jax
import numpy as np
from equinox import _jit

from stepcache.calls.context import current_scope, in_mesh_of
from stepcache.calls.padding import Padder
from stepcache.engine import Engine
from stepcache.events import StepStats
from stepcache.modules.module_step import ModuleStepBase
from stepcache.step import Step, reduced, spec_of

P = ParamSpec("P")
R = TypeVar("R")

# Bound once, so that a program which replaces `filter_jit` cannot make a step call itself.
_filter_jit: Any = eqx.filter_jit
_OF_STEP = ("batch", "pad")
_STATIC = {"static_argnums": 2}  # Of the function that `filter_jit` compiles.


class FilterStep(ModuleStepBase, _jit._JitWrapper, Generic[P, R]):
    """A function under `stepcache.equinox.step`: called like the function.

    A module, as what `filter_jit` returns: its arrays are those of the function, if that has any.
    """

    _made_by = "stepcache.equinox.step"

    def __call__(self, /, *args: P.args, **kwargs: P.kwargs) -> R:
        call: Any = super().__call__
        padder = self._cached.padder
        return call(*args, **kwargs) if padder is None else padder.run(call, args, kwargs)

    @property
    def _step(self) -> Step:
        return self._cached.step

    @property
    def _options(self) -> dict[str, Any]:
        return self._cached.options

    def _shown(self, args: tuple, kwargs: dict[str, Any]) -> tuple[tuple, dict[str, Any]]:
        if self._cached.padder is not None:
            args, kwargs = self._cached.padder.padded(args, kwargs)
        shapes = dict[int, tuple[Any, Any]]()

        def array(x: Any) -> Any:
            """An array in the place of a shape, which would be static."""
            if not isinstance(x, jax.ShapeDtypeStruct):
                return x
            made = np.empty(0)
            shapes[id(made)] = made, x
            return made

        args, kwargs = jax.tree.map(array, (args, kwargs))
        of_callable = self._signature, self._dynamic_fun, self._static_fun
        info = (*of_callable, self.donate_first, self.donate_rest)
        *groups, static = _jit._preprocess(info, args, kwargs, return_static=True)
        donated, kept = jax.tree.map(lambda x: shapes.get(id(x), (x, x))[1], groups)
        return (donated, kept, static), {}

    def __reduce__(self):
        return reduced(self, _make, self.__wrapped__, self._options)

    def stats(self) -> StepStats:
        stats, padder = self._step.stats(), self._cached.padder
        return stats if padder is None else dataclasses.replace(stats, padding=padder.padding)

    def clear_cache(self) -> None:
        """Drops the step's programs and traces; the next call builds anew."""
        self._step.clear_cache()


class _Inner:
    """The step in the place of the `jax.jit` of `filter_jit`. Those over one function are equal.

    Attributes:
        step: the step, over the flat arrays that `filter_jit` makes of arguments.
        options: the keywords of `seqx.step`.
        padder: pads the user's arguments; None without `pad`.
    """

    def __init__(self, fun: Any, jitted: Any, options: dict[str, Any]):
        named = {name: options[name] for name in _OF_STEP if name in options}
        of_jax = {name: value for name, value in options.items() if name not in (*named, "donate")}
        if options["donate"] != "none":
            of_jax["donate_argnums"] = 0
        users, spec = spec_of(fun, named), spec_of(jitted.__wrapped__, of_jax | _STATIC)
        given = spec.parameters  # With the names of the user's, in which `tell` speaks.
        parameters = users.parameters._replace(roles=given.roles, tell=given.tell)
        spec = spec._replace(name=users.name, source=fun, parameters=parameters)
        self.step, self.options, self.padder = Step(Engine(spec), of_jax), options, None
        self.lower, self._engine = self.step.lower, self.step._engine
        if users.pads:
            self.padder = _FilterPadder(users, self, lambda: self, current_scope)

    def __call__(self, *given: Any) -> tuple:
        marker, arrays, static = self.step(*given)
        # Equinox waits for the marker, to raise what callbacks raise: in vain, if there are none.
        return (marker if self._engine.calls_back else None), arrays, static

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Inner) and self._parts() == other._parts()

    def __hash__(self) -> int:
        return hash(self._engine.number)

    def __repr__(self) -> str:
        return repr(self.step)

    def eval_shape(self, args: tuple, kwargs: dict[str, Any]) -> Any:
        """The shapes of the outputs of a call, for the padder."""
        with in_mesh_of(current_scope()):
            return eqx.filter_eval_shape(self._engine.spec.source, *args, **kwargs)

    def _parts(self) -> tuple:
        return self._engine.number, self.options


class _FilterPadder(Padder):
    jit = staticmethod(_filter_jit)
    kind_of = staticmethod(lambda leaf: leaf)  # It is static.


def _make(fun: Callable, options: dict[str, Any]) -> FilterStep:
    of_equinox = {name: value for name, value in options.items() if name not in _OF_STEP}
    made = _filter_jit(fun, **of_equinox)  # Judges the options, and raises as it does.
    fields = {each.name: getattr(made, each.name) for each in dataclasses.fields(made)}
    fields["_cached"] = _Inner(fun, made._cached, options)
    step: Any = eqx.module_update_wrapper(FilterStep(**fields))
    return step


@overload
def step(fun: Callable[P, R], /, **options: Any) -> FilterStep[P, R]: ...
@overload
def step(**options: Any) -> Callable[[Callable[P, R]], FilterStep[P, R]]: ...
def step(fun: Any = None, /, *, donate: str = "none", **options: Any) -> Any:
    """Compiles a function over equinox modules once for each signature, static values and mesh.

    A drop-in for `eqx.filter_jit`: `@step`, `@step(donate=...)` and `step(fun, ...)`. All arrays of
    JAX and numpy are traced, in the arguments, in modules and in the function itself; everything
    else is static. It is `filter_jit` itself, with a step in the place of its `jax.jit`: so calls
    take `filter_jit`'s time, and `1`, `1.0` and `True` are one static value.

        @seqx.step(donate="all-except-first")
        def make_step(batch, model, opt_state): ...

    The function is entered as often as under `filter_jit`: also steps that are made anew over equal
    callables share their programs, such as `step(model)` in each epoch.

    Programs are cached and explained as those of `stepcache.step`. A miss names the attribute, such
    as `model.layers[3].weight`, and rules of a session match its path, `model/layers/3/weight`. A
    call waits for its results only if a program of the step calls back into Python, as
    `eqx.error_if` does; then an error is raised as in `filter_jit`.

    Args:
        fun: the function; omitted in `@step(...)`.
        donate: "all", "all-except-first", "warn", "warn-except-first" or "none".
        **options: keywords of `filter_jit`, which are those of `jax.jit` except for static and
            donated arguments and shardings; `batch` and `pad`, as in `stepcache.step`.

    Returns:
        A `FilterStep`.

    Raises:
        ValueError: as `filter_jit` does.
    """
    if fun is None:
        return functools.partial(step, donate=donate, **options)
    return _make(fun, {"donate": donate, **options})
