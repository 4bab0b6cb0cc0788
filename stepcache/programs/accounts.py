"""What is told of how a program came: to the miss log, to the run log, to listeners."""

from __future__ import annotations

import dataclasses

from stepcache.calls.step_spec import Request
from stepcache.events import Built, Captured, Loaded, Miss, recorder
from stepcache.jaxcompat import storing
from stepcache.programs.archive import Archive, LookupResult
from stepcache.programs.levels import Resolution
from stepcache.programs.miss_log import MissLog

_OF_CALL = ("argument", "tree", "static", "options", "mesh")
_EVENTS = {1: "loaded", 2: "relinked", 3: "built"}
_REMEDIES = {
    1: "loaded from disk, without a trace",
    2: "traced, and loaded from disk without compiling it",
    3: "built",
}


def with_result(miss: Miss, result: LookupResult) -> Miss:
    """A miss, with what the archive knows about it."""
    if result.untrackable:
        miss = dataclasses.replace(miss, untrackable=result.untrackable)
    if result.since is None:
        return miss
    if miss.reason != "first call":
        stored = tuple(each for each in result.changes if each.part not in _OF_CALL)
        return dataclasses.replace(miss, stored=stored, since=result.since if stored else None)
    return dataclasses.replace(miss, reason="other run", changes=result.changes, since=result.since)


def account(
    miss_log: MissLog,
    name: str,
    build_id: int,
    request: Request,
    resolution: Resolution,
    miss: Miss,
    own_seconds: float,
) -> None:
    """Tells the miss log of a step, and those who listen.

    Args:
        miss_log: of the step.
        name: of the step.
        build_id: ties events about one program together.
        request: the call.
        resolution: its program.
        miss: why it was not there.
        own_seconds: what the call took apart from the stages.
    """
    program, seconds = resolution.program, resolution.program.seconds
    remedy = _REMEDIES[program.level]
    if resolution.giver is not None:
        remedy = f"loaded from rank {resolution.giver}, without a trace"
    if program.level < 3:
        remedy += f", in {sum(seconds.values()):.2f} s"
    advice = (*miss.advice, *map(_advise_on_capture, program.captured))
    miss = dataclasses.replace(
        miss, advice=advice, untrackable=resolution.untrackable, remedy=remedy
    )
    miss_log.add(request, miss)
    traced, built = program.level > 1, program.level > 2
    traces = program.traces
    counts = {"traces": traces, "lowers": traces, "compiles": built, "loads": not built}
    times = {f"{stage}_seconds": value for stage, value in seconds.items()}
    miss_log.count(misses=1, own_seconds=own_seconds, **counts, **times)
    if built:
        stages = (seconds["trace"], seconds["lower"], seconds["compile"])
        recorder.emit(Built(name, build_id, miss, *stages, own_seconds, program.captured))
    else:
        recorder.emit(Loaded(name, build_id, miss, traced, dict(seconds), own_seconds))


def note(archive: Archive, name: str, resolution: Resolution, miss: Miss) -> None:
    """Writes a row of the run log; for what is being stored, when that is decided."""
    address, program = resolution.address, resolution.program
    assert address is not None
    devices = storing.program_devices(program.run) if resolution.digest else ()
    archive.note(
        _EVENTS[program.level],
        name,
        address.label,
        lookup=address.digest,
        program=resolution.digest,
        devices=[device.id for device in devices],
        seconds={stage: round(value, 4) for stage, value in program.seconds.items()},
        reason=str(miss),
        changes=[[each.part, each.path, each.before, each.after] for each in miss.changes],
        untrackable=list(resolution.untrackable),
    )
    for rank, (level, seconds) in resolution.others.items():
        archive.note(_EVENTS[level], name, address.label, rank=rank, seconds=seconds)


def _advise_on_capture(captured: Captured) -> str:
    return (
        f"{captured.name}, {captured.type}, is captured by closure: "
        f"{captured.size_bytes / 1e6:.1f} MB inside the program; pass it as an argument"
    )
