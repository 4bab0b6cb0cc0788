"""`PolicyCosts`: predicts what some variables cost a step under each placement and policy."""

from __future__ import annotations

import contextlib
import functools
import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager
from dataclasses import replace
from types import MappingProxyType
from typing import Any, Literal, NamedTuple

import jax

from stepcache.serving.connecting import connect
from stepcache.serving.measuring import own_server, served_times
from stepcache.serving.served import Served
from stepcache.variables.link_measuring import link_times
from stepcache.variables.link_times import ROUTES, LinkTimes
from stepcache.variables.masters import InHostMemory
from stepcache.variables.plan import HOST_LINK, SERVER_LINK
from stepcache.variables.policy import OnHost, Placement, Read, Write, on_host
from stepcache.variables.routes import Route
from stepcache.variables.shares import HostLayout, host_layout
from stepcache.variables.transfer import Meter
from stepcache.variables.variables import Variables

Costs = tuple[float, dict[str, float]]
"""Seconds a step, and bytes a step over each link."""
Policies = tuple[Placement, Read, Write]

_KEPT: tuple[Literal["device"] | None, ...] = (None, "device")
_LATE, _EVERY = (1, 4, 16), (4, 16)
_FEWEST_READS = 4  # After which past reads and writes say how often there are some.


class Reads(NamedTuple):
    """How often a value is read and written."""

    carried: bool  # Whether the step writes it.
    readers: float = 1  # How many calls read it in the time of a step.
    writes_every: float | None = None  # Steps between two writes; None for those seen until now.


class Tried(NamedTuple):
    """How long calls of a step took under one policy, beyond one that reads nothing."""

    seconds: float  # Of one that finds the value as it was; of all if a copy may be late.
    after_write: float  # Of the first one after a write.
    push: float = 0.0  # Of the push that follows each.


class Subject(NamedTuple):
    """Variables that are tried, under some policies."""

    variables: Variables
    # Writes them as another session or process does; None where nobody writes.
    write: Callable[[], None] | None = None
    # Pushes an update, as is done after each call; None where there is none.
    push: Callable[[], None] | None = None


def moved(variables: Variables, placement: Placement, read: Read) -> Variables:
    """Returns a copy of variables in this process, under another placement and policy."""
    about: dict[str, Any] = {"name": variables._prefix or None, "pack": variables._pack}
    return Variables(variables.value, placement=placement, read=read, **about)


class PolicyCosts(ABC):
    """Predicted costs of some variables."""

    is_served = False  # Whether another process has the master copy.
    measured = ""  # What the predictions rest on, in words.
    # What calls took, by `alike`; empty where they are predicted by the times of links.
    tried: Mapping[Policies, Tried] = MappingProxyType({})

    def __init__(self, variables: Variables, reads: Reads):
        self.variables, self._reads, self.carried = variables, reads, reads.carried
        # Steps between two writes.
        self.between = 1.0 if reads.carried else reads.writes_every or _seen_between(variables)

    @property
    def policies_now(self) -> Policies:
        """Placement, read and write policy as they are."""
        return self.variables.placement, self.variables.read, self.variables.write

    def now(self, computing: float) -> float:
        """Returns the seconds a step under the policies of now."""
        return self.of(*self.policies_now, computing)[0]

    def fetches(self, read: Read) -> float:
        """Returns how many times a step the value is fetched, on average."""
        if read.cache is None:
            return self._reads.readers
        if self.carried:
            return 0.0  # What the step returns is kept.
        return min(self._reads.readers, 1 / self._between_fetches(read.max_staleness))

    def alike(self, placement: Placement, read: Read, write: Write) -> Policies:
        """Returns the policies that have to be tried in the place of some, which cost as much."""
        return placement, read, write

    @abstractmethod
    def trial(self) -> AbstractContextManager[Callable[[Placement, Read, Write], Subject]]:
        """Context manager of a trial, with what makes its subjects."""

    def _seconds_as(self, tried: Tried, read: Read) -> float:
        """Returns the seconds a step of calls like those that were tried."""
        if self.carried:
            return tried.seconds
        reads = self._reads.readers
        fetches = reads / self.between if read.cache is None else self.fetches(read)
        return reads * tried.seconds + fetches * (tried.after_write - tried.seconds) + tried.push

    @abstractmethod
    def _between_fetches(self, late: int) -> float:
        """Returns how many steps a copy serves that may be so many steps late."""

    @abstractmethod
    def policies(self) -> Iterator[Policies]:
        """Yields those of now, and others that could take their place."""

    @abstractmethod
    def of(self, placement: Placement, read: Read, write: Write, computing: float) -> Costs:
        """Returns the costs of policies, beside so many seconds of a step."""

    @abstractmethod
    def held_bytes(self, placement: Placement, read: Read) -> int:
        """Returns the bytes of a device that the value takes between steps."""


def costs_of(variables: Variables, reads: Reads) -> PolicyCosts:
    """Returns the costs of variables. Measures links that are not known."""
    kind = ServedCosts if isinstance(variables._master, Served) else PlacedCosts
    return kind(variables, reads)


def _seen_between(variables: Variables) -> float:
    held = variables._held()
    is_known = held.reads >= _FEWEST_READS and held.version > 0
    return max(1.0, held.reads / held.version) if is_known else 1.0


class PlacedCosts(PolicyCosts):
    """Of variables whose master copy is on the devices, or in host memory of this process."""

    def __init__(self, variables: Variables, reads: Reads):
        super().__init__(variables, reads)
        master, mesh = variables._master, variables._mesh
        if isinstance(master, InHostMemory):
            self._layout: HostLayout = master.host_layout
        else:
            self._layout = host_layout(master.layout, mesh, variables.name)
        self._times: LinkTimes = link_times(variables._placer)
        day = self._times.measured.partition("T")[0]
        self.measured = f"the links of {self._times.machine} were measured on {day}"
        self._whole = self._split = 0
        for host, device in zip(self._layout.on_host, self._layout.on_device, strict=True):
            size = device.size * device.dtype.itemsize if host is not None else 0
            whole: Any = device.sharding
            if whole is None or whole.is_fully_replicated:
                self._whole += size
            else:
                self._split += size
        self._devices = mesh.devices.size if mesh is not None else 1

    def policies(self) -> Iterator[Policies]:
        placement, read, write = self.policies_now
        there = on_host(placement)
        found = [(placement, read), (there.on_device, Read())]
        reads = [Read(cache=cache, route=each) for cache in _KEPT for each in self._routes(cache)]
        reads.append(Read(prefetch=True))
        if not self.carried:
            reads += [Read(cache="device", max_staleness=late) for late in _LATE]
        found += [(there, each) for each in reads]
        yield from dict.fromkeys((*each, write) for each in found)

    def _routes(self, cache: Literal["device"] | None) -> Iterator[Any]:
        """Yields "auto", and the routes that it does not choose."""
        yield "auto"
        if cache and self.carried:  # The value is never fetched.
            return
        if self._devices > 1 and "each" in self._times.operations:
            chosen = self._master(Read(cache=cache))._route.name
            yield from (each for each in ROUTES if each != chosen)

    def _master(self, read: Read) -> InHostMemory:
        """What the master copy would be under another policy."""
        return InHostMemory(self.variables._master.packed, self._layout, read)

    def _between_fetches(self, late: int) -> float:
        # Each step compares versions, so that a copy is late from the first write on.
        return self.between * (late // self.between + 1)

    def held_bytes(self, placement: Placement, read: Read) -> int:
        split = -(-self._split // self._devices)
        kept = not isinstance(placement, OnHost) or read.cache or read.prefetch
        return self._whole + split if kept else 0

    def of(self, placement: Placement, read: Read, write: Write, computing: float) -> Costs:
        carried, times, buffers = self.carried, self._times, len(self._layout.on_device)
        if not isinstance(placement, OnHost):
            return 0.0, {}
        master = self._master(read)
        route: Route = master._route
        operation = route.name
        if master._crosses_in_program:
            operation = "carry" if carried else "program"
        elif read.prefetch:
            operation = "ahead"
        fetch = times.of(operation, self._whole, buffers) if self._whole else 0.0
        if self._split:
            fetch += times.of("split", self._split, 1 if self._whole else buffers)
        fetches = self.fetches(read)
        seconds = fetches * fetch
        if read.prefetch:  # Where the value is written meanwhile, it is read again.
            again = 0.0 if carried else 1 / self.between
            seconds = fetches * max(0.0, fetch - times.overlap * computing) + again * fetch
            fetches += again
        moved = {link: fetches * size for link, size in route.link_bytes}
        if carried and operation not in ("carry", "program"):
            seconds += times.of("write", self._whole + self._split, buffers)
        if (tried := self.tried.get(self.alike(placement, read, write))) is not None:
            seconds = self._seconds_as(tried, read)
        if carried:
            moved[HOST_LINK] = moved.get(HOST_LINK, 0) + self._layout.write_bytes
        return seconds, moved

    def alike(self, placement: Placement, read: Read, write: Write) -> Policies:
        # How late a copy may be changes when it is fetched, and not how.
        return placement, replace(read, max_staleness=0), write

    @contextlib.contextmanager
    def trial(self) -> Iterator[Callable[[Placement, Read, Write], Subject]]:
        leaves = jax.tree_util.tree_leaves(self.variables.value)

        def make(placement: Placement, read: Read, _: Write) -> Subject:
            made = moved(self.variables, placement, read)
            if self.carried or not isinstance(placement, OnHost):
                return Subject(made)
            return Subject(made, lambda: made._master.assign(leaves, None, Meter()))

        yield make


class ServedCosts(PolicyCosts):
    """Of variables that another process holds."""

    is_served = True

    def __init__(self, variables: Variables, reads: Reads):
        super().__init__(variables, reads)
        self._master: Any = variables._master

    def policies(self) -> Iterator[Policies]:
        placement, read, write = self.policies_now
        reads = [Read(), Read(cache="device")]
        if not self.carried:
            reads.append(Read(cache="device", prefetch=True))
            reads += [Read(cache="device", max_staleness=late) for late in _LATE]
        found = [(placement, each, write) for each in (read, *reads)]
        if self._pushes():
            found += [(placement, read, replace(write, every=each)) for each in _EVERY]
        yield from dict.fromkeys(found)

    @property
    def _address(self) -> str:
        return self._master._source.address

    @functools.cached_property
    def _times(self) -> LinkTimes:
        found = served_times(self._address)
        self.measured = f"{found.machine}, was measured on {found.measured.partition('T')[0]}"
        return found

    @contextlib.contextmanager
    def trial(self) -> Iterator[Callable[[Placement, Read, Write], Subject]]:
        tree, name = self.variables.value, "trial"
        update = jax.tree_util.tree_map(jax.numpy.zeros_like, tree)
        with contextlib.ExitStack() as stack:
            address = stack.enter_context(own_server(self._address))
            ours, others = (stack.enter_context(connect(address)) for _ in range(2))

            def make(placement: Placement, read: Read, write: Write) -> Subject:
                made = ours.variables(name, tree, placement=placement, read=read, write=write)
                if self._pushes():
                    ours.flush()  # Later pushes find the memory of earlier ones, as on any server.
                    return Subject(made, push=lambda: made.push(update))
                written = others.variables(name, tree, write=write)
                return Subject(made, None if self.carried else lambda: written.assign(tree))

            yield make

    def _pushes(self) -> bool:
        return self.variables.write.mode != "assign" and not self.carried

    def _between_fetches(self, late: int) -> float:
        return (late + 1) * math.ceil(self.between / (late + 1))  # It is compared after so many.

    def held_bytes(self, placement: Placement, read: Read) -> int:
        extent = self._master._extent
        return extent.held_bytes // extent.devices if read.cache == "device" else 0

    def of(self, placement: Placement, read: Read, write: Write, computing: float) -> Costs:
        readers, size = self._reads.readers, self._master.layout.size_bytes
        fetches = self.fetches(read)
        moved = {SERVER_LINK: fetches * size, HOST_LINK: fetches * self._master._extent.held_bytes}
        sent = 1.0 if self.carried else 1 / write.every if self._pushes() else 0.0
        moved[SERVER_LINK] += sent * size
        moved[HOST_LINK] += sent * size
        if (tried := self.tried.get((placement, read, write))) is not None:
            return self._seconds_as(tried, read), moved
        fetch = self._seconds("fetch")
        if read.prefetch:  # Each step starts a read, and waits for the rest of it.
            seconds = readers * self._seconds("ahead") + fetches * max(0.0, fetch - computing)
        else:
            checks = max(0.0, readers / (read.max_staleness + 1) - fetches)
            seconds = fetches * fetch + checks * self._seconds("check")
        seconds += sent * self._seconds("push")
        return seconds, moved

    def _seconds(self, operation: str) -> float:
        return self._times.of(operation, self.variables.nbytes)
