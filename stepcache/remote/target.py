"""`Target`: runs the steps of a session on tasks.

A step is traced here, over the abstract mesh of the tasks, and travels once, as StableHLO. After
that a call is one message: the number of its *call form*, which says which arrays and variables the
program takes and which variables it writes.
"""

import contextlib
import hashlib
import itertools
import threading
import time
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
from jax.sharding import AbstractMesh, NamedSharding, PartitionSpec

from stepcache import jaxcompat
from stepcache.calls.carry import carried_leaves, check_carry, settled_leaves
from stepcache.calls.context import Scope
from stepcache.calls.key import Key
from stepcache.calls.signature import Unreadable
from stepcache.calls.step_spec import Request, StepSpec
from stepcache.engine import Engine
from stepcache.errors import CarryError, OptionError, TaskError
from stepcache.jaxcompat.specs import decode_spec, encode_dtype, encode_spec
from stepcache.remote.arrays import ArrayType, RemoteArray
from stepcache.remote.calls import Arguments, CallPlan, Groups, RemoteProgram, kind_of
from stepcache.remote.clients import MAX_FORMS
from stepcache.remote.connection import Connection
from stepcache.remote.messages import packed
from stepcache.remote.tracing import TracedStep, donated_leaves
from stepcache.remote.variables import fed, hold, master_of, placed, state_types
from stepcache.variables.describing import Placing
from stepcache.variables.policy import OnHost, Read
from stepcache.variables.variables import Variables

_MAX_PLANS = 256


class Planned(NamedTuple):
    """What a call would do.

    Attributes:
        request: the call.
        seconds: what its program took to build; None if there is none yet.
        sources: for each leaf, what on the tasks it stands for; None for one that is sent.
    """

    request: Request
    seconds: dict[str, float] | None
    sources: list[Any]


class Target:
    """The tasks of a session, and the mesh of their devices.

    Attributes:
        number: different for each, for JAX's keys.
        session: returns the session; None if it is gone.
        lock: held while a call is made, so that runs are numbered in the order in which they refer
            to each other.
    """

    _numbers = itertools.count(1)

    def __init__(self, connection: Connection, mesh: AbstractMesh):
        self.connection, self.mesh = connection, mesh
        self.number = next(self._numbers)
        self.session: Any = lambda: None
        self.lock = threading.RLock()
        self._programs: dict[tuple[int, Key], RemoteProgram] = {}  # Also by incarnation.
        self._engines: dict[tuple, Engine] = {}
        self._forms: dict[tuple, int] = {}
        self._plans: dict[tuple, CallPlan] = {}
        self._form_numbers = itertools.count(1)
        # They do not refer to the target, which closes the connection when it is dropped.
        connection.on_restart += [each.clear for each in (self._programs, self._forms, self._plans)]

    @property
    def mesh_code(self) -> list[Any]:
        """The mesh, as messages describe it."""
        mesh = self.mesh
        kinds = [kind.name for kind in mesh.axis_types]
        return [list(mesh.axis_names), list(mesh.axis_sizes), kinds]

    def hold(self, placing: Placing, tree: Any) -> Any:
        """Returns the master of new variables on the tasks; see `variables.hold`."""
        with self.lock:
            return hold(self, placing, tree)

    def check_policies(self, variables: Variables) -> None:
        """Raises `OptionError` for what has no effect where the value is where steps run."""
        given = {
            "placement": isinstance(variables.placement, OnHost),
            "read": variables.read != Read(),
            "pack": variables._placing.pack,
        }
        for name in (name for name, is_given in given.items() if is_given):
            raise OptionError(
                f"{name} has no effect on variables that live on tasks",
                where=variables.name,
                hint="remove it: the value is where the steps run",
            )

    def push(self, variables: Variables, update: Any, mode: str) -> None:
        """Adds an update to variables, or passes it to their optimizer, on the tasks."""
        with self.lock, self._entered():
            if mode == "add":
                self._own_step(("add",), _added, ("value",))(variables, update)
                return
            state, optimizer = self.ready_state(variables), variables.write.optimizer

            def applied(value, state, update):
                import optax

                updates, state = optimizer.update(update, state, value)
                return optax.apply_updates(value, updates), state

            key = ("apply", id(optimizer))
            self._own_step(key, applied, ("value", "state"))(variables, state, update)

    def ready_state(self, variables: Variables, first: Any = None) -> Variables:
        """Returns the variables that hold an optimizer's state, and makes them if need be.

        Their first value is `first`, if given, or what the optimizer makes of the variables.
        """
        master = master_of(variables)
        with self.lock, self._entered():
            if master.state is None and first is None:
                init, (_, slots) = variables.write.optimizer.init, state_types(variables)
                places = tuple(slot.sharding for slot in slots)
                key = ("init", id(init), places)
                first = self._own_step(key, placed(init, places), ())(variables)
            if master.state is None:
                master.state = Variables(first, name=f"{variables.name}/optimizer")
        return master.state

    def _entered(self) -> contextlib.AbstractContextManager:
        """Returns a context manager of what runs a step of our own: the session."""
        if (scope := jaxcompat.entered_session()) is not None and scope.target is self:
            return contextlib.nullcontext()
        if (session := self.session()) is None:
            raise TaskError("the session of the variables is gone", hint="keep it")
        return session

    def _own_step(self, key: tuple, fun: Callable, carry: tuple[str, ...]) -> Callable[..., Any]:
        """Returns a step of our own, made once. Called in the session."""
        if key not in self._engines:
            scope = jaxcompat.entered_session()
            options: dict[str, Any] = {"donate_argnames": carry} if carry else {}
            spec = StepSpec.of(fun, options, carry)
            self._engines[key] = Engine(spec, lambda: scope)
        engine = self._engines[key]
        return lambda *args: self.call(engine, engine.scope(), args, {})

    def call(self, engine: Any, scope: Scope, args: tuple, kwargs: dict) -> Any:
        """Starts a step on the tasks. Returns `RemoteArray`s, and the variables that it carried.

        Raises:
            RankLostError: tasks were lost since the last call.
            TaskError: the step cannot run there.
        """
        with self.lock:
            incarnation = self.connection.ready()
            self.connection.flush_freed()
            leaves, tree = jax.tree_util.tree_flatten((args, kwargs))
            kinds = tuple(map(kind_of, leaves))
            settings = jaxcompat.environment()
            known = (incarnation, engine.number, engine.spec.key_options, tree, kinds, settings)
            plan = None if None in kinds else self._plans.get(known)
            if plan is None:
                plan = self._planned(engine, scope, args, kwargs)
                if None not in kinds and not plan.has_statics:
                    self._plans[known] = plan
                    while len(self._plans) > _MAX_PLANS:
                        del self._plans[next(iter(self._plans))]
            elif scope.count_hits:
                engine.miss_log.count(hits=1)
            if plan.has_statics:
                leaves = plan.dynamic_leaves(args, kwargs)
            return self._run(plan, leaves, incarnation)

    def _planned(self, engine: Any, scope: Scope, args: tuple, kwargs: dict) -> CallPlan:
        """Reads a call, and finds its program."""
        started = time.perf_counter()
        arguments = Arguments(self, args, kwargs)
        request = _request(engine, scope, arguments)
        program = self._known(request)
        if program is None:
            program = self._obtain(engine, scope, request, started, explicit=False)
        else:
            engine.miss_log.count(hits=1)
        return CallPlan(engine.spec, request, arguments, program)

    def warm(self, engine: Any, scope: Scope, args: tuple, kwargs: dict) -> None:
        """Has the program of a call compiled by the tasks, and runs nothing."""
        with self.lock:
            self.connection.ready()
            request = _request(engine, scope, Arguments(self, args, kwargs))
            if self._known(request) is None:
                self._obtain(engine, scope, request, time.perf_counter(), explicit=True)

    def shown(self, args: tuple, kwargs: dict) -> tuple[tuple, dict]:
        """Returns the arguments of a call with stand-ins for what lives on the tasks."""
        return Arguments(self, args, kwargs).shown

    def planned(self, engine: Any, scope: Scope, args: tuple, kwargs: dict) -> Planned:
        """Says what a call would do. Runs nothing."""
        arguments = Arguments(self, args, kwargs)
        request = _request(engine, scope, arguments)
        program = self._known(request)
        found = [arguments.sources.get(id(leaf)) for leaf in request.call.leaves]
        sources = [None if isinstance(each, jax.Array) else each for each in found]
        return Planned(request, program and program.seconds, sources)

    def _run(self, plan: CallPlan, leaves: list[Any], incarnation: int) -> Any:
        """Starts a run. `leaves` are those of the arguments, with variables as one leaf each."""
        connection, program = self.connection, plan.program
        connection.make_room(incarnation)
        run = connection.runs + 1
        refs, takes = Groups(), Groups()
        taken: list[RemoteArray] = []
        feeds: list[Any] = []
        values = connection.values()
        for leaf, (first, count, feed) in zip(leaves, plan.rows, strict=True):
            if isinstance(leaf, Variables):
                if count:
                    refs.rows.append(("v", master_of(leaf).number))
            elif isinstance(leaf, RemoteArray):
                ref = leaf.ref(run)
                refs.add(*ref)
                if first in program.donated:
                    takes.add(*ref)
                    taken.append(leaf)
            else:
                refs.add_feed()
                feeds.append(fed(leaf, feed, values))
        if len(set(map(id, taken))) != len(taken):
            raise CarryError(
                f"{plan.name} gets the same array in several places, and donates it",
                expected="a separate array for each leaf that is carried or donated",
            )
        form = (incarnation, program.number, *refs.rows, None, *takes.rows, None, *plan.writes)
        number = self._forms.get(form)
        about: dict[str, Any] = {}
        if number is None:
            number = next(self._form_numbers)
            about["form"] = {
                "program": program.number,
                "refs": refs.rows,
                "takes": takes.rows,
                "writes": plan.writes,
            }
        if feeds:
            about |= {"feeds": feeds, **values.fields}
        body = packed(**about) if about else b""
        connection.run(incarnation, number, body, values)
        for each in taken:
            each.donated()
        for variables in plan.outputs.written:
            master_of(variables).written(run)
        self._forms[form] = number
        while len(self._forms) > MAX_FORMS:  # As all others do who know them.
            del self._forms[next(iter(self._forms))]
        return plan.outputs.tree(connection, incarnation, run)

    def _known(self, request: Request) -> RemoteProgram | None:
        return self._programs.get((self.connection.incarnation, request.key))

    def _obtain(
        self, engine: Any, scope: Scope, request: Request, started: float, *, explicit: bool
    ) -> RemoteProgram:
        """Traces a step, and has the tasks compile it."""
        resolver, spec, incarnation = engine.resolver, engine.spec, self.connection.incarnation
        miss = engine.miss_log.why(request)
        if not explicit:
            resolver.judge(scope, miss)
        seconds: dict[str, float] = {}
        traced, settled = self._traced(spec, request, seconds)
        program = self._define(spec.name, traced, seconds)
        self._programs[incarnation, request.key] = program
        if settled:
            self._programs[incarnation, request.settled(settled).key] = program
        own = time.perf_counter() - started - sum(seconds.values())
        resolver.built_elsewhere(request, miss, seconds, own)
        scope.check_rules(spec.name, request.shown.paths, carries=bool(spec.parameters.carry))
        return program

    def _traced(
        self, spec: StepSpec, request: Request, seconds: dict[str, float]
    ) -> tuple[TracedStep, tuple[int, ...]]:
        call = request.call
        leaves = list(request.leaves)
        settled: tuple[int, ...] = ()
        while True:
            stand_ins = [
                self._stand_in(leaf, asked)
                for leaf, asked in zip(leaves, request.asked, strict=True)
            ]

            def fun(*leaves):
                args, kwargs = call.rebuilt(leaves)
                return spec.fun(*args, **kwargs)

            traced = TracedStep(fun, stand_ins, self.mesh, seconds)
            if not spec.parameters.carry:
                break
            pins = check_carry(spec, request, traced)  # type: ignore[arg-type]
            traced.pins = pins
            known, settled = settled, settled_leaves(spec, request, traced.out_avals)
            if known == settled:
                break
            for number in settled:
                leaves[number] = leaves[number].settled()
        traced.donated = donated_leaves(spec, request)
        traced.carried = carried_leaves(spec, request)
        return traced, settled

    def _stand_in(self, leaf: Any, asked: Any) -> jax.ShapeDtypeStruct:
        sharding = asked or leaf.sharding
        if not isinstance(sharding, NamedSharding) or sharding.mesh != self.mesh:
            sharding = NamedSharding(self.mesh, getattr(sharding, "spec", PartitionSpec()))
        return jax.ShapeDtypeStruct(
            leaf.shape, leaf.dtype, sharding=sharding, weak_type=leaf.weak_type
        )

    def _define(self, name: str, traced: TracedStep, seconds: dict[str, float]) -> RemoteProgram:
        """Has the tasks compile what was traced."""
        begun = time.perf_counter()
        exported = traced.exported(self.connection.about["platform"], name)
        lowered = time.perf_counter()
        outs = [pin and encode_spec(pin.spec) for pin in traced.out_pins]
        about: dict[str, Any] = {
            "name": name,
            "mesh": self.mesh_code,
            "in": [encode_spec(each.sharding.spec) for each in traced.stand_ins],
            "types": [[encode_dtype(each.dtype), list(each.shape)] for each in traced.stand_ins],
            "out": outs,
            "donate": sorted(traced.donated),
            "carried": traced.carried,
        }
        digest = hashlib.sha256(exported).digest()
        about["digest"] = digest + hashlib.sha256(packed(**about)).digest()
        number, answer = self.connection.define(about, exported)
        seconds["lower"] = seconds.get("lower", 0.0) + lowered - begun
        seconds["compile"] = time.perf_counter() - lowered
        outputs = tuple(
            ArrayType(
                aval.shape, aval.dtype, aval.weak_type, NamedSharding(self.mesh, decode_spec(spec))
            )
            for aval, spec in zip(traced.out_avals, answer["specs"], strict=True)
        )
        donated = frozenset(traced.donated)
        return RemoteProgram(number, traced.out_tree, outputs, donated, dict(seconds))


def _added(value: Any, update: Any) -> Any:
    return jax.tree.map(jax.numpy.add, value, update)


def _request(engine: Any, scope: Scope, arguments: Arguments) -> Request:
    """Reads a call. Raises JAX's own error if the step cannot be called so."""
    try:
        return engine.request(scope, *arguments.shown)
    except Unreadable:
        args, kwargs = arguments.shown
        engine.spec.jitted.trace(*args, **kwargs)
        raise TaskError(f"{engine.spec.name} cannot be called so on tasks") from None
