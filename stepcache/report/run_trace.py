"""The misses and transfers of a run as trace events, which Perfetto and chrome://tracing show.

The format is the JSON of Chrome's trace events. Times are in microseconds since the run began.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from stepcache.report.runs import Rank, Run, change_in_words, in_order
from stepcache.storage.run_activity import Activity
from stepcache.storage.run_log import Row


def trace_events(run: Run) -> dict[str, Any]:
    """Returns the events of a run: ranks are processes, concurrent misses are in threads.

    What a process moved is a counter, in bytes and calls a second. The run log bounds the number of
    events.
    """
    started = began(run)
    events = [event for rank in run.ranks for event in _rank_events(run, rank, started)]
    about = {"script": run.script, "run": run.name, "started_time": started}
    return {"traceEvents": events, "displayTimeUnit": "ms", "otherData": about}


def began(run: Run) -> float:
    """The time of the first call or transfer, in seconds since the epoch."""
    starts = (rank.activity.started_time for rank in run.ranks if rank.activity)
    return min([*map(called_at, run.happenings), *starts])


def called_at(row: Row) -> float:
    """The time of the call that missed."""
    return row.called_time or row.time - sum(row.seconds.values())


def _rank_events(run: Run, rank: Rank, started: float) -> Iterator[dict[str, Any]]:
    common = {"pid": rank.rank}
    name = run.script if len(run.ranks) == 1 else f"rank {rank.rank}: {run.script}"
    yield {"ph": "M", "name": "process_name", "args": {"name": name}, **common}
    yield {"ph": "M", "name": "process_sort_index", "args": {"sort_index": rank.rank}, **common}
    ends: list[float] = []  # Of the last miss in each thread.
    for row in sorted((row for row in run.happenings if row.rank == rank.rank), key=called_at):
        at = called_at(row)
        thread = next((n for n, end in enumerate(ends) if end <= at), len(ends))
        ends[thread : thread + 1] = [at + sum(row.seconds.values())]
        yield from _slices(row, round((at - started) * 1e6), {**common, "tid": thread})
    for thread in range(len(ends)):
        about = {"name": f"calls ({thread + 1})" if thread else "calls"}
        yield {"ph": "M", "name": "thread_name", "args": about, "tid": thread, **common}
    if rank.activity is not None:
        yield from _counters(rank.activity, started, {**common, "tid": 0})


def _slices(row: Row, at: int, common: dict[str, int]) -> Iterator[dict[str, Any]]:
    """Yields a miss, and within it the stages one after the other, as they are in a miss."""
    durations = {stage: round(row.seconds[stage] * 1e6) for stage in in_order(row.seconds)}
    changes = list(map(change_in_words, row.changes))
    args = {"label": row.label, "reason": row.reason, "changes": changes, "program": row.program}
    name, total = f"{row.step}: {row.event}", sum(durations.values())
    yield {"ph": "X", "cat": "miss", "name": name, "ts": at, "dur": total, "args": args, **common}
    for stage, duration in durations.items():
        yield {"ph": "X", "cat": "stage", "name": stage, "ts": at, "dur": duration, **common}
        at += duration


def _counters(
    activity: Activity, started: float, common: dict[str, int]
) -> Iterator[dict[str, Any]]:
    """Yields the transfers as rates, which last until the next event of the same name."""
    width = activity.width_seconds
    first = round((activity.started_time - started) * 1e6)
    for each in activity.moved:
        filled = {index: (count, size) for index, count, size in each.buckets}
        for index in sorted({*filled, *(index + 1 for index in filled)}):
            at = {"ph": "C", "ts": first + round(index * width * 1e6), **common}
            for what, value in zip(("calls", "bytes"), filled.get(index, (0, 0)), strict=True):
                name = f"{each.link}, {what}/s"
                yield {"name": name, "args": {each.mover: value / width}, **at}
