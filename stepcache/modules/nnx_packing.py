"""`PackedStructure`: a module of which the small arrays lie in a few buffers.

A call of JAX takes about 1 µs for each array that goes in and comes out. So the small variables of
a module share one buffer for each dtype and device, as those of `Variables(pack=True)` do, and the
program takes them apart.
"""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
from flax import nnx
from jax.sharding import SingleDeviceSharding

from stepcache.fingerprint.trail import Trail
from stepcache.fingerprint.values import HANDLERS
from stepcache.modules.module_state import ModuleState, Outcome, is_state
from stepcache.modules.nnx_graph import NOTHING_ELSE, GraphStructure, OverGraphs
from stepcache.variables.packing import PACKED_BELOW_BYTES, Layout, Slot, layout_of


class PackedStructure:
    """The structure of a module of which some arrays, `held`, lie in buffers, as `layout` says."""

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
        paths, named = self.inner.paths(), enumerate(self.layout.buffers)
        counts = Counter(slot.buffer for slot in self.layout.slots)
        packed = [f"{counts[number]} packed {buffer.dtype}" for number, buffer in named]
        return [paths[number] for number in self.alone] + packed

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
        return all(is_like(slot, values[number]) for number, slot in rows)


def is_like(slot: Slot, value: Any) -> bool:
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


def packed_structure(state: ModuleState, variables: Sequence[nnx.Variable]) -> PackedStructure:
    """The structure of a module whose small values are to be packed, of its own variables."""
    (device,) = jax.device_put(0).sharding.device_set
    slots = [_slot_of(*pair, device) for pair in zip(variables, state.values, strict=True)]
    return PackedStructure(state.structure, slots)


def _slot_of(variable: nnx.Variable, value: Any, device: Any) -> Slot:
    """The slot of a value; one that cannot be packed where the value has to stand alone."""
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
    """Whether variables of a type hold no more than nnx's do, and are read as these are."""
    names = ("__getattr__", "__getattribute__", "_raw_value")
    same = all(getattr(kind, name) is getattr(nnx.Variable, name) for name in names)
    sizes = ("__basicsize__", "__dictoffset__", "__weakrefoffset__")
    return same and all(getattr(kind, name) == getattr(nnx.Variable, name) for name in sizes)
