"""`Tables`: the tables of a host, of which clients read and update few rows at a time.

Unlike values, rows are updated in place, and a reader gets a copy of its rows. A `TableStorage`
holds the arrays. Its base survives the host; snapshots and images hold the rows that have changed
since the base. Optimizers of rows keep their state by row, and touch only the rows of an update.
"""

from __future__ import annotations

import functools
import math
import mmap
from collections.abc import Callable, Iterator, Sequence
from dataclasses import astuple, dataclass, replace
from typing import Protocol
from urllib.parse import quote

import numpy as np

from stepcache.link import plain
from stepcache.serving.messages import (
    DTYPES,
    BlockLayout,
    LeafType,
    MalformedMessageError,
    RefusalError,
    RowsRequest,
    check_name,
)
from stepcache.serving.row_optimizers import STATE, UPDATED, RowOptimizer

MAX_ROWS = 1 << 40
MAX_TABLE_BYTES = 1 << 56
_NOISE_ROWS = 1 << 16
_PAGE_BYTES = mmap.PAGESIZE


@dataclass(frozen=True, slots=True)
class TableType:
    """The type of a table.

    Attributes:
        rows: number of rows.
        shape, dtype: shape and dtype of one row.
        stddev, seed: the initial rows are normal noise of this standard deviation; zeros if it is
            0.
        optimizer: how rows are updated.
    """

    rows: int
    shape: list[int]
    dtype: str
    stddev: float
    seed: int
    optimizer: RowOptimizer

    def packed(self) -> bytes:
        """Encodes it for a message."""
        return plain.pack(astuple(self))

    @classmethod
    def unpacked(cls, sent: bytes) -> TableType:
        """Decodes the result of `packed`. Raises `MalformedMessageError` for what is no table."""
        try:
            rows, shape, dtype, stddev, seed, how = plain.unpack(sent)
            found = cls(rows, shape, dtype, stddev, seed, RowOptimizer(*how))
        except (TypeError, ValueError):
            raise MalformedMessageError("the type of the table is malformed") from None
        sizes = (found.rows, *found.shape) if plain.fits(found, cls) else (-1,)
        is_legal = all(0 <= size <= MAX_ROWS for size in sizes)
        if not is_legal or found.dtype not in DTYPES:
            raise MalformedMessageError("the type of the table is malformed")
        found.layout(1)  # A row fits into a message.
        if math.prod(sizes) * DTYPES[found.dtype].itemsize > MAX_TABLE_BYTES:
            raise MalformedMessageError(f"a table of more than {MAX_TABLE_BYTES} bytes")
        return found

    def difference(self, other: TableType) -> str:
        """Describes the fields that differ from those of another type."""
        pairs = ((name, getattr(self, name), getattr(other, name)) for name in self.__slots__)
        return " and ".join(f"with {name}={a!r}, not {b!r}" for name, a, b in pairs if a != b)

    def arrays(self) -> dict[str, tuple[tuple[int, ...], np.dtype]]:
        """Returns shape and dtype of the rows, and of each array of the optimizer's state."""
        like = ((self.rows, *self.shape), DTYPES[self.dtype])
        count = ((self.rows,), np.dtype(np.int32))
        names = STATE.get(self.optimizer.name, ())
        return {"rows": like} | {name: count if name == "count" else like for name in names}

    def noise(self) -> Iterator[np.ndarray]:
        """Yields the initial rows in chunks; nothing if they are zeros."""
        random = np.random.Generator(np.random.Philox(self.seed))
        for start in range(0, self.rows if self.stddev else 0, _NOISE_ROWS):
            shape = (min(self.rows - start, _NOISE_ROWS), *self.shape)
            noise = random.standard_normal(shape, np.float32) * np.float32(self.stddev)
            yield noise.astype(DTYPES[self.dtype])

    def layout(self, count: int) -> BlockLayout:
        """Returns the layout of this many rows."""
        return _layout_of((count, *self.shape), self.dtype, has_ids=False)

    def update_layout(self, count: int) -> BlockLayout:
        """Returns the layout of an update of this many rows: their numbers, then the rows."""
        return _layout_of((count, *self.shape), self.dtype, has_ids=True)


@functools.lru_cache(maxsize=1024)
def _layout_of(shape: tuple[int, ...], dtype: str, has_ids: bool) -> BlockLayout:
    ids: list[LeafType] = [("ids", [shape[0]], "int64")] if has_ids else []
    return BlockLayout([*ids, ("rows", [*shape], dtype)])


class TableStorage(Protocol):
    """Holds the arrays of tables. What a host writes to them is lost with its process."""

    def make(self, key: str, kind: TableType) -> None:
        """Creates the base of a new table. Raises `OSError` if there is no space."""
        ...

    def open(self, key: str, kind: TableType) -> dict[str, np.ndarray]:
        """Returns the arrays of a table, by the names of `TableType.arrays`."""
        ...

    def zeros(self, count: int) -> np.ndarray:
        """Returns this many int64 zeros. Raises `OSError` if there is no space."""
        ...


@dataclass(frozen=True, slots=True)
class SavedTable:
    """The part of a table that a snapshot or an image holds.

    Attributes:
        type, key: type of the table, and its name in the storage.
        number, token: version of the table.
        base: number of a version whose rows are all in the base.
        stored: number of the version whose rows will be in the base when the next snapshot is
            whole.
        ids: the rows that have changed since `base`.
        arrays: these rows of each array.
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
    """A table of the host, of which the storage holds the base.

    Attributes:
        type, key, number, token, base, stored: as in `SavedTable`.
        arrays: the rows, and the arrays of the optimizer's state.
        versions: for each row, the number of its last update since the host started; 0 for none.
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
        """Returns row numbers. Raises `MalformedMessageError` if one is out of range."""
        if ids.size and (ids.min() < 0 or ids.max() >= self.type.rows):
            raise MalformedMessageError(
                f"a row number is out of range: the table has {self.type.rows} rows"
            )
        return ids

    def update(self, ids: np.ndarray, update: np.ndarray) -> None:
        """Updates different rows, which makes a new version; changes nothing if it raises."""
        is_sorted = bool((ids[1:] > ids[:-1]).all())  # Clients send them in order.
        if not is_sorted and np.unique(ids).size != ids.size:
            raise MalformedMessageError("an update contains a row twice")
        self.checked(ids)
        new = {name: values[ids] for name, values in self.arrays.items()}  # Copies.
        rows, how = new.pop("rows"), self.type.optimizer
        new["rows"] = UPDATED[how.name](how, rows, update, new)
        for name, values in new.items():
            self.arrays[name][ids] = values
        if (new := ids[self.versions[ids] <= self.base]).size:
            self._changed.append(new)
            self._changed_count += new.size
        self.number += 1
        self.versions[ids] = self.number

    def changed(self, since: int) -> np.ndarray:
        """Returns the rows that have changed since a version (not before `base`), in order."""
        ids = np.concatenate(self._changed)
        self._changed = [ids]
        return np.sort(ids[self.versions[ids] > since])

    @property
    def changed_bytes(self) -> int:
        """Upper bound of the memory of rows that are not in the base."""
        total = 0
        for array in self.arrays.values():
            row_bytes = array.nbytes // max(self.type.rows, 1)
            pages = 1 if _PAGE_BYTES % max(row_bytes, 1) == 0 else row_bytes // _PAGE_BYTES + 2
            total += min(self._changed_count * pages * _PAGE_BYTES, array.nbytes)
        return total

    def saved(self, *, on_disk: bool) -> SavedTable:
        """Returns what a snapshot on disk, or an image, must hold of the table now."""
        base = self.stored if on_disk else self.base
        ids = self.changed(base)
        arrays = {name: each[ids] for name, each in self.arrays.items()}
        version = (self.number, self.token, base, self.number if on_disk else base)
        return SavedTable(self.type, self.key, *version, ids, arrays)

    def is_stored(self, saved: SavedTable) -> None:
        """Notes that a snapshot on disk is whole; takes over its `base` and `stored`."""
        self.base, self.stored = saved.base, saved.stored
        self._changed = [self.changed(self.base)]
        self._changed_count = self._changed[0].size


class Tables:
    """The tables of a host, by name in `held`, given those of a snapshot or an image."""

    def __init__(self, storage: TableStorage, saved: dict[str, SavedTable]):
        self._storage = storage
        self.held = {name: HeldTable(each, storage) for name, each in saved.items()}

    def _find(self, name: str) -> HeldTable:
        if name not in self.held:
            known = ", ".join(sorted(self.held)[:8]) or "none"
            raise RefusalError("unknown", f"it has no table {name!r}; it has {known}")
        return self.held[name]

    def create(self, name: str, sent: bytes, token: int, *, may_alter: bool = False) -> bool:
        """Creates a table unless it exists. Returns whether it is new.

        Args:
            name, token: name of the table, and the token of its first version.
            sent: its type, as `TableType.packed` encodes it.
            may_alter: another optimizer with the same arrays of state replaces that of the table.

        Raises:
            RefusalError: a table of this name has another type; there is no space; or there can be
                no such table.
        """
        kind, known = TableType.unpacked(sent), self.held.get(name)
        if known is not None and known.type != kind:
            is_alterable = replace(known.type, optimizer=kind.optimizer) == kind
            is_alterable &= known.type.arrays() == kind.arrays()
            if not (is_alterable and may_alter):
                hint = "; replace_optimizer=True replaces it" if is_alterable else ""
                why = f"{name} already exists, {known.type.difference(kind)}{hint}"
                raise RefusalError("type", why)
        if known is not None:
            known.type = kind
            return False
        check_name(name, self.held)
        key = f"{quote(name, safe='')[:80]}-{token:016x}"
        try:
            self._storage.make(key, kind)
            new = SavedTable(kind, key, 0, token, 0, 0, np.empty(0, np.int64), {})
            self.held[name] = HeldTable(new, self._storage)
        except OSError as error:
            raise RefusalError("failed", f"{name} cannot be created: {error}") from None
        return True

    def read(
        self, request: RowsRequest, payload: np.ndarray | None, epoch: int
    ) -> tuple[tuple[list[int], list[int], list[bool]], tuple[BlockLayout, list[np.ndarray]]]:
        """Serves a request with its block, given the epoch of the host.

        Returns:
            Numbers, tokens and flags for `Values`; layout and values of the leaves to send.
        """
        table, is_compared = self._find(request.name), request.epoch >= 0
        columns = 2 if is_compared else 1
        if payload is None or payload.size % (8 * columns):
            raise MalformedMessageError("the block does not contain row numbers")
        ids, *compared = payload.view(np.int64).reshape(columns, -1)
        version = ([table.number], [table.token], [True])
        rows = table.checked(ids)
        if not is_compared:
            return version, (table.type.layout(ids.size), [table.arrays["rows"][rows]])
        is_sent = (table.versions[rows] > compared[0]) | (request.epoch != epoch)
        rows = rows[is_sent]
        types = [("sent", [ids.size], "bool"), *table.type.layout(rows.size).types]
        return version, (BlockLayout(types), [is_sent, table.arrays["rows"][rows]])

    def update(
        self,
        name: str,
        types: Sequence[LeafType],
        payload: np.ndarray,
        may_assign: Callable[[np.ndarray], np.ndarray] | None = None,
    ) -> HeldTable:
        """Updates rows, and returns the table. The caller sets the token of the new version.

        `may_assign` returns for each row whether a value may be assigned to it; None for all.
        """
        table = self._find(name)
        count = types[0][1][0] if types and types[0][1] else 0
        layout = table.type.update_layout(count)
        if not layout.has(types) or layout.size_bytes != payload.size:
            raise RefusalError("type", f"{name} has rows of {table.type.dtype}{table.type.shape}")
        ids, update = layout.views(payload)
        if may_assign is not None and table.type.optimizer.name == "assign":
            is_kept = may_assign(ids)
            ids, update = ids[is_kept], update[is_kept]
        table.update(ids, update)
        return table

    def saved(self, *, on_disk: bool) -> dict[str, SavedTable]:
        """Returns what a snapshot on disk, or an image, must hold of each table now."""
        return {name: each.saved(on_disk=on_disk) for name, each in self.held.items()}

    def is_stored(self, saved: dict[str, SavedTable]) -> None:
        """Notes that a snapshot on disk is whole."""
        for name, each in saved.items():
            self.held[name].is_stored(each)

    def status(self) -> list[tuple[str, int, int, int, int]]:
        """Returns the rows of `Status.variables` for the tables."""
        rows = []
        for name, table in sorted(self.held.items()):
            rows_bytes = table.arrays["rows"].nbytes
            state_bytes = sum(each.nbytes for each in table.arrays.values()) - rows_bytes
            rows.append((name, table.number, rows_bytes, state_bytes, 1))
        return rows
