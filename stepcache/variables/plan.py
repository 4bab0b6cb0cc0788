"""`Plan`: the transfers that one call needs, with the bytes that cross each link. Pure data.

For one version of one variable there is at most one transfer to each memory, whatever number of
arguments, steps or devices read it (the canonicalization of sends and receives in *A Tour of
TensorFlow*, Goldsborough 2016, Fig. 5c).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass

from stepcache.errors import TransferBudgetError

HOST_LINK, DEVICE_LINK, SERVER_LINK = "host ↔ device", "device ↔ device", "server ↔ process"

Links = tuple[tuple[str, int], ...]
"""Bytes that cross each link, without the links that nothing crosses."""


def links(host_bytes: int, device_bytes: int = 0, server_bytes: int = 0) -> Links:
    crossed = ((SERVER_LINK, server_bytes), (HOST_LINK, host_bytes), (DEVICE_LINK, device_bytes))
    return tuple((link, size) for link, size in crossed if size)


@dataclass(frozen=True, slots=True)
class Transfer:
    """The transfer of one value, or the reason why it needs none.

    Attributes:
        variable, version: whose value it is.
        source, target: the memories.
        route: "gather" for a read, "copy" for one from another process,
            "scatter" for a write; "none" where nothing moves.
        why: why so, or why nothing moves.
        readers: the arguments that it is for; several share one transfer.
        link_bytes: bytes that cross each link.
    """

    variable: str
    version: int
    source: str
    target: str
    route: str
    why: str
    readers: tuple[str, ...] = ()
    link_bytes: Links = ()

    @property
    def bytes(self) -> int:
        """Bytes over all links."""
        return sum(size for _, size in self.link_bytes)


@dataclass(frozen=True, slots=True)
class Plan:
    """The transfers of one call, in the order in which they start."""

    transfers: tuple[Transfer, ...] = ()

    @property
    def link_bytes(self) -> dict[str, int]:
        """Bytes that cross each link."""
        sums = Counter()
        for transfer in self.transfers:
            sums.update(dict(transfer.link_bytes))
        return dict(sums)

    @property
    def bytes(self) -> int:
        """Bytes over all links."""
        return sum(self.link_bytes.values())

    @property
    def bytes_by_transfer(self) -> dict[str, int]:
        """Bytes over all links, by variable and route."""
        sums = Counter()
        for transfer in self.transfers:
            sums[f"{transfer.variable} ({transfer.route})"] += transfer.bytes
        return dict(sums)


def check_bytes(mover: str, needed: Mapping[str, int], max_bytes: int | None) -> None:
    """Raises `TransferBudgetError` if all transfers together need more than `max_bytes`."""
    total = sum(needed.values())
    if max_bytes is None or total <= max_bytes:
        return
    largest = sorted(needed.items(), key=lambda item: -item[1])[:3]
    raise TransferBudgetError(
        f"{mover} would move more than max_step_bytes allows",
        total,
        max_bytes,
        where=", ".join(f"{name}: {size} bytes" for name, size in largest if size),
        expected=f"at most {max_bytes} bytes",
        got=f"{total} bytes",
        hint="step.explain(...) shows all that a step moves; place arguments beforehand, let Read "
        "keep a copy, or write less often",
    )
