"""`Worker`: runs jobs in a thread of its own. Programs are stored by one of these."""

from __future__ import annotations

import collections
import contextlib
import logging
import sys
import threading
import time
from collections.abc import Callable
from typing import Any

from stepcache import _process_hooks
from stepcache._changes import Shared
from stepcache.storage import load_markers, run_activity
from stepcache.weak_objects import WeakObjects

_IDLE_SECONDS = 0.5
_LONGEST_TRACE_SECONDS = 2.0  # So long jobs wait for a trace to end, before they run beside it.
_LOOK_SECONDS = 0.02
_STOP_SECONDS = 2.0

_log = logging.getLogger("stepcache")


class _Tracing(Shared):
    """Says for as long as a step is being traced or lowered that workers' jobs are to wait.

    Python runs one thread at a time, so a job beside a trace would make it as much longer. While
    XLA compiles or loads, Python is free.
    """

    def __init__(self) -> None:
        super().__init__()
        self._over = threading.Event()
        self._over.set()

    def _make(self, users: int) -> bool:
        self._over.clear()
        return True

    def _undo(self) -> None:
        self._over.set()

    def reset(self) -> None:
        self._over = threading.Event()
        super().reset()

    def wait_until_over(self, is_urgent: Callable[[], bool]) -> None:
        limit = time.monotonic() + _LONGEST_TRACE_SECONDS
        while not is_urgent() and time.monotonic() < limit:
            if self._over.wait(_LOOK_SECONDS):
                break


tracing = _Tracing()


class Job:
    """A job of a worker."""

    def __init__(self, work: Callable[[], Any]):
        self.work = work
        self.outcome: Any = None  # What it returned; None before that, and where it raised.
        self.is_over = False  # It has run, or is not going to.


class Worker:
    """Runs jobs one after the other, in a thread that is there while there are jobs.

    A job that raises is logged. At the end of the process the jobs that are left are run, or, with
    `droppable`, dropped.

    Args:
        name: of the thread.
        droppable: whether the process need not wait for its jobs.
        when_idle: called after the last of several jobs that follow each other, and by `flush`.
    """

    def __init__(
        self,
        name: str,
        *,
        droppable: bool = False,
        when_idle: Callable[[], None] = lambda: None,
    ):
        self._name, self.droppable, self._when_idle = name, droppable, when_idle
        self.begin()
        _live.add(self)

    def begin(self) -> None:
        """Has no jobs, and no thread: as it is made, and in a child, where the parent's are not."""
        self._changed = threading.Condition()
        self._jobs: collections.deque[Job] = collections.deque()
        self._running: Job | None = None
        self._thread: threading.Thread | None = None
        self._flushing = 0  # Threads that wait for all jobs.
        self._is_stopping = False

    def submit(self, work: Callable[[], Any]) -> Job:
        """Runs `work` in the background.

        Where no thread can be started, it waits for the next job, for `flush`, or for the end.
        """
        job = Job(work)
        _process_hooks.at_end_of_child(_stop_all)
        with self._changed:
            if not self._is_stopping:
                self._jobs.append(job)
                self._changed.notify_all()
                self._start()
        return job

    def _start(self) -> bool:
        """Starts the thread if it is not there. Returns whether it is."""
        if self._thread is None or not self._thread.is_alive():
            # Not joined by Python's own end, which has no time limit; `stop` is called before it.
            thread = threading.Thread(target=self._run, name=self._name, daemon=True)
            try:
                thread.start()
            except (RuntimeError, MemoryError) as error:  # Too many, or Python is about to end.
                _log.info("%s: no thread can be started now: %s", self._name, error)
                return False
            self._thread = thread
        return True

    def _run(self) -> None:
        while True:
            with self._changed:
                if not self._jobs and not self._is_stopping:
                    self._changed.wait(_IDLE_SECONDS)
                has_jobs = bool(self._jobs)
            if not has_jobs:
                self._call(self._when_idle)
            with self._changed:
                if not self._jobs:
                    self._thread = None
                    self._changed.notify_all()
                    return
            tracing.wait_until_over(lambda: self._flushing > 0)
            self._run_next()

    def _run_next(self) -> None:
        with self._changed:
            self._running = job = self._jobs.popleft() if self._jobs else None
        if job is None:
            return
        outcome = self._call(job.work)
        with self._changed:
            job.outcome, job.is_over, self._running = outcome, True, None
            self._changed.notify_all()

    def _call(self, work: Callable[[], Any]) -> Any:
        try:
            # Else a call beside it would wait for Python's lock for as long as Python lets it run.
            with _process_hooks.quick_switching():
                return work()
        except BaseException:
            _log.exception("%s: a job failed", self._name)

    def flush(self) -> None:
        """Waits until all jobs have run, and what is to be done when there are none."""
        with self._changed:
            self._flushing += 1
        try:
            while True:
                with self._changed:
                    if not self._jobs and self._running is None:
                        break
                    if started := self._start():
                        self._changed.wait(_IDLE_SECONDS)
                if not started:
                    self._run_next()
            self._call(self._when_idle)
        finally:
            with self._changed:
                self._flushing -= 1

    def take(self, job: Job) -> Any:
        """Takes a job back, once it is done if it is being done.

        Returns:
            What it returned. None where it had not begun, or failed: it is not tried again.
        """
        with self._changed:
            with contextlib.suppress(ValueError):
                self._jobs.remove(job)
            while self._running is job and self._thread is not None and self._thread.is_alive():
                self._changed.wait(_IDLE_SECONDS)
        return job.outcome

    def stop(self) -> None:
        """Runs the jobs that are left, or drops them, and takes no more."""
        if not self.droppable:
            self.flush()
        with self._changed:
            self._is_stopping = True
            self._jobs.clear()
            self._changed.notify_all()
            thread = self._thread
        if thread is not None and thread is not threading.current_thread():
            thread.join(_STOP_SECONDS)


_live: WeakObjects[Worker] = WeakObjects()


def _begin_anew() -> None:
    for worker in _live:
        worker.begin()


_process_hooks.at_fork(after_in_child=_begin_anew)


@_process_hooks.at_exit
def _stop_all() -> None:
    for worker in sorted(_live, key=lambda worker: not worker.droppable):
        worker.stop()
    run_activity.finish()
    if shared := sys.modules.get("stepcache.storage.shared_entries"):  # Else there is none.
        shared.finish_all()
    load_markers.take_own_away()
