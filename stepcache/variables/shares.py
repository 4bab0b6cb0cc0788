"""`HostLayout`: how buffers lie in the memory of the hosts while no step uses them.

One representation serves one device, many, and pods: each buffer is split evenly over the devices,
and each device's share lies in the memory of its own host. To read is a compiled program that
copies every share to its device and gathers them there; to write is the way back.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding, PartitionSpec, Sharding, SingleDeviceSharding

from stepcache.errors import VariablesError
from stepcache.variables.packing import Buffer, Layout


@dataclass(frozen=True, eq=False)
class HostLayout:
    """Buffers on the devices, and the same on the hosts.

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
        kinds = [memory.kind for memory in device.addressable_memories()]
        if memory_kind not in kinds:
            raise VariablesError(
                "a device has no such memory",
                where=where,
                expected=f"one of {', '.join(map(repr, kinds))}, which {device.device_kind} has",
                got=repr(memory_kind),
                hint="OnHost(memory_kind=...) names the host's memory; without one, keep the "
                "variables Replicated() or Sharded(rules)",
            )
    on_device, on_host = [], []
    for buffer in layout.buffers:
        sharding = buffer.sharding or SingleDeviceSharding(devices[0])
        on_device.append(buffer._replace(sharding=sharding))
        if jnp.issubdtype(buffer.dtype, jax.dtypes.extended):
            on_host.append(None)
        else:
            on_host.append(_on_host(on_device[-1], mesh, memory_kind))
    return HostLayout(tuple(on_device), tuple(on_host))


def _on_host(buffer: Buffer, mesh: Mesh | None, memory_kind: str) -> Buffer:
    sharding: Sharding = buffer.sharding  # type: ignore[assignment]
    if mesh is None or not sharding.is_fully_replicated or mesh.size == 1:
        return buffer._replace(sharding=sharding.with_memory_kind(memory_kind))
    size, parts = math.prod(buffer.shape), mesh.size
    spec = PartitionSpec(tuple(mesh.axis_names))
    split = NamedSharding(mesh, spec, memory_kind=memory_kind)
    return Buffer((-(-size // parts) * parts,), buffer.dtype, split)
