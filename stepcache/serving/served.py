"""`Served`: the master copy of some variables, in another process."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import SingleDeviceSharding

from stepcache import jaxcompat
from stepcache.serving.client import Client
from stepcache.serving.messages import BlockLayout
from stepcache.serving.optimizers import types_of
from stepcache.serving.transport import Version
from stepcache.variables import transfer
from stepcache.variables.copies import Copies, Copy
from stepcache.variables.describing import blank
from stepcache.variables.masters import Master, Reader, Source
from stepcache.variables.packing import Layout, Packed, Slot
from stepcache.variables.plan import HOST_LINK, SERVER_LINK, Extent, Transfer, extent_of, links
from stepcache.variables.policy import (
    Read,
)
from stepcache.variables.transfer import Meter


class Served(Master):
    """A master copy that a host in another process holds.

    A step takes a copy, by the policy; what it returns for it is assigned, if nobody else has
    written meanwhile. Updates are applied there.

    Args:
        source: reads several of them in one go.
        client: of the host.
        name: of the variables there.
        layout: of the value on the devices of this process.
        policy: which copies may serve.
        version: of the value.
    """

    is_resident, applies_updates = False, True

    def __init__(
        self,
        source: Source,
        client: Client,
        name: str,
        layout: Layout,
        policy: Read,
        version: Version,
    ):
        super().__init__(Packed(layout, ()))
        self.source = self._source = source
        self._client = client
        self._name, self._policy = name, policy
        self._types = types_of([(slot.path, slot) for slot in layout.slots])
        self._block = BlockLayout(self._types)
        self._copies = Copies(policy)
        self.version, self._current = version.number, version
        self._is_asked = False  # Whether `_current` is that of the call under way.
        self._fetched: Any = None  # The current value, as copies are kept.
        self._seen = 0  # The version that `leaves` returned last.

    # ---- which copy serves ---------------------------------------------------------------------

    def _serving(self, reader: Reader) -> tuple[Copy | None, str]:
        current = self.version if self._is_asked else None
        copy, why = self._copies.serving(reader.session, current)
        if copy is not None and reader.carried and copy.version != current:
            return None, "a carried value has to be current"
        return copy, why

    def question(self, reader: Reader) -> tuple[str, int, int | None]:
        """What to ask the host before a step.

        Returns:
            The name, the token of the version that the reader needs no copy of, or 0, and the
            moment of the host from which a copy may serve without asking, or None.
        """
        self._is_asked = False
        may_serve = self._serving(reader)[0] is not None
        self._is_asked = True
        copy, _ = self._serving(reader)
        is_current = copy is not None and copy.version == self.version
        moment = self._current.moment if may_serve else None
        return self._name, self._current.token if is_current else 0, moment

    def answered(self, version: Version | None, data: np.ndarray | None) -> None:
        """Takes what the host has said.

        Args:
            version: the current one; None if nothing was asked.
            data: the block of its value, which never changes; None if the reader needs none.
        """
        self._is_asked, self._fetched = version is not None, None
        if version is not None:
            self._is_now(version)
        if data is not None:
            self._fetched = self._kept(self._block.views(data))

    def _is_now(self, version: Version) -> None:
        before = self._current
        if version.epoch != before.epoch and version.token != before.token:
            self._copies.begin_anew()  # Writes may have been repeated in another order.
        self._current, self.version = version, version.number

    def _kept(self, leaves: Sequence[np.ndarray]) -> Any:
        """A copy of the value: on the devices, or where the host has it."""
        if self._policy.cache == "host":
            return leaves
        return transfer.pack(leaves, self.layout, may_alias=True)

    # ---- a step --------------------------------------------------------------------------------

    def plan(self, variable: str, reader: Reader) -> tuple[Transfer, ...]:
        planned = self.plan_take(variable, reader)
        return planned + self.plan_put(variable, reader) if reader.carried else planned

    def plan_take(self, variable: str, reader: Reader) -> tuple[Transfer, ...]:
        copy, why = self._serving(reader)
        there = ("server", "devices")
        if copy is not None and self._policy.cache == "device":
            rest = ("none", why, reader.arguments)
            return (Transfer(variable, copy.version, *there, *rest, extent=self._extent),)
        server_bytes = self.layout.size_bytes if copy is None else 0
        moved = links(self._extent.held_bytes, 0, server_bytes)
        rest = ("copy", why, reader.arguments, moved)
        return (Transfer(variable, self.version, *there, *rest, extent=self._extent),)

    def plan_put(self, variable: str, reader: Reader) -> tuple[Transfer, ...]:
        way = ("devices", "server", "scatter", "the new value is assigned", reader.arguments)
        moved = links(self.layout.size_bytes, 0, self.layout.size_bytes)
        return (Transfer(variable, self.version + 1, *way, moved, extent=self._extent),)

    @functools.cached_property
    def _extent(self) -> Extent:
        here = SingleDeviceSharding(jax.devices()[0])
        buffers = self.layout.buffers
        return extent_of([each._replace(sharding=each.sharding or here) for each in buffers])

    def take(self, reader: Reader, meter: Meter) -> Packed:
        fetched, self._fetched = self._fetched, None
        copy, _ = self._serving(reader)
        if fetched is None and copy is None:  # Nobody has asked, or another call took the copy.
            self._source.read_together([(self, reader)], values=True)
            fetched, self._fetched = self._fetched, None
            copy, _ = self._serving(reader)
        if fetched is not None:
            meter[SERVER_LINK] += self.layout.size_bytes
            self._copies.keep(self.version, fetched)
            kept = fetched
        else:
            assert copy is not None
            self._copies.served(copy, self.version if self._is_asked else None)
            kept = copy.value
        self._is_asked = False
        if reader.carried:
            self._copies.drop()  # The program will donate it.
        is_on_host = not isinstance(kept, Packed)
        if is_on_host or fetched is not None:
            meter[HOST_LINK] += self._extent.held_bytes
        return transfer.pack(kept, self.layout, may_alias=True) if is_on_host else kept

    def described(self, *, in_program: bool) -> Packed:
        buffers = (
            jaxcompat.stand_in(each.shape, each.dtype, each.weak_type, each.sharding)
            for each in self.layout.buffers
        )
        return Packed(self.layout, tuple(buffers))

    def put(self, packed: Packed, session: Any, meter: Meter) -> None:
        meter[HOST_LINK] += self.layout.size_bytes
        leaves = packed.layout.unpack([np.asarray(each) for each in packed.buffers])
        self._write("assign", leaves, session, meter, base=self._current.token)
        kept = packed if self._policy.cache == "device" else [np.array(leaf) for leaf in leaves]
        self._copies.keep(self.version, kept, exact=True)

    def _write(
        self, mode: str, leaves: Sequence[Any], session: Any, meter: Meter, base: int = 0
    ) -> None:
        self._is_now(self._client.write(self._name, mode, self._block, leaves, base))
        meter[SERVER_LINK] += self.layout.size_bytes
        self._copies.wrote(session, self.version)

    # ---- the methods of `Variables` ------------------------------------------------------------

    def assign(self, leaves: Sequence[Any], session: Any, meter: Meter) -> None:
        meter[HOST_LINK] += transfer.to_host_bytes(leaves, None)
        self._write("assign", list(map(np.asarray, leaves)), session, meter)

    def apply(self, leaves: Sequence[Any], mode: str, session: Any, meter: Meter) -> None:
        meter[HOST_LINK] += transfer.to_host_bytes(leaves, None)
        self._write(mode, list(map(np.asarray, leaves)), session, meter)

    def plan_apply(self, variable: str, leaves: Sequence[Any]) -> tuple[Transfer, ...]:
        way = ("devices", "server", "update", "the host computes", ())
        moved = links(transfer.to_host_bytes(leaves, None), 0, self.layout.size_bytes)
        return (Transfer(variable, self.version + 1, *way, moved),)

    def leaves(self, meter: Meter) -> list[Any]:
        (version,), blocks = self._client.read([self._name], [0])
        leaves = [np.array(view) for view in self._block.views(blocks[self._name])]
        meter[SERVER_LINK] += self.layout.size_bytes
        self._seen = version.number
        return leaves

    def looked_at(self, session: Any) -> None:
        self._copies.saw(session, self._seen)

    def on_devices(self, meter: Meter) -> Packed:
        return transfer.pack(self.leaves(meter), self.layout)

    def arrays(self) -> Sequence[jax.Array]:
        return ()

    def copied(self) -> Master:
        return Master(transfer.pack(self.leaves(Meter()), self.layout))

    def is_on_one_device(self) -> bool:
        return self._extent.devices == 1

    def _template(self, slot: Slot) -> Any:
        return blank(slot.shape, slot.dtype)

    @property
    def is_lost(self) -> bool:
        return False
