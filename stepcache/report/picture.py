"""Draws the transfers that one call makes, next to what its readers would do unshared.

Each row is a transfer. On the left, every reader (an argument on a device) fetches the value from
its master copy (*A Tour of TensorFlow*, Goldsborough 2016, Fig. 5b). On the right is the plan
(Fig. 5c). The two are the same for values that a step writes back and for values on the devices.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import NamedTuple

from stepcache.report.svg import Canvas, printable, text_width, wrapped
from stepcache.units import counted, listed, readable_bytes
from stepcache.variables.plan import DEVICE_LINK, HOST_LINK, Plan, Transfer

_MARGIN, _GAP, _WIDTH = 24.0, 28.0, 500.0
_PAGE = 2 * (_MARGIN + _WIDTH) + _GAP
_LEFT, _RIGHT, _INNER = _MARGIN, _MARGIN + _WIDTH + _GAP, _PAGE - 2 * _MARGIN
_HEAD, _TEXT, _LABEL, _SMALL = 14.0, 12.5, 12.0, 10.5  # Font sizes.
_THINNEST, _WIDEST = 1.2, 5.5
# In a column: left edge and width of the two bands of memory, the bus between devices, the bars.
_HOST, _DEVICES, _BUS, _BARS = (8.0, 104.0), (276.0, 160.0), 474.0, 250.0
_PITCH, _SLOT_HEIGHT, _VALUE_HEIGHT, _PAD, _INSET = 18.0, 15.0, 34.0, 6.0, 3.0
_DEVICES_DRAWN, _READERS_DRAWN = 8, 3

_HOW_TO_READ = (
    "Each row is one version of a value, with its bytes counted once. Above a drawing: how many "
    "arrows cross a link, the bytes of each, and of all of them. In the host's memory: the bytes "
    "of the value, or of the shares that cross. The wider an arrow, the more bytes."
)
_LINKS = (("host", HOST_LINK), ("device", DEVICE_LINK))
_NO_PLAN = "Nothing is planned: the call passes no Variables."


class Totals(NamedTuple):
    """Bytes over the host's link, and between devices."""

    host_bytes: int = 0
    device_bytes: int = 0


class Flow(NamedTuple):
    """The movement of one value between a host and its devices.

    In the pattern "each" an arrow goes from the host to every reader; in "fanout" one goes to the
    first device, which passes the value on; in "shares" a share goes to every device, and they
    gather the rest; in "back" a share goes from every device to the host; at "rest" nothing moves.
    """

    pattern: str
    devices: int
    note: str
    size_bytes: int = 0
    moved: Totals = Totals()
    readers: tuple[str, ...] = ()  # On each device; empty if they share one copy.

    @property
    def arrows(self) -> tuple[int, int]:
        """Number of arrows over the host's link, and between devices."""
        readers = max(1, len(self.readers)) if self.pattern == "each" else 1
        from_host = 1 if self.pattern == "fanout" else self.devices * readers
        return from_host, self.devices - (self.pattern == "fanout")

    @property
    def parts(self) -> tuple[float, float]:
        """Bytes of one arrow over the host's link, and between devices."""
        host, device = self.arrows
        return self.moved.host_bytes / max(1, host), self.moved.device_bytes / max(1, device)


class Lane(NamedTuple):
    """One row: a transfer, what its readers would do unshared, and what the plan does."""

    transfer: Transfer
    naive: Flow
    planned: Flow


def lanes(plan: Plan) -> tuple[Lane, ...]:
    """A row for each transfer of a plan, in its order."""
    moved = {each.variable for each in plan.transfers if each.target == "devices" and each.bytes}
    found = []
    for each in plan.transfers:
        readers = tuple(map(printable, each.readers))
        variable, why = printable(each.variable), printable(each.why)
        shown = replace(each, variable=variable, why=why, readers=readers)
        found.append(Lane(shown, _naive(shown, each.variable in moved), _planned(shown)))
    return tuple(found)


def totals(flows: Iterable[Flow]) -> Totals:
    moved = [flow.moved for flow in flows]
    return Totals(sum(host for host, _ in moved), sum(device for _, device in moved))


def savings(naive: Totals, planned: Totals) -> str:
    """How many bytes over the host's link the plan saves, as a sentence."""
    was, now = naive.host_bytes, planned.host_bytes
    if was == now:
        moved = f"{readable_bytes(now)} cross" if now else "Nothing crosses"
        return f"{moved} the host's link, either way."
    if not now:
        return f"Nothing crosses the host's link, where {readable_bytes(was)} would."
    factor = f"{was / now:.1f} × less" if was > now else f"{now / was:.1f} × more"
    there = f"{readable_bytes(now)} planned, {readable_bytes(was)} naive"
    return f"{factor} over the host's link: {there}."


def _planned(transfer: Transfer) -> Flow:
    links, extent = dict(transfer.link_bytes), transfer.extent
    if not transfer.bytes:
        return Flow("rest", extent.devices, transfer.why)
    note = f"{transfer.route}: {transfer.why}"
    if transfer.wire:
        note += f"; as {transfer.wire} on the wire, {transfer.error_bound}"
    if len(transfer.readers) > 1 and transfer.route != "scatter":
        note += f". One transfer serves {listed(transfer.readers)}"
    # A value that is split over the devices goes to each of them, whatever its route.
    whole = extent.held_bytes == extent.size_bytes * extent.devices
    fanout = "fanout" if whole else "shares"
    patterns = {"scatter": "back", "each": "each", "copy": "each", "fanout": fanout}
    pattern = patterns.get(transfer.route, "shares")
    moved = Totals(links.get(HOST_LINK, 0), links.get(DEVICE_LINK, 0))
    return Flow(pattern, extent.devices, note, extent.size_bytes, moved)


def _naive(transfer: Transfer, is_prefetched: bool) -> Flow:
    extent, devices = transfer.extent, transfer.extent.devices
    if transfer.source == "devices" and transfer.bytes:
        return _planned(transfer)._replace(note="what is written goes back once, either way")
    if transfer.source == "devices" or not extent.held_bytes:
        return _planned(transfer)
    if transfer.route == "none" and is_prefetched:
        return Flow("rest", devices, "a prefetch is counted in the step that starts it")
    readers = transfer.readers or ("the step",)
    where = "the device" if devices == 1 else f"each of {devices} devices"
    fetch = "fetches it" if len(readers) == 1 else "each fetch it"
    note = f"{listed(readers)} {fetch} on {where}{', uncoded' if transfer.wire else ''}"
    fetched = Totals(extent.held_bytes * len(readers))
    return Flow("each", devices, note, extent.size_bytes, fetched, readers)


def draw(step: str, mesh: Mapping[str, int] | None, plan: Plan, moved_bytes: int) -> str:
    """Draws a plan as an SVG element; `moved_bytes` are those of all arguments of the call."""
    return _Picture(plan).drawn(printable(step), mesh, moved_bytes - plan.bytes)


class _Picture:
    """One picture, drawn from the top; `_y` is where the next part begins."""

    def __init__(self, plan: Plan):
        self._lanes = lanes(plan)
        self._naive = totals(lane.naive for lane in self._lanes)
        self._planned = totals(lane.planned for lane in self._lanes)
        flows = [flow for lane in self._lanes for flow in (lane.naive, lane.planned)]
        self._largest = max((part for flow in flows for part in flow.parts), default=0.0)
        self._canvas, self._y = Canvas(), _MARGIN

    def drawn(self, step: str, mesh: Mapping[str, int] | None, other_bytes: int) -> str:
        title = f"{step}: what one call moves for its variables"
        self._paragraph("ink", title, 18.0, bold=True)
        self._paragraph("quiet", _mesh_text(mesh), _TEXT)
        self._y += 12
        if not self._lanes:
            self._paragraph("ink", _NO_PLAN, _HEAD)
        if self._largest:
            self._legend()
        for lane in self._lanes:
            self._lane(lane)
        if self._largest:
            self._sums()
        if self._lanes:
            self._paragraph("ink", savings(self._naive, self._planned), 16.0, bold=True)
        if other_bytes > 0:
            moved = f"Other arguments move {readable_bytes(other_bytes)} to devices"
            self._paragraph("quiet", f"{moved}, not drawn here.", _TEXT)
        return self._canvas.document(_PAGE, self._y + _MARGIN, title, self._description())

    def _description(self) -> str:
        if not self._lanes:
            return _NO_PLAN
        sentences = []
        for transfer, _, flow in self._lanes:
            moved = zip(flow.moved, _LINKS, strict=True)
            links = [f"{readable_bytes(size)} {link}" for size, (_, link) in moved if size]
            moves = f"{', '.join(links) or 'nothing moves'}; {flow.note}."
            sentences.append(f"{transfer.variable}, {_about(transfer)}: {moves}")
        return " ".join((*sentences, savings(self._naive, self._planned)))

    def _paragraph(self, kind: str, text: str, size: float, bold: bool = False) -> None:
        self._y = self._canvas.paragraph(kind, (_LEFT, self._y), _INNER, text, size, bold)

    def _legend(self) -> None:
        y = self._y + 14
        for x, (kind, link) in zip((_LEFT, _LEFT + 190), _LINKS, strict=True):
            self._canvas.arrow(kind, (x, y), (x + 30, y), 3)
            self._canvas.text("ink", (x + 38, y + 4), link, _TEXT)
        self._y = y + 14
        self._paragraph("quiet", _HOW_TO_READ, _TEXT)
        y = self._y + 10 + _HEAD
        for x, head, what in (
            (_LEFT, "Naive", "every argument fetches on every device"),
            (_RIGHT, "Planned", "one transfer for each version and memory"),
        ):
            self._canvas.text("ink", (x, y), head, _HEAD, bold=True)
            self._canvas.text("quiet", (x + 84, y), what, _TEXT)
            for memory, left, width in (("host memory", *_HOST), ("devices", *_DEVICES)):
                middle = (x + left + width / 2, y + 24)
                self._canvas.text("ink", middle, memory, _TEXT, anchor="middle")
        self._y = y + 34

    def _lane(self, lane: Lane) -> None:
        """A row: the variable's name, and the two flows side by side."""
        self._canvas.box("strip", _LEFT, self._y, _INNER, 43, 4)
        for kind, y, text, size in (
            ("ink", 3 + _HEAD, lane.transfer.variable, _HEAD),
            ("quiet", 22 + _LABEL, _about(lane.transfer), _LABEL),
        ):
            bold = kind == "ink"
            (fitting,) = wrapped(text, _INNER - 16, size, bold, most=1)
            self._canvas.text(kind, (_LEFT + 8, self._y + y), fitting, size, bold)
        self._y += 49
        if lane.naive.pattern == lane.planned.pattern == "rest":
            self._paragraph("quiet", f"Nothing moves: {lane.planned.note}.", _LABEL)
            self._y += 14
            return
        columns = ((_LEFT, lane.naive), (_RIGHT, lane.planned))
        top = max(self._link_labels(flow, x) for x, flow in columns) + 2
        ends = []
        for x, flow in columns:
            text, below = f"Nothing moves: {flow.note}.", self._y
            if flow.pattern != "rest":
                text, below = flow.note, self._flow(flow, x, top) + 4
            ends.append(self._canvas.paragraph("quiet", (x + 8, below), _WIDTH - 16, text, _LABEL))
        self._y = max(ends) + 14

    def _link_labels(self, flow: Flow, x: float) -> float:
        """Writes what crosses each link; returns where the labels end."""
        end, places = self._y, ((_HOST[0], _DEVICES[0] - 8), (_DEVICES[0], _WIDTH))
        moved = zip(_LINKS, flow.moved, flow.arrows, places, strict=True)
        for (kind, link), size, arrows, (left, right) in moved:
            if size:
                self._canvas.text(kind, (x + left, self._y + _LABEL), link, _LABEL)
                at, product = (x + left, self._y + 16), _product(size, arrows)
                end = max(end, self._canvas.paragraph(kind, at, right - left, product, _LABEL))
        return end

    def _sums(self) -> None:
        self._canvas.box("strip", _LEFT, self._y, _INNER, 1, 0)
        self._y += 10
        self._paragraph("quiet", "The sums of all rows, with bars of one scale:", _TEXT)
        largest = max(*self._naive, *self._planned, 1)
        for x, sums in ((_LEFT, self._naive), (_RIGHT, self._planned)):
            for y, (kind, link), size in zip((6, 26), _LINKS, sums, strict=True):
                text, top = f"{link}: {readable_bytes(size)}", self._y + y
                self._canvas.text(kind, (x + 8, top + _TEXT), text, _TEXT, bold=True)
                if size:
                    width = max((_WIDTH - _BARS - 8) * size / largest, 1.5)
                    self._canvas.box(kind, x + _BARS, top + 3, width, 10, 2)
        self._y += 56

    def _flow(self, flow: Flow, x: float, top: float) -> float:
        """Draws the host's memory, the devices' memories and what moves; returns the lower edge."""
        slots = _slots(flow, top + _PAD)
        height = max(slots[-1].top + _SLOT_HEIGHT, top + _PAD + _VALUE_HEIGHT) + _PAD - top
        for left, width in (_HOST, _DEVICES):
            self._canvas.box("band", x + left, top, width, height, 5)
        for slot in slots:
            self._slot("place", _DEVICES, slot, slot.label, x)
        if flow.pattern in ("shares", "back"):
            for slot in slots:
                self._slot("value", _HOST, slot, readable_bytes(round(flow.parts[0])), x)
                self._crossing(flow, slot, x, slot.middle)
        else:  # One value on the host, which goes to each reader, or to the first device.
            first = flow.pattern == "fanout"
            receiving = slots[:1] if first else slots
            size = max(_VALUE_HEIGHT, 0.0 if first else height / 2)
            value_top = top + (_PAD if first else (height - size) / 2)
            value = _Slot("", value_top, height=size)
            self._slot("value", _HOST, value, readable_bytes(flow.size_bytes), x)
            for number, slot in enumerate(receiving):
                spread = value_top + 6 + (size - 12) * (number + 0.5) / len(receiving)
                self._crossing(flow, slot, x, slot.middle if first else spread)
        if flow.moved.device_bytes:
            self._bus(flow, slots, x)
        return top + height

    def _stroke(self, size_bytes: float) -> float:
        """Width of an arrow. The square root sets whole values apart from shares."""
        return _THINNEST + (_WIDEST - _THINNEST) * math.sqrt(size_bytes / self._largest)

    def _slot(self, kind: str, band: tuple[float, float], slot: _Slot, label: str, x: float):
        """A labelled box across a band."""
        left, width = x + band[0] + _PAD, band[1] - 2 * _PAD
        self._canvas.box(kind + slot.more, left, slot.top, width, slot.height)
        (fitting,) = wrapped(label, width - 2 * _INSET, _SMALL, most=1)
        middle = (left + width / 2, slot.middle + _SMALL * 0.36)
        self._canvas.text("ink", middle, fitting, _SMALL, anchor="middle")

    def _crossing(self, flow: Flow, slot: _Slot, x: float, host_y: float) -> None:
        ends = (x + sum(_HOST) - _PAD + 2, host_y), (x + _DEVICES[0] + _PAD - 2, slot.middle)
        start, end = ends[::-1] if flow.pattern == "back" else ends
        self._canvas.arrow(f"host{slot.more}", start, end, self._stroke(flow.parts[0]))

    def _bus(self, flow: Flow, slots: list[_Slot], x: float) -> None:
        """A line beside the devices, and an arrow to each of them; from the first in a fanout."""
        edge, bus, width = x + sum(_DEVICES) - _PAD + 2, x + _BUS, self._stroke(flow.parts[1])
        top, bottom = slots[0].middle - width / 2, slots[-1].middle + width / 2
        self._canvas.arrow("device", (bus, top), (bus, bottom), width, head=False)
        for slot in slots:
            receives = slot is not slots[0] or flow.pattern != "fanout"
            at, there = (bus, slot.middle), (edge, slot.middle)
            self._canvas.arrow(f"device{slot.more}", at, there, width, head=receives)


class _Slot(NamedTuple):
    """The memory of a device; with `more=" more"`, of several that are drawn as one."""

    label: str
    top: float
    more: str = ""
    height: float = _SLOT_HEIGHT

    @property
    def middle(self) -> float:
        return self.top + self.height / 2


def _slots(flow: Flow, top: float) -> list[_Slot]:
    """The memories that a flow reaches, from `top` down."""
    readers = [(f" · {reader}", "") for reader in flow.readers]
    if len(readers) < 2:
        readers = [("", "")]
    elif len(readers) > _READERS_DRAWN:
        left = len(readers) - _READERS_DRAWN + 1
        readers[_READERS_DRAWN - 1 :] = [(f" · {left} more", " more")]
    if flow.devices * len(readers) == 1:
        top += (_VALUE_HEIGHT - _SLOT_HEIGHT) / 2  # Beside the middle of the value.
    slots = []
    for device in range(min(flow.devices, _DEVICES_DRAWN)):
        for reader, more in readers:
            label = f"device {device}{reader}"
            fits = text_width(label, _SMALL) <= _DEVICES[1] - 2 * (_PAD + _INSET)
            slots.append(_Slot(label if fits else f"{device}{reader}", top, more))
            top += _PITCH
        top += 4 if len(readers) > 1 else 0
    if flow.devices > _DEVICES_DRAWN:
        slots.append(_Slot(f"… and {flow.devices - _DEVICES_DRAWN} more", top, " more"))
    return slots


def _mesh_text(mesh: Mapping[str, int] | None) -> str:
    if mesh is None:
        return "No mesh."
    axes = " × ".join(f"{name} {size}" for name, size in mesh.items())
    return printable(f"Mesh: {axes}; {counted(math.prod(mesh.values()), 'device')}.")


def _about(transfer: Transfer) -> str:
    """Version, size and readers of a row's value."""
    size = readable_bytes(transfer.extent.size_bytes)
    verb = "written by" if transfer.route == "scatter" else "for"
    readers = f" · {verb} {listed(transfer.readers)}" if transfer.readers else ""
    return f"version {transfer.version} · {size}{readers}"


def _product(size_bytes: int, parts: int) -> str:
    """`8 × 2.1 kB = 16.7 kB`."""
    total = readable_bytes(size_bytes)
    if parts < 2:
        return f"1 × {total}"
    if size_bytes % parts:
        return f"{parts} parts, {total} in all"
    return f"{parts} × {readable_bytes(size_bytes // parts)} = {total}"
