"""`Unsaved`: the writes of a client that no snapshot is known to have."""

from __future__ import annotations

import collections
from dataclasses import dataclass, replace

from stepcache.serving.held import Block
from stepcache.serving.messages import WriteRequest


@dataclass(eq=False, slots=True)
class Sent:
    """A write that no snapshot is known to have. The host has confirmed it if it has a stamp."""

    request: WriteRequest
    block: Block
    stamp: tuple[int, int] | None = None


class Unsaved(collections.deque[Sent]):
    """Writes in the order of their numbers.

    Attributes:
        size_bytes: of their blocks.
        next: the number of the next write.
    """

    def __init__(self) -> None:
        super().__init__()
        self.size_bytes, self.next = 0, 1

    def add(self, sent: Sent) -> None:
        """Adds a write that has the next number."""
        self.append(sent)
        self.size_bytes += sent.block.data.size
        self.next += 1

    def drop(self, sent: Sent) -> None:
        """Drops a write that the host refuses; those after it move up."""
        if sent not in self:
            return
        self.remove(sent)
        self.size_bytes -= sent.block.data.size
        for each in self:
            if each.request.sequence > sent.request.sequence:
                each.request = replace(each.request, sequence=each.request.sequence - 1)
        self.next -= 1

    def forget(self, saved: int) -> None:
        """Drops the writes up to a number: a snapshot has them."""
        while self and self[0].request.sequence <= saved:
            self.size_bytes -= self.popleft().block.data.size
