"""JAX's coordination service: names and values that the processes of a pod share.

`jax.distributed.initialize` starts it, in the process of rank 0. JAX has no public way to it.
"""

from __future__ import annotations

import ctypes
import socket
import time
from collections.abc import Callable
from typing import Any

from stepcache.jaxcompat.private import PRIVATE_API

if PRIVATE_API:
    from jax._src import distributed
else:
    distributed: Any = None


_PROBE_SECONDS = 0.1
_SHORTEST_PAUSE_SECONDS, _LONGEST_PAUSE_SECONDS = 0.001, 10.0


class Unreachable(Exception):
    """The service has gone, or has thrown this process out."""


class Service:
    """The names and values.

    Args:
        client: JAX's client of the service.

    Attributes:
        client: as given.
    """

    def __init__(self, client: Any):
        self.client = client

    def put(self, name: str, value: bytes) -> bool:
        """Gives a name a value; False where it has one already."""
        try:
            self.client.key_value_set_bytes(name, value)
        except Exception as error:
            _expect(error, "ALREADY_EXISTS")
            return False
        return True

    def get(self, name: str, timeout_seconds: float) -> bytes | None:
        """Waits for the value of a name; None where none has come in time."""
        try:
            return self.client.blocking_key_value_get_bytes(name, int(timeout_seconds * 1000))
        except Exception as error:
            _expect(error, "DEADLINE_EXCEEDED")
            return None

    def listed(self, directory: str) -> dict[str, bytes]:
        """The names below a directory, without it, and their values."""
        try:
            found = self.client.key_value_dir_get_bytes(directory)
        except Exception as error:
            _expect(error, "NOT_FOUND")
            return {}
        return {name.removeprefix(directory).lstrip("/"): value for name, value in found}

    def add(self, name: str) -> int:
        """Adds one to a counter, and returns what it is then."""
        try:
            return int(self.client.key_value_increment(name, 1))
        except Exception as error:
            raise Unreachable(str(error)) from None

    def delete(self, name: str) -> None:
        """Forgets a name, or a directory that ends with `/`."""
        try:
            self.client.key_value_delete(name)
        except Exception as error:
            _expect(error, "NOT_FOUND")


def _expect(error: Exception, status: str) -> None:
    if not str(error).startswith(status):
        raise Unreachable(str(error)) from None


def service() -> Service | None:
    """The service of this process's pod; None in a process of its own."""
    if distributed is None or distributed.global_state.client is None:
        return None
    return Service(distributed.global_state.client)


def coordinator_address() -> str:
    """Where the service is, as `host:port`."""
    return distributed.global_state.coordinator_address


def coordinator_refuses() -> bool:
    """Whether the process of rank 0, which runs the service, has certainly ended.

    Its machine then refuses connections to the port of the service. JAX's own client says nothing
    about it any more: it is busy with the abort of this process.
    """
    host, _, port = coordinator_address().rpartition(":")
    try:
        socket.create_connection((host.strip("[]"), int(port)), timeout=_PROBE_SECONDS).close()
    except ConnectionRefusedError:
        return True
    except OSError:
        return False
    return False


def wait_until_coordinator_ends(is_over: Callable[[], bool]) -> bool:
    """Waits until the process of rank 0 has certainly ended.

    Holds a connection to the port of the service, and says nothing there. It is closed with the
    process, and JAX's client, which hears of that too, begins to abort this one. The service also
    closes it when it has heard nothing for two minutes; then its port takes another.

    Args:
        is_over: whether nobody wants to know any more.

    Returns:
        Whether it has ended; False where `is_over`.
    """
    host, _, port = distributed.global_state.coordinator_address.rpartition(":")
    pause = _SHORTEST_PAUSE_SECONDS
    while not is_over():
        started = time.monotonic()
        try:
            with socket.create_connection((host.strip("[]"), int(port))) as connection:
                while connection.recv(4096):
                    pass
        except ConnectionRefusedError:
            return not is_over()
        except OSError:
            pass
        lasted = time.monotonic() - started > 1
        pause = _SHORTEST_PAUSE_SECONDS if lasted else min(2 * pause, _LONGEST_PAUSE_SECONDS)
        time.sleep(pause)
    return False


def replace_shutdown(replacement: Callable[[Callable[[], None]], None]) -> None:
    """Has JAX's next shutdown of the service, at the end of the process at the latest, replaced.

    Args:
        replacement: is given JAX's own, which is back in its place before.
    """
    state = distributed.global_state

    def shutdown() -> None:
        del state.shutdown
        replacement(state.shutdown)

    state.shutdown = shutdown


def abandon() -> None:
    """Has the end of this process not wait for the others of its pod, of which one has gone.

    JAX would wait for all of them, and then abort. What it holds of the service is never freed:
    freeing it would wait too.
    """
    state = distributed.global_state
    for held in (state.client, state.service, state.preemption_sync_manager):
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(held))
    state.client = state.service = state.preemption_sync_manager = None
