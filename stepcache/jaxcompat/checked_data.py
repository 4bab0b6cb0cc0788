"""Checks of plain data that was read from a file, and of values that are about to be written."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Sequence
from typing import Any


class NotStorable(Exception):
    """A program that cannot be kept outside its process, with the reason as its text: one line."""

    def __init__(self, reason: str):
        super().__init__(" ".join(reason.split()))


def of_kind(kind: type, value: Any) -> Any:
    if type(value) is not kind:
        raise TypeError(f"expected {kind.__name__}, got {value!r:.80}")
    return value


def texts_in(values: Any) -> tuple[str, ...]:
    return tuple(of_kind(str, value) for value in of_kind(list, values))


def sizes_in(values: Any) -> tuple[int, ...]:
    for value in of_kind(list, values):
        if type(value) is not int or value < 0:
            raise ValueError(f"expected a size, got {value!r:.80}")
    return tuple(values)


def item_at(values: Sequence[Any], position: Any) -> Any:
    if type(position) is not int or position < 0:
        raise ValueError(f"expected a position, got {position!r:.80}")
    return values[position]


def text_or_none(value: Any) -> str | None:
    return None if value is None else of_kind(str, value)


def of_kinds(value: Any, kinds: type | tuple[type, ...], what: str) -> Any:
    if not isinstance(value, kinds):
        raise NotStorable(f"it has {what} of the kind {type(value).__name__}: {value!r:.80}")
    return value


class NotThere(ValueError):
    """This process does not have what a tree names, by now: a trace may make it.

    JAX may not know a class as a node, too: chex registers one with its first object.
    """


def name_of(value: type, check: Callable[[Any], None]) -> list[str]:
    """The module and the name by which a class is found; one that a function made is not."""
    name = [value.__module__, value.__qualname__]
    with contextlib.suppress(ValueError, TypeError, KeyError):
        if named(name, check) is value:
            return name
    raise NotStorable(f"{name[1]} is not found in {name[0]} by its name")


def named(name: Any, check: Callable[[Any], None]) -> Any:
    """A class by its module and its name. Looks into dicts alone: nothing is imported or run."""
    module, path = name
    found: Any = sys.modules[module]
    for part in path.split("."):
        found = space_of(found)[part]
    check(found)
    return found


def space_of(value: Any) -> Any:
    """The `__dict__` of a module or a class. Runs nothing that these, or a metaclass, define."""
    return (type if isinstance(value, type) else object).__getattribute__(value, "__dict__")
