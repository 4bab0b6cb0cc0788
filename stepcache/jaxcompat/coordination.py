"""JAX's coordination service: a key-value store that the processes of a pod share.

`jax.distributed.initialize` starts it in the process of rank 0. JAX has no public API for it.
"""

from __future__ import annotations

import contextlib
import ctypes
import socket
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any, TypeVar

from stepcache._process_hooks import quick_switching
from stepcache.jaxcompat.private import PRIVATE_API

if PRIVATE_API:
    from jax._src import distributed
else:
    distributed: Any = None

T = TypeVar("T")
_FOREVER_SECONDS = 20 * 86400.0  # In milliseconds it is still a 32-bit number.
_PROBE_SECONDS = 0.1
_TURNS = 20
_SHORTEST_PAUSE_SECONDS, _LONGEST_PAUSE_SECONDS = 0.001, 10.0


class Unreachable(Exception):
    """The service does not answer, or has disconnected this process."""


class Service:
    """The key-value store, through JAX's client of the service."""

    def __init__(self, client: Any):
        self.client = client

    def put(self, name: str, value: bytes) -> bool:
        """Sets the value of a name; returns False if the name has a value already."""
        try:
            self.client.key_value_set_bytes(name, value)
        except Exception as error:
            _expect(error, "ALREADY_EXISTS")
            return False
        return True

    def get(self, name: str) -> bytes:
        """Waits for the value of a name, in a single call.

        The service keeps a record of each call that times out, until the name has a value.
        """
        while True:
            try:
                return self.client.blocking_key_value_get_bytes(name, int(_FOREVER_SECONDS * 1000))
            except Exception as error:
                _expect(error, "DEADLINE_EXCEEDED")

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


def call_in_thread(call: Callable[[], T]) -> Future[T]:
    """Makes a call of the service in a new thread.

    A thread in such a call handles no signals and raises no errors. If the process of rank 0 is
    stopped, the call never returns.
    """
    future: Future[T] = Future()

    def make() -> None:
        try:
            future.set_result(call())
        except Exception as error:
            future.set_exception(error)

    threading.Thread(target=make, name="stepcache call", daemon=True).start()
    return future


class LimitedService:
    """The service, for calls that must end although the process of rank 0 is stopped.

    After `limit_seconds` a call raises `Unreachable`, and its thread waits on.
    """

    def __init__(self, service: Service, limit_seconds: float):
        self._service, self._limit_seconds = service, limit_seconds

    def put(self, name: str, value: bytes) -> bool:
        return self._limited(lambda: self._service.put(name, value))

    def listed(self, directory: str) -> dict[str, bytes]:
        return self._limited(lambda: self._service.listed(directory))

    def _limited(self, call: Callable[[], T]) -> T:
        if not threading.main_thread().is_alive():  # Python starts no threads at its end.
            return call()
        answer = call_in_thread(call)
        for _ in range(_TURNS):  # While this process is suspended, or gets no CPU, none passes.
            with contextlib.suppress(TimeoutError):
                return answer.result(self._limit_seconds / _TURNS)
        raise Unreachable(f"no answer within {self._limit_seconds:.0f} s")


def _expect(error: Exception, status: str) -> None:
    if not str(error).startswith(status):
        raise Unreachable(str(error)) from None


def service() -> Service | None:
    """Returns the service of this process's pod; None in a process without a pod."""
    if distributed is None or distributed.global_state.client is None:
        return None
    return Service(distributed.global_state.client)


def coordinator_address() -> tuple[str, int]:
    """Returns host and port of the service."""
    host, _, port = distributed.global_state.coordinator_address.rpartition(":")
    return host.strip("[]"), int(port)


def coordinator_refuses() -> bool:
    """Returns whether rank 0's machine refuses connections to the service: then the process of
    rank 0 has certainly ended. JAX's client, which aborts this process, does not say.
    """
    try:
        socket.create_connection(coordinator_address(), timeout=_PROBE_SECONDS).close()
    except OSError as error:
        return isinstance(error, ConnectionRefusedError)
    return False


def wait_until_coordinator_ends(is_over: Callable[[], bool]) -> bool:
    """Waits until the process of rank 0 has certainly ended.

    Holds an idle connection to the port of the service. It closes when the process ends, and also
    when it has been idle for two minutes; then the port accepts a new one. If the port has never
    accepted a connection, its refusals mean nothing: JAX may reach the service in another way.

    Args:
        is_over: returns whether to stop waiting.

    Returns:
        Whether the process has ended; False if `is_over`.
    """
    address = coordinator_address()
    pause, was_connected = 0.0, False
    while not is_over():
        started = time.monotonic()
        try:
            with quick_switching():
                connection = socket.create_connection(address)
            was_connected = True
            try:
                while connection.recv(4096):
                    pass
            finally:
                with quick_switching():
                    connection.close()
        except OSError as error:
            if was_connected and isinstance(error, ConnectionRefusedError):
                return not is_over()
        if time.monotonic() - started > 1:
            pause = 0.0  # It matters how soon a refusal is seen.
        else:
            pause = min(max(2 * pause, _SHORTEST_PAUSE_SECONDS), _LONGEST_PAUSE_SECONDS)
            time.sleep(pause)
    return False


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
