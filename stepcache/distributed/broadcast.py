"""`Channel`: sends bytes from one process of an agreement round to several others."""

from __future__ import annotations

from collections.abc import Callable

from stepcache.distributed.failure_detection import Watch
from stepcache.link import plain

CHUNK_BYTES = 1 << 20
"""The coordination service bounds the size of a message."""


class Channel:
    """Sends bytes to other processes of a round, in chunks through the coordination service.

    Args:
        place: the prefix of the round's names in the service.
        watch: detects lost processes.
        wait: waits for the value of a name.
    """

    def __init__(self, place: str, watch: Watch, wait: Callable[[str], bytes]):
        self._place, self._wait = place, wait
        self._service, self._rank = watch.service, watch.rank
        self._sent: list[str] = []

    def close(self, *, all_received: bool) -> None:
        """Frees the chunks in the service if all receivers have them."""
        for place in self._sent if all_received else ():
            self._service.delete(f"{place}/")

    def send(self, name: str, data: bytes) -> None:
        """Sends data to all processes that call `receive`. Only the first under a name counts."""
        place = f"{self._place}/{name}/{self._rank}"
        chunks = [data[at : at + CHUNK_BYTES] for at in range(0, len(data), CHUNK_BYTES)] or [b""]
        if not self._service.put(f"{place}/begin", plain.pack(len(chunks))):
            return
        self._sent.append(place)
        for number, chunk in enumerate(chunks):
            self._service.put(f"{place}/{number}", chunk)

    def receive(self, name: str, sender: int) -> bytes:
        """Waits for the data that a process sends under a name.

        Raises:
            RankLostError: a process was lost.
        """
        place = f"{self._place}/{name}/{sender}"
        count = plain.unpack(self._wait(f"{place}/begin"))
        return b"".join([self._wait(f"{place}/{number}") for number in range(count)])
