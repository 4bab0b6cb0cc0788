"""`ResidentRunner`: runs the calls of one step that pass `Variables`, and plans later ones."""

from __future__ import annotations

import contextlib
import functools
import threading
from collections import OrderedDict
from collections.abc import Callable
from typing import Any

from stepcache import jaxcompat
from stepcache.calls.context import Scope, in_mesh_of
from stepcache.calls.placement import check_budget
from stepcache.calls.signature import Unreadable
from stepcache.resident.call import ResidentCall
from stepcache.resident.form import Form, over_buffers
from stepcache.resident.passing import admitted
from stepcache.resident.plan import plan_of
from stepcache.variables.variables import locked

_FORMS_PER_STEP, _PLANS_PER_STEP = 64, 8


class ResidentRunner:
    """Runs the calls of one step that pass `Variables`.

    `own` is the engine of the step, which is not kept alive. `make_engine` makes the engine of the
    step over the buffers of one `Form`.
    """

    def __init__(self, own: Any, make_engine: Callable[[Any], Any]):
        self.spec, self._serve_by = own.spec, own.serve_by
        self._miss_log, self._call_count = own.miss_log, own.call_count
        self._make_engine = make_engine
        self._engines: OrderedDict[Form, Any] = OrderedDict()
        self._lock = threading.RLock()
        self._planned: set[Any] = set()
        # Each plan passes on the calls that it does not serve, the first one to the dispatcher.
        self._dispatch = self._newest_plan = own.dispatcher.call

    def read(self, args: tuple, kwargs: dict[str, Any]) -> ResidentCall:
        """A call, and its `Variables`."""
        return ResidentCall(self.spec, args, kwargs)

    def engines(self) -> list[Any]:
        """Those of the forms that the last calls had."""
        return list(self._engines.values())

    def engine_of(self, form: Form) -> Any:
        """What runs the step over the buffers of a form."""
        with self._lock:
            engine = self._engines.get(form)
            if engine is None:
                engine = self._engines[form] = self._make_engine(over_buffers(self.spec, form))
                if len(self._engines) > _FORMS_PER_STEP:
                    self._engines.popitem(last=False)
            self._engines.move_to_end(form)
            return engine

    def eval_shape(self, scope: Scope, call: ResidentCall) -> Any:
        """The shapes of the outputs of a call, with trees in the place of variables."""
        form, args, kwargs = call.shown()
        with in_mesh_of(scope):
            shapes = self.engine_of(form).spec.jitted.eval_shape(*args, **kwargs)
        carry = self.spec.parameters.carry
        return form.put_back(carry, shapes, form.shapes) if call.carried else shapes

    def run(self, scope: Scope, call: ResidentCall) -> Any:
        """Runs one call. Returns its outputs, with the `Variables` that it carried in them."""
        with locked(call.checked(scope).variables):
            call.compare_values(scope)
            if scope.max_step_bytes is not None:
                form, args, kwargs = call.shown()
                engine, request = self.engine_of(form), None
                with contextlib.suppress(Unreadable):  # Only JAX can judge the other arguments.
                    request = engine.request(scope, args, kwargs)
                check_budget(scope, engine.spec, request, call.plan().bytes_by_transfer)
            before = getattr(admitted, "engine", None)
            try:
                form, args, kwargs = call.taken()
                engine = admitted.engine = self.engine_of(form)
                outputs = engine.dispatcher.call(*args, **kwargs)
                written = call.written(form, outputs)
                self._plan(scope, call, form, outputs, engine)
                return written
            finally:
                admitted.engine = before
                if moved := sum(call.meter.values()):
                    self._miss_log.count(moved_bytes=moved)
                    call.meter.emit(self.spec.name)

    def _plan(
        self, scope: Scope, call: ResidentCall, form: Form, outputs: Any, engine: Any
    ) -> None:
        """Has the next calls like this one served by a plan, if it may: a plan counts no calls,
        and takes values that live on the devices.
        """
        serve_by = self._serve_by()
        if serve_by is None or scope.is_watched or not jaxcompat.PRIVATE_API:
            return
        on_devices = all(each._master.is_resident for each in call.variables)
        if not on_devices or jaxcompat.arguments_outlive_calls():
            return
        args, kwargs = call.given
        carry = self.spec.parameters.carry
        is_alone = call.carried > 0 and form.comes_alone(carry, outputs)
        numbers = tuple(each._number for each in call.variables)
        key = (form, len(args), tuple(kwargs), is_alone, numbers)
        with self._lock:
            if key in self._planned:
                return
            if len(self._planned) == _PLANS_PER_STEP:
                self._planned, self._newest_plan = set(), self._dispatch
            self._planned.add(key)
            plan = plan_of(carry, call, form, is_alone, engine, self._newest_plan)
            self._newest_plan = functools.update_wrapper(plan, self._newest_plan)
            self._call_count.is_whole = False
            serve_by(self._newest_plan)
