"""The engine: what happens when a call of a step enters Python.

`Engine.run` reads top to bottom: the call's signature, its placement, its key, its program, the
run. A call that the C++ dispatcher serves by itself never comes here.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import logging
import threading
import time
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax

from stepcache import jaxcompat
from stepcache.errors import (
    ForkedProcessError,
    PlacementError,
    RecompileError,
    RecompileWarning,
    SessionClosedError,
    StaleProgramError,
    warn,
)
from stepcache.events import (
    BuildFailed,
    Built,
    Captured,
    Change,
    Evicted,
    Loaded,
    Miss,
    StageStarted,
    Verified,
    recorder,
)
from stepcache.jaxcompat import inspection, storing
from stepcache.programs import signature as signatures
from stepcache.programs.archive import Answer, Archive
from stepcache.programs.build import NotHoldable, Program, Recipe, Stopwatch, trace
from stepcache.programs.cache import ProgramCache, new_owner_number
from stepcache.programs.dispatch import Dispatcher, forked_with_jax_running
from stepcache.programs.key import Key
from stepcache.programs.ledger import Ledger
from stepcache.programs.levels import Brought, Levels, Wanted, in_background, when_ready
from stepcache.programs.placement import place
from stepcache.programs.question import Question, step_label
from stepcache.programs.signature import Call, Leaf, Unreadable
from stepcache.scope import Scope, current_scope, recompiles_forbidden
from stepcache.sharding import Placed, mesh_identity

_build_ids = itertools.count(1)
_log = logging.getLogger("stepcache")
# A call that was under way may still tell the dispatcher about a stale program: it is cleared so
# many times, so far apart, or until the error has been raised.
_STALE_ROUNDS, _STALE_SECONDS = 100, 0.05
_REMEDIES = {
    1: "it was loaded from disk, without a trace",
    2: "it was traced, and loaded from disk without compiling it",
    3: "it was built",
}


@dataclass(frozen=True, slots=True)
class Request:
    """A call with what it needs: read, placed and keyed.

    Attributes:
        call: as it came.
        leaves: its leaves where the session places them.
        placed: for each leaf, where it goes and why; None for one that stays where it is.
        key: the key of its program.
    """

    call: Call
    leaves: tuple[Leaf, ...]
    placed: tuple[Placed | None, ...]
    key: Key

    def wanted(self, scope: Scope) -> Wanted:
        """What the call needs a program for."""
        return Wanted(self.key, self.call, self.leaves, scope.mesh)


class Engine:
    """Runs one step.

    Args:
        recipe: the step.
        scope: gives the scope of the session in which a call is made.
    """

    def __init__(self, recipe: Recipe, scope: Callable[[], Scope] = current_scope):
        self.recipe = recipe
        self.ledger = Ledger(recipe.name)
        self.scope = scope
        self.number = new_owner_number()
        self.levels = Levels(recipe, self.number)
        self._caches: weakref.WeakSet[ProgramCache] = weakref.WeakSet()
        self._unverified: dict[Key, tuple[Archive, Brought]] = {}
        self._unexecuted: dict[Key, tuple[Archive, Brought]] = {}
        self._stale: StaleProgramError | None = None
        self._calls_until_check = 0
        self._not_holdable: set[Key] = set()
        # The dispatcher knows its engine weakly: a step is freed when its last reference goes.
        miss = functools.partial(_serve, weakref.ref(self), recipe.jitted)
        self.dispatcher = Dispatcher(recipe.fun, recipe.name, miss, recipe.parameters.roles)
        weakref.finalize(self, _release, self._caches, self.number)
        _live.add(self)
        self.preload(scope().cache)

    def preload(self, cache: ProgramCache) -> None:
        """Starts loading what the last run of this script used of the step."""
        archive = cache.archive()
        if archive is not None:
            archive.preload(step_label(self.recipe.fun))

    # ---- a call ------------------------------------------------------------------------------

    def run(self, *args, **kwargs) -> tuple[Any, Any]:
        """Serves a call that the C++ dispatcher could not serve.

        Returns:
            The outputs, and what the dispatcher needs to serve the next such call by itself.
        """
        started = time.perf_counter()
        if jaxcompat.is_tracing() or jaxcompat.must_delegate():
            return self._delegate(args, kwargs)
        scope = self._open_scope()
        self._raise_if_stale()
        try:
            request = self.request(scope, args, kwargs)
            program = self._find(scope, request)
            if program is not None:
                self.ledger.count(hits=1)
            else:
                program = self._obtain(scope, request, started, explicit=False)
            if scope.cache.check_every is not None:
                self._check_every(scope, request, program)
            executed = time.perf_counter()
            outputs, fast_path = self._execute(program, request.call)
        except (Unreadable, NotHoldable, jaxcompat.InvalidInputError):
            return self._delegate(args, kwargs)
        self._after_first_execution(scope, request, program, outputs, executed)
        through_python = scope.count_hits or scope.closed or scope.cache.check_every
        return outputs, None if through_python or self._stale is not None else fast_path

    def warm(self, args: tuple, kwargs: dict) -> None:
        """Builds the program of a call without running it."""
        started = time.perf_counter()
        scope = self._open_scope()
        try:
            request = self.request(scope, args, kwargs)
        except Unreadable:
            self.trace(args, kwargs)  # JAX says what is wrong with the call.
            raise
        self._raise_if_stale()
        self._check_runnable(request)
        program = self._find(scope, request)
        if program is None:
            program = self._obtain(scope, request, started, explicit=True)
        self._verify(scope, request, program)

    def trace(self, args: tuple, kwargs: dict) -> Any:
        """The `jax.stages.Traced` of the program that a call needs."""
        scope = self.scope()
        if jaxcompat.is_tracing() or (scope.placer is None and not self.recipe.parameters.carry):
            return self.recipe.jitted.trace(*args, **kwargs)
        try:
            request = self.request(scope, args, kwargs)
        except Unreadable:
            return self.recipe.jitted.trace(*args, **kwargs)
        return trace(self.recipe, request.call, request.leaves, scope.mesh).as_traced()

    def _delegate(self, args: tuple, kwargs: dict) -> tuple[Any, Any]:
        self.ledger.count(delegated=1)
        return self.recipe.jitted(*args, **kwargs), None

    def _open_scope(self) -> Scope:
        if forked_with_jax_running():
            raise ForkedProcessError(
                f"{self.recipe.name} was called in a forked process, but JAX was already running "
                "in its parent, and its threads do not survive a fork",
                hint='start workers with multiprocessing.get_context("spawn"), or fork before the '
                "first use of JAX",
            )
        scope = self.scope()
        self._check_open(scope)
        return scope

    def _check_open(self, scope: Scope) -> None:
        if scope.closed:
            raise SessionClosedError(
                f"{self.recipe.name} was called in a session that has been closed",
                hint="close a session after its last step, or make a new one",
            )

    # ---- signature, placement, key -----------------------------------------------------------

    def request(self, scope: Scope, args: tuple, kwargs: dict) -> Request:
        """Reads, places and keys a call. Traces nothing and moves nothing.

        Raises:
            Unreadable: only JAX can judge the call.
            PlacementError: a leaf cannot be placed as asked.
        """
        call = signatures.read(self.recipe.parameters, args, kwargs)
        leaves, placed = place(self.recipe, scope.placer, call)
        placed_call = call.with_signature_leaves(leaves)
        key = Key(
            self.recipe.identity,
            placed_call.signature,
            mesh_identity(scope.mesh),
            self.recipe.key_options,
            jaxcompat.environment(),
        )
        return Request(call, leaves, placed, key)

    # ---- programs ----------------------------------------------------------------------------

    def foresee(self, scope: Scope, request: Request) -> tuple[Miss, bool]:
        """Why a call finds no program in memory, and whether it will find one on disk."""
        miss, archive = self.ledger.why(request.key, request.call), scope.cache.archive()
        if archive is None:
            return miss, False
        answer = archive.answer(Question(self.recipe, request.key, request.call.paths))
        return _told(miss, answer), answer.candidate is not None

    def _find(self, scope: Scope, request: Request) -> Program | None:
        self._caches.add(scope.cache)
        try:
            not_holdable = request.key in self._not_holdable
            program = None if not_holdable else scope.cache.get(request.key, self)
        except Exception:
            if not request.key.signature.statics:
                raise
            raise Unreadable from None  # A static argument that cannot be compared.
        if not_holdable:
            raise NotHoldable
        return program

    def _obtain(self, scope: Scope, request: Request, started: float, *, explicit: bool) -> Program:
        """The program of a call that missed: brought here, or by another thread meanwhile."""
        program, built = scope.cache.get_or_build(
            request.key, self, lambda: self._bring(scope, request, started, explicit)
        )
        self._check_open(scope)
        if not built:
            self.ledger.count(hits=1)
        return program

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

    def _bring(self, scope: Scope, request: Request, started: float, explicit: bool) -> Program:
        build_id = next(_build_ids)
        name = self.recipe.name
        stopwatch = Stopwatch(lambda stage: recorder.emit(StageStarted(name, build_id, stage)))
        miss = self.ledger.why(request.key, request.call)

        def before_trace(answer: Answer) -> None:
            nonlocal miss
            miss = _told(miss, answer)
            if not explicit:
                self._judge(scope, miss)

        archive = scope.cache.archive()
        watch = scope.cache.check_every is not None
        try:
            brought = self.levels.bring(
                request.wanted(scope), archive, stopwatch, before_trace, watch=watch
            )
        except BaseException as error:
            if isinstance(error, NotHoldable):
                self._not_holdable.add(request.key)
            recorder.emit(BuildFailed(name, build_id, stopwatch.current, type(error).__name__))
            raise
        own_seconds = time.perf_counter() - started - sum(stopwatch.seconds.values())
        if archive is not None:
            self._note(archive, brought, miss)
            if brought.program.level == 1 and archive.verify == "background":
                self._unverified[request.key] = (archive, brought)
            self._unexecuted[request.key] = (archive, brought)
        self._account(request, brought, miss, build_id, own_seconds)
        self._check_rules(scope, request)
        return brought.program

    def _account(
        self, request: Request, brought: Brought, miss: Miss, build_id: int, own_seconds: float
    ) -> None:
        """Tells the ledger and whoever listens how a program came."""
        program, seconds = brought.program, brought.program.seconds
        advice = (*miss.advice, *map(_advise_on_capture, program.captured))
        remedy = _REMEDIES[program.level]
        if program.level < 3:
            remedy += f", in {sum(seconds.values()):.2f} s"
        miss = dataclasses.replace(miss, advice=advice, unvouched=brought.unvouched, remedy=remedy)
        self.ledger.add(request.key, request.call.paths, miss)
        traced, built = program.level > 1, program.level > 2
        counts = {"traces": traced, "lowers": traced, "compiles": built, "loads": not built}
        times = {f"{stage}_seconds": value for stage, value in seconds.items()}
        self.ledger.count(misses=1, own_seconds=own_seconds, **counts, **times)
        name = self.recipe.name
        if built:
            stages = (seconds["trace"], seconds["lower"], seconds["compile"])
            event = Built(name, build_id, miss, *stages, own_seconds, program.captured)
        else:
            event = Loaded(name, build_id, miss, traced, dict(seconds), own_seconds)
        recorder.emit(event)

    def _note(self, archive: Archive, brought: Brought, miss: Miss) -> None:
        """Writes a row of the ledger on disk; for what is being stored, when that is decided."""
        question, program = brought.question, brought.program
        assert question is not None
        archive.note(
            {1: "loaded", 2: "relinked", 3: "built"}[program.level],
            self.recipe.name,
            question.label,
            lookup=question.lookup,
            program=brought.digest,
            devices=[device.id for device in storing.program_devices(program.run)]
            if brought.digest
            else [],
            seconds={stage: round(value, 4) for stage, value in program.seconds.items()},
            reason=str(miss),
            changes=[[each.part, each.path, each.before, each.after] for each in miss.changes],
            unvouched=list(brought.unvouched),
        )

    def _check_runnable(self, request: Request) -> None:
        """A program for devices that are only described can be lowered, but not held here.

        Raises:
            PlacementError: some device is no device of this process's backends.
        """
        for leaf, path in zip(request.leaves, request.call.paths, strict=True):
            devices = leaf.sharding.device_set if leaf.sharding is not None else ()
            if not inspection.live_backend(devices):
                raise PlacementError(
                    f"{self.recipe.name} cannot be warmed for devices that are not there",
                    where=path.text,
                    expected="devices of this process (jax.devices())",
                    got=", ".join(sorted(str(device) for device in devices)[:4]),
                    hint="step.lower(...).compile() compiles for another topology where JAX can",
                )

    def _after_first_execution(
        self, scope: Scope, request: Request, program: Program, outputs: Any, started: float
    ) -> None:
        """What is left to do for a program that has just been run for the first time."""
        if request.key in self._unexecuted:
            archive, brought = self._unexecuted.pop(request.key)
            assert brought.question is not None
            note = functools.partial(
                archive.note, "executed", self.recipe.name, brought.question.label
            )
            when_ready(outputs, started, lambda seconds: note(seconds={"execute": seconds}))
        self._verify(scope, request, program)

    # ---- checks of programs in use -----------------------------------------------------------

    def _raise_if_stale(self) -> None:
        if self._stale is not None:
            error, self._stale = self._stale, None
            raise error

    def _check_every(self, scope: Scope, request: Request, program: Program) -> None:
        """Every so many calls: is what the step depends on as it was when it was traced?"""
        self._calls_until_check -= 1
        if self._calls_until_check >= 0:
            return
        self._calls_until_check = (scope.cache.check_every or 1) - 1
        changes = self.levels.changes_since_trace(program, request.wanted(scope))
        if changes:
            self._drop(scope, request)
            raise self._staleness("depends on what changed after it was traced", changes)

    def _verify(self, scope: Scope, request: Request, program: Program) -> None:
        """Traces the step in the background, to see that a loaded program is the right one."""
        archive, brought = self._unverified.pop(request.key, (None, None))
        if archive is None or brought is None:
            return
        candidate, wanted = brought.answer.candidate, request.wanted(scope)
        assert candidate is not None and brought.question is not None
        question = brought.question

        def check() -> None:
            started = time.perf_counter()
            if jaxcompat.environment() != request.key.environment:
                return  # The caller's settings cannot be had in another thread.
            changes = self.levels.retrace(program, candidate, wanted)
            seconds = time.perf_counter() - started
            self.ledger.count(verifications=1)
            event = "verified" if changes is None else "stale"
            archive.note(
                event,
                self.recipe.name,
                question.label,
                seconds={"verify": round(seconds, 4)},
                reason="\n".join(map(str, changes or ())),
            )
            recorder.emit(Verified(self.recipe.name, changes is None, seconds))
            if changes is not None:
                archive.forget(question, candidate)
                self._drop(scope, request)
                self._make_stale(changes)

        in_background(check)

    def _make_stale(self, changes: Sequence[Change]) -> None:
        """Has the next call raise, whatever the dispatcher was given meanwhile."""
        error = self._staleness("was loaded, but a trace gives another program", changes)
        self._stale = error
        for _ in range(_STALE_ROUNDS):
            self.dispatcher.clear()
            if self._stale is not error or not threading.main_thread().is_alive():
                break
            time.sleep(_STALE_SECONDS)
        if self._stale is error:
            _log.error("%s", error)  # Nobody may call the step again.

    def _staleness(self, what: str, changes: Sequence[Change]) -> StaleProgramError:
        shown = "\n  ".join(str(change) for change in changes[:12])
        return StaleProgramError(
            f"a program of {self.recipe.name} {what}:\n  {shown}",
            changes,
            hint="the program has been removed, and the next call builds it anew; what earlier "
            "calls returned came from it",
        )

    def _drop(self, scope: Scope, request: Request) -> None:
        self.levels.forget()
        scope.cache.drop(request.key)
        jaxcompat.forget_traces(self.recipe.jitted, self.recipe.fun)
        self.ledger.gone(request.key, "cleared")
        self.dispatcher.clear()

    def _check_rules(self, scope: Scope, request: Request) -> None:
        """Warns of rules that match nothing, once each, where a step with state is built.

        A rule anchored at an argument (`^prompt/`) that the step does not have is about another
        step, and is left to the end of the session.
        """
        if scope.placer is None:
            return
        scope.built = True
        rules, paths = scope.placer.rules, request.call.paths
        unseen = set(range(len(rules))) - scope.matched
        if not unseen:
            return
        matches = (rules.match(path.slashed) for path in paths)
        found = {index for index in matches if index is not None}
        scope.matched |= found
        if not found and not self.recipe.parameters.carry:
            return
        arguments = {path.argument for path in paths}
        about = {index for index in unseen - found if rules.anchor(index) in (None, *arguments)}
        examples = ", ".join(path.slashed for path in paths[:3])
        scope.warn_of_rules(about, f"{self.recipe.name}, nor of a step before it ({examples}, …)")

    # ---- execution ---------------------------------------------------------------------------

    def _execute(self, program: Program, call: Call) -> tuple[Any, Any]:
        try:
            return program.run(call.leaves, call.args, call.kwargs)
        except jaxcompat.FloatingPointCheckError as error:
            jaxcompat.explain_floating_point_error(error, self.recipe.fun, *call.given)
            raise
        except (RuntimeError, ValueError) as error:
            if "deleted" in str(error):
                _note_deleted(error, call)
            raise

    # ---- what is held ------------------------------------------------------------------------

    def show_use(self) -> None:
        """A cache asks which programs are in use: the next calls come through it."""
        self.dispatcher.clear()

    def lost(self, program: Program, reason: str) -> None:
        """A cache dropped a program: it goes from the dispatcher, and JAX's traces with it."""
        self.dispatcher.clear()
        jaxcompat.forget_traces(self.recipe.jitted, self.recipe.fun)
        self.ledger.gone(program.key, reason)
        if reason == "evicted":
            self.ledger.count(evictions=1)
            recorder.emit(Evicted(self.recipe.name, "made room in memory"))

    def clear(self) -> None:
        """Drops all programs of the step from memory, and JAX's traces of its function."""
        self.levels.forget()
        for cache in list(self._caches):
            cache.release(self.number)
        self._not_holdable.clear()
        self.dispatcher.clear()
        self.recipe.jitted.clear_cache()
        self.ledger.all_gone("cleared")

    def programs(self) -> int:
        """How many programs of the step are held."""
        return sum(cache.programs_of(self) for cache in list(self._caches))


_live: weakref.WeakSet[Engine] = weakref.WeakSet()


def preload_all(cache: ProgramCache) -> None:
    """Starts loading, for all steps there are, what the last run of this script used of them."""
    for engine in list(_live):
        engine.preload(cache)


def _serve(engine: weakref.ref[Engine], jitted: Any, *args, **kwargs) -> tuple[Any, Any]:
    """What a dispatcher calls on a miss; it may outlive its engine in somebody's hands."""
    alive = engine()
    return (jitted(*args, **kwargs), None) if alive is None else alive.run(*args, **kwargs)


def _told(miss: Miss, answer: Answer) -> Miss:
    """A miss, with what the archive knows about it."""
    if answer.unvouched:
        miss = dataclasses.replace(miss, unvouched=answer.unvouched)
    if miss.reason != "first call" or answer.since is None:
        return miss
    return dataclasses.replace(miss, reason="other run", changes=answer.changes, since=answer.since)


def _advise_on_capture(captured: Captured) -> str:
    return (
        f"{captured.name}, {captured.type}, is captured by closure: "
        f"{captured.size_bytes / 1e6:.1f} MB inside the program; pass it as an argument"
    )


def _release(caches: weakref.WeakSet[ProgramCache], owner_number: int) -> None:
    for cache in list(caches):
        cache.release(owner_number)


def _note_deleted(error: Exception, call: Call) -> None:
    """Names the argument that JAX's "has been deleted" is about."""
    deleted = [
        path.text
        for value, path in zip(call.leaves, call.paths, strict=True)
        if isinstance(value, jax.Array) and value.is_deleted()
    ]
    if deleted:
        named = ", ".join(deleted[:3]) + (", …" if len(deleted) > 3 else "")
        error.add_note(
            f"stepcache: {named} has been deleted, or donated to an earlier call (a carry always "
            "is); use the array that the call returned in its place"
        )
