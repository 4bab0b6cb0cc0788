"""`Canvas`: boxes, arrows and lines of text as SVG. It knows nothing of what they stand for.

A picture refers to nothing outside itself, so it cannot know the reader's font: widths of text are
estimated from above, after DejaVu Sans, which is wider than what most systems have.
"""

from __future__ import annotations

import math
import unicodedata
from collections.abc import Iterator, Sequence
from html import escape

Point = tuple[float, float]

_NARROW = frozenset(" .,:;!|'()[]/\\-·fijlrtIJ")
_WIDE = frozenset("mwMW@%…→↔×+<>=~#^—")
_ROUNDING = 1e-6
_HEAD_LENGTH, _HEAD_HALF_WIDTH = 5.0, 2.5

# Okabe and Ito's orange, blue and green, which colour-blind readers tell apart, darkened until text
# in them reads well on paper. What is orange or blue also differs in where it is drawn.
_STYLE = """
.stepcache-plan text { font-family: system-ui, "Segoe UI", Roboto, "DejaVu Sans", sans-serif; }
.stepcache-plan .paper { fill: #ffffff; }
.stepcache-plan .strip { fill: #eceff3; }
.stepcache-plan .band { fill: #f6f8fa; stroke: #d0d7de; }
.stepcache-plan .place { fill: #ffffff; stroke: #8c959f; }
.stepcache-plan .value { fill: #fbe3cb; stroke: #a84a00; }
.stepcache-plan .more { stroke-dasharray: 3 2; }
.stepcache-plan .ink { fill: #1f2328; }
.stepcache-plan .quiet { fill: #57606a; }
.stepcache-plan .host { fill: #a84a00; }
.stepcache-plan .device { fill: #0063a0; }
.stepcache-plan path.line { fill: none; }
.stepcache-plan .host.line { stroke: #d55e00; }
.stepcache-plan .host.head { fill: #d55e00; }
.stepcache-plan .device.line { stroke: #0072b2; }
.stepcache-plan .device.head { fill: #0072b2; }
@media (prefers-color-scheme: dark) {
.stepcache-plan .paper { fill: #0d1117; }
.stepcache-plan .strip { fill: #21262d; }
.stepcache-plan .band { fill: #161b22; stroke: #30363d; }
.stepcache-plan .place { fill: #0d1117; stroke: #8b949e; }
.stepcache-plan .value { fill: #4a2a0c; stroke: #ffb066; }
.stepcache-plan .ink { fill: #e6edf3; }
.stepcache-plan .quiet { fill: #9da7b3; }
.stepcache-plan .host { fill: #ffb066; }
.stepcache-plan .device { fill: #79c0ff; }
.stepcache-plan .host.line { stroke: #f08c2e; }
.stepcache-plan .host.head { fill: #f08c2e; }
.stepcache-plan .device.line { stroke: #56b4e9; }
.stepcache-plan .device.head { fill: #56b4e9; }
}
"""


def printable(text: str) -> str:
    """Text that a document may hold: without control characters, and on one line."""
    return "".join(
        " " if letter in "\t\n\r" else "\ufffd" if not _is_printed(letter) else letter
        for letter in text
    )


def _is_printed(letter: str) -> bool:
    return unicodedata.category(letter) not in ("Cc", "Cs") and letter not in "\ufffe\uffff"


def text_width(text: str, size: float, bold: bool = False) -> float:
    """How wide text is at most, in pixels.

    Args:
        text: one line.
        size: of the font, in pixels.
        bold: whether it is set in bold.
    """
    return sum(map(_letter_width, text)) * size * (1.18 if bold else 1.0)


def _letter_width(letter: str) -> float:
    if letter in _NARROW:
        return 0.42
    if letter in _WIDE or unicodedata.east_asian_width(letter) in "WF":
        return 1.05
    if unicodedata.combining(letter):
        return 0.0
    return 0.8 if letter.isupper() or not letter.isascii() or letter in "&_" else 0.65


def shortened(text: str, width: float, size: float, bold: bool = False) -> str:
    """Text that fits, with `…` for what does not."""
    if text_width(text, size, bold) <= width:
        return text
    room, kept = width - text_width("…", size, bold), ""
    for letter in text:
        room -= text_width(letter, size, bold)
        if room < _ROUNDING:
            break
        kept += letter
    return kept.rstrip() + "…"


def wrapped(text: str, width: float, size: float, bold: bool = False, most: int = 4) -> list[str]:
    """Lines that fit: broken between words, and inside a word that is wider than a line.

    Args:
        text: what to break.
        width: of a line, in pixels.
        size: of the font, in pixels.
        bold: whether it is set in bold.
        most: how many lines there may be; the last of them is shortened.
    """
    lines: list[str] = []
    line = ""
    for piece in _pieces(text, width, size, bold):
        if line and text_width(line + piece.rstrip(), size, bold) > width:
            lines.append(line.rstrip())
            line = piece.lstrip()
        else:
            line += piece
    lines.append(line.rstrip())
    if len(lines) > most:
        last = shortened(f"{lines[most - 1]} …", width, size, bold)
        lines = [*lines[: most - 1], last]
    return lines


def _pieces(text: str, width: float, size: float, bold: bool) -> Iterator[str]:
    """Words with the space behind them, and parts of words that are wider than a line."""
    for word in text.split(" "):
        piece = ""
        for letter in word:
            if text_width(piece + letter, size, bold) > width:
                yield piece
                piece = ""
            piece += letter
        yield piece + " "


class Canvas:
    """A picture in the making. Lengths are in pixels, and y grows downwards."""

    def __init__(self) -> None:
        self._elements: list[str] = []

    def box(self, kind: str, x: float, y: float, width: float, height: float, round_: float = 3):
        """A rectangle of a kind that the style knows."""
        self._elements.append(
            f'<rect class="{kind}" x="{_n(x)}" y="{_n(y)}" width="{_n(width)}" '
            f'height="{_n(height)}" rx="{_n(round_)}"/>'
        )

    def text(
        self,
        kind: str,
        x: float,
        y: float,
        text: str,
        size: float,
        anchor: str = "start",
        bold: bool = False,
    ) -> None:
        """A line of text on its base line."""
        if not text.strip():
            return
        weight = ' font-weight="bold"' if bold else ""
        at = f'x="{_n(x)}" y="{_n(y)}" font-size="{_n(size)}" text-anchor="{anchor}"{weight}'
        self._elements.append(f'<text class="{kind}" {at}>{escape(text)}</text>')

    def paragraph(
        self,
        kind: str,
        x: float,
        top: float,
        lines: Sequence[str],
        size: float,
        bold: bool = False,
    ) -> float:
        """Lines of text below each other; returns where the next begins."""
        for line in lines:
            self.text(kind, x, top + size, line, size, bold=bold)
            top += line_height(size)
        return top

    def arrow(
        self,
        kind: str,
        points: Sequence[Point],
        width: float,
        hint: str,
        head: bool = True,
        dashed: bool = False,
    ) -> None:
        """A line through points, with a head at its end.

        Args:
            kind: the style knows it.
            points: at least two.
            width: of the line.
            hint: what a pointer that rests on it is told.
            head: whether it has one.
            dashed: whether it stands for several.
        """
        more = " more" if dashed else ""
        shape = ""
        if head:
            points, corners = _with_head(points, width)
            shape = f'<path class="{kind} head" d="{_path(corners)}Z"/>'
        self._elements.append(
            f'<g><title>{escape(hint)}</title><path class="{kind} line{more}" d="{_path(points)}" '
            f'stroke-width="{_n(width)}"/>{shape}</g>'
        )

    def document(self, width: float, height: float, title: str, description: str) -> str:
        """The picture as one SVG element.

        Args:
            width: of all of it.
            height: of all of it.
            title: what a screen reader calls it.
            description: what a screen reader reads in its place.
        """
        return "\n".join(
            (
                f'<svg xmlns="http://www.w3.org/2000/svg" class="stepcache-plan" role="img" '
                f'width="{_n(width)}" height="{_n(height)}" '
                f'viewBox="0 0 {_n(width)} {_n(height)}">',
                f"<title>{escape(title)}</title>",
                f"<desc>{escape(description)}</desc>",
                f"<style>{_STYLE}</style>",
                f'<rect class="paper" width="{_n(width)}" height="{_n(height)}"/>',
                *self._elements,
                "</svg>",
            )
        )


def line_height(size: float) -> float:
    """From one line of text to the next."""
    return round(size * 1.35)


def _with_head(points: Sequence[Point], width: float) -> tuple[list[Point], list[Point]]:
    """A line that ends where its head begins, and the corners of the head."""
    (before_x, before_y), (x, y) = points[-2:]
    length = math.hypot(x - before_x, y - before_y)
    along_x, along_y = (x - before_x) / length, (y - before_y) / length
    back, side = _HEAD_LENGTH + 0.8 * width, _HEAD_HALF_WIDTH + 0.6 * width
    neck = (x - along_x * back, y - along_y * back)
    corners = [
        (x, y),
        (neck[0] - along_y * side, neck[1] + along_x * side),
        (neck[0] + along_y * side, neck[1] - along_x * side),
    ]
    return [*points[:-1], neck], corners


def _path(points: Sequence[Point]) -> str:
    return "M" + "L".join(f"{_n(x)} {_n(y)}" for x, y in points)


def _n(value: float) -> str:
    """A length, as short as it can be written."""
    return f"{value:.1f}".removesuffix(".0")
