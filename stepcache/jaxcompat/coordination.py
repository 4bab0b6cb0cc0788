"""JAX's coordination service: names and values that the processes of a pod share.

`jax.distributed.initialize` starts it, in the process of rank 0. JAX has no public way to it.
"""

from __future__ import annotations

import ctypes
import socket
import threading
import time
import zlib
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from typing import Any, TypeVar

import msgpack

from stepcache.jaxcompat.private import PRIVATE_API
from stepcache.units import spans_of

if PRIVATE_API:
    from jax._src import distributed
else:
    distributed: Any = None


T = TypeVar("T")
Brief = Callable[[dict[int, bytes]], Mapping[int, bytes]]
"""Makes of what each rank said what all have to know of it."""

_FOREVER_SECONDS = 20 * 86400.0  # In milliseconds it is still a 32-bit number.
_PROBE_SECONDS = 0.1
_SHORTEST_PAUSE_SECONDS, _LONGEST_PAUSE_SECONDS = 0.001, 10.0


class Unreachable(Exception):
    """The service has gone, or has thrown this process out."""


class Service:
    """The names and values.

    Args:
        client: JAX's client of the service.

    Attributes:
        client: as given.
    """

    def __init__(self, client: Any):
        self.client = client

    def put(self, name: str, value: bytes) -> bool:
        """Gives a name a value; False where it has one already."""
        try:
            self.client.key_value_set_bytes(name, value)
        except Exception as error:
            _expect(error, "ALREADY_EXISTS")
            return False
        return True

    def get(self, name: str) -> bytes:
        """Waits for the value of a name.

        In one call, however long that takes: the service keeps a record of each call that ends
        without an answer for as long as the name has no value.
        """
        while True:
            try:
                return self.client.blocking_key_value_get_bytes(name, int(_FOREVER_SECONDS * 1000))
            except Exception as error:
                _expect(error, "DEADLINE_EXCEEDED")

    def listed(self, directory: str) -> dict[str, bytes]:
        """The names below a directory, without it, and their values."""
        try:
            found = self.client.key_value_dir_get_bytes(directory)
        except Exception as error:
            _expect(error, "NOT_FOUND")
            return {}
        return {name.removeprefix(directory).lstrip("/"): value for name, value in found}

    def add(self, name: str) -> int:
        """Adds one to a counter, and returns what it is then."""
        try:
            return int(self.client.key_value_increment(name, 1))
        except Exception as error:
            raise Unreachable(str(error)) from None

    def say(self, place: str, rank: int, count: int, said: bytes, brief: Brief | None) -> int:
        """Says something to all; what all say is then the value of `outcome_of(place)`.

        The process that comes last reads what each has said and writes the outcome, once for all.
        So the others read as much as differs, and not as many values as there are processes.

        Args:
            place: a name that all of them use, once.
            rank: of this process.
            count: how many have to say something.
            said: by this one.
            brief: shortens what they said.

        Returns:
            How many have spoken so far.
        """
        self.put(f"{place}/said/{rank}", said)
        turn = self.add(f"{place}/count")
        if turn == count:
            try:
                voices = self.said(place)
                heard: Mapping[int, bytes] = brief(voices) if brief is not None else voices
                outcome = pack_outcome(voices=heard)
            except Exception as error:  # Nobody may wait for an outcome in vain.
                outcome = pack_outcome(failed=f"{type(error).__name__}: {error}")
            self.put(outcome_of(place), outcome)
        return turn

    def said(self, place: str) -> dict[int, bytes]:
        """What each rank has said, as it was. Only for one process: it grows with their number."""
        voices = self.listed(f"{place}/said/")
        return {int(rank): voices[rank] for rank in sorted(voices, key=int)}

    def delete(self, name: str) -> None:
        """Forgets a name, or a directory that ends with `/`."""
        try:
            self.client.key_value_delete(name)
        except Exception as error:
            _expect(error, "NOT_FOUND")


def outcome_of(place: str) -> str:
    """The name that has the outcome of what was said at a place."""
    return f"{place}/outcome"


def pack_outcome(voices: Mapping[int, bytes] | None = None, **more: Any) -> bytes:
    """What all said, where ranks that said the same take the place of one; or something else."""
    if voices is not None:
        groups: dict[bytes, list[int]] = {}
        for rank, voice in voices.items():
            groups.setdefault(voice, []).append(rank)
        more["voices"] = [[spans_of(ranks), voice] for voice, ranks in groups.items()]
    packed = msgpack.packb(more, unicode_errors="surrogatepass")
    assert packed is not None
    return zlib.compress(packed, 1)


def unpack_outcome(outcome: bytes) -> dict[str, Any]:
    """What was packed, with the voices by rank."""
    found = msgpack.unpackb(zlib.decompress(outcome), unicode_errors="surrogatepass")
    if "voices" in found:
        by_rank = {
            rank: voice
            for spans, voice in found["voices"]
            for low, high in spans
            for rank in range(low, high + 1)
        }
        found["voices"] = dict(sorted(by_rank.items()))
    return found


def asked(call: Callable[[], T]) -> Future[T]:
    """A call of the service, made in a thread of its own.

    While a thread is in such a call it handles no signals, and raises no loss that becomes known.
    Where the process of rank 0 is stopped, the call never returns.
    """
    future: Future[T] = Future()

    def make() -> None:
        try:
            future.set_result(call())
        except Unreachable as error:
            future.set_exception(error)

    threading.Thread(target=make, name="stepcache call", daemon=True).start()
    return future


def _expect(error: Exception, status: str) -> None:
    if not str(error).startswith(status):
        raise Unreachable(str(error)) from None


def service() -> Service | None:
    """The service of this process's pod; None in a process of its own."""
    if distributed is None or distributed.global_state.client is None:
        return None
    return Service(distributed.global_state.client)


def coordinator_address() -> str:
    """Where the service is, as `host:port`."""
    return distributed.global_state.coordinator_address


def coordinator_refuses() -> bool:
    """Whether the process of rank 0, which runs the service, has certainly ended.

    Its machine then refuses connections to the port of the service. JAX's own client says nothing
    about it any more: it is busy with the abort of this process.
    """
    host, _, port = coordinator_address().rpartition(":")
    try:
        socket.create_connection((host.strip("[]"), int(port)), timeout=_PROBE_SECONDS).close()
    except ConnectionRefusedError:
        return True
    except OSError:
        return False
    return False


def wait_until_coordinator_ends(is_over: Callable[[], bool]) -> bool:
    """Waits until the process of rank 0 has certainly ended.

    Holds a connection to the port of the service, and says nothing there. It is closed with the
    process, and JAX's client, which hears of that too, begins to abort this one. The service also
    closes it when it has heard nothing for two minutes; then its port takes another. A port that
    has never taken one says nothing: JAX may have another way there.

    Args:
        is_over: whether nobody wants to know any more.

    Returns:
        Whether it has ended; False where `is_over`.
    """
    host, _, port = distributed.global_state.coordinator_address.rpartition(":")
    pause, was_connected = _SHORTEST_PAUSE_SECONDS, False
    while not is_over():
        started = time.monotonic()
        try:
            with socket.create_connection((host.strip("[]"), int(port))) as connection:
                was_connected = True
                while connection.recv(4096):
                    pass
        except OSError as error:
            if was_connected and isinstance(error, ConnectionRefusedError):
                return not is_over()
        lasted = time.monotonic() - started > 1
        pause = _SHORTEST_PAUSE_SECONDS if lasted else min(2 * pause, _LONGEST_PAUSE_SECONDS)
        time.sleep(pause)
    return False


def replace_shutdown(replacement: Callable[[Callable[[], None]], None]) -> None:
    """Has JAX's next shutdown of the service, at the end of the process at the latest, replaced.

    Args:
        replacement: is given JAX's own, which is back in its place before.
    """
    state = distributed.global_state

    def shutdown() -> None:
        del state.shutdown
        replacement(state.shutdown)

    state.shutdown = shutdown


def abandon() -> None:
    """Has the end of this process not wait for the others of its pod, of which one has gone.

    JAX would wait for all of them, and then abort. What it holds of the service is never freed:
    freeing it would wait too.
    """
    state = distributed.global_state
    for held in (state.client, state.service, state.preemption_sync_manager):
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(held))
    state.client = state.service = state.preemption_sync_manager = None
