"""Work beside the steps of other threads, and out of their way."""

from __future__ import annotations

import contextlib
import sys
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, TypeVar

import jax

from stepcache import jaxcompat

_SWITCH_SECONDS = 0.00005
_POLL_SECONDS = 0.005

T = TypeVar("T")


@contextlib.contextmanager
def beside(work: Callable[[], T]) -> Iterator[Future[T]]:
    """Does something in another thread, under the settings of this one; its end waits for that."""
    settings = jaxcompat.carried_settings()

    def run() -> T:
        with settings:
            return work()

    with ThreadPoolExecutor(1, "stepcache beside") as pool:
        try:
            future = pool.submit(run)
        except RuntimeError:  # Python is about to end, and starts no thread any more.
            future = Future()
            future.set_result(run())
        yield future


def in_background(check: Callable[[], None]) -> threading.Thread:
    """Runs a check under the settings of this thread, in another one that gives way to all."""
    settings = jaxcompat.carried_settings()

    def run() -> None:
        with settings, _standing_back():
            check()

    thread = threading.Thread(target=run, name="stepcache verify", daemon=False)
    thread.start()
    return thread


def seconds_until_ready(outputs: Any, started: float) -> Callable[[], float | None]:
    """Waits, when it is called, for the outputs of a program.

    One output stands for all, and is held weakly: a call that it is donated to frees it.

    Args:
        outputs: of the program, in any tree.
        started: when it was called, by `time.perf_counter`.

    Returns:
        A function that waits, and returns how many seconds they took; None where that cannot be
        told any more, or the main thread has ended.
    """
    leaves = [each for each in jax.tree.leaves(outputs) if isinstance(each, jax.Array)]
    # Of a step with a carry, what comes after it.
    output = weakref.ref(leaves[-1]) if leaves else lambda: None

    def wait() -> float | None:
        while threading.main_thread().is_alive():
            array: Any = output()
            if array is None or array.is_deleted():
                return None
            if array.is_ready():
                return round(time.perf_counter() - started, 4)
            del array
            time.sleep(_POLL_SECONDS)
        return None

    return wait


_RUN_SECONDS = 0.0005
_REST_SECONDS = 0.001
_BUSY_SECONDS = 0.00015
_PAUSE_SECONDS = 0.001
_LONGEST_PAUSE_SECONDS = 0.005
_switching = threading.Lock()
_standing_back_now = 0
_usual_seconds = 0.0


@contextlib.contextmanager
def _standing_back() -> Iterator[None]:
    """Has this thread give way whenever another one wants Python's lock, and rest in between.

    A step that returns thousands of arrays takes and releases the lock for each, and would wait
    for it as often. So this thread looks, every so often, whether it gets the lock back at once;
    if not, somebody else is at work, and it pauses until nobody is, or for the longest pause. It
    rests because cores share caches and memory: where another process kept the second core busy,
    steps took 1.3 × as long (`benchmarks.restart`).
    """
    global _standing_back_now, _usual_seconds
    with _switching:
        _standing_back_now += 1
        if _standing_back_now == 1:
            _usual_seconds = sys.getswitchinterval()
            sys.setswitchinterval(min(_usual_seconds, _SWITCH_SECONDS))
    until = 0.0

    def give_way(frame: Any, event: Any, argument: Any) -> None:
        nonlocal until
        now = began = time.perf_counter()
        if now < until:
            return
        if threading.main_thread().is_alive():
            time.sleep(_REST_SECONDS)
        while now - began < _LONGEST_PAUSE_SECONDS:
            asked = time.perf_counter()
            time.sleep(1e-6)
            now = time.perf_counter()
            if now - asked < _BUSY_SECONDS:
                break
            time.sleep(_PAUSE_SECONDS)
        until = now + _RUN_SECONDS

    sys.setprofile(give_way)
    try:
        yield
    finally:
        sys.setprofile(None)
        with _switching:
            _standing_back_now -= 1
            if not _standing_back_now:
                sys.setswitchinterval(_usual_seconds)
