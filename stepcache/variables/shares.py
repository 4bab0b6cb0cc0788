"""`HostLayout`: how buffers lie in host memory between steps, and the programs that move them.

One representation serves one device, many, and pods: each buffer is split evenly over the devices,
and each device's shard lies in the memory of its host. A read is a compiled program that copies
each shard to its device and all-gathers there; a write is the reverse. A step that carries the
value does both inside its own program.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding, PartitionSpec, Sharding, SingleDeviceSharding

from stepcache import jaxcompat
from stepcache.errors import VariablesError
from stepcache.jaxcompat import PINNED_HOST
from stepcache.sharding import axes_of, is_in_type
from stepcache.variables.packing import (
    Buffer,
    Layout,
    bytes_here,
    interned,
    is_key_type,
    shards_bytes,
)


@dataclass(frozen=True, eq=False)
class HostLayout(Layout):
    """A layout whose buffers lie on the hosts. Equal ones are one object, so that variables of one
    layout share compiled programs. `pack` and `unpack` are for a program that takes them there.
    """

    on_device: tuple[Buffer, ...]  # As other programs take them.
    # Flat and padded where a device buffer is replicated. None stay on the devices: random keys,
    # weakly typed numbers, and buffers without elements, which GPUs hold in no other memory.
    on_host: tuple[Buffer | None, ...]

    @functools.cached_property
    def _parts(self) -> dict[tuple[int, ...], HostLayout]:
        return {}

    @functools.cached_property
    def bytes(self) -> tuple[int, int]:
        """Bytes that a read moves over the hosts' links, and between devices. A write moves those
        over the hosts' links back.
        """
        return self._crossing(shards_bytes)

    @functools.cached_property
    def bytes_here(self) -> tuple[int, int]:
        """The same in this process."""
        return self._crossing(bytes_here)

    def _crossing(self, bytes_of: Callable[[Any], int]) -> tuple[int, int]:
        pairs = zip(self.on_host, self.on_device, strict=True)
        read = [(bytes_of(host), bytes_of(device)) for host, device in pairs if host]
        crossing = sum(host for host, _ in read)
        return crossing, sum(device for _, device in read) - crossing

    @functools.cached_property
    def homes(self) -> list[Any]:
        """The sharding of each buffer where it is kept."""
        rows = zip(self.on_host, self.on_device, strict=True)
        return [(host or device).sharding for host, device in rows]

    @functools.cached_property
    def read(self) -> Any:
        """The compiled program from shards on the hosts to buffers on the devices."""
        places = [buffer.sharding for buffer in self.on_device]
        return jaxcompat.jit(self._read, in_shardings=(self.homes,), out_shardings=places)

    def _read(self, buffers: Sequence[Any]) -> list[Any]:
        return [
            buffer if host is None else _restored(_moved(buffer, host, to_device=True), device)
            for buffer, host, device in zip(buffers, self.on_host, self.on_device, strict=True)
        ]

    @functools.cached_property
    def write(self) -> Any:
        """The compiled program from buffers on the devices to shards on the hosts."""
        return jaxcompat.jit(self._write, out_shardings=self.homes)

    def _write(self, buffers: Sequence[Any]) -> list[Any]:
        return [
            buffer if host is None else _moved(_flat(buffer, host), host, to_device=False)
            for buffer, host in zip(buffers, self.on_host, strict=True)
        ]

    def part(self, numbers: Sequence[int]) -> HostLayout:
        """Some of the buffers, without the leaves that they hold."""
        if len(numbers) == len(self.on_device):
            return self
        on_device = tuple(self.on_device[number] for number in numbers)
        on_host = tuple(self.on_host[number] for number in numbers)
        made = HostLayout(None, (), on_device, on_device, on_host)
        return self._parts.setdefault(tuple(numbers), made)

    def pack(self, leaves: Iterable[Any], xp: Any = jnp) -> list[Any]:
        """Shards on the hosts from leaves, inside a trace."""
        buffers = Layout.pack(self, leaves, xp)
        pairs = zip(buffers, self.on_device, strict=True)
        return self._write([_constrained(buffer, at.sharding) for buffer, at in pairs])

    def unpack(self, buffers: Sequence[Any]) -> list[Any]:
        """Leaves on the devices from shards on the hosts, inside a trace."""
        pairs = zip(self._read(buffers), self.on_device, strict=True)
        return Layout.unpack(self, [_constrained(buffer, at.sharding) for buffer, at in pairs])


def _moved(value: Any, host: Any, *, to_device: bool) -> Any:
    """A buffer in the other memory: without a mesh, of whichever device the program runs on."""
    if isinstance(host.sharding, SingleDeviceSharding):
        space = jax.memory.Space
        return jax.device_put(value, space.Device if to_device else space.Host)
    on_device = host.sharding.with_memory_kind("device")
    return jax.device_put(value, on_device if to_device else host.sharding)


def _constrained(value: Any, sharding: Any) -> Any:
    """A device buffer, placed as in a program that gets it from another; without a mesh, anywhere.

    Else XLA would split the whole step as the hosts do, or fuse it with the padding, and round in
    another way.
    """
    if not isinstance(sharding, NamedSharding):
        return value
    if is_in_type(sharding):
        return jax.lax.optimization_barrier(jax.sharding.reshard(value, sharding))
    value = jax.lax.with_sharding_constraint(value, sharding)
    return jax.lax.with_sharding_constraint(jax.lax.optimization_barrier(value), sharding)


def _flat(value: Any, host: Buffer) -> Any:
    """A device buffer, flat and padded as on the hosts."""
    if value.shape == host.shape:
        return value
    flat = jnp.ravel(value)
    return jnp.pad(flat, (0, host.shape[0] - flat.shape[0]))


def _restored(value: Any, device: Buffer) -> Any:
    """A gathered device buffer, from one that is flat and padded."""
    if value.shape == device.shape:
        return value
    value = _constrained(value, replicated(device.sharding))
    return value[: device.size].reshape(device.shape)


def replicated(sharding: Any) -> Any:
    """As a sharding that splits nothing, but for arrays of any rank."""
    is_named = isinstance(sharding, NamedSharding)
    return NamedSharding(sharding.mesh, PartitionSpec()) if is_named else sharding


def host_layout(layout: Layout, mesh: Mesh | None, where: str) -> HostLayout:
    """How the buffers of a layout lie on the hosts of a mesh."""
    devices = list(mesh.devices.flat) if mesh is not None else [jaxcompat.default_device()]
    for device in {device.device_kind: device for device in devices}.values():
        kinds = [memory.kind for memory in device.addressable_memories()]
        if PINNED_HOST not in kinds:
            what = "a device has no host memory kind"
            expected = f"{PINNED_HOST!r} among the memories of {device.device_kind}"
            got = ", ".join(map(repr, kinds)) or "none"
            hint = "keep the variables Replicated() or Sharded(rules)"
            raise VariablesError(what, where=where, expected=expected, got=got, hint=hint)
    return _host_layout(layout, devices[0])


@interned
def _host_layout(layout: Layout, device: Any) -> HostLayout:
    on_device = tuple(
        at._replace(sharding=at.sharding or SingleDeviceSharding(device)) for at in layout.buffers
    )
    on_host = tuple(_on_host(at) for at in on_device)
    return HostLayout(layout.tree, layout.slots, layout.buffers, on_device, on_host)


def _on_host(buffer: Buffer) -> Buffer | None:
    sharding: Any = buffer.sharding
    if is_key_type(buffer.dtype) or buffer.weak_type or buffer.size == 0:
        return None
    if not isinstance(sharding, NamedSharding) or sharding.mesh.size == 1:
        return buffer._replace(sharding=sharding.with_memory_kind(PINNED_HOST))
    if not sharding.is_fully_replicated:
        return buffer._replace(sharding=_split_further(buffer.shape, sharding))
    mesh = sharding.mesh
    split = NamedSharding(mesh, PartitionSpec(tuple(mesh.axis_names)), memory_kind=PINNED_HOST)
    return Buffer((-(-buffer.size // mesh.size) * mesh.size,), buffer.dtype, split)


def _split_further(shape: tuple[int, ...], sharding: NamedSharding) -> Sharding:
    """A sharding with fewer replicas, split also along unused mesh axes where one divides."""
    sizes = sharding.mesh.shape
    spec = [axes_of(entry) for entry in sharding.spec]
    spec += [()] * (len(shape) - len(spec))
    unused = [axis for axis in sizes if not any(axis in axes for axes in spec)]
    for axis in unused:
        for dimension, axes in enumerate(spec):
            parts = math.prod(sizes[each] for each in (*axes, axis))
            if shape[dimension] % parts == 0:
                spec[dimension] = (*axes, axis)
                break
    return NamedSharding(sharding.mesh, PartitionSpec(*spec), memory_kind=PINNED_HOST)
