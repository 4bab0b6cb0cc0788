"""`Relay`: sends data from one process of a pod to many others, in a tree.

Each process passes chunks on while it receives them, so that the coordination service, a single
process, need not serve large data to thousands. The service transfers only the addresses, a token
that authenticates the processes of the pod, and the digest of the data.
"""

from __future__ import annotations

import contextlib
import hmac
import socket
import threading
import time
from collections.abc import Callable

CHILDREN = 3
"""How many processes receive from one."""
_CHUNK_BYTES = 1 << 20
_CONNECT_SECONDS = 5.0
_STALLED_SECONDS = 20.0
_SLICE_SECONDS = 0.5


def parent_of(number: int) -> int:
    """Returns the number of the process that a receiver reads from; the source is number 0."""
    return (number - 1) // CHILDREN


class Relay:
    """Sends data to every process that knows the token.

    Args:
        host: address of this machine for the receivers.
        token: authenticates the receivers.
        data: the data, or a buffer that `fetch` fills.

    Raises:
        OSError: this process cannot listen at the address.
    """

    def __init__(self, host: str, token: bytes, data: bytes | bytearray):
        self._token, self.data = token, data
        self._there = 0 if isinstance(data, bytearray) else len(data)  # Bytes that have arrived.
        self._closed = False
        self._moved = threading.Condition()
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        self._listener = socket.create_server((host, 0), family=family, backlog=64)
        self._listener.settimeout(_SLICE_SECONDS)
        self.address: tuple[str, int] = self._listener.getsockname()[:2]
        threading.Thread(target=self._accept, name="stepcache relay", daemon=True).start()

    def close(self) -> None:
        """Stops sending."""
        with self._moved:
            self._closed = True
            self._moved.notify_all()

    def _accept(self) -> None:
        with self._listener:
            while not self._closed:
                with contextlib.suppress(OSError):  # No connection within the time.
                    connection, _ = self._listener.accept()
                    serve = threading.Thread(target=self._serve, args=(connection,), daemon=True)
                    serve.start()

    def _serve(self, connection: socket.socket) -> None:
        sent, view = 0, memoryview(self.data)
        with contextlib.suppress(OSError), connection:
            connection.settimeout(_STALLED_SECONDS)
            given = connection.recv(len(self._token), socket.MSG_WAITALL)
            if not hmac.compare_digest(given, self._token):
                return
            while sent < len(view):
                with self._moved:
                    while self._there == sent and not self._closed:
                        self._moved.wait()
                    if self._there == sent:
                        return
                    chunk = view[sent : min(self._there, sent + _CHUNK_BYTES)]
                connection.sendall(chunk)
                sent += len(chunk)

    def fetch(self, address: tuple[str, int], check: Callable[[], None]) -> None:
        """Receives the data from the relay at an address.

        Args:
            address: host and port.
            check: raises if the data cannot arrive any more.

        Raises:
            OSError: the data does not arrive.
        """
        assert isinstance(self.data, bytearray)
        view, moved = memoryview(self.data), time.monotonic()
        try:
            with socket.create_connection(address, _CONNECT_SECONDS) as source:
                source.sendall(self._token)
                source.settimeout(_SLICE_SECONDS)
                while self._there < len(view):
                    try:
                        size = source.recv_into(view[self._there :][:_CHUNK_BYTES])
                    except TimeoutError:
                        check()
                        if time.monotonic() - moved > _STALLED_SECONDS:
                            raise
                        continue
                    if not size:
                        raise ConnectionError(f"{address[0]} closed the connection")
                    moved = time.monotonic()
                    with self._moved:
                        self._there += size
                        self._moved.notify_all()
        except BaseException:
            self.close()  # Its receivers must not wait for the rest.
            raise


def own_host(coordinator: tuple[str, int]) -> str:
    """Returns the address of this machine on the route to the coordinator. Sends nothing.

    Raises:
        OSError: there is no route.
    """
    family, kind, *_, address = socket.getaddrinfo(*coordinator, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, kind) as probe:
        probe.connect(address)
        return probe.getsockname()[0]
