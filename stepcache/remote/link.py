"""`Link`: a client's end of the connection with the coordinator: messages, waits and losses."""

from __future__ import annotations

import contextlib
import functools
import logging
import math
import os
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from stepcache.errors import DeadlineError, RankLostError, TaskError
from stepcache.link.processes import Process
from stepcache.remote.local_tasks import address
from stepcache.remote.messages import RUNS, Kind, Message, decode, packed
from stepcache.serving.channel import Channel
from stepcache.serving.messages import MalformedMessageError

_WAIT_SECONDS = 1.0  # After which a wait looks again whether the tasks were lost.
_ANSWER_SECONDS = 10.0  # That the coordinator may take to say where the tasks are.
_COORDINATOR_ENDED = "the coordinator of the tasks has ended"
_log = logging.getLogger("stepcache")
_SILENT_SECONDS = 2.0  # Before it logs that no tasks are there.


class Link:
    """Sends messages of this process, and receives them. Thread-safe.

    Of the threads that wait one receives for all.

    Args:
        where: the directory of the tasks, or another name for them in messages.
        name: of the client; empty for one whose state is dropped when it ends.
        watch: name of a client whose variables this one only reads; empty for none.
        timeout: seconds that the tasks may take to start.
        hang_seconds, deadline_seconds: see `Session`.
        find: returns the address of the coordinator; by default it is in the directory.

    Attributes:
        shares: whether the coordinator can open memory of this process.
        about: what the tasks are: their number, devices and platform.
        incarnation: of the tasks; raised each time they are started; 0 while they are.
        lock: held while messages are sent, or taken.
        runs, done: numbers of the last run that was sent, and of the last that is done.
    """

    def __init__(
        self,
        where: Path | str,
        name: str = "",
        watch: str = "",
        timeout: float = 10.0,
        hang_seconds: float = math.inf,
        deadline_seconds: float = math.inf,
        find: Callable[[], dict[str, Any] | None] | None = None,
    ) -> None:
        self.where, self._name, self._watch = where, name, watch
        self._find = find or functools.partial(address, Path(where))
        self.shares = True
        self._hang_seconds = hang_seconds
        self._deadline_seconds, self._start_seconds = deadline_seconds, timeout
        self.lock = threading.RLock()
        self._has_received = threading.Condition(self.lock)
        self._receiver = 0  # The thread that receives; 0 for none.
        self._channel: Channel[Message] | None = None
        self._pid, self._heard = os.getpid(), time.monotonic()
        self._replies: dict[int, list[Message]] = {}  # That somebody waits for.
        self._failures: dict[int, str] = {}  # By run.
        # Runs under way that have brought values: what is kept of these, and what was sent.
        self._kept: deque[tuple[int, list[Any], int]] = deque()
        self._kept_bytes = 0  # Of what was sent.
        self._loss: tuple[str, Sequence[int], str] = "", (), ""
        self._is_told = True  # Whether the latest loss of tasks has been raised.
        self._taken = self._reports = 0  # Messages, and those of them that say where tasks hang.
        self.about: dict[str, Any] = {}
        self.client, self.incarnation = 0, 0
        self.runs, self.done = 0, 0
        self.on_restart: list[Callable[[], None]] = []
        try:
            self._connect(time.monotonic() + timeout)
        except BaseException:
            self.close()
            raise

    def _connect(self, deadline: float) -> None:
        silent_until = time.monotonic() + _SILENT_SECONDS
        while (channel := self._opened_channel()) is None:
            if time.monotonic() > silent_until:
                _log.warning("waiting for `stepcache serve --tasks`, at %s", self.where)
                silent_until = math.inf
            if time.monotonic() > deadline:
                raise TaskError(
                    "no tasks run in this directory" if self.shares else "no such tasks run",
                    where=str(self.where),
                    hint="start them: stepcache serve --tasks 2x4 --directory DIR",
                )
            time.sleep(0.02)
        self._channel = channel
        body = packed(name=self._name, process=str(Process.current()), watch=self._watch)
        self.send(Message(Kind.HELLO, body=body).encoded())
        self._wait_for_start(deadline)

    def _wait_for_start(self, deadline: float) -> None:
        while not self.incarnation:
            if time.monotonic() > deadline:
                raise TaskError(
                    "the tasks have not started in time",
                    where=str(self.where),
                    hint=f"see {self.where}/task*.log" if self.shares else "see the logs of Ray",
                )
            self._receive(0.2)
            self.raise_if_lost()

    def _opened_channel(self) -> Channel[Message] | None:
        found = self._find()
        key = found.get("key", b"") if found else b""
        self.shares = not key
        with contextlib.suppress(OSError):
            return Channel.to(found["address"], decode, key) if found else None
        return None

    def close(self) -> None:
        """Leaves: the tasks run what this client has started, and then drop what it holds. Under a
        name, its variables stay.
        """
        is_forked = self._pid != os.getpid()  # The lock may be held for ever then.
        with contextlib.nullcontext() if is_forked else self.lock:
            if self._channel is not None:
                self._channel.close(for_all=not is_forked)
            self._channel = None

    def _used(self) -> Channel[Message]:
        if self._channel is None:
            raise TaskError("the session with these tasks has been closed")
        if self._pid != os.getpid():
            raise TaskError(
                "the session with these tasks belongs to the process that this one was forked from",
                hint="make a session in this process",
            )
        return self._channel

    @property
    def has_sent(self) -> bool:
        """Whether all that was to be sent has been."""
        return self._channel is None or not self._channel.unsent_bytes

    def send(self, data: bytes) -> int:
        """Sends a message, or begins to if that takes longer than waits may. Returns its size."""
        channel, started = self._used(), time.monotonic()
        try:
            channel.send(data)
            while not channel.flush() and time.monotonic() < started + self._deadline_seconds:
                channel.wait(min(_WAIT_SECONDS, self._deadline_seconds), to_send=True)
        except OSError:
            self._set_lost(_COORDINATOR_ENDED, [])
        return len(data)

    def _receive(self, seconds: float) -> None:
        """Takes the messages that have arrived; waits for one if there is none."""
        channel, thread = self._used(), threading.get_ident()
        try:
            with self._has_received:
                if self._receiver not in (0, thread):  # Ctrl-C may have left this thread there.
                    self._has_received.wait(seconds)
                    return
                self._receiver = thread
            if not self._take_arrived(channel) and seconds:
                channel.wait(seconds)
                self._take_arrived(channel)
        finally:
            with self._has_received:
                if self._receiver == thread:
                    self._receiver = 0
                    self._has_received.notify_all()

    def _take_arrived(self, channel: Channel[Message]) -> bool:
        """Takes the messages that have arrived. Returns whether there was one."""
        found = False
        with self.lock:
            try:
                channel.flush()
                while (message := channel.receive()) is not None:
                    found = True
                    self._taken += 1
                    self._take(message)
            except (OSError, MalformedMessageError):
                self._set_lost(_COORDINATOR_ENDED, [])
            if found:
                self._heard = time.monotonic()
        return found

    def _take(self, message: Message) -> None:
        kind, number = message.kind, message.number
        if kind is Kind.DONE:
            self._are_done(number)
            return
        about = message.data(dict[str, Any]) if message.body and kind is not Kind.DATA else {}
        if kind is Kind.WELCOME:
            self.client = message.client or self.client
            if message.incarnation:
                self.about, self.incarnation = about, message.incarnation
        elif kind is Kind.LOST:
            if message.incarnation == self.incarnation:
                self._set_lost(about["why"], about["ranks"])
        elif kind is Kind.HANG:
            self._reports += 1
            _log.warning("%s", about["why"])
        elif kind is Kind.REFUSED and about["kind"] == "restarted":
            pass  # `LOST` came before, and numbers have begun again since.
        elif kind is Kind.FAILED and Kind[about["command"]] in RUNS:
            self._failures.setdefault(number, about["why"])
        elif kind is Kind.REFUSED and message.value in RUNS:
            self._failures.setdefault(number, about["why"])
            self._are_done(number)
        elif kind is Kind.REFUSED and number not in self._replies:
            raise TaskError(f"the tasks refuse: {about['why']}")
        elif number in self._replies:
            self._replies[number].append(message)

    def _are_done(self, number: int) -> None:
        self.done = max(self.done, number)
        while self._kept and self._kept[0][0] <= self.done:
            self._kept_bytes -= self._kept.popleft()[2]

    def _set_lost(self, why: str, ranks: Sequence[int]) -> None:
        after = f"after run {self.done} of this client" if self.done else "before its first run"
        self._loss, self._is_told = (why, ranks, f"{self.where}, {after}"), False
        for each in (self._replies, self._kept, self._failures):
            each.clear()  # Numbers of runs begin again.
        self.incarnation = 0
        self.runs = self.done = self._kept_bytes = 0
        for forget in self.on_restart:
            forget()

    def raise_if_lost(self, incarnation: int = 0) -> None:
        """Raises `RankLostError` once after tasks were lost. Later calls use the new ones.

        The caller waits for the tasks of an incarnation; 0 for any.
        """
        if self._is_told and incarnation in (0, self.incarnation):
            return
        self._is_told = True
        why, ranks, where = self._loss
        raise RankLostError(
            f"the tasks were lost: {why}",
            ranks,
            where=where,
            hint="their arrays and variables are lost: make them again, or restore a checkpoint",
        )

    def ready(self) -> int:
        """Waits until the tasks can take commands. Returns their incarnation.

        Raises `RankLostError` if some were lost since the last call, `TaskError` if they do
        not start in time.
        """
        self._receive(0)
        self.raise_if_lost()
        self._wait_for_start(time.monotonic() + self._start_seconds)
        return self.incarnation

    def wait_until(
        self, is_so: Callable[[], bool], incarnation: int = 0, *, has_deadline: bool = True
    ) -> None:
        """Waits for the tasks; reports where they are if nothing comes of it for long.

        Args:
            is_so: whether what is waited for has come.
            incarnation: of the tasks that are waited for; by default of those that are there.
            has_deadline: whether it raises `DeadlineError` after the session's deadline.

        Raises:
            RankLostError: the tasks were lost.
        """
        incarnation, started, asked = incarnation or self.incarnation, time.monotonic(), 0.0
        reports = self._reports
        deadline = started + (self._deadline_seconds if has_deadline else math.inf)
        while not is_so():
            left = deadline - time.monotonic()
            if left <= 0:
                raise DeadlineError(
                    f"the tasks have not answered in {self._deadline_seconds:g} s",
                    where=f"{self.where}, after run {self.done} of {self.runs}",
                    hint="the tasks go on, and nothing is lost: wait for the output again",
                )
            self.raise_if_lost(incarnation)
            self._receive(min(_WAIT_SECONDS, self._hang_seconds, left))
            self.raise_if_lost(incarnation)
            now = time.monotonic()
            if not asked and now > max(started, self._heard) + self._hang_seconds:
                asked = now
                body = packed(seconds=self._hang_seconds)
                about = self.client, incarnation, self._taken
                self.send(Message(Kind.HANG, *about, body=body).encoded())
            elif 0 < asked < self._heard and self._reports == reports:
                asked = 0.0  # What has come was on its way.
            elif asked > self._heard and now > asked + _ANSWER_SECONDS:
                asked = math.inf
                logs = f"{self.where}/coordinator.log" if self.shares else "the logs of Ray"
                text = "the coordinator of the tasks has not answered for %g s; see %s"
                _log.warning(text, _ANSWER_SECONDS, logs)
