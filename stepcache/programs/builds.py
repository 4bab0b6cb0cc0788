"""`builds`: the builds that are in Python now, which jobs in the background leave alone."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any


class Builds:
    """The builds that are in Python now. Workers' jobs wait for them.

    Python runs one thread at a time, so a job beside a trace would make it as much longer.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._in_python, self._latest = 0, 0.0
        self._thread = threading.local()
        self._none = threading.Event()
        self._none.set()

    def _add(self, number: int) -> None:
        with self._lock:
            self._in_python += number
            self._latest = time.perf_counter()
            if self._in_python:
                self._none.clear()
            else:
                self._none.set()

    @contextlib.contextmanager
    def in_python(self) -> Iterator[None]:
        """Open while a program is looked for and built."""
        outer = getattr(self._thread, "count", 0)
        self._add(1)
        try:
            self._thread.count = outer + 1
            yield
        finally:
            self._thread.count = outer
            self._add(-1)

    @contextlib.contextmanager
    def in_xla(self) -> Iterator[None]:
        """Open, within `in_python`, while XLA compiles and Python is free."""
        self._add(-1)
        try:
            yield
        finally:
            self._add(1)

    def are_nested(self) -> bool:
        """Whether this thread builds within a build, as where a signal is handled during one."""
        return getattr(self._thread, "count", 0) > 1

    def are_quiet(self, seconds: float = 0.0) -> bool:
        """Whether no build has been in Python for some time."""
        return not self._in_python and time.perf_counter() >= self._latest + seconds

    def wait(self, is_over: Callable[[], Any]) -> None:
        """Waits until no build is in Python, but not for long, nor once `is_over` is true."""
        limit = time.perf_counter() + _LONGEST_STAGE_SECONDS
        while not is_over() and time.perf_counter() < limit:
            if self._none.wait(_POLL_SECONDS):
                return


builds = Builds()
_LONGEST_STAGE_SECONDS, _POLL_SECONDS = 2.0, 0.05
