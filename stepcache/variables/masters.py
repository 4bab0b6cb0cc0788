"""Master copies: on the devices, or in the hosts' memory. What a step takes of them, and puts back.

Everything here is called under the lock of the `Variables` whose master it is, but for `current`.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import jax

from stepcache.errors import VariablesError
from stepcache.sharding import Placer, processes_of
from stepcache.variables import transfer
from stepcache.variables.checkpoint_tree import blank, is_key
from stepcache.variables.copies import Copies
from stepcache.variables.describing import describe
from stepcache.variables.packing import PACKED_BELOW_BYTES, Layout, Packed, Slot, layout_of
from stepcache.variables.plan import (
    Extent,
    Transfer,
    choose_route,
    extent_of,
    read_bytes,
    write_bytes,
)
from stepcache.variables.policy import OnHost, Placement, Read
from stepcache.variables.shares import HostLayout, host_layout
from stepcache.variables.transfer import Meter
from stepcache.variables.wire import error_bound

LOST = "the value is lost"


class Reader(NamedTuple):
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
        """What a call of a step is going to move."""
        ...

    def plan_take(self, variable: str, reader: Reader) -> tuple[Transfer, ...]:
        """What `take` is going to move."""
        ...

    def plan_put(self, variable: str, reader: Reader) -> tuple[Transfer, ...]:
        """What `put` or `assign` is going to move."""
        ...

    def take(self, reader: Reader, meter: Meter) -> Packed:
        """The value as a program takes it."""
        ...

    def put(self, packed: Packed, session: Any, meter: Meter) -> None:
        """Makes what a program returned the value, and raises the version."""
        ...

    def ahead(self, reader: Reader, meter: Meter) -> None:
        """Starts to read what the next step is going to take, where the policy says so."""
        ...

    def assign(self, leaves: Sequence[Any], session: Any, meter: Meter) -> None:
        """Makes copies of other leaves the value, and raises the version."""
        ...

    def on_devices(self, meter: Meter) -> Packed:
        """The value in the memory of the devices."""
        ...

    def leaves(self, meter: Meter) -> list[Any]:
        """The leaves, in arrays that nobody else is going to donate."""
        ...

    def looked_at(self, session: Any) -> None:
        """Notes that a session has seen the value as it is now."""
        ...

    def arrays(self) -> Sequence[jax.Array]:
        """The arrays that hold the master."""
        ...

    def copied(self) -> Master:
        """Another master copy of the same value, of version 0."""
        ...


class OnDevices:
    """A master copy in the memory of the devices that use it: a step takes it as it is.

    Attributes:
        packed: the value.
    """

    def __init__(self, packed: Packed):
        self.packed = packed
        self.version = 0

    def plan(self, variable: str, reader: Reader) -> tuple[Transfer, ...]:
        there = ("devices", "devices", "none", "it lives there", reader.arguments)
        return (Transfer(variable, self.version, *there, extent=self._extent),)

    plan_take = plan

    def plan_put(self, variable: str, reader: Reader) -> tuple[Transfer, ...]:
        return ()

    @functools.cached_property
    def _extent(self) -> Extent:
        return extent_of(self.packed.buffers)

    def take(self, reader: Reader, meter: Meter) -> Packed:
        return self.packed

    def put(self, packed: Packed, session: Any, meter: Meter) -> None:
        self.write(packed)

    def write(self, packed: Packed) -> None:
        """Makes this the value."""
        _old, self.packed = self.packed, packed  # To free it may let another thread look.
        self.version += 1

    def ahead(self, reader: Reader, meter: Meter) -> None:
        """Nothing is to be read."""

    def assign(self, leaves: Sequence[Any], session: Any, meter: Meter) -> None:
        self.write(transfer.pack(leaves, self.packed.layout))

    def on_devices(self, meter: Meter) -> Packed:
        return self.packed

    def leaves(self, meter: Meter) -> list[Any]:
        leaves, shared = transfer.unpack(self.packed)
        own = {id(array) for array in shared}
        return [transfer.copy(leaf) if id(leaf) in own else leaf for leaf in leaves]

    def looked_at(self, session: Any) -> None:
        """There is no older value that it could be given."""

    def arrays(self) -> Sequence[jax.Array]:
        return self.packed.buffers

    def copied(self) -> OnDevices:
        return OnDevices(transfer.copied(self.packed))


class InHostMemory:
    """A master copy in the hosts' memory: a step takes a copy, and what it returns is written back.

    Args:
        packed: the value, in the hosts' memory.
        layout: how its buffers lie there.
        policy: how it is read.
    """

    def __init__(self, packed: Packed, layout: HostLayout, policy: Read):
        self._packed, self._layout, self._policy = packed, layout, policy
        self._copies = Copies(policy)
        self.version = 0

    def plan(self, variable: str, reader: Reader) -> tuple[Transfer, ...]:
        planned = self.plan_take(variable, reader)
        if reader.carried:
            planned += self.plan_put(variable, reader)
        if self._reads_ahead():
            version, ahead = self.version + reader.carried, ", ahead of the next step"
            planned += (self._reading(variable, version, reader, ahead),)
        return planned

    def plan_take(self, variable: str, reader: Reader) -> tuple[Transfer, ...]:
        copy, why = self._serving(reader)
        if copy is None:
            return (self._reading(variable, self.version, reader),)
        there = ("host", "devices", "none", why, reader.arguments)
        return (Transfer(variable, copy.version, *there, extent=self._extent),)

    def plan_put(self, variable: str, reader: Reader) -> tuple[Transfer, ...]:
        way = ("devices", "host", "scatter", "every share crosses once", reader.arguments)
        moved = write_bytes(self._layout)
        return (Transfer(variable, self.version + 1, *way, moved, extent=self._extent),)

    def _serving(self, reader: Reader) -> tuple[Any, str]:
        copy, why = self._copies.serving(reader.session, self.version)
        if copy is not None and reader.carried:
            if copy.version != self.version:
                return None, "what is written has to be read first, as it is now"
            if self._policy.wire is not None and not copy.exact:
                return None, "what is written has to be read exactly"
        return copy, why

    def _reading(self, variable: str, version: int, reader: Reader, more: str = "") -> Transfer:
        route, why = self._route
        wire = self._wire(reader)
        moved, bound = read_bytes(self._layout, route, wire), error_bound(wire)
        rest = (route, why + more, reader.arguments, moved, wire or "", bound, self._extent)
        return Transfer(variable, version, "host", "devices", *rest)

    @functools.cached_property
    def _extent(self) -> Extent:
        pairs = zip(self._layout.on_host, self._layout.on_device, strict=True)
        return extent_of(device for host, device in pairs if host is not None)

    @functools.cached_property
    def _devices(self) -> frozenset[Any]:
        return frozenset().union(*map(_devices_of, self._layout.on_device))

    @functools.cached_property
    def _route(self) -> tuple[str, str]:
        ours = all(device.process_index == jax.process_index() for device in self._devices)
        return choose_route(self._policy.route, len(self._devices), self._reads_ahead() and ours)

    def take(self, reader: Reader, meter: Meter) -> Packed:
        copy, _ = self._serving(reader)
        if copy is not None:
            self._copies.served(copy, self.version)
            packed = copy.value
        else:
            packed = self._read(reader, meter)
            self._copies.keep(self.version, packed)
        if reader.carried:
            self._copies.drop()  # The program is going to use it up.
        return packed

    def _wire(self, reader: Reader) -> str | None:
        """What is written back has to be read as it is: the master would drift."""
        return None if reader.carried else self._policy.wire

    def _read(self, reader: Reader, meter: Meter, *, ahead: bool = False) -> Packed:
        route, wire = self._route[0], self._wire(reader)
        return transfer.read(self._packed, self._layout, route, wire, meter, ahead)

    def put(self, packed: Packed, session: Any, meter: Meter) -> None:
        self._write(transfer.write(packed, self._layout, meter), session)
        self._copies.keep(self.version, packed, exact=True)

    def _reads_ahead(self) -> bool:
        return self._policy.prefetch and self._policy.cache is None

    def ahead(self, reader: Reader, meter: Meter) -> None:
        if self._reads_ahead():
            exact = self._wire(reader) is None
            self._copies.ahead(self.version, self._read(reader, meter, ahead=True), exact=exact)

    def assign(self, leaves: Sequence[Any], session: Any, meter: Meter) -> None:
        layout = self._packed.layout
        self._write(transfer.pack_on_hosts(leaves, layout, self._layout, meter), session)

    def _write(self, packed: Packed, session: Any) -> None:
        _old, self._packed = self._packed, packed
        self.version += 1
        self._copies.wrote(session, self.version)

    def on_devices(self, meter: Meter) -> Packed:
        return transfer.read(self._packed, self._layout, "gather", None, meter)

    def leaves(self, meter: Meter) -> list[Any]:
        return transfer.look(self._packed, self._layout, meter)

    def looked_at(self, session: Any) -> None:
        self._copies.saw(session, self.version)

    def on_host(self) -> list[Any]:
        """The value in host memory, in the shapes that it has on the devices."""
        return transfer.on_host(self._packed, self._layout)

    def store(self, buffers: Sequence[Any], session: Any) -> None:
        """Makes what was computed on the host the value. It crosses no link."""
        self._write(transfer.store(buffers, self._packed.layout, self._layout), session)

    def arrays(self) -> Sequence[jax.Array]:
        return self._packed.buffers

    def copied(self) -> InHostMemory:
        return InHostMemory(transfer.copied(self._packed), self._layout, self._policy)


def _devices_of(buffer: Any) -> Any:
    return buffer.sharding.device_set if buffer.sharding is not None else ()


@dataclass(frozen=True, slots=True)
class Held:
    """A value that is held: how it lies, and where.

    Attributes:
        layout: of its buffers on the devices.
        master: the master copy.
    """

    layout: Layout
    master: Master

    def templates(self) -> Any:
        """The tree, of what its leaves are and where `put` can take others from."""
        arrays = self.master.arrays()
        leaves = [self._template(slot, arrays[slot.buffer]) for slot in self.layout.slots]
        return self.layout.tree.unflatten(leaves)

    def _template(self, slot: Slot, array: jax.Array) -> Any:
        sharding = slot.sharding
        if isinstance(self.master, InHostMemory) and not is_key(array):
            if slot.offset is not None or array.is_fully_addressable or array.shape != slot.shape:
                return blank(slot.shape, slot.dtype)
            sharding = array.sharding
        return jax.ShapeDtypeStruct(slot.shape, slot.dtype, sharding=sharding)

    @property
    def is_lost(self) -> bool:
        """Whether a buffer has gone: a program has taken it for its own, and has not returned."""
        return any(array.is_deleted() for array in self.master.arrays())

    def check_not_lost(self, name: str) -> None:
        """Whether there is a value. Under the lock, where no program is at work on it.

        Raises:
            VariablesError: there is none.
        """
        if self.is_lost:
            raise VariablesError(
                f"{LOST}: a program had taken its buffers, and failed",
                where=name,
                hint="assign(...) or restore(...) a value that was kept",
            )

    def put(self, leaves: Sequence[Any], session: Any, meter: Meter) -> None:
        """Makes other leaves the value; of random keys, their data will do."""
        buffers = self.master.arrays()
        leaves = [
            jax.random.wrap_key_data(leaf, impl=jax.random.key_impl(buffers[slot.buffer]))
            if jax.numpy.issubdtype(slot.dtype, jax.dtypes.extended) and leaf.dtype != slot.dtype
            else leaf
            for slot, leaf in zip(self.layout.slots, leaves, strict=True)
        ]
        self.master.assign(leaves, session, meter)


def hold(
    name: str,
    tree: Any,
    placement: Placement,
    placer: Placer | None,
    policy: Read,
    meter: Meter,
    prefix: str = "",
    pack: bool = False,
) -> Held:
    """Takes copies of a tree's arrays, and puts them where they are to live.

    Raises:
        VariablesError: a leaf is no array, a device lacks the memory, or a policy needs the whole
            value in the memory of one process of a pod.
        PlacementError: a leaf cannot be placed as asked.
    """
    structure, leaves, described = describe(name, tree, placement, placer, prefix)
    layout = layout_of(structure, described, PACKED_BELOW_BYTES if pack else 0)
    if not isinstance(placement, OnHost):
        return Held(layout, OnDevices(transfer.pack(leaves, layout)))
    mesh = placer.mesh if placer else None
    if mesh is not None and len(processes_of(mesh.devices.flat)) > 1:
        _check_for_pod(name, placement, policy)
    on_host = host_layout(layout, mesh, placement.memory_kind, name)
    packed = transfer.pack_on_hosts(leaves, layout, on_host, meter)
    return Held(layout, InHostMemory(packed, on_host, policy))


def _check_for_pod(name: str, placement: OnHost, policy: Read) -> None:
    """Each host of a pod has a share of the value, and none has the whole."""
    for what, given, possible in (
        ("Read(route=…)", policy.route, ("auto", "gather")),
        ("Read(wire=…)", policy.wire, (None,)),
        ("OnHost(update=…)", placement.update, ("device",)),
    ):
        if given not in possible:
            raise VariablesError(
                f"{what} needs the whole value in one process, and each process of a pod holds a "
                "share",
                where=name,
                expected=" or ".join(map(repr, possible)),
                got=repr(given),
            )
