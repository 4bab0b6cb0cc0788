"""Snapshots of a host: checkpoints that `stepcache.restore` and orbax read too.

A snapshot holds values and optimizer states leaf by leaf, the rows of tables that are not in their
files (see `table_files`), and the number of each client's last write. It is published atomically.
`step` is the host's moment.
"""

from __future__ import annotations

import functools
import logging
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

from stepcache.errors import StepCacheError, VariablesError
from stepcache.link import plain
from stepcache.serving.held import HeldVariables, HostState, LastWrite
from stepcache.serving.messages import BlockLayout
from stepcache.serving.shared_memory import Block
from stepcache.serving.tables import SavedTable, TableType
from stepcache.storage.private_files import remove, sync
from stepcache.variables.checkpoint_steps import step_path, steps_in
from stepcache.variables.checkpoints import save
from stepcache.variables.restoring import restore, stored_kinds

_KEPT = 2

Items = dict[str, dict[str, dict[str, np.ndarray]]]
"""Arrays by part ("values", "optimizers" or "tables"), name of the variables or table, and path."""

_log = logging.getLogger("stepcache")


def write(directory: Path, state: HostState) -> None:
    """Writes a snapshot to a directory, and removes all older ones there but the last."""
    arrays, about = contents(state)
    about["checksum"] = _checksum(arrays)
    items: dict[str, Any] = {**arrays, "table": np.frombuffer(plain.pack(about), np.uint8)}
    save(directory, keep=_KEPT, step=state.moment, **items)
    for path in step_path(directory, state.moment).rglob("*"):
        sync(path)
    sync(directory)


def contents(state: HostState) -> tuple[Items, dict[str, Any]]:
    """Returns the arrays of a host, without a copy, and the rest of its state as plain data."""
    values, optimizers, rows, about = {}, {}, {}, []
    for name, held in state.variables.items():
        values[name] = _named(held.layout, held.value)
        if held.state is not None:
            optimizers[name] = _named(BlockLayout(held.state_types), held.state)
        version = (held.number, held.token, held.assigned)
        about.append([name, *version, held.layout.types, held.rule, held.state_types])
    tables = []
    for name, table in state.tables.items():
        rows[name] = {"ids": table.ids, **table.arrays}
        version = (table.number, table.token, table.base, table.stored)
        tables.append([name, table.type.packed(), table.key, *version, table.ids.size])
    applied = {client: [*last] for client, last in state.applied.items()}
    rest = {"applied": applied, "moment": state.moment, "processes": state.processes}
    items = {"values": values, "optimizers": optimizers, "tables": rows}
    return items, {"variables": about, **rest, "tables": tables}


def newest(
    directory: Path, allocate: Callable[[int], Block], least: int = 0
) -> tuple[HostState | None, str]:
    """Reads the newest snapshot that is not damaged. Returns it and its name, or None and "".

    Renames newer ones, which are damaged: from now on, the host may apply other writes than they
    hold.

    Args:
        directory, allocate: directory of all snapshots; makes a block of this many bytes.
        least: moment of the latest snapshot whose rows may be in the files of tables. Older
            snapshots are not consistent with these files.

    Raises:
        StepCacheError: there are snapshots, and none can be used.
    """
    error, damaged = None, []
    for path in steps_in(directory):
        try:
            state = _read(path, allocate)
            if state.moment < least:
                raise VariablesError(
                    "a snapshot is older than the rows in the files of its tables",
                    where=str(path),
                    expected=f"moment {least} or later",
                    got=f"{state.moment}",
                )
        except (StepCacheError, ValueError, KeyError, TypeError) as raised:
            error = error or raised
            damaged.append(path)
            _log.error("the snapshot %s cannot be read: %s", path, raised)
            continue
        for each in damaged:
            aside = each.with_name(f"damaged_{each.name}")
            remove(aside)
            each.rename(aside)
        return state, path.name
    if error is not None:
        raise error
    return None, ""


def _read(path: Path, allocate: Callable[[int], Block]) -> HostState:
    kind = stored_kinds(path)["table"]
    table = restore(path, partial=True, table=np.zeros(kind.shape, np.uint8))["table"]
    about = plain.unpack(table.tobytes())
    state, items = begun(about, allocate)
    read = restore(path, partial=True, **dict[str, Any](items))
    for part, blocks in items.items():
        for name, views in blocks.items():
            for key, view in views.items():
                view[...] = read[part][name][key]
    if _checksum(items) != about["checksum"]:
        raise VariablesError("an array of a snapshot is damaged", where=str(path))
    return state


def begun(about: dict[str, Any], allocate: Callable[[int], Block]) -> tuple[HostState, Items]:
    """Returns a state, given the plain data of `contents`, and its arrays, which are empty."""
    variables: dict[str, HeldVariables] = {}
    items: Items = {"values": {}, "optimizers": {}, "tables": {}}
    for name, number, token, assigned, types, rule, state_types in about["variables"]:
        layout = BlockLayout([tuple(each) for each in types])
        block = allocate(layout.size_bytes)
        held = HeldVariables(layout, number, token, tuple(assigned), block, rule)
        variables[name] = held
        items["values"][name] = _named(layout, held.value)
        if rule:
            held.state_types = [tuple(each) for each in state_types]
            layout = BlockLayout(held.state_types)
            held.state = allocate(layout.size_bytes)
            items["optimizers"][name] = _named(layout, held.state)
    tables = {}
    for name, packed, key, number, token, base, stored, count in about["tables"]:
        kind, ids = TableType.unpacked(packed), np.empty(count, np.int64)
        types = kind.arrays().items()
        arrays = {each: np.empty((count, *shape[1:]), dtype) for each, (shape, dtype) in types}
        tables[name] = SavedTable(kind, key, number, token, base, stored, ids, arrays)
        items["tables"][name] = {"ids": ids, **arrays}
    applied = {
        client: LastWrite(last) if isinstance(last, int) else LastWrite(*last)  # Of version 0.1.
        for client, last in about["applied"].items()
    }
    rest = (applied, about["moment"], about["processes"], tables)
    return HostState(variables, *rest), items


def arrays_of(items: Items) -> Iterator[np.ndarray]:
    """Yields the arrays of a host as flat bytes, always in the same order."""
    for blocks in items.values():
        for views in blocks.values():
            for view in views.values():
                yield view.reshape(-1).view(np.uint8)


def _checksum(items: Items) -> int:
    """Returns a checksum of the arrays: orbax does not detect changed bytes."""
    return functools.reduce(lambda sum, each: zlib.crc32(each.data, sum), arrays_of(items), 0)


def _named(layout: BlockLayout, block: Block) -> dict[str, np.ndarray]:
    views = layout.views(block.data)
    return {path: view for (path, _, _), view in zip(layout.types, views, strict=True)}
