"""`ReadAhead`: reads variables in the background, for the next call."""

from __future__ import annotations

import functools
import sys
import threading
from collections.abc import Sequence
from concurrent.futures import Future, wait
from typing import Any, NamedTuple

from stepcache import _process_hooks, jaxcompat
from stepcache.serving import transport
from stepcache.serving.hosts import Hosts, Versions

_END_SECONDS = 2.0
_reading: set[Future[Any]] = set()


@_process_hooks.before_threads_end
def _wait_for_all() -> None:
    """Ray ends the process, with an error, if a thread uses it later."""
    wait(set(_reading), _END_SECONDS)
    transport.is_ending.set()
    if "ray" in sys.modules:
        wait(set(_reading), _END_SECONDS)  # Until they have seen that.


class Arrival(NamedTuple):
    """Result of a background read.

    Attributes:
        version: the newest version at that time.
        kept: its value, in the form in which copies are kept; None if the reader had it already.
    """

    version: Versions
    kept: Any


class ReadAhead:
    """Reads variables in a thread. The next call gets the result, or raises the error."""

    def __init__(self, hosts: Hosts):
        self._hosts = hosts

    def start(
        self, masters: Sequence[Any], names: Sequence[str], known: Sequence[Versions | None]
    ) -> Future[Any]:
        """Starts to read masters; `names` and `known` are those of `Hosts.read`."""
        settings = jaxcompat.carried_settings()
        future: Future[Any] = Future()
        read = functools.partial(self._read, settings, masters, names, known)
        threading.Thread(
            target=lambda: future.set_result(read()), name=transport.READER, daemon=True
        ).start()
        _reading.add(future)
        future.add_done_callback(_reading.discard)
        return future

    def _read(self, settings: Any, masters: Any, names: Any, known: Any) -> Any:
        try:
            with settings:
                rows = zip(masters, *self._hosts.read(names, known), strict=True)
                return {
                    master: Arrival(version, master.as_copy(leaves))
                    for master, version, leaves in rows
                }
        except Exception as error:
            return error

    def finish(self, job: Future[Any], master: Any) -> Arrival:
        """Waits for a read. Returns its result for a master."""
        outcome = job.result()
        if isinstance(outcome, Exception):
            raise outcome
        return outcome[master]
