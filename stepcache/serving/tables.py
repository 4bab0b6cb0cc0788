"""`Tables`: rows that a host holds, of which clients read and update few at a time.

The rows are written to in place, unlike values: a reader gets a copy of its rows. Where they are,
the storage says that a host is given; what survives the host is the table as it is in the storage's
base, and the rows that are not there yet, which snapshots and images have. Optimizers of rows keep
their state by row, and touch only the rows of an update.
"""

from __future__ import annotations

import math
import mmap
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol
from urllib.parse import quote

import numpy as np

from stepcache.serving.messages import (
    DTYPES,
    MAX_NAMES,
    BlockLayout,
    LeafType,
    MalformedMessageError,
    RowsRequest,
)
from stepcache.storage import plain
from stepcache.variables.policy import RowOptimizer

MAX_ROWS = 1 << 40
MAX_TABLE_BYTES = 1 << 56
_NOISE_ROWS = 1 << 16
_PAGE_BYTES = mmap.PAGESIZE


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
        found.layout(1)  # A row fits into a message.
        if math.prod(sizes) * DTYPES[found.dtype].itemsize > MAX_TABLE_BYTES:
            raise MalformedMessageError(f"a table of more than {MAX_TABLE_BYTES} bytes")
        return found

    def arrays(self) -> dict[str, tuple[tuple[int, ...], np.dtype]]:
        """Shape and dtype of its rows, and of each array of the optimizer's state."""
        like = ((self.rows, *self.shape), DTYPES[self.dtype])
        count = ((self.rows,), np.dtype(np.int32))
        names = _STATE.get(self.optimizer.name, ())
        return {"rows": like} | {name: count if name == "count" else like for name in names}

    def noise(self) -> Iterator[np.ndarray]:
        """Its first rows, some at a time; nothing where they are zeros."""
        random = np.random.Generator(np.random.Philox(self.seed))
        for start in range(0, self.rows if self.stddev else 0, _NOISE_ROWS):
            shape = (min(self.rows - start, _NOISE_ROWS), *self.shape)
            noise = random.standard_normal(shape, np.float32) * np.float32(self.stddev)
            yield noise.astype(DTYPES[self.dtype])

    def layout(self, count: int) -> BlockLayout:
        """The layout of so many rows."""
        return BlockLayout([("rows", [count, *self.shape], self.dtype)])

    def update_types(self, count: int) -> list[LeafType]:
        """The leaves of an update of so many rows."""
        return [("ids", [count], "int64"), ("rows", [count, *self.shape], self.dtype)]


class TableStorage(Protocol):
    """Where tables are. What a host writes to their arrays does not outlive it."""

    def make(self, key: str, kind: TableType) -> None:
        """Makes a new table. Raises `OSError` where it has no room."""
        ...

    def open(self, key: str, kind: TableType) -> dict[str, np.ndarray]:
        """The arrays of a table, by the names of `TableType.arrays`."""
        ...

    def zeros(self, count: int) -> np.ndarray:
        """Numbers of 64 bits. Raises `OSError` where it has no room."""
        ...


@dataclass(frozen=True, slots=True)
class SavedTable:
    """What a snapshot or an image has of a table.

    Attributes:
        type, key: what it is, and its name in the storage.
        number, token: its version.
        base: the number of the version whose rows are surely in the base.
        stored: the number of a version that will be there before another snapshot is whole.
        ids: the rows that have changed since `base`.
        arrays: those rows of each array.
    """

    type: TableType
    key: str
    number: int
    token: int
    base: int
    stored: int
    ids: np.ndarray
    arrays: dict[str, np.ndarray]


class HeldTable:
    """A table of the host.

    Args:
        saved: what it begins with.
        storage: has its base.

    Attributes:
        type, key, number, token, base, stored: as in `SavedTable`.
        arrays: its rows, and the optimizer's state.
        versions: of each row, the number of its last update since the host began; 0 for none.
    """

    def __init__(self, saved: SavedTable, storage: TableStorage):
        self.type, self.key = saved.type, saved.key
        self.number, self.token = saved.number, saved.token
        self.base, self.stored = saved.base, saved.stored
        self.versions = storage.zeros(self.type.rows)
        self.arrays = storage.open(self.key, self.type)
        for name, rows in saved.arrays.items():
            self.arrays[name][saved.ids] = rows
        self.versions[saved.ids] = self.number
        self._changed = [saved.ids]  # No row is there twice.
        self._changed_count = saved.ids.size

    def checked(self, ids: np.ndarray) -> np.ndarray:
        """Numbers of rows. Raises `MalformedMessageError` for those that are not there."""
        if ids.size and (ids.min() < 0 or ids.max() >= self.type.rows):
            raise MalformedMessageError(f"there are {self.type.rows} rows")
        return ids

    def update(self, ids: np.ndarray, update: np.ndarray) -> None:
        """Updates different rows, for a new version. Nothing changes where it raises."""
        if np.unique(self.checked(ids)).size != ids.size:
            raise MalformedMessageError("a row is there twice")
        new = {name: values[ids] for name, values in self.arrays.items()}  # Copies.
        rows, how = new.pop("rows"), self.type.optimizer
        new["rows"] = _RULES[how.name](how, rows, update, new)
        for name, values in new.items():
            self.arrays[name][ids] = values
        self._add_changed(ids[self.versions[ids] <= self.base])
        self.number += 1
        self.versions[ids] = self.number

    def _add_changed(self, ids: np.ndarray) -> None:
        if ids.size:
            self._changed.append(ids)
            self._changed_count += ids.size

    def changed(self, since: int) -> np.ndarray:
        """The rows that have changed since a version, in order; at most since `base`."""
        ids = np.concatenate(self._changed)
        self._changed = [ids]
        return np.sort(ids[self.versions[ids] > since])

    @property
    def changed_bytes(self) -> int:
        """A bound on the memory that the rows take which are not in the base."""
        total = 0
        for array in self.arrays.values():
            row_bytes = array.nbytes // max(self.type.rows, 1)
            pages = 1 if _PAGE_BYTES % max(row_bytes, 1) == 0 else row_bytes // _PAGE_BYTES + 2
            total += min(self._changed_count * pages * _PAGE_BYTES, array.nbytes)
        return total

    def saved(self, *, on_disk: bool) -> SavedTable:
        """What a snapshot on the disk, or an image, needs of it now."""
        base = self.stored if on_disk else self.base
        ids = self.changed(base)
        arrays = {name: each[ids] for name, each in self.arrays.items()}
        version = (self.number, self.token, base, self.number if on_disk else base)
        return SavedTable(self.type, self.key, *version, ids, arrays)

    def is_stored(self, saved: SavedTable) -> None:
        """Notes that a snapshot on the disk has the table, and the base what was `stored`."""
        self.base, self.stored = saved.base, saved.stored
        self._changed = [self.changed(self.base)]
        self._changed_count = self._changed[0].size


class TableError(Exception):
    """A client asks for rows of a table that is not there, or is another one."""


class Tables:
    """The tables of a host.

    Args:
        storage: has their bases.
        saved: those of a snapshot or an image, by name.

    Attributes:
        held: the tables, by name.
    """

    def __init__(self, storage: TableStorage, saved: dict[str, SavedTable]):
        self._storage = storage
        self.held = {name: HeldTable(each, storage) for name, each in saved.items()}

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
        key = f"{quote(name, safe='')[:80]}-{token:016x}"
        try:
            self._storage.make(key, kind)
            new = SavedTable(kind, key, 0, token, 0, 0, np.empty(0, np.int64), {})
            self.held[name] = HeldTable(new, self._storage)
        except OSError as error:
            raise TableError(f"{name} cannot be made: {error}") from None
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
            return version, (table.type.layout(ids.size).types, [table.arrays["rows"][rows]])
        is_sent = (table.versions[rows] > compared[0]) | (request.epoch != epoch)
        rows = rows[is_sent]
        types = [("sent", [ids.size], "bool"), *table.type.layout(rows.size).types]
        return version, (types, [is_sent, table.arrays["rows"][rows]])

    def update(self, name: str, types: Sequence[LeafType], payload: np.ndarray) -> HeldTable:
        """Updates rows; the token of the version is left to the caller."""
        table, layout = self._find(name), BlockLayout(types)
        count = layout.types[0][1][0] if layout.types and layout.types[0][1] else 0
        if layout.types != table.type.update_types(count) or layout.size_bytes != payload.size:
            raise TableError(f"{name} has rows of {table.type.dtype}{table.type.shape}")
        table.update(*layout.views(payload))
        return table

    def saved(self, *, on_disk: bool) -> dict[str, SavedTable]:
        """What a snapshot on the disk, or an image, needs of them now."""
        return {name: each.saved(on_disk=on_disk) for name, each in self.held.items()}

    def is_stored(self, saved: dict[str, SavedTable]) -> None:
        """Notes that a snapshot on the disk has tables, and their bases what was stored before."""
        for name, each in saved.items():
            self.held[name].is_stored(each)

    @property
    def changed_bytes(self) -> int:
        """A bound on the memory that the rows take which are not in the bases."""
        return sum(each.changed_bytes for each in self.held.values())

    def status(self) -> list[tuple[str, int, int, int, int]]:
        """Name, version, bytes of the rows and of the optimizer's state, and number of leaves."""
        rows = []
        for name, table in sorted(self.held.items()):
            rows_bytes = table.arrays["rows"].nbytes
            state_bytes = sum(each.nbytes for each in table.arrays.values()) - rows_bytes
            rows.append((name, table.number, rows_bytes, state_bytes, 1))
        return rows
