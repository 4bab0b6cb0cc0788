"""`Transport`, the protocol by which a client sends requests to a host; one for each engine."""

from __future__ import annotations

import contextlib
import logging
import threading
import time
import weakref
from collections.abc import Callable
from typing import Any, NamedTuple, Protocol

import numpy as np

from stepcache.errors import VariablesError
from stepcache.serving.messages import Refused, Request, Values
from stepcache.serving.shared_memory import Block

READER = "stepcache read"
"""Name of the threads that read in the background."""
is_ending = threading.Event()
"""Set when the process ends and does not wait for these threads any more."""
_log = logging.getLogger("stepcache")


def place_of(place: str, host: int) -> str:
    """Returns the name or directory of a host, given that of host 0 of the same set."""
    return f"{place}/{host}" if host else place


class Version(NamedTuple):
    """A version of served variables on one host.

    Attributes:
        number: how often the variables were written.
        token: identifies the sequence of these writes.
        moment: how many writes, to any variables, the host had applied when it reported the
            version.
        epoch: epoch of the host then.
    """

    number: int
    token: int
    moment: int = 0
    epoch: int = 0


def versions_of(reply: Values) -> list[Version]:
    """Returns the versions in a reply."""
    rows = zip(reply.numbers, reply.tokens, strict=True)
    return [Version(*row, reply.moment, reply.epoch) for row in rows]


class Received(NamedTuple):
    """A reply, and the bytes of its blocks: they do not change while an array refers to them."""

    message: Any
    blocks: list[np.ndarray]


class Transport(Protocol):
    """Sends the requests of one client to a host. Not thread-safe."""

    def allocate(self, size_bytes: int) -> Block:
        """Allocates a block for a request."""
        ...

    def request(self, message: Request, block: Any, deadline: float) -> Any:
        """Sends a request and waits for the reply. Repeats it where it may be lost.

        Args:
            message: the request.
            block: the value of the request; the caller must not change it before this returns.
            deadline: by `time.monotonic`.

        Returns:
            The reply; None if none arrives in time.
        """
        ...

    def pause(self) -> None:
        """Sleeps before a request is repeated."""
        ...

    def close(self) -> None: ...


def refusal(reply: Any, where: str) -> VariablesError:
    """Returns the error for a reply of another type than the expected one."""
    is_refused = isinstance(reply, Refused)
    why = reply.why if is_refused else f"its reply is a {type(reply).__name__}"
    hint = None
    if is_refused and reply.kind == "conflict":
        hint = "where several processes write, push updates: only one may carry"
    return VariablesError(f"the host of the variables refuses: {why}", where=where, hint=hint)


def keep_in_thread(keep: Callable[[], bool], seconds: float) -> threading.Thread:
    """Starts a thread that calls a method at this interval, until the method returns False.

    The thread holds no reference to the method's object, and ends once the object is freed.
    """
    alive = weakref.WeakMethod(keep)

    def run() -> None:
        while (method := alive()) is not None:
            try:
                if not method():
                    return
            except Exception:  # The next request in a user's thread raises it too.
                _log.debug("a client of served variables failed in the background", exc_info=True)
            del method
            time.sleep(seconds)

    thread = threading.Thread(target=run, name="stepcache client", daemon=True)
    with contextlib.suppress(RuntimeError):  # The process is about to end.
        thread.start()
    return thread
