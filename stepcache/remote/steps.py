"""`Target`: runs the steps of a session on tasks.

A step is traced here, over the abstract mesh of the tasks, and travels once, as StableHLO. After
that a call is one message: the number of its *call form*, which says which arrays and variables the
program takes and which variables it writes.
"""

from __future__ import annotations

import functools
import hashlib
import itertools
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import numpy as np
from jax import export
from jax.sharding import AbstractMesh, NamedSharding, PartitionSpec

from stepcache import jaxcompat
from stepcache.calls.carry import check_carry, settled_leaves
from stepcache.calls.context import Scope
from stepcache.calls.key import Key
from stepcache.calls.over_buffers import argument_of
from stepcache.calls.step_spec import Request, StepSpec
from stepcache.engine import Engine
from stepcache.errors import CarryError, TaskError, first_line
from stepcache.jaxcompat.call_codec import decode_spec, encode_dtype, encode_spec
from stepcache.remote.arrays import ArrayType, RemoteArray
from stepcache.remote.connection import Connection
from stepcache.remote.messages import packed
from stepcache.variables.packing import is_key_type
from stepcache.variables.variables import Variables

_MAX_PLANS = 256


@dataclass(frozen=True)
class RemoteProgram:
    """A program that the tasks hold.

    Attributes:
        number: by which they know it.
        out_tree: tree of the outputs.
        outputs: each output.
        donated: numbers of the arguments, among the leaves, that it takes.
        seconds: what each stage took.
    """

    number: int
    out_tree: Any
    outputs: tuple[ArrayType, ...]
    donated: frozenset[int]
    seconds: dict[str, float]


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
    """The tasks of a session.

    Args:
        connection: to them.
        mesh: of their devices.

    Attributes:
        connection, mesh: as given.
        number: different for each, for JAX's keys.
    """

    _numbers = itertools.count(1)

    def __init__(self, connection: Connection, mesh: AbstractMesh):
        self.connection, self.mesh = connection, mesh
        self.number = next(self._numbers)
        self._lock = threading.RLock()
        self._programs: dict[Key, RemoteProgram] = {}
        self._engines: dict[tuple, Engine] = {}
        self._forms: dict[tuple, int] = {}
        self._plans: dict[tuple, _Plan] = {}
        self._form_numbers = itertools.count(1)
        connection.on_restart.append(self._forget)

    def _forget(self) -> None:
        """Forgets what tasks knew that have ended."""
        for each in (self._programs, self._forms, self._plans):
            each.clear()

    @property
    def mesh_code(self) -> list[Any]:
        """The mesh, as messages describe it."""
        mesh = self.mesh
        kinds = [kind.name for kind in mesh.axis_types]
        return [list(mesh.axis_names), list(mesh.axis_sizes), kinds]

    def hold(self, name: str, tree: Any, placement: Any, placer: Any, prefix: str) -> Any:
        """Returns the master of new variables on the tasks; see `variables.hold`."""
        from stepcache.remote.variables import hold

        with self._lock:
            return hold(self, name, tree, placement, placer, prefix)

    # ---- variables -------------------------------------------------------------------------------

    def save(self, root: Any, items: dict[str, Any], keep: int | None, step: int) -> Any:
        """Has the tasks write a checkpoint; see `checkpoints.save`."""
        from stepcache.remote import checkpoints

        with self._lock:
            return checkpoints.save(self, root, items, keep, step)

    def restore(self, root: Any, items: dict[str, Any], partial: bool) -> dict[str, Any]:
        """Has the tasks read a checkpoint; see `checkpoints.restore`."""
        from stepcache.remote import checkpoints

        with self._lock:
            return checkpoints.restore(self, root, items, partial)

    def push(self, variables: Variables, update: Any, mode: str) -> None:
        """Adds an update to variables, or passes it to their optimizer, on the tasks."""
        with self._lock:
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

    def ready_state(self, variables: Variables) -> Variables:
        """Returns the variables that hold an optimizer's state, and makes them if need be."""
        master: Any = variables._master
        if master.state is None:
            init = variables.write.optimizer.init
            state = self._own_step(("init", id(init)), lambda value: init(value), ())(variables)
            master.state = Variables(state, name=f"{variables.name}/optimizer")
        return master.state

    def _own_step(self, key: tuple, fun: Callable, carry: tuple[str, ...]) -> Callable[..., Any]:
        """Returns a step of our own, made once. Called in the session."""
        if key not in self._engines:
            scope = jaxcompat.entered_session()
            options: dict[str, Any] = {"donate_argnames": carry} if carry else {}
            spec = StepSpec.of(fun, options, carry)
            self._engines[key] = Engine(spec, lambda: scope)
        engine = self._engines[key]
        return lambda *args: self.call(engine, engine.scope(), args, {})

    # ---- a call ----------------------------------------------------------------------------------

    def call(self, engine: Any, scope: Scope, args: tuple, kwargs: dict) -> Any:
        """Starts a step on the tasks.

        Returns:
            Its outputs: `RemoteArray`s, and the variables that it carried.

        Raises:
            RankLostError: tasks were lost since the last call.
            TaskError: the step cannot run there.
        """
        with self._lock:
            self.connection.ready()
            self.connection.flush_freed()
            leaves, tree = jax.tree_util.tree_flatten((args, kwargs))
            kinds = tuple(map(_kind, leaves))
            settings = jaxcompat.environment()
            known = (engine.number, tree, kinds, settings)
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
            return self._run(plan, leaves)

    def _planned(self, engine: Any, scope: Scope, args: tuple, kwargs: dict) -> _Plan:
        """Reads a call, and finds its program."""
        started = time.perf_counter()
        arguments = Arguments(self, args, kwargs)
        request = engine.request(scope, *arguments.shown)
        program = self._programs.get(request.key)
        if program is None:
            program = self._obtain(engine, scope, request, started, explicit=False)
        else:
            engine.miss_log.count(hits=1)
        return _Plan(engine.spec, request, arguments, program)

    def warm(self, engine: Any, scope: Scope, args: tuple, kwargs: dict) -> None:
        """Has the program of a call compiled by the tasks, and runs nothing."""
        with self._lock:
            self.connection.ready()
            request = engine.request(scope, *Arguments(self, args, kwargs).shown)
            if request.key not in self._programs:
                self._obtain(engine, scope, request, time.perf_counter(), explicit=True)

    def shown(self, args: tuple, kwargs: dict) -> tuple[tuple, dict]:
        """Returns the arguments of a call with stand-ins for what lives on the tasks."""
        return Arguments(self, args, kwargs).shown

    def planned(self, engine: Any, scope: Scope, args: tuple, kwargs: dict) -> Planned:
        """Says what a call would do. Runs nothing."""
        arguments = Arguments(self, args, kwargs)
        request = engine.request(scope, *arguments.shown)
        program = self._programs.get(request.key)
        found = [arguments.sources.get(id(leaf)) for leaf in request.call.leaves]
        sources = [None if isinstance(each, jax.Array) else each for each in found]
        return Planned(request, program and program.seconds, sources)

    def _run(self, plan: _Plan, leaves: list[Any]) -> Any:
        """Starts a run. `leaves` are those of the arguments, with variables as one leaf each."""
        connection, program = self.connection, plan.program
        run = connection.runs + 1
        refs, takes = _Groups(), _Groups()
        taken: list[RemoteArray] = []
        feeds: list[Any] = []
        blobs: list[Any] = []
        kept: list[Any] = []
        for leaf, (first, count, feed) in zip(leaves, plan.rows, strict=True):
            if isinstance(leaf, Variables):
                if count:
                    refs.rows.append(("v", leaf._master.number))  # type: ignore[attr-defined]
            elif isinstance(leaf, RemoteArray):
                ref = leaf.ref(run)
                refs.add(*ref)
                if first in program.donated:
                    takes.add(*ref)
                    taken.append(leaf)
            else:
                refs.add_feed()
                feeds.append(self._fed(leaf, feed, blobs, kept))
        if len(set(map(id, taken))) != len(taken):
            raise CarryError(
                f"{plan.name} is given the same array in several places, and writes over it",
                expected="an array of its own for each leaf that is carried or donated",
            )
        form = (program.number, *refs.rows, None, *takes.rows, None, *plan.writes)
        number = self._forms.get(form)
        about: dict[str, Any] = {}
        if number is None:
            number = self._forms[form] = next(self._form_numbers)
            about["form"] = {
                "program": program.number,
                "refs": refs.rows,
                "takes": takes.rows,
                "writes": plan.writes,
            }
        if feeds:
            about["feeds"] = feeds
        connection.run(number, packed(**about) if about else b"", blobs, kept)
        for each in taken:
            each.donated()
        for variables in plan.outputs.written:
            variables._master.written(run)  # type: ignore[attr-defined]
        return plan.outputs.tree(connection, run)

    def _fed(self, value: Any, leaf: Any, blobs: list[Any], kept: list[Any]) -> Any:
        if is_key_type(leaf.dtype):
            data = np.asarray(jax.random.key_data(value))
            name = str(jax.random.key_impl(value))
            return [self.connection.describe(data, blobs, kept), name]
        return self.connection.describe(np.asarray(value, leaf.dtype), blobs, kept)

    # ---- programs --------------------------------------------------------------------------------

    def _obtain(
        self, engine: Any, scope: Scope, request: Request, started: float, *, explicit: bool
    ) -> RemoteProgram:
        """Traces a step, and has the tasks compile it."""
        resolver, spec = engine.resolver, engine.spec
        miss = engine.miss_log.why(request)
        if not explicit:
            resolver.judge(scope, miss)
        seconds: dict[str, float] = {}
        traced, settled = self._traced(spec, request, seconds)
        program = self._define(spec.name, traced, seconds)
        self._programs[request.key] = program
        if settled:
            self._programs[request.settled(settled).key] = program
        own = time.perf_counter() - started - sum(seconds.values())
        resolver.built_elsewhere(request, miss, seconds, own)
        scope.check_rules(spec.name, request.shown.paths, carries=bool(spec.parameters.carry))
        return program

    def _traced(
        self, spec: StepSpec, request: Request, seconds: dict[str, float]
    ) -> tuple[_Traced, tuple[int, ...]]:
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

            traced = _Traced(fun, stand_ins, self.mesh, seconds)
            if not spec.parameters.carry:
                break
            pins = check_carry(spec, request, traced)  # type: ignore[arg-type]
            traced.pins = pins
            known, settled = settled, settled_leaves(spec, request, traced.out_avals)
            if known == settled:
                break
            for number in settled:
                leaves[number] = leaves[number].settled()
        traced.donated = _donated(spec, request)
        return traced, settled

    def _stand_in(self, leaf: Any, asked: Any) -> jax.ShapeDtypeStruct:
        sharding = asked or leaf.sharding
        if not isinstance(sharding, NamedSharding) or sharding.mesh != self.mesh:
            sharding = NamedSharding(self.mesh, getattr(sharding, "spec", PartitionSpec()))
        return jax.ShapeDtypeStruct(
            leaf.shape, leaf.dtype, sharding=sharding, weak_type=leaf.weak_type
        )

    def _define(self, name: str, traced: _Traced, seconds: dict[str, float]) -> RemoteProgram:
        """Has the tasks compile what was traced."""
        begun = time.perf_counter()
        exported = traced.exported(self.connection.about["platform"], name)
        lowered = time.perf_counter()
        outs = [pin and encode_spec(pin.spec) for pin in traced.out_pins]
        about: dict[str, Any] = {
            "name": name,
            "mesh": self.mesh_code,
            "in": [encode_spec(each.sharding.spec) for each in traced.stand_ins],  # type: ignore[union-attr]
            "types": [[encode_dtype(each.dtype), list(each.shape)] for each in traced.stand_ins],
            "out": outs,
            "donate": sorted(traced.donated),
        }
        digest = hashlib.sha256(exported).digest()
        about["digest"] = digest + hashlib.sha256(packed(**about)).digest()
        number, answer = self.connection.define(packed(**about), exported)
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


def _kind(leaf: Any) -> Any:
    """What a plan depends on in a leaf of the arguments; None for one that is not planned."""
    kind = type(leaf)
    if kind is RemoteArray:
        return leaf._type.number
    if kind is Variables:
        return leaf._number, getattr(leaf._master, "number", None)
    if kind is np.ndarray:
        return leaf.shape, leaf.dtype
    if kind in (float, int, bool) or isinstance(leaf, np.generic):
        return kind
    if isinstance(leaf, jax.Array) and not isinstance(leaf, jaxcompat.Tracer):
        return leaf.shape, leaf.dtype, leaf.aval.weak_type
    return None


class _Held(NamedTuple):
    """A leaf of variables in a call."""

    number: int
    index: int


class _Groups:
    """References to arrays, with neighbours in one."""

    def __init__(self) -> None:
        self.rows: list[tuple] = []

    def add(self, kind: str, ago: int, index: int, count: int) -> None:
        last = self.rows[-1] if self.rows else None
        if last is not None and last[:2] == ("o", ago) and last[2] + last[3] == index:
            self.rows[-1] = ("o", ago, last[2], last[3] + count)
        else:
            self.rows.append((kind, ago, index, count))

    def add_feed(self) -> None:
        last = self.rows[-1] if self.rows else None
        if last is not None and last[0] == "f":
            self.rows[-1] = ("f", last[1] + 1)
        else:
            self.rows.append(("f", 1))


class Arguments:
    """The arguments of a call, with stand-ins for what lives on the tasks.

    Attributes:
        given: the arguments.
        shown: the arguments with stand-ins.
        sources: what each stand-in stands for, by its identity.
    """

    def __init__(self, target: Target, args: tuple, kwargs: dict[str, Any]):
        self._target, self.given = target, (args, kwargs)
        self.sources: dict[int, Any] = {}
        self._kept: list[Any] = []  # Stand-ins, which are known by their identity.
        self.shown = (
            tuple(map(self._shown, args)),
            {name: self._shown(tree) for name, tree in kwargs.items()},
        )

    def _shown(self, tree: Any) -> Any:
        leaves, structure = jax.tree_util.tree_flatten(tree)
        if not any(isinstance(x, Variables | RemoteArray | jax.Array) for x in leaves):
            return tree
        return structure.unflatten(map(self._stand_in, leaves))

    def _stand_in(self, leaf: Any) -> Any:
        if isinstance(leaf, RemoteArray):
            self.sources[id(leaf._stand_in)] = leaf
            return leaf._stand_in
        if isinstance(leaf, Variables):
            return self._of_variables(leaf)
        if isinstance(leaf, jax.Array) and not isinstance(leaf, jaxcompat.Tracer):
            made = jaxcompat.stand_in(leaf.shape, leaf.dtype, leaf.aval.weak_type, None)
            self.sources[id(made)] = leaf
            self._kept.append(made)
            return made
        return leaf

    def _of_variables(self, variables: Variables) -> Any:
        master: Any = variables._master
        if getattr(master, "target", None) is not self._target:
            raise TaskError(
                "the variables do not live on the tasks of this session",
                where=variables.name,
                hint="make them inside the session",
            )
        master.check_not_lost(variables.name)
        for index, each in enumerate(master.stand_ins):
            self.sources[id(each)] = _Held(master.number, index)
        return master.layout.tree.unflatten(master.stand_ins)


class _Plan:
    """How calls that look alike are made.

    Attributes:
        name: of the step.
        request: the call.
        program: its program.
        rows: for each leaf of the arguments, where variables are one leaf: the number of its first
            leaf in the program, how many it has there, and its type if it is sent.
        writes: which variables are written: number, first output, number of outputs.
        outputs: what becomes of the outputs.
        has_statics: whether the call passes static arguments.
    """

    def __init__(
        self, spec: StepSpec, request: Request, arguments: Arguments, program: RemoteProgram
    ):
        self.name, self.request, self.program = spec.name, request.described(), program
        self.rows: list[tuple[int, int, Any]] = []
        self.has_statics = bool(request.call.signature.statics)
        first = 0
        for leaf in self.dynamic_leaves(*arguments.given):
            count = _leaves_in(leaf)
            sent = None if isinstance(leaf, Variables | RemoteArray) else request.leaves[first]
            self.rows.append((first, count, sent))
            first += count
        self.writes: list[tuple[int, int, int]] = []
        self.outputs = Outputs(program)
        offset = 0
        for name in spec.parameters.carry:
            args, kwargs = arguments.given
            given = argument_of(spec.parameters.positional, args, kwargs, name)
            for leaf in jax.tree_util.tree_leaves(given):
                count = _leaves_in(leaf)
                if isinstance(leaf, Variables):
                    self.writes.append((leaf._master.number, offset, count))  # type: ignore[attr-defined]
                    self.outputs.written.append(leaf)
                offset += count
            self.outputs.carry(given)

    def dynamic_leaves(self, args: tuple, kwargs: dict[str, Any]) -> list[Any]:
        """Returns the leaves of the arguments that are not static."""
        call = self.request.call
        dynamic = [args[position] for position in call.positions]
        return jax.tree_util.tree_leaves((dynamic, {name: kwargs[name] for name in call.kwargs}))


def _leaves_in(leaf: Any) -> int:
    return len(leaf._master.layout.slots) if isinstance(leaf, Variables) else 1


class Outputs:
    """What becomes of the outputs of a run.

    Attributes:
        written: the variables that are carried.
    """

    def __init__(self, program: RemoteProgram):
        self._program = program
        self._carried: list[tuple[Any, list[Variables | None]]] = []
        self._opened: list[Any] = []
        self.written: list[Variables] = []
        self._inside: frozenset[int] = frozenset()

    def carry(self, given: Any) -> None:
        """Adds an argument that is carried, as it was given."""
        leaves, structure = jax.tree_util.tree_flatten(given)
        self._carried.append((structure, [x if isinstance(x, Variables) else None for x in leaves]))
        self._opened.append(jax.tree_util.tree_structure(_opened(given)))
        offset, inside = 0, []
        for _, variables in self._carried:
            for each in variables:
                count = 1 if each is None else _leaves_in(each)
                inside += [] if each is None else range(offset, offset + count)
                offset += count
        self._inside = frozenset(inside)

    def tree(self, connection: Connection, run: int) -> Any:
        """Returns what the step returns."""
        program = self._program
        leaves: list[Any] = [
            None if index in self._inside else RemoteArray(connection, run, index, each)
            for index, each in enumerate(program.outputs)
        ]
        return self._with_variables(leaves) if self.written else program.out_tree.unflatten(leaves)

    def _with_variables(self, leaves: list[Any]) -> Any:
        new: list[Any] = []
        offset = 0
        for structure, variables in self._carried:
            values = []
            for each in variables:
                values.append(leaves[offset] if each is None else each)
                offset += 1 if each is None else _leaves_in(each)
            new.append(structure.unflatten(values))
        node, children = self._node
        if node is None:
            return new[0]
        for each in children[len(new) :]:
            new.append(each.unflatten(leaves[offset : offset + each.num_leaves]))
            offset += each.num_leaves
        return node(new) if node in (tuple, list) else node(*new)

    @functools.cached_property
    def _node(self) -> tuple[Any, list[Any]]:
        """The class of the outputs, and their trees; None for a carry that is returned alone."""
        tree = self._program.out_tree
        if [tree] == self._opened:
            return None, []
        return tree.node_data()[0], jax.tree_util.treedef_children(tree)


def _opened(tree: Any) -> Any:
    """A tree with the trees of variables in their places."""

    def opened(leaf: Any) -> Any:
        if not isinstance(leaf, Variables):
            return leaf
        return leaf._master.layout.tree.unflatten(range(len(leaf._master.layout.slots)))

    return jax.tree_util.tree_map(opened, tree)


class _Traced:
    """A function, traced over the mesh of the tasks.

    Attributes:
        stand_ins: of its arguments.
        out_tree, out_avals: of its outputs.
        pins: where outputs have to go; None where XLA decides.
        donated: numbers of the arguments that it takes.
    """

    def __init__(
        self,
        fun: Callable,
        stand_ins: list[jax.ShapeDtypeStruct],
        mesh: AbstractMesh,
        seconds: dict[str, float],
    ):
        self.stand_ins, self._mesh = stand_ins, mesh
        self.pins: Sequence[NamedSharding | None] = ()
        self.donated: set[int] = set()
        started = time.perf_counter()

        def flat(*leaves):
            outputs, self.out_tree = jax.tree_util.tree_flatten(fun(*leaves))
            return outputs

        shardings = tuple(each.sharding for each in stand_ins)
        self._jitted = jax.jit(flat, in_shardings=shardings)
        with jax.sharding.use_abstract_mesh(mesh):
            traced = self._jitted.trace(*stand_ins)
        self.out_avals = traced.jaxpr.out_avals
        seconds["trace"] = seconds.get("trace", 0.0) + time.perf_counter() - started

    @property
    def out_pins(self) -> list[NamedSharding | None]:
        """Where each output has to go; None where XLA decides."""
        return [*self.pins, *[None] * (len(self.out_avals) - len(self.pins))]

    def exported(self, platform: str, name: str) -> bytes:
        """Returns the program as bytes.

        Raises:
            TaskError: it has effects, such as callbacks, which need this process.
        """
        try:
            with jax.sharding.use_abstract_mesh(self._mesh):
                made = export.export(self._jitted, platforms=(platform,))(*self.stand_ins)
            return bytes(made.serialize())
        except Exception as error:
            raise TaskError(
                "the step cannot run in another process",
                where=name,
                got=f"{type(error).__name__}: {first_line(error)}",
                hint="callbacks and other effects need the process that traced them",
            ) from error


def _donated(spec: StepSpec, request: Request) -> set[int]:
    """Returns the numbers of the leaves that a call donates."""
    numbers, names = (
        _as_set(spec.options.get(each)) for each in ("donate_argnums", "donate_argnames")
    )
    call = request.call
    count = len(call.given[0])
    numbers = {number % count if number < 0 and count else number for number in numbers}
    arguments = {
        name
        for position, name in zip(call.positions, call.names, strict=True)
        if position in numbers or name in names
    } | {name for name in call.kwargs if name in names}
    return {n for n, path in enumerate(call.paths) if path.argument in arguments}


def _as_set(value: Any) -> set:
    if value is None:
        return set()
    return {value} if isinstance(value, int | str) else set(value)
