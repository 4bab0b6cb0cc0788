"""`Checks`: verifies that the programs in use still match a new trace of the step.

A program that was loaded without a trace is verified by one, in the background, until one start has
done so, and by a sample of later starts. Other threads may disturb that trace, so where it gives
another program, the next call traces the step, and that decides. Where something has changed that a
program depends on, a new trace says whether it matters.
"""

from __future__ import annotations

import collections
import contextlib
import contextvars
import difflib
import functools
import threading
import time
import zlib
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from stepcache import jaxcompat
from stepcache._changes import Undoing
from stepcache._process_hooks import quick_switching, rare_collections
from stepcache.calls.key import Key
from stepcache.calls.step_spec import Request, StepSpec
from stepcache.errors import StaleProgramError, StaleProgramWarning, warn
from stepcache.events import Change, Verified, recorder
from stepcache.fingerprint.dependencies import agree, differences
from stepcache.jaxcompat import storing
from stepcache.programs.archive import Archive
from stepcache.programs.background import LATER
from stepcache.programs.build import Program, trace
from stepcache.programs.builds import builds
from stepcache.programs.cache import ProgramCache
from stepcache.programs.dispatch import Dispatcher
from stepcache.programs.left_by_traces import but_for_traces
from stepcache.programs.levels import Levels
from stepcache.programs.lookup import Lookup
from stepcache.programs.miss_log import MissLog
from stepcache.programs.resolution import Resolution
from stepcache.storage import plain
from stepcache.storage.dependency_record import DependencyRecord

# A call that was under way may still tell the dispatcher about a suspected program: it is cleared
# so many times, so far apart, or until a call has judged it.
_STALE_ROUNDS, _STALE_SECONDS = 100, 0.05
_QUIET_SECONDS, _LONGEST_WAIT_SECONDS = 0.2, 20.0
# So many of a step's latest programs are traced anew when something has changed.
_JUDGED_AGAIN = 4


class Checks:
    """Checks the programs of one step.

    That something has changed which a trace looked at is no error by itself: a new trace decides,
    by what it lowers to.

    Args:
        spec: the step.
        number: of the step, unique in this process.
        levels: forget what the step depends on when it has changed.
        miss_log: counts the checks.
        dispatcher: drops a program that is wrong.
    """

    def __init__(
        self, spec: StepSpec, number: int, levels: Levels, miss_log: MissLog, dispatcher: Dispatcher
    ):
        self._spec, self._number = spec, number
        self._levels, self._miss_log, self._dispatcher = levels, miss_log, dispatcher
        self._lock = threading.Lock()
        self._latest: collections.deque[_Lowered] = collections.deque(maxlen=_JUDGED_AGAIN)
        self._accepted: dict[Key, dict[str, str]] = {}
        self._calls_until_check = 0
        self._warned = False
        # Judges, in the thread of the next call, what a check in the background has found.
        self.suspicion: Callable[[], None] | None = None

    def raise_if_stale(self) -> None:
        """Judges, once, what a check in the background has found.

        Other threads may have disturbed that trace; this one is made where the step is called.

        Raises:
            StaleProgramError: a program is not the one that a trace gives.
        """
        if self.suspicion is None:
            return
        with self._lock:
            judge, self.suspicion = self.suspicion, None
        if judge is not None:
            judge()

    def every(self, cache: ProgramCache, request: Request, program: Program) -> None:
        """Every so many calls: does the step still lower to this program?

        It is traced again only where something that its trace depended on has changed.

        Raises:
            StaleProgramError: it does not.
        """
        if cache.check_every is None:
            return
        self._calls_until_check -= 1
        if self._calls_until_check >= 0:
            return
        self._calls_until_check = cache.check_every - 1
        if program.dependencies is None or program.used is None:
            return
        dependencies = dict(Lookup(self._spec, request).with_used(program.used).dependencies)
        before = self._accepted.get(request.key, program.dependencies)
        changes = differences(before, but_for_traces(dependencies, before))
        if not changes:
            return
        if self._retraced(request, program.run.out_tree).digest != program.lowered:
            self._drop(cache, request.key)
            raise self._staleness("has dependencies that changed after its trace", changes)
        self._accepted[request.key] = dependencies

    def compare(self, cache: ProgramCache, request: Request, resolution: Resolution) -> None:
        """Warns if an earlier program is no longer what a trace gives, as something has changed.

        Args:
            cache: that the programs are in.
            request, resolution: the call whose program has just come, and that program.
        """
        with self._lock:
            earlier = [each for each in self._latest if cache.peek(each.request.key) is not None]
        if resolution.changes and not self._warned:
            for each in reversed(earlier):
                found = self._retraced(each.request, each.out_tree)
                if found.error is None and found.digest != each.digest:
                    self._warned = True
                    warn(
                        f"dependencies of {self._spec.name} have changed since it was traced; "
                        "programs that were built before are used until step.clear_cache():\n  "
                        + "\n  ".join(map(str, resolution.changes)),
                        StaleProgramWarning,
                    )
                    break
        program, described = resolution.program, request.described()
        if program.lowered and described is not request:  # Else it would keep the call's arrays.
            lowered = _Lowered(described, program.lowered, program.run.out_tree)
            with self._lock:
                self._latest.append(lowered)

    def verification(
        self, cache: ProgramCache, request: Request, archive: Archive, resolution: Resolution
    ) -> Callable[[float], None]:
        """Traces in the background, to verify a loaded program.

        Args:
            cache, archive: that the program is in, and that it was loaded from.
            request: the call, as `Request.described` gives it.
            resolution: the program.

        Returns:
            A function that has the trace begin at a time given as by `time.perf_counter`, under the
            settings of JAX that hold now in this thread.
        """
        settings, context = jaxcompat.carried_settings(), contextvars.copy_context()

        def verify_at(due: float) -> None:
            def job() -> Any:
                late = time.perf_counter() - due
                # It would hold up the steps that are being started.
                quiet = builds.are_quiet(_QUIET_SECONDS) or late > _LONGEST_WAIT_SECONDS
                if late < 0 or not quiet:
                    return LATER
                with settings, quick_switching():
                    context.run(self._verify, cache, request, archive, resolution)
                return None

            archive.verifier.submit(job)

        return verify_at

    def _verify(
        self, cache: ProgramCache, request: Request, archive: Archive, resolution: Resolution
    ) -> None:
        started = time.perf_counter()
        record = resolution.result.record
        assert record is not None
        if jaxcompat.environment() != request.key.environment:
            return  # The caller's settings cannot be had in another thread.
        if resolution.result.assumes and not self._is_as_it_was(request, record):
            return  # A trace would begin elsewhere than the program's own.
        if self._differences(request, resolution) is None:
            self._note(archive, resolution, None, time.perf_counter() - started)
        elif not archive.verifier.is_stopping:  # Which may have interrupted the trace.
            self._suspect(functools.partial(self._judge, cache, request, archive, resolution))

    def _judge(
        self, cache: ProgramCache, request: Request, archive: Archive, resolution: Resolution
    ) -> None:
        """Traces a suspected program in this thread. Raises `StaleProgramError` if it is wrong."""
        started = time.perf_counter()
        record, address = resolution.result.record, resolution.address
        assert record is not None and address is not None
        if jaxcompat.environment() != request.key.environment:
            return  # The next start verifies it.
        if not self._is_as_it_was(request, record):
            return  # The program was right when it was loaded, and goes on as it was.
        changes = self._differences(request, resolution)
        self._note(archive, resolution, changes, time.perf_counter() - started)
        if changes is not None:
            archive.forget(address, record)
            self._drop(cache, request.key)
            raise self._staleness("was loaded, but a trace gives another program", changes)

    def _note(
        self,
        archive: Archive,
        resolution: Resolution,
        changes: Sequence[Change] | None,
        seconds: float,
    ) -> None:
        """Notes that a program was verified, or what differs."""
        record, address, name = resolution.result.record, resolution.address, self._spec.name
        assert record is not None and address is not None
        self._miss_log.count(verifications=1)
        row = archive.row(
            "verified" if changes is None else "stale",
            name,
            address.label,
            seconds={"verify": round(seconds, 4)},
            reason="\n".join(map(str, changes or ())),
        )
        archive.note(row)
        recorder.emit(Verified(name, changes is None, seconds))
        if changes is None:
            archive.note_verified(address, record)

    def _is_as_it_was(self, request: Request, record: DependencyRecord) -> bool:
        """Whether what a loaded program depends on has not changed since it was loaded."""
        found = Lookup(self._spec, request).with_used(record.used)
        return agree(record.dependencies, found.dependencies)

    def _differences(self, request: Request, resolution: Resolution) -> tuple[Change, ...] | None:
        """What differs between a loaded program and a new trace; None where nothing does."""
        record, program = resolution.result.record, resolution.program
        assert record is not None
        found = self._retraced(request, program.run.out_tree, record.tree)
        if found.error is not None:
            name = self._spec.name
            return (Change("code", name, "a program", found.error, "tracing it raised"),)
        if found.digest == record.program:
            return None
        if not found.digest:
            sides = (str(program.run.out_tree), str(found.out_tree))
            return (Change("code", "the tree of its outputs", *sides),)
        before = zlib.decompress(record.outline).decode()
        return _first_difference(before, jaxcompat.outline(found.lowered)) or (
            Change("environment", "what XLA is given", record.program[:12], found.digest[:12]),
        )

    def _retraced(self, request: Request, out_tree: Any, recorded: Any = None) -> _Retraced:
        """Traces and lowers a step without any cached trace.

        A tree of outputs other than `out_tree`, as it was, or was `recorded`, gives no digest.
        """
        token = jaxcompat.ValueToken((self._number, "retrace", time.monotonic()))
        with Undoing() as undoing, undoing:
            undoing.use(rare_collections)
            undoing.hold(jaxcompat.tracing_context(request.mesh))
            jaxcompat.trace_anew(undoing, token)
            try:
                staged = trace(self._spec, request)
                staged.lower()
                digest = storing.lowered_digest(staged)
            except Exception as error:
                return _Retraced(error=f"{type(error).__name__}: {error}")
        same = staged.out_tree == out_tree
        same = same or self._are_alike(request, staged.out_tree, out_tree, recorded)
        return _Retraced(digest if same else "", staged.lowered, staged.out_tree)

    def _are_alike(self, request: Request, tree: Any, before: Any, recorded: Any) -> bool:
        """Whether trees of outputs are equal but for functions that each trace makes anew."""
        lookup = Lookup(self._spec, request)
        with contextlib.suppress(storing.NotStorable):
            found = plain.pack(lookup.encoded(tree))
            return found == plain.pack(recorded) or found == plain.pack(lookup.encoded(before))
        return False

    def _suspect(self, judge: Callable[[], None]) -> None:
        """Has the next call judge a program, even if the dispatcher has been refilled."""
        self.suspicion = judge
        for _ in range(_STALE_ROUNDS):
            self._dispatcher.clear()
            if self.suspicion is not judge or not threading.main_thread().is_alive():
                break
            time.sleep(_STALE_SECONDS)

    def _drop(self, cache: ProgramCache, key: Key) -> None:
        self._levels.forget()
        self._latest.clear()
        self._accepted.pop(key, None)
        cache.drop(key)
        jaxcompat.forget_traces(self._spec.jitted, self._spec.fun)
        self._miss_log.gone(key, "cleared")
        self._dispatcher.clear()

    def _staleness(self, what: str, changes: Sequence[Change]) -> StaleProgramError:
        shown = "\n  ".join(str(change) for change in changes[:12])
        return StaleProgramError(
            f"a program of {self._spec.name} {what}:\n  {shown}",
            changes,
            hint="the program has been removed, and the next call builds it anew; what earlier "
            "calls returned came from it",
        )


class _Lowered(NamedTuple):
    """A program of the step: for which call, and what it was lowered to."""

    request: Request
    digest: str
    out_tree: Any


class _Retraced(NamedTuple):
    """What a new trace gives."""

    digest: str = ""
    lowered: Any = None
    out_tree: Any = None
    error: str | None = None


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
