"""`Served`: the master copy of some variables, in another process."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import Any

import numpy as np
from jax.sharding import SingleDeviceSharding

from stepcache import jaxcompat
from stepcache.errors import VariablesError
from stepcache.serving.copies import Copies, Copy
from stepcache.serving.hosts import Hosts, Versions
from stepcache.serving.read_ahead import Arrival
from stepcache.variables import transfer
from stepcache.variables.masters import Master, Reader
from stepcache.variables.packing import Layout, Packed, shards_bytes
from stepcache.variables.plan import HOST_LINK, SERVER_LINK, Links, Transfer, links
from stepcache.variables.policy import Read
from stepcache.variables.transfer import Meter


class Served(Master):
    """A master copy that one or more hosts in other processes hold.

    A step reads a copy, as the policy allows. The new value of a step that carries it is assigned,
    unless another process has written meanwhile. The hosts apply updates. The version is the number
    of writes; where several hosts have leaves, their sum.

    Args:
        source: reads several masters in one request.
        hosts, name: the clients of all hosts, and the name of the variables there.
        layout: layout of the value on the devices of this process.
        policy: which copies may serve.
        version: version of the value.
    """

    applies_updates = True

    def __init__(
        self,
        source: Any,
        hosts: Hosts,
        name: str,
        layout: Layout,
        policy: Read,
        version: Versions,
    ):
        super().__init__(Packed(layout, ()))
        self.source = self._source = source
        self._hosts = hosts
        self._name, self._policy = name, policy
        self._copies = Copies(policy)
        self.version, self._current = _number(version), version
        self._copied_at = version  # The last version at which the kept copy was the newest.
        self._is_asked = False  # Whether the hosts were asked for `_current` in this call.
        self._fetched: Any = None  # The current value, in the form in which copies are kept.
        self._job: Future[Any] | None = None  # A read in the background, for the next call.
        self._ahead_links: Links = ()  # Bytes that it has moved, until a call counts them.
        self._granted: Copy | None = None  # Serves this call, of which the hosts were not asked.
        self._seen = 0  # The version that `leaves` returned last.

    def _serving(self, reader: Reader) -> tuple[Copy | None, str]:
        if reader.carried and not self._hosts.is_whole(self._name):
            raise VariablesError(
                "several hosts have leaves of these variables: no step can carry them",
                where=self._name,
                hint="pass them without carry, and push an update of them",
            )
        current = self.version if self._is_asked else None
        return self._copies.serving(reader.session, current, carried=reader.carried)

    def lookup(self, reader: Reader) -> tuple[str, Versions | None, Versions | None]:
        """Looks for a copy that may serve a step.

        Returns:
            The name, as the hosts know it; the version of the copy if that is the latest known one;
            and the version at which a copy that may serve without asking was the newest. None for
            none.
        """
        self._is_asked = False
        self._granted, _ = self._serving(reader)
        self._is_asked = True
        copy, _ = self._serving(reader)
        is_current = copy is not None and copy.version == self.version
        copied_at = self._copied_at if self._granted is not None else None
        return self._name, self._current if is_current else None, copied_at

    def receive(self, version: Versions | None, leaves: list[np.ndarray] | None) -> None:
        """Stores the hosts' reply to a lookup.

        Args:
            version: the current version; None if the hosts were not asked.
            leaves: the value, which never changes; None if the reader needs none.
        """
        self._is_asked, self._fetched = version is not None, None
        if version is not None:
            self._granted = None
            self._set_current(version)
        self._fetched = self.as_copy(leaves)

    def _set_current(self, version: Versions) -> None:
        before = self._current
        for host, now in version.items():
            if now.epoch != before[host].epoch and now.token != before[host].token:
                self._copies.reset()  # Writes may have been repeated in another order.
        self._current, self.version = version, _number(version)

    def as_copy(self, leaves: list[np.ndarray] | None) -> Any:
        """Returns a value in the form in which copies are kept; None for None."""
        return leaves and transfer.pack(leaves, self.layout, may_alias=True)

    def reads_ahead(self, reader: Reader) -> bool:
        """Returns whether the value is to be read in the background for the next step."""
        is_wanted = self._policy.max_staleness > 0 and not reader.carried
        return is_wanted and self._serving(reader)[0] is None

    def started(self, job: Future[Any]) -> None:
        """Sets the job that reads the value for the next call."""
        self._job, self._is_asked = job, False

    def take_job(self) -> Future[Any] | None:
        """Removes and returns the job that reads the value for this call; None for none."""
        job, self._job = self._job, None
        return job

    def arrived(self, arrival: Arrival) -> None:
        """Keeps the result of the job, unless this process has seen a newer version since."""
        version, kept = arrival
        if kept is not None:
            self._ahead_links = self._read_links
        rows = [(now, self._current[host]) for host, now in version.items()]
        if all((now.epoch, now.moment) >= (seen.epoch, seen.moment) for now, seen in rows):
            self._set_current(version)
            self._copies.arrived(self.version, kept)
            self._copied_at = version

    def plan_take(self, variable: str, reader: Reader) -> tuple[Transfer, ...]:
        copy, why = self._serving(reader)
        if copy is not None:
            way = ("server", "devices", "none", why, reader.arguments)
            planned = (Transfer(variable, copy.version, *way),)
        else:
            planned = (self._plan_read(variable, why, reader, self._read_links),)
        if self._ahead_links:
            why = "it was read in the background for this step"
            planned = (self._plan_read(variable, why, reader, self._ahead_links), *planned)
        return planned

    def _plan_read(self, variable: str, why: str, reader: Reader, moved: Links) -> Transfer:
        way = ("server", "devices", "copy", why, reader.arguments, moved)
        return Transfer(variable, self.version, *way)

    @functools.cached_property
    def _read_links(self) -> Links:
        """The bytes of a read over each link: to the devices, and sent by the host."""
        return links(sum(map(shards_bytes, self.on_devices())), 0, self.layout.size_bytes)

    def plan_put(self, variable: str, reader: Reader) -> tuple[Transfer, ...]:
        way = ("devices", "server", "scatter", "the new value is assigned", reader.arguments)
        moved = links(self.layout.size_bytes, 0, self.layout.size_bytes)
        return (Transfer(variable, self.version + 1, *way, moved),)

    def on_devices(self) -> Sequence[Any]:
        here = SingleDeviceSharding(jaxcompat.default_device())
        return [at._replace(sharding=at.sharding or here) for at in self.layout.buffers]

    def take(self, reader: Reader, meter: Meter) -> Packed:
        fetched, self._fetched = self._fetched, None
        # One that was granted serves, though another thread has looked at a newer value since: the
        # values of a call are of one moment.
        copy = self._granted or self._serving(reader)[0]
        self._granted = None
        if fetched is not None:
            self.fetches += 1
            self._copies.keep(self.version, fetched)
            kept = fetched
        else:
            assert copy is not None
            self.hits += 1
            self._copies.served(copy, self.version if self._is_asked else None)
            kept = copy.value
        if self._is_asked:
            self._copied_at = self._current
        self._is_asked = False
        if reader.carried:
            self._copies.drop()  # The program will donate it.
        for link, size in (*self._ahead_links, *(self._read_links if fetched is not None else ())):
            meter[link] += size
        self._ahead_links = ()
        return kept

    def put(self, packed: Packed, session: Any, meter: Meter) -> None:
        meter[HOST_LINK] += self.layout.size_bytes
        leaves = packed.layout.unpack([np.asarray(each) for each in packed.buffers])
        self._write("assign", leaves, session, meter, base=self._current)
        self._copies.keep(self.version, packed)
        self._copied_at = self._current

    def _write(
        self, mode: str, leaves: Sequence[Any], session: Any, meter: Meter, **options: Any
    ) -> None:
        try:
            version = self._hosts.write(self._name, mode, leaves, **options)
        except BaseException:
            self._copies.drop()  # The hosts may have the write, or get it later.
            raise
        self._set_current(version)
        meter[SERVER_LINK] += self.layout.size_bytes
        self._copies.saw(session, self.version)

    def assign(self, leaves: Sequence[Any], session: Any, meter: Meter) -> None:
        meter[HOST_LINK] += transfer.to_host_bytes(leaves)
        self._write("assign", list(map(np.asarray, leaves)), session, meter)

    def apply(
        self, leaves: Sequence[Any], mode: str, session: Any, meter: Meter, on_kept: Callable
    ) -> None:
        meter[HOST_LINK] += transfer.to_host_bytes(leaves)
        self._write(mode, list(map(np.asarray, leaves)), session, meter, on_kept=on_kept)

    def leaves(self, meter: Meter) -> list[Any]:
        (version,), (found,) = self._hosts.read([self._name], [None])
        leaves = [np.array(leaf) for leaf in found or ()]
        meter[SERVER_LINK] += self.layout.size_bytes
        self._seen = _number(version)
        return leaves

    def looked_at(self, session: Any) -> None:
        self._copies.saw(session, self._seen)


def _number(version: Versions) -> int:
    return sum(part.number for part in version.values())
