"""`Resolver`: resolves a miss by a build, and records it.

The `Miss` is completed here, and given to the miss log, the run log and listeners. What is left to
do, to store the program and to say how an earlier run differs, is done in the background.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import itertools
import logging
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

from stepcache import jaxcompat
from stepcache.calls.carry import settled_leaves
from stepcache.calls.context import Scope, recompiles_forbidden
from stepcache.calls.key import Key
from stepcache.calls.layers import place_of, step_label
from stepcache.calls.nnx_modules import checking_modules, warn_of_carried_module
from stepcache.calls.step_spec import Request, StepSpec
from stepcache.errors import OptionError, RecompileError, RecompileWarning, warn
from stepcache.events import BuildFailed, Built, Loaded, Miss, recorder
from stepcache.programs.build import Program, Stopwatch, build, is_large
from stepcache.programs.captured_numbers import advice_on_remaking
from stepcache.programs.earlier_runs import compared_with_earlier_run, describe, file_of
from stepcache.programs.miss_log import MissLog
from stepcache.programs.prediction import Described
from stepcache.programs.store import ProgramStore, Publication
from stepcache.units import readable_bytes

_log = logging.getLogger("stepcache")
_build_ids = itertools.count(1)

_SOURCES = {
    "memory": "traced, and runs the executable that this process has of the same module",
    "preloaded": "preloaded from disk",
    "remote": "loaded from the shared cache",
}


class _Once:
    """Calls a function when its result is first asked for, by whichever thread."""

    def __init__(self, make: Callable[[], Any]):
        self._make: Callable[[], Any] | None = make
        self._lock = threading.Lock()
        self._made: Any = None

    def __call__(self) -> Any:
        with self._lock:
            if self._make is not None:
                self._made, self._make = self._make(), None
            return self._made

    def replace(self, made: Any) -> None:
        """Has another result from now on, after it has been asked for."""
        self._made = made


class Resolver:
    """Resolves the misses of one step."""

    def __init__(self, spec: StepSpec, miss_log: MissLog):
        self._spec, self._miss_log = spec, miss_log
        self.label, self._file = step_label(spec.source), file_of(spec.source)
        self._unsettled: list[_Settling] = []
        self._not_compared: set[Key] = set()

    def resolve(self, scope: Scope, request: Request, started: float, *, explicit: bool) -> Program:
        """The program of a call that is not in memory.

        Args:
            scope: of the call.
            request: the call.
            started: when it came, by `time.perf_counter`.
            explicit: the user asked for the program, so that the miss causes no warning.

        Raises:
            RecompileError: it would have to be compiled, and that is forbidden.
            NotHoldable: only `jax.jit` can run it.
        """
        build_id, name = next(_build_ids), self._spec.name
        stopwatch = Stopwatch(name, build_id)
        try:
            miss, store = self._miss_log.why(request), scope.cache.store()
            warn_of_carried_module(self._spec, request.call)
            # It is to outlive the call, and holds on to no array and to nothing of the step.
            shown = request.shown.paths, request.shown.signature
            described = _Once(functools.partial(describe, self.label, request.key, *shown))
            explained = functools.partial(_explained, store, described)

            def before_compiling(module: Callable[[], str], digest: str) -> None:
                if not explicit:
                    self.judge(scope, miss, lambda: explained(miss, module, digest))

            peers, trust = scope.together(request.ranks), scope.cache.trusted
            place = self._miss_log.making.place or place_of(request.shown.fun)
            release = trust.release(described(), request, place) if trust else None
            joining: Any = contextlib.nullcontext()
            if peers is not None:
                if release is not None:
                    raise OptionError("trust= is for one process, and not for a pod", where=name)
                from stepcache.programs.together import building

                joining = building(peers, name, request, described(), scope.cache, miss.in_a_line)
            spec = checking_modules(self._spec, request.call)
            arguments = spec, request, stopwatch, scope.cache.by_module, store
            with joining as together:
                program, publication = build(*arguments, before_compiling, together, release)
            if together is not None and not together.knows_values:
                self._not_compared.add(request.key)
            call_seconds = time.perf_counter() - started
            own_seconds = call_seconds - sum(stopwatch.seconds.values())
            program, settled = self._settled(request, program)
            remade = place and miss.number == 1 and advice_on_remaking(place, self._spec.source)
            is_compiled, remote_bytes = program.source == "compiled", None
            if store is not None and store.remote is not None and not is_compiled:
                remote_bytes = store.remote.received.pop(program.digest, None)
            captured = [
                f"{each.name}, {each.type}, is captured by closure: {each.size_bytes / 1e6:.1f} MB "
                "inside the program; pass it as an argument"
                for each in program.captured
            ]
            advice = (*captured, *filter(None, (remade, settled, release and release.why_traced)))
            miss = dataclasses.replace(
                miss,
                advice=(*miss.advice, *advice),
                remedy=_how_obtained(program, remote_bytes) + (release.in_words if release else ""),
                not_stored=_why_not_stored(program) if store is not None else "",
                called_time=time.time() - call_seconds,
                place=place,
            )
            about = miss, publication.module, program.digest
            final = _Once(functools.partial(explained, *about) if is_compiled else lambda: miss)
            if store is not None:
                devices = () if program.run.calls_back else program.run.device_order
                about = self.label, self._file, program.source, devices, miss.not_stored, store
                self._unsettled.append(_Settling(*about, described, final, publication, release))
            is_trusted = release is not None and release.since is not None
            about = miss, final, own_seconds, remote_bytes, is_trusted
            self._record(build_id, request, program, *about)
        except BaseException as error:
            recorder.emit(BuildFailed(name, build_id, stopwatch.current, type(error).__name__))
            raise
        scope.check_rules(name, request.shown.paths, carries=bool(self._spec.parameters.carry))
        return program

    def _settled(self, request: Request, program: Program) -> tuple[Program, str]:
        """Has a program serve the calls with the carry that it returns, too; and says so."""
        numbers = settled_leaves(self._spec, request, program.run.out_avals)
        if not numbers:
            return program, ""
        program = dataclasses.replace(program, settled_key=request.settled(numbers).key)
        shown = request.shown.paths
        paths = shown if len(shown) == len(request.leaves) else request.call.paths
        named = [f"{paths[n].text} ({request.leaves[n]})" for n in numbers[:3]]
        more = f" and {len(numbers) - 3} more" if len(numbers) > 3 else ""
        return program, (
            f"{', '.join(named)}{more}: weakly typed in this call, like a Python number, and "
            "not when returned: one program serves both"
        )

    def _record(
        self,
        build_id: int,
        request: Request,
        program: Program,
        miss: Miss,
        final: Callable[[], Miss],
        own_seconds: float,
        remote_bytes: int | None = None,
        is_trusted: bool = False,
    ) -> None:
        """Records a miss in the step's miss log, and emits its event.

        `final` gives the miss as compared with earlier runs, `own_seconds` are those of the call
        apart from the stages, `remote_bytes` the size of what came from the shared cache.
        `is_trusted` says that the step's export was traced, and not the step.
        """
        name, seconds = self._spec.name, program.seconds
        is_compiled = program.source == "compiled"
        self._miss_log.add(request, miss, final)
        traced = "trusted" if is_trusted else "traces"
        counts = {traced: 1, "lowers": 1, "compiles": is_compiled, "loads": not is_compiled}
        times = {f"{stage}_seconds": value for stage, value in seconds.items()}
        if remote_bytes is not None:
            counts |= {"remote_loads": 1, "remote_bytes": remote_bytes}
        self._miss_log.count(misses=1, own_seconds=own_seconds, **counts, **times)
        if is_compiled:
            trace, lower, compile = (seconds.get(x, 0.0) for x in ("trace", "lower", "compile"))
            about = trace, lower, compile, own_seconds, program.captured
            recorder.emit(Built(name, build_id, miss, *about))
        else:
            source, stages = program.source, dict(seconds)
            recorder.emit(Loaded(name, build_id, miss, source, stages, own_seconds, remote_bytes))

    def compare_values(self, scope: Scope, request: Request) -> None:
        """Compares the host values of a pod's processes, if no call with values has done so yet.

        Raises `AgreementError` if they differ.
        """
        if self._not_compared and request.key in self._not_compared:
            peers = scope.together(request.ranks)
            if peers is not None:
                from stepcache.programs.together import compare_call_values

                compare_call_values(self._spec.name, request, peers)
            self._not_compared.discard(request.key)

    def built_elsewhere(
        self, request: Request, miss: Miss, seconds: dict[str, float], own_seconds: float
    ) -> None:
        """Records a program that other processes run, and that this one traced."""
        program = Program(request.key, None, (), seconds)  # type: ignore[arg-type]
        miss = dataclasses.replace(miss, remedy="compiled")
        self._record(next(_build_ids), request, program, miss, lambda: miss, own_seconds)

    def judge(self, scope: Scope, miss: Miss, explained: Callable[[], Miss] | None = None) -> None:
        """Warns of a program that has to be compiled, or raises `RecompileError`."""
        is_forbidden, is_another = recompiles_forbidden.get(), miss.number > scope.warm_programs
        if is_forbidden or (scope.on_miss == "error" and is_another):
            where = "no_recompile()" if is_forbidden else 'on_miss="error"'
            miss = explained() if explained is not None else miss
            raise RecompileError(
                f"{where} forbids to compile the program that this call needs\n{miss}",
                miss,
                hint="call step.warm(...) beforehand for each signature that the loop uses",
            )
        if scope.on_miss == "warn" and is_another and miss.number > 1:
            warn(str(explained() if explained is not None else miss), RecompileWarning)

    def settle(self) -> None:
        """Has new programs stored in the background, once they have run or failed to."""
        while self._unsettled:
            with contextlib.suppress(IndexError):  # Another thread may take the last one.
                (settling := self._unsettled.pop()).store.worker.submit(settling)


@dataclasses.dataclass(eq=False, repr=False, slots=True)
class _Settling:
    """Stores a program, notes it for the next run, and logs its miss; in the store's worker.

    It holds on to nothing of the step, which may be freed before.
    """

    label: str  # The step, by its file and name.
    file: str  # Where the function of the step is.
    source: str  # Where the executable was, as in `Program`.
    devices: Sequence[Any]
    why_not: str  # Why it is not stored.
    store: ProgramStore
    described: Callable[[], Described]
    miss: _Once
    publication: Publication
    release: Any = None  # As given to `build`.

    def __call__(self) -> None:
        store, publication, why_not = self.store, self.publication, self.why_not
        if (self.source == "compiled" or publication.data) and not why_not:
            why_not = store.publish(publication, self.label)
        publication.building.release()
        if self.release is not None and not why_not:
            self.release.keep(publication.digest)
        described = self.described()
        miss = self.miss()  # Before the prediction that it compares with is replaced.
        if why_not:
            miss = dataclasses.replace(miss, not_stored=why_not)
            self.miss.replace(miss)
        store.log(
            "compiled" if self.source == "compiled" else "loaded",
            miss.step,
            self.label,
            source=f"{self.source}{self.release.in_words if self.release else ''}",
            program="" if why_not else publication.digest,
            seconds={stage: round(took, 4) for stage, took in publication.seconds.items()},
            reason=miss.headline,
            changes=[
                [each.part, each.path, each.before, each.after]
                for each in (*miss.changes, *miss.stored)
            ],
            not_stored=why_not,
            number=miss.number,
            called_time=round(miss.called_time, 4),
            advice=list(miss.advice),
        )
        if not why_not:
            store.note_use(described, publication.digest, self.devices, self.file)


def _explained(
    store: ProgramStore | None,
    described: Callable[[], Described],
    miss: Miss,
    module: Callable[[], str],
    digest: str,
) -> Miss:
    """A miss, with what differs from the program that an earlier run compiled."""
    if store is None:
        return miss
    try:
        return compared_with_earlier_run(miss, store, described(), digest, module)
    except Exception:
        _log.exception("%s is not compared with earlier runs", miss.step)
        return miss


def _how_obtained(program: Program, remote_bytes: int | None) -> str:
    if program.source == "compiled":
        return "compiled"
    source = "remote" if remote_bytes is not None else program.source  # Maybe fetched ahead.
    words = _SOURCES.get(source) or f"loaded from {source}"
    size = f" ({readable_bytes(remote_bytes)})" if remote_bytes is not None else ""
    return f"{words}{size}, in {sum(program.seconds.values()):.2f} s"


def _why_not_stored(program: Program) -> str:
    """Why later processes do not find the executable of a program; empty where they may."""
    why_not = jaxcompat.why_not_storable(program.run)
    if why_not or program.digest:
        return why_not
    if is_large(program.captured):
        size = readable_bytes(sum(each.size_bytes for each in program.captured))
        return f"it captures {size} of arrays by closure, and would take long to load"
    return "JAX had compiled it before in this process"
