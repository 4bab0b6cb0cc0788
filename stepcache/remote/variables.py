"""`RemoteMaster`: variables whose value lives on the tasks."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from stepcache import jaxcompat
from stepcache.errors import TaskError, VariablesError
from stepcache.jaxcompat.specs import encode_dtype, encode_spec
from stepcache.remote.arrays import ArrayType, RemoteArray, fetch_refs
from stepcache.remote.messages import Kind, Values, packed
from stepcache.variables.describing import Parameters, Placing, describe, named_leaves
from stepcache.variables.masters import LOST, Master, Reader
from stepcache.variables.packing import Layout, Packed, Slot, is_key_type, layout_of
from stepcache.variables.plan import SERVER_LINK
from stepcache.variables.transfer import Meter

_BATCH_BYTES = 256 << 20


class RemoteMaster(Master):
    """A master copy on the tasks. Steps read and write it there; nothing moves.

    Attributes:
        target: the tasks.
        number: by which they know the variables.
        stand_ins: of the leaves.
        state: `Variables` that hold the optimizer's state, once there is some.
        is_new: whether the tasks did not know the name before.
    """

    applies_updates = True

    def __init__(self, target: Any, name: str, layout: Layout):
        super().__init__(Packed(layout, ()))
        self.target = target
        self._connection, self._name = target.connection, name
        self.stand_ins = [
            jaxcompat.stand_in(slot.shape, slot.dtype, slot.weak_type, slot.sharding)
            for slot in layout.slots
        ]
        self._runs: tuple[int, ...] = ()  # Those that wrote the value.
        self.state: Any = None
        self._leaf_rows = [
            [slot.path, encode_dtype(slot.dtype), list(slot.shape), spec_of(slot)]
            for slot in layout.slots
        ]
        self._open()

    def _open(self) -> None:
        """Finds the variables on the tasks by their name, or makes them there."""
        self._incarnation = now = self._connection.ready()
        about = {"name": self._name, "leaves": self._leaf_rows}
        (answer,) = self._connection.ask(Kind.OPEN, incarnation=now, **about)
        about = answer.data(dict[str, Any])
        self.number, self.is_new = answer.value, about["new"] or not about["version"]
        # The tasks count the first value as a write.
        self.version = max(self.version, about["version"] - 1)

    def own_state(self) -> Master:
        return _State(self)

    def written(self, run: int) -> None:
        """Notes that a run writes the value."""
        self._runs = (run,)
        self.version += 1

    # ---- reading and writing ---------------------------------------------------------------------

    def leaves(self, meter: Meter) -> list[Any]:
        self._connection.ready()
        self.check_not_lost(self._name)
        meter[SERVER_LINK] += self.layout.size_bytes
        slots, values, batches = self.layout.slots, [], _batches(self.layout.slots)
        # All of one moment.
        with self.target.lock if len(batches) > 1 else contextlib.nullcontext():
            for each in batches:
                ref = ["v", self.number, each.start, each.stop - each.start]
                what = [ref], self._connection.runs, self.stand_ins[each]
                values += fetch_refs(self._connection, *what, self._incarnation)
        self._check_runs()
        return [_as_given(value, slot) for value, slot in zip(values, slots, strict=True)]

    def _check_runs(self) -> None:
        for run in self._runs:
            self._connection.check(run)

    def brought(self, leaves: Sequence[Any], meter: Meter) -> list[Any]:
        return sent(self.target, self.layout.slots, leaves, meter)

    def assign(self, leaves: Sequence[Any], session: Any, meter: Meter) -> None:
        self._connection.ready()
        if self.is_lost:
            self._open()
            self.state = None
        self.store(leaves, meter)
        self.version += 1

    def apply(
        self, leaves: Sequence[Any], mode: str, session: Any, meter: Meter, on_kept: Callable
    ) -> None:
        meter[SERVER_LINK] += _sent_bytes(leaves)
        self.target.push(self.owner(), self.layout.tree.unflatten(leaves), mode)
        on_kept()

    def store(self, leaves: Sequence[Any], meter: Meter) -> None:
        """Makes leaves the value, which may be on the tasks already."""
        connection = self._connection
        with self.target.lock:
            arrays = sent(self.target, self.layout.slots, leaves, meter)
            self._incarnation, now = connection.ready(), connection.runs
            refs = [array.ref(now) for array in arrays]
            connection.command(Kind.BIND, self.number, now, refs=refs)
            for array in arrays:
                array.donated()
            self._runs = tuple({now - ago for _, ago, *_ in refs})

    def block_until_ready(self) -> None:
        self._connection.wait(max(self._runs, default=0), self._incarnation)
        self._check_runs()

    def take(self, reader: Reader, meter: Meter) -> Packed:
        raise TaskError(
            "variables that live on tasks are used outside of their session", where=self._name
        )

    def copied(self) -> Master:
        raise TaskError(
            "variables that live on tasks cannot be copied",
            where=self._name,
            hint="return a copy from a step, and make variables of it",
        )

    # ---- what is said about it -------------------------------------------------------------------

    @property
    def is_lost(self) -> bool:
        return self._incarnation != self._connection.incarnation

    def check_not_lost(self, name: str) -> None:
        if self.is_lost:
            raise VariablesError(
                f"{LOST}: the tasks that held it have ended",
                where=name,
                hint="make the variables again, assign(...) or restore(...) a value",
            )


def master_of(variables: Any) -> RemoteMaster:
    """Returns the master of variables on tasks. Raises `TaskError` if they live elsewhere."""
    master = variables._master
    if not isinstance(master, RemoteMaster):
        raise TaskError(
            "the variables do not live on the tasks of this session",
            where=variables.name,
            hint="make them inside the session",
        )
    return master


def hold(target: Any, placing: Placing, tree: Any) -> RemoteMaster:
    """Puts the arrays of a tree on the tasks, unless these hold variables of this name already.

    Raises:
        VariablesError: a leaf is no array.
        PlacementError: a leaf cannot be placed as asked.
        TaskError: the tasks hold variables of this name with other leaves.
    """
    tree = jax.tree_util.tree_map(lambda x: jax.device_get(x) if _is_committed(x) else x, tree)
    structure, leaves, slots = describe(placing, tree)
    slots = tuple(
        slot._replace(sharding=leaf.sharding) if isinstance(leaf, RemoteArray) else slot
        for slot, leaf in zip(slots, leaves, strict=True)
    )
    target.connection.ready()
    master = RemoteMaster(target, placing.name, layout_of(structure, slots))
    if master.is_new:
        master.store(leaves, Meter())
    return master


class _State(Master):
    """The state of the optimizer of variables on tasks, which may have to be made yet."""

    def __init__(self, of: RemoteMaster):
        super().__init__(Packed(layout_of(*state_types(of.owner())), ()))
        self._of = of

    def leaves(self, meter: Meter) -> list[Any]:
        return master_of(self._of.target.ready_state(self._of.owner())).leaves(meter)

    def brought(self, leaves: Sequence[Any], meter: Meter) -> list[Any]:
        return sent(self._of.target, self.layout.slots, leaves, meter)

    def assign(self, leaves: Sequence[Any], session: Any, meter: Meter) -> None:
        arrays = self.brought(leaves, meter)
        state = self.layout.tree.unflatten(arrays)
        kept = master_of(self._of.target.ready_state(self._of.owner(), state))
        if not all(array.is_deleted() for array in arrays):  # Else they are the first value.
            kept.assign(arrays, session, meter)

    def check_not_lost(self, name: str) -> None:
        self._of.check_not_lost(name)


def state_types(variables: Any) -> tuple[Any, tuple[Slot, ...]]:
    """The tree of an optimizer's state, and its leaves, each beside what it updates."""
    placer = variables._placing.of_leaves()
    assert placer is not None  # The mesh of the tasks.
    layout = variables._layout
    parameters = Parameters(variables._placing.prefix, layout.slots)
    shapes = [jax.ShapeDtypeStruct(slot.shape, slot.dtype) for slot in layout.slots]
    state = jax.eval_shape(variables.write.optimizer.init, layout.tree.unflatten(shapes))
    named, structure = named_leaves(state)
    slots = (
        Slot(path, x.shape, x.dtype, False, parameters.beside(placer, path, x.shape))
        for path, x in named
    )
    return structure, tuple(slots)


def placed(function: Callable[[Any], Any], places: Sequence[Any]) -> Callable[[Any], Any]:
    """Returns a function whose outputs have these shardings."""

    def run(value: Any) -> Any:
        leaves, structure = jax.tree.flatten(function(value))
        return structure.unflatten(map(jax.lax.with_sharding_constraint, leaves, places))

    return run


def fed(value: Any, kind: Any, values: Values) -> Any:
    """Adds a value of the dtype of `kind` to a message. Returns how the body describes it."""
    if is_key_type(kind.dtype):
        data = np.asarray(jax.random.key_data(value))
        return [values.add(data), str(jax.random.key_impl(value))]
    return values.add(np.asarray(value, kind.dtype))


def sent(
    target: Any, slots: Sequence[Slot], leaves: Sequence[Any], meter: Meter
) -> list[RemoteArray]:
    """Leaves as arrays on the tasks, where some of them may be already."""
    pairs = zip(slots, leaves, strict=True)
    own = [(slot, leaf) for slot, leaf in pairs if not isinstance(leaf, RemoteArray)]
    with target.lock:
        incarnation = target.connection.ready()
        target.connection.flush_freed()
        batches = _batches([slot for slot, _ in own]) if own else []
        made = iter([x for each in batches for x in _put(target, incarnation, own[each])])
    meter[SERVER_LINK] += sum(slot.size_bytes for slot, _ in own)
    return [leaf if isinstance(leaf, RemoteArray) else next(made) for leaf in leaves]


def _put(target: Any, incarnation: int, rows: Sequence[tuple[Slot, Any]]) -> list[RemoteArray]:
    """Sends leaves in one message."""
    connection = target.connection
    connection.make_room(incarnation)
    values = connection.values()
    feeds = [fed(leaf, slot, values) for slot, leaf in rows]
    specs = [spec_of(slot) for slot, _ in rows]
    body = packed(feeds=feeds, specs=specs, mesh=target.mesh_code, **values.fields)
    run = connection.run(incarnation, 0, body, values, Kind.PUT)
    types = (ArrayType(each.shape, each.dtype, each.weak_type, each.sharding) for each, _ in rows)
    return [RemoteArray(connection, incarnation, run, n, x) for n, x in enumerate(types)]


def _batches(slots: Sequence[Slot]) -> list[slice]:
    """Which leaves a message brings together: it has a largest size."""
    batches, first, size_bytes = [], 0, 0
    for index, slot in enumerate(slots):
        if index > first and size_bytes + slot.size_bytes > _BATCH_BYTES:
            batches.append(slice(first, index))
            first, size_bytes = index, 0
        size_bytes += slot.size_bytes
    return [*batches, slice(first, len(slots))]


def _sent_bytes(leaves: Sequence[Any]) -> int:
    return sum(np.asarray(leaf).nbytes for leaf in leaves if not isinstance(leaf, RemoteArray))


def _is_committed(leaf: Any) -> bool:
    return isinstance(leaf, jax.Array) and not is_key_type(leaf.dtype) and leaf.committed


def spec_of(slot: Slot) -> Any:
    """Returns where a leaf lies, as messages describe it."""
    sharding = slot.sharding
    return encode_spec(sharding.spec if isinstance(sharding, NamedSharding) else PartitionSpec())


def _as_given(value: np.ndarray, slot: Slot) -> Any:
    if is_key_type(slot.dtype):
        return jax.random.wrap_key_data(jax.numpy.asarray(value), impl=jaxcompat.key_impl(slot))
    return np.array(value)
