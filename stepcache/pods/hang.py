"""Where the threads of this process are, and for how long its main thread has not moved."""

from __future__ import annotations

import linecache
import os
import re
import sys
import threading
import time
import traceback
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax

from stepcache.jaxcompat.inspection import COMPILER_FILE
from stepcache.origin import is_users_file

AGREE_SECONDS = 60.0
"""How long to wait, by default, for a process that does not take part in an agreement round."""
HANG_SECONDS = 60.0
"""After how long without progress all ranks log where they are, by default."""
_IDLE_SECONDS = 0.0002  # CPU time between two looks below which a thread only waits.
_LINE_LENGTH = 60
_OWN = os.path.dirname(os.path.dirname(os.path.abspath(__file__))) + os.sep
_OF_JAX = tuple(os.path.dirname(os.path.abspath(jax.__file__)) + end for end in (os.sep, "lib"))
# Calls in a user's own line that do not wait for a device.
_OTHER_WAITS = re.compile(
    r"\b(accept|acquire|close|flush|fsync|get|input|join|poll|read|readline|recv|select|sleep|wait"
    r"|write)\("
)


@dataclass(eq=False, repr=False)
class CallCount:
    """Counts the calls of one step that Python sees."""

    step: str
    calls: int = 0
    is_whole: bool = True  # Whether Python sees all of them.

    def add_one(self) -> None:
        global _latest
        self.calls += 1
        _latest = self

    def __str__(self) -> str:
        return f"{f'call {self.calls} of ' if self.is_whole else ''}{self.step}"


_latest: CallCount | None = None


def latest_call() -> str:
    """The latest call of a step: "call 12 of train", or its name where not every call is seen."""
    return str(_latest or "no call of a step")


class Movement:
    """Watches whether a thread moves, by its CPU time and its position.

    A waiting thread uses no CPU time; a training loop uses some, even if it is always seen on the
    same line.
    """

    def __init__(self, thread: int):
        self.thread = thread  # Its identifier.
        self.where = ""  # File, line, expression and function of the user's code.
        self.waits_for_device = False  # Whether it seemed to, at the last look.
        self._seen: Any = None
        self._cpu_seconds = 0.0
        self._since = time.monotonic()

    def look(self) -> float:
        """Notes the position of the thread; returns for how many seconds it has not moved."""
        frame = sys._current_frames().get(self.thread)  # Not kept: it would keep its arrays.
        if frame is None:
            return time.monotonic() - self._since
        seen, before = (id(frame), frame.f_lasti), self._cpu_seconds
        clock = getattr(time, "pthread_getcpuclockid", None)  # Not on macOS.
        self._cpu_seconds = time.clock_gettime(clock(self.thread)) if clock else time.process_time()
        if seen == self._seen and self._cpu_seconds < before + _IDLE_SECONDS:
            return time.monotonic() - self._since
        self._seen, self._since = seen, time.monotonic()
        file, number = frame.f_code.co_filename, frame.f_lineno or 0  # None where it has no line.
        line = linecache.getline(file, number)  # Empty if it cannot be read.
        is_other = not (line and is_users_file(file)) or _OTHER_WAITS.search(line)
        is_own = file.startswith((_OWN, *_OF_JAX)) and file != COMPILER_FILE
        self.waits_for_device = is_own or not is_other
        # The thread runs on: a frame that has returned meanwhile has no caller any more.
        while not is_users_file(frame.f_code.co_filename) and (back := frame.f_back) is not None:
            frame = back
        code, number = frame.f_code, frame.f_lineno or 0
        line = linecache.getline(code.co_filename, number).strip()[:_LINE_LENGTH]
        self.where = f"{Path(code.co_filename).name}:{number} in {code.co_name}: {line}"
        return 0.0


def stacks() -> str:
    """Returns the stacks of all threads of this process but the calling one."""
    names = {thread.ident: thread.name for thread in threading.enumerate()}
    return "\n".join(
        f"{names.get(number, number)}:\n{''.join(traceback.format_stack(frame)).rstrip()}"
        for number, frame in sys._current_frames().items()
        if number != threading.get_ident()
    )
