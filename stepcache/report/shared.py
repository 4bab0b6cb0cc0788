"""The commands on a shared cache: `ls`, `push`, `pull` and `prune`.

They wait for the store without a limit, and report its failures as errors.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from stepcache.errors import CacheDirectoryError, OptionError, StepCacheError
from stepcache.link import plain
from stepcache.programs.opening import open_store
from stepcache.programs.prediction import Prediction
from stepcache.programs.store import ProgramStore
from stepcache.report.inventory import Inventory, Item, chosen, label_of, means
from stepcache.storage.entry import DamagedEntryError, EntryInfo
from stepcache.storage.object_store import Object, ObjectStore, in_short
from stepcache.storage.shared_entries import ROOT, Catalogue, opened, signed
from stepcache.storage.shared_place import MODE, Place

_REQUESTS = 16  # At a time.


class SharedCacheError(StepCacheError):
    """A shared cache cannot be read or written."""


@dataclass(frozen=True, slots=True)
class Shared:
    """What `push` has written, or `pull` has stored."""

    remote: str  # URL of the shared cache.
    labels: tuple[str, ...]  # Labels of the steps of the programs that were copied.
    programs: int  # Number of programs that were copied.
    already_there: int  # Number of programs that were there before.
    left_out: tuple[str, ...]  # What was not copied, and why.


class _Copied(NamedTuple):
    """An entry that was to be copied."""

    kind: str
    label: str
    was_there: bool = False
    problem: str = ""  # Why it was not copied.


@dataclass(frozen=True, slots=True)
class Removed:
    """What `prune` has removed."""

    remote: str  # URL of the shared cache.
    removed: tuple[str, ...]  # Names of the objects.
    freed_bytes: int  # Their size.
    left_bytes: int  # Size of what is left.


@contextlib.contextmanager
def _opened(place: Place, *, to_write: bool = False) -> Iterator[ObjectStore]:
    """Opens the store. Its errors are raised as `SharedCacheError`."""
    if to_write and not place.writable:
        raise SharedCacheError("The shared cache is read only", where=f"{MODE}=read")
    try:
        yield ObjectStore(place)
    except StepCacheError:
        raise
    except Exception as error:
        raise SharedCacheError(
            f"The shared cache cannot be used: {in_short(error)}",
            where=place.url,
            hint="check address and credentials in the environment (docs/shared-cache.md)",
        ) from None


def take_inventory(place: Place) -> Inventory:
    """Lists the programs. Their steps are known where a prediction names them."""
    labels, damaged = dict[str, str](), list[Item]()
    with _opened(place) as objects:
        catalogue = Catalogue.read(objects)
        predictions = catalogue.of_kind("prediction")
        for name, each in predictions.items():
            try:
                _, payload = opened(place.key, "prediction", name, objects.get(each.name))
                rows = (Prediction(*row) for row in plain.unpack(payload)[1])
                labels |= {row.program: row.label for row in rows}
            except (DamagedEntryError, TypeError, ValueError) as error:
                damaged.append(_item("prediction", name, each, problem=str(error)))
    programs = catalogue.of_kind("program").items()
    items = [_item("program", digest, each, labels.get(digest, "")) for digest, each in programs]
    counts = len(items), len(predictions), len(damaged)
    sizes = (each.size_bytes for each in catalogue.entries.values())
    return Inventory(place.url, (*items, *damaged), *counts, sum(sizes))


def _item(
    kind: str, digest: str, there: Object, label: str = "", problem: str | None = None
) -> Item:
    return Item(kind, digest, label, there.size_bytes, there.time, there.time, None, problem)


def push(store: ProgramStore, place: Place, wanted: Sequence[str] = ()) -> Shared:
    """Writes the programs of a directory to a shared cache: all, or those of some steps.

    It overwrites nothing. With all programs go the predictions that the shared cache lacks.

    Raises `SharedCacheError` if the store fails or is read only, `OptionError` for unknown names.
    """
    steps = (each for each in store.disk.entries() if each.kind != "prediction")
    entries = chosen(steps, wanted)
    entries += [] if wanted else store.disk.entries("prediction")
    with _opened(place, to_write=True) as objects:
        known = Catalogue.read(objects)

        def write(entry: EntryInfo) -> _Copied:
            kind, digest, copied = entry.kind, entry.digest, _Copied(entry.kind, label_of(entry))
            if (kind, digest) in known.entries:
                return copied._replace(was_there=True)
            info = store.disk.peek(kind, digest)
            if info is None or info.problem is not None:
                why = info.problem if info is not None else "it is gone"
                return copied._replace(problem=f"{kind} {digest[:12]}: {why}")
            data = signed(place.key, kind, digest, info.header or {}, info.payload)
            run = "/pushed" if kind == "prediction" else ""
            objects.put(f"{ROOT}{kind}/{digest}{run}", data)
            return copied

        with ThreadPoolExecutor(_REQUESTS) as pool:
            return _summed(place, pool.map(write, entries))


def pull(directory: Path, place: Place, wanted: Sequence[str] = ()) -> Shared:
    """Stores the programs of a shared cache in a directory: all, or those of some steps.

    With all programs come the predictions that the directory lacks. For some steps, all programs
    are read, as only they say of which step they are.

    Raises `SharedCacheError` if the store fails, `CacheDirectoryError` if the directory cannot be
    written, `OptionError` for unknown names.
    """
    disk = open_store(directory, None, 0.0).disk
    with _opened(place) as objects:
        catalogue = Catalogue.read(objects)

        def read(kind: str, digest: str, there: Object) -> _Copied:
            known = disk.peek(kind, digest)
            if known is not None and known.problem is None:
                return _Copied(kind, label_of(known), was_there=True)
            try:
                about, payload = opened(place.key, kind, digest, objects.get(there.name))
            except DamagedEntryError as damage:
                return _Copied(kind, "", problem=f"{kind} {digest[:12]} is refused: {damage}")
            copied = _Copied(kind, str(about.get("label", "")))
            is_wanted = not wanted or any(means(copied.label, each) for each in wanted)
            if is_wanted and not disk.publish(kind, digest, about, payload):
                raise CacheDirectoryError("The directory cannot be written", where=str(directory))
            return copied if is_wanted else _Copied("", "")

        found = catalogue.entries.items()
        rows = [(*name, each) for name, each in found if not wanted or name[0] != "prediction"]
        with ThreadPoolExecutor(_REQUESTS) as pool:
            copied = list(pool.map(read, *zip(*rows, strict=True))) if rows else []
    for each in wanted:
        if not any(means(row.label, each) for row in copied):
            raise OptionError(f"No program matches {each!r}", where="STEPS", got=repr(each))
    return _summed(place, copied)


def _summed(place: Place, copied: Iterable[_Copied]) -> Shared:
    copied = list(copied)
    programs = [each for each in copied if each.kind == "program" and not each.problem]
    new = [each.label for each in programs if not each.was_there]
    left_out = tuple(each.problem for each in copied if each.problem)
    return Shared(place.url, tuple(new), len(new), len(programs) - len(new), left_out)


def prune(place: Place, max_bytes: int | None, written_before: float | None) -> Removed:
    """Removes what was written first, as stores have no times of reads.

    At most `max_bytes` are left, and nothing written before a time, in seconds since the epoch.

    Raises `SharedCacheError` if the store fails, or is read only.
    """
    with _opened(place, to_write=True) as objects:
        found = sorted(objects.listed(ROOT), key=lambda each: each.time)
        left_bytes, removed = sum(each.size_bytes for each in found), list[Object]()
        for each in found:
            is_old = written_before is not None and each.time < written_before
            if not is_old and (max_bytes is None or left_bytes <= max_bytes):
                break
            removed.append(each)
            left_bytes -= each.size_bytes
        if removed:
            objects.delete([each.name for each in removed])
    freed_bytes = sum(each.size_bytes for each in removed)
    return Removed(place.url, tuple(each.name for each in removed), freed_bytes, left_bytes)
