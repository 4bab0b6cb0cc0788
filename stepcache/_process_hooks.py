"""Every change that stepcache makes to the whole process or to a whole thread, and how it ends.

docs/process.md lists them for users. What is changed inside JAX stands in `jaxcompat/hooks.py`.
Each hook calls what it found in its place, and removes only itself: where other code has set
something else meanwhile, that stays.
"""

from __future__ import annotations

import atexit
import contextlib
import faulthandler
import gc
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from stepcache._changes import Shared, Undoing, shared


class _Setting(Shared):
    """Another value of a setting of Python, until the last user leaves or other code sets it.

    Args:
        read, write: the setting.
        ours: gives our value beside the usual one; None where that stays.
    """

    def __init__(self, read: Callable[[], Any], write: Callable, ours: Callable[[Any], Any]):
        super().__init__()
        self._read, self._write, self._ours = read, write, ours
        self._usual = self._written = None

    def _make(self, users: int) -> bool:
        usual = self._read()
        if not users and (ours := self._ours(usual)) is not None:
            self._usual = usual
            self._write(ours)
            self._written = self._read()  # Python may round it.
        return True

    def _undo(self) -> None:
        if self._usual is not None and self._read() == self._written:
            self._write(self._usual)
        self._usual = None


# In microseconds as Python keeps it, and no round number, to recognize what a user sets.
_SWITCH_SECONDS = 0.000053
_switching = _Setting(
    sys.getswitchinterval,
    sys.setswitchinterval,
    lambda usual: _SWITCH_SECONDS if usual > _SWITCH_SECONDS else None,
)


@contextlib.contextmanager
def quick_switching() -> Iterator[None]:
    """Has Python switch between threads often, until the last user leaves or other code sets it."""
    with Undoing() as undoing, undoing:
        undoing.use(_switching)
        yield


# A trace makes many objects and nearly no cycles of them, and Python looks through all objects
# whenever they have become a quarter more: an eighth of the time of a long trace. It still looks
# through the youngest, which are in the processor's caches: so it is done sooner than at the end.
_NO_FULL_COLLECTIONS = 100_000
rare_collections = _Setting(
    gc.get_threshold,
    lambda threshold: gc.set_threshold(*threshold),
    # A first number of 0 is for never.
    lambda usual: (*usual[:2], _NO_FULL_COLLECTIONS) if usual[0] else None,
)

at_exit = atexit.register

# Python 3.12.0 to 3.12.2 start no thread any more once the main thread has ended (python#113964).
THREADS_END_EARLY = (3, 12, 0) <= sys.version_info[:3] <= (3, 12, 2)


def before_threads_end(function: Callable[[], None]) -> None:
    """Has a function called when the main thread ends, while executors still take work."""
    import concurrent.futures.thread  # noqa: F401  (What is registered last is called first.)

    register = getattr(threading, "_register_atexit", None)
    (register or atexit.register)(function)


_at_ends: dict[Callable[[], None], Any] = {}


def at_end_of_child(function: Callable[[], None]) -> None:
    """Has a function called at the end of a `multiprocessing` child: forks run no exit handlers."""
    parent = getattr(sys.modules.get("multiprocessing.process"), "parent_process", None)
    if parent is None or parent() is None:
        return
    from multiprocessing import util

    known = _at_ends.get(function)
    if known is None or not known.still_active():  # A child forgets those of its parent.
        _at_ends[function] = util.Finalize(None, function, exitpriority=-100)  # The last.


def fail_at_exit_if(has_failed: Callable[[], bool]) -> None:
    """Has the process end with exit code 1 if something has failed, after all exit handlers."""

    def fail() -> None:
        if has_failed():
            atexit.unregister(fail)
            atexit._run_exitfuncs()  # The others'.
            print(end="", flush=True)
            os._exit(1)

    atexit.register(fail)


def exit_after(seconds: float) -> Callable[[], None]:
    """Ends the process later, unless what is returned is called; also while Python shuts down."""
    faulthandler.dump_traceback_later(seconds, exit=True)
    return faulthandler.cancel_dump_traceback_later


def at_fork(**functions: Callable[[], Any]) -> None:
    """As `os.register_at_fork`, where there is one."""
    if hasattr(os, "register_at_fork"):
        os.register_at_fork(**functions)


# A forked child undoes what threads asked for that are not there.
at_fork(after_in_child=lambda: [each.reset() for each in shared])


@contextlib.contextmanager
def signals_handled(numbers: Sequence[int], handler: Callable[[int, Any], None]) -> Iterator[None]:
    """Handles signals, but for those that the process was started to ignore."""
    before = {number: signal.getsignal(number) for number in numbers}
    try:
        for number in numbers:
            if before[number] != signal.SIG_IGN:
                signal.signal(number, handler)
        yield
    finally:
        for number in numbers:
            signal.signal(number, before[number])
