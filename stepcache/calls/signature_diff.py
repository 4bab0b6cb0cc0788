"""Differences of signatures: their distance, and the changes that explain a miss."""

from __future__ import annotations

import numbers
from collections.abc import Sequence
from itertools import islice
from operator import ne
from typing import Any

import numpy as np
from jax.sharding import NamedSharding, Sharding

from stepcache import jaxcompat
from stepcache.calls.signature import (
    AttributePath,
    Call,
    Leaf,
    Path,
    Signature,
    Static,
    short_sharding,
    shorten,
)
from stepcache.events import Change
from stepcache.units import counted, text_of

_LEAVES_GRADED = 16


def distance(a: Signature, b: Signature) -> int:
    """Returns the distance of two signatures, 0 if they are equal. Trees count more than leaves."""
    statics = len(set(a.statics) ^ set(b.statics))
    if a.tree != b.tree:
        return 1_000_000 + 1_000 * abs(len(a.leaves) - len(b.leaves)) + statics
    differing = [i for i, differs in enumerate(map(ne, a.leaves, b.leaves)) if differs]
    graded = sum(_leaf_distance(a.leaves[i], b.leaves[i]) for i in differing[:_LEAVES_GRADED])
    return statics + graded + len(differing)


def _leaf_distance(a: Leaf, b: Leaf) -> int:
    axes = sum(map(ne, a.shape, b.shape)) if len(a.shape) == len(b.shape) else 10
    return axes + 10 * sum(map(ne, a[1:], b[1:]))


def diff(
    before: Signature, before_paths: Sequence[Path], after: Signature, call: Call, limit: int = 64
) -> tuple[tuple[Change, ...], int]:
    """Returns the differences of two signatures, and how many more leaves differ.

    `before` is a known signature, with the paths of its leaves; `after` is that of a call, placed.
    There are at most `limit` changes of leaves that both have.
    """
    changes = list(_diff_statics(before.statics, after.statics))
    old = {path.text: leaf for path, leaf in zip(before_paths, before.leaves, strict=True)}
    new = {path.text: leaf for path, leaf in zip(call.paths, after.leaves, strict=True)}
    changes += _diff_trees(before.tree, after.tree, old, new, call)
    changed = (path for path, leaf in new.items() if path in old and old[path] != leaf)
    changes += [_diff_leaves(old[path], new[path], path) for path in islice(changed, limit)]
    omitted = sum(1 for _ in changed)
    return tuple(changes) or diff_holders(before_paths, call.paths), omitted


def _diff_statics(before: Sequence[Static], after: Sequence[Static]):
    olds, news = ({static.name: static for static in statics} for statics in (before, after))
    for name in dict.fromkeys((*olds, *news)):
        old, new = olds.get(name), news.get(name)
        if old != new:
            was, now = ("its default" if x is None else _show(x.value) for x in (old, new))
            note = "static"
            if old and new and old.kind is not new.kind:
                note = f"static, {old.kind.__name__} → {new.kind.__name__}"
            values = [static.value for static in (old, new) if static is not None]
            yield Change("static", name, was, now, note, (_kind_of(values),))


def _kind_of(values: Sequence[Any]) -> str:
    if all(isinstance(value, numbers.Number | np.generic) for value in values):
        return "number"
    if any(map(callable, values)):
        return "callable"
    by_identity = any(type(value).__eq__ is object.__eq__ for value in values if value is not None)
    return "object" if by_identity else "value"


def _show(value: Any) -> str:
    try:
        return shorten(text_of(value))
    except Exception:
        return f"a {type(value).__name__} that cannot be printed"


def _diff_trees(before: Any, after: Any, old: dict[str, Leaf], new: dict[str, Leaf], call: Call):
    if before == after:
        return
    for path in [path for path in new if path not in old]:
        yield Change("tree", path, "absent", str(new[path]), "added")
    for path in [path for path in old if path not in new]:
        yield Change("tree", path, str(old[path]), "absent", "missing")
    if old.keys() == new.keys():
        for keys, x, y, why in jaxcompat.tree_differences(before, after):
            path = call.path(keys).text if len(keys) > 1 else "arguments"
            kept = (_kept_at(tree, keys) for tree in (before, after))
            settings = list(_diff_settings(path, *kept))
            yield from settings or [Change("tree", path, shorten(x), shorten(y), why)]


def _kept_at(tree: Any, keys: Sequence[Any]) -> Any:
    """Returns the auxiliary data of the tree's node at some of JAX's keys; None if unknown."""
    for key in keys:
        kind, kept = tree.node_data() or (None, ())
        index = kept.index(key.key) if kind is dict else getattr(key, "idx", None)
        if index is None:
            return None
        tree = tree.children()[index]
    data = tree.node_data()
    return data[1] if data is not None else None


def _diff_settings(path: str, before: Any, after: Any):
    """Yields the differences of two modules' attributes, if the nodes have `settings`."""
    if not (hasattr(before, "settings") and hasattr(after, "settings")):
        return
    old, new = before.settings(), after.settings()
    for name in dict.fromkeys((*old, *new)):
        if old.get(name) != new.get(name):
            where = path + str(AttributePath(name))
            was, now = (shorten(each.get(name, "absent")) for each in (old, new))
            yield Change("tree", where, was, now, "attribute of the module")


def diff_holders(before: Sequence[Path], after: Sequence[Path]) -> tuple[Change, ...]:
    """Returns a change for each argument that is now passed as `Variables`, or no longer."""
    differing = (
        Change("tree", new.argument, old.holder or "arrays", new.holder or "arrays")
        for old, new in zip(before, after, strict=False)
        if old.holder != new.holder
    )
    return tuple(dict.fromkeys(differing))


def _diff_leaves(before: Leaf, after: Leaf, path: str) -> Change:
    old, new = str(before), str(after)
    notes: dict[str, str] = {}
    sizes = ()
    if before.dtype != after.dtype:
        notes["dtype"] = "dtype"
    if len(before.shape) != len(after.shape):
        notes["shape"] = f"{len(before.shape)} → {counted(len(after.shape), 'dimension')}"
    elif before.shape != after.shape:
        pairs = enumerate(zip(before.shape, after.shape, strict=True))
        sizes = tuple((axis, x, y) for axis, (x, y) in pairs if x != y)
        notes["shape"] = f"axis {', '.join(str(axis) for axis, _, _ in sizes)}"
    if before.weak_type != after.weak_type:
        old = f"{old} weak" if before.weak_type else old
        new = f"{new} weak" if after.weak_type else new
        side = "the call's" if after.weak_type else "the known one's"
        notes["weak_type"] = f"weak type: {side} comes from a Python scalar"
    if before.sharding != after.sharding:
        old = f"{old} {short_sharding(before.sharding)}"
        new = f"{new} {short_sharding(after.sharding)}"
        if before.sharding is None or after.sharding is None:
            notes["committed"] = "no longer committed" if before.sharding else "committed"
        else:
            notes["sharding"] = _sharding_note(before.sharding, after.sharding)
    if before.layout != after.layout:
        old, new = f"{old} {before.layout}", f"{new} {after.layout}"
        notes["layout"] = "layout"
    return Change("argument", path, old, new, "; ".join(notes.values()), tuple(notes), sizes)


def _sharding_note(before: Sharding, after: Sharding) -> str:
    if before.memory_kind != after.memory_kind:
        return f"memory kind {before.memory_kind} → {after.memory_kind}"
    if isinstance(before, NamedSharding) and isinstance(after, NamedSharding):
        if before.mesh != after.mesh:
            if before.mesh.shape != after.mesh.shape:
                old, new = (dict(sharding.mesh.shape) for sharding in (before, after))
                return f"mesh {old} → {new}"
            if before.mesh.axis_types != after.mesh.axis_types:
                return f"mesh axis types {before.mesh.axis_types} → {after.mesh.axis_types}"
            return "the mesh has other devices, or the same in another order"
        return "spec"
    return "sharding"
