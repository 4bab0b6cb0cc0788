"""`PodEvents`: a sequence of events that all ranks of a pod read, and roll calls by it."""

from __future__ import annotations

import contextlib
import os
import queue
import select
import socket
import threading
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

from stepcache.distributed.hang_report import Row
from stepcache.distributed.service_calls import LimitedService
from stepcache.jaxcompat.coordination import Service, Unreachable
from stepcache.link import plain

ANSWER_SECONDS = 5.0
"""How long a process may take to answer a roll call."""
START_SECONDS = 60.0
"""How long the service may take to note the processes of a pod."""
ENDED = "its process has ended"
_END_SECONDS = 2.0  # How long a process may take to end after it has left the pod.
_HEARTBEAT_SECONDS = 60.0
_EVENTS, _PROCESSES, _ROLL, _LEFT = (
    f"stepcache/{name}" for name in ("events", "processes", "roll", "left")
)


class PodEvents:
    """One sequence of events, which any rank may append to and all ranks read.

    A daemon thread waits for the next event in a single call of the service, so that a quiet pod
    makes no calls.

    Raises:
        Unreachable: the service does not answer.
    """

    def __init__(self, service: Service, rank: int):
        self._listening, self._rank = service, rank
        self._service = LimitedService(service, 2 * ANSWER_SECONDS)
        # Receives (number, event) of each event, and ("unreachable", "") at the end.
        self.inbox: queue.SimpleQueue[tuple[Any, Any]] = queue.SimpleQueue()
        self.over = False  # Whether a loss has been announced; later events are not read.
        self._received = self._handled = 0  # Numbers of the next events.
        self._machine = _machine()
        self._neighbours: dict[int, int] = {}
        self._list_after, self._list_pause = 0.0, ANSWER_SECONDS
        # All ranks do this at once, when nobody is known to be lost: the service may take longer.
        patient = LimitedService(service, START_SECONDS)
        patient.put(f"{_PROCESSES}/{self._machine}/{rank}", str(os.getpid()).encode())
        self.thread = threading.Thread(target=self._listen, name="stepcache events", daemon=True)
        self.thread.start()

    def _listen(self) -> None:
        with contextlib.suppress(Unreachable):
            while True:
                number = self._received
                event = plain.unpack(self._listening.get(f"{_EVENTS}/{number}"))
                self._received = number + 1
                self.inbox.put((number, event))
                if event["kind"] == "lost":  # No thread may be in a call when the process ends.
                    self.over = True
                    return
        self.inbox.put(("unreachable", ""))

    def note_handled(self, number: int) -> None:
        """Notes that this process has acted on an event."""
        self._handled = max(self._handled, number + 1)

    def append(self, kind: str, **more: Any) -> int | None:
        """Appends an event and returns its number; None if another event is to be handled first."""
        number = self._received if kind == "lost" else self._handled
        event = plain.pack({"kind": kind, "by": self._rank, **more})
        return number if self._service.put(f"{_EVENTS}/{number}", event) else None

    def _processes(self) -> dict[int, tuple[str, int]]:
        """Returns machine and process identifier of each rank."""
        names = self._service.listed(f"{_PROCESSES}/")
        return {int(name.split("/")[1]): (name.split("/")[0], int(names[name])) for name in names}

    def ended_neighbours(self) -> list[int]:
        """Returns the ranks of this machine whose processes have ended."""
        if time.monotonic() > self._list_after:  # New ones may have started.
            self._list_after = time.monotonic() + self._list_pause
            self._list_pause *= 2
            listed = self._service.listed(f"{_PROCESSES}/{self._machine}/")
            self._neighbours = {int(rank): int(pid) for rank, pid in listed.items()}
        return [rank for rank, pid in self._neighbours.items() if _has_ended(pid)]

    def expect_new_neighbours(self) -> None:
        """Makes `ended_neighbours` list the processes of this machine again, and then rarely."""
        self._list_after, self._list_pause = 0.0, _HEARTBEAT_SECONDS

    def answer(self, number: int, row: Row) -> None:
        """Answers the roll call of an event."""
        self._service.put(f"{_ROLL}/{number}/{self._rank}", plain.pack(asdict(row)))

    def call_roll(self, row: Row) -> tuple[dict[int, Row], dict[int, str]] | None:
        """Asks all ranks where they are, as `row` says of this one.

        Returns:
            The answers, by rank, and why other ranks did not answer; None if another event is to be
            handled first.
        """
        if (number := self.append("roll")) is None:
            return None
        self.note_handled(number)
        self.answer(number, row)
        processes = self._processes()
        deadline, pause = time.monotonic() + ANSWER_SECONDS, 0.02
        while True:
            answers = self._service.listed(f"{_ROLL}/{number}/")
            rows = {int(rank): Row(**plain.unpack(packed)) for rank, packed in answers.items()}
            silent = {
                rank: ENDED if self._ended_here(*processes[rank]) else "does not answer"
                for rank in processes.keys() - rows.keys()
            }
            if all(why == ENDED for why in silent.values()) or time.monotonic() > deadline:
                return rows, silent
            if self._received > number + 1:  # That event may be the loss.
                return None
            pause *= 2  # All answers are read each time.
            time.sleep(max(0.0, min(pause, deadline - time.monotonic())))

    def _ended_here(self, machine: str, pid: int) -> bool:
        return machine == self._machine and _has_ended(pid)

    def leave(self, wait_for_others_but: set[int] | None, seconds: float) -> None:
        """Leaves a broken pod.

        Args:
            wait_for_others_but: waits until all other ranks but these have left or ended; None does
                not wait.
            seconds: the time limit.
        """
        self._service.put(f"{_LEFT}/{self._rank}", b"1")
        if wait_for_others_but is None:
            return
        processes = self._processes()
        others = processes.keys() - wait_for_others_but - {self._rank}
        deadline = time.monotonic() + seconds
        while silent := others - {int(rank) for rank in self._service.listed(f"{_LEFT}/")}:
            # One that failed, too, takes this rank for lost, and does not say that it leaves.
            if all(self._ended_here(*processes[rank]) for rank in silent):
                break
            if time.monotonic() > deadline:
                return
            time.sleep(0.1)
        # JAX aborts a process that still runs when the service ends.
        deadline = min(deadline, time.monotonic() + _END_SECONDS)
        while time.monotonic() < deadline:
            if all(self._ended_here(*processes[rank]) for rank in others):
                return
            time.sleep(0.05)


def _machine() -> str:
    """Returns a name of this machine and of the namespace of its process identifiers."""
    parts = [socket.gethostname()]
    with contextlib.suppress(OSError):
        parts.append(Path("/proc/sys/kernel/random/boot_id").read_text().strip())
        parts.append(str(Path("/proc/self/ns/pid").stat().st_ino))
    return "-".join(parts)


def _has_ended(pid: int) -> bool:
    """Returns whether a process of this machine has certainly ended."""
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
