"""`Connection`: a client's connection to the coordinator of some tasks."""

from __future__ import annotations

import itertools
import time
from collections.abc import Sequence
from typing import Any

from stepcache.errors import TaskError
from stepcache.pods.watch import OF_TRANSPORT
from stepcache.remote.link import Link
from stepcache.remote.messages import Kind, Message, Values, packed, receive_array
from stepcache.serving.shared_memory import INLINE_BYTES, Opened, Pool
from stepcache.units import counted

IN_FLIGHT, IN_FLIGHT_BYTES = 32, 256 << 20
"""Runs of one client that may be under way, and bytes of their values outside shared memory."""
_SOON_ANSWERED = (Kind.FETCH, Kind.OPEN, Kind.STATUS)
_LOSS_SECONDS = 2.0
_FREE_AT_ONCE = 128
_FREE_BYTES = 64 << 20


class Connection(Link):
    """Sends the commands of this process, and receives replies. Thread-safe. Made as a `Link`.

    Attributes:
        sent_bytes: bytes of messages, and of the values that they bring.
    """

    def __init__(self, *args: Any, **options: Any) -> None:
        self._numbers = itertools.count(1)
        self._pool, self._opened = Pool(), Opened()
        self._fetching: set[int] = set()  # Numbers of the fetches that have not ended.
        self._unexplained: set[str] = set()  # Failures that no lost task was the cause of.
        self._freed: list[list[int]] = []
        self._freed_bytes = 0
        self.sent_bytes = {"runs": 0, "values": 0, "other": 0}
        super().__init__(*args, **options)
        self.on_restart += [self._freed.clear, self._unexplained.clear]

    def run(
        self,
        incarnation: int,
        form: int,
        body: bytes,
        values: Values,
        kind: Kind = Kind.RUN,
    ) -> int:
        """Starts a run, after `make_room`. Returns its number.

        Args:
            incarnation: of the tasks whose arrays the run refers to.
            form: number of the call form.
            body: a new form, and values; empty for none.
            values: that the run brings.
            kind: `PUT` keeps arrays without a program.

        Raises:
            RankLostError: these tasks were lost.
        """
        with self.lock:
            self.raise_if_lost(incarnation)
            number = self.runs + 1
            identity = kind, self.client, incarnation, number
            data = Message(*identity, form, body, values.blob).encoded()
            self.runs = number  # Before it is sent: no other run may have this number.
            if values.kept or len(values.blob) > INLINE_BYTES:
                self.sent_bytes["values"] += sum(block.data.size for block in values.kept)
                self._kept.append((number, values.kept, len(values.blob)))
                self._kept_bytes += len(values.blob)
            self.sent_bytes["runs"] += self.send(data)
        return number

    def make_room(self, incarnation: int) -> None:
        """Waits while too many runs are under way, or much is still to be sent.

        An error here, or Ctrl-C, changes nothing.
        """
        number = self.runs + 1 - IN_FLIGHT

        def has_room() -> bool:
            is_little = self._kept_bytes < IN_FLIGHT_BYTES
            return self.done >= number and self.has_sent and is_little

        if not has_room():
            self.wait_until(has_room, incarnation)

    def wait(self, number: int, incarnation: int = 0) -> None:
        """Waits until a run of this client is done, as `wait_until` does."""
        if self.done < number:
            self.wait_until(lambda: self.done >= number, incarnation)

    def has_failed(self, number: int) -> bool:
        """Whether a run is known to have failed. Outputs that it carries may have values."""
        return number in self._failures

    def check(self, number: int) -> None:
        """Raises `TaskError` if a run is known to have failed."""
        if (why := self._failures.get(number)) is not None:
            self._raise_if_lost_by(why, self.incarnation)
            raise TaskError(f"a step failed on the tasks: {why}", where=f"run {number}")

    def _raise_if_lost_by(self, why: str, incarnation: int) -> None:
        """Raises `RankLostError` where tasks say of a killed one only that they do not reach it."""
        if why in self._unexplained or not OF_TRANSPORT.search(why):
            return
        deadline = time.monotonic() + _LOSS_SECONDS
        while time.monotonic() < deadline:
            self._receive(0.1)
            self.raise_if_lost(incarnation)
        self._unexplained.add(why)

    def command(self, kind: Kind, value: int = 0, number: int = 0, **about: Any) -> None:
        """Sends a command that is neither a run nor answered."""
        with self.lock:
            identity = kind, self.client, self.incarnation, number, value
            self.sent_bytes["other"] += self.send(Message(*identity, packed(**about)).encoded())

    def ask(
        self,
        kind: Kind,
        value: int = 0,
        blob: bytes | bytearray = b"",
        count: int = 1,
        number: int = 0,
        incarnation: int = 0,
        **about: Any,
    ) -> list[Message]:
        """Sends a command with the body `about`, and waits for the replies to it.

        Args:
            kind, value, blob: of the command.
            count: how many replies there will be, unless the coordinator refuses.
            number: of the command; by default the next one.
            incarnation: of the tasks that it is for; by default of those that are there.

        Raises:
            RankLostError: the tasks were lost.
            TaskError: one of them failed, or refused.
            DeadlineError: the answer did not come in time; what takes long by itself may.
        """
        number, incarnation = number or next(self._numbers), incarnation or self.ready()
        found: list[Message] = []
        with self.lock:
            self.raise_if_lost(incarnation)
            identity = kind, self.client, incarnation, number, value
            data = Message(*identity, packed(**about), blob).encoded()
            self._replies[number] = found
            self.sent_bytes["other"] += self.send(data)

        def is_answered() -> bool:
            return len(found) >= count or any(each.kind is Kind.REFUSED for each in found)

        try:
            self.wait_until(is_answered, incarnation, has_deadline=kind in _SOON_ANSWERED)
        finally:
            self._replies.pop(number, None)
        for each in found:
            if each.kind in (Kind.FAILED, Kind.REFUSED):
                why = each.data(dict[str, Any])["why"]
                self._raise_if_lost_by(why, incarnation)
                what = "the tasks refuse: " if each.kind is Kind.REFUSED else ""
                raise TaskError(what + why, where="the tasks")
        return found

    def define(self, about: dict[str, Any], exported: bytes) -> tuple[int, dict[str, Any]]:
        """Has a program compiled by all tasks. Returns its number, and what the tasks say of it."""
        (answer,) = self.ask(Kind.PROGRAM, **about)
        if answer.kind is Kind.NEED_PROGRAM:
            (answer,) = self.ask(Kind.PROGRAM, blob=exported, **about)
        return answer.value, answer.data(dict[str, Any])

    def values(self) -> Values:
        """Returns a place for the values of a message."""
        return Values(self._pool if self.shares else None)

    def fetch(
        self, refs: Sequence[Any], run: int, count: int, incarnation: int, *, only_look: bool
    ) -> list[list[Any]]:
        """Fetches arrays. Returns rows of index, bounds and data, from all tasks.

        Args:
            refs: what to fetch, as call forms say it, seen from run `run`.
            count: how many tasks have parts of them: one, or all.
            incarnation: of these tasks.
            only_look: fetch nothing, and raise if one is not there.
        """
        with self.lock:
            self._fetching.add(number := next(self._numbers))
            # The tasks keep the memory of replies from this one on.
            first = min(self._fetching)
        about = {"refs": refs, "from": count, "first": first, "only_look": only_look}
        identity = {"count": count, "number": number, "incarnation": incarnation}
        found: list[Any] = []
        try:
            for message in self.ask(Kind.FETCH, run, **identity, **about):
                reply = message.data(dict[str, Any])
                for index, bounds, row in reply["rows"]:
                    data = receive_array(row, reply, self._opened, message.blob)
                    found.append((index, bounds, data))
        finally:
            self._fetching.discard(number)
        return found

    def free(self, rows: Sequence[list[int]], size_bytes: int) -> None:
        """Has arrays dropped, soon. Garbage collection may call it at any point."""
        self._freed += rows
        self._freed_bytes += size_bytes

    def flush_freed(self) -> None:
        """Tells the tasks which arrays nobody needs, if these are many."""
        if len(self._freed) < _FREE_AT_ONCE and self._freed_bytes < _FREE_BYTES:
            return
        rows, self._freed_bytes = self._freed[:], 0
        del self._freed[: len(rows)]
        self.command(Kind.FREE, rows=rows)

    def status(self) -> dict[str, Any]:
        """Returns what the coordinator holds."""
        (answer,) = self.ask(Kind.STATUS)
        return answer.data(dict[str, Any])

    def __repr__(self) -> str:
        tasks = counted(self.about.get("tasks", 0), "task")
        return f"Connection({self.where}, {tasks})"
