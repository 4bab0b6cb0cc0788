"""Meshes, rules, and where a leaf of a call belongs: the sharding half of a step's placement.

Nothing here moves an array.
"""

from __future__ import annotations

import functools
import math
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding, PartitionSpec, Sharding

from stepcache import jaxcompat
from stepcache.errors import OptionError, PlacementError
from stepcache.units import counted

DataAxis = str | tuple[str, ...] | None
Role = Literal["carry", "batch", "batches"] | None


def devices_of(mesh: Mesh | AbstractMesh | None) -> tuple:
    """The devices of a mesh in order; none of one that other processes have."""
    return tuple(mesh.devices.flat) if isinstance(mesh, Mesh) else ()


def mesh_identity(mesh: Mesh | AbstractMesh | None) -> tuple:
    """What makes two meshes the same to a program: devices in order, axes, sizes and types."""
    if mesh is None:
        return ()
    devices = tuple((device.platform, device.id) for device in devices_of(mesh))
    return (tuple(mesh.shape.items()), tuple(str(kind) for kind in mesh.axis_types), devices)


def processes_of(devices: Iterable) -> tuple[int, ...]:
    """The processes that own some devices, in order."""
    return tuple(sorted({device.process_index for device in devices}))


@functools.lru_cache(maxsize=256)
def parts_along(mesh: Mesh, axes: tuple[str, ...]) -> int:
    """How many processes' equal parts make a dimension that is split over some axes of a mesh."""
    if len(processes_of(devices_of(mesh))) < 2:
        return 1
    total = math.prod(mesh.shape[axis] for axis in axes)
    held: dict[int, set[int]] = {}
    sharding = NamedSharding(mesh, PartitionSpec(axes))
    for device, (index,) in sharding.devices_indices_map((total,)).items():
        held.setdefault(device.process_index, set()).add(index.start or 0)
    counts = {len(starts) for starts in held.values()}
    if len(counts) > 1:
        raise PlacementError(
            "the processes of the mesh hold unequal numbers of shards",
            where=f"mesh axis {quoted(axes)}",
            expected="the same number of shards on each process",
            got=", ".join(f"rank {rank}: {len(starts)}" for rank, starts in sorted(held.items())),
            hint="give each process as many devices; jax.make_mesh orders them in this way",
        )
    return total // counts.pop()


def is_in_type(sharding: Sharding | None) -> bool:
    """Whether a sharding is part of the array's type, as on the Explicit axes of a mesh."""
    return isinstance(sharding, NamedSharding) and any(
        kind is not AxisType.Auto for kind in sharding.mesh.axis_types
    )


def axes_of(entry: object) -> tuple[str, ...]:
    """The mesh axes that one entry of a `PartitionSpec` names."""
    if entry is None:
        return ()
    return tuple(entry) if isinstance(entry, tuple) else (str(entry),)


def quoted(axes: Iterable[str]) -> str:
    """The names of mesh axes, as people read them: `'data' × 'model'`."""
    return " × ".join(map(repr, axes))


class Rules:
    """An ordered list of (path regex, `PartitionSpec`), which places the leaves of a call.

    The regex is searched (`re.search`) in the path of a leaf, `argument/key/…`, with every key and
    index joined by `/`; the first match wins.

    Args:
        rules: pairs of a regex and a `PartitionSpec`.

    Raises:
        OptionError: an element that is not such a pair, or a regex that does not compile.

    Shardings by name, outside of the model, as in T5X and MaxText.
    """

    __slots__ = ("_patterns", "rules")

    def __init__(self, rules: Iterable[tuple[str, PartitionSpec]] = ()):
        checked = []
        for number, rule in enumerate(rules):
            if not (isinstance(rule, Sequence) and len(rule) == 2 and isinstance(rule[0], str)):
                raise OptionError(
                    "a rule is a pair of a regex and a PartitionSpec",
                    where=f"rule {number}",
                    got=repr(rule),
                    hint='Rules([("kernel", PartitionSpec(None, "model"))])',
                )
            pattern, spec = rule
            where = f"rule {number}, {pattern!r}"
            if not isinstance(spec, PartitionSpec):
                what = "the second half of a rule is a jax.sharding.PartitionSpec"
                got = f"{spec!r} of type {type(spec).__name__}"
                raise OptionError(what, where=where, got=got)
            if PartitionSpec.UNCONSTRAINED in spec:
                what = "a rule places a leaf, so its spec cannot leave a dimension unconstrained"
                raise OptionError(what, where=where, got=str(spec))
            try:
                compiled = re.compile(pattern)
            except re.error as error:
                what = "the regex of a rule does not compile"
                raise OptionError(what, where=where, got=str(error)) from None
            checked.append(((pattern, spec), compiled))
        self.rules = tuple(rule for rule, _ in checked)
        self._patterns = tuple(compiled for _, compiled in checked)

    def match(self, path: str) -> int | None:
        """The index of the first rule whose regex is found in `path`."""
        for index, pattern in enumerate(self._patterns):
            if pattern.search(path):
                return index
        return None

    def anchor(self, index: int) -> str | None:
        """The argument that a rule is anchored at: `prompt` for `^prompt/…`, else None."""
        found = re.match(r"\^(\w+)", self.rules[index][0])
        return found.group(1) if found else None

    def __len__(self) -> int:
        return len(self.rules)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Rules) and self.rules == other.rules

    def __hash__(self) -> int:
        return hash(self.rules)

    def __repr__(self) -> str:
        return f"Rules({list(self.rules)!r})"


class Placed(NamedTuple):
    """Where a leaf goes, and which rule or default says so."""

    sharding: NamedSharding
    shape: tuple[int, ...]  # Of the whole, of which a process of a pod may hand in a part.
    why: str  # The role of its argument, and the rule or default.
    rule: int | None = None  # The index of the rule, if it was one.


@dataclass(frozen=True, slots=True)
class Placer:
    """A mesh with the rules and the data axis by which leaves are placed on it."""

    mesh: Mesh
    rules: Rules
    data_axis: DataAxis

    def __post_init__(self):
        for pattern, spec in self.rules.rules:
            for axis in (axis for entry in spec for axis in axes_of(entry)):
                self._check_axis(axis, f"rule {pattern!r}, {spec}")
        for axis in axes_of(self.data_axis):
            self._check_axis(axis, f"data_axis={self.data_axis!r}")

    def _check_axis(self, axis: str, where: str) -> None:
        if axis not in self.mesh.shape:
            raise PlacementError(
                f"the mesh has no axis {axis!r}",
                where=where,
                expected=f"one of {', '.join(map(repr, self.mesh.shape))}",
                got=repr(axis),
                hint="name an axis of the mesh, or add the axis where the mesh is made"
                + (" (data_axis=None replicates)" if where.startswith("data") else ""),
            )

    def place(self, path: str, shape: tuple[int, ...], role: Role) -> Placed:
        """Where a leaf belongs, by its path, `argument/key/…`, its shape and its argument's role.

        In a pod, each process hands in its part of a batch along the data axis, and the whole along
        all others; of everything else, the whole.
        """
        index = self.rules.match(path)
        spec = PartitionSpec()
        if index is not None:
            pattern, spec = self.rules.rules[index]
            why = f"{role}, rule {pattern!r}" if role else f"rule {pattern!r}"
        elif role not in ("batch", "batches"):
            why = f"{role}, replicated" if role else "no role: replicated"
        elif len(shape) <= (stacked := role == "batches") or self.data_axis is None:
            why = f"{role}, {'data_axis=None' if shape else 'scalar'}: replicated"
        else:  # The first dimension of several batches counts them.
            spec = PartitionSpec(*(None,) * stacked, self.data_axis)
            why = f"{role}, split along {quoted(axes_of(self.data_axis))}"
        whole = self._whole(shape, spec) if role in ("batch", "batches") else shape
        self._check_divides(path, whole, spec, index)
        return Placed(self._sharding(spec, shape), whole, why, index)

    @property
    def splits_batches(self) -> bool:
        """Whether a batch is split over more than one device."""
        return math.prod(self.mesh.shape[axis] for axis in axes_of(self.data_axis)) > 1

    @property
    def own_parts(self) -> int:
        """The number of parts that this process splits its part of a batch into."""
        axes = axes_of(self.data_axis)
        return math.prod(self.mesh.shape[axis] for axis in axes) // parts_along(self.mesh, axes)

    def _whole(self, shape: tuple[int, ...], spec: PartitionSpec) -> tuple[int, ...]:
        data_axes = set(axes_of(self.data_axis))
        entries = [axes_of(entry) for entry in spec] + [()] * (len(shape) - len(spec))
        return tuple(
            size * parts_along(self.mesh, axes) if data_axes & set(axes) else size
            for size, axes in zip(shape, entries, strict=False)
        )

    def _sharding(self, spec: PartitionSpec, shape: tuple[int, ...]) -> NamedSharding:
        sharding = NamedSharding(self.mesh, spec)
        if is_in_type(sharding):
            # A type spells every dimension out; so a leaf that leaves a step comes back the same.
            padded = PartitionSpec(*spec, *(None,) * (len(shape) - len(spec)))
            return NamedSharding(self.mesh, padded)
        return sharding

    def _check_divides(
        self, path: str, shape: tuple[int, ...], spec: PartitionSpec, rule: int | None
    ) -> None:
        by = "a batch" if rule is None else f"rule {self.rules.rules[rule][0]!r}"
        if len(spec) > len(shape):
            what = f"{spec} has more dimensions than the leaf that {by} would place"
            expected = f"at least {counted(len(spec), 'dimension')}"
            got = f"shape {list(shape)}"
            hint = "narrow the rule's regex, or put a rule for this path before it"
            raise PlacementError(what, where=path, expected=expected, got=got, hint=hint)
        for dimension, (size, entry) in enumerate(zip(shape, spec, strict=False)):
            axes = axes_of(entry)
            parts = math.prod(self.mesh.shape[axis] for axis in axes)
            if size % parts:
                names = quoted(axes)
                raise PlacementError(
                    f"dimension {dimension} is not divisible by mesh axis {names}, "
                    f"over which {by} {'is split' if rule is None else 'splits it'}",
                    where=path,
                    expected=f"a multiple of {parts}, the size of {names}",
                    got=f"size {size}, in shape {list(shape)}",
                    hint=("let the step pad it, pad=sc.Pad(…)" if rule is None else "pad it")
                    + f"; or give this path a rule of its own, such as "
                    f'("{re.escape(path)}", PartitionSpec()) to replicate it',
                )


def current_placer() -> Placer | None:
    """The mesh and rules of the innermost session of this thread; None outside of one."""
    session = jaxcompat.entered_session()
    return session.placer if session is not None else None


def current_reader() -> object | None:
    """Identifies the innermost session of this thread as a reader and writer of variables."""
    return jaxcompat.entered_session()
