"""What a process moves, and the variables that it holds, in a small file beside its run log.

A listener adds up the `Moved` events in a bounded number of buckets of time, which get wider as the
run gets longer. Variables and tables are asked for their counts when the file is written.
A call that JAX's dispatcher serves does nothing of this.
"""

from __future__ import annotations

import collections
import contextlib
import json
import os
import threading
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from stepcache.events import Moved, recorder
from stepcache.link.plain import record_of
from stepcache.storage.private_files import replace_file
from stepcache.weak_objects import WeakObjects

_BUCKETS, _FIRST_WIDTH_SECONDS = 128, 0.01
_SERIES, _VARIABLES, _MAX_BYTES = 24, 256, 1 << 20
_OTHERS = "(others)"
_FIRST_WAIT_SECONDS, _LONGEST_WAIT_SECONDS = 0.5, 10.0


@dataclass(slots=True)
class Series:
    """What one step, or one object, moved over one link."""

    mover: str  # Name of the step; of variables for their methods.
    link: str  # The link that the bytes crossed.
    transfers: int  # Number of calls that moved something.
    size_bytes: int  # Sum of what they moved.
    # Index of each bucket in which something moved, with the number of calls and their bytes.
    buckets: list[list[int]]


@dataclass(slots=True)
class Held:
    """Variables, or a table."""

    name: str  # Their name.
    version: int  # Number of writes.
    size_bytes: int  # Size of the value, however many devices hold it.
    placement: str  # Where the master copy is.
    read: str = ""  # The read policy, where it is not the default.
    reads: int = 0  # Reads of the value, or of rows, from the master copy or a copy of it.
    hits: int = 0  # Those of them that a copy served.


@dataclass(slots=True)
class Activity:
    """What a process has moved, and what it held."""

    started_time: float  # Time at which the first bucket begins, in seconds since the epoch.
    written_time: float  # Time of the counts, likewise.
    ended: bool  # Whether the process has ended; False also where it was killed.
    width_seconds: float  # Duration of a bucket.
    moved: list[Series]  # Bytes over time, by step and link.
    held: list[Held]  # Variables and tables; of many, the latest.


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
        self._is_waiting, self._wait_seconds = False, _FIRST_WAIT_SECONDS
        self._ended, self._started, self._width = False, self._clock(), _FIRST_WIDTH_SECONDS
        self._moved: dict[tuple[str, str], dict[int, list[int]]] = {}
        self._holders: WeakObjects[Holder] = WeakObjects()
        # Appended to by the garbage collector, and so without the lock.
        self._gone: collections.deque[Held] = collections.deque(maxlen=_VARIABLES)
        self._files: set[Path] = set()
        self._last: Activity | None = None

    def _here(self) -> ActivityLog:
        if os.getpid() != self._pid:
            self._begin()  # A forked child is another run.
        return self

    def __call__(self, event: Moved) -> None:
        """Counts what was moved; a subscriber of the recorder."""
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

    def write_to(self, file: Path) -> None:
        """Writes what there is to a file too: soon, then while it changes, and at the end."""
        self._here()._files.add(file)
        with contextlib.suppress(OSError):  # Once: a directory that was removed stays so.
            file.parent.mkdir(mode=0o700, exist_ok=True)
        self._last = None
        self._write_soon()

    def _write_soon(self) -> None:
        if self._files and not self._is_waiting and not self._ended:
            timer = threading.Timer(self._wait_seconds, self._write)
            timer.daemon, timer.name = True, "stepcache activity"
            with contextlib.suppress(RuntimeError, MemoryError):  # No thread can be started now.
                timer.start()
                self._is_waiting = True

    def finish(self) -> None:
        """Writes the files for the last time, at the end of the process."""
        self._here()._ended = True
        with contextlib.suppress(Exception):
            self._write()

    def _write(self) -> None:
        self._is_waiting, found = False, self.activity()
        self._wait_seconds = min(2 * self._wait_seconds, _LONGEST_WAIT_SECONDS)
        if found == self._last:
            return
        self._last = found
        text = json.dumps(asdict(replace(found, written_time=round(self._clock(), 3))))
        for file in list(self._files):
            try:
                replace_file(file, text)
            except OSError:
                self._files.discard(file)  # The directory was removed, or the disk is full.
        self._write_soon()

    def activity(self) -> Activity:
        """The counts of now, with 0 as their time."""
        self._here()
        held = [*self._gone, *(each._held() for each in self._holders)][-_VARIABLES:]
        with self._lock:
            moved = []
            for key, buckets in self._moved.items():
                calls, sizes = zip(*buckets.values(), strict=True)
                rows = [[index, *bucket] for index, bucket in buckets.items()]
                moved.append(Series(*key, sum(calls), sum(sizes), rows))
        return Activity(self._started, 0.0, self._ended, self._width, moved, held)


def read_activity(file: Path) -> Activity | None:
    """Reads a file. Returns None if there is none, or it is no record of an activity."""
    try:
        with file.open("rb") as opened:
            found = json.loads(opened.read(_MAX_BYTES))
        for name, kind in (("moved", Series), ("held", Held)):
            found[name] = [record_of(kind, each) for each in found[name]]
        activity = record_of(Activity, found)
    except (OSError, ValueError, TypeError, KeyError, RecursionError):
        return None
    buckets = (bucket for each in activity.moved for bucket in each.buckets)
    is_whole = activity.width_seconds > 0 and all(len(bucket) == 3 for bucket in buckets)
    return activity if is_whole else None


activity_log = ActivityLog()
recorder.subscribe(activity_log, Moved)
