"""Quantities and lists as people read them."""

from __future__ import annotations

from collections.abc import Sequence


def readable_bytes(size: int) -> str:
    """`1.5 MB`, in powers of 1000."""
    value = float(size)
    for unit in ("B", "kB", "MB", "GB"):
        if value < 1000 or unit == "GB":
            return f"{int(value)} B" if unit == "B" else f"{value:.1f} {unit}"
        value /= 1000
    raise AssertionError


def listed(names: Sequence[str]) -> str:
    """`a, b and c`."""
    return " and ".join((", ".join(names[:-1]), names[-1])) if len(names) > 1 else "".join(names)
