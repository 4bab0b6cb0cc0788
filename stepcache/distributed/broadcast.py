"""`Channel`: sends bytes from one process of an agreement round to several others."""

from __future__ import annotations

import hashlib
import logging
import secrets
from collections.abc import Callable
from typing import Any

from stepcache.distributed.failure_detection import Watch
from stepcache.distributed.relay import Relay, own_host, parent_of
from stepcache.jaxcompat.coordination import coordinator_address
from stepcache.storage import plain

CHUNK_BYTES = 1 << 20
"""The coordination service bounds the size of a message."""
RELAYED_BYTES = 4 << 20
"""Data of this size or more goes from process to process, and not through the service."""

_log = logging.getLogger("stepcache")


class Channel:
    """Sends bytes to other processes of a round: small data in chunks through the coordination
    service, large data through a tree of relays. If a relay fails, its receiver reads chunks.

    Args:
        place: the prefix of the round's names in the service.
        watch: detects lost processes.
        wait: waits for the value of a name.
    """

    def __init__(self, place: str, watch: Watch, wait: Callable[[str], bytes]):
        self._place, self._watch, self._wait = place, watch, wait
        self._service, self._rank = watch.service, watch.rank
        self._relays: list[Relay] = []
        self._in_chunks: list[str] = []

    def close(self, *, all_received: bool) -> None:
        """Closes the relays; frees the chunks in the service if all receivers have them."""
        for relay in self._relays:
            relay.close()
        for place in self._in_chunks if all_received else ():
            self._service.delete(f"{place}/")

    def send(self, name: str, data: bytes, receivers: int) -> None:
        """Sends data to this many processes. Only the first data sent under a name counts.

        Each receiver must call `receive`, as `send` waits until relays have passed the data on.
        """
        place = f"{self._place}/{name}/{self._rank}"
        chunks = [data[at : at + CHUNK_BYTES] for at in range(0, len(data), CHUNK_BYTES)] or [b""]
        source = self._relayed(data, receivers) if len(data) >= RELAYED_BYTES else None
        if not self._service.put(f"{place}/begin", plain.pack([len(chunks), source])):
            return
        if source is None or self._wait(f"{place}/relayed") != b"all":
            self._in_chunks.append(place)
            for number, chunk in enumerate(chunks):
                self._service.put(f"{place}/{number}", chunk)

    def receive(self, name: str, sender: int) -> bytes:
        """Waits for the data that a process sends under a name.

        Raises:
            RankLostError: a process was lost.
        """
        place = f"{self._place}/{name}/{sender}"
        count, source = plain.unpack(self._wait(f"{place}/begin"))
        if source is not None and (data := self._fetched(place, sender, source)) is not None:
            return data
        return b"".join([self._wait(f"{place}/{number}") for number in range(count)])

    def _relayed(self, data: bytes, receivers: int) -> dict[str, Any] | None:
        """Starts a relay; returns what receivers need to use it, or None if it cannot start."""
        token = secrets.token_bytes(32)
        try:
            relay = Relay(own_host(coordinator_address()), token, data)
        except OSError as error:
            _log.info("a program is sent through the coordination service: %s", error)
            return None
        self._relays.append(relay)
        return {
            "address": list(relay.address),
            "token": token,
            "size_bytes": len(data),
            "digest": hashlib.sha256(data).digest(),
            "receivers": receivers,
        }

    def _fetched(self, place: str, sender: int, source: dict[str, Any]) -> bytes | None:
        """Fetches data from a relay; returns None if that fails: then the sender sends chunks."""
        number = self._service.add(f"{place}/joined")  # Position in the tree of relays.
        data = None
        try:
            data = self._by_relay(f"{place}/at", number, source)
        except OSError as error:
            self._service.put(f"{place}/at/{number}", plain.pack(None))
            self._service.put(f"{place}/relayed", b"not all")
            _log.info("a program of rank %d is received in chunks: %s", sender, error)
        if self._service.add(f"{place}/ended") == source["receivers"]:
            self._service.put(f"{place}/relayed", b"all")
        return data

    def _by_relay(self, places: str, number: int, source: dict[str, Any]) -> bytes:
        data, address = bytearray(source["size_bytes"]), source["address"]
        relay = Relay(own_host(coordinator_address()), source["token"], data)
        self._relays.append(relay)
        self._service.put(f"{places}/{number}", plain.pack(list(relay.address)))
        if parent := parent_of(number):
            address = plain.unpack(self._wait(f"{places}/{parent}"))
        if address is None:
            raise ConnectionError("the relay before this one cannot listen")
        relay.fetch(tuple(address), self._watch.loss.raise_if_known)
        if hashlib.sha256(data).digest() != source["digest"]:
            raise ConnectionError("the data that arrived has another digest")
        return bytes(data)
