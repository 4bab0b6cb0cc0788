"""`Table`: a table of rows on the hosts, for clients. `Rows`: the rows that a step uses."""

from __future__ import annotations

import functools
import math
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import jax
import numpy as np

from stepcache.errors import VariablesError
from stepcache.events import Moved, recorder
from stepcache.serving.hosts import Hosts, first_host
from stepcache.serving.messages import DTYPES, BlockLayout
from stepcache.serving.row_cache import RowCache, padded_count
from stepcache.serving.tables import TableType
from stepcache.storage.run_activity import Held, Holder, activity_log
from stepcache.variables.describing import check_not_tracing
from stepcache.variables.plan import links

_Update = tuple[np.ndarray, np.ndarray]  # Numbers of different rows, and an update of each.


@functools.partial(
    jax.tree_util.register_dataclass,
    data_fields=["values", "index"],
    meta_fields=[],
    drop_fields=["ids"],
)
@dataclass(eq=False)
class Rows:
    """The rows of a table for some ids. It is a pytree, to be passed to a step.

        @sc.step
        def loss(rows):
            return (rows.spread() ** 2).sum()

    Each row occurs once, however often its id does. Rows of zeros pad their number to a power of
    two, so that batches with other numbers of different ids use the same program.

    Attributes:
        values: the rows, of shape (padded count, *shape of a row). Differentiate with respect to
            them.
        index: for each id, the position of its row in `values`; of the shape of the ids.
        ids: numbers of the rows, without padding, in the order of `values`. None inside a step.
    """

    values: Any
    index: Any
    ids: np.ndarray | None = field(default=None)

    def spread(self, values: Any = None) -> Any:
        """Returns the row of each id: an array of shape (*shape of the ids, *shape of a row).

        Args:
            values: rows to use in place of `self.values`, to differentiate with respect to them.
        """
        return (self.values if values is None else values)[self.index]


class Table(Holder):
    """A table of rows that the hosts hold, row r on host r % N. Thread-safe.

    Made by `Connection.table`.

        rows = table.lookup(batch["ids"])
        loss, gradients = step(params, rows, batch)  # The gradient with respect to rows.values.
        table.push(rows, gradients)

    Only the rows of a batch move, each once. The hosts apply each update exactly once. Without a
    cache, a lookup reads the current rows. With a cache, it checks only rows whose copies may not
    serve without a check, as `read` says, and receives only those that were updated since. Rows
    that were pushed through this object are always checked.

    Args:
        hosts: the hosts. The table is created where it does not exist yet.
        name, kind: name and type of the table.
        cache: copies of rows; None for none.
        every: how many updates are added up before they are sent as one.
        replaces_optimizer: the optimizer of `kind` replaces that of a table that exists.

    Raises:
        VariablesError: a host has another table, or variables, of this name.
    """

    def __init__(
        self,
        hosts: Hosts,
        name: str,
        kind: TableType,
        cache: RowCache | None = None,
        every: int = 1,
        replaces_optimizer: bool = False,
    ):
        self._hosts, self.name, self._type = hosts, name, kind
        self._cache, self._lock = cache, threading.Lock()
        self._every = every
        self._pending: list[_Update] = []
        self._create("alter table" if replaces_optimizer else "create table")
        activity_log.watch(self)

    def _create(self, mode: str) -> None:
        """Creates the table on all hosts, where it does not exist yet."""
        kind, hosts = self._type, len(self._hosts.clients)

        def create(host: int) -> None:
            rows = len(range(host, kind.rows, hosts))
            part = replace(kind, rows=rows, seed=kind.seed + (host << 32))
            row = (self.name, mode, BlockLayout([]), [])
            self._hosts.clients[host].create(*row, rule=part.packed())

        first = first_host(self.name, hosts)  # It would have variables of this name.
        create(first)
        self._hosts.together(
            [functools.partial(create, host) for host in range(hosts) if host != first]
        )

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the whole table: (number of rows, *shape of a row)."""
        return (self._type.rows, *self._type.shape)

    @property
    def dtype(self) -> np.dtype:
        return DTYPES[self._type.dtype]

    def lookup(self, ids: Any) -> Rows:
        """Returns the rows for some ids.

        Args:
            ids: integers of any shape, each at least 0 and less than the number of rows.

        Raises:
            VariablesError: an id is out of range; or this is inside a JAX transformation, where ids
                have no values: look rows up before the step.
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

        def read(host: int, at: Any, numbers: np.ndarray) -> None:
            _, block = self._hosts.clients[host].rows(self.name, numbers)
            values[: different.size][at] = self._type.layout(numbers.size).views(block)[0]

        self._on_each_host(different, read)
        self._note(different.nbytes + different.size * self._row_bytes)
        return Rows(values, index, different)

    def _compared(
        self, ids: np.ndarray, compared: np.ndarray, epochs: np.ndarray
    ) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
        """Reads the rows that were updated since they were compared; a `row_cache.Fetch`."""
        numbers_now, epochs_now = np.empty_like(compared), np.empty_like(epochs)
        is_sent, parts = np.empty(ids.size, bool), []

        def read(host: int, at: Any, numbers: np.ndarray) -> None:
            epoch = int(epochs[at].max())
            known = np.where(epochs[at] == epoch, compared[at], -1)
            asked = np.concatenate([numbers, known])
            version, data = self._hosts.clients[host].rows(self.name, asked, epoch)
            numbers_now[at], epochs_now[at] = version.number, version.epoch
            is_sent[at] = sent = data[: numbers.size].view(bool)
            types = [("sent", [numbers.size], "bool"), *self._type.layout(int(sent.sum())).types]
            parts.append((np.arange(ids.size)[at][sent], BlockLayout(types).views(data)[1]))

        self._on_each_host(ids, read)
        rows = np.empty((int(is_sent.sum()), *self._type.shape), self.dtype)
        places = np.cumsum(is_sent) - 1
        for at, found in parts:
            rows[places[at]] = found
        self._note(ids.nbytes + compared.nbytes + is_sent.nbytes + rows.nbytes)
        return numbers_now, epochs_now, is_sent, rows

    def _different(self, ids: Any) -> tuple[np.ndarray, np.ndarray]:
        """Returns the different ids in order, and for each id its position among them."""
        array, count = np.asarray(ids), self._type.rows
        are_integers = array.dtype.kind in "iu"
        different, index = np.unique(array if are_integers else [], return_inverse=True)
        if array.size and not (are_integers and different[0] >= 0 and different[-1] < count):
            got = f"{array.dtype}{list(array.shape)}"
            if are_integers:
                got = f"{array.dtype} from {different[0]} to {different[-1]}"
            raise VariablesError(
                "an id is out of range, or not an integer",
                where=self.name,
                expected=f"integers from 0 to {count - 1}",
                got=got,
            )
        return different.astype(np.int64), index.reshape(array.shape).astype(np.int32)

    def push(self, rows: Rows, update: Any) -> None:
        """Updates rows with the table's optimizer.

        With `every=k`, each k-th push sends the sums of k updates, each row once; until then
        lookups do not see them.

        Args:
            rows: the result of `lookup`.
            update: of the shape of `rows.values`: a gradient, or values to add or to assign.

        Raises:
            VariablesError: `rows` is the output of a step, which has no ids; or the update has
                another shape.
            ServerLostError: the host did not answer in time.
        """
        check_not_tracing("rows cannot be pushed", self.name)
        if not isinstance(rows, Rows) or rows.ids is None:
            raise VariablesError(
                "the rows have no row numbers",
                where=self.name,
                expected="the result of lookup; rows that a step returns have no row numbers",
                got=type(rows).__name__,
            )
        update = np.asarray(update.values if isinstance(update, Rows) else update)
        shape = (padded_count(rows.ids.size), *self._type.shape)
        if update.shape != shape or not np.can_cast(update.dtype, self.dtype, "same_kind"):
            raise VariablesError(
                "the update does not match the rows",
                where=self.name,
                expected=f"{self.dtype}{list(shape)}, as rows.values: one update for each "
                "different row, not one for each id",
                got=f"{update.dtype}{list(update.shape)}",
                hint="differentiate with respect to rows.values",
            )
        update = update[: rows.ids.size]
        with self._lock:
            if self._every > 1:  # A copy: the caller may change it before it is sent.
                update = update.astype(self.dtype)
            updates = [*self._pending, (rows.ids, update)]
            if len(updates) < self._every:
                self._pending = updates
            else:
                self._send(updates)

    def flush(self) -> None:
        """Sends the sums of `every=k` now.

        Raises:
            ServerLostError: the host did not answer in time.
        """
        with self._lock:
            if self._pending:
                self._send(self._pending)

    def _send(self, updates: Sequence[_Update]) -> None:
        """Sends the sum of updates. Those that are pending are pending no longer.

        If this raises, they are again, but for rows of hosts that have the sum or will get it.
        """
        ids, update = _added_up(updates)
        pending = self._pending
        kept: set[int] = set()  # Hosts.

        def write(host: int, at: Any, numbers: np.ndarray) -> None:
            layout = self._type.update_layout(numbers.size)
            on_kept = functools.partial(kept.add, host)
            row = (self.name, "rows", layout, [numbers, update[at]])
            self._hosts.clients[host].write(*row, on_kept=on_kept)

        try:
            if self._cache is not None:
                self._cache.invalidate(ids)
            self._pending = []
            self._on_each_host(ids, write)
        except BaseException:
            hosts = len(self._hosts.clients)
            left = [(row, ~np.isin(row[0] % hosts, [*kept])) for row in pending]
            self._pending = [(ids[at], update[at]) for (ids, update), at in left if at.any()]
            raise
        self._note(ids.nbytes + ids.size * self._row_bytes)

    def _on_each_host(self, ids: np.ndarray, call: Callable[[int, Any, np.ndarray], None]) -> None:
        """Calls a function for each host that has some of the rows.

        Args:
            ids: numbers of different rows.
            call: takes the host, the positions of its rows in `ids`, and their numbers there.
        """
        hosts = len(self._hosts.clients)
        if hosts == 1:
            call(0, slice(None), ids)
            return
        places = [(host, np.flatnonzero(ids % hosts == host)) for host in range(hosts)]
        rows = [(host, at, ids[at] // hosts) for host, at in places if at.size]
        self._hosts.together([functools.partial(call, *row) for row in rows])

    @property
    def _row_bytes(self) -> int:
        return math.prod(self._type.shape) * self.dtype.itemsize

    def _note(self, server_bytes: int, host_bytes: int = 0) -> None:
        recorder.emit(Moved(self.name, links(host_bytes, 0, server_bytes)))

    def _held(self) -> Held:
        """What the run report says of the table."""
        size = math.prod(self.shape) * self.dtype.itemsize
        found = (self._cache.reads, self._cache.hits) if self._cache is not None else (0, 0)
        return Held(self.name, 0, size, "a served table", "", *found)

    def __repr__(self) -> str:
        how = self._type.optimizer.name
        return f"Table({self.name!r}, {self._type.dtype}{list(self.shape)}, {how})"


def _added_up(updates: Sequence[_Update]) -> _Update:
    """Returns the different rows of some updates, and for each the sum of its updates."""
    if len(updates) == 1:
        return updates[0]
    ids, places = np.unique(np.concatenate([ids for ids, _ in updates]), return_inverse=True)
    first = updates[0][1]
    # bfloat16 and float16 would lose most of a small update.
    kind = np.result_type(first.dtype, np.float32) if first.itemsize < 4 else first.dtype
    sums = np.zeros((ids.size, *first.shape[1:]), kind)
    np.add.at(sums, places, np.concatenate([update for _, update in updates]).astype(kind))
    return ids, sums.astype(first.dtype)
