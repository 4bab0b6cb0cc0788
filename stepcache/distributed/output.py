"""What the ranks of a launch write and tell: shown in whole lines, the rank before each."""

from __future__ import annotations

import contextlib
import functools
import os
import selectors
import signal
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from queue import SimpleQueue
from typing import IO, Literal, TextIO

_TAIL_LINES = 40
_CHUNK_BYTES = 1 << 16
_REDRAW_SECONDS = 1.0
LAG_SECONDS = 0.5
_COLOURS = (36, 33, 35, 32, 34, 31)


@dataclass(frozen=True)
class Event:
    """What the launcher waits for: a rank raised, a rank ended, or somebody asked for the end.

    Attributes:
        what: one of these.
        rank: which.
        code: its exit code, negative for a signal; when asked, the number of the signal.
        seconds: when, by the monotonic clock.
    """

    what: Literal["raised", "ended", "asked"]
    rank: int
    code: int
    seconds: float

    def order(self) -> float:
        """Sorts failures by their causes. One that lost its neighbour to a signal may say so sooner
        than the launcher hears of that; only an abort may itself come from losing a neighbour.
        """
        killed = self.code < 0 and -self.code not in (signal.SIGABRT, signal.SIGINT)
        return self.seconds - LAG_SECONDS if killed else self.seconds

    def __str__(self) -> str:
        if self.code >= 0:
            return f"rank {self.rank} failed with exit code {self.code}"
        return f"rank {self.rank} was killed by {signal_name(-self.code)}"


def signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


class Output:
    """Shows what ranks write, in whole lines, and keeps the last lines of their errors."""

    def __init__(self, events: SimpleQueue[Event]):
        self._events = events
        self._selector = selectors.DefaultSelector()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._errors: list[_Lines] = []
        self.start = self._thread.start

    def join(self, timeout: float) -> None:
        """Waits for the end of all streams. A process that left its rank's group may hold one."""
        if self._thread.is_alive():
            self._thread.join(timeout)

    def add(self, rank: int, ranks: int, process: subprocess.Popen[bytes]) -> None:
        """Has an eye on the two streams of a rank."""
        for pipe, stream in ((process.stdout, sys.stdout), (process.stderr, sys.stderr)):
            assert pipe is not None
            prefix = _prefix(rank, ranks, stream)
            lines = _Lines(prefix, functools.partial(self._write, stream))
            self._selector.register(pipe, selectors.EVENT_READ, (pipe, lines.take))
        self._errors.append(lines)

    def add_reports(self, file: IO[bytes]) -> None:
        """Makes events of what ranks tell of their errors."""

        def take(data: bytes) -> None:
            for line in data.splitlines():
                rank, code, seconds = line.split()
                self._events.put(Event("raised", int(rank), int(code), float(seconds)))
                # Later it may speak of how it was ended.
                self._errors[int(rank)].tail_until = time.monotonic() + LAG_SECONDS

        self._selector.register(file, selectors.EVENT_READ, (file, take))

    def _run(self) -> None:
        while self._selector.get_map():
            for key, _ in self._selector.select():
                pipe, take = key.data
                data = pipe.read(_CHUNK_BYTES)
                take(data)
                if not data:
                    self._selector.unregister(pipe)
                    pipe.close()
        self._selector.close()

    def say(self, text: str) -> None:
        """Says something of the launcher's own."""
        self._write(sys.stderr, f"stepcache launch: {text}\n".encode())

    def show_tail(self, rank: int) -> None:
        """Shows a rank's last errors again, unless no other rank can have hidden them."""
        lines = self._errors[rank]
        if len(self._errors) > 1 and lines.tail:
            self.say(f"the last errors of rank {rank}:")
            lines.write(b"".join(lines.tail))

    def _write(self, stream: TextIO, data: bytes) -> None:
        try:
            stream.buffer.write(data)
            stream.flush()
        except (OSError, ValueError):  # Nobody listens any more, as to a pipe into `head`.
            self._events.put(Event("asked", -1, signal.SIGPIPE, time.monotonic()))
            with contextlib.suppress(OSError, ValueError), Path(os.devnull).open("wb") as nowhere:
                os.dup2(nowhere.fileno(), stream.fileno())


def _prefix(rank: int, ranks: int, stream: TextIO) -> bytes:
    text = f"[{rank:>{len(str(ranks - 1))}}]"
    if stream.isatty() and "NO_COLOR" not in os.environ:
        text = f"\x1b[{_COLOURS[rank % len(_COLOURS)]}m{text}\x1b[0m"
    return f"{text} ".encode()


class _Lines:
    """One stream, cut into lines.

    A line that is drawn again and again after a carriage return, as a progress bar is, is shown in
    its last state, and at most once a second before.

    Args:
        prefix: stands before each line.
        write: takes what is to be shown.

    Attributes:
        tail: the last lines, as shown.
        tail_until: what comes later does not belong to it, by the monotonic clock.
        write: as given.
    """

    def __init__(self, prefix: bytes, write: Callable[[bytes], None]):
        self._prefix, self.write = prefix, write
        self._pending: list[bytes] = []
        self._next_redraw = 0.0
        self.tail: deque[bytes] = deque(maxlen=_TAIL_LINES)
        self.tail_until = float("inf")

    def take(self, data: bytes) -> None:
        """Takes what has been written; nothing means that this was all."""
        self._pending.append(data)
        if data and b"\n" not in data and b"\r" not in data:
            return
        *lines, rest = b"".join(self._pending).split(b"\n")
        lines = [line.rstrip(b"\r").rpartition(b"\r")[2] for line in lines]
        body = rest.rstrip(b"\r")
        *drawn, last = body.split(b"\r")
        self._pending = [last, rest[len(body) :]]  # The return may be half of the end of a line.
        if not data:
            lines += [last] if last else []
        elif any(drawn) and time.monotonic() > self._next_redraw:
            self._next_redraw = time.monotonic() + _REDRAW_SECONDS
            lines.append(next(filter(None, reversed(drawn))))
        shown = [b"%s%s\n" % (self._prefix, line) for line in lines]
        if time.monotonic() < self.tail_until:
            self.tail.extend(shown)
        if shown:
            self.write(b"".join(shown))
