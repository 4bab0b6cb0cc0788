"""Determines where the threads of a pod's processes are, and for how long they have not moved."""

from __future__ import annotations

import linecache
import os
import sys
import sysconfig
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from types import FrameType
from typing import Any, Literal

import jax

from stepcache.units import readable_ranks

AGREE_SECONDS = 60.0
"""How long to wait, by default, for a process that does not take part in an agreement round."""
HANG_SECONDS = 60.0
"""After how long without progress all ranks log where they are, by default."""
OnHang = Literal["warn", "error"]

_IDLE_SECONDS = 0.0002  # CPU time between two looks below which a thread only waits.
_EXPRESSION_LENGTH = 50
_OWN = os.path.dirname(os.path.dirname(os.path.abspath(__file__))) + os.sep
_OF_JAX = tuple(os.path.dirname(os.path.abspath(jax.__file__)) + end for end in (os.sep, "lib"))
_INSTALLED = tuple({sysconfig.get_path(name) for name in ("stdlib", "purelib", "platlib")})
# Calls in a user's own line that do not wait for a device.
_OTHER_WAITS = frozenset(
    "accept acquire close flush fsync get input join poll read readline recv select sleep wait "
    "write".split()
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
    return str(_latest or "")


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

    @property
    def still_seconds(self) -> float:
        """How long the thread has not moved."""
        return time.monotonic() - self._since

    def look(self) -> None:
        """Notes the position of the thread."""
        frame = sys._current_frames().get(self.thread)  # Not kept: it would keep its arrays.
        if frame is None:
            return
        seen, before = (id(frame), frame.f_lasti), self._cpu_seconds
        self._cpu_seconds = _cpu_seconds(self.thread)
        if seen == self._seen and self._cpu_seconds < before + _IDLE_SECONDS:
            return
        self._seen, self._since = seen, time.monotonic()
        file = frame.f_code.co_filename
        callee = _expression(frame).partition("(")[0].rpartition(".")[2]
        inside = file.startswith((_OWN, *_OF_JAX))
        self.waits_for_device = inside or (_is_users(file) and callee not in _OTHER_WAITS)
        # The thread runs on: a frame that has returned meanwhile has no caller any more.
        while not _is_users(frame.f_code.co_filename) and (back := frame.f_back) is not None:
            frame = back
        name = Path(frame.f_code.co_filename).name
        self.where = f"{name}:{frame.f_lineno} {_expression(frame)} in {frame.f_code.co_name}"


def _cpu_seconds(thread: int) -> float:
    if not hasattr(time, "pthread_getcpuclockid"):  # As on macOS.
        return time.process_time()
    return time.clock_gettime(time.pthread_getcpuclockid(thread))


def _is_users(file: str) -> bool:
    return not file.startswith((_OWN, *_OF_JAX, *_INSTALLED, "<"))


def _expression(frame: FrameType) -> str:
    """Returns the source text of the expression that a frame is evaluating."""
    at = max(frame.f_lasti // 2, 0)
    line, end_line, start, end = next(islice(frame.f_code.co_positions(), at, None))
    text = linecache.getline(frame.f_code.co_filename, line or 0).encode()
    shown = text[start : end if line == end_line else None].decode(errors="replace").strip()
    return shown if len(shown) <= _EXPRESSION_LENGTH else f"{shown[:_EXPRESSION_LENGTH]}…"


@dataclass
class Row:
    """The answer of one process to a roll call."""

    where: str = ""  # Position of its thread, as in `Movement`.
    still_seconds: float = 0.0  # How long the thread has not moved.
    call: str = ""  # The latest call of a step, "call 12 of train"; empty if unknown.
    ended: str = ""  # How the process ended; empty while it runs.
    # By mesh, the number of the last session and how it was left; empty while it is entered.
    sessions: dict[str, list] = field(default_factory=dict)

    def how_left(self, mesh: str, number: int) -> str:
        """Returns how the process ended or left a session; empty while it is in it."""
        entered, left = self.sessions.get(mesh, (0, ""))
        return self.ended or (left if entered == number else "left it" if entered > number else "")

    def text(self) -> str:
        """Returns where the process is, in words."""
        outside = not any(how == "" for _, how in self.sessions.values())
        left = next(reversed(self.sessions.values()))[1] if self.sessions and outside else ""
        state = f"has {self.ended or left}" if self.ended or left else ""
        return ", ".join(filter(None, (state, self.call, "" if self.ended else self.where)))


def table(rows: Mapping[int, Row], silent: Mapping[int, str] | None = None) -> str:
    """Returns where all ranks are, by their answers; those at the same position share an entry.

    `silent` says why other ranks did not answer.
    """
    groups: dict[str, list[int]] = {}
    for rank, row in sorted(rows.items()):
        groups.setdefault(row.text(), []).append(rank)
    lines = []
    for text, ranks in groups.items():
        seconds = max(rows[rank].still_seconds for rank in ranks)
        lines.append((ranks, f"{text}, for {seconds:.0f} s" if seconds >= 1 else text))
    reasons: dict[str, list[int]] = {}
    for rank, why in (silent or {}).items():
        reasons.setdefault(why, []).append(rank)
    lines += [(ranks, why) for why, ranks in reasons.items()]
    return "; ".join(f"{readable_ranks(ranks)}: {text}" for ranks, text in lines)
