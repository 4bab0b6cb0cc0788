"""The news of a pod, the roll call of its processes, and which of this machine have ended."""

from __future__ import annotations

import contextlib
import os
import queue
import select
import socket
import threading
import time
from pathlib import Path
from typing import Any

from stepcache.distributed.hang_report import Row
from stepcache.jaxcompat.coordination import Service, Unreachable, asked
from stepcache.storage import plain

ANSWER_SECONDS = 5.0
"""How long a process has to answer a roll call."""
_ENDING_SECONDS = 2.0
"""How long a process takes to end that has said goodbye."""
_HEARTBEAT_SECONDS = 60.0
"""A process that waits asks the service at most so often, once all have met."""
_NEWS, _WHO, _ROLL, _LEFT = (f"stepcache/{name}" for name in ("news", "who", "roll", "left"))
_ENDED = "its process has ended"


class News:
    """One sequence of news, which any rank may continue and all get.

    A daemon thread waits for the next piece in a single call of the service. So quiet is free.

    Args:
        service: JAX's coordination service.
        rank: of this process.

    Attributes:
        inbox: gets (number, news) for each piece, and ("unreachable", "") at the end.
        thread: that waits.
        over: a loss has been told; nothing that comes later is heard.
    """

    def __init__(self, service: Service, rank: int):
        self._service, self._rank = service, rank
        self.inbox: queue.SimpleQueue[tuple[Any, Any]] = queue.SimpleQueue()
        self.over = False
        self._heard = self._taken = 0  # Pieces that have come, and that have been acted on.
        self._machine = _machine()
        self._neighbours: dict[int, int] = {}
        self._list_after, self._list_pause = 0.0, ANSWER_SECONDS
        service.put(f"{_WHO}/{self._machine}/{rank}", str(os.getpid()).encode())
        self.thread = threading.Thread(target=self._listen, name="stepcache news", daemon=True)
        self.thread.start()

    def _listen(self) -> None:
        with contextlib.suppress(Unreachable):
            while True:
                number = self._heard
                news = plain.unpack(self._service.get(f"{_NEWS}/{number}"))
                self._heard = number + 1
                self.inbox.put((number, news))
                if news["kind"] == "lost":  # So the end of the process finds no thread in a call.
                    self.over = True
                    return
        self.inbox.put(("unreachable", ""))

    def took(self, number: int) -> None:
        """Notes that a piece has been acted on."""
        self._taken = max(self._taken, number + 1)

    def give(self, kind: str, **more: Any) -> int | None:
        """Gives the next piece; None where others were faster, whose news is to be read first."""
        number = self._heard if kind == "lost" else self._taken
        news = plain.pack({"kind": kind, "by": self._rank, **more})
        return number if self._service.put(f"{_NEWS}/{number}", news) else None

    # ---- who is there ----------------------------------------------------------------------------

    def _everybody(self) -> dict[int, tuple[str, int]]:
        """Machine and process of each rank."""
        names = self._service.listed(f"{_WHO}/")
        return {int(name.split("/")[1]): (name.split("/")[0], int(names[name])) for name in names}

    def ended_neighbours(self) -> list[int]:
        """The ranks of this machine whose processes have ended, where the system shows that."""
        if time.monotonic() > self._list_after:  # Some may have come since.
            self._list_after = time.monotonic() + self._list_pause
            self._list_pause *= 2
            listed = self._service.listed(f"{_WHO}/{self._machine}/")
            self._neighbours = {int(rank): int(pid) for rank, pid in listed.items()}
        return [rank for rank, pid in self._neighbours.items() if _has_ended(pid)]

    def some_may_be_new(self) -> None:
        """Has the processes of this machine looked up once more, and then rarely."""
        self._list_after, self._list_pause = 0.0, _HEARTBEAT_SECONDS

    def answer(self, number: int, row: Row) -> None:
        """Answers a roll call, by the number of that news."""
        self._service.put(f"{_ROLL}/{number}/{self._rank}", plain.pack(row.packed()))

    def call_roll(self, row: Row) -> tuple[dict[int, Row], dict[int, str]] | None:
        """Has all say where they are. None where another rank's news is to be read first.

        Args:
            row: of this process.

        Returns:
            What they said, and why others did not answer.
        """
        try:
            number = asked(lambda: self.give("roll")).result(2 * ANSWER_SECONDS)
        except TimeoutError:
            text = f"does not answer within {2 * ANSWER_SECONDS:.0f} s"
            raise Unreachable(text) from None
        if number is None:
            return None
        self.took(number)
        self.answer(number, row)
        everybody = self._everybody()
        deadline, pause = time.monotonic() + ANSWER_SECONDS, 0.02
        while True:
            answers = self._service.listed(f"{_ROLL}/{number}/")
            rows = {int(rank): Row(**plain.unpack(packed)) for rank, packed in answers.items()}
            silent = dict.fromkeys(everybody.keys() - rows.keys(), "does not answer")
            for rank in silent:
                machine, pid = everybody[rank]
                if machine == self._machine and _has_ended(pid):
                    silent[rank] = _ENDED
            if all(why == _ENDED for why in silent.values()) or time.monotonic() > deadline:
                return rows, silent
            if self._heard > number + 1:  # It may be the answer, and the others have left.
                return None
            pause *= 2  # All answers are read each time.
            time.sleep(max(0.0, min(pause, deadline - time.monotonic())))

    def say_goodbye(self, wait_for_others_but: set[int] | None, seconds: float) -> None:
        """Leaves a broken pod.

        Args:
            wait_for_others_but: wait for all but these to leave; None waits for nobody.
            seconds: how long.
        """
        self._service.put(f"{_LEFT}/{self._rank}", b"1")
        if wait_for_others_but is None:
            return
        everybody = self._everybody()
        others = {each: everybody[each] for each in everybody.keys() - wait_for_others_but}
        others.pop(self._rank, None)
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline:
            left = {int(rank) for rank in self._service.listed(f"{_LEFT}/")}
            if others.keys() <= left:
                break
            time.sleep(0.1)
        # JAX aborts a process that still runs when the service goes.
        deadline = min(deadline, time.monotonic() + _ENDING_SECONDS)
        while time.monotonic() < deadline and not all(
            machine == self._machine and _has_ended(pid) for machine, pid in others.values()
        ):
            time.sleep(0.05)


def _machine() -> str:
    """Names this machine, and the numbering of its processes."""
    parts = [socket.gethostname()]
    with contextlib.suppress(OSError):
        parts.append(Path("/proc/sys/kernel/random/boot_id").read_text().strip())
        parts.append(str(Path("/proc/self/ns/pid").stat().st_ino))
    return "-".join(parts)


def _has_ended(pid: int) -> bool:
    """Whether a process of this machine has certainly ended."""
    if not hasattr(os, "pidfd_open"):
        return False
    try:
        file = os.pidfd_open(pid)
    except ProcessLookupError:
        return True
    except OSError:
        return False
    try:
        poll = select.poll()
        poll.register(file, select.POLLIN)
        return bool(poll.poll(0))
    finally:
        os.close(file)
