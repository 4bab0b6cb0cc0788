"""How a walk looks at instances.

Attributes that only the user's own code can read are noted when code is found that names them.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import operator
import types
import typing
from collections.abc import Iterator
from typing import Any

from stepcache.fingerprint import instances, values
from stepcache.fingerprint.asked_by_name import config_among, is_model, note_config, note_model
from stepcache.fingerprint.bytecode import SHOWS_ARGUMENTS, SHOWS_NAMESPACES
from stepcache.fingerprint.classes import is_plain
from stepcache.fingerprint.tokens import OF_ITERATOR, digest, is_special
from stepcache.fingerprint.trail import Trail


def note_instance(walk: Trail, path: str, value: Any) -> None:
    """Notes an object of a class that has no handler of its own."""
    cls = type(value)
    state = instances.attributes_of(value)
    if not instances.is_shown(cls):
        parts = instances.taken_apart(value)
        if parts is None:
            walk.blame(
                path, f"an object of {cls.__module__}.{cls.__qualname__} cannot be looked into"
            )
            return
        walk.note(path, f"a {walk.follow_class(cls)}, taken apart")
        is_iterator = issubclass(cls, Iterator)
        values.note_items(walk, path + (OF_ITERATOR if is_iterator else " (parts)"), parts, "parts")
        if isinstance(value, operator.attrgetter | operator.methodcaller):
            walk.reads_any_attribute()
        return
    walk.note(path, f"a {walk.follow_class(cls)}")
    _note_content(walk, path, value)
    if (config := config_among(cls)) is not None:
        state = note_config(walk, path, config, state)
    elif is_model(cls):
        note_model(walk, path, state)
        return
    selective = is_plain(cls)
    owner = walk.confined.confine(value) if selective else 0
    if not selective and len(state) > 1:
        walk.note(f"{path} (order of attributes)", digest(state))
    elif len(state) > 1:
        walk.when_dynamic(f"{path} (order of attributes)", tuple(state), owner)
    if cls is dataclasses.Field:
        _note_annotation(walk, f"{path}.type", state.pop("type", None))
        # A constructor has its own way to it.
        walk.when_named(_FACTORY, f"{path}.{_FACTORY}", state.pop(_FACTORY, None))
    for name, each in state.items():
        if selective and (shown := _shown_by(cls)):
            walk.when_named(shown, f"{path}.{name}", each, owner)
        if (selective and not is_special(name)) or (cls.__module__, name) == _RESOLVED:
            walk.when_named(name, f"{path}.{name}", each, owner)
        else:
            walk.value(f"{path}.{name}", each)


_FACTORY = "default_factory"


def _shown_by(cls: type) -> str:
    """What stands among the names that code reads if it needs all attributes of such an object.

    The methods that show and compare Python's namespaces are not the user's, so no code of theirs
    names the attributes.
    """
    if issubclass(cls, types.SimpleNamespace):
        return SHOWS_NAMESPACES
    return SHOWS_ARGUMENTS if issubclass(cls, argparse.Namespace) else ""


# What resolvers gave before, such as the time that hydra asks for, is named by code that asks them.
_RESOLVED = ("omegaconf.base", "resolver_cache")


def _note_content(walk: Trail, path: str, value: Any) -> None:
    base = _content_base(type(value))
    fields = getattr(type(value), "_fields", ())
    if isinstance(value, functools.partial):
        values.note_partial(walk, path + values.CONTENT, value)
    elif isinstance(value, tuple) and isinstance(fields, tuple) and len(fields) == len(value):
        for name, each in zip(fields, tuple.__iter__(value), strict=True):
            walk.value(f"{path}.{name}", each)
    elif base is not None and base in values.HANDLERS:
        values.HANDLERS[base](walk, path + values.CONTENT, value)
    elif base is not None:
        walk.note(path + values.CONTENT, base.__repr__(value))


@functools.lru_cache(maxsize=4096)
def _content_base(cls: type) -> Any:
    return next((each for each in instances.CONTENT if issubclass(cls, each)), None)


def _note_annotation(walk: Trail, path: str, annotation: Any) -> None:
    """Notes the type of a field, of whose classes nobody makes an object because of that."""
    if issubclass(type(annotation), type):
        walk.note(path, f"class {walk.follow_class(annotation)}")
    elif parts := typing.get_args(annotation):
        for number, part in enumerate((typing.get_origin(annotation), *parts)):
            _note_annotation(walk, f"{path}[{number}]", part)
    else:
        walk.value(path, annotation)
