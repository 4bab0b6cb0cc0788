"""The archive: programs on disk, and in a shared cache behind it, on the three levels at which a
later process finds them.

1. *No trace*: a lookup asked before the trace finds a record that agrees with every dependency.
2. *No compile*: what was lowered has the digest of a stored executable.
3. *Build*: nothing was found; what was compiled is stored, in the background.

The shared cache is asked where the disk has no answer, by those who time that as a `Stage`.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any, TypeVar

import jax

from stepcache import jaxcompat
from stepcache._process_hooks import quick_switching
from stepcache.fingerprint import module_contents
from stepcache.fingerprint.dependencies import agree, differences, digest_dependencies
from stepcache.jaxcompat import Runnable, storing
from stepcache.programs.background import Worker
from stepcache.programs.left_by_traces import Left, LeftInCells
from stepcache.programs.lookup import NEVER_STORED, Lookup, LookupResult
from stepcache.programs.preload import Preloader
from stepcache.storage.content_index import ContentIndex
from stepcache.storage.dependency_record import (
    Address,
    DependencyRecord,
    Publication,
    pack_records,
    unpack_records,
)
from stepcache.storage.disk_store import DiskStore
from stepcache.storage.run_log import Row, RunLog, script_name
from stepcache.storage.starts import Starts

if TYPE_CHECKING:  # Few processes have a shared cache.
    from stepcache.storage.shared_entries import SharedEntries

RECORDS_KEPT = 8
_RUNS_COMPARED = 8

_log = logging.getLogger("stepcache")

Stage = Callable[[str], AbstractContextManager[Any]]
Method = TypeVar("Method", bound=Callable)


def _no_matter_of_the_step(
    what: str, instead: Callable[[], Any] = lambda: None
) -> Callable[[Method], Method]:
    """Logs that a method of the archive could not do `what`; it returns what `instead` gives.

    The step goes on as without an archive.
    """

    def guarded(method: Any) -> Any:
        @functools.wraps(method)
        def call(*args: Any, **kwargs: Any) -> Any:
            try:
                return method(*args, **kwargs)
            except Exception:
                _log.exception("stepcache could not %s", what)
                return instead()

        return call

    return guarded


class Archive:
    """Programs of one directory.

    Args:
        disk: keeps the entries.
        starts: counts the starts of each record.
        run_log: keeps the runs.
        contents: keeps what the files of installed modules hold.
        verify, min_build_seconds: as for `ProgramCache`.
        remote: what other machines have built.
    """

    def __init__(
        self,
        disk: DiskStore,
        starts: Starts,
        run_log: RunLog,
        contents: ContentIndex,
        verify: str,
        min_build_seconds: float,
        remote: SharedEntries | None,
    ):
        self.remote = remote
        self.disk, self.starts, self.run_log = disk, starts, run_log
        self.verify, self.min_build_seconds = verify, min_build_seconds
        self.worker = Worker("stepcache store", droppable=False)  # Stores what was built.
        self.verifier = Worker("stepcache verify", droppable=True, poll_seconds=0.05)
        self.preloader = Preloader(run_log, self._records, self._read_executable, remote)
        self._left = LeftInCells()
        self._offered: set[tuple[str, str]] = set()
        self._contents = contents
        module_contents.learn(contents.read())

    @_no_matter_of_the_step("remember what a trace leaves changed")
    def remember_left(self, left: Left, lookup: Lookup) -> None:
        """Remembers what the trace of a program leaves changed, which was loaded without one."""
        if left:
            self._left.add(left, lookup.cells())

    @_no_matter_of_the_step("determine what traces leave changed", dict)
    def left_for(self, lookup: Lookup) -> Left:
        """What the traces of such programs, of any step, leave changed for a lookup."""
        return self._left.of(lookup.cells()) if self._left else {}

    @_no_matter_of_the_step("look for a program", LookupResult)
    def look_up(self, lookup: Lookup, stage: Stage | None = None) -> LookupResult:
        """Looks for a record. Reads files, imports nothing, and runs nothing of the user's.

        The entry is named by all dependencies that are known before a trace. Its records differ
        only in what a trace adds: files, environment variables, attributes that libraries read.

        Args:
            lookup: the call.
            stage: times what the shared cache takes; None where it is not to be asked.
        """
        if lookup.base.untrackable:
            return LookupResult(untrackable=lookup.base.untrackable)
        newest: LookupResult | None = None
        for record in self._candidates(lookup.address.digest, stage):
            found = lookup.with_used(record.used)
            if found.untrackable:
                return LookupResult(untrackable=found.untrackable)
            if agree(record.dependencies, found.dependencies):
                remote = self._offering(lookup.address, record)
                if remote is None:
                    return LookupResult(record)
                remote.fetch_run_of(lookup.address.digest, record)
                return LookupResult(record, remote=remote.url)
            newest = newest or _compared(record, found.dependencies)
        return newest or self._compared_with_last_run(lookup)

    def _candidates(self, lookup: str, stage: Stage | None) -> Iterator[DependencyRecord]:
        """The records on disk, then those that only the shared cache has."""
        known = self._records(lookup)
        yield from known
        if stage is None or self.remote is None or not self.remote.is_on:
            return
        with stage("remote"):
            offered = self.remote.records(lookup)
        digests = {each.digest for each in known}
        for each in offered:
            if each.digest not in digests:
                self._offered.add((lookup, each.digest))
                yield each

    def _offering(self, address: Address, record: DependencyRecord) -> SharedEntries | None:
        """The shared cache, where a record was found there and is not on disk."""
        return self.remote if (address.digest, record.digest) in self._offered else None

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

    @_no_matter_of_the_step("load a program")
    def load(
        self,
        record: DependencyRecord,
        address: Address,
        in_tree: Any,
        holder: storing.Holder,
        stage: Stage | None = None,
    ) -> Runnable | None:
        """Loads the program of a record; None where that cannot be done.

        Args:
            record: from `look_up`.
            address: of the lookup.
            in_tree: the tree of the call's arguments.
            holder: of what the function of the step holds.
            stage: as for `look_up`.
        """
        try:
            devices = tuple(address.devices[position] for position in record.devices)
            executable = self.preloader.take(record.program, devices)
            if executable is None:
                load = functools.partial(storing.load_executable, devices=devices)
                executable = self._read_executable(record.program, load, stage)
            if executable is None:
                return None
            tree = storing.decode_tree(record.tree, in_tree, holder)
            run = storing.assemble(executable, record.call, tree, devices)
            if self._offering(address, record) is not None:
                self._add_record(address, record)
            return run
        except storing.NotThere:  # A trace may make it.
            return None
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
    def executable_bytes(self, digest: str, stage: Stage | None = None) -> bytes:
        """A stored executable, to be given to another process; empty where there is none."""
        self._is_there(digest, stage)
        entry = self.disk.read("program", digest)
        return entry.payload if entry is not None else b""

    @_no_matter_of_the_step("store a program")
    def keep(self, address: Address, record: DependencyRecord, data: bytes) -> None:
        """Stores what another process built and this one has loaded."""
        if self.disk.publish("program", record.program, {"label": address.label}, data):
            self._add_record(address, record)

    def _is_there(self, digest: str, stage: Stage | None) -> bool:
        """Whether an executable is on disk, by now."""
        if self.disk.holds("program", digest):
            return True
        if stage is None or self.remote is None or not self.remote.is_on:
            return False
        with stage("remote"):
            return self.remote.fetch(digest)

    def _read_executable(
        self, digest: str, load: Callable[[bytes], Any], stage: Stage | None = None
    ) -> Any:
        if not self._is_there(digest, stage):
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

    @_no_matter_of_the_step("load a program")
    def find(self, digest: str, load: Callable[[bytes], Any], stage: Stage | None = None) -> Any:
        """The stored executable of a lowered module; None if there is none."""
        return self._read_executable(digest, load, stage)

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
        built, data, record = "compile" in publication.seconds, publication.data, None
        if data or built:
            data = data or publication.serialized()
            if not self.disk.publish("program", digest, {"label": address.label}, data):
                return
        if publication.traced.tree is not None:
            record = publication.record(self.run_log.clock())
            self._add_record(address, record)
        # What another process has given is written by that process.
        if self.remote is not None and (built or (record is not None and not publication.data)):
            if not data and digest not in self.remote.received:
                data = self.executable_bytes(digest)
            self.remote.upload(address, digest, record, data)

    def _add_record(self, address: Address, record: DependencyRecord) -> None:
        others = self._others(address, record)
        self._write_records(address, [record, *others][:RECORDS_KEPT])

    def _others(self, address: Address, record: DependencyRecord) -> list[DependencyRecord]:
        known = self._records(address.digest)
        return [each for each in known if each.digest != record.digest]

    def _write_records(self, address: Address, records: list[DependencyRecord]) -> None:
        about, payload = pack_records(address.label, records)
        self.disk.publish("step", address.digest, about, payload)

    @_no_matter_of_the_step("remove a wrong program")
    def forget(self, address: Address, record: DependencyRecord) -> None:
        """Invalidates a record that does not match a new trace."""
        self.starts.note_wrong(start_name(address, record), address.digest[:24], record.digest)
        if self.remote is not None:
            self.remote.forget(address.digest, record)
        others = self._others(address, record)
        if others:
            self._write_records(address, others)
        else:
            self.disk.discard("step", address.digest, "a trace gave another program", False)

    def forgot(self, address: Address, dependencies: dict[str, str]) -> bool:
        """Whether a record was invalidated that depended on the same."""
        wrong = self.starts.wrong(address.digest[:24])
        return wrong != "" and digest_dependencies(dependencies) in wrong

    def flush(self) -> None:
        """Waits until everything built so far is stored."""
        self.worker.flush()
        if self.remote is not None:
            self.remote.flush()

    def note_start(self, address: Address, record: DependencyRecord) -> bool:
        """Counts a start of a record. Returns whether it should be verified."""
        name = start_name(address, record)
        if self.remote is not None and self.remote.is_verified(address.digest, record):
            self.starts.note_verified_elsewhere(name)
        return self.starts.note_start(name)

    def note_verified(self, address: Address, record: DependencyRecord) -> None:
        """Notes that a trace gave the same program."""
        self.starts.note_verified(start_name(address, record))
        if self.remote is not None:
            self.remote.upload_verified(address.digest, record)

    @_no_matter_of_the_step("keep what modules hold")
    def keep_contents(self) -> None:
        """Keeps what this process found in files of modules, so that others need not read them."""
        rows = module_contents.found()
        if rows is not None:
            self._contents.write(rows)

    @_no_matter_of_the_step("write its run log")
    def note(self, *rows: Row) -> None:
        """Writes rows of this run."""
        self.run_log.add(*rows)

    def row(self, event: str, step: str, label: str, **details: Any) -> Row:
        """A row of this run, of this moment."""
        now = self.run_log.clock()
        rank, processes = 0, 1
        if jaxcompat.backends_are_initialized():
            rank, processes = jax.process_index(), jax.process_count()
        details = {"rank": rank, "processes": processes} | details
        return Row(event, now, script_name(), step, label, **details)


def _compared(record: DependencyRecord, found: dict[str, str]) -> LookupResult:
    changes = differences(record.dependencies, found)
    return LookupResult(None, record.created_time, changes, used=record.used, found=dict(found))


def start_name(address: Address, record: DependencyRecord) -> str:
    """Names a record where its starts are counted."""
    return f"{address.digest[:24]}-{record.digest[:24]}-{record.program[:24]}"


def _distance(recorded: dict[str, str], base: dict[str, str]) -> int:
    return sum(recorded.get(name) != dependency for name, dependency in base.items())
