"""How a walk looks at values: containers, arrays, and the objects of Python's own library.

Each function notes one kind of value under a path, and what it is made of under paths below that.
"""

from __future__ import annotations

import enum
import functools
import re
import struct
import threading
import types
import typing
import weakref
from collections import Counter, OrderedDict, defaultdict, deque, namedtuple
from collections.abc import Callable, Iterable
from typing import Any

from stepcache.fingerprint import opened_files
from stepcache.fingerprint.bytecode import DYNAMIC_ACCESS
from stepcache.fingerprint.known_packages import TRUSTED
from stepcache.fingerprint.nondeterminism import name_of_method
from stepcache.fingerprint.provenance import INSTALLED, origin_of_module
from stepcache.fingerprint.tokens import (
    ATOMS,
    atom,
    digest,
    key_text,
    plain_text,
    qualified_name,
    short,
)
from stepcache.fingerprint.trail import Trail

_LISTED = 64
# Names the content of a container that has attributes too; its items are named as of any other.
CONTENT = " (content)"


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
    kind = type(value).__name__
    if isinstance(value, deque) and value.maxlen is not None:
        kind += f" (maxlen {value.maxlen})"
    note_items(walk, path, base.__iter__(value), kind)


def note_mapping(walk: Trail, path: str, value: Any) -> None:
    """Notes a dictionary with its order."""
    base: Any = next((each for each in (OrderedDict, dict) if isinstance(value, each)), type(value))
    items = list(base.items(dict.copy(value) if base is dict else value))
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
        if (text := plain_text(each)) is not None:
            plain.append(atom(each) if type(each) in ATOMS else text)
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


def note_builtin(walk: Trail, path: str, value: Any) -> None:
    """Notes a function written in C by its name, with what it is bound to."""
    owner = getattr(value, "__self__", None)
    name = getattr(value, "__qualname__", value.__name__)
    if value.__name__ in DYNAMIC_ACCESS:
        walk.reads_any_attribute()
    is_slot = type(value) is types.MethodWrapperType  # As `__getattribute__` of a module.
    if owner is None or (isinstance(owner, types.ModuleType) and not is_slot):
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
        walk.check_pure(path, name_of_method(owner, value.__name__))
    walk.value(f"{path}.__self__", owner)


def note_partial(walk: Trail, path: str, value: Any) -> None:
    """Notes a partial application."""
    walk.note(path, type(value).__name__)
    owner = path.removesuffix(CONTENT)
    for name in ("func", "args", "keywords"):
        walk.value(f"{owner}.{name}", getattr(value, name))
    if getattr(value, "__dict__", None) and type(value) is functools.partial:
        walk.value(f"{path}.__dict__", dict(value.__dict__))


def _of_parts(*names: str) -> Callable[[Trail, str, Any], None]:
    """A handler for objects that some of their attributes say everything of."""

    def note(walk: Trail, path: str, value: Any) -> None:
        walk.note(path, type(value).__name__)
        for name in names:
            walk.value(f"{path}.{name}", getattr(value, name))

    return note


def _note_method(walk: Trail, path: str, value: types.MethodType) -> None:
    walk.note(path, "method")
    walk.value(f"{path}.__func__", value.__func__)
    walk.value(f"{path}.__self__", value.__self__, walk.confined.way_to_self(value.__func__))


def _note_class_method(walk: Trail, path: str, value: classmethod) -> None:
    walk.note(path, "classmethod")
    walk.value(f"{path}.__func__", value.__func__)
    walk.read_attributes(("classmethod",))  # It may call the class that it is given.


def _note_pattern(walk: Trail, path: str, value: re.Pattern) -> None:
    walk.note(path, f"Pattern {value.flags} {short(repr(value.pattern))}")


def _note_repr(walk: Trail, path: str, value: Any) -> None:
    walk.note(path, short(repr(value)))


def _note_lock(walk: Trail, path: str, value: Any) -> None:
    walk.note(path, type(value).__name__)
    for name in ("locked", "acquire"):
        walk.when_named(name, f"{path}.locked()", value.locked())


def note_alias(walk: Trail, path: str, value: Any) -> None:
    """Notes a type that is made of others, as `list[Config]` or a type variable with a bound."""
    parts = {name: getattr(value, name, None) for name in _PARTS_OF_ALIASES}
    parts = {
        name: part for name, part in parts.items() if not any(part is each for each in _NO_PART)
    }
    walk.note(path, type(value).__name__ if parts else short(repr(value)))
    for name, part in parts.items():
        walk.value(f"{path}.{name}", part)


_PARTS_OF_ALIASES = (
    *("__name__", "__origin__", "__args__", "__metadata__", "__supertype__"),
    *("__bound__", "__constraints__", "__default__"),
)
_NO_PART = (None, (), getattr(typing, "NoDefault", None))


def _note_field(walk: Trail, path: str, value: Any) -> None:
    """A field of a named tuple: its number."""
    walk.value(path, value.__reduce__()[1][0])


def _note_weak(walk: Trail, path: str, value: weakref.ref) -> None:
    walk.note(path, "weak reference")
    walk.value(f"{path}()", value())


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
    types.MethodType: _note_method,
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
    type(threading.Lock()): _note_lock,
    type(threading.RLock()): _of_parts(),
    object: _of_parts(),
    re.Pattern: _note_pattern,
    slice: _of_parts("start", "stop", "step"),
    struct.Struct: _of_parts("format"),
    type(vars(namedtuple("_", "field"))["field"]): _note_field,
    weakref.ref: _note_weak,
    range: _note_repr,
    types.GenericAlias: note_alias,
    types.UnionType: note_alias,
}
