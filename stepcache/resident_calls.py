"""Calls that pass `Variables`: run by an engine over their buffers, and planned for later calls."""

from __future__ import annotations

import contextlib
from typing import Any

from stepcache import jaxcompat
from stepcache.calls.bound_variables import admitted
from stepcache.calls.call_plan import CallPlans
from stepcache.calls.context import Scope
from stepcache.calls.over_buffers import Form, bare, shapes_in
from stepcache.calls.placement import check_budget
from stepcache.calls.residence import Use
from stepcache.calls.signature import Unreadable
from stepcache.dispatcher import Dispatcher
from stepcache.variables.variables import locked


class ResidentCalls:
    """Serves the calls of one step that pass `Variables`.

    `own` is the engine of the step, which is not kept alive. `engine` runs the step where its
    arguments are buffers in the place of `Variables`.
    """

    def __init__(self, own: Any, engine: Any):
        self.engine, self.spec, self.serve_by = engine, own.spec, own.serve_by
        self.miss_log, self.call_count = own.miss_log, own.call_count
        self._plans = CallPlans(own.spec, own.dispatcher.call)

    shapes_in = staticmethod(shapes_in)

    def use(self, args: tuple, kwargs: dict[str, Any]) -> Use:
        """The `Variables` of a call."""
        return Use(self.spec, args, kwargs)

    def run(self, scope: Scope, use: Use) -> Any:
        """Runs one call. Returns its outputs, with the `Variables` that it carried in them."""
        engine = self.engine
        with locked(use.checked(scope).variables):
            use.compare_values(scope)
            if scope.max_step_bytes is not None:
                request = None  # Where only JAX can judge the other arguments.
                with contextlib.suppress(Unreadable):
                    request = engine.request(scope, *use.shown())
                check_budget(scope, self.spec.name, request, use)
            before, admitted.engine = getattr(admitted, "engine", None), engine
            try:
                form, args, kwargs = bare(*use.taken(), self.spec.parameters.roles)
                dispatcher = engine.dispatcher.bound(form)
                outputs = dispatcher.call(*args, **kwargs)
                written = use.written(outputs)
                self._plan(scope, use, form, outputs, dispatcher)
                return written
            finally:
                admitted.engine = before
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
        plan = self._plans.add(use, form, outputs, dispatcher)
        if plan is not None:
            self.call_count.is_whole = False
            serve_by(plan)
