"""`restore`: reads variables, pytrees and numbers from a checkpoint, by path."""

from __future__ import annotations

import itertools
import logging
import os
import re
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax.sharding import SingleDeviceSharding

from stepcache import jaxcompat
from stepcache.errors import VariablesError
from stepcache.pods.global_arrays import is_key, placed
from stepcache.sharding import current_reader
from stepcache.units import listed
from stepcache.variables import checkpoints
from stepcache.variables.checkpoint_steps import (
    NoCheckpointError,
    find,
    is_ours,
    names_in,
    trees_in,
)
from stepcache.variables.checkpoints import Kind, Leaf, is_number, key_text, leaves_of, masters_of
from stepcache.variables.describing import check_not_tracing
from stepcache.variables.masters import Master
from stepcache.variables.transfer import Meter
from stepcache.variables.updates import NONE_PENDING
from stepcache.variables.variables import Variables, locked

_log = logging.getLogger("stepcache")
_NOT_WHOLE = "there is no whole checkpoint of stepcache.save or orbax to restore"
_LEFT_OUT = ""  # The path of leaves that `rename` leaves out.


def restore(
    directory: str | os.PathLike,
    *,
    partial: bool = False,
    cast: bool = False,
    rename: Mapping[str, str | None] | None = None,
    **items: Any,
) -> dict[str, Any]:
    """Reads a checkpoint of `save`, or of orbax's `StandardCheckpointer` or `CheckpointManager`.

        try:
            step = sc.restore("saves", params=params, moments=moments, step=0)["step"]
        except FileNotFoundError:  # It is the first start, or the first save was interrupted.
            step = 0

    Leaves are found by their paths, in whatever order they were saved. They get the shardings of
    the variables or templates, from whatever mesh they were saved. Variables change only after
    everything has been read. In a pod, all processes call this inside the session.

    Args:
        directory: the checkpoint; or the directory above numbered ones (`keep=`, or those of a
            `CheckpointManager`), of which the newest complete one is restored.
        partial: restore the leaves that are in both the checkpoint and `items`. Other leaves of the
            checkpoint are ignored. Other leaves of `items` keep their values, and the logger
            `stepcache` names them.
        cast: convert numbers that are stored in another dtype.
        rename: what leaves of the checkpoint are called here: a regex of their paths, such as
            `params/encoder/(.*)`, and the path, as `re.sub` has it; the first that matches the
            whole path counts. None leaves a leaf out: with `partial`, a new head stays as it is by
            `{"params/head/.*": None}`.
        **items: what to restore, by name. `Variables` are restored in place, which is a write.
            Trees of arrays or `jax.ShapeDtypeStruct`s, and numbers, are templates for structure,
            shapes, dtypes and shardings.

    Returns:
        The restored values by name; for `Variables` the same objects.

    Raises:
        VariablesError: `directory` is a URL, the checkpoint is damaged, a leaf is missing, new, or
            of another shape or dtype. If there is no checkpoint, it is a `FileNotFoundError`, too.
        RankLostError, DeadlineError: a process or a task was lost, or tasks do not answer in time.
        ForkedProcessError: this process was forked after JAX had started.
    """
    check_not_tracing("nothing can be restored", "restore")
    jaxcompat.check_not_forked(f"{directory} was to be restored")
    checkpoints.join_all()
    root = checkpoints.path_of(directory)
    together = checkpoints.Together(f"restoring {root}", _NOT_WHOLE)
    if not (found := together(lambda: find(root, items) or "", of_first=True)):
        what = "there is no checkpoint to restore"  # In all processes.
        expected = "a directory that stepcache.save or orbax's StandardCheckpointer wrote"
        got = f"{names_in(root)[:3]}" if root.is_dir() else "no such directory"
        raise NoCheckpointError(what, where=str(root), expected=expected, got=got)
    parts: list[tuple[str, Master | None, list[Leaf]]] = []  # By the item that they are of.

    def read() -> dict[str, Any]:
        stored = _Stored(Path(found), items, rename or {})
        for name, item in items.items():
            masters: dict[str, Master | None] = {name: None}
            if isinstance(item, Variables):
                with locked([item]):
                    has_state = f"{name}:optimizer" in stored.trees or not partial
                    masters = {**masters_of(name, item, has_state=has_state)}
            for part, master in masters.items():
                tree = item if master is None else master.templates()
                parts.append((name, master, leaves_of({part: tree})))
        every = [leaf for *_, leaves in parts for leaf in leaves]
        _check_same(stored, every, items, partial, cast)
        return stored.read(every)

    values = together(read)

    def whole(name: str, master: Master | None, leaves: list[Leaf]) -> list[Any] | None:
        """All leaves of a part: those that are not stored as they are. None if nothing is read."""
        new, now = [values.get(leaf.path) for leaf in leaves], [leaf.value for leaf in leaves]
        missing = [value is None for value in new]
        if master is not None and any(missing):
            if all(missing):
                return None
            master.check_not_lost(items[name].name)
            now = master.leaves(Meter())
        new = [old if value is None else value for value, old in zip(new, now, strict=True)]
        if master is None:
            return new
        with items[name]._moving() as meter:
            return master.brought(new, meter)

    restored = dict(items)
    with locked(items.values()):
        new = list(itertools.starmap(whole, parts))  # What raises does so before anything changes.
        for (name, master, leaves), values_of in zip(parts, new, strict=True):
            item = items[name]
            if master is None:
                restored[name] = jax.tree_util.tree_structure(item).unflatten(values_of)
            elif values_of is not None:
                own, updates = item._master, item._updates
                with item._moving() as meter:
                    if master is own or own.applies_updates:
                        master.assign(values_of, current_reader(), meter)
                    else:  # Perhaps of other dtypes.
                        tree = master.layout.tree.unflatten(values_of)
                        updates.state = updates.held_state(tree, own, meter)
                if master is own:
                    updates.pending = NONE_PENDING
                for leaf in leaves:  # The processes of a pod have what was read from one file.
                    if leaf.path in values:
                        item._made_of.pop("/".join(leaf.keys[1:]), None)
    return restored


def stored_kinds(path: Path) -> dict[str, Kind]:
    """Dtype and shape of each leaf of a checkpoint, by path. Raises `VariablesError` if damaged."""
    return checkpoints.Together(f"reading {path}", _NOT_WHOLE)(lambda: _Stored(path, (), {})).kinds


class _Stored:
    """The leaves of a checkpoint, by the paths that they have here: their `kinds`, and their first
    keys, which are names of items and of other `trees` of variables.
    """

    def __init__(self, path: Path, asked: Collection[str], rename: Mapping[str, str | None]):
        import orbax.checkpoint as ocp
        from etils import epath

        self.directory, self.kinds = path, dict[str, Kind]()
        self._handler = ocp.PyTreeCheckpointHandler()  # A `Checkpointer` would wait for all.
        self._trees: list[tuple[Any, Any, list[str]]] = []  # With its structure and paths here.
        for name in trees_in(path, asked) or [""]:  # Of a `CheckpointManager`, one for each name.
            directory = epath.Path(path / name)
            described = self._handler.metadata(directory).tree
            flat, structure = jax.tree_util.tree_flatten_with_path(described)
            above = [name] if name else []
            paths = ["/".join([*above, *map(key_text, keys)]) for keys, _ in flat]
            tops = {path.partition("/")[0] for path in paths}
            if not (name or is_ours(path) or tops & {*asked}) and len(asked) == 1:
                # A tree that orbax's user has saved without a name is the only item asked for.
                paths = [f"{next(iter(asked))}/{path}".rstrip("/") for path in paths]
            paths = [_renamed(path, rename) for path in paths]
            self._trees.append((directory, structure, paths))
            for path_here, (_, x) in zip(paths, flat, strict=True):
                self.kinds[path_here] = Kind(np.dtype(x.dtype).name, tuple(x.shape))
        self.kinds.pop(_LEFT_OUT, None)
        self.trees = {path.partition("/")[0] for path in self.kinds}

    def read(self, leaves: list[Leaf]) -> dict[str, Any]:
        """Reads those of some leaves that are stored, each to the sharding of its template."""
        import orbax.checkpoint as ocp

        asked = {leaf.path: leaf.value for leaf in leaves if leaf.path in self.kinds}
        read: dict[str, Any] = {}
        for directory, structure, paths in self._trees:
            if not asked.keys() & {*paths}:
                continue
            places = [None if is_key(x) else _sharding_for(x) for x in map(asked.get, paths)]
            here = ocp.RestoreArgs(restore_type=np.ndarray)
            options = [ocp.ArrayRestoreArgs(sharding=at) if at else here for at in places]
            targets = [np.zeros(()) if path in asked else ... for path in paths]
            item, restore_args = map(structure.unflatten, (targets, options))
            args = ocp.args.PyTreeRestore(item=item, restore_args=restore_args)
            tree = self._handler.restore(directory, args=args)
            read |= zip(paths, structure.flatten_up_to(tree), strict=True)
        for leaf in leaves:
            if 0 in (kind := leaf.kind).shape:  # Orbax stores no such arrays.
                read[leaf.path] = np.zeros(kind.shape, kind.dtype)
        return {leaf.path: _like(leaf, read[leaf.path]) for leaf in leaves if leaf.path in read}


def _renamed(path: str, rename: Mapping[str, str | None]) -> str:
    """The path here of a leaf that is stored at `path`."""
    for pattern, new in rename.items():
        if match := re.fullmatch(pattern, path):
            return match.expand(new) if new is not None else _LEFT_OUT
    return path


def _check_same(
    stored: _Stored, leaves: list[Leaf], items: Collection[str], partial: bool, cast: bool
) -> None:
    """Raises `VariablesError` unless the leaves to restore are those that are stored."""
    what = f"the items do not match the checkpoint {stored.directory}"
    hint = "restore(..., partial=True) restores the leaves that both have"
    more, absent = dict(stored.kinds), list[str]()
    for leaf in leaves:
        kind, found = leaf.kind, more.pop(leaf.path, None)
        if found is None and (partial or 0 in kind.shape):
            absent += [leaf.path] if 0 not in kind.shape else []
        elif found is None or not _is_compatible(found, leaf, cast):
            if found is not None:
                hint = "restore(..., cast=True) converts it"
            if found is not None and found.shape != kind.shape:
                pattern = re.escape(leaf.path)
                hint = f"to leave it as it is: partial=True, rename={{{pattern!r}: None}}"
            got = f"{found or 'no such leaf'}"
            raise VariablesError(what, where=leaf.path, expected=f"{kind}", got=got, hint=hint)
    if more and not partial:
        tops = dict.fromkeys(path.partition("/")[0] for path in more)
        others = [name for name in tops if name.partition(":")[0] not in items]
        path = next(path for path in more if not others or path.partition("/")[0] in others)
        if others:
            what = f"{stored.directory} has items that were not asked for"
            asked = ", ".join(f"{name}=" for name in others)
            hint = f"name them too ({asked}), or ignore them with restore(..., partial=True)"
        got = f"{more[path]}"
        raise VariablesError(what, where=path, expected="no such leaf", got=got, hint=hint)
    if absent:
        _log.warning("%s has no leaves %s: they stay as they are", stored.directory, listed(absent))


def _is_compatible(stored: Kind, leaf: Leaf, cast: bool) -> bool:
    """Whether what was stored can be restored as the leaf."""
    if stored.shape != leaf.kind.shape or stored == leaf.kind or is_key(leaf.value):
        return stored == leaf.kind
    if not is_number(leaf.value):
        return cast or _is_of_optimizer(leaf)
    dtype, number = np.dtype(stored.dtype), type(leaf.value)
    return (dtype.kind == "b") is (number is bool) and np.can_cast(dtype, number, "same_kind")


def _is_of_optimizer(leaf: Leaf) -> bool:
    """Whether a leaf is of an optimizer's state, which may be of the dtypes of the gradients."""
    return ":" in leaf.keys[0]


def _sharding_for(template: Any) -> Any:
    """The sharding that a leaf is restored to; None for the memory of this process."""
    if isinstance(template, jax.ShapeDtypeStruct):
        return template.sharding or SingleDeviceSharding(jax.local_devices()[0])
    return template.sharding if isinstance(template, jax.Array) and template.committed else None


def _like(leaf: Leaf, read: Any) -> Any:
    """What was read of a leaf, in the type and sharding of its template."""
    template = leaf.value
    if is_number(template):
        return type(template)(np.asarray(read).item())
    if is_key(template):
        if not is_key(read):
            impl = jaxcompat.key_impl(template)
            read = jax.random.wrap_key_data(jax.numpy.asarray(read), impl=impl)
        return placed(read, _sharding_for(template))
    if read.dtype != template.dtype and not _is_of_optimizer(leaf):
        read = read.astype(template.dtype)
    if isinstance(template, np.ndarray | np.generic):
        return np.asarray(read)[()] if isinstance(template, np.generic) else np.asarray(read)
    return read if isinstance(read, jax.Array) else placed(read, _sharding_for(template))
