"""`builds`: the builds that are in Python now, which jobs in the background leave alone."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Any

from stepcache._changes import Undoing
from stepcache._process_hooks import rare_collections


class Builds:
    """The builds that are in Python now. Workers' jobs wait for them.

    Python runs one thread at a time, so a job beside a trace would make it as much longer.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._in_python: set[object] = set()
        self._latest = 0.0
        self._thread = threading.local()
        self._none = threading.Event()
        self._none.set()

    def _of_thread(self) -> tuple[object, ...]:
        return getattr(self._thread, "builds", ())

    def _enter(self, build: object) -> None:
        with self._lock:
            self._in_python.add(build)
            self._note()

    def _leave(self, build: object) -> None:
        with self._lock:
            self._in_python.discard(build)
            self._note()

    def _note(self) -> None:
        self._latest = time.perf_counter()
        (self._none.clear if self._in_python else self._none.set)()

    def in_python(self, undoing: Undoing) -> None:
        """A program is looked for and built in this thread until the end of `undoing`."""
        outer, build = self._of_thread(), object()
        undoing.add(setattr, self._thread, "builds", outer)
        undoing.use(rare_collections)
        undoing.add(self._leave, build)
        self._enter(build)
        self._thread.builds = (*outer, build)

    def in_xla(self, undoing: Undoing) -> None:
        """Within `in_python`, XLA compiles, and Python is free, until the end of `undoing`."""
        build = self._of_thread()[-1]
        undoing.add(self._enter, build)
        self._leave(build)

    def are_nested(self) -> bool:
        """Whether this thread builds within a build, as where a signal is handled during one."""
        return len(self._of_thread()) > 1

    def are_quiet(self, seconds: float) -> bool:
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
