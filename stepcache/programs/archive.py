"""The archive: programs on disk, on the three levels at which a later process finds them.

1. *No trace*: a question asked before the trace finds a candidate that agrees with every fact.
2. *No compile*: what was lowered has the digest of a stored executable.
3. *Build*: nothing was found; what was compiled is stored, in the background.
"""

from __future__ import annotations

import functools
import logging
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Concatenate, ParamSpec, TypeVar

import jax

from stepcache import jaxcompat
from stepcache._process_hooks import quick_switching
from stepcache.events import Change
from stepcache.fingerprint.installed_packages import look_at_modules
from stepcache.jaxcompat import Runnable, storing
from stepcache.programs.background import LATER, Job, Worker
from stepcache.programs.question import Question
from stepcache.storage.dependency_record import (
    Address,
    Candidate,
    Publication,
    agree,
    differences,
    pack_candidates,
    unpack_candidates,
)
from stepcache.storage.disk_store import DiskTier
from stepcache.storage.run_log import History, Row, script_name
from stepcache.storage.starts import Starts

CANDIDATES_KEPT = 8
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
    """What a method of the archive raises is logged, and the step goes on as without the archive.

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
class Answer:
    """What the archive knows about a question.

    Attributes:
        candidate: agrees with every fact; None where there is none.
        since: when the build was made that the changes are told against; None without one.
        changes: what differs from that build.
        unvouched: why no candidate could be looked for, or none was kept.
    """

    candidate: Candidate | None = None
    since: float | None = None
    changes: tuple[Change, ...] = ()
    unvouched: tuple[str, ...] = ()


class Archive:
    """Programs of one directory.

    Args:
        tier: where entries are kept.
        starts: where the starts of each candidate are counted.
        history: where runs are kept.
        verify: "background", "before" or "off".
        min_build_seconds: what was built faster is not kept.

    Attributes:
        worker: stores what was built.
        verifier: traces anew what was loaded.
    """

    def __init__(
        self,
        tier: DiskTier,
        starts: Starts,
        history: History,
        verify: str,
        min_build_seconds: float,
    ):
        self.tier, self.starts, self.history = tier, starts, history
        self.verify, self.min_build_seconds = verify, min_build_seconds
        self.worker = Worker("stepcache store", droppable=False)
        self.verifier = Worker("stepcache verify", droppable=True, poll_seconds=0.05)
        self._preloader = Worker("stepcache preload", droppable=True, poll_seconds=0.01)
        self._lock = threading.Lock()
        self._preloaded: dict[tuple[str, tuple[int, ...]], Job] = {}
        self._taken: set[tuple[str, tuple[int, ...]]] = set()
        self._asked_for: set[str] = set()

    # ---- level 1: without a trace --------------------------------------------------------------

    @_no_matter_of_the_step("look for a program", Answer)
    def answer(self, question: Question) -> Answer:
        """Looks for a candidate. Reads files, imports nothing, and runs nothing of the user's.

        The entry that is read is named by all that is known before a trace, so that its candidates
        differ only in what a trace tells of: files, variables, attributes that libraries read.
        """
        if question.base.blames:
            return Answer(unvouched=question.base.blames)
        candidates = self._candidates(question.address.lookup)
        newest: tuple[dict[str, str], dict[str, str]] | None = None
        for candidate in candidates:
            found = question.with_used(candidate.used)
            if found.blames:
                return Answer(unvouched=found.blames)
            if agree(candidate.told, found.facts):
                return Answer(candidate)
            newest = newest or (candidate.told, dict(found.facts))
        if newest is not None:
            return Answer(None, candidates[0].created_time, differences(*newest))
        return self._compared_with_last_run(question)

    def _candidates(self, lookup: str) -> list[Candidate]:
        entry = self.tier.read("step", lookup)
        if entry is None:
            return []
        try:
            return unpack_candidates(entry.payload)
        except ValueError as error:
            self.tier.discard("step", lookup, f"it is malformed: {error}")
            return []

    def _compared_with_last_run(self, question: Question) -> Answer:
        """No entry is for this code, values and call: compares with the nearest of the last run."""
        rows = [row for row in self.history.last_run_of(question.address.label) if row.lookup]
        lookups = list(dict.fromkeys(row.lookup for row in reversed(rows)))[:_RUNS_COMPARED]
        latest = [found[0] for found in map(self._candidates, lookups) if found]
        if not latest:
            return Answer()
        base = dict(question.base.facts)
        nearest = min(latest, key=lambda each: _distance(each.told, base))
        changes = differences(nearest.told, question.with_used(nearest.used).facts)
        return Answer(None, nearest.created_time, changes)

    @_no_matter_of_the_step("load a program", _nothing)
    def load(self, candidate: Candidate, address: Address, in_tree: Any) -> Runnable | None:
        """Loads the program of a candidate; None where that cannot be done.

        Args:
            candidate: from `answer`.
            address: of the question.
            in_tree: the tree of the call's arguments.
        """
        try:
            devices = tuple(address.devices[position] for position in candidate.devices)
            executable = self._executable(candidate.program, devices)
            if executable is None:
                return None
            tree = storing.decode_tree(candidate.tree, in_tree)
            return storing.assemble(executable, candidate.call, tree, devices)
        except Exception as error:
            self.tier.discard("step", address.lookup, f"{type(error).__name__}: {error}")
            return None

    def name(self) -> str:
        """Names the directory: the same in all processes that look into it, and in no others."""
        try:
            return self.tier.vouch(b"the name of this directory").hex()
        except OSError:
            return ""

    @_no_matter_of_the_step("look for programs", bool)
    def has_programs(self) -> bool:
        """Whether there is any executable."""
        return self.tier.holds_any("program")

    @_no_matter_of_the_step("read a program", bytes)
    def executable_bytes(self, digest: str) -> bytes:
        """A stored executable, to be given to another process; empty where there is none."""
        entry = self.tier.read("program", digest)
        return entry.payload if entry is not None else b""

    @_no_matter_of_the_step("store a program", _nothing)
    def keep(self, address: Address, candidate: Candidate, data: bytes) -> None:
        """Stores what another process built and this one has loaded."""
        if self.tier.publish("program", candidate.program, {"label": address.label}, data):
            self._add_candidate(address, candidate)

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
        with self.tier.loading("program", digest):
            entry = self.tier.read("program", digest)
            if entry is None:
                return None
            try:
                return load(entry.payload)
            except Exception as error:
                why = f"XLA does not load it: {type(error).__name__}: {error}"
                self.tier.discard("program", digest, why)
                return None

    # ---- level 2: without compiling ------------------------------------------------------------

    @_no_matter_of_the_step("load a program", _nothing)
    def find(self, digest: str, load: Callable[[bytes], Any]) -> Any:
        """The executable of what XLA is about to be given; None where there is none."""
        return self._read_executable(digest, load)

    # ---- level 3: keeping what was built -------------------------------------------------------

    @_no_matter_of_the_step("store a program", _nothing)
    def publish(self, publication: Publication) -> None:
        """Stores a program."""
        try:
            with quick_switching():
                self._publish(publication)
        except storing.NotStorable as error:
            _log.warning("%s will have to be traced again: %s", publication.address.label, error)

    def _publish(self, publication: Publication) -> None:
        address, digest = publication.address, publication.digest
        if publication.data or "compile" in publication.seconds:
            data = publication.data or publication.serialized()
            if not self.tier.publish("program", digest, {"label": address.label}, data):
                return
        if publication.traced.tree is not None:
            self._add_candidate(address, publication.candidate(self.history.clock()))

    def _add_candidate(self, address: Address, candidate: Candidate) -> None:
        others = self._others(address, candidate)
        self._write_candidates(address, [candidate, *others][:CANDIDATES_KEPT])

    def _others(self, address: Address, candidate: Candidate) -> list[Candidate]:
        known = self._candidates(address.lookup)
        return [each for each in known if each.facts != candidate.facts]

    def _write_candidates(self, address: Address, candidates: list[Candidate]) -> None:
        about, payload = pack_candidates(address.label, candidates)
        self.tier.publish("step", address.lookup, about, payload)

    @_no_matter_of_the_step("remove a wrong program", _nothing)
    def forget(self, address: Address, candidate: Candidate) -> None:
        """Drops a candidate that a trace has proved wrong."""
        self.starts.forget(start_name(address, candidate))
        others = self._others(address, candidate)
        if others:
            self._write_candidates(address, others)
        else:
            self.tier.discard("step", address.lookup, "a trace gave another program", False)

    def flush(self) -> None:
        """Waits until everything built so far is stored."""
        self.worker.flush()

    # ---- loading beforehand --------------------------------------------------------------------

    @_no_matter_of_the_step("load programs beforehand", _nothing)
    def preload(self, label: str) -> None:
        """Starts loading, in the background, what the last run of this script used of a step."""
        with self._lock:
            if label in self._asked_for:
                return
            self._asked_for.add(label)
        self._preloader.submit(functools.partial(self._prepare, label))

    def _prepare(self, label: str) -> None:
        rows = [row for row in self.history.last_run_of(label) if row.program]
        if not jaxcompat.backends_are_initialized():  # Else the first call may be about to come.
            for lookup in dict.fromkeys(row.lookup for row in rows if row.lookup):
                for candidate in self._candidates(lookup):
                    look_at_modules(candidate.used.modules, candidate.used.names)
        for key in dict.fromkeys((row.program, tuple(row.devices)) for row in rows):
            with self._lock:
                known = key in self._taken or key in self._preloaded
                if not known and len(self._preloaded) < _PRELOADED_AT_MOST:
                    work = functools.partial(self._load_ahead, *key)
                    self._preloaded[key] = self._preloader.submit(work)

    def _load_ahead(self, digest: str, numbers: tuple[int, ...]) -> Any:
        """Loads a program once JAX's backend has been started by somebody else, at their moment."""
        if not jaxcompat.backends_are_initialized():
            return LATER
        by_number = {device.id: device for device in jax.devices()}
        if not set(numbers) <= by_number.keys():
            return None
        devices = tuple(by_number[number] for number in numbers)
        return self._read_executable(digest, lambda data: storing.load_executable(data, devices))

    # ---- the ledger ----------------------------------------------------------------------------

    @_no_matter_of_the_step("write its ledger", _nothing)
    def note(self, event: str, step: str, label: str, **details: Any) -> None:
        """Writes a row of this run."""
        now = self.history.clock()
        rank, processes = 0, 1
        if jaxcompat.backends_are_initialized():
            rank, processes = jax.process_index(), jax.process_count()
        details = {"rank": rank, "processes": processes} | details
        self.history.add(Row(event, now, script_name(), step, label, **details))


def start_name(address: Address, candidate: Candidate) -> str:
    """Names a candidate where its starts are counted."""
    return f"{address.lookup[:24]}-{candidate.facts[:24]}-{candidate.program[:24]}"


def _distance(told: dict[str, str], base: dict[str, str]) -> int:
    return sum(told.get(name) != fact for name, fact in base.items())


def open_archive(
    directory: Path, max_bytes: int | None, verify: str, min_build_seconds: float
) -> Archive:
    """Opens, and if need be makes, a directory of programs.

    Raises:
        CacheDirectoryError: others can write to it.
    """
    tier = DiskTier(directory, max_bytes)
    history = History(directory / "v1" / "runs", tier.writable)
    starts = Starts(directory / "v1" / "starts", tier.writable)
    return Archive(tier, starts, history, verify, min_build_seconds)
