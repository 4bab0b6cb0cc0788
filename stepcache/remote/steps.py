"""`Target`: runs the steps of a session on tasks.

A step is traced here, over the abstract mesh of the tasks, and travels once, as StableHLO. After
that a call is one message: the number of its *call form*, which says which arrays and variables the
program takes and which variables it writes.
"""

from __future__ import annotations

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
from stepcache.calls.step_spec import Request, StepSpec
from stepcache.engine import Engine
from stepcache.errors import CarryError, TaskError, first_line
from stepcache.jaxcompat.call_codec import decode_spec, encode_dtype, encode_spec
from stepcache.remote.arrays import RemoteArray
from stepcache.remote.connection import Connection
from stepcache.remote.messages import packed
from stepcache.variables.packing import is_key_type
from stepcache.variables.variables import Variables


class Output(NamedTuple):
    """An output of a program, as the client knows it."""

    shape: tuple[int, ...]
    dtype: Any
    weak_type: bool
    sharding: NamedSharding


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
    outputs: tuple[Output, ...]
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
        self._form_numbers = itertools.count(1)
        connection.on_restart.append(self._forget)

    def _forget(self) -> None:
        """Forgets what tasks knew that have ended."""
        self._programs.clear()
        self._forms.clear()

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
        started = time.perf_counter()
        with self._lock:
            self.connection.ready()
            self.connection.flush_freed()
            arguments = Arguments(self, args, kwargs)
            request = engine.request(scope, *arguments.shown)
            program = self._programs.get(request.key)
            if program is None:
                program = self._obtain(engine, scope, request, started, explicit=False)
            else:
                engine.miss_log.count(hits=1)
            return self._run(engine.spec, request, arguments, program)

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

    def _run(
        self, spec: StepSpec, request: Request, arguments: Arguments, program: RemoteProgram
    ) -> Any:
        groups = _Groups(self.connection.runs + 1)
        taken: list[Any] = []
        feeds: list[Any] = []
        blobs: list[Any] = []
        kept: list[Any] = []
        refs = _Groups(groups.run)
        for index, (value, leaf) in enumerate(
            zip(request.call.leaves, request.leaves, strict=True)
        ):
            source = arguments.sources.get(id(value))
            if isinstance(source, _Held):
                refs.add_held(source)
            elif isinstance(source, RemoteArray):
                refs.add(source.ref(groups.run))
                if index in program.donated:
                    groups.add(source.ref(groups.run))
                    taken.append(source)
            else:
                given = value if source is None else source
                refs.add(["f", 1])
                feeds.append(self._fed(given, leaf, blobs, kept))
        if len({id(each) for each in taken}) != len(taken):
            raise CarryError(
                f"{spec.name} is given the same array in several places, and writes over it",
                expected="an array of its own for each leaf that is carried or donated",
            )
        writes, outputs = self._outputs(spec, request, arguments, program)
        form = (program.number, refs.key(), groups.key(), tuple(map(tuple, writes)))
        number = self._forms.get(form)
        about: dict[str, Any] = {}
        if number is None:
            number = self._forms[form] = next(self._form_numbers)
            about["form"] = {
                "program": program.number,
                "refs": refs.rows,
                "takes": groups.rows,
                "writes": writes,
            }
        if feeds:
            about["feeds"] = feeds
        for each in taken:
            each.donated()
        run = self.connection.run(number, packed(**about) if about else b"", blobs, kept)
        assert run == groups.run
        for variables, _, _ in outputs.written:
            variables._master.written(run)
        return outputs.tree(self.connection, run)

    def _fed(self, value: Any, leaf: Any, blobs: list[Any], kept: list[Any]) -> Any:
        if is_key_type(leaf.dtype):
            data = np.asarray(jax.random.key_data(value))
            name = str(jax.random.key_impl(value))
            return [self.connection.describe(data, blobs, kept), name]
        return self.connection.describe(np.asarray(value, leaf.dtype), blobs, kept)

    def _outputs(
        self, spec: StepSpec, request: Request, arguments: Arguments, program: RemoteProgram
    ) -> tuple[list[list[int]], Outputs]:
        """Decides what becomes of the outputs: which variables they are written to."""
        names = spec.parameters.carry
        outputs = Outputs(program)
        writes: list[list[int]] = []
        offset = 0
        for name in names:
            given = arguments.given(spec, name)
            for leaf in jax.tree_util.tree_leaves(given):
                if isinstance(leaf, Variables):
                    count = len(leaf._master.layout.slots)
                    writes.append([leaf._master.number, offset, count])
                    outputs.written.append((leaf, offset, count))
                    offset += count
                else:
                    offset += 1
            outputs.carried.append(given)
        return writes, outputs

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
            Output(
                aval.shape, aval.dtype, aval.weak_type, NamedSharding(self.mesh, decode_spec(spec))
            )
            for aval, spec in zip(traced.out_avals, answer["specs"], strict=True)
        )
        donated = frozenset(traced.donated)
        return RemoteProgram(number, traced.out_tree, outputs, donated, dict(seconds))


def _added(value: Any, update: Any) -> Any:
    return jax.tree.map(jax.numpy.add, value, update)


class _Held(NamedTuple):
    """A leaf of variables in a call."""

    number: int
    index: int
    count: int


class _Groups:
    """References to arrays, with neighbours in one."""

    def __init__(self, run: int):
        self.run, self.rows = run, []

    def add(self, ref: list[Any]) -> None:
        last = self.rows[-1] if self.rows else None
        if last is not None and last[0] == ref[0] == "f":
            last[1] += 1
        elif (
            last is not None
            and last[0] == ref[0] == "o"
            and last[1] == ref[1]
            and (last[2] + last[3] == ref[2])
        ):
            last[3] += 1
        else:
            self.rows.append(ref)

    def add_held(self, source: _Held) -> None:
        if source.index == 0:
            self.rows.append(["v", source.number])

    def key(self) -> tuple:
        return tuple(map(tuple, self.rows))


class Arguments:
    """The arguments of a call, with stand-ins for what lives on the tasks.

    Attributes:
        shown: the arguments with stand-ins.
        sources: what each stand-in stands for, by its identity.
    """

    def __init__(self, target: Target, args: tuple, kwargs: dict[str, Any]):
        self._target, self._given = target, (args, kwargs)
        self.sources: dict[int, Any] = {}
        self._kept: list[Any] = []  # Stand-ins, which are known by their identity.
        self.shown = (
            tuple(map(self._shown, args)),
            {name: self._shown(tree) for name, tree in kwargs.items()},
        )

    def given(self, spec: StepSpec, name: str) -> Any:
        """Returns an argument by name, as it was given."""
        args, kwargs = self._given
        if name in kwargs:
            return kwargs[name]
        return args[spec.parameters.positional.index(name)]

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
        count = len(master.stand_ins)
        for index, each in enumerate(master.stand_ins):
            self.sources[id(each)] = _Held(master.number, index, count)
        return master.layout.tree.unflatten(master.stand_ins)


class Outputs:
    """What becomes of the outputs of a run.

    Attributes:
        carried: the arguments that are carried, as given.
        written: the variables among them, each with its first output and their number.
    """

    def __init__(self, program: RemoteProgram):
        self._program = program
        self.carried: list[Any] = []
        self.written: list[tuple[Variables, int, int]] = []

    def tree(self, connection: Connection, run: int) -> Any:
        """Returns what the step returns."""
        program = self._program
        inside = {first + offset for _, first, count in self.written for offset in range(count)}
        leaves: list[Any] = [
            None
            if index in inside
            else RemoteArray(connection, run, index, jaxcompat.stand_in(*each))
            for index, each in enumerate(program.outputs)
        ]
        if not self.written:
            return program.out_tree.unflatten(leaves)
        return self._with_variables(leaves)

    def _with_variables(self, leaves: list[Any]) -> Any:
        new: list[Any] = []
        offset = 0
        for given in self.carried:
            flat, structure = jax.tree_util.tree_flatten(given)
            values = []
            for leaf in flat:
                if isinstance(leaf, Variables):
                    values.append(leaf)
                    offset += len(leaf._master.layout.slots)
                else:
                    values.append(leaves[offset])
                    offset += 1
            new.append(structure.unflatten(values))
        if offset == len(leaves) and self._is_alone(new):
            return new[0]
        node = self._program.out_tree.node_data()
        rest = jax.tree_util.treedef_children(self._program.out_tree)[len(new) :]
        for each in rest:
            new.append(each.unflatten(leaves[offset : offset + each.num_leaves]))
            offset += each.num_leaves
        kind = node[0]
        return kind(new) if kind in (tuple, list) else kind(*new)

    def _is_alone(self, new: list[Any]) -> bool:
        tree = self._program.out_tree
        if len(new) != 1:
            return False
        node = tree.node_data()
        children = jax.tree_util.treedef_children(tree)
        shape = jax.tree_util.tree_structure(_opened(self.carried[0]))
        return not (
            node is not None and node[0] in (tuple, list) and children and children[0] == shape
        )


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
