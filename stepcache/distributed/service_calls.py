"""Calls of the coordination service that have to end; and whether rank 0, its host, has ended."""

from __future__ import annotations

import contextlib
import socket
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from typing import TypeVar

from stepcache._process_hooks import quick_switching
from stepcache.jaxcompat.coordination import Service, Unreachable, coordinator_address

T = TypeVar("T")
_PROBE_SECONDS = 0.1
_TURNS = 20
_SHORTEST_PAUSE_SECONDS, _LONGEST_PAUSE_SECONDS = 0.001, 10.0


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
