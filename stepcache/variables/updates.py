"""`Updates`: what `Variables.push` does with an update, as `Write` says.

Updates are summed where they arrive, and every so many are written as one: added, or passed to an
optimizer. That runs where the master copy lives, or where the placement of one in host memory says.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from stepcache import jaxcompat
from stepcache.errors import VariablesError
from stepcache.sharding import current_reader
from stepcache.units import counted
from stepcache.variables import transfer
from stepcache.variables.describing import Parameters, Placing
from stepcache.variables.masters import Master, OnDevices, Reader, hold
from stepcache.variables.packing import Packed, Slot, layout_of
from stepcache.variables.plan import HOST_LINK
from stepcache.variables.policy import Read, Replicated, Write
from stepcache.variables.transfer import Meter

NONE_PENDING: tuple[int, list[Any]] = (0, [])


class Updates:
    """The pending updates of some variables, and their optimizer's state."""

    def __init__(self, placing: Placing, write: Write):
        self._name, self._placing, self._write = placing.name, placing, write
        self._on_host = getattr(placing.placement, "update", None) == "host"
        self._run = _over_packed(_rule_of(write), placed=not self._on_host)
        self.state: Master | None = None  # Of the optimizer; before the first push that needs it.
        # How many updates are pushed and not yet written, and their sum.
        self.pending: tuple[int, list[Any]] = NONE_PENDING

    def check_none_pending(self) -> None:
        """Raises `VariablesError` if a checkpoint would be without updates that are pushed."""
        count, _ = self.pending
        if count:
            what = "updates are pending, which a checkpoint does not hold"
            hint = "call flush() before, or save after a push that writes"
            got = f"{counted(count, 'update')}, and {self._write}"
            raise VariablesError(what, where=self._name, got=got, hint=hint)

    def push(self, leaves: Sequence[Any], master: Master, meter: Meter) -> None:
        """Adds an update to the pending ones, and writes the sum if it is time."""
        count, _ = self.pending
        is_last = count + 1 >= self._write.every
        self._make_ready(master, meter, is_last)
        # An update that leaves this process at once is not copied before.
        is_sent = master.applies_updates and is_last and not count
        summed = list(leaves) if is_sent else self._summed(leaves, meter, is_last)
        if is_last:
            self._write_sum(summed, master, meter)
        else:
            self.pending = count + 1, summed

    def flush(self, master: Master, meter: Meter) -> None:
        """Writes the sum of the pending updates, if there are any."""
        count, summed = self.pending
        if count:
            self._make_ready(master, meter, is_last=True)
            self._write_sum(summed, master, meter)

    def _make_ready(self, master: Master, meter: Meter, is_last: bool) -> None:
        """Checks what an update needs, and makes the optimizer's state if it is missing."""
        master.check_not_lost(self._name)
        if self.state is not None:
            self.state.check_not_lost(self._name)
        needs_state = self._write.mode == "apply" and is_last and not master.applies_updates
        if needs_state and self.state is None:
            self.state = self.ready_state(master, meter)

    def _write_sum(self, summed: Sequence[Any], master: Any, meter: Meter) -> None:
        pending, version = self.pending, master.version
        self.pending = NONE_PENDING
        kept: list[bool] = []  # By the master, which repeats it.
        try:
            if master.applies_updates:
                on_kept = functools.partial(kept.append, True)
                master.apply(summed, self._write.mode, current_reader(), meter, on_kept)
            else:
                self._apply(master.layout.tree.unflatten(summed), master, meter)
        except BaseException:
            if not kept and master.version == version:
                self.pending = pending
            raise

    def _summed(self, leaves: Sequence[Any], meter: Meter, is_last: bool) -> list[Any]:
        """An update added to the pending ones, in memory of its own if it is not the last."""
        kinds, (count, before) = np.ndarray, self.pending
        if self._on_host:
            meter[HOST_LINK] += transfer.to_host_bytes(leaves)
            kinds = np.ndarray | jax.Array
        new = [np.array(leaf) if isinstance(leaf, kinds) else leaf for leaf in leaves]
        if count:
            add = np.add if self._on_host else jnp.add
            return [add(a, b) for a, b in zip(before, new, strict=True)]
        if is_last:
            return new
        return [transfer.copy(leaf) if isinstance(leaf, jax.Array) else leaf for leaf in new]

    def _apply(self, update: Any, master: Any, meter: Meter) -> None:
        state, reader = self.state or _NO_STATE, Reader(current_reader(), carried=True)
        with self._computing():
            taken = master.on_host() if self._on_host else master.take(reader, meter)
            value, new_state = self._run(taken, state.take(reader, meter), update)
            if self._on_host:
                master.store(value)
            else:
                master.put(value, reader.session, meter)
        if new_state.layout is not state.layout:
            leaves = transfer.unpack(new_state)
            self.state = self.held_state(new_state.layout.tree.unflatten(leaves), master, meter)
        elif state is not _NO_STATE:
            state.put(new_state, reader.session, meter)

    def _computing(self) -> contextlib.AbstractContextManager:
        """Context manager in which the optimizer runs."""
        if self._on_host:
            return jax.default_device(_host_device(self._name))
        placer = self._placing.placer
        return jaxcompat.tracing_context(placer.mesh if placer else None)

    def ready_state(self, master: Master, meter: Meter) -> Master:
        """The optimizer's state, or a new one, of zeros where the value is lost."""
        if self.state is not None:
            return self.state
        layout = master.layout
        if master.is_lost:
            zeros = [np.zeros(slot.shape, slot.dtype) for slot in layout.slots]
            master = OnDevices(transfer.pack(zeros, layout))
        if self._on_host:
            leaves = list(map(np.asarray, master.leaves(meter)))
        else:
            leaves = transfer.unpack(master.take(Reader(current_reader()), meter))
        with self._computing():
            state = self._write.optimizer.init(layout.tree.unflatten(leaves))
        return self.held_state(state, master, meter)

    def saved_state(self, master: Master, meter: Meter) -> Master | None:
        """The optimizer's state that a checkpoint holds; None where there is none here."""
        if self._write.mode != "apply":
            return None
        return master.own_state() if master.applies_updates else self.ready_state(master, meter)

    def held_state(self, tree: Any, master: Master, meter: Meter) -> Master:
        """A master copy of an optimizer's state, where the optimizer runs."""
        parameters = Parameters(self._placing.prefix, master.layout.slots)
        placing = self._placing._replace(name=f"{self._name}/optimizer")
        if not self._on_host:
            return hold(placing, tree, Read(), meter, parameters)
        placing = placing._replace(placement=Replicated(), placer=None)
        with jax.default_device(_host_device(self._name)):
            return hold(placing, tree, Read(), meter, parameters)

    def forget_lost_state(self) -> None:
        """Drops a state that a failed push donated: the next push makes a new one."""
        if self.state is not None and self.state.is_lost:
            self.state = None


_Rule = Callable[[Any, Any, Any], tuple[Any, Any]]


def _rule_of(write: Write) -> _Rule:
    """A function of value, optimizer state and update that returns the new value and state."""
    if write.mode == "add":
        return lambda value, state, update: (jax.tree.map(jnp.add, value, update), state)

    def apply(value: Any, state: Any, update: Any) -> tuple[Any, Any]:
        import optax

        updates, state = write.optimizer.update(update, state, value)
        return optax.apply_updates(value, updates), state

    return apply


def _over_packed(rule: _Rule, *, placed: bool) -> Any:
    """A rule as a compiled program over packed values, which it donates."""

    def repacked(old: Packed, tree: Any) -> Packed:
        leaves, layout = jax.tree_util.tree_leaves(tree), old.layout
        rows = list(zip(leaves, layout.slots, strict=True))
        if any(leaf.dtype != slot.dtype for leaf, slot in rows):  # Such as moments, by gradients.
            slots = (Slot(s.path, x.shape, x.dtype, x.weak_type, s.sharding) for x, s in rows)
            layout = layout_of(layout.tree, tuple(slots))
        buffers = layout.pack(leaves)
        if placed:
            pairs = zip(buffers, (buffer.sharding for buffer in layout.buffers), strict=True)
            buffers = [x if place is None else jax.device_put(x, place) for x, place in pairs]
        return Packed(layout, tuple(buffers))

    def run(value: Packed, state: Packed, update: Any) -> tuple[Packed, Packed]:
        new, new_state = rule(value.value(), state.value(), update)
        return repacked(value, new), repacked(state, new_state)

    return jaxcompat.jit(run, donate_argnums=(0, 1))


def _host_device(where: str) -> Any:
    """The device that computes in host memory."""
    try:
        return jax.local_devices(backend="cpu")[0]
    except RuntimeError as error:
        what = "the host cannot compute"
        expected = "JAX's CPU backend beside that of the devices"
        got = str(error).splitlines()[0]
        hint = 'add cpu to JAX_PLATFORMS ("cuda,cpu"), or use OnHost(update="device")'
        raise VariablesError(what, where=where, expected=expected, got=got, hint=hint) from None


_NO_STATE = hold(Placing("nothing"), (), Read(), Meter())
