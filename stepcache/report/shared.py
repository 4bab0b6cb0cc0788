"""The commands on a shared cache: `ls`, `push`, `pull` and `prune`.

They wait for the store without a limit, and report its failures as errors.
"""

from __future__ import annotations

import contextlib
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
def _asking(place: Place) -> Iterator[ObjectStore]:
    """Opens the store. Its errors are raised as `SharedCacheError`."""
    store = ObjectStore(place)
    try:
        yield store
    except OSError as error:
        raise SharedCacheError(
            f"The shared cache cannot be used: {error}",
            where=place.url,
            hint="check address and credentials in the environment (docs/shared-cache.md)",
        ) from None
    finally:
        store.reads.stop()
        store.writes.stop()


def _read(
    store: ObjectStore, place: Place, names: Iterable[Name]
) -> list[tuple[Name, Step | None, str]]:
    """Reads the records of these names. Returns each as a step or None, and its problem or ""."""

    def read(name: Name, data: bytes) -> tuple[Name, Step | None, str]:
        try:
            header, file = opened(place.key, "step", name.lookup, data)
            records = unpack_records(read_payload(file, header))
        except (DamagedEntryError, ValueError) as error:
            return name, None, str(error)
        return name, Step(name.lookup, str(header.about.get("label", "")), records), ""

    asked = [store.get(name.path, partial(read, name)) for name in names]
    return [found for found in map(_unless_gone, asked) if found is not None]


def _unless_gone(future: Future[T]) -> T | None:
    with contextlib.suppress(FileNotFoundError):
        return future.result()
    return None


# ---- contents ------------------------------------------------------------------------------


def take_inventory(place: Place) -> Inventory:
    """Lists the steps, and the programs that no step names."""
    with _asking(place) as store:
        catalogue = store.listed(ROOT, Catalogue.of).result()
        names = [name for each in catalogue.steps.values() for name in each]
        read = _read(store, place, names)
    programs = catalogue.programs
    by_lookup: dict[str, list[tuple[Name, Step | None, str]]] = {}
    for each in read:
        by_lookup.setdefault(each[0].lookup, []).append(each)
    items = [_item(lookup, found, catalogue) for lookup, found in by_lookup.items()]
    named = {name.program for name in names}
    items += [
        Item("program", digest, "", 0, (), (), each.size_bytes, None, each.time, None, None)
        for digest, each in programs.items()
        if digest not in named
    ]
    size_bytes = sum(name.size_bytes for name in names)
    size_bytes += sum(each.size_bytes for each in programs.values())
    damaged = sum(bool(problem) for _, _, problem in read)
    return Inventory(place.url, tuple(items), len(by_lookup), len(programs), damaged, size_bytes)


def _item(
    lookup: str, found: Sequence[tuple[Name, Step | None, str]], catalogue: Catalogue
) -> Item:
    records = [record for _, step, _ in found if step is not None for record in step.records]
    problems = [problem for _, _, problem in found if problem]
    programs = tuple(dict.fromkeys(name.program for name, _, _ in found))
    there = [catalogue.programs[each] for each in programs if each in catalogue.programs]
    return Item(
        "step",
        lookup,
        next((step.label for _, step, _ in found if step is not None), ""),
        len(found),
        programs,
        tuple(each for each in programs if each not in catalogue.programs),
        sum(name.size_bytes for name, _, _ in found) + sum(each.size_bytes for each in there),
        max((record.created_time for record in records), default=None),
        max(name.time for name, _, _ in found),
        sum(records[0].seconds.values()) if records else None,
        problems[0] if problems else None,
    )


# ---- push and pull -----------------------------------------------------------------------------


def push(archive: Archive, place: Place, wanted: Sequence[str] = ()) -> Shared:
    """Writes the wanted steps of a directory, or all, to a shared cache. Overwrites nothing.

    Raises:
        SharedCacheError: the store fails, or is read only.
        OptionError: a name matches no step.
    """
    if not place.writable:
        raise SharedCacheError("The shared cache is read only", where=f"{MODE}=read")
    disk, left_out = archive.disk, list[str]()
    chosen = chosen_entries(list(disk.entries("step")), wanted)
    labels, sent, there, run = [], set[str](), set[str](), secrets.token_hex(4)
    with _asking(place) as store:
        known = store.listed(ROOT, Catalogue.of).result()
        for digest, label, records in sound_steps(disk, chosen, left_out):
            for record in records:
                if record.program in known.programs:
                    there.add(record.program)
                elif record.program not in sent:
                    info, data = disk.peek("program", record.program)
                    if info is None or info.problem:
                        left_out.append(f"{label}: its program {record.program[:12]} is not there")
                        continue
                    _write(store, place, "program", record.program, info.header or {}, data)
                    sent.add(record.program)
                name = Name.of(digest, record, run)
                if all(each[:3] != name[:3] for each in known.steps.get(digest, [])):
                    about, packed = pack_records(label, [record])
                    _write(store, place, "step", digest, about, packed, name.path)
            labels.append(label)
    return Shared(place.url, tuple(labels), len(sent), len(there), tuple(left_out))


def _write(
    store: ObjectStore,
    place: Place,
    kind: str,
    digest: str,
    about: dict[str, Any],
    payload: bytes,
    path: str = "",
) -> None:
    make = partial(signed, place.key, kind, digest, about, payload)
    store.put(path or program_path(digest), make).result()


def pull(directory: Path, place: Place, wanted: Sequence[str] = ()) -> Shared:
    """Stores the wanted steps of a shared cache, or all, in a directory.

    Raises:
        SharedCacheError: the store fails.
        BundleError: the directory cannot be written.
        OptionError: a name matches no step.
    """
    disk, left_out = open_archive(directory, None, "off", 0.0).disk, list[str]()
    labels, stored, there = [], set[str](), set[str]()
    with _asking(place) as store:
        catalogue = store.listed(ROOT, Catalogue.of).result()
        names = [name for each in catalogue.steps.values() for name in reversed(each)]
        missing = set(wanted)
        for name, step, problem in _read(store, place, names):
            if step is None:
                left_out.append(f"step {name.lookup[:12]}: {problem}")
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
            labels.append(step.label)
    require_found(sorted(missing), left_out)
    already = len(there - stored)
    return Shared(place.url, tuple(labels), len(stored), already, tuple(left_out))


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


# ---- making room --------------------------------------------------------------------------------


def prune(place: Place, max_bytes: int | None, written_before: float | None) -> Removed:
    """Removes the programs that were written first, each with all records that name it.

    The age of a program is that of its latest record, as stores have no times of reads.

    Args:
        place: the shared cache.
        max_bytes: maximal size afterwards; None for no limit.
        written_before: remove programs written before this time, in seconds since the epoch.

    Raises:
        SharedCacheError: the store fails, or is read only.
    """
    if not place.writable:
        raise SharedCacheError("The shared cache is read only", where=f"{MODE}=read")
    with _asking(place) as store:
        together = _together(store.listed(ROOT, Catalogue.of).result())
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
