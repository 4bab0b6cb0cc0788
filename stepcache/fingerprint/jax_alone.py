"""Whether JAX's code alone runs when a primitive is bound, or a function such as `jnp.add` called.

`sys.setprofile`, which recordings use on Python 3.11, nearly doubles the time of a trace, and most
of a long trace is spent below `Primitive.bind`, `ufunc.__call__` and calls of functions under
`jax.jit`. No code of the user's runs there if the primitive, its rules, the active traces and all
that they are given are JAX's: a recording may then pause.
"""

from __future__ import annotations

import functools
import sys
import threading
import types
from collections import Counter
from itertools import chain
from typing import Any

import jax.numpy as jnp
import numpy as np

from stepcache import jaxcompat
from stepcache.fingerprint.held import function_in
from stepcache.fingerprint.known_packages import IN_EACH_TRACE
from stepcache.fingerprint.lowering_rules import code_of_rule
from stepcache.fingerprint.provenance import PYTHON, origin_of_file, package_of

_PACKAGES = IN_EACH_TRACE | {"scipy", "opt_einsum", "flatbuffers", "nanobind"}
# A short trace is not worth examining JAX for.
_BINDS_BEFORE_PAUSES = 300
# The first binds of each primitive are watched: which code of JAX's they enter counts, too.
_WATCHED = 3
_NUMBERS = frozenset((bool, int, float, complex, np.ndarray))
_LITERALS = frozenset("TypedInt TypedFloat TypedComplex TypedNdArray".split())
_PLAIN = frozenset((bool, int, float, complex, str, type(None)))
# Of a parameter that holds no function, by name.
_OF_JAX = frozenset(
    "Jaxpr ClosedJaxpr Mesh AbstractMesh NamedSharding SingleDeviceSharding GSPMDSharding "
    "PartitionSpec UnspecifiedValue AutoLayout Layout Format ShapedArray MemorySpace "
    "GatherDimensionNumbers GatherScatterMode ScatterDimensionNumbers ConvDimensionNumbers "
    "DotDimensionNumbers Precision DotAlgorithm DotAlgorithmPreset RoundingMethod AccuracyMode "
    "Tolerance FftType RandomAlgorithm ArrayCopySemantics".split()
)


class _Thread(threading.local):
    def __init__(self) -> None:
        self.binds = 0
        self.jax_is_whole: bool | None = None
        self.primitives: dict[Any, bool] = {}  # Which of them are JAX's.
        self.calls: Counter[Any] = Counter()  # Of functions under `jax.jit`.


_thread = _Thread()
_seen: Counter[tuple[Any, type]] = Counter()


def watch_binds(user: object) -> None:
    """Has a recording that this thread has just begun pause where JAX's code alone runs."""
    _thread.__init__()
    jaxcompat.pause_nothing()
    for each in _replaced:
        each.start(user)


def stop_watching(user: object) -> None:
    """Ends what `watch_binds` began."""
    _thread.calls.clear()
    for each in _replaced:
        each.stop(user)


def runs_jax_alone(primitive: Any, arguments: tuple, parameters: dict[str, Any]) -> bool:
    """Whether to bind a primitive now runs no code but JAX's, all of which has been seen before.

    So for a call of a `jax.numpy.ufunc`. Where that binds primitives, each is asked about again.
    """
    _thread.binds += 1
    return (
        _thread.binds >= _BINDS_BEFORE_PAUSES
        and _calls_nothing(primitive, parameters)
        and all(map(_holds_numbers, map(type, arguments)))
        and _traces_in_jax()
        and _was_watched(primitive)
        and _jax_is_whole()
    )


def stays_in_jax(primitive: Any, arguments: tuple, parameters: dict[str, Any]) -> bool:
    """As `runs_jax_alone`, where JAX's own code binds a primitive in a pause.

    What a function under `jax.jit` binds is asked about one by one.
    """
    given = parameters if getattr(primitive, "name", "") not in ("jit", "pjit") else {}
    return _calls_nothing(primitive, given) and _was_watched(primitive)


def _was_watched(primitive: Any) -> bool:
    """Whether enough binds of a primitive were watched; counts one more if not."""
    key = primitive, type(jaxcompat.active_traces()[0])
    if _seen[key] < _WATCHED:
        _seen[key] += 1
        return False
    return True


def jit_runs_jax_alone(first: Any, arguments: tuple, parameters: dict[str, Any]) -> bool:
    """Whether a call of a function under `jax.jit` runs no code but JAX's, and what it ran before.

    A function of JAX's is given that function and its arguments, among others.
    """
    if _thread.binds < _BINDS_BEFORE_PAUSES or not _traces_in_jax():
        return False
    function = first if callable(first) else arguments[1]
    if type(function) is not types.FunctionType or code_of_rule(function) is None:
        return False
    try:
        key = function, type(jaxcompat.active_traces()[0]), *map(_told, arguments[-2:])
        _thread.calls[key] += 1
    except (_Unknown, TypeError):  # Or an argument cannot be hashed.
        return False
    return _thread.calls[key] > _WATCHED and _jax_is_whole()


class _Unknown(Exception):
    """A function may be in an argument."""


def _told(value: Any) -> Any:
    """What of an argument may decide which code of JAX's runs."""
    kind = type(value)
    if kind is tuple or kind is list:
        return kind, *map(_told, value)
    if kind is dict:
        return *value, *map(_told, value.values())
    if issubclass(kind, jaxcompat.Tracer) and _is_defined_in_jax(kind):
        return value.aval
    is_function_of_jax = kind is types.FunctionType and code_of_rule(value) is not None
    if not is_function_of_jax and not _holds_no_function(value):
        raise _Unknown
    return kind, value


def ends_in_jax(frame: Any, arguments: tuple, parameters: dict[str, Any]) -> bool:
    """Whether to collect the equations of a trace runs no code but JAX's."""
    return _thread.binds >= _BINDS_BEFORE_PAUSES and _traces_in_jax() and _jax_is_whole()


def _stays(first: Any, arguments: tuple, parameters: dict[str, Any]) -> bool:
    """Whether a pause may go on below a function that itself calls nobody's code but JAX's.

    Functions of others would be in parameters of primitives, which are asked about one by one.
    """
    return True


def _calls_nothing(primitive: Any, parameters: dict[str, Any]) -> bool:
    """Whether a primitive and its rules are JAX's, and are given no function to call."""
    return _is_of_jax(primitive) and all(map(_holds_no_function, parameters.values()))


def _traces_in_jax() -> bool:
    """Whether the active traces are JAX's."""
    return all(map(_is_defined_in_jax, map(type, jaxcompat.active_traces())))


def _jax_is_whole() -> bool:
    if _thread.jax_is_whole is None:
        _thread.jax_is_whole = jax_is_whole()
    return _thread.jax_is_whole


def _is_of_jax(primitive: Any) -> bool:
    """Whether a primitive and its rules are JAX's."""
    known = _thread.primitives.get(primitive)
    if known is None:
        known = _thread.primitives[primitive] = _has_rules_of_jax(primitive)
    return known


def _has_rules_of_jax(primitive: Any) -> bool:
    """See `_is_of_jax`. The rules of random keys call their generator's."""
    if type(primitive) is jnp.ufunc:  # Users make some, too, by `jnp.frompyfunc`.
        held = (each.values() for each in vars(primitive).values() if type(each) is dict)
        return all(map(_is_known, chain.from_iterable(held)))
    if not _is_defined_in_jax(type(primitive)) or primitive.name.startswith("random_"):
        return False
    rules = [*jaxcompat.tracing_rules(primitive), *jaxcompat.lowering_rules(primitive)]
    return all(code_of_rule(rule) is not None for rule in rules)


@functools.lru_cache(maxsize=1024)
def _holds_numbers(kind: type) -> bool:
    """Whether values of a class are numbers, or arrays of numpy's, or tracers of JAX's."""
    if issubclass(kind, jaxcompat.Tracer) or kind.__name__ in _LITERALS:
        return _is_defined_in_jax(kind)
    return kind in _NUMBERS or (issubclass(kind, np.generic) and kind.__module__ == "numpy")


def _holds_no_function(value: Any) -> bool:
    """Whether a parameter of a primitive holds nothing that its rules could call."""
    kind = type(value)
    if kind is tuple or kind is frozenset:
        return all(map(_holds_no_function, value))
    return isinstance(value, type) or _is_plain(kind)


@functools.lru_cache(maxsize=1024)
def _is_plain(kind: type) -> bool:
    if issubclass(kind, np.dtype | np.generic):
        return str(kind.__module__).partition(".")[0] == "numpy"
    return kind in _PLAIN or (kind.__name__ in _OF_JAX and _is_defined_in_jax(kind))


@functools.lru_cache(maxsize=1024)
def _is_defined_in_jax(kind: type) -> bool:
    return str(kind.__module__).startswith(("jax.", "jaxlib."))


def jax_is_whole() -> bool:
    """Whether the modules of JAX and their classes hold the functions of known packages alone."""
    for name, module in sys.modules.copy().items():
        if name.partition(".")[0] != "jax" or not isinstance(module, types.ModuleType):
            continue
        for value in list(vars(module).values()):
            if isinstance(value, type):
                members = list(vars(value).values())
                if _is_defined_in_jax(value) and not all(map(_is_known, members)):
                    return False
            elif not _is_known(value):
                return False
    return True


def _is_known(value: Any) -> bool:
    """Whether a value is no function, or one of a known package."""
    while type(value) is functools.partial:
        value = value.func
    function = value if type(value) is types.FunctionType else function_in(value)
    if function is None:
        return not callable(value) or _is_of_known_package(type(value).__module__)
    filename = function.__code__.co_filename
    if filename.startswith("<"):  # As the methods of a dataclass.
        made_in = function.__globals__.get("__name__", "")
        return made_in.startswith("namedtuple_") or _is_of_known_package(made_in)
    return package_of(filename) in _PACKAGES or origin_of_file(filename) == PYTHON


def _is_of_known_package(module: str) -> bool:
    package = module.partition(".")[0]
    return package in _PACKAGES or package in sys.stdlib_module_names


_replaced = [
    jaxcompat.CallReplacement(holder, name, may_pause, may_stay)
    for places, may_pause, may_stay in (
        (jaxcompat.WATCHED_BINDS, runs_jax_alone, stays_in_jax),
        (jaxcompat.WATCHED_JITS, jit_runs_jax_alone, _stays),
        (jaxcompat.WATCHED_ENDS, ends_in_jax, _stays),
    )
    for holder, name in places
]
