"""Whether `functools.lru_cache` holds what its function computes.

A trace that finds a result in the cache does not enter the function, so what that read when it was
called is not recorded. Of a function that does no more than to compute with numbers, texts and
NumPy's arrays, one can see whether it matters: called once more, it gives what the cache holds, or
an object that it reads, or the result, was changed since.
"""

from __future__ import annotations

import functools
import gc
import itertools
import math
import operator
import threading
import types
import weakref
from typing import Any

import jax.numpy as jnp
import numpy as np

from stepcache.fingerprint.bytecode import Read, names_of
from stepcache.fingerprint.instructions import instructions_of
from stepcache.fingerprint.provenance import USER, origin_of
from stepcache.fingerprint.tokens import ATOMS, atom
from stepcache.jaxcompat.inspection import content_digest

REMEMBERING = type(functools.lru_cache(lambda: 0))
"""The class of functions that remember."""

_BUILTINS = frozenset(
    "abs all any bool complex dict divmod enumerate filter float int isinstance len list map max "
    "min pow range reversed round slice sorted str sum tuple zip AssertionError IndexError "
    "KeyError NotImplementedError RuntimeError TypeError ValueError".split()
)
_MODULES = (np, np.fft, np.linalg, math, itertools, operator)
# NumPy's functions that read or write files, print, change what the process has, or read memory
# that nobody has written to.
_NOT_ONLY_COMPUTING = frozenset(
    "DataSource empty empty_like errstate fromfile fromregex genfromtxt info load loadtxt memmap "
    "ndarray printoptions save savetxt savez savez_compressed set_printoptions setbufsize seterr "
    "seterrcall show_config show_runtime".split()
)
_OTHER_EFFECTS = frozenset(
    "STORE_GLOBAL DELETE_GLOBAL STORE_ATTR DELETE_ATTR IMPORT_NAME LOAD_BUILD_CLASS BUILD_SET "
    "SET_ADD".split()
)
_Call = tuple[tuple[Any, ...], tuple[tuple[str, Any], ...]]

_lock = threading.Lock()
# By function that remembers: what its function gave when it was called once more.
_computed: weakref.WeakKeyDictionary[Any, dict[_Call, str]] = weakref.WeakKeyDictionary()


def holds_what_it_computes(remembering: Any) -> bool:
    """Whether the results in the cache are what the function gives now.

    It is called for that, once for each of the arguments.
    """
    function = remembering.__wrapped__
    if remembering.cache_parameters()["typed"] or not _only_computes(function, set()):
        return False
    results = _results(remembering)
    if results is None:
        return False
    with _lock:
        known = _computed.setdefault(remembering, {})
    for (given, named), result in results:
        if (given, named) not in known:
            known[given, named] = _content(function(*given, **dict(named))) or "another object"
        if _content(result) != known[given, named]:
            return False
    return True


def _results(remembering: Any) -> list[tuple[_Call, Any]] | None:
    """The calls and results in a cache; None if an argument is an object."""
    referents = gc.get_referents(remembering)
    size = remembering.cache_info().currsize
    kept = [each for each in referents if type(each) is dict and each is not vars(remembering)]
    if len(kept) != 1 or len(kept[0]) != size:
        return None
    pairs = list(kept[0].copy().items())
    link = type(pairs[0][1]) if pairs else object
    if link.__name__ == "_lru_list_elem":  # Of a bounded cache: key, result and this, in turn.
        ends = [number for number, each in enumerate(referents) if each is link][:size]
        pairs = [(referents[end - 2], referents[end - 1]) for end in ends]
    found = []
    for key, result in pairs:
        call = _call_of(key)
        if call is None:
            return None
        found.append((call, result))
    return found


def _call_of(key: Any) -> _Call | None:
    """The arguments that a key of a cache stands for; None if one is an object."""
    parts = key if type(key) is tuple else (key,)
    marks = [number for number, part in enumerate(parts) if type(part) is object]
    given, named = (parts[: marks[0]], parts[marks[0] + 1 :]) if marks else (parts, ())
    if not _is_constant((*given, *named)):
        return None
    return given, tuple(zip(named[::2], named[1::2], strict=True))


def _content(value: Any) -> str | None:
    """All of a number, a text, an array, a type of numbers, a tuple or list of such; else None."""
    if type(value) in ATOMS:
        return atom(value)
    if type(value) in (tuple, list):
        parts = [_content(each) for each in value]
        return None if None in parts else f"{type(value).__name__}{parts}"
    if type(value) is np.ndarray and not value.dtype.hasobject:
        layout = f"{value.dtype.str} {value.shape} {value.strides} {value.flags.writeable}"
        return f"array {layout} {content_digest(value)}"
    if issubclass(type(value), np.generic) and not value.dtype.hasobject:
        return f"{value.dtype.str} {value.tobytes()!r}"
    if issubclass(type(value), np.dtype) or _is_number_type(value):
        return f"type {value}"
    return None


def _is_number_type(value: Any) -> bool:
    is_jaxs = type(value) is type(jnp.float32)
    return is_jaxs or (type(value) is type and issubclass(value, (np.generic, int, float, complex)))


def _is_constant(value: Any) -> bool:
    """Whether a value is one that code can read, and not change."""
    if type(value) is tuple:
        return all(map(_is_constant, value))
    return type(value) not in (list, np.ndarray) and _content(value) is not None


def _only_computes(function: Any, seen: set[int]) -> bool:
    """Whether nobody notices that a function is called, and it reads only what a walk sees."""
    if id(function) in seen:
        return True
    seen.add(id(function))
    if type(function) is not types.FunctionType or origin_of(function) != USER:
        return False
    names = names_of(function.__code__)
    given = (*(function.__defaults__ or ()), *(function.__kwdefaults__ or {}).values())
    does_more = names.is_dynamic or names.imports or "tofile" in names.loads
    if does_more or not all(map(_is_constant, given)):
        return False
    operations = {each.opname for code in names.codes for each in instructions_of(code)}
    return operations.isdisjoint(_OTHER_EFFECTS) and all(
        _is_number_or_computes(function, read, seen) for read in names.reads
    )


def _is_number_or_computes(reader: Any, read: Read, seen: set[int]) -> bool:
    """Whether what code reads is a constant, or a function that does no more than to compute."""
    space, name, chain = reader.__globals__, read.name, read.attributes
    if read.kind != "global" or name not in space:
        return read.kind == "global" and name in _BUILTINS
    value = space[name]
    while type(value) is types.ModuleType and chain:
        if value is not jnp and not any(value is each for each in _MODULES):
            return False
        space, (name, *chain) = vars(value), chain
        value = space.get(name)
    if _is_constant(value):
        return True
    if any(vars(each).get(name) is value for each in _MODULES):
        if name in _NOT_ONLY_COMPUTING:
            return False
        return type(value) is not types.ModuleType and origin_of(value) != USER
    function = getattr(value, "__wrapped__", None) if type(value) is REMEMBERING else value
    return not chain and _only_computes(function, seen)
