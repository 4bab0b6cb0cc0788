"""`Plan`: the transfers that one call needs, with the bytes that cross each link. Pure.

For one version of one variable there is at most one transfer to each memory, whatever number of
arguments, steps or devices read it (the canonicalization of sends and receives in *A Tour of
TensorFlow*, Goldsborough 2016, Fig. 5c).
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
from jax.sharding import Sharding

from stepcache.errors import TransferBudgetError
from stepcache.variables.packing import Buffer
from stepcache.variables.shares import HostLayout
from stepcache.variables.wire import coded_bytes, codes

HOST_LINK, DEVICE_LINK = "host ↔ device", "device ↔ device"


@dataclass(frozen=True, slots=True)
class Extent:
    """How much there is of a value that a step takes.

    Attributes:
        size_bytes: of the value, counted once.
        held_bytes: over all devices that are to have it, or their part of it.
        devices: how many those are.
    """

    size_bytes: int = 0
    held_bytes: int = 0
    devices: int = 1


@dataclass(frozen=True, slots=True)
class Transfer:
    """One value on its way, or not.

    Attributes:
        variable: its name.
        version: of the value.
        source: where it is.
        target: where it goes.
        route: "each", "fanout" or "gather" for a read, "scatter" for a write; "none" where nothing
            moves.
        why: what chose the route, or why nothing moves.
        readers: the arguments that it is for: more than one share it.
        link_bytes: bytes that cross each link.
        wire: the type that floating point values have on the way; empty where that is their own.
        error_bound: how far a value that is coded on the way may be off; empty for exact.
        extent: of the value on the devices, whether it moves or not.
    """

    variable: str
    version: int
    source: str
    target: str
    route: str
    why: str
    readers: tuple[str, ...] = ()
    link_bytes: tuple[tuple[str, int], ...] = ()
    wire: str = ""
    error_bound: str = ""
    extent: Extent = Extent()

    @property
    def bytes(self) -> int:
        """Bytes over all links."""
        return sum(size for _, size in self.link_bytes)


@dataclass(frozen=True, slots=True)
class Plan:
    """The transfers of one call.

    Attributes:
        transfers: in the order in which they start.
    """

    transfers: tuple[Transfer, ...] = ()

    @property
    def link_bytes(self) -> dict[str, int]:
        """Bytes that cross each link."""
        sums: dict[str, int] = {}
        for transfer in self.transfers:
            for link, size in transfer.link_bytes:
                sums[link] = sums.get(link, 0) + size
        return sums

    @property
    def bytes(self) -> int:
        """Bytes over all links."""
        return sum(self.link_bytes.values())

    @property
    def bytes_by_transfer(self) -> dict[str, int]:
        """Bytes over all links, by variable and route."""
        sums: dict[str, int] = {}
        for transfer in self.transfers:
            name = f"{transfer.variable} ({transfer.route})"
            sums[name] = sums.get(name, 0) + transfer.bytes
        return sums


def check_bytes(mover: str, needed: Mapping[str, int], max_bytes: int | None) -> None:
    """Whether no more is going to move than a session allows.

    Args:
        mover: what would move it.
        needed: bytes of each of the things that would move.
        max_bytes: the bound, or None.

    Raises:
        TransferBudgetError: more is.
    """
    total = sum(needed.values())
    if max_bytes is None or total <= max_bytes:
        return
    dearest = sorted(needed.items(), key=lambda item: -item[1])[:3]
    raise TransferBudgetError(
        f"{mover} would move more than max_step_bytes allows",
        total,
        max_bytes,
        where=", ".join(f"{name}: {size} bytes" for name, size in dearest if size),
        expected=f"at most {max_bytes} bytes",
        got=f"{total} bytes",
        hint="step.explain(...) shows all that a step moves; place arguments beforehand, let Read "
        "keep a copy, or write less often",
    )


def extent_of(buffers: Iterable[Any]) -> Extent:
    """The extent of a value.

    Args:
        buffers: `Buffer` records with shardings, or arrays.
    """
    buffers = tuple(buffers)
    return Extent(
        sum(math.prod(buffer.shape) * buffer.dtype.itemsize for buffer in buffers),
        sum(map(_bytes_held, buffers)),
        max((len(_devices(buffer)) for buffer in buffers), default=1),
    )


def choose_route(asked: str, devices: int, ahead: bool = False) -> tuple[str, str]:
    """The route of a read, and why.

    Args:
        asked: the policy's route.
        devices: how many are to have the value; all of this process where it is read ahead.
        ahead: whether it is read beside a step.
    """
    if asked != "auto":
        return asked, "asked for"
    if devices == 1:
        return "gather", "there is one device"
    if ahead:
        return "fanout", "its copies run beside a step, where a program would wait for it"
    return "gather", f"the value crosses the host's link once, not {devices} times"


def read_bytes(
    layout: HostLayout, route: str, wire: str | None = None
) -> tuple[tuple[str, int], ...]:
    """Bytes that cross each link when a value is read."""
    host_link = device_link = 0
    for host, device in zip(layout.on_host, layout.on_device, strict=True):
        if host is None:
            continue
        held, shared = _bytes_held(device), _bytes_held(host)
        copies = len(_devices(device))
        if is_coded(device, route, wire):
            assert wire is not None
            shared = coded_bytes(wire, math.prod(device.shape), parts_of(device, route))
            held = shared * copies
        if is_gathered(device, route):
            host_link += shared
            device_link += held - shared
        elif route == "each":
            host_link += held
        else:
            host_link += held // copies
            device_link += held - held // copies
    return _links(host_link, device_link)


def write_bytes(layout: HostLayout) -> tuple[tuple[str, int], ...]:
    """Bytes that cross each link when a value is written: every share, once."""
    return _links(sum(_bytes_held(host) for host in layout.on_host if host is not None), 0)


def update_bytes(leaves: Iterable[Any], wire: str | None) -> tuple[tuple[str, int], ...]:
    """Bytes that cross when the leaves of an update go to a host that computes with them."""
    crossing = sum(
        coded_bytes(wire, leaf.size, 1) if wire and codes(wire, leaf.dtype) else leaf.nbytes
        for leaf in leaves
        if isinstance(leaf, jax.Array)
    )
    return _links(crossing, 0)


def _links(host_link: int, device_link: int) -> tuple[tuple[str, int], ...]:
    links = ((HOST_LINK, host_link), (DEVICE_LINK, device_link))
    return tuple((link, size) for link, size in links if size)


def parts_of(buffer: Buffer, route: str) -> int:
    """Into how many parts a buffer is taken to cross the host's link."""
    return len(_devices(buffer)) if route == "gather" else 1


def is_gathered(buffer: Buffer, route: str) -> bool:
    """Whether a buffer is read by the compiled program that gathers shares.

    One that is split over the devices has no other way, and one that is weakly typed stays so only
    inside of a program.
    """
    return route == "gather" or buffer.weak_type or not is_replicated(buffer)


def is_coded(buffer: Buffer, route: str, wire: str | None) -> bool:
    """Whether a buffer is coded on its way to the devices.

    One that is split over them by rules is not, nor one that is weakly typed, nor one that padding
    would make larger.
    """
    if wire is None or buffer.weak_type or not is_replicated(buffer):
        return False
    if not codes(wire, buffer.dtype):
        return False
    coded = coded_bytes(wire, math.prod(buffer.shape), parts_of(buffer, route))
    return coded < buffer.size_bytes


def is_replicated(buffer: Buffer) -> bool:
    """Whether each device has all of a buffer."""
    return buffer.sharding is not None and buffer.sharding.is_fully_replicated


def _devices(buffer: Buffer) -> Sequence:
    sharding: Sharding = buffer.sharding  # type: ignore[assignment]
    return tuple(sharding.device_set)


def _bytes_held(buffer: Buffer) -> int:
    """Bytes of all shards, on all devices."""
    sharding: Sharding = buffer.sharding  # type: ignore[assignment]
    shard = math.prod(sharding.shard_shape(buffer.shape)) * buffer.dtype.itemsize
    return shard * len(sharding.device_set)
