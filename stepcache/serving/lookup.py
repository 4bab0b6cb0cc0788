"""`Table`: rows that a host holds, as a client sees them. `Rows`: those that a step needs."""

from __future__ import annotations

import math
import threading
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import jax
import numpy as np

from stepcache.errors import VariablesError
from stepcache.events import Moved, recorder
from stepcache.serving.messages import DTYPES
from stepcache.serving.row_cache import RowCache, padded_count
from stepcache.serving.split_table import SplitTable
from stepcache.serving.tables import TableType
from stepcache.variables.describing import check_not_tracing
from stepcache.variables.plan import links


@jax.tree_util.register_pytree_node_class
@dataclass(eq=False)
class Rows:
    """The rows of a table that some ids name: an argument of a step.

    Each row is there once, however often its id is. Their number is padded with rows of zeros to a
    power of two, so that batches with other numbers of ids find the same program.

    Attributes:
        values: the rows, of shape (padded count, *shape of a row). Differentiate by them.
        index: for each id, which of the rows is its own; of the shape of the ids.
        ids: the numbers of the rows without padding, in their order. Not there inside a step.
    """

    values: Any
    index: Any
    ids: np.ndarray | None = field(default=None)

    def spread(self, values: Any = None) -> Any:
        """The row of each id: of shape (*shape of the ids, *shape of a row).

        Args:
            values: rows in the place of `values`: those that a gradient is taken by.
        """
        return (self.values if values is None else values)[self.index]

    def tree_flatten(self) -> tuple[tuple[Any, Any], None]:
        return (self.values, self.index), None

    @classmethod
    def tree_unflatten(cls, about: None, children: tuple[Any, Any]) -> Rows:
        return cls(*children)


class Table:
    """A table of rows that a host holds. Made by `Connection.table`.

        rows = table.lookup(batch["ids"])
        loss, gradients = step(params, rows, batch)  # by rows.values; inside: rows.spread(values)
        table.push(rows, gradients)

    Only the rows of a batch move, each once. An update is done exactly once, as those of variables
    are. Without a cache, a lookup gives the rows as they are now. With one, it asks only for rows
    whose copies may not serve, as `read` says, and gets only those that have been updated. Rows
    that were pushed through this object are asked for. Thread-safe.

    Args:
        split: the rows, on their hosts.
        name, kind: of the table.
        cache: copies of rows; None for none.
        every: how many updates are added up before they are sent as one.
    """

    def __init__(
        self,
        split: SplitTable,
        name: str,
        kind: TableType,
        cache: RowCache | None = None,
        every: int = 1,
    ):
        self._split, self.name, self._type = split, name, kind
        self._cache, self._lock = cache, threading.Lock()
        self._every = every
        self._pending: list[tuple[np.ndarray, np.ndarray]] = []  # Rows, and updates of them.

    @property
    def shape(self) -> tuple[int, ...]:
        """The number of rows, and the shape of one."""
        return (self._type.rows, *self._type.shape)

    @property
    def dtype(self) -> np.dtype:
        return DTYPES[self._type.dtype]

    def lookup(self, ids: Any) -> Rows:
        """The rows that ids name.

        Args:
            ids: integers of any shape, each at least 0 and less than the number of rows.

        Raises:
            VariablesError: an id is no row; or this is inside a transformation, where ids have no
                values: look rows up before the step.
            ServerLostError: the host did not answer in time.
        """
        check_not_tracing("rows cannot be looked up", self.name)
        different, index = self._different(ids)
        padded = padded_count(different.size)
        if self._cache is not None and different.size <= self._cache.capacity:
            with self._lock:
                values, copied_bytes = self._cache.lookup(different, padded, self._compared)
            self._note(0, copied_bytes)
            return Rows(values, index, different)
        values = np.zeros((padded, *self._type.shape), self.dtype)
        self._split.read(different, values[: different.size])
        self._note(different.nbytes + different.size * self._row_bytes)
        return Rows(values, index, different)

    def _compared(
        self, ids: np.ndarray, compared: np.ndarray, epochs: np.ndarray
    ) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
        """What the hosts send of rows; see `row_cache.Fetch`."""
        found = self._split.compare(ids, compared, epochs)
        is_sent, rows = found[2:]
        self._note(ids.nbytes + compared.nbytes + is_sent.nbytes + rows.nbytes)
        return found

    def _different(self, ids: Any) -> tuple[np.ndarray, np.ndarray]:
        """The different ids, and for each id which of these it is."""
        array, count = np.asarray(ids), self._type.rows
        is_legal = not array.size or array.dtype.kind in "iu"
        if array.size and is_legal:
            is_legal = bool(array.min() >= 0 and array.max() < count)
        if not is_legal:
            raise VariablesError(
                "ids are numbers of rows",
                where=self.name,
                expected=f"integers from 0 to {count - 1}",
                got=f"{array.dtype} from {array.min()} to {array.max()}",
            )
        different, index = np.unique(array, return_inverse=True)
        return different.astype(np.int64), index.reshape(array.shape).astype(np.int32)

    def push(self, rows: Rows, update: Any) -> None:
        """Updates rows, as the table's optimizer says.

        With `every=k`, each k-th push sends the sums of k updates, each row once; until then
        lookups do not see them.

        Args:
            rows: what `lookup` has returned.
            update: of the shape of `rows.values`: gradients by them, or what to add or assign.

        Raises:
            VariablesError: `rows` come out of a step, and do not say which they are; or the update
                has another shape.
            ServerLostError: the host did not answer in time.
        """
        check_not_tracing("rows cannot be pushed", self.name)
        update = update.values if isinstance(update, Rows) else update
        got = tuple(np.shape(update))
        if rows.ids is None or got[1:] != tuple(self._type.shape) or len(update) < rows.ids.size:
            raise VariablesError(
                "an update does not fit the rows",
                where=self.name,
                expected="the rows that lookup returned, and an update of their shape",
                got=f"an update of shape {list(got)}",
            )
        update = np.asarray(update)[: rows.ids.size]
        with self._lock:
            if self._every > 1:
                update = update.copy()  # The caller may write to it before it is sent.
            self._pending.append((rows.ids, update))
            if len(self._pending) >= self._every:
                self._send()

    def flush(self) -> None:
        """Sends the sums of updates that `every=k` has added up so far.

        Raises:
            ServerLostError: the host did not answer in time.
        """
        with self._lock:
            if self._pending:
                self._send()

    def _send(self) -> None:
        ids, update = _added_up(self._pending)
        self._pending = []
        if self._cache is not None:
            self._cache.invalidate(ids)
        self._split.update(ids, update)
        self._note(ids.nbytes + ids.size * self._row_bytes)

    @property
    def _row_bytes(self) -> int:
        return math.prod(self._type.shape) * self.dtype.itemsize

    def _note(self, server_bytes: int, host_bytes: int = 0) -> None:
        recorder.emit(Moved(self.name, links(host_bytes, 0, server_bytes)))

    def __repr__(self) -> str:
        how = self._type.optimizer.name
        return f"Table({self.name!r}, {self._type.dtype}{list(self.shape)}, {how})"


def _added_up(updates: Sequence[tuple[np.ndarray, np.ndarray]]) -> tuple[np.ndarray, np.ndarray]:
    """The different rows of some updates, and the sum of the updates of each."""
    if len(updates) == 1:
        return updates[0]
    ids, places = np.unique(np.concatenate([ids for ids, _ in updates]), return_inverse=True)
    first = updates[0][1]
    # bfloat16 and float16 would lose most of a small update.
    kind = np.result_type(first.dtype, np.float32) if first.itemsize < 4 else first.dtype
    sums = np.zeros((ids.size, *first.shape[1:]), kind)
    np.add.at(sums, places, np.concatenate([update for _, update in updates]).astype(kind))
    return ids, sums.astype(first.dtype)
