"""`ProgramCache`: where programs are kept and found, one build per key however many callers.

A call looks for its program in memory first. On a miss the first caller resolves it; other callers
that need the same program wait.
"""

from __future__ import annotations

import collections
import dataclasses
import functools
import itertools
import os
import threading
import weakref
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from numbers import Real
from typing import Any

from stepcache import jaxcompat
from stepcache.calls.key import Key
from stepcache.calls.step_spec import StepSpec
from stepcache.errors import OptionError
from stepcache.programs.build import Program
from stepcache.programs.memory import Held, MemoryPrograms, Owner
from stepcache.programs.opening import (
    DEFAULT_DISK_BYTES,
    FROM_ENVIRONMENT,
    USER_DIRECTORY,
    open_for,
    place_of,
)
from stepcache.programs.store import ProgramStore
from stepcache.weak_objects import WeakObjects

_numbers = itertools.count(1)
_TRUST, _PROVE_EVERY = "STEPCACHE_TRUST", "STEPCACHE_PROVE_EVERY"


@dataclass(frozen=True, slots=True)
class CacheInfo:
    """Size and counters of a program cache in memory."""

    programs: int  # Number of programs in memory.
    max_memory_programs: int  # The limit of that number.
    max_bytes: int | None  # The limit of their size in bytes; None for none.
    hits: int  # Lookups that found a program.
    builds: int  # Programs built.
    evictions: int  # Programs dropped to make room for others.


class ProgramCache:
    """Keeps compiled programs in memory and on disk. Evicts the least recently used first.

    Args:
        directory: where programs are stored for later processes. By default `STEPCACHE_DIR`, or a
            directory in the user's cache directory. None, or `STEPCACHE_DIR=off`, keeps programs in
            memory only. Only the user may write to it, because loading an executable runs code.
        max_bytes: limit of the size of all programs, applied to memory and to disk. By default
            there is none for memory, and 10 GiB for disk. In memory the generated code counts, or
            the optimized HLO if the platform does not report that (CPU).
        max_memory_programs: limit of the number of programs in memory.
        min_build_seconds: programs that took less time to trace, lower and compile are not stored.
        remote: a cache that many machines share: "s3://BUCKET/PREFIX", "gs://BUCKET/PREFIX" or
            "file:///DIRECTORY". Programs that the directory lacks are loaded from there, and new
            programs are written there in the background. By default `STEPCACHE_REMOTE`; "off" uses
            none. docs/shared-cache.md describes its key and its cost.
        trust: a KEY that vouches that a step with the same signature, mesh and settings is the same
            program: name it after code, configuration and all values that steps capture. Steps are
            traced in its first start, and run their exports in later ones. By default
            `STEPCACHE_TRUST`; "off" traces. docs/restarts.md says what a wrong KEY does.
        prove_every: so often, in starts, steps are traced nevertheless, and compared with what the
            KEY's first start traced. `STEPCACHE_PROVE_EVERY` comes before it.

    Raises:
        OptionError: a limit that is not positive, a `min_build_seconds` that is not a number, a
            malformed `remote`, a KEY that is no text, or an option that is gone.
        CacheDirectoryError: `directory` is a URL, or others can write to it; or `remote` has no
            key that can be trusted.

    A cache may serve any number of sessions, threads and processes. A process builds the program of
    a key once: other callers wait for that build, and try again if it fails. So do processes that
    need the same program at once, over one directory. A step's programs are dropped from memory
    when its function is freed.

    A stored executable runs only after this process has traced and lowered the step to the very
    module that it was compiled from, as with JAX's persistent cache; with `trust`, the step's
    export.
    """

    def __init__(
        self,
        directory: str | os.PathLike | None = USER_DIRECTORY,
        *,
        max_bytes: int | None = None,
        max_memory_programs: int = 4096,
        min_build_seconds: float = 0.0,
        remote: str | None = None,
        trust: str | None = None,
        prove_every: int = 20,
        **gone: Any,
    ):
        for name in gone:
            if name not in ("verify", "check_every"):
                raise OptionError(f"ProgramCache has no option {name!r}", where="ProgramCache")
            what = f"{name} is gone: each program is traced before it runs, so nothing is to verify"
            raise OptionError(what, where="ProgramCache", hint=f"leave out {name}")
        bounds = {"max_bytes": max_bytes, "max_memory_programs": max_memory_programs}
        for name, bound in (bounds | {"prove_every": prove_every}).items():
            if bound is not None and not (isinstance(bound, Real) and float(bound) >= 1):
                what, got = f"{name} must be a positive number", repr(bound)
                raise OptionError(what, where="ProgramCache", got=got)
        if not isinstance(min_build_seconds, Real):
            what, got = "min_build_seconds is a number", repr(min_build_seconds)
            raise OptionError(what, where="ProgramCache", got=got)
        for option, value in ("remote", remote), ("trust", trust):
            if directory is None and str(value or "off").lower() != "off":
                what, got = f"{option} needs a directory, for what it loads", f"{option}={value!r}"
                raise OptionError(what, where="ProgramCache(directory=None)", got=got)
        if not isinstance(trust, str | None):
            raise OptionError("trust is a text", where="ProgramCache", got=repr(trust))
        self._trust, self._prove_every = trust, prove_every
        self.trusted: Any = None  # The `Trust` of a KEY, if there is one, once the store is open.
        self.number = next(_numbers)
        self._bounds = (max_memory_programs, max_bytes)
        self._memory = MemoryPrograms(*self._bounds)
        self._lock = threading.Lock()
        # The programs in memory by their module and devices, for steps that are made anew.
        self.by_module: weakref.WeakValueDictionary[tuple, Program] = weakref.WeakValueDictionary()
        self._building: dict[Key, tuple[threading.Lock, int]] = {}
        self._released: collections.deque[int] = collections.deque()
        self._hits = self._builds = self._evictions = 0
        self._cleared_with_jax = jaxcompat.call_on_clear_caches(self.clear)
        self._opening = threading.Lock()
        self._store: ProgramStore | None = None
        self._is_open = False
        self._open = functools.partial(
            open_for,
            directory,
            max_bytes or DEFAULT_DISK_BYTES,
            min_build_seconds,
            FROM_ENVIRONMENT if remote is None else place_of(remote, "ProgramCache(remote)"),
        )
        if directory is not USER_DIRECTORY:
            self.store()

    def store(self) -> ProgramStore | None:
        """The programs outside this process, opened at the first use; None for none."""
        if not self._is_open:
            with self._opening:
                if not self._is_open:
                    if (store := self._open()) is not None and self.trust:
                        from stepcache.programs.trust import Trust  # Few processes do.

                        starts = os.environ.get(_PROVE_EVERY) or str(self._prove_every)
                        if not starts.isdecimal() or int(starts) < 1:
                            what = f"prove_every, or {_PROVE_EVERY}, is a number of starts"
                            raise OptionError(what, where="ProgramCache", got=starts)
                        self.trusted = Trust(self.trust, int(starts), store)
                    self._store, self._is_open = store, True
        return self._store

    @property
    def trust(self) -> str:
        """The KEY that vouches for steps; empty for none."""
        key = os.environ.get(_TRUST, "") if self._trust is None else self._trust
        return "" if key.lower() == "off" else key

    def bound_memory(self, max_bytes: int) -> None:
        """Limits the size of the programs in memory, and not on disk, while there are none."""
        self._bounds = self._bounds[0], max_bytes
        self._memory = MemoryPrograms(*self._bounds)

    def flush(self) -> None:
        """Waits until all programs built so far are on disk, as the end of the process does."""
        if self._store is not None:
            self._store.flush()

    def get(self, key: Key, owner: Owner) -> Program | None:
        """The program of `key`, if it is there."""
        with self._lock:
            return self._get(key, owner)

    def _get(self, key: Key, owner: Owner) -> Program | None:
        self._forget_released()
        program = self._memory.get(key, owner)
        self._hits += program is not None
        return program

    def peek(self, key: Key) -> Program | None:
        """The program of `key`, without marking it as used."""
        with self._lock:
            return self._memory.peek(key)

    def get_or_build(
        self, key: Key, owner: Owner, build: Callable[[], Program]
    ) -> tuple[Program, bool]:
        """The program of `key`, built by this caller or by another one where it is not there.

        Returns:
            The program, and whether this caller built it.
        """
        evicted: list[Held] = []
        doubted: list[Held] = []
        thread, building = threading.get_ident(), threading.Lock()
        building.acquire()
        try:  # Before others wait: an interrupt may come at any moment.
            while True:
                with self._lock:
                    program = self._get(key, owner)
                    if program is not None:
                        return program, False
                    others, builder = self._building.get(key, (None, None))
                    if others is None or not others.locked():
                        self._building[key] = (building, thread)
                        break
                if builder == thread:  # The step calls itself while it is traced.
                    return build(), True
                with others:
                    pass  # It is built, or that has failed.
            program = build()
            with self._lock:
                self._builds += 1
                if program.digest:
                    self.by_module[program.digest, program.run.device_order] = program
                made = {key: program}
                settled = program.settled_key
                if settled is not None and self._memory.peek(settled) is None:
                    made = {settled: dataclasses.replace(program, key=settled), key: program}
                for each, of_key in made.items():
                    gone, asked = self._memory.put(each, of_key, owner)
                    evicted += gone
                    doubted += asked
                self._evictions += len(evicted)
        finally:
            building.release()  # In C: no interrupt comes before it.
            with self._lock:
                if self._building.get(key) == (building, thread):
                    del self._building[key]
        _tell_lost(evicted, "evicted")
        for held in doubted:
            for each in held.owners:
                each.show_use()
        return program, True

    def holds_module(self, digest: str) -> bool:
        """Whether a program of a module is in memory."""
        return any(known == digest for known, _ in list(self.by_module))

    def release(self, owner_number: int) -> None:
        """Drops the programs that are kept for this number. Finalizers may call it."""
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
        """Drops all programs from memory, as `jax.clear_caches()` does."""
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


def _tell_lost(dropped: Iterable[Held], reason: str) -> None:
    for held in dropped:
        for owner in held.owners:
            owner.lost(held.program, reason)


_caches: dict[int, WeakObjects[ProgramCache]] = {}
_caching = threading.Lock()


def caches_for(spec: StepSpec, engine: Any) -> WeakObjects[ProgramCache]:
    """The caches that hold programs of a function: these live, as in `jax.jit`, with the function.

    So a step that is made anew over the same function finds what an earlier one built.
    """
    number = spec.identity.number
    with _caching:
        found = _caches.get(number)
        if found is None:
            found = _caches[number] = WeakObjects()
            held_for = spec.fun if spec.identity.shared else engine
            # At exit it would drop each program by itself, of those that the process leaves anyway.
            weakref.finalize(held_for, _release, number).atexit = False
        return found


def _release(number: int) -> None:
    for cache in _caches.pop(number, ()):
        cache.release(number)
