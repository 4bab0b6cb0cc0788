"""Moving values of variables. Nothing else in the package moves an array.

What crosses a link is counted here, from the arrays that did.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterable, Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec, SingleDeviceSharding

from stepcache import jaxcompat
from stepcache.events import Moved, recorder
from stepcache.spanning import placed, spans_processes
from stepcache.variables.packing import Buffer, Layout, Packed
from stepcache.variables.plan import (
    DEVICE_LINK,
    HOST_LINK,
    is_coded,
    is_gathered,
    is_replicated,
    parts_of,
)
from stepcache.variables.shares import HostLayout
from stepcache.variables.wire import codes, decode, encode


def pack(leaves: Sequence[Any], layout: Layout) -> Packed:
    """Puts leaves into buffers of their own: what they came from may change or go.

    Args:
        leaves: arrays, or what JAX takes for one.
        layout: how they are to lie.
    """
    return Packed(layout, tuple(map(_put, _joined(leaves, layout), layout.buffers)))


def _joined(leaves: Sequence[Any], layout: Layout) -> list[Any]:
    """What the buffers are to hold: numpy arrays of the leaves that share one, or the leaf."""
    parts: list[list[Any]] = [[] for _ in layout.buffers]
    for slot, leaf in zip(layout.slots, leaves, strict=True):
        parts[slot.buffer].append(leaf if slot.offset is None else np.asarray(leaf).reshape(-1))
    return [np.concatenate(part) if len(part) > 1 else part[0] for part in parts]


def _put(value: Any, buffer: Buffer) -> jax.Array:
    """A value in memory of its own, with the type and the place that programs know it by."""
    sharding = buffer.sharding
    if isinstance(value, jax.Array):
        if jax.numpy.issubdtype(value.dtype, jax.dtypes.extended):
            pass
        elif value.weak_type != buffer.weak_type or (sharding is None and value.committed):
            value = np.asarray(value)
    if buffer.weak_type and isinstance(value, np.ndarray | np.generic) and value.ndim == 0:
        value = value.item()
    if isinstance(value, np.ndarray):
        value = np.array(value)  # device_put may take the caller's memory as it is.
    elif not isinstance(value, jax.Array):
        value = jax.numpy.asarray(value, None if buffer.weak_type else buffer.dtype)
    elif sharding not in (None, value.sharding):
        value = copy(value)  # Else it may be taken for one of the copies.
    return placed(value, sharding, may_alias=False)


def unpack(packed: Packed) -> tuple[list[jax.Array], list[jax.Array]]:
    """The leaves of a value, each where it belongs.

    Returns:
        The leaves, and those of them that are buffers of the value itself.
    """
    layout = packed.layout
    host = {
        slot.buffer: np.array(packed.buffers[slot.buffer])
        for slot in layout.slots
        if slot.offset is not None
    }
    views, places = [], []
    for slot in layout.slots:
        if slot.offset is not None:
            flat = host[slot.buffer][slot.offset : slot.offset + slot.size]
            views.append(flat.reshape(slot.shape))
            places.append(slot.sharding or _place_of(packed.buffers[slot.buffer]))
    small = iter(
        [placed(view, place) for view, place in zip(views, places, strict=True)]
        if any(map(spans_processes, places))
        else jax.device_put(views, places)
    )
    shared: list[jax.Array] = []
    leaves: list[jax.Array] = []
    for slot in layout.slots:
        if slot.offset is not None:
            leaves.append(next(small))
        else:
            leaves.append(packed.buffers[slot.buffer])
            shared.append(leaves[-1])
    return leaves, shared


def _place_of(buffer: jax.Array) -> Any:
    """Where leaves of a packed buffer are, that nobody placed: a step may have drawn them there."""
    if not buffer.committed or not isinstance(buffer.sharding, NamedSharding):
        return buffer.sharding if buffer.committed else None
    return NamedSharding(buffer.sharding.mesh, PartitionSpec())


def copy(array: jax.Array) -> jax.Array:
    """The same value in memory of its own, in the same place."""
    sharding = array.sharding if array.committed else None
    return placed(array, sharding, may_alias=False)


def copied(packed: Packed) -> Packed:
    """The same value in buffers of its own."""
    return Packed(packed.layout, tuple(map(copy, packed.buffers)))


# ---- between hosts and devices ----------------------------------------------------------------


class Meter:
    """Bytes that have crossed each link."""

    def __init__(self) -> None:
        self.link_bytes: dict[str, int] = {}

    def add(self, link: str, size_bytes: int) -> None:
        if size_bytes:
            self.link_bytes[link] = self.link_bytes.get(link, 0) + size_bytes

    def emit(self, mover: str) -> None:
        """Records what has moved, if anything has.

        Args:
            mover: the name of the step, or of the variables.
        """
        if self.link_bytes:
            recorder.emit(Moved(mover, tuple(self.link_bytes.items())))


def read(
    packed: Packed,
    layout: HostLayout,
    route: str,
    wire: str | None,
    meter: Meter,
    ahead: bool = False,
) -> Packed:
    """Copies a value from the hosts' memory to the devices.

    Args:
        packed: as it lies on the hosts.
        layout: how it lies there, and on the devices.
        route: "each", "fanout" or "gather".
        wire: how it is coded on the way, or None.
        meter: counts what moves.
        ahead: whether a step is running meanwhile.
    """
    buffers: list[Any] = list(packed.buffers)
    exact = []
    for number, device in enumerate(layout.on_device):
        if layout.on_host[number] is not None and is_coded(device, route, wire):
            assert wire is not None
            buffers[number] = _read_coded(buffers[number], device, route, wire, meter)
        elif layout.on_host[number] is None or is_gathered(device, route):
            exact.append(number)
        else:
            buffers[number] = _read_one(buffers[number], device, route, meter)
    if exact:
        part = layout if len(exact) == len(buffers) else layout.part(exact)
        sources = [buffers[number] for number in exact]
        targets = part.read_ahead(sources) if ahead else part.read(sources)
        for number, host, source, target in zip(exact, part.on_host, sources, targets, strict=True):
            # What stays on the devices is copied: the step may use up what it takes.
            buffers[number] = copy(source) if target is source else target
            if host is not None:
                _count_copied(source, target, meter)
    return _as_made(buffers, packed.layout)


def _count_copied(source: jax.Array, target: jax.Array, meter: Meter) -> None:
    """Counts what has crossed the host's link once, and then gone on from device to device."""
    meter.add(HOST_LINK, _bytes_of(source))
    meter.add(DEVICE_LINK, _bytes_of(target) - _bytes_of(source))


def _as_made(buffers: Iterable[Any], layout: Layout) -> Packed:
    """Buffers that are free to follow others where the leaves were that they were made of."""
    pairs = zip(buffers, layout.buffers, strict=True)
    made = (jaxcompat.uncommitted(x) if buffer.sharding is None else x for x, buffer in pairs)
    return Packed(layout, tuple(made))


def _read_coded(value: Any, device: Buffer, route: str, wire: str, meter: Meter) -> Any:
    sharding: Any = device.sharding
    devices = sorted(sharding.device_set, key=lambda each: each.id)
    flat = _in_shape(value, device).reshape(-1)
    coded = encode(wire, flat, parts_of(device, route), xp=np)
    whole = _replicated(sharding)
    place: Any = whole
    if route == "gather" and isinstance(sharding, NamedSharding):
        place = NamedSharding(sharding.mesh, PartitionSpec(tuple(sharding.mesh.axis_names)))
    elif route == "fanout":
        place = SingleDeviceSharding(devices[0])
    arrived = jax.device_put(coded, place)
    crossed = sum(map(_bytes_of, arrived))
    meter.add(HOST_LINK, crossed)
    if route == "fanout":
        arrived = jax.device_put(arrived, whole)
    if route != "each":
        meter.add(DEVICE_LINK, crossed * (len(devices) - 1))
    return _decoder(wire, device)(arrived)


def _replicated(sharding: Any) -> Any:
    """A sharding that splits nothing, for arrays of any rank."""
    if isinstance(sharding, NamedSharding):
        return NamedSharding(sharding.mesh, PartitionSpec())
    return sharding


@functools.lru_cache(maxsize=1024)
def _decoder(wire: str, device: Buffer) -> Any:
    def decoder(coded: Sequence[Any]) -> Any:
        # The code is gathered, not what it stands for.
        coded = [jax.device_put(each, _replicated(device.sharding)) for each in coded]
        return decode(wire, coded, device.shape, device.dtype)

    return jax.jit(decoder, out_shardings=device.sharding)


def _read_one(value: Any, device: Buffer, route: str, meter: Meter) -> Any:
    assert device.sharding is not None
    whole = _in_shape(value, device)
    if route == "each":
        target = jax.device_put(whole, device.sharding)
        meter.add(HOST_LINK, _bytes_of(target))
        return target
    first = min(device.sharding.device_set, key=lambda each: each.id)
    one = jax.device_put(whole, SingleDeviceSharding(first))
    target = jax.device_put(one, device.sharding)
    _count_copied(one, target, meter)
    return target


def write(packed: Packed, layout: HostLayout, meter: Meter) -> Packed:
    """Copies a value from the devices to the hosts' memory: every share, once."""
    buffers = layout.write(_gone_home(packed, layout))
    meter.add(HOST_LINK, sum(_bytes_of_shared(buffers, layout.on_host)))
    return Packed(packed.layout, tuple(buffers))


def _gone_home(packed: Packed, layout: HostLayout) -> Sequence[Any]:
    """The buffers on their hosts' devices: a step without a mesh may return them elsewhere."""
    return [
        value
        if value.sharding.device_set == device.sharding.device_set  # type: ignore[union-attr]
        else jax.device_put(value, device.sharding)
        for value, device in zip(packed.buffers, layout.on_device, strict=True)
    ]


def _bytes_of(array: jax.Array) -> int:
    """Bytes of all shards. To ask each shard would cost more than to dispatch the read."""
    sharding = array.sharding
    shard = math.prod(sharding.shard_shape(array.shape)) * array.dtype.itemsize
    return shard * len(sharding.addressable_devices)


def _bytes_of_shared(arrays: Iterable[Any], hosts: Iterable[Any]) -> Iterable[int]:
    for array, host in zip(arrays, hosts, strict=True):
        if host is not None:
            yield _bytes_of(array)


# ---- on a host ----------------------------------------------------------------------------------


def look(packed: Packed, layout: HostLayout, meter: Meter) -> list[Any]:
    """The leaves of a value in host memory, without the memory of the devices.

    They are numpy arrays, but for what numpy cannot hold: random keys and weak types, which come as
    they lie on the devices, and a leaf that is split over the processes of a pod, which comes as it
    lies on the hosts. A pod gathers replicated leaves through its devices, one buffer at a time.

    Args:
        packed: as it lies on the hosts.
        layout: how it lies there, and on the devices.
        meter: counts what a pod gathers.
    """
    buffers = []
    for number, made in enumerate(packed.layout.buffers):
        seen = _seen(packed.buffers[number], number, layout, meter)
        if made.sharding is None and isinstance(seen, jax.Array):
            seen = jaxcompat.uncommitted(seen)
        buffers.append(seen)
    return packed.layout.unpack(buffers)


def _seen(value: Any, number: int, layout: HostLayout, meter: Meter) -> Any:
    host, device = layout.on_host[number], layout.on_device[number]
    spans = not value.is_fully_addressable
    if host is None or (spans and not is_replicated(device)):
        return copy(value)
    if device.weak_type and not device.shape and not spans:
        return jax.device_put(_in_shape(value, device).item(), device.sharding)
    if spans or device.weak_type:  # Only a program gives such a type to an array.
        source, (value,) = value, layout.part((number,)).read([value])
        _count_copied(source, value, meter)
    return value if device.weak_type else _in_shape(value, device)


def on_host(packed: Packed, layout: HostLayout) -> list[np.ndarray | jax.Array]:
    """The buffers of a value in host memory, in the shapes they have on the devices."""
    rows = zip(packed.buffers, layout.on_host, layout.on_device, strict=True)
    return [value if host is None else _in_shape(value, device) for value, host, device in rows]


def _in_shape(value: jax.Array, device: Buffer) -> np.ndarray:
    """A buffer that this process has, in numpy's memory and in the shape it has on the devices."""
    return _to_numpy(value).reshape(-1)[: math.prod(device.shape)].reshape(device.shape)


def _to_numpy(array: jax.Array) -> np.ndarray:
    """The value in memory of its own. Arrays keep what `np.asarray` makes of them, for as long as
    they live: this does not."""
    whole = np.empty(array.shape, array.dtype)
    shards = array.addressable_shards
    for shard in shards[:1] if array.is_fully_replicated else shards:
        data = shard.data
        twin = jax.make_array_from_single_device_arrays(data.shape, data.sharding, [data])
        whole[shard.index] = np.asarray(twin)
    return whole


def pack_on_hosts(
    leaves: Sequence[Any], packed_layout: Layout, layout: HostLayout, meter: Meter
) -> Packed:
    """Puts leaves into the hosts' memory, in buffers of their own.

    Args:
        leaves: arrays, or what JAX takes for one.
        packed_layout: how they are to lie in buffers.
        layout: how the buffers are to lie on the hosts.
        meter: counts what is written.
    """
    packed = store(_joined(leaves, packed_layout), packed_layout, layout)
    meter.add(HOST_LINK, sum(_bytes_of_shared(packed.buffers, layout.on_host)))
    return packed


def store(values: Sequence[Any], packed_layout: Layout, layout: HostLayout) -> Packed:
    """Puts buffers into the hosts' memory, share by share, without the memory of the devices.

    Except for what only devices hold, which a program moves: weak types that are to be split, and
    arrays over the processes of a pod that are not split as they are to lie on the hosts.
    """
    stored, moved = [], []
    rows = zip(values, layout.on_host, layout.on_device, strict=True)
    for number, (value, host, device) in enumerate(rows):
        spans = isinstance(value, jax.Array) and not value.is_fully_addressable
        is_there = host is not None and _lies_as(value, device)
        if host is None:
            value = _put(value, device)
        elif _lies_as(value, host) or (is_there and host.shape == device.shape and not spans):
            value = placed(value, host.sharding, may_alias=False)
        elif spans or device.weak_type:
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


def _lies_as(value: Any, buffer: Buffer) -> bool:
    """Whether a value is an array of the type and in the place of a buffer."""
    if not isinstance(value, jax.Array) or value.shape != buffer.shape:
        return False
    sharding: Any = buffer.sharding
    if value.dtype != buffer.dtype or value.weak_type != buffer.weak_type:
        return False
    return value.sharding.is_equivalent_to(sharding, value.ndim)


def _split(value: Any, host: Buffer) -> jax.Array:
    """A value that this process has, in shares on the hosts, the last ones filled up with zeros."""
    whole = _to_numpy(value) if isinstance(value, jax.Array) else np.asarray(value)
    whole = whole.reshape(host.shape if whole.size == math.prod(host.shape) else -1)
    sharding: Any = host.sharding
    shape = sharding.shard_shape(host.shape)

    def share(index: Any) -> np.ndarray:
        # In memory of its own: JAX may take it as it is.
        part, filled = whole[index], np.zeros(shape, host.dtype)
        filled[tuple(map(slice, part.shape))] = part
        return filled

    return jax.make_array_from_callback(host.shape, sharding, share)


def to_host(array: Any, wire: str | None, meter: Meter) -> np.ndarray:
    """An array in memory of a host's own, coded on its way there."""
    if not isinstance(array, jax.Array):
        return np.array(array)
    if wire is None or not codes(wire, array.dtype):
        meter.add(HOST_LINK, array.nbytes)
        return np.array(array)
    coded = [np.asarray(each) for each in _encoder(wire)(array)]
    meter.add(HOST_LINK, sum(each.nbytes for each in coded))
    return decode(wire, coded, array.shape, array.dtype, xp=np)


@functools.lru_cache(maxsize=8)
def _encoder(wire: str) -> Any:
    return jax.jit(lambda array: encode(wire, array.reshape(-1)))
