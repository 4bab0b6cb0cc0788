"""`step`, a drop-in for `equinox.filter_jit`: arrays are traced, and everything else is static.

    from stepcache import equinox as seqx

    @seqx.step
    def make_step(model, opt_state, batch):
        loss, grads = eqx.filter_value_and_grad(loss_fn)(model, batch)
        updates, opt_state = optimizer.update(grads, opt_state)
        return eqx.apply_updates(model, updates), opt_state, loss

Calls that stepcache does not support go to `eqx.filter_jit`.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import itertools
import os
from collections.abc import Callable, Iterable, Iterator
from typing import Any, Generic, ParamSpec, TypeVar, overload

import equinox as eqx
import jax
from equinox import _jit

from stepcache import _process_hooks, jaxcompat
from stepcache._changes import Undoing
from stepcache.calls.context import current_scope, in_mesh_of
from stepcache.jaxcompat.inspection import LOG_OF_CALLBACKS
from stepcache.modules.equinox_trees import (
    OverTrees,
    Partitioned,
    built,
    is_array_or_shape,
    over_trees,
)
from stepcache.modules.module_step import ModuleStepBase
from stepcache.step import reduced
from stepcache.step import step as step_over_arrays

P = ParamSpec("P")
R = TypeVar("R")

# Bound once, so that a program which replaces `filter_jit` cannot make a step call itself.
_filter_jit: Any = eqx.filter_jit
_OF_STEP = ("batch", "pad")
_ARGUMENTS_DONATED = 64
"""How many of the arguments that `*args` takes are donated at most."""
_BY_POSITION = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)


class FilterStep(ModuleStepBase, Generic[P, R]):
    """A function under `stepcache.equinox.step`: called like the function."""

    __wrapped__: Callable[P, R]
    _made_by = "stepcache.equinox.step"
    _callable: tuple | None = None  # The program's argument for `__wrapped__`, if there is one.

    def __init__(self, fun: Callable[P, R], donate: str, options: dict[str, Any]):
        of_equinox = {name: value for name, value in options.items() if name not in _OF_STEP}
        self._filter_jit = functools.partial(_filter_jit, donate=donate, **of_equinox)
        functools.update_wrapper(self, fun, updated=())
        _ = self._by_equinox  # Judges the options, and raises as it does.
        self._options = {"donate": donate, **options}
        self._signature = inspect.signature(fun)
        self._over = over_trees(fun, self._signature)
        options = {**options, **_donated(donate, self._over)}
        self._step = step_over_arrays(self._over, **options)
        self._partition, self._ignores_donation = Partitioned(), donate.startswith("all")
        self._id = os.urandom(16)  # Where equinox ends the stack that it shows of an error.

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> R:
        if jaxcompat.is_tracing():
            return self._run_by_equinox(args, kwargs)
        try:
            given, named = self._arguments(args, kwargs)
        except (TypeError, ValueError):  # It says what is wrong, such as a static value of no hash.
            return self._run_by_equinox(args, kwargs)
        __equinox_jit_id__ = self._id  # noqa: F841  (equinox looks for it in the frames of a trace)
        try:
            with self._suppressed():
                outcome = self._step(*given, **named)
                if outcome.about:  # It calls back: as in `filter_jit`, an error is this call's.
                    jax.block_until_ready(outcome)
        except (jax.errors.JaxRuntimeError, ValueError) as error:
            if "_EquinoxRuntimeError: " not in str(error):
                raise
            raise eqx.EquinoxRuntimeError(_message(str(error), self._id)) from None
        return built(outcome.outputs)

    def _suppressed(self) -> contextlib.AbstractContextManager:
        """Suppresses what `filter_jit` does: logs of errors that are raised, warnings of donation.

        No logs where no program of the step calls back, because this takes some microseconds.
        """
        logs = self._over.has_called_back is not False
        warnings = self._ignores_donation
        return _suppressed(logs, warnings) if logs or warnings else contextlib.nullcontext()

    def _run_by_equinox(self, args: tuple, kwargs: dict[str, Any]) -> Any:
        with in_mesh_of(current_scope()):
            return self._by_equinox(*args, **kwargs)

    @functools.cached_property
    def _by_equinox(self) -> Any:
        return self._filter_jit(self.__wrapped__)

    def _arguments(
        self, args: tuple, kwargs: dict[str, Any], is_array: Callable[[Any], bool] = eqx.is_array
    ) -> tuple[tuple, dict[str, Any]]:
        """The arguments of the step over arrays."""
        if kwargs:
            bound = self._signature.bind(*args, **kwargs)
            args, kwargs = bound.args, bound.kwargs
        if self._callable is None:
            taken = [self.__wrapped__] if self._over.takes_callable else []
            self._callable = tuple(map(self._partition, taken))
        args = (*self._callable, *(self._partition(each, is_array) for each in args))
        return args, {name: self._partition(each, is_array) for name, each in kwargs.items()}

    def _shown(self, args: tuple, kwargs: dict[str, Any]) -> tuple[tuple, dict[str, Any]]:
        return self._arguments(args, kwargs, is_array_or_shape)

    def __get__(self, instance: Any, owner: type | None = None) -> Any:
        return self if instance is None else eqx.Partial(self, instance)

    def __reduce__(self):
        return reduced(self, _make, self.__wrapped__, self._options)

    def lower(self, *args: P.args, **kwargs: P.kwargs) -> Any:
        """Traces and lowers the function for these arguments, as `filter_jit` does."""
        with in_mesh_of(current_scope()):
            return self._by_equinox.lower(*args, **kwargs)

    def clear_cache(self) -> None:
        """Drops the step's programs and traces; the next call builds anew."""
        self._step.clear_cache()


_OF_CALLABLE = ("__wrapped__", "_callable", "_by_equinox")


class _OverCallable(FilterStep[P, R]):
    """A step over a callable that has arrays in it: as that, a tree of these."""

    def _flattened(self) -> tuple[tuple[tuple[Any, Any]], Any]:
        shared = {name: value for name, value in vars(self).items() if name not in _OF_CALLABLE}
        children = ((jax.tree_util.GetAttrKey("__wrapped__"), self.__wrapped__),)
        return children, _Shared(shared)

    @classmethod
    def _unflattened(cls, shared: _Shared, children: Iterable[Any]) -> _OverCallable:
        made = cls.__new__(cls)
        (fun,) = children
        vars(made).update(shared.attributes, __wrapped__=fun)
        return made


class _Shared:
    """The attributes of a step without its callable, which all copies of it share."""

    def __init__(self, attributes: dict[str, Any]):
        self.attributes = attributes

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Shared) and self._parts() == other._parts()

    def __hash__(self) -> int:
        return hash(id(self.attributes["_over"]))

    def __repr__(self) -> str:
        return repr(self.attributes["_step"])

    def _parts(self) -> tuple:
        return id(self.attributes["_over"]), self.attributes["_options"]


jax.tree_util.register_pytree_with_keys(
    _OverCallable, _OverCallable._flattened, _OverCallable._unflattened
)


@contextlib.contextmanager
def _suppressed(logs: bool, warnings: bool) -> Iterator[None]:
    with Undoing() as undoing, undoing:
        if logs:
            _process_hooks.without_log(undoing, *LOG_OF_CALLBACKS)
        if warnings:
            undoing.hold(_process_hooks.without_warnings("Some donated buffers were not usable"))
        yield


def _make(fun: Callable, options: dict[str, Any]) -> FilterStep:
    return step(fun, **options)


def _donated(donate: str, over: OverTrees) -> dict[str, Any]:
    """The options of `jax.jit` for what `filter_jit` donates."""
    if donate == "none":
        return {}
    parameters = over.__signature__.parameters.values()
    kinds = [each.kind for each in parameters]
    count = sum(kind in _BY_POSITION for kind in kinds)
    if inspect.Parameter.VAR_POSITIONAL in kinds:
        count += _ARGUMENTS_DONATED
    # The callable is donated even so: it is not the first of what the user passes.
    kept = {int(over.takes_callable)} if donate.endswith("except-first") else set()
    return {
        "donate_argnums": tuple(number for number in range(count) if number not in kept),
        "donate_argnames": [
            each.name for each in parameters if each.kind is inspect.Parameter.KEYWORD_ONLY
        ],
    }


def _message(text: str, call_id: bytes) -> str:
    """What `filter_jit` says of an error of `eqx.error_if`: with the stack inside of the step."""
    message = text.partition("_EquinoxRuntimeError: ")[2].partition("\n\n\n---")[0]
    try:
        info: Any = _jit.last_error_info
        message, stack = info
        inner = itertools.takewhile(lambda each: each != call_id, stack)
        lines = reversed([each for each in inner if isinstance(each, str)])
        return _jit._on_error_msg.format(msg=message, stack="".join(lines))
    except (AttributeError, TypeError, ValueError):  # Equinox keeps them elsewhere.
        return message


@overload
def step(fun: Callable[P, R], /, **options: Any) -> FilterStep[P, R]: ...
@overload
def step(**options: Any) -> Callable[[Callable[P, R]], FilterStep[P, R]]: ...
def step(fun: Any = None, /, *, donate: str = "none", **options: Any) -> Any:
    """Compiles a function over equinox modules once for each signature, static values and mesh.

    A drop-in for `eqx.filter_jit`: `@step`, `@step(donate=...)` and `step(fun, ...)`. All arrays of
    JAX and numpy are traced, in the arguments, in modules and in the function itself; everything
    else is static.

        @seqx.step(donate="all-except-first")
        def make_step(batch, model, opt_state): ...

    The function is entered as often as under `filter_jit`: also steps that are made anew over equal
    callables share their programs, such as `step(model)` in each epoch. But `1`, `1.0` and `True`
    are three static values, and not one.

    Programs are cached and explained as those of `stepcache.step`. A miss names the attribute, such
    as `model.layers[3].weight`. A call waits for its results only if its program calls back into
    Python, as `eqx.error_if` does; then an error is raised as in `filter_jit`.

    Calls inside a transformation are passed to `filter_jit`.

    Args:
        fun: the function; omitted in `@step(...)`.
        donate: "all", "all-except-first", "warn", "warn-except-first" or "none". Arguments of
            `**kwargs`, and those of `*args` after the 64th, are not donated.
        **options: keywords of `filter_jit`, which are those of `jax.jit` except for static and
            donated arguments and shardings; `batch` and `pad`, as in `stepcache.step`.

    Returns:
        A `FilterStep`.

    Raises:
        ValueError: as `filter_jit` does.
    """
    if fun is None:
        return functools.partial(step, donate=donate, **options)
    has_arrays = any(map(eqx.is_array, jax.tree.leaves(fun)))
    return (_OverCallable if has_arrays else FilterStep)(fun, donate, options)
