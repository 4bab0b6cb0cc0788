"""`HostLayout`: how buffers lie in the memory of the hosts while no step uses them.

One representation serves one device, many, and pods: each buffer is split evenly over the devices,
and each device's share lies in the memory of its own host. To read is a compiled program that
copies every share to its device and gathers them there; to write is the way back.
"""

from __future__ import annotations

import functools
import math
import threading
import weakref
from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding, PartitionSpec, Sharding, SingleDeviceSharding

from stepcache.errors import VariablesError
from stepcache.sharding import axes_of
from stepcache.variables.packing import Buffer, Layout


@dataclass(frozen=True, eq=False)
class HostLayout:
    """Buffers on the devices, and the same on the hosts. Equal ones are one object, made by
    `host_layout`, so that variables that lie alike share compiled programs.

    Attributes:
        on_device: as a program takes them.
        on_host: as they lie; flat and padded where a device buffer is replicated. None for one that
            stays on the devices: random keys.
    """

    on_device: tuple[Buffer, ...]
    on_host: tuple[Buffer | None, ...]

    @functools.cached_property
    def read(self) -> Any:
        """A compiled program: from shares on the hosts to buffers on the devices."""

        def read(buffers: Sequence[Any]) -> list[Any]:
            return [
                buffer if host is None else _unfolded(_move(buffer, host, "device"), device)
                for buffer, host, device in zip(buffers, self.on_host, self.on_device, strict=True)
            ]

        return jax.jit(read, out_shardings=[buffer.sharding for buffer in self.on_device])

    def read_ahead(self, buffers: Sequence[Any]) -> list[Any]:
        """The same, and it begins at once, beside a step that is running: devices run programs one
        after the other, but the copy is no program. Each buffer costs more than in one program.
        """
        read = list(jax.device_put(list(buffers), self._arrivals))
        if self._split:
            gathered = self._gather([read[number] for number in self._split])
            for number, buffer in zip(self._split, gathered, strict=True):
                read[number] = buffer
        return read

    @functools.cached_property
    def _split(self) -> tuple[int, ...]:
        """The buffers of which a device has only its share when they have been copied."""
        return tuple(
            number
            for number, (host, device) in enumerate(zip(self.on_host, self.on_device, strict=True))
            if host is not None and _shares(host) != device._replace(weak_type=False)
        )

    @functools.cached_property
    def _arrivals(self) -> list[Any]:
        """Where each buffer is copied to."""
        return [
            _shares(self.on_host[number]).sharding if number in self._split else device.sharding
            for number, device in enumerate(self.on_device)
        ]

    @functools.cached_property
    def _gather(self) -> Any:
        """A compiled program: from shares on the devices to buffers."""
        wanted = [self.on_device[number] for number in self._split]

        def gather(buffers: Sequence[Any]) -> list[Any]:
            return [_unfolded(each, device) for each, device in zip(buffers, wanted, strict=True)]

        return jax.jit(gather, out_shardings=[device.sharding for device in wanted])

    def part(self, numbers: Sequence[int]) -> HostLayout:
        """Some of the buffers."""
        return _part(self, tuple(numbers))

    @functools.cached_property
    def write(self) -> Any:
        """A compiled program: from buffers on the devices to shares on the hosts."""
        places = [
            (device if host is None else host).sharding
            for device, host in zip(self.on_device, self.on_host, strict=True)
        ]

        def write(buffers: Sequence[Any]) -> list[Any]:
            return [
                buffer if host is None else _move(_folded(buffer, host), host, None)
                for buffer, host in zip(buffers, self.on_host, strict=True)
            ]

        return jax.jit(write, out_shardings=places)


@functools.lru_cache(maxsize=4096)
def _part(layout: HostLayout, numbers: tuple[int, ...]) -> HostLayout:
    on_device = tuple(layout.on_device[number] for number in numbers)
    return HostLayout(on_device, tuple(layout.on_host[number] for number in numbers))


def _shares(host: Any) -> Buffer:
    """A buffer of a host, in the memory of its devices."""
    sharding = host.sharding.with_memory_kind("device")
    return host._replace(sharding=sharding, weak_type=False)


def _move(value: Any, host: Buffer, memory_kind: str | None) -> Any:
    sharding: Any = host.sharding
    if memory_kind is not None:
        sharding = sharding.with_memory_kind(memory_kind)
    return jax.device_put(value, sharding)


def _folded(value: Any, host: Buffer) -> Any:
    if value.shape == host.shape:
        return value
    flat = jnp.ravel(value)
    return jnp.pad(flat, (0, host.shape[0] - flat.shape[0]))


def _unfolded(value: Any, device: Buffer) -> Any:
    if value.shape == device.shape:
        return value
    gathered: Any = device.sharding  # Its rank may be another, but it splits nothing.
    if isinstance(gathered, NamedSharding):
        gathered = NamedSharding(gathered.mesh, PartitionSpec())
    value = jax.device_put(value, gathered)
    return value[: math.prod(device.shape)].reshape(device.shape)


def host_layout(layout: Layout, mesh: Mesh | None, memory_kind: str, where: str) -> HostLayout:
    """How the buffers of a layout lie on the hosts.

    Args:
        layout: of buffers on the devices.
        mesh: the session's mesh, or None.
        memory_kind: of the hosts' memory.
        where: the variables, for errors.

    Raises:
        VariablesError: a device has no such memory.
    """
    devices = list(mesh.devices.flat) if mesh is not None else [jax.devices()[0]]
    for device in {device.device_kind: device for device in devices}.values():
        _check_memory(device, memory_kind, where)
    key = (layout, devices[0], memory_kind)
    with _lock:
        found = _host_layouts.get(key)
        if found is None:
            found = _host_layouts[key] = _lay_out(layout, devices[0], memory_kind)
        return found


_host_layouts: weakref.WeakValueDictionary[Hashable, HostLayout] = weakref.WeakValueDictionary()
_lock = threading.Lock()


def _check_memory(device: Any, memory_kind: str, where: str) -> None:
    kinds = [memory.kind for memory in device.addressable_memories()]
    own = device.default_memory().kind if kinds else None
    if memory_kind in kinds and memory_kind != own:
        return
    raise VariablesError(
        "a device's own memory is not its host's"
        if memory_kind in kinds
        else "a device has no such memory",
        where=where,
        expected=f"one that {device.device_kind} has beside its own: "
        + (", ".join(repr(kind) for kind in kinds if kind != own) or "there is none"),
        got=repr(memory_kind),
        hint="OnHost(memory_kind=...) names the host's memory; without one, keep the variables "
        "Replicated() or Sharded(rules)",
    )


def _lay_out(layout: Layout, device: Any, memory_kind: str) -> HostLayout:
    on_device = tuple(
        buffer._replace(sharding=buffer.sharding or SingleDeviceSharding(device))
        for buffer in layout.buffers
    )
    on_host = tuple(
        None if jnp.issubdtype(buffer.dtype, jax.dtypes.extended) else _on_host(buffer, memory_kind)
        for buffer in on_device
    )
    return HostLayout(on_device, on_host)


def _on_host(buffer: Buffer, memory_kind: str) -> Buffer:
    sharding: Sharding = buffer.sharding  # type: ignore[assignment]
    if not isinstance(sharding, NamedSharding) or sharding.mesh.size == 1:
        return buffer._replace(sharding=sharding.with_memory_kind(memory_kind))
    if not sharding.is_fully_replicated:
        return buffer._replace(sharding=_spread(buffer.shape, sharding, memory_kind))
    mesh = sharding.mesh
    size, parts = math.prod(buffer.shape), mesh.size
    split = NamedSharding(mesh, PartitionSpec(tuple(mesh.axis_names)), memory_kind=memory_kind)
    return Buffer((-(-size // parts) * parts,), buffer.dtype, split)


def _spread(shape: tuple[int, ...], sharding: NamedSharding, memory_kind: str) -> Sharding:
    """A split that repeats less: over axes of the mesh that it left out, where one divides."""
    sizes = sharding.mesh.shape
    spec = [axes_of(entry) for entry in sharding.spec]
    spec += [()] * (len(shape) - len(spec))
    left_out = [axis for axis in sizes if not any(axis in axes for axes in spec)]
    for axis in left_out:
        for dimension, axes in enumerate(spec):
            parts = math.prod(sizes[each] for each in (*axes, axis))
            if shape[dimension] % parts == 0:
                spec[dimension] = (*axes, axis)
                break
    return NamedSharding(sharding.mesh, PartitionSpec(*spec), memory_kind=memory_kind)
