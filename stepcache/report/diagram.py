"""One flow as a diagram: the host's memory on the left, the devices' memories on the right.

┌ host ─┐                  ┌ devices ────────┐
│ value │ ───────────────▶ │ device 0        │ ─┐
│       │                  │ device 1        │ ◀┘
└───────┘                  └─────────────────┘
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from stepcache.report.flows import Flow
from stepcache.report.svg import Canvas, printable, shortened, text_width, wrapped
from stepcache.units import readable_bytes
from stepcache.variables.plan import DEVICE_LINK, HOST_LINK

WIDTH = 500.0
DEVICES_DRAWN = 8
READERS_DRAWN = 3

LABEL_SIZE, _SLOT_SIZE = 12.0, 10.5
_HOST_LEFT, _HOST_WIDTH = 8.0, 104.0
_DEVICES_LEFT, _DEVICES_WIDTH = 276.0, 160.0
_BUS = 474.0
_PITCH, _SLOT_HEIGHT, _GROUP_GAP, _PAD = 18.0, 15.0, 4.0, 6.0
_VALUE_HEIGHT = 34.0
_CENTRED = _PAD + (_VALUE_HEIGHT - _SLOT_HEIGHT) / 2
_INSET = 3.0
_SLOT_ROOM = _DEVICES_WIDTH - 2 * (_PAD + _INSET)

HOST_MIDDLE = _HOST_LEFT + _HOST_WIDTH / 2
DEVICES_MIDDLE = _DEVICES_LEFT + _DEVICES_WIDTH / 2


@dataclass(frozen=True, slots=True)
class Slot:
    """A place in the memory of a device, or of several that are not drawn one by one.

    Attributes:
        label: the device, and the reader if there are several.
        top: below the top of the diagram.
        many: whether it stands for several.
    """

    label: str
    top: float
    many: bool = False

    @property
    def middle(self) -> float:
        return self.top + _SLOT_HEIGHT / 2


def slots(flow: Flow) -> list[Slot]:
    """The places of a flow, from above."""
    readers = _drawn_readers(flow)
    placed, top = [], _CENTRED if flow.devices * len(readers) == 1 else _PAD
    for device in range(min(flow.devices, DEVICES_DRAWN)):
        for reader, many in readers:
            placed.append(Slot(_label(device, reader), top, many))
            top += _PITCH
        top += _GROUP_GAP if len(readers) > 1 else 0
    if flow.devices > DEVICES_DRAWN:
        placed.append(Slot(f"… and {flow.devices - DEVICES_DRAWN} more", top, True))
    return placed


def _drawn_readers(flow: Flow) -> list[tuple[str, bool]]:
    """The readers that have a slot on each device, and whether one stands for several."""
    if len(flow.readers) < 2:
        return [("", False)]
    readers = [(printable(reader), False) for reader in flow.readers]
    if len(readers) <= READERS_DRAWN:
        return readers
    drawn = readers[: READERS_DRAWN - 1]
    return [*drawn, (f"{len(readers) - len(drawn)} more", True)]


def _label(device: int, reader: str) -> str:
    whole = f"device {device} · {reader}" if reader else f"device {device}"
    return whole if text_width(whole, _SLOT_SIZE) <= _SLOT_ROOM else f"{device} · {reader}"


def height_of(flow: Flow) -> float:
    """How high the diagram of a flow is."""
    return max(slots(flow)[-1].top + _SLOT_HEIGHT, _PAD + _VALUE_HEIGHT) + _PAD


def draw_labels(canvas: Canvas, flow: Flow, x: float, top: float) -> float:
    """What crosses which link, above the diagram; returns where they end."""
    ends = [top]
    columns = (
        ("host", HOST_LINK, _HOST_LEFT, _DEVICES_LEFT - 8, flow.host_bytes, flow.host_arrows),
        ("device", DEVICE_LINK, _DEVICES_LEFT, WIDTH, flow.device_bytes, flow.device_arrows),
    )
    for kind, link, left, right, size, arrows in columns:
        if size:
            lines = [link, *wrapped(_counted(size, arrows), right - left, LABEL_SIZE)]
            ends.append(canvas.paragraph(kind, x + left, top, lines, LABEL_SIZE))
    return max(ends)


def _counted(size_bytes: int, parts: int) -> str:
    total = readable_bytes(size_bytes)
    if parts < 2:
        return f"1 × {total}"
    part, rest = divmod(size_bytes, parts)
    if rest:
        return f"{parts} parts, {total} in all"
    return f"{parts} × {readable_bytes(part)} = {total}"


class Diagram:
    """A flow with its place in a picture.

    Args:
        canvas: to draw on.
        flow: what to draw.
        x: its left edge.
        top: its upper edge.
        stroke: how wide a line is that stands for so many bytes.
    """

    def __init__(
        self, canvas: Canvas, flow: Flow, x: float, top: float, stroke: Callable[[float], float]
    ):
        self._canvas, self._flow, self._x, self._top = canvas, flow, x, top
        self._slots = slots(flow)
        self._height = height_of(flow)
        self._host_part = flow.host_bytes / max(1, flow.host_arrows)
        self._device_part = flow.device_bytes / max(1, flow.device_arrows)
        self._host_stroke = stroke(self._host_part)
        self._device_stroke = stroke(self._device_part)

    def draw(self) -> None:
        """Draws it."""
        self._bands()
        if self._flow.pattern in ("shares", "back"):
            self._shares()
        else:
            self._whole()
        if self._flow.device_bytes:
            self._bus()

    def _bands(self) -> None:
        for left, width in ((_HOST_LEFT, _HOST_WIDTH), (_DEVICES_LEFT, _DEVICES_WIDTH)):
            self._canvas.box("band", self._x + left, self._top, width, self._height, 5)

    def _place(self, kind: str, left: float, top: float, width: float, label: str, height: float):
        """A box with a label in it."""
        self._canvas.box(kind, self._x + left, self._top + top, width, height)
        fitting = shortened(label, width - 2 * _INSET, _SLOT_SIZE)
        middle, base = left + width / 2, top + height / 2 + _SLOT_SIZE * 0.36
        self._canvas.text(
            "ink", self._x + middle, self._top + base, fitting, _SLOT_SIZE, anchor="middle"
        )

    def _device(self, kind: str, slot: Slot) -> None:
        kind += " more" if slot.many else ""
        left, width = _DEVICES_LEFT + _PAD, _DEVICES_WIDTH - 2 * _PAD
        self._place(kind, left, slot.top, width, slot.label, _SLOT_HEIGHT)

    def _host(self, kind: str, top: float, height: float, label: str) -> None:
        self._place(kind, _HOST_LEFT + _PAD, top, _HOST_WIDTH - 2 * _PAD, label, height)

    def _shares(self) -> None:
        back = self._flow.pattern == "back"
        for slot in self._slots:
            many = " more" if slot.many else ""
            share = readable_bytes(round(self._host_part))
            self._host("value" + many, slot.top, _SLOT_HEIGHT, share)
            self._device("place", slot)
            self._crossing(slot, slot.middle, back)

    def _whole(self) -> None:
        """One value on the host, which goes to its readers, or to the first device."""
        first = self._flow.pattern == "fanout"
        receiving = self._slots[:1] if first else self._slots
        height = max(_VALUE_HEIGHT, 0.0 if first else self._height / 2)
        top = _PAD if first else (self._height - height) / 2
        self._host("value", top, height, readable_bytes(self._flow.size_bytes))
        for slot in self._slots:
            self._device("place", slot)
        for number, slot in enumerate(receiving):
            spread = top + 6 + (height - 12) * (number + 0.5) / len(receiving)
            self._crossing(slot, slot.middle if first else spread, False)

    def _crossing(self, slot: Slot, host_y: float, back: bool) -> None:
        """An arrow over the host's link."""
        points = [
            (self._x + _HOST_LEFT + _HOST_WIDTH - _PAD + 2, self._top + host_y),
            (self._x + _DEVICES_LEFT + _PAD - 2, self._top + slot.middle),
        ]
        size = readable_bytes(round(self._host_part))
        hint = f"{size} from {slot.label}" if back else f"{size} to {slot.label}"
        self._canvas.arrow(
            "host",
            points[::-1] if back else points,
            self._host_stroke,
            f"{hint}, each" if slot.many else hint,
            dashed=slot.many,
        )

    def _bus(self) -> None:
        """What devices get from each other."""
        size = readable_bytes(round(self._device_part))
        edge = self._x + _DEVICES_LEFT + _DEVICES_WIDTH - _PAD + 2
        bus, wide = self._x + _BUS, self._device_stroke
        first, last = self._top + self._slots[0].middle, self._top + self._slots[-1].middle
        half = wide / 2
        trunk = [(bus, first - half), (bus, last + half)]
        self._canvas.arrow("device", trunk, wide, "between devices", head=False)
        for number, slot in enumerate(self._slots):
            gives = number == 0 and self._flow.pattern == "fanout"
            at = self._top + slot.middle
            points = [(edge, at), (bus, at)] if gives else [(bus, at), (edge, at)]
            self._canvas.arrow(
                "device",
                points,
                wide,
                f"from {slot.label}" if gives else f"{size} to {slot.label}, from other devices",
                head=not gives,
                dashed=slot.many,
            )
