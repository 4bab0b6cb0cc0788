"""Exports programs of one directory to a bundle, and imports a bundle into another directory.

Programs are code: who imports a bundle trusts its maker. A valid HMAC proves that the same
directory wrote it; any other bundle needs `trust=True`. Nothing is stored before all steps of the
bundle have been read and checked.

A step is foreign if this machine or its installed packages differ from those of the build. Settings
that each process chooses (JAX's configuration, XLA's flags, the number of CPU devices) are
reported, but do not make a step foreign.
"""

from __future__ import annotations

import contextlib
import hmac
import itertools
import os
import re
import tarfile
import tempfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

import jax

from stepcache.errors import OptionError, StepCacheError
from stepcache.fingerprint.dependencies import kind_of
from stepcache.fingerprint.provenance import distribution_of
from stepcache.jaxcompat import inspection
from stepcache.programs.archive import RECORDS_KEPT, Archive
from stepcache.programs.opening import open_archive
from stepcache.report.bundle import PURPOSE, Bundle, Step, add_entry, signed_tar
from stepcache.report.inventory import find, label_of
from stepcache.storage.dependency_record import DependencyRecord, pack_records, unpack_records
from stepcache.storage.disk_store import DiskStore
from stepcache.storage.entry import DamagedEntryError, EntryInfo, Stored

_OF_THE_MACHINE = tuple(
    f"environment {name}" for name in ("python", "system", "backend", "device kind", "CPU")
)
_DEVICES, _TOPOLOGY = "environment devices", "environment topology"


class BundleError(StepCacheError):
    """A bundle cannot be written, read or stored."""


class UntrustedBundleError(BundleError):
    """The bundle comes from another directory, and `trust` was not given."""


@dataclass(frozen=True, slots=True)
class Part:
    """A difference between two environments."""

    part: str  # Name of the dependency.
    bundle: str  # Value that the programs were built for, or "absent".
    here: str  # Value in this process, or "absent".


class ForeignBundleError(BundleError):
    """No step in the bundle was built for this environment.

    Attributes:
        parts: the differences, of the step with the fewest.
    """

    def __init__(self, what: str, parts: Sequence[Part], **details: Any):
        super().__init__(what, **details)
        self.parts = tuple(parts)


@dataclass(frozen=True, slots=True)
class Exported:
    """What `export` wrote."""

    file: str  # Path of the bundle.
    steps: tuple[str, ...]  # Labels of the steps, one for each entry.
    programs: int  # Number of programs.
    size_bytes: int  # Size of the file.
    left_out: tuple[str, ...]  # Entries that were not exported, and why.


@dataclass(frozen=True, slots=True)
class Imported:
    """What `take` stored."""

    file: str  # Path of the bundle.
    steps: tuple[str, ...]  # Labels of the steps that were stored, one for each entry.
    programs: int  # Number of programs that were stored.
    already_there: int  # Number of programs that the directory already had.
    refused: tuple[str, ...]  # Labels of the steps that were built for another environment.
    foreign: tuple[Part, ...]  # How that environment differs from this one: part, bundle, here.
    settings: tuple[Part, ...]  # Settings that a process must change to find the stored steps.
    trusted: str  # "own key", or "as asked".


def export(archive: Archive, file: Path, wanted: Sequence[str] = ()) -> Exported:
    """Writes a bundle of the wanted steps, or of all steps and programs. The write is atomic.

    Raises `BundleError` if there is nothing to export, or the file cannot be written.
    """
    left_out: list[str] = []
    try:
        with _replacing(file) as out, signed_tar(out, archive.disk) as tar:
            programs, labels = _add_entries(tar, archive.disk, wanted, left_out)
            if not programs and not labels:
                raise BundleError(
                    "There is nothing to export",
                    where=str(archive.disk.directory),
                    got="; ".join(left_out) or None,
                    hint="stepcache cache ls lists the steps",
                )
        size_bytes = file.stat().st_size
    except OSError as error:
        why = error.strerror or str(error)
        raise BundleError(f"The bundle cannot be written: {why}", where=str(file)) from None
    return Exported(str(file), tuple(labels), programs, size_bytes, tuple(left_out))


@contextlib.contextmanager
def _replacing(file: Path) -> Iterator[IO[bytes]]:
    """Opens a temporary file that replaces `file` when the block ends without an error."""
    with tempfile.NamedTemporaryFile(prefix=".stepcache-", dir=file.parent, delete=False) as out:
        try:
            yield out.file
            out.flush()
            os.fsync(out.fileno())
            Path(out.name).replace(file)
        except BaseException:
            Path(out.name).unlink(missing_ok=True)
            raise


def _add_entries(
    tar: tarfile.TarFile, disk: DiskStore, wanted: Sequence[str], left_out: list[str]
) -> tuple[int, list[str]]:
    """Adds programs, then the steps that have one. Returns the number of programs, and labels."""
    entries = list(disk.entries())
    chosen = chosen_entries(entries, wanted)
    steps = list(sound_steps(disk, chosen, left_out))
    named = _digests(entries, "program") & (_programs(steps) | _digests(chosen, "program"))
    added, labels = set(), []
    for entry in _sound_entries(disk, "program", named, left_out):
        add_entry(tar, "program", entry.digest, entry.header or {}, entry.payload)
        added.add(entry.digest)
    for digest, label, records in steps:
        sound = [each for each in records if each.program in added]
        if sound:
            add_entry(tar, "step", digest, *pack_records(label, sound))
            labels.append(label)
        else:
            why = "its programs are not there" if records else "another stepcache stored it"
            left_out.append(f"{label}: {why}")
    return len(added), labels


def _digests(entries: Iterable[EntryInfo], kind: str) -> set[str]:
    return {each.digest for each in entries if each.kind == kind}


def chosen_entries(entries: Sequence[EntryInfo], wanted: Sequence[str]) -> Sequence[EntryInfo]:
    """Returns what `find` finds for some names, or all. Raises `OptionError` if that is nothing."""
    found = {name: find(entries, name) for name in wanted}
    require_found(name for name, each in found.items() if not each)
    return [each for entries_of_name in found.values() for each in entries_of_name] or entries


def require_found(missing: Iterable[str], left_out: Sequence[str] = ()) -> None:
    """Raises an `OptionError` if there are names that match nothing."""
    if names := ", ".join(map(repr, missing)):
        raise OptionError(
            f"No step or program matches {names}",
            got="; ".join(left_out) or None,
            hint="stepcache cache ls lists the steps",
        )


def sound_steps(
    disk: DiskStore, entries: Iterable[EntryInfo], left_out: list[str]
) -> Iterator[Step]:
    """Yields the steps among some entries. Adds damaged or missing ones to `left_out`."""
    for entry in _sound_entries(disk, "step", _digests(entries, "step"), left_out):
        try:
            yield Step(entry.digest, label_of(entry), unpack_records(entry.payload))
        except ValueError as error:
            left_out.append(f"{label_of(entry)}: it is malformed: {error}")


def _sound_entries(
    disk: DiskStore, kind: str, digests: Iterable[str], left_out: list[str]
) -> Iterator[EntryInfo]:
    """Yields entries. Adds damaged or missing ones to `left_out`."""
    for digest in sorted(digests):
        info = disk.peek(kind, digest)
        if info is not None and info.problem is None:
            yield info
        else:
            problem = info.problem if info is not None else "it is gone"
            left_out.append(f"{kind} {digest[:12]}: {problem}")


def take(directory: Path, file: Path, *, trust: bool = False, anyway: bool = False) -> Imported:
    """Stores the programs of a bundle in a directory.

    Args:
        directory: created if it does not exist, after the bundle has been checked.
        file: path of the bundle.
        trust: accept a bundle of another directory, whose maker can then run code here.
        anyway: also store foreign steps. They do no harm: no lookup finds them.

    Raises:
        UntrustedBundleError: another directory made it, and `trust` is false.
        ForeignBundleError: nothing in it was built for this environment.
        BundleError: it is damaged or malformed, or cannot be read or stored.
    """
    try:
        with file.open("rb") as opened:
            bundle = Bundle(opened)
            disk = open_archive(directory, None, "off", 0.0).disk
            trusted = hmac.compare_digest(disk.vouch(PURPOSE + bundle.sha256), bundle.signature)
            if not trusted and not trust:
                raise UntrustedBundleError(
                    "The bundle was made with the key of another directory. Programs are code: "
                    "importing it lets its maker run code as you",
                    where=str(file),
                    hint="if you trust its maker and the way it reached you, add --trust",
                )
            bundle.read_headers()
            return _store(bundle, disk, file, "own key" if trusted else "as asked", anyway)
    except (DamagedEntryError, OSError) as error:
        why = getattr(error, "strerror", None) or str(error)
        raise BundleError(f"The bundle is refused: {why}", where=str(file)) from None


def _store(bundle: Bundle, disk: DiskStore, file: Path, trusted: str, anyway: bool) -> Imported:
    steps = bundle.steps()
    own = inspection.process_environment() if steps else {}  # Starts JAX's default backend.
    # For each step, what keeps its builds from serving here; of the build that differs least.
    foreign = {
        step.digest: min((foreign_parts(each.dependencies, own) for each in step.records), key=len)
        for step in steps
    }
    taken = [step for step in steps if anyway or not foreign[step.digest]]
    refused = [step for step in steps if step not in taken]
    if refused and not taken:
        raise ForeignBundleError(
            "The bundle was built for another environment: no lookup here would find its programs",
            min(foreign.values(), key=len),
            where=str(file),
            hint="--anyway stores them nevertheless",
        )
    unneeded = _programs(refused) - _programs(taken)
    needed = {name for name in bundle.headers if name[0] == "program" and name[1] not in unneeded}
    missing = [name for name in bundle.headers if name in needed and disk.read(*name) is None]
    for name in missing:
        publish(disk, *name, *bundle.read(*name))
    for step in taken:
        publish(disk, "step", step.digest, *merged(disk, step))
    return Imported(
        str(file),
        tuple(step.label for step in taken),
        len(missing),
        len(needed) - len(missing),
        tuple(step.label for step in refused),
        _distinct(foreign.values()),
        _distinct(settings_that_differ(step.records[0].dependencies, own) for step in taken),
        trusted,
    )


def _distinct(parts: Iterable[Iterable[Part]]) -> tuple[Part, ...]:
    return tuple(dict.fromkeys(itertools.chain.from_iterable(parts)))


def foreign_parts(dependencies: Mapping[str, str], own: Mapping[str, str]) -> list[Part]:
    """Returns the differences that make a build foreign to the environment `own`."""
    names, own = [each for each in _machine(dependencies) if each in dependencies], dict(own)
    for name in dependencies:
        if kind_of(name) == "package":
            names.append(name)
            version = own.get(name) or distribution_of(name.removeprefix("package "))[1]
            own[name] = version or "absent"
    # An executable names its devices by position, so any devices serve if there are enough.
    count = re.fullmatch(r"\d+, (\d+) local", dependencies.get(_DEVICES, ""))
    if _TOPOLOGY in _machine(dependencies) and count and int(count[1]) > jax.local_device_count():
        names.append(_DEVICES)
    return _differing(names, dependencies, own)


def settings_that_differ(dependencies: Mapping[str, str], own: Mapping[str, str]) -> list[Part]:
    """Returns the settings that differ in this process and can be changed by a process."""
    both, machine = dependencies.keys() & own.keys(), {*_machine(dependencies), _TOPOLOGY}
    names = [
        name
        for name in dict.fromkeys((*dependencies, *own))
        # Another version of JAX has other settings.
        if (kind_of(name) == "config" and name in both)
        or (kind_of(name) == "environment" and name not in machine)
    ]
    return _differing(names, dependencies, own)


def _machine(dependencies: Mapping[str, str]) -> list[str]:
    """Returns the parts of the environment that a process cannot choose."""
    # The topology of a CPU is only the number of its devices, which each process chooses.
    is_for_cpu = dependencies.get("environment backend", "").startswith("cpu")
    return [*_OF_THE_MACHINE] if is_for_cpu else [*_OF_THE_MACHINE, _TOPOLOGY]


def _differing(
    names: Iterable[str], dependencies: Mapping[str, str], own: Mapping[str, str]
) -> list[Part]:
    parts = [
        Part(each, dependencies.get(each, "absent"), own.get(each, "absent")) for each in names
    ]
    return [each for each in parts if each.bundle != each.here]


def _programs(steps: Iterable[Step]) -> set[str]:
    return {each.program for step in steps for each in step.records}


def merged(disk: DiskStore, step: Step) -> tuple[dict[str, Any], bytes]:
    """Returns a step's entry, merged with the builds that the directory has, the latest first."""
    entry = disk.read("step", step.digest)
    known: list[DependencyRecord] = []
    if entry is not None:
        with contextlib.suppress(ValueError):
            known = unpack_records(entry.payload)
    digests = {each.digest for each in known}
    both = known + [each for each in step.records if each.digest not in digests]
    both.sort(key=lambda record: -record.created_time)
    return pack_records(step.label, both[:RECORDS_KEPT])


def publish(disk: DiskStore, kind: str, digest: str, about: dict, payload: bytes | Stored) -> None:
    """Stores an entry. Raises `BundleError` if that fails."""
    if not disk.publish(kind, digest, about, payload):
        raise BundleError(
            f"{kind} {digest[:12]} cannot be stored",
            where=str(disk.directory),
            hint="stepcache doctor checks the directory",
        )
