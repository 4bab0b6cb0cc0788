"""`Route`: how a value in host memory reaches the devices. Predicts its bytes, and moves it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import jax
from jax.sharding import SingleDeviceSharding

from stepcache.variables.packing import Buffer, Packed, bytes_here, shards_bytes
from stepcache.variables.plan import DEVICE_LINK, HOST_LINK, Links, links
from stepcache.variables.shares import HostLayout
from stepcache.variables.transfer import Meter, copy, free, in_device_shape


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


class Route:
    """How the buffers of a value are read from host memory: by "each", "fanout" or "gather"."""

    def __init__(self, layout: HostLayout, name: str, why: str = ""):
        self.layout, self.name, self.why = layout, name, why
        pairs = zip(layout.on_host, layout.on_device, strict=True)
        self._legs = [_leg(host, device, name) for host, device in pairs]
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
                buffers[number] = self._sent(buffers[number], device, meter)
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

    def _sent(self, value: Any, device: Any, meter: Meter) -> Any:
        """A buffer that this process has, copied by `jax.device_put`."""
        sent, everywhere = in_device_shape(value, device), device.sharding
        if self.name == "fanout":
            first = min(everywhere.device_set, key=lambda each: each.id)
            sent = jax.device_put(sent, SingleDeviceSharding(first))
            meter[HOST_LINK] += bytes_here(sent)
            meter[DEVICE_LINK] += bytes_here(sent) * (len(everywhere.device_set) - 1)
            return jax.device_put(sent, everywhere)
        arrived = jax.device_put(sent, everywhere)
        meter[HOST_LINK] += bytes_here(arrived)
        return arrived


def _leg(host: Buffer | None, device: Buffer, route: str) -> _Leg:
    if host is None:
        return _Leg()
    sharding: Any = device.sharding
    # A split buffer has no other way than the program, and only a program keeps a type weak.
    needs_program = device.weak_type or not sharding.is_fully_replicated
    if needs_program or route == "gather":
        return _Leg(shards_bytes(host), shards_bytes(device) - shards_bytes(host))
    size, devices = device.size_bytes, len(sharding.device_set)
    moved = (size * devices, 0) if route == "each" else (size, size * (devices - 1))
    return _Leg(*moved, in_program=False)
