"""`Canvas`: boxes, arrows and paragraphs as SVG.

A picture refers to nothing outside itself, so the reader's font is unknown: `text_width` is an
upper bound for DejaVu Sans, which is wider than the default fonts of most systems.
"""

from __future__ import annotations

import itertools
import math
import re
import unicodedata
from html import escape

Point = tuple[float, float]

_EMS = dict.fromkeys(" .,:;!|'()[]/\\-·fijlrtIJ", 0.42) | dict.fromkeys("mwMW@%…→↔×+<>=~#^—", 1.05)
_ROUNDING = 1e-6

# Class, property, colour on light paper, colour on dark paper. Okabe and Ito's orange and blue,
# which colour-blind readers tell apart, are darker where text has that colour.
_COLORS = """
paper fill #ffffff #0d1117
strip fill #eceff3 #21262d
band fill #f6f8fa #161b22
band stroke #d0d7de #30363d
place fill #ffffff #0d1117
place stroke #8c959f #8b949e
value fill #fbe3cb #4a2a0c
value stroke #a84a00 #ffb066
ink fill #1f2328 #e6edf3
quiet fill #57606a #9da7b3
host fill #a84a00 #ffb066
device fill #0063a0 #79c0ff
host.line stroke #d55e00 #f08c2e
host.head fill #d55e00 #f08c2e
device.line stroke #0072b2 #56b4e9
device.head fill #0072b2 #56b4e9
"""


def _rules(scheme: int) -> str:
    rows = map(str.split, _COLORS.strip().splitlines())
    return "\n".join(
        f".stepcache-plan .{kind} {{ {name}: {colors[scheme]}; }}" for kind, name, *colors in rows
    )


_STYLE = f"""<style>
.stepcache-plan text {{ font-family: system-ui, "Segoe UI", Roboto, "DejaVu Sans", sans-serif; }}
.stepcache-plan .more {{ stroke-dasharray: 3 2; }}
{_rules(0)}
@media (prefers-color-scheme: dark) {{
{_rules(1)}
}}
</style>"""


def html_page(title: str, style: str, *body: str) -> str:
    """An HTML page, which like a picture refers to nothing outside itself."""
    return "\n".join(
        (
            '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">',
            '<meta name="viewport" content="width=device-width, initial-scale=1">',
            '<meta name="color-scheme" content="light dark">',
            f"<title>{escape(printable(title))}</title>",
            f"<style>{style}</style></head><body>",
            *body,
            "</body></html>\n",
        )
    )


def printable(text: str) -> str:
    """Text on one line, with U+FFFD for control characters and what XML forbids."""
    text = re.sub("[\t\n\r]", " ", text)
    return re.sub("[\x00-\x1f\x7f-\x9f\ud800-\udfff\ufffe\uffff]", "\ufffd", text)


def text_width(text: str, size: float, bold: bool = False) -> float:
    """An upper bound on the width of a line, in pixels, at a font size in pixels."""
    return sum(map(_ems, text)) * size * (1.18 if bold else 1.0)


def _ems(letter: str) -> float:
    if letter in _EMS:
        return _EMS[letter]
    if letter.isascii():
        return 0.8 if letter.isupper() or letter in "&_" else 0.65
    return 1.05 if unicodedata.east_asian_width(letter) in "WF" else 0.8


def _fitting(text: str, width: float, size: float, bold: bool) -> int:
    """How many letters of a text fit into a width."""
    ends = itertools.accumulate(text_width(letter, size, bold) for letter in text)
    return next((n for n, end in enumerate(ends) if end > width - _ROUNDING), len(text))


def wrapped(text: str, width: float, size: float, bold: bool = False, most: int = 4) -> list[str]:
    """Breaks text into at most `most` lines that fit into a width; the last one may end in `…`."""
    lines: list[str] = []
    while text and len(lines) < most:
        end, dots = _fitting(text, width, size, bold), ""
        if end < len(text) and len(lines) == most - 1:
            end, dots = _fitting(text, width - text_width("…", size, bold), size, bold), "…"
        elif end < len(text):
            space = text.rfind(" ", 0, end + 1)
            end = space if space > 0 else max(1, end)
        lines.append(text[:end].rstrip() + dots)
        text = text[end:].lstrip()
    return lines or [""]


class Canvas:
    """Collects shapes, each of a class of the style. Lengths are in pixels; y grows downwards."""

    def __init__(self) -> None:
        self._elements: list[str] = []

    def box(
        self, kind: str, x: float, y: float, width: float, height: float, radius: float = 3
    ) -> None:
        place = f'x="{_n(x)}" y="{_n(y)}" width="{_n(width)}" height="{_n(height)}"'
        self._elements.append(f'<rect class="{kind}" {place} rx="{_n(radius)}"/>')

    def text(
        self,
        kind: str,
        at: Point,
        text: str,
        size: float,
        bold: bool = False,
        anchor: str = "start",
    ) -> None:
        """Draws a line of text on a base line that begins at a point, or has it in its middle."""
        if text.strip():
            weight = ' font-weight="bold"' if bold else ""
            place = f'x="{_n(at[0])}" y="{_n(at[1])}" font-size="{_n(size)}" text-anchor="{anchor}"'
            self._elements.append(f'<text class="{kind}" {place}{weight}>{escape(text)}</text>')

    def paragraph(
        self, kind: str, at: Point, width: float, text: str, size: float, bold: bool = False
    ) -> float:
        """Draws text in lines below a point, and returns where the next line begins."""
        x, y = at
        for line in wrapped(text, width, size, bold):
            self.text(kind, (x, y + size), line, size, bold)
            y += round(size * 1.35)
        return y

    def arrow(self, kind: str, start: Point, end: Point, width: float, head: bool = True) -> None:
        """Draws an arrow between two points, or a line without a head."""
        (x, y), (from_x, from_y) = end, start
        length = math.hypot(x - from_x, y - from_y)
        along_x, along_y = (x - from_x) / length, (y - from_y) / length
        back, side = 5.0 + 0.8 * width, 2.5 + 0.6 * width
        neck_x, neck_y = x - along_x * back, y - along_y * back
        path = _path(start, (neck_x, neck_y) if head else end)
        self._elements.append(f'<path class="{kind} line" d="{path}" stroke-width="{_n(width)}"/>')
        if head:
            one = (neck_x - along_y * side, neck_y + along_x * side)
            other = (neck_x + along_y * side, neck_y - along_x * side)
            self._elements.append(f'<path class="{kind} head" d="{_path(end, one, other)}Z"/>')

    def document(self, width: float, height: float, title: str, description: str) -> str:
        """The picture as one SVG element, with a title and a description for screen readers."""
        size = f'width="{_n(width)}" height="{_n(height)}"'
        lines = (
            f'<svg xmlns="http://www.w3.org/2000/svg" class="stepcache-plan" role="img" {size} '
            f'viewBox="0 0 {_n(width)} {_n(height)}">',
            f"<title>{escape(title)}</title>",
            f"<desc>{escape(description)}</desc>",
            _STYLE,
            f'<rect class="paper" {size}/>',
            *self._elements,
            "</svg>",
        )
        return "\n".join(lines)


def _path(*points: Point) -> str:
    return "M" + "L".join(f"{_n(x)} {_n(y)}" for x, y in points)


def _n(value: float) -> str:
    """A length with at most one decimal."""
    return f"{value:.1f}".removesuffix(".0")
