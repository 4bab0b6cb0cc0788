"""Checkpoints of what lives on tasks: the tasks write and read the arrays, by the paths of leaves.

The files are those of `stepcache.save`, so that either side, and orbax, can read them.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar, cast

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding

from stepcache.errors import RankLostError, VariablesError, first_line
from stepcache.jaxcompat.specs import decode_dtype, decode_spec, encode_dtype
from stepcache.remote.arrays import RemoteArray
from stepcache.remote.messages import Kind
from stepcache.remote.variables import master_of, spec_of
from stepcache.variables import checkpoints, restoring
from stepcache.variables.checkpoint_items import Leaf, check_names, joined_part, leaves_of
from stepcache.variables.variables import Variables

T = TypeVar("T")


class Saved:
    """A checkpoint that has been written; `wait` returns at once."""

    done = True

    def wait(self) -> None:
        """Returns: the checkpoint is whole."""


def save(target: Any, root: Path, items: dict[str, Any], keep: int | None, step: int) -> Saved:
    """Has the tasks write a checkpoint; see `stepcache.save`."""
    check_names(items)
    connection = target.connection
    connection.ready()
    now = connection.runs
    values = connection.values()
    about: dict[str, Any] = {}
    leaves: list[list[Any]] = []
    for name, item in items.items():
        if isinstance(item, Variables):
            about[name] = {"version": item.version, "mode": item.write.mode, "pending": 0}
            for part, each in _parts(item).items():
                found = leaves_of(joined_part(name, part), _numbered(each))
                leaves += [_row(leaf, ["v", master_of(each).number, leaf.value]) for leaf in found]
            continue
        for leaf in leaves_of(name, item):
            value: Any = leaf.value
            is_there = isinstance(value, RemoteArray)
            ref = value.ref(now) if is_there else ["f", values.add(np.asarray(value))]
            leaves.append(_row(leaf, ref))
    count = connection.about["tasks"]
    body = {"directory": str(root), "keep": keep, "step": step, "leaves": leaves, "about": about}
    connection.ask(Kind.SAVE, now, values.blob, count, **body, **values.fields)
    return Saved()


def restore(target: Any, root: Path, items: dict[str, Any], partial: bool) -> dict[str, Any]:
    """Has the tasks read a checkpoint; see `stepcache.restore`."""
    check_names(items)
    connection = target.connection
    connection.ready()
    leaves: list[list[Any]] = []
    others: dict[str, Any] = {}
    for name, item in items.items():
        if not isinstance(item, Variables):
            others[name] = item
            found = leaves_of(name, item)
            leaves += [_row(leaf, None, *_type_of(leaf.value)) for leaf in found]
            continue
        master_of(item).revive()
        if item.write.mode == "apply":
            target.ready_state(item)
        for part, each in _parts(item).items():
            slots = each._master.layout.slots
            for leaf in leaves_of(joined_part(name, part), _numbered(each)):
                slot = slots[leaf.value]
                types = encode_dtype(slot.dtype), list(slot.shape), spec_of(slot)
                leaves.append(_row(leaf, [master_of(each).number, leaf.value], *types))
    answers = connection.ask(
        Kind.RESTORE,
        connection.runs,
        count=connection.about["tasks"],
        directory=str(root),
        partial=partial,
        leaves=leaves,
        asked=list(items),
        mesh=target.mesh_code,
    )
    about = answers[0].data(dict[str, Any])["about"]
    restored: dict[str, Any] = dict(items)
    if others:  # Small values, which this process reads by itself.
        restored |= restoring.restore_here(root, others)
    for name, item in items.items():
        if isinstance(item, Variables):
            master_of(item).restored(max(item.version, about.get(name, {}).get("version", 0)))
    return restored


def _parts(variables: Variables) -> dict[str, Variables]:
    state = master_of(variables).state
    return {"": variables} | ({"optimizer": state} if state is not None else {})


def _numbered(variables: Variables) -> Any:
    layout = variables._master.layout
    return layout.tree.unflatten(range(len(layout.slots)))


def _row(leaf: Leaf, value: Any, *more: Any) -> list[Any]:
    return [list(leaf.name), leaf.path, value, *more]


def _type_of(value: Any) -> tuple[Any, list[int]]:
    array = np.asarray(value) if not hasattr(value, "dtype") else value
    return encode_dtype(array.dtype), list(array.shape)


# ---- on a task -----------------------------------------------------------------------------------


def write(
    about: dict[str, Any], find: Callable[[Any], list[Any]], value_of: Callable[[Any], np.ndarray]
) -> None:
    """Writes a checkpoint, together with the other tasks.

    Args:
        about: the body of the message.
        find: returns the arrays that a reference names.
        value_of: returns an array that the message brings.
    """

    def collected() -> list[Leaf]:
        leaves = []
        for name, path, ref in about["leaves"]:
            if ref[0] == "f":
                value = value_of(ref[1])
            elif ref[0] == "v":
                value = find(ref[:2])[ref[2]]
            else:
                (value,) = find(ref)
            leaves.append(Leaf(tuple(name), path, value))
        jax.block_until_ready([each.value for each in leaves])  # The step of one may have failed.
        return leaves

    leaves = _in_all_tasks(collected)
    checkpoints.write_leaves(
        Path(about["directory"]), leaves, about["about"], about["keep"], about["step"]
    )


def read(
    about: dict[str, Any], mesh: Mesh, find: Callable[[Any], list[Any]]
) -> tuple[dict[int, list[Any]], dict[str, Any]]:
    """Reads a checkpoint, together with the other tasks.

    Args:
        about: the body of the message, with specs of `mesh`.
        find: returns the arrays that a reference names, or what stands for lost ones.

    Returns:
        The arrays of each variable by its number, and what was saved about variables.
    """
    places: list[tuple[int, int, tuple[str, ...]]] = []

    def templates() -> list[Leaf]:
        leaves = []
        for name, path, place, dtype, shape, *spec in about["leaves"]:
            kind = tuple(shape), decode_dtype(dtype)
            if place is None:
                template: Any = np.zeros(*kind)
            else:
                at = NamedSharding(mesh, decode_spec(spec[0]))
                template = jax.ShapeDtypeStruct(*kind, sharding=at)
                places.append((*place, tuple(name)))
            leaves.append(Leaf(tuple(name), path, template))
        return leaves

    leaves = _in_all_tasks(templates)
    rest = set(about["asked"]), about["partial"]
    values, saved = _in_all_tasks(
        lambda: restoring.read_leaves(Path(about["directory"]), leaves, *rest)
    )
    found: dict[int, list[Any]] = {}
    for number, index, name in places:
        arrays = found.setdefault(number, list(find(["v", number])))
        if name in values:
            arrays[index] = values[name]
    return found, saved


def _in_all_tasks(work: Callable[[], T]) -> T:
    """Does some work in each task, and returns its result; raises in all if it fails in one."""
    made, error, why = None, None, ""
    try:
        made = work()
    except RankLostError:
        raise
    except Exception as raised:
        error, why = raised, first_line(raised)
    answers = checkpoints.processes().gather("a checkpoint of tasks", why.encode())
    if error is not None:
        raise error
    for task, text in answers.items():
        if text:
            raise VariablesError(f"task {task}: {text.decode()}")
    return cast(T, made)
