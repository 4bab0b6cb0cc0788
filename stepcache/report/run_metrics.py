"""The counts of a run as OpenMetrics text, for Prometheus and what reads the same."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping

from stepcache.report.runs import Run, program_steps

Labels = tuple[tuple[str, str], ...]


def metrics_text(run: Run, program_bytes: Mapping[str, int]) -> str:
    """Returns the counts of a run; `program_bytes` are sizes of programs on disk, by digest."""
    families = (*_of_run(run), *_of_programs(run, program_bytes), *_of_values(run))
    return "\n".join([*(line for family in families for line in family), "# EOF", ""])


def _of_run(run: Run) -> Iterator[list[str]]:
    about = _labels(script=run.script, run=run.name, processes=len(run.ranks))
    yield _family("run", "info", "The run that the other metrics are about.", {about: 1})
    started = {(): run.started_time}
    yield _family("start_time_seconds", "gauge", "When the first program was obtained.", started)
    found = [(rank.rank, rank.activity) for rank in run.ranks if rank.activity]
    times = {_labels(rank=rank): activity.written_time for rank, activity in found}
    yield _family("activity_time_seconds", "gauge", "When a process wrote its counters.", times)
    ended = {_labels(rank=rank): int(activity.ended) for rank, activity in found}
    yield _family("ended", "gauge", "1 if the process has exited normally.", ended)


def _of_programs(run: Run, program_bytes: Mapping[str, int]) -> Iterator[list[str]]:
    events, seconds = defaultdict[Labels, float](float), defaultdict[Labels, float](float)
    for row in run.happenings:
        about = {"step": row.label, "rank": row.rank}
        events[_labels(event=row.event, **about)] += 1
        for stage, taken in row.seconds.items():
            seconds[_labels(stage=stage, **about)] += taken
    yield _family("programs", "counter", "Programs compiled and loaded.", events)
    yield _family("stage_seconds", "counter", "Time spent on programs, by stage.", seconds)
    sizes = {
        _labels(step=step, program=digest): program_bytes[digest]
        for digest, step in program_steps(run).items()
        if digest in program_bytes
    }
    yield _family("program_size_bytes", "gauge", "Size of a program on disk.", sizes)


def _of_values(run: Run) -> Iterator[list[str]]:
    transfers, moved, reads = (defaultdict[Labels, float](int) for _ in range(3))
    versions: dict[Labels, float] = {}
    sizes: dict[Labels, float] = {}
    for rank in run.ranks:
        for each in rank.moved:
            labels = _labels(mover=each.mover, link=each.link, rank=rank.rank)
            transfers[labels] += each.transfers
            moved[labels] += each.size_bytes
        for held in rank.held:
            about = {"variable": held.name, "rank": rank.rank}
            versions[_labels(**about)] = held.version
            sizes[_labels(**about)] = held.size_bytes
            reads[_labels(source="copy", **about)] += held.hits
            reads[_labels(source="master", **about)] += held.reads - held.hits
    yield _family("transfers", "counter", "Calls that moved values of variables.", transfers)
    yield _family("moved_bytes", "counter", "Bytes of variables over each link.", moved)
    yield _family("variable_version", "gauge", "Number of writes.", versions)
    yield _family("variable_size_bytes", "gauge", "Size of a value.", sizes)
    yield _family("variable_reads", "counter", "Reads served by a copy, or by the master.", reads)


def _labels(**labels: str | int) -> Labels:
    return tuple((name, str(value)) for name, value in sorted(labels.items()))


_SUFFIXES = {"counter": "_total", "info": "_info", "gauge": ""}


def _family(name: str, kind: str, about: str, samples: Mapping[Labels, float]) -> list[str]:
    """Returns the lines of one metric; its unit is the end of its name."""
    name, unit = f"stepcache_{name}", name.rpartition("_")[2]
    lines = [f"# TYPE {name} {kind}"]
    lines += [f"# UNIT {name} {unit}"] if unit in ("seconds", "bytes") else []
    lines += [f"# HELP {name} {about}"]
    for labels, value in samples.items():
        text = ",".join(f'{label}="{_escaped(content)}"' for label, content in labels)
        lines.append(f"{name}{_SUFFIXES[kind]}{f'{{{text}}}' if text else ''} {value!r}")
    return lines


def _escaped(content: str) -> str:
    content = content.encode(errors="replace").decode()  # Names of files may be no text.
    return content.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")
