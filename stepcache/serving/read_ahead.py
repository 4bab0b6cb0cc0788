"""`ReadAhead`: reads variables in the background, for the next call (`Read(prefetch=True)`)."""

from __future__ import annotations

import functools
import time
from collections.abc import Sequence
from typing import Any, NamedTuple

from stepcache import _process_hooks, jaxcompat
from stepcache.programs.worker import Job, Worker
from stepcache.serving.hosts import Hosts, Versions
from stepcache.weak_objects import WeakObjects

_workers: WeakObjects[Worker] = WeakObjects()


def _stop_all() -> None:
    for worker in _workers:
        worker.stop()


_process_hooks.before_threads_end(_stop_all)  # Ray ends the process if a thread uses it later.


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
        self._worker = Worker("stepcache read ahead", droppable=True)
        _workers.add(self._worker)

    def start(
        self, masters: Sequence[Any], names: Sequence[str], known: Sequence[Versions | None]
    ) -> Job:
        """Starts to read masters; `names` and `known` are those of `Hosts.read`."""
        settings = jaxcompat.carried_settings()
        return self._worker.submit(functools.partial(self._read, settings, masters, names, known))

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

    def finish(self, job: Job, master: Any) -> Arrival | None:
        """Waits for a read. Returns its result for a master; None if it had not begun."""
        outcome = self._worker.take(job)
        if isinstance(outcome, Exception):
            raise outcome
        return outcome and outcome[master]
