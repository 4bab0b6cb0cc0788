"""`Notices`: what one process of a pod tells all others, whatever they are doing."""

from __future__ import annotations

import contextlib
import itertools
import logging
import threading

from stepcache import _process_hooks
from stepcache.jaxcompat.coordination import Service, Unreachable
from stepcache.programs import plain

_LONG_SECONDS = 86400.0
_END_SECONDS = 2.0

_log = logging.getLogger("stepcache")


class Notices:
    """Numbered notices: any process may write the next one, and all log it.

    A daemon thread waits for the next one in a single call of the service, so that a pod without
    notices makes no calls. The first process that ends writes the last one, for all: when Python
    ends, no thread may be in a call of JAX.

    Args:
        service: JAX's coordination service.
        name: what the names of notices begin with.
        rank: of this process.

    Attributes:
        given_up: by rank, why a process has given up waiting for others.
    """

    def __init__(self, service: Service, name: str, rank: int):
        self._service, self._name, self._rank = service, f"{name}/notice", rank
        self._next = 0
        self.given_up: dict[int, str] = {}
        self._thread = threading.Thread(target=self._listen, name="stepcache notices", daemon=True)
        self._thread.start()
        _process_hooks.at_exit(self._end)

    def tell(self, text: str, *, gives_up: bool = False) -> None:
        """Writes the next notice.

        Args:
            text: one line; empty for the last notice.
            gives_up: it is why this process has given up waiting.
        """
        notice = plain.pack([self._rank, text, gives_up])
        for number in itertools.count(self._next):
            if not self._thread.is_alive() or self._service.put(f"{self._name}/{number}", notice):
                return

    def _listen(self) -> None:
        service, text = Service(self._service.client), "-"
        with contextlib.suppress(Unreachable):
            while text:
                found = service.get(f"{self._name}/{self._next}", _LONG_SECONDS)
                if found is not None:
                    self._next += 1
                    rank, text, gives_up = plain.unpack(found)
                    self._note(rank, text, gives_up)

    def _note(self, rank: int, text: str, gives_up: bool) -> None:
        if gives_up:
            self.given_up[rank] = text
        if text and not (gives_up and rank == self._rank):  # There it is an error.
            _log.warning("%s", text)

    def _end(self) -> None:
        with contextlib.suppress(Exception):
            self.tell("")
        self._thread.join(_END_SECONDS)
