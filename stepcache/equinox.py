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

import functools
import inspect
from collections.abc import Callable, Iterable
from typing import Any, Generic, ParamSpec, TypeVar, overload

import equinox as eqx
import jax

from stepcache import _process_hooks, jaxcompat
from stepcache._changes import Undoing
from stepcache.calls.context import current_scope, in_mesh_of
from stepcache.events import Miss
from stepcache.modules.equinox_state import Builders, OverTrees, given_back, taken, with_stand_ins
from stepcache.modules.module_step import ModuleStepBase
from stepcache.step import Step, reduced
from stepcache.step import step as step_over_arrays

P = ParamSpec("P")
R = TypeVar("R")

# Bound once, so that a program which replaces `filter_jit` cannot make a step call itself.
_filter_jit: Any = eqx.filter_jit
_OF_STEP = ("batch", "pad")
_RAISING = frozenset(("pure_callback", "io_callback"))
_ARGUMENTS_DONATED = 64
"""How many of the arguments that `*args` takes are donated at most."""


class FilterStep(ModuleStepBase, Generic[P, R]):
    """A function under `stepcache.equinox.step`: called like the function."""

    __wrapped__: Callable[P, R]
    _made_by = "stepcache.equinox.step"
    _first: tuple | None = None  # What the function's own arrays are taken to; None until a call.

    def __init__(self, fun: Callable[P, R], donate: str, options: dict[str, Any]):
        of_equinox = {name: value for name, value in options.items() if name not in _OF_STEP}
        self._filter_jit = functools.partial(_filter_jit, donate=donate, **of_equinox)
        functools.update_wrapper(self, fun, updated=())
        _ = self._by_equinox  # Judges the options, and raises as it does.
        self._options = {"donate": donate, **options}
        self._signature = signature = inspect.signature(fun)
        inner, call = fun, None
        if has_arrays := isinstance(self, _OverArrays):
            inner, call = _without_arrays(fun), _call
            this = inspect.Parameter("self", inspect.Parameter.POSITIONAL_ONLY)
            signature = signature.replace(parameters=[this, *signature.parameters.values()])
        self._is_quiet, self._donates = donate.startswith("all"), donate != "none"
        options = {**options, **_donated(donate, self._signature, int(has_arrays))}
        self._step = step_over_arrays(OverTrees(inner, signature, call), **options)
        self._build, self._seen = Builders(), _Seen()

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> R:
        if (self._seen.may_raise and self._donates) or jaxcompat.is_tracing():
            return self._run_by_equinox(args, kwargs)
        try:
            given, named = self._taken(args, kwargs)
        except TypeError:  # It says what is wrong, such as a static value without a hash.
            return self._run_by_equinox(args, kwargs)
        try:
            if self._seen.checked is not None and not self._seen.may_raise:
                outputs = self._outputs(given, named)
            else:
                with Undoing() as undoing, undoing:
                    _process_hooks.without_log(undoing, *jaxcompat.LOG_OF_CALLBACKS)
                    outputs = self._outputs(given, named)
        except (jax.errors.JaxRuntimeError, ValueError) as error:
            if "EquinoxRuntimeError" not in str(error):
                raise
            leaves = jax.tree.leaves((args, kwargs))
            if any(isinstance(x, jax.Array) and x.is_deleted() for x in leaves):
                raise eqx.EquinoxRuntimeError(_message(error)) from None
            # Called again, with the same arguments, equinox says where in the function that was.
            return self._run_by_equinox(args, kwargs)
        return given_back(outputs, self._build)

    def _run_by_equinox(self, args: tuple, kwargs: dict[str, Any]) -> Any:
        with in_mesh_of(current_scope()):
            return self._by_equinox(*args, **kwargs)

    @functools.cached_property
    def _by_equinox(self) -> Any:
        return self._filter_jit(self.__wrapped__)

    def _outputs(self, given: tuple, named: dict[str, Any]) -> Any:
        outputs, seen = self._run(given, named), self._seen
        if self._step.last_miss is not seen.checked and seen.new_trace_of(self._step):
            seen.may_raise |= _may_raise(self._step.trace(*given, **named).jaxpr)
        if seen.may_raise:
            jax.block_until_ready(outputs)
        return outputs

    def _run(self, given: tuple, named: dict[str, Any]) -> Any:
        if not self._is_quiet:
            return self._step(*given, **named).outputs
        with _process_hooks.without_warnings("Some donated buffers were not usable"):
            return self._step(*given, **named).outputs

    def _taken(self, args: tuple, kwargs: dict[str, Any]) -> tuple[tuple, dict[str, Any]]:
        if kwargs:
            bound = self._signature.bind(*args, **kwargs)
            args, kwargs = bound.args, bound.kwargs
        named = {name: taken(value) for name, value in kwargs.items()} if kwargs else kwargs
        if self._first is None:
            self._first = self._taken_function()
        return (*self._first, *map(taken, args)), named

    def _taken_function(self) -> tuple:
        return ()

    def __get__(self, instance: Any, owner: type | None = None) -> Any:
        return self if instance is None else eqx.Partial(self, instance)

    @property
    def _stepcache_parts(self) -> tuple[Any, dict[str, Any]]:
        """The function and the options: what another step that calls this one depends on."""
        return self.__wrapped__, self._options

    def __reduce__(self):
        return reduced(self, _make, self.__wrapped__, self._options)

    def lower(self, *args: P.args, **kwargs: P.kwargs) -> Any:
        """Traces and lowers the function for these arguments, as `filter_jit` does."""
        with in_mesh_of(current_scope()):
            return self._by_equinox.lower(*args, **kwargs)

    def clear_cache(self) -> None:
        """Drops the step's programs and traces; the next call builds anew."""
        self._step.clear_cache()
        self._build.clear()

    def _shown(self, args: tuple, kwargs: dict[str, Any]) -> tuple[tuple, dict[str, Any]]:
        return with_stand_ins(self._taken, args, kwargs)


class _Seen:
    """What has been seen of a step's programs: by all copies that tree operations make of it."""

    def __init__(self) -> None:
        self.checked: Miss | None = None  # Of the latest program that was looked at.
        self.may_raise, self._traces = False, 0  # The first: whether one calls back into Python.

    def new_trace_of(self, step: Step) -> bool:
        """Whether the latest program was traced: what was stored never calls back into Python."""
        before, self._traces = self._traces, step.stats().traces
        self.checked = step.last_miss
        return self._traces > before


_OF_ARRAYS = ("__wrapped__", "_first", "_by_equinox")


class _OverArrays(FilterStep[P, R]):
    """A step over a callable that has arrays in it: as that, a tree of these."""

    def _taken_function(self) -> tuple:
        return (taken(self.__wrapped__),)

    def _flattened(self) -> tuple[tuple[tuple[Any, Any]], Any]:
        shared = {name: value for name, value in vars(self).items() if name not in _OF_ARRAYS}
        children = ((jax.tree_util.GetAttrKey("__wrapped__"), self.__wrapped__),)
        return children, _Shared(shared)

    @classmethod
    def _unflattened(cls, shared: _Shared, children: Iterable[Any]) -> _OverArrays:
        made = cls.__new__(cls)
        (fun,) = children
        vars(made).update(shared.attributes, __wrapped__=fun)
        return made


class _Shared:
    """The attributes of a step without its arrays, which all copies of it share."""

    def __init__(self, attributes: dict[str, Any]):
        self.attributes = attributes

    @property
    def _stepcache_parts(self) -> tuple[Any, dict[str, Any]]:
        return self.attributes["_step"], self.attributes["_options"]

    def __eq__(self, other: object) -> bool:
        is_one = isinstance(other, _Shared)
        return is_one and self.attributes["_step"] is other.attributes["_step"]

    def __repr__(self) -> str:
        return repr(self.attributes["_step"])

    def __hash__(self) -> int:
        return id(self.attributes["_step"])


jax.tree_util.register_pytree_with_keys(
    _OverArrays, _OverArrays._flattened, _OverArrays._unflattened
)


def _make(fun: Callable, options: dict[str, Any]) -> FilterStep:
    return step(fun, **options)


def _call(fun: Callable, /, *args: Any, **kwargs: Any) -> Any:
    return fun(*args, **kwargs)


def _without_arrays(fun: Any) -> Any:
    """The function in a callable that has arrays in it: a bound method, a module, a partial."""
    if isinstance(fun, eqx.Partial | functools.partial):
        return _without_arrays(fun.func) if _has_arrays(fun.func) else fun.func
    inner = getattr(fun, "__func__", None)
    return inner if inner is not None else type(fun).__call__


def _has_arrays(tree: Any) -> bool:
    return any(map(eqx.is_array, jax.tree.leaves(tree)))


def _donated(donate: str, signature: inspect.Signature, offset: int) -> dict[str, Any]:
    """The options of `jax.jit` for what `filter_jit` donates; arguments begin at `offset`."""
    if donate == "none":
        return {}
    kinds = [each.kind for each in signature.parameters.values()]
    count = sum(kind in _BY_POSITION for kind in kinds)
    if inspect.Parameter.VAR_POSITIONAL in kinds:
        count += _ARGUMENTS_DONATED
    start = offset + 1 if donate.endswith("except-first") else offset
    return {
        "donate_argnums": (*range(offset), *range(start, offset + count)),
        "donate_argnames": [
            name
            for name, each in signature.parameters.items()
            if each.kind is inspect.Parameter.KEYWORD_ONLY
        ],
    }


def _message(error: Exception) -> str:
    """What the user said in `eqx.error_if`."""
    text = str(error)
    return text.partition("EquinoxRuntimeError: ")[2].partition("\n---")[0].strip() or text


_BY_POSITION = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)


def _may_raise(jaxpr: Any) -> bool:
    """Whether a program calls back into Python, as that of `eqx.error_if` does."""
    for equation in getattr(jaxpr, "jaxpr", jaxpr).eqns:
        if equation.primitive.name in _RAISING:
            return True
        inner = jax.tree.leaves(
            list(equation.params.values()), is_leaf=lambda x: hasattr(x, "eqns")
        )
        if any(_may_raise(each) for each in inner if hasattr(each, "eqns")):
            return True
    return False


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

    Programs are cached and explained as those of `stepcache.step`. A second start of a script
    traces nothing, if the modules that are returned have the structure of arguments. A miss names
    the attribute, such as `model.layers[3].weight`. Unlike with `filter_jit`, a call does not wait
    for its results.

    These are passed to `filter_jit`: calls inside a transformation, and calls of donating steps
    that call back into Python, as `eqx.error_if` does, because `filter_jit` can say where in the
    function an error came from.

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
    return (_OverArrays if _has_arrays(fun) else FilterStep)(fun, donate, options)
