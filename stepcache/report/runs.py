"""What the latest runs built and loaded, and why: the ledger on disk, as records.

The names of the fields here are the names in the JSON of `stepcache cache why`.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace

from stepcache.programs.archive import Archive
from stepcache.report.inventory import means
from stepcache.storage.run_log import Row

STAGES = tuple("import hash read agree wait load trace lower compile give execute verify".split())
_BROUGHT = ("built", "loaded", "relinked")
_CHANGE: tuple[str, ...] = ("part", "path", "before", "after")
# Processes of one pod write their first row within that time of each other.
_POD_SECONDS = 600


@dataclass(frozen=True, slots=True)
class Happening:
    """One thing that happened to a step in a run.

    Attributes:
        step: the step's name.
        label: the step by file and name.
        event: "built", "loaded" (without a trace), "relinked" (traced, not compiled), "verified",
            "stale" or "failed".
        time: seconds since the epoch.
        seconds: by stage, that of its first execution too.
        reason: why the program was not simply there.
        changes: what changed since an earlier run: part, path, before, after.
        unvouched: what keeps the step from being started without a trace.
        program: digest of the executable; empty where it is not on disk.
        lookup: digest of the step's entry.
        rank: of the process, in its pod.
    """

    step: str
    label: str
    event: str
    time: float
    seconds: dict[str, float]
    reason: str
    changes: tuple[dict[str, str], ...]
    unvouched: tuple[str, ...]
    program: str
    lookup: str
    rank: int


@dataclass(frozen=True, slots=True)
class Rank:
    """One process of a run.

    Attributes:
        rank: its index in the pod.
        seconds: by stage, over all its steps, and "import".
        total_seconds: their sum, without what happened in the background.
        events: how often what happened.
    """

    rank: int
    seconds: dict[str, float]
    total_seconds: float
    events: dict[str, int]


@dataclass(frozen=True, slots=True)
class Run:
    """One run of a script: one process, or all processes of a pod.

    Attributes:
        script: name of the main program's file.
        started_time: of the first row, in seconds since the epoch.
        ranks: its processes, by rank.
        slowest: for each stage, the rank that took longest.
        happenings: what happened, in order.
    """

    script: str
    started_time: float
    ranks: tuple[Rank, ...]
    slowest: dict[str, int]
    happenings: tuple[Happening, ...]


def latest_runs(archive: Archive | None, step: str | None = None) -> Iterator[Run]:
    """The runs that used a step, or any, the latest first; only what concerns the step."""
    if archive is None:
        return
    for rows in _pods(archive.history.runs()):
        if step is not None:
            rows = [row for row in rows if means(row.label, step) or row.step == step]
        if rows:
            yield _run(rows)


def steps_known(archive: Archive | None) -> list[str]:
    """The labels of all steps that the ledger knows."""
    runs = archive.history.runs() if archive is not None else ()
    return sorted({row.label for rows in runs for row in rows})


def _pods(files: Iterable[list[Row]]) -> Iterator[list[Row]]:
    """Puts together what the processes of one pod wrote, each into a file of its own."""
    waiting: list[list[list[Row]]] = []
    for rows in files:
        pod = next((pod for pod in waiting if _belongs(rows, pod)), None)
        if pod is not None:
            pod.append(rows)
        else:
            waiting.append([rows])
        while waiting and len(waiting[0]) == waiting[0][0][0].processes:
            yield _in_order(waiting.pop(0))
    yield from map(_in_order, waiting)


def _belongs(rows: list[Row], pod: list[list[Row]]) -> bool:
    row, first = rows[0], pod[0][0]
    return (
        (row.script, row.processes) == (first.script, first.processes)
        and row.rank not in {each[0].rank for each in pod}
        and abs(row.time - first.time) < _POD_SECONDS
    )


def _in_order(pod: list[list[Row]]) -> list[Row]:
    return sorted(itertools.chain.from_iterable(pod), key=lambda row: row.time)


def _run(rows: list[Row]) -> Run:
    by_rank: dict[int, list[Row]] = {}
    for row in rows:
        by_rank.setdefault(row.rank, []).append(row)
    ranks = tuple(_rank(rank, by_rank[rank]) for rank in sorted(by_rank))
    stages = in_order({stage for rank in ranks for stage in rank.seconds})
    slowest = {
        stage: max(ranks, key=lambda rank: rank.seconds.get(stage, 0.0)).rank for stage in stages
    }
    happenings = tuple(map(_happening, _with_executions(rows)))
    return Run(rows[0].script, rows[0].time, ranks, slowest, happenings)


def _with_executions(rows: list[Row]) -> list[Row]:
    """Puts the seconds of a first execution to those of what was executed, where that is told."""
    kept: list[Row] = []
    for row in rows:
        if row.event == "executed":
            for index, each in enumerate(kept):
                same = (each.rank, each.label) == (row.rank, row.label)
                if same and each.event in _BROUGHT and "execute" not in each.seconds:
                    kept[index] = replace(each, seconds=each.seconds | row.seconds)
                    break
        else:
            kept.append(row)
    return kept


def _rank(rank: int, rows: list[Row]) -> Rank:
    seconds: dict[str, float] = {}
    events: dict[str, int] = {}
    for row in rows:
        events[row.event] = events.get(row.event, 0) + 1
        for stage, value in row.seconds.items():
            seconds[stage] = round(seconds.get(stage, 0.0) + value, 4)
    total = sum(value for stage, value in seconds.items() if stage != "verify")
    return Rank(rank, {stage: seconds[stage] for stage in in_order(seconds)}, total, events)


def in_order(stages: Iterable[str]) -> list[str]:
    """Stages in the order in which a start goes through them."""
    known = {stage: number for number, stage in enumerate(STAGES)}
    return sorted(stages, key=lambda stage: (known.get(stage, len(known)), stage))


def _happening(row: Row) -> Happening:
    headline = row.reason.partition("\n")[0]
    reason = headline.partition(": ")[2] if headline.startswith(f"{row.step}, miss") else row.reason
    changes = [dict(zip(_CHANGE, each, strict=False)) for each in row.changes]
    return Happening(
        row.step,
        row.label,
        row.event,
        row.time,
        {stage: value for stage, value in row.seconds.items() if stage != "import"},
        reason,
        tuple(changes),
        tuple(row.unvouched),
        row.program,
        row.lookup,
        row.rank,
    )


def in_words(change: dict[str, str]) -> str:
    """A change as one reads it: "`model.py:Block.__call__` its code changed"."""
    part, path = change.get("part", ""), change.get("path", "")
    before, after = change.get("before", ""), change.get("after", "")
    if part == "code" and "absent" in (before, after):
        return f"`{path}` {'was not there' if before == 'absent' else 'is gone'}"
    if part == "code" and before.startswith("code ") and after.startswith("code "):
        return f"`{path}` its code changed"
    name = path if path.startswith(part) or part in ("value", "code") else f"{part} {path}"
    return f"{name} {before} → {after}"
