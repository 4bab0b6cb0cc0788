"""What a name in an installed module means, as a text that another process can compare."""

from __future__ import annotations

import functools
import logging
import threading
import types
import weakref
from collections import deque
from collections.abc import Iterator
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any, NamedTuple

from stepcache.fingerprint import instances
from stepcache.fingerprint.classes import is_foreign
from stepcache.fingerprint.dependencies import LATE
from stepcache.fingerprint.held import CONTAINERS, function_in, is_immutable, registered_with
from stepcache.fingerprint.known_packages import TRUSTED
from stepcache.fingerprint.provenance import INSTALLED, PYTHON, USER, origin_of, origin_of_file
from stepcache.fingerprint.tokens import (
    attribute_of,
    container_text,
    digest,
    is_special,
    plain_text,
    qualified_name,
    random_state,
    short,
)


@dataclass(slots=True)
class Meaning:
    """What a name of a module means. Takes the place of a `Walk` while that is found out.

    There are thousands of them, nearly all without dependencies and values.

    Attributes:
        text: the meaning, as far as it can be told in words.
        dependencies: what is worth a dependency of its own: name and token.
        values: path and value of what is the user's and has to be followed.
        locals: path and value of what holds something else in each thread.
    """

    text: str = ""
    dependencies: tuple[tuple[str, str], ...] = ()
    values: tuple[tuple[str, Any], ...] = ()
    locals: tuple[tuple[str, threading.local], ...] = ()

    def once(self, path: str, text: str) -> None:
        self.dependencies += ((path, text),)

    def value(self, path: str, value: Any) -> None:
        self.values += ((path, value),)

    def add(self, other: Meaning) -> None:
        """Adds what another one has beside its text."""
        self.dependencies += other.dependencies
        self.values += other.values
        self.locals += other.locals

    def in_this_thread(self) -> dict[str, str]:
        """Dependencies on what `locals` hold in this thread."""
        return {f"{path}{_OF_THREAD}": _thread_text(value) for path, value in self.locals}


def is_held_whole(value: Any, deepest: int = 4) -> bool:
    """Whether `Held` sees all that could change what a value means.

    Not of an object whose attributes may be set, nor where a package's own is in a container.
    Python's own objects in one count as unchanging.
    """
    kind = type(value)
    if deepest < 0:
        return kind not in CONTAINERS or not value
    if kind in CONTAINERS:
        parts = (part.value for part in _parts(_Part("", value)))
        followed = (p for p in parts if type(p) in CONTAINERS or origin_of(type(p)) == INSTALLED)
        return all(is_held_whole(each, deepest - 1) for each in followed)
    wrapping = (types.ModuleType, staticmethod, classmethod, property)
    is_function = callable(value) and not _may_have_state(value)
    if plain_text(value) is not None or is_function or _is_users(value):
        return True
    if issubclass(kind, (*wrapping, *instances.SLOT_TYPES, *_UNCHANGING)):
        return True
    # A mere mark has neither attributes nor slots.
    return not kind.__dictoffset__ and kind.__basicsize__ == object.__basicsize__


class _Part(NamedTuple):
    """What is in a container or in an object; named if texts alone lead to it."""

    place: str
    value: Any
    is_named: bool = True
    in_row: bool = False


# What Python keeps in classes of named tuples and in dataclasses.
_UNCHANGING = (type(vars(_Part)["place"]), type(vars(Meaning)["__dataclass_params__"]))


def is_own_dependency(attribute: str, value: Any, text: str, package: str) -> bool:
    """Whether a name is a dependency of its own: the user can change it, or it was changed."""
    if callable(value):
        return not text.endswith(attribute) and attribute_of(value, "__qualname__") is not None
    return package not in TRUSTED and not issubclass(type(value), types.ModuleType)


def members_of(cls: type) -> list[tuple[str, Any]]:
    """What a class has of its own. To look at its annotations may give it empty ones."""
    return [
        (name, value)
        for name, value in vars(cls).copy().items()  # Another thread may add some.
        if name not in _UNTOLD and (name != "__annotations__" or value)
    ]


def class_text(notes: Meaning, cls: type, has_state: bool) -> str:
    if is_immutable(cls):
        return "immutable"
    keeps_state = origin_of(cls) == PYTHON  # As `weakref.finalize` keeps a registry and marks.
    name = qualified_name(cls)
    module, prefix = cls.__module__, f"{cls.__qualname__}."
    package = str(module).partition(".")[0]
    texts = [name]
    for attribute, value in sorted(members_of(cls)):
        kind = type(value)
        if kind is types.FunctionType:
            if (
                value.__module__ == module
                and value.__qualname__ == prefix + attribute
                and not value.__defaults__
                and origin_of_file(value.__code__.co_filename) != USER
            ):
                texts.append(attribute)  # Most are such.
                continue
        elif kind in instances.DESCRIPTORS:
            texts.append(f"{attribute} {value.__objclass__.__qualname__}.{value.__name__}")
            continue
        function = function_in(value)
        if keeps_state and function is None and not callable(value):
            continue
        text = _name_of_function(value, function) if function is not None else None
        if text is not None and function.__module__ == module and text.endswith(attribute):
            texts.append(f"{attribute} {text}")
            continue
        if text is None and kind in CONTAINERS and is_special(attribute):
            text = None if has_state else container_text(value)  # Python's, as of a dataclass.
            text = text or kind.__name__
        if text is None:
            text = text_of(notes, f"{name}.{attribute}", value, has_state)
        is_function = kind is types.FunctionType
        is_moved = is_function and value.__module__ != module and text != "the user's"
        if is_moved and has_state and str(value.__module__).partition(".")[0] == package:
            # Put there by another module of it, as jax.shard_map's does when imported.
            notes.once(f"{LATE}{name}.{attribute}", text)
            continue
        texts.append(f"{attribute} {text}")
        if is_function and not attribute.startswith("_"):
            worth = not text.endswith(f".{attribute}")
        else:
            worth = not (has_state or is_special(attribute)) and plain_text(value) is not None
        if worth:
            notes.once(f"{name}.{attribute}", text)
    return digest(texts)


def _name_of_function(value: Any, function: types.FunctionType) -> str | None:
    """The name of a value whose function is an installed package's own; None of any other.

    `function` is that of the value, as `function_in` returns it.
    """
    if function is not value and function.__dict__:
        return None
    filename = function.__code__.co_filename
    if filename.startswith("<") or origin_of_file(filename) == USER:
        return None
    name = _name_with_defaults(function)
    return name if function is value else f"{type(value).__name__} {name}"


def _name_with_defaults(function: types.FunctionType) -> str:
    defaults = plain_text(function.__defaults__) if function.__defaults__ else None
    return f"{defaults or ''}{function.__module__}.{function.__qualname__}"


def text_of(notes: Meaning, path: str, value: Any, has_state: bool) -> str:
    """What a name stands for, as far as that is the same in each process."""
    function = function_in(value)
    name = _name_of_function(value, function) if function is not None else None
    if name is not None:
        for cls, each in registered_with(function).items():
            if is_foreign(each):
                notes.value(f"{path}[{qualified_name(cls)}]", each)
        return name
    kind = type(value)
    if path in _OF_NO_TRACE:
        return qualified_name(kind)
    is_users = path in _OF_THE_USERS
    if kind is types.FunctionType or issubclass(kind, type):
        is_users = is_users or is_foreign(value)
    elif kind is types.ModuleType:
        return value.__name__
    elif (text := plain_text(value)) is not None:
        return text
    elif (kind in CONTAINERS or kind is deque) and not is_users:
        return _container_text(notes, path, value, has_state)
    else:
        is_users = is_users or _is_users(value)
    if is_users:
        notes.value(path, value)
        return "the user's"
    if kind is types.FunctionType:
        return _name_with_defaults(value)
    if issubclass(kind, type):
        return f"{kind.__qualname__} {qualified_name(value)}"
    if kind in _WEAK:  # Its other attributes tell when something in it died.
        holds = len(value) and path.partition(".")[0] not in TRUSTED  # Flax keeps live modules so.
        return f"{kind.__qualname__} of objects" if holds else kind.__qualname__
    if issubclass(kind, threading.local) and not has_state:
        notes.locals += ((path, value),)
        return kind.__qualname__
    if kind is ContextVar:
        notes.once(path, text := f"ContextVar {_context_text(value)}")
        return text
    if not has_state and (state := random_state(value)) is not None:
        notes.once(path, text := f"{kind.__qualname__}, state {state}")
        return text
    text = kind.__qualname__
    if callable(value) or issubclass(kind, staticmethod | classmethod | property):
        text = _callable_text(notes, path, value)
    if has_state or not _may_have_state(value):
        return text
    state = instances.attributes_of(value)
    is_logger = issubclass(kind, logging.Logger)
    if is_logger:
        state.pop("_cache", None)  # It remembers which levels are enabled; those are noted.
    texts = [f"{name} {container_text(each)}" for name, each in state.items()]
    texts += [] if is_logger else _follow(notes, path, value)
    return f"{text} {digest(texts)}"


def _may_have_state(value: Any) -> bool:
    """Whether a value is not a function or class, but an object that may hold settings."""
    kind = type(value)
    if not callable(value):
        return True
    known = issubclass(kind, type) or kind.__module__.partition(".")[0] in TRUSTED
    return not known and origin_of(kind) == INSTALLED


def _thread_text(value: threading.local) -> str:
    """What is kept for this thread, such as flax's rules of axes."""
    # Python itself keeps `__orig_class__` there, once the thread has an object.
    kept = sorted(vars(value).copy().items())
    texts = ((name, _kept_text(each)) for name, each in kept if not is_special(name))
    return short(", ".join(f"{name} {text}" for name, text in texts if text not in _EMPTY))


def _context_text(variable: ContextVar) -> str:
    return _kept_text(variable.get(None))


def _kept_text(value: Any) -> str:
    """What a thread or a context has: all of a plain value, of any other what is plain inside."""
    text = container_text(value)
    return text or f"{qualified_name(type(value))} {digest(_follow(None, '', value))}"


_OF_THREAD = " (in this thread)"
# As before, or after, any use.
_EMPTY = frozenset("None list() dict() tuple() set() deque()".split())


def _container_text(notes: Meaning, path: str, value: Any, has_state: bool) -> str:
    text = f"{type(value).__name__} of objects"
    if has_state:
        parts = value.values() if isinstance(value, dict) else value
        for number, each in enumerate(list(parts)):
            if type(each) is types.FunctionType and is_foreign(each):
                notes.value(f"{path}[{number}]", each)
        return text
    if (whole := container_text(value)) is not None:
        return whole
    settings = _follow(notes, path, value)
    return f"{text}, {digest(settings)}" if settings else text


def _follow(notes: Meaning | None, path: str, value: Any) -> list[str]:
    """Notes what of the user's is inside a value. Returns the plain values inside, by their names.

    A cache that is filled in passing may hold plain values too, but under objects or in a row.
    Without `notes`, what is the user's is gone through, too.
    """
    settings = []
    seen, level = {id(value)}, [_Part("", value)]
    for _ in range(_DEEPEST):
        below = []
        for part in (each for owner in level for each in _parts(owner)):
            if (text := container_text(part.value)) is not None:
                settings += [f"{part.place} {text}"] if part.is_named and not part.in_row else []
            elif id(part.value) not in seen:
                seen.add(id(part.value))
                kind = type(part.value)
                if kind is ContextVar:
                    settings.append(f"{part.place} {_context_text(part.value)}")
                elif (state := random_state(part.value)) is not None:
                    settings.append(f"{part.place} {state}")
                elif notes is None:
                    settings.append(f"{part.place} {_name(part.value)}")
                    below.append(part)
                elif issubclass(kind, threading.local):
                    notes.locals += ((f"{path}{part.place}", part.value),)
                elif _is_users(part.value):
                    notes.value(f"{path}{part.place}", part.value)
                else:
                    below.append(part)
        level = below[:_MAX_INSIDE]
    return sorted(settings)


_DEEPEST, _MAX_INSIDE = 4, 512


def _parts(owner: _Part) -> Iterator[_Part]:
    where, value, is_named, _ = owner
    kind = type(value)
    if issubclass(kind, dict | types.MappingProxyType):
        inside = dict.copy(value) if issubclass(kind, dict) else value
        for number, (key, each) in enumerate(list(inside.items())):
            if type(key) in (str, tuple) and plain_text(key) is not None:
                yield _Part(f"{where}[{key!r}]", each, is_named)
            elif type(each) is types.FunctionType or not _is_users(key):
                # What flax keeps for each of the user's classes matters where that is reached.
                yield _Part(f"{where}[{number}]", each, is_named=False)
    elif issubclass(kind, set | frozenset | list | tuple | deque):
        has_order = not issubclass(kind, set | frozenset)
        for number, each in enumerate(list(value) if has_order else sorted(value, key=_name)):
            yield _Part(f"{where}[{number}]", each, is_named and has_order, in_row=True)
    is_object = origin_of(kind) != PYTHON or kind is types.SimpleNamespace
    if is_object and instances.is_shown(kind) and not issubclass(kind, type):
        for name, each in instances.attributes_of(value).items():
            yield _Part(f"{where}.{name}", each, is_named)


def _name(value: Any) -> str:
    """The name of a function or a class; of any other value, that of its class."""
    kind = type(value)
    named = issubclass(kind, types.FunctionType | types.BuiltinFunctionType | type)
    return qualified_name(value if named else kind)


def _is_users(value: Any) -> bool:
    """Whether a value is the user's: a function, a class, or an object of such a class."""
    return is_foreign(value) or instances.is_users(type(value))


# What packages keep for the user, wholly: the values of gin's parameters, functions among them;
# the handlers of numpyro around a call; haiku's policies of precision, whose objects are those of
# one thread and cannot be looked into.
_OF_THE_USERS = frozenset(
    (
        "gin.config._CONFIG",
        "gin.config._CONSTANTS",
        "haiku._src.mixed_precision._thread_local_state",
        "numpyro.primitives._PYRO_STACK",
    )
)

# Modules that are being made; and all that `pickle` and `copy` ever made.
_OF_NO_TRACE = frozenset(("equinox._module._module._currently_initialising",))


def _callable_text(notes: Meaning, path: str, value: Any) -> str:
    """A function in some wrapping: by its name where it has one, and what the user put into it."""
    inner: Any = value
    for _ in range(8):
        found = (attribute_of(inner, name) for name in _WRAPPED)
        following = next((each for each in found if each is not None), None)
        if following is None or following is inner:
            break
        inner = following
        if is_foreign(inner):
            notes.value(path, value)
            return "the user's"
    if issubclass(type(value), functools.partial):
        given: tuple[Any, ...] = (*value.args, *value.keywords.values())
        if any(is_foreign(each) for each in given):
            notes.value(path, value)
        texts = (container_text(each) or qualified_name(each) for each in given)
        return f"partial of {qualified_name(inner)} {tuple(value.keywords)} {digest(texts)}"
    kind = type(value).__qualname__
    module, name = attribute_of(inner, "__module__"), attribute_of(inner, "__qualname__")
    return f"{kind} {module or ''}.{name or kind}"


_WRAPPED = ("func", "__func__", "fget", "__wrapped__")


_WEAK = (weakref.WeakKeyDictionary, weakref.WeakValueDictionary, weakref.WeakSet)
_UNTOLD = frozenset(
    "__doc__ __module__ __qualname__ __firstlineno__ __slotnames__ _abc_impl".split()
)
