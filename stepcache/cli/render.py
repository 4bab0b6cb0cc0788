"""Renders records as text, which the command line prints without `--json`.

Each function yields the parts of a text: lines, or tables. Fields are formatted by the unit in
their name, such as `size_bytes`, `built_seconds` or `used_time`.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict
from typing import Any

import click
from rich.console import Console
from rich.table import Table
from rich.text import Text

from stepcache.report.doctor import Diagnosis
from stepcache.report.inventory import Checked, Details, Inventory, Item
from stepcache.report.runs import (
    Run,
    change_in_words,
    counts,
    events_in_words,
    in_order,
    slowest_seconds,
)
from stepcache.report.shared import Shared
from stepcache.storage.run_log import Row
from stepcache.units import counted, readable_bytes, readable_time, shortened, terminal_width

Rendered = Iterator[str | Text | Table]

_CUT_WIDTH = 16
_CHANGES_SHOWN = 12
_LEAST_SECONDS = 0.005
_COLORS = {"ok": "green", "warning": "yellow", "fault": "red"}
_SOURCES = {
    "memory": "traced; the program is in memory",
    "preloaded": "traced; the program was preloaded",
    "disk": "traced; the program is loaded from disk",
    "remote": "traced; the program is loaded from the shared cache",
    "rank": "traced; the program comes from another rank",
}


def show(parts: Iterable[str | Text | Table]) -> None:
    """Prints parts. A terminal sets the width of tables; elsewhere nothing is cut or folded."""
    if sys.stdout is None:
        return
    console = Console(width=_width(), markup=False, emoji=False, highlight=False)
    with console.capture() as capture:
        for part in parts:
            console.print(part, soft_wrap=not console.is_terminal)
    encoding = sys.stdout.encoding or "utf-8"  # A letter that it lacks is shown as `?`.
    for line in capture.get().splitlines():
        click.echo(line.rstrip().encode(encoding, errors="replace").decode(encoding))


def _width() -> int:
    return terminal_width() if sys.stdout.isatty() else sys.maxsize


def _field(name: str, value: Any) -> str:
    """Returns a field as text, formatted by the unit in its name."""
    if value is None or value == "":
        return ""
    if name.endswith("_bytes"):
        return readable_bytes(value)
    if name.endswith("_seconds"):
        return f"{value:.2f} s"
    if name.endswith("_time"):
        return readable_time(value)
    return str(value)


def _ago(seconds: float | None) -> str:
    """Returns a time as its age, such as `14m ago`."""
    if not seconds:
        return ""
    age = time.time() - seconds
    for unit, size in (("d", 86400), ("h", 3600), ("m", 60)):
        if age >= size:
            return f"{int(age / size)}{unit} ago"
    return "now"


def _stages(seconds: Mapping[str, float]) -> str:
    return ", ".join(f"{stage} {seconds[stage]:.2f}" for stage in in_order(seconds))


def _table(
    rows: Sequence[Mapping[str, str]],
    right: Collection[str] = (),
    wrap: Collection[str] = (),
    cut: str = "",
) -> Table:
    """Makes a table of cells by column. Columns in `wrap` wrap; the column `cut` is cut to fit."""
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="bold")
    columns = list(rows[0])
    widths = [max(len(name), *(len(row[name]) for row in rows)) for name in columns]
    excess = sum(widths) + 2 * len(columns) - _width()
    for name, width in zip(columns, widths, strict=True):
        justify = "right" if name in right else "left"
        overflow = "fold" if name in wrap else "ellipsis"
        most = max(_CUT_WIDTH, width - excess) if name == cut else None
        table.add_column(
            name, justify=justify, overflow=overflow, no_wrap=name not in wrap, max_width=most
        )
    for row in rows:
        table.add_row(*map(Text, row.values()))
    return table


def records(rows: Sequence[Any]) -> Table:
    """Makes a table of records of one class, with a column for each field."""
    cells = [asdict(row) for row in rows]
    return _named(cells[0], (row.values() for row in cells), wrap=cells[0])


def _named(names: Collection[str], rows: Iterable[Iterable[Any]], **options: Any) -> Table:
    """Makes a table of rows of values, which `_field` formats by their names."""
    cells = (zip(names, row, strict=True) for row in rows)
    return _table([{name: _field(name, value) for name, value in row} for row in cells], **options)


def inventory(found: Inventory) -> Rendered:
    """Renders `ls`: a row for each program."""
    if not found.items:
        yield f"{found.directory} holds no programs."
        return
    rows = list(map(_cells, found.items))
    yield _table(rows, right=("size", "took"), cut="step")
    size = f"{readable_bytes(found.size_bytes)} in {found.directory}"
    scripts = f" of {counted(found.predictions, 'script')}" if found.predictions else ""
    yield f"{counted(found.programs, 'program')}{scripts}, {size}"
    for item in found.items:
        if item.problem:
            yield Text(f"{item.kind} {item.digest[:12]} is damaged: {item.problem}", "red")
    if found.damaged and "://" not in found.directory:  # As that of a shared cache.
        yield "stepcache cache verify puts damaged entries in quarantine."


def _cells(item: Item) -> dict[str, str]:
    name = item.label or "?"
    return {
        "step": f"damaged: {name}" if item.problem else name,
        "program": item.digest[:12],
        "size": readable_bytes(item.size_bytes),
        "built": _ago(item.built_time),
        "took": _field("build_seconds", item.build_seconds),
        "last used": _ago(item.used_time),
    }


def details(found: Details) -> Rendered:
    """Renders `show`: one entry."""
    yield Text(f"{found.kind} {found.digest}", "bold")
    fields = asdict(found)
    for name in ("label", "size_bytes", "created_time", "used_time", "programs"):
        if text := _field(name, fields[name]):
            yield f"{name.removesuffix('_time').removesuffix('_bytes')}: {text}"
    if found.seconds:
        yield f"seconds: {_stages(found.seconds)}"
    for each in found.captured:
        yield "captured: " + ", ".join(_field(name, value) for name, value in each.items())
    if found.problem:
        yield Text(f"damaged: {found.problem}", "red")
    if found.module:
        yield f"\n{found.module}"


def verified(count: int, found: Sequence[Checked], directory: str) -> Rendered:
    """Renders `verify`: the problems, and the number of entries that were read."""
    for each in found:
        name = f"{each.kind} {each.digest[:12]} {each.label}".rstrip()
        yield Text(f"{name} is damaged: {each.problem}", "red")
    outcome = f"{len(found)} damaged, now in quarantine" if found else "none is damaged"
    yield f"{counted(count, 'entry')} in {directory} read and checked: {outcome}."


def why(run: Run) -> Rendered:
    """Renders `why`: each event of a run, with its durations and its reason."""
    ranks = f", {len(run.ranks)} processes" if len(run.ranks) > 1 else ""
    seconds = slowest_seconds(run).get("import")
    importing = f"; importing took {seconds:.2f} s" if seconds is not None else ""
    yield Text(f"{_of(run)}{ranks}{importing}", "bold")
    for each in run.happenings:
        rank = f", rank {each.rank}" if ranks else ""
        event = _SOURCES.get(each.source.partition(" ")[0], each.event)
        yield Text(f"\n{each.step} ({each.label}){rank}: {event}", "bold")
        yield from (f"  {line}" for line in _happening(each))


def _of(run: Run) -> str:
    return f"{run.script}, run of {readable_time(run.started_time)}"


def _happening(each: Row) -> Iterator[str]:
    yield f"{sum(each.seconds.values()):.2f} s: {_stages(each.seconds)}"
    yield from each.reason.splitlines()
    changes = shortened([*map(change_in_words, each.changes)], _CHANGES_SHOWN)
    yield from (f"  {change}" for change in changes)
    if each.not_stored:
        yield f"each run has to compile it: {each.not_stored}"


def startup_ledger(runs: Sequence[Run]) -> Rendered:
    """Renders `why --runs`: seconds by stage of several runs side by side, the latest first."""
    headings = ["latest", *(f"{number} before" for number in range(1, len(runs)))]
    totals = [slowest_seconds(run) for run in runs]
    stages = in_order({stage for total in totals for stage in total})
    for total in totals:
        total["all"] = sum(total.values())
    rows = []
    for stage in (*stages, "all"):
        cells = (f"{total[stage]:.2f}" if stage in total else "·" for total in totals)
        rows.append({"seconds": stage, **dict(zip(headings, cells, strict=True))})
    yield _table(rows, right=headings)
    yield ""
    for heading, run in zip(headings, runs, strict=True):
        yield f"{heading}: {_of(run)}; {events_in_words(counts(run))}"


def ranks(run: Run) -> Rendered:
    """Renders `why --ranks`: the processes of a run, and the slowest one in each stage."""
    stages = [each for each, taken in slowest_seconds(run).items() if taken >= _LEAST_SECONDS]
    yield Text(f"{_of(run)}, seconds by stage", "bold")
    rows = [
        {
            "rank": str(rank.rank),
            **{stage: f"{rank.seconds.get(stage, 0.0):.2f}" for stage in stages},
            "all": f"{rank.total_seconds:.2f}",
            "what": events_in_words(rank.events),
        }
        for rank in run.ranks
    ]
    yield _table(rows, right=rows[0].keys() - {"what"}, wrap=("what",))
    last = max(run.ranks, key=lambda each: each.total_seconds)
    slowest = ", ".join(f"{stage} rank {run.slowest[stage]}" for stage in stages)
    yield f"Rank {last.rank} started slowest; slowest by stage: {slowest}"


def shared(result: Shared, how: str) -> Rendered:
    """Renders `push` and `pull`; `how` is "pushed to" or "pulled from"."""
    there = f" ({result.already_there} more were there)" if result.already_there else ""
    yield f"{counted(result.programs, 'program')} {how} {result.remote}{there}."
    yield from (f"left out: {each}" for each in result.left_out)


def removed(count: int, freed_bytes: int, left_bytes: int, place: str) -> Rendered:
    """Renders `prune` and `clear`."""
    freed, left = readable_bytes(freed_bytes), readable_bytes(left_bytes)
    yield f"{counted(count, 'entry')} removed, {freed} freed; {left} left in {place}."


def diagnosis(found: Diagnosis) -> Rendered:
    """Renders `doctor`: a line for each check, and below it the hint."""
    width = max(len(check.name) for check in found.checks)
    for check in found.checks:
        status = Text(f"{check.status:<8}", _COLORS[check.status])
        detail, *more = check.detail.splitlines()
        yield status.append(f"{check.name:<{width}}  {detail}", "default")
        more += [f"try: {check.hint}"] if check.hint else []
        yield from (f"{'':{width + 10}}{line}" for line in more)


def tasks(found: dict[str, Any]) -> Rendered:
    """Renders `status --tasks`: the reply of a coordinator."""
    yield f"{found['joined']} of {found['tasks']} tasks; started {found['incarnation']} times"
    for title, names in (
        ("programs", ("program", "number")),
        ("variables", ("client", "variables", "version", "leaves")),
        ("clients", ("client", "name", "process", "runs done", "messages", "size_bytes")),
    ):
        if found[title]:
            yield _named(names, found[title], right=names[2:], cut=names[1])
    yield from _counts(found["counts"])


def served(found: dict[str, Any]) -> Rendered:
    """Renders `status`: the `Status` of each host of variables, by address."""
    for address, status in found.items():
        yield f"{address}: epoch {status.epoch}; last snapshot: {status.snapshot or 'none'}"
        if status.variables:
            names = ("name", "version", "size_bytes", "optimizer_bytes", "leaves")
            yield _named(names, status.variables, right=names[1:], cut="name")
        if status.clients:
            names = ("client", "process", "writes", "saved")
            rows = ((name[:8], by.partition(".")[0], *more) for name, by, *more in status.clients)
            yield _named(names, rows, right=names[2:])
        yield from _counts(status.counts)


def _counts(counts: Mapping[str, float]) -> Iterator[str]:
    for name, value in sorted(counts.items()):
        if name.startswith("bytes"):
            yield f"{name}: {readable_bytes(int(value))}"
        elif name.endswith(" seconds"):
            yield f"{name.removesuffix(' seconds')}: {value * 1e3:.3f} ms"
        else:
            yield f"{name}: {value}"
