"""Quantities and lists as people read them."""

from __future__ import annotations

import html
import os
import re
import shutil
import sys
import time
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

BYTES = {"": 1, "k": 1e3, "m": 1e6, "g": 1e9, "t": 1e12}
BYTES |= {"ki": 1 << 10, "mi": 1 << 20, "gi": 1 << 30, "ti": 1 << 40}
BYTES |= {f"{unit}b": size for unit, size in BYTES.items()}
SECONDS = {"s": 1, "m": 60, "h": 3600, "d": 86400, "w": 604800}


def quantity(text: str, units: Mapping[str, float]) -> float:
    """Reads a number with a unit, such as `1.5GiB`; raises `ValueError` where that is none."""
    found = re.fullmatch(r"([\d.]+)\s*([a-z]*)", text.strip().lower())
    if found is None or found[2] not in units:
        raise ValueError(text)
    return float(found[1]) * units[found[2]]


def readable_bytes(size: int) -> str:
    """`1.5 MB`, in powers of 1000."""
    value, unit = float(size), "B"
    for larger in ("kB", "MB", "GB"):
        if value >= 1000:
            value, unit = value / 1000, larger
    return f"{int(value)} B" if unit == "B" else f"{value:.1f} {unit}"


def readable_time(seconds: float | None) -> str:
    """`Tuesday 2026-11-17 10:02`, in local time."""
    try:
        return time.strftime("%A %Y-%m-%d %H:%M", time.localtime(seconds)) if seconds else "?"
    except (OverflowError, ValueError, OSError):
        return "?"


def readable_seconds(seconds: float) -> str:
    """`310 µs`, `12.3 ms`, `1.5 s`: three digits, or whole seconds."""
    if seconds >= 999.5:
        return f"{seconds:.0f} s"
    for factor, unit in ((1, "s"), (1e3, "ms")):
        if seconds * factor >= 0.9995:
            return f"{seconds * factor:.3g} {unit}"
    return f"{seconds * 1e6:.3g} µs"


_PLURALS = {"leaf": "leaves", "entry": "entries"}


def counted(count: int, noun: str) -> str:
    """`1 leaf`, `2 leaves`, `0 more changes`."""
    *before, last = noun.split()
    plural = " ".join((*before, _PLURALS.get(last, f"{last}s")))
    return f"{count} {noun if count == 1 else plural}"


def listed(names: Sequence[str]) -> str:
    """`a, b and c`."""
    return " and ".join((", ".join(names[:-1]), names[-1])) if len(names) > 1 else "".join(names)


def shortened(lines: Sequence[str], most: int) -> list[str]:
    """The first lines, and after them how many more there are."""
    more = len(lines) - most
    return [*lines[:most], f"… and {more} more"] if more > 0 else [*lines]


def readable_ranks(ranks: Iterable[int]) -> str:
    """Processes of a pod: "rank 3", "ranks 0–2, 5"."""
    spans = spans_of(ranks)
    texts = (str(low) if low == high else f"{low}–{high}" for low, high in spans)
    single = len(spans) == 1 and spans[0][0] == spans[0][1]
    return f"rank{'' if single else 's'} {', '.join(shortened([*texts], 32))}"


def spans_of(numbers: Iterable[int]) -> list[list[int]]:
    """The first and the last of each run of numbers."""
    spans: list[list[int]] = []
    for number in sorted(numbers):
        if spans and number == spans[-1][1] + 1:
            spans[-1][1] = number
        else:
            spans.append([number, number])
    return spans


def shown_as_printed(shown: Any, printer: Any, cycle: bool) -> None:
    """Has IPython show an object as `print` does.

    It is the `_repr_pretty_` of a class: of itself, not of a base, as IPython prefers a `__repr__`
    of the class to that.
    """
    printer.text(str(shown))


def html_table(caption: str, rows: Mapping[str, str]) -> str:
    """Names and texts as a table, for notebooks."""
    cells = "".join(
        f"<tr><th style='text-align:left'>{html.escape(name)}</th>"
        f"<td style='text-align:left'>{html.escape(text)}</td></tr>"
        for name, text in rows.items()
    )
    return f"<table><caption>{html.escape(caption)}</caption>{cells}</table>"


def terminal_width() -> int:
    """Columns of the terminal, or as `COLUMNS` says; 100 where the output goes elsewhere."""
    is_told = sys.stdout.isatty() or "COLUMNS" in os.environ
    return shutil.get_terminal_size((100, 24)).columns if is_told else 100


def text_of(value: Any) -> str:
    """A text that differs for values that differ, as two functions that `jax.jit` made of one."""
    text, address = repr(value), hex(id(value))
    is_compared_by_identity = type(value).__hash__ is object.__hash__
    return f"{text} at {address}" if is_compared_by_identity and address not in text else text
