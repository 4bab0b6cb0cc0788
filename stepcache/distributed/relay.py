"""`Relay`: bytes from one process of a pod to many, in a tree: each passes chunks on as they come.

Else all would read them from the coordination service, which is one process for thousands. That
says where to connect, by which token processes of the pod know each other, and the digest by which
a receiver checks what came; the bytes go from process to process.
"""

from __future__ import annotations

import contextlib
import hmac
import socket
import threading
import time
from collections.abc import Callable

CHILDREN = 3
"""To how many others each process passes on what it receives."""
_CHUNK_BYTES = 1 << 20
_CONNECT_SECONDS = 5.0
_STALLED_SECONDS = 20.0
_SLICE_SECONDS = 0.5


def parent_of(number: int) -> int:
    """From which number a receiver gets the bytes; the source is 0, receivers count from 1."""
    return (number - 1) // CHILDREN


class Relay:
    """Passes bytes on to whoever knows the token, as far as they are there.

    Args:
        host: the address of this process at which others reach it.
        token: theirs.
        data: the bytes; a receiver's are filled in by `fetch`.
        complete: whether they are there already.

    Attributes:
        address: host and port.
        data: as given.

    Raises:
        OSError: nothing can listen there.
    """

    def __init__(self, host: str, token: bytes, data: bytes | bytearray, *, complete: bool):
        self._token, self.data = token, data
        self._there = len(data) if complete else 0
        self._closed = False
        self._moved = threading.Condition()
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        self._listener = socket.create_server((host, 0), family=family, backlog=64)
        self._listener.settimeout(_SLICE_SECONDS)
        self.address: tuple[str, int] = self._listener.getsockname()[:2]
        threading.Thread(target=self._accept, name="stepcache relay", daemon=True).start()

    def close(self) -> None:
        """Passes nothing on any more."""
        with self._moved:
            self._closed = True
            self._moved.notify_all()

    def _accept(self) -> None:
        with self._listener:
            while not self._closed:
                with contextlib.suppress(OSError):  # Nobody has come within the time.
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
        """Receives the bytes from another relay.

        Args:
            address: of that one.
            check: raises where there is no sense in waiting any more.

        Raises:
            OSError: they do not come.
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
                        raise ConnectionError(f"{address[0]} sends no more")
                    moved = time.monotonic()
                    with self._moved:
                        self._there += size
                        self._moved.notify_all()
        except BaseException:
            self.close()  # Those that wait for the rest here get it elsewhere.
            raise


def own_host(coordinator: str) -> str:
    """The address by which this machine is known on the way to another one; sends nothing.

    Args:
        coordinator: `host:port` of that one.

    Raises:
        OSError: there is no way.
    """
    host, _, port = coordinator.rpartition(":")
    family, kind, *_, address = socket.getaddrinfo(
        host.strip("[]"), int(port), type=socket.SOCK_DGRAM
    )[0]
    with socket.socket(family, kind) as probe:
        probe.connect(address)
        return probe.getsockname()[0]
