"""Work beside the calls of steps: workers, and the thread that runs during a compilation."""

from __future__ import annotations

import collections
import contextlib
import ctypes
import logging
import os
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from typing import Any, TypeVar

import jax

from stepcache import _process_hooks, jaxcompat

_POLL_SECONDS = 0.005
_IDLE_SECONDS = 0.5
_STOP_SECONDS = 2.0

T = TypeVar("T")

_log = logging.getLogger("stepcache")

LATER: Any = object()
"""What a job returns that is not due yet: it is tried again."""


@contextlib.contextmanager
def beside(work: Callable[[], T]) -> Iterator[Future[T]]:
    """Runs `work` in another thread, under this thread's settings of JAX, while the body runs.

    Where no thread can be started, `work` runs here, after the body.
    """
    settings = jaxcompat.carried_settings()
    future: Future[T] = Future()

    def run() -> None:
        try:
            with settings:
                future.set_result(work())
        except BaseException as error:
            future.set_exception(error)

    thread = threading.Thread(target=run, name="stepcache beside", daemon=True)
    try:
        thread.start()
    except RuntimeError:  # Too many threads, or Python is about to end.
        thread = None
    try:
        yield future
    finally:
        if thread is None:
            run()
        else:
            thread.join()


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
        self._forget()
        _workers.add(self)

    def _forget(self) -> None:
        self._pid = os.getpid()
        self._changed = threading.Condition()
        self._jobs: collections.deque[Callable[[], Any]] = collections.deque()
        self._thread: threading.Thread | None = None
        self._stopping = False

    def submit(self, job: Callable[[], Any]) -> None:
        """Has a job run: a function that returns `LATER` for as long as it is not due."""
        if os.getpid() != self._pid:
            self._forget()  # The jobs are the parent's, and its thread is not here.
        with self._changed:
            if self._stopping:
                return
            self._jobs.append(job)
            self._changed.notify_all()
            self._start()

    def _start(self) -> None:
        if self._thread is None or not self._thread.is_alive():
            # Not joined by Python's own end, which has no time limit; `stop` is called before it.
            thread = threading.Thread(target=self._run, name=self._name, daemon=True)
            try:
                thread.start()
            except RuntimeError:
                return  # The jobs wait for the next one, for `flush`, or for the end.
            self._thread = thread

    def _run(self) -> None:
        with contextlib.suppress(_Interrupted):
            self._work()

    def _work(self) -> None:
        while True:
            with self._changed:
                if not self._jobs and not self._stopping:
                    self._changed.wait(_IDLE_SECONDS)
                if not self._jobs:
                    self._thread = None
                    self._changed.notify_all()
                    return
                jobs = list(self._jobs)
            done = [self._try(job) for job in jobs]
            if not any(done):
                time.sleep(self._poll_seconds)

    def _try(self, job: Callable[[], Any]) -> bool:
        """Runs a job; False where it is not due yet."""
        outcome = None
        try:
            outcome = job()
        except _Interrupted:
            pass
        except BaseException:
            _log.exception("%s: a job failed", self._name)
        if outcome is LATER:
            return False
        with self._changed:
            with contextlib.suppress(ValueError):  # `stop` may have dropped it.
                self._jobs.remove(job)
            self._changed.notify_all()
        return True

    def flush(self) -> None:
        """Waits until all jobs have run that are there now."""
        with self._changed:
            waiting = list(self._jobs)
        while waiting:
            with self._changed:
                waiting = [job for job in waiting if job in self._jobs]
                if not waiting:
                    return
                self._start()
                inline = self._thread is None
                if not inline:
                    self._changed.wait(_IDLE_SECONDS)
            if inline:
                for job in waiting:
                    self._try(job)
                time.sleep(self._poll_seconds)

    def outcome_of(self, future: Future[T]) -> T | None:
        """The result of what a job of this worker promised; None where the job did not keep it."""
        while not future.done():
            with self._changed:
                thread = self._thread
            if thread is None or not thread.is_alive():
                break
            with contextlib.suppress(TimeoutError):
                future.result(_IDLE_SECONDS)
        return future.result() if future.done() and future.exception() is None else None

    def stop(self) -> None:
        """Ends the work: runs what is left, or drops it."""
        if os.getpid() != self._pid:
            return
        if not self._droppable:
            self.flush()
        with self._changed:
            self._stopping = True
            if self._droppable:
                self._jobs.clear()
            self._changed.notify_all()
            thread = self._thread
        limit = time.monotonic() + _STOP_SECONDS
        # One that met a callback of the garbage collector has nobody to catch it.
        with _process_hooks.unreported(_Interrupted):
            while thread is not None and thread.is_alive() and time.monotonic() < limit:
                if self._droppable:
                    _interrupt(thread)
                thread.join(0.05)


class _Interrupted(BaseException):
    """Raised in a droppable worker when the process ends."""


def _interrupt(thread: threading.Thread) -> None:
    """Raises `_Interrupted` in a thread, as soon as it runs Python code."""
    identity = ctypes.c_ulong(thread.ident or 0)
    ctypes.pythonapi.PyThreadState_SetAsyncExc(identity, ctypes.py_object(_Interrupted))


_workers: weakref.WeakSet[Worker] = weakref.WeakSet()


@_process_hooks.at_exit
def _stop_all() -> None:
    for worker in sorted(_workers, key=lambda worker: worker._droppable, reverse=True):
        worker.stop()


def until_ready(outputs: Any, started: float) -> Callable[[], Any]:
    """Waits for the outputs of a program, one look at a time.

    Args:
        outputs: of the program, in any tree; one of them stands for all.
        started: when it was called, by `time.perf_counter`.

    Returns:
        A function that returns `LATER` while they are computed, and then how many seconds they
        took; None where that cannot be told any more, or the main thread has ended.
    """
    # Random keys are arrays that cannot be asked. Of a step with a carry, what comes after it.
    array: Any = None
    for each in jax.tree.leaves(outputs):
        array = each if hasattr(each, "is_ready") else array

    def look() -> Any:
        if array is None or array.is_deleted() or not threading.main_thread().is_alive():
            return None
        return round(time.perf_counter() - started, 4) if array.is_ready() else LATER

    return look
