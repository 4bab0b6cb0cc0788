"""`step`: the decorator, and the `Step` that it makes."""

from __future__ import annotations

import dataclasses
import difflib
import functools
import inspect
import operator
import sys
import types
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Generic, ParamSpec, TypeVar, overload

import jax

from stepcache import jaxcompat
from stepcache.calls.context import Scope, current_scope
from stepcache.calls.pad import Pad, check_pads
from stepcache.calls.repeating import repeated
from stepcache.calls.step_spec import StepSpec
from stepcache.engine import Engine
from stepcache.errors import OptionError
from stepcache.events import Miss, StepStats
from stepcache.modules.library_names import tell_of

if TYPE_CHECKING:  # Imported by what few programs call.
    from stepcache.report.explanation import Explanation

P = ParamSpec("P")
R = TypeVar("R")

NOT_GIVEN: Any = object()
_ROLES = {"carry": "carried", "batch": "a batch"}
_OPTIONS = tuple(inspect.signature(jax.jit).parameters)[1:]


class Step(Generic[P, R]):
    """A function under `stepcache.step`: called like the function, compiled like `jax.jit`.

    Calls cost what calls of `jax.jit` cost: `__call__` is a slot, in which each step has JAX's own
    C++ dispatcher. Python finds it there without a frame of its own.

    What wraps a step (`jax.grad`, `functools.wraps`) copies its `__dict__`. So a step keeps its own
    attributes in slots, and in its `__dict__` what a function has too, and what the user sets.
    """

    __slots__ = tuple("__call__ __dict__ __weakref__ _engine _options _repeated _repeats".split())
    __wrapped__: Callable[P, R]

    if TYPE_CHECKING:

        def __call__(self, /, *args: P.args, **kwargs: P.kwargs) -> R: ...

    def __init__(self, engine: Engine, options: dict[str, Any]):
        self._engine, self._options = engine, options
        self.__call__ = engine.padder or engine.dispatcher.call
        self._repeated: dict[int, Step] = {}
        self._repeats: tuple[Step, int] | None = None  # Which other one it repeats, how often.
        self.__name__ = self.__qualname__ = engine.spec.name
        functools.update_wrapper(self, engine.spec.fun)
        jaxcompat.unhide_methods(self)
        engine.serve_by = weakref.WeakMethod(self._serve_by)

    def _serve_by(self, call: Callable[P, R]) -> None:
        """Has calls served by something else than the dispatcher, at the same speed."""
        if self._engine.padder is not None:
            self._engine.padder.call = call
        else:
            self.__call__ = call

    def __get__(self, instance: Any, owner: type | None = None) -> Any:
        return self if instance is None else types.MethodType(self, instance)

    def __reduce__(self):
        if self._repeats is not None:
            return reduced(self, Step.repeat, *self._repeats)
        engine = self._engine
        return reduced(self, make_step, engine.spec.fun, self._options, engine.scope)

    @property
    def __signature__(self) -> inspect.Signature:
        return inspect.signature(self._engine.spec.fun)

    def __repr__(self) -> str:
        return f"<stepcache.step of {self._engine.spec.name}>"

    def trace(self, /, *args: P.args, **kwargs: P.kwargs) -> jax.stages.Traced:
        """Traces the function for these arguments, placed as a call would place them."""
        return self._engine.trace(*self._padded(args, kwargs))

    def lower(self, /, *args: P.args, **kwargs: P.kwargs) -> jax.stages.Lowered:
        """Traces and lowers the function for these arguments."""
        return self.trace(*args, **kwargs).lower()

    def eval_shape(self, /, *args: P.args, **kwargs: P.kwargs) -> Any:
        """The shapes and dtypes of the outputs, as `jax.ShapeDtypeStruct`.

        Carried `Variables` are returned as their tree.
        """
        return (self._engine.padder or self._engine).eval_shape(args, kwargs)

    def clear_cache(self) -> None:
        """Drops the step's programs and traces; the next call builds anew."""
        self._engine.clear()

    def _cache_size(self) -> int:
        return self._engine.dispatcher.size()

    def _clear_cache(self) -> None:
        self._engine.dispatcher.clear()

    def warm(self, /, *args: Any, **kwargs: Any) -> None:
        """Builds or loads the program for these arguments, if it is not in memory; runs nothing.

        Does nothing for a call that goes to `jax.jit`, as with mutable references.

        Args:
            *args: as in a call; arrays may be `jax.ShapeDtypeStruct`.
            **kwargs: as in a call.

        Raises:
            PlacementError: the session cannot place an argument as asked.
        """
        self._engine.warm(*self._padded(args, kwargs))

    def explain(self, /, *args: Any, **kwargs: Any) -> Explanation:
        """Says whether a call would hit and why, and where each argument would go. Runs nothing.

        Args:
            *args: as in a call; arrays may be `jax.ShapeDtypeStruct`.
            **kwargs: as in a call.

        Returns:
            An `Explanation`; print it.
        """
        from stepcache.report.explanation import explain

        return explain(self._engine, *self._padded(args, kwargs))

    def _padded(self, args: tuple, kwargs: dict) -> tuple[tuple, dict]:
        padder = self._engine.padder
        return padder.padded(args, kwargs) if padder else (args, kwargs)

    def repeat(self, count: int) -> Step[..., Any]:
        """Makes a step that runs this one `count` times in one call, by `lax.scan`.

            hundred = train_step.repeat(100)
            state, metrics = hundred(state, batches)  # metrics["loss"] has shape [100]

        Each run gets the carry of the run before. A batch (`step(batch=...)`) has the batches of
        all runs, along a new first dimension of size `count`. Other arguments are the same in all
        runs. Outputs other than the carry are stacked along a new first dimension.

        The overhead of a call is paid once for all runs; in a session with a target, they take one
        message. The function is traced and compiled once, whatever the `count`.

        Args:
            count: number of runs.

        Returns:
            The step; for the same `count`, the same one.

        Raises:
            OptionError: the step carries nothing, pads, or has `in_shardings` or `out_shardings`.
                In a call: the first dimension of a batch is not `count`.
        """
        if count not in self._repeated:
            spec = repeated(self._engine.spec, count)
            made = Step(Engine(spec, self._engine.scope), self._options)
            made._repeats = (self, count)
            self._repeated.setdefault(count, made)  # Another thread may have come first.
        return self._repeated[count]

    def stats(self) -> StepStats:
        """Counts and durations so far. `StepStats.hits` says which hits are counted."""
        stats, padder = self._engine.miss_log.stats(self._engine.programs()), self._engine.padder
        if padder is None:
            return stats
        return dataclasses.replace(stats, padding=padder.padding)

    @property
    def last_miss(self) -> Miss | None:
        """The latest `Miss`: why a call found no program in memory. None before the first."""
        return self._engine.miss_log.last_miss


@overload
def step(fun: Callable[P, R], /, **options: Any) -> Step[P, R]: ...
@overload
def step(
    *,
    carry: str | Sequence[str] = (),
    batch: str | Sequence[str] = (),
    pad: Pad | Sequence[Pad] = (),
    **options: Any,
) -> Callable[[Callable[P, R]], Step[P, R]]: ...
def step(fun: Any = NOT_GIVEN, /, **options: Any) -> Any:
    """Compiles a function once for each signature and mesh, and says why it compiled.

    A drop-in for `jax.jit`: `@sc.step`, `@sc.step(...)` and `sc.step(fun, ...)` take every keyword
    of `jax.jit`, with the same meaning. Without a session's mesh, arrays are where `jax.jit` would
    have them.

    Args:
        fun: the function; omitted in `@sc.step(...)`.
        carry: name, or names, of arguments that the step returns first, updated, as `lax.scan`
            returns its carry: alone, or as the first outputs of a tuple. They are donated. In a
            session with a mesh, they are returned with the sharding that they were passed with.
        batch: name, or names, of arguments whose leaves a session with a mesh splits along its
            `data_axis`, on dimension 0. Other arguments are replicated, unless a rule places them.
        pad: `Pad`, or several: pads arguments to one of a few sizes before a call, so that ragged
            batches share programs.
        **options: keywords of `jax.jit`.

    Returns:
        A `Step`.

    Raises:
        OptionError: an unknown keyword; a carry or batch that is not a parameter of `fun`, or is
            static; an argument that is both; a `Pad` of an argument that cannot be padded.

    Errors of `jax.jit` are raised unchanged. The idea of a client that caches the compiled parts of
    each step is TensorFlow's (OSDI'16, §3.3).
    """
    return make_step(fun, options)


def make_step(fun: Any, options: dict[str, Any], scope: Callable[[], Scope] = current_scope) -> Any:
    """What `step` does, for calls in the scope that `scope` gives."""
    for name in options:
        if name not in (*_ROLES, "pad", *_OPTIONS):
            near = difflib.get_close_matches(name, (*_ROLES, "pad", *_OPTIONS), n=1)
            expected = f"carry, batch, pad, or a keyword of jax.jit: {', '.join(_OPTIONS)}"
            hint = f"did you mean {near[0]!r}?" if near else None
            raise OptionError(f"step has no keyword {name!r}", expected=expected, hint=hint)
    options = {name: _plain(name, value) for name, value in options.items()}
    if fun is NOT_GIVEN:
        return lambda fun: make_step(fun, options, scope)
    return Step(Engine(spec_of(fun, options), scope), options)


def spec_of(fun: Any, options: dict[str, Any]) -> StepSpec:
    """The spec of a step with these options of `step`. Raises what `step` raises."""
    jit_options = dict(options)
    named = {role: _names(role, jit_options.pop(role, ())) for role in _ROLES}
    pads = jit_options.pop("pad", ())
    pads = (pads,) if isinstance(pads, Pad) or not isinstance(pads, Iterable) else tuple(pads)
    if pads:
        check_pads(fun, pads, named)
    if any(named.values()):
        _check_roles(fun, named, jit_options)
    if named["carry"]:
        _donate(fun, named["carry"], jit_options)
    spec = StepSpec.of(fun, jit_options, **named, pads=pads)
    return spec._replace(parameters=spec.parameters._replace(tell=tell_of(fun)))


def reduced(step: Any, make: Callable, *args: Any) -> Any:
    """What the `__reduce__` of a step returns: its name, or else what makes an equal one."""
    path, module = getattr(step, "__qualname__", ""), getattr(step, "__module__", "")
    found = sys.modules.get(module)
    for name in path.split("."):
        found = getattr(found, name, None)
    # Those of `__main__` cloudpickle sends to processes that have another one.
    caller = sys._getframe(2).f_globals.get("__name__", "")
    if found is step and not (module == "__main__" and "cloudpickle" in caller):
        return path  # Pickled by name, as functions are.
    return make, args


def _plain(name: str, value: Any) -> Any:
    """An option as one number or name, or a tuple of them, where JAX takes other forms of these."""
    if not name.endswith(("_argnums", "_argnames")) or isinstance(value, int | str | tuple | list):
        return value
    if isinstance(value, Iterable):
        return tuple(sorted(value, key=str))  # A set has another order in another process.
    return operator.index(value) if hasattr(value, "__index__") else value


def _names(role: str, given: Any) -> tuple[str, ...]:
    names = (given,) if isinstance(given, str) or not isinstance(given, Iterable) else tuple(given)
    if not all(isinstance(name, str) for name in names):
        what = f"{role} takes the name of an argument, or several"
        raise OptionError(what, where="step", got=repr(given))
    return names


def _check_roles(
    fun: Callable, named: Mapping[str, tuple[str, ...]], options: dict[str, Any]
) -> None:
    """Raises `OptionError` for a role of what is no such parameter, is static, or has two roles."""
    parameters = list(inspect.signature(fun).parameters.values())
    by_position = [p.name for p in parameters if p.kind is not p.KEYWORD_ONLY]
    roles = jaxcompat.argument_roles(jaxcompat.jit(fun, **options), fun, options)
    static = {*roles.static_argnames, *_at(roles.static_argnums, by_position)}
    single = [p.name for p in parameters if p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)]
    # What is carried comes back as one output; a batch may be `*args` or `**kwargs`.
    possible = {"carry": single, "batch": [p.name for p in parameters]}
    for role, name in ((role, name) for role, names in named.items() for name in names):
        if name not in possible[role]:
            among = ", ".join(possible[role])
            what = f"{role}={name!r} is not a parameter of {getattr(fun, '__name__', fun)}"
            expected = f"one of {among}" if among else "one that takes one argument"
            raise OptionError(what, expected=expected)
        if name in static:
            raise OptionError(f"{name!r} cannot be both {_ROLES[role]} and static", where="step")
    for name in set(named["carry"]).intersection(named["batch"]):
        what = f"{name!r} cannot be both carried and a batch"
        hint = "a rule of the session can split leaves of a carry"
        raise OptionError(what, where="step", hint=hint)


def _donate(fun: Callable, carry: tuple[str, ...], options: dict[str, Any]) -> None:
    """Adds the carry to the donated arguments, by number and by name."""
    parameters = list(inspect.signature(fun).parameters.values())
    by_position = [p.name for p in parameters if p.kind is not p.KEYWORD_ONLY]
    nameless = {p.name for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.VAR_POSITIONAL)}
    given = (options.get(each) for each in ("donate_argnums", "donate_argnames"))
    numbers, names = map(as_tuple, given)
    added = {*carry, *_at(numbers, by_position)}
    beyond = {i for i in numbers if not -len(by_position) <= i < len(by_position)}
    donated = {i for i, name in enumerate(by_position) if name in added or name in names}
    options["donate_argnums"] = tuple(sorted(beyond | donated))
    # JAX takes no names of what goes by position alone; of others' names it is the judge.
    options["donate_argnames"] = tuple(sorted((added - nameless).union(names)))


def _at(numbers: Iterable[int], names: Sequence[str]) -> list[str]:
    return [names[i] for i in numbers if -len(names) <= i < len(names)]


def as_tuple(value: Any) -> tuple:
    """Numbers or names as `jax.jit` takes them: none, one or several."""
    if value is None:
        return ()
    return (value,) if isinstance(value, int | str) else tuple(value)
