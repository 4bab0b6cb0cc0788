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
import zlib
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import msgpack

from stepcache import jaxcompat
from stepcache.events import Change
from stepcache.jaxcompat import Runnable, storing
from stepcache.programs.disk.tier import DiskTier
from stepcache.programs.fingerprint.origin import distribution_of, file_digest
from stepcache.programs.history import History, Row, script_name
from stepcache.programs.question import Candidate, Question, Used, agree, differences, digest_facts

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
        self._publishing: list[threading.Thread] = []

    # ---- level 1: without a trace --------------------------------------------------------------

    def answer(self, question: Question) -> Answer:
        """Looks for a candidate. Reads files, and runs nothing of the user's function."""
        if question.base.blames:
            return Answer(unvouched=question.base.blames)
        candidates = self._candidates(question.lookup)
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
        rows = [row for row in self.history.last_run_of(question.label) if row.lookup]
        if not rows or any(row.lookup == question.lookup for row in rows):
            return Answer()
        candidates = self._candidates(rows[-1].lookup)
        if not candidates:
            return Answer()
        found = question.with_used(candidates[0].used)
        changes = differences(candidates[0].told, found.facts)
        return Answer(None, candidates[0].created_time, changes)

    def load(self, candidate: Candidate, question: Question, in_tree: Any) -> Runnable | None:
        """Loads the program of a candidate; None where that cannot be done.

        Args:
            candidate: from `answer`.
            question: the question.
            in_tree: the tree of the call's arguments.
        """
        try:
            devices = tuple(question.devices[position] for position in candidate.devices)
            executable = self._executable(candidate.program, devices)
            if executable is None:
                return None
            tree = storing.decode_tree(candidate.tree, in_tree)
            return storing.assemble(executable, candidate.call, tree, devices)
        except Exception as error:
            self.tier.discard("step", question.lookup, f"{type(error).__name__}: {error}")
            return None

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

    def keep(
        self,
        question: Question,
        digest: str,
        run: Runnable,
        compiled: bool,
        make: Callable[[], Candidate | None],
    ) -> None:
        """Stores a program, in the background.

        Args:
            question: the question that it answers.
            digest: of its executable.
            run: the program.
            compiled: whether XLA made it just now, rather than that it was loaded.
            make: makes the candidate; None where the step cannot be vouched for.
        """

        def publish() -> None:
            try:
                self._publish(question, digest, run, compiled, make)
            except storing.NotStorable as error:
                _log.warning("%s will have to be traced again: %s", question.label, error)
            except Exception:
                _log.exception("stepcache could not store %s", question.label)
            finally:
                with self._lock:
                    self._publishing.remove(thread)

        # Not a daemon: a short script ends when its programs are stored.
        thread = threading.Thread(target=publish, name="stepcache publish", daemon=False)
        with self._lock:
            self._publishing.append(thread)
        thread.start()

    def _publish(
        self,
        question: Question,
        digest: str,
        run: Runnable,
        compiled: bool,
        make: Callable[[], Candidate | None],
    ) -> None:
        if compiled:
            data = storing.serialize_executable(run.xla_executable)
            with self.tier.loading("program", digest):
                storing.load_executable(data, storing.program_devices(run))
                about = {"label": question.label}
                if not self.tier.publish("program", digest, about, data):
                    return
        candidate = make()
        if candidate is not None:
            self._add_candidate(question, candidate)

    def _add_candidate(self, question: Question, candidate: Candidate) -> None:
        others = [
            each for each in self._candidates(question.lookup) if each.facts != candidate.facts
        ]
        self._write_candidates(question, [candidate, *others][:CANDIDATES_KEPT])

    def _write_candidates(self, question: Question, candidates: list[Candidate]) -> None:
        about, payload = pack_candidates(question.label, candidates)
        self.tier.publish("step", question.lookup, about, payload)

    def forget(self, question: Question, candidate: Candidate) -> None:
        """Drops a candidate that a trace has proved wrong."""
        others = [
            each for each in self._candidates(question.lookup) if each.facts != candidate.facts
        ]
        if others:
            self._write_candidates(question, others)
        else:
            self.tier.discard("step", question.lookup, "a trace gave another program", False)

    def flush(self) -> None:
        """Waits until everything built so far is stored."""
        while True:
            with self._lock:
                thread = next(iter(self._publishing), None)
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
        pod = {"rank": rank, "processes": processes}
        self.history.add(Row(event, now, script_name(), step, label, **pod, **details))


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


def make_candidate(
    question: Question,
    used: Used,
    facts: dict[str, str],
    digest: str,
    run: Runnable,
    in_tree: Any,
    captured: Sequence[Any],
    seconds: dict[str, float],
    outline: str,
    created_time: float,
) -> Candidate:
    """Puts down what a later process needs to start a program without a trace.

    Raises:
        NotStorable: a part of it cannot be stored.
    """
    positions = {device: index for index, device in enumerate(question.devices)}
    return Candidate(
        digest,
        digest_facts(facts),
        facts,
        used,
        [positions[device] for device in storing.program_devices(run)],
        storing.pickle_call(run),
        storing.encode_tree(run.out_tree, in_tree),
        [[each.name, each.type, each.size_bytes] for each in captured],
        seconds,
        created_time,
        zlib.compress(outline.encode(), 1),
    )


def pack_candidates(label: str, candidates: Sequence[Candidate]) -> tuple[dict[str, Any], bytes]:
    """Header and payload of a step's entry; the latest candidate comes first."""
    about = {
        "label": label,
        "programs": [each.program for each in candidates],
        "seconds": [round(sum(each.seconds.values()), 4) for each in candidates],
        "built": [each.created_time for each in candidates],
    }
    payload: Any = msgpack.packb(
        [each.packed() for each in candidates], unicode_errors="surrogatepass"
    )
    return about, payload


def unpack_candidates(payload: bytes) -> list[Candidate]:
    """The candidates in the payload of a step's entry.

    Raises:
        ValueError: it is malformed.
    """
    try:
        data: Any = msgpack.unpackb(payload, strict_map_key=False, unicode_errors="surrogatepass")
        if not isinstance(data, list):
            raise ValueError("it is not a list")
        return [Candidate.unpacked(each) for each in data]
    except Exception as error:
        raise ValueError(f"{type(error).__name__}: {error}") from None
