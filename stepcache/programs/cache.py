"""`ProgramCache`: where programs are kept and found, one build per key however many callers.

Today there is one tier, memory. Anything that asks for a program asks here.
"""

from __future__ import annotations

import collections
import itertools
import threading
import weakref
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Protocol

from stepcache import jaxcompat
from stepcache.errors import OptionError
from stepcache.programs.build import Program
from stepcache.programs.key import Key
from stepcache.programs.memory import Held, MemoryTier

_numbers = itertools.count(1)


class Owner(Protocol):
    """Whoever uses programs of a cache. A cache holds its owners by weak references.

    Attributes:
        number: from `new_owner_number`.
    """

    number: int

    def lost(self, program: Program, reason: str) -> None:
        """Called, outside the cache's lock, when a program is dropped: "evicted" or "cleared"."""

    def show_use(self) -> None:
        """Called, outside the lock, to have the owner's next calls come through the cache.

        Else a program in constant use, served by a dispatcher, would look unused and be dropped.
        """


def new_owner_number() -> int:
    """A number for an owner, which outlives it in the caches that have to release its programs."""
    return next(_numbers)


@dataclass(frozen=True, slots=True)
class CacheInfo:
    """What a cache holds now, and how often it was asked.

    Attributes:
        programs: programs held.
        max_memory_programs: the bound on them.
        max_bytes: the bound on their size in bytes, or None.
        hits: times a program was found.
        builds: times a program was built.
        evictions: programs that made room for others.
    """

    programs: int
    max_memory_programs: int
    max_bytes: int | None
    hits: int
    builds: int
    evictions: int


class ProgramCache:
    """Keeps compiled programs, least recently used first out.

    Args:
        max_bytes: bound on the bytes of the programs in memory; None for no bound. The size of a
            program is that of its generated code, or of its optimized HLO where the platform does
            not tell (CPU).
        max_memory_programs: bound on the number of programs in memory.

    Raises:
        OptionError: a bound that is not positive.

    A cache may serve any number of sessions and threads. For one key there is one build: callers
    that come while it runs wait for it. A build that fails is not cached, and whoever waited for it
    tries again. The programs of a step leave with the step.
    """

    def __init__(self, *, max_bytes: int | None = None, max_memory_programs: int = 4096):
        for name, bound in (
            ("max_bytes", max_bytes),
            ("max_memory_programs", max_memory_programs),
        ):
            if bound is not None and bound < 1:
                raise OptionError(f"{name} must be positive", where="ProgramCache", got=repr(bound))
        self.number = next(_numbers)
        self._bounds = (max_memory_programs, max_bytes)
        self._memory = MemoryTier(max_memory_programs, max_bytes)
        self._lock = threading.Lock()
        self._building: dict[Key, tuple[threading.Event, int]] = {}
        self._released: collections.deque[int] = collections.deque()
        self._hits = self._builds = self._evictions = 0
        self._cleared_with_jax = jaxcompat.call_on_clear_caches(self.clear)

    def get(self, key: Key, owner: Owner) -> Program | None:
        """The program of `key`, if it is there."""
        with self._lock:
            self._forget_released()
            return self._get(key, owner)

    def _get(self, key: Key, owner: Owner) -> Program | None:
        program = self._memory.get(key, owner.number, weakref.ref(owner))
        self._hits += program is not None
        return program

    def peek(self, key: Key) -> Program | None:
        """The program of `key`; asking leaves no trace."""
        with self._lock:
            return self._memory.peek(key)

    def get_or_build(
        self, key: Key, owner: Owner, build: Callable[[], Program]
    ) -> tuple[Program, bool]:
        """The program of `key`, built by this caller or by another one where it is not there.

        Returns:
            The program, and whether this caller built it.
        """
        while True:
            with self._lock:
                self._forget_released()
                program = self._get(key, owner)
                if program is not None:
                    return program, False
                pending, builder = self._building.get(key, (None, None))
                if pending is None:
                    done = threading.Event()
                    self._building[key] = (done, threading.get_ident())
                    break
            if builder == threading.get_ident():  # The step calls itself while it is traced.
                return build(), True
            pending.wait()
        evicted: list[Held] = []
        doubted = None
        try:
            program = build()
            with self._lock:
                self._builds += 1
                evicted, doubted = self._memory.put(key, program, owner.number, weakref.ref(owner))
                self._evictions += len(evicted)
        finally:
            with self._lock:
                del self._building[key]
            done.set()
        _tell_lost(evicted, "evicted")
        if doubted is not None:
            for each in _owners(doubted):
                each.show_use()
        return program, True

    def release(self, owner_number: int) -> None:
        """Drops the programs that only this owner uses. Finalizers may call it at any time."""
        self._released.append(owner_number)
        if self._lock.acquire(blocking=False):
            try:
                self._forget_released()
            finally:
                self._lock.release()

    def _forget_released(self) -> None:
        while self._released:
            self._memory.release(self._released.popleft())

    def clear(self) -> None:
        """Drops all programs, as `jax.clear_caches()` does. Steps build them anew."""
        with self._lock:
            dropped = self._memory.clear()
        _tell_lost(dropped, "cleared")

    def programs_of(self, owner: Owner) -> int:
        """How many programs of the cache `owner` uses."""
        with self._lock:
            self._forget_released()
            return self._memory.owned_by(owner.number)

    def info(self) -> CacheInfo:
        """What the cache holds, and what it has done."""
        with self._lock:
            self._forget_released()
            counts = (self._hits, self._builds, self._evictions)
            return CacheInfo(len(self._memory), *self._bounds, *counts)

    def __repr__(self) -> str:
        info = self.info()
        return f"ProgramCache({info.programs} of at most {info.max_memory_programs} programs)"


def _owners(held: Held) -> Iterator[Owner]:
    """Those owners of a program that are still there."""
    for reference in list(held.owners.values()):
        owner = reference()
        if owner is not None:
            yield owner


def _tell_lost(dropped: Iterable[Held], reason: str) -> None:
    for held in dropped:
        for owner in _owners(held):
            owner.lost(held.program, reason)
