"""Programs in the memory of this process, least recently used first out.

A hit that JAX's C++ dispatcher serves is not seen here. So when memory is full, the oldest programs
are put on probation: their owners send the next call through the cache, where its use is seen, and
only what is not used until its turn comes is dropped. This is the second chance of the clock
algorithm (Corbató, 1968).

Not thread-safe by itself; `cache.py` holds the lock.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass, field
from itertools import islice
from typing import Protocol

from stepcache.calls.key import Key
from stepcache.programs.build import Program
from stepcache.weak_objects import WeakObjects

_FILL_AT_PROBATION = 0.75


class Owner(Protocol):
    """A user of a cache's programs. A cache holds its owners by weak references."""

    number: int  # Of the function that programs are kept for. All owners of a program share it.

    def lost(self, program: Program, reason: str) -> None:
        """Called, outside the cache's lock, when a program is dropped: "evicted" or "cleared"."""

    def show_use(self) -> None:
        """Called, outside the lock, to send the owner's next calls through the cache.

        Else a program in constant use, served by a dispatcher, would look unused and be dropped.
        """


@dataclass(eq=False, repr=False, slots=True)
class Held:
    """A program in the memory."""

    program: Program
    size_bytes: int  # 0 where the memory is not bounded by bytes.
    number: int  # Of its owners.
    owners: WeakObjects[Owner] = field(default_factory=WeakObjects)
    on_probation: bool = False  # Its owners have been asked to show the next use of it.


class MemoryPrograms:
    """Programs by key, bounded by count and by bytes.

    Args:
        max_programs: at most so many programs.
        max_bytes: at most so many bytes of programs (`Program.size_bytes`); None for no bound. A
            single program larger than that is still held, alone.
    """

    def __init__(self, max_programs: int, max_bytes: int | None):
        self._max_programs = max_programs
        self._max_bytes = max_bytes
        self._held: OrderedDict[Key, Held] = OrderedDict()
        self._size_bytes = 0

    def get(self, key: Key, owner: Owner) -> Program | None:
        """The program of `key`, now the most recently used, and used by `owner` too."""
        held = self._held.get(key)
        if held is None:
            return None
        self._held.move_to_end(key)
        held.on_probation = False
        held.owners.add(owner)
        return held.program

    def peek(self, key: Key) -> Program | None:
        """The program of `key`, without marking it as used."""
        held = self._held.get(key)
        return held.program if held else None

    def put(self, key: Key, program: Program, owner: Owner) -> tuple[list[Held], list[Held]]:
        """Adds a program.

        Returns:
            The programs that made room for it, and those, one at most, now put on probation.
        """
        size_bytes = 0 if self._max_bytes is None else program.size_bytes
        self._held[key] = held = Held(program, size_bytes, owner.number)
        held.owners.add(owner)
        self._size_bytes += size_bytes
        evicted = []
        while len(self._held) > 1 and self._fill() > 1:
            evicted.append(self._drop(next(iter(self._held))))
        doubted = []
        if self._fill() > _FILL_AT_PROBATION:
            older = (held for held in self._held.values() if held.program is not program)
            doubted = list(islice((held for held in older if not held.on_probation), 1))
            for held in doubted:
                held.on_probation = True
        return evicted, doubted

    def _fill(self) -> float:
        by_count = len(self._held) / self._max_programs
        if self._max_bytes is None:
            return by_count
        return max(by_count, self._size_bytes / self._max_bytes)

    def _drop(self, key: Key) -> Held:
        held = self._held.pop(key)
        self._size_bytes -= held.size_bytes
        return held

    def release(self, number: int) -> None:
        """Drops the programs that are kept for this number."""
        for key in [key for key, held in self._held.items() if held.number == number]:
            self._drop(key)

    def clear(self) -> list[Held]:
        """Drops everything; returns it."""
        return [self._drop(key) for key in list(self._held)]

    def owned_by(self, number: int) -> int:
        """How many programs are kept for this number."""
        return sum(held.number == number for held in self._held.values())

    def __len__(self) -> int:
        return len(self._held)
