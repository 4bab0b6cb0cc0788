"""Records read from JSON that another version, or nobody of ours, may have written."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import fields
from typing import Any, TypeVar

T = TypeVar("T")

_LARGEST = 1e18


def _is_integer(value: Any) -> bool:
    return type(value) is int and abs(value) < _LARGEST


def _is_number(value: Any) -> bool:
    return type(value) in (int, float) and -_LARGEST < value < _LARGEST  # NaN is not.


def _is_text(value: Any) -> bool:
    return isinstance(value, str)


def _list_of(check: Callable[[Any], bool]) -> Callable[[Any], bool]:
    return lambda value: isinstance(value, list) and all(map(check, value))


_CHECKS: dict[str, Callable[[Any], bool]] = {
    "str": _is_text,
    "int": _is_integer,
    "bool": lambda value: isinstance(value, bool),
    "float": _is_number,
    "dict[str, float]": lambda value: (
        isinstance(value, dict) and all(map(_is_number, value.values()))
    ),
    "list[str]": _list_of(_is_text),
    "list[int]": _list_of(_is_integer),
    "list[list[int]]": _list_of(_list_of(_is_integer)),
    # Of the changes of a miss.
    "list[Any]": _list_of(_list_of(_is_text)),
}


@functools.cache
def _fields(kind: type) -> tuple[tuple[str, Callable[[Any], bool]], ...]:
    return tuple((each.name, _CHECKS[str(each.type)]) for each in fields(kind))


def record_of(kind: type[T], found: Any) -> T:
    """Makes a record, a dataclass, of a decoded JSON object. Fields that are unknown are left out.

    Raises:
        ValueError: it is no object, a field is missing, or one has another type.
    """
    if not isinstance(found, dict):
        raise ValueError("no object")
    known = {}
    for name, check in _fields(kind):
        if name in found:
            known[name] = found[name]
            if not check(known[name]):
                raise ValueError(f"{name} has another type than that of {kind.__name__}")
    try:
        return kind(**known)
    except TypeError as error:
        raise ValueError(str(error)) from None
