"""Snapshots of a host: checkpoints that `stepcache.restore` and orbax read too.

A snapshot holds the value and the optimizer's state of each of the variables, leaf by leaf, and the
table of the writes that are done. It is there whole or not at all. `step` is the host's moment.
"""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from stepcache.errors import StepCacheError
from stepcache.serving.held import Block, HeldVariables, HostState
from stepcache.serving.messages import BlockLayout
from stepcache.serving.tables import HeldTable, TableType
from stepcache.storage import plain
from stepcache.variables import checkpoint_files as files
from stepcache.variables.checkpoints import save
from stepcache.variables.restoring import restore, stored_kinds

_KEPT = 2

Items = dict[str, dict[str, dict[str, np.ndarray]]]
"""Arrays by part ("values" or "optimizers"), name of the variables, and path."""
StateTypes = Callable[[bytes], Any]

_log = logging.getLogger("stepcache")


def write(directory: Path, state: HostState, state_types: StateTypes) -> None:
    """Writes a snapshot, and removes older ones but the last.

    Args:
        directory: of all snapshots.
        state: of the host.
        state_types: gives the types of the state of an optimizer, as it was sent.

    Raises:
        VariablesError: it could not be written.
    """
    arrays, about = contents(state, state_types)
    items: dict[str, Any] = {**arrays, "table": np.frombuffer(plain.pack(about), np.uint8)}
    save(directory, keep=_KEPT, step=state.moment, **items)


def contents(state: HostState, state_types: StateTypes) -> tuple[Items, dict[str, Any]]:
    """The arrays of a host, without a copy, and all else that `begun` needs, as plain data."""
    values, optimizers, about = {}, {}, []
    for name, held in state.variables.items():
        values[name] = _named(held.layout, held.value)
        types = state_types(held.rule) if held.rule else []
        if held.state is not None:
            optimizers[name] = _named(BlockLayout(types), held.state)
        about.append([name, *_version(held), held.layout.types, held.rule, types])
    tables = []
    for name, table in state.tables.items():
        values[name], optimizers[name] = {"rows": table.rows}, table.state
        tables.append([name, table.number, table.token, table.type.packed()])
    rest = {"applied": state.applied, "moment": state.moment, "processes": state.processes}
    items = {"values": values, "optimizers": optimizers}
    return items, {"variables": about, **rest, "tables": tables}


def newest(directory: Path, allocate: Callable[[int], Block]) -> tuple[HostState | None, str]:
    """The newest snapshot that is whole, and its name; None and "" where there is none.

    Raises:
        StepCacheError: there are snapshots, and none can be read.
    """
    files.recover(directory)
    error = None
    for path in files.steps_in(directory):
        try:
            return _read(path, allocate), path.name
        except (StepCacheError, ValueError, KeyError, TypeError) as raised:
            error = raised
            _log.error("the snapshot %s cannot be read: %s", path, raised)
    if error is not None:
        raise error
    return None, ""


def _read(path: Path, allocate: Callable[[int], Block]) -> HostState:
    kind = stored_kinds(path)["table",]
    table = restore(path, partial=True, table=np.zeros(kind.shape, np.uint8))["table"]
    state, items = begun(plain.unpack(table.tobytes()), allocate)
    read = restore(path, partial=True, **items)
    for part, blocks in items.items():
        for name, views in blocks.items():
            for key, view in views.items():
                view[...] = read[part][name][key]
    return state


def begun(about: dict[str, Any], allocate: Callable[[int], Block]) -> tuple[HostState, Items]:
    """A host's state of what `contents` has said, and its arrays, which the caller has to fill."""
    variables: dict[str, HeldVariables] = {}
    items: Items = {"values": {}, "optimizers": {}}
    for name, number, token, assigned, types, rule, state_types in about["variables"]:
        layout = BlockLayout([tuple(each) for each in types])
        block = allocate(layout.size_bytes)
        held = HeldVariables(layout, number, token, tuple(assigned), block, rule)
        variables[name] = held
        items["values"][name] = _named(layout, held.value)
        if rule:
            layout = BlockLayout([tuple(each) for each in state_types])
            held.state = allocate(layout.size_bytes)
            items["optimizers"][name] = _named(layout, held.state)
    tables = {}
    for name, number, token, packed in about["tables"]:
        table = HeldTable.made(dataclasses.replace(TableType.unpacked(packed), stddev=0.0), token)
        table.number, table.type = number, TableType.unpacked(packed)
        tables[name] = table
        items["values"][name], items["optimizers"][name] = {"rows": table.rows}, table.state
    rest = (about["applied"], about["moment"], about["processes"], tables)
    return HostState(variables, *rest), items


def _version(held: HeldVariables) -> tuple[Any, ...]:
    return held.number, held.token, held.assigned


def _named(layout: BlockLayout, block: Block) -> dict[str, np.ndarray]:
    views = layout.views(block.data)
    return {path: view for (path, _, _), view in zip(layout.types, views, strict=True)}
