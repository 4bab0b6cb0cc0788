"""`Resolver`: what happens for a call whose program is not in memory, from the miss to what is left
to do after its first run.
"""

from __future__ import annotations

import itertools
import logging
import time
from collections.abc import Callable
from typing import Any

from stepcache.calls.context import Scope, recompiles_forbidden
from stepcache.calls.key import Key
from stepcache.calls.step_spec import Request, StepSpec
from stepcache.errors import RecompileError, RecompileWarning, warn
from stepcache.events import BuildFailed, Miss, StageStarted, recorder
from stepcache.programs import accounts
from stepcache.programs.archive import Archive, LookupResult, start_name
from stepcache.programs.background import LATER, WHEN_QUIET, builds, until_ready
from stepcache.programs.build import Program, Stopwatch
from stepcache.programs.levels import Levels, Resolution
from stepcache.programs.miss_log import MissLog
from stepcache.programs.pods.together import bring_together, compare_values
from stepcache.programs.verification import Checks

_log = logging.getLogger("stepcache")
_build_ids = itertools.count(1)


class Resolver:
    """Brings the programs of one step: from disk, from another process of its pod, or by a build.

    Args:
        spec: the step.
        levels: resolve them in one process.
        checks: check afterwards what was loaded.
        miss_log: is told.
    """

    def __init__(self, spec: StepSpec, levels: Levels, checks: Checks, miss_log: MissLog):
        self._spec, self._levels, self._checks, self._miss_log = spec, levels, checks, miss_log
        self._unsettled: dict[Key, tuple[Archive, Resolution, Miss]] = {}
        self._not_compared: set[Key] = set()

    def resolve(self, scope: Scope, request: Request, started: float, *, explicit: bool) -> Program:
        """Brings a program, and tells of it.

        Args:
            scope: of the call.
            request: the call.
            started: when it came, by `time.perf_counter`.
            explicit: nobody has to be warned of it.

        Raises:
            RecompileError: it would have to be built, and that is forbidden.
            NotHoldable: only `jax.jit` can run it.
        """
        build_id = next(_build_ids)
        name = self._spec.name
        stopwatch = Stopwatch(lambda stage: recorder.emit(StageStarted(name, build_id, stage)))
        miss = self._miss_log.why(request)

        def before_trace(result: LookupResult) -> None:
            nonlocal miss
            miss = accounts.with_result(miss, result)
            if not explicit:
                self._judge(scope, miss)

        archive = scope.cache.archive()
        watch = scope.cache.check_every is not None
        try:
            common = (request, archive, stopwatch, before_trace)
            peers = scope.together(request.ranks)
            with builds.in_python():
                if peers is None:
                    resolution = self._levels.resolve(*common, watch=watch)
                else:
                    levels = self._levels
                    spec, why = self._spec, miss.in_a_line
                    resolution = bring_together(levels, spec, *common, peers, why, watch=watch)
        except BaseException as error:
            recorder.emit(BuildFailed(name, build_id, stopwatch.current, type(error).__name__))
            raise
        if not resolution.has_compared:
            self._not_compared.add(request.key)
        own_seconds = time.perf_counter() - started - sum(stopwatch.seconds.values())
        self._checks.compare(scope.cache, request, resolution)
        if archive is not None and resolution.address is not None:
            self._unsettled[request.key] = (archive, resolution, miss)
        accounts.account(self._miss_log, name, build_id, request, resolution, miss, own_seconds)
        carries = bool(self._spec.parameters.carry)
        scope.check_rules(name, request.shown.paths, carries=carries)
        return resolution.program

    def compare_values(self, scope: Scope, request: Request) -> None:
        """Compares what the processes of a pod hand in, where no call with values has done it yet.

        Raises:
            AgreementError: values differ.
        """
        if self._not_compared and request.key in self._not_compared:
            peers = scope.together(request.ranks)
            if peers is not None:
                compare_values(self._spec, request, peers)
            self._not_compared.discard(request.key)

    def _judge(self, scope: Scope, miss: Miss) -> None:
        if recompiles_forbidden.get() or scope.on_miss == "error":
            where = "no_recompile()" if recompiles_forbidden.get() else 'on_miss="error"'
            raise RecompileError(
                f"{where} forbids the program that this call needs\n{miss}",
                miss,
                hint="call step.warm(...) for every signature beforehand, or keep to known ones",
            )
        if scope.on_miss == "warn" and miss.number > 1:
            warn(str(miss), RecompileWarning)

    def settle(
        self, scope: Scope, request: Request, outputs: Any = None, started: float = 0.0
    ) -> None:
        """What is left to do for a program that has just come, out of the way of its first run."""
        if not self._unsettled:
            return
        unsettled = self._unsettled.pop(request.key, None)
        if unsettled is None:
            return
        archive, resolution, miss = unsettled
        try:
            look = until_ready(outputs, started)
            settling = _Settling(self._spec.name, archive, resolution, miss, look)
            if resolution.program.level == 1 and archive.verify == "background":
                verification = self._checks.verification
                settling.verify = verification(
                    scope.cache, request.described(), archive, resolution
                )
            archive.worker.submit(settling)
        except Exception:  # The call has its outputs.
            _log.exception("a program of %s is neither stored nor verified", self._spec.name)


class _Settling:
    """Notes how a program came, and its first run; then stores it, or has it verified.

    What was loaded has nothing to store: its notes wait until no other step is being started.

    Attributes:
        verify: has the program verified, from a given time on; None for one that was traced.
    """

    def __init__(
        self,
        name: str,
        archive: Archive,
        resolution: Resolution,
        miss: Miss,
        look: Callable[[], Any],
    ):
        self._name, self._archive, self._brought, self._miss = name, archive, resolution, miss
        self._look = look
        self._seconds: Any = LATER
        self.verify: Callable[[float], None] | None = None

    def __call__(self) -> Any:
        archive, resolution = self._archive, self._brought
        assert resolution.address is not None
        if self._seconds is LATER:
            self._seconds = self._look()
            if self._seconds is LATER:
                return LATER
            if resolution.publication is None:
                return WHEN_QUIET
        seconds = self._seconds
        accounts.note(archive, self._name, resolution, self._miss)
        if seconds is not None:
            label = resolution.address.label
            archive.note("executed", self._name, label, seconds={"execute": seconds})
        if resolution.publication is not None:
            archive.publish(resolution.publication)
        record = resolution.result.record
        if self.verify is None or record is None:
            return None
        if archive.starts.note_start(start_name(resolution.address, record)):
            wait = min(max(_FIRST_STEPS * (seconds or 0.0), _QUIET_SECONDS), _LONGEST_WAIT)
            self.verify(time.perf_counter() + wait)
        return None


# Verification begins when about ten steps have run.
_FIRST_STEPS, _QUIET_SECONDS, _LONGEST_WAIT = 10, 0.5, 20.0
