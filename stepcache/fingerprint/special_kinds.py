"""How a walk looks at objects that are known by their class or by their nature.

Arrays, members of enumerations, functions under `jax.jit` or with a memory, loggers and the like;
what a class of the user's adds to such an object is noted too. Containers are in `values`.
"""

from __future__ import annotations

import contextvars
import datetime
import enum
import functools
import io
import logging
import os
from collections.abc import Container
from contextvars import ContextVar
from pathlib import PurePath
from typing import Any, TypeGuard

import jax
import numpy as np

from stepcache.fingerprint import instances
from stepcache.fingerprint.asked_by_name import note_settings
from stepcache.fingerprint.lowering_rules import code_of_rule
from stepcache.fingerprint.provenance import USER, origin_of
from stepcache.fingerprint.remembered import REMEMBERING, holds_what_it_computes
from stepcache.fingerprint.tokens import STATE, random_state, short
from stepcache.fingerprint.trail import Trail
from stepcache.fingerprint.values import note_alias, note_items
from stepcache.jaxcompat import Tracer, inspection

_BY_REPR_MODULES = ("datetime", "decimal", "fractions", "uuid", "ipaddress")
_MISSING = object()
_MESHES = jax.sharding.Mesh | jax.sharding.AbstractMesh
_TEXT: Any = io.TextIOBase.__bases__[0]  # To ask the abstract class takes long, and asks proxies.


def note_special(walk: Trail, path: str, value: Any) -> bool:
    """Notes a value, and says yes, if it is of a kind known by its class or by its nature."""
    kind = type(value)
    if not may_be_special(kind) or not _note_by_nature(walk, path, value):
        return False
    if instances.is_users(kind):
        walk.follow_class(kind)
        for name, each in instances.attributes_of(value).items():
            if not (name.startswith("_") and name.endswith("_")):  # An enumeration's own.
                walk.when_named(name, f"{path}.{name}", each)
    return True


def _note_by_nature(walk: Trail, path: str, value: Any) -> bool:
    """As `note_special`, without what a class of the user's adds."""
    kind = type(value)
    if isinstance(value, jax.Array | np.ndarray | np.generic | np.dtype):
        note_array(walk, path, value)
    elif isinstance(value, enum.Enum):
        note_enum_member(walk, path, value)
    elif isinstance(value, PurePath) and kind.__module__.partition(".")[0] == "pathlib":
        walk.note(path, f"{kind.__name__} {walk.place(os.fspath(value))}")
    elif kind.__module__ in _BY_REPR_MODULES:
        walk.follow_class(kind)
        if isinstance(value, datetime.datetime | datetime.time) and value.tzinfo is not None:
            walk.value(f"{path}.tzinfo", value.tzinfo)
            value = value.replace(tzinfo=None)
        walk.note(path, f"{kind.__name__} {short(repr(value))}")
    elif isinstance(value, jax.Device | jax.P):
        walk.note(path, f"{kind.__name__} {short(repr(value))}")
    elif kind.__module__ == "typing":
        note_alias(walk, path, value)
    elif isinstance(value, jax.sharding.Sharding | _MESHES):
        walk.note(path, f"{kind.__name__} {inspection.sharding_text(value)}")
    elif isinstance(value, jax.tree_util.PyTreeDef):
        walk.tree(path, value)
    elif (names := getattr(kind, "_trace_attributes", None)) is not None:  # One of stepcache's own.
        walk.note(path, kind.__name__)
        for name in names:
            walk.when_named(name, f"{path}.{name}", getattr(value, name))
    elif (jitted := inspection.jitted_parts(value)) is not None:
        note_jitted(walk, path, jitted)
        if kind is type(inspection.PLAIN_JIT):
            known = {*vars(inspection.PLAIN_JIT), *getattr(jitted[0], "__dict__", ())}
            _note_attributes(walk, path, value, known)
    elif (state := random_state(value)) is not None:
        walk.note(path, kind.__name__)
        walk.note(path + STATE, state)
    elif kind.__module__ == "flax.ids" or _full_name(kind) in inspection.ORIGINS_OF_JAXPRS:
        walk.note(path, kind.__name__)  # Flax's are numbers that tell modules apart in a process.
    elif isinstance(value, logging.Logger):
        enabled = max(value.getEffectiveLevel(), value.manager.disable + 1)
        text = "disabled" if value.disabled else f"enabled from {enabled}"
        walk.note(path, f"logger {value.name}, level {value.level}, {text}")
    elif _full_name(kind) in _FLAGS:
        note_flags(walk, path, value)
    elif isinstance(value, ContextVar):
        _note_context_variable(walk, path, value)
    elif is_output(value):
        _note_output(walk, path, value)
    elif isinstance(value, np.ufunc):
        walk.note(path, f"ufunc {value.__name__}")
        if getattr(np, value.__name__, None) is not value:
            walk.blame(path, "it is a ufunc that is not numpy's")
    elif inspection.is_primitive(value) and (rules := _rules_of_others(value)):
        walk.note(path, f"primitive {value.name}")
        for number, rule in enumerate(rules):
            walk.value(f"{path} (rule {number})", rule)
    elif kind is REMEMBERING or (
        kind.__module__.startswith("jaxlib") and hasattr(value, "cache_info")
    ):
        note_remembering(walk, path, value)
    else:
        return value is os.environ or value is os.environb  # What is read of it is recorded.
    return True


def _rules_of_others(primitive: Any) -> list[Any]:
    """What JAX keeps for a primitive in the tables of its transformations; none for one of JAX."""
    rules = inspection.tracing_rules(primitive) + inspection.lowering_rules(primitive)
    return rules if any(code_of_rule(rule) is None for rule in rules if callable(rule)) else []


def _full_name(kind: type) -> str:
    return f"{kind.__module__}.{kind.__name__}"


def is_output(value: Any) -> TypeGuard[io.TextIOBase]:
    """Whether a value is a stream of text that is only written to, as `sys.stderr` is."""
    is_text = issubclass(type(value), _TEXT) and origin_of(type(value)) != USER
    return is_text and not value.closed and value.writable() and not value.readable()


def _note_output(walk: Trail, path: str, stream: io.TextIOBase) -> None:
    """Notes a stream; of what it says of itself, that which code asks for."""
    walk.note(path, "an output stream")
    for name in ("encoding", "errors", "line_buffering"):
        walk.when_named(name, f"{path}.{name}", getattr(stream, name, None))
    name = getattr(stream, "name", None)
    walk.when_named("name", f"{path}.name", walk.place(name) if isinstance(name, str) else name)
    walk.when_named("isatty", f"{path}.isatty()", stream.isatty())
    position = stream.tell() if stream.seekable() else None
    walk.when_named("tell", f"{path}.tell()", position)


def _note_context_variable(walk: Trail, path: str, variable: ContextVar) -> None:
    walk.note(path, f"context variable {variable.name}")
    default = contextvars.Context().run(_default_of, variable)
    for name, value in ((".get()", variable.get(_MISSING)), (" (default)", default)):
        if value is not _MISSING:
            walk.value(path + name, value)


def _default_of(variable: ContextVar) -> Any:
    """What a variable gives in a context in which it has no value."""
    try:
        return variable.get()
    except LookupError:
        return _MISSING


def levels_of_loggers() -> dict[str, Any]:
    """What decides which messages are logged."""
    manager = logging.root.manager
    found = {
        name: (each.level, each.disabled)
        for name, each in [("", logging.root), *manager.loggerDict.copy().items()]
        if isinstance(each, logging.Logger) and (each.level or each.disabled)
    }
    return {"disable": manager.disable, **dict(sorted(found.items()))}


_FLAGS = ("absl.flags._flagvalues.FlagValues", "absl.flags._flagvalues.FlagHolder")


def note_flags(walk: Trail, path: str, flags: Any) -> None:
    """Notes the values of absl's flags, or that of the flag of a holder.

    Absl also keeps them by the addresses of modules, which are other ones in each process.
    """
    walk.note(path, type(flags).__name__)
    is_holder = hasattr(flags, "_flagvalues")
    known = flags._flagvalues if is_holder else flags
    names = {flags.name} & {*known} if is_holder else sorted(known)
    found = [(name, known[name]) for name in names]
    note_settings(walk, path, type(flags), [(name, flag.value) for name, flag in found])
    for name, flag in found:
        for each in ("present", "default", "using_default_value"):
            walk.when_named(each, f"{path}[{name!r}].{each}", getattr(flag, each, None))


@functools.lru_cache(maxsize=4096)
def may_be_special(kind: type) -> bool:
    """Whether `note_special` may know a class: few do, and it asks many questions."""
    package = kind.__module__.partition(".")[0]
    return (
        package in _SPECIAL_PACKAGES
        or kind.__module__ == "flax.ids"
        or issubclass(kind, _SPECIAL_CLASSES)
    )


_SPECIAL_PACKAGES = frozenset(
    ("jax", "jaxlib", "stepcache", "absl", "random", "os", "typing", *_BY_REPR_MODULES)
)
_SPECIAL_CLASSES: tuple[Any, ...] = (
    *(np.ndarray, np.generic, np.dtype, np.ufunc),
    *(np.random.RandomState, np.random.Generator, np.random.BitGenerator),
    *(jax.Array, jax.Device, jax.P, jax.sharding.Sharding, jax.sharding.Mesh),
    *(jax.tree_util.PyTreeDef, type(inspection.PLAIN_JIT), functools.partial),
    *(enum.Enum, PurePath, logging.Logger, ContextVar, _TEXT, REMEMBERING),
)


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
        kind = "scalar " if type(value) is value.dtype.type else f"{type(value).__name__} "
        text = f"content {inspection.content_digest(np.asarray(value))}"
        if value.ndim == 0 and value.dtype.kind in "biufc":
            text = repr(value.item())
        if not value.flags.c_contiguous:
            text += f", strides {value.strides}"
        walk.note(path, f"{kind}{value.dtype}{list(value.shape)} {text}".removeprefix("ndarray "))
        flags = value.flags
        walk.when_named("flags", f"{path}.flags", (flags.writeable, flags.owndata, flags.aligned))
        walk.when_named("base", f"{path}.base", value.base is None)
    more = getattr(value, "__dict__", None) if isinstance(value, np.ndarray) else None
    if more:  # As the mask of a masked array.
        walk.value(f"{path} (attributes)", dict(more))
    metadata = getattr(getattr(value, "dtype", value), "metadata", None)
    if metadata:  # Of a dtype.
        walk.value(f"{path} (metadata)", dict(metadata))


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


def note_jitted(walk: Trail, path: str, parts: tuple[Any, dict[str, Any]]) -> None:
    """Notes a function under `jax.jit` with its options."""
    function, options = parts
    walk.note(path, "jitted function")
    walk.value(f"{path} (function)", function)
    for name, option in options.items():
        walk.value(f"{path} ({name})", option)


def note_remembering(walk: Trail, path: str, value: Any) -> None:
    """A function that remembers its results, such as that of `functools.lru_cache`."""
    walk.note(path, type(value).__name__)
    function = getattr(value, "__wrapped__", None)
    if function is None:
        walk.blame(path, "it caches results that cannot be fingerprinted")
        return
    matters = origin_of(function) == USER
    if type(value) is REMEMBERING:  # A library's own function remembers for itself alone.
        matters = matters or not instances.found_by_name(value)
        _note_attributes(walk, path, value, ("__wrapped__", "cache_parameters"))
        matters = matters and not holds_what_it_computes(value)
    if matters and value.cache_info().currsize:
        why = "its cache holds results of earlier calls, and what those read is not known"
        walk.blame(path, why)
    walk.value(f"{path} (function)", function)


def _note_attributes(walk: Trail, path: str, value: Any, known: Container[str]) -> None:
    """Notes the attributes that were given to an object beside those that are known."""
    for name, each in vars(value).items():
        if name not in known:
            walk.value(f"{path}.{name}", each)
