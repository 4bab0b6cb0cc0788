"""`restore`: reads variables, pytrees and numbers from a checkpoint, by path."""

from __future__ import annotations

import logging
import os
import re
from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.sharding import SingleDeviceSharding

from stepcache import jaxcompat
from stepcache.errors import VariablesError
from stepcache.pods.global_arrays import is_key, placed
from stepcache.units import listed
from stepcache.variables import checkpoints
from stepcache.variables.checkpoint_items import (
    Kind,
    Leaf,
    is_number,
    key_text,
    leaves_of,
    masters_to_restore,
    put_trees,
)
from stepcache.variables.checkpoint_steps import find, no_checkpoint, trees_in, versions_in
from stepcache.variables.describing import check_not_tracing
from stepcache.variables.masters import Master
from stepcache.variables.variables import Variables, locked

_log = logging.getLogger("stepcache")
_LEFT_OUT = ""  # The path of leaves that `rename` leaves out.


class How(NamedTuple):
    """How leaves may differ from those that are stored; see `restore`."""

    partial: bool = False
    cast: bool = False
    rename: Mapping[str, str | None] = {}


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
        **items: what to restore, by name. `Variables` are restored in place; their versions never
            go back. Trees of arrays or `jax.ShapeDtypeStruct`s, and numbers, are templates for
            structure, shapes, dtypes and shardings.

    Returns:
        The restored values by name; for `Variables` the same objects.

    Raises:
        VariablesError: `directory` is a URL, the checkpoint is damaged, a leaf is missing, new, or
            of another shape or dtype. If there is no checkpoint, it is a `FileNotFoundError`, too.
        RankLostError: a process of the pod was lost.
        ForkedProcessError: this process was forked after JAX had started.
    """
    check_not_tracing("nothing can be restored", "restore")
    jaxcompat.check_not_forked(f"{directory} was to be restored")
    checkpoints.join_all()
    root, how = checkpoints.path_of(directory), How(partial, cast, rename or {})
    if (target := getattr(jaxcompat.entered_session(), "target", None)) is not None:
        return target.restore(root, items, how)
    return read(root, items, how)()


def read(root: Path, items: dict[str, Any], how: How) -> Callable[[], dict[str, Any]]:
    """Reads some items, in all processes of the pod: if that fails in one, all raise.

    Returns what puts the values in place: it changes variables, and returns the restored values.
    """
    together = _together(root)
    if not (found := together(lambda: find(root, items) or "", of_first=True)):
        raise no_checkpoint(root)  # In all processes.
    return together(lambda: _read(Path(found), items, how))


def _together(root: Path) -> checkpoints.Together:
    what = "there is no whole checkpoint of stepcache.save or orbax to restore"
    return checkpoints.Together(f"restoring {root}", what)


def _read(path: Path, items: dict[str, Any], how: How) -> Callable[[], dict[str, Any]]:
    """Reads some items of one checkpoint."""
    stored = _Stored(path, items, how.rename)
    masters: dict[str, dict[str, Master]] = {}
    templates: dict[str, Any] = {}
    for name, item in items.items():
        if isinstance(item, Variables):
            masters[name] = masters_to_restore(name, item, stored.trees, how.partial)
            templates |= {part: master.templates() for part, master in masters[name].items()}
        else:
            templates[name] = item
    leaves = {name: leaves_of({name: tree}) for name, tree in templates.items()}
    every = [leaf for rows in leaves.values() for leaf in rows]
    _check_same(stored, every, items, how)
    values = stored.read(every)
    read = {name: [values.get(leaf.path) for leaf in rows] for name, rows in leaves.items()}
    for name, parts in masters.items():
        for part, master in parts.items():
            stays = [value is None for value in read[part]]
            if any(stays) and not (part == name and all(stays)):
                master.check_not_lost(items[name].name)

    def put() -> dict[str, Any]:
        restored = {}
        with locked(items.values()):
            for name, item in items.items():
                if name in masters:
                    trees = {part: (master, read[part]) for part, master in masters[name].items()}
                    put_trees(name, item, trees, stored.versions.get(name, 0))
                    restored[name] = item
                else:
                    own = [values.get(leaf.path, leaf.value) for leaf in leaves[name]]
                    restored[name] = jax.tree_util.tree_structure(item).unflatten(own)
        return restored

    return put


def stored_kinds(path: Path) -> dict[str, Kind]:
    """Dtype and shape of each leaf of a checkpoint, by path. Raises `VariablesError` if damaged."""
    return _together(path)(lambda: _Stored(path, (), {})).kinds


class _Stored:
    """The leaves of a checkpoint, by the paths that they have here.

    Attributes:
        kinds: dtype and shape of each leaf.
        trees: the first key of each leaf: names of items, and of other trees of variables.
        versions: those that the variables had, by their names.
    """

    def __init__(self, path: Path, asked: Collection[str], rename: Mapping[str, str | None]):
        import orbax.checkpoint as ocp
        from etils import epath

        self.directory, self.kinds, ours = path, dict[str, Kind](), versions_in(path)
        self._handler = ocp.PyTreeCheckpointHandler()  # A `Checkpointer` would wait for all.
        self._trees: list[tuple[Any, Any, list[str]]] = []  # With its structure and paths here.
        for name in trees_in(path, asked) or [""]:  # Of a `CheckpointManager`, one for each name.
            directory = epath.Path(path / name)
            flat, structure = jax.tree_util.tree_flatten_with_path(
                self._handler.metadata(directory).tree
            )
            top = [name] if name else []
            paths = ["/".join([*top, *map(key_text, keys)]) for keys, _ in flat]
            tops = {path.partition("/")[0] for path in paths}
            if not (name or ours is not None or tops & {*asked}) and len(asked) == 1:
                # A tree that orbax's user has saved without a name is the only item asked for.
                paths = [f"{next(iter(asked))}/{path}".rstrip("/") for path in paths]
            paths = [_renamed(path, rename) for path in paths]
            self._trees.append((directory, structure, paths))
            for path_here, (_, x) in zip(paths, flat, strict=True):
                self.kinds[path_here] = Kind(np.dtype(x.dtype).name, tuple(x.shape))
        self.kinds.pop(_LEFT_OUT, None)
        self.trees = {path.partition("/")[0] for path in self.kinds}
        self.versions = ours or {}

    def read(self, leaves: list[Leaf]) -> dict[str, Any]:
        """Reads those of some leaves that are stored, each to the sharding of its template."""
        import orbax.checkpoint as ocp

        templates = {leaf.path: leaf.value for leaf in leaves if leaf.path in self.kinds}
        read: dict[str, Any] = {}
        for directory, structure, paths in self._trees:
            if not templates.keys() & {*paths}:
                continue
            targets, options = [], []
            for path in paths:
                template = templates.get(path)
                where = None if is_key(template) else _sharding_for(template)
                targets.append(np.zeros(()) if path in templates else ...)
                options.append(
                    ocp.ArrayRestoreArgs(sharding=where)
                    if where is not None
                    else ocp.RestoreArgs(restore_type=np.ndarray)
                )
            item, restore_args = map(structure.unflatten, (targets, options))
            args = ocp.args.PyTreeRestore(item=item, restore_args=restore_args)
            tree = self._handler.restore(directory, args=args)
            read |= zip(paths, structure.flatten_up_to(tree), strict=True)
        for leaf in leaves:
            if leaf.path not in templates and 0 in leaf.kind.shape:
                templates[leaf.path] = leaf.value
                read[leaf.path] = np.zeros(leaf.kind.shape, leaf.kind.dtype)
        return {path: _like(path, template, read[path]) for path, template in templates.items()}


def _renamed(path: str, rename: Mapping[str, str | None]) -> str:
    """The path here of a leaf that is stored at `path`."""
    for pattern, new in rename.items():
        if match := re.fullmatch(pattern, path):
            return match.expand(new) if new is not None else _LEFT_OUT
    return path


def _check_same(stored: _Stored, leaves: list[Leaf], items: Collection[str], how: How) -> None:
    """Raises `VariablesError` unless the leaves to restore are those that are stored."""
    paths, kinds = {leaf.path for leaf in leaves}, stored.kinds
    absent = [leaf for leaf in leaves if leaf.path not in kinds and 0 not in leaf.kind.shape]
    more = [path for path in kinds if path not in paths]
    what, rows = f"the items do not match the checkpoint {stored.directory}", []
    for leaf in leaves:
        kind = kinds.get(leaf.path, leaf.kind)
        if not _is_compatible(kind, leaf, how.cast):
            hint = "restore(..., cast=True) converts it"
            if kind.shape != leaf.kind.shape:
                pattern = re.escape(leaf.path)
                hint = f"to leave it as it is: partial=True, rename={{{pattern!r}: None}}"
            rows.append((leaf.path, leaf.kind, kind, hint))
    if not how.partial:
        hint = "restore(..., partial=True) restores the leaves that both have"
        rows += [(leaf.path, leaf.kind, "no such leaf", hint) for leaf in absent]
        tops = dict.fromkeys(path.partition("/")[0] for path in more)
        others = [name for name in tops if name.partition(":")[0] not in items]
        if others and not rows:
            what = f"{stored.directory} has items that were not asked for"
            asked = ", ".join(f"{item}=" for item in others)
            hint = f"name them too ({asked}), or ignore them with restore(..., partial=True)"
            more = [path for path in more if path.partition("/")[0] in others]
        rows += [(path, "no such leaf", kinds[path], hint) for path in more]
    for where, expected, got, hint in rows:
        raise VariablesError(what, where=where, expected=f"{expected}", got=f"{got}", hint=hint)
    if absent:
        text = "%s has no leaves %s: they stay as they are"
        _log.warning(text, stored.directory, listed([leaf.path for leaf in absent]))


def _is_compatible(stored: Kind, leaf: Leaf, cast: bool) -> bool:
    """Whether what was stored can be restored as the leaf."""
    if stored.shape != leaf.kind.shape or stored == leaf.kind or is_key(leaf.value):
        return stored == leaf.kind
    if _is_of_updates(leaf.path) or not is_number(leaf.value):
        return cast or _is_of_updates(leaf.path)
    dtype, number = np.dtype(stored.dtype), type(leaf.value)
    return (dtype.kind == "b") is (number is bool) and np.can_cast(dtype, number, "same_kind")


def _is_of_updates(path: str) -> bool:
    """Whether a leaf is of an optimizer's state, which may be of the dtypes of the gradients."""
    return ":" in path.partition("/")[0]


def _sharding_for(template: Any) -> Any:
    """The sharding that a leaf is restored to; None for the memory of this process."""
    if isinstance(template, jax.ShapeDtypeStruct):
        return template.sharding or SingleDeviceSharding(jax.local_devices()[0])
    return template.sharding if isinstance(template, jax.Array) and template.committed else None


def _like(path: str, template: Any, read: Any) -> Any:
    """What was read at a path, in the type and sharding of its template."""
    if is_number(template):
        number = np.asarray(read).item()
        return number if _is_of_updates(path) else type(template)(number)
    if is_key(template):
        if not is_key(read):
            impl: list[Any] = []
            jax.eval_shape(lambda key: impl.append(jax.random.key_impl(key)), template)
            data: Any = np.asarray(read)
            read = jax.random.wrap_key_data(data, impl=impl[0])
        return placed(read, _sharding_for(template))
    if read.dtype != template.dtype and not _is_of_updates(path):
        read = read.astype(template.dtype)
    if isinstance(template, np.ndarray | np.generic):
        return np.asarray(read)[()] if isinstance(template, np.generic) else np.asarray(read)
    return read if isinstance(read, jax.Array) else placed(read, _sharding_for(template))
