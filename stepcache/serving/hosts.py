"""`Hosts`: sends requests to the hosts that share one set of variables.

The hosts know nothing of each other. Names, sizes and the number of hosts determine which host
holds what, so that all processes agree. The leaves of variables are balanced over the hosts by
their bytes. Variables with an optimizer are on one host, as the optimizer may need all leaves at
once. Row r of a table is on host r modulo the number of hosts.
"""

from __future__ import annotations

import concurrent.futures
import functools
import hashlib
import heapq
import logging
import threading
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, TypeVar

import numpy as np

from stepcache.errors import OptimizerWarning, OptionError, VariablesError, warn
from stepcache.serving.client import Client
from stepcache.serving.messages import BlockLayout, Described, LeafType, Status
from stepcache.serving.optimizers import ExportedRule, differ
from stepcache.serving.transport import Version
from stepcache.variables.describing import joined

_CALLS_AT_ONCE = 64

Versions = dict[int, Version]
"""The version of served variables: the version of the part on each host, by the host's number."""

T = TypeVar("T")

_log = logging.getLogger("stepcache")


def _token(version: Versions | None, host: int) -> int:
    """Returns the token of a version on a host; 0 for none."""
    return version[host].token if version is not None else 0


def first_host(name: str, hosts: int) -> int:
    """Returns the first host of variables: the only one for those with an optimizer or one leaf."""
    digest = hashlib.blake2b(name.encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") % hosts


def leaves_by_host(name: str, sizes: Sequence[int], hosts: int) -> dict[int, list[int]]:
    """Assigns leaves to hosts: the largest leaf first, each to the host with the fewest bytes.

    Args:
        name: name of the variables.
        sizes: sizes of the leaves, in bytes.
        hosts: number of hosts.

    Returns:
        The numbers of the leaves, by host; `first_host` comes first, and has the largest leaf.
    """
    first = first_host(name, hosts)
    found: dict[int, list[int]] = {first: []}
    filled = [(0, distance) for distance in range(hosts)]  # A heap.
    for leaf in sorted(range(len(sizes)), key=lambda leaf: -sizes[leaf]):
        size, distance = filled[0]
        found.setdefault((first + distance) % hosts, []).append(leaf)
        heapq.heapreplace(filled, (size + sizes[leaf], distance))
    return {host: sorted(leaves) for host, leaves in found.items()}


class Part(NamedTuple):
    """The part of some variables that one host holds: numbers and block of its leaves."""

    leaves: list[int]
    block: BlockLayout


class Hosts:
    """The clients of all hosts of a set. Requests to several hosts are made at the same time.

    Args:
        connect: makes the client of a host, given its number. Host 0 reports how many there are.
    """

    def __init__(self, connect: Callable[[int], Client]):
        self._connect, self._known = connect, [connect(0)]
        self._lock, self._is_complete = threading.Lock(), False
        self._parts: dict[str, dict[int, Part]] = {}
        self._is_closed = False
        self._threads = concurrent.futures.ThreadPoolExecutor(_CALLS_AT_ONCE, "stepcache hosts")

    @property
    def clients(self) -> list[Client]:
        """The client of each host. Raises `ServerLostError` if host 0 does not answer in time."""
        with self._lock:
            if not self._is_complete:
                count = self._known[0].status().hosts
                self._known += [self._connect(host) for host in range(1, count)]
                self._is_complete = True
            return self._known

    def together(self, calls: Sequence[Callable[[], T]]) -> list[T]:
        """Makes calls at the same time, waits for all, and returns their results."""
        # One host costs no more than its own client; and each client says that it is closed.
        if len(calls) < 2 or self._is_closed:
            return [call() for call in calls]
        futures = [self._threads.submit(call) for call in calls[1:]]
        try:
            results = [calls[0]()]
        finally:
            concurrent.futures.wait(futures)
        return results + [future.result() for future in futures]

    def __reduce__(self):
        raise VariablesError(
            "a connection, its variables and its tables belong to one process, and are not pickled",
            where=self._known[0].where,
            hint="pass the address, and connect in the other process",
        )

    def described(self, name: str) -> Described | None:
        """Asks the first host of some variables to describe them; None if they do not exist."""
        return self.clients[first_host(name, len(self.clients))].describe(name)

    def open(
        self,
        name: str,
        types: Sequence[LeafType],
        leaves: Sequence[Any],
        known: Described | None,
        rule: bytes,
    ) -> Versions:
        """Opens variables, and creates the parts that do not exist yet.

        Args:
            types, leaves: types and initial values of all leaves.
            known: result of `described`.
            rule: the optimizer to create them with; one host then has all leaves. Variables that
                exist keep theirs.

        Raises:
            VariablesError: variables of this name exist, and have other leaves.
        """
        is_whole = bool(rule) or (known is not None and known.has_rule)
        first, *others = parts = self._parted(name, types, is_whole)
        found = {first: known} | self._found_elsewhere(name, parts, is_there=known is not None)

        def opened(host: int) -> Version:
            there, part = found[host], parts[host]
            if there is not None and BlockLayout(there.types) == part.block:
                is_like = there.has_rule or not rule  # Otherwise the host refuses to create it.
                if is_like and (there.is_saved or self.clients[host].is_saved_at_last(name)):
                    return Version(there.number, 0)
            value = [np.asarray(leaves[number]) for number in part.leaves]
            return self.clients[host].create(name, "create", part.block, value, rule=rule)

        versions = self.together([functools.partial(opened, host) for host in others])
        versions = {first: opened(first), **dict(zip(others, versions, strict=True))}
        self._parts[name] = parts  # Not before: variables of this name may be open already.
        return versions

    def compare_optimizer(self, name: str, rule: bytes, replaces: bool) -> Versions | None:
        """Compares the optimizer of open variables with an exported one, `rule`.

        Args:
            replaces: replace an optimizer that may be another one. Otherwise, one that surely is
                another one is an `OptimizerWarning`.

        Returns:
            The version after it was replaced; None if it was not.
        """
        ((host, _),), stored = self._parts[name].items(), self.described(name)
        given, kept = ExportedRule(rule).identity, stored.optimizer if stored else ""
        if given == kept:
            return None
        if replaces:
            row = (name, "replace optimizer", BlockLayout([]), [])
            return {host: self.clients[host].write(*row, rule=rule)}
        if differ(given, kept):
            text = (
                f"The variables {name!r} of {self.clients[host].where} have another optimizer than "
                "the one given, for example another learning rate. They keep theirs. Open them "
                "with replace_optimizer=True to replace it."
            )
            _log.warning("%s", text)
            warn(text, OptimizerWarning)
        return None

    def _parted(self, name: str, types: Sequence[LeafType], is_whole: bool) -> dict[int, Part]:
        """Divides variables among hosts that get leaves; `first_host` comes first."""
        hosts = len(self.clients)
        sizes = [BlockLayout([each]).size_bytes for each in types]
        shares = leaves_by_host(name, sizes, hosts)
        if is_whole:
            shares = {first_host(name, hosts): [*range(len(types))]}
        return {
            host: Part(leaves, BlockLayout([types[leaf] for leaf in leaves]))
            for host, leaves in shares.items()
        }

    def _found_elsewhere(
        self, name: str, parts: dict[int, Part], is_there: bool
    ) -> dict[int, Described | None]:
        """Asks all hosts but the first to describe variables.

        The first host gets its part last: if it has one (`is_there`), all have theirs.

        Raises:
            VariablesError: a host has other leaves than its part.
        """
        first = next(iter(parts))
        hosts = [host for host in range(len(self.clients)) if host != first]
        calls = [functools.partial(self.clients[host].describe, name) for host in hosts]
        found = dict(zip(hosts, self.together(calls), strict=True))
        for host, there in found.items():
            expected = parts[host].block if host in parts else None
            has = BlockLayout(there.types) if there is not None else None
            if has != expected and (is_there or has is not None):
                raise VariablesError(
                    "variables of this name already exist, with other leaves",
                    where=joined(self.clients[host].where, name),
                    expected=f"{len(expected.types) if expected else 0} leaves on this host",
                    got=f"{len(has.types) if has else 0} leaves, or of other types",
                )
        return found

    def is_whole(self, name: str) -> bool:
        """Returns whether one host has all leaves of some variables."""
        return len(self._parts[name]) == 1

    def write(
        self,
        name: str,
        mode: str,
        leaves: Sequence[Any],
        base: Versions | None = None,
        on_kept: Callable[[], None] = lambda: None,
    ) -> Versions:
        """Writes exactly once to each host that has leaves of the variables.

        Args:
            name, mode: as in `WriteRequest`.
            leaves: the value or the update.
            base: version that the value was computed from, for variables on one host.
            on_kept: called for each host that has applied the write or will apply it.

        Raises:
            VariablesError: a host refused the write. Others may have applied it.
            ServerLostError: as for `Client.write`.
        """

        def written(host: int, part: Part) -> Version:
            row = (part.block, [leaves[number] for number in part.leaves], _token(base, host))
            return self.clients[host].write(name, mode, *row, on_kept=on_kept)

        parts = self._parts[name]
        calls = [functools.partial(written, *row) for row in parts.items()]
        return dict(zip(parts, self.together(calls), strict=True))

    def read(
        self,
        names: Sequence[str],
        known: Sequence[Versions | None],
        *,
        values: bool = True,
    ) -> tuple[list[Versions], list[list[np.ndarray] | None]]:
        """Reads variables, on each host as of one moment, after all writes of this process.

        Args:
            names, known: names of the variables; versions that the caller has, None for none.
            values: whether to read the values of newer versions, or the versions alone.

        Returns:
            The version of each, and its leaves, or None where the caller has the current value.
            The leaves never change.
        """
        known = [*known]
        while True:
            versions, blocks = self._read_once(names, known, values)
            partial = [
                index
                for index, name in enumerate(names)
                if 0 < len(blocks[index]) < len(self._parts[name])
            ]
            if not partial:
                break
            for index in partial:  # A value needs the parts of all hosts.
                known[index] = None
        rows = zip(names, blocks, strict=True)
        return versions, [self._joined(name, found) if found else None for name, found in rows]

    def _read_once(
        self, names: Sequence[str], known: Sequence[Versions | None], values: bool
    ) -> tuple[list[Versions], list[dict[int, np.ndarray]]]:
        asked: dict[int, list[int]] = {}
        for index, name in enumerate(names):
            for host in self._parts[name]:
                asked.setdefault(host, []).append(index)

        def read(host: int, indices: list[int]) -> Any:
            tokens = [_token(known[index], host) for index in indices]
            return self.clients[host].read([names[i] for i in indices], tokens, values=values)

        results = self.together([functools.partial(read, *row) for row in asked.items()])
        versions: list[Versions] = [{} for _ in names]
        blocks: list[dict[int, np.ndarray]] = [{} for _ in names]
        for (host, indices), (found, sent) in zip(asked.items(), results, strict=True):
            for index, version, block in zip(indices, found, sent, strict=True):
                versions[index][host] = version
                if block is not None:
                    blocks[index][host] = block
        return versions, blocks

    def _joined(self, name: str, blocks: dict[int, np.ndarray]) -> list[np.ndarray]:
        """Joins the blocks of all hosts: the leaves, in their order."""
        found: dict[int, np.ndarray] = {}
        for host, part in self._parts[name].items():
            found.update(zip(part.leaves, part.block.views(blocks[host]), strict=True))
        return [found[number] for number in range(len(found))]

    def status(self, host: int) -> Status:
        """Asks a host for contents and counters. Raises `OptionError` if there is no such host."""
        if not 0 <= host < len(self.clients):
            last = len(self.clients) - 1
            raise OptionError(
                "no such host", where="status", expected=f"0 to {last}", got=f"{host}"
            )
        return self.clients[host].status()

    def flush(self) -> None:
        """Waits until snapshots on disk hold all writes of this process."""
        self.together([client.flush for client in self.clients])

    def close(self) -> None:
        """Closes all connections."""
        self._is_closed = True
        for client in self._known:
            client.close()
        self._threads.shutdown(wait=False)
