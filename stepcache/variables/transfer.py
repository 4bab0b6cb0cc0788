"""Moves values between numpy, devices and host memory, and counts the bytes that cross each link.

Nothing else in the package moves an array.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Sequence
from typing import Any

import jax
import numpy as np

from stepcache import jaxcompat
from stepcache.events import Moved, recorder
from stepcache.pods.global_arrays import placed
from stepcache.variables.packing import Buffer, Layout, Packed, bytes_here, is_key_type
from stepcache.variables.plan import DEVICE_LINK, HOST_LINK
from stepcache.variables.shares import HostLayout, replicated


class Meter(dict[str, int]):
    """Bytes that have crossed each link. Each call makes one: a `Counter` would take longer."""

    def __missing__(self, link: str) -> int:
        return 0

    def read(self, layout: HostLayout) -> None:
        """Counts a read of a whole value from the host."""
        self[HOST_LINK] += layout.bytes_here[0]
        self[DEVICE_LINK] += layout.bytes_here[1]

    def emit(self, mover: str) -> None:
        """Records what a step, or variables, have moved, if anything."""
        if crossed := tuple((link, size) for link, size in self.items() if size):
            recorder.emit(Moved(mover, crossed))


def pack(leaves: Sequence[Any], layout: Layout, *, may_alias: bool = False) -> Packed:
    """Copies leaves into buffers on the devices. They may be changed or donated afterwards.

    Leaves that never change (`may_alias`) are numpy arrays whose memory a CPU device may use as it
    is. JAX refers to them then, and does not write to them, as PJRT promises
    (`kImmutableZeroCopy`): it copies them when they are donated.
    """
    put = functools.partial(_put, may_alias=may_alias)
    return Packed(layout, tuple(map(put, layout.pack(leaves, np), layout.buffers)))


def _put(value: Any, buffer: Buffer, may_alias: bool = False) -> jax.Array:
    """A copy of a value, with the type and sharding that programs expect of the buffer."""
    sharding = buffer.sharding
    is_array = isinstance(value, jax.Array) and not is_key_type(value.dtype)
    if is_array and (value.weak_type != buffer.weak_type or (sharding is None and value.committed)):
        value = np.asarray(value)
    if buffer.weak_type and isinstance(value, np.ndarray | np.generic) and value.ndim == 0:
        value = value.item()
    if isinstance(value, np.ndarray):
        if may_alias:
            return placed(value, sharding)
        value = np.array(value)  # device_put may use the caller's memory as it is.
    elif not isinstance(value, jax.Array):
        value = jax.numpy.asarray(value, None if buffer.weak_type else buffer.dtype)
    elif sharding not in (None, value.sharding):
        value = copy(value)  # Else device_put may reuse it for one of the replicas.
    return placed(value, sharding, may_alias=False)


def unpack(packed: Packed) -> list[jax.Array]:
    """The leaves of a value: those with a buffer of their own as that buffer, others as copies."""
    slots, buffers = packed.layout.slots, packed.buffers
    flat = {slot.buffer for slot in slots if slot.offset is not None}
    leaves = packed.layout.unpack([np.array(x) if n in flat else x for n, x in enumerate(buffers)])
    for number, slot in enumerate(slots):
        if slot.offset is not None:  # A step may have moved leaves without a sharding of their own.
            buffer = buffers[slot.buffer]
            of_buffer = replicated(buffer.sharding) if buffer.committed else None
            leaves[number] = placed(leaves[number], slot.sharding or of_buffer)
    return leaves


def copy(array: jax.Array) -> jax.Array:
    """A copy of an array, with the same sharding."""
    stays = array.committed or jaxcompat.is_on_host(array)
    return placed(array, array.sharding if stays else None, may_alias=False)


def copied(packed: Packed) -> Packed:
    """The same value in buffers of its own."""
    return Packed(packed.layout, tuple(map(copy, packed.buffers)))


def read(packed: Packed, layout: HostLayout, meter: Meter) -> Packed:
    """Copies a value from host memory to the devices.

    Each device copies its share, and all gather: the value crosses the host's link once.
    """
    targets = layout.read(list(packed.buffers))
    meter.read(layout)
    # What stays on the devices is copied: the step may donate what it takes.
    pairs = zip(packed.buffers, targets, strict=True)
    return free(Packed(packed.layout, tuple(copy(x) if x is y else y for x, y in pairs)))


def write(packed: Packed, layout: HostLayout, meter: Meter) -> tuple[Any, ...]:
    """Copies a value from the devices to host memory: every shard, once.

    What a program wrote there is moved where that is another device's.
    """
    meter[HOST_LINK] += layout.bytes_here[0]
    if packed.layout is layout:
        return tuple(_brought(packed.buffers, layout.homes))
    places = [device.sharding for device in layout.on_device]
    return tuple(layout.write(_brought(packed.buffers, places)))


def _brought(buffers: Sequence[Any], places: Sequence[Any]) -> list[Any]:
    """Buffers on the devices of their places: a step without a mesh may return them on another."""
    is_there = not buffers or buffers[0].sharding.device_set == places[0].device_set
    return list(buffers) if is_there else jax.device_put(list(buffers), list(places))


def free(packed: Packed) -> Packed:
    """The same buffers, where they are, but uncommitted where JAX chose their device."""
    pairs = list(zip(packed.buffers, packed.layout.buffers, strict=True))
    if not any(like.sharding is None and value.committed for value, like in pairs):
        return packed
    buffers = (jaxcompat.committed(value, like.sharding is not None) for value, like in pairs)
    return Packed(packed.layout, tuple(buffers))


def pack_on_hosts(
    leaves: Sequence[Any], packed_layout: Layout, layout: HostLayout, meter: Meter
) -> Packed:
    """Copies leaves into buffers in host memory. They may be changed or donated afterwards."""
    packed = store(packed_layout.pack(leaves, np), packed_layout, layout)
    meter[HOST_LINK] += layout.bytes_here[0]
    return packed


def store(values: Sequence[Any], packed_layout: Layout, layout: HostLayout) -> Packed:
    """Copies buffers into host memory, shard by shard, without memory of the devices.

    A program moves arrays over the processes of a pod that are not split as on the hosts.
    """
    stored, moved = [], []
    rows = zip(values, layout.on_host, layout.on_device, strict=True)
    for number, (value, host, device) in enumerate(rows):
        spans = isinstance(value, jax.Array) and not value.is_fully_addressable
        is_there = host is not None and _matches(value, device)
        if host is None:
            value = _put(value, device)
        elif _matches(value, host) or (is_there and host.shape == device.shape and not spans):
            value = placed(value, host.sharding, may_alias=False)
        elif spans:
            value = value if is_there else _put(value, device)
            moved.append(number)
        else:
            value = _split(value, host)
        stored.append(value)
    if moved:
        written = layout.part(moved).write([stored[number] for number in moved])
        for number, value in zip(moved, written, strict=True):
            stored[number] = value
    return Packed(packed_layout, tuple(stored))


def _matches(value: Any, buffer: Buffer) -> bool:
    """Whether a value is an array of the type and sharding of a buffer."""
    if not isinstance(value, jax.Array) or value.shape != buffer.shape:
        return False
    sharding: Any = buffer.sharding
    if value.dtype != buffer.dtype or value.weak_type != buffer.weak_type:
        return False
    return value.sharding.is_equivalent_to(sharding, value.ndim)


def _split(value: Any, host: Buffer) -> jax.Array:
    """A value that this process has, in shards on the hosts, the last ones padded with zeros."""
    whole = _to_numpy(value) if isinstance(value, jax.Array) else np.asarray(value)
    padded = np.zeros(host.size, host.dtype)  # Of its own: JAX may use the memory as it is.
    padded[: whole.size] = whole.reshape(-1)
    with jaxcompat.explicit_transfer():  # As `jax.device_put`, also in a pod.
        return placed(padded.reshape(host.shape), host.sharding, may_alias=False)


def look(packed: Packed, layout: HostLayout, meter: Meter) -> list[Any]:
    """The leaves of a value in host memory, without memory of the devices.

    They are numpy arrays. What numpy cannot hold is a `jax.Array`: random keys and weakly typed
    numbers, on the devices, and a leaf that is split over the processes of a pod, as it is on the
    hosts. A pod gathers replicated leaves through its devices, one buffer at a time.
    """
    buffers = []
    rows = zip(packed.buffers, packed.layout.buffers, layout.on_host, layout.on_device, strict=True)
    for number, (value, made, host, device) in enumerate(rows):
        in_numpy = not (device.weak_type or is_key_type(device.dtype))
        spans = not value.is_fully_addressable
        if device.size == 0 and in_numpy:
            leaf: Any = np.empty(device.shape, device.dtype)
        elif host is None or (spans and not device.sharding.is_fully_replicated):  # type: ignore[union-attr]
            leaf = jaxcompat.committed(copy(value), made.sharding is not None)
        elif spans:
            (whole,) = layout.part((number,)).read([value])
            meter[HOST_LINK] += bytes_here(value)
            meter[DEVICE_LINK] += bytes_here(whole) - bytes_here(value)
            leaf = in_device_shape(whole, device)
        else:
            leaf = in_device_shape(value, device)
        buffers.append(leaf)
    return packed.layout.unpack(buffers)


def in_device_shape(value: jax.Array, device: Buffer) -> np.ndarray:
    """A buffer of this process as a numpy array, in the shape that it has on the devices."""
    return _to_numpy(value).reshape(-1)[: device.size].reshape(device.shape)


def _to_numpy(array: jax.Array) -> np.ndarray:
    """A numpy copy of an array, which does not keep it, as it would that of `np.asarray`."""
    whole = np.empty(array.shape, array.dtype)
    # What programs return without elements is not split as its sharding says, on JAX 0.10.
    shards = array.addressable_shards if array.size else []
    for shard in shards[:1] if array.is_fully_replicated else shards:
        data = shard.data
        twin = jax.make_array_from_single_device_arrays(data.shape, data.sharding, [data])
        whole[shard.index] = np.asarray(twin)
    return whole


def to_host_bytes(leaves: Iterable[Any]) -> int:
    """Bytes of leaves that numpy copies from the devices."""
    return sum(leaf.nbytes for leaf in leaves if isinstance(leaf, jax.Array))
