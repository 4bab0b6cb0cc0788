"""Plain data as bytes: what goes to disk, and what processes tell each other.

Paths may hold bytes that are no text; they travel as Python's surrogates.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, Literal, get_args, get_origin, get_type_hints

import msgpack


def pack(data: Any) -> bytes:
    """Numbers, texts, bytes, lists and dicts, as bytes."""
    packed = msgpack.packb(data, unicode_errors="surrogatepass")
    assert packed is not None
    return packed


def unpack(packed: bytes) -> Any:
    """What was packed; tuples come back as lists.

    Raises:
        ValueError: the bytes are malformed.
    """
    return msgpack.unpackb(packed, strict_map_key=False, unicode_errors="surrogatepass")


def fits(value: Any, kind: Any) -> bool:
    """Whether unpacked data is of an annotated kind.

    Args:
        value: plain data, or a dataclass of it.
        kind: a plain type, a dataclass, or a generic type of these. `tuple[str, int]` stands for a
            list of a text and a number, as tuples are unpacked; an int fits a float.
    """
    return _check_of(kind)(value)


@functools.lru_cache(maxsize=256)
def _check_of(kind: Any) -> Callable[[Any], bool]:
    """What `fits` does for one kind: made once, as messages are checked one by one."""
    if kind is Any:
        return lambda value: True
    if dataclasses.is_dataclass(kind):
        names = get_type_hints(kind)
        fields = [(name, _check_of(each)) for name, each in names.items()]
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
