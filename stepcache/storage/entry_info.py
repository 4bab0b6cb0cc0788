"""Entries of the disk store as its users see them."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, NamedTuple


@dataclass(frozen=True, slots=True)
class EntryInfo:
    """A stored entry. Where it is damaged, header and `created_time` are None."""

    kind: str  # What sort of thing it is.
    digest: str  # Its name.
    header: dict[str, Any] | None  # The description given when it was stored.
    size_bytes: int  # Size of its file.
    created_time: float | None  # When it was stored, in seconds since the epoch.
    used_time: float  # When it was last used before, likewise, to the minute.
    problem: str | None = None  # What is wrong with it.
    payload: bytes = field(default=b"", repr=False)  # Empty if it is damaged, or only listed.


class Refusal(NamedTuple):
    """An entry that was not handed out, and why."""

    kind: str
    digest: str
    reason: str
