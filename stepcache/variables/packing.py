"""`Layout`: how the leaves of a tree lie in a few buffers, and the way in and out.

Each leaf is a buffer of its own, as it is, unless packing is asked for. Then the small leaves of
one dtype and sharding share one flat buffer, which the program slices inside XLA: a call costs by
the array. A leaf that is large or split over devices, or that XLA knows by more than shape and
dtype (weak types, random keys), still is a buffer of its own.
"""

from __future__ import annotations

import math
import operator
import threading
import weakref
from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec, Sharding

from stepcache.sharding import is_in_type

PACKED_BELOW_BYTES = 64 << 10
"""Where leaves are packed, those of at least so many bytes are buffers of their own.

Measured over the state of a 24-layer transformer with adamw: a null step took 0.34 of its time with
unpacked leaves where this was 4 KiB, 0.36 at 16 KiB, 0.25 at 64 KiB and 0.41 at 256 KiB (jax
0.10.2; with 0.12.0.1 0.26, 0.30, 0.16 and 0.17).
"""


class Slot(NamedTuple):
    """A leaf: what it is, and where it lies.

    Attributes:
        path: its keys, joined by `/`.
        shape: its shape.
        dtype: its dtype.
        sharding: where its value belongs when somebody looks; None for where JAX puts it.
        buffer: the number of its buffer.
        offset: where it begins in a packed buffer, in elements; None in a buffer of its own.
    """

    path: str
    shape: tuple[int, ...]
    dtype: Any
    sharding: Sharding | None
    buffer: int
    offset: int | None

    @property
    def size(self) -> int:
        return math.prod(self.shape)

    @property
    def size_bytes(self) -> int:
        return self.size * self.dtype.itemsize


class Buffer(NamedTuple):
    """An array that holds leaves.

    Attributes:
        shape: its shape; a packed buffer is flat.
        dtype: its dtype.
        sharding: where it lies; None for where JAX puts it.
        weak_type: whether its type gives way to others; never of a packed one.
    """

    shape: tuple[int, ...]
    dtype: Any
    sharding: Sharding | None
    weak_type: bool = False

    @property
    def size_bytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize


class Described(NamedTuple):
    """A leaf before it has a place in a buffer."""

    path: str
    shape: tuple[int, ...]
    dtype: Any
    weak_type: bool
    sharding: Sharding | None


@dataclass(frozen=True, eq=False, slots=True, weakref_slot=True)
class Layout:
    """How the leaves of a tree lie in buffers. Equal layouts are one object: made by `layout_of`.

    Attributes:
        tree: the tree structure.
        slots: the leaves, in the order of the tree.
        buffers: the arrays that hold them.
    """

    tree: Any
    slots: tuple[Slot, ...]
    buffers: tuple[Buffer, ...]

    @property
    def size_bytes(self) -> int:
        """Bytes of all leaves, each counted once, however many devices hold it."""
        return sum(slot.size_bytes for slot in self.slots)

    def pack(self, leaves: Sequence[Any]) -> list[Any]:
        """Buffers from leaves, inside a trace."""
        filled: list[list[Any]] = [[] for _ in self.buffers]
        for slot, leaf in zip(self.slots, leaves, strict=True):
            filled[slot.buffer].append(leaf if slot.offset is None else jnp.ravel(leaf))
        return [
            jnp.concatenate(parts) if buffer.shape != () and len(parts) > 1 else parts[0]
            for buffer, parts in zip(self.buffers, filled, strict=True)
        ]

    def unpack(self, buffers: Sequence[Any]) -> list[Any]:
        """Leaves from buffers, inside a trace or of numpy arrays."""
        leaves = []
        for slot in self.slots:
            buffer = buffers[slot.buffer]
            if slot.offset is not None:
                buffer = buffer[slot.offset : slot.offset + slot.size].reshape(slot.shape)
            leaves.append(buffer)
        return leaves


_layouts: weakref.WeakValueDictionary[Hashable, Layout] = weakref.WeakValueDictionary()
_lock = threading.Lock()


def layout_of(tree: Any, leaves: Iterable[Described], packed_below_bytes: int = 0) -> Layout:
    """The layout of leaves.

    Args:
        tree: the tree structure.
        leaves: its leaves.
        packed_below_bytes: smaller leaves of one dtype and sharding share a buffer.
    """
    leaves = tuple(leaves)
    key = (tree, leaves, packed_below_bytes)
    with _lock:
        layout = _layouts.get(key)
        if layout is None:
            layout = _layouts[key] = _lay_out(tree, leaves, packed_below_bytes)
        return layout


def _lay_out(tree: Any, leaves: Sequence[Described], packed_below_bytes: int) -> Layout:
    shared: dict[tuple, list[int]] = {}
    for index, leaf in enumerate(leaves):
        if _can_share(leaf, packed_below_bytes):
            shared.setdefault((leaf.dtype, _of_flat(leaf.sharding)), []).append(index)
    shared = {group: members for group, members in shared.items() if len(members) > 1}
    places: dict[int, tuple[int, int]] = {}
    buffers: list[Buffer] = []
    for (dtype, sharding), members in shared.items():
        offset = 0
        for index in members:
            places[index] = (len(buffers), offset)
            offset += math.prod(leaves[index].shape)
        buffers.append(Buffer((offset,), dtype, sharding))
    slots = []
    for index, leaf in enumerate(leaves):
        if index in places:
            buffer, offset = places[index]
        else:
            buffer, offset = len(buffers), None
            buffers.append(Buffer(leaf.shape, leaf.dtype, leaf.sharding, leaf.weak_type))
        slots.append(Slot(leaf.path, leaf.shape, leaf.dtype, leaf.sharding, buffer, offset))
    return Layout(tree, tuple(slots), tuple(buffers))


def _of_flat(sharding: Sharding | None) -> Sharding | None:
    """The sharding of a flat buffer whose leaves have this one, which splits nothing."""
    if not isinstance(sharding, NamedSharding):
        return sharding
    spec = PartitionSpec(None) if is_in_type(sharding) else PartitionSpec()
    return NamedSharding(sharding.mesh, spec, memory_kind=sharding.memory_kind)


def _can_share(leaf: Described, packed_below_bytes: int) -> bool:
    return (
        not leaf.weak_type
        and not jnp.issubdtype(leaf.dtype, jax.dtypes.extended)
        and leaf.dtype.itemsize * math.prod(leaf.shape) < packed_below_bytes
        and np.dtype(leaf.dtype).name not in _NARROW
        and (leaf.sharding is None or leaf.sharding.is_fully_replicated)
    )


# Several of their elements share a byte, which concatenation would have to take apart.
_NARROW = frozenset(("int2", "uint2", "int4", "uint4", "float4_e2m1fn"))


class Packed:
    """One whole version of a value, as a program takes and returns it.

    Attributes:
        buffers: its arrays.
        layout: how leaves lie in them.
    """

    __slots__ = ("__weakref__", "buffers", "layout")

    def __init__(self, layout: Layout, buffers: Any):
        self.layout = layout
        self.buffers = buffers

    def value(self) -> Any:
        """The tree, inside a trace."""
        return self.layout.tree.unflatten(self.layout.unpack(self.buffers))


# As a dataclass of JAX's it would take twice as long to make one, which each call of a step does.
jax.tree_util.register_pytree_with_keys(
    Packed,
    lambda packed: (
        [(jax.tree_util.SequenceKey(i), buffer) for i, buffer in enumerate(packed.buffers)],
        packed.layout,
    ),
    Packed,
    operator.attrgetter("buffers", "layout"),
)


def bytes_per_device(arrays: Iterable[jax.Array]) -> dict[str, int]:
    """Bytes that arrays take of each kind of memory, on the device where they take most."""
    sums: dict[tuple[str, int], int] = {}
    for array in arrays:
        sharding = array.sharding
        shard = math.prod(sharding.shard_shape(array.shape)) * array.dtype.itemsize
        for device in sharding.device_set:
            place = (f"{sharding.memory_kind or 'device'} memory", device.id)
            sums[place] = sums.get(place, 0) + shard
    fullest: dict[str, int] = {}
    for (memory, _), size in sums.items():
        fullest[memory] = max(size, fullest.get(memory, 0))
    return fullest
