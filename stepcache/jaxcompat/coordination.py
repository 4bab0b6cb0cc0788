"""JAX's coordination service: a key-value store that the processes of a pod share.

`jax.distributed.initialize` starts it in the process of rank 0. JAX has no public API for it.
"""

from __future__ import annotations

import contextlib
import ctypes
from collections.abc import Callable
from typing import Any

from stepcache.jaxcompat.private import PRIVATE_API

if PRIVATE_API:
    from jax._src import distributed
else:
    distributed: Any = None


class Unreachable(Exception):
    """The service does not answer, or has disconnected this process."""


class Service:
    """The key-value store, through JAX's client of the service."""

    def __init__(self, client: Any):
        self.client = client

    def put(self, name: str, value: bytes, *, replace: bool = False) -> bool:
        """Sets the value of a name; returns False if it has one that is not replaced."""
        try:
            self.client.key_value_set_bytes(name, value, replace)
        except Exception as error:
            _expect(error, "ALREADY_EXISTS")
            return False
        return True

    def get(self, name: str, seconds: float) -> bytes | None:
        """Waits for the value of a name, in a single call; returns None if it has none in time.

        The service keeps a record of a call that times out, until the name has a value.
        """
        try:
            return self.client.blocking_key_value_get_bytes(name, int(seconds * 1000))
        except Exception as error:
            _expect(error, "DEADLINE_EXCEEDED")
            return None

    def listed(self, directory: str) -> dict[str, bytes]:
        """Returns the values below a directory, by their names in it."""
        try:
            found = self.client.key_value_dir_get_bytes(directory)
        except Exception as error:
            _expect(error, "NOT_FOUND")
            return {}
        return {name.removeprefix(directory).lstrip("/"): value for name, value in found}

    def add(self, name: str) -> int:
        """Increments a counter, and returns its new value."""
        try:
            return int(self.client.key_value_increment(name, 1))
        except Exception as error:
            raise Unreachable(str(error)) from None

    def delete(self, name: str) -> None:
        """Frees a name, or a directory that ends with `/`. Does not fail."""
        with contextlib.suppress(Exception):
            self.client.key_value_delete(name)


def _expect(error: Exception, status: str) -> None:
    if not str(error).startswith(status):
        raise Unreachable(str(error)) from None


def service() -> Service | None:
    """Returns the service of this process's pod; None in a process without a pod."""
    if distributed is None or distributed.global_state.client is None:
        return None
    return Service(distributed.global_state.client)


def replace_shutdown(replacement: Callable[[Callable[[], None]], None]) -> None:
    """Replaces JAX's next shutdown of the service, which JAX calls at exit at the latest.

    The replacement receives JAX's own function, which is restored before.
    """
    state = distributed.global_state

    def shutdown() -> None:
        del state.shutdown
        replacement(state.shutdown)

    state.shutdown = shutdown


def abandon() -> None:
    """Makes JAX forget the service, so that this process ends without waiting for its pod.

    JAX would wait for all processes, and then abort. Its client is never freed: that waits too.
    """
    state = distributed.global_state
    for held in (state.client, state.service, state.preemption_sync_manager):
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(held))
    state.client = state.service = state.preemption_sync_manager = None
