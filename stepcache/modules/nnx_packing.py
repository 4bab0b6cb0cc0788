"""`hold_all`: small variables of nnx modules, kept in a few buffers between the calls of a step.

A call of JAX takes about 1 µs for each array that goes in and comes out. So the small variables of a
module share one buffer for each dtype and device, as `Variables(pack=True)` do, which the program
takes apart. Until somebody looks at such a variable it has no value: its slot for it is empty. Python
then asks `Variable.__getattr__`, which cuts the value out of the buffer.
"""

from __future__ import annotations

import functools
import gc
import math
import operator
import threading
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import SingleDeviceSharding

from stepcache import _process_hooks
from stepcache.fingerprint.trail import Trail
from stepcache.fingerprint.values import HANDLERS
from stepcache.modules.module_state import ModuleState, Outcome, is_state
from stepcache.modules.nnx_graph import NOTHING_ELSE, GraphCall, GraphStructure, OverGraphs
from stepcache.modules.nnx_variables import (
    clear_value,
    is_empty,
    raw_values,
    set_values,
    value_of,
)
from stepcache.variables.packing import PACKED_BELOW_BYTES, Layout, Slot, layout_of

_FEW = 16
"""How many values that were assigned between two calls are written into the buffers one by one."""


class PackedStructure:
    """The structure of a module of which some arrays lie in buffers.

    Attributes:
        inner: the structure of the module.
        alone, held: the numbers of the arrays that stand alone, and of those in buffers.
        layout: how these lie in the buffers.
    """

    __slots__ = ("__weakref__", "_order", "alone", "held", "inner", "layout")

    def __init__(self, inner: GraphStructure, slots: Sequence[Slot]):
        can_be = layout_of(None, tuple(slots), PACKED_BELOW_BYTES).slots
        self.inner, places = inner, list(enumerate(can_be))
        self.held = tuple(number for number, slot in places if slot.offset is not None)
        self.alone = tuple(number for number, slot in places if slot.offset is None)
        self._order = np.argsort([*self.alone, *self.held]).tolist()
        self.layout: Layout = layout_of(
            None, tuple(slots[number] for number in self.held), PACKED_BELOW_BYTES
        )

    def _parts(self) -> tuple:
        return self.inner, self.held, self.layout

    def __eq__(self, other: object) -> bool:
        if self is other:
            return True
        return isinstance(other, PackedStructure) and self._parts() == other._parts()

    def __hash__(self) -> int:
        return hash(self._parts())

    def __repr__(self) -> str:
        return f"{self.inner} with {len(self.held)} arrays packed"

    @property
    def graphdef(self) -> Any:
        return self.inner.graphdef

    def paths(self) -> list[str]:
        """The path of each array that stands alone, and names for the buffers."""
        paths = self.inner.paths()
        return [*(paths[number] for number in self.alone), *self._names()]

    def _names(self) -> list[str]:
        return [f"packed {buffer.dtype}" for buffer in self.layout.buffers]

    def settings(self) -> dict[str, str]:
        """What there is beside the arrays of `paths`, by path."""
        paths = self.inner.paths()
        rows = zip(self.held, self.layout.slots, strict=True)
        packed = {paths[number]: f"{slot.dtype}{list(slot.shape)}, packed" for number, slot in rows}
        return self.inner.settings() | packed

    def taken_apart(self, values: Sequence[Any]) -> list[Any]:
        """All arrays, in order, inside a trace."""
        count = len(self.alone)
        arrays = [*values[:count], *self.layout.unpack(values[count:])]
        return [arrays[place] for place in self._order]

    def put_together(self, values: Sequence[Any]) -> list[Any]:
        """Those that stand alone, and the buffers."""
        alone, packed = ([values[number] for number in each] for each in (self.alone, self.held))
        return alone + self.layout.pack(packed)

    def can_take(self, values: Sequence[Any]) -> bool:
        """Whether arrays of a trace fit into the buffers as they are."""
        if len(values) != len(self.alone) + len(self.held):
            return False
        rows = zip(self.held, self.layout.slots, strict=True)
        return all(_is_like(slot, values[number]) for number, slot in rows)


def _is_like(slot: Slot, value: Any) -> bool:
    is_weak = bool(getattr(value, "weak_type", False))
    shape, dtype = getattr(value, "shape", None), getattr(value, "dtype", None)
    return (shape, dtype, is_weak) == (slot.shape, slot.dtype, False)


def _note_structure(walk: Trail, path: str, structure: PackedStructure) -> None:
    walk.value(path, structure.inner)
    places = [str(structure.held), *(str(slot[:-1]) for slot in structure.layout.slots)]
    walk.value(f"{path} (packed)", places)


HANDLERS[PackedStructure] = _note_structure

PACKED = (*NOTHING_ELSE, "packed")
"""`Outcome.about` where its states are as `PackedStructure.put_together` makes them."""


class OverPacked(OverGraphs):
    """As `OverGraphs`, of states with a `PackedStructure`.

    Where values do not fit into the buffers any more, or more than values has changed, the outcome
    is that of `OverGraphs`.
    """

    def __call__(self, *args: Any, **kwargs: Any) -> Outcome:
        structures: list[PackedStructure] = []

        def open_(x: Any) -> Any:
            if not is_state(x) or not isinstance(x.structure, PackedStructure):
                return x
            structures.append(x.structure)
            return ModuleState(x.structure.inner, x.structure.taken_apart(x.values))

        args, kwargs = jax.tree.map(open_, (args, kwargs), is_leaf=is_state)
        outcome = super().__call__(*args, **kwargs)
        if not structures or outcome.about != NOTHING_ELSE:
            return outcome
        rows = list(zip(structures, outcome.states, strict=True))
        if not all(structure.can_take(values) for structure, values in rows):
            return outcome
        states = [structure.put_together(values) for structure, values in rows]
        return Outcome(PACKED, (states, outcome.outputs))


# ---- between calls ------------------------------------------------------------------------------

_lock = threading.RLock()
_holders: dict[int, Held] = {}  # By the identity of a variable, which its holder keeps alive.
_unused: list[Held] = []


class Held:
    """The values of the variables of one module, small ones in buffers.

    Args:
        structure: of the module.
        variables: all of its own, in order.

    Attributes:
        root: the module, weakly.
        buffers: hold the values of variables that nobody has looked at.
        seen: what variables have been given of them since they were filled, by number.
    """

    def __init__(self, structure: PackedStructure, variables: Sequence[nnx.Variable]):
        self.structure, self._all = structure, list(variables)
        self._alone = [variables[number] for number in structure.alone]
        self._held = [variables[number] for number in structure.held]
        self._numbers = {id(each): number for number, each in enumerate(self._held)}
        self._empty_count: int | None = None
        self.root: Any = None
        self.buffers: list[jax.Array] = []
        self.seen: dict[int, Any] = {}

    def is_of(self, structure: PackedStructure, variables: Sequence[nnx.Variable]) -> bool:
        """Whether it holds these variables in this form."""
        same = len(variables) == len(self._all) and all(map(operator.is_, variables, self._all))
        return same and structure == self.structure

    def fill(self, values: Sequence[Any], root: Any) -> None:
        """Takes the values of all variables, which keep them too until the next `put`."""
        values = [values[number] for number in self.structure.held]
        packed = self.structure.layout.pack(values, np)
        sides = [buffer.sharding for buffer in self.structure.layout.buffers]
        with _lock:
            self.buffers = [
                jnp.array(x) if side is None else jax.device_put(x, side)
                for x, side in zip(packed, sides, strict=True)
            ]
            self.seen = dict(enumerate(values))
            self.root = weakref.ref(root, lambda _, unused=_unused: unused.append(self))
            previous = {id(each): each for each in map(_holders.get, self._numbers) if each}
            _holders.update(dict.fromkeys(self._numbers, self))
        for each in previous.values():
            if each is not self:
                each.release()

    def taken(self) -> list[Any] | None:
        """What the program takes; None where the variables have values that do not fit."""
        with _lock:
            if self._held and _holders.get(id(self._held[0])) is not self:
                return None
            count = len(gc.get_referents(*self._held))  # An empty slot refers to nothing.
            if count != self._empty_count and not self._takes_in():
                return None
            return [*raw_values(self._alone), *self.buffers]

    def _takes_in(self) -> bool:
        """Writes values that variables were given into the buffers, if these can take them."""
        changed = {}
        for number, variable in enumerate(self._held):
            if not is_empty(variable) and value_of(variable) is not self.seen.get(number):
                changed[number] = value_of(variable)
        slots = self.structure.layout.slots
        fit = all(_fits(slots[number], value) for number, value in changed.items())
        if not fit or len(changed) > _FEW:
            return False
        for number, value in changed.items():
            slot = slots[number]
            buffer = self.buffers[slot.buffer]
            written = _written(buffer, value, _number_beside(buffer, slot.offset))
            self.buffers[slot.buffer], self.seen[number] = written, value
        return True

    def put(self, values: Sequence[Any]) -> None:
        """Takes what the program returned; variables in buffers have no values of their own."""
        count = len(self._alone)
        set_values(self._alone, values[:count])
        with _lock:
            self.buffers, seen, self.seen = list(values[count:]), self.seen, {}
            for number in seen:
                clear_value(self._held[number])
            if self._empty_count is None and all(map(is_empty, self._held)):
                self._empty_count = len(gc.get_referents(*self._held))
        while _unused:
            _unused.pop().release()

    def look(self, variable: nnx.Variable) -> Any:
        """Gives a variable its value, and returns it."""
        number = self._numbers[id(variable)]
        with _lock:
            if not is_empty(variable):
                return value_of(variable)
            slot = self.structure.layout.slots[number]
            buffer = self.buffers[slot.buffer]
            with jax.ensure_compile_time_eval():  # Somebody may look inside a trace.
                value = _cut(buffer, _number_beside(buffer, slot.offset), slot.shape)
            self.seen[number] = value
            set_values([variable], [value])
            return value

    def release(self) -> None:
        """Gives all variables their values, and holds them no longer."""
        with _lock:
            for variable in self._held:
                if _holders.get(id(variable)) is self:
                    self.look(variable)
                    del _holders[id(variable)]
            self.root = None


@functools.partial(jax.jit, static_argnums=2)
def _cut(buffer: jax.Array, offset: jax.Array, shape: tuple[int, ...]) -> jax.Array:
    return jax.lax.dynamic_slice(buffer, (offset,), (math.prod(shape),)).reshape(shape)


@jax.jit
def _written(buffer: jax.Array, value: jax.Array, offset: jax.Array) -> jax.Array:
    return jax.lax.dynamic_update_slice(buffer, value.reshape(-1), (offset,))


def _number_beside(buffer: jax.Array, number: int | None) -> jax.Array:
    """A number where a buffer is, as `jax.transfer_guard` allows it."""
    return jax.device_put(np.int32(number), buffer.sharding if buffer.committed else None)


def _slot_of(variable: nnx.Variable, value: Any, device: Any) -> Slot:
    """The place of a value in a layout, as one that cannot be packed where it has to stand alone."""
    if not isinstance(value, jax.Array | jax.ShapeDtypeStruct) or not _is_plain(type(variable)):
        return _ALONE
    sharding = value.sharding
    if isinstance(value, jax.Array) and not value.committed:
        if sharding.device_set != {device}:
            return _ALONE
        sharding = None
    if sharding is not None and not _is_one_device(sharding):
        return _ALONE
    return Slot("", value.shape, value.dtype, getattr(value, "weak_type", True), sharding)


def _is_one_device(sharding: jax.sharding.Sharding) -> bool:
    """Whether an array is on one device, in the memory that it has by default."""
    if type(sharding) is not SingleDeviceSharding:
        return False
    (device,) = sharding.device_set
    return sharding.memory_kind in (None, device.default_memory().kind)


_ALONE = Slot("", (), np.dtype("float32"), True, None)


@functools.cache
def _is_plain(kind: type) -> bool:
    """Whether variables of a type have nothing beside what nnx's have, and are read as these are."""
    names = ("__getattr__", "__getattribute__", "_raw_value")
    same = all(getattr(kind, name) is getattr(nnx.Variable, name) for name in names)
    sizes = ("__basicsize__", "__dictoffset__", "__weakrefoffset__")
    return same and all(getattr(kind, name) == getattr(nnx.Variable, name) for name in sizes)


def _fits(slot: Slot, value: Any) -> bool:
    """Whether a value that a variable was given is like the one it had."""
    if not isinstance(value, jax.Array) or not _is_like(slot, value):
        return False
    return slot.sharding == (value.sharding if value.committed else None)


def _give(variable: nnx.Variable, name: str, as_before: Callable[[Any, str], Any]) -> Any:
    holder = _holders.get(id(variable))
    if holder is not None and is_empty(variable):
        holder.look(variable)
    if name == "_raw_value" and not is_empty(variable):
        return value_of(variable)
    return as_before(variable, name)


@functools.cache
def watch_for_looks() -> None:
    """Has variables without a value get it from who holds it when somebody asks for it."""
    _process_hooks.on_missing_attributes(nnx.Variable, _give)


def hold_all(call: GraphCall) -> bool:
    """Has the small values of a call's modules held, which then takes buffers in their place.

    Returns:
        Whether that can be done.
    """
    for state, variables, root in _modules(call):
        structure = _structure_of(state, variables)
        found = _holders.get(id(variables[structure.held[0]])) if structure.held else None
        if found is None or not found.is_of(structure, variables):
            found = Held(structure, variables)
        found.fill(state.values, root)
        state.structure, state.values = found.structure, found.taken()
        call.held.append(found)
    return bool(call.held)


def show_held(call: GraphCall) -> None:
    """Has a call take shapes of the buffers in which its small values would be held."""
    for state, variables, _ in _modules(call):
        structure = _structure_of(state, variables)
        buffers = (
            jax.ShapeDtypeStruct(each.shape, each.dtype, sharding=each.sharding)
            for each in structure.layout.buffers
        )
        alone = (state.values[number] for number in structure.alone)
        state.structure, state.values = structure, [*alone, *buffers]


def _modules(call: GraphCall) -> list[tuple[ModuleState, list[nnx.Variable], Any]]:
    """The modules of a call, with their own variables; none where one cannot be held."""
    if not (call.is_flat and all(isinstance(root, nnx.Pytree) for root in call.roots)):
        return []
    rows, start = [], 0
    for state, root in zip(call.states, call.roots, strict=True):
        end = start + len(state.values)
        rows.append((state, call.variables[start:end], root))
        start = end
    return rows


def _structure_of(state: ModuleState, variables: Sequence[nnx.Variable]) -> PackedStructure:
    (device,) = jax.device_put(0).sharding.device_set
    slots = [_slot_of(*pair, device) for pair in zip(variables, state.values, strict=True)]
    return PackedStructure(state.structure, slots)


def put(held: Sequence[Held], outcome: Outcome) -> bool:
    """Gives the new values of a call to who holds them; False where the outcome is not packed."""
    if outcome.about != PACKED:
        return False
    for each, values in zip(held, outcome.states, strict=True):
        each.put(values)
    return True
