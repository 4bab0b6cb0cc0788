"""What the leaves of a tree are, where they are placed, and whether another tree matches."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.core
from jax.sharding import Mesh, NamedSharding, Sharding
from jax.tree_util import keystr

from stepcache import jaxcompat
from stepcache.errors import VariablesError
from stepcache.sharding import Placer, Rules, devices_of
from stepcache.variables.packing import Buffer, Layout, Slot
from stepcache.variables.policy import OnHost, Placement, Replicated, Sharded


def joined(name: str, path: str) -> str:
    """The path of a leaf below a name, as rules read it and errors show it."""
    return f"{name}/{path}" if path else name


def named_leaves(tree: Any) -> tuple[list[tuple[str, Any]], Any]:
    """The leaves of a tree with their paths, `layer/w`, and the tree structure."""
    leaves, structure = jax.tree_util.tree_flatten_with_path(tree)
    return [(keystr(keys, simple=True, separator="/"), leaf) for keys, leaf in leaves], structure


class Placing(NamedTuple):
    """What the leaves of some variables are called, and how they are placed."""

    name: str  # In messages.
    prefix: str = ""  # With which the paths for rules begin.
    placement: Placement = Replicated()
    placer: Placer | None = None  # Of the session in which the variables were made.
    pack: bool = False

    @property
    def on_device(self) -> Replicated | Sharded:
        """The placement on the devices, of a value that may be kept elsewhere."""
        placement = self.placement
        return placement.on_device if isinstance(placement, OnHost) else placement

    def of_leaves(self) -> Placer | None:
        """What places the leaves on devices: the session's mesh, with the rules of `Sharded`."""
        if not isinstance(self.on_device, Sharded):
            return self.placer
        if self.placer is None:
            what = "Sharded(rules) splits over a mesh, and there is none"
            hint = "make the variables inside `with Session(mesh)`"
            raise VariablesError(what, where=self.name, hint=hint)
        return Placer(self.placer.mesh, self.on_device.rules, None)


class Parameters:
    """The parameters of an optimizer, beside which its state is placed."""

    def __init__(self, prefix: str, slots: Sequence[Slot]):
        self._prefix, self._slots = prefix, {slot.path: slot for slot in slots}

    def beside(self, placer: Placer, path: str, shape: tuple[int, ...]) -> Sharding | None:
        """Where a leaf of the optimizer's state is placed, as `Sharded` says."""
        parameter = self._parameter_of(path)
        rules = list(placer.rules.rules) if shape else []
        if parameter is not None:
            of_parameter = joined(self._prefix, parameter.path)
            rules = [rule for rule in rules if not re.search(rule[0], of_parameter)]
        own = joined(joined(self._prefix, "optimizer"), path)
        placed = Placer(placer.mesh, Rules(rules), None).place(own, shape, "carry")
        if parameter is not None and placed.rule is None and parameter.shape == shape:
            return parameter.sharding
        return placed.sharding

    def _parameter_of(self, path: str) -> Slot | None:
        """The parameter that a leaf belongs to: the one whose path its own ends with.

        optax makes moments by mapping over the parameters: that of `a/w` is at `0/mu/a/w`.
        """
        keys = path.split("/")
        ends = ("/".join(keys[start:]) for start in range(len(keys) + 1))
        return next((self._slots[end] for end in ends if end in self._slots), None)


def describe(
    placing: Placing, tree: Any, parameters: Parameters | None = None
) -> tuple[Any, list[Any], tuple[Slot, ...]]:
    """The structure of a tree, its leaves, and what they are and where they go on the devices.

    Raises `VariablesError` for a leaf that is no array, or is to be split without a mesh.
    """
    placer = placing.of_leaves()
    devices = set(devices_of(placer.mesh)) if placer is not None else set()
    named, structure = named_leaves(tree)
    described = []
    for path, leaf in named:
        aval = check_array(leaf, joined(placing.name, path))
        sharding = leaf.sharding if isinstance(leaf, jax.Array) and leaf.committed else None
        if sharding is not None and isinstance(placing.placement, OnHost):
            device = min(sharding.device_set, key=lambda each: each.id)
            sharding = sharding.with_memory_kind(device.default_memory().kind)
        is_placed = isinstance(sharding, NamedSharding) and sharding.device_set == devices
        if placer is not None and (isinstance(placing.on_device, Sharded) or not is_placed):
            if parameters is not None:
                sharding = parameters.beside(placer, path, aval.shape)
            else:
                path_for_rules = joined(placing.prefix, path)
                sharding = placer.place(path_for_rules, aval.shape, "carry").sharding
        described.append(Slot(path, aval.shape, aval.dtype, aval.weak_type, sharding))
    return structure, [leaf for _, leaf in named], tuple(described)


def check_array(leaf: Any, where: str) -> Any:
    """The shape and type of a leaf, as JAX's aval. Raises `VariablesError` if it has none."""
    if (aval := abstract(leaf)) is None:
        dtype = getattr(leaf, "dtype", None)  # Such as ">i4", which JAX does not have.
        got = type(leaf).__name__ + (f" of dtype {dtype!s}" if dtype is not None else "")
        expected = "a jax.Array, a numpy array or a number of at most 64 bits"
        hint = "keep what is not an array outside, or in the tree's static parts"
        what = "a leaf is not an array"
        raise VariablesError(what, where=where, expected=expected, got=got, hint=hint)
    return aval


def abstract(leaf: Any) -> Any:
    """The shape and type of a leaf, as JAX's aval; None if it is no array with a value."""
    if isinstance(leaf, jax.ShapeDtypeStruct | jaxcompat.Tracer):
        return None
    try:
        aval = jaxcompat.abstract(getattr(leaf, "_stand_in", leaf))  # One of another process.
    except (TypeError, ValueError, OverflowError):
        return None
    return aval if type(aval) is jax.core.ShapedArray else None


def matching(name: str, layout: Layout, tree: Any, what: str, *, dtypes: bool = True) -> list[Any]:
    """The leaves of another tree. Raises `VariablesError` unless structure, shapes and, if asked,
    dtypes are the same.
    """
    leaves, structure = jax.tree_util.tree_flatten(tree)
    if structure != layout.tree:
        own, given = (
            {slot.path for slot in layout.slots},
            {path for path, _ in named_leaves(tree)[0]},
        )
        missing, new = sorted(own - given), sorted(given - own)
        raise VariablesError(
            f"a value of another structure cannot be {what}",
            where=joined(name, (missing or new or [""])[0]),
            expected=f"a leaf {missing[0]!r}" if missing else "the structure it was made with",
            got=f"a leaf {new[0]!r}" if new else "none" if missing else str(structure),
        )
    for slot, leaf in zip(layout.slots, leaves, strict=True):
        aval = abstract(leaf)
        if aval is None or aval.shape != slot.shape or (dtypes and aval.dtype != slot.dtype):
            raise VariablesError(
                f"a value of another type cannot be {what}",
                where=joined(name, slot.path),
                expected=f"{slot.dtype}{list(slot.shape)}",
                got=f"{aval.dtype}{list(aval.shape)}" if aval else type(leaf).__name__,
                hint="cast or reshape it first",
            )
    return leaves


def check_not_tracing(what: str, where: str) -> None:
    """Raises `VariablesError` inside a transformation, where arrays have no values."""
    if jaxcompat.is_tracing():
        raise VariablesError(
            f"{what} inside a transformation, where arrays have no values yet",
            where=where,
            hint="do it outside of jax.jit, jax.grad, jax.vmap and the like; a step writes what it "
            "carries",
        )


def check_not_constant(where: str) -> None:
    """Raises `VariablesError` where a transformation would keep what is read now as a constant."""
    if jaxcompat.keeps_what_is_read():
        raise VariablesError(
            "the value is read inside a transformation, which would keep it as a constant and not "
            "see later writes",
            where=where,
            hint="pass the variables as an argument of the step, or .value as an argument of the "
            "function that is transformed",
        )


def mesh_text(mesh: Mesh | None) -> str:
    return f"mesh {dict(mesh.shape)}" if mesh is not None else "no mesh"


def stand_in(buffer: Buffer, on_host: Buffer | None = None) -> jax.ShapeDtypeStruct:
    """Returns a stand-in for a buffer, which may lie on the host."""
    if on_host is None:
        return jaxcompat.stand_in(buffer.shape, buffer.dtype, buffer.weak_type, buffer.sharding)
    there = None if buffer.sharding is None else on_host.sharding
    shape, dtype, weak_type = on_host.shape, on_host.dtype, on_host.weak_type
    return jaxcompat.stand_in(shape, dtype, weak_type, there, on_host=True)
