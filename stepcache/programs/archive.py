"""The archive: programs on disk, on the three levels at which a later process finds them.

1. *No trace*: a question asked before the trace finds a candidate that agrees with every fact.
2. *No compile*: what was lowered has the digest of a stored executable.
3. *Build*: nothing was found; what was compiled is stored, in the background, once it has been
   loaded again as another process would load it.
"""

from __future__ import annotations

import contextlib
import logging
import sys
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax

from stepcache import jaxcompat
from stepcache.events import Change
from stepcache.jaxcompat import Runnable, storing
from stepcache.programs.candidate import (
    Address,
    Candidate,
    Publication,
    agree,
    differences,
    pack_candidates,
    unpack_candidates,
)
from stepcache.programs.disk.tier import DiskTier
from stepcache.programs.fingerprint.origin import distribution_of, file_digest
from stepcache.programs.history import History, Row, script_name
from stepcache.programs.question import Question

CANDIDATES_KEPT = 8
_PRELOADED_AT_MOST = 16
_POLL_SECONDS = 0.01

_log = logging.getLogger("stepcache")


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
        history: where runs are kept.
        verify: "background", "before" or "off".
        min_build_seconds: what was built faster is not kept.
    """

    def __init__(self, tier: DiskTier, history: History, verify: str, min_build_seconds: float):
        self.tier, self.history = tier, history
        self.verify, self.min_build_seconds = verify, min_build_seconds
        self._lock = threading.Lock()
        self._preloaded: dict[tuple[str, tuple[int, ...]], Future] = {}
        self._asked_for: set[str] = set()
        self._working: list[threading.Thread] = []

    # ---- level 1: without a trace --------------------------------------------------------------

    def answer(self, question: Question) -> Answer:
        """Looks for a candidate. Reads files, and runs nothing of the user's function."""
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
        """Another signature, mesh or environment than any build: compare with the latest one."""
        rows = [row for row in self.history.last_run_of(question.address.label) if row.lookup]
        if not rows or any(row.lookup == question.address.lookup for row in rows):
            return Answer()
        candidates = self._candidates(rows[-1].lookup)
        if not candidates:
            return Answer()
        found = question.with_used(candidates[0].used)
        changes = differences(candidates[0].told, found.facts)
        return Answer(None, candidates[0].created_time, changes)

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

    def executable_bytes(self, digest: str) -> bytes:
        """A stored executable, to be given to another process; empty where there is none."""
        entry = self.tier.read("program", digest)
        return entry.payload if entry is not None else b""

    def keep(self, address: Address, candidate: Candidate, data: bytes) -> None:
        """Stores what another process built and this one has loaded."""
        try:
            if self.tier.publish("program", candidate.program, {"label": address.label}, data):
                self._add_candidate(address, candidate)
        except Exception:
            _log.exception("stepcache could not store %s", address.label)

    def _executable(self, digest: str, devices: Sequence[Any]) -> Any:
        with self._lock:
            ahead = self._preloaded.pop((digest, tuple(device.id for device in devices)), None)
        if ahead is not None:
            with contextlib.suppress(Exception):
                return ahead.result()
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

    def find(self, digest: str, load: Callable[[bytes], Any]) -> Any:
        """The executable of what XLA is about to be given; None where there is none."""
        return self._read_executable(digest, load)

    # ---- level 3: keeping what was built -------------------------------------------------------

    def publish(self, publication: Publication) -> None:
        """Stores a program. What goes wrong is logged, and is no matter of the step's."""
        label = publication.address.label
        try:
            self._publish(publication)
        except storing.NotStorable as error:
            _log.warning("%s will have to be traced again: %s", label, error)
        except Exception:
            _log.exception("stepcache could not store %s", label)

    def _publish(self, publication: Publication) -> None:
        address, digest = publication.address, publication.digest
        if "compile" in publication.seconds:
            data = publication.data or publication.serialized()
            with self.tier.loading("program", digest):
                storing.load_executable(data, storing.program_devices(publication.run))
                if not self.tier.publish("program", digest, {"label": address.label}, data):
                    return
        if publication.traced.tree is not None:
            self._add_candidate(address, publication.candidate(self.history.clock()))

    def in_background(self, work: Callable[[], None]) -> None:
        """Does something beside the steps. `flush` and the end of a script wait for it."""

        def run() -> None:
            try:
                work()
            finally:
                with self._lock:
                    self._working.remove(thread)

        thread = threading.Thread(target=run, name="stepcache publish", daemon=False)
        with self._lock:
            self._working.append(thread)
        thread.start()

    def _add_candidate(self, address: Address, candidate: Candidate) -> None:
        others = self._others(address, candidate)
        self._write_candidates(address, [candidate, *others][:CANDIDATES_KEPT])

    def _others(self, address: Address, candidate: Candidate) -> list[Candidate]:
        known = self._candidates(address.lookup)
        return [each for each in known if each.facts != candidate.facts]

    def _write_candidates(self, address: Address, candidates: list[Candidate]) -> None:
        about, payload = pack_candidates(address.label, candidates)
        self.tier.publish("step", address.lookup, about, payload)

    def forget(self, address: Address, candidate: Candidate) -> None:
        """Drops a candidate that a trace has proved wrong."""
        others = self._others(address, candidate)
        if others:
            self._write_candidates(address, others)
        else:
            self.tier.discard("step", address.lookup, "a trace gave another program", False)

    def flush(self) -> None:
        """Waits until everything built so far is stored."""
        while True:
            with self._lock:
                thread = next(iter(self._working), None)
            if thread is None:
                return
            thread.join()

    # ---- loading beforehand --------------------------------------------------------------------

    def preload(self, label: str) -> None:
        """Starts loading, in the background, what the last run of this script used of a step.

        It waits for JAX's backend to be started by somebody else: that is the user's moment.
        """
        with self._lock:
            if label in self._asked_for:
                return
            self._asked_for.add(label)
        # Not a daemon: Python's end must not find a thread inside XLA.
        threading.Thread(
            target=self._preload, args=(label,), name="stepcache preload", daemon=False
        ).start()

    def _preload(self, label: str) -> None:
        wanted: dict[tuple[str, tuple[int, ...]], Future] = {}
        rows = self.history.last_run_of(label)
        for row in rows:
            if row.program and len(wanted) < _PRELOADED_AT_MOST:
                wanted[(row.program, tuple(row.devices))] = Future()
        with self._lock:
            self._preloaded |= wanted
        if not jaxcompat.backends_are_initialized():  # Else the first call may be about to come.
            for lookup in {row.lookup for row in rows if row.lookup}:
                for candidate in self._candidates(lookup)[:1]:
                    _look_at_modules(candidate.used.modules)
        going_on = threading.main_thread().is_alive
        while wanted and going_on() and not jaxcompat.backends_are_initialized():
            time.sleep(_POLL_SECONDS)
        for (digest, numbers), future in wanted.items():
            try:
                if not going_on():
                    raise LookupError("the program has ended")
                by_number = {device.id: device for device in jax.devices()}
                devices = tuple(by_number[number] for number in numbers)
                loaded = self._read_executable(
                    digest, lambda data, devices=devices: storing.load_executable(data, devices)
                )
                if loaded is None:
                    raise LookupError(digest)
                future.set_result(loaded)
            except BaseException as error:
                future.set_exception(error)

    # ---- the ledger ----------------------------------------------------------------------------

    def note(self, event: str, step: str, label: str, **details: Any) -> None:
        """Writes a row of this run."""
        now = self.history.clock()
        rank, processes = 0, 1
        if jaxcompat.backends_are_initialized():
            rank, processes = jax.process_index(), jax.process_count()
        details = {"rank": rank, "processes": processes} | details
        self.history.add(Row(event, now, script_name(), step, label, **details))


def _look_at_modules(names: Iterable[str]) -> None:
    """Reads what will be asked of installed modules, so that it is known when it is asked."""
    for name in names:
        distribution_of(name)
        path = getattr(sys.modules.get(name), "__file__", None)
        if path:
            file_digest(path)


def open_archive(
    directory: Path, max_bytes: int | None, verify: str, min_build_seconds: float
) -> Archive:
    """Opens, and if need be makes, a directory of programs.

    Raises:
        CacheDirectoryError: others can write to it.
    """
    tier = DiskTier(directory, max_bytes)
    history = History(directory / "v1" / "runs", tier.writable)
    return Archive(tier, history, verify, min_build_seconds)
