"""How a program that is not in memory comes to be: from disk without a trace, from disk after one,
or by a build.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import threading
import zlib
from collections.abc import Callable, Hashable, Iterator
from concurrent.futures import Future
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from types import CodeType
from typing import Any

from stepcache import jaxcompat
from stepcache.calls.step_spec import Recipe, Request
from stepcache.events import Captured, Change
from stepcache.fingerprint import shared_traces
from stepcache.fingerprint.recorder import Recording
from stepcache.jaxcompat import storing
from stepcache.programs.archive import Answer, Archive
from stepcache.programs.background import beside, builds
from stepcache.programs.build import Program, Stopwatch, build
from stepcache.programs.question import Question
from stepcache.storage.dependency_record import (
    Address,
    Publication,
    Traced,
    Used,
    differences,
    digest_facts,
)

_MUTABLE = ("code", "value", "file", "variable")

_log = logging.getLogger("stepcache")


@dataclass(frozen=True, slots=True)
class Lowered:
    """What was lowered for a program, as processes compare it.

    Attributes:
        outline: the module as text, without locations.
        facts: gives what the trace depended on.
        sources: gives the lines of source code, each (file, line) and the innermost first, that a
            line of the outline comes from; none where the step was not traced here.
    """

    outline: str
    facts: Callable[[], dict[str, str]]
    sources: Callable[[int], list[tuple[str, int]]] = lambda line: []


def _keep(value: Any) -> None:
    """Does nothing with a value."""


@dataclass(frozen=True, slots=True)
class Sharing:
    """How a trace is shared with other processes.

    Attributes:
        find: looks for the executable of a lowered module.
        compare: is given what was lowered, before XLA compiles it.
        tell: is given what the trace depended on, as soon as that is known, in another thread.
    """

    find: storing.Find
    compare: Callable[[Lowered], None] = _keep
    tell: Callable[[Traced], None] = _keep


@dataclass(frozen=True, slots=True)
class Brought:
    """A program, and how it came.

    Attributes:
        program: the program.
        answer: what the archive knew.
        unvouched: why a later process will have to trace the step.
        digest: of the executable; empty where it is not, and will not be, on disk.
        address: of the question; None where there is no archive.
        publication: what is to be stored, or None.
        lowered: what was lowered, where processes compare it.
        giver: the rank of the process that it came from; None for this one.
        others: of the other processes, where they keep no ledger beside this one's: level and
            seconds by stage, by rank.
        changes: what the step depends on, and what has changed since it was last traced here.
        has_compared: whether the processes have compared the host values of the call.
    """

    program: Program
    answer: Answer
    unvouched: tuple[str, ...] = ()
    digest: str = ""
    address: Address | None = None
    publication: Publication | None = None
    lowered: Lowered | None = None
    giver: int | None = None
    others: dict[int, tuple[int, dict[str, float]]] = field(default_factory=dict)
    changes: tuple[Change, ...] = ()
    has_compared: bool = True


class _Found:
    """What there was for a lowered module: on disk, or from another process.

    Attributes:
        to_xla: called when XLA is about to take over, which leaves Python to others.
    """

    def __init__(self, find: storing.Find):
        self._find = find
        self.digest, self.loaded = "", False
        self.to_xla: Callable[[], None] = lambda: None

    def __call__(self, digest: str, load: Callable[[bytes], Any]) -> Any:
        def load_by_xla(data: bytes) -> Any:
            self.to_xla()
            return load(data)

        self.digest = digest
        executable = self._find(digest, load_by_xla)
        self.loaded = executable is not None
        self.to_xla()
        return executable


class Levels:
    """Brings the programs of one step.

    Args:
        recipe: the step.
        number: tells the step from others of this process.
    """

    def __init__(self, recipe: Recipe, number: int):
        self._recipe, self._number = recipe, number
        self._lock = threading.Lock()
        self._recording = Recording()
        self._facts: dict[str, str] = {}

    def bring(
        self,
        request: Request,
        archive: Archive | None,
        stopwatch: Stopwatch,
        before_trace: Callable[[Answer], None],
        *,
        watch: bool = False,
    ) -> Brought:
        """A program for a call.

        Args:
            request: the call.
            archive: the programs on disk, or None.
            stopwatch: times the stages.
            before_trace: told what the archive knew, where it does not have the program.
            watch: keep with the program what the step depends on, even without an archive.
        """
        if archive is None and not watch:
            before_trace(Answer())
            program, _ = build(self._recipe, request, stopwatch)
            return Brought(program, Answer())
        with stopwatch.stage("hash"):
            question = self._question(request)
        if question is None:
            before_trace(Answer())
            program, _ = build(self._recipe, request, stopwatch)
            return Brought(program, Answer())
        answer = Answer()
        if archive is not None:
            with stopwatch.stage("read"):
                answer = archive.answer(question)
            if answer.candidate is not None and archive.verify != "before":
                brought = self.load(request, archive, question, answer, stopwatch, watch)
                if brought is not None:
                    return brought
        before_trace(answer)
        return self.trace(request, archive, question, answer, stopwatch, watch)

    def _question(self, request: Request) -> Question | None:
        """What a call depends on; None, and a log, where looking at that fails."""
        try:
            return Question(self._recipe, request)
        except Exception:
            _log.exception("%s is not looked for on disk, nor stored", self._recipe.name)
            return None

    def load(
        self,
        request: Request,
        archive: Archive | None,
        question: Question,
        answer: Answer,
        stopwatch: Stopwatch,
        watch: bool,
        data: bytes = b"",
    ) -> Brought | None:
        """The program of the candidate in an answer, without a trace; None if it does not load.

        Args:
            request: the call.
            archive: the programs on disk, or None.
            question: that of the answer.
            answer: with a candidate.
            stopwatch: times the stages.
            watch: as for `bring`.
            data: the executable, if it does not come from the archive.
        """
        candidate, address = answer.candidate, question.address
        assert candidate is not None
        with stopwatch.stage("load"):
            tree = request.key.signature.tree
            if data:
                run = candidate.assembled(data, address, tree)
            else:
                run = archive.load(candidate, address, tree) if archive is not None else None
        if run is None:
            return None
        changes = self._changes_to(candidate.told)
        captured = tuple(Captured(*each) for each in candidate.captured)
        seconds = stopwatch.seconds
        program = Program(request.key, run, captured, seconds, 1, lowered=candidate.program)
        lowered = Lowered(zlib.decompress(candidate.outline).decode(), lambda: candidate.told)
        brought = Brought(
            program, answer, (), candidate.program, address, None, lowered, changes=changes
        )
        return _watched(brought, candidate.told, candidate.used, watch)

    def trace(
        self,
        request: Request,
        archive: Archive | None,
        question: Question,
        answer: Answer,
        stopwatch: Stopwatch,
        watch: bool,
        sharing: Sharing | None = None,
    ) -> Brought:
        """A program by a trace, and if need be by a compilation.

        What the trace depends on is found out beside the compilation.

        Args:
            request, archive, question, answer, stopwatch, watch: as for `load`.
            sharing: with other processes; None for a trace that concerns this one alone, where
                the archive is asked for the executable.
        """
        brought = None
        while brought is None:
            brought = self._traced_once(request, archive, question, answer, stopwatch, sharing)
        return _watched(*brought, watch)

    def _traced_once(
        self,
        request: Request,
        archive: Archive | None,
        question: Question,
        answer: Answer,
        stopwatch: Stopwatch,
        sharing: Sharing | None,
    ) -> tuple[Brought, dict[str, str], Used] | None:
        """See `trace`; None where a part of it was made with the libraries as they were before."""
        with stopwatch.stage("hash"):
            with self._lock:
                recorded = self._recording
            known = question.extend(question.used_by(recorded))
            changes = self._changes_to(known.facts)
            # What JAX has traced inside the step before is shared where the facts are equal.
            values = (self._number, digest_facts(known.facts))
            own = question.own_code()
            shared = shared_traces.begin() if question.is_alone() and sharing is None else None
        recording = Recording()
        find = archive.find if archive is not None else lambda digest, load: None
        found = _Found(sharing.find if sharing is not None else find)
        telling: list[Future[Traced]] = []
        lowered: list[Lowered] = []

        @contextlib.contextmanager
        def compiling(staged: jaxcompat.Staged) -> Iterator[None]:
            def note() -> Traced:
                try:
                    traced = self._traced(request, question, recording, staged)
                except Exception as error:
                    traced = self._untold(error)
                if sharing is not None:
                    sharing.tell(traced)
                return traced

            def to_xla() -> None:
                if not telling:
                    in_xla.enter_context(builds.in_xla())
                    telling.append(in_xla.enter_context(beside(note)))

            if sharing is not None:
                facts = functools.partial(self._facts_of, telling, request, question, recording)
                sources = functools.partial(jaxcompat.sources_of, staged.lowered)
                outline = jaxcompat.outline(staged.lowered)
                lowered.append(Lowered(outline, functools.partial(facts, staged), sources))
                sharing.compare(lowered[0])
            with contextlib.ExitStack() as in_xla:
                found.to_xla = to_xla
                with storing.compiling_through(found) if storing.CAN_STORE else nullcontext():
                    if not storing.CAN_STORE:
                        to_xla()
                    yield
                to_xla()  # JAX had compiled it before.

        watched = _watched_trace(recording, own if shared else None, shared or values)
        is_seen = shared_traces.was_lowered if shared else lambda staged: False
        program, staged = build(self._recipe, request, stopwatch, watched, compiling, is_seen)
        program = replace(program, lowered=found.digest)
        if found.loaded:
            program.seconds["load"] = program.seconds.pop("compile")
            program = replace(program, level=2)
        try:
            traced = telling[0].result(timeout=0)
        except Exception as error:
            if sharing is not None:
                raise  # The other processes were not told.
            traced = self._untold(error)
        if shared and shared_traces.is_outdated(shared, looked=bool(traced.facts)):
            return None
        outline = functools.cache(functools.partial(jaxcompat.outline, staged.lowered))
        brought = Brought(program, answer, traced.unvouched, changes=changes)
        if sharing is not None or archive is not None:
            brought = _to_store(brought, question.address, found, archive, traced, outline)
        if lowered:
            brought = replace(brought, lowered=lowered[0])
        return brought, traced.facts, traced.used

    def _traced(
        self, request: Request, question: Question, recording: Recording, staged: jaxcompat.Staged
    ) -> Traced:
        """What a trace has told."""
        with self._lock:
            self._recording = recorded = self._recording.with_all_of(recording)
        used = question.used_by(recorded)
        facts = dict(question.extend(used).facts)
        unvouched = question.blames_of(recorded)
        # What the trace itself changed, as a count of its calls, is no change after it.
        self._remember(facts | question.values_now(used))
        tree = None
        try:
            tree = storing.encode_tree(staged.out_tree, request.key.signature.tree)
        except storing.NotStorable as error:
            unvouched = (*unvouched, str(error))
        return Traced(facts, used, None if unvouched else tree, unvouched)

    def _facts_of(self, telling: list[Future[Traced]], *about: Any) -> dict[str, str]:
        """What a trace depends on, whether or not that has been looked at yet."""
        return (telling[0].result() if telling else self._traced(*about)).facts

    def _untold(self, error: Exception) -> Traced:
        """What is known of a trace where looking at what it depends on raised."""
        _log.error(
            "%s cannot be stored to start without a trace", self._recipe.name, exc_info=error
        )
        why = f"looking at what it depends on raised {type(error).__name__}"
        return Traced({}, Used(), None, (why,))

    def _changes_to(self, facts: dict[str, str]) -> tuple[Change, ...]:
        """What has changed in this process since the step was last traced, or loaded."""
        with self._lock:
            before = {name: self._facts[name] for name in self._facts if name in facts}
        changes = differences(before, {name: facts[name] for name in before})
        self._remember(facts)
        return tuple(change for change in changes if change.part in _MUTABLE)

    def _remember(self, facts: dict[str, str]) -> None:
        with self._lock:
            self._facts = self._facts | facts

    def forget(self) -> None:
        """Begins anew: what the step depends on has changed, and that is known."""
        with self._lock:
            self._facts, self._recording = {}, Recording()


def _to_store(
    brought: Brought,
    address: Address,
    found: _Found,
    archive: Archive | None,
    traced: Traced,
    outline: Callable[[], str],
) -> Brought:
    """With what is to be stored of a program, or why it is not."""
    program = brought.program
    why = _why_not_stored(program, found, archive)
    if why is not None:
        return replace(brought, address=address, unvouched=(f"it is not stored: {why}",))
    publication = Publication(
        address, found.digest, program.run, traced, program.captured, program.seconds, outline
    )
    return replace(brought, address=address, digest=found.digest, publication=publication)


def _why_not_stored(program: Program, found: _Found, archive: Archive | None) -> str | None:
    why = storing.why_not_storable(program.run)
    if why is None and not found.digest:
        why = "JAX had compiled it before"
    seconds = sum(program.seconds.values())
    if why is None and archive is not None and seconds < archive.min_build_seconds:
        why = f"it was built in less than {archive.min_build_seconds} s"
    return why


def _watched(brought: Brought, facts: dict[str, str], used: Used, watch: bool) -> Brought:
    """Keeps with a program what it depends on, where that is going to be checked."""
    if not watch:
        return brought
    return replace(brought, program=replace(brought.program, facts=facts, used=used))


@contextlib.contextmanager
def _watched_trace(
    recording: Recording, own: set[CodeType] | None, token: tuple[Hashable, ...]
) -> Iterator[None]:
    """Records a trace.

    Args:
        recording: what it used.
        own: the code of a step that shares traces with others; None where it does not.
        token: tells the traces that it may share from others.
    """
    complete = None
    try:
        with recording, jaxcompat.recording_context(jaxcompat.ValueToken(token)):
            yield
        complete = recording
    finally:
        if own is not None:
            recording.entered |= shared_traces.end(complete, own)
