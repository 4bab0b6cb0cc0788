"""Entries of the disk store as its users see them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple


@dataclass(frozen=True, slots=True)
class Entry:
    """What was stored under a name, whole and authentic.

    Attributes:
        header: the description given when it was stored.
        payload: its bytes.
        size_bytes: size of its file.
        created_time: when it was stored, in seconds since the epoch.
        used_time: when it was last used before, likewise, to the minute.
    """

    header: dict[str, Any]
    payload: bytes
    size_bytes: int
    created_time: float
    used_time: float


@dataclass(frozen=True, slots=True)
class EntryInfo:
    """A stored entry as a list shows it.

    Attributes:
        kind: what sort of thing it is.
        digest: its name.
        header: the description given when it was stored; None for a damaged entry.
        size_bytes: size of its file.
        created_time: when it was stored, in seconds since the epoch; None for a damaged entry.
        used_time: when it was last used, likewise, to the minute.
        problem: what is wrong with it, or None.
    """

    kind: str
    digest: str
    header: dict[str, Any] | None
    size_bytes: int
    created_time: float | None
    used_time: float
    problem: str | None = None


class Refusal(NamedTuple):
    """An entry that was not handed out, and why."""

    kind: str
    digest: str
    reason: str
