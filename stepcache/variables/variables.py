"""`Variables`: a versioned tree that stepcache holds between steps."""

from __future__ import annotations

import contextlib
import itertools
import threading
import weakref
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import jax
from jax.sharding import Mesh

from stepcache.errors import StepCacheError, UnmatchedRuleWarning, VariablesError, warn
from stepcache.pods.replicas import Part, check_replicas, is_local, token_of
from stepcache.pods.rounds import Peers
from stepcache.sharding import (
    Placer,
    current_placer,
    current_reader,
    devices_of,
    mesh_identity,
    processes_of,
)
from stepcache.storage.run_activity import Held, Holder, activity_log
from stepcache.units import counted, html_table, readable_bytes
from stepcache.variables.describing import (
    Placing,
    check_not_constant,
    check_not_tracing,
    joined,
    matching,
    mesh_text,
    named_leaves,
)
from stepcache.variables.masters import LOST, InHostMemory, Master, hold
from stepcache.variables.misuse import NoTree
from stepcache.variables.packing import Layout, bytes_per_device
from stepcache.variables.policy import Placement, Read, Replicated, Sharded, Write, check_policies
from stepcache.variables.transfer import Meter
from stepcache.variables.updates import Updates

_numbers = itertools.count(1)


class Variables(NoTree, Holder):
    """A versioned tree of arrays that stays where it is placed between steps.

        params = sc.Variables({"w": np.zeros((512, 10), np.float32)}, name="params")
        params, loss = train_step(params, batch)  # @sc.step(carry="params")

    Pass `Variables` to a step instead of the tree; the step's function gets the tree. If `carry`
    names the argument, the returned value is written to the variables, their version grows by one,
    and the step returns the same object. Otherwise the step only reads them. `Variables` are
    thread-safe: a reader sees one whole version.

    If a step raises before its program runs, value and version are unchanged. If a program fails
    while it runs, the value is lost, because the buffers of the carry were donated; a master copy
    in host memory is kept. `.value`, `push`, `sc.save` and steps then raise `VariablesError`
    until `assign` or `sc.restore` sets a value.

    Args:
        tree: any pytree of arrays: dicts, flax modules and states, optax states, equinox modules.
            Its arrays are copied, so you may change, donate or delete them afterwards.
        placement: where the master copy is: `Replicated()`, `Sharded(rules)` or `OnHost(...)`. With
            `Replicated()` in a session with a mesh, the session's rules place the leaves, except
            those that are on the mesh already.
        read: how steps read a master copy in another memory (`advise` tries the policies).
        write: what `push` does.
        name: the name in plans and messages, with which the paths for rules begin.
        pack: keep leaves below 64 KiB of one dtype and sharding in one buffer, which the program
            slices inside XLA (flat buckets: Rajbhandari et al., 2020). A call takes some 1 µs less
            for each such leaf, a first call some 7 ms more on a CPU. This pays for steps of well
            under a millisecond that run tens of thousands of times.

    Raises:
        VariablesError: a leaf is not an array.
        OptionError: a policy has an option without effect under this placement.
        PlacementError: a leaf cannot be placed as asked.
    """

    def __init__(
        self,
        tree: Any,
        *,
        placement: Placement = Replicated(),
        read: Read = Read(),
        write: Write = Write(),
        name: str | None = None,
        pack: bool = False,
    ):
        check_not_tracing("variables cannot be made", name or "Variables")
        self._set_up(placement, read, write, name, pack)
        made = Meter()  # Not recorded: no budget and no statistics cover making variables.
        target = getattr(current_reader(), "target", None)
        if target is not None:
            target.check_policies(self)
        check_policies(placement, read, write)
        if target is not None:
            self._begin(target.hold(self._placing, tree))
            self._master.owner = weakref.ref(self)
            return
        self._begin(hold(self._placing, tree, read, made))
        self._made_of = self._tokens(tree)
        self._warn_of_unmatched_rules()

    def _set_up(
        self, placement: Placement, read: Read, write: Write, name: str | None, pack: bool
    ) -> None:
        NoTree._made = True
        self._number = next(_numbers)
        own = {"name": name or f"variables{self._number}", "placement": placement}
        vars(self).update(own, read=read, write=write)
        self._lock = threading.RLock()
        placer = current_placer()
        self._placing = Placing(self.name, name or "", placement, placer, pack)
        self._mesh: Mesh | None = placer.mesh if placer else None
        self._home = mesh_identity(self._mesh)

    @classmethod
    def _over(
        cls, master: Master, name: str, placement: Placement, read: Read, write: Write
    ) -> Variables:
        """Variables over a master copy that another module has made."""
        made = cls.__new__(cls)
        made._set_up(placement, read, write, name, pack=False)
        made._begin(master)
        made._warn_of_unmatched_rules()
        return made

    def _begin(self, master: Master) -> None:
        """Takes a value, without pending updates or optimizer state."""
        self._master, self._views = master, dict[Any, Any]()  # Under the lock.
        activity_log.watch(self)
        self._made_of = {}  # In pods, until it is compared.
        self._updates = Updates(self._placing, self.write)

    def _tokens(self, tree: Any) -> dict[str, str]:
        """Tokens of the host values in a tree, which the processes of a pod compare; by path."""
        if self._mesh is None or len(processes_of(devices_of(self._mesh))) < 2:
            return {}
        return {path: token_of(leaf) for path, leaf in named_leaves(tree)[0] if is_local(leaf)}

    def _warn_of_unmatched_rules(self) -> None:
        on_device = self._placing.on_device
        if not isinstance(on_device, Sharded):
            return
        paths = self._paths()
        matched = set(map(on_device.rules.match, paths))
        examples = ", ".join(paths[:3])
        for index, (pattern, spec) in enumerate(on_device.rules.rules):
            of_state = self.write.optimizer is not None and "optimizer" in pattern  # Made later.
            if index not in matched and not of_state:
                text = f"rule {pattern!r}, {spec}, matches no leaf of {self.name} ({examples}, …)"
                warn(text, UnmatchedRuleWarning)

    @property
    def version(self) -> int:
        """The number of writes since the variables were made."""
        return self._master.version

    @property
    def nbytes(self) -> int:
        """Bytes of the value, however many devices hold it."""
        return self._layout.size_bytes

    @property
    def value(self) -> Any:
        """A copy of the tree: one whole version, in arrays that the caller may donate.

        With `OnHost`, leaves are numpy arrays. Random keys, weakly typed leaves, and leaves that no
        process of a pod has whole, are `jax.Array`s.

        Raises:
            VariablesError: inside a transformation, which would keep the value as a constant and
                not see later writes; or the value is lost.
        """
        check_not_constant(self.name)
        with self._moving() as meter:
            try:  # Not under the lock: a step on another thread may build its program for minutes.
                leaves = self._master.leaves(meter)
            except StepCacheError:
                raise
            except (RuntimeError, ValueError):  # Such a step has just donated the buffers.
                with self._lock:
                    self._master.check_not_lost(self.name)
                    leaves = self._master.leaves(meter)
        self._master.looked_at(current_reader())
        return self._layout.tree.unflatten(leaves)

    def block_until_ready(self) -> Variables:
        """Waits until the value has been computed, and returns the variables.

        Raises:
            VariablesError: it is lost.
        """
        with self._lock:
            self._master.check_not_lost(self.name)
            self._master.block_until_ready()
        return self

    def copy(self) -> Variables:
        """Returns new variables with a copy of the value, such as those of a target network.

        They have the same placement, policies, packing, name and mesh, and version 0. Pending
        updates and the optimizer's state are not copied. Later writes to one do not change the
        other.

        Raises:
            VariablesError: inside a transformation; or the value is lost.
        """
        check_not_tracing("variables cannot be copied", self.name)
        copied = Variables.__new__(Variables)
        vars(copied).update(vars(self), _number=next(_numbers), _lock=threading.RLock())
        with self._lock:
            self._master.check_not_lost(self.name)
            copied._begin(self._master.copied())
        return copied

    def assign(self, tree: Any) -> None:
        """Replaces the value. If a failed `push` lost the optimizer's state, initializes it.

            params.assign(jax.tree.map(np.zeros_like, params.value))

        Args:
            tree: of the same structure, shapes and dtypes.

        Raises:
            VariablesError: a leaf is missing or new, or has another shape or dtype.
        """
        check_not_tracing("variables cannot be assigned", self.name)
        leaves = matching(self.name, self._layout, tree, "assigned")
        with self._lock, self._moving() as meter:
            self._master.assign(leaves, current_reader(), meter)
            self._updates.forget_lost_state()
            if self._made_of:  # Not compared yet.
                self._made_of = self._tokens(tree)

    def push(self, update: Any) -> None:
        """Applies an update: assigns it, adds it or passes it to the optimizer, by `write.mode`.

            table = sc.Variables({"w": w}, write=sc.Write(mode="apply", optimizer=optax.adam(1e-3)))
            table.push({"w": gradient})

        With `Write(every=k)`, each k-th push writes the sum of k updates, as one version. `flush`
        writes the sum of fewer.

        Args:
            update: has the structure and shapes of the value, and its dtypes, except gradients for
                an optimizer.

        Raises:
            VariablesError: a leaf is missing or new, or has another shape or dtype; or the value is
                lost.
        """
        check_not_tracing("updates cannot be pushed", self.name)
        if self.write.mode == "assign":
            self.assign(update)
            return
        exact = self.write.mode == "add"
        leaves = matching(self.name, self._layout, update, "pushed", dtypes=exact)
        with self._lock, self._moving() as meter:
            self._updates.push(leaves, self._master, meter)

    def flush(self) -> None:
        """Writes the sum of the updates that are pending with `Write(every=k)`.

            for batch in batches:
                table.push(gradients(table, batch))
            table.flush()

        Raises:
            VariablesError: the value is lost.
        """
        check_not_tracing("updates cannot be written", self.name)
        with self._lock, self._moving() as meter:
            self._updates.flush(self._master, meter)

    @contextlib.contextmanager
    def _moving(self) -> Iterator[Meter]:
        """Gives a meter for what a method moves, and records that."""
        meter = Meter()
        try:
            yield meter
        finally:
            meter.emit(self.name)

    @property
    def _layout(self) -> Layout:
        return self._master.layout

    def _paths(self) -> Sequence[str]:
        return [joined(self._placing.prefix, slot.path) for slot in self._layout.slots]

    def _parts_on_devices(self) -> Iterator[tuple[str, jax.Array, slice | None]]:
        """Path and buffer of each leaf on the devices, and its slice of a packed one."""
        for slot in self._layout.slots if self._master.is_resident else ():
            start = slot.offset
            part = slice(start, start + slot.size) if start is not None else None
            yield joined(self.name, slot.path), self._master.arrays()[slot.buffer], part

    def _seen_from(self, placer: Placer | None) -> Master:
        """The master copy. One on the host is copied, once a version, for each other mesh that
        reads it. Under the lock.
        """
        mesh = placer.mesh if placer is not None else None
        if mesh is self._mesh or self._master.is_resident or mesh_identity(mesh) == self._home:
            return self._master
        view: Any = self._views.get(mesh_identity(mesh))
        if view is None:
            tree = self._layout.tree.unflatten(self._master.leaves(Meter()))
            made = hold(self._placing._replace(placer=placer), tree, self.read, Meter())
            view, made.version = made, self._master.version
            self._views[mesh_identity(mesh)] = view
        view.follow(self._master)
        return view

    def _check_usable(self, mesh: Mesh | None, *, writes: bool) -> None:
        """Checks that the variables were made on the mesh of a session, or may be read from it."""
        is_read = mesh is not None and isinstance(self._master, InHostMemory) and not writes
        if is_read and jax.process_count() == 1:
            return
        if mesh is not self._mesh and mesh_identity(mesh) != self._home:
            raise VariablesError(
                "the variables were made on the mesh of another session",
                where=self.name,
                expected=mesh_text(self._mesh),
                got=mesh_text(mesh),
                hint="make them inside the session that uses them, or assign their value to "
                "variables made there",
            )

    def _summary(self) -> dict[str, str]:
        leaves = counted(len(self._layout.slots), "leaf")
        buffers = counted(len(self._layout.buffers), "buffer")
        rows = {"name": repr(self.name), "version": str(self.version)}
        rows["value"] = f"{leaves} in {buffers}, {readable_bytes(self.nbytes)}"
        rows["placement"] = str(self.placement)
        if self._lock.acquire(blocking=False):  # Else a step is running, and may have the buffers.
            if self._master.is_lost:
                rows["value"] += f", {LOST}"
            self._lock.release()
        for memory, size in bytes_per_device(self._master.arrays()).items():
            rows[memory] = f"{readable_bytes(size)} per device"
        shown = {"read": self.read != Read(), "write": self.write != Write()}
        return rows | {name: str(getattr(self, name)) for name in shown if shown[name]}

    def _held(self) -> Held:
        """What the run report says of the variables."""
        hits, reads = self._master.hits, self._master.hits + self._master.fetches
        read = str(self.read) if self.read != Read() else ""
        return Held(self.name, self.version, self.nbytes, str(self.placement), read, reads, hits)

    def __repr__(self) -> str:
        texts = [
            f"{text} in {what}" if what.endswith(" memory") else text
            for what, text in self._summary().items()
        ]
        return f"Variables({texts[0]}, version {', '.join(texts[1:])})"

    def _repr_html_(self) -> str:
        return html_table("Variables", self._summary())


@contextlib.contextmanager
def locked(items: Iterable[Any]) -> Iterator[None]:
    """Locks the variables among some items, in one order everywhere: two threads never wait for
    each other. An interrupt while it waits for one lets go of the others.
    """
    variables = {item for item in items if isinstance(item, Variables)}
    in_order = sorted(variables, key=lambda each: each._number)
    targets = {each._master.target for each in variables} - {None}
    locks = [each._lock for each in in_order]
    yield from _holding(locks + [x.lock for x in sorted(targets, key=lambda x: x.number)])


def _holding(locks: list[Any]) -> Iterator[None]:
    if locks:
        with locks[0]:  # No interrupt comes between the lock and what lets go of it.
            yield from _holding(locks[1:])
    else:
        yield


holding = contextlib.contextmanager(_holding)  # Some locks, which are in order.


def check_tree(tree: Any, peers: Peers | None, about: str) -> None:
    """Raises `AgreementError` if replicas of values in a tree differ, on devices or processes."""

    def parts() -> Iterator[Part]:
        for path, leaf in named_leaves(tree)[0]:
            if isinstance(leaf, Variables):
                yield from leaf._parts_on_devices()
            else:
                yield path, leaf, None

    with locked(jax.tree_util.tree_leaves(tree)):
        check_replicas(parts(), peers, about)
