"""`ReadAhead`: reads variables in the background, for the next call (`Read(prefetch=True)`)."""

from __future__ import annotations

import functools
import time
from collections.abc import Sequence
from typing import Any, NamedTuple

from stepcache import _process_hooks, jaxcompat
from stepcache.programs.background import Job, Worker
from stepcache.serving.client import Client
from stepcache.serving.transport import Version
from stepcache.weak_objects import WeakObjects

_workers: WeakObjects[Worker] = WeakObjects()


def _stop_all() -> None:
    for worker in _workers:
        worker.stop()


_process_hooks.before_threads_end(_stop_all)  # Ray ends the process if a thread uses it later.


class Arrival(NamedTuple):
    """What a background read has found.

    Attributes:
        version: the newest one then.
        kept: its value, as copies are kept; None if the reader had it already.
        seconds: when it was read, by `time.monotonic`.
    """

    version: Version
    kept: Any
    seconds: float


class ReadAhead:
    """Reads variables of one host in a thread. What it finds, or raises, is for their next call."""

    def __init__(self, client: Client):
        self._client = client
        self._worker = Worker("stepcache read ahead", droppable=True)
        _workers.add(self._worker)

    def start(self, masters: Sequence[Any], names: Sequence[str], known: Sequence[int]) -> Job:
        """Starts to read masters, as they are at one moment; names and tokens as for `Client`."""
        settings = jaxcompat.carried_settings()
        return self._worker.submit(functools.partial(self._read, settings, masters, names, known))

    def _read(self, settings: Any, masters: Any, names: Any, known: Any) -> Any:
        try:
            with settings:
                seconds, wires = time.monotonic(), [master.wire for master in masters]
                versions, blocks = self._client.read(names, known, wires=wires)
                return {
                    master: Arrival(version, master.kept(blocks.get(name)), seconds)
                    for master, name, version in zip(masters, names, versions, strict=True)
                }
        except Exception as error:
            return error

    def finish(self, job: Job, master: Any) -> Arrival | None:
        """What a read has found for a master, once it is done; None if it had not begun.

        Raises:
            VariablesError: the host refused it.
            ServerLostError: it did not answer in time.
        """
        outcome = self._worker.take(job)
        if isinstance(outcome, Exception):
            raise outcome
        return outcome and outcome[master]
