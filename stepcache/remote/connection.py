"""`Connection`: a client's connection to the coordinator of some tasks."""

from __future__ import annotations

import contextlib
import itertools
import os
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import zmq

from stepcache.errors import RankLostError, TaskError
from stepcache.remote.local_tasks import address
from stepcache.remote.messages import Kind, Message, packed, parse, receive_array, send_array
from stepcache.serving.local_transport import _context_of
from stepcache.serving.shared_memory import Opened, Pool
from stepcache.storage.load_markers import Process
from stepcache.units import counted

_POLL_MS = 200
_RUNS = (Kind.RUN, Kind.PUT, Kind.BIND)
_ANSWERED = (Kind.OPEN, Kind.FETCH, Kind.SAVE, Kind.RESTORE)
_FREE_AT_ONCE = 128
_FREE_BYTES = 64 << 20


class Connection:
    """Sends commands of this process, and receives replies. Thread-safe.

    Args:
        directory: of the tasks.
        name: of the client; empty for one whose state is dropped when it ends.
        watch: name of a client whose variables this one only reads; empty for none.
        in_flight: how many runs may be under way.
        timeout: seconds that the tasks may take to start.

    Attributes:
        about: what the tasks are: their number, devices and platform.
        incarnation: of the tasks; raised each time they are started.
        sent_bytes: bytes of messages, and of the values that they bring.
        lock: held while the socket is used.
    """

    def __init__(
        self, directory: Path, name: str, watch: str, in_flight: int, timeout: float
    ) -> None:
        self.directory, self._name, self._watch = directory, name, watch
        self._in_flight = in_flight
        self.lock = threading.RLock()
        self._numbers = itertools.count(1)
        self._socket: Any = None
        self._pool, self._opened = Pool(), Opened()
        self._replies: dict[int, list[Message]] = {0: []}  # That somebody waits for.
        self._failures: dict[int, str] = {}  # By run.
        self._kept: deque[tuple[int, list[Any]]] = deque()  # Values of runs that are under way.
        self._freed: list[list[int]] = []
        self._freed_bytes = 0
        self._lost: RankLostError | None = None
        self.about: dict[str, Any] = {}
        self.client, self.incarnation = 0, 0
        self.runs, self.done = 0, 0
        self.sent_bytes = {"runs": 0, "values": 0, "other": 0}
        self.on_restart: list[Callable[[], None]] = []
        self._connect(time.monotonic() + timeout)

    # ---- connecting ------------------------------------------------------------------------------

    def _connect(self, deadline: float) -> None:
        found = None
        while (found := address(self.directory)) is None:
            if time.monotonic() > deadline:
                raise TaskError(
                    "no tasks run in this directory",
                    where=str(self.directory),
                    hint="start them: stepcache serve --tasks 2x4 --directory DIR",
                )
            time.sleep(0.02)
        self._coordinator = Process.parse(found["process"])
        self._socket = _context_of(os.getpid()).socket(zmq.DEALER)
        for option, value in ((zmq.LINGER, 200), (zmq.SNDHWM, 0), (zmq.RCVHWM, 0)):
            self._socket.setsockopt(option, value)
        self._socket.connect(found["address"])
        body = packed(name=self._name, process=str(Process.current()), watch=self._watch)
        self._send(Message(Kind.HELLO, body=body))
        while not self.incarnation:
            if time.monotonic() > deadline:
                raise TaskError(
                    "the tasks have not started in time",
                    where=str(self.directory),
                    hint=f"see {self.directory}/task*.log",
                )
            self._receive_one(0.2)

    def close(self) -> None:
        """Leaves: drops what this client holds, unless it has a name."""
        with self.lock:
            if self._socket is not None:
                with contextlib.suppress(zmq.ZMQError):
                    self._send(Message(Kind.BYE, self.client, self.incarnation))
                self._socket.close()
                self._socket = None

    # ---- messages --------------------------------------------------------------------------------

    def _send(self, message: Message) -> None:
        if self._socket is None:
            raise TaskError("the session with these tasks has been closed")
        frames = message.frames()
        if len(frames) == 1:
            self._socket.send(frames[0], zmq.NOBLOCK)
        else:
            self._socket.send_multipart(frames, zmq.NOBLOCK)

    def _receive_one(self, seconds: float) -> bool:
        """Takes one message if there is one in time."""
        if self._socket.getsockopt(zmq.EVENTS) & zmq.POLLIN:
            self._receive_now()
            return True
        if not self._socket.poll(int(seconds * 1000)):
            if self._coordinator is not None and self._coordinator.has_ended():
                self._set_lost("the coordinator of the tasks has ended", [])
            return False
        self._receive_now()
        return True

    def _receive_now(self) -> None:
        self._take(parse(self._socket.recv_multipart()))

    def _take(self, message: Message) -> None:
        kind = message.kind
        if kind is Kind.DONE:
            self.done = max(self.done, message.number)
            while self._kept and self._kept[0][0] <= self.done:
                self._kept.popleft()
        elif kind is Kind.WELCOME:
            self.client = message.client or self.client
            if message.incarnation:
                self.about, self.incarnation = message.data(dict[str, Any]), message.incarnation
        elif kind is Kind.LOST:
            about = message.data(dict[str, Any])
            if message.incarnation == self.incarnation:
                self._set_lost(about["why"], about["ranks"])
        elif kind is Kind.FAILED:
            about = message.data(dict[str, Any])
            if Kind[about["command"]] in _RUNS:
                self._failures.setdefault(message.number, about["why"])
            else:
                is_program = about["command"] == Kind.PROGRAM.name
                self._replied(0 if is_program else message.number, message)
        elif kind in (Kind.READY, Kind.NEED_PROGRAM, Kind.STATUS):
            self._replied(0, message)
        elif kind is Kind.REFUSED and message.value in _RUNS:
            self._failures.setdefault(message.number, message.data(dict[str, Any])["why"])
            self.done = max(self.done, message.number)
        elif kind is Kind.REFUSED and message.value == Kind.PROGRAM:
            self._replied(0, message)
        elif kind is Kind.REFUSED and (not message.number or message.number not in self._replies):
            raise TaskError(f"the tasks refuse: {message.data(dict[str, Any])['why']}")
        else:
            self._replied(message.number, message)

    def _replied(self, number: int, message: Message) -> None:
        if number in self._replies:
            self._replies[number].append(message)

    def _set_lost(self, why: str, ranks: Sequence[int]) -> None:
        after = f"after run {self.done} of this client" if self.done else "before its first run"
        self._lost = RankLostError(
            f"the tasks were lost: {why}",
            ranks,
            where=f"{self.directory}, {after}",
            hint="what they held is gone: make the variables again, or restore a checkpoint",
        )
        self._replies = {0: []}
        for each in (self._kept, self._failures, self._freed):  # Numbers of runs begin again.
            each.clear()
        self.incarnation = 0
        self.runs = self.done = 0
        for forget in self.on_restart:
            forget()

    def raise_if_lost(self) -> None:
        """Raises `RankLostError` once after tasks were lost. Later calls use the new ones."""
        if self._lost is not None:
            lost, self._lost = self._lost, None
            raise lost

    def ready(self) -> None:
        """Waits until the tasks can take commands.

        Raises:
            RankLostError: tasks were lost since the last call.
        """
        while self._socket is not None and self._socket.getsockopt(zmq.EVENTS) & zmq.POLLIN:
            self._receive_now()
        self.raise_if_lost()
        while not self.incarnation:
            self._receive_one(_POLL_MS / 1000)
            self.raise_if_lost()

    # ---- commands --------------------------------------------------------------------------------

    def run(
        self, form: int, body: bytes, blobs: Sequence[Any], kept: list[Any], kind: Kind = Kind.RUN
    ) -> int:
        """Starts a run. Waits if too many are under way.

        Args:
            form: number of the call form.
            body: a new form, and values; empty for none.
            blobs: small values.
            kept: blocks that hold large values.
            kind: `PUT` keeps arrays without a program.

        Returns:
            Its number.
        """
        self.wait(self.runs + 1 - self._in_flight)
        self.runs += 1
        message = Message(kind, self.client, self.incarnation, self.runs, form, body, blobs)
        self._send(message)
        self.sent_bytes["runs"] += message.size_bytes
        self.sent_bytes["values"] += sum(block.data.size for block in kept)
        if kept:
            self._kept.append((self.runs, kept))
        return self.runs

    def wait(self, number: int) -> None:
        """Waits until a run of this client is done.

        Raises:
            RankLostError: the tasks were lost.
        """
        with self.lock:
            while self.done < number:
                self._receive_one(_POLL_MS / 1000)
                self.raise_if_lost()

    def check(self, number: int) -> None:
        """Raises `TaskError` if a run is known to have failed."""
        if (why := self._failures.get(number)) is not None:
            raise TaskError(f"a step failed on the tasks: {why}", where=f"run {number}")

    def command(
        self, kind: Kind, value: int = 0, body: bytes = b"", blobs: Any = (), number: int = 0
    ) -> int:
        """Sends a command that is no run. Returns its number, for `reply`."""
        number = number or next(self._numbers)
        if kind in _ANSWERED:
            self._replies[number] = []
        message = Message(kind, self.client, self.incarnation, number, value, body, blobs)
        self._send(message)
        self.sent_bytes["other"] += message.size_bytes
        return number

    def reply(self, number: int, count: int = 1) -> list[Message]:
        """Waits for the replies to a command.

        Args:
            number: of the command; 0 for a program.
            count: how many replies there will be.

        Raises:
            RankLostError: the tasks were lost.
            TaskError: one of them failed, or refused.
        """
        while len(found := self._replies.get(number, [])) < count:
            self._receive_one(_POLL_MS / 1000)
            self.raise_if_lost()
            for each in found:
                if each.kind in (Kind.FAILED, Kind.REFUSED):
                    self._replies.pop(number)
                    self._replies.setdefault(0, [])
                    why = each.data(dict[str, Any])["why"]
                    what = "refuse" if each.kind is Kind.REFUSED else "failed"
                    raise TaskError(f"the tasks {what}: {why}")
        self._replies.pop(number)
        self._replies.setdefault(0, [])
        return found

    # ---- programs --------------------------------------------------------------------------------

    def define(self, body: bytes, exported: bytes) -> tuple[int, dict[str, Any]]:
        """Has a program compiled by all tasks, and sends it if they do not know it.

        Returns:
            Its number, and what the tasks say of it.
        """
        with self.lock:
            self.ready()
            self.command(Kind.PROGRAM, body=body)
            (answer,) = self.reply(0)
            if answer.kind is Kind.NEED_PROGRAM:
                self.command(Kind.PROGRAM, body=body, blobs=(exported,))
                (answer,) = self.reply(0)
            return answer.value, answer.data(dict[str, Any])

    # ---- values ----------------------------------------------------------------------------------

    def describe(self, array: np.ndarray, blobs: list[Any], kept: list[Any]) -> list[Any]:
        """Describes an array for a message; see `send_array`."""
        return send_array(array, self._pool, blobs, kept)

    def fetch(self, refs: Sequence[Any], run: int, count: int) -> list[list[Any]]:
        """Fetches arrays.

        Args:
            refs: what to fetch, as call forms say it, seen from run `run`.
            run: a number.
            count: how many tasks have parts of them: one, or all.

        Returns:
            For each array rows of its bounds and data, from all tasks.
        """
        with self.lock:
            self.ready()
            number = self.command(Kind.FETCH, run, packed(**{"refs": refs, "from": count}))
            found: list[Any] = []
            for message in self.reply(number, count):
                for index, bounds, row in message.data(dict[str, Any])["rows"]:
                    found.append((index, bounds, receive_array(row, self._opened, message.blobs)))
            return found

    def free(self, rows: Sequence[list[int]], size_bytes: int) -> None:
        """Has arrays dropped, soon. Garbage collection may call it at any point."""
        self._freed += rows
        self._freed_bytes += size_bytes

    def flush_freed(self) -> None:
        """Tells the tasks which arrays nobody needs, if these are many."""
        if len(self._freed) < _FREE_AT_ONCE and self._freed_bytes < _FREE_BYTES:
            return
        rows, self._freed, self._freed_bytes = self._freed, [], 0
        self.command(Kind.FREE, body=packed(rows=rows))

    def status(self) -> dict[str, Any]:
        """Returns what the coordinator holds."""
        with self.lock:
            self.ready()
            self._send(Message(Kind.STATUS, self.client, self.incarnation))
            (answer,) = self.reply(0)
            return answer.data(dict[str, Any])

    def __repr__(self) -> str:
        tasks = counted(self.about.get("tasks", 0), "task")
        return f"Connection({self.directory}, {tasks})"
