"""Records of the latest runs: the programs that each has built and loaded, and why.

`stepcache cache why --json` prints these records, with these names.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace

from stepcache.programs.archive import Archive
from stepcache.report.inventory import means
from stepcache.storage.run_log import Row

STAGES = tuple(
    "import hash read remote agree wait load trace lower compile give execute verify".split()
)
_PROGRAM_EVENTS = ("built", "loaded", "relinked")
_CHANGE = ("part", "path", "before", "after")
_POD_SECONDS = 600  # The processes of one pod write their first rows within this time.


@dataclass(frozen=True, slots=True)
class Rank:
    """One process of a run."""

    rank: int  # Index of the process in its pod.
    seconds: dict[str, float]  # Duration of each stage over all steps, and "import".
    total_seconds: float  # Their sum, without background verification.
    events: dict[str, int]  # Number of events of each kind.


@dataclass(frozen=True, slots=True)
class Run:
    """One run of a script: one process, or all processes of a pod."""

    script: str  # File name of the main program.
    started_time: float  # Time of the first event, in seconds since the epoch.
    ranks: tuple[Rank, ...]  # The processes, by rank.
    slowest: dict[str, int]  # The rank that took longest in each stage.
    # The rows of the run log in order of time: each change with its names, and the seconds with
    # those of the first execution, but without the import.
    happenings: tuple[Row, ...]


def latest_runs(archive: Archive | None, step: str | None = None) -> Iterator[Run]:
    """Yields runs, the latest first; given a step, only runs of it and only its events."""
    for rows in _pods(archive.run_log.runs() if archive is not None else ()):
        rows = [row for row in rows if step in (None, row.step) or means(row.label, step)]
        if rows:
            yield _run(rows)


def steps_known(archive: Archive | None) -> list[str]:
    """The labels of all steps in the run log."""
    runs = archive.run_log.runs() if archive is not None else ()
    return sorted({row.label for rows in runs for row in rows})


def _pods(files: Iterable[list[Row]]) -> Iterator[list[Row]]:
    """Yields the rows of each run, joined from the files of the processes of a pod."""
    waiting: list[list[list[Row]]] = []
    for rows in files:
        pod = next((pod for pod in waiting if _belongs(rows[0], pod)), None)
        if pod is None:
            waiting.append([rows])
        else:
            pod.append(rows)
        while waiting and len(waiting[0]) == waiting[0][0][0].processes:
            yield _by_time(waiting.pop(0))
    yield from map(_by_time, waiting)


def _belongs(row: Row, pod: list[list[Row]]) -> bool:
    """Returns whether a file with this first row belongs to a pod."""
    first = pod[0][0]
    return (
        (row.script, row.processes) == (first.script, first.processes)
        and row.rank not in {rows[0].rank for rows in pod}
        and abs(row.time - first.time) < _POD_SECONDS
    )


def _by_time(pod: list[list[Row]]) -> list[Row]:
    return sorted(itertools.chain.from_iterable(pod), key=lambda row: row.time)


def _run(rows: list[Row]) -> Run:
    numbers = sorted({row.rank for row in rows})
    ranks = tuple(_rank(number, [row for row in rows if row.rank == number]) for number in numbers)
    slowest = {
        stage: max(ranks, key=lambda rank: rank.seconds.get(stage, 0.0)).rank
        for stage in in_order({stage for rank in ranks for stage in rank.seconds})
    }
    return Run(rows[0].script, rows[0].time, ranks, slowest, tuple(_happenings(rows)))


def _happenings(rows: list[Row]) -> list[Row]:
    """Returns the rows of `Run`: first executions are merged into the builds and loads before."""
    kept: list[Row] = []
    for row in rows:
        if row.event != "executed":
            seconds = {stage: value for stage, value in row.seconds.items() if stage != "import"}
            changes = [dict(zip(_CHANGE, each, strict=False)) for each in row.changes]
            kept.append(replace(row, seconds=seconds, changes=changes))
            continue
        for index, each in enumerate(kept):
            same = (each.rank, each.label) == (row.rank, row.label)
            if same and each.event in _PROGRAM_EVENTS and "execute" not in each.seconds:
                kept[index] = replace(each, seconds=each.seconds | row.seconds)
                break
    return kept


def _rank(rank: int, rows: list[Row]) -> Rank:
    seconds: dict[str, float] = {}
    for stage, taken in itertools.chain.from_iterable(row.seconds.items() for row in rows):
        seconds[stage] = seconds.get(stage, 0.0) + taken
    rounded = {stage: round(seconds[stage], 4) for stage in in_order(seconds)}
    total = sum(value for stage, value in rounded.items() if stage != "verify")
    return Rank(rank, rounded, total, dict(Counter(row.event for row in rows)))


def in_order(stages: Iterable[str]) -> list[str]:
    """Sorts stages in the order of a miss."""
    known = {stage: number for number, stage in enumerate(STAGES)}
    return sorted(stages, key=lambda stage: (known.get(stage, len(known)), stage))


def change_in_words(change: dict[str, str]) -> str:
    """Returns a change as text, such as "`model.py:Block.__call__` its code changed"."""
    part, path = change.get("part", ""), change.get("path", "")
    before, after = change.get("before", ""), change.get("after", "")
    if part == "code" and "absent" in (before, after):
        return f"`{path}` {'was not there' if before == 'absent' else 'is gone'}"
    if part == "code" and before.startswith("code ") and after.startswith("code "):
        return f"`{path}` its code changed"
    name = path if path.startswith(part) or part in ("value", "code") else f"{part} {path}"
    return f"{name} {before} → {after}"
