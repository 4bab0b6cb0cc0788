"""`ReadAhead`: reads variables in the background, for the next call (`Read(prefetch=True)`)."""

from __future__ import annotations

import time
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, NamedTuple

from stepcache import jaxcompat
from stepcache.serving.hosts import Hosts, Versions


class Arrival(NamedTuple):
    """Result of a background read.

    Attributes:
        version: the newest version at that time.
        kept: its value, in the form in which copies are kept; None if the reader had it already.
        seconds: time of the read, by `time.monotonic`.
    """

    version: Versions
    kept: Any
    seconds: float


class ReadAhead:
    """Reads variables in a thread. The next call gets the result, or raises the error."""

    def __init__(self, hosts: Hosts):
        self._hosts = hosts
        self._executor = ThreadPoolExecutor(1, "stepcache read ahead")

    def start(
        self, masters: Sequence[Any], names: Sequence[str], known: Sequence[Versions | None]
    ) -> Future[Any]:
        """Starts to read masters; `names` and `known` are those of `Hosts.read`."""
        settings = jaxcompat.carried_settings()
        return self._executor.submit(self._read, settings, masters, names, known)

    def _read(self, settings: Any, masters: Any, names: Any, known: Any) -> Any:
        try:
            with settings:
                seconds, wires = time.monotonic(), [master.wire for master in masters]
                rows = zip(masters, *self._hosts.read(names, known, wires=wires), strict=True)
                return {
                    master: Arrival(version, master.as_copy(leaves), seconds)
                    for master, version, leaves in rows
                }
        except Exception as error:
            return error

    def finish(self, job: Future[Any], master: Any) -> Arrival | None:
        """Waits for a read. Returns its result for a master; None if it had not begun."""
        outcome = None if job.cancel() else job.result()
        if isinstance(outcome, Exception):
            raise outcome
        return outcome and outcome[master]
