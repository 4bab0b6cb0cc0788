"""The memory tier: programs of this process, least recently used first out.

Not thread-safe by itself; `cache.py` holds the lock.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Hashable
from dataclasses import dataclass, field

from stepcache.programs.build import Program
from stepcache.programs.key import Key


@dataclass(slots=True)
class _Entry:
    program: Program
    owners: set[Hashable] = field(default_factory=set)


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

    def get(self, key: Key, owner: Hashable) -> Program | None:
        """The program of `key`, now the most recently used and also `owner`'s."""
        entry = self._entries.get(key)
        if entry is None:
            return None
        self._entries.move_to_end(key)
        entry.owners.add(owner)
        return entry.program

    def peek(self, key: Key) -> Program | None:
        """The program of `key`, without a trace of the question."""
        entry = self._entries.get(key)
        return entry.program if entry else None

    def put(self, key: Key, program: Program, owner: Hashable) -> list[tuple[Program, set]]:
        """Adds a program; returns those that made room for it, each with its owners."""
        self._entries[key] = _Entry(program, {owner})
        self._entries.move_to_end(key)
        evicted = []
        while len(self._entries) > 1 and self._is_full():
            _, entry = self._entries.popitem(last=False)
            evicted.append((entry.program, entry.owners))
        return evicted

    def _is_full(self) -> bool:
        if len(self._entries) > self._max_programs:
            return True
        return self._max_bytes is not None and self.size_bytes > self._max_bytes

    def release(self, owner: Hashable) -> None:
        """Drops the programs that no other owner uses."""
        for key, entry in list(self._entries.items()):
            entry.owners.discard(owner)
            if not entry.owners:
                del self._entries[key]

    def clear(self) -> list[tuple[Program, set]]:
        """Drops everything; returns it."""
        dropped = [(entry.program, entry.owners) for entry in self._entries.values()]
        self._entries.clear()
        return dropped

    def owned_by(self, owner: Hashable) -> int:
        return sum(owner in entry.owners for entry in self._entries.values())

    @property
    def size_bytes(self) -> int:
        return sum(entry.program.size_bytes for entry in self._entries.values())

    def __len__(self) -> int:
        return len(self._entries)
