"""How a walk looks at values: containers, arrays, and the objects of Python's own library.

Each function notes one kind of value under a path, and what it is made of under paths below that.
"""

from __future__ import annotations

import enum
import functools
import logging
import os
import re
import struct
import threading
import types
import weakref
from collections import Counter, OrderedDict, defaultdict, deque, namedtuple
from collections.abc import Callable, Iterable
from contextvars import ContextVar
from pathlib import PurePath
from typing import Any

import jax
import numpy as np

from stepcache.fingerprint import opened_files
from stepcache.fingerprint.bytecode import DYNAMIC_ACCESS
from stepcache.fingerprint.provenance import INSTALLED, USER, origin_of, origin_of_module
from stepcache.fingerprint.tokens import (
    ATOMS,
    atom,
    digest,
    key_text,
    qualified_name,
    short,
)
from stepcache.fingerprint.trail import Trail
from stepcache.jaxcompat import Tracer, inspection

_LISTED = 64
# Names the content of a container that has attributes too; its items are named as of any other.
CONTENT = " (content)"
_BY_REPR_MODULES = ("datetime", "decimal", "fractions", "uuid", "ipaddress", "zoneinfo", "typing")
# Compiled packages that are known to read nothing behind Python's back.
TRUSTED = frozenset("jax jaxlib numpy scipy ml_dtypes flax optax stepcache".split())


def note_items(walk: Trail, path: str, value: Iterable, kind: str) -> None:
    """Notes a sequence; a long one of plain values as a whole."""
    values = list(value)
    if len(values) > _LISTED and all(type(each) in ATOMS for each in values):
        walk.note(path, f"{kind} of {len(values)}, {digest(map(atom, values))}")
        return
    walk.note(path, f"{kind} of {len(values)}")
    owner = path.removesuffix(CONTENT)
    for index, each in enumerate(values):
        walk.value(f"{owner}[{index}]", each)


def note_sequence(walk: Trail, path: str, value: Any) -> None:
    """Notes a list, a tuple or the like, by what the base class gives."""
    base: Any = next(each for each in (list, tuple, deque, bytearray) if isinstance(value, each))
    note_items(walk, path, base.__iter__(value), type(value).__name__)


def note_mapping(walk: Trail, path: str, value: Any) -> None:
    """Notes a dictionary with its order."""
    items = list(dict.items(value) if isinstance(value, dict) else value.items())
    walk.note(path, f"{type(value).__name__} of {len(items)}")
    if isinstance(value, defaultdict):
        walk.value(f"{path}.default_factory", value.default_factory)
    if len(items) > 1:
        walk.note(f"{path} (order)", digest(key_text(key) for key, _ in items))
    owner = path.removesuffix(CONTENT)
    for number, (key, each) in enumerate(items):
        if type(key) in ATOMS:
            walk.value(f"{owner}[{key!r}]", each)
        else:
            walk.value(f"{owner} key {number}", key)
            walk.value(f"{owner}[key {number}]", each)


def note_set(walk: Trail, path: str, value: Any) -> None:
    """Notes a set, whose order is no matter."""
    plain, named = [], []
    for each in set.__iter__(value) if isinstance(value, set) else frozenset.__iter__(value):
        if type(each) in ATOMS:
            plain.append(atom(each))
        elif isinstance(each, type | types.FunctionType | enum.Enum):
            named.append(each)
        else:
            walk.blame(path, "a set has no order by which its objects can be compared")
            return
    texts = sorted(plain)
    for each in sorted(named, key=qualified_name):
        texts.append(qualified_name(each))
        walk.value(f"{path} member {qualified_name(each)}", each)
    walk.note(path, f"{type(value).__name__} of {len(texts)}: {short(', '.join(texts))}")


def note_array(walk: Trail, path: str, value: Any) -> None:
    """Notes an array by its content."""
    if isinstance(value, np.dtype):
        walk.note(path, f"dtype {value}")
    elif isinstance(value, Tracer):
        walk.blame(path, "it is a tracer of another transformation")
    elif isinstance(value, jax.Array):
        _note_jax_array(walk, path, value)
    elif value.dtype == object:
        note_items(walk, path, np.ravel(value).tolist(), f"array {value.shape} of objects")
    else:
        scalar = "scalar " if isinstance(value, np.generic) else ""
        text = f"content {inspection.content_digest(np.asarray(value))}"
        if value.ndim == 0 and value.dtype.kind in "biufc":
            text = repr(value.item())
        walk.note(path, f"{scalar}{value.dtype}{list(value.shape)} {text}")
    more = getattr(value, "__dict__", None) if isinstance(value, np.ndarray) else None
    if more:  # As the mask of a masked array.
        walk.value(f"{path} (attributes)", dict(more))


def _note_jax_array(walk: Trail, path: str, value: jax.Array) -> None:
    if value.is_deleted():
        walk.blame(path, "the array has been deleted or donated")
        return
    if not value.is_fully_addressable:
        walk.blame(path, "parts of the array are in other processes")
        return
    placed = inspection.sharding_text(value.sharding) if value.committed else "uncommitted"
    content = inspection.array_digest(value)
    weak = " weak" if value.aval.weak_type else ""
    walk.note(path, f"{value.dtype}{list(value.shape)}{weak} content {content}, {placed}")


def note_enum_member(walk: Trail, path: str, value: enum.Enum) -> None:
    """Notes a member of an enumeration with its value."""
    walk.note(path, f"{type(value).__name__}.{value.name}")
    walk.value(f"{path}.value", value.value)
    walk.follow_class(type(value))


def note_builtin(walk: Trail, path: str, value: Any) -> None:
    """Notes a function written in C by its name, with what it is bound to."""
    owner = getattr(value, "__self__", None)
    name = getattr(value, "__qualname__", value.__name__)
    if value.__name__ in DYNAMIC_ACCESS:
        walk.reads_any_attribute()
    if owner is None or isinstance(owner, types.ModuleType):
        opened_files.watch_before_call(value)
        module = getattr(value, "__module__", None) or "builtins"
        walk.check_pure(path, f"{module}.{name}")
        if value is globals and path != "globals":
            walk.blame(path, "it is globals() by another name")
        walk.note(path, f"builtin {module}.{name}")
        if origin_of_module(module) == INSTALLED and module.partition(".")[0] not in TRUSTED:
            walk.blame(path, f"{module} is compiled, and may read what cannot be seen")
        return
    walk.note(path, f"builtin method {name}")
    if isinstance(owner, type):
        walk.check_pure(path, f"{owner.__module__}.{name}")
    walk.value(f"{path}.__self__", owner)


def note_partial(walk: Trail, path: str, value: Any) -> None:
    """Notes a partial application."""
    walk.note(path, type(value).__name__)
    owner = path.removesuffix(CONTENT)
    for name in ("func", "args", "keywords"):
        walk.value(f"{owner}.{name}", getattr(value, name))
    if getattr(value, "__dict__", None) and type(value) is functools.partial:
        walk.value(f"{path}.__dict__", dict(value.__dict__))


def note_jitted(walk: Trail, path: str, parts: tuple[Any, dict[str, Any]]) -> None:
    """Notes a function under `jax.jit` with its options."""
    function, options = parts
    walk.note(path, "jitted function")
    walk.value(f"{path} (function)", function)
    for name, option in options.items():
        walk.value(f"{path} ({name})", option)


def _of_parts(*names: str) -> Callable[[Trail, str, Any], None]:
    """A handler for objects that some of their attributes say everything of."""

    def note(walk: Trail, path: str, value: Any) -> None:
        walk.note(path, type(value).__name__)
        for name in names:
            walk.value(f"{path}.{name}", getattr(value, name))

    return note


def _note_class_method(walk: Trail, path: str, value: classmethod) -> None:
    walk.note(path, "classmethod")
    walk.value(f"{path}.__func__", value.__func__)
    walk.read_attributes(("classmethod",))  # It may call the class that it is given.


def note_remembering(walk: Trail, path: str, value: Any) -> None:
    """A function that remembers its results, such as that of `functools.lru_cache`."""
    walk.note(path, f"{type(value).__name__}")
    function = getattr(value, "__wrapped__", None)
    if function is None:
        walk.blame(path, "it remembers results that cannot be looked at")
        return
    if value.cache_info().currsize and origin_of(function) == USER:
        why = "its cache holds results of earlier calls, and what those read is not known"
        walk.blame(path, why)
    walk.value(f"{path} (function)", function)


def _note_pattern(walk: Trail, path: str, value: re.Pattern) -> None:
    walk.note(path, f"Pattern {value.flags} {short(repr(value.pattern))}")


def _note_repr(walk: Trail, path: str, value: Any) -> None:
    walk.note(path, short(repr(value)))


def _note_field(walk: Trail, path: str, value: Any) -> None:
    """A field of a named tuple: its number."""
    walk.value(path, value.__reduce__()[1][0])


def _note_weak(walk: Trail, path: str, value: weakref.ref) -> None:
    walk.note(path, "weak reference")
    walk.value(f"{path}()", value())


def note_special(walk: Trail, path: str, value: Any) -> bool:
    """Notes a value of a kind that is known by its class or by its nature.

    Returns:
        Whether it is of such a kind.
    """
    kind = type(value)
    if not _may_be_special(kind):
        return False
    if isinstance(value, jax.Array | np.ndarray | np.generic | np.dtype):
        note_array(walk, path, value)
    elif isinstance(value, enum.Enum):
        note_enum_member(walk, path, value)
    elif isinstance(value, PurePath) and kind.__module__.partition(".")[0] == "pathlib":
        walk.note(path, f"{kind.__name__} {walk.place(os.fspath(value))}")
    elif kind.__module__ in _BY_REPR_MODULES or isinstance(value, jax.Device | jax.P):
        walk.note(path, f"{kind.__name__} {short(repr(value))}")
    elif isinstance(value, jax.sharding.Sharding | jax.sharding.Mesh):
        walk.note(path, f"{kind.__name__} {inspection.sharding_text(value)}")
    elif isinstance(value, jax.tree_util.PyTreeDef):
        walk.tree(path, value)
    elif (names := getattr(kind, "_trace_attributes", None)) is not None:  # One of stepcache's own.
        walk.note(path, kind.__name__)
        for name in names:
            walk.when_named(name, f"{path}.{name}", getattr(value, name))
    elif (jitted := inspection.jitted_parts(value)) is not None:
        note_jitted(walk, path, jitted)
    elif (state := _random_state(value)) is not None:
        walk.note(path, kind.__name__)
        walk.value(f"{path} (state)", state)
    elif kind.__module__ == "flax.ids":  # A number that tells modules apart in this process.
        walk.note(path, kind.__name__)
    elif isinstance(value, logging.Logger):
        walk.note(path, f"logger {value.name}, level {value.getEffectiveLevel()}")
    elif f"{kind.__module__}.{kind.__name__}" in _FLAGS:
        note_flags(walk, path, value)
    elif isinstance(value, ContextVar):
        walk.note(path, f"context variable {value.name}")
        walk.value(f"{path}.get()", value.get(None))
    elif isinstance(value, np.ufunc):
        walk.note(path, f"ufunc {value.__name__}")
        if getattr(np, value.__name__, None) is not value:
            walk.blame(path, "it is a ufunc that is not numpy's")
    elif kind is _REMEMBERING or (
        kind.__module__.startswith("jaxlib") and hasattr(value, "cache_info")
    ):
        note_remembering(walk, path, value)
    else:
        return value is os.environ or value is os.environb  # What is read of it is recorded.
    return True


_FLAGS = ("absl.flags._flagvalues.FlagValues", "absl.flags._flagvalues.FlagHolder")


def note_flags(walk: Trail, path: str, flags: Any) -> None:
    """Notes the values of absl's flags, or that of the flag of a holder.

    Absl also keeps them by the addresses of modules, which are other ones in each process.
    """
    walk.note(path, type(flags).__name__)
    is_holder = hasattr(flags, "_flagvalues")
    known = flags._flagvalues if is_holder else flags
    for name in {flags.name} & {*known} if is_holder else sorted(known):
        walk.value(f"{path}.{name}", known[name].value)
        walk.when_named("present", f"{path}[{name!r}].present", known[name].present)


@functools.lru_cache(maxsize=4096)
def _may_be_special(kind: type) -> bool:
    """Whether `note_special` may know a class: few do, and it asks many questions."""
    package = kind.__module__.partition(".")[0]
    return (
        package in _SPECIAL_PACKAGES
        or kind.__module__ == "flax.ids"
        or issubclass(kind, _SPECIAL_CLASSES)
    )


_SPECIAL_PACKAGES = frozenset(
    ("jax", "jaxlib", "stepcache", "absl", "random", "os", *_BY_REPR_MODULES)
)
_SPECIAL_CLASSES: tuple[Any, ...] = (
    *(np.ndarray, np.generic, np.dtype, np.random.RandomState, np.random.Generator, np.ufunc),
    *(jax.Array, jax.Device, jax.P, jax.sharding.Sharding, jax.sharding.Mesh),
    *(jax.tree_util.PyTreeDef, type(jax.jit(lambda: 0)), functools.partial),
    *(enum.Enum, PurePath, logging.Logger, ContextVar, type(functools.lru_cache(lambda: 0))),
)


def _random_state(value: Any) -> Any:
    """The state of a generator of random numbers, which says what it will give next."""
    if isinstance(value, np.random.RandomState):
        return value.get_state()
    if isinstance(value, np.random.Generator):
        return value.bit_generator.state
    return value.getstate() if type(value).__module__ == "random" else None


_REMEMBERING = type(functools.lru_cache(lambda: 0))

HANDLERS: dict[Any, Any] = {
    list: note_sequence,
    tuple: note_sequence,
    deque: note_sequence,
    bytearray: note_sequence,
    dict: note_mapping,
    OrderedDict: note_mapping,
    defaultdict: note_mapping,
    Counter: note_mapping,
    types.MappingProxyType: note_mapping,
    set: note_set,
    frozenset: note_set,
    types.MethodType: _of_parts("__func__", "__self__"),
    types.BuiltinFunctionType: note_builtin,
    types.MethodDescriptorType: note_builtin,
    types.WrapperDescriptorType: note_builtin,
    types.MethodWrapperType: note_builtin,
    types.ClassMethodDescriptorType: note_builtin,
    functools.partialmethod: note_partial,
    property: _of_parts("fget", "fset"),
    staticmethod: _of_parts("__func__"),
    classmethod: _note_class_method,
    threading.local: _of_parts("__dict__"),
    type(threading.Lock()): _of_parts(),
    type(threading.RLock()): _of_parts(),
    object: _of_parts(),
    re.Pattern: _note_pattern,
    slice: _of_parts("start", "stop", "step"),
    struct.Struct: _of_parts("format"),
    type(vars(namedtuple("_", "field"))["field"]): _note_field,
    weakref.ref: _note_weak,
    range: _note_repr,
    types.GenericAlias: _note_repr,
    types.UnionType: _note_repr,
}
