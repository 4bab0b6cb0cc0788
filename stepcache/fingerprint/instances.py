"""What there is in an object, and whether Python shows all of it.

An object of a class written in C may hold what no attribute shows. Python's own can mostly be taken
apart as `pickle` would take them; any other is for the caller to refuse.
"""

from __future__ import annotations

import contextlib
import functools
import sys
import types
import typing
from collections import OrderedDict, defaultdict, deque
from typing import Any

from stepcache.fingerprint.held import is_immutable
from stepcache.fingerprint.provenance import PYTHON, USER, origin_of

SLOT_TYPES = (types.GetSetDescriptorType, types.MemberDescriptorType)
DESCRIPTORS = (
    *SLOT_TYPES,
    types.WrapperDescriptorType,
    types.MethodDescriptorType,
    types.ClassMethodDescriptorType,
)
_NATIVE_METHODS = frozenset(("nb_method", "nb_func", "cython_function_or_method"))
# Their content is looked at by itself.
CONTENT = (
    *(dict, list, tuple, set, frozenset, deque, int, float, str, bytes, complex, bytearray),
    *(property, staticmethod, classmethod),
)
_KNOWN = frozenset((*CONTENT, OrderedDict, defaultdict, functools.partial, types.SimpleNamespace))
_NOT_TAKEN_APART = frozenset(("itertools", "_io", "io", "weakref"))


def attributes_of(value: Any) -> dict[str, Any]:
    """The attributes kept in an instance itself, in slots and in its `__dict__`.

    Not the hash that a class of a package, such as flax's `FrozenDict`, keeps once it was asked
    for: that of a string is another in each process.
    """
    state: dict[str, Any] = {}
    for name, descriptor in _slot_descriptors(type(value)):
        with contextlib.suppress(AttributeError):  # It is empty.
            state[name] = descriptor.__get__(value, type(value))
    with contextlib.suppress(AttributeError):
        found = object.__getattribute__(value, "__dict__")
        if isinstance(found, dict):
            state.update(found)
    for name in state.keys() & _HASHES:
        if type(state[name]) in (int, types.NoneType) and has_hash_of_package(type(value)):
            del state[name]
    return state


_HASHES = frozenset("_hash _hashed _hash_value _cached_hash".split())


@functools.lru_cache(maxsize=4096)
def has_hash_of_package(cls: type) -> bool:
    owner = next(base for base in cls.__mro__ if "__hash__" in vars(base))
    return owner is not object and origin_of(owner) != USER


@functools.lru_cache(maxsize=4096)
def _slot_descriptors(cls: type) -> tuple[tuple[str, Any], ...]:
    return tuple(
        (name, descriptor)
        for base in cls.__mro__
        for name, descriptor in vars(base).copy().items()
        if isinstance(descriptor, types.MemberDescriptorType) and name in slots_of(base)
    )


def slots_of(cls: type) -> set[str]:
    """The names of a class's own slots, as its descriptors are called."""
    slots = vars(cls).get("__slots__", ())
    owner = cls.__name__.lstrip("_")
    return {
        f"_{owner}{slot}" if slot.startswith("__") and not slot.endswith("__") else slot
        for slot in ((slots,) if isinstance(slots, str) else slots)
    }


def native_base(cls: type) -> type:
    """The nearest base that is written in C: its instances hold what Python does not show."""
    return next((base for base in cls.__mro__ if _is_native(base)), object)


@functools.lru_cache(maxsize=4096)
def _is_native(cls: type) -> bool:
    if cls is object or cls is typing.Generic:  # Written in C since Python 3.12; it keeps nothing.
        return False
    if is_immutable(cls):
        return True
    slots = slots_of(cls)
    for name, value in vars(cls).copy().items():
        if isinstance(value, DESCRIPTORS):
            if value.__objclass__ is cls and name not in slots and not _is_pythons(name, value):
                return True
        elif (isinstance(value, types.BuiltinFunctionType) and value.__self__ is cls) or type(
            value
        ).__name__ in _NATIVE_METHODS:
            return True
    return False


def _is_pythons(name: str, descriptor: Any) -> bool:
    return name in ("__dict__", "__weakref__") and isinstance(
        descriptor, types.GetSetDescriptorType
    )


def is_shown(cls: type) -> bool:
    """Whether attributes and content are all there is to an instance."""
    base = native_base(cls)
    return base is object or base in _KNOWN


@functools.lru_cache(maxsize=4096)
def is_users(cls: type) -> bool:
    """Whether a class is the user's, and not one written in C by whomever."""
    return origin_of(cls) == USER and not (_is_native(cls) or issubclass(cls, type))


def taken_apart(value: Any) -> tuple[Any, ...] | None:
    """The parts of an object of Python's own library; None if they cannot be determined."""
    base = native_base(type(value))
    if origin_of(base) != PYTHON or base.__module__ in _NOT_TAKEN_APART:
        return None
    if any(
        origin_of(each) == USER and not vars(each).keys().isdisjoint(_PICKLING)
        for each in type(value).__mro__
    ):
        return None
    try:
        parts = value.__reduce_ex__(2)
    except Exception:
        return None
    if not isinstance(parts, tuple):
        return None
    return (*parts[:3], *(list(each) for each in parts[3:5] if each is not None))


_PICKLING = frozenset("__reduce__ __reduce_ex__ __getstate__ __getnewargs_ex__".split())


def found_by_name(value: Any) -> bool:
    """Whether a module has something under its own name, so that the name says it all."""
    found: Any = sys.modules.get(getattr(value, "__module__", None) or "")
    name = getattr(value, "__qualname__", None) or getattr(value, "__name__", None)
    if found is None or not isinstance(name, str):
        return False
    for part in name.split("."):
        found = getattr(found, part, None)
    return found is value or getattr(found, "__wrapped__", found) is value
