"""Copies what the ranks of a launch write, in whole lines, with the rank before each."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Callable
from pathlib import Path
from typing import IO, TextIO

_TAIL_LINES = 40
_COLOURS = (36, 33, 35, 32, 34, 31)


class Output:
    """Copies the streams of ranks, in a thread for each, and keeps the last lines of their errors.

    Calls `on_closed` when nobody reads the launcher's own output any more.
    """

    def __init__(self, on_closed: Callable[[], None]):
        self._on_closed, self._writing = on_closed, threading.Lock()
        self._tails: list[deque[bytes]] = []
        self._threads: list[threading.Thread] = []

    def add(self, rank: int, ranks: int, process: subprocess.Popen[bytes]) -> None:
        """Starts to copy both streams of a rank."""
        for pipe, stream in ((process.stdout, sys.stdout), (process.stderr, sys.stderr)):
            tail = deque(maxlen=_TAIL_LINES)
            arguments = (pipe, stream, _prefix(rank, ranks, stream), tail)
            self._threads.append(threading.Thread(target=self._copy, args=arguments, daemon=True))
            self._threads[-1].start()
        self._tails.append(tail)

    def _copy(self, pipe: IO[bytes], stream: TextIO, prefix: bytes, tail: deque[bytes]) -> None:
        with pipe:
            for line in pipe:  # A progress bar, drawn after carriage returns, is shown at its end.
                tail.append(prefix + line.rstrip(b"\r\n").rpartition(b"\r")[2] + b"\n")
                self._write(stream, tail[-1])

    def join(self, timeout: float) -> None:
        """Waits for the end of all streams. A process that left its rank's group may hold one."""
        deadline = time.monotonic() + timeout
        for thread in self._threads:
            thread.join(max(0.0, deadline - time.monotonic()))

    def say(self, text: str) -> None:
        """Writes a line of the launcher's own."""
        self._write(sys.stderr, f"stepcache launch: {text}\n".encode())

    def show_tail(self, rank: int) -> None:
        """Shows a rank's last errors again, if there are other ranks that can have hidden them."""
        if len(self._tails) > 1 and self._tails[rank]:
            self.say(f"the last errors of rank {rank}:")
            self._write(sys.stderr, b"".join(self._tails[rank]))

    def _write(self, stream: TextIO, data: bytes) -> None:
        try:
            with self._writing:
                stream.buffer.write(data)
                stream.flush()
        except (OSError, ValueError):  # As after `| head`.
            self._on_closed()
            with contextlib.suppress(OSError, ValueError), Path(os.devnull).open("wb") as nowhere:
                os.dup2(nowhere.fileno(), stream.fileno())


def _prefix(rank: int, ranks: int, stream: TextIO) -> bytes:
    text = f"[{rank:>{len(str(ranks - 1))}}]"
    if stream.isatty() and "NO_COLOR" not in os.environ:
        text = f"\x1b[{_COLOURS[rank % len(_COLOURS)]}m{text}\x1b[0m"
    return f"{text} ".encode()
