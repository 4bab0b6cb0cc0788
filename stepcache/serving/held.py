"""The variables that a host holds: `HeldVariables`, and `HostState`, which a snapshot keeps."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import NamedTuple

from stepcache.serving.coding import Coding
from stepcache.serving.messages import BlockLayout, LeafType
from stepcache.serving.shared_memory import Block
from stepcache.serving.tables import SavedTable


@dataclass(slots=True)
class HeldVariables:
    """Variables that the host holds. A write makes new ones.

    Attributes:
        number: the version: how often they were written.
        token: identifies the sequence of these writes. After a restart, clients may repeat writes
            in another order, so that one number can stand for two values.
        assigned: epoch and moment of the host at the last assignment. Earlier writes are not
            repeated.
        rule: the exported optimizer; empty for none.
        state, state_types: block of the optimizer's state, and types of the leaves in it.
    """

    layout: BlockLayout
    number: int
    token: int
    assigned: tuple[int, int]
    value: Block
    rule: bytes = b""
    state: Block | None = None
    state_types: list[LeafType] = field(default_factory=list)
    _codings: dict[str, Coding] = field(default_factory=dict)
    _coded: dict[str, tuple[int, Block]] = field(default_factory=dict)  # Token and block, by wire.

    def coding(self, wire: str) -> Coding:
        """Returns the coding of the value for a wire; "" for none."""
        if wire not in self._codings:
            self._codings[wire] = Coding(self.layout.types, wire)
        return self._codings[wire]

    def block(self, wire: str, allocate: Callable[[int], Block]) -> Block:
        """Returns the coded value. It is coded once for each version and wire."""
        coding = self.coding(wire)
        if coding.wire is None:
            return self.value
        token, block = self._coded.get(wire, (0, self.value))
        if token != self.token:
            block = allocate(coding.layout.size_bytes)
            coding.layout.fill(block.data, coding.encode(self.layout.views(self.value.data)))
            self._coded[wire] = self.token, block
        return block


class LastWrite(NamedTuple):
    """The last write of a client that was applied, and what it is confirmed with.

    Attributes:
        sequence: its number; or that of a later one, which a snapshot has lost.
        moment, number, token: as in `Written`; 0 if no write is known.
    """

    sequence: int = 0
    moment: int = 0
    number: int = 0
    token: int = 0


class HostState(NamedTuple):
    """The state of a host at one moment, for snapshots and images. Its blocks do not change."""

    variables: dict[str, HeldVariables]
    applied: dict[str, LastWrite]
    moment: int
    processes: dict[str, str]
    tables: dict[str, SavedTable]
