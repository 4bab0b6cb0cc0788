"""`Layout`: how the leaves of a tree lie in a few buffers, and how to pack and unpack them.

Each leaf is a buffer of its own unless packing is asked for. Then the small leaves of one dtype and
sharding share one flat buffer, which the program slices inside XLA, as a call costs time for each
array. Leaves that are large, split over devices, weakly typed or random keys are never packed.
"""

from __future__ import annotations

import functools
import math
import threading
import weakref
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec, Sharding

from stepcache.sharding import is_in_type

PACKED_BELOW_BYTES = 64 << 10
"""With packing, leaves of at least this many bytes are buffers of their own.

For the state of a 24-layer transformer with adamw, a null step took 0.34 of its time without
packing at 4 KiB, 0.36 at 16 KiB, 0.25 at 64 KiB and 0.41 at 256 KiB (jax 0.10.2).
"""


class Slot(NamedTuple):
    """A leaf without its value, and its place in a buffer."""

    path: str  # Its keys, joined by `/`.
    shape: tuple[int, ...]
    dtype: Any
    weak_type: bool
    sharding: Sharding | None  # In `.value`; None where JAX chooses it.
    buffer: int = 0  # The index of its buffer.
    offset: int | None = None  # In elements, in a packed buffer; None in a buffer of its own.

    @property
    def size(self) -> int:
        return math.prod(self.shape)

    @property
    def size_bytes(self) -> int:
        return self.size * self.dtype.itemsize


class Buffer(NamedTuple):
    """An array that holds one leaf, or several packed ones, flat and not weakly typed."""

    shape: tuple[int, ...]
    dtype: Any
    sharding: Sharding | None  # None where JAX chooses it.
    weak_type: bool = False

    @property
    def size(self) -> int:
        return math.prod(self.shape)


@dataclass(frozen=True, eq=False, slots=True, weakref_slot=True)
class Layout:
    """How the leaves of a tree lie in buffers. Equal ones are one object: made by `layout_of`."""

    tree: Any  # Its structure.
    slots: tuple[Slot, ...]  # The leaves, in the order of the tree.
    buffers: tuple[Buffer, ...]  # The arrays that hold them.

    @property
    def size_bytes(self) -> int:
        """Bytes of all leaves, each counted once, however many devices hold it."""
        return sum(slot.size_bytes for slot in self.slots)

    def pack(self, leaves: Iterable[Any], xp: Any = jnp) -> list[Any]:
        """Buffers from leaves, inside a trace, or packed by numpy."""
        parts: list[list[Any]] = [[] for _ in self.buffers]
        for slot, leaf in zip(self.slots, leaves, strict=True):
            parts[slot.buffer].append(leaf if slot.offset is None else xp.asarray(leaf).reshape(-1))
        return [xp.concatenate(part) if len(part) > 1 else part[0] for part in parts]

    def unpack(self, buffers: Sequence[Any]) -> list[Any]:
        """Leaves from buffers, inside a trace or of numpy arrays."""
        leaves = []
        for slot in self.slots:
            buffer = buffers[slot.buffer]
            if slot.offset is not None:
                buffer = buffer[slot.offset : slot.offset + slot.size].reshape(slot.shape)
            leaves.append(buffer)
        return leaves


Made = TypeVar("Made", bound=Callable)


def interned(make: Made) -> Made:
    """Has a function return one object for equal arguments, as long as anybody holds it."""
    held: weakref.WeakValueDictionary = weakref.WeakValueDictionary()
    lock = threading.Lock()

    @functools.wraps(make)
    def find(*key: Any) -> Any:
        with lock:
            if (found := held.get(key)) is None:
                found = held[key] = make(*key)
            return found

    return find  # type: ignore[return-value]


@interned
def layout_of(tree: Any, leaves: tuple[Slot, ...], packed_below_bytes: int = 0) -> Layout:
    """The layout of a tree structure and its leaves, of which smaller ones share buffers."""
    groups: dict[tuple, list[int]] = {}
    for index, leaf in enumerate(leaves):
        if _can_be_packed(leaf, packed_below_bytes):
            groups.setdefault((leaf.dtype, _of_flat(leaf.sharding)), []).append(index)
    places: dict[int, tuple[int, int]] = {}
    buffers: list[Buffer] = []
    for (dtype, sharding), members in groups.items():
        if len(members) > 1:
            offset = 0
            for index in members:
                places[index] = (len(buffers), offset)
                offset += leaves[index].size
            buffers.append(Buffer((offset,), dtype, sharding))
    slots = []
    for index, leaf in enumerate(leaves):
        buffer, offset = places.get(index, (len(buffers), None))
        if offset is None:
            buffers.append(Buffer(leaf.shape, leaf.dtype, leaf.sharding, leaf.weak_type))
        slots.append(leaf._replace(buffer=buffer, offset=offset))
    return Layout(tree, tuple(slots), tuple(buffers))


def _of_flat(sharding: Sharding | None) -> Sharding | None:
    """The sharding of a flat buffer, for leaves of this sharding, which splits nothing."""
    if not isinstance(sharding, NamedSharding):
        return sharding
    spec = PartitionSpec(None) if is_in_type(sharding) else PartitionSpec()
    return NamedSharding(sharding.mesh, spec, memory_kind=sharding.memory_kind)


def _can_be_packed(leaf: Slot, packed_below_bytes: int) -> bool:
    return (
        not leaf.weak_type
        and not is_key_type(leaf.dtype)
        and leaf.size_bytes < packed_below_bytes
        and np.dtype(leaf.dtype).name not in _NARROW
        and (leaf.sharding is None or leaf.sharding.is_fully_replicated)
    )


# Several of their elements share a byte, which concatenation would have to take apart.
_NARROW = frozenset(("int2", "uint2", "int4", "uint4", "float4_e2m1fn"))


def is_key_type(dtype: Any) -> bool:
    """Whether this is the dtype of random keys."""
    return jnp.issubdtype(dtype, jax.dtypes.extended)


@jax.tree_util.register_dataclass
@dataclass(eq=False, slots=True, weakref_slot=True)
class Packed:
    """One whole version of a value, as a program takes and returns it: its buffers."""

    layout: Layout = field(metadata={"static": True})
    buffers: Any

    def value(self) -> Any:
        """The tree, inside a trace."""
        return self.layout.tree.unflatten(self.layout.unpack(self.buffers))


def shard_bytes(array: Any) -> int:
    """Bytes of one shard of an array, or of a `Buffer`: asking `addressable_shards` is slow."""
    return math.prod(array.sharding.shard_shape(array.shape)) * array.dtype.itemsize


def bytes_here(array: Any) -> int:
    """Bytes of the shards of an array, or of a `Buffer`, on the devices of this process."""
    return shard_bytes(array) * len(array.sharding.addressable_devices)


def shards_bytes(array: Any) -> int:
    """Bytes of all shards of an array, or of a `Buffer`, on all devices."""
    return shard_bytes(array) * len(array.sharding.device_set)


def bytes_per_device(arrays: Iterable[jax.Array]) -> dict[str, int]:
    """Bytes that arrays take of each kind of memory, on the device where they take most."""
    sums: dict[tuple[str, Any], int] = {}
    for array in arrays:
        for device in array.sharding.device_set:
            place = (f"{array.sharding.memory_kind or 'device'} memory", device)
            sums[place] = sums.get(place, 0) + shard_bytes(array)
    fullest: dict[str, int] = {}
    for (memory, _), size in sums.items():
        fullest[memory] = max(size, fullest.get(memory, 0))
    return fullest
