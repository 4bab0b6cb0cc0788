"""`Worker`: one thread with one queue. Programs are stored by one of these.

It is an executor of Python's. Its jobs run while XLA compiles, or once no step has been traced for
a while. It outlives a fork, and at the end of the process hurries: Python's own end runs what is
left.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import os
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor, wait

from stepcache import _process_hooks
from stepcache._changes import Shared
from stepcache.storage import load_markers, run_activity
from stepcache.weak_objects import WeakObjects

_LONGEST_TRACE_SECONDS = 2.0  # So long jobs wait for a trace to end, before they run beside it.
_LOOK_SECONDS = 0.02
# The end of the process is to wait no longer than this for what is left.
_QUIET_SECONDS, _SECONDS_LEFT = 0.1, 0.1

_log = logging.getLogger("stepcache")


class _UnderWay(Shared):
    """What this process is doing, in whichever threads, and when it ended last."""

    def __init__(self) -> None:
        super().__init__()
        self.begun, self.ended = threading.Event(), 0.0

    def _make(self, users: int) -> bool:
        self.begun.set()
        return True

    def _undo(self) -> None:
        self.begun.clear()
        self.ended = time.monotonic()

    def reset(self) -> None:
        self.begun = threading.Event()  # Another thread of the parent may have had its lock.
        super().reset()


# Python runs one thread at a time, so that a job beside a trace or a lowering makes it as much
# longer. While XLA compiles, Python is free.
tracing, compiling = _UnderWay(), _UnderWay()


def _wait_for_python(worker: Worker) -> None:
    """Waits, not long, until no step has been traced for a while.

    Or until XLA compiles, where more is left than the end of the process is to wait for; or, where
    nothing is compiled, until no trace is under way.
    """
    limit = time.monotonic() + _LONGEST_TRACE_SECONDS
    while not worker.is_urgent.is_set() and (now := time.monotonic()) < limit:
        if (left := len(worker._jobs) * worker.job_seconds) < _SECONDS_LEFT:
            worker.is_urgent.wait(_LOOK_SECONDS)
        elif compiling.begun.wait(_LOOK_SECONDS):
            return
        is_late = now >= tracing.ended + _QUIET_SECONDS or left >= 1.5 * _SECONDS_LEFT
        if is_late and not tracing.begun.is_set():
            return


def _yield_to_others() -> None:
    """Has the system prefer all other threads to this one, as those in which XLA compiles."""
    if sys.platform == "linux":  # Where each thread has a priority of its own.
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), 15)


class Worker:
    """Runs jobs one after the other, in a thread. A job that raises is logged.

    Args:
        name: of the thread.
        after: called there after each job.
    """

    def __init__(self, name: str, after: Callable[[], None] = lambda: None):
        self._name, self.after = name, after
        self.begin()
        _live.add(self)

    def begin(self) -> None:
        """Has no jobs: as it is made, and in a child, where the parent's thread is not."""
        self._executor = ThreadPoolExecutor(1, self._name, _yield_to_others)
        self._jobs: dict[Future[None], None] = {}
        self.job_seconds = 0.002  # What one takes, as the latest did.
        self.is_urgent = threading.Event()  # Somebody waits for the jobs, or the process ends.

    def submit(self, work: Callable[[], None]) -> None:
        """Runs `work` in the background; here if no thread starts."""
        _process_hooks.at_end_of_child(_end)
        job = functools.partial(self._do, [work])
        try:
            future = self._executor.submit(job)
        except (RuntimeError, MemoryError) as error:  # Too many threads, or Python's end.
            _log.info("%s: no thread can be started now: %s", self._name, error)
            return job()
        self._jobs[future] = None
        future.add_done_callback(self._jobs.pop)

    def _do(self, job: list[Callable[[], None]]) -> None:
        """Does a job, once: an executor that could not start a thread has it in its queue."""
        _wait_for_python(self)
        with contextlib.suppress(IndexError):
            work, started = job.pop(), time.monotonic()
            self._run(work)
            self.job_seconds += (time.monotonic() - started - self.job_seconds) / 8
            self._run(self.after)

    def _run(self, work: Callable[[], None]) -> None:
        try:
            # Else a call beside it would wait for Python's lock as long as that lets it.
            with _process_hooks.quick_switching():
                work()
        except BaseException:
            _log.exception("%s: a job failed", self._name)

    def has_more(self) -> bool:
        """Whether other jobs wait, for the one that asks."""
        return len(self._jobs) > 1

    def flush(self) -> None:
        """Waits until all jobs have run, and those that they have submitted."""
        self.is_urgent.set()
        while jobs := set(self._jobs):
            wait(jobs)
        self.is_urgent.clear()


_live: WeakObjects[Worker] = WeakObjects()


_process_hooks.at_fork(after_in_child=lambda: [each.begin() for each in _live])


@_process_hooks.before_threads_end
def _hurry() -> None:
    """Before Python's own end waits for the jobs that are left."""
    for worker in _live:
        worker.is_urgent.set()


@_process_hooks.at_exit
def _end() -> None:
    for worker in _live:
        worker.flush()
    run_activity.activity_log.finish()
    if shared := sys.modules.get("stepcache.storage.shared_entries"):  # Else there is none.
        shared.finish_all()
    load_markers.take_own_away()
