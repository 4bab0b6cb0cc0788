"""Decides where the leaves of a call are placed before its program runs. Moves nothing."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import (
    Mesh,
    NamedSharding,
    PartitionSpec,
    Sharding,
    SingleDeviceSharding,
)

from stepcache.calls.signature import Call, Leaf, Unreadable
from stepcache.calls.step_spec import Request, StepSpec
from stepcache.errors import PlacementError
from stepcache.jaxcompat import inspection
from stepcache.sharding import Placed, Placer, axes_of, is_in_type, quoted


def place(
    spec: StepSpec, placer: Placer | None, call: Call
) -> tuple[tuple[Leaf, ...], tuple[Placed | None, ...], tuple[Sharding | None, ...]]:
    """Places the leaves of a call that are not committed yet.

    Without a mesh, those of a call that has leaves committed to one device go there with them, as
    JAX has it: then the call has the key of one where all are committed, as what it returns is.

    Args:
        spec: the step.
        placer: the session's mesh and rules; None places nothing.
        call: the call.

    Returns:
        The leaves as the program has them; for each where the session sends it and why, or None;
        and for each where the step's `in_shardings` do, or None where they do not say.

    Raises:
        PlacementError: a leaf cannot be placed as asked.
        Unreadable: the step's `in_shardings` do not fit the call, which JAX will say.
    """
    asked = _asked_by_options(spec.options, placer, call)
    leaves = [
        leaf._replace(sharding=None) if _is_at(leaf, sharding) else leaf
        for leaf, sharding in zip(call.signature.leaves, asked, strict=True)
    ]
    placed: list[Placed | None] = [None] * len(leaves)
    if placer is not None:
        for index, leaf in enumerate(leaves):
            if leaf.sharding is None and asked[index] is None:
                path = call.paths[index]
                role = spec.parameters.role_of(path.argument)
                at = placer.place(path.slashed, leaf.shape, role)
                placed[index] = at
                leaves[index] = leaf._replace(shape=at.shape, sharding=at.sharding)
    elif not any(asked):
        leaves = _beside_committed(leaves)
    sent = (sharding if isinstance(sharding, Sharding) else None for sharding in asked)
    return tuple(leaves), tuple(placed), tuple(sent)


def _beside_committed(leaves: list[Leaf]) -> list[Leaf]:
    committed = {leaf.sharding for leaf in leaves} - {None}
    if len(committed) != 1 or not isinstance(at := committed.pop(), SingleDeviceSharding):
        return leaves
    return [
        leaf._replace(sharding=at) if leaf.sharding is None and not leaf.on_host else leaf
        for leaf in leaves
    ]


def is_elsewhere(
    mesh: Mesh | None,
    leaves: Sequence[Leaf],
    placed: Sequence[Placed | None],
    asked: Sequence[Sharding | None],
) -> bool:
    """Whether a call runs on other devices than a mesh's: the user has placed its arrays there.

    JAX runs a program on the devices of its committed arrays, which are the same for all of them.

    Args:
        mesh: of the session.
        leaves: of the call, placed.
        placed, asked: as `place` returns them.
    """
    if not isinstance(mesh, Mesh) or any(placed) or any(asked):
        return False
    committed = next((leaf.sharding for leaf in leaves if leaf.sharding is not None), None)
    return committed is not None and committed.device_set != _devices_of(mesh)


def is_committed_by_hosts(request: Request) -> bool:
    """Whether JAX commits what a call returns only as its program reads from host memory.

    The call names no mesh, device or sharding, so its outputs may follow arguments of other calls.
    """
    leaves = request.leaves
    if request.mesh is not None or not any(leaf.on_host for leaf in leaves):
        return False
    return all(leaf.sharding is None for leaf in leaves) and not any(request.asked)


@functools.lru_cache(maxsize=64)
def _devices_of(mesh: Mesh) -> frozenset:
    return frozenset(mesh.devices.flat)


_LARGE_BYTES = 1 << 20


def unnamed_batch(spec: StepSpec, placer: Placer, request: Request) -> str | None:
    """A warning for a step without a batch that replicates a large host array; None for none."""
    if spec.parameters.batch or not placer.splits_batches:
        return None
    call = request.call
    rows = zip(call.leaves, call.paths, call.signature.leaves, request.placed, strict=True)
    for value, path, leaf, placed in rows:
        if (
            isinstance(value, np.ndarray)
            and leaf.size_bytes >= _LARGE_BYTES
            and placed is not None
            and placed.rule is None
            and spec.parameters.role_of(path.argument) is None
        ):
            parameter = spec.parameters.parameter_of(path.argument)
            return (
                f"{spec.name} names no batch, so each of {placer.mesh.size} devices gets the "
                f"whole of {path.text}, {leaf} from the host. If it is a batch, @step(batch="
                f"{parameter!r}) splits it along {quoted(axes_of(placer.data_axis))}; else "
                "jax.device_put places it once, before the first call"
            )
    return None


class _Asked:
    """What an option asks of a leaf, opaque to tree operations, so that None is a leaf too."""

    __slots__ = ("sharding",)

    def __init__(self, sharding: Any):
        self.sharding = sharding


def _asked_by_options(options: dict[str, Any], placer: Placer | None, call: Call) -> list[Any]:
    """What the step's `in_shardings`, `device` or `backend` ask of each leaf; None for nothing."""
    if options.get("device") or options.get("backend"):
        return ["a device"] * len(call.leaves)
    shardings = options.get("in_shardings")
    if shardings is None:
        return [None] * len(call.leaves)

    def resolve(entry: Any) -> _Asked:
        if isinstance(entry, PartitionSpec) and placer is not None:
            return _Asked(NamedSharding(placer.mesh, entry))
        return _Asked(entry)

    prefix = tuple(shardings) if isinstance(shardings, list) else shardings
    asked = jax.tree_util.tree_map(resolve, prefix, is_leaf=lambda x: x is None)
    try:
        spread = jax.tree_util.tree_broadcast(asked, call.args, is_leaf=_is_asked)
    except ValueError:
        raise Unreadable from None
    found = [leaf.sharding for leaf in jax.tree_util.tree_leaves(spread, is_leaf=_is_asked)]
    return found + [None] * (len(call.leaves) - len(found))  # Keyword arguments come last.


def _is_asked(x: Any) -> bool:
    return isinstance(x, _Asked)


def _is_at(leaf: Leaf, sharding: Any) -> bool:
    """Whether a leaf already has the placement that an option asks for."""
    return (
        isinstance(sharding, Sharding)
        and leaf.sharding is not None
        and not is_in_type(leaf.sharding)
        and leaf.sharding.memory_kind == sharding.memory_kind
        and leaf.sharding.is_equivalent_to(sharding, len(leaf.shape))
    )


def moved_bytes(
    value: Any, given: Leaf, placed: Placed | None, asked: Sharding | None = None
) -> int:
    """Bytes that a call moves to devices of this process for a leaf of its arguments.

    Args:
        value: the leaf.
        given: as it came.
        placed: where the session sends it; None where the session leaves it.
        asked: where the step's `in_shardings` do; None where they do not say.
    """
    present: set[Any] = set()
    if given.sharding is not None:
        present = set(given.sharding.device_set)
    elif isinstance(value, jax.Array):
        present = set(value.sharding.device_set)
    target, shape = (placed.sharding, placed.shape) if placed else (asked, given.shape)
    if target is not None:
        with contextlib.suppress(ValueError):  # It does not fit the leaf, which JAX will say.
            shard = given._replace(shape=tuple(target.shard_shape(shape)))
            return shard.size_bytes * len(target.addressable_devices - present)
    return 0 if present else given.size_bytes


def check_runnable(step: str, request: Request) -> None:
    """Raises for devices that are only described: a program can be lowered for them, not run.

    Raises:
        PlacementError: some device is no device of this process's backends.
    """
    for leaf, path in zip(request.leaves, request.call.paths, strict=True):
        devices = leaf.sharding.device_set if leaf.sharding is not None else ()
        if not inspection.live_backend(devices):
            raise PlacementError(
                f"{step} cannot be warmed for devices that are not there",
                where=path.text,
                expected="devices of this process (jax.devices())",
                got=", ".join(sorted(str(device) for device in devices)[:4]),
                hint="step.lower(...).compile() compiles for another topology where JAX can",
            )
