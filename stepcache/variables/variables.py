"""`Variables`: a versioned tree that stepcache holds between steps."""

from __future__ import annotations

import contextlib
import itertools
import os
import threading
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

import jax
from jax.sharding import Mesh
from jax.tree_util import keystr

from stepcache.errors import UnmatchedRuleWarning, VariablesError, warn
from stepcache.replicas import is_own, token_of
from stepcache.sharding import (
    current_max_bytes,
    current_placer,
    current_reader,
    mesh_identity,
    processes_of,
)
from stepcache.units import counted, html_table, readable_bytes
from stepcache.variables import checkpoints, restoring
from stepcache.variables.checkpoint_items import Parts
from stepcache.variables.describing import (
    NoAttributeError,
    NoTreeError,
    check_not_kept,
    check_not_tracing,
    joined,
    matching,
)
from stepcache.variables.masters import LOST, Held, OnDevices, Reader, hold
from stepcache.variables.packing import Layout, Packed, bytes_per_device
from stepcache.variables.plan import Plan, Transfer, check_bytes
from stepcache.variables.policy import (
    Placement,
    Read,
    Replicated,
    Sharded,
    Write,
    check_policies,
)
from stepcache.variables.transfer import Meter
from stepcache.variables.updates import Updates
from stepcache.variables.wire import check_wire

_numbers = itertools.count(1)

_NO_TREE = "variables are no array, nor a tree of arrays"
_USE_VALUE = (
    "pass them as an argument of a step, whose function sees their tree; elsewhere use .value"
)


def any_variables() -> bool:
    """Whether this process has made any yet."""
    return Variables._made


class Variables:
    """A versioned tree of arrays that stays where it is placed between steps.

    Pass it to a step in the place of the tree: the step's function sees the tree. Named in `carry`,
    it takes the value that the step returns for it, its version is raised by one, and the same
    object comes back; else it is read only.

    A step that raises before its program runs leaves value and version as they were. A program that
    fails while it runs has used up the buffers of what it carries. The value is lost then, unless
    its master copy is in host memory: `.value`, `push`, `save` and steps raise `VariablesError`
    until `assign` or `restore` gives another one.

    Args:
        tree: any pytree of arrays: dicts, flax modules and states, optax states, equinox modules.
            Its arrays are copied, and may be changed, donated or dropped afterwards.
        placement: where the master copy lives: `Replicated()`, `Sharded(rules)` or `OnHost(...)`.
            In a session with a mesh, leaves that were placed on it already stay as they are under
            `Replicated()`, and the session's rules apply to the others.
        read: how steps get the value where it lives in another memory.
        write: what `push` does.
        name: what to call it in plans and messages, and what its paths begin with for rules.
        pack: whether leaves below 64 KiB of one dtype and sharding share one buffer, which the
            program slices inside XLA, as optimizers and collectives do with flat buckets
            (Rajbhandari et al., 2020). A call then costs some 1 µs less for each such leaf, and a
            first call some 7 ms more on a CPU: it pays for steps of well under a millisecond that
            run tens of thousands of times.

    Raises:
        VariablesError: a leaf is no array, or the devices do not know the type of a wire.
        OptionError: a policy has an option that would do nothing under this placement.
        PlacementError: a leaf cannot be placed as asked.

    It is thread-safe: a reader sees one whole version.
    """

    _made = False

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
        check_policies(placement, read, write)
        for wire in (read.wire, write.wire):
            check_wire(wire, name or "Variables")
        Variables._made = True
        self._number = next(_numbers)
        self.name = name or f"variables{self._number}"
        self.placement, self.read, self.write = placement, read, write
        self._lock = threading.RLock()
        self._placer = current_placer()
        self._mesh: Mesh | None = self._placer.mesh if self._placer else None
        self._prefix = name or ""
        made = Meter()  # Not recorded: nobody asks what it takes to make them.
        self._pack = pack
        held = hold(self.name, tree, placement, self._placer, read, made, self._prefix, pack)
        self._begin_with(held)
        self._made_of = self._tokens(tree)
        self._warn_of_rules()

    def _begin_with(self, held: Held) -> None:
        """Takes a value, without updates or optimizer state."""
        self._held = held
        self._made_of: dict[str, str] = {}  # In pods, until it is compared.
        self._master: Any = held.master  # To be used under the lock.
        self._updates = Updates(self.name, self.write, self.placement, self._placer, self._pack)

    def _tokens(self, tree: Any) -> dict[str, str]:
        """What each process of a pod says of the host values that it makes the variables of."""
        if self._mesh is None or len(processes_of(self._mesh.devices.flat)) < 2:
            return {}
        named, _ = jax.tree_util.tree_flatten_with_path(tree)
        return {
            keystr(keys, simple=True, separator="/"): token_of(leaf)
            for keys, leaf in named
            if is_own(leaf)
        }

    def _warn_of_rules(self) -> None:
        """Warns of the placement's own rules that match no leaf."""
        on_device = getattr(self.placement, "on_device", self.placement)
        if not isinstance(on_device, Sharded):
            return
        paths = self._paths()
        matched = set(map(on_device.rules.match, paths))
        examples = ", ".join(paths[:3])
        for index, (pattern, spec) in enumerate(on_device.rules.rules):
            if index not in matched:
                warn(
                    f"rule {pattern!r}, {spec}, matches no leaf of {self.name} ({examples}, …)",
                    UnmatchedRuleWarning,
                )

    @property
    def _layout(self) -> Layout:
        """How the leaves lie in buffers."""
        return self._held.layout

    def _paths(self) -> Sequence[str]:
        """The paths of the leaves, as rules read them."""
        return [joined(self._prefix, slot.path) for slot in self._layout.slots]

    def _parts_on_devices(self) -> Iterator[tuple[str, jax.Array, slice | None]]:
        """Path and buffer of each leaf, and which part of a flat one it is. Under the lock.

        Nothing where the master copy is in host memory, of which each process has a share.
        """
        if isinstance(self._master, OnDevices):
            buffers = self._master.arrays()
            for slot in self._layout.slots:
                start = slot.offset
                part = slice(start, start + slot.size) if start is not None else None
                yield joined(self.name, slot.path), buffers[slot.buffer], part

    # ---- looking -------------------------------------------------------------------------------

    @property
    def version(self) -> int:
        """How often the value has been written; 0 for the one it was made with."""
        return self._master.version

    @property
    def nbytes(self) -> int:
        """Bytes of the value, however many devices hold it."""
        return self._layout.size_bytes

    @property
    def value(self) -> Any:
        """The tree, as it is now: a whole version, in arrays that are yours to keep or donate.

        Under `OnHost` they are numpy arrays; `jax.Array`s only where numpy has no such type (random
        keys, weak types), or where no process of a pod has the whole.

        Raises:
            VariablesError: this is inside a transformation, which would keep the value as a
                constant and not see later writes; or the value is lost.
        """
        check_not_kept(self.name)
        with self._moving("value") as meter:
            try:  # Not under the lock: a step on another thread may build its program for minutes.
                leaves = self._master.leaves(meter)
            except (
                RuntimeError,
                ValueError,
            ):  # Such a step has just taken the buffers for its own.
                with self._lock:
                    self._held.check_not_lost(self.name)
                    leaves = self._master.leaves(meter)
        self._master.looked_at(current_reader())
        return self._layout.tree.unflatten(leaves)

    def block_until_ready(self) -> Variables:
        """Waits until the value has been computed.

        Raises:
            VariablesError: it is lost.
        """
        with self._lock:
            self._held.check_not_lost(self.name)
            jax.block_until_ready(self._master.arrays())
        return self

    def copy(self) -> Variables:
        """Makes other variables of the value as it is now, such as a target network's.

        They have the same placement, policies, packing and name, and lie on the same mesh. Their
        version is 0. Updates that are pending and the optimizer's state are not copied. Later
        writes to either do not reach the other.

        Raises:
            VariablesError: this is inside a transformation; or the value is lost.
        """
        check_not_tracing("variables cannot be copied", self.name)
        copied = Variables.__new__(Variables)
        vars(copied).update(vars(self), _number=next(_numbers), _lock=threading.RLock())
        with self._lock:
            self._held.check_not_lost(self.name)
            held = Held(self._layout, self._master.copied())
        copied._begin_with(held)
        return copied

    # ---- writing -------------------------------------------------------------------------------

    def assign(self, tree: Any) -> None:
        """Takes another value.

        Where a failed `push` lost the optimizer's state too, the state begins anew.

        Args:
            tree: of the same structure, shapes and dtypes.

        Raises:
            VariablesError: a leaf is missing or new, or has another shape or dtype.
            TransferBudgetError: it would move more than the session allows.
        """
        check_not_tracing("variables cannot be assigned", self.name)
        leaves = matching(self.name, self._layout, tree, "assigned")
        with self._lock, self._moving("assign", self._held) as meter:
            self._held.put(leaves, current_reader(), meter)
            self._updates.forget_lost_state()
            if self._made_of:  # Not compared yet.
                self._made_of = self._tokens(tree)

    def push(self, update: Any) -> None:
        """Does with an update what the `Write` policy says.

        Args:
            update: of the structure and shapes of the value; its dtypes too, unless it is for an
                optimizer.

        Raises:
            VariablesError: a leaf is missing or new, or has another shape or dtype; or the value is
                lost.
            TransferBudgetError: it would move more than the session allows.
        """
        check_not_tracing("updates cannot be pushed", self.name)
        if self.write.mode == "assign":
            self.assign(update)
            return
        exact = self.write.mode == "add"
        leaves = matching(self.name, self._layout, update, "pushed", dtypes=exact)
        with self._lock, self._moving("push") as meter:
            self._updates.push(leaves, self._held, meter)

    # ---- keeping ---------------------------------------------------------------------------------

    def save(self, directory: str | os.PathLike) -> None:
        """Writes value and version, optimizer state and pending updates to a directory.

        Short for `stepcache.save(directory, value=self)`, which says what may be replaced, and what
        happens at a crash.

        Args:
            directory: where to; a checkpoint that is there is replaced when all is written.

        Raises:
            VariablesError: `directory` is a URL, or holds something else than a checkpoint; or the
                value is lost.
        """
        checkpoints.save(directory, value=self)

    def restore(self, directory: str | os.PathLike) -> None:
        """Takes the value that `save` wrote, from any mesh and placement; it is a write.

        Short for `stepcache.restore(directory, value=self)`.

        Args:
            directory: where `save` wrote, or orbax's `StandardCheckpointer` a tree of the same
                paths. The version is that of the value then, or the next one here, whichever is
                later: versions never go back.

        Raises:
            VariablesError: `directory` is a URL, there is nothing to read, or a leaf is missing,
                new, or of another type.
            TransferBudgetError: it would move more than the session allows.
        """
        restoring.restore(directory, value=self)

    @contextlib.contextmanager
    def _moving(self, what: str, *written: Held) -> Iterator[Meter]:
        """Gives a meter for what moves outside of steps, and records that in the end.

        Args:
            what: the method that moves it.
            written: what it writes, to be judged by what the session allows.

        Raises:
            TransferBudgetError: it would move more.
        """
        reader, planned = Reader(current_reader()), Counter()
        for each in written:
            planned.update(Plan(each.master.plan_put(self.name, reader)).bytes_by_transfer)
        check_bytes(f"{self.name}.{what}", planned, current_max_bytes())
        meter = Meter()
        try:
            yield meter
        finally:
            meter.emit(self.name)

    def _parts(self) -> Parts:
        """What a checkpoint is to hold. To be called under the lock."""
        trees = {"": self.value}
        about = {"version": self.version, "mode": self.write.mode, "pending": self._updates.pending}
        if (state := self._updates.state) is not None:
            state.check_not_lost(self.name)
            with self._moving("save") as meter:
                trees["optimizer"] = state.layout.tree.unflatten(state.master.leaves(meter))
        if (pending := self._updates.pending_leaves) is not None:
            trees["pending"] = self._layout.tree.unflatten(pending)
        return Parts(trees, about)

    def _wanted_parts(self, stored: set[str], about: dict[str, Any], partial: bool) -> Parts:
        """What is to be restored of a checkpoint.

        Args:
            stored: the parts that it has.
            about: what it knows about the variables; empty where it was written of something else.
            partial: whether what it lacks may stay as it is.

        Raises:
            TransferBudgetError: it would move more than the session allows.
        """
        wanted = Parts({"": self._held.templates()})
        same = about.get("mode") == self.write.mode
        if "pending" in stored and same:
            wanted.trees["pending"] = self._held.templates()
        # A checkpoint without a state is one of before the first push, which makes it.
        unmade = "optimizer" not in stored and (same or partial)
        apply = self.write.mode == "apply" and not unmade
        held = (self._held, *((self._updates.state,) if apply and self._updates.state else ()))
        with self._lock, self._moving("restore", *held) as meter:
            if apply:
                before = self._updates.state
                wanted.state = self._updates.state_to_restore(self._held, meter)
                self._updates.state = before  # Until all has been read.
                wanted.trees["optimizer"] = wanted.state.templates()
        return wanted

    def _put_parts(self, wanted: Parts, restored: dict[str, list[Any]]) -> None:
        """Takes what was restored. To be called under the lock.

        Args:
            wanted: as `wanted_parts` gave it, and what the checkpoint knows about the variables.
            restored: the leaves of each part; None for those that stay as they are.
        """
        about, reader = wanted.about, current_reader()
        for slot, leaf in zip(self._layout.slots, restored[""], strict=False):
            if leaf is not None:
                self._made_of.pop(slot.path, None)
        with self._moving("restore") as meter:
            if any(leaf is not None for leaf in restored[""]) or not restored[""]:
                self._master.version = max(self.version, about.get("version", 0) - 1)
                self._held.put(_filled(restored[""], self._held, meter), reader, meter)
            if (state := wanted.state) is not None:
                state.put(_filled(restored["optimizer"], state, meter), reader, meter)
                self._updates.state = state
            elif about.get("mode") == "apply":
                self._updates.state = None
        if about:
            self._updates.resume(restored.get("pending"), about["pending"])

    # ---- for the engine ------------------------------------------------------------------------

    def _plan(self, reader: Reader) -> tuple[Transfer, ...]:
        """What a call is going to move."""
        with self._lock:
            return self._master.plan(self.name, reader)

    def _take(self, reader: Reader, meter: Meter) -> Packed:
        """The value as a program takes it. To be called, and used, under the lock.

        Raises:
            VariablesError: it is lost.
        """
        self._held.check_not_lost(self.name)
        return self._master.take(reader, meter)

    def _put(self, packed: Packed, session: Any, meter: Meter) -> None:
        """Takes what a program returned for the value. To be called under the lock."""
        self._master.put(packed, session, meter)

    def _described(self) -> Packed:
        """The value as a program would take it: shapes, dtypes and shardings alone."""
        buffers = (
            jax.ShapeDtypeStruct(
                buffer.shape, buffer.dtype, sharding=buffer.sharding, weak_type=buffer.weak_type
            )
            for buffer in self._layout.buffers
        )
        return Packed(self._layout, tuple(buffers))

    def _ahead(self, reader: Reader, meter: Meter) -> None:
        """Starts to read what the next step is going to take. To be called under the lock."""
        self._master.ahead(reader, meter)

    def _check_usable(self, mesh: Mesh | None) -> None:
        """Whether a session with this mesh can use the variables.

        Raises:
            VariablesError: they lie on another one.
        """
        if mesh is not self._mesh and mesh_identity(mesh) != mesh_identity(self._mesh):
            raise VariablesError(
                "variables of another session's mesh",
                where=self.name,
                expected=_mesh_text(self._mesh),
                got=_mesh_text(mesh),
                hint="make them inside the session that uses them, or assign their value to "
                "variables made there",
            )

    @property
    def __jax_array__(self):
        """JAX looks for this in whatever is used as an array.

        Raises:
            VariablesError: always. It is no `TypeError`, which JAX would put its own words around.
        """
        raise VariablesError(_NO_TREE, where=self.name, hint=_USE_VALUE)

    if not TYPE_CHECKING:  # Type checkers say already that there is nothing of this kind.

        def _refuse(self, *_, **__):
            raise NoTreeError(_NO_TREE, where=self.name, hint=_USE_VALUE)

        __getitem__ = __setitem__ = __len__ = __array__ = _refuse  # Iteration asks for items.
        __add__ = __sub__ = __mul__ = __truediv__ = __matmul__ = __pow__ = _refuse
        __radd__ = __rsub__ = __rmul__ = __rtruediv__ = __rmatmul__ = __rpow__ = _refuse
        __floordiv__ = __mod__ = __neg__ = __abs__ = __lt__ = __le__ = __gt__ = __ge__ = _refuse

        def __getattr__(self, name):
            what = f"variables have no attribute {name!r}"
            raise NoAttributeError(what, where=vars(self).get("name"), hint=_USE_VALUE)

    def __bool__(self) -> bool:
        return True

    def __reduce__(self):
        raise VariablesError(
            "variables are neither pickled nor copied: they are one place, known to many",
            where=self.name,
            hint="use .copy(), which makes others; or pickle .value, and make Variables of it",
        )

    # ---- showing -------------------------------------------------------------------------------

    def _told(self) -> dict[str, str]:
        leaves = counted(len(self._layout.slots), "leaf")
        buffers = counted(len(self._layout.buffers), "buffer")
        told = {
            "name": repr(self.name),
            "version": str(self.version),
            "value": f"{leaves} in {buffers}, {readable_bytes(self.nbytes)}",
            "placement": str(self.placement),
        }
        if self._lock.acquire(blocking=False):  # Else a step is at work, and may have the buffers.
            if self._held.is_lost:
                told["value"] += f", {LOST}"
            self._lock.release()
        for memory, size in bytes_per_device(self._master.arrays()).items():
            told[memory] = f"{readable_bytes(size)} per device"
        if self.read != Read():
            told["read"] = str(self.read)
        if self.write != Write():
            told["write"] = str(self.write)
        return told

    def __repr__(self) -> str:
        told = self._told()
        name, version = told.pop("name"), told.pop("version")
        rest = (
            text if what in ("value", "placement", "read", "write") else f"{text} in {what}"
            for what, text in told.items()
        )
        return f"Variables({name}, version {version}, {', '.join(rest)})"

    def _repr_html_(self) -> str:
        return html_table("Variables", self._told())


def _filled(leaves: list[Any], held: Held, meter: Meter) -> list[Any]:
    """Leaves, with those of now in the place of None."""
    if all(leaf is not None for leaf in leaves):
        return leaves
    pairs = zip(leaves, held.master.leaves(meter), strict=True)
    return [now if leaf is None else leaf for leaf, now in pairs]


def _mesh_text(mesh: Mesh | None) -> str:
    return f"mesh {dict(mesh.shape)}" if mesh is not None else "no mesh"
