"""`Unsaved`: the writes that a client keeps because no snapshot holds them yet."""

from __future__ import annotations

import collections
from dataclasses import dataclass, replace

from stepcache.serving.held import Block
from stepcache.serving.messages import WriteRequest


@dataclass(eq=False, slots=True)
class Sent:
    """A write that no snapshot holds yet.

    Attributes:
        request, block: the write, and its value.
        stamp: epoch and moment of the host when it confirmed the write; None before that.
    """

    request: WriteRequest
    block: Block
    stamp: tuple[int, int] | None = None


class Unsaved(collections.deque[Sent]):
    """Writes, in the order of their numbers.

    Attributes:
        size_bytes: total size of their blocks.
        next: number of the next write.
        serial: number of the next write among all, with those that the host has refused.
    """

    def __init__(self) -> None:
        super().__init__()
        self.size_bytes, self.next, self.serial = 0, 1, 1

    def add(self, sent: Sent) -> None:
        """Adds the write with the next number."""
        self.append(sent)
        self.size_bytes += sent.block.data.size
        self.next += 1
        self.serial += 1

    def drop(self, sent: Sent) -> None:
        """Drops a write that the host has refused, and renumbers those after it."""
        if sent not in self:
            return
        self.remove(sent)
        self.size_bytes -= sent.block.data.size
        for each in self:
            if each.request.sequence > sent.request.sequence:
                each.request = replace(each.request, sequence=each.request.sequence - 1)
        self.next -= 1

    def forget(self, saved: int) -> None:
        """Drops the writes up to this number, which a snapshot holds."""
        while self and self[0].request.sequence <= saved:
            self.size_bytes -= self.popleft().block.data.size
