"""`LocalTransport`: sends requests to the server of a directory over ZeroMQ; see `local_server`."""

from __future__ import annotations

import contextlib
import errno
import functools
import json
import os
import time
from dataclasses import astuple
from pathlib import Path
from typing import Any

import numpy as np
import zmq

from stepcache.errors import VariablesError
from stepcache.serving.messages import StatusRequest, from_plain, to_plain
from stepcache.serving.shared_memory import Opened, Place, Pool, SharedBlock
from stepcache.serving.transport import Received
from stepcache.storage import plain
from stepcache.storage.load_markers import Process

ADDRESS_FILE = "server.json"
_SHORTEST_WAIT_SECONDS = 0.02
_SILENCE_SECONDS = 2.0
"""Time without a reply after which a request is sent again; it doubles each time."""
_LAST_REQUEST_MS = 100


def address(directory: Path) -> dict[str, Any] | None:
    """Returns address, epoch and process of the latest server of a directory; None for none."""
    try:
        found = json.loads((directory / ADDRESS_FILE).read_text())
    except (OSError, ValueError):
        return None
    is_whole = isinstance(found, dict) and {"address", "epoch", "process"} <= found.keys()
    return found if is_whole else None


def bytes_of(frame: Any) -> np.ndarray:
    """Returns the bytes of a frame, without a copy."""
    return np.frombuffer(frame, np.uint8) if len(frame) else np.empty(0, np.uint8)


@functools.cache
def _context_of(pid: int) -> zmq.Context:
    """Returns the ZeroMQ context of this process.

    It is never freed: the garbage collector would wait for open sockets.
    """
    return zmq.Context()


class LocalTransport:
    """Sends the requests of one client to the server of a directory. Not thread-safe.

    Args:
        directory: directory of the server.
        client: name of the client.
    """

    def __init__(self, directory: Path, client: str):
        self._directory, self._client = directory.expanduser().resolve(), client
        self._socket: Any = None
        self._server: dict[str, Any] | None = None
        self._number = 0
        self._opened = Opened()
        self._pool = Pool()

    def allocate(self, size_bytes: int) -> SharedBlock:
        """Allocates a block for a request."""
        return self._pool.allocate(size_bytes)

    def request(self, message: Any, block: SharedBlock | None, deadline: float) -> Received | None:
        """Sends a request and waits for the reply. Repeats the request to each new server, and when
        no reply comes.

        Args:
            message: the request.
            block: the value of the request; the caller must not change it before this returns.
            deadline: by `time.monotonic`.

        Returns:
            The reply; None if none arrives in time.
        """
        self._number += 1
        place = astuple(block.place) if block is not None and block.place is not None else None
        header = plain.pack([self._number, self._client, place, to_plain(message)])
        frames: list[Any] = [header]
        if block is not None and place is None:
            frames.append(block.data)
        is_sent, wait, silence = False, _SHORTEST_WAIT_SECONDS, _SILENCE_SECONDS
        again = time.monotonic() + silence
        is_connected = self._socket is not None  # Look for another server only without a reply.
        while True:
            if not is_connected:
                is_sent = self._follow_server() and is_sent
            if not is_sent and self._socket is not None:
                with contextlib.suppress(zmq.Again):
                    self._socket.send_multipart(frames, zmq.NOBLOCK)
                    is_sent = True
            left = deadline - time.monotonic()
            if left <= 0:
                return None
            if self._socket is None:
                time.sleep(min(wait, left))
            else:
                self._socket.rcvtimeo = int(min(wait, left) * 1000) + 1
                with contextlib.suppress(zmq.Again):
                    if (received := self._receive()) is not None:
                        return received
                    continue
            is_connected, wait = False, min(wait * 2, 1.0)
            if time.monotonic() > again:  # A broken connection loses replies.
                is_sent, silence = False, silence * 2
                again = time.monotonic() + silence

    def _follow_server(self) -> bool:
        """Connects to the latest server. Returns False if that is a new connection, or none."""
        if self._socket is not None and self._server is not None:
            process = Process.parse(self._server["process"])
            if process is not None and not process.has_ended():
                return True
        server = address(self._directory)
        if server is None or server == self._server:
            return self._socket is not None
        self.close_socket()
        self._socket = _context_of(os.getpid()).socket(zmq.DEALER)
        self._socket.setsockopt(zmq.LINGER, 0)
        self._socket.connect(server["address"])
        self._server = server
        return False

    def _receive(self) -> Received | None:
        frames = self._socket.recv_multipart(copy=False)
        number, places, message = plain.unpack(bytes(frames[0].buffer))
        if number != self._number:
            return None  # The reply to an earlier request.
        inline = iter(frames[1:])
        try:
            blocks = [
                self._opened.locked(Place(*place)) if place else bytes_of(next(inline).buffer)
                for place in places
            ]
        except OSError as error:
            if error.errno not in (errno.EACCES, errno.EPERM):
                return None  # The server has just ended.
            raise VariablesError(
                "the memory of the host's process cannot be mapped",
                where=str(self._directory),
                got=str(error),
                hint="run both processes as one user and in one PID namespace",
            ) from error
        return Received(from_plain(message), blocks)

    def pause(self) -> None:
        """Sleeps before a request is repeated."""
        time.sleep(0.01)

    def close_socket(self) -> None:
        """Closes the connection."""
        if self._socket is not None:
            self._socket.close()
            self._socket = None

    def close(self) -> None:
        """Releases the blocks of the last reply, and closes the connection."""
        if self._socket is not None:
            # The server keeps the blocks of its last reply until the next request.
            self._socket.setsockopt(zmq.LINGER, _LAST_REQUEST_MS)
            header = plain.pack([self._number + 1, self._client, None, to_plain(StatusRequest())])
            with contextlib.suppress(zmq.Again):
                self._socket.send(header, zmq.NOBLOCK)
        self.close_socket()
