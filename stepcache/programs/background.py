"""Background work: worker threads, and the thread that runs during a compilation."""

from __future__ import annotations

import _thread
import collections
import contextlib
import contextvars
import ctypes
import functools
import logging
import operator
import sys
import threading
import time
import weakref
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any, TypeVar

import jax

from stepcache import _process_hooks, jaxcompat
from stepcache._changes import Undoing
from stepcache.programs.builds import builds
from stepcache.storage import load_markers, run_activity
from stepcache.weak_objects import WeakObjects

_POLL_SECONDS, _IDLE_SECONDS, _STOP_SECONDS = 0.005, 0.5, 2.0
_FORK_SECONDS = 1.0
_INTERRUPT_SECONDS = 0.5  # Another one could end the cleaning up after the first.

T = TypeVar("T")

_log = logging.getLogger("stepcache")

LATER: Any = object()
"""What a job returns that is not due yet: it is tried again."""

WHEN_QUIET: Any = object()
"""What a job returns that can wait: it is run again when no program is looked for or built."""

SOON: Any = object()
"""As `WHEN_QUIET`, for a job whose result others wait for: only a few of these wait, not long."""


def beside(undoing: Undoing, work: Callable[[], T]) -> Future[T]:
    """Runs `work` in another thread, in this one's context and JAX settings, until `undoing` ends.

    Where no thread can be started, and within a build that a signal has interrupted, whose locks
    the thread would wait for, `work` runs here, at the end. After it the future is done, unless
    an exception has ended the thread, or this one's wait for it: ask it with a timeout of 0.
    """
    settings = jaxcompat.carried_settings()
    future: Future[T] = Future()
    running = threading.Lock()

    def work_here() -> None:
        try:
            with settings:
                future.set_result(work())
        except BaseException as error:
            future.set_exception(error)

    run = functools.partial(contextvars.copy_context().run, work_here)

    def work_there() -> None:
        try:
            # The other thread comes back from XLA while this one is in Python.
            with _process_hooks.quick_switching():
                run()
        finally:
            running.release()

    wait: Callable[[], Any] = run
    if not builds.are_nested():
        with contextlib.suppress(*_NO_THREAD):
            running.acquire()
            # `Thread.start` would wait until that runs, and keep this thread from XLA meanwhile.
            _thread.start_new_thread(work_there, ())
            wait = running.acquire
    waits = [wait]
    undoing.add(lambda: waits and waits.pop()())  # Once, for Ctrl-C must not wait.
    return future


_QUIET_SECONDS, _LONGEST_BUSY_SECONDS = 0.2, 10.0  # The first: longer than a small compilation.
_SOON_SECONDS, _AT_END_SECONDS = 2.0, 0.12  # The second: of the jobs that wait for the former.
_NO_THREAD = (RuntimeError, MemoryError)  # Too many threads, or Python is about to end.


@dataclass(eq=False, slots=True)
class Job:
    """A job of a worker."""

    work: Callable[[], Any]  # Returns `LATER` while it is not due, `WHEN_QUIET`, or `SOON`.
    outcome: Any = None  # What it returned; None before that, and where it raised.
    runs_at: float = 0.0  # At the latest, by `time.perf_counter`, though builds go on.
    is_awaited: bool = False  # It returned `SOON`.
    is_over: bool = False  # It is not going to be run any more.


class Worker:
    """Runs jobs one after the other in a thread of its own, which is there while there are jobs.

    A job that raises is logged. At the end of the process the jobs that are left are run, or, with
    `droppable`, dropped, and the one that is running is interrupted.

    Args:
        name: of the thread.
        droppable: whether the process need not wait for its jobs.
        poll_seconds: how long to wait before jobs are tried again that were not due.
    """

    def __init__(self, name: str, *, droppable: bool, poll_seconds: float = _POLL_SECONDS):
        self._name, self._droppable, self._poll_seconds = name, droppable, poll_seconds
        self.begin()
        _workers.add(self)

    def begin(self) -> None:
        """Has no jobs, and no thread: as it is made, and in a child, where the parent's are not."""
        self._changed = threading.Condition()
        self.at_work = threading.Lock()  # Held while a job runs in the thread.
        self._jobs: collections.deque[Job] = collections.deque()
        self._running: Job | None = None
        self._seconds_of_job = 0.005  # Of those that are awaited, about.
        self._thread: threading.Thread | None = None
        self.is_stopping, self._flushing = False, 0  # The first: as the process is about to end.

    def submit(self, work: Callable[[], Any]) -> Job:
        """Runs `work` in the background. It returns `LATER` for as long as it is not due.

        Where no thread can be started, it waits for the next job, for `flush`, or for the end.
        """
        job = Job(work)
        _process_hooks.at_end_of_child(_stop_all)
        with self._changed:
            if not self.is_stopping:
                self._jobs.append(job)
                self._changed.notify_all()
                self._start()
        return job

    def _start(self) -> bool:
        """Starts the thread if it is not there. Returns whether it is."""
        if not self._is_alive():
            # Not joined by Python's own end, which has no time limit; `stop` is called before it.
            thread = threading.Thread(target=self._run, name=self._name, daemon=True)
            try:
                thread.start()
            except _NO_THREAD as error:
                _log.info("%s: no thread can be started now: %s", self._name, error)
                return False
            self._thread = thread
        return True

    def _is_alive(self) -> bool:
        return self._thread is not None and self._thread.is_alive()

    def _run(self) -> None:
        try:
            with Undoing() as undoing, undoing:
                if not self._droppable:  # It has jobs as long as builds follow each other.
                    undoing.use(_process_hooks.rare_collections)
                self._work()
        except _Interrupted:
            pass
        except BaseException:
            _log.exception("%s: the thread ended; its jobs wait for another one", self._name)

    def _work(self) -> None:
        while True:
            with self._changed:
                if not self._jobs and not self.is_stopping:
                    self._changed.wait(_IDLE_SECONDS)
                if not self._jobs:
                    self._thread = None
                    self._changed.notify_all()
                    return
                jobs = self._due()
            done = []
            for job in jobs:
                builds.wait(lambda: self._flushing)
                with self.at_work:
                    done.append(self._try(job))
            if not any(done):
                time.sleep(self._poll_seconds)

    def _due(self) -> list[Job]:
        """The jobs to try now."""
        if self._flushing or builds.are_quiet(_QUIET_SECONDS):
            return list(self._jobs)
        now = time.perf_counter()
        awaited = [job for job in self._jobs if job.is_awaited]
        for waiting, job in enumerate(reversed(awaited), 1):
            if waiting * self._seconds_of_job > _AT_END_SECONDS:
                job.runs_at = now
        return [job for job in self._jobs if job.runs_at <= now]

    def _try(self, job: Job) -> bool:
        """Runs a job; False where it is not due yet."""
        with self._changed:
            if job.is_over:
                return True  # It was taken back, or dropped.
            self._running = job
        outcome, started = None, time.thread_time()
        try:
            outcome = job.work()
        except _Interrupted:
            pass
        except BaseException:
            _log.exception("%s: a job failed", self._name)
        with self._changed:
            self._running = None
            self._changed.notify_all()
            if outcome is WHEN_QUIET or outcome is SOON:
                job.is_awaited = outcome is SOON
                longest = _SOON_SECONDS if job.is_awaited else _LONGEST_BUSY_SECONDS
                job.runs_at = time.perf_counter() + longest
            if any(outcome is each for each in (LATER, WHEN_QUIET, SOON)):
                return False
            if job.is_awaited:
                took = time.thread_time() - started
                self._seconds_of_job += (took - self._seconds_of_job) / 4
            job.outcome = outcome
            self._drop(job)
        return True

    def _drop(self, job: Job) -> None:
        job.is_over = True
        with contextlib.suppress(ValueError):
            self._jobs.remove(job)

    def flush(self) -> None:
        """Waits until all jobs have run that are there now."""
        with self._changed:
            waiting = list(self._jobs)
            self._flushing += 1
        try:
            self._wait_for(waiting)
        finally:
            with self._changed:
                self._flushing -= 1

    def _wait_for(self, waiting: list[Job]) -> None:
        while waiting:
            with self._changed:
                waiting = [job for job in waiting if not job.is_over]
                if not waiting:
                    return
                if started := self._start():
                    self._changed.wait(_IDLE_SECONDS)
            if not started:
                for job in waiting:
                    self._try(job)
                time.sleep(self._poll_seconds)

    def take(self, job: Job) -> Any:
        """Takes a job back, once it is done if it is being done.

        Returns:
            What it returned. None where it had not begun, or failed: it is not tried again.
        """
        with self._changed:
            self._drop(job)
            while self._running is job and self._is_alive():
                self._changed.wait(_IDLE_SECONDS)
        return job.outcome

    def drop_jobs(self) -> None:
        """Takes no more jobs, and drops those that it has not begun, where they may be dropped."""
        with self._changed:
            self.is_stopping = True
            if self._droppable:
                for job in tuple(self._jobs):
                    self._drop(job)
            self._changed.notify_all()

    def stop(self) -> None:
        """Stops the worker: runs the remaining jobs, or drops them."""
        if not self._droppable:
            self.flush()
        self.drop_jobs()
        thread, now = self._thread, time.monotonic()
        limit, interrupt_at = now + _STOP_SECONDS, now
        # Raised in a callback of the garbage collector, it is not caught.
        with _process_hooks.unreported(_Interrupted):
            while thread is not None and thread.is_alive() and now < limit:
                if self._droppable and now >= interrupt_at:
                    _interrupt(thread)
                    interrupt_at = now + _INTERRUPT_SECONDS
                thread.join(0.05)
                now = time.monotonic()


class _Interrupted(BaseException):
    """Raised in a droppable worker when the process ends."""


def _interrupt(thread: threading.Thread) -> None:
    """Raises `_Interrupted` in a thread, as soon as it runs Python code."""
    identity = ctypes.c_ulong(thread.ident or 0)
    ctypes.pythonapi.PyThreadState_SetAsyncExc(identity, ctypes.py_object(_Interrupted))


_workers: WeakObjects[Worker] = WeakObjects()
_held: list[threading.Lock] = []


def _hold_jobs() -> None:
    """Before a fork: the child would have the locks of a job that runs now, taken for ever.

    Where JAX is running, steps raise in the child whatever happens, and jobs may be long.
    """
    if not jaxcompat.backends_are_initialized():
        for worker in _workers:
            if worker.at_work.acquire(timeout=_FORK_SECONDS):
                _held.append(worker.at_work)


def _let_jobs_run() -> None:
    while _held:
        _held.pop().release()


def _begin_anew() -> None:
    _held.clear()
    for worker in _workers:
        worker.begin()


_process_hooks.at_fork(before=_hold_jobs, after_in_parent=_let_jobs_run, after_in_child=_begin_anew)


@_process_hooks.at_exit
def _stop_all() -> None:
    workers = sorted(_workers, key=lambda worker: worker._droppable)
    for worker in workers:
        if worker._droppable:
            worker.drop_jobs()
    # Those that may be interrupted come last: a thread that is interrupted while it takes a lock
    # may end with it, and whoever needs that lock then waits for ever.
    for worker in workers:
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
