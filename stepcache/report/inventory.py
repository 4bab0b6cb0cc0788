"""The contents of a cache directory as records.

Reads headers, and the entries of steps. It starts no JAX backend, loads no program, and does not
change the times of use. `stepcache cache ls --json` and `show --json` print these records.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from stepcache.fingerprint.dependencies import KINDS, differences, kind_of
from stepcache.programs.archive import Archive
from stepcache.programs.opening import open_archive
from stepcache.storage.dependency_record import DependencyRecord, unpack_records
from stepcache.storage.entry import EntryInfo
from stepcache.storage.private_files import check_directory
from stepcache.units import counted


@dataclass(frozen=True, slots=True)
class Item:
    """A row of `ls`: a step's entry, or a program that no step's entry names."""

    kind: str  # "step" or "program".
    digest: str  # Name of the entry.
    label: str  # File and name of the step; empty for a damaged entry.
    builds: int  # Number of builds of the step; 0 for a program.
    programs: tuple[str, ...]  # Digests of their programs.
    missing: tuple[str, ...]  # Those of them that are no longer there.
    size_bytes: int  # Size of its file and of its programs' files.
    # Time of the latest build, in seconds since the epoch; None if unknown.
    built_time: float | None
    used_time: float  # Time of the last use, likewise, to the minute.
    built_seconds: float | None  # Duration of that build, all stages; None if unknown.
    problem: str | None  # What is wrong with the entry, or None.


@dataclass(frozen=True, slots=True)
class Inventory:
    """All entries of a directory."""

    directory: str  # Path of the cache directory.
    items: tuple[Item, ...]  # The rows of `ls`.
    steps: int  # Number of steps' entries.
    programs: int  # Number of programs, including those of steps.
    damaged: int  # Number of entries with a damaged header.
    size_bytes: int  # Size of all entries.


@dataclass(frozen=True, slots=True)
class Build:
    """One build of a step."""

    program: str  # Digest of its executable.
    program_bytes: int | None  # Size of the executable's file; None if it is no longer there.
    built_time: float  # Time of the build, in seconds since the epoch.
    seconds: dict[str, float]  # Duration of each stage.
    dependencies: dict[str, dict[str, str]]  # Its dependencies by name, in groups.
    # What its trace read beyond the code: attributes, modules, files, variables.
    used: dict[str, list[Any]]
    devices: list[int]  # Devices of the executable, as positions among those of the call.
    captured: list[dict[str, Any]]  # Arrays inside the program: name, type, size_bytes.
    # Differences from the latest build: part, path, before (here), after (there).
    differs: list[dict[str, str]]


@dataclass(frozen=True, slots=True)
class Details:
    """One entry."""

    kind: str  # "step" or "program".
    digest: str  # Name of the entry.
    label: str  # File and name of the step.
    size_bytes: int  # Size of its own file.
    # When it was stored, in seconds since the epoch; None for a damaged entry.
    created_time: float | None
    used_time: float  # Time of the last use, likewise, to the minute.
    problem: str | None  # What is wrong with the entry, or None.
    builds: tuple[Build, ...]  # Builds of a step, the latest first.
    used_by: tuple[str, ...]  # Digests of the steps' entries that name a program.


def open_existing(directory: Path) -> Archive | None:
    """Opens a cache directory; returns None, and creates nothing, if there is none.

    Raises `CacheDirectoryError` if other users can write to it, or it is a file.
    """
    if not (directory / "v1").is_dir():
        if directory.exists():
            check_directory(directory)
        return None
    return open_archive(directory, None, "off", 0.0)


def entries_of(archive: Archive | None, *, whole: bool = False) -> list[EntryInfo]:
    """Returns the entries of an archive; an empty list for None."""
    return list(archive.disk.entries(whole=whole)) if archive is not None else []


def take_inventory(directory: Path) -> Inventory:
    """Lists the steps, and the programs that no step names."""
    entries = entries_of(open_existing(directory))
    programs = {each.digest: each for each in entries if each.kind == "program"}
    steps = [each for each in entries if each.kind == "step"]
    named = {digest for each in steps for digest in _programs_of(each)}
    alone = [each for each in entries if each.kind != "step" and each.digest not in named]
    items = [*(_item(each, programs) for each in steps), *(_item(each, {}) for each in alone)]
    return Inventory(
        str(directory),
        tuple(items),
        len(steps),
        len(programs),
        sum(each.problem is not None for each in entries),
        sum(each.size_bytes for each in entries),
    )


def _item(entry: EntryInfo, programs: dict[str, EntryInfo]) -> Item:
    about, builds = entry.header or {}, _programs_of(entry)
    named = tuple(dict.fromkeys(builds))
    there = [programs[digest] for digest in named if digest in programs]
    problems = [each.problem for each in (entry, *there) if each.problem]
    return Item(
        entry.kind,
        entry.digest,
        label_of(entry),
        len(builds),
        named,
        tuple(digest for digest in named if digest not in programs),
        entry.size_bytes + sum(each.size_bytes for each in there),
        _first(about.get("built")) or entry.created_time,
        entry.used_time,
        _first(about.get("seconds")),
        problems[0] if problems else None,
    )


def _first(values: Any) -> float | None:
    return values[0] if isinstance(values, list) and values else None


def label_of(entry: EntryInfo) -> str:
    """Returns file and name of an entry's step; empty for a damaged entry."""
    return str((entry.header or {}).get("label", ""))


def _programs_of(entry: EntryInfo) -> list[str]:
    programs = (entry.header or {}).get("programs")
    return [str(each) for each in programs] if isinstance(programs, list) else []


def find(entries: Iterable[EntryInfo], wanted: str) -> list[EntryInfo]:
    """Finds entries by the name of their step, else by the beginning of their digest.

    A name finds programs only if there is no entry of the step.
    """
    entries = list(entries)
    by_name = [each for each in entries if means(label_of(each), wanted)]
    steps = [each for each in by_name if each.kind == "step"]
    by_digest = (each for each in entries if each.digest.startswith(wanted.lower()))
    return steps or by_name or list(by_digest)


def means(label: str, wanted: str) -> bool:
    """Returns whether a text is a step's label, such as `model.py:train_step`, or its last part."""
    name = label.rpartition(":")[2]
    return bool(label) and wanted in (label, name, name.rpartition(".")[2])


def details(archive: Archive, entry: EntryInfo) -> Details:
    info = archive.disk.peek(entry.kind, entry.digest) or entry
    records, problem = _records(info)
    sizes = {each.digest: each.size_bytes for each in archive.disk.entries("program")}
    steps = archive.disk.entries("step") if info.kind == "program" else ()
    return Details(
        info.kind,
        info.digest,
        label_of(info),
        info.size_bytes,
        info.created_time,
        info.used_time,
        problem,
        tuple(_build(each, records[0], sizes) for each in records),
        tuple(each.digest for each in steps if info.digest in _programs_of(each)),
    )


def _records(info: EntryInfo) -> tuple[list[DependencyRecord], str | None]:
    """Returns the builds in a step's entry, and the problem of the entry or None."""
    if info.kind != "step" or info.problem is not None:
        return [], info.problem
    try:
        return unpack_records(info.payload), None
    except ValueError as error:
        return [], f"it is malformed: {error}"


def _build(record: DependencyRecord, latest: DependencyRecord, sizes: dict[str, int]) -> Build:
    used = asdict(record.used)
    del used["names"]
    groups: dict[str, dict[str, str]] = {kind: {} for kind in KINDS}
    for name, token in record.dependencies.items():
        groups[kind_of(name, token)][name] = token
    return Build(
        record.program,
        sizes.get(record.program),
        record.created_time,
        record.seconds,
        {kind: group for kind, group in groups.items() if group},
        used,
        record.devices,
        [dict(zip(("name", "type", "size_bytes"), each, strict=True)) for each in record.captured],
        [
            {name: getattr(each, name) for name in ("part", "path", "before", "after")}
            for each in differences(record.dependencies, latest.dependencies)
        ],
    )


@dataclass(frozen=True, slots=True)
class Checked:
    """A problem that `verify` found."""

    kind: str  # "step" or "program".
    digest: str  # Name of the entry.
    label: str  # File and name of the step; empty for a damaged entry.
    problem: str  # What is wrong with the entry.
    # "damaged", and quarantined now; or "incomplete": a program of the step is gone, and will be
    # rebuilt when it is needed.
    state: str


def verify(archive: Archive | None) -> tuple[int, list[Checked]]:
    """Checks all entries, and quarantines damaged ones. Returns their number, and the problems."""
    if archive is None:
        return 0, []
    entries = entries_of(archive, whole=True)
    programs = {each.digest for each in entries if each.kind == "program" and not each.problem}
    found = []
    for each in entries:
        problem, state = each.problem, "damaged"
        if each.kind == "step" and problem is None:
            info = archive.disk.peek("step", each.digest)
            if info is None:  # It was removed in the meantime.
                continue
            records, problem = _records(info)
            missing = {record.program for record in records} - programs
            if problem is not None:
                archive.disk.discard("step", each.digest, problem)
            elif missing:
                builds, state = counted(len(records), "build"), "incomplete"
                problem = f"{counted(len(missing), 'program')} of its {builds} not there"
        if problem is not None:
            found.append(Checked(each.kind, each.digest, label_of(each), problem, state))
    return len(entries), found
