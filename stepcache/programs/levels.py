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
from stepcache.calls.step_spec import Request, StepSpec
from stepcache.events import Captured, Change
from stepcache.fingerprint import shared_traces
from stepcache.fingerprint.recorder import Recording
from stepcache.jaxcompat import storing
from stepcache.programs.archive import Archive, LookupResult
from stepcache.programs.background import beside, builds
from stepcache.programs.build import Program, Stopwatch, build
from stepcache.programs.lookup import Lookup
from stepcache.storage.dependency_record import (
    Address,
    Publication,
    Traced,
    Used,
    differences,
    digest_dependencies,
)

_MUTABLE = ("code", "value", "file", "variable")

_log = logging.getLogger("stepcache")


@dataclass(frozen=True, slots=True)
class Lowered:
    """What was lowered for a program, as processes compare it.

    Attributes:
        outline: the module as text, without locations.
        dependencies: gives what the trace depended on.
        sources: gives the lines of source code, each (file, line) and the innermost first, that a
            line of the outline comes from; none where the step was not traced here.
    """

    outline: str
    dependencies: Callable[[], dict[str, str]]
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
class Resolution:
    """A program, and how it came.

    Attributes:
        program: the program.
        result: what the archive knew.
        untrackable: why a later process will have to trace the step.
        digest: of the executable; empty where it is not, and will not be, on disk.
        address: of the lookup; None where there is no archive.
        publication: what is to be stored, or None.
        lowered: what was lowered, where processes compare it.
        giver: the rank of the process that it came from; None for this one.
        others: of the other processes, where they keep no run log beside this one's: level and
            seconds by stage, by rank.
        changes: what the step depends on, and what has changed since it was last traced here.
        has_compared: whether the processes have compared the host values of the call.
    """

    program: Program
    result: LookupResult
    untrackable: tuple[str, ...] = ()
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
        spec: the step.
        number: tells the step from others of this process.
    """

    def __init__(self, spec: StepSpec, number: int):
        self._spec, self._number = spec, number
        self._lock = threading.Lock()
        self._recording = Recording()
        self._dependencies: dict[str, str] = {}

    def resolve(
        self,
        request: Request,
        archive: Archive | None,
        stopwatch: Stopwatch,
        before_trace: Callable[[LookupResult], None],
        *,
        watch: bool = False,
    ) -> Resolution:
        """A program for a call.

        Args:
            request: the call.
            archive: the programs on disk, or None.
            stopwatch: times the stages.
            before_trace: told what the archive knew, where it does not have the program.
            watch: keep with the program what the step depends on, even without an archive.
        """
        if archive is None and not watch:
            before_trace(LookupResult())
            program, _ = build(self._spec, request, stopwatch)
            return Resolution(program, LookupResult())
        with stopwatch.stage("hash"):
            lookup = self._question(request)
        if lookup is None:
            before_trace(LookupResult())
            program, _ = build(self._spec, request, stopwatch)
            return Resolution(program, LookupResult())
        result = LookupResult()
        if archive is not None:
            with stopwatch.stage("read"):
                result = archive.look_up(lookup)
            if result.record is not None and archive.verify != "before":
                resolution = self.load(request, archive, lookup, result, stopwatch, watch)
                if resolution is not None:
                    return resolution
        before_trace(result)
        return self.trace(request, archive, lookup, result, stopwatch, watch)

    def _question(self, request: Request) -> Lookup | None:
        """What a call depends on; None, and a log, where looking at that fails."""
        try:
            return Lookup(self._spec, request)
        except Exception:
            _log.exception("%s is not looked for on disk, nor stored", self._spec.name)
            return None

    def load(
        self,
        request: Request,
        archive: Archive | None,
        lookup: Lookup,
        result: LookupResult,
        stopwatch: Stopwatch,
        watch: bool,
        data: bytes = b"",
    ) -> Resolution | None:
        """The program of the record in a result, without a trace; None if it does not load.

        Args:
            request: the call.
            archive: the programs on disk, or None.
            lookup: that of the result.
            result: with a record.
            stopwatch: times the stages.
            watch: as for `resolve`.
            data: the executable, if it does not come from the archive.
        """
        record, address = result.record, lookup.address
        assert record is not None
        with stopwatch.stage("load"):
            tree = request.key.signature.tree
            if data:
                run = record.assembled(data, address, tree)
            else:
                run = archive.load(record, address, tree) if archive is not None else None
        if run is None:
            return None
        changes = self._changes_to(record.dependencies)
        captured = tuple(Captured(*each) for each in record.captured)
        seconds = stopwatch.seconds
        program = Program(request.key, run, captured, seconds, 1, lowered=record.program)
        lowered = Lowered(zlib.decompress(record.outline).decode(), lambda: record.dependencies)
        resolution = Resolution(
            program, result, (), record.program, address, None, lowered, changes=changes
        )
        return _watched(resolution, record.dependencies, record.used, watch)

    def trace(
        self,
        request: Request,
        archive: Archive | None,
        lookup: Lookup,
        result: LookupResult,
        stopwatch: Stopwatch,
        watch: bool,
        sharing: Sharing | None = None,
    ) -> Resolution:
        """A program by a trace, and if need be by a compilation.

        What the trace depends on is found out beside the compilation.

        Args:
            request, archive, lookup, result, stopwatch, watch: as for `load`.
            sharing: with other processes; None for a trace that concerns this one alone, where
                the archive is asked for the executable.
        """
        resolution = None
        while resolution is None:
            resolution = self._traced_once(request, archive, lookup, result, stopwatch, sharing)
        return _watched(*resolution, watch)

    def _traced_once(
        self,
        request: Request,
        archive: Archive | None,
        lookup: Lookup,
        result: LookupResult,
        stopwatch: Stopwatch,
        sharing: Sharing | None,
    ) -> tuple[Resolution, dict[str, str], Used] | None:
        """See `trace`; None where a part of it was made with the libraries as they were before."""
        with stopwatch.stage("hash"):
            with self._lock:
                recorded = self._recording
            known = lookup.extend(lookup.used_by(recorded))
            changes = self._changes_to(known.dependencies)
            # What JAX has traced inside the step before is shared where the dependencies are equal.
            values = (self._number, digest_dependencies(known.dependencies))
            own = lookup.own_code()
            shared = shared_traces.begin() if lookup.is_alone() and sharing is None else None
        recording = Recording()
        find = archive.find if archive is not None else lambda digest, load: None
        found = _Found(sharing.find if sharing is not None else find)
        telling: list[Future[Traced]] = []
        lowered: list[Lowered] = []

        @contextlib.contextmanager
        def compiling(staged: jaxcompat.Staged) -> Iterator[None]:
            def note() -> Traced:
                try:
                    traced = self._traced(request, lookup, recording, staged)
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
                dependencies = functools.partial(
                    self._dependencies_of, telling, request, lookup, recording
                )
                sources = functools.partial(jaxcompat.sources_of, staged.lowered)
                outline = jaxcompat.outline(staged.lowered)
                lowered.append(Lowered(outline, functools.partial(dependencies, staged), sources))
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
        program, staged = build(self._spec, request, stopwatch, watched, compiling, is_seen)
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
        if shared and shared_traces.is_outdated(shared, looked=bool(traced.dependencies)):
            return None
        outline = functools.cache(functools.partial(jaxcompat.outline, staged.lowered))
        resolution = Resolution(program, result, traced.untrackable, changes=changes)
        if sharing is not None or archive is not None:
            resolution = _to_store(resolution, lookup.address, found, archive, traced, outline)
        if lowered:
            resolution = replace(resolution, lowered=lowered[0])
        return resolution, traced.dependencies, traced.used

    def _traced(
        self, request: Request, lookup: Lookup, recording: Recording, staged: jaxcompat.Staged
    ) -> Traced:
        """What a trace has told."""
        with self._lock:
            self._recording = recorded = self._recording.with_all_of(recording)
        used = lookup.used_by(recorded)
        dependencies = dict(lookup.extend(used).dependencies)
        untrackable = lookup.untrackable_in(recorded)
        # What the trace itself changed, as a count of its calls, is no change after it.
        self._remember(dependencies | lookup.values_now(used))
        tree = None
        try:
            tree = storing.encode_tree(staged.out_tree, request.key.signature.tree)
        except storing.NotStorable as error:
            untrackable = (*untrackable, str(error))
        return Traced(dependencies, used, None if untrackable else tree, untrackable)

    def _dependencies_of(self, telling: list[Future[Traced]], *about: Any) -> dict[str, str]:
        """What a trace depends on, whether or not that has been looked at yet."""
        return (telling[0].result() if telling else self._traced(*about)).dependencies

    def _untold(self, error: Exception) -> Traced:
        """What is known of a trace where looking at what it depends on raised."""
        _log.error("%s cannot be stored to start without a trace", self._spec.name, exc_info=error)
        why = f"looking at what it depends on raised {type(error).__name__}"
        return Traced({}, Used(), None, (why,))

    def _changes_to(self, dependencies: dict[str, str]) -> tuple[Change, ...]:
        """What has changed in this process since the step was last traced, or loaded."""
        with self._lock:
            before = {
                name: self._dependencies[name]
                for name in self._dependencies
                if name in dependencies
            }
        changes = differences(before, {name: dependencies[name] for name in before})
        self._remember(dependencies)
        return tuple(change for change in changes if change.part in _MUTABLE)

    def _remember(self, dependencies: dict[str, str]) -> None:
        with self._lock:
            self._dependencies = self._dependencies | dependencies

    def forget(self) -> None:
        """Begins anew: what the step depends on has changed, and that is known."""
        with self._lock:
            self._dependencies, self._recording = {}, Recording()


def _to_store(
    resolution: Resolution,
    address: Address,
    found: _Found,
    archive: Archive | None,
    traced: Traced,
    outline: Callable[[], str],
) -> Resolution:
    """With what is to be stored of a program, or why it is not."""
    program = resolution.program
    why = _why_not_stored(program, found, archive)
    if why is not None:
        return replace(resolution, address=address, untrackable=(f"it is not stored: {why}",))
    publication = Publication(
        address, found.digest, program.run, traced, program.captured, program.seconds, outline
    )
    return replace(resolution, address=address, digest=found.digest, publication=publication)


def _why_not_stored(program: Program, found: _Found, archive: Archive | None) -> str | None:
    why = storing.why_not_storable(program.run)
    if why is None and not found.digest:
        why = "JAX had compiled it before"
    seconds = sum(program.seconds.values())
    if why is None and archive is not None and seconds < archive.min_build_seconds:
        why = f"it was built in less than {archive.min_build_seconds} s"
    return why


def _watched(
    resolution: Resolution, dependencies: dict[str, str], used: Used, watch: bool
) -> Resolution:
    """Keeps with a program what it depends on, where that is going to be checked."""
    if not watch:
        return resolution
    return replace(
        resolution, program=replace(resolution.program, dependencies=dependencies, used=used)
    )


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
