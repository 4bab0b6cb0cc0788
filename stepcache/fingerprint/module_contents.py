"""What there is in the files of installed modules, told without reading files that are known.

To read and hash the sixty files of JAX that a small step leads to takes 3 ms of each process. So
what was found is kept with the state of the file, as Git does it: a file of the same size, inode
and times of change was not written to since.
"""

from __future__ import annotations

import hashlib
import itertools
import logging
import os
import re
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

from stepcache.fingerprint.provenance import file_of_module, state_of_file

Rows = dict[str, list[Any]]
"""By path: size, inode, both times of change in nanoseconds, and the fields of `Content`."""

# A file that was written to since may be written to again within the same tick of its clock.
_SETTLED_NS = 2_000_000_000


class Content(NamedTuple):
    """What there is in a module's file."""

    digest: str
    varying: frozenset[str]  # The globals that its own functions assign.
    written_ns: int = 0  # When it was last changed, in nanoseconds since the epoch.


def content_of(module: str) -> Content:
    """What there is in the file that a module was, or would be, imported from."""
    with _lock:
        if module not in _contents:
            path = getattr(sys.modules.get(module), "__file__", None) or file_of_module(module)
            _contents[module] = _content_of_file(path) if path else _ABSENT
        return _contents[module]


def learn(rows: Rows) -> None:
    """Takes over what an earlier process found; only what is true of the files now is used."""
    with _lock:
        _rows.update(rows)


def found() -> Rows | None:
    """All that is known, if something has been added to it since this was last asked."""
    global _is_new
    with _lock:
        is_new, _is_new = _is_new, False
        return dict(_rows) if is_new else None


def _content_of_file(path: str) -> Content:
    global _is_new
    state = state_of_file(path)
    if state is None:
        return _ABSENT
    known = _rows.get(path)
    if known is not None and tuple(known[:4]) == state:
        return Content(known[4], frozenset(known[5]), max(state[2:]))
    try:
        content = Path(path).read_bytes()
    except OSError:
        return _ABSENT
    varying = sorted(set(_assigned_globals(content))) if path.endswith(".py") else []
    digest = hashlib.sha256(content).hexdigest()[:16] if content else _ABSENT.digest
    if max(state[2:]) < time.time_ns() - _SETTLED_NS and state == state_of_file(path):
        _rows[path], _is_new = [*state, digest, varying], True
    return Content(digest, frozenset(varying), max(state[2:]))


def _assigned_globals(source: bytes) -> Iterator[str]:
    """The names in the `global` statements of a module. They stand at the begin of a line."""
    for statement in _GLOBAL.finditer(source):
        begin = source.rfind(b"\n", 0, statement.start()) + 1
        if not source[begin : statement.start()].strip():
            for name in statement[1].split(b","):
                yield name.strip().decode()


def was_read_after_ns(module: str) -> int:
    """A time, in nanoseconds since the epoch, after which an imported module's file was read.

    When the process began does not say it: a shell may install packages and then become Python,
    and one that forks may have imported modules before.
    """
    if module in _BEFORE_LOGGING:
        return min(PROCESS_BEGAN_NS, _LOGGING_BEGAN_NS)
    return _LOGGING_BEGAN_NS


def _process_began_ns() -> int:
    """When this process began; where the system does not tell, the time of now."""
    try:
        fields = Path("/proc/self/stat").read_text().rpartition(")")[2].split()
        ticks = int(fields[19])  # Since the system began.
        began = _boot_ns() + (ticks + 1) * 1_000_000_000 // os.sysconf("SC_CLK_TCK")
    except (OSError, ValueError, IndexError, AttributeError):
        return time.time_ns()
    return began if ticks else time.time_ns()


def _boot_ns() -> int:
    """When the system began.

    A process may be interrupted between its readings of two clocks; so this is the difference of
    that reading, of several, which took least time.
    """
    readings = []
    for _ in range(5):
        before = time.clock_gettime_ns(time.CLOCK_BOOTTIME)
        now = time.time_ns()
        took = time.clock_gettime_ns(time.CLOCK_BOOTTIME) - before
        readings.append((took, now - before - took // 2))
    return min(readings)[1]


def _logging_began_ns() -> int:
    """When `logging` was imported, which it keeps; if it does not, when the process began."""
    started = getattr(logging, "_startTime", None)
    if isinstance(started, float):  # In seconds; of Python 3.13 in nanoseconds.
        started = int(started * 1e9)
    return started if isinstance(started, int) and started < time.time_ns() else PROCESS_BEGAN_NS


PROCESS_BEGAN_NS = _process_began_ns()
_LOGGING_BEGAN_NS = _logging_began_ns()
_BEFORE_LOGGING = frozenset(itertools.takewhile(lambda name: name != "logging", sys.modules.copy()))
_GLOBAL = re.compile(rb"global ([\w, ]+)")
_ABSENT = Content("absent", frozenset())
_lock = threading.RLock()
_contents: dict[str, Content] = {}
_rows: Rows = {}
_is_new = False
