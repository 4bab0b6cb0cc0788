"""`Tables`: rows that a host holds, of which clients read and update few at a time.

The rows are written to in place, unlike values: a reader gets a copy of its rows, and a snapshot
one of the table. Optimizers of rows keep their state by row, and touch only the rows of an update.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from stepcache.serving.messages import (
    DTYPES,
    MAX_BLOCK_BYTES,
    MAX_NAMES,
    BlockLayout,
    LeafType,
    MalformedMessageError,
    RowsRequest,
)
from stepcache.storage import plain
from stepcache.variables.policy import RowOptimizer

MAX_ROWS = 1 << 40
_INIT_CHUNK_ROWS = 1 << 16


def _add(how: RowOptimizer, rows: Any, update: Any, state: dict[str, Any]) -> Any:
    return rows + update


def _assign(how: RowOptimizer, rows: Any, update: Any, state: dict[str, Any]) -> Any:
    return update


def _sgd(how: RowOptimizer, rows: Any, update: Any, state: dict[str, Any]) -> Any:
    return rows - how.learning_rate * update


def _adagrad(how: RowOptimizer, rows: Any, update: Any, state: dict[str, Any]) -> Any:
    state["squares"] += update * update
    return rows - how.learning_rate * update / (np.sqrt(state["squares"]) + how.eps)


def _adam(how: RowOptimizer, rows: Any, update: Any, state: dict[str, Any]) -> Any:
    """Adam of the rows that an update has: the others' moments stay as they are (lazy Adam)."""
    state["count"] += 1
    state["mean"] += (1 - how.b1) * (update - state["mean"])
    state["squares"] += (1 - how.b2) * (update * update - state["squares"])
    count = state["count"].reshape(-1, *(1,) * (rows.ndim - 1))
    mean = state["mean"] / (1 - how.b1**count)
    squares = state["squares"] / (1 - how.b2**count)
    return rows - how.learning_rate * mean / (np.sqrt(squares) + how.eps)


_STATE = {"adagrad": ("squares",), "adam": ("count", "mean", "squares")}
"""The arrays of an optimizer's state. "count" is one number a row, the others are like the rows."""
_RULES: dict[str, Callable[..., Any]] = {
    "add": _add,
    "assign": _assign,
    "sgd": _sgd,
    "adagrad": _adagrad,
    "adam": _adam,
}


@dataclass(frozen=True, slots=True)
class TableType:
    """What a table is, but for its rows.

    Attributes:
        rows: how many.
        shape, dtype: of one row.
        stddev, seed: the rows begin as normal noise of this deviation; zeros, if it is 0.
        optimizer: how rows are updated.
    """

    rows: int
    shape: list[int]
    dtype: str
    stddev: float
    seed: int
    optimizer: RowOptimizer

    def packed(self) -> bytes:
        """As it is sent."""
        rest = [self.rows, self.shape, self.dtype, self.stddev, self.seed]
        how = self.optimizer
        return plain.pack([*rest, [how.name, how.learning_rate, how.b1, how.b2, how.eps]])

    @classmethod
    def unpacked(cls, sent: bytes) -> TableType:
        """From `packed`.

        Raises:
            MalformedMessageError: there can be no such table.
        """
        try:
            *rest, how = plain.unpack(sent)
            rows, shape, dtype, stddev, seed = rest
            found = cls(rows, shape, dtype, stddev, seed, RowOptimizer(*how))
        except (TypeError, ValueError):
            raise MalformedMessageError("it describes no table") from None
        sizes = (found.rows, *found.shape) if plain.fits(found, cls) else (-1,)
        is_legal = all(0 <= size <= MAX_ROWS for size in sizes)
        if not is_legal or found.dtype not in DTYPES:
            raise MalformedMessageError("it describes no table")
        if math.prod(sizes) * DTYPES[found.dtype].itemsize > MAX_BLOCK_BYTES:
            raise MalformedMessageError(f"a table of more than {MAX_BLOCK_BYTES} bytes")
        return found

    def layout(self, count: int) -> BlockLayout:
        """The layout of so many rows."""
        return BlockLayout([("rows", [count, *self.shape], self.dtype)])

    def update_types(self, count: int) -> list[LeafType]:
        """The leaves of an update of so many rows."""
        return [("ids", [count], "int64"), ("rows", [count, *self.shape], self.dtype)]


@dataclass(slots=True)
class HeldTable:
    """A table of the host.

    Attributes:
        type: what it is.
        number: the number of updates.
        token: stands for the writes that led to it.
        rows: all of them.
        versions: of each row, the number of its last update in this epoch; 0 for none.
        state: the optimizer's, by name.
    """

    type: TableType
    number: int
    token: int
    rows: np.ndarray
    versions: np.ndarray
    state: dict[str, np.ndarray] = field(default_factory=dict)

    @classmethod
    def made(cls, kind: TableType, token: int) -> HeldTable:
        """A new table."""
        dtype = DTYPES[kind.dtype]
        rows = np.zeros((kind.rows, *kind.shape), dtype)
        if kind.stddev:
            random = np.random.Generator(np.random.Philox(kind.seed))
            for start in range(0, kind.rows, _INIT_CHUNK_ROWS):
                part = rows[start : start + _INIT_CHUNK_ROWS]
                part[...] = random.standard_normal(part.shape, np.float32) * kind.stddev
        like = {"count": np.zeros(kind.rows, np.int32)}
        state = {
            name: like[name] if name in like else np.zeros(rows.shape, dtype)
            for name in _STATE.get(kind.optimizer.name, ())
        }
        return cls(kind, 0, token, rows, np.zeros(kind.rows, np.int64), state)

    def checked(self, ids: np.ndarray) -> np.ndarray:
        """Numbers of rows. Raises `MalformedMessageError` for those that are not there."""
        if ids.size and (ids.min() < 0 or ids.max() >= self.type.rows):
            raise MalformedMessageError(f"there are {self.type.rows} rows")
        return ids

    def update(self, ids: np.ndarray, update: np.ndarray) -> None:
        """Updates different rows, for a new version. Nothing changes where it raises."""
        if np.unique(self.checked(ids)).size != ids.size:
            raise MalformedMessageError("a row is there twice")
        state = {name: values[ids] for name, values in self.state.items()}  # Copies.
        how = self.type.optimizer
        rows = _RULES[how.name](how, self.rows[ids], update, state)
        self.rows[ids] = rows
        for name, values in state.items():
            self.state[name][ids] = values
        self.number += 1
        self.versions[ids] = self.number

    def copied(self) -> HeldTable:
        """The table as it is now."""
        state = {name: values.copy() for name, values in self.state.items()}
        versions = np.zeros_like(self.versions)
        return HeldTable(self.type, self.number, self.token, self.rows.copy(), versions, state)


class TableError(Exception):
    """A client asks for rows of a table that is not there, or is another one."""


class Tables:
    """The tables of a host.

    Args:
        held: those of a snapshot, by name. They are used from now on.
    """

    def __init__(self, held: dict[str, HeldTable]):
        self.held = dict(held)

    def _find(self, name: str) -> HeldTable:
        if name not in self.held:
            known = ", ".join(sorted(self.held)[:8]) or "none"
            raise TableError(f"there is no table {name!r} here; known: {known}")
        return self.held[name]

    def create(self, name: str, sent: bytes, token: int) -> bool:
        """Makes a table of what a client has sent. Returns whether it is new."""
        kind, known = TableType.unpacked(sent), self.held.get(name)
        if known is not None and known.type != kind:
            raise TableError(f"{name} is there already, and another: {known.type}")
        if known is not None:
            return False
        if not name or len(self.held) >= MAX_NAMES:
            raise MalformedMessageError(f"no name, or over {MAX_NAMES} tables")
        self.held[name] = HeldTable.made(kind, token)
        return True

    def read(
        self, request: RowsRequest, payload: np.ndarray | None, epoch: int
    ) -> tuple[tuple[list[int], list[int], list[bool]], tuple[list[LeafType], list[np.ndarray]]]:
        """Version of a table, as `Values` says it; types and values of what is sent.

        Args:
            request: what is asked for.
            payload: its block.
            epoch: of the host.
        """
        table, is_compared = self._find(request.name), request.epoch >= 0
        columns = 2 if is_compared else 1
        if payload is None or payload.size % (8 * columns):
            raise MalformedMessageError("these are no numbers of rows")
        ids, *compared = payload.view(np.int64).reshape(columns, -1)
        version = ([table.number], [table.token], [True])
        rows = table.checked(ids)
        if not is_compared:
            return version, (table.type.layout(ids.size).types, [table.rows[rows]])
        is_sent = (table.versions[rows] > compared[0]) | (request.epoch != epoch)
        rows = rows[is_sent]
        types = [("sent", [ids.size], "bool"), *table.type.layout(rows.size).types]
        return version, (types, [is_sent, table.rows[rows]])

    def update(self, name: str, types: Sequence[LeafType], payload: np.ndarray) -> HeldTable:
        """Updates rows; the token of the version is left to the caller."""
        table, layout = self._find(name), BlockLayout(types)
        count = layout.types[0][1][0] if layout.types and layout.types[0][1] else 0
        if layout.types != table.type.update_types(count) or layout.size_bytes != payload.size:
            raise TableError(f"{name} has rows of {table.type.dtype}{table.type.shape}")
        table.update(*layout.views(payload))
        return table

    def copied(self) -> dict[str, HeldTable]:
        """The tables as they are now."""
        return {name: each.copied() for name, each in self.held.items()}

    def status(self) -> list[tuple[str, int, int, int, int]]:
        """Name, version, bytes of the rows and of the optimizer's state, and number of leaves."""
        rows = []
        for name, table in sorted(self.held.items()):
            state_bytes = sum(each.nbytes for each in table.state.values())
            rows.append((name, table.number, table.rows.nbytes, state_bytes, 1))
        return rows
