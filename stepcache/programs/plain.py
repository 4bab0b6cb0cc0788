"""Plain data as bytes: what goes to disk, and what processes tell each other.

Paths may hold bytes that are no text; they travel as Python's surrogates.
"""

from __future__ import annotations

from typing import Any

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
