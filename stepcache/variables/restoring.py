"""`restore`: reads variables, pytrees and numbers from a checkpoint, by path."""

from __future__ import annotations

import contextlib
import logging
import os
import re
from collections.abc import Callable, Collection, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.sharding import SingleDeviceSharding

from stepcache import jaxcompat
from stepcache.errors import VariablesError
from stepcache.pods.global_arrays import placed
from stepcache.units import listed
from stepcache.variables import checkpoint_files as files
from stepcache.variables.checkpoint_items import (
    NOTHING,
    Kind,
    Leaf,
    Name,
    Savable,
    check_names,
    escape,
    is_key,
    is_number,
    joined_part,
    key_text,
    kind_of,
    leaves_of,
    locked,
)
from stepcache.variables.checkpoints import damage_as_error, join_all, of_leader, path_of, processes
from stepcache.variables.describing import blank, check_not_tracing

_log = logging.getLogger("stepcache")
_UNREADABLE = (
    "there is nothing that can be restored",
    "a whole checkpoint that stepcache.save or orbax's StandardCheckpointer wrote",
)


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

        step = sc.restore("saves", params=params, moments=moments, step=0)["step"]

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
        VariablesError: `directory` is a URL, there is no checkpoint or a damaged one, a leaf is
            missing, new, or of another shape or dtype, or tasks are asked to cast or rename.
        RankLostError: a process of the pod was lost.
        ForkedProcessError: this process was forked after JAX had started.
    """
    check_not_tracing("nothing can be restored", "restore")
    jaxcompat.check_not_forked(f"{directory} was to be restored")
    join_all()
    root = path_of(directory)
    check_names(items)
    how = How(partial, cast, rename or {})
    if (target := getattr(jaxcompat.entered_session(), "target", None)) is not None:
        if how != How(partial):
            raise VariablesError("tasks cast and rename nothing", where="restore")
        return target.restore(root, items, partial)
    pod = processes()
    found = of_leader(pod, root, lambda: files.find(root, items), *_UNREADABLE)
    return pod.guarded(lambda: _restore(found, items, how))


def read_leaves(
    root: Path, leaves: list[Leaf], asked: set[str], partial: bool
) -> tuple[dict[Name, Any], dict[str, Any]]:
    """Reads named leaves from a checkpoint. In a pod all processes call it.

    Returns the values by the names of leaves, and what was saved about variables. An optimizer's
    state that was not stored is not read. `asked` are the names of the items.
    """
    pod = processes()
    path = of_leader(pod, root, lambda: files.find(root), *_UNREADABLE)

    def read() -> tuple[dict[Name, Any], dict[str, Any]]:
        with _opened(path, asked, How(partial)) as stored:
            heads = {name[0] for name in stored.kinds}
            found = [x for x in leaves if ":" not in x.name[0] or x.name[0] in heads]
            _check_same(path, stored, found, asked)
            with damage_as_error(path, *_UNREADABLE):
                return stored.read(found), stored.about

    return pod.guarded(read)


def restore_here(root: Path, items: dict[str, Any]) -> dict[str, Any]:
    """Reads some items of a checkpoint in this process alone; others may be stored too."""
    return _restore(files.find(root), items, How(partial=True))


def _restore(path: Path, items: dict[str, Any], how: How) -> dict[str, Any]:
    if files.is_composite(path, items):  # Of orbax's `CheckpointManager`: a tree for each name.
        put = [_read(path / name, {name: item}, how) for name, item in items.items()]
    else:
        put = [_read(path, items, how)]
    return {name: value for each in put for name, value in each().items()}


def _read(path: Path, items: dict[str, Any], how: How) -> Callable[[], dict[str, Any]]:
    """Reads some items. Returns what puts them in place, which changes variables."""
    with _opened(path, set(items), how) as stored:
        wanted = {
            name: item._wanted_parts(stored.parts_of(name), stored.about.get(name, {}), how.partial)
            for name, item in items.items()
            if isinstance(item, Savable)
        }
        leaves: dict[tuple[str, str], list[Leaf]] = {}
        for name, item in items.items():
            for part, tree in (wanted[name][0] if name in wanted else {"": item}).items():
                found = leaves_of(joined_part(name, part), tree)
                # Updates for an optimizer may be of other types than the value, and so its state.
                leaves[name, part] = [*map(stored.typed, found)] if part else found
        every = [leaf for each in leaves.values() for leaf in each]
        _check_same(path, stored, every, items)
        with damage_as_error(path, *_UNREADABLE):
            read = stored.read(every)
    restored = dict(items)
    for name, item in items.items():
        if name not in wanted:
            values = [read.get(leaf.name, leaf.value) for leaf in leaves[name, ""]]
            restored[name] = jax.tree_util.tree_structure(item).unflatten(values)
    got = {
        name: {part: [read.get(leaf.name) for leaf in leaves[name, part]] for part in trees}
        for name, (trees, _) in wanted.items()
    }

    def put() -> dict[str, Any]:
        with locked(items.values()):
            for name, (_, state) in wanted.items():
                items[name]._check_parts(got[name], state)
            for name, (_, state) in wanted.items():
                items[name]._put_parts(got[name], state, stored.about.get(name, {}))
        return restored

    return put


def stored_kinds(path: Path) -> dict[Name, Kind]:
    """Dtype and shape of each leaf of a checkpoint. Raises `VariablesError` if there is none."""
    with _opened(path, set(), How()) as stored:
        return stored.kinds


@contextlib.contextmanager
def _opened(path: Path, asked: set[str], how: How) -> Iterator[_Stored]:
    """Opens a checkpoint to read some items. Raises `VariablesError` if it is damaged."""
    import orbax.checkpoint as ocp

    with ocp.Checkpointer(ocp.PyTreeCheckpointHandler()) as checkpointer:
        with damage_as_error(path, *_UNREADABLE):
            stored = _Stored(path, checkpointer, asked, how)
        yield stored


class _Stored:
    """What a checkpoint holds: dtype and shape of each leaf, and what is stored about variables."""

    def __init__(self, path: Path, checkpointer: Any, asked: set[str], how: How):
        self._path, self._checkpointer, self.how = path, checkpointer, how
        tree = checkpointer.metadata(path).item_metadata.tree
        flat, self._structure = jax.tree_util.tree_flatten_with_path(tree)
        custom = files.custom_metadata(path)
        ours = custom.get("stepcache", {})
        self.about: dict[str, dict[str, Any]] = ours.get("variables", {})
        names = [tuple(map(key_text, keys)) for keys, _ in flat]
        if "stepcache" not in custom:
            # One tree that orbax's user has saved without a name is the only item asked for.
            is_bare = len(asked) == 1 and asked.isdisjoint(name[0] for name in names if name)
            prefix = tuple(asked) if is_bare else ()
            names = [(*prefix, *map(escape, name)) for name in names]
        self._names = [self._renamed(name) for name in names]
        rows = zip(self._names, flat, strict=True)
        kinds = {name: Kind(np.dtype(x.dtype).name, tuple(x.shape)) for name, (_, x) in rows}
        for name, dtype, shape in ours.get("leaves", ()):
            kinds[self._renamed(tuple(name))] = Kind(dtype, tuple(shape))
        self.kinds = {name: kinds[name] for name in kinds if name not in (NOTHING, ())}

    def _renamed(self, name: Name) -> Name:
        """What a leaf is called here; empty if it is left out."""
        for pattern, path in self.how.rename.items():
            if match := re.fullmatch(pattern, "/".join(name)):
                return tuple(match.expand(path).split("/")) if path is not None else ()
        return name

    def parts_of(self, item: str) -> set[str]:
        """The parts of some variables that have leaves here."""
        heads = {name[0].partition(":") for name in self.kinds}
        return {part for head, _, part in heads if head == item}

    def typed(self, leaf: Leaf) -> Leaf:
        """A leaf with the dtype that is stored."""
        if leaf.name not in self.kinds or is_key(leaf.value):
            return leaf
        template, dtype = leaf.value, np.dtype(self.kinds[leaf.name].dtype)
        if is_number(template):
            return leaf._replace(value=dtype.type(0).item())
        if isinstance(template, np.ndarray):
            return leaf._replace(value=blank(template.shape, dtype))
        return leaf._replace(value=template.update(dtype=dtype))

    def read(self, leaves: list[Leaf]) -> dict[Name, Any]:
        """Reads the leaves that are stored, each to the sharding of its template."""
        import orbax.checkpoint as ocp

        templates = {leaf.name: leaf.value for leaf in leaves}
        targets, options = [], []
        for name in self._names:
            template = templates.get(name)
            where = None if is_key(template) else _sharding_for(template)
            targets.append(np.zeros(()) if name in templates else ...)
            options.append(
                ocp.ArrayRestoreArgs(sharding=where)
                if where is not None
                else ocp.RestoreArgs(restore_type=np.ndarray)
            )
        read = {}
        if not templates.keys().isdisjoint(self._names):
            item, restore_args = map(self._structure.unflatten, (targets, options))
            args = ocp.args.PyTreeRestore(item=item, restore_args=restore_args)
            tree = self._checkpointer.restore(self._path, args=args)
            read = dict(zip(self._names, self._structure.flatten_up_to(tree), strict=True))
        return {
            name: _like(template, read[name] if name in read else _empty_like(template))
            for name, template in templates.items()
            if name in self.kinds
        }


def _check_same(path: Path, stored: _Stored, leaves: list[Leaf], items: Collection[str]) -> None:
    """Raises `VariablesError` unless the leaves to restore are those that are stored."""
    what, hint = f"the items do not match the checkpoint {path}", None
    partial, cast, _ = stored.how
    names = {leaf.name for leaf in leaves}
    absent = [leaf for leaf in leaves if leaf.name not in stored.kinds]
    more = [name for name in stored.kinds if name not in names]
    rows = [
        (leaf.path, f"{kind_of(leaf)}", f"{kind}")
        for leaf in leaves
        if (kind := stored.kinds.get(leaf.name)) is not None
        and not _is_compatible(kind, leaf, cast)
    ]
    if rows:
        same_shape = rows[0][1].partition("[")[2] == rows[0][2].partition("[")[2]
        leaving = f"to leave it as it is: partial=True, rename={{{re.escape(rows[0][0])!r}: None}}"
        hint = "restore(..., cast=True) converts it" if same_shape else leaving
    if not rows and not partial:
        hint = "restore(..., partial=True) restores the leaves that both have"
        rows += [(leaf.path, f"{kind_of(leaf)}", "no such leaf") for leaf in absent]
        others = dict.fromkeys(name[0] for name in more if name[0].partition(":")[0] not in items)
        if others and not rows:
            what = f"{path} has items that were not asked for"
            asked = ", ".join(f"{item}=" for item in others)
            hint = f"name them too ({asked}), or ignore them with restore(..., partial=True)"
            more = [name for name in more if name[0] in others]
        rows += [("/".join(name), "no such leaf", f"{stored.kinds[name]}") for name in more]
    for where, expected, got in rows:
        raise VariablesError(what, where=where, expected=expected, got=got, hint=hint)
    if absent:
        text = "%s has no leaves %s: they stay as they are"
        _log.warning(text, path, listed([leaf.path for leaf in absent]))


def _is_compatible(stored: Kind, leaf: Leaf, cast: bool) -> bool:
    """Whether what was stored can be restored as the leaf."""
    if is_key(leaf.value):  # orbax stores keys as their data.
        data = jax.eval_shape(jax.random.key_data, leaf.value)
        return stored in (kind_of(leaf), Kind(data.dtype.name, data.shape))
    if not is_number(leaf.value):
        is_cast = cast and not stored.dtype.startswith("key<")
        return stored.shape == kind_of(leaf).shape if is_cast else stored == kind_of(leaf)
    if stored.shape or stored.dtype.startswith("key<"):
        return False
    dtype, kind = np.dtype(stored.dtype), type(leaf.value)
    return (dtype.kind == "b") is (kind is bool) and np.can_cast(dtype, kind, "same_kind")


def _sharding_for(template: Any) -> Any:
    """The sharding that a leaf is restored to; None for the memory of this process."""
    if isinstance(template, jax.ShapeDtypeStruct):
        return template.sharding or SingleDeviceSharding(jax.local_devices()[0])
    return template.sharding if isinstance(template, jax.Array) and template.committed else None


def _like(template: Any, read: Any) -> Any:
    """What was read, in the type and sharding of its template."""
    if is_number(template):
        return type(template)(np.asarray(read).item())
    if isinstance(template, np.generic):
        return np.asarray(read, template.dtype)[()]
    if isinstance(template, np.ndarray):
        return np.asarray(read, template.dtype)
    if is_key(template):
        data = jax.random.key_data(read) if is_key(read) else np.asarray(read)
        return placed(_keys(data, template), _sharding_for(template))
    read = read if read.dtype == template.dtype else read.astype(template.dtype)
    return read if isinstance(read, jax.Array) else placed(read, _sharding_for(template))


def _empty_like(template: Any) -> Any:
    """The data of an array without elements, which orbax does not store."""
    data = jax.eval_shape(jax.random.key_data, template) if is_key(template) else template
    return np.zeros(data.shape, data.dtype)


def _keys(data: Any, template: Any) -> Any:
    impl = []
    jax.eval_shape(lambda key: impl.append(jax.random.key_impl(key)), template)
    return jax.random.wrap_key_data(data, impl=impl[0])
