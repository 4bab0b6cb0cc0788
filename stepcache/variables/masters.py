"""Master copies: on the devices, or in the hosts' memory. What a step takes of them, and puts back.

Everything here is called under the lock of the `Variables` whose master it is, but for `current`.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import jax

from stepcache.variables import transfer
from stepcache.variables.copies import Copies
from stepcache.variables.packing import Packed
from stepcache.variables.plan import Transfer, choose_route, read_bytes, write_bytes
from stepcache.variables.policy import Read
from stepcache.variables.shares import HostLayout
from stepcache.variables.transfer import Meter


@dataclass(frozen=True, slots=True)
class Reader:
    """Who takes a value, and what for.

    Attributes:
        session: the session; it always reads what it wrote.
        arguments: the arguments of the call that are to have the value.
        carried: whether the call writes it, so that its program may use up what it takes.
    """

    session: Any
    arguments: tuple[str, ...] = ()
    carried: bool = False


class Master(Protocol):
    """Where the value of some variables lives.

    Attributes:
        version: of the value.
    """

    version: int

    def plan(self, variable: str, reader: Reader) -> tuple[Transfer, ...]:
        """What a call is going to move."""
        ...

    def take(self, reader: Reader, meter: Meter) -> Packed:
        """The value as a program takes it."""
        ...

    def put(self, packed: Packed, session: Any, meter: Meter) -> None:
        """Makes what a program returned the value, and raises the version."""
        ...

    def ahead(self, meter: Meter) -> None:
        """Starts to read what the next step is going to take, where the policy says so."""
        ...

    def current(self) -> Packed:
        """The value on the devices, to be looked at."""
        ...

    def lend(self, arrays: Sequence[jax.Array]) -> None:
        """Notes that somebody holds buffers of the value."""
        ...

    def arrays(self) -> Sequence[jax.Array]:
        """The arrays that hold the master."""
        ...


class OnDevices:
    """A master copy in the memory of the devices that use it: a step takes it as it is.

    Args:
        packed: the value.
    """

    def __init__(self, packed: Packed):
        self._packed = packed
        self._lent: list[weakref.ref] = []
        self.version = 0

    def plan(self, variable: str, reader: Reader) -> tuple[Transfer, ...]:
        why = "it lives there"
        return (
            Transfer(variable, self.version, "devices", "devices", "none", why, reader.arguments),
        )

    def take(self, reader: Reader, meter: Meter) -> Packed:
        if reader.carried and self._lent:  # What somebody looks at is not to be written over.
            lent = {id(array) for reference in self._lent if (array := reference()) is not None}
            self._lent.clear()
            buffers = [
                transfer.copy(buffer) if id(buffer) in lent else buffer
                for buffer in self._packed.buffers
            ]
            self._packed = Packed(tuple(buffers), self._packed.layout)
        return self._packed

    def put(self, packed: Packed, session: Any, meter: Meter) -> None:
        self._packed = packed
        self._lent.clear()
        self.version += 1

    def ahead(self, meter: Meter) -> None:
        """Nothing is to be read."""

    def current(self) -> Packed:
        return self._packed

    def lend(self, arrays: Sequence[jax.Array]) -> None:
        self._lent += [weakref.ref(array) for array in arrays]

    def arrays(self) -> Sequence[jax.Array]:
        return self._packed.buffers


class InHostMemory:
    """A master copy in the hosts' memory: a step takes a copy, and what it returns is written back.

    Args:
        packed: the value, on the devices.
        layout: how it lies on the hosts.
        policy: how it is read.
    """

    def __init__(self, packed: Packed, layout: HostLayout, policy: Read):
        self._layout, self._policy = layout, policy
        self._packed = transfer.write(packed, layout, Meter())
        self._copies = Copies(policy)
        self.version = 0

    def plan(self, variable: str, reader: Reader) -> tuple[Transfer, ...]:
        copy, why = self._serving(reader)
        planned = []
        if copy is not None:
            planned.append(
                Transfer(variable, copy.version, "host", "devices", "none", why, reader.arguments)
            )
        else:
            planned.append(self._reading(variable, reader.arguments, ""))
        version = self.version
        if reader.carried:
            version += 1
            scattered = write_bytes(self._layout)
            planned.append(
                Transfer(
                    variable,
                    version,
                    "devices",
                    "host",
                    "scatter",
                    "every share crosses once",
                    reader.arguments,
                    scattered,
                )
            )
        if self._reads_ahead():
            ahead = self._reading(variable, reader.arguments, ", ahead of the next step")
            planned.append(ahead)
        return tuple(planned)

    def _serving(self, reader: Reader) -> tuple[Any, str]:
        copy, why = self._copies.serving(reader.session, self.version)
        if copy is not None and reader.carried and copy.version != self.version:
            return None, "what is written has to be read first, as it is now"
        return copy, why

    def _reading(self, variable: str, arguments: tuple[str, ...], more: str) -> Transfer:
        route, why = self._route()
        moved = read_bytes(self._layout, route)
        why += more
        return Transfer(variable, self.version, "host", "devices", route, why, arguments, moved)

    def _route(self) -> tuple[str, str]:
        size = sum(buffer.size_bytes for buffer in self._layout.on_device)
        devices = max((len(_devices(buffer)) for buffer in self._layout.on_device), default=1)
        return choose_route(self._policy.route, size, devices)

    def take(self, reader: Reader, meter: Meter) -> Packed:
        copy, _ = self._serving(reader)
        if copy is not None:
            self._copies.served(copy, self.version)
            packed = copy.value
        else:
            packed = self._read(meter)
            self._copies.keep(self.version, packed)
        if reader.carried:
            self._copies.drop()  # The program is going to use it up.
        return packed

    def _read(self, meter: Meter) -> Packed:
        return transfer.read(self._packed, self._layout, self._route()[0], meter)

    def put(self, packed: Packed, session: Any, meter: Meter) -> None:
        self._packed = transfer.write(packed, self._layout, meter)
        self.version += 1
        self._copies.wrote(session, self.version)
        self._copies.keep(self.version, packed)

    def _reads_ahead(self) -> bool:
        return self._policy.prefetch > 0 and self._policy.cache is None

    def ahead(self, meter: Meter) -> None:
        if self._reads_ahead():
            self._copies.ahead(self.version, self._read(meter))

    def current(self) -> Packed:
        return transfer.read(self._packed, self._layout, "gather", Meter())

    def lend(self, arrays: Sequence[jax.Array]) -> None:
        """They are copies already."""

    def arrays(self) -> Sequence[jax.Array]:
        return self._packed.buffers


def _devices(buffer: Any) -> Any:
    return buffer.sharding.device_set if buffer.sharding is not None else ()
