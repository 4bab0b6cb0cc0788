"""The variables that a host holds: `HeldVariables`, and `HostState`, which a snapshot keeps."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

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
