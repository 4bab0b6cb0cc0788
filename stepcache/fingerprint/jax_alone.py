"""Whether JAX's code alone runs when a primitive is bound, or a function such as `jnp.add` called.

`sys.setprofile`, which recordings use on Python 3.11, nearly doubles the time of a trace, and most
of a long trace is spent below `Primitive.bind` and `ufunc.__call__`. No code of the user's runs
there if the primitive, its rules, the active traces and all that they are given are JAX's: a
recording may then pause.
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
from stepcache.fingerprint.lowering_rules import code_of_rule
from stepcache.fingerprint.provenance import PYTHON, origin_of_file, package_of

_PACKAGES = frozenset(
    "jax jaxlib numpy scipy ml_dtypes opt_einsum flatbuffers nanobind stepcache".split()
)
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


_thread = _Thread()
_seen: Counter[tuple[Any, type]] = Counter()


def watch_binds() -> None:
    """Has the recording that this thread has just begun pause where JAX's code alone runs."""
    _thread.__init__()
    for each in _replaced:
        each.start()


def stop_watching() -> None:
    """Ends what `watch_binds` began."""
    for each in _replaced:
        each.stop()


def runs_jax_alone(primitive: Any, arguments: tuple, parameters: dict[str, Any]) -> bool:
    """Whether to bind a primitive now runs no code but JAX's, all of which has been seen before.

    So for a call of a `jax.numpy.ufunc`. Where that binds primitives, each is asked about again.
    """
    _thread.binds += 1
    if _thread.binds < _BINDS_BEFORE_PAUSES:
        return False
    is_of_jax = _thread.primitives.get(primitive)
    if is_of_jax is None:
        is_of_jax = _thread.primitives[primitive] = _is_of_jax(primitive)
    if not (
        is_of_jax
        and all(map(_holds_numbers, map(type, arguments)))
        and all(map(_holds_no_function, parameters.values()))
    ):
        return False
    traces = jaxcompat.active_traces()
    if not all(map(_is_defined_in_jax, map(type, traces))):
        return False
    key = primitive, type(traces[0])
    if _seen[key] < _WATCHED:
        _seen[key] += 1
        return False
    if _thread.jax_is_whole is None:
        _thread.jax_is_whole = jax_is_whole()
    return _thread.jax_is_whole


def _is_of_jax(primitive: Any) -> bool:
    """Whether a primitive and its rules are JAX's. Those of random keys call their generator's."""
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


# ---- what was put into JAX ----------------------------------------------------------------------


def jax_is_whole() -> bool:
    """Whether the modules of JAX and their classes hold the functions of known packages alone."""
    for name, module in list(sys.modules.items()):
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


_replaced = [jaxcompat.CallReplacement(*each, runs_jax_alone) for each in jaxcompat.WATCHED_CALLS]
