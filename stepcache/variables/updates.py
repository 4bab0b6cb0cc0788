"""`Updates`: what `Variables.push` does with an update, as `Write` says.

Updates are added up where they arrive, and every so many are written as one: added, or handed to an
optimizer. That runs where the master copy lives; of one in host memory, where its placement says.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from stepcache import jaxcompat
from stepcache.errors import VariablesError
from stepcache.sharding import Placer, current_max_bytes, current_reader
from stepcache.variables import transfer
from stepcache.variables.masters import Held, InHostMemory, Reader, hold
from stepcache.variables.packing import Layout, Packed
from stepcache.variables.plan import Plan, Transfer, check_bytes, update_bytes
from stepcache.variables.policy import OnHost, Placement, Read, Replicated, Write
from stepcache.variables.transfer import Meter


class Updates:
    """The updates of some variables, and their optimizer's state.

    Args:
        name: of the variables.
        write: the policy.
        placement: of the variables.
        placer: the mesh and rules by which they were placed.
        pack: whether small leaves of the state share buffers.

    Attributes:
        state: the optimizer's state; None before it is needed.
    """

    def __init__(
        self, name: str, write: Write, placement: Placement, placer: Placer | None, pack: bool
    ):
        self._name, self._write = name, write
        self._placement, self._placer, self._pack = placement, placer, pack
        self._on_host = isinstance(placement, OnHost) and placement.update == "host"
        self._sum = _Sum(write, self._on_host)
        self._run = _over_packed(_rule_of(write), placed=not self._on_host)
        self.state: Held | None = None

    @property
    def pending(self) -> int:
        """Updates that have been pushed, and are not written yet."""
        return self._sum.count

    @property
    def pending_leaves(self) -> Sequence[Any] | None:
        """The sum of the pending updates; None where none is pending."""
        return self._sum._leaves

    def resume(self, leaves: Sequence[Any] | None, count: int) -> None:
        """Takes pending updates, as a checkpoint holds them."""
        self._sum._leaves = None if leaves is None else [*leaves]
        self._sum.count = 0 if leaves is None else count

    def push(self, leaves: Sequence[Any], held: Held, meter: Meter) -> None:
        """Takes an update, and writes what there is, if it is time. Under the variables' lock.

        Args:
            leaves: of the update.
            held: the value.
            meter: counts what moves.

        Raises:
            VariablesError: the value, or the optimizer's state, is lost.
            TransferBudgetError: it would move more than the session allows. What it takes to make
                the optimizer's state counts, but is not judged.
        """
        held.check_not_lost(self._name)
        if self.state is not None:
            self.state.check_not_lost(self._name)
        reader = Reader(current_reader(), carried=True)
        self._check_budget(leaves, held, reader)
        if self._write.mode == "apply" and self._sum.is_last and self.state is None:
            self.ready_state(held, meter)
            self._check_budget(leaves, held, reader)
        summed = self._sum.add(leaves, meter)
        if summed is None:
            return
        state = self.state or _NOTHING
        update = held.layout.tree.unflatten(summed)
        if self._on_host:
            assert isinstance(held.master, InHostMemory)
            with jax.default_device(_host_device(self._name)):
                value = Packed(held.layout, tuple(held.master.on_host()))
                value, new_state = self._run(value, state.master.take(reader, meter), update)
                held.master.store(value.buffers, reader.session)
        else:
            with jaxcompat.tracing_context(self._placer.mesh if self._placer else None):
                value = held.master.take(reader, meter)
                value, new_state = self._run(value, state.master.take(reader, meter), update)
                held.master.put(value, reader.session, meter)
        if state is not _NOTHING:
            state.master.put(new_state, reader.session, meter)

    def _check_budget(self, leaves: Sequence[Any], held: Held, reader: Reader) -> None:
        """Whether a push moves no more than the session allows."""
        planned = []
        if self._on_host:
            way = ("devices", "host", "update", "the host computes", ())
            moved = update_bytes(leaves, self._write.wire)
            planned.append(Transfer(self._name, held.master.version + 1, *way, moved))
        elif self._sum.is_last:
            for name, each in ((self._name, held), (f"{self._name}/optimizer", self.state)):
                if each is not None:
                    planned += each.master.plan_take(name, reader)
                    planned += each.master.plan_put(name, reader)
        needed = Plan(tuple(planned)).bytes_by_transfer
        check_bytes(f"{self._name}.push", needed, current_max_bytes())

    def ready_state(self, held: Held, meter: Meter) -> Held:
        """The optimizer's state, made of the value if there is none yet."""
        if self.state is None:
            # An optimizer that runs on the devices makes its state there.
            leaves = (
                held.master.leaves(meter)
                if self._on_host
                else transfer.unpack(held.master.on_devices(meter))[0]
            )
            self.state = self._initial_state(held.layout, leaves, meter)
        return self.state

    def state_to_restore(self, held: Held, meter: Meter) -> Held:
        """The optimizer's state to be overwritten: as it is, or made of what a lost value was."""
        if self.state is None and held.is_lost:
            zeros = [np.zeros(slot.shape, slot.dtype) for slot in held.layout.slots]
            blank = transfer.unpack(transfer.pack(zeros, held.layout))[0]
            return self._initial_state(held.layout, blank, meter)
        return self.ready_state(held, meter)

    def _initial_state(self, layout: Layout, leaves: Sequence[Any], meter: Meter) -> Held:
        name, optimizer = f"{self._name}/optimizer", self._write.optimizer
        if not self._on_host:
            state = optimizer.init(layout.tree.unflatten(leaves))
            return hold(name, state, self._placement, self._placer, Read(), meter, pack=self._pack)
        with jax.default_device(_host_device(self._name)):
            state = optimizer.init(layout.tree.unflatten(map(np.asarray, leaves)))
            return hold(name, state, Replicated(), None, Read(), meter, pack=self._pack)

    def forget_lost_state(self) -> None:
        """Lets go of a state that a failed push took with it: the next one begins anew."""
        if self.state is not None and self.state.is_lost:
            self.state = None


class _Sum:
    """Updates that are still to be written, added up.

    Args:
        write: the policy.
        on_host: whether they are added up in host memory.
    """

    def __init__(self, write: Write, on_host: bool):
        self._write, self._on_host = write, on_host
        self._leaves: list[Any] | None = None
        self.count = 0

    @property
    def is_last(self) -> bool:
        """Whether the next update is written, with those before it."""
        return self.count + 1 >= self._write.every

    def add(self, leaves: Sequence[Any], meter: Meter) -> list[Any] | None:
        """Adds an update.

        Args:
            leaves: of the update.
            meter: counts what moves.

        Returns:
            What is to be written now, or None.
        """
        if self._on_host:
            new = [transfer.to_host(leaf, self._write.wire, meter) for leaf in leaves]
        else:  # Of numpy's arrays a copy: they may change in their owner's hands.
            new = [np.array(leaf) if isinstance(leaf, np.ndarray) else leaf for leaf in leaves]
        if self._leaves is not None:
            add = np.add if self._on_host else jnp.add
            new = [add(a, b) for a, b in zip(self._leaves, new, strict=True)]
        if not self.is_last:
            self._leaves, self.count = new, self.count + 1
            return None
        self._leaves, self.count = None, 0
        return new


_Rule = Callable[[Any, Any, Any], tuple[Any, Any]]


def _rule_of(write: Write) -> _Rule:
    """Value, optimizer state and update to the new value and state, inside a trace."""
    if write.mode == "add":

        def add(value: Any, state: Any, update: Any) -> tuple[Any, Any]:
            return jax.tree.map(jnp.add, value, update), state

        return add

    def apply(value: Any, state: Any, update: Any) -> tuple[Any, Any]:
        import optax

        updates, state = write.optimizer.update(update, state, value)
        return optax.apply_updates(value, updates), state

    return apply


def _over_packed(rule: _Rule, *, placed: bool) -> Any:
    """A rule as a compiled program over packed values, which it uses up."""

    def repacked(old: Packed, tree: Any) -> Packed:
        buffers = old.layout.pack(jax.tree_util.tree_leaves(tree))
        if placed:
            places = [buffer.sharding for buffer in old.layout.buffers]
            pairs = zip(buffers, places, strict=True)
            buffers = [x if place is None else jax.device_put(x, place) for x, place in pairs]
        return Packed(old.layout, tuple(buffers))

    def run(value: Packed, state: Packed, update: Any) -> tuple[Packed, Packed]:
        new, new_state = rule(value.value(), state.value(), update)
        return repacked(value, new), repacked(state, new_state)

    return jax.jit(run, donate_argnums=(0, 1))


def _host_device(where: str) -> Any:
    """The device that computes in host memory.

    Raises:
        VariablesError: JAX was told not to use the CPU.
    """
    try:
        return jax.local_devices(backend="cpu")[0]
    except RuntimeError as error:
        raise VariablesError(
            "the host cannot compute",
            where=where,
            expected="JAX's CPU backend beside that of the devices",
            got=str(error).splitlines()[0],
            hint='add cpu to JAX_PLATFORMS ("cuda,cpu"), or say OnHost(update="device")',
        ) from None


_NOTHING = hold("nothing", (), Replicated(), None, Read(), Meter())
