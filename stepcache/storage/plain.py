"""Plain data as bytes: what goes to disk, and what processes tell each other.

Paths may hold bytes that are no text; they travel as Python's surrogates.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any, get_args, get_origin, get_type_hints

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
    if kind is Any:
        return True
    if dataclasses.is_dataclass(kind):
        return type(value) is kind and all(
            fits(getattr(value, name), each) for name, each in _fields(kind)
        )
    kinds = get_args(kind)
    match get_origin(kind) or kind:
        case origin if origin is tuple:
            return (
                isinstance(value, list)
                and len(value) == len(kinds)
                and all(map(fits, value, kinds))
            )
        case origin if origin is list:
            return isinstance(value, list) and all(fits(each, kinds[0]) for each in value)
        case origin if origin is dict:
            return isinstance(value, dict) and all(
                fits(name, kinds[0]) and fits(each, kinds[1]) for name, each in value.items()
            )
        case origin:
            return type(value) is origin or (origin is float and type(value) is int)


@functools.lru_cache
def _fields(kind: type) -> tuple[tuple[str, Any], ...]:
    return tuple(get_type_hints(kind).items())
