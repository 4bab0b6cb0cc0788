"""The contents of a cache directory as records.

It starts no JAX backend, loads no program, and does not change the times of use.
`stepcache cache ls --json` and `show --json` print these records.
"""

from __future__ import annotations

import contextlib
import zlib
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from stepcache.errors import OptionError
from stepcache.link import plain
from stepcache.programs.opening import open_store
from stepcache.programs.store import ProgramStore
from stepcache.storage.disk_store import ROOT
from stepcache.storage.entry import EntryInfo
from stepcache.storage.private_files import check_directory

_CAPTURED = ("name", "type", "size_bytes")


@dataclass(frozen=True, slots=True)
class Item:
    """A row of `ls`: a program, or a damaged entry."""

    kind: str  # "program", or "prediction" if it is damaged.
    digest: str  # Name of the entry.
    label: str  # File and name of the step; empty if unknown.
    size_bytes: int  # Size of its file.
    # When it was stored, in seconds since the epoch; None if unknown.
    built_time: float | None
    used_time: float  # Time of the last use, likewise, to the minute.
    build_seconds: float | None  # Duration of all stages of the build; None if unknown.
    problem: str | None  # What is wrong with the entry, or None.


@dataclass(frozen=True, slots=True)
class Inventory:
    """All entries of a directory, or of a shared cache."""

    directory: str  # Path of the cache directory, or URL of the shared cache.
    items: tuple[Item, ...]  # The rows of `ls`.
    programs: int  # Number of programs.
    predictions: int  # Number of scripts whose programs are preloaded.
    damaged: int  # Number of entries with a damaged header.
    size_bytes: int  # Size of all entries.


@dataclass(frozen=True, slots=True)
class Details:
    """One entry."""

    kind: str  # "program" or "prediction".
    digest: str  # Name of the entry.
    label: str  # File and name of the step.
    size_bytes: int  # Size of its file.
    # When it was stored, in seconds since the epoch; None for a damaged entry.
    created_time: float | None
    used_time: float  # Time of the last use, likewise, to the minute.
    problem: str | None  # What is wrong with the entry, or None.
    seconds: dict[str, float]  # Duration of each stage of the build.
    captured: list[dict[str, Any]]  # Arrays inside the program: name, type, size_bytes.
    programs: int | None  # Number of the programs that a prediction names; None for a program.
    module: str  # The lowered module as text; empty if unknown, or not asked for.


@dataclass(frozen=True, slots=True)
class Checked:
    """A problem that `verify` found. The entry is in quarantine now."""

    kind: str  # "program" or "prediction".
    digest: str  # Name of the entry.
    label: str  # File and name of the step; empty for a damaged header.
    problem: str  # What is wrong with the entry.


def open_existing(directory: Path) -> ProgramStore | None:
    """Opens a cache directory; returns None, and creates nothing, if there is none.

    Raises `CacheDirectoryError` if other users can write to it, or it is a file.
    """
    if not (directory / ROOT).is_dir():
        if directory.exists():
            check_directory(directory)
        return None
    return open_store(directory, None, 0.0)


def entries_of(store: ProgramStore | None, *, whole: bool = False) -> list[EntryInfo]:
    """Returns the entries of a directory; an empty list for None."""
    return list(store.disk.entries(whole=whole)) if store is not None else []


def take_inventory(directory: Path) -> Inventory:
    """Lists the programs, and what is damaged."""
    entries = entries_of(open_existing(directory))
    programs = [each for each in entries if each.kind == "program"]
    return Inventory(
        str(directory),
        tuple(_item(each) for each in entries if each.kind == "program" or each.problem),
        len(programs),
        sum(each.kind == "prediction" for each in entries),
        sum(each.problem is not None for each in entries),
        sum(each.size_bytes for each in entries),
    )


def _item(entry: EntryInfo) -> Item:
    seconds = _seconds_of(entry)
    return Item(
        entry.kind,
        entry.digest,
        label_of(entry),
        entry.size_bytes,
        entry.created_time,
        entry.used_time,
        sum(seconds.values()) if seconds else None,
        entry.problem,
    )


def label_of(entry: EntryInfo) -> str:
    """Returns file and name of an entry's step; empty for a damaged entry."""
    return str((entry.header or {}).get("label", ""))


def _seconds_of(entry: EntryInfo) -> dict[str, float]:
    found: Any = (entry.header or {}).get("seconds")
    return found if plain.fits(found, dict[str, float]) else {}


def find(entries: Iterable[EntryInfo], wanted: str) -> list[EntryInfo]:
    """Finds entries by the name of their step, else by the beginning of their digest."""
    entries = list(entries)
    by_name = [each for each in entries if means(label_of(each), wanted)]
    return by_name or [each for each in entries if each.digest.startswith(wanted.lower())]


def means(label: str, wanted: str) -> bool:
    """Returns whether a text is a step's label, such as `model.py:train_step`, or its last part."""
    name = label.rpartition(":")[2]
    return bool(label) and wanted in (label, name, name.rpartition(".")[2])


def chosen(entries: Iterable[EntryInfo], wanted: Iterable[str]) -> list[EntryInfo]:
    """The entries that any of these texts finds; all of them without a text.

    Raises `OptionError` for a text that finds none.
    """
    entries, found = list(entries), dict[str, EntryInfo]()
    for text in (wanted := list(wanted)):
        matching = find(entries, text)
        if not matching:
            raise OptionError(f"No program matches {text!r}", where="STEPS", got=repr(text))
        found.update((each.digest, each) for each in matching)
    return list(found.values()) if wanted else entries


def details(store: ProgramStore, entry: EntryInfo, *, with_module: bool = False) -> Details:
    """Reads an entry, whose header may have been read before."""
    info = store.disk.peek(entry.kind, entry.digest) or entry
    about = info.header or {}
    captured: Any = about.get("captured")
    module = ""
    with contextlib.suppress(zlib.error, TypeError, UnicodeDecodeError):
        module = zlib.decompress(about.get("module", b"")).decode() if with_module else ""
    return Details(
        info.kind,
        info.digest,
        label_of(info),
        info.size_bytes,
        info.created_time,
        info.used_time,
        info.problem,
        _seconds_of(info),
        [dict(zip(_CAPTURED, row, strict=True)) for row in captured]
        if plain.fits(captured, list[tuple[str, str, int]])
        else [],
        about.get("programs"),
        module,
    )


def verify(store: ProgramStore | None) -> tuple[int, list[Checked]]:
    """Checks all entries, and quarantines damaged ones. Returns their number, and the problems."""
    entries = entries_of(store, whole=True)
    damaged = ((each, each.problem) for each in entries if each.problem is not None)
    return len(entries), [
        Checked(each.kind, each.digest, label_of(each), problem) for each, problem in damaged
    ]
