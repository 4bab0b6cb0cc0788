"""What a host holds of its variables: their values, and how readers get them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol

import numpy as np

from stepcache.serving.coding import Coding
from stepcache.serving.messages import BlockLayout, LeafType
from stepcache.serving.tables import SavedTable


class Block(Protocol):
    """Memory of a value; freed, or used again, when nothing refers to it."""

    data: np.ndarray  # Flat, of bytes.


class Rule(Protocol):
    """An optimizer."""

    state_types: list[LeafType]

    def init(self, value: Sequence[np.ndarray]) -> Sequence[Any]:
        """The leaves of its state for a value."""
        ...

    def update(
        self, value: Sequence[Any], state: Sequence[Any], update: Sequence[Any]
    ) -> tuple[Sequence[Any], Sequence[Any]]:
        """The leaves of a new value and state."""
        ...


@dataclass(slots=True)
class HeldVariables:
    """Variables of the host.

    Attributes:
        layout: of the block of the value.
        number: the version.
        token: stands for the writes that led to it. After a restart clients may repeat their writes
            in another order: the same number is another value then.
        assigned: epoch and moment of the host when the value was assigned. What was written before
            is not done again.
        value: its block.
        rule: the optimizer as it was sent; empty for none.
        state: the block of the optimizer's state.
    """

    layout: BlockLayout
    number: int
    token: int
    assigned: tuple[int, int]
    value: Block
    rule: bytes = b""
    state: Block | None = None
    _codings: dict[str, Coding] = field(default_factory=dict)
    _coded: dict[str, tuple[int, Block]] = field(default_factory=dict)  # Token and block, by wire.

    def coding(self, wire: str) -> Coding:
        """How the value is coded on a wire; "" for none."""
        if wire not in self._codings:
            self._codings[wire] = Coding(self.layout.types, wire)
        return self._codings[wire]

    def block(self, wire: str, allocate: Callable[[int], Block]) -> Block:
        """The block of the value as a wire codes it: once, however many readers it has."""
        coding = self.coding(wire)
        if coding.wire is None:
            return self.value
        token, block = self._coded.get(wire, (0, self.value))
        if token != self.token:
            block = allocate(coding.layout.size_bytes)
            coding.layout.fill(block.data, coding.encode(self.layout.views(self.value.data)))
            self._coded[wire] = self.token, block
        return block


class HostState(NamedTuple):
    """All that a snapshot keeps, as of one moment. Its blocks do not change."""

    variables: dict[str, HeldVariables]
    applied: dict[str, int]
    moment: int
    processes: dict[str, str]
    tables: dict[str, SavedTable]
