"""`LocalTransport`: sends requests to the server of a directory; see `local_server`."""

from __future__ import annotations

import contextlib
import errno
import json
import logging
import struct
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from stepcache.errors import VariablesError
from stepcache.link import plain
from stepcache.serving.channel import Channel
from stepcache.serving.messages import (
    MAX_BLOCK_BYTES,
    MalformedMessageError,
    Refused,
    from_plain,
    to_plain,
)
from stepcache.serving.shared_memory import Block, Opened, Place, Pool
from stepcache.serving.transport import Received
from stepcache.units import readable_bytes

ADDRESS_FILE = "server.json"
MAX_REQUEST_BYTES = 4 << 30
"""Of a request, without what is in shared memory."""
_SHORTEST_WAIT_SECONDS = 0.02
_SILENCE_SECONDS = 2.0
"""Time without a reply after which a request is sent again; it doubles each time."""
_MAX_FRAMES = 1 << 16

_log = logging.getLogger("stepcache")


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


def joined(frames: Sequence[Any]) -> bytes:
    """Returns a message of these frames: their number, their sizes, and their bytes."""
    sizes = [memoryview(frame).nbytes for frame in frames]
    return b"".join([struct.pack(f"<I{len(sizes)}Q", len(sizes), *sizes), *frames])


def splitter(max_bytes: int) -> Callable[[bytearray], list[bytes] | None]:
    """Returns a function that takes the frames of the first message out of received bytes.

    It returns None if the message has not arrived as a whole, and raises `MalformedMessageError` if
    it has more than `max_bytes`.
    """

    def split(received: bytearray) -> list[bytes] | None:
        if len(received) < 4:
            return None
        (count,) = struct.unpack_from("<I", received)
        if not 0 < count <= _MAX_FRAMES:
            raise MalformedMessageError(f"it has {count:,} frames")
        start = 4 + 8 * count
        if len(received) < start:
            return None
        sizes = struct.unpack_from(f"<{count}Q", received, 4)
        if sum(sizes) > max_bytes:
            raise MalformedMessageError(f"it has {sum(sizes):,} bytes")
        if len(received) < start + sum(sizes):
            return None
        frames, view = [], memoryview(received)
        for size in sizes:
            frames.append(bytes(view[start : start + size]))
            start += size
        view.release()
        del received[:start]
        return frames

    return split


class LocalTransport:
    """Sends the requests of a client, given its name, to the server of a directory."""

    def __init__(self, directory: Path | str, client: str):
        self._directory, self._client = Path(directory).expanduser().resolve(), client
        self._channel: Channel[list[bytes]] | None = None
        self._number = 0
        self._opened = Opened()
        self._pool = Pool()

    def allocate(self, size_bytes: int) -> Block:
        return self._pool.allocate(size_bytes)

    def request(self, message: Any, block: Block | None, deadline: float) -> Received | None:
        """See `Transport`. Repeats the request to each new server, and when no reply comes.

        A request that is too large is refused here.
        """
        self._number += 1
        place = block.place if block is not None else None
        header = plain.pack([self._number, self._client, place, to_plain(message)])
        frames = [header] if block is None or place is not None else [header, block.data]
        if (size_bytes := sum(map(len, frames))) > MAX_REQUEST_BYTES:
            sizes = readable_bytes(size_bytes), readable_bytes(MAX_REQUEST_BYTES)
            why = "a request would have {}; at most {} are taken".format(*sizes)
            return Received(Refused("malformed", why, 0), [])
        data = joined(frames)
        is_sent, wait, silence = False, _SHORTEST_WAIT_SECONDS, _SILENCE_SECONDS
        again = time.monotonic() + silence
        try:
            while True:
                is_sent = self._connect() and is_sent
                if not is_sent:
                    is_sent = self._sent(data)
                left = deadline - time.monotonic()
                if left <= 0:
                    return None
                if (received := self._waited(min(wait, left))) is not None:
                    return received
                wait = min(wait * 2, 1.0)
                if time.monotonic() > again:
                    if self._channel is None:
                        _log.warning("waiting for `stepcache serve` in %s", self._directory)
                    is_sent, silence = False, silence * 2
                    again = time.monotonic() + silence
        except BaseException:  # Ctrl-C may have lost a part of a message.
            self.close()
            raise

    def _connect(self) -> bool:
        """Connects to the server, if it runs. Returns whether the connection was there before."""
        if self._channel is not None:
            return True
        if (server := address(self._directory)) is not None:
            with contextlib.suppress(OSError):
                self._channel = Channel.to(server["address"], splitter(MAX_BLOCK_BYTES))
        return False

    def _sent(self, data: bytes) -> bool:
        """Sends a request. Returns False where nobody takes it."""
        if self._channel is None or self._channel.unsent_bytes:
            return False
        try:
            self._channel.send(data)
        except OSError:
            self.close()
        return self._channel is not None

    def _waited(self, seconds: float) -> Received | None:
        """Waits for the reply to the last request. Returns None if it does not come in time."""
        until = time.monotonic() + seconds
        while (left := until - time.monotonic()) > 0:
            if self._channel is None:
                time.sleep(left)
                return None
            try:
                self._channel.wait(left)
                self._channel.flush()
                frames = self._channel.receive()
            except (OSError, MalformedMessageError):  # The server has ended.
                self.close()
                time.sleep(min(left, _SHORTEST_WAIT_SECONDS))
                return None
            if frames is not None and (received := self._received(frames)) is not None:
                return received
        return None

    def _received(self, frames: list[bytes]) -> Received | None:
        """Returns a reply; None if it is that to an earlier request, or the server has ended."""
        number, places, message = plain.unpack(frames[0])
        if number != self._number:
            return None
        inline = iter(frames[1:])
        try:
            blocks = [
                self._opened.locked(Place(*place)) if place else bytes_of(next(inline))
                for place in places
            ]
        except OSError as error:
            if error.errno not in (errno.EACCES, errno.EPERM):
                return None
            raise VariablesError(
                "the memory of the host's process cannot be mapped",
                where=str(self._directory),
                got=str(error),
                hint="run both processes as one user and in one PID namespace",
            ) from error
        return Received(from_plain(message), blocks)

    def pause(self) -> None:
        time.sleep(0.01)

    def close(self) -> None:
        """Closes the connection. The server then releases the blocks of its last reply."""
        if self._channel is not None:
            self._channel.close()
            self._channel = None
