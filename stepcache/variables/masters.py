"""Masters: where the value of some variables lives, and how a call takes and writes it.

Everything here is called under the lock of the `Variables` that own the master, but for `version`
and `leaves`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.sharding import Sharding

from stepcache.errors import VariablesError
from stepcache.sharding import processes_of
from stepcache.variables import transfer
from stepcache.variables.describing import Parameters, Placing, describe, stand_in
from stepcache.variables.packing import (
    PACKED_BELOW_BYTES,
    Layout,
    Packed,
    Slot,
    is_key_type,
    layout_of,
)
from stepcache.variables.plan import Transfer, links
from stepcache.variables.policy import OnHost, Read
from stepcache.variables.shares import HostLayout, host_layout
from stepcache.variables.transfer import Meter

LOST = "the value is lost"
_NO_COPY = -1, None


class Reader(NamedTuple):
    """A session that takes a value, and what for."""

    session: Any  # It always reads what it wrote; None outside of sessions.
    arguments: tuple[str, ...] = ()  # Of the call, that get the value.
    carried: bool = False  # The call writes the value: its program may donate what it takes.
    in_program: bool = False  # Its program can read a value from host memory, and write it back.


class Master:
    """Where a value lives. Each kind has six methods of its own: `plan_take` and `take` for a call
    that reads the value, `plan_put` and `put` for one that writes it, `assign`, and `leaves`.

    A kind whose value is in another process, which applies updates there, also has `apply`. On
    tasks, which run the steps, nothing is taken or put.
    """

    is_resident = False  # Whether the buffers that a step takes are the master copy.
    applies_updates = False
    hits = fetches = 0  # Reads that a copy has served, and that have fetched the value.
    # What reads several masters in one go, as they are at one moment: `read_together`, and ahead of
    # the next call `read_ahead`.
    source: Any = None
    owner: Any = None  # A weak reference to the variables, of masters that need them.
    target: Any = None  # The tasks that have the value: steps hold their lock, not the variables'.

    def __init__(self, packed: Packed):
        self.packed, self.version = packed, 0

    def plan_take(self, variable: str, reader: Reader) -> tuple[Transfer, ...]:
        """The transfers of `take`."""
        raise NotImplementedError

    def take(self, reader: Reader, meter: Meter) -> Packed:
        """The value as a program takes it."""
        raise NotImplementedError

    def plan_put(self, variable: str, reader: Reader) -> tuple[Transfer, ...]:
        """The transfers of `put`."""
        raise NotImplementedError

    def put(self, packed: Packed, session: Any, meter: Meter) -> None:
        """Makes what a program returned the value, and raises the version."""
        raise NotImplementedError

    def assign(self, leaves: Sequence[Any], session: Any, meter: Meter) -> None:
        """Makes copies of other leaves the value, and raises the version."""
        raise NotImplementedError

    def leaves(self, meter: Meter) -> list[Any]:
        """Copies of the leaves."""
        raise NotImplementedError

    def brought(self, leaves: list[Any], meter: Meter) -> list[Any]:
        """Leaves for `assign`, brought to where the value lives, if that may take long, or fail."""
        return leaves

    def looked_at(self, session: Any) -> None:
        """Records that a session has seen the current version."""

    def own_state(self) -> Master | None:
        """The state of the optimizer, of a master that applies updates and shows it."""
        return None

    def copied(self) -> Master:
        """A master copy on the devices of the same value, of version 0."""
        return OnDevices(transfer.pack(self.leaves(Meter()), self.layout))

    @property
    def layout(self) -> Layout:
        """How the leaves lie in buffers."""
        return self.packed.layout

    def shapes(self, *, in_program: bool) -> Packed:
        """What `take` would give, in `jax.ShapeDtypeStruct`s."""
        return Packed(self.layout, tuple(map(stand_in, self.layout.buffers)))

    def arrays(self) -> Sequence[jax.Array]:
        """The arrays of this process that hold the value."""
        return self.packed.buffers

    def block_until_ready(self) -> None:
        """Waits until the value has been computed."""
        jax.block_until_ready(self.arrays())

    def on_devices(self) -> Sequence[Any]:
        """Arrays, or `Buffer`s, as a program that does not read host memory takes the value."""
        return self.arrays()

    def write(self, packed: Packed) -> None:
        """Makes this the value, and raises the version."""
        _old, self.packed = self.packed, packed  # To free it may let another thread look.
        self.version += 1

    def templates(self) -> Any:
        """The tree, with the types and shardings in which `restore` reads its leaves."""

        def template(slot: Slot) -> Any:
            if slot.weak_type and not slot.shape:  # orbax does not keep the type of a number.
                return slot.dtype.type(0).item()
            place, is_key = self._place_of(slot), is_key_type(slot.dtype)
            if place is None and not is_key:  # In this process's memory, of which it takes none.
                return np.broadcast_to(np.zeros((), slot.dtype), slot.shape)
            return jax.ShapeDtypeStruct(slot.shape, slot.dtype, sharding=place)

        return self.layout.tree.unflatten(map(template, self.layout.slots))

    def _place_of(self, slot: Slot) -> Sharding | None:
        """Where a leaf is kept; None where this process can have all of it."""
        return None

    @property
    def is_lost(self) -> bool:
        """Whether a program has donated a buffer, and has not returned another."""
        return any(array.is_deleted() for array in self.arrays())

    def check_not_lost(self, name: str) -> None:
        """Raises `VariablesError` if there is no value, while no program is working on it."""
        if self.is_lost:
            what = f"{LOST}: a program donated its buffers, and failed or was interrupted"
            hint = "assign(...) or restore(...) a value"
            raise VariablesError(what, where=name, hint=hint)


class OnDevices(Master):
    """A master copy in the memory of the devices: a step takes its buffers as they are."""

    is_resident = True

    def plan_take(self, variable: str, reader: Reader) -> tuple[Transfer, ...]:
        there = ("devices", "devices", "none", "the master copy is there", reader.arguments)
        return (Transfer(variable, self.version, *there),)

    def take(self, reader: Reader, meter: Meter) -> Packed:
        return self.packed

    def plan_put(self, variable: str, reader: Reader) -> tuple[Transfer, ...]:
        return ()

    def put(self, packed: Packed, session: Any, meter: Meter) -> None:
        self.write(packed)

    def assign(self, leaves: Sequence[Any], session: Any, meter: Meter) -> None:
        self.write(transfer.pack(leaves, self.layout))

    def leaves(self, meter: Meter) -> list[Any]:
        pairs = zip(self.layout.slots, transfer.unpack(self.packed), strict=True)
        return [transfer.copy(leaf) if slot.offset is None else leaf for slot, leaf in pairs]

    def copied(self) -> OnDevices:
        return OnDevices(transfer.copied(self.packed))

    def _place_of(self, slot: Slot) -> Sharding | None:
        return slot.sharding


class InHostMemory(Master):
    """A master copy in host memory: a step takes a copy, and what it returns is written back.

    Or its program takes the buffers as they are, and does both itself.
    """

    def __init__(self, packed: Packed, host_layout: HostLayout, policy: Read):
        super().__init__(packed)
        self.host_layout, self._policy = host_layout, policy
        self._copy: tuple[int, Any] = _NO_COPY  # A version, and a copy of it on the devices.

    def plan_take(self, variable: str, reader: Reader) -> tuple[Transfer, ...]:
        devices = max((len(home.device_set) for home in self.host_layout.homes), default=1)
        once = f"the value crosses the host's link once, not {devices} times"
        chosen = "there is one device" if devices == 1 else once
        way, why, moved = "gather", chosen, links(*self.host_layout.bytes)
        if self._copy[0] == self.version:
            way, why, moved = "none", f"a copy of version {self.version} is there", ()
        there = (variable, self.version, "host", "devices", way, why, reader.arguments, moved)
        return (Transfer(*there),)

    def _keep(self, packed: Packed) -> None:
        if self._policy.cache is not None:
            self._copy = self.version, packed

    def on_devices(self) -> Sequence[Any]:
        return self.host_layout.on_device

    def shapes(self, *, in_program: bool) -> Packed:
        if not (in_program and self._crosses_in_program):
            return super().shapes(in_program=in_program)
        pairs = zip(self.layout.buffers, self.host_layout.on_host, strict=True)
        return Packed(self.host_layout, tuple(stand_in(made, host) for made, host in pairs))

    @property
    def _crosses_in_program(self) -> bool:
        """Whether a program may read the value by itself: no copy of it is kept."""
        return self._policy.cache is None

    def take(self, reader: Reader, meter: Meter) -> Packed:
        if reader.in_program and self._crosses_in_program:
            # Committed arrays would commit the call, and all that it returns, to their device.
            self.packed = transfer.free(self.packed)
            self.fetches += 1
            meter.read(self.host_layout)
            return Packed(self.host_layout, self.packed.buffers)
        version, packed = self._copy
        if version == self.version:
            self.hits += 1
        else:
            packed = transfer.read(self.packed, self.host_layout, meter)
            self.fetches += 1
            self._keep(packed)
        if reader.carried:
            self._copy = _NO_COPY  # The program will donate it.
        return packed

    def plan_put(self, variable: str, reader: Reader) -> tuple[Transfer, ...]:
        way = ("devices", "host", "scatter", "every share crosses once", reader.arguments)
        moved = links(self.host_layout.bytes[0])
        return (Transfer(variable, self.version + 1, *way, moved),)

    def put(self, packed: Packed, session: Any, meter: Meter) -> None:
        written = transfer.write(packed, self.host_layout, meter)
        self.write(Packed(self.layout, written))
        if packed.layout is self.layout:
            self._keep(transfer.free(packed))

    def assign(self, leaves: Sequence[Any], session: Any, meter: Meter) -> None:
        self.write(transfer.pack_on_hosts(leaves, self.layout, self.host_layout, meter))

    def leaves(self, meter: Meter) -> list[Any]:
        return transfer.look(self.packed, self.host_layout, meter)

    def follow(self, master: InHostMemory) -> None:
        """Takes the value of a master of another mesh."""
        if self.version != master.version:
            self.assign(master.leaves(Meter()), None, Meter())
            self.version = master.version

    def on_host(self) -> Packed:
        """The value in the memory of this host, in the shapes that it has on the devices."""
        layout, whole = self.host_layout, transfer.in_device_shape
        rows = zip(self.packed.buffers, layout.on_host, layout.on_device, strict=True)
        buffers = (whole(x, at) if host or not at.size else x for x, host, at in rows)
        return Packed(self.layout, tuple(buffers))

    def store(self, packed: Packed) -> None:
        """Makes what was computed on the host the value. It crosses no link."""
        self.write(transfer.store(packed.buffers, self.layout, self.host_layout))

    def copied(self) -> InHostMemory:
        return InHostMemory(transfer.copied(self.packed), self.host_layout, self._policy)

    def _place_of(self, slot: Slot) -> Sharding | None:
        if is_key_type(slot.dtype):  # It stays on the devices.
            return slot.sharding
        array = self.packed.buffers[slot.buffer]
        is_whole = array.is_fully_addressable or array.shape != slot.shape  # Else split by rules.
        return None if is_whole or slot.offset is not None else array.sharding


def hold(
    placing: Placing, tree: Any, policy: Read, meter: Meter, parameters: Parameters | None = None
) -> Master:
    """Copies the arrays of a tree to where a placement says, and counts what moves.

    `parameters` are what the tree is the state of. Raises `VariablesError` or `PlacementError`
    where a leaf, a device or a pod cannot do as asked.
    """
    structure, leaves, described = describe(placing, tree, parameters)
    layout = layout_of(structure, described, PACKED_BELOW_BYTES if placing.pack else 0)
    if not isinstance(placing.placement, OnHost):
        return OnDevices(transfer.pack(leaves, layout))
    mesh, update = placing.placer.mesh if placing.placer else None, placing.placement.update
    if update == "host" and mesh is not None and len(processes_of(mesh.devices.flat)) > 1:
        what = "OnHost(update=…) needs the whole value in one process, and each process of a pod "
        what += "holds a share"
        raise VariablesError(what, where=placing.name, expected="'device'", got=repr(update))
    on_host = host_layout(layout, mesh, placing.name)
    return InHostMemory(transfer.pack_on_hosts(leaves, layout, on_host, meter), on_host, policy)
