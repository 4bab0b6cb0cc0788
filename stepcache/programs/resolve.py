"""`Resolver`: resolves a miss: from disk, from other processes of the pod, or by a build.

The `Miss` is completed here, and given to the miss log, the run log and listeners. What is left to
do after the program's first run, to store it or to verify it, is done in the background.
"""

from __future__ import annotations

import dataclasses
import itertools
import logging
import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from stepcache._changes import Undoing
from stepcache.calls.carry import settled_leaves
from stepcache.calls.context import Scope, recompiles_forbidden
from stepcache.calls.global_arguments import compare_call_values
from stepcache.calls.key import Key
from stepcache.calls.nnx_modules import warn_of_carried_module
from stepcache.calls.step_spec import Request, StepSpec
from stepcache.errors import RecompileError, RecompileWarning, warn
from stepcache.events import (
    BuildFailed,
    Built,
    Captured,
    Change,
    Loaded,
    Miss,
    StageStarted,
    recorder,
)
from stepcache.fingerprint.shared_state import ALONE
from stepcache.jaxcompat import storing
from stepcache.programs import remaking
from stepcache.programs.archive import Archive
from stepcache.programs.background import LATER, SOON, WHEN_QUIET, until_ready
from stepcache.programs.build import Program, Stopwatch
from stepcache.programs.builds import builds
from stepcache.programs.levels import Levels
from stepcache.programs.lookup import LookupResult
from stepcache.programs.miss_log import MissLog
from stepcache.programs.preload import named
from stepcache.programs.resolution import MissedCall, Resolution
from stepcache.programs.verification import Checks
from stepcache.units import readable_bytes

if TYPE_CHECKING:  # Few processes have a shared cache.
    from stepcache.storage.run_log import Row
    from stepcache.storage.shared_entries import SharedEntries

_log = logging.getLogger("stepcache")
_build_ids = itertools.count(1)

_OF_CALL = ("argument", "tree", "static", "options", "mesh")
_EVENTS = {1: "loaded", 2: "relinked", 3: "built"}
_REMEDIES = {
    1: "loaded from disk, without a trace",
    2: "traced, and loaded from disk without compiling it",
    3: "built",
}


class Resolver:
    """Resolves the misses of one step."""

    def __init__(self, spec: StepSpec, levels: Levels, checks: Checks, miss_log: MissLog):
        self._spec, self._levels, self._checks, self._miss_log = spec, levels, checks, miss_log
        self._unsettled: dict[Key, tuple[Archive, Resolution, Miss]] = {}
        self._not_compared: set[Key] = set()

    def resolve(self, scope: Scope, request: Request, started: float, *, explicit: bool) -> Program:
        """The program of a call that is not in memory.

        Args:
            scope: of the call.
            request: the call.
            started: when it came, by `time.perf_counter`.
            explicit: the user asked for the program, so that the miss causes no warning.

        Raises:
            RecompileError: it would have to be built, and that is forbidden.
            NotHoldable: only `jax.jit` can run it.
        """
        build_id, name = next(_build_ids), self._spec.name
        stopwatch = Stopwatch(lambda stage: recorder.emit(StageStarted(name, build_id, stage)))
        try:
            program = self._resolved(build_id, stopwatch, scope, request, started, explicit)
        except BaseException as error:
            recorder.emit(BuildFailed(name, build_id, stopwatch.current, type(error).__name__))
            raise
        carries = bool(self._spec.parameters.carry)
        scope.check_rules(name, request.shown.paths, carries=carries)
        return program

    def _resolved(
        self,
        build_id: int,
        stopwatch: Stopwatch,
        scope: Scope,
        request: Request,
        started: float,
        explicit: bool,
    ) -> Program:
        """See `resolve`; what is raised is no event yet."""
        miss = self._miss_log.why(request)
        warn_of_carried_module(self._spec, request.call)

        def before_trace(result: LookupResult) -> None:
            if not explicit:
                self.judge(scope, compared(miss, result))

        archive, watch = scope.cache.archive(), scope.cache.check_every is not None
        call = MissedCall(request, archive, stopwatch, before_trace, watch)
        peers = scope.together(request.ranks)
        with Undoing() as undoing, undoing:
            builds.in_python(undoing)
            if peers is None:
                resolution = self._levels.resolve(call)
            else:
                from stepcache.programs.pods.shared_compile import resolve_together

                reason = miss.in_a_line
                resolution = resolve_together(self._levels, self._spec, call, peers, reason)
        call_seconds = time.perf_counter() - started
        own_seconds = call_seconds - sum(stopwatch.seconds.values())
        miss = dataclasses.replace(miss, called_time=time.time() - call_seconds)
        self._checks.compare(scope.cache, request, resolution)
        if not resolution.has_compared:
            self._not_compared.add(request.key)
        if resolution.program.level > 1:
            miss = compared(miss, resolution.result)
        resolution, settled = self._settled(request, resolution)
        remade = remaking.advice(self._levels.remade or ()) if miss.number == 1 else ""
        remote = archive.remote if archive is not None else None
        remote_bytes, refused = _from_remote(remote, resolution)
        miss_known = _completed(miss, resolution, remade, settled, *refused)
        if remote is not None and remote_bytes is not None:
            place = f"from {remote.url} ({readable_bytes(remote_bytes)})"
            remedy = miss_known.remedy.replace("from disk", place)
            miss_known = dataclasses.replace(miss_known, remedy=remedy)
        if archive is not None and resolution.address is not None:
            self._unsettled[request.key] = (archive, resolution, miss_known)
        self._record(build_id, request, resolution, miss_known, own_seconds, remote_bytes)
        return resolution.program

    def _settled(self, request: Request, resolution: Resolution) -> tuple[Resolution, str]:
        """Has a program serve the calls with the carry that it returns, too; and says so."""
        out_avals = resolution.program.run.out_avals
        numbers = settled_leaves(self._spec, request, out_avals)
        if not numbers:
            return resolution, ""
        key = request.settled(numbers).key
        program = dataclasses.replace(resolution.program, settled_key=key)
        shown = request.shown.paths
        paths = shown if len(shown) == len(request.leaves) else request.call.paths
        named = [f"{paths[n].text} ({request.leaves[n]})" for n in numbers[:3]]
        more = f" and {len(numbers) - 3} more" if len(numbers) > 3 else ""
        said = (
            f"{', '.join(named)}{more}: weakly typed in this call, like a Python number, and "
            "not when returned: one program serves both"
        )
        return dataclasses.replace(resolution, program=program), said

    def _record(
        self,
        build_id: int,
        request: Request,
        resolution: Resolution,
        miss: Miss,
        own_seconds: float,
        remote_bytes: int | None,
    ) -> None:
        """Records a miss in the step's miss log, and emits its event.

        Args:
            build_id, request, resolution: of the miss.
            miss: completed.
            own_seconds: what the call took apart from the stages.
            remote_bytes: size of the executable, if it came from the shared cache.
        """
        name, program = self._spec.name, resolution.program
        seconds, traces = program.seconds, program.traces
        traced, built = program.level > 1, program.level > 2
        self._miss_log.add(request, miss)
        counts = {"traces": traces, "lowers": traces, "compiles": built, "loads": not built}
        times = {f"{stage}_seconds": value for stage, value in seconds.items()}
        if remote_bytes is not None:
            counts |= {"remote_loads": 1, "remote_bytes": remote_bytes}
        self._miss_log.count(misses=1, own_seconds=own_seconds, **counts, **times)
        if built:
            stages = (seconds["trace"], seconds["lower"], seconds["compile"])
            recorder.emit(Built(name, build_id, miss, *stages, own_seconds, program.captured))
        else:
            stages = dict(seconds)
            recorder.emit(Loaded(name, build_id, miss, traced, stages, own_seconds, remote_bytes))

    def compare_values(self, scope: Scope, request: Request) -> None:
        """Compares the host values of a pod's processes, if no call with values has done so yet.

        Raises:
            AgreementError: values differ.
        """
        if self._not_compared and request.key in self._not_compared:
            peers = scope.together(request.ranks)
            if peers is not None:
                compare_call_values(self._spec.name, request, peers)
            self._not_compared.discard(request.key)

    def built_elsewhere(
        self, request: Request, miss: Miss, seconds: dict[str, float], own_seconds: float
    ) -> None:
        """Records a program that other processes run, and that this one traced."""
        program = Program(request.key, None, (), seconds, traces=1)  # type: ignore[arg-type]
        resolution = Resolution(program, LookupResult())
        miss = _completed(miss, resolution)
        self._record(next(_build_ids), request, resolution, miss, own_seconds, None)

    def judge(self, scope: Scope, miss: Miss) -> None:
        """Raises or warns of a miss, as the session says.

        Raises:
            RecompileError: it says that nothing may be built.
        """
        if recompiles_forbidden.get() or scope.on_miss == "error":
            where = "no_recompile()" if recompiles_forbidden.get() else 'on_miss="error"'
            raise RecompileError(
                f"{where} forbids the program that this call needs\n{miss}",
                miss,
                hint="call step.warm(...) beforehand for each signature that the loop uses",
            )
        if scope.on_miss == "warn" and miss.number > 1:
            warn(str(miss), RecompileWarning)

    def settle(
        self, scope: Scope, request: Request, outputs: Any = None, started: float = 0.0
    ) -> None:
        """Has a new program stored or verified in the background, after its first run."""
        if not self._unsettled:
            return
        unsettled = self._unsettled.pop(request.key, None)
        if unsettled is None:
            return
        archive, resolution, _ = unsettled
        try:
            settling = _Settling(self._spec.name, *unsettled, until_ready(outputs, started))
            record = resolution.result.record
            alone = record is not None and ALONE in record.used.attributes
            if resolution.program.level == 1 and archive.verify == "background" and not alone:
                described = request.described()
                verification = self._checks.verification
                settling.verify = verification(scope.cache, described, archive, resolution)
            archive.worker.submit(settling)
        except Exception:  # The call has its outputs.
            _log.exception("a program of %s is neither stored nor verified", self._spec.name)


@dataclasses.dataclass(eq=False)
class _Settling:
    """Logs how a program was obtained, and its first run; then stores or verifies it.

    That waits until no other step is being started, which it would slow down. A program that took
    long to build is stored after its first run: XLA serializes it without Python's lock.
    """

    name: str
    archive: Archive
    resolution: Resolution
    miss: Miss
    look: Callable[[], Any]  # From `until_ready`.
    seconds: Any = LATER  # What the first run took, as `look` says.
    verify: Callable[[float], None] | None = None  # From a time on; None for what was traced.

    def __call__(self) -> Any:
        archive, resolution = self.archive, self.resolution
        assert resolution.address is not None
        if self.seconds is LATER:
            self.seconds = self.look()
            if self.seconds is LATER:
                return LATER
            if resolution.publication is None:
                return WHEN_QUIET
            if sum(resolution.program.seconds.values()) < _LONG_SECONDS:
                return SOON
        seconds = self.seconds
        why_not = ""
        if resolution.publication is not None:
            why_not = archive.publish(resolution.publication)
        rows = _rows(archive, self.name, resolution, self.miss, why_not)
        if seconds is not None:
            label, took = resolution.address.label, {"execute": seconds}
            rows.append(archive.row("executed", self.name, label, seconds=took))
        archive.note(*rows)
        archive.keep_contents()
        record = resolution.result.record
        if self.verify is None or record is None:
            return None
        if archive.note_start(resolution.address, record):
            wait = min(max(_FIRST_STEPS * (seconds or 0.0), _QUIET_SECONDS), _LONGEST_WAIT)
            self.verify(time.perf_counter() + wait)
        return None


_LONG_SECONDS = 1.0
# Verification begins when about ten steps have run.
_FIRST_STEPS, _QUIET_SECONDS, _LONGEST_WAIT = 10, 0.5, 20.0


def compared(miss: Miss, result: LookupResult) -> Miss:
    """A miss in memory, with what the archive knows about it."""
    if result.untrackable:
        miss = dataclasses.replace(miss, untrackable=result.untrackable)
    if result.since is None:
        return miss
    if miss.reason != "first call":
        said = {each.part for each in miss.changes}.intersection(_OF_CALL)
        stored = tuple(each for each in result.changes if each.part not in said)
        return dataclasses.replace(miss, stored=stored, since=result.since if stored else None)
    return dataclasses.replace(miss, reason="other run", changes=result.changes, since=result.since)


def _from_remote(
    remote: SharedEntries | None, resolution: Resolution
) -> tuple[int | None, list[str]]:
    """Size of an executable that the shared cache had, and what of it there was refused."""
    if remote is None or resolution.giver is not None:
        return None, []
    program = resolution.program
    names = {program.lowered, resolution.address.digest if resolution.address else ""}
    refused = [each.reason for each in list(remote.refused) if each.digest in names]
    said = [f"what {remote.url} has for it is not used: {why}" for why in dict.fromkeys(refused)]
    return remote.taken(program.lowered) if program.level < 3 else None, said


def _completed(miss: Miss, resolution: Resolution, *more_advice: str) -> Miss:
    """A miss with how it was resolved."""
    program = resolution.program
    remedy = _REMEDIES[program.level]
    if resolution.giver is not None:
        remedy = f"loaded from rank {resolution.giver}, without a trace"
    if program.level < 3:
        remedy += f", in {sum(program.seconds.values()):.2f} s"
    advice = (*miss.advice, *map(_advise_on_capture, program.captured))
    advice += tuple(filter(None, more_advice))
    untrackable = resolution.untrackable or resolution.result.untrackable
    return dataclasses.replace(miss, advice=advice, untrackable=untrackable, remedy=remedy)


def _advise_on_capture(captured: Captured) -> str:
    return (
        f"{captured.name}, {captured.type}, is captured by closure: "
        f"{captured.size_bytes / 1e6:.1f} MB inside the program; pass it as an argument"
    )


def _plain(changes: Sequence[Change]) -> list[list[str]]:
    return [[each.part, each.path, each.before, each.after] for each in changes]


def _rows(
    archive: Archive, name: str, resolution: Resolution, miss: Miss, why_not_stored: str
) -> list[Row]:
    """What the run log says of a program; of one that is stored, when that is decided."""
    address, program = resolution.address, resolution.program
    assert address is not None
    devices = storing.program_devices(program.run) if resolution.digest else ()
    platform, numbers = named(devices)
    own = archive.row(
        _EVENTS[program.level],
        name,
        address.label,
        lookup=address.digest,
        program=resolution.digest,
        platform=platform,
        devices=list(numbers),
        seconds={stage: round(value, 4) for stage, value in program.seconds.items()},
        reason=miss.headline,
        changes=_plain(miss.changes),
        untrackable=[*resolution.untrackable, *filter(None, [why_not_stored])],
        number=miss.number,
        called_time=round(miss.called_time, 4),
        advice=list(miss.advice),
        stored=_plain(miss.stored),
    )
    others = (
        archive.row(_EVENTS[level], name, address.label, rank=rank, seconds=seconds)
        for rank, (level, seconds) in resolution.others.items()
    )
    return [own, *others]
