"""`Variables`: a versioned tree that stepcache holds between steps."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Sequence
from typing import Any

import jax
from jax.sharding import Mesh, NamedSharding, Sharding
from jax.tree_util import keystr

from stepcache import jaxcompat
from stepcache.errors import VariablesError
from stepcache.sharding import Placer, current_placer, mesh_identity
from stepcache.variables import transfer
from stepcache.variables.masters import InHostMemory, Master, OnDevices, Reader
from stepcache.variables.packing import Described, Layout, Packed, layout_of
from stepcache.variables.plan import Transfer
from stepcache.variables.policy import OnHost, Placement, Read, Replicated, Sharded, Write
from stepcache.variables.shares import host_layout
from stepcache.variables.transfer import Meter

_numbers = itertools.count(1)


def any_variables() -> bool:
    """Whether this process has made any yet."""
    return Variables.made


class Variables:
    """A versioned tree of arrays that stays where it is placed between steps.

    Pass it to a step in the place of the tree: the step's function sees the tree. Named in `carry`,
    it takes the value that the step returns for it, its version is raised by one, and the same
    object comes back; else it is read only. A step that raises leaves value and version as they
    were.

    Args:
        tree: any pytree of arrays: dicts, flax modules and states, optax states, equinox modules.
            Its arrays are copied, and may be changed, donated or dropped afterwards.
        placement: where the master copy lives: `Replicated()`, `Sharded(rules)` or `OnHost(...)`.
            In a session with a mesh, leaves that were placed on it already stay as they are under
            `Replicated()`, and the session's rules apply to the others.
        read: how steps get the value where it lives in another memory.
        write: what `push` does.
        name: what to call it in plans and messages, and what its paths begin with for rules.

    Raises:
        VariablesError: a leaf is no array.
        PlacementError: a leaf cannot be placed as asked.

    Small leaves of one dtype and sharding share one buffer, which the program slices inside XLA, as
    optimizers and collectives do with flat buckets (Rajbhandari et al., 2020). It is thread-safe: a
    reader sees one whole version.
    """

    made = False

    def __init__(
        self,
        tree: Any,
        *,
        placement: Placement = Replicated(),
        read: Read = Read(),
        write: Write = Write(),
        name: str | None = None,
    ):
        Variables.made = True
        self.number = next(_numbers)
        self.name = name or f"variables{self.number}"
        self.placement, self.read, self.write = placement, read, write
        self.lock = threading.RLock()
        placer = current_placer()
        self.mesh: Mesh | None = placer.mesh if placer else None
        named, structure = jax.tree_util.tree_flatten_with_path(tree)
        leaves = [leaf for _, leaf in named]
        described = [self._describe(keys, leaf, placer) for keys, leaf in named]
        self.layout: Layout = layout_of(structure, described)
        self._master: Master = self._master_of(transfer.pack(leaves, self.layout))

    def _master_of(self, packed: Packed) -> Master:
        if not isinstance(self.placement, OnHost):
            return OnDevices(packed)
        kind = self.placement.memory_kind
        layout = host_layout(self.layout, self.mesh, kind, self.name)
        return InHostMemory(packed, layout, self.read)

    # ---- where leaves belong ------------------------------------------------------------------

    def _describe(self, keys: tuple, leaf: Any, placer: Placer | None) -> Described:
        path = keystr(keys, simple=True, separator="/")
        try:
            aval: Any = jaxcompat.abstract(leaf)
        except (TypeError, ValueError):
            aval = None
        if (
            aval is None
            or isinstance(leaf, jax.ShapeDtypeStruct | jaxcompat.Tracer)
            or not jaxcompat.is_array_type(aval)
        ):
            raise VariablesError(
                "a leaf is no array",
                where=self._where(path),
                expected="a jax.Array, a numpy array or a number",
                got=type(leaf).__name__,
                hint="keep what is not an array outside, or in the tree's static parts",
            )
        sharding = self._sharding(path, leaf, aval.shape, placer)
        return Described(path, aval.shape, aval.dtype, aval.weak_type, sharding)

    def _where(self, path: str) -> str:
        return f"{self.name}/{path}" if path else self.name

    def _sharding(
        self, path: str, leaf: Any, shape: tuple[int, ...], placer: Placer | None
    ) -> Sharding | None:
        given = leaf.sharding if isinstance(leaf, jax.Array) and leaf.committed else None
        if placer is None:
            if isinstance(self.placement, Sharded):
                raise VariablesError(
                    "Sharded(rules) splits over a mesh, and there is none",
                    where=self.name,
                    hint="make the variables inside `with Session(mesh)`",
                )
            return given
        if isinstance(self.placement, Sharded):
            placer = Placer(placer.mesh, self.placement.rules, None)
        elif given is not None and _is_on(given, placer.mesh):
            return given
        return placer.place(self._where(path), shape, carried=True).sharding

    # ---- looking -------------------------------------------------------------------------------

    @property
    def version(self) -> int:
        """How often the value has been written; 0 for the one it was made with."""
        return self._master.version

    @property
    def nbytes(self) -> int:
        """Bytes of the value, however many devices hold it."""
        return self.layout.size_bytes

    @property
    def value(self) -> Any:
        """The tree, as it is now: a whole version, in arrays that no later step touches."""
        if not self.lock.acquire(blocking=False):
            # A step on another thread has it, and may be building its program for minutes.
            try:
                return self._copied()
            except RuntimeError:  # The step has taken these buffers for its own.
                self.lock.acquire()
        try:
            leaves, shared = transfer.unpack(self._master.current())
            self._master.lend(shared)
        finally:
            self.lock.release()
        return self.layout.tree.unflatten(leaves)

    def _copied(self) -> Any:
        leaves, shared = transfer.unpack(self._master.current())
        own = {id(array) for array in shared}
        leaves = [transfer.copy(leaf) if id(leaf) in own else leaf for leaf in leaves]
        return self.layout.tree.unflatten(leaves)

    def block_until_ready(self) -> Variables:
        """Waits until the value has been computed."""
        with self.lock:
            jax.block_until_ready(self._master.arrays())
        return self

    # ---- writing -------------------------------------------------------------------------------

    def assign(self, tree: Any) -> None:
        """Takes another value.

        Args:
            tree: of the same structure, shapes and dtypes.

        Raises:
            VariablesError: a leaf is missing or new, or has another shape or dtype.
        """
        named, structure = jax.tree_util.tree_flatten_with_path(tree)
        leaves = self._checked(named, structure)
        packed = transfer.pack(leaves, self.layout)
        with self.lock:
            self._master.put(packed, _session(), Meter())

    def _checked(self, named: Sequence[tuple[tuple, Any]], structure: Any) -> list[Any]:
        given = {keystr(keys, simple=True, separator="/"): leaf for keys, leaf in named}
        if structure != self.layout.tree:
            mine = {slot.path for slot in self.layout.slots}
            missing, new = sorted(mine - given.keys()), sorted(given.keys() - mine)
            raise VariablesError(
                "a value of another structure cannot be assigned",
                where=self._where((missing or new or [""])[0]),
                expected=f"a leaf {missing[0]!r}" if missing else "the structure it was made with",
                got=f"a leaf {new[0]!r}" if new else "none" if missing else str(structure),
            )
        leaves = []
        for slot, (_, leaf) in zip(self.layout.slots, named, strict=True):
            aval = _abstract(leaf)
            if aval is None or (aval.shape, aval.dtype) != (slot.shape, slot.dtype):
                raise VariablesError(
                    "a value of another type cannot be assigned",
                    where=self._where(slot.path),
                    expected=f"{slot.dtype}{list(slot.shape)}",
                    got=f"{aval.dtype}{list(aval.shape)}" if aval else type(leaf).__name__,
                    hint="cast or reshape it first",
                )
            leaves.append(leaf)
        return leaves

    # ---- for the engine ------------------------------------------------------------------------

    def plan(self, reader: Reader) -> tuple[Transfer, ...]:
        """What a call is going to move."""
        with self.lock:
            return self._master.plan(self.name, reader)

    def take(self, reader: Reader, meter: Meter) -> Packed:
        """The value as a program takes it. To be called, and used, under the lock."""
        return self._master.take(reader, meter)

    def put(self, packed: Packed, session: Any, meter: Meter) -> None:
        """Takes what a program returned for the value. To be called under the lock."""
        self._master.put(packed, session, meter)

    def described(self) -> Packed:
        """The value as a program would take it: shapes, dtypes and shardings alone."""
        buffers = (
            jax.ShapeDtypeStruct(
                buffer.shape, buffer.dtype, sharding=buffer.sharding, weak_type=buffer.weak_type
            )
            for buffer in self.layout.buffers
        )
        return Packed(tuple(buffers), self.layout)

    def ahead(self, meter: Meter) -> None:
        """Starts to read what the next step is going to take. To be called under the lock."""
        self._master.ahead(meter)

    def check_usable(self, mesh: Mesh | None) -> None:
        """Whether a session with this mesh can use the variables.

        Raises:
            VariablesError: they lie on another one.
        """
        if mesh is not self.mesh and mesh_identity(mesh) != mesh_identity(self.mesh):
            raise VariablesError(
                "variables of another session's mesh",
                where=self.name,
                expected=_mesh_text(self.mesh),
                got=_mesh_text(mesh),
                hint="make them inside the session that uses them, or assign their value to "
                "variables made there",
            )

    # ---- showing -------------------------------------------------------------------------------

    def __repr__(self) -> str:
        leaves, buffers = len(self.layout.slots), len(self.layout.buffers)
        rows = [
            f"Variables({self.name!r}, version {self.version}, {leaves} leaves in {buffers} "
            f"buffers, {_bytes_text(self.nbytes)}, {self.placement}"
        ]
        if self.read != Read():
            rows.append(str(self.read))
        if self.write != Write():
            rows.append(str(self.write))
        return ", ".join(rows) + ")"


def _session() -> Any:
    """The session of this thread, as those who read and write are told apart; None outside."""
    token = jaxcompat.session_context.value
    return token.reader if token is not None else None


def _abstract(leaf: Any) -> Any:
    try:
        return jaxcompat.abstract(leaf)
    except (TypeError, ValueError):
        return None


def _is_on(sharding: Sharding, mesh: Mesh) -> bool:
    return isinstance(sharding, NamedSharding) and sharding.device_set == set(mesh.devices.flat)


def _mesh_text(mesh: Mesh | None) -> str:
    return f"mesh {dict(mesh.shape)}" if mesh is not None else "no mesh"


def _bytes_text(size: int) -> str:
    value = float(size)
    for unit in ("B", "kB", "MB"):
        if value < 1000:
            return f"{value:.4g} {unit}"
        value /= 1000
    return f"{value:.4g} GB"
