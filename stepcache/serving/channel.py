"""`Channel` and `Channels`: messages over sockets, sent and received by the thread that needs them.

A start of a step passes four processes' threads. A library that has a thread of its own for its
sockets, such as ZeroMQ, wakes eight, and a wake-up costs more than all else on the way.
"""

from __future__ import annotations

import contextlib
import errno
import hmac
import os
import select
import selectors
import socket
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Generic, TypeVar

from stepcache.serving.messages import MalformedMessageError

T = TypeVar("T")
C = TypeVar("C", bound="Channel[Any]")

_NO_SIGNAL = getattr(socket, "MSG_NOSIGNAL", 0)  # Else SIGPIPE ends programs that do not ignore it.
_CONNECT_SECONDS = 10.0
_WAITING_TO_CONNECT = 1024
_SPIN_SECONDS = 200e-6
"""Time for which a reader polls before it sleeps: to be woken would take about as long."""
_SLICE_SECONDS, _BUSY_SECONDS = 1e-3, 0.1
_NO_MORE_FILES, _FULL_SECONDS = (errno.EMFILE, errno.ENFILE), 0.02
_CHUNK_BYTES = 1 << 16
_MAX_CHUNK_BYTES = 1 << 22


class Listener(socket.socket):
    """A Unix socket that is bound to a path, also where an earlier server has left one.

    Once it is closed the path is free, unless a later server has taken it.
    """

    def __init__(self, path: str):
        super().__init__(socket.AF_UNIX, socket.SOCK_STREAM)
        self._path = Path(path)
        self._path.unlink(missing_ok=True)
        self.bind(path)
        self._inode = self._path.stat().st_ino

    def close(self) -> None:
        """Closes the socket, and removes it."""
        if self.fileno() < 0:  # Another file may have the number by now.
            return
        with contextlib.suppress(OSError):
            if self._path.stat().st_ino == self._inode:
                self._path.unlink()
        super().close()


class Channel(Generic[T]):
    """One end of a connection. Nothing blocks but `wait`, which alone is thread-safe.

    Args:
        made: a connected stream socket, which the channel then owns.
        decode: takes the first message out of the bytes that were received; returns None if it has
            not arrived as a whole, and raises `MalformedMessageError` if it is no message.
        key: what the other end has to send first; empty where only its user can connect.

    Raises:
        OSError: what sends or receives does, once the other end has been closed.
        MalformedMessageError: what receives does; the channel is of no use any more.
    """

    def __init__(
        self, made: socket.socket, decode: Callable[[bytearray], T | None], key: bytes = b""
    ):
        made.setblocking(False)
        if made.family != socket.AF_UNIX:
            _set_options(made)
        self._decode, self._key = decode, key
        self._socket, self._spin = made, _Spin()
        self._received, self._unsent = bytearray(), bytearray()
        self._chunk_bytes = _CHUNK_BYTES

    @classmethod
    def to(
        cls, address: str, decode: Callable[[bytearray], T | None], key: bytes = b""
    ) -> Channel[T]:
        """Connects to the path of a Unix socket, or to `host:port`. `OSError` if nobody listens."""
        host, _, port = address.rpartition(":")
        if not address.startswith("/"):
            made = socket.create_connection((host, int(port)), _CONNECT_SECONDS)
            made.sendall(key)
            return cls(made, decode)
        made = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        made.settimeout(_CONNECT_SECONDS)  # Else it waits while too many others wait there.
        try:
            made.connect(address)
        except OSError:
            made.close()
            raise
        return cls(made, decode)

    def fileno(self) -> int:
        """Returns the number of the socket, for selectors."""
        return self._socket.fileno()

    @property
    def unsent_bytes(self) -> int:
        """What the system has not taken yet."""
        return len(self._unsent)

    def send(self, data: bytes) -> None:
        """Sends an encoded message; what the system does not take now is kept for `flush`."""
        sent = 0
        if not self._unsent:
            with contextlib.suppress(BlockingIOError):
                sent = self._socket.send(data, _NO_SIGNAL)
        if sent < len(data):
            self._unsent += data[sent:] if sent else data

    def flush(self) -> bool:
        """Sends what is kept, as far as the system takes it. Returns whether it has taken all."""
        with contextlib.suppress(BlockingIOError):
            while self._unsent:
                sent = self._socket.send(self._unsent[:_MAX_CHUNK_BYTES], _NO_SIGNAL)
                del self._unsent[:sent]
        return not self._unsent

    def receive(self) -> T | None:
        """Returns the next message; None if it has not arrived as a whole."""
        while (message := self.taken()) is None and self.read():
            pass
        return message

    def taken(self) -> T | None:
        """Returns the next message of what was read; None if it was not read as a whole."""
        if self._key and not self._is_let_in():
            return None
        return self._decode(self._received)

    def _is_let_in(self) -> bool:
        """Whether the other end has sent the key."""
        size = len(self._key)
        if len(self._received) < size:
            return False
        if not hmac.compare_digest(self._received[:size], self._key):
            raise MalformedMessageError("its sender does not have the key")
        del self._received[:size]
        self._key = b""
        return True

    def read(self) -> bool:
        """Reads what has arrived, up to some size. Returns whether there was anything."""
        try:
            chunk = self._socket.recv(self._chunk_bytes)
        except BlockingIOError:
            return False
        if not chunk:
            raise ConnectionResetError("the other end has been closed")
        self._received += chunk
        is_large = len(chunk) == self._chunk_bytes
        self._chunk_bytes = _MAX_CHUNK_BYTES if is_large else _CHUNK_BYTES
        return True

    def wait(self, seconds: float | None = None, *, to_send: bool = False) -> None:
        """Waits until something arrives, or until `flush` can go on. Several threads may wait.

        Args:
            seconds: to wait at most; None for no limit.
            to_send: wait for `flush` alone.
        """
        waiting = select.poll()
        mask = select.POLLIN | select.POLLOUT if self._unsent else select.POLLIN
        mask = select.POLLOUT if to_send else mask
        waiting.register(self._socket, mask)
        if not self._spin(lambda: waiting.poll(0)):
            waiting.poll(None if seconds is None else 1000 * seconds)

    def close(self, *, for_all: bool = True) -> None:
        """Closes the socket; `for_all` ends it for other processes that have it too."""
        with contextlib.suppress(OSError):
            if for_all:
                self._socket.shutdown(socket.SHUT_RDWR)
        self._socket.close()


class Channels(Generic[C]):
    """Accepts connections, and sends and receives for all of them. Not thread-safe.

    Args:
        listener: a bound stream socket, which this object then owns.
        make: makes the channel of a socket that was accepted.
    """

    def __init__(self, listener: socket.socket, make: Callable[[socket.socket], C]):
        listener.listen(_WAITING_TO_CONNECT)
        listener.setblocking(False)
        self._listener, self._make = listener, make
        self._selector = selectors.DefaultSelector()
        self._selector.register(listener, selectors.EVENT_READ)
        self._is_busy, self._spin = False, _Spin()

    def received(self, seconds: float) -> Iterator[tuple[C, Any]]:
        """Waits for messages, and sends what is kept.

        Args:
            seconds: to wait at most.

        Yields:
            Each message with its channel. In place of a message an error, after which the channel
            has to be closed: `MalformedMessageError`, or `OSError` where the other end is closed.
        """
        found = self._spin(lambda: self._selector.select(0)) if self._is_busy else []
        found = found or self._selector.select(seconds)
        self._is_busy = bool(found)
        for key, _ in found:
            if key.data is not None:
                yield from self._received(key.data)
                continue
            try:
                channel = self._make(self._listener.accept()[0])
                self._selector.register(channel, selectors.EVENT_READ, channel)
            except OSError as error:
                if error.errno in _NO_MORE_FILES:  # Until some are closed, the connection waits.
                    time.sleep(_FULL_SECONDS)

    def _received(self, channel: C) -> Iterator[tuple[C, Any]]:
        try:
            if channel.unsent_bytes and channel.flush():
                self._selector.modify(channel, selectors.EVENT_READ, channel)
            channel.read()
            # Who gets a message may close its channel.
            while channel.fileno() >= 0 and (message := channel.taken()) is not None:
                yield channel, message
        except (MalformedMessageError, OSError) as error:
            yield channel, error

    def send(self, channel: C, data: bytes) -> None:
        """Sends an encoded message, now or later. `received` says if the other end is closed."""
        is_kept = channel.unsent_bytes > 0
        with contextlib.suppress(OSError):
            channel.send(data)
        if channel.unsent_bytes and not is_kept:
            both = selectors.EVENT_READ | selectors.EVENT_WRITE
            self._selector.modify(channel, both, channel)

    def close_one(self, channel: C) -> None:
        """Closes a channel, if it is open."""
        if channel.fileno() >= 0:
            self._selector.unregister(channel)
            channel.close()

    def close(self) -> None:
        """Closes all channels, and the socket that accepts them."""
        self._listener.close()
        for key in list(self._selector.get_map().values()):
            if key.data is not None:
                key.data.close()
        self._selector.close()


class _Spin:
    """Polls for a short time before its user sleeps, and lets others run meanwhile.

    It stops for a while when another program has taken a time slice: a thread that yields gets its
    next turn after all others, and one that is woken gets it before them.
    """

    def __init__(self):
        self._begins = 0.0

    def __call__(self, poll: Callable[[], list[Any]]) -> list[Any]:
        """Returns what was found; an empty list for nothing."""
        now = time.perf_counter()
        if now < self._begins:
            return []
        until = now + _SPIN_SECONDS
        while not (found := poll()) and now < until:
            before = now
            os.sched_yield()
            now = time.perf_counter()
            if now - before > _SLICE_SECONDS:
                self._begins = now + _BUSY_SECONDS
        return found


def _set_options(made: socket.socket) -> None:
    """Has a connection between machines send at once, and notice that the other one is gone."""
    made.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    made.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for option, seconds in (("TCP_KEEPIDLE", 5), ("TCP_KEEPINTVL", 5), ("TCP_KEEPCNT", 4)):
        if hasattr(socket, option):
            made.setsockopt(socket.IPPROTO_TCP, getattr(socket, option), seconds)
