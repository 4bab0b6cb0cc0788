"""The commands on a shared cache: `ls`, `push`, `pull` and `prune`.

They wait for the store without a limit, and report its failures as errors.
"""

from __future__ import annotations

import contextlib
import itertools
import secrets
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from stepcache.errors import StepCacheError
from stepcache.programs.archive import Archive
from stepcache.programs.opening import open_archive
from stepcache.report.bundle import Step
from stepcache.report.inventory import Inventory, Item, means
from stepcache.report.moving import chosen_entries, merged, publish, require_found, sound_steps
from stepcache.storage.dependency_record import pack_records, unpack_records
from stepcache.storage.entry import DamagedEntryError, read_payload, read_stored
from stepcache.storage.object_store import Object, ObjectStore
from stepcache.storage.shared_names import ROOT, Catalogue, Name, opened, program_path, signed
from stepcache.storage.shared_place import MODE, Place

T = TypeVar("T")


class SharedCacheError(StepCacheError):
    """A shared cache cannot be read or written."""


@dataclass(frozen=True, slots=True)
class Shared:
    """What `push` has written, or `pull` has stored."""

    remote: str  # URL of the shared cache.
    steps: tuple[str, ...]  # Labels of the steps, one for each entry.
    programs: int  # Number of programs that were copied.
    already_there: int  # Number of programs that were there before.
    left_out: tuple[str, ...]  # What was not copied, and why.


@dataclass(frozen=True, slots=True)
class Removed:
    """What `prune` has removed."""

    remote: str  # URL of the shared cache.
    removed: tuple[str, ...]  # Names of the objects.
    freed_bytes: int  # Their size.
    left_bytes: int  # Size of what is left.


@contextlib.contextmanager
def _opened(place: Place, *, to_write: bool = False) -> Iterator[tuple[ObjectStore, Catalogue]]:
    """Opens and lists the store. Its errors are raised as `SharedCacheError`."""
    if to_write and not place.writable:
        raise SharedCacheError("The shared cache is read only", where=f"{MODE}=read")
    store = ObjectStore(place)
    try:
        yield store, store.listed(ROOT, Catalogue.of).result()
    except OSError as error:
        raise SharedCacheError(
            f"The shared cache cannot be used: {error}",
            where=place.url,
            hint="check address and credentials in the environment (docs/shared-cache.md)",
        ) from None
    finally:
        store.reads.stop()
        store.writes.stop()


def _read(store: ObjectStore, place: Place, names: Iterable[Name]) -> list[tuple[Name, Step | str]]:
    """Reads the records of these names. Returns each as a step, or what is wrong with it."""

    def read(name: Name, data: bytes) -> tuple[Name, Step | str]:
        try:
            header, file = opened(place.key, "step", name.lookup, data)
            records = unpack_records(read_payload(file, header))
        except (DamagedEntryError, ValueError) as error:
            return name, str(error)
        return name, Step(name.lookup, str(header.about.get("label", "")), records)

    asked = [store.get(name.path, partial(read, name)) for name in names]
    return [found for found in map(_unless_gone, asked) if found is not None]


def _unless_gone(future: Future[T]) -> T | None:
    with contextlib.suppress(FileNotFoundError):
        return future.result()
    return None


def take_inventory(place: Place) -> Inventory:
    """Lists the steps, and the programs that no step names."""
    with _opened(place) as (store, catalogue):
        names = [name for each in catalogue.steps.values() for name in each]
        read = _read(store, place, names)
    programs = catalogue.programs
    items = [
        _item(lookup, list(found), catalogue)
        for lookup, found in itertools.groupby(read, key=lambda each: each[0].lookup)
    ]
    steps, named = len(items), {name.program for name in names}
    items += [
        Item("program", digest, "", 0, (), (), each.size_bytes, None, each.time, None, None)
        for digest, each in programs.items()
        if digest not in named
    ]
    size_bytes = sum(name.size_bytes for name in names)
    size_bytes += sum(each.size_bytes for each in programs.values())
    damaged = sum(isinstance(step, str) for _, step in read)
    return Inventory(place.url, tuple(items), steps, len(programs), damaged, size_bytes)


def _item(lookup: str, found: Sequence[tuple[Name, Step | str]], catalogue: Catalogue) -> Item:
    names, steps = zip(*found, strict=True)
    problem = next((each for each in steps if isinstance(each, str)), None)
    steps = [each for each in steps if isinstance(each, Step)]
    records = [record for step in steps for record in step.records]
    programs = tuple(dict.fromkeys(name.program for name in names))
    there = [catalogue.programs[each] for each in programs if each in catalogue.programs]
    return Item(
        "step",
        lookup,
        steps[0].label if steps else "",
        len(found),
        programs,
        tuple(each for each in programs if each not in catalogue.programs),
        sum(each.size_bytes for each in (*names, *there)),
        max((record.created_time for record in records), default=None),
        max(name.time for name in names),
        sum(records[0].seconds.values()) if records else None,
        problem,
    )


def push(archive: Archive, place: Place, wanted: Sequence[str] = ()) -> Shared:
    """Writes the wanted steps of a directory, or all, to a shared cache. Overwrites nothing.

    Raises `SharedCacheError` if the store fails or is read only, `OptionError` for unknown names.
    """
    disk, left_out = archive.disk, list[str]()
    chosen = chosen_entries(list(disk.entries("step")), wanted)
    labels, sent, there, run = [], set[str](), set[str](), secrets.token_hex(4)
    with _opened(place, to_write=True) as (store, known):

        def write(path: str, *entry: Any) -> None:
            store.put(path, partial(signed, place.key, *entry)).result()

        for digest, label, records in sound_steps(disk, chosen, left_out):
            for record in records:
                if record.program in known.programs:
                    there.add(record.program)
                elif record.program not in sent:
                    entry = disk.peek("program", record.program)
                    if entry is None or entry.problem:
                        left_out.append(f"{label}: its program {record.program[:12]} is not there")
                        continue
                    about, path = entry.header or {}, program_path(record.program)
                    write(path, "program", record.program, about, entry.payload)
                    sent.add(record.program)
                name = Name.of(digest, record, run)
                if all(each[:3] != name[:3] for each in known.steps.get(digest, [])):
                    about, packed = pack_records(label, [record])
                    write(name.path, "step", digest, about, packed)
            labels.append(label)
    return Shared(place.url, tuple(labels), len(sent), len(there), tuple(left_out))


def pull(directory: Path, place: Place, wanted: Sequence[str] = ()) -> Shared:
    """Stores the wanted steps of a shared cache, or all, in a directory.

    Raises `SharedCacheError` if the store fails, `BundleError` if the directory cannot be written,
    `OptionError` for unknown names.
    """
    disk, left_out = open_archive(directory, None, "off", 0.0).disk, list[str]()
    labels, stored, there = dict[str, str](), set[str](), set[str]()
    with _opened(place) as (store, catalogue):
        names = [name for each in catalogue.steps.values() for name in reversed(each)]
        missing = set(wanted)
        for name, step in _read(store, place, names):
            if isinstance(step, str):
                left_out.append(f"step {name.lookup[:12]}: {step}")
                continue
            matched = {each for each in wanted if means(step.label, each)}
            if wanted and not matched:
                continue
            missing -= matched
            if disk.read("program", name.program) is not None:
                there.add(name.program)
            elif why := _pull_program(store, place, disk, name.program):
                left_out.append(f"{step.label}: {why}")
                continue
            else:
                stored.add(name.program)
            publish(disk, "step", name.lookup, *merged(disk, step))
            labels[name.lookup] = step.label
    require_found(sorted(missing), left_out)
    already = len(there - stored)
    return Shared(place.url, tuple(labels.values()), len(stored), already, tuple(left_out))


def _pull_program(store: ObjectStore, place: Place, disk: Any, digest: str) -> str:
    """Stores an executable. Returns the reason if that fails, else ""."""
    data = _unless_gone(store.get(program_path(digest)))
    if data is None:
        return f"its program {digest[:12]} is not there"
    try:
        header, file = opened(place.key, "program", digest, data)
        publish(disk, "program", digest, header.about, read_stored(file, header))
    except DamagedEntryError as damage:
        return f"its program {digest[:12]} is refused: {damage}"
    return ""


def prune(place: Place, max_bytes: int | None, written_before: float | None) -> Removed:
    """Removes the programs that were written first, each with all records that name it.

    The age of a program is that of its latest record, as stores have no times of reads.

    At most `max_bytes` are left, and nothing written before a time, in seconds since the epoch.

    Raises `SharedCacheError` if the store fails, or is read only.
    """
    with _opened(place, to_write=True) as (store, catalogue):
        together = _together(catalogue)
        left_bytes = sum(each.size_bytes for group in together for each in group)
        removed, freed_bytes = list[str](), 0
        for group in sorted(together, key=_latest):
            too_old = written_before is not None and _latest(group) < written_before
            if not too_old and (max_bytes is None or left_bytes <= max_bytes):
                break
            size_bytes = sum(each.size_bytes for each in group)
            removed += [each.name for each in group]
            left_bytes, freed_bytes = left_bytes - size_bytes, freed_bytes + size_bytes
        if removed:
            store.delete(removed).result()
    return Removed(place.url, tuple(removed), freed_bytes, left_bytes)


def _latest(group: Sequence[Object]) -> float:
    return max(each.time for each in group)


def _together(catalogue: Catalogue) -> list[list[Object]]:
    """Returns the objects of each program: its records, their verifications, the executable."""
    groups: dict[str, list[Object]] = {}
    for name in (name for each in catalogue.steps.values() for name in each):
        group = groups.setdefault(name.program, [])
        group.append(Object(name.path, name.size_bytes, name.time))
        if name[:3] in catalogue.verified:
            group.append(Object(name.verified_path, 0, name.time))
    for digest, each in catalogue.programs.items():
        groups.setdefault(digest, []).append(each)
    return list(groups.values())
