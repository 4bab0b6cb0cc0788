"""`Repeats`: the writes that clients repeat after a crash, in the order in which they were applied.

Each client repeats its own in order, but clients do not wait for each other. An assignment may come
after updates that were applied to its value.
"""

from __future__ import annotations

import bisect
from collections.abc import Callable
from typing import NamedTuple

import numpy as np

from stepcache.serving.held import HeldVariables
from stepcache.serving.messages import WriteRequest
from stepcache.serving.shared_memory import Block

Apply = Callable[[HeldVariables, WriteRequest, np.ndarray], HeldVariables]
"""Returns variables after a write, given its value."""


class Repeat(NamedTuple):
    """A repeated write and its value; when it was first applied: epoch and moment of the host."""

    stamp: tuple[int, int]
    request: WriteRequest
    block: Block


class Repeats:
    """The writes that were repeated in this recovery, by the name of their variables."""

    def __init__(self) -> None:
        self._before: dict[str, HeldVariables] = {}
        self._writes: dict[str, list[Repeat]] = {}
        self._rows: dict[str, dict[int, tuple[int, int]]] = {}  # Stamps of assigned rows of tables.

    def clear(self) -> None:
        """Forgets all of them: the recovery has ended."""
        for each in (self._before, self._writes, self._rows):
            each.clear()

    def applied(self, held: HeldVariables, write: Repeat, apply: Apply) -> HeldVariables:
        """Returns variables after one more write.

        Updates come in any order. An assignment goes before the updates that followed it, and an
        optimizer applies those that followed it alone.
        """
        name = write.request.name
        before, writes = self._before.setdefault(name, held), self._writes.setdefault(name, [])
        place = bisect.bisect(writes, write.stamp, key=lambda each: each.stamp)
        missed = [write]
        modes = {each.request.mode for each in (write, *writes[place:])}
        if place < len(writes) and (write.request.mode == "assign" or "replace optimizer" in modes):
            held, missed = before, [*writes[:place], write, *writes[place:]]
        for each in missed:
            held = apply(held, each.request, each.block.data)
        writes.insert(place, write)
        return held

    def are_latest(self, request: WriteRequest, ids: np.ndarray) -> np.ndarray:
        """Returns for each row of a repeated assignment whether no later one has come before."""
        stamps, stamp = self._rows.setdefault(request.name, {}), (*request.stamp,)
        latest = [stamps.get(row, (0, 0)) <= stamp for row in ids.tolist()]
        stamps |= {row: stamp for row, is_so in zip(ids.tolist(), latest, strict=True) if is_so}
        return np.array(latest, bool)
