"""The report of a run as one HTML page, which needs no script and no other file."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from html import escape

from stepcache.report.run_trace import began, called_at
from stepcache.report.runs import Run, change_in_words, counts, events_in_words, slowest_seconds
from stepcache.storage.run_activity import Activity
from stepcache.storage.run_log import Row
from stepcache.units import readable_bytes, readable_ranks, readable_time, shortened

Cells = Mapping[str, str | Sequence[str]]
"""A row of a table: text by column. Of several texts the first is the heading of a list."""

_ROWS_SHOWN, _LINES_SHOWN = 500, 12
_COLUMNS = 68

_STYLE = """
:root { color-scheme: light dark; --paper: #ffffff; --ink: #1f2328; --quiet: #57606a;
  --line: #d0d7de; --band: #f6f8fa; --mark: #0063a0; }
@media (prefers-color-scheme: dark) { :root { --paper: #0d1117; --ink: #e6edf3;
  --quiet: #9da7b3; --line: #30363d; --band: #161b22; --mark: #79c0ff; } }
body { margin: 0 auto; max-width: 1200px; padding: 16px; background: var(--paper);
  color: var(--ink); font: 15px/1.5 system-ui, "Segoe UI", Roboto, "DejaVu Sans", sans-serif; }
h1 { font-size: 24px; margin: 8px 0; overflow-wrap: anywhere; }
h2 { font-size: 18px; margin: 36px 0 4px; }
p, figcaption { color: var(--quiet); margin: 4px 0 10px; max-width: 75ch; }
dl { display: flex; flex-wrap: wrap; gap: 12px; margin: 16px 0; }
dl div { background: var(--band); border: 1px solid var(--line); border-radius: 6px;
  padding: 8px 14px; }
dt { color: var(--quiet); font-size: 13px; }
dd { margin: 0; font-size: 18px; font-weight: 600; }
figure { margin: 8px 0; }
.charts { display: flex; flex-wrap: wrap; gap: 8px 32px; }
.charts figure { width: 340px; max-width: 100%; }
.columns { display: flex; align-items: flex-end; height: 80px; gap: 1px;
  border-bottom: 1px solid var(--quiet); }
.columns div { flex: 1; background: var(--mark); }
.bar { display: grid; grid-template-columns: 80px 1fr 80px; max-width: 480px; gap: 8px; }
.bar div { align-self: center; height: 12px; min-width: 1px; background: var(--mark); }
table { border-collapse: collapse; width: 100%; font-size: 14px; }
th, td { text-align: left; vertical-align: top; padding: 5px 14px 5px 0;
  border-bottom: 1px solid var(--line); overflow-wrap: anywhere; }
th { color: var(--quiet); font-weight: 600; overflow-wrap: normal; }
.right { text-align: right; white-space: nowrap; font-variant-numeric: tabular-nums; }
ul { margin: 2px 0; padding-left: 18px; }
"""


def page(run: Run, program_bytes: Mapping[str, int]) -> str:
    """Returns the page of a run; `program_bytes` are sizes of programs on disk, by digest."""
    sections = {
        "Start-up ledger": _ledger(run),
        "Misses": _misses(run),
        "Programs": _programs(run, program_bytes),
        "Transfers": _transfers(run),
        "Variables": _variables(run),
        "Processes": _processes(run),
    }
    body = [f"<h1>{_html(run.script)}</h1>", _head(run)]
    for title, parts in sections.items():
        body += [f"<section><h2>{title}</h2>", *parts, "</section>"]
    return "\n".join(
        (
            '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">',
            '<meta name="viewport" content="width=device-width, initial-scale=1">',
            f"<title>{_html(f'{run.script}: stepcache run report')}</title>",
            f"<style>{_STYLE}</style></head><body>",
            *body,
            "</body></html>\n",
        )
    )


def _head(run: Run) -> str:
    state, *others = {_state(rank.activity) for rank in run.ranks}
    state = "the processes differ: see below" if others else state
    moved = sum(each.size_bytes for rank in run.ranks for each in rank.moved)
    tiles = {
        "duration": _seconds(_duration(run)),
        "start-up": _seconds(max(rank.total_seconds for rank in run.ranks)),
        "programs": events_in_words(counts(run)),
        "bytes of variables moved": readable_bytes(moved),
        "variables": str(sum(len(rank.held) for rank in run.ranks)),
        "processes": str(len(run.ranks)),
    }
    shown = "".join(
        f"<div><dt>{name}</dt><dd>{_html(text)}</dd></div>" for name, text in tiles.items()
    )
    return f"{_paragraph(f'Run of {readable_time(run.started_time)}; {state}.')}<dl>{shown}</dl>"


def _state(activity: Activity | None) -> str:
    if activity is None:
        return "there are no counts of transfers and variables"
    when = readable_time(activity.written_time)
    return f"ended {when}" if activity.ended else f"not ended {when}, when it was last seen"


def _ledger(run: Run) -> Iterator[str]:
    yield _paragraph(
        "Seconds by stage, over all steps. With several processes, each bar is the time of the "
        "slowest process in that stage."
    )
    seconds = slowest_seconds(run)
    bars = seconds | {"sum": max(rank.total_seconds for rank in run.ranks)}
    largest = max(bars.values()) or 1.0
    for name, each in bars.items():
        bar = f'<div style="width: {100 * each / largest:.1f}%"></div>'
        yield f'<div class="bar"><span>{_html(name)}</span>{bar}<span>{_seconds(each)}</span></div>'


def _misses(run: Run) -> Iterator[str]:
    started = began(run)
    rows = [
        {
            "rank": _rank(run, row.rank),
            "at": f"{max(0.0, called_at(row) - started):.2f} s",
            "step": row.step,
            "miss": str(row.number or ""),
            "program": _obtained_in_words(row),
            "took": _seconds(sum(row.seconds.values())),
            "why": list(_why(row)),
        }
        for row in sorted(run.happenings, key=called_at)
    ]
    yield _paragraph(
        "Calls that found no program in memory, by the time since the run began. All others are "
        "served by JAX's dispatcher, and not recorded."
    )
    yield from _table(rows, right={"at", "took"})


def _why(row: Row) -> Iterator[str]:
    yield row.reason.splitlines()[0] if row.reason else "unknown"
    for what, lines in (
        ("", [*map(change_in_words, row.changes)]),
        ("hint: ", row.advice),
        ("each run has to compile it: ", [row.not_stored] if row.not_stored else []),
    ):
        yield from (f"{what}{text}" for text in shortened(lines, _LINES_SHOWN))


def _programs(run: Run, program_bytes: Mapping[str, int]) -> Iterator[str]:
    groups: dict[tuple[str, str], list[Row]] = {}
    for row in run.happenings:
        groups.setdefault((row.label, row.program), []).append(row)
    rows = []
    for (label, program), found in groups.items():
        size = program_bytes.get(program)
        rows.append(
            {
                "step": label,
                "program": program[:12] or "not on disk",
                "size": readable_bytes(size) if size is not None else "gone" if program else "",
                "obtained": "; ".join(_obtained(run, found)),
            }
        )
    yield from _table(rows, right={"size"})


def _obtained(run: Run, rows: Sequence[Row]) -> Iterator[str]:
    by_text: dict[str, list[int]] = {}
    for row in rows:
        by_text.setdefault(_obtained_in_words(row), []).append(row.rank)
    for text, ranks in by_text.items():
        yield f"{text} by {readable_ranks(ranks)}" if len(run.ranks) > 1 else text


def _obtained_in_words(row: Row) -> str:
    return f"{row.event}, {row.source}" if row.source not in ("", row.event) else row.event


def _transfers(run: Run) -> Iterator[str]:
    rows, by_link = [], dict[str, list[float]]()
    started, duration = began(run), _duration(run)
    for rank, activity in _activities(run):
        first, width = activity.started_time - started, activity.width_seconds
        for each in activity.moved:
            columns = by_link.setdefault(each.link, [0.0] * _COLUMNS)
            for index, _, size in each.buckets:
                ends = ((first + (index + end) * width) / duration for end in (0, 1))
                low, high = (min(max(0, int(end * _COLUMNS)), _COLUMNS - 1) for end in ends)
                for column in range(low, high + 1):  # A bucket may be wider than a column.
                    columns[column] += size / (high + 1 - low)
            cells = {
                "rank": _rank(run, rank),
                "what": each.mover,
                "link": each.link,
                "calls": f"{each.transfers:,}",
                "bytes": readable_bytes(each.size_bytes),
                "a call": readable_bytes(round(each.size_bytes / max(1, each.transfers))),
            }
            rows.append((each.size_bytes, cells))
    if not rows:
        yield _paragraph("No values of variables were moved, or the counts were lost.")
        return
    yield _paragraph(
        "Bytes of variables over each link, of all processes, from the start of the run to its "
        "end. “What” is the step, or the variables whose method moved them."
    )
    charts = (_columns(link, columns, duration) for link, columns in by_link.items())
    yield f'<div class="charts">{"".join(charts)}</div>'
    rows.sort(key=lambda row: -row[0])
    yield from _table([cells for _, cells in rows], right={"calls", "bytes", "a call"})


def _duration(run: Run) -> float:
    """Returns how many seconds after its start a run was last seen."""
    ends = [row.time for row in run.happenings]
    for _, each in _activities(run):
        last = max((bucket[0] + 1 for series in each.moved for bucket in series.buckets), default=0)
        moved_until = each.started_time + last * each.width_seconds
        ends += [each.written_time, moved_until]
    return max(1e-3, max(ends) - began(run))


def _variables(run: Run) -> Iterator[str]:
    rows = [
        {
            "rank": _rank(run, rank.rank),
            "name": held.name,
            "version": f"{held.version:,}",
            "size": readable_bytes(held.size_bytes),
            "placement": held.placement,
            "read": held.read,
            "reads": f"{held.reads:,}" if held.reads else "",
            "served by a copy": f"{held.hits / held.reads:.1%}" if held.reads else "",
        }
        for rank in run.ranks
        for held in rank.held
    ]
    yield _paragraph(
        "The version is the number of writes. Reads are counted only if the master copy is not on "
        "the devices of the step; for tables, by row."
    )
    yield from _table(rows, right={"version", "size", "reads", "served by a copy"})


def _processes(run: Run) -> Iterator[str]:
    stages = list(slowest_seconds(run))
    rows = [
        {
            "rank": str(rank.rank),
            "programs": events_in_words(rank.events),
            **{each: f"{rank.seconds.get(each, 0.0):.2f}" for each in stages},
            "sum": f"{rank.total_seconds:.2f}",
            "moved": readable_bytes(sum(each.size_bytes for each in rank.moved)),
            "state": _state(rank.activity),
        }
        for rank in run.ranks
    ]
    yield _paragraph("Seconds as in the start-up ledger; bytes of variables.")
    yield from _table(rows, right={*stages, "sum", "moved"})


def _rank(run: Run, rank: int) -> str:
    """The cell of a process; empty in a run of one, whose tables then have no such column."""
    return str(rank) if len(run.ranks) > 1 else ""


def _activities(run: Run) -> list[tuple[int, Activity]]:
    """What each process moved and held, where it is known."""
    return [(rank.rank, rank.activity) for rank in run.ranks if rank.activity is not None]


def _seconds(value: float) -> str:
    return f"{value:,.2f} s" if value >= 0.1 or not value else f"{value * 1e3:.1f} ms"


def _html(text: str) -> str:
    """Text on one line, with U+FFFD for control characters and surrogates."""
    text = re.sub("[\t\n\r]", " ", text)
    return escape(re.sub("[\x00-\x1f\x7f-\x9f\ud800-\udfff\ufffe\uffff]", "\ufffd", text))


def _paragraph(text: str) -> str:
    return f"<p>{_html(text)}</p>"


def _table(rows: Sequence[Cells], right: Collection[str] = ()) -> Iterator[str]:
    """Yields a table, without columns that are empty. Columns in `right` have numbers."""
    if not rows:
        yield _paragraph("None.")
        return
    names = [name for name in rows[0] if any(row[name] for row in rows)]
    kinds = {name: ' class="right"' if name in right else "" for name in names}
    heads = "".join(f"<th{kind}>{_html(name)}</th>" for name, kind in kinds.items())
    yield f"<table><thead><tr>{heads}</tr></thead><tbody>"
    for row in rows[:_ROWS_SHOWN]:
        cells = (f"<td{kind}>{_cell(row[name])}</td>" for name, kind in kinds.items())
        yield f"<tr>{''.join(cells)}</tr>"
    yield "</tbody></table>"
    if len(rows) > _ROWS_SHOWN:
        yield _paragraph(f"… and {len(rows) - _ROWS_SHOWN} more.")


def _cell(text: str | Sequence[str]) -> str:
    if isinstance(text, str):
        return _html(text)
    first, *rest = map(_html, text)
    items = "".join(f"<li>{line}</li>" for line in rest)
    return f"<div>{first}{f'<ul>{items}</ul>' if items else ''}</div>"


def _columns(link: str, values: Sequence[float], seconds: float) -> str:
    """Draws the bytes that crossed a link, from the start of a run to its end."""
    largest = max(values) or 1.0
    heights = (max(1.0, 100 * value / largest) if value else 0.0 for value in values)
    columns = "".join(f'<div style="height: {height:.1f}%"></div>' for height in heights)
    span, size = _seconds(seconds / len(values)), readable_bytes(round(sum(values)))
    most = f"at most {readable_bytes(round(largest))} in {span}; 0 s to {seconds:,.1f} s"
    caption = f"<figcaption>{_html(link)}: {size}, {most}</figcaption>"
    return f'<figure>{caption}<div class="columns">{columns}</div></figure>'
