"""The run log: what each run built and loaded, kept beside the programs.

Each process has a file, each event a line of JSON; what it moved is in another file, of the same
name (`run_activity.py`). The log explains runs; it never decides which program serves a call.
"""

from __future__ import annotations

import contextlib
import functools
import json
import logging
import os
import re
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import NamedTuple

from stepcache.link.plain import fields_of, record_of
from stepcache.storage.private_files import listed, remove
from stepcache.storage.run_activity import Activity, activity_log, read_activity

_RUNS_KEPT, _ROWS_A_RUN = 64, 2_000
_NEEDED = frozenset("event time script step label".split())

_log = logging.getLogger("stepcache")

import_seconds = 0.0
"""What importing stepcache took, and JAX with it if it was the first to ask for it."""


@dataclass(slots=True)
class Row:
    """One thing that happened to a program."""

    event: str  # "compiled", or "loaded" (traced, but not compiled).
    time: float  # Seconds since the epoch.
    script: str  # Name of the main program's file.
    step: str  # Name of the step.
    label: str  # File and name of the step.
    program: str = ""  # Digest of the program.
    # Where what was loaded came from: "memory", "preloaded", "disk", "remote" or "rank N".
    source: str = ""
    # Duration of each stage: "import" (in the first row of a run), "trace", "lower", "load",
    # "remote", "wait", "compile"; in a pod also "agree" and "give".
    seconds: dict[str, float] = field(default_factory=dict)
    reason: str = ""  # Why the call missed.
    # Part, path, before and after of each change since an earlier run.
    changes: list[list[str]] = field(default_factory=list)
    not_stored: str = ""  # Why the program is not kept for later runs.
    rank: int = 0  # Index of the process in its pod.
    processes: int = 1  # Number of processes of the pod.
    number: int = 0  # 1 for the first miss of the step; 0 where it is no miss, or unknown.
    called_time: float = 0.0  # Time of the call that missed, in seconds since the epoch.
    advice: list[str] = field(default_factory=list)  # Hints for the user.


class Logged(NamedTuple):
    """The log of one process."""

    name: str  # Name of its file, which begins with the time of its first row.
    rows: list[Row]  # In the order in which they were written; never empty.
    activity: Activity | None  # What it moved and held; None if that is unknown.


@functools.cache  # At the end of the process `__main__` may be gone.
def script_name() -> str:
    """What to call the main program of this process."""
    path = getattr(sys.modules.get("__main__"), "__file__", None)
    return Path(path).name if path else "<interactive>"


class RunLog:
    """The runs that used one directory of programs, with a file for each."""

    def __init__(
        self, directory: Path, writable: bool = True, clock: Callable[[], float] = time.time
    ):
        self.directory = directory
        self.clock = clock
        script_name()
        self._writable = writable
        self._lock = threading.Lock()
        self._pid = os.getpid()
        self.name = self._new_name()  # Of the file of this run.
        self._rows = 0

    def _new_name(self) -> str:
        now = self.clock()
        stamp = time.strftime("%Y%m%dT%H%M%S", time.gmtime(now)) + f"{now % 1:.6f}"[1:]
        script = re.sub(r"[^A-Za-z0-9.]", "_", script_name())[:40]
        return f"{stamp}-{script}-{os.getpid()}-{os.urandom(3).hex()}.jsonl"

    def add(self, *rows: Row) -> None:
        """Appends rows; a directory that cannot be written loses them."""
        with self._lock:
            if os.getpid() != self._pid:  # A forked child is another run.
                self._pid, self.name, self._rows = os.getpid(), self._new_name(), 0
            if self._rows == 0:
                first = {"import": round(import_seconds, 4), **rows[0].seconds}
                rows = (replace(rows[0], seconds=first), *rows[1:])
            if not self._writable or self._rows >= _ROWS_A_RUN:
                return
            try:
                self._append("".join(map(_line, rows)).encode())
                self._rows += len(rows)
            except OSError as error:
                self._writable = False
                _log.info("stepcache no longer writes its run log: %s", error)

    def _append(self, lines: bytes) -> None:
        if self._rows == 0:
            self.directory.mkdir(mode=0o700, parents=True, exist_ok=True)
            for old in self._files()[: -_RUNS_KEPT + 1]:
                remove(old)
                remove(self._activity_file(old.name))
            activity_log.write_to(self._activity_file(self.name))
        flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND
        with os.fdopen(os.open(self.directory / self.name, flags, 0o600), "wb", 0) as file:
            file.write(lines)

    def _files(self) -> list[Path]:
        return sorted(path for path in listed(self.directory) if path.suffix == ".jsonl")

    def _activity_file(self, name: str) -> Path:
        return self.directory.with_name("activity") / f"{name.removesuffix('.jsonl')}.json"

    def runs(self) -> Iterator[Logged]:
        """The logs of all processes, this one's too, the latest first."""
        for path in reversed(self._files()):
            rows = list(_read(path))
            if rows:
                yield Logged(path.stem, rows, read_activity(self._activity_file(path.name)))


def _line(row: Row) -> str:
    """A row as it is written, without fields that are empty: readers give them their defaults."""
    said = {name: value for name, value in fields_of(row).items() if value or name in _NEEDED}
    return f"{json.dumps(said)}\n"


def _read(path: Path) -> Iterator[Row]:
    """The rows of a file; a line that is torn or of another version is passed over."""
    try:
        lines = path.read_bytes().splitlines()
    except OSError:
        return
    for line in lines:
        with contextlib.suppress(ValueError, RecursionError):
            yield record_of(Row, json.loads(line))
