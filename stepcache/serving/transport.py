"""What a client needs of an engine: `Transport`, which carries requests to a host."""

from __future__ import annotations

import logging
import threading
import time
import weakref
from collections.abc import Callable
from typing import Any, NamedTuple, Protocol

import numpy as np

from stepcache.errors import VariablesError
from stepcache.serving.held import Block
from stepcache.serving.messages import Refused, Request

_log = logging.getLogger("stepcache")


class Version(NamedTuple):
    """A version of served variables.

    Attributes:
        number: the number of writes.
        token: stands for their sequence.
        moment: the number of all writes of the host, when this version was the newest.
        epoch: of the host then.
    """

    number: int
    token: int
    moment: int = 0
    epoch: int = 0


class Received(NamedTuple):
    """A reply, and the blocks that came with it.

    Attributes:
        message: the reply.
        blocks: their bytes: memory of the engine's, which never changes while something refers to
            the array.
    """

    message: Any
    blocks: list[np.ndarray]


class Transport(Protocol):
    """Carries requests to a host."""

    def allocate(self, size_bytes: int) -> Block: ...

    def request(self, message: Request, block: Any, deadline: float) -> Any:
        """The reply to a request; None if none came in time."""
        ...

    def pause(self) -> None:
        """Waits a moment before a request is made again."""
        ...

    def close(self) -> None: ...


def refusal(reply: Any, where: str) -> VariablesError:
    """The error for a reply that is not the expected one."""
    is_refused = isinstance(reply, Refused)
    why = reply.why if is_refused else f"a {type(reply).__name__} came back"
    hint = None
    if is_refused and reply.kind == "conflict":
        hint = "where several processes write, push updates: only one may carry"
    return VariablesError(f"the host of the variables refuses: {why}", where=where, hint=hint)


def keep_in_thread(keep: Callable[[], bool], seconds: float) -> threading.Thread:
    """Calls a bound method every so many seconds, until it returns False or its object is freed."""
    alive = weakref.WeakMethod(keep)

    def run() -> None:
        while (method := alive()) is not None:
            try:
                if not method():
                    return
            except Exception:  # The next request of the user's raises it too.
                _log.debug("a client of served variables", exc_info=True)
            del method
            time.sleep(seconds)

    thread = threading.Thread(target=run, name="stepcache client", daemon=True)
    thread.start()
    return thread
