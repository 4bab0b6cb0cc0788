"""`Held`: small variables of nnx modules that have no value of their own between two calls.

Their values are in buffers (`nnx_packing`), and their slots for them are empty. Whoever looks finds
the slot empty, so that Python asks `Variable.__getattr__`, which cuts the value out of the buffer.
Before the next call, what the variables refer to tells whether any of them has a value again.
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

from stepcache import _process_hooks, jaxcompat
from stepcache.modules.module_state import ModuleState, Outcome
from stepcache.modules.nnx_graph import GraphCall
from stepcache.modules.nnx_packing import PACKED, PackedStructure, is_like, packed_structure
from stepcache.modules.nnx_variables import clear_value, is_empty, raw_values, set_values, value_of
from stepcache.variables.packing import Slot

_FEW = 16
"""How many values that were assigned between two calls are written into the buffers one by one."""

_lock = threading.RLock()
_holders: dict[int, Held] = {}  # By the identity of a variable, which its holder keeps alive.
_unused: list[Held] = []


class Held:
    """The values of all variables of one module, small ones in buffers."""

    def __init__(self, structure: PackedStructure, variables: Sequence[nnx.Variable]):
        self.structure, self._all = structure, list(variables)
        self._alone = [variables[number] for number in structure.alone]
        self._held = [variables[number] for number in structure.held]
        self._numbers = {id(each): number for number, each in enumerate(self._held)}
        self._empty_count: int | None = None
        self.root: Any = None  # The module, weakly.
        self.buffers: list[jax.Array] = []  # Values of variables that nobody has looked at.
        self.seen: dict[int, Any] = {}  # What variables were given since of them, by number.

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
        if not fit or len(changed) > _FEW or any(each.is_deleted() for each in self.buffers):
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
            if buffer.is_deleted():
                value = buffer  # A program that was given it has failed: JAX says what is lost.
            else:
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


def _number_beside(buffer: jax.Array, number: Any) -> jax.Array:
    """A number where a buffer is, as `jax.transfer_guard` allows it."""
    return jax.device_put(np.int32(number), buffer.sharding if buffer.committed else None)


def _fits(slot: Slot, value: Any) -> bool:
    """Whether a value that a variable was given is like the one it had."""
    if not isinstance(value, jax.Array) or not is_like(slot, value):
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


def hold_all(call: GraphCall) -> None:
    """Has the small values of a call's modules held, if it can: it takes buffers in their place."""
    for state, variables, root in _modules(call):
        structure = packed_structure(state, variables)
        found = _holders.get(id(variables[structure.held[0]])) if structure.held else None
        if found is None or not found.is_of(structure, variables):
            found = Held(structure, variables)
        found.fill(state.values, root)
        state.structure, state.values = found.structure, found.taken()
        call.held.append(found)


def show_held(call: GraphCall) -> None:
    """Has a call take shapes of the buffers in which its small values would be held."""
    for state, variables, _ in _modules(call):
        structure = packed_structure(state, variables)
        buffers = (
            jaxcompat.stand_in_here(each.shape, each.dtype)
            if each.sharding is None
            else jax.ShapeDtypeStruct(each.shape, each.dtype, sharding=each.sharding)
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


def put(held: Sequence[Held], outcome: Outcome) -> bool:
    """Gives the new values of a call to who holds them; False where the outcome is not packed."""
    if outcome.about != PACKED:
        return False
    for each, values in zip(held, outcome.states, strict=True):
        each.put(values)
    return True
