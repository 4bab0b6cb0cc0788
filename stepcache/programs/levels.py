"""How a program that is not in memory comes to be: from disk without a trace, from disk after one,
or by a build.
"""

from __future__ import annotations

import contextlib
import functools
import zlib
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from typing import Any

from stepcache import jaxcompat
from stepcache.errors import StaleProgramWarning, warn
from stepcache.events import Captured
from stepcache.jaxcompat import storing
from stepcache.programs.archive import Answer, Archive
from stepcache.programs.background import beside
from stepcache.programs.build import Program, Stopwatch, build
from stepcache.programs.candidate import (
    Address,
    Publication,
    Traced,
    Used,
    differences,
    digest_facts,
)
from stepcache.programs.fingerprint.recording import Recording
from stepcache.programs.question import Question
from stepcache.programs.recipe import Recipe, Request

_MUTABLE = ("code", "value", "file", "variable")


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
        outline: the lowered module as text, where processes compare it.
        giver: the rank of the process that it came from; None for this one.
        others: of the other processes, where they keep no ledger beside this one's: level and
            seconds by stage, by rank.
    """

    program: Program
    answer: Answer
    unvouched: tuple[str, ...] = ()
    digest: str = ""
    address: Address | None = None
    publication: Publication | None = None
    outline: str = ""
    giver: int | None = None
    others: dict[int, tuple[int, dict[str, float]]] = field(default_factory=dict)


class _Found:
    """What there was for a lowered module: on disk, or from another process."""

    def __init__(self, find: storing.Find):
        self._find = find
        self.digest, self.loaded = "", False

    def __call__(self, digest: str, load: Callable[[bytes], Any]) -> Any:
        self.digest = digest
        executable = self._find(digest, load)
        self.loaded = executable is not None
        return executable


class Levels:
    """Brings the programs of one step.

    Args:
        recipe: the step.
        number: tells the step from others of this process.
    """

    def __init__(self, recipe: Recipe, number: int):
        self._recipe, self._number = recipe, number
        self._recording = Recording()
        self._facts: dict[str, str] = {}
        self._warned = False

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
            question = Question(self._recipe, request)
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
        self._notice(candidate.told)
        captured = tuple(Captured(*each) for each in candidate.captured)
        program = Program(request.key, run, captured, stopwatch.seconds, level=1)
        outline = zlib.decompress(candidate.outline).decode()
        brought = Brought(program, answer, (), candidate.program, address, None, outline)
        return _watched(brought, candidate.told, candidate.used, watch)

    def trace(
        self,
        request: Request,
        archive: Archive | None,
        question: Question,
        answer: Answer,
        stopwatch: Stopwatch,
        watch: bool,
        find: storing.Find | None = None,
        tell: Callable[[Traced], None] = lambda traced: None,
    ) -> Brought:
        """A program by a trace, and if need be by a compilation.

        What the trace depends on is found out beside the compilation.

        Args:
            request, archive, question, answer, stopwatch, watch: as for `load`.
            find: looks for the executable of a lowered module; by default in the archive. Where it
                is given, what was built can be handed to other processes.
            tell: is told what the trace has told, as soon as that is known, in another thread.
        """
        with stopwatch.stage("hash"):
            known = question.extend(question.used_by(self._recording))
            self._notice(known.facts)
            # Equal facts may share what JAX has traced inside the step before; others must not.
            token = jaxcompat.ValueToken((self._number, digest_facts(known.facts)))
        recording = Recording()
        together = find is not None
        if find is None and archive is not None:
            find = archive.find
        found = _Found(find) if find is not None else None
        telling: list[Future[Traced]] = []

        @contextlib.contextmanager
        def compiling(staged: jaxcompat.Staged) -> Iterator[None]:
            def note() -> Traced:
                traced = self._traced(request, question, recording, staged)
                tell(traced)
                return traced

            hooked = storing.compiling_through(found) if found is not None else nullcontext()
            with hooked, beside(note) as future:
                telling.append(future)
                yield

        watched = _both(recording, jaxcompat.recording_context(token))
        program, staged = build(self._recipe, request, stopwatch, watched, compiling)
        if found is not None and found.loaded:
            program.seconds["load"] = program.seconds.pop("compile")
            program = replace(program, level=2)
        traced = telling[0].result()
        outline = functools.cache(functools.partial(jaxcompat.outline, staged.lowered))
        brought = Brought(program, answer, traced.unvouched)
        if found is not None:
            brought = _to_store(brought, question.address, found, archive, traced, outline)
        if together:
            brought = replace(brought, outline=outline())
        return _watched(brought, traced.facts, traced.used, watch)

    def _traced(
        self, request: Request, question: Question, recording: Recording, staged: jaxcompat.Staged
    ) -> Traced:
        """What a trace has told."""
        self._recording.add_from(recording)
        used = question.used_by(self._recording)
        facts = dict(question.extend(used).facts)
        unvouched = question.blames_of(self._recording)
        tree = None
        try:
            tree = storing.encode_tree(staged.out_tree, request.key.signature.tree)
        except storing.NotStorable as error:
            unvouched = (*unvouched, str(error))
        return Traced(facts, used, None if unvouched else tree, unvouched)

    def _notice(self, facts: dict[str, str]) -> None:
        """Warns, once, of what changed in this process since the step was first traced."""
        before = {name: self._facts[name] for name in self._facts if name in facts}
        changed = differences(before, {name: facts[name] for name in before})
        # What lies in a container is often the trace's own doing: a list that counts traces.
        changed = tuple(
            change
            for change in changed
            if change.part in _MUTABLE and "[" not in change.path and " of " not in change.before
        )
        if changed and not self._warned:
            self._warned = True
            warn(
                f"{self._recipe.name} depends on what changed after it was traced; programs built "
                "before go on as they were, until step.clear_cache():\n  "
                + "\n  ".join(map(str, changed)),
                StaleProgramWarning,
            )
        self._facts |= facts

    def forget(self) -> None:
        """Begins anew: what the step depends on has changed, and that is known."""
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
def _both(*contexts: Any) -> Iterator[None]:
    with contextlib.ExitStack() as stack:
        for context in contexts:
            stack.enter_context(context)
        yield
