"""The engine: what happens when a call of a step enters Python.

`Engine.run` reads top to bottom: the call's signature, its placement, its key, its program, the
run. A call that the C++ dispatcher serves by itself never comes here.
"""

from __future__ import annotations

import contextlib
import functools
import threading
import time
import weakref
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from stepcache import jaxcompat
from stepcache.calls import signature as signatures
from stepcache.calls.carry import check_tied, note_deleted
from stepcache.calls.context import Scope, current_scope, in_mesh_of
from stepcache.calls.global_arguments import GlobalArguments, is_of_pod
from stepcache.calls.key import Key
from stepcache.calls.layers import count_step
from stepcache.calls.nnx_modules import checking_modules
from stepcache.calls.placement import (
    check_budget,
    check_runnable,
    is_at_default,
    is_committed_by_hosts,
    is_elsewhere,
    place,
    unnamed_batch,
)
from stepcache.calls.signature import Unreadable
from stepcache.calls.step_spec import Request, StepSpec
from stepcache.dispatcher import Dispatcher, eagerly, serve
from stepcache.errors import SessionClosedError, StepCacheWarning, warn
from stepcache.events import Evicted, Miss, recorder
from stepcache.pods.hang import CallCount
from stepcache.programs.build import NotHoldable, Program, trace
from stepcache.programs.cache import caches_for
from stepcache.programs.earlier_runs import compared_with_earlier_run, describe
from stepcache.programs.miss_log import MissLog
from stepcache.programs.resolve import Resolver
from stepcache.resident.passing import admitted, passes_variables
from stepcache.sharding import mesh_identity

if TYPE_CHECKING:  # Imported where a call passes `Variables`, as few programs have any.
    from stepcache.resident.call import ResidentCall
    from stepcache.resident.runner import ResidentRunner

_making = threading.RLock()  # One engine may make another.


class Engine:
    """Runs one step; if it is over buffers, with these in the place of `Variables`."""

    def __init__(
        self,
        spec: StepSpec,
        scope: Callable[[], Scope] = current_scope,
        miss_log: MissLog | None = None,
        is_over_buffers: bool = False,
    ):
        self.spec = spec
        self.miss_log = miss_log or MissLog(spec.name, count_step(spec.source), spec.pads)
        self.scope, self.number = scope, spec.identity.number
        self._caches = caches_for(spec, self)
        self._not_holdable: set[Key] = set()
        self.is_over_buffers = is_over_buffers
        self.global_arguments: GlobalArguments | None = None
        self.calls_back = not jaxcompat.PRIVATE_API  # Whether any program may do so.
        self.call_count, self.has_global_arguments = CallCount(spec.name), False
        # The dispatcher knows its engine weakly: a step is freed when its last reference goes.
        self._weakly: weakref.ref[Engine] = weakref.ref(self)
        miss = functools.partial(serve, self._weakly, spec.jitted)
        eager = eagerly(self._weakly, spec.fun)
        self.dispatcher = Dispatcher(eager, spec.name, miss, spec.parameters.roles)
        self.padder = None
        if spec.pads:
            from stepcache.calls.padding import Padder

            self.padder = Padder(spec, self.dispatcher.call, self._weakly, scope)
        # Has the step call something else than its dispatcher; the step sets it.
        self.serve_by: Callable[[], Callable[[Callable], None] | None] = lambda: None
        self._resident_runner: ResidentRunner | None = None
        self.resolver = Resolver(spec, self.miss_log)
        scope().cache.store()  # Which begins to preload.

    def run(self, args: tuple, kwargs: dict) -> tuple[Any, Any]:
        """The outputs of a call, and what the dispatcher needs to serve the next one by itself."""
        started = time.perf_counter()
        if (target := self.scope().target) is not None and not jaxcompat.is_tracing():
            return target.call(self, self._open_scope(), args, kwargs), None
        if passes_variables(args, kwargs):
            return self.run_resident(args, kwargs), None
        if jaxcompat.is_tracing() or jaxcompat.must_delegate():
            return self._delegate(args, kwargs)
        scope = self._open_scope()
        try:
            request = self.request(scope, args, kwargs)
            check_budget(scope, self.spec, request)
            self._warn_of_unnamed_batch(scope, request)
            missed = (program := self._find(scope, request)) is None
            if program is not None:
                self.miss_log.count(hits=1)
            else:
                program = self._obtain(scope, request, started, explicit=False)
            if request.commits and program.run.devices != {request.device}:
                # It names others itself: JAX says whether it can take the arrays.
                request = self.request(scope, args, kwargs, as_committed=True)
                missed = (program := self._find(scope, request)) is None
                program = program or self._obtain(scope, request, started, explicit=False)
            watched = scope.is_watched or (
                self.is_over_buffers and jaxcompat.arguments_outlive_calls()
            )
            if missed or not watched:  # Else it may be one hit of many, which nothing slows down.
                check_tied(self.spec, request, program.run)
            self.resolver.compare_values(scope, request)
            whole = GlobalArguments(request, self.scope) if is_of_pod(request) else None
            outputs, fast_path = self._execute(scope, request, program, whole)
        except (Unreadable, NotHoldable, jaxcompat.InvalidInputError):
            return self._delegate(args, kwargs)
        finally:
            self.resolver.settle()
        through_python = watched or scope.closed
        if not (request.call.signature.statics or through_python) and whole is not None:
            self.global_arguments = whole
        return outputs, None if through_python else fast_path

    @property
    def resident_runner(self) -> ResidentRunner:
        """Runs the calls that pass `Variables`; what it imports few programs need."""
        from stepcache.resident.runner import ResidentRunner

        with _making:  # By the first of several threads.
            if self._resident_runner is None:
                own: Any = {"scope": self.scope, "miss_log": self.miss_log, "is_over_buffers": True}
                self._resident_runner = ResidentRunner(self, functools.partial(Engine, **own))
            return self._resident_runner

    def run_resident(self, args: tuple, kwargs: dict) -> Any:
        call = self.resident_runner.read(args, kwargs)
        if jaxcompat.is_tracing():
            args, kwargs = call.inlined()
            return self.spec.jitted(*args, **kwargs)
        return self.resident_runner.run(self._open_scope(), call)

    def is_planned(self) -> bool:
        """Whether a call over buffers comes from a plan, and not from `run_resident`."""
        is_admitted = getattr(admitted, "engine", None) is self
        return self.is_over_buffers and (not is_admitted or jaxcompat.is_tracing())

    def resident_call(self, args: tuple, kwargs: dict) -> ResidentCall | None:
        """A call that passes `Variables`; None where it passes none, or only names them."""
        if not passes_variables(args, kwargs) or self.scope().target is not None:
            return None
        return self.resident_runner.read(args, kwargs).checked(self.scope())

    def resident(self, args: tuple, kwargs: dict) -> tuple[Engine, tuple, dict]:
        """The engine that serves a call, and the arguments that it is given."""
        if (target := self.scope().target) is not None:
            return self, *target.shown(args, kwargs)
        if (call := self.resident_call(args, kwargs)) is None:
            return self, args, kwargs
        form, args, kwargs = call.shown()
        return self.resident_runner.engine_of(form), args, kwargs

    def warm(self, args: tuple, kwargs: dict) -> Program | None:
        """Builds the program of a call; None where other processes, or `jax.jit` itself, run it."""
        started = time.perf_counter()
        if (target := self.scope().target) is not None:
            return target.warm(self, self._open_scope(), args, kwargs)
        engine, args, kwargs = self.resident(args, kwargs)
        if engine is not self:
            return engine.warm(args, kwargs)
        scope = self._open_scope()
        try:
            request = self.request(scope, args, kwargs)
            check_runnable(self.spec.name, request)
            self._warn_of_unnamed_batch(scope, request)
            program = self._find(scope, request)
            return program or self._obtain(scope, request, started, explicit=True)
        except Unreadable:
            self.trace(args, kwargs)  # JAX says what is wrong with the call, if anything is.
            return None
        except NotHoldable:
            return None
        finally:
            self.resolver.settle()

    def trace(self, args: tuple, kwargs: dict) -> Any:
        """The `jax.stages.Traced` of the program that a call needs."""
        engine, args, kwargs = self.resident(args, kwargs)
        if engine is not self:
            return engine.trace(args, kwargs)
        scope = self.scope()
        is_jax_s = scope.placer is None and not self.spec.parameters.carry
        if not (is_jax_s or jaxcompat.is_tracing()):
            with contextlib.suppress(Unreadable):
                request = self.request(scope, args, kwargs)
                with jaxcompat.tracing_context(request.mesh):
                    return trace(checking_modules(self.spec, request.call), request).as_traced()
        with jaxcompat.tracing_context(None):
            return self.spec.jitted.trace(*args, **kwargs)

    def eval_shape(self, args: tuple, kwargs: dict) -> Any:
        """The shapes and dtypes of the outputs of a call."""
        if (call := self.resident_call(args, kwargs)) is not None:
            return self.resident_runner.eval_shape(self.scope(), call)
        _, args, kwargs = self.resident(args, kwargs)
        with in_mesh_of(self.scope()):
            return self.spec.jitted.eval_shape(*args, **kwargs)

    def _delegate(self, args: tuple, kwargs: dict) -> tuple[Any, Any]:
        self.miss_log.count(delegated=1)
        self.calls_back |= not jaxcompat.is_tracing()  # It may: of a program of JAX's none knows.
        return self.spec.jitted(*args, **kwargs), None

    def _open_scope(self) -> Scope:
        jaxcompat.check_not_forked(f"{self.spec.name} was called")
        self._check_open(scope := self.scope())
        return scope

    def _check_open(self, scope: Scope) -> None:
        if scope.closed:
            raise SessionClosedError(
                f"{self.spec.name} was called in a session that has been closed",
                hint="close a session after its last step, or make a new one",
            )

    def request(
        self, scope: Scope, args: tuple, kwargs: dict, *, as_committed: bool = False
    ) -> Request:
        """Reads, places and keys a call. Traces nothing and moves nothing.

        A call that is committed to the device where it would run anyway has the key of one that is
        not, unless `as_committed`.

        Raises:
            Unreadable: only JAX can judge the call.
            PlacementError: a leaf cannot be placed as asked.
        """
        call = signatures.read(self.spec.parameters, args, kwargs)
        leaves, placed, asked = place(self.spec, scope.placer, call)
        commits = (
            scope.mesh is None
            and not (as_committed or self.is_over_buffers or self.spec.places_outputs)
            and is_at_default(leaves, asked)
        )
        keyed = tuple(leaf._replace(sharding=None) for leaf in leaves) if commits else leaves
        placed_call = call.with_signature_leaves(keyed)
        mesh = None if is_elsewhere(scope.mesh, leaves, placed, asked) else scope.mesh
        key = Key(
            self.spec.identity,
            placed_call.signature,
            mesh_identity(mesh),
            self.spec.key_options,
            jaxcompat.environment(),
        )
        return Request(call, leaves, placed, asked, key, mesh, self.spec.tell, commits)

    def _warn_of_unnamed_batch(self, scope: Scope, request: Request) -> None:
        if scope.placer is not None and not self.miss_log.warned_of_batch:
            advice = unnamed_batch(self.spec, scope.placer, request)
            if advice is not None:
                self.miss_log.warned_of_batch = True
                warn(advice, StepCacheWarning)

    def foresee(self, scope: Scope, request: Request) -> tuple[Miss, bool, float | None]:
        """Why a call finds no program in memory, and what it would do.

        Whether the last runs used a program for such a call that is on disk; and since when a KEY
        vouches for the step, None if it would be traced.
        """
        miss, store = self.miss_log.why(request), scope.cache.store()
        if store is None:
            return miss, False, None
        shown = request.shown.paths, request.shown.signature
        described = describe(self.resolver.label, request.key, *shown)
        trusted = scope.cache.trusted
        place = self.miss_log.making.place
        since = trusted.release(described, request, place).since if trusted is not None else None
        prediction = store.predictions.find(described.label, described.signature)
        if prediction is not None:
            return miss, store.disk.holds("program", prediction.program), since
        return compared_with_earlier_run(miss, store, described, "", lambda: ""), False, since

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
        """The program of a call that missed: resolved here, or by another thread meanwhile."""
        resolve = self.resolver.resolve
        build = functools.partial(resolve, scope, request, started, explicit=explicit)
        try:
            program, built = scope.cache.get_or_build(request.key, self, build)
        except NotHoldable:
            self._not_holdable.add(request.key)
            raise
        self._check_open(scope)
        if not built:
            self.miss_log.count(hits=1)
        return program

    def _execute(
        self, scope: Scope, request: Request, program: Program, whole: GlobalArguments | None
    ) -> tuple[Any, Any]:
        call = request.call if whole is None else whole.in_place(request.call)
        try:
            self.calls_back |= program.run.calls_back
            outputs, fast_path = program.run(call.leaves, call.args, call.kwargs)
            if request.commits or is_committed_by_hosts(request) or not program.is_committed:
                commits = request.commits
                outputs, fast_path = jaxcompat.recommitted(outputs, fast_path, is_committed=commits)
            return outputs, fast_path if call is request.call else None
        except jaxcompat.FloatingPointCheckError as error:
            jaxcompat.explain_floating_point_error(error, self.spec.fun, *call.given)
            raise
        except (RuntimeError, ValueError) as error:
            if "deleted" in str(error):
                note_deleted(error, call)
            if (peers := scope.together(request.ranks)) is not None:
                peers.watch.raise_if_lost_by(error)
            raise

    def show_use(self) -> None:
        """A cache asks which programs are in use: the next calls come through it."""
        self.dispatcher.clear()

    def lost(self, program: Program, reason: str) -> None:
        """A cache dropped a program: it goes from the dispatcher, and JAX's traces with it."""
        self.dispatcher.clear()
        jaxcompat.forget_traces(self.spec.jitted, self.spec.fun)
        self.miss_log.gone(program.key, reason)
        if reason == "evicted":
            self.miss_log.count(evictions=1)
            recorder.emit(Evicted(self.spec.name, "made room in memory"))

    def clear(self) -> None:
        """Drops all programs of the step from memory, and JAX's traces of its function."""
        if self._resident_runner is not None:
            for engine in self._resident_runner.engines():
                engine.clear()
        for cache in self._caches:
            cache.release(self.number)
        self._not_holdable.clear()
        self.dispatcher.clear()
        self.spec.jitted.clear_cache()
        self.miss_log.all_gone("cleared")

    def programs(self) -> int:
        """How many programs of the step are held."""
        runner = self._resident_runner
        resident = sum(each.programs() for each in runner.engines()) if runner is not None else 0
        return resident + sum(cache.programs_of(self) for cache in self._caches)
