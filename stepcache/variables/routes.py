"""`Route`: how a value in host memory reaches the devices. Predicts its bytes, and moves it."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec, SingleDeviceSharding

from stepcache.variables.packing import Buffer, Packed, bytes_here, shards_bytes
from stepcache.variables.plan import DEVICE_LINK, HOST_LINK, Links, links
from stepcache.variables.shares import HostLayout, replicated
from stepcache.variables.transfer import Meter, copy, free, in_device_shape
from stepcache.variables.wire import coded_bytes, codes, decode, encode


def choose_route(
    asked: str, devices: int, ahead: bool = False, measured: tuple[str, str] | None = None
) -> tuple[str, str]:
    """The route of a read to so many devices, and why; `measured` is the fastest, if known."""
    if asked != "auto":
        return asked, "asked for"
    if devices == 1:
        return "gather", "there is one device"
    if ahead:
        return "fanout", "its copies run beside a step, where a program would wait for it"
    return measured or ("gather", f"the value crosses the host's link once, not {devices} times")


@dataclass(frozen=True)
class _Leg:
    """How one buffer is read, and the bytes that cross each link."""

    host_bytes: int = 0
    device_bytes: int = 0
    in_program: bool = True  # By the compiled program of the layout; else by `jax.device_put`.
    wire: str | None = None
    parts: int = 1  # The number of parts that cross the host's link.


class Route:
    """How the buffers of a value are read from host memory: by "each", "fanout" or "gather"."""

    def __init__(self, layout: HostLayout, name: str, why: str = "", wire: str | None = None):
        self.layout, self.name, self.why, self.wire = layout, name, why, wire
        pairs = zip(layout.on_host, layout.on_device, strict=True)
        self._legs = [_leg(host, device, name, wire) for host, device in pairs]
        self._in_program = [n for n, leg in enumerate(self._legs) if leg.in_program]

    @property
    def link_bytes(self) -> Links:
        """Bytes that cross each link when the value is read."""
        host_bytes = sum(leg.host_bytes for leg in self._legs)
        return links(host_bytes, sum(leg.device_bytes for leg in self._legs))

    def read(self, packed: Packed, meter: Meter, ahead: bool = False) -> Packed:
        """Copies a value from host memory to the devices, perhaps beside a running step."""
        buffers: list[Any] = list(packed.buffers)
        for number, leg in enumerate(self._legs):
            if not leg.in_program:
                device = self.layout.on_device[number]
                buffers[number] = self._sent(buffers[number], device, leg, meter)
        part = self.layout.part(self._in_program)
        sources = [buffers[number] for number in self._in_program]
        targets = (part.read_ahead if ahead else part.read)(sources) if sources else []
        rows = zip(self._in_program, part.on_host, sources, targets, strict=True)
        for number, host, source, target in rows:
            # What stays on the devices is copied: the step may donate what it takes.
            buffers[number] = copy(source) if target is source else target
            if host is not None:
                meter[HOST_LINK] += bytes_here(source)
                meter[DEVICE_LINK] += bytes_here(target) - bytes_here(source)
        return free(Packed(packed.layout, tuple(buffers)))

    def _sent(self, value: Any, device: Any, leg: _Leg, meter: Meter) -> Any:
        """A buffer that this process has, copied by `jax.device_put`."""
        whole = in_device_shape(value, device)
        sent, everywhere = (whole,), device.sharding
        devices = len(everywhere.device_set)
        if leg.wire is not None:
            sent = encode(leg.wire, whole.reshape(-1), leg.parts, xp=np)
            everywhere = replicated(everywhere)
        arrived = jax.device_put(sent, self._first_stop(everywhere))
        crossed = sum(map(bytes_here, arrived))
        meter[HOST_LINK] += crossed
        if self.name == "fanout":
            arrived = jax.device_put(arrived, everywhere)
        if self.name != "each":
            meter[DEVICE_LINK] += crossed * (devices - 1)
        return arrived[0] if leg.wire is None else decoder(leg.wire, device)(arrived)

    def _first_stop(self, everywhere: Any) -> Any:
        if self.name == "fanout":
            return SingleDeviceSharding(min(everywhere.device_set, key=lambda each: each.id))
        if self.name == "gather" and isinstance(everywhere, NamedSharding):
            mesh = everywhere.mesh
            return NamedSharding(mesh, PartitionSpec(tuple(mesh.axis_names)))
        return everywhere


def _leg(host: Buffer | None, device: Buffer, route: str, wire: str | None) -> _Leg:
    if host is None:
        return _Leg()
    sharding: Any = device.sharding
    devices = len(sharding.device_set)
    parts = devices if route == "gather" else 1
    # A split buffer has no other way than the program, and only a program keeps a type weak.
    needs_program = device.weak_type or not sharding.is_fully_replicated
    is_coded = not needs_program and codes(wire, device.dtype, device.size, parts)
    if needs_program or (route == "gather" and not is_coded):
        return _Leg(shards_bytes(host), shards_bytes(device) - shards_bytes(host))
    crossing = coded_bytes(wire, device.size, parts) if is_coded and wire else device.size_bytes
    moved = (crossing * devices, 0) if route == "each" else (crossing, crossing * (devices - 1))
    return _Leg(*moved, in_program=False, wire=wire if is_coded else None, parts=parts)


@functools.lru_cache(maxsize=1024)
def decoder(wire: str, device: Buffer) -> Any:
    """A program that decodes what is coded on a wire into a buffer of the devices."""

    def decoded(coded: Sequence[Any]) -> Any:
        # The coded values are gathered, which are fewer bytes than the decoded ones.
        coded = [jax.device_put(each, replicated(device.sharding)) for each in coded]
        return decode(wire, coded, device.shape, device.dtype)

    return jax.jit(decoded, out_shardings=device.sharding)
