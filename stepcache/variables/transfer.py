"""Moving values of variables. Nothing else in the package moves an array.

What crosses a link is counted here, from the arrays that did.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import SingleDeviceSharding

from stepcache.variables.packing import Buffer, Layout, Packed
from stepcache.variables.plan import DEVICE_LINK, HOST_LINK
from stepcache.variables.shares import HostLayout


def pack(leaves: Sequence[Any], layout: Layout) -> Packed:
    """Puts leaves into buffers of their own: what they came from may change or go.

    Args:
        leaves: arrays, or what JAX takes for one.
        layout: how they are to lie.
    """
    parts: list[list[Any]] = [[] for _ in layout.buffers]
    for slot, leaf in zip(layout.slots, leaves, strict=True):
        # A buffer of host memory must not be the caller's: device_put may take it as it is.
        parts[slot.buffer].append(leaf if slot.offset is None else np.asarray(leaf).reshape(-1))
    buffers = [
        _put(np.concatenate(part) if len(part) > 1 else part[0], buffer.sharding)
        for part, buffer in zip(parts, layout.buffers, strict=True)
    ]
    return Packed(tuple(buffers), layout)


def _put(value: Any, sharding: Any) -> jax.Array:
    if isinstance(value, np.ndarray):
        value = np.array(value)
    elif not isinstance(value, jax.Array):
        value = jax.numpy.asarray(value)  # A Python scalar, which stays weakly typed.
    return jax.device_put(value, sharding, may_alias=False)


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
            places.append(slot.sharding)
    small = iter(jax.device_put(views, places))
    shared: list[jax.Array] = []
    leaves: list[jax.Array] = []
    for slot in layout.slots:
        if slot.offset is not None:
            leaves.append(next(small))
        else:
            leaves.append(packed.buffers[slot.buffer])
            shared.append(leaves[-1])
    return leaves, shared


def copy(array: jax.Array) -> jax.Array:
    """The same value in memory of its own, in the same place."""
    sharding = array.sharding if array.committed else None
    return jax.device_put(array, sharding, may_alias=False)


# ---- between hosts and devices ----------------------------------------------------------------


class Meter:
    """Bytes that have crossed each link."""

    def __init__(self) -> None:
        self.link_bytes: dict[str, int] = {}

    def add(self, link: str, size_bytes: int) -> None:
        if size_bytes:
            self.link_bytes[link] = self.link_bytes.get(link, 0) + size_bytes


def read(packed: Packed, layout: HostLayout, route: str, meter: Meter) -> Packed:
    """Copies a value from the hosts' memory to the devices.

    Args:
        packed: as it lies on the hosts.
        layout: how it lies there, and on the devices.
        route: "each", "fanout" or "gather".
        meter: counts what moves.
    """
    if route == "gather":
        buffers = layout.read(packed.buffers)
        for source, target, host in zip(packed.buffers, buffers, layout.on_host, strict=True):
            if host is not None:
                crossed = _bytes_of(source)
                meter.add(HOST_LINK, crossed)
                meter.add(DEVICE_LINK, _bytes_of(target) - crossed)
    else:
        rows = zip(packed.buffers, layout.on_host, layout.on_device, strict=True)
        buffers = [_read_one(*row, route, meter) for row in rows]
    return Packed(tuple(buffers), packed.layout)


def _read_one(value: Any, host: Buffer | None, device: Buffer, route: str, meter: Meter) -> Any:
    if host is None:
        return value
    if device.sharding is None or not device.sharding.is_fully_replicated:
        target = jax.device_put(value, device.sharding)
        meter.add(HOST_LINK, _bytes_of(target))
        return target
    whole = np.array(value).reshape(-1)[: math.prod(device.shape)].reshape(device.shape)
    if route == "each":
        target = jax.device_put(whole, device.sharding)
        meter.add(HOST_LINK, _bytes_of(target))
        return target
    first = min(device.sharding.device_set, key=lambda each: each.id)
    one = jax.device_put(whole, SingleDeviceSharding(first))
    target = jax.device_put(one, device.sharding)
    meter.add(HOST_LINK, _bytes_of(one))
    meter.add(DEVICE_LINK, _bytes_of(target) - _bytes_of(one))
    return target


def write(packed: Packed, layout: HostLayout, meter: Meter) -> Packed:
    """Copies a value from the devices to the hosts' memory: every share, once."""
    buffers = layout.write(packed.buffers)
    meter.add(HOST_LINK, sum(_bytes_of_shared(buffers, layout.on_host)))
    return Packed(tuple(buffers), packed.layout)


def _bytes_of(array: jax.Array) -> int:
    return sum(shard.data.nbytes for shard in array.addressable_shards)


def _bytes_of_shared(arrays: Iterable[Any], hosts: Iterable[Any]) -> Iterable[int]:
    for array, host in zip(arrays, hosts, strict=True):
        if host is not None:
            yield _bytes_of(array)
