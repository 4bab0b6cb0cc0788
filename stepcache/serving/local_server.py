"""The local engine: a host of variables for the processes of one machine, over a Unix socket.

One thread serves the messages one after the other. Large values are not sent: a reader maps the
memory in which the host holds them, and the host maps the memory of a writer. The server keeps the
blocks of a reply until the client's next request, before which the client locks them. An actor of
the ray engine serves the processes of its machine in the same way.
"""

from __future__ import annotations

import json
import threading
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from stepcache.link.processes import Process, socket_path
from stepcache.serving import host_directory
from stepcache.serving.channel import Channel, Channels, Listener
from stepcache.serving.durable_host import TEND_SECONDS, DurableHost
from stepcache.serving.local_transport import (
    ADDRESS_FILE,
    MAX_REQUEST_BYTES,
    bytes_of,
    joined,
    splitter,
)
from stepcache.serving.messages import MalformedMessageError, Reply, from_plain, to_plain
from stepcache.serving.shared_memory import Block, Opened, Place, Pool, allow_many_files
from stepcache.storage import plain
from stepcache.storage.private_files import replace_file

_SWEEP_SECONDS = 2.0


_Channel = Channel[list[bytes]]


@dataclass(eq=False, slots=True)
class _Reply:
    """The last reply to a client: its number, its blocks, and where it was sent."""

    number: int
    blocks: list[Block]
    channel: _Channel


class LocalServer:
    """Serves the variables of one directory, until it is stopped.

    Args:
        directory: directory of the snapshots; clients find the server by it.
        durable: the host of this directory, if another engine serves it too. Its blocks must be
            those of a `Pool`.
        options: options of `DurableHost`.

    Attributes:
        directory, host: those of the durable host.
        lock: held while the durable host is used.

    Raises:
        VariablesError: another process serves this directory, or its snapshots cannot be read.
        CacheDirectoryError: other users can write to the directory.
    """

    def __init__(self, directory: Path, durable: DurableHost | None = None, **options: Any):
        self._opened, self.lock = Opened(), threading.Lock()
        # Another engine may give the host work at any time.
        self._idle_seconds = 10 * TEND_SECONDS if durable is None else TEND_SECONDS
        self._durable = durable or DurableHost(
            directory, Pool().allocate, has_images=True, **options
        )
        self.directory, self.host = self._durable.directory, self._durable.host
        self._counts = self._durable.counts
        self._sent: dict[str, _Reply] = {}  # The last one to each client.
        self._processes: set[Process] = set()
        self._stopping = threading.Event()
        allow_many_files()
        address = socket_path(self.directory)
        self._channels: Channels[_Channel] = Channels(
            Listener(address), lambda made: Channel(made, splitter(MAX_REQUEST_BYTES))
        )
        data = {"address": address, "epoch": self.host.epoch, "process": str(Process.current())}
        with host_directory.unusable(self.directory):
            replace_file(self.directory / ADDRESS_FILE, json.dumps(data))

    def run(self) -> bool:
        """Serves until `stop`. Returns whether its last snapshot holds all writes."""
        try:
            self.serve()
            return self._durable.finish()
        finally:
            self._durable.close()

    def serve(self) -> None:
        """Serves until `stop`, then closes the socket. Clients wait for the next server."""
        swept = time.monotonic()
        try:
            while not self._stopping.is_set():
                timeout = TEND_SECONDS if self._durable.is_waiting else self._idle_seconds
                is_tended = False
                for channel, found in self._channels.received(timeout):
                    is_tended |= self._attend(channel, found)
                if not is_tended:
                    with self.lock:
                        self._durable.tend()
                if time.monotonic() > swept + _SWEEP_SECONDS:
                    self._sweep()
                    swept = time.monotonic()
        finally:
            self._channels.close()

    def stop(self) -> None:
        """Makes `run` and `serve` return. Signal handlers and other threads may call it."""
        self._stopping.set()

    def _attend(self, channel: _Channel, found: list[bytes] | Exception) -> bool:
        """Serves a request, or closes the connection that has ended with an error.

        Returns whether it has tended the durable host too.
        """
        with self.lock:
            if self._stopping.is_set():
                return False
            if isinstance(found, list):
                self._serve(channel, found)
                self._durable.tend()
                return True
            if isinstance(found, MalformedMessageError):
                self._durable.refuse_malformed(found)
            # Its client does not read the blocks of replies any more.
            for client in [name for name, each in self._sent.items() if each.channel is channel]:
                del self._sent[client]
        self._channels.close_one(channel)
        return False

    def _serve(self, channel: _Channel, frames: list[bytes]) -> None:
        started = time.perf_counter()
        self._counts["bytes received"] += sum(map(len, frames))
        number, client, payload = 0, "", None
        try:
            number, client, place, message = _envelope(frames)
            if client in self._sent and number > self._sent[client].number:
                del self._sent[client]  # The client has locked the blocks that it still reads.
            if place is not None:
                payload = self._opened.open(place)
            elif len(frames) > 1:
                payload = bytes_of(frames[1])
        except (MalformedMessageError, OSError) as error:
            reply: Reply = self._durable.refuse_malformed(error)
            self._send(channel, number, client, reply, [])
            return
        reply, blocks = self._durable.handle(client, message, payload)
        if hasattr(message, "process") and (process := Process.parse(message.process)):
            self._processes.add(process)
        self._send(channel, number, client, reply, blocks)
        self._durable.seconds.append(time.perf_counter() - started)

    def _send(
        self, channel: _Channel, number: int, client: str, reply: Reply, blocks: list[Block]
    ) -> None:
        places = [block.place for block in blocks]
        if any(places):
            sent = self._sent.setdefault(client, _Reply(number, [], channel))
            sent.blocks.extend(blocks)
            if number >= sent.number:  # Else it was late, by a connection that may have ended.
                sent.channel = channel
        header = plain.pack([number, places, to_plain(reply)])
        inline = [block.data for block in blocks if block.place is None]
        self._counts["bytes sent"] += len(header) + sum(each.size for each in inline)
        self._counts["bytes shared"] += sum(each.size_bytes for each in places if each)
        if channel.unsent_bytes:  # The client does not read; one that is alive asks again.
            self._counts["replies dropped"] += 1
            return
        self._channels.send(channel, joined([header, *inline]))

    def _sweep(self) -> None:
        """Releases the blocks of processes that have ended."""
        ended = {each for each in self._processes if each.is_local() and each.has_ended()}
        self._processes -= ended
        for process in ended:
            self._opened.forget(process.pid)
        texts = {str(each) for each in ended}  # Forks of these may have their sockets.
        for client in [name for name in self._sent if self.host.processes.get(name) in texts]:
            del self._sent[client]


def _envelope(frames: list[bytes]) -> tuple[int, str, Place | None, Any]:
    """Decodes a request: its number, client, place of its block or None, and message."""
    if len(frames) > 2:
        raise MalformedMessageError(f"a request has 1 or 2 frames, not {len(frames)}")
    try:
        number, client, place, message = plain.unpack(frames[0])
    except Exception:
        raise MalformedMessageError("its header cannot be decoded") from None
    if not plain.fits([number, client], tuple[int, str]) or len(client) > 64:
        raise MalformedMessageError("a field of its header has another type")
    place = None if place is None else Place.of(place)
    return number, client, place, from_plain(message)
