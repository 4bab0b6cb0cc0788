"""What the command line prints for people: the records of the other rooms as tables and lines."""

from __future__ import annotations

import io
import itertools
import sys
import time
from collections.abc import Iterable, Sequence
from typing import Any

import click
from rich.console import Console, Group, RenderableType
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from stepcache.report.doctor import Check, Diagnosis
from stepcache.report.environment import Part
from stepcache.report.inventory import Build, Checked, Details, Inventory, Item
from stepcache.report.moving import Exported, Imported
from stepcache.report.runs import Happening, Run, in_order, in_words
from stepcache.units import counted, readable_bytes, terminal_width

_NAME_WIDTH, _GAP = 20, 2
_FACTS_SHOWN = 4
_CHANGES_SHOWN = 12
_COLORS = {"ok": "green", "warning": "yellow", "fault": "red"}
_EVENTS = {
    "built": "built: traced, lowered and compiled",
    "loaded": "loaded, without a trace",
    "relinked": "traced, and loaded without compiling",
    "verified": "verified by a trace in the background",
    "stale": "found stale by a trace in the background",
}


def show(shown: RenderableType) -> None:
    """Prints: as wide as the terminal. Without one tables have 100 columns, and lines no end."""
    if sys.stdout.isatty():
        Console(highlight=False).print(shown)
        return
    file = io.StringIO()
    console = Console(file=file, width=terminal_width(), color_system=None, highlight=False)
    console.print(shown, soft_wrap=True)
    for line in file.getvalue().splitlines():
        click.echo(line.rstrip().encode(errors="replace").decode())


def _table(
    columns: Sequence[str],
    rows: Sequence[Sequence[str]],
    *,
    right: Sequence[str] = (),
    cut: str = "",
    styles: Sequence[str] = (),
) -> Table:
    """A table that keeps each row on one line; column `cut` gives way where it is narrow."""
    widths = {
        name: max(map(len, cells)) for name, *cells in zip(columns, columns, *rows, strict=True)
    }
    if cut:
        spare = terminal_width() - sum(widths.values()) - _GAP * (len(widths) - 1)
        widths[cut] = max(min(widths[cut], _NAME_WIDTH), min(widths[cut], widths[cut] + spare))
    table = Table(box=None, pad_edge=False, padding=(0, _GAP, 0, 0), header_style="bold")
    for name, width in widths.items():
        justify = "right" if name in right else "left"
        table.add_column(name, justify=justify, no_wrap=True, overflow="ellipsis", width=width)
    for row, style in itertools.zip_longest(rows, styles, fillvalue=""):
        table.add_row(*map(Text, row), style=style or None)
    return table


def _line(text: str, style: str = "") -> Text:
    return Text(text, style)


def _indented(lines: Iterable[str], columns: int = 2) -> Padding:
    return Padding(Group(*map(_line, lines)), (0, 0, 0, columns), expand=False)


def readable_time(seconds: float | None) -> str:
    """`Tuesday 2026-11-17 10:02`, in local time."""
    try:
        return time.strftime("%A %Y-%m-%d %H:%M", time.localtime(seconds)) if seconds else "?"
    except (OverflowError, ValueError, OSError):
        return "?"


def _ago(seconds: float | None, now: float) -> str:
    """`14m ago`."""
    if not seconds:
        return ""
    age = now - seconds
    for unit, size in (("d", 86400), ("h", 3600), ("m", 60)):
        if age >= size:
            return f"{int(age / size)}{unit} ago"
    return "now"


def _readable_seconds(seconds: float | None) -> str:
    return "" if seconds is None else f"{seconds:.2f} s"


def _stages(seconds: dict[str, float]) -> str:
    return ", ".join(f"{stage} {seconds[stage]:.2f}" for stage in in_order(seconds))


def _short(digest: str) -> str:
    return digest[:12]


# ---- ls, show, verify ---------------------------------------------------------------------------


def inventory(found: Inventory, items: Sequence[Item]) -> RenderableType:
    """A row for each step and for each program that no step names."""
    if not items:
        return _line(f"{found.directory} holds no programs.")
    now = time.time()
    columns = ["what", "digest", "builds", "size", "built", "took", "last used", "programs"]
    shown = len(columns) if terminal_width() >= 100 else -1
    table = _table(
        columns[:shown],
        [_cells(item, now)[:shown] for item in items],
        right=("builds", "size", "took"),
        cut="what",
        styles=["red" if item.problem else "" for item in items],
    )
    total = (
        f"{counted(found.steps, 'step')}, {counted(found.programs, 'program')}, "
        f"{readable_bytes(found.size_bytes)} "
        f"in {found.directory}"
    )
    parts: list[RenderableType] = [table, _line(total)]
    for item in items:
        if item.problem:
            parts.append(_line(f"{item.kind} {_short(item.digest)} is damaged: {item.problem}"))
    if found.damaged:
        parts.append(_line("stepcache cache verify puts damaged entries in quarantine."))
    return Group(*parts)


def _cells(item: Item, now: float) -> tuple[str, ...]:
    name = item.label or "?"
    if item.kind != "step":
        name = f"{item.kind} of {name}"
    programs = ", ".join(each[:8] for each in item.programs[:1])
    if len(item.programs) > 1:
        programs += f" + {len(item.programs) - 1}"
    if item.missing:
        programs += f", {len(item.missing)} gone"
    return (
        f"damaged: {name}" if item.problem else name,
        _short(item.digest),
        str(item.builds or ""),
        readable_bytes(item.size_bytes),
        _ago(item.built_time, now),
        _readable_seconds(item.built_seconds),
        _ago(item.used_time, now),
        programs,
    )


def details(found: Details, *, everything: bool) -> RenderableType:
    """One entry, with every fact of it or the first ones of each group."""
    parts: list[RenderableType] = [
        _line(f"{found.kind} {found.digest}", "bold"),
        _line(
            f"{found.label or '?'}; {readable_bytes(found.size_bytes)}; "
            f"stored {readable_time(found.created_time)}; "
            f"last used {readable_time(found.used_time)}"
        ),
    ]
    if found.problem:
        parts.append(_line(f"damaged: {found.problem}", "red"))
    for digest in found.used_by:
        parts.append(_line(f"used by step {_short(digest)}"))
    for number, build in enumerate(found.builds, 1):
        heading = f"build {number} of {len(found.builds)}"
        parts += [_line(""), *_build(heading, build, everything, number == 1)]
    return Group(*parts)


def _build(heading: str, build: Build, everything: bool, latest: bool) -> list[RenderableType]:
    size = "not there any more"
    if build.program_bytes is not None:
        size = readable_bytes(build.program_bytes)
    total = sum(build.seconds.values())
    parts: list[RenderableType] = [
        _line(f"{heading}, {readable_time(build.built_time)}", "bold"),
        _indented(
            [
                f"program {_short(build.program)}, {size}; devices {_numbers(build.devices)}",
                f"took {total:.2f} s: {_stages(build.seconds)}",
            ]
        ),
    ]
    if build.differs and not latest:
        words = [f"  {in_words(each)}" for each in build.differs[:_CHANGES_SHOWN]]
        parts.append(_indented(["differs from build 1 in", *words]))
    if everything or latest:
        parts += [_indented(_facts(name, build.facts[name], everything)) for name in build.facts]
        parts.append(_indented(_used(build, everything)))
    for each in build.captured:
        size = readable_bytes(each["size_bytes"])
        parts.append(_indented([f"captured: {each['name']}, {each['type']}, {size}"]))
    return parts


def _facts(group: str, facts: dict[str, str], everything: bool) -> list[str]:
    shown = list(facts.items())[: None if everything else _FACTS_SHOWN]
    lines = [f"{group} ({len(facts)})", *(f"  {name} = {value}" for name, value in shown)]
    if len(shown) < len(facts):
        lines.append(f"  … and {len(facts) - len(shown)} more (--all)")
    return lines


def _used(build: Build, everything: bool) -> list[str]:
    counts = [f"{len(each)} {name}" for name, each in build.used.items() if each]
    lines = [f"its trace used {', '.join(counts) or 'nothing beyond the code'}"]
    for name in build.used if everything else ("files", "variables"):
        for each in build.used[name]:
            text = each if isinstance(each, str) else f"{each[-1]} (of the {each[0]})"
            lines.append(f"  {name.removesuffix('s')} {text}")
    return lines


def _numbers(numbers: Sequence[int]) -> str:
    if len(numbers) > 2 and list(numbers) == list(range(numbers[0], numbers[-1] + 1)):
        return f"{numbers[0]}–{numbers[-1]}"
    return ", ".join(map(str, numbers))


def verified(count: int, found: Sequence[Checked], directory: str) -> RenderableType:
    """What `verify` has to say."""
    damaged = [each for each in found if each.state == "damaged"]
    lines = [
        _line(
            f"{each.kind} {_short(each.digest)} {each.label}".rstrip()
            + f" is {each.state}: {each.problem}",
            "red" if each.state == "damaged" else "yellow",
        )
        for each in found
    ]
    outcome = f"{len(damaged)} damaged, now in quarantine" if damaged else "none is damaged"
    return Group(
        *lines,
        _line(f"{counted(count, 'entry')} in {directory} read and checked: {outcome}."),
    )


# ---- why ----------------------------------------------------------------------------------------


def why(run: Run) -> RenderableType:
    """What happened to each step of a run, and the reason."""
    ranks = f", {len(run.ranks)} processes" if len(run.ranks) > 1 else ""
    imports = [rank.seconds["import"] for rank in run.ranks if "import" in rank.seconds]
    importing = f"; importing took {max(imports):.2f} s" if imports else ""
    heading = f"{run.script}, run of {readable_time(run.started_time)}{ranks}{importing}"
    parts: list[RenderableType] = [_line(heading, "bold")]
    for each in run.happenings:
        parts += [_line(""), *_happening(each, bool(ranks))]
    return Group(*parts)


def _happening(each: Happening, with_rank: bool) -> list[RenderableType]:
    rank = f", rank {each.rank}" if with_rank else ""
    lines = [f"{sum(each.seconds.values()):.2f} s: {_stages(each.seconds)}"]
    if each.reason and not (each.event == "loaded" and not each.changes):
        lines += each.reason.splitlines()
    lines += [f"  {in_words(change)}" for change in each.changes[:_CHANGES_SHOWN]]
    if len(each.changes) > _CHANGES_SHOWN:
        lines.append(f"  … and {counted(len(each.changes) - _CHANGES_SHOWN, 'more change')}")
    if each.unvouched:
        lines.append("it cannot be started without a trace, because of")
        lines += [f"  {text}" for text in each.unvouched[:_CHANGES_SHOWN]]
    headline = f"{each.step} ({each.label}){rank}: {_EVENTS.get(each.event, each.event)}"
    return [_line(headline, "bold"), _indented(lines)]


def startup_ledger(runs: Sequence[Run]) -> RenderableType:
    """Seconds by stage of several runs, side by side, the latest first.

    Verifying goes on in the background: it is not part of the sum.
    """
    headings = ["latest", *(f"{number} before" for number in range(1, len(runs)))]
    totals = [_sum(run) for run in runs]
    stages = in_order({stage for total in totals for stage in total})
    rows = [
        [stage, *(f"{total[stage]:.2f}" if stage in total else "·" for total in totals)]
        for stage in stages
    ]
    sums = (sum(total.values()) - total.get("verify", 0.0) for total in totals)
    rows.append(["all", *(f"{seconds:.2f}" for seconds in sums)])
    table = _table(["seconds", *headings], rows, right=headings)
    legend = [
        f"{heading}: {run.script}, {readable_time(run.started_time)}; {_events(run)}"
        for heading, run in zip(headings, runs, strict=True)
    ]
    return Group(table, _line(""), *map(_line, legend))


def _sum(run: Run) -> dict[str, float]:
    """Of the slowest process, stage by stage: the others wait for it."""
    total: dict[str, float] = {}
    for rank in run.ranks:
        for stage, seconds in rank.seconds.items():
            total[stage] = max(total.get(stage, 0.0), seconds)
    return total


def _events(run: Run) -> str:
    counts: dict[str, int] = {}
    for each in run.happenings:
        counts[each.event] = counts.get(each.event, 0) + 1
    return ", ".join(f"{count} {event}" for event, count in counts.items())


_SHOWN_SECONDS = 0.005


def ranks(run: Run) -> RenderableType:
    """The processes of a run side by side, and the slowest start by stage."""
    taken = {
        stage: max(each.seconds.get(stage, 0.0) for each in run.ranks) for stage in run.slowest
    }
    stages = in_order(stage for stage, seconds in taken.items() if seconds >= _SHOWN_SECONDS)
    rows = [
        [
            str(rank.rank),
            *(f"{rank.seconds.get(stage, 0.0):.2f}" for stage in stages),
            f"{rank.total_seconds:.2f}",
            ", ".join(f"{count} {event}" for event, count in rank.events.items()),
        ]
        for rank in run.ranks
    ]
    columns = ["rank", *stages, "all", "what"]
    table = _table(columns, rows, right=columns[:-1], cut="what")
    last = max(run.ranks, key=lambda each: each.total_seconds)
    slowest = ", ".join(f"{stage} rank {run.slowest[stage]}" for stage in stages)
    heading = f"{run.script}, run of {readable_time(run.started_time)}, seconds by stage"
    told = f"The slowest start is that of rank {last.rank}; by stage: {slowest}"
    return Group(_line(heading, "bold"), table, _line(told))


# ---- export, import, doctor ---------------------------------------------------------------------


def _steps(steps: Sequence[Any]) -> str:
    return counted(len(steps), "step")


def exported(result: Exported) -> RenderableType:
    """What went into a bundle."""
    lines = [f"left out {each}" for each in result.left_out]
    lines += [
        f"{result.file}: {_steps(result.steps)}, {counted(result.programs, 'program')}, "
        f"{readable_bytes(result.size_bytes)}"
    ]
    return Group(*map(_line, lines))


def imported(result: Imported) -> RenderableType:
    """What came out of a bundle."""
    there = f" ({result.already_there} more were there)" if result.already_there else ""
    parts: list[RenderableType] = [
        _line(f"{_steps(result.steps)} and {counted(result.programs, 'program')} imported{there}.")
    ]
    if result.foreign:
        refused = (
            f"{_steps(result.refused)} {'was' if len(result.refused) == 1 else 'were'} refused"
        )
        what = refused if result.refused else "They were stored"
        parts += [_line(f"{what}, but built for another environment:"), parts_table(result.foreign)]
    if result.settings:
        parts.append(_line("They are found by processes that set what this one does not:"))
        parts.append(parts_table(result.settings))
    return Group(*parts)


def parts_table(parts: Sequence[Part]) -> RenderableType:
    """Parts of two environments side by side."""
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 2), header_style="bold")
    table.add_column("part", no_wrap=True, overflow="ellipsis", min_width=_NAME_WIDTH)
    for name in ("bundle", "here"):
        table.add_column(name, overflow="fold")
    for each in parts:
        table.add_row(Text(each.part), Text(each.bundle), Text(each.here))
    return table


def diagnosis(found: Diagnosis) -> RenderableType:
    """A line for each check, and what to try below those that are not well."""
    width = max(len(check.name) for check in found.checks)
    return Group(*(each for check in found.checks for each in _check(check, width)))


def _check(check: Check, width: int) -> list[Any]:
    detail, *more = check.detail.splitlines()
    line = Text(f"{check.status:<8}", _COLORS[check.status])
    line.append(f"{check.name:<{width}}  {detail}", "default")
    hint = [f"try: {check.hint}"] if check.hint else []
    return [line, _indented([*more, *hint], 10 + width)]
