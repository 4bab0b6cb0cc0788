"""Checkpoints of what lives on tasks: the tasks write and read the arrays, by the paths of leaves.

The files are those of `stepcache.save`, so that either side, and orbax, can read them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding

from stepcache.jaxcompat.specs import decode_dtype, decode_spec, encode_dtype
from stepcache.remote.arrays import RemoteArray
from stepcache.remote.messages import Kind
from stepcache.remote.variables import master_of, spec_of
from stepcache.variables.checkpoint_items import Leaf, leaves_of, nested
from stepcache.variables.checkpoint_steps import find, versions_in
from stepcache.variables.checkpoints import Saving, storable
from stepcache.variables.packing import Slot
from stepcache.variables.restoring import How, read
from stepcache.variables.variables import Variables


def _split(items: dict[str, Any]) -> tuple[dict[str, Variables], dict[str, Any]]:
    """The variables among some items, and the other items."""
    own = {name: item for name, item in items.items() if isinstance(item, Variables)}
    return own, {name: item for name, item in items.items() if name not in own}


def _places(target: Any, own: dict[str, Variables]) -> Iterator[tuple[Leaf, Slot]]:
    """The leaves of variables and of their optimizers' states. The value of each is where the tasks
    have it: the number of the variables, and an index into their arrays.
    """
    applying = {name: item for name, item in own.items() if item.write.mode == "apply"}
    states = {f"{name}:optimizer": target.ready_state(x) for name, x in applying.items()}
    for name, item in (own | states).items():
        master, slots = master_of(item), item._layout.slots
        numbered = leaves_of({name: master.layout.tree.unflatten(range(len(slots)))})
        for leaf, slot in zip(numbered, slots, strict=True):
            yield leaf._replace(value=[master.number, leaf.value]), slot


def save(target: Any, root: Path, items: dict[str, Any], keep: int, step: int | None) -> None:
    """Has the tasks write a checkpoint; see `stepcache.save`."""
    connection = target.connection
    connection.ready()
    own, others = _split(items)
    for item in own.values():
        item._updates.check_none_pending()
    rows = [[place.keys, ["v", *place.value]] for place, _ in _places(target, own)]
    now, values = connection.runs, connection.values()
    for keys, value in leaves_of(others):
        is_there = isinstance(value, RemoteArray)
        ref = value.ref(now) if is_there else ["f", values.add(np.asarray(value))]
        rows.append([keys, ref])
    body = {"directory": str(root), "keep": keep, "step": step, "leaves": rows}
    body["versions"] = {name: item.version for name, item in own.items()}
    count = connection.about["tasks"]
    connection.ask(Kind.SAVE, now, values.blob, count, **body, **values.fields)


def restore(target: Any, root: Path, items: dict[str, Any], how: How) -> dict[str, Any]:
    """Has the tasks read a checkpoint; see `stepcache.restore`."""
    connection = target.connection
    connection.ready()
    own, others = _split(items)
    for item in own.values():
        master_of(item).revive()
    rows = [
        [place.keys, place.value, encode_dtype(slot.dtype), list(slot.shape), spec_of(slot)]
        for place, slot in _places(target, own)
    ]
    for keys, value in leaves_of(others):
        array = value if hasattr(value, "dtype") else np.asarray(value)
        rows.append([keys, None, encode_dtype(array.dtype), list(array.shape), None])
    body = {"directory": str(root), "leaves": rows, "mesh": target.mesh_code}
    body["how"] = [how.partial, how.cast, dict(how.rename)]
    count = connection.about["tasks"]
    answers = connection.ask(Kind.RESTORE, connection.runs, count=count, **body)
    restored = dict(items)
    if others:  # Small values, which this process reads by itself.
        restored |= read(root, others, how._replace(partial=True))()
    versions = answers[0].data(dict[str, Any])["versions"]
    for name, item in own.items():
        master_of(item).restored(versions.get(name, 0))
        item._updates.resume(None, 0)
    return restored


# ---- on a task -----------------------------------------------------------------------------------


def write(
    body: dict[str, Any], look_up: Callable[[Any], list[Any]], value_of: Callable[[Any], np.ndarray]
) -> None:
    """Writes a checkpoint, together with the other tasks.

    Args:
        body: of the message.
        look_up: returns the arrays that a reference names.
        value_of: returns an array that the message brings.
    """

    def collected() -> Any:
        leaves = []
        for keys, (kind, *ref) in body["leaves"]:
            arrays = [value_of(ref[0])] if kind == "f" else look_up([kind, *ref])
            leaves.append(Leaf(tuple(keys), arrays[ref[1] if kind == "v" else 0]))
        jax.block_until_ready([leaf.value for leaf in leaves])  # The step of one may have failed.
        return nested(storable(leaves, copied=False))

    saving = Saving(Path(body["directory"]))
    saving._start(saving._together(collected), body["versions"], body["step"], body["keep"])
    saving.wait()


def read_here(
    body: dict[str, Any], mesh: Mesh, look_up: Callable[[Any], list[Any]]
) -> tuple[dict[int, list[Any]], dict[str, int]]:
    """Reads a checkpoint, together with the other tasks.

    Returns the arrays of each variable by its number, and the versions that were saved. For the
    arguments see `write`; the specs are of `mesh`.
    """
    templates, places = [], {}
    for keys, place, code, shape, spec in body["leaves"]:
        kind = tuple(shape), decode_dtype(code)
        template: Any = np.zeros(*kind)
        if place is not None:
            template = jax.ShapeDtypeStruct(*kind, sharding=NamedSharding(mesh, decode_spec(spec)))
        templates.append(Leaf(tuple(keys), template))
        places[templates[-1].path] = place
    root, items = Path(body["directory"]), nested(templates)
    restored = read(root, items, How(*body["how"]))()
    arrays: dict[int, list[Any]] = {}
    for leaf in leaves_of(restored):
        if (place := places[leaf.path]) is not None and isinstance(leaf.value, jax.Array):
            number, index = place
            arrays.setdefault(number, list(look_up(["v", number])))[index] = leaf.value
    return arrays, versions_in(find(root, items) or root) or {}
