"""What a process moves, and the variables that it holds, in a small file beside its run log.

A listener adds up the `Moved` events in a bounded number of buckets of time, which get wider as the
run gets longer. Variables and tables are asked for their counts when the file is written.
A call that JAX's dispatcher serves does nothing of this.
"""

from __future__ import annotations

import collections
import contextlib
import json
import logging
import os
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from stepcache.events import Event, Moved, recorder
from stepcache.storage.plain import fields_of, record_of
from stepcache.weak_objects import WeakObjects

_BUCKETS, _FIRST_WIDTH_SECONDS = 128, 0.01
_SERIES, _VARIABLES, _FILES, _LETTERS = 24, 256, 8, 200
_OTHERS = "(others)"
_FIRST_WAIT_SECONDS, _LONGEST_WAIT_SECONDS = 0.5, 10.0
_MAX_BYTES = 1 << 20

_log = logging.getLogger("stepcache")


@dataclass(frozen=True, slots=True)
class Series:
    """What one step, or one object, moved over one link."""

    mover: str  # Name of the step; of variables for their methods.
    link: str  # The link that the bytes crossed.
    transfers: int  # Number of calls that moved something.
    size_bytes: int  # Sum of what they moved.
    # Index of each bucket in which something moved, with the number of calls and their bytes.
    buckets: list[list[int]]


@dataclass(frozen=True, slots=True)
class Held:
    """Variables, or a table."""

    name: str  # Their name.
    version: int  # Number of writes.
    size_bytes: int  # Size of the value, however many devices hold it.
    placement: str  # Where the master copy is.
    read: str = ""  # The read policy, where it is not the default.
    reads: int = 0  # Reads of the value, or of rows, from the master copy or a copy of it.
    hits: int = 0  # Those of them that a copy served.


@dataclass(frozen=True, slots=True)
class Period:
    """When the counts of a process were taken."""

    started_time: float  # Time at which the first bucket begins, in seconds since the epoch.
    written_time: float  # Time of the counts, likewise.
    ended: bool  # Whether the process has ended; False also where it was killed.
    width_seconds: float  # Duration of a bucket.
    more_held: int = 0  # Number of variables whose counts were dropped.


@dataclass(frozen=True, slots=True)
class Activity:
    """What a process has moved, and what it held."""

    period: Period  # When the counts were taken.
    moved: tuple[Series, ...]  # Bytes over time, by step and link.
    held: tuple[Held, ...]  # Variables and tables.


class Holder:
    """Base of variables and tables. Has their last counts kept when they are deleted."""

    def _held(self) -> Held:
        raise NotImplementedError

    def __del__(self) -> None:
        try:  # noqa: SIM105  (At the end of Python, `contextlib` may be gone before.)
            activity_log.gone(self._held())
        except Exception:  # Or it was never made.
            pass


class ActivityLog:
    """Adds up what this process does, and writes it to the files of its run logs."""

    def __init__(self, clock: Callable[[], float] = time.time):
        self._clock = clock
        self._begin()

    def _begin(self) -> None:
        self._pid, self._lock = os.getpid(), threading.Lock()
        self._ended = threading.Event()
        self._thread: threading.Thread | None = None
        self._started, self._width = self._clock(), _FIRST_WIDTH_SECONDS
        self._moved: dict[tuple[str, str], dict[int, list[int]]] = {}
        self._holders: WeakObjects[Holder] = WeakObjects()
        # Appended to by the garbage collector, and so without the lock.
        self._gone: collections.deque[Held] = collections.deque(maxlen=_VARIABLES)
        self._gone_count = 0
        self._files: dict[Path, None] = {}
        self._last: Activity | None = None

    def _here(self) -> ActivityLog:
        if os.getpid() != self._pid:
            self._begin()  # A forked child is another run.
        return self

    def __call__(self, event: Event) -> None:
        """Counts a `Moved` event; a subscriber of the recorder."""
        if type(event) is not Moved:
            return
        self._here()
        with self._lock:
            index = self._index()
            for link, size in event.link_bytes:
                key = (event.step, link)
                if key not in self._moved and len(self._moved) >= _SERIES:
                    key = (_OTHERS, link)
                bucket = self._moved.setdefault(key, {}).setdefault(index, [0, 0])
                bucket[0] += 1
                bucket[1] += size
        self._write_soon()

    def _index(self) -> int:
        """Returns the bucket of this moment. Joins pairs of buckets until there is one."""
        seconds = max(0.0, self._clock() - self._started)
        while seconds >= self._width * _BUCKETS:
            self._width *= 2
            for key, buckets in self._moved.items():
                joined: dict[int, list[int]] = {}
                for index, (count, size) in buckets.items():
                    both = joined.setdefault(index // 2, [0, 0])
                    both[0] += count
                    both[1] += size
                self._moved[key] = joined
        return int(seconds / self._width)

    def watch(self, holder: Holder) -> None:
        """Has variables, or a table, in the file from now on."""
        self._here()._holders.add(holder)

    def gone(self, held: Held) -> None:
        """Keeps the counts of variables that are about to be deleted."""
        self._here()._gone.append(held)
        self._gone_count += 1

    def write_to(self, file: Path) -> None:
        """Writes what there is to a file too: soon, then while it changes, and at the end."""
        self._here()
        with contextlib.suppress(OSError):  # Once: a directory that was removed stays so.
            file.parent.mkdir(mode=0o700, exist_ok=True)
        with self._lock:
            self._files[file] = None
            for old in list(self._files)[:-_FILES]:
                del self._files[old]
            self._last = None
        self._write_soon()

    def _write_soon(self) -> None:
        if self._files and self._thread is None and not self._ended.is_set():
            with self._lock:
                if self._thread is not None:
                    return
                name = "stepcache activity"
                self._thread = threading.Thread(target=self._run, name=name, daemon=True)
            try:
                self._thread.start()
            except (RuntimeError, MemoryError):  # No thread can be started now.
                self._thread = None

    def _run(self) -> None:
        wait = _FIRST_WAIT_SECONDS
        try:
            while not self._ended.wait(wait) and self._write():
                wait = min(2 * wait, _LONGEST_WAIT_SECONDS)
        except Exception:
            _log.info("stepcache does not record the transfers of this process", exc_info=True)
        finally:
            self._thread = None

    def finish(self) -> None:
        """Writes the files for the last time, at the end of the process."""
        self._here()._ended.set()
        with contextlib.suppress(Exception):
            self._write()

    def _write(self) -> bool:
        """Writes the files. Returns whether anything has changed since the last time."""
        found, now = self.activity(), round(self._clock(), 3)
        with self._lock:
            if found == self._last or not self._files:
                return False
            self._last, files = found, list(self._files)
        plain = {"period": _plain(replace(found.period, written_time=now))}
        plain |= {name: list(map(_plain, getattr(found, name))) for name in ("moved", "held")}
        text = json.dumps(plain)
        for file in files:
            try:
                temporary = file.with_suffix(".new")
                flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW
                with os.fdopen(os.open(temporary, flags, 0o600), "w", encoding="utf-8") as opened:
                    opened.write(text)
                temporary.replace(file)
            except OSError:
                self._files.pop(file, None)  # The directory was removed, or the disk is full.
        return True

    def activity(self) -> Activity:
        """The counts of now, with 0 as their time."""
        self._here()
        held = [*self._gone, *(each._held() for each in self._holders)]
        more = max(0, self._gone_count - len(self._gone)) + len(held[:-_VARIABLES])
        with self._lock:
            moved = []
            for key, buckets in self._moved.items():
                calls, sizes = zip(*buckets.values(), strict=True)
                rows = [[index, *bucket] for index, bucket in buckets.items()]
                moved.append(Series(*key, sum(calls), sum(sizes), rows))
            period = Period(self._started, 0.0, self._ended.is_set(), self._width, more)
        return Activity(period, tuple(moved), tuple(held[-_VARIABLES:]))


def _plain(record: Any) -> dict[str, Any]:
    """The fields of a record; texts only as far as they are of use."""
    found = fields_of(record).items()
    return {name: v[:_LETTERS] if isinstance(v, str) else v for name, v in found}


def read_activity(file: Path) -> Activity | None:
    """Reads a file. Returns None if there is none, or it is no record of an activity."""
    try:
        with file.open("rb") as opened:
            found = json.loads(opened.read(_MAX_BYTES))
        period = record_of(Period, found["period"])
        moved = tuple(record_of(Series, each) for each in found["moved"])
        held = tuple(record_of(Held, each) for each in found["held"])
    except (OSError, ValueError, TypeError, KeyError, RecursionError):
        return None
    buckets = (bucket for each in moved for bucket in each.buckets)
    if period.width_seconds <= 0 or any(len(bucket) != 3 for bucket in buckets):
        return None
    return Activity(period, moved, held)


activity_log = ActivityLog()
recorder.subscribe(activity_log)
finish = activity_log.finish
