"""Runs that are taken back before they begin: on all tasks, or on none.

A task that has begun a run may wait in a collective for the others. So on a cancel each task first
says how far it is, and begins no other run that might be meant; then the coordinator says after
which run, the last that any of them has begun, they leave out the rest. Tasks answer in a thread of
their own, over a connection of its own, as the thread that runs may wait for the others.
"""

from __future__ import annotations

import os
import threading
import traceback
from dataclasses import dataclass, field

from stepcache.remote.messages import Kind, Message
from stepcache.serving.channel import Channel


@dataclass
class Cancel:
    """What the coordinator knows of a cancel that is under way.

    Attributes:
        number: of the client's command; 0 for a client that has left.
        last: the last run that is meant.
        begun: by task that has answered, the last run that it has begun.
    """

    number: int
    last: int
    begun: dict[int, int] = field(default_factory=dict)


class Gate:
    """Where each run of a task passes before it begins. Thread-safe."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._begun: dict[int, int] = {}  # By client, the last run.
        self._held: dict[int, int] = {}  # By client, up to which run none begins.
        self._cancelled: dict[int, list[tuple[int, int]]] = {}  # After which run, up to which.

    def begins(self, client: int, number: int) -> bool:
        """Waits until it is known whether a run may begin. Returns whether it is cancelled."""
        with self._changed:
            while number <= self._held.get(client, 0):
                self._changed.wait()
            self._begun[client] = number
            if not (ranges := self._cancelled.get(client)):
                return False
            while ranges and ranges[0][1] < number:
                ranges.pop(0)
            return bool(ranges) and ranges[0][0] < number

    def hold(self, client: int, last: int) -> int:
        """Has no run up to `last` begin. Returns the last that has begun."""
        with self._changed:
            self._held[client] = last
            return self._begun.get(client, 0)

    def cancel(self, client: int, after: int, last: int) -> None:
        """Cancels the runs after one, up to `last`; others begin."""
        with self._changed:
            self._held.pop(client, None)
            if after < last:
                self._cancelled.setdefault(client, []).append((after, last))
            self._changed.notify_all()

    def forget(self, client: int) -> None:
        """Drops what is known of a client of which no task has anything left."""
        with self._changed:
            for each in (self._begun, self._held, self._cancelled):
                each.pop(client, None)


def listen(channel: Channel[Message], incarnation: int, gate: Gate) -> None:
    """Answers the coordinator when runs are cancelled, until it ends; in a thread of its own."""
    try:
        while True:
            if (message := channel.receive()) is None:
                channel.wait()
            elif message.kind is Kind.HOLD:
                begun = gate.hold(message.client, message.number)
                reply = message._replace(incarnation=incarnation, value=begun)
                channel.send(reply.encoded())
            elif message.kind is Kind.CANCEL:
                gate.cancel(message.client, message.value, message.number)
            elif message.kind is Kind.DROP:
                gate.forget(message.client)
    except ConnectionError:
        pass  # The coordinator has ended.
    except BaseException:
        traceback.print_exc()
    os._exit(1)  # A cancel would wait for this task for ever.
