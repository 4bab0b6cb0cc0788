"""How a program that is not in memory comes to be: from disk without a trace, from disk after one,
or by a build; and how one that came without a trace is checked afterwards.
"""

from __future__ import annotations

import contextlib
import difflib
import sys
import threading
import time
import weakref
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import jax
from jax.sharding import Mesh

from stepcache import jaxcompat
from stepcache.errors import StaleProgramWarning, warn
from stepcache.events import Captured, Change
from stepcache.jaxcompat import storing
from stepcache.programs.archive import Answer, Archive, make_candidate
from stepcache.programs.build import Program, Recipe, Stopwatch, build, trace
from stepcache.programs.fingerprint.recording import Recording
from stepcache.programs.key import Key
from stepcache.programs.question import Candidate, Question, Used, differences, digest_facts
from stepcache.programs.signature import Call, Leaf

_SWITCH_SECONDS = 0.00005
_POLL_SECONDS = 0.005
_MUTABLE = ("code", "value", "file", "variable")


@dataclass(frozen=True, slots=True)
class Wanted:
    """What a program is needed for.

    Attributes:
        key: its key.
        call: the call, as it came.
        leaves: the leaves of the call where the session places them.
        mesh: the session's mesh, or None.
    """

    key: Key
    call: Call
    leaves: tuple[Leaf, ...]
    mesh: Mesh | None


@dataclass(frozen=True, slots=True)
class Brought:
    """A program, and how it came.

    Attributes:
        program: the program.
        answer: what the archive knew.
        unvouched: why a later process will have to trace the step.
        digest: of the executable; empty where it is not on disk.
        question: what was asked; None where there is no archive.
    """

    program: Program
    answer: Answer
    unvouched: tuple[str, ...] = ()
    digest: str = ""
    question: Question | None = None


class _Found:
    """What the archive had for a lowered module."""

    def __init__(self, archive: Archive):
        self._archive = archive
        self.digest, self.loaded = "", False

    def __call__(self, digest: str, load: Callable[[bytes], Any]) -> Any:
        self.digest = digest
        executable = self._archive.find(digest, load)
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
        wanted: Wanted,
        archive: Archive | None,
        stopwatch: Stopwatch,
        before_trace: Callable[[Answer], None],
        *,
        watch: bool = False,
    ) -> Brought:
        """A program for a call.

        Args:
            wanted: what it is needed for.
            archive: the programs on disk, or None.
            stopwatch: times the stages.
            before_trace: told what the archive knew, where it does not have the program.
            watch: keep with the program what the step depends on, even without an archive.
        """
        if archive is None and not watch:
            before_trace(Answer())
            program, _ = self._build(wanted, stopwatch)
            return Brought(program, Answer())
        with stopwatch.stage("hash"):
            question = Question(self._recipe, wanted.key, wanted.call.paths)
        answer = Answer()
        if archive is not None:
            with stopwatch.stage("read"):
                answer = archive.answer(question)
            if answer.candidate is not None and archive.verify != "before":
                with stopwatch.stage("load"):
                    program = self._load(wanted, archive, question, answer.candidate, stopwatch)
                if program is not None:
                    self._notice(answer.candidate.told)
                    if watch:
                        program = _watched(program, answer.candidate.told, answer.candidate.used)
                    return Brought(program, answer, (), answer.candidate.program, question)
        before_trace(answer)
        return self._trace(wanted, archive, question, answer, stopwatch, watch)

    def _load(
        self,
        wanted: Wanted,
        archive: Archive,
        question: Question,
        candidate: Candidate,
        stopwatch: Stopwatch,
    ) -> Program | None:
        run = archive.load(candidate, question, wanted.key.signature.tree)
        if run is None:
            return None
        captured = tuple(Captured(*each) for each in candidate.captured)
        return Program(wanted.key, run, captured, stopwatch.seconds, level=1)

    def _build(
        self,
        wanted: Wanted,
        stopwatch: Stopwatch,
        watched: contextlib.AbstractContextManager | None = None,
        compiling: contextlib.AbstractContextManager | None = None,
    ) -> tuple[Program, jaxcompat.Staged]:
        return build(
            self._recipe,
            wanted.key,
            wanted.call,
            wanted.leaves,
            wanted.mesh,
            stopwatch,
            watched or contextlib.nullcontext(),
            compiling or contextlib.nullcontext(),
        )

    def _trace(
        self,
        wanted: Wanted,
        archive: Archive | None,
        question: Question,
        answer: Answer,
        stopwatch: Stopwatch,
        watch: bool,
    ) -> Brought:
        with stopwatch.stage("hash"):
            known = question.extend(question.used_by(self._recording))
            self._notice(known.facts)
            # Equal facts may share what JAX has traced inside the step before; others must not.
            token = jaxcompat.ValueToken((self._number, digest_facts(known.facts)))
        recording = Recording()
        found = _Found(archive) if archive is not None else None
        program, staged = self._build(
            wanted,
            stopwatch,
            _both(recording, jaxcompat.recording_context(token)),
            storing.compiling_through(found) if found is not None else None,
        )
        with stopwatch.stage("hash"):
            self._recording.add_from(recording)
            used = question.used_by(self._recording)
            facts = dict(question.extend(used).facts)
            unvouched = question.blames_of(self._recording)
        if watch:
            program = _watched(program, facts, used)
        if found is None or archive is None:
            return Brought(program, answer, unvouched, "", question)
        if found.loaded:
            program.seconds["load"] = program.seconds.pop("compile")
            program = replace(program, level=2)
        why = storing.why_not_storable(program.run)
        if why is None and not found.digest:
            why = "JAX had compiled it before"
        if why is None and sum(program.seconds.values()) < archive.min_build_seconds:
            why = f"it was built in less than {archive.min_build_seconds} s"
        if why is not None:
            return Brought(program, answer, (f"it is not stored: {why}",), "", question)
        brought = Brought(program, answer, unvouched, found.digest, question)
        self._keep(archive, brought, wanted, staged, used, facts)
        return brought

    def _keep(
        self,
        archive: Archive,
        brought: Brought,
        wanted: Wanted,
        staged: jaxcompat.Staged,
        used: Used,
        facts: dict[str, str],
    ) -> None:
        program, question = brought.program, brought.question
        assert question is not None

        def make() -> Candidate | None:
            if brought.unvouched:
                return None
            return make_candidate(
                question,
                used,
                facts,
                brought.digest,
                program.run,
                wanted.key.signature.tree,
                program.captured,
                dict(program.seconds),
                staged.outline(),
                archive.history.clock(),
            )

        archive.keep(
            question,
            brought.digest,
            program.run,
            program.level == 3,
            make,
        )

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

    # ---- checking afterwards -------------------------------------------------------------------

    def changes_since_trace(self, program: Program, wanted: Wanted) -> tuple[Change, ...]:
        """What a program's step depends on that is not as it was when it was traced."""
        if program.facts is None or program.used is None:
            return ()
        question = Question(self._recipe, wanted.key, wanted.call.paths)
        return differences(program.facts, dict(question.with_used(program.used).facts))

    def retrace(
        self, program: Program, candidate: Candidate, wanted: Wanted
    ) -> tuple[Change, ...] | None:
        """Traces and lowers a step whose program was loaded, as if nothing were known of it.

        Returns:
            What differs from the loaded program; None where it is the same.
        """
        token = jaxcompat.ValueToken((self._number, "retrace", time.monotonic()))
        found: list[str] = []

        def note(digest: str, load: Any) -> None:
            found.append(digest)
            raise _DigestKnown

        with jaxcompat.tracing_context(wanted.mesh), jaxcompat.recording_context(token):
            try:
                staged = trace(self._recipe, wanted.call, wanted.leaves, wanted.mesh)
                staged.lower()
                with storing.compiling_through(note), contextlib.suppress(_DigestKnown):
                    staged.compile()
            except Exception as error:
                text = f"{type(error).__name__}: {error}"
                return (Change("code", self._recipe.name, "a program", text, "tracing it raised"),)
        if found == [candidate.program] and staged.out_tree == program.run.out_tree:
            return None
        if staged.out_tree != program.run.out_tree:
            sides = (str(program.run.out_tree), str(staged.out_tree))
            return (Change("code", "the tree of its outputs", *sides),)
        before = zlib.decompress(candidate.outline).decode()
        return _first_difference(before, staged.outline()) or (
            Change("environment", "what XLA is given", candidate.program[:12], found[0][:12]),
        )


def _watched(program: Program, facts: dict[str, str], used: Used) -> Program:
    return replace(program, facts=facts, used=used)


class _DigestKnown(Exception):
    """The digest of what XLA would be given is known, and that is all that was wanted."""


@contextlib.contextmanager
def _both(*contexts: Any) -> Iterator[None]:
    with contextlib.ExitStack() as stack:
        for context in contexts:
            stack.enter_context(context)
        yield


def _first_difference(before: str, after: str) -> tuple[Change, ...]:
    """The first lines in which two lowered modules differ."""
    old, new = before.splitlines(), after.splitlines()
    for old_line, new_line in zip(old, new, strict=False):
        if old_line != new_line:
            return (Change("code", "in the lowered program", old_line.strip(), new_line.strip()),)
    for line in difflib.unified_diff(old, new, n=0, lineterm=""):
        if line[:1] in "+-" and not line.startswith(("+++", "---")):
            sides = (line[1:].strip(), "absent") if line[0] == "-" else ("absent", line[1:].strip())
            return (Change("code", "in the lowered program", *sides),)
    return ()


def in_background(check: Callable[[], None]) -> threading.Thread:
    """Runs a check beside the steps of this thread, and out of their way."""
    settings = jaxcompat.carried_settings()

    def run() -> None:
        with settings, _standing_back():
            check()

    thread = threading.Thread(target=run, name="stepcache verify", daemon=False)
    thread.start()
    return thread


def when_ready(outputs: Any, started: float, tell: Callable[[float], None]) -> None:
    """Tells how many seconds it took until the outputs of a program were there.

    One output stands for all, and is held weakly: a call that it is donated to frees it.
    """
    leaves = [each for each in jax.tree.leaves(outputs) if isinstance(each, jax.Array)]
    if not leaves:
        return
    last: Any = leaves[-1]
    output = weakref.ref(last)  # Of a step with a carry, what comes after it.

    def watch() -> None:
        while threading.main_thread().is_alive():
            array = output()
            if array is None or array.is_deleted():
                return
            if array.is_ready():
                tell(round(time.perf_counter() - started, 4))
                return
            del array
            time.sleep(_POLL_SECONDS)

    threading.Thread(target=watch, name="stepcache first execution", daemon=False).start()


_RUN_SECONDS = 0.0005
_BUSY_SECONDS = 0.00015
_PAUSE_SECONDS = 0.001
_LONGEST_PAUSE_SECONDS = 0.005
_switching = threading.Lock()
_standing_back_now = 0
_usual_seconds = 0.0


@contextlib.contextmanager
def _standing_back() -> Iterator[None]:
    """Has this thread give way whenever another one wants Python's lock.

    A step that returns thousands of arrays takes and releases the lock for each, and would wait
    for it as often. So this thread looks, every so often, whether it gets the lock back at once;
    if not, somebody else is at work, and it pauses until nobody is, or for the longest pause.
    """
    global _standing_back_now, _usual_seconds
    with _switching:
        _standing_back_now += 1
        if _standing_back_now == 1:
            _usual_seconds = sys.getswitchinterval()
            sys.setswitchinterval(min(_usual_seconds, _SWITCH_SECONDS))
    until = 0.0

    def give_way(frame: Any, event: Any, argument: Any) -> None:
        nonlocal until
        now = began = time.perf_counter()
        if now < until:
            return
        while now - began < _LONGEST_PAUSE_SECONDS:
            asked = time.perf_counter()
            time.sleep(1e-6)
            now = time.perf_counter()
            if now - asked < _BUSY_SECONDS:
                break
            time.sleep(_PAUSE_SECONDS)
        until = now + _RUN_SECONDS

    sys.setprofile(give_way)
    try:
        yield
    finally:
        sys.setprofile(None)
        with _switching:
            _standing_back_now -= 1
            if not _standing_back_now:
                sys.setswitchinterval(_usual_seconds)
