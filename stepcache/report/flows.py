"""`Flow`: how the values of a plan reach their readers, with canonicalization and without it. Pure.

Without it every reader fetches for itself: each argument, on each device, from where the master
copy is (*A Tour of TensorFlow*, Goldsborough 2016, Fig. 5b). With it there is what the plan says
(Fig. 5c). Where nothing can be shared the two are the same: values that a step writes back, and
those that live on the devices.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Literal

from stepcache.units import listed, readable_bytes
from stepcache.variables.plan import DEVICE_LINK, HOST_LINK, Plan, Transfer

Pattern = Literal["each", "fanout", "shares", "back", "rest"]


@dataclass(frozen=True, slots=True)
class Flow:
    """One value on its way between a host and devices, or at rest.

    Attributes:
        pattern: "each": every reader has an arrow of its own from the host; "fanout": one device
            has, and passes the value on; "shares": every device has one for its share, and they
            gather the rest; "back": shares go to the host; "rest": nothing moves.
        devices: how many.
        note: why, in a sentence.
        size_bytes: of the value.
        readers: what takes it on each device; none where one copy there serves all.
        host_bytes: over the host's link.
        device_bytes: between devices.
    """

    pattern: Pattern
    devices: int
    note: str
    size_bytes: int = 0
    readers: tuple[str, ...] = ()
    host_bytes: int = 0
    device_bytes: int = 0

    @property
    def host_arrows(self) -> int:
        """How many times something crosses the host's link."""
        counts = {"rest": 0, "fanout": 1, "each": self.devices * max(1, len(self.readers))}
        return counts.get(self.pattern, self.devices)

    @property
    def device_arrows(self) -> int:
        """How many devices get something from others."""
        if not self.device_bytes:
            return 0
        return self.devices - 1 if self.pattern == "fanout" else self.devices


@dataclass(frozen=True, slots=True)
class Lane:
    """What one transfer of a plan does, next to what its readers would do without it."""

    transfer: Transfer
    naive: Flow
    planned: Flow


@dataclass(frozen=True, slots=True)
class Totals:
    """Bytes of a whole call.

    Attributes:
        host_bytes: over the host's link.
        device_bytes: between devices.
    """

    host_bytes: int
    device_bytes: int


def lanes(plan: Plan) -> tuple[Lane, ...]:
    """One lane for each transfer of a plan, in its order."""
    moved = {each.variable for each in plan.transfers if each.target == "devices" and each.bytes}
    return tuple(Lane(each, _naive(each, moved), _planned(each)) for each in plan.transfers)


def totals(flows: Iterable[Flow]) -> Totals:
    """The bytes of several flows together."""
    flows = tuple(flows)
    return Totals(sum(flow.host_bytes for flow in flows), sum(flow.device_bytes for flow in flows))


def savings(naive: Totals, planned: Totals) -> str:
    """What canonicalization saves on the host's link, in a sentence."""
    was, now = naive.host_bytes, planned.host_bytes
    if not was and not now:
        return "Nothing crosses the host's link, either way."
    if was == now:
        return f"{readable_bytes(now)} cross the host's link, either way."
    if not now:
        return f"Nothing crosses the host's link, where {readable_bytes(was)} would."
    factor = f"{was / now:.1f} × less" if was > now else f"{now / was:.1f} × more"
    there = f"{readable_bytes(now)} planned, {readable_bytes(was)} naive"
    return f"{factor} over the host's link: {there}."


def _planned(transfer: Transfer) -> Flow:
    links, extent = dict(transfer.link_bytes), transfer.extent
    if not transfer.bytes:
        return Flow("rest", extent.devices, transfer.why, extent.size_bytes)
    note = f"{transfer.route}: {transfer.why}"
    if transfer.wire:
        note += f"; as {transfer.wire} on the wire, {transfer.error_bound}"
    if len(transfer.readers) > 1 and transfer.route != "scatter":
        note += f". One transfer serves {listed(transfer.readers)}"
    return Flow(
        _pattern(transfer),
        extent.devices,
        note,
        extent.size_bytes,
        host_bytes=links.get(HOST_LINK, 0),
        device_bytes=links.get(DEVICE_LINK, 0),
    )


def _pattern(transfer: Transfer) -> Pattern:
    extent = transfer.extent
    if transfer.route == "scatter":
        return "back"
    if transfer.route == "each":
        return "each"
    # What is split over the devices goes to each of them, whatever the route of the rest.
    whole = extent.held_bytes == extent.size_bytes * extent.devices
    return "fanout" if transfer.route == "fanout" and whole else "shares"


def _naive(transfer: Transfer, moved: set[str]) -> Flow:
    extent = transfer.extent
    if transfer.source == "devices" and transfer.bytes:
        return replace(_planned(transfer), note="what is written goes back once, either way")
    if transfer.source == "devices" or not extent.held_bytes:
        return _planned(transfer)
    if transfer.route == "none" and transfer.variable in moved:
        note = "a fetch ahead is counted in the step that makes it"
        return Flow("rest", extent.devices, note, extent.size_bytes)
    readers = transfer.readers or ("the step",)
    where = "the device" if extent.devices == 1 else f"each of {extent.devices} devices"
    fetch = "fetches it" if len(readers) == 1 else "each fetch it"
    note = f"{listed(readers)} {fetch} on {where}{', uncoded' if transfer.wire else ''}"
    fetched = extent.held_bytes * len(readers)
    return Flow("each", extent.devices, note, extent.size_bytes, readers, fetched)
