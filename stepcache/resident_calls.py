"""Calls that pass `Variables`: run by an engine over their buffers, and planned for later calls."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable
from typing import Any

from stepcache import jaxcompat
from stepcache.calls.call_plan import CallPlans
from stepcache.calls.context import Scope
from stepcache.calls.over_buffers import Form, bare
from stepcache.calls.residence import Use, check_budget
from stepcache.calls.signature import Unreadable
from stepcache.calls.step_spec import StepSpec
from stepcache.dispatcher import Dispatcher
from stepcache.distributed.hang_report import CallCount
from stepcache.programs.miss_log import MissLog
from stepcache.variables.checkpoint_items import locked

_making = threading.RLock()  # One engine may make another.
_admitted = threading.local()


def is_admitted(engine: Any) -> bool:
    """Whether this thread is in a call that `ResidentCalls.run` gave to an engine."""
    return getattr(_admitted, "engine", None) is engine


class ResidentCalls:
    """Serves the calls of one step that pass `Variables`; `dispatch` those without a plan."""

    def __init__(
        self,
        spec: StepSpec,
        miss_log: MissLog,
        call_count: CallCount,
        dispatch: Callable[..., Any],
        make_engine: Callable[[], Any],
    ):
        self.spec, self.miss_log, self.call_count = spec, miss_log, call_count
        self.made: Any = None  # The engine that runs the step over buffers, once there is one.
        # Has the step call something else than its dispatcher; the step sets it.
        self.serve_by: Callable[[], Callable[[Callable], None] | None] = lambda: None
        self._make_engine = make_engine
        self._plans = CallPlans(spec, dispatch)
        self._runs = 0

    @property
    def engine(self) -> Any:
        """Runs the step where its arguments are buffers in the place of `Variables`."""
        if self.made is None:
            with _making:  # By the first of several threads.
                if self.made is None:
                    self.made = self._make_engine()
        return self.made

    def run(self, scope: Scope, use: Use) -> Any:
        """Runs one call. Returns its outputs, with the `Variables` that it carried in them."""
        engine = self.engine
        with locked(use.checked(scope).variables):
            use.compare_values(scope)
            if scope.check_replicas_every:
                self._runs += 1
                use.check_replicas(scope, self._runs)
            if scope.max_step_bytes is not None:
                request = None  # Where only JAX can judge the other arguments.
                with contextlib.suppress(Unreadable):
                    request = engine.request(scope, *use.shown())
                check_budget(scope, self.spec.name, request, use)
            before, _admitted.engine = getattr(_admitted, "engine", None), engine
            try:
                form, args, kwargs = bare(*use.taken(), self.spec.parameters.roles)
                dispatcher = engine.dispatcher.bound(form)
                outputs = dispatcher.call(*args, **kwargs)
                written = use.written(outputs)
                self._plan(scope, use, form, outputs, dispatcher)
                return written
            finally:
                _admitted.engine = before
                if moved := sum(use.meter.values()):
                    self.miss_log.count(moved_bytes=moved)
                    use.meter.emit(self.spec.name)

    def _plan(
        self, scope: Scope, use: Use, form: Form, outputs: Any, dispatcher: Dispatcher
    ) -> None:
        """Has the next calls like this one served by a plan; it counts no calls."""
        serve_by = self.serve_by()
        if serve_by is None or scope.is_watched or not jaxcompat.PRIVATE_API:
            return
        if jaxcompat.arguments_outlive_calls():
            return
        if scope.check_replicas_every:
            plan = self._plans.stop()
        else:
            plan = self._plans.add(use, form, outputs, dispatcher)
        if plan is not None:
            self.call_count.is_whole = False
            serve_by(plan)
