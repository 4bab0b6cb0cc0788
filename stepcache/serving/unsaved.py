"""`Unsaved`: the writes that a client keeps because no snapshot holds them yet."""

from __future__ import annotations

import collections
import itertools
from dataclasses import dataclass, replace

from stepcache.serving.messages import WriteRequest
from stepcache.serving.shared_memory import Block
from stepcache.units import counted, readable_bytes


@dataclass(eq=False, slots=True)
class Sent:
    """A write and its value, which no snapshot holds yet."""

    request: WriteRequest
    block: Block
    stamp: tuple[int, int] | None = None  # Epoch and moment of the host when it confirmed it.


class Unsaved(collections.deque[Sent]):
    """Writes, in the order of their numbers.

    Attributes:
        size_bytes: total size of their blocks.
        serial: number of the next write among all, with those that the host has refused.
    """

    def __init__(self) -> None:
        super().__init__()
        self.size_bytes, self.serial, self._forgotten = 0, 1, 0

    @property
    def next(self) -> int:
        """Number of the next write."""
        return self[-1].request.sequence + 1 if self else self._forgotten + 1

    @property
    def not_confirmed(self) -> list[Sent]:
        """The last writes, which the host has not confirmed. Only the first of them was sent."""
        found = itertools.takewhile(lambda sent: sent.stamp is None, reversed(self))
        return [*found][::-1]

    def __str__(self) -> str:
        return f"{counted(len(self), 'write')} ({readable_bytes(self.size_bytes)})"

    def add(self, sent: Sent) -> None:
        """Adds the write with the next number."""
        self.serial += 1
        self.size_bytes += sent.block.data.size
        self.append(sent)  # At last: Ctrl-C may come between two lines.

    def drop(self, sent: Sent) -> None:
        """Drops a write that the host has refused, and renumbers those after it."""
        self.remove(sent)
        self.size_bytes -= sent.block.data.size
        for each in self:
            if each.request.sequence > sent.request.sequence:
                each.request = replace(each.request, sequence=each.request.sequence - 1)

    def forget(self, saved: int) -> None:
        """Drops the writes up to this number, which a snapshot holds."""
        while self and self[0].request.sequence <= saved:
            self._forgotten = self[0].request.sequence
            self.size_bytes -= self[0].block.data.size
            self.popleft()
