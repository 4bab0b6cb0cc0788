"""The memory tier: programs of this process, least recently used first out.

Not thread-safe by itself; `cache.py` holds the lock.
"""

from __future__ import annotations

import weakref
from collections import OrderedDict
from dataclasses import dataclass, field
from typing import NamedTuple

from stepcache.programs.build import Program
from stepcache.programs.key import Key

Owners = dict[int, weakref.ref]


class Evicted(NamedTuple):
    """A program that left the tier, and weak references to those who used it, by their numbers."""

    program: Program
    owners: Owners


@dataclass(slots=True)
class _Entry:
    program: Program
    owners: Owners = field(default_factory=dict)


class MemoryTier:
    """Programs by key, bounded by count and by bytes.

    Args:
        max_programs: at most so many programs.
        max_bytes: at most so many bytes of programs (`Program.size_bytes`); None for no bound. A
            single program larger than that is still held, alone.
    """

    def __init__(self, max_programs: int, max_bytes: int | None):
        self._max_programs = max_programs
        self._max_bytes = max_bytes
        self._entries: OrderedDict[Key, _Entry] = OrderedDict()

    def get(self, key: Key, number: int, owner: weakref.ref) -> Program | None:
        """The program of `key`, now the most recently used, and used by owner `number` too."""
        entry = self._entries.get(key)
        if entry is None:
            return None
        self._entries.move_to_end(key)
        entry.owners[number] = owner
        return entry.program

    def peek(self, key: Key) -> Program | None:
        """The program of `key`, without a trace of the question."""
        entry = self._entries.get(key)
        return entry.program if entry else None

    def put(self, key: Key, program: Program, number: int, owner: weakref.ref) -> list[Evicted]:
        """Adds a program; returns those that made room for it."""
        self._entries[key] = _Entry(program, {number: owner})
        self._entries.move_to_end(key)
        evicted = []
        while len(self._entries) > 1 and self._is_full():
            _, entry = self._entries.popitem(last=False)
            evicted.append(Evicted(entry.program, entry.owners))
        return evicted

    def _is_full(self) -> bool:
        if len(self._entries) > self._max_programs:
            return True
        return self._max_bytes is not None and self.size_bytes > self._max_bytes

    def release(self, number: int) -> None:
        """Drops the programs that no owner but `number` uses."""
        for key, entry in list(self._entries.items()):
            if entry.owners.pop(number, None) is not None and not entry.owners:
                del self._entries[key]

    def clear(self) -> list[Evicted]:
        """Drops everything; returns it."""
        dropped = [Evicted(entry.program, entry.owners) for entry in self._entries.values()]
        self._entries.clear()
        return dropped

    def owned_by(self, number: int) -> int:
        return sum(number in entry.owners for entry in self._entries.values())

    @property
    def size_bytes(self) -> int:
        return sum(entry.program.size_bytes for entry in self._entries.values())

    def __len__(self) -> int:
        return len(self._entries)
