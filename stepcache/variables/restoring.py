"""`restore`: reads variables, pytrees and numbers from a checkpoint, by path."""

from __future__ import annotations

import contextlib
import logging
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import numpy as np

from stepcache.errors import StepCacheError, VariablesError, first_line
from stepcache.sharding import current_company
from stepcache.units import listed
from stepcache.variables import checkpoint_files as files
from stepcache.variables.checkpoint_items import (
    NOTHING,
    Everybody,
    Savable,
    check_names,
    joined_part,
    locked,
    of_leader,
    path_of,
)
from stepcache.variables.checkpoint_tree import (
    Kind,
    Leaf,
    Name,
    blank,
    compatible,
    empty_like,
    escape,
    kind_of,
    leaves_of,
    like,
    sharding_for,
)
from stepcache.variables.checkpoints import join_all
from stepcache.variables.describing import check_not_tracing

_log = logging.getLogger("stepcache")


def restore(directory: str | os.PathLike, *, partial: bool = False, **items: Any) -> dict[str, Any]:
    """Reads a checkpoint: what `save` wrote, or orbax's `StandardCheckpointer`.

        step = sc.restore("saves", params=params, moments=moments, step=0)["step"]

    Leaves are found by their paths, whatever the order in which they were saved, and go to where
    the variables or templates live now, whatever mesh they were saved on. Variables change only
    when all has been read. In a pod all processes call it, inside the session.

    Args:
        directory: where the checkpoint is; of numbered ones (`keep=`), the directory above them:
            the one of the highest step is taken.
        partial: restore what is asked for and stored. What is stored and not asked for is ignored;
            what is not stored stays as it is, and a line in the log of "stepcache" names it.
        **items: what to restore, by name. `Variables` are restored in place; their versions never
            go back. Trees of arrays or `jax.ShapeDtypeStruct`s, and numbers, are templates: they
            say which leaves there are, of what shapes, dtypes and shardings.

    Returns:
        The restored values by name; for `Variables` the same objects.

    Raises:
        VariablesError: `directory` is a URL, there is no checkpoint or a damaged one, or a leaf is
            missing, new, or of another shape or dtype.
        RankLostError: a process of the pod has gone.
    """
    check_not_tracing("nothing can be restored", "restore")
    join_all()
    root = path_of(directory)
    check_names(items)
    company = current_company() or Everybody()
    found = Path(of_leader(company, root, lambda: str(_found(root))))
    return company.guarded(lambda: _restore(found, items, partial))


def _found(root: Path) -> Path:
    with _damage(root):
        files.recover(root)
        found = files.newest_whole(root)
    if found is None:
        raise VariablesError(
            "there is no checkpoint to restore",
            where=str(root),
            expected="a directory that stepcache.save or orbax's StandardCheckpointer wrote",
            got=files.described(root),
        )
    return found


def _restore(path: Path, items: dict[str, Any], partial: bool) -> dict[str, Any]:
    import orbax.checkpoint as ocp

    with ocp.Checkpointer(ocp.PyTreeCheckpointHandler()) as checkpointer:
        with _damage(path):
            stored = _Stored(path, checkpointer.metadata(path), set(items))
        wanted = {
            name: item._wanted_parts(stored.parts_of(name), stored.versions.get(name, {}), partial)
            for name, item in items.items()
            if isinstance(item, Savable)
        }
        trees = {
            (name, part): tree
            for name, item in items.items()
            for part, tree in (wanted[name].trees if name in wanted else {"": item}).items()
        }
        leaves = {at: leaves_of(joined_part(*at), tree) for at, tree in trees.items()}
        for (name, part), each in leaves.items():
            if part == "pending":  # Updates for an optimizer may be of other types than the value.
                leaves[name, part] = [stored.typed(leaf) for leaf in each]
        every = [leaf for each in leaves.values() for leaf in each]
        _check_same(path, stored, every, partial)
        with _damage(path):
            read = stored.read(checkpointer, every)
    for name, parts in wanted.items():
        parts.about = stored.versions.get(name, {})
    restored = dict(items)
    for name, item in items.items():
        if not isinstance(item, Savable):
            mine = [read.get(leaf.name, leaf.value) for leaf in leaves[name, ""]]
            restored[name] = jax.tree_util.tree_structure(item).unflatten(mine)
    with locked(items):
        for name, parts in wanted.items():
            got = {
                part: [read.get(leaf.name) for leaf in leaves[name, part]] for part in parts.trees
            }
            items[name]._put_parts(parts, got)
    return restored


class _Stored:
    """What a checkpoint holds.

    Args:
        path: its directory.
        metadata: orbax's.
        asked: the names of the items to restore.

    Attributes:
        kinds: what the leaves are, by name.
        versions: what was stored about variables.
    """

    def __init__(self, path: Path, metadata: Any, asked: set[str]):
        self._path = path
        flat, self._structure = jax.tree_util.tree_flatten_with_path(metadata.item_metadata.tree)
        about = files.custom_metadata(path)
        ours = about.get("stepcache", {})
        self.versions: dict[str, Any] = ours.get("variables", {})
        plain = [
            tuple(jax.tree_util.keystr((key,), simple=True) for key in keys) for keys, _ in flat
        ]
        if "stepcache" in about:
            self._names: list[Name] = plain
        elif files.is_ours(about):
            self._names = [_name_by_number(name[0], about["leaves"]) for name in plain]
            self.versions = {"value": {"version": about["version"], "mode": "apply", "pending": 0}}
        else:
            # Orbax's user has saved one tree without a name: it is what `Variables.restore` wants.
            alone = asked == {"value"} and all(name[:1] != ("value",) for name in plain)
            prefix = ("value",) if alone else ()
            self._names = [(*prefix, *map(escape, name)) for name in plain]
        rows = zip(self._names, flat, strict=True)
        self.kinds = {name: Kind(np.dtype(x.dtype).name, tuple(x.shape)) for name, (_, x) in rows}
        self.kinds.pop(NOTHING, None)
        for name, dtype, shape in ours.get("leaves", ()):
            self.kinds[tuple(name)] = Kind(dtype, tuple(shape))

    def parts_of(self, item: str) -> set[str]:
        """Which parts of some variables have leaves here."""
        heads = {name[0].partition(":") for name in self.kinds}
        return {part for head, _, part in heads if head == item}

    def typed(self, leaf: Leaf) -> Leaf:
        """A leaf that is to be read in the type in which it was stored."""
        if leaf.name not in self.kinds:
            return leaf
        template, dtype = leaf.value, np.dtype(self.kinds[leaf.name].dtype)
        if isinstance(template, np.ndarray):
            return leaf._replace(value=blank(template.shape, dtype))
        return leaf._replace(value=template.update(dtype=dtype))

    def read(self, checkpointer: Any, leaves: list[Leaf]) -> dict[Name, Any]:
        """Reads the leaves that are here, each to where its template lives."""
        import orbax.checkpoint as ocp

        by_name = {leaf.name: leaf.value for leaf in leaves}
        targets, ways = [], []
        for name in self._names:
            where = sharding_for(by_name[name]) if name in by_name else None
            targets.append(np.zeros(()) if name in by_name else ...)
            ways.append(
                ocp.ArrayRestoreArgs(sharding=where)
                if where is not None
                else ocp.RestoreArgs(restore_type=np.ndarray)
            )
        read = {}
        if any(target is not ... for target in targets):
            args = ocp.args.PyTreeRestore(
                item=self._structure.unflatten(targets),
                restore_args=self._structure.unflatten(ways),
            )
            tree = checkpointer.restore(self._path, args=args)
            read = dict(zip(self._names, self._structure.flatten_up_to(tree), strict=True))
        return {
            name: like(value, read[name] if name in read else empty_like(value))
            for name, value in by_name.items()
            if name in self.kinds
        }


def _name_by_number(number: str, rows: list[Any]) -> Name:
    """The name of a leaf in the first format, which numbered leaves and listed their paths."""
    if not number.isdecimal():
        return NOTHING
    path = rows[int(number)][0]
    of_state = path.startswith("optimizer state/")
    path = path.removeprefix("optimizer state/")
    item = "value:optimizer" if of_state else "value"
    return (item, *path.split("/")) if path else (item,)


def _check_same(path: Path, stored: _Stored, leaves: list[Leaf], partial: bool) -> None:
    names = {leaf.name for leaf in leaves}
    absent = [leaf for leaf in leaves if leaf.name not in stored.kinds]
    more = [name for name in stored.kinds if name not in names]
    for leaf in leaves:
        kind = stored.kinds.get(leaf.name)
        if kind is not None and not compatible(kind, leaf):
            raise _another(path, leaf.path, f"{kind_of(leaf)}", f"{kind}")
    if partial:
        if absent:
            text = "%s has no leaves %s: they stay as they are"
            _log.warning(text, path, listed([leaf.path for leaf in absent]))
        return
    hint = "restore(..., partial=True) restores what both have"
    if absent:
        raise _another(path, absent[0].path, f"{kind_of(absent[0])}", "no such leaf", hint)
    if more:
        raise _another(path, "/".join(more[0]), "no such leaf", f"{stored.kinds[more[0]]}", hint)


def _another(
    path: Path, where: str, expected: str, got: str, hint: str | None = None
) -> VariablesError:
    what = f"another value was stored in {path}"
    return VariablesError(what, where=where, expected=expected, got=got, hint=hint)


@contextlib.contextmanager
def _damage(path: Path) -> Iterator[None]:
    try:
        yield
    except StepCacheError:
        raise
    except Exception as error:
        raise VariablesError(
            "there is nothing that can be restored",
            where=str(path),
            expected="a whole checkpoint that stepcache.save or orbax's StandardCheckpointer wrote",
            got=first_line(error),
        ) from error
