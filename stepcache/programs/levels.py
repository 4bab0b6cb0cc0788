"""How a program that is not in memory comes to be: from disk without a trace, from disk after one,
or by a build.
"""

from __future__ import annotations

import functools
import logging
import threading
import zlib
from collections.abc import Callable
from dataclasses import replace

from stepcache import jaxcompat
from stepcache._changes import Undoing
from stepcache.calls.step_spec import Request, StepSpec
from stepcache.events import Captured, Change
from stepcache.fingerprint import shared_traces
from stepcache.fingerprint.dependencies import NAMES_OF, differences, digest_dependencies
from stepcache.fingerprint.findings import Findings
from stepcache.fingerprint.installed_packages import kept_for_this_thread
from stepcache.fingerprint.shared_traces import SharedTraces
from stepcache.jaxcompat import storing
from stepcache.programs.archive import Archive, Stage
from stepcache.programs.build import Program, build
from stepcache.programs.left_by_traces import (
    Left,
    as_left,
    but_for_traces,
    changed_by,
    moved_on,
    note_changed,
)
from stepcache.programs.lookup import NEVER_STORED, Lookup, LookupResult
from stepcache.programs.recorded_trace import RecordedTrace
from stepcache.programs.remaking import captured_numbers
from stepcache.programs.resolution import Lowered, MissedCall, Resolution, Sharing
from stepcache.storage.dependency_record import Address, Publication, Traced, Used

_MUTABLE = ("code", "value", "file", "variable")
_WAS_WRONG = "a program with the same dependencies was stale: something matters that is not seen"

_log = logging.getLogger("stepcache")


class Levels:
    """Resolves calls of one step in one process: from disk, or by a trace.

    Args:
        spec: the step.

    Attributes:
        remade: the captured numbers that tell it from the step made before from its function; None
            before its first call.
    """

    def __init__(self, spec: StepSpec):
        self._spec = spec
        self.remade: tuple[Change, ...] | None = None
        self._lock = threading.Lock()
        self._dependencies: dict[str, str] = {}
        self._may_share = True  # Whether all traces so far could be shared with other steps.
        self._left: Left = {}  # By the traces of programs that were loaded.
        self._record_anew()

    def resolve(self, call: MissedCall) -> Resolution:
        """A program for a call."""
        archive, lookup, result = call.archive, None, LookupResult()
        if archive is not None or call.watch:
            with call.stopwatch.stage("hash"):
                lookup = self._lookup(call.request)
        if lookup is None:
            call.before_trace(result)
            program, _ = build(self._spec, call.request, call.stopwatch)
            return Resolution(program, result)
        if self.remade is None:
            self.remade = captured_numbers(lookup.address.label, lookup.base.dependencies)
        if archive is not None:
            with call.stopwatch.stage("read"):
                finding, result = self.look_up(lookup, archive, call.stopwatch.stage)
            if result.record is not None and archive.verify != "before":
                resolution = self.load(call, finding, result)
                if resolution is not None:
                    return resolution
        call.before_trace(result)
        return self.trace(call, lookup, result)

    def look_up(
        self, lookup: Lookup, archive: Archive, stage: Stage | None
    ) -> tuple[Lookup, LookupResult]:
        """What the archive has for a lookup, and the lookup that finds it.

        Where there is nothing, it is asked again as if what was loaded had been traced.
        """
        result = archive.look_up(lookup, stage)
        left = {} if result.record is not None else archive.left_for(lookup) | self._left
        if left:
            after = lookup.after(left)
            found = archive.look_up(after, stage)
            if found.record is not None:
                with self._lock:
                    self._left = left | self._left
                return after, replace(found, assumes=True)
        return lookup, result

    def _lookup(self, request: Request) -> Lookup | None:
        """What a call depends on; None, and a log line, if that cannot be determined."""
        try:
            return Lookup(self._spec, request)
        except Exception:
            _log.exception("%s is not looked for on disk, nor stored", self._spec.name)
            return None

    def load(
        self, call: MissedCall, lookup: Lookup, result: LookupResult, data: bytes = b""
    ) -> Resolution | None:
        """The program of the record in a result, without a trace; None if it does not load.

        Args:
            call: the call.
            lookup: that of the result.
            result: with a record.
            data: the executable, if it does not come from the archive.
        """
        record, address = result.record, lookup.address
        archive, seconds, stage = call.archive, call.stopwatch.seconds, call.stopwatch.stage
        assert record is not None
        with stage("load"):
            trees = call.request.key.signature.tree, lookup.held_objects()
            if data:
                run = record.assembled(data, address, *trees)
            else:
                run = archive.load(record, address, *trees, stage) if archive is not None else None
        if run is None:
            return None
        left = {name: (record.dependencies[name], to) for name, to in record.left.items()}
        with self._lock:
            self._left = self._left | left
        if archive is not None:
            archive.remember_left(left, lookup)
        _, changes = self._changes_to(record.dependencies)
        captured = tuple(Captured(*each) for each in record.captured)
        program = Program(call.request.key, run, captured, seconds, 1, lowered=record.program)
        lowered = Lowered(zlib.decompress(record.outline).decode(), lambda: record.dependencies)
        resolution = Resolution(
            program, result, (), record.program, address, None, lowered, changes=changes
        )
        return _watched(resolution, record.dependencies, record.used, call.watch)

    def trace(
        self,
        call: MissedCall,
        lookup: Lookup,
        result: LookupResult,
        sharing: Sharing | None = None,
    ) -> Resolution:
        """A program by a trace, and if need be by a compilation.

        What the trace depends on is found out beside the compilation.

        Args:
            call, lookup, result: as for `load`.
            sharing: with other processes; None for a trace that concerns this one alone, where
                the archive is asked for the executable.
        """
        resolution = None
        while resolution is None:
            with Undoing() as undoing, undoing:
                resolution = self._traced_once(undoing, call, lookup, result, sharing)
            result = replace(result, found={})  # What was found then is of before the first trace.
        return _watched(*resolution, call.watch)

    def _traced_once(
        self,
        undoing: Undoing,
        call: MissedCall,
        lookup: Lookup,
        result: LookupResult,
        sharing: Sharing | None,
    ) -> tuple[Resolution, dict[str, str], Used] | None:
        """See `trace`; None if it shared a trace made before an object of JAX was replaced."""
        request, archive, stopwatch = call.request, call.archive, call.stopwatch
        with stopwatch.stage("hash"):
            known, changes = self._known_before(lookup)
            own = lookup.own_code()
            # To record what will not be stored would cost each start time for nothing.
            records = not result.is_never_stored or call.watch or sharing is not None
            may_share = records and sharing is None and self._may_share
            shared = self._begin_sharing(undoing, lookup) if may_share else None
            # What JAX has traced inside the step before is shared where the dependencies are equal,
            # and where it was recorded.
            values = () if shared else (self._token, records, digest_dependencies(known))
        find = sharing.find if sharing else call.find
        examine = functools.partial(self._examined, request, lookup, result)
        if not records:
            examine = _not_examined
        trace = RecordedTrace(find, sharing, examine, records)
        watch = functools.partial(trace.watch, own, shared, values)
        hooks = (watch, trace.compile_through, trace.is_lowered_by_jax)
        try:
            program, staged = build(self._spec, request, stopwatch, *hooks)
            try:
                traced = trace.result(staged)
            except Exception as error:
                if sharing is not None:
                    raise  # The other processes have not heard of it.
                traced = self._unexamined(error)
            if traced.dependencies:  # Another thread has examined the trace.
                own_state = kept_for_this_thread(traced.used.names)
                own_state |= _filled_by_trace(own_state, traced.used, result)
                self._remember(own_state)
                traced = traced._replace(dependencies=traced.dependencies | own_state)
        except BaseException:
            self._record_anew()  # Nobody has examined what it used.
            raise
        self._may_share &= trace.is_shared
        may_load = traced.tree is not None
        if may_load and archive and archive.forgot(lookup.address, traced.dependencies):
            traced = traced._replace(tree=None, untrackable=(_WAS_WRONG,))
        program = replace(program, lowered=trace.digest)
        if trace.is_loaded:
            program.seconds["load"] = program.seconds.pop("compile")
            program = replace(program, level=2)
        if shared and shared_traces.is_outdated(shared, looked=bool(traced.dependencies)):
            return None
        resolution = Resolution(
            program, result, traced.untrackable, changes=changes, lowered=trace.lowered
        )
        if sharing is not None or archive is not None:
            outline = functools.cache(functools.partial(jaxcompat.outline, staged.lowered))
            resolution = _to_store(resolution, lookup.address, archive, traced, outline)
        return resolution, traced.dependencies, traced.used

    def _begin_sharing(self, undoing: Undoing, lookup: Lookup) -> SharedTraces | None:
        is_alone = lookup.is_alone()
        if not is_alone and shared_traces.may_nest(lookup.reached_code()):
            return None
        return shared_traces.begin(undoing, is_alone)

    def _known_before(self, lookup: Lookup) -> tuple[dict[str, str], tuple[Change, ...]]:
        """What is known before a trace: its dependencies, and those that have changed."""
        with self._lock:
            recorded = self._recording
        known = lookup.extend(lookup.used_by(recorded)).dependencies
        has_changed, changes = self._changes_to(known)
        if has_changed:  # What the traces before it used does not concern this one.
            self._record_anew()
            lookup.restart()
            known = lookup.base.dependencies
        return known, changes

    def _examined(
        self,
        request: Request,
        lookup: Lookup,
        result: LookupResult,
        recording: Findings,
        staged: jaxcompat.Staged,
    ) -> Traced:
        """What a recorded trace depended on."""
        try:
            return self._examine(request, lookup, result, recording, staged)
        except Exception as error:
            return self._unexamined(error)

    def _examine(
        self,
        request: Request,
        lookup: Lookup,
        result: LookupResult,
        recording: Findings,
        staged: jaxcompat.Staged,
    ) -> Traced:
        with self._lock:
            self._recording = recorded = self._recording.with_all_of(recording)
        used = lookup.used_by(recorded)
        dependencies = dict(lookup.extend(used).dependencies)
        # That has found more objects of the user's, in installed modules, whose code may read them.
        while (more := lookup.used_by(recorded)) != used:
            used, dependencies = more, dict(lookup.extend(more).dependencies)
        dependencies |= _filled_by_trace(dependencies, used, result)
        untrackable = lookup.untrackable_in(recorded)
        recorded.explained = lookup.explained_in(recorded)
        # What the trace itself changed, as a count of its calls, is no change after it.
        now = lookup.values_now(used)
        self._remember(dependencies | now)
        left = changed_by(dependencies, now)
        untrackable += moved_on(dependencies, now)
        note_changed(dependencies, now)
        # Another process may have imported before the trace what this one imported in it.
        dependencies = {name: now[name] for name in lookup.late_among(now)} | dependencies
        tree = None
        try:
            tree = lookup.encoded(staged.out_tree)
        except storing.NotStorable as error:
            untrackable = (*untrackable, str(error))
        return Traced(dependencies, used, left, None if untrackable else tree, untrackable)

    def _unexamined(self, error: Exception) -> Traced:
        """The result for a trace whose dependencies could not be determined."""
        _log.error("%s cannot be stored to start without a trace", self._spec.name, exc_info=error)
        why = f"fingerprinting its dependencies raised {type(error).__name__}"
        return Traced({}, Used(), {}, None, (why,))

    def _changes_to(self, dependencies: dict[str, str]) -> tuple[bool, tuple[Change, ...]]:
        """Whether something has changed in this process since the step was last traced or loaded.

        And what it is, but for what traces have changed.
        """
        found = as_left(dependencies, self._left)
        with self._lock:
            before = as_left(
                {name: token for name, token in self._dependencies.items() if name in found},
                self._left,
            )
        found = {name: found[name] for name in before}
        has_changed = any(each.part in _MUTABLE for each in differences(before, found))
        changes = differences(before, but_for_traces(found, before)) if has_changed else ()
        self._remember(dependencies)
        return has_changed, tuple(each for each in changes if each.part in _MUTABLE)

    def _remember(self, dependencies: dict[str, str]) -> None:
        with self._lock:
            self._dependencies = self._dependencies | dependencies

    def forget(self) -> None:
        """Begins anew: what the step depends on has changed, and that is known."""
        with self._lock:
            self._dependencies, self._left = {}, {}
        self._record_anew()

    def _record_anew(self) -> None:
        """Drops what traces used, and has JAX trace the functions inside the step again."""
        with self._lock:
            self._recording, self._token = Findings(), jaxcompat.ContextToken()


def _not_examined(recording: Findings, staged: jaxcompat.Staged) -> Traced:
    return Traced({}, Used(), {}, None)


def _filled_by_trace(
    dependencies: dict[str, str], used: Used, result: LookupResult
) -> dict[str, str]:
    """What names in installed modules meant when the trace began, if the trace changed that.

    A package may keep a cache that its own code fills while it is traced. The trace depends on what
    the cache held before. That is known of names that the last build read too.
    """
    alike = [name for name, read in used.names.items() if result.used.names.get(name) == read]
    prefixes = tuple(f"{name}." for name in alike)
    whole = {f"{NAMES_OF}{name}" for name in alike}
    return {
        name: result.found[name]
        for name in dependencies.keys() & result.found.keys()
        if name in whole or name.startswith(prefixes)
    }


def _to_store(
    resolution: Resolution,
    address: Address,
    archive: Archive | None,
    traced: Traced,
    outline: Callable[[], str],
) -> Resolution:
    """A resolution with what is to be stored, or why nothing is."""
    program = resolution.program
    digest, why = program.lowered, _why_not_stored(program, archive)
    if why is not None:
        return replace(resolution, address=address, untrackable=(why,))
    publication = Publication(
        address, digest, program.run, traced, program.captured, program.seconds, outline
    )
    return replace(resolution, address=address, digest=digest, publication=publication)


def _why_not_stored(program: Program, archive: Archive | None) -> str | None:
    why = storing.why_not_storable(program.run)
    if why is not None:
        return f"{NEVER_STORED}{why}"
    if not program.lowered:
        return "it is not stored: JAX had compiled it before"
    seconds = sum(program.seconds.values())
    if archive is not None and seconds < archive.min_build_seconds:
        return f"it is not stored: it was built in less than {archive.min_build_seconds} s"
    return None


def _watched(
    resolution: Resolution, dependencies: dict[str, str], used: Used, watch: bool
) -> Resolution:
    """Keeps a program's dependencies with it if they will be checked."""
    if not watch:
        return resolution
    return replace(
        resolution, program=replace(resolution.program, dependencies=dependencies, used=used)
    )
