"""The engine: what happens when a call of a step enters Python.

`Engine.run` reads top to bottom: the call's signature, its placement, its key, its program, the
run. A call that the C++ dispatcher serves by itself never comes here.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import time
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax

from stepcache import jaxcompat
from stepcache.errors import (
    ForkedProcessError,
    RecompileError,
    RecompileWarning,
    SessionClosedError,
    warn,
)
from stepcache.events import BuildFailed, Built, Captured, Evicted, Miss, StageStarted, recorder
from stepcache.programs import signature as signatures
from stepcache.programs.build import NotHoldable, Program, Recipe, Stopwatch, build, trace
from stepcache.programs.cache import ProgramCache, new_owner_number
from stepcache.programs.dispatch import Dispatcher, forked_with_jax_running
from stepcache.programs.key import Key
from stepcache.programs.ledger import Ledger
from stepcache.programs.placement import place
from stepcache.programs.signature import Call, Leaf, Unreadable
from stepcache.scope import Scope, current_scope, recompiles_forbidden
from stepcache.sharding import Placed, mesh_identity

_build_ids = itertools.count(1)


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
        self._caches: weakref.WeakSet[ProgramCache] = weakref.WeakSet()
        self._not_holdable: set[Key] = set()
        # The dispatcher knows its engine weakly: a step is freed when its last reference goes.
        miss = functools.partial(_serve, weakref.ref(self), recipe.jitted)
        self.dispatcher = Dispatcher(recipe.fun, recipe.name, miss, recipe.parameters.roles)
        weakref.finalize(self, _release, self._caches, self.number)

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
        try:
            request = self.request(scope, args, kwargs)
            program = self._find(scope, request)
            if program is not None:
                self.ledger.count(hits=1)
            else:
                program = self._obtain(scope, request, started, explicit=False)
            outputs, fast_path = self._execute(program, request.call)
        except (Unreadable, NotHoldable, jaxcompat.InvalidInputError):
            return self._delegate(args, kwargs)
        return outputs, None if scope.count_hits or scope.closed else fast_path

    def warm(self, args: tuple, kwargs: dict) -> None:
        """Builds the program of a call without running it."""
        started = time.perf_counter()
        scope = self._open_scope()
        try:
            request = self.request(scope, args, kwargs)
        except Unreadable:
            self.trace(args, kwargs)  # JAX says what is wrong with the call.
            raise
        if self._find(scope, request) is None:
            self._obtain(scope, request, started, explicit=True)

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
            self.recipe.fingerprint,
            placed_call.signature,
            mesh_identity(scope.mesh),
            self.recipe.key_options,
            jaxcompat.environment(),
        )
        return Request(call, leaves, placed, key)

    # ---- programs ----------------------------------------------------------------------------

    def why(self, request: Request) -> Miss:
        """Why a call that finds no program finds none."""
        return self.ledger.why(request.key, request.call)

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
        """The program of a call that missed: built here, or by another thread meanwhile."""
        miss = self.why(request)
        if not explicit:
            self._judge(scope, miss)
        program, built = scope.cache.get_or_build(
            request.key, self, lambda: self._build(scope, request, miss, started)
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

    def _build(self, scope: Scope, request: Request, miss: Miss, started: float) -> Program:
        build_id = next(_build_ids)
        name = self.recipe.name
        stopwatch = Stopwatch(lambda stage: recorder.emit(StageStarted(name, build_id, stage)))
        try:
            program = build(
                self.recipe, request.key, request.call, request.leaves, scope.mesh, stopwatch
            )
        except BaseException as error:
            if isinstance(error, NotHoldable):
                self._not_holdable.add(request.key)
            recorder.emit(BuildFailed(name, build_id, stopwatch.current, type(error).__name__))
            raise
        advice = (*miss.advice, *map(_advise_on_capture, program.captured))
        miss = dataclasses.replace(miss, advice=advice)
        self.ledger.add(request.key, request.call.paths, miss)
        self._check_rules(scope, request)
        stages = (program.trace_seconds, program.lower_seconds, program.compile_seconds)
        own_seconds = time.perf_counter() - started - sum(stages)
        self.ledger.count(
            misses=1,
            traces=1,
            lowers=1,
            compiles=1,
            trace_seconds=program.trace_seconds,
            lower_seconds=program.lower_seconds,
            compile_seconds=program.compile_seconds,
            own_seconds=own_seconds,
        )
        recorder.emit(Built(name, build_id, miss, *stages, own_seconds, program.captured))
        return program

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
        """Drops all programs of the step, and JAX's traces of its function."""
        for cache in list(self._caches):
            cache.release(self.number)
        self._not_holdable.clear()
        self.dispatcher.clear()
        self.recipe.jitted.clear_cache()
        self.ledger.all_gone("cleared")

    def programs(self) -> int:
        """How many programs of the step are held."""
        return sum(cache.programs_of(self) for cache in list(self._caches))


def _serve(engine: weakref.ref[Engine], jitted: Any, *args, **kwargs) -> tuple[Any, Any]:
    """What a dispatcher calls on a miss; it may outlive its engine in somebody's hands."""
    alive = engine()
    return (jitted(*args, **kwargs), None) if alive is None else alive.run(*args, **kwargs)


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
