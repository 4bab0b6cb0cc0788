"""Entries of the disk store as its users see them."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, NamedTuple


@dataclass(frozen=True, slots=True)
class EntryInfo:
    """A stored entry.

    Attributes:
        kind: what sort of thing it is.
        digest: its name.
        header: the description given when it was stored; None for a damaged entry.
        size_bytes: size of its file.
        created_time: when it was stored, in seconds since the epoch; None for a damaged entry.
        used_time: when it was last used before, likewise, to the minute.
        problem: what is wrong with it, or None.
        payload: its bytes; empty where it is damaged, or was only listed.
    """

    kind: str
    digest: str
    header: dict[str, Any] | None
    size_bytes: int
    created_time: float | None
    used_time: float
    problem: str | None = None
    payload: bytes = field(default=b"", repr=False)


class Refusal(NamedTuple):
    """An entry that was not handed out, and why."""

    kind: str
    digest: str
    reason: str
