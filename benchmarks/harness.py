"""Interleaved timing, one table and one JSON a run.

The machines that benchmarks run on are shared and noisy. So the contenders of a case are timed in
turn, round by round, in random order, and a ratio is the median of the rounds' own ratios.
"""

from __future__ import annotations

import dataclasses
import json
import platform
import random
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import jaxlib
import numpy as np
from rich.console import Console
from rich.table import Table

RESULTS = Path(__file__).parent / "results"


@dataclass(frozen=True)
class Row:
    """One contender in one case.

    Attributes:
        median_seconds: of one call, over the rounds.
        low_seconds, high_seconds: the quartiles.
        ratio: to the case's first contender, median over the rounds; 1.0 for itself.
        ratio_low, ratio_high: its quartiles.
    """

    case: str
    contender: str
    median_seconds: float
    low_seconds: float
    high_seconds: float
    ratio: float
    ratio_low: float
    ratio_high: float


def quartiles(values: Sequence[float]) -> tuple[float, float, float]:
    low, middle, high = np.percentile(values, [25, 50, 75])
    return float(low), float(middle), float(high)


def interleaved(
    case: str, contenders: Mapping[str, Callable[[], Any]], *, rounds: int, batch_seconds: float
) -> list[Row]:
    """Times the contenders in turn.

    Args:
        case: the name of the case.
        contenders: what to time; the first is what the others are compared with.
        rounds: how many times each is timed.
        batch_seconds: how long one timing lasts, about.
    """
    calls: dict[str, int] = {}
    for name, contender in contenders.items():
        for _ in range(3):
            jax.block_until_ready(contender())
        started = time.perf_counter()
        for _ in range(5):
            output = contender()
        jax.block_until_ready(output)
        once = (time.perf_counter() - started) / 5
        calls[name] = max(2, int(batch_seconds / once))
    seconds: dict[str, list[float]] = {name: [] for name in contenders}
    shuffler = random.Random(0)
    for _ in range(rounds):
        order = list(contenders)
        shuffler.shuffle(order)
        for name in order:
            contender, count = contenders[name], calls[name]
            started = time.perf_counter()
            for _ in range(count):
                output = contender()
            jax.block_until_ready(output)
            seconds[name].append((time.perf_counter() - started) / count)
    return compared(case, seconds)


def compared(case: str, seconds: Mapping[str, Sequence[float]]) -> list[Row]:
    """Rows of contenders that were timed round by round; the first is what they are compared to."""
    first = next(iter(seconds))
    rows = []
    for name, times in seconds.items():
        low, middle, high = quartiles(times)
        ratios = quartiles([a / b for a, b in zip(times, seconds[first], strict=True)])
        rows.append(Row(case, name, middle, low, high, ratios[1], ratios[0], ratios[2]))
    return rows


def show(title: str, rows: Sequence[Row], unit: str = "µs a call") -> None:
    """Prints one table of times and ratios; `unit` is "µs a call" or "ms"."""
    scale, digits = (1e3, 0) if unit == "ms" else (1e6, 1)
    table = Table(title=title, title_justify="left")
    for name in ("case", "contender"):
        table.add_column(name)
    for name in (unit, "quartiles", "ratio", "quartiles of it"):
        table.add_column(name, justify="right")
    case = None
    for row in rows:
        if case not in (None, row.case):
            table.add_section()
        table.add_row(
            row.case if row.case != case else "",
            row.contender,
            f"{row.median_seconds * scale:,.{digits}f}",
            f"{row.low_seconds * scale:,.{digits}f} … {row.high_seconds * scale:,.{digits}f}",
            f"{row.ratio:.3f}",
            f"{row.ratio_low:.3f} … {row.ratio_high:.3f}",
        )
        case = row.case
    Console(width=118).print(table)


def write(name: str, rows: Sequence[Row], figures: Mapping[str, Any], **settings: Any) -> Path:
    """Writes one run as JSON, by the device it ran on."""
    device = jax.devices()[0]
    kind = device.device_kind.replace(" ", "-").lower()
    path = RESULTS / f"{name}-{kind}-jax{jax.__version__}.json"
    path.parent.mkdir(exist_ok=True)
    record = {
        "benchmark": name,
        "device": f"{device.device_kind} × {jax.device_count()}",
        "python": platform.python_version(),
        "jax": jax.__version__,
        "jaxlib": jaxlib.__version__,
        "settings": settings,
        "rows": [dataclasses.asdict(row) for row in rows],
        "figures": figures,
    }
    path.write_text(json.dumps(record, indent=1) + "\n")
    return path


def spread(values: Sequence[float]) -> dict[str, float]:
    """Median, minimum and maximum, for a figure that is no ratio."""
    return {"median": statistics.median(values), "min": min(values), "max": max(values)}
