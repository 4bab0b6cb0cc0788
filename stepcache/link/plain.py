"""Plain data as bytes: what goes to disk, and what processes send to each other.

Paths may hold bytes that are no text; they travel as Python's surrogates.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, Literal, TypeVar, get_args, get_origin, get_type_hints

import msgpack

T = TypeVar("T")

_LARGEST = 1e18  # Of the numbers in a record.


def pack(data: Any) -> bytes:
    """Numbers, texts, bytes, lists and dicts, as bytes."""
    packed = msgpack.packb(data, unicode_errors="surrogatepass")
    assert packed is not None
    return packed


def unpack(packed: bytes) -> Any:
    """What was packed; tuples come back as lists. Raises `ValueError` for malformed bytes."""
    return msgpack.unpackb(packed, strict_map_key=False, unicode_errors="surrogatepass")


def fits(value: Any, kind: Any) -> bool:
    """Whether plain data, or a record of it, is of an annotated kind.

    That is a plain type, a record, or a generic type of these. `tuple[str, int]` stands for a
    list of a text and a number, as tuples are unpacked; an int fits a float.
    """
    return _check_of(kind)(value)


@functools.lru_cache(maxsize=256)
def _check_of(kind: Any) -> Callable[[Any], bool]:
    """What `fits` does for one kind: made once, as messages are checked one by one."""
    if kind is Any:
        return lambda value: True
    if hasattr(kind, "__match_args__"):  # A record.
        fields = [(name, _check_of(each)) for name, each in get_type_hints(kind).items()]
        return lambda value: (
            type(value) is kind and all(check(getattr(value, name)) for name, check in fields)
        )
    if get_origin(kind) is Literal:
        return lambda value: value in get_args(kind)
    origin, kinds = get_origin(kind) or kind, [_check_of(each) for each in get_args(kind)]
    if origin is tuple:
        return lambda value: (
            isinstance(value, list)
            and len(value) == len(kinds)
            and all(check(each) for check, each in zip(kinds, value, strict=True))
        )
    if origin is list:
        return lambda value: isinstance(value, list) and all(map(kinds[0], value))
    if origin is dict:
        return lambda value: (
            isinstance(value, dict)
            and all(map(kinds[0], value))
            and all(map(kinds[1], value.values()))
        )
    if origin is float:
        return lambda value: type(value) in (float, int)
    return lambda value: type(value) is origin


def record_of(kind: type[T], found: Any) -> T:
    """Makes a record, a dataclass or a named tuple, of a decoded JSON object.

    Fields that are unknown are left out.
    Raises `ValueError` if it is no object, a field is missing, or one has another type.
    """
    if not isinstance(found, dict):
        raise ValueError("no object")
    try:
        record = kind(**{name: found[name] for name in kind.__match_args__ if name in found})  # type: ignore[attr-defined]
    except TypeError as error:
        raise ValueError(str(error)) from None
    if not fits(record, kind) or not _are_bounded(fields_of(record)):
        raise ValueError(f"a field has another type than that of {kind.__name__}")
    return record


def _are_bounded(value: Any) -> bool:
    """Whether the numbers in data can be summed up and shown."""
    if isinstance(value, list | dict):
        return all(map(_are_bounded, value.values() if isinstance(value, dict) else value))
    return not isinstance(value, float | int) or abs(value) < _LARGEST  # NaN is not.


def fields_of(record: Any) -> dict[str, Any]:
    """The fields of a record. `asdict` would copy, and by recursion, what may be large."""
    return {name: getattr(record, name) for name in record.__match_args__}
