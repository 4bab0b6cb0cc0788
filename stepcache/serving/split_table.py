"""`SplitTable`: a table whose rows are on the hosts of a connection, row r on host r % N."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np

from stepcache.serving.hosts import Hosts, first_host
from stepcache.serving.messages import DTYPES, BlockLayout
from stepcache.serving.tables import TableType


class SplitTable:
    """Sends the requests for rows of a table to the hosts that have them.

    Args:
        hosts: the hosts.
        name, kind: name and type of the table.
    """

    def __init__(self, hosts: Hosts, name: str, kind: TableType):
        self._hosts, self._name, self._type = hosts, name, kind

    def make(self) -> None:
        """Creates the table on all hosts, where it does not exist yet.

        Raises:
            VariablesError: a host has another table, or variables, of this name.
        """
        kind, hosts = self._type, len(self._hosts.clients)

        def make(host: int) -> None:
            rows = len(range(host, kind.rows, hosts))
            part = replace(kind, rows=rows, seed=kind.seed + (host << 32))
            row = (self._name, "create table", BlockLayout([]), [])
            self._hosts.clients[host].create(*row, rule=part.packed())

        first = first_host(self._name, hosts)  # It would have variables of this name.
        make(first)
        rest = [functools.partial(make, host) for host in range(hosts) if host != first]
        self._hosts.together(rest)

    def read(self, ids: np.ndarray, out: np.ndarray) -> None:
        """Reads rows, after all writes of this process.

        Args:
            ids: numbers of different rows.
            out: receives the rows.
        """

        def read(host: int, at: Any, numbers: np.ndarray) -> None:
            _, block = self._hosts.clients[host].rows(self._name, numbers)
            out[at] = self._type.layout(numbers.size).views(block)[0]

        self._on_each_host(ids, read)

    def compare(
        self, ids: np.ndarray, compared: np.ndarray, epochs: np.ndarray
    ) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
        """Reads the rows that were updated since their copies were compared.

        Arguments and results are those of `row_cache.Fetch`.
        """
        numbers_now, epochs_now = np.empty_like(compared), np.empty_like(epochs)
        is_sent, parts = np.empty(ids.size, bool), []

        def read(host: int, at: Any, numbers: np.ndarray) -> None:
            epoch = int(epochs[at].max())
            known = np.where(epochs[at] == epoch, compared[at], -1)
            asked = np.concatenate([numbers, known])
            version, data = self._hosts.clients[host].rows(self._name, asked, epoch)
            numbers_now[at], epochs_now[at] = version.number, version.epoch
            is_sent[at] = sent = data[: numbers.size].view(bool)
            types = [("sent", [numbers.size], "bool"), *self._type.layout(int(sent.sum())).types]
            parts.append((np.arange(ids.size)[at][sent], BlockLayout(types).views(data)[1]))

        self._on_each_host(ids, read)
        rows = np.empty((int(is_sent.sum()), *self._type.shape), DTYPES[self._type.dtype])
        places = np.cumsum(is_sent) - 1
        for at, found in parts:
            rows[places[at]] = found
        return numbers_now, epochs_now, is_sent, rows

    def update(self, ids: np.ndarray, update: np.ndarray) -> None:
        """Sends an update of different rows; it is applied exactly once."""

        def write(host: int, at: Any, numbers: np.ndarray) -> None:
            types = self._type.update_types(numbers.size)
            row = (self._name, "rows", BlockLayout(types), [numbers, update[at]])
            self._hosts.clients[host].write(*row, types=types)

        self._on_each_host(ids, write)

    def _on_each_host(self, ids: np.ndarray, call: Callable[[int, Any, np.ndarray], None]) -> None:
        """Calls a function for each host that has some of the rows.

        Args:
            ids: numbers of the rows.
            call: takes the host, the positions of its rows in `ids`, and their numbers there.
        """
        hosts = len(self._hosts.clients)
        if hosts == 1:
            call(0, slice(None), ids)
            return
        places = [(host, np.flatnonzero(ids % hosts == host)) for host in range(hosts)]
        rows = [(host, at, ids[at] // hosts) for host, at in places if at.size]
        self._hosts.together([functools.partial(call, *row) for row in rows])
