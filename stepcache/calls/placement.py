"""Decides the placement of a call's leaves. Moves nothing."""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec, Sharding, SingleDeviceSharding

from stepcache import jaxcompat
from stepcache.calls.context import Scope
from stepcache.calls.pad import Pad
from stepcache.calls.signature import Call, Leaf, Unreadable
from stepcache.calls.step_spec import Request, StepSpec
from stepcache.errors import PlacementError
from stepcache.sharding import Placed, Placer, axes_of, is_in_type, quoted


def place(
    spec: StepSpec, placer: Placer | None, call: Call
) -> tuple[tuple[Leaf, ...], tuple[Placed | None, ...], tuple[Sharding | None, ...]]:
    """Decides the placement of the leaves that are not committed yet.

    Without a mesh, uncommitted leaves follow committed ones to their device, as in JAX. They are
    then committed in the signature too: a step's outputs, which are committed, find the same
    program. Without a placer nothing else is placed.

    Returns:
        The leaves as placed; for each leaf its place by the session, and the reason, or None; and
        for each leaf its sharding by the step's `in_shardings`, or None.

    Raises `PlacementError` if a leaf cannot be placed by its rule, and `Unreadable` if the step's
    `in_shardings` do not match the call, for which JAX will raise an error.
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
        for pad in spec.parameters.pads:
            _place_mask(pad, call, leaves, placed)
    elif not any(asked):
        leaves = _beside_committed(leaves)
    sent = (sharding if isinstance(sharding, Sharding) else None for sharding in asked)
    return tuple(leaves), tuple(placed), tuple(sent)


def _place_mask(pad: Pad, call: Call, leaves: list[Leaf], placed: list[Placed | None]) -> None:
    """Places the mask of an axis, unless a rule does, as the session places the axis.

    Raises `PaddingError` for `Pad.count` where this process of a pod passes its part of the axis.
    """
    axis = slice(pad.axis, pad.axis + 1)
    for path, leaf, at in zip(call.paths, call.signature.leaves, placed, strict=True):
        if at is not None and pad.covers(path.slashed) and leaf.shape[axis]:
            break
    else:  # The call passes no array, or the user has placed them, and passes the whole.
        return
    is_part = at.shape[axis] != leaf.shape[axis]  # The mask then covers the parts of all processes.
    if pad.count is not None and is_part:
        raise pad._error(
            "count= needs the whole axis, and each process passes its part",
            hint="take mask= instead, whose sum is the number of all rows",
        )
    sharding = NamedSharding(at.sharding.mesh, PartitionSpec(*at.sharding.spec[axis]))
    for index, (mask, own) in enumerate(zip(call.paths, placed, strict=True)):
        if mask.argument == pad.mask and own is not None and (is_part or own.rule is None):
            placed[index] = Placed(sharding, at.shape[axis], f"mask of {path.text}: {at.why}")
            leaves[index] = leaves[index]._replace(shape=at.shape[axis], sharding=sharding)


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
    """Returns whether the user has placed the arrays of a call on other devices than the mesh's.

    `leaves`, `placed` and `asked` are results of `place`.
    """
    if not isinstance(mesh, Mesh) or any(placed) or any(asked):
        return False
    committed = next((leaf.sharding for leaf in leaves if leaf.sharding is not None), None)
    everywhere = NamedSharding(mesh, PartitionSpec())
    return committed is not None and committed.device_set != everywhere.device_set


def is_committed_by_hosts(request: Request) -> bool:
    """Returns whether JAX commits a call's outputs only because an argument is in host memory.

    The call names no mesh, device or sharding, so its outputs may follow arguments of other calls.
    """
    leaves = request.leaves
    if request.mesh is not None or not any(leaf.on_host for leaf in leaves):
        return False
    return all(leaf.sharding is None for leaf in leaves) and not any(request.asked)


def is_at_default(leaves: Sequence[Leaf], asked: Sequence[Sharding | None]) -> bool:
    """Returns whether a call without a mesh is committed to the device where it would run anyway.

    All of its arrays lie there, by themselves or beside the others, in the device's own memory.
    """
    if not jaxcompat.PRIVATE_API or any(asked) or jax.process_count() > 1:
        return False
    shardings = {leaf.sharding for leaf in leaves if leaf.sharding is not None}
    if len(shardings) != 1 or any(leaf.on_host or leaf.layout is not None for leaf in leaves):
        return False
    (at,) = shardings
    device = jaxcompat.default_device()
    return (
        isinstance(at, SingleDeviceSharding)
        and at.device_set == {device}
        and at.memory_kind in (None, device.default_memory().kind)
        and not jaxcompat.has_concrete_mesh()
    )


_LARGE_BYTES = 1 << 20


def unnamed_batch(spec: StepSpec, placer: Placer, request: Request) -> str | None:
    """Returns a warning if a step without a batch replicates a large host array, else None."""
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
                f"{spec.name} names no batch, so {path.text}, {leaf} on the host, is copied to "
                f"each of {placer.mesh.size} devices. If it is a batch, @step(batch={parameter!r}) "
                f"splits it along {quoted(axes_of(placer.data_axis))}; otherwise jax.device_put "
                "places it once, before the first call"
            )
    return None


def _asked_by_options(options: dict[str, Any], placer: Placer | None, call: Call) -> list[Any]:
    """Returns for each leaf what `in_shardings`, `device` or `backend` say of it, or None."""
    if options.get("device") or options.get("backend"):
        return ["a device"] * len(call.leaves)
    shardings = options.get("in_shardings")
    asked: list[Any] = []

    def ask(entry: Any, part: Any) -> None:
        if isinstance(entry, PartitionSpec) and placer is not None:
            entry = NamedSharding(placer.mesh, entry)
        asked.extend([entry] * len(jax.tree_util.tree_leaves(part)))

    prefix = tuple(shardings) if isinstance(shardings, list) else shardings
    try:
        jax.tree_util.tree_map(ask, prefix, call.args, is_leaf=lambda entry: entry is None)
    except ValueError:
        raise Unreadable from None
    return asked + [None] * (len(call.leaves) - len(asked))  # Keyword arguments come last.


def _is_at(leaf: Leaf, sharding: Any) -> bool:
    """Returns whether a leaf has the placement of an option already."""
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
    """Returns how many bytes a call moves to devices of this process for a leaf.

    `given` is the leaf before placement; `placed` and `asked` are as `place` returns them.
    """
    at = given.sharding or getattr(value, "sharding", None)
    present = set(at.device_set) if at is not None else set()
    target, shape = (placed.sharding, placed.shape) if placed else (asked, given.shape)
    if target is not None:
        with contextlib.suppress(ValueError):  # It does not fit the leaf, which JAX will say.
            shard = given._replace(shape=tuple(target.shard_shape(shape)))
            return shard.size_bytes * len(target.addressable_devices - present)
    return 0 if present else given.size_bytes


def check_runnable(step: str, request: Request) -> None:
    """Checks that a call's devices exist. For devices of a topology, programs can only be lowered.

    Raises `PlacementError` for a device of no backend of this process.
    """
    for leaf, path in zip(request.leaves, request.call.paths, strict=True):
        devices = leaf.sharding.device_set if leaf.sharding is not None else ()
        if not jaxcompat.live_backend(devices):
            raise PlacementError(
                f"{step} cannot be warmed for devices that do not exist here",
                where=path.text,
                expected="devices of this process (jax.devices())",
                got=", ".join(sorted(str(device) for device in devices)[:4]),
                hint="step.lower(...).compile() compiles for another topology if JAX can",
            )


def check_budget(
    scope: Scope, spec: StepSpec, request: Request | None, planned: Mapping[str, int] | None = None
) -> None:
    """Raises `TransferBudgetError` for a call that would move more than its session allows.

    `request` is the call of a step of `spec`; None if it is unknown. `planned` is what its
    `Variables` move.
    """
    if scope.max_step_bytes is None:
        return
    from stepcache.variables.plan import check_bytes

    needed = Counter(planned)
    if request is not None:
        call, buffers = request.call, spec.buffers(request.call)
        rows = zip(call.leaves, call.signature.leaves, request.placed, request.asked, strict=True)
        for number, (path, row) in enumerate(zip(call.paths, rows, strict=True)):
            if number not in buffers:
                needed[path.text] += moved_bytes(*row)
    check_bytes(spec.name, needed, scope.max_step_bytes)
