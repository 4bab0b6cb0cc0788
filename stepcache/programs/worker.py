"""`Worker`: runs jobs in a thread of its own. Programs are stored by one of these."""

from __future__ import annotations

import collections
import contextlib
import logging
import operator
import sys
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import jax

from stepcache import _process_hooks
from stepcache.storage import load_markers, run_activity
from stepcache.weak_objects import WeakObjects

_IDLE_SECONDS, _POLL_SECONDS = 0.5, 0.005
_LONGEST_TRACE_SECONDS = 2.0  # So long jobs wait for a trace to end, before they run beside it.
_STOP_SECONDS = 2.0
_NO_THREAD = (RuntimeError, MemoryError)  # Too many threads, or Python is about to end.

_log = logging.getLogger("stepcache")

LATER: Any = object()
"""What a job returns that is not due yet: it is tried again."""


class _Tracing:
    """Whether a step is being traced or lowered. Workers' jobs wait for that.

    Python runs one thread at a time, so a job beside a trace would make it as much longer. While
    XLA compiles or loads, Python is free.
    """

    def __init__(self) -> None:
        self._changed, self._count = threading.Condition(), 0

    @contextlib.contextmanager
    def now(self) -> Iterator[None]:
        with self._changed:
            self._count += 1
        try:
            yield
        finally:
            with self._changed:
                self._count -= 1
                self._changed.notify_all()

    def wait_until_over(self, is_urgent: Callable[[], Any]) -> None:
        with self._changed:
            self._changed.wait_for(
                lambda: self._count == 0 or is_urgent(), timeout=_LONGEST_TRACE_SECONDS
            )


tracing = _Tracing()


class Job:
    """A job of a worker."""

    def __init__(self, work: Callable[[], Any]):
        self.work = work  # Returns `LATER` while it is not due.
        self.outcome: Any = None  # What it returned; None before that, and where it raised.
        self.is_over = False  # It is not going to be run any more.


class Worker:
    """Runs jobs one after the other, in a thread that is there while there are jobs.

    A job that raises is logged. At the end of the process the jobs that are left are run, or, with
    `droppable`, dropped.
    """

    def __init__(self, name: str, *, droppable: bool = False):
        self._name, self.droppable = name, droppable
        self.begin()
        _live.add(self)

    def begin(self) -> None:
        """Has no jobs, and no thread: as it is made, and in a child, where the parent's are not."""
        self._changed = threading.Condition()
        self._jobs: collections.deque[Job] = collections.deque()
        self._running: Job | None = None
        self._thread: threading.Thread | None = None
        self._waiting = 0  # Threads that wait for all jobs.
        self._is_stopping = False

    def submit(self, work: Callable[[], Any]) -> Job:
        """Runs `work` in the background. It returns `LATER` for as long as it is not due.

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

    @property
    def is_flushing(self) -> bool:
        """Whether somebody waits for all jobs, as the end of the process does."""
        return self._waiting > 0

    def _start(self) -> bool:
        """Starts the thread if it is not there. Returns whether it is."""
        if self._thread is None or not self._thread.is_alive():
            # Not joined by Python's own end, which has no time limit; `stop` is called before it.
            thread = threading.Thread(target=self._run, name=self._name, daemon=True)
            try:
                thread.start()
            except _NO_THREAD as error:
                _log.info("%s: no thread can be started now: %s", self._name, error)
                return False
            self._thread = thread
        return True

    def _run(self) -> None:
        while True:
            with self._changed:
                if not self._jobs and not self._is_stopping:
                    self._changed.wait(_IDLE_SECONDS)
                if not self._jobs:
                    self._thread = None
                    self._changed.notify_all()
                    return
                jobs = list(self._jobs)
            done = 0
            for job in jobs:
                tracing.wait_until_over(lambda: self._waiting)
                done += self._try(job)
            if not done:
                time.sleep(_POLL_SECONDS)

    def _try(self, job: Job) -> bool:
        """Runs a job; False where it is not due yet."""
        with self._changed:
            if job.is_over:
                return True  # It was taken back, or dropped.
            self._running = job
        outcome = None
        try:
            # Else a call beside it would wait for Python's lock for as long as Python lets it run.
            with _process_hooks.quick_switching():
                outcome = job.work()
        except BaseException:
            _log.exception("%s: a job failed", self._name)
        with self._changed:
            self._running = None
            if outcome is not LATER:
                job.outcome = outcome
                self._drop(job)
            self._changed.notify_all()
        return outcome is not LATER

    def _drop(self, job: Job) -> None:
        job.is_over = True
        with contextlib.suppress(ValueError):
            self._jobs.remove(job)

    def flush(self) -> None:
        """Waits until all jobs have run that are there now, and those that they submit."""
        with self._changed:
            self._waiting += 1
        try:
            for _ in range(2):  # Storing a program submits the job that notes it for the next run.
                with self._changed:
                    jobs = list(self._jobs)
                while jobs := [job for job in jobs if not job.is_over]:
                    with self._changed:
                        started = self._start()
                        if started and not all(job.is_over for job in jobs):
                            self._changed.wait(_IDLE_SECONDS)
                    if not started:
                        for job in jobs:
                            self._try(job)
                        time.sleep(_POLL_SECONDS)
        finally:
            with self._changed:
                self._waiting -= 1

    def take(self, job: Job) -> Any:
        """Takes a job back, once it is done if it is being done.

        Returns:
            What it returned. None where it had not begun, or failed: it is not tried again.
        """
        with self._changed:
            self._drop(job)
            while self._running is job and self._thread is not None and self._thread.is_alive():
                self._changed.wait(_IDLE_SECONDS)
        return job.outcome

    def stop(self) -> None:
        """Runs the jobs that are left, or drops them, and takes no more."""
        if not self.droppable:
            self.flush()
        with self._changed:
            self._is_stopping = True
            for job in tuple(self._jobs):
                self._drop(job)
            self._changed.notify_all()
            thread = self._thread
        if thread is not None and thread is not threading.current_thread():
            thread.join(_STOP_SECONDS)


_live: WeakObjects[Worker] = WeakObjects()


def _begin_anew() -> None:
    for worker in _live:
        worker.begin()
    tracing.__init__()


_process_hooks.at_fork(after_in_child=_begin_anew)


@_process_hooks.at_exit
def _stop_all() -> None:
    for worker in sorted(_live, key=lambda worker: not worker.droppable):
        worker.stop()
    run_activity.finish()
    if shared := sys.modules.get("stepcache.storage.shared_entries"):  # Else there is none.
        shared.finish_all()
    load_markers.take_own_away()


def until_ready(outputs: Any, started: float) -> Callable[[], Any]:
    """Waits for the outputs of a program, one look at a time.

    One output represents all. It is held weakly, so that it can be freed meanwhile. The program was
    called at `started`, by `time.perf_counter`.

    Returns:
        A function that returns `LATER` while they are computed, and then how many seconds they
        took; None if that is no longer known, or the main thread has ended.
    """
    # Random keys are arrays that cannot be asked. Of a step with a carry, what comes after it.
    leaves = [each for each in jax.tree.leaves(outputs) if hasattr(each, "is_ready")]
    output: Callable[[], Any] = weakref.ref(leaves[-1]) if leaves else lambda: None
    del leaves

    def look() -> Any:
        array = output()
        if array is None or not threading.main_thread().is_alive():
            return None
        try:
            # In one go, so that no other thread of Python can delete the array between the two: on
            # JAX 0.10, `is_ready` of a deleted array ends the process.
            over = any(map(operator.call, (array.is_deleted, array.is_ready)))
            if not over:
                return LATER
            return None if array.is_deleted() else round(time.perf_counter() - started, 4)
        except RuntimeError:  # It was donated to another call at this moment.
            _log.info("the first run of a program could not be timed", exc_info=True)
            return None

    first = look()
    return look if first is LATER else lambda: first
