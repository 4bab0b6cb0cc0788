"""What a directory of programs holds, as records. Reads headers and the entries of steps; starts no
backend of JAX, loads no program, and leaves no trace of having looked.

The names of the fields here are the names in the JSON of `stepcache cache ls` and `show`.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from stepcache.programs.archive import Archive, open_archive
from stepcache.storage.dependency_record import Candidate, differences, unpack_candidates
from stepcache.storage.disk_store import EntryInfo
from stepcache.units import counted

# Groups of facts by the beginning of their names; the first that fits. The rest is code or values.
_GROUPS = (
    ("argument ", "arguments"),
    ("arguments", "arguments"),
    ("static ", "static"),
    ("option ", "options"),
    ("mesh", "mesh"),
    ("environment variable ", "variables"),
    ("environment ", "environment"),
    ("package ", "packages"),
    ("config ", "config"),
    ("module ", "modules"),
    ("names of ", "modules"),
    ("file ", "files"),
)


@dataclass(frozen=True, slots=True)
class Item:
    """A row of `ls`: a step's entry, or a program that no step's entry names.

    Attributes:
        kind: "step" or "program".
        digest: its name.
        label: the step by file and name; empty for a damaged entry.
        builds: how many builds of the step it has; 0 for a program.
        programs: digests of their programs.
        missing: those of them that are not there any more.
        size_bytes: size of its file, and of its programs' files.
        built_time: when its latest build was made, in seconds since the epoch; None if unknown.
        used_time: when it was last used, likewise, to the minute.
        built_seconds: what that build took, all stages; None if unknown.
        problem: what is wrong with it, or None.
    """

    kind: str
    digest: str
    label: str
    builds: int
    programs: tuple[str, ...]
    missing: tuple[str, ...]
    size_bytes: int
    built_time: float | None
    used_time: float
    built_seconds: float | None
    problem: str | None


@dataclass(frozen=True, slots=True)
class Inventory:
    """What `ls` shows.

    Attributes:
        directory: the directory of programs.
        items: its rows.
        steps: how many entries of steps there are.
        programs: how many programs, those of steps included.
        damaged: how many of all these are damaged, as far as their headers tell.
        size_bytes: size of all of them.
    """

    directory: str
    items: tuple[Item, ...]
    steps: int
    programs: int
    damaged: int
    size_bytes: int


@dataclass(frozen=True, slots=True)
class Build:
    """One build of a step.

    Attributes:
        program: digest of its executable.
        program_bytes: size of the executable's file; None where it is not there any more.
        built_time: when it was made, in seconds since the epoch.
        seconds: by stage.
        facts: what it depends on, name by name, in groups.
        used: what its trace used beyond the code: attributes, modules, files, variables.
        devices: of the executable, as positions among the devices of the call.
        captured: arrays inside the program: name, type, size_bytes.
        differs: what differs from the latest build: part, path, before (here), after (there).
    """

    program: str
    program_bytes: int | None
    built_time: float
    seconds: dict[str, float]
    facts: dict[str, dict[str, str]]
    used: dict[str, list[Any]]
    devices: list[int]
    captured: list[dict[str, Any]]
    differs: list[dict[str, str]]


@dataclass(frozen=True, slots=True)
class Details:
    """What `show` shows of an entry.

    Attributes:
        kind: "step" or "program".
        digest: its name.
        label: the step by file and name.
        size_bytes: size of its own file.
        created_time: when it was stored, in seconds since the epoch; None for a damaged entry.
        used_time: when it was last used, likewise, to the minute.
        problem: what is wrong with it, or None.
        builds: of a step, the latest first.
        used_by: of a program: digests of the steps' entries that name it.
    """

    kind: str
    digest: str
    label: str
    size_bytes: int
    created_time: float | None
    used_time: float
    problem: str | None
    builds: tuple[Build, ...]
    used_by: tuple[str, ...]


def open_existing(directory: Path) -> Archive | None:
    """The programs of a directory; None where there are none, and then nothing is made.

    Raises:
        CacheDirectoryError: others can write to it.
    """
    if not (directory / "v1").is_dir():
        return None
    return open_archive(directory, None, "off", 0.0)


def take_inventory(archive: Archive | None, directory: Path) -> Inventory:
    """Lists the steps' entries, and the programs that none of them names, last used first."""
    entries = list(archive.tier.entries()) if archive is not None else []
    programs = {each.digest: each for each in entries if each.kind == "program"}
    steps = [each for each in entries if each.kind == "step"]
    named = {digest for each in steps for digest in _programs_of(each)}
    items = [_item(each, programs) for each in steps]
    items += [
        _item(each, {}) for each in entries if each.kind != "step" and each.digest not in named
    ]
    return Inventory(
        str(directory),
        tuple(sorted(items, key=lambda item: -item.used_time)),
        len(steps),
        len(programs),
        sum(each.problem is not None for each in entries),
        sum(each.size_bytes for each in entries),
    )


def _item(entry: EntryInfo, programs: dict[str, EntryInfo]) -> Item:
    named = _programs_of(entry)
    about = entry.header or {}
    there = [programs[digest] for digest in dict.fromkeys(named) if digest in programs]
    problems = [each.problem for each in (entry, *there) if each.problem]
    return Item(
        entry.kind,
        entry.digest,
        label_of(entry),
        len(named),
        tuple(dict.fromkeys(named)),
        tuple(digest for digest in dict.fromkeys(named) if digest not in programs),
        entry.size_bytes + sum(each.size_bytes for each in there),
        _first(about.get("built")) or entry.created_time,
        entry.used_time,
        _first(about.get("seconds")),
        problems[0] if problems else None,
    )


def _first(values: Any) -> float | None:
    return values[0] if isinstance(values, list) and values else None


def label_of(entry: EntryInfo) -> str:
    """The step that an entry belongs to; empty for a damaged one."""
    return str((entry.header or {}).get("label", ""))


def _programs_of(entry: EntryInfo) -> list[str]:
    programs = (entry.header or {}).get("programs")
    return [str(each) for each in programs] if isinstance(programs, list) else []


# ---- one entry ---------------------------------------------------------------------------------


def find(entries: Iterable[EntryInfo], wanted: str) -> list[EntryInfo]:
    """The entries that a text may mean: by the begin of their digest, else by the step's name.

    A step's name means its programs only where no entry of the step is there.
    """
    entries = list(entries)
    by_digest = [each for each in entries if each.digest.startswith(wanted.lower())]
    by_name = [each for each in entries if means(label_of(each), wanted)]
    steps = [each for each in by_name if each.kind == "step"]
    return by_digest or steps or by_name


def means(label: str, wanted: str) -> bool:
    """Whether a text names a step: by its label `model.py:train_step`, or the end of it."""
    name = label.rpartition(":")[2]
    return bool(label) and wanted in (label, name, name.rpartition(".")[2])


def details(archive: Archive, entry: EntryInfo) -> Details:
    """Everything that is known of an entry."""
    info, payload = archive.tier.peek(entry.kind, entry.digest)
    info = info or entry
    problem, builds, used_by = info.problem, (), ()
    if info.kind == "step" and problem is None:
        try:
            builds = _builds(unpack_candidates(payload), archive)
        except ValueError as error:
            problem = f"it is malformed: {error}"
    elif info.kind == "program":
        steps = archive.tier.entries("step")
        used_by = tuple(each.digest for each in steps if info.digest in _programs_of(each))
    return Details(
        info.kind,
        info.digest,
        label_of(info),
        info.size_bytes,
        info.created_time,
        info.used_time,
        problem,
        builds,
        used_by,
    )


def _builds(candidates: list[Candidate], archive: Archive) -> tuple[Build, ...]:
    sizes = {each.digest: each.size_bytes for each in archive.tier.entries("program")}
    return tuple(_build(each, candidates[0], sizes) for each in candidates)


def _build(candidate: Candidate, latest: Candidate, sizes: dict[str, int]) -> Build:
    differs = differences(candidate.told, latest.told)
    return Build(
        candidate.program,
        sizes.get(candidate.program),
        candidate.created_time,
        candidate.seconds,
        grouped(candidate.told),
        {
            "attributes": candidate.used.attributes,
            "modules": candidate.used.modules,
            "files": candidate.used.files,
            "variables": candidate.used.variables,
        },
        candidate.devices,
        [
            {"name": name, "type": kind, "size_bytes": size}
            for name, kind, size in candidate.captured
        ],
        [
            {"part": each.part, "path": each.path, "before": each.before, "after": each.after}
            for each in differs
        ],
    )


def grouped(facts: dict[str, str]) -> dict[str, dict[str, str]]:
    """Facts in groups: arguments, mesh, environment, packages, config, code, values, …"""
    groups: dict[str, dict[str, str]] = {}
    for name, value in facts.items():
        rest = "code" if value.startswith(("code ", "function ")) else "values"
        group = next((group for prefix, group in _GROUPS if name.startswith(prefix)), rest)
        groups.setdefault(group, {})[name] = value
    order = [*dict.fromkeys(group for _, group in _GROUPS), "code", "values"]
    order.sort(key=lambda group: group in ("modules", "files", "variables"))
    return {group: groups[group] for group in order if group in groups}


# ---- checking ----------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Checked:
    """An entry that `verify` has something to say of.

    Attributes:
        kind: "step" or "program".
        digest: its name.
        label: the step by file and name; empty for a damaged entry.
        problem: what is wrong with it.
        state: "damaged", in quarantine now; or "incomplete": a program of the step has left the
            directory, and will be built or found otherwise when it is needed.
    """

    kind: str
    digest: str
    label: str
    problem: str
    state: str


def verify(archive: Archive) -> tuple[int, list[Checked]]:
    """Reads and checks every entry, and puts damaged ones in quarantine.

    Returns:
        How many entries there were, and what is to be said of some.
    """
    entries = list(archive.tier.verify())
    bad = [
        Checked(each.kind, each.digest, label_of(each), each.problem, "damaged")
        for each in entries
        if each.problem is not None
    ]
    sound = [each for each in entries if each.problem is None]
    programs = {each.digest for each in sound if each.kind == "program"}
    for each in sound:
        if each.kind == "step":
            checked = _check_step(archive, each, programs)
            bad += [checked] if checked is not None else []
    return len(entries), bad


def _check_step(archive: Archive, entry: EntryInfo, programs: set[str]) -> Checked | None:
    info, payload = archive.tier.peek("step", entry.digest)
    if info is None:
        return None
    label, problem = label_of(entry), info.problem
    if problem is None:
        try:
            candidates = unpack_candidates(payload)
        except ValueError as error:
            problem = f"it is malformed: {error}"
            archive.tier.discard("step", entry.digest, problem)
        else:
            missing = {each.program for each in candidates} - programs
            if not missing:
                return None
            builds = counted(len(candidates), "build")
            text = f"{counted(len(missing), 'program')} of its {builds} not there"
            return Checked("step", entry.digest, label, text, "incomplete")
    return Checked("step", entry.digest, label, problem, "damaged")
