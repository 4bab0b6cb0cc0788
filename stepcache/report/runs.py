"""Records of the latest runs: the programs that each has built and loaded, and why.

`stepcache cache why --json` prints these records, with these names.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

from stepcache.programs.store import ProgramStore
from stepcache.report.inventory import means
from stepcache.storage.run_activity import Activity, Held, Series
from stepcache.storage.run_log import Logged, Row

STAGES = tuple("import trace lower agree remote wait load compile give".split())
LATEST = "last"
_CHANGE = ("part", "path", "before", "after")
_POD_SECONDS = 600  # The processes of one pod write their first rows within this time.


@dataclass(frozen=True, slots=True)
class Rank:
    """One process of a run."""

    rank: int  # Index of the process in its pod.
    seconds: dict[str, float]  # Duration of each stage over all steps, and "import".
    total_seconds: float  # Their sum.
    events: dict[str, int]  # Number of events of each kind.
    activity: Activity | None = None  # What it moved and held; None if that is unknown.

    @property
    def moved(self) -> list[Series]:
        """What it moved; empty if that is unknown."""
        return self.activity.moved if self.activity is not None else []

    @property
    def held(self) -> list[Held]:
        """Variables and tables that it held; empty if they are unknown."""
        return self.activity.held if self.activity is not None else []


@dataclass(frozen=True, slots=True)
class Run:
    """One run of a script: one process, or all processes of a pod."""

    script: str  # File name of the main program.
    started_time: float  # Time of the first event, in seconds since the epoch.
    ranks: tuple[Rank, ...]  # The processes, by rank.
    slowest: dict[str, int]  # The rank that took longest in each stage.
    # The rows of the run log in order of time: each change with its names, and the seconds without
    # those of the import.
    happenings: tuple[Row, ...]
    name: str  # Name of the run's log, which begins with its time; of a pod, that of one process.


@dataclass(frozen=True, slots=True)
class Summary:
    """A row of `stepcache report --list`."""

    number: int  # 0 for the latest run.
    script: str  # File name of the main program.
    started_time: float  # Time of the first event, in seconds since the epoch.
    processes: int  # Number of processes in the run log.
    events: str  # Number of events of each kind.
    name: str  # Name of the run.


def find_run(store: ProgramStore | None, wanted: str) -> Run | None:
    """Returns a run by its number, the beginning of its name, or the name of its script."""
    runs = latest_runs(store)
    number = "0" if wanted == LATEST else wanted
    if number.isdecimal() and len(number) < 5:
        return next(itertools.islice(runs, int(number), None), None)
    return next((run for run in runs if wanted == run.script or run.name.startswith(wanted)), None)


def summaries(store: ProgramStore | None) -> list[Summary]:
    """Lists the runs, the latest first."""
    found = []
    for number, run in enumerate(latest_runs(store)):
        about = len(run.ranks), events_in_words(counts(run)), run.name
        found.append(Summary(number, run.script, run.started_time, *about))
    return found


def slowest_seconds(run: Run) -> dict[str, float]:
    """The seconds of each stage in the process that was slowest in it."""
    seconds = {rank.rank: rank.seconds for rank in run.ranks}
    return {stage: seconds[rank][stage] for stage, rank in run.slowest.items()}


def program_steps(run: Run) -> dict[str, str]:
    """The label of the step of each program on disk, by the program's digest."""
    return {each.program: each.label for each in run.happenings if each.program}


def events_in_words(counts: Mapping[str, int]) -> str:
    """`2 compiled, 1 loaded`."""
    return ", ".join(f"{count} {event}" for event, count in counts.items())


def counts(run: Run) -> dict[str, int]:
    return dict(Counter(each.event for each in run.happenings))


def latest_runs(store: ProgramStore | None, step: str | None = None) -> Iterator[Run]:
    """Yields runs, the latest first; given a step, only runs of it and only its events."""
    for pod in _pods(store.run_log.runs() if store is not None else ()):
        rows = itertools.chain.from_iterable(logged.rows for logged in pod)
        rows = [row for row in rows if step in (None, row.step) or means(row.label, step)]
        if rows:
            yield _run(pod, sorted(rows, key=lambda row: row.time))


def steps_known(store: ProgramStore | None) -> list[str]:
    """The labels of all steps in the run log."""
    runs = store.run_log.runs() if store is not None else ()
    return sorted({row.label for logged in runs for row in logged.rows})


def _pods(logs: Iterable[Logged]) -> Iterator[list[Logged]]:
    """Yields the logs of each run: those of the processes of a pod together."""
    waiting: list[list[Logged]] = []
    for logged in logs:
        pod = next((pod for pod in waiting if _belongs(logged.rows[0], pod)), None)
        if pod is None:
            waiting.append([logged])
        else:
            pod.append(logged)
        while waiting and len(waiting[0]) == waiting[0][0].rows[0].processes:
            yield waiting.pop(0)
    yield from waiting


def _belongs(row: Row, pod: list[Logged]) -> bool:
    """Returns whether a log with this first row belongs to a pod."""
    first = pod[0].rows[0]
    return (
        (row.script, row.processes) == (first.script, first.processes)
        and row.rank not in {logged.rows[0].rank for logged in pod}
        and abs(row.time - first.time) < _POD_SECONDS
    )


def _run(pod: list[Logged], rows: list[Row]) -> Run:
    activities = {logged.rows[0].rank: logged.activity for logged in pod}
    ranks = tuple(
        _rank(number, [row for row in rows if row.rank == number], activities.get(number))
        for number in sorted({row.rank for row in rows})
    )
    slowest = {
        stage: max(ranks, key=lambda rank: rank.seconds.get(stage, 0.0)).rank
        for stage in in_order({stage for rank in ranks for stage in rank.seconds})
    }
    name = min(logged.name for logged in pod)
    return Run(rows[0].script, rows[0].time, ranks, slowest, tuple(map(_happening, rows)), name)


def _happening(row: Row) -> Row:
    seconds = {stage: value for stage, value in row.seconds.items() if stage != "import"}
    return replace(row, seconds=seconds, changes=_named(row.changes))


def _named(changes: list[list[str]]) -> list[dict[str, str]]:
    return [dict(zip(_CHANGE, each, strict=False)) for each in changes]


def _rank(rank: int, rows: list[Row], activity: Activity | None) -> Rank:
    seconds: dict[str, float] = {}
    for stage, taken in itertools.chain.from_iterable(row.seconds.items() for row in rows):
        seconds[stage] = seconds.get(stage, 0.0) + taken
    rounded = {stage: round(seconds[stage], 4) for stage in in_order(seconds)}
    total = sum(rounded.values())
    return Rank(rank, rounded, total, dict(Counter(row.event for row in rows)), activity)


def in_order(stages: Iterable[str]) -> list[str]:
    """Sorts stages in the order of a miss."""
    known = {stage: number for number, stage in enumerate(STAGES)}
    return sorted(stages, key=lambda stage: (known.get(stage, len(known)), stage))


def change_in_words(change: Any) -> str:
    """Returns a named change as text, such as "package jaxlib: 0.10.1 → 0.10.2"."""
    part, path = change.get("part", ""), change.get("path", "")
    name = path if path.startswith(part) or part in ("argument", "code") else f"{part} {path}"
    return f"{name}: {change.get('before', '')} → {change.get('after', '')}"
