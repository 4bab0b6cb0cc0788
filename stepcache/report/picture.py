"""`plan_svg`: the transfers of one call as a picture, for people who would rather look than read.

Each row is a transfer of the plan. On the left is what its readers would do on their own, on the
right what the plan does: *A Tour of TensorFlow* (Goldsborough, 2016), Fig. 5b and 5c.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from html import escape
from typing import Protocol

from stepcache.report.diagram import (
    DEVICES_MIDDLE,
    HOST_MIDDLE,
    LABEL_SIZE,
    WIDTH,
    Diagram,
    draw_labels,
    height_of,
)
from stepcache.report.flows import Flow, Lane, Totals, lanes, savings, totals
from stepcache.report.svg import Canvas, line_height, printable, wrapped
from stepcache.units import listed, readable_bytes
from stepcache.variables.plan import DEVICE_LINK, HOST_LINK, Plan

_MARGIN, _GAP = 24.0, 28.0
_PAGE = 2 * (_MARGIN + WIDTH) + _GAP
_LEFT, _RIGHT = _MARGIN, _MARGIN + WIDTH + _GAP
_TITLE_SIZE, _HEAD_SIZE, _TEXT_SIZE = 18.0, 14.0, 12.5
_THINNEST, _WIDEST = 1.2, 5.5
_BAR_LEFT, _BAR_HEIGHT = 250.0, 10.0


_HOW_TO_READ = (
    "Each row is one version of a value, with its bytes counted once. Above a drawing: how many "
    "arrows cross a link, the bytes of each, and of all of them. In the host's memory: the bytes "
    "of the value, or of the shares that cross. The wider an arrow, the more bytes."
)


class Explained(Protocol):
    """What is drawn of an `Explanation`."""

    @property
    def step(self) -> str:
        """The step's name."""
        ...

    @property
    def mesh(self) -> Mapping[str, int] | None:
        """Axes and sizes of the mesh."""
        ...

    @property
    def plan(self) -> Plan:
        """The transfers of the call."""
        ...

    @property
    def moved_bytes(self) -> int:
        """Bytes that the call moves, for variables and for other arguments."""
        ...


def plan_svg(explanation: Explained) -> str:
    """Draws which bytes one call of a step moves for its `Variables`, and what sharing them saves.

    On the left every reader, which is an argument on a device, fetches each value for itself from
    where its master copy is. On the right is the plan: one transfer for each version of a variable
    and each memory, by its route. The wider an arrow, the more bytes it stands for. What is
    written back is the same on both, and where nothing moves there is no drawing.

    Args:
        explanation: from `step.explain(...)`.

    Returns:
        An SVG element that refers to nothing outside itself; its colours follow the reader's
        choice of light or dark.
    """
    return _Picture(explanation).drawn()


def plan_html(explanation: Explained) -> str:
    """A page with the picture of a plan, and the text of its explanation."""
    title = escape(printable(f"{explanation.step}: what one call moves"))
    text = "\n".join(escape(printable(line)) for line in str(explanation).splitlines())
    return f"""<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta name="color-scheme" content="light dark">
<title>{title}</title>
<style>
body {{ margin: 0 auto; padding: 1rem; max-width: {_PAGE:.0f}px; }}
figure {{ margin: 0; overflow-x: auto; }}
pre {{ padding: 1rem 1.5rem; overflow-x: auto; font-size: 0.85rem; }}
@media (prefers-color-scheme: dark) {{ body {{ background: #0d1117; color: #e6edf3; }} }}
</style>
</head>
<body>
<figure>
{plan_svg(explanation)}
</figure>
<pre>{text}</pre>
</body>
</html>
"""


class _Picture:
    """One picture, drawn from above; `_y` is where the next part begins."""

    def __init__(self, explained: Explained):
        self._explained = explained
        self._lanes = lanes(explained.plan)
        self._naive = totals(lane.naive for lane in self._lanes)
        self._planned = totals(lane.planned for lane in self._lanes)
        flows = [flow for lane in self._lanes for flow in (lane.naive, lane.planned)]
        self._largest = max(map(_part, flows), default=0.0)
        self._canvas, self._y = Canvas(), _MARGIN

    def drawn(self) -> str:
        step = printable(self._explained.step)
        title = f"{step}: what one call moves for its variables"
        self._paragraph(title, _TITLE_SIZE, bold=True)
        self._paragraph(_mesh_text(self._explained.mesh), _TEXT_SIZE, "quiet")
        self._y += 12
        if not self._lanes:
            self._paragraph("Nothing is planned: the call passes no Variables.", _HEAD_SIZE)
        if self._largest:
            self._legend()
            self._heads()
        for lane in self._lanes:
            self._lane(lane)
        if self._largest:
            self._totals()
        if self._lanes:
            self._paragraph(savings(self._naive, self._planned), 16.0, bold=True)
        others = self._explained.moved_bytes - self._explained.plan.bytes
        if others > 0:
            moved = f"Other arguments move {readable_bytes(others)} to devices, not drawn here."
            self._paragraph(moved, _TEXT_SIZE, "quiet")
        return self._canvas.document(_PAGE, self._y + _MARGIN, title, self._told())

    def _paragraph(self, text: str, size: float, kind: str = "ink", bold: bool = False) -> None:
        lines = wrapped(text, _PAGE - 2 * _MARGIN, size, bold)
        self._y = self._canvas.paragraph(kind, _LEFT, self._y, lines, size, bold)

    def _stroke(self, size_bytes: float) -> float:
        """How wide an arrow is: as the root of its bytes, to set whole values off from shares."""
        share = math.sqrt(size_bytes / self._largest) if self._largest else 0.0
        return _THINNEST + (_WIDEST - _THINNEST) * share

    # ---- above the rows -----------------------------------------------------------------------

    def _legend(self) -> None:
        y = self._y + 14
        x = _LEFT
        for kind, text in (("host", HOST_LINK), ("device", DEVICE_LINK)):
            self._canvas.arrow(kind, [(x, y), (x + 30, y)], 3, text)
            self._canvas.text("ink", x + 38, y + 4, text, _TEXT_SIZE)
            x += 190
        self._y = y + 14
        self._paragraph(_HOW_TO_READ, _TEXT_SIZE, "quiet")
        self._y += 10

    def _heads(self) -> None:
        heads = (
            (_LEFT, "Naive", "every argument fetches on every device"),
            (_RIGHT, "Planned", "one transfer for each version and memory"),
        )
        for x, head, what in heads:
            base = self._y + _HEAD_SIZE
            self._canvas.text("ink", x, base, head, _HEAD_SIZE, bold=True)
            self._canvas.text("quiet", x + 84, base, what, _TEXT_SIZE)
            for middle, memory in ((HOST_MIDDLE, "host memory"), (DEVICES_MIDDLE, "devices")):
                at = x + middle
                self._canvas.text("ink", at, base + 24, memory, _TEXT_SIZE, "middle")
        self._y += _HEAD_SIZE + 34

    # ---- rows ------------------------------------------------------------------------------------

    def _lane(self, lane: Lane) -> None:
        self._strip(lane)
        if lane.naive.pattern == lane.planned.pattern == "rest":
            self._paragraph(_at_rest(lane.planned), LABEL_SIZE, "quiet")
            self._y += 14
            return
        columns = ((_LEFT, lane.naive), (_RIGHT, lane.planned))
        moving = [(x, flow) for x, flow in columns if flow.pattern != "rest"]
        top = max(draw_labels(self._canvas, flow, x, self._y) for x, flow in moving) + 2
        ends = []
        for x, flow in columns:
            text, below = _at_rest(flow), self._y
            if flow.pattern != "rest":
                Diagram(self._canvas, flow, x, top, self._stroke).draw()
                text, below = printable(flow.note), top + height_of(flow) + 4
            note = wrapped(text, WIDTH - 16, LABEL_SIZE)
            ends.append(self._canvas.paragraph("quiet", x + 8, below, note, LABEL_SIZE))
        self._y = max(ends) + 14

    def _strip(self, lane: Lane) -> None:
        """The head of a row."""
        width = _PAGE - 2 * _MARGIN
        name = wrapped(printable(lane.transfer.variable), width - 16, _HEAD_SIZE, bold=True)
        about = wrapped(_about(lane), width - 16, LABEL_SIZE)
        height = len(name) * line_height(_HEAD_SIZE) + len(about) * line_height(LABEL_SIZE) + 8
        self._canvas.box("strip", _LEFT, self._y, width, height, 4)
        top = self._canvas.paragraph("ink", _LEFT + 8, self._y + 3, name, _HEAD_SIZE, bold=True)
        self._canvas.paragraph("quiet", _LEFT + 8, top, about, LABEL_SIZE)
        self._y += height + 6

    # ---- below the rows -----------------------------------------------------------------------

    def _totals(self) -> None:
        width = _PAGE - 2 * _MARGIN
        self._canvas.box("strip", _LEFT, self._y, width, 1, 0)
        self._y += 10
        self._paragraph("The sums of all rows, with bars of one scale:", _TEXT_SIZE, "quiet")
        self._y += 6
        largest = max(*_sizes(self._naive), *_sizes(self._planned), 1)
        for x, sums in ((_LEFT, self._naive), (_RIGHT, self._planned)):
            y = self._y
            for kind, link, size in zip(
                ("host", "device"), (HOST_LINK, DEVICE_LINK), _sizes(sums), strict=True
            ):
                text = f"{link}: {readable_bytes(size)}"
                self._canvas.text(kind, x + 8, y + _TEXT_SIZE, text, _TEXT_SIZE, bold=True)
                bar = (WIDTH - _BAR_LEFT - 8) * size / largest
                if bar:
                    at = (x + _BAR_LEFT, y + 3)
                    self._canvas.box(kind, *at, max(bar, 1.5), _BAR_HEIGHT, 2)
                y += 20
        self._y += 50

    # ---- for screen readers ---------------------------------------------------------------------

    def _told(self) -> str:
        """The picture in words."""
        if not self._lanes:
            return "Nothing is planned: the call passes no Variables."
        sentences = [
            f"{printable(lane.transfer.variable)}, {_about(lane)}: {_moves(lane.planned)}"
            f"{printable(lane.planned.note)}."
            for lane in self._lanes
        ]
        return " ".join((*sentences, savings(self._naive, self._planned)))


def _at_rest(flow: Flow) -> str:
    return printable(f"Nothing moves: {flow.note}.")


def _moves(flow: Flow) -> str:
    links = ((flow.host_bytes, HOST_LINK), (flow.device_bytes, DEVICE_LINK))
    moved = [f"{readable_bytes(size)} {link}" for size, link in links if size]
    return f"{', '.join(moved) or 'nothing moves'}; "


def _about(lane: Lane) -> str:
    """A row's version, size and readers."""
    transfer = lane.transfer
    size = readable_bytes(transfer.extent.size_bytes)
    verb = "written by" if transfer.route == "scatter" else "for"
    readers = f" · {verb} {listed(transfer.readers)}" if transfer.readers else ""
    return printable(f"version {transfer.version} · {size}{readers}")


def _part(flow: Flow) -> float:
    """The most bytes that one arrow of a flow stands for."""
    return max(
        flow.host_bytes / max(1, flow.host_arrows), flow.device_bytes / max(1, flow.device_arrows)
    )


def _sizes(sums: Totals) -> Sequence[int]:
    return sums.host_bytes, sums.device_bytes


def _mesh_text(mesh: Mapping[str, int] | None) -> str:
    if mesh is None:
        return "No mesh."
    devices = math.prod(mesh.values())
    axes = " × ".join(f"{name} {size}" for name, size in mesh.items())
    return printable(f"Mesh: {axes}; {devices} device{'s' if devices != 1 else ''}.")
