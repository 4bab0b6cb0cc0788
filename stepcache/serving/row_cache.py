"""`RowCache`: copies of rows of a served table, in one buffer on the device.

The idea, a cache of embeddings on each worker with a bound on how old each may be, is HET's (Miao
et al., VLDB 2022).
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
import numpy as np

from stepcache.variables.policy import Read

_EMPTY = -1

Fetch = Callable[[np.ndarray, np.ndarray, np.ndarray], tuple[np.ndarray, ...]]
"""Asks the hosts for rows. Takes the row numbers, and for each row the table's version when its
copy was compared, or -1, and the epoch of that version. Returns for each row the current version
and epoch, whether it was updated since; and the rows that were."""


@jax.jit
def _take(buffer: jax.Array, places: jax.Array) -> jax.Array:
    return buffer.at[places].get(mode="fill", fill_value=0)


@functools.partial(jax.jit, donate_argnums=0)
def _put(buffer: jax.Array, places: jax.Array, rows: jax.Array) -> jax.Array:
    return buffer.at[places].set(rows, mode="drop")


class RowCache:
    """Copies of the rows that were looked up last. Not thread-safe.

    Args:
        policy: how long a copy may serve before it is compared with the host's row;
            `max_staleness` counts lookups.
        capacity: number of rows. The least recently used rows are replaced.
        shape, dtype: shape and dtype of one row.

    Attributes:
        reads: number of rows that were looked up.
        hits: those of them that were not sent.
    """

    def __init__(
        self,
        policy: Read,
        capacity: int,
        shape: Sequence[int],
        dtype: np.dtype,
    ):
        self.capacity, self._policy = capacity, policy
        self._buffer = jnp.zeros((capacity, *shape), dtype)
        self._places: dict[int, int] = {}  # Positions in the buffer, by the number of the row.
        self._ids = np.full(capacity, _EMPTY)
        self._lookups = self.reads = self.hits = 0
        self._used = np.full(capacity, _EMPTY)  # The last lookup that used each.
        # When each was last known to be current: version of the table, epoch, lookup.
        self._compared, self._epochs = np.full(capacity, _EMPTY), np.zeros(capacity, np.int64)
        self._compared_lookup = np.zeros(capacity, np.int64)

    def lookup(self, ids: np.ndarray, padded: int, fetch: Fetch) -> tuple[jax.Array, int]:
        """Looks different rows up, at most as many as the capacity.

        Returns:
            The rows on the device, padded with zeros to `padded`; and how many bytes were copied.
        """
        self._lookups += 1
        places = self._find(ids)
        is_asked = ~self._may_serve(places)
        asked, copied_bytes = ids[is_asked], 0
        self.reads += ids.size
        self.hits += ids.size - asked.size
        if asked.size:
            compared = np.where(places < 0, _EMPTY, self._compared[places])[is_asked]
            epochs = np.where(places < 0, 0, self._epochs[places])[is_asked]
            numbers, epochs, is_sent, rows = fetch(asked, compared, epochs)
            self.hits += int(asked.size - is_sent.sum())
            self._used[places[places >= 0]] = self._lookups
            places[places < 0] = self._make_room(ids[places < 0])
            copied_bytes = self._copy(places[is_asked][is_sent], rows)
            self._note(places[is_asked], numbers, epochs)
        self._used[places] = self._lookups
        return _take(self._buffer, self._padded(places, padded)), copied_bytes

    def invalidate(self, ids: np.ndarray) -> None:
        """Marks copies as outdated: this process has updated these rows."""
        places = self._find(ids)
        self._compared[places[places >= 0]] = _EMPTY

    def _find(self, ids: np.ndarray) -> np.ndarray:
        """Returns the position of each row in the buffer; negative for rows without a copy."""
        return np.fromiter((self._places.get(each, _EMPTY) for each in ids.tolist()), int, ids.size)

    def _may_serve(self, places: np.ndarray) -> np.ndarray:
        """Returns for each copy whether it may serve without being compared."""
        is_late = self._lookups - self._compared_lookup[places] > self._policy.max_staleness
        return (places >= 0) & (self._compared[places] >= 0) & ~is_late

    def _make_room(self, ids: np.ndarray) -> np.ndarray:
        """Returns positions for new rows: free ones, then those of the least recently used rows."""
        if not ids.size:
            return ids
        places = np.argpartition(self._used, ids.size - 1)[: ids.size]
        for each in self._ids[places].tolist():
            self._places.pop(each, None)
        self._ids[places], self._compared[places] = ids, _EMPTY
        self._places.update(zip(ids.tolist(), places.tolist(), strict=True))
        return places

    def _note(self, places: np.ndarray, numbers: np.ndarray, epochs: np.ndarray) -> None:
        """Notes that copies are current now."""
        self._compared[places], self._epochs[places] = numbers, epochs
        self._compared_lookup[places] = self._lookups

    def _copy(self, places: np.ndarray, rows: np.ndarray) -> int:
        if not places.size:
            return 0
        sent = np.zeros((padded_count(places.size), *rows.shape[1:]), rows.dtype)
        sent[: places.size] = rows
        self._buffer = _put(self._buffer, self._padded(places, len(sent)), sent)
        return sent.nbytes

    def _padded(self, places: np.ndarray, count: int) -> np.ndarray:
        """Pads positions with one past the end of the buffer, which reads as zeros."""
        padded = np.full(count, self.capacity, np.int32)
        padded[: places.size] = places
        return padded


def padded_count(count: int) -> int:
    """Returns the power of two to which this many rows are padded."""
    return 1 << max(count - 1, 7).bit_length()
