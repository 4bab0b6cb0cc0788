"""The archive: programs on disk, on the three levels at which a later process finds them.

1. *No trace*: a lookup asked before the trace finds a record that agrees with every dependency.
2. *No compile*: what was lowered has the digest of a stored executable.
3. *Build*: nothing was found; what was compiled is stored, in the background.
"""

from __future__ import annotations

import functools
import logging
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Concatenate, ParamSpec, TypeVar

import jax

from stepcache import jaxcompat
from stepcache._process_hooks import quick_switching
from stepcache.events import Change
from stepcache.fingerprint.dependencies import agree, differences
from stepcache.fingerprint.installed_packages import look_at_modules
from stepcache.jaxcompat import Runnable, storing
from stepcache.programs.background import LATER, Job, Worker
from stepcache.programs.lookup import Lookup
from stepcache.storage.dependency_record import (
    Address,
    DependencyRecord,
    Publication,
    Used,
    pack_records,
    unpack_records,
)
from stepcache.storage.disk_store import DiskStore
from stepcache.storage.run_log import Row, RunLog, script_name
from stepcache.storage.starts import Starts

RECORDS_KEPT = 8
NEVER_STORED = "it cannot be stored: "
"""Begins the reason of a program which is of a kind that no process can store."""
_RUNS_COMPARED = 8
_PRELOADED_AT_MOST = 256

_log = logging.getLogger("stepcache")

P = ParamSpec("P")
R = TypeVar("R")


def _no_matter_of_the_step(
    what: str, instead: Callable[[], R]
) -> Callable[
    [Callable[Concatenate[Archive, P], R]],
    Callable[Concatenate[Archive, P], R],
]:
    """Logs what a method of the archive raises; the step goes on as without an archive.

    Args:
        what: the method could not do, for the log.
        instead: gives what is returned then.
    """

    def guarded(method: Callable[Concatenate[Archive, P], R]) -> Any:
        @functools.wraps(method)
        def call(archive: Archive, *args: P.args, **kwargs: P.kwargs) -> R:
            try:
                return method(archive, *args, **kwargs)
            except Exception:
                _log.exception("stepcache could not %s", what)
                return instead()

        return call

    return guarded


def _nothing() -> Any:
    return None


@dataclass(frozen=True, slots=True)
class LookupResult:
    """What the archive knows about a lookup.

    Attributes:
        record: agrees with every dependency; None where there is none.
        since: when the build was made that `changes` compares with; None without one.
        changes: what differs from that build.
        untrackable: why no record could be looked for, or none was kept.
        used: what the trace of that build used.
        found: the dependencies of that trace as they were at the lookup.
    """

    record: DependencyRecord | None = None
    since: float | None = None
    changes: tuple[Change, ...] = ()
    untrackable: tuple[str, ...] = ()
    used: Used = field(default_factory=Used)
    found: dict[str, str] = field(default_factory=dict)

    @property
    def is_never_stored(self) -> bool:
        """Whether the last run built the same program, and found that it cannot be stored."""
        return any(why.startswith(NEVER_STORED) for why in self.untrackable)


class Archive:
    """Programs of one directory.

    Args:
        disk: where entries are kept.
        starts: where the starts of each record are counted.
        run_log: where runs are kept.
        verify: "background", "before" or "off".
        min_build_seconds: what was built faster is not kept.

    Attributes:
        worker: stores what was built.
        verifier: traces anew what was loaded.
    """

    def __init__(
        self,
        disk: DiskStore,
        starts: Starts,
        run_log: RunLog,
        verify: str,
        min_build_seconds: float,
    ):
        self.disk, self.starts, self.run_log = disk, starts, run_log
        self.verify, self.min_build_seconds = verify, min_build_seconds
        self.worker = Worker("stepcache store", droppable=False)
        self.verifier = Worker("stepcache verify", droppable=True, poll_seconds=0.05)
        self._preloader = Worker("stepcache preload", droppable=True, poll_seconds=0.01)
        self._lock = threading.Lock()
        self._preloaded: dict[tuple[str, tuple[int, ...]], Job] = {}
        self._taken: set[tuple[str, tuple[int, ...]]] = set()
        self._asked_for: set[str] = set()

    # ---- level 1: without a trace --------------------------------------------------------------

    @_no_matter_of_the_step("look for a program", LookupResult)
    def look_up(self, lookup: Lookup) -> LookupResult:
        """Looks for a record. Reads files, imports nothing, and runs nothing of the user's.

        The entry is named by all dependencies that are known before a trace. Its records differ
        only in what a trace adds: files, environment variables, attributes that libraries read.
        """
        if lookup.base.untrackable:
            return LookupResult(untrackable=lookup.base.untrackable)
        records = self._records(lookup.address.digest)
        newest: LookupResult | None = None
        for record in records:
            found = lookup.with_used(record.used)
            if found.untrackable:
                return LookupResult(untrackable=found.untrackable)
            if agree(record.dependencies, found.dependencies):
                return LookupResult(record)
            newest = newest or _compared(record, found.dependencies)
        return newest or self._compared_with_last_run(lookup)

    def _records(self, lookup: str) -> list[DependencyRecord]:
        entry = self.disk.read("step", lookup)
        if entry is None:
            return []
        try:
            return unpack_records(entry.payload)
        except ValueError as error:
            self.disk.discard("step", lookup, f"it is malformed: {error}")
            return []

    def _compared_with_last_run(self, lookup: Lookup) -> LookupResult:
        """Compares a call without an entry with the closest record of the last run."""
        rows = [row for row in self.run_log.last_run_of(lookup.address.label) if row.lookup]
        for row in rows:
            if row.lookup == lookup.address.digest and row.untrackable:
                return LookupResult(untrackable=tuple(row.untrackable))
        lookups = list(dict.fromkeys(row.lookup for row in reversed(rows)))[:_RUNS_COMPARED]
        latest = [found[0] for found in map(self._records, lookups) if found]
        if not latest:
            return LookupResult()
        base = dict(lookup.base.dependencies)
        nearest = min(latest, key=lambda each: _distance(each.dependencies, base))
        return _compared(nearest, lookup.with_used(nearest.used).dependencies)

    @_no_matter_of_the_step("load a program", _nothing)
    def load(self, record: DependencyRecord, address: Address, in_tree: Any) -> Runnable | None:
        """Loads the program of a record; None where that cannot be done.

        Args:
            record: from `result`.
            address: of the lookup.
            in_tree: the tree of the call's arguments.
        """
        try:
            devices = tuple(address.devices[position] for position in record.devices)
            executable = self._executable(record.program, devices)
            if executable is None:
                return None
            tree = storing.decode_tree(record.tree, in_tree)
            return storing.assemble(executable, record.call, tree, devices)
        except Exception as error:
            self.disk.discard("step", address.digest, f"{type(error).__name__}: {error}")
            return None

    def name(self) -> str:
        """Names the directory: the same in all processes that look into it, and in no others."""
        try:
            return self.disk.vouch(b"the name of this directory").hex()
        except OSError:
            return ""

    @_no_matter_of_the_step("look for programs", bool)
    def has_programs(self) -> bool:
        """Whether there is any executable."""
        return self.disk.holds("program")

    @_no_matter_of_the_step("read a program", bytes)
    def executable_bytes(self, digest: str) -> bytes:
        """A stored executable, to be given to another process; empty where there is none."""
        entry = self.disk.read("program", digest)
        return entry.payload if entry is not None else b""

    @_no_matter_of_the_step("store a program", _nothing)
    def keep(self, address: Address, record: DependencyRecord, data: bytes) -> None:
        """Stores what another process built and this one has loaded."""
        if self.disk.publish("program", record.program, {"label": address.label}, data):
            self._add_record(address, record)

    def _executable(self, digest: str, devices: Sequence[Any]) -> Any:
        key = (digest, tuple(device.id for device in devices))
        with self._lock:
            ahead = self._preloaded.pop(key, None)
            self._taken.add(key)
        loaded = self._preloader.take(ahead) if ahead is not None else None
        if loaded is not None:
            return loaded
        return self._read_executable(digest, lambda data: storing.load_executable(data, devices))

    def _read_executable(self, digest: str, load: Callable[[bytes], Any]) -> Any:
        if not self.disk.holds("program", digest):
            return None
        with self.disk.loading("program", digest):
            entry = self.disk.read("program", digest)
            if entry is None:
                return None
            try:
                return load(entry.payload)
            except Exception as error:
                why = f"XLA does not load it: {type(error).__name__}: {error}"
                self.disk.discard("program", digest, why)
                return None

    # ---- level 2: without compiling ------------------------------------------------------------

    @_no_matter_of_the_step("load a program", _nothing)
    def find(self, digest: str, load: Callable[[bytes], Any]) -> Any:
        """The stored executable of a lowered module; None if there is none."""
        return self._read_executable(digest, load)

    # ---- level 3: keeping what was built -------------------------------------------------------

    @_no_matter_of_the_step("store a program", lambda: "it is not stored: see the log")
    def publish(self, publication: Publication) -> str:
        """Stores a program. Returns why that cannot be done; an empty text if it can."""
        try:
            with quick_switching():
                self._publish(publication)
        except storing.NotStorable as error:
            return f"{NEVER_STORED}{error}"
        return ""

    def _publish(self, publication: Publication) -> None:
        address, digest = publication.address, publication.digest
        if publication.data or "compile" in publication.seconds:
            data = publication.data or publication.serialized()
            if not self.disk.publish("program", digest, {"label": address.label}, data):
                return
        if publication.traced.tree is not None:
            self._add_record(address, publication.record(self.run_log.clock()))

    def _add_record(self, address: Address, record: DependencyRecord) -> None:
        others = self._others(address, record)
        self._write_records(address, [record, *others][:RECORDS_KEPT])

    def _others(self, address: Address, record: DependencyRecord) -> list[DependencyRecord]:
        known = self._records(address.digest)
        return [each for each in known if each.digest != record.digest]

    def _write_records(self, address: Address, records: list[DependencyRecord]) -> None:
        about, payload = pack_records(address.label, records)
        self.disk.publish("step", address.digest, about, payload)

    @_no_matter_of_the_step("remove a wrong program", _nothing)
    def forget(self, address: Address, record: DependencyRecord) -> None:
        """Invalidates a record that does not match a new trace."""
        self.starts.forget(start_name(address, record))
        others = self._others(address, record)
        if others:
            self._write_records(address, others)
        else:
            self.disk.discard("step", address.digest, "a trace gave another program", False)

    def flush(self) -> None:
        """Waits until everything built so far is stored."""
        self.worker.flush()

    # ---- preloading -------------------------------------------------------------------------

    @_no_matter_of_the_step("preload programs", _nothing)
    def preload(self, label: str) -> None:
        """Starts loading, in the background, what the last run of this script used of a step."""
        with self._lock:
            if label in self._asked_for:
                return
            self._asked_for.add(label)
        self._preloader.submit(functools.partial(self._prepare, label))

    def _prepare(self, label: str) -> None:
        rows = [row for row in self.run_log.last_run_of(label) if row.program]
        if not jaxcompat.backends_are_initialized():  # Else the first call may be about to come.
            for lookup in dict.fromkeys(row.lookup for row in rows if row.lookup):
                for record in self._records(lookup):
                    look_at_modules(record.used.modules, record.used.names)
        for key in dict.fromkeys((row.program, tuple(row.devices)) for row in rows):
            with self._lock:
                known = key in self._taken or key in self._preloaded
                if not known and len(self._preloaded) < _PRELOADED_AT_MOST:
                    work = functools.partial(self._load_ahead, *key)
                    self._preloaded[key] = self._preloader.submit(work)

    def _load_ahead(self, digest: str, numbers: tuple[int, ...]) -> Any:
        """Loads a program, but never starts JAX's backend: that is left to the user's code."""
        if not jaxcompat.backends_are_initialized():
            return LATER
        by_number = {device.id: device for device in jax.devices()}
        if not set(numbers) <= by_number.keys():
            return None
        devices = tuple(by_number[number] for number in numbers)
        return self._read_executable(digest, lambda data: storing.load_executable(data, devices))

    # ---- the run log ---------------------------------------------------------------------------

    @_no_matter_of_the_step("write its run log", _nothing)
    def note(self, event: str, step: str, label: str, **details: Any) -> None:
        """Writes a row of this run."""
        now = self.run_log.clock()
        rank, processes = 0, 1
        if jaxcompat.backends_are_initialized():
            rank, processes = jax.process_index(), jax.process_count()
        details = {"rank": rank, "processes": processes} | details
        self.run_log.add(Row(event, now, script_name(), step, label, **details))


def _compared(record: DependencyRecord, found: dict[str, str]) -> LookupResult:
    changes = differences(record.dependencies, found)
    return LookupResult(None, record.created_time, changes, used=record.used, found=dict(found))


def start_name(address: Address, record: DependencyRecord) -> str:
    """Names a record where its starts are counted."""
    return f"{address.digest[:24]}-{record.digest[:24]}-{record.program[:24]}"


def _distance(recorded: dict[str, str], base: dict[str, str]) -> int:
    return sum(recorded.get(name) != dependency for name, dependency in base.items())


def open_archive(
    directory: Path, max_bytes: int | None, verify: str, min_build_seconds: float
) -> Archive:
    """Opens, and if need be makes, a directory of programs.

    Raises:
        CacheDirectoryError: others can write to it.
    """
    disk = DiskStore(directory, max_bytes)
    run_log = RunLog(directory / "v1" / "runs", disk.writable)
    starts = Starts(directory / "v1" / "starts", disk.writable)
    return Archive(disk, starts, run_log, verify, min_build_seconds)
