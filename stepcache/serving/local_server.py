"""The local engine: a host of variables for the processes of one machine, over ZeroMQ.

One thread serves one message after the other. Large values do not travel: a reader maps the memory
that the host has them in, and the host reads what a writer has written to its own. A read leases
the blocks that it gets; they are not used again before the reader has given them back, or ended.
"""

from __future__ import annotations

import collections
import contextlib
import errno
import fcntl
import hashlib
import json
import logging
import os
import resource
import tempfile
import threading
import time
from dataclasses import astuple, replace
from pathlib import Path
from typing import Any

import numpy as np
import zmq

from stepcache.errors import VariablesError, first_line
from stepcache.serving import snapshots
from stepcache.serving.host import Host, HostState
from stepcache.serving.local_transport import ADDRESS_FILE, address
from stepcache.serving.messages import (
    MalformedMessageError,
    Refused,
    Reply,
    SnapshotRequest,
    Status,
    from_plain,
    to_plain,
)
from stepcache.serving.optimizers import ExportedRule
from stepcache.serving.shared_memory import CAN_SHARE, Opened, Place, Pool
from stepcache.storage import plain
from stepcache.storage.load_markers import Process
from stepcache.storage.private_files import make_directory
from stepcache.units import counted

MAX_FRAME_BYTES = 16 << 20 if CAN_SHARE else 4 << 30
_POLL_SECONDS = 0.05
_SNAPSHOT_BYTES = 256 << 20  # After so much written: clients keep what no snapshot has.
_SWEEP_SECONDS = 2.0
_LEASES_A_CLIENT = 1024
_TIMED_REQUESTS = 4096
_RECOVERY_SECONDS, _LONGEST_RECOVERY_SECONDS = 1.5, 5.0
_EPOCH = "epoch"
_MAX_SOCKET_PATH = 100  # Of 107 that the system allows.

_log = logging.getLogger("stepcache")


class LocalServer:
    """Serves the variables of one directory, until it is stopped.

    Args:
        directory: where snapshots are kept, and how clients name this server.
        snapshot_seconds: a snapshot is written so long after a write, unless one has been.
        snapshot_writes: and after so many writes.

    Raises:
        VariablesError: another process serves this directory, or its snapshots cannot be read.
        CacheDirectoryError: others can write to the directory.
    """

    def __init__(
        self, directory: Path, *, snapshot_seconds: float = 30.0, snapshot_writes: int = 10_000
    ):
        self.directory = directory.expanduser().resolve()
        self._every_seconds, self._every_writes = snapshot_seconds, snapshot_writes
        make_directory(self.directory)
        self._lock = _lock(self.directory)
        self._snapshots = self.directory / "snapshots"
        self._pool, self._opened = Pool(), Opened()
        state, self._snapshot = snapshots.newest(self._snapshots, self._pool.allocate)
        epoch, was_stopped = _next_epoch(self.directory)
        self.host = Host(epoch, self._pool.allocate, ExportedRule, state)
        self._started = time.monotonic()
        if not was_stopped:
            self.host.waiting_for = {"", *_alive(state)}
        self._saved_moment, self._saved_bytes = self.host.moment, 0
        self._changed_time: float | None = None
        self._wanted = False
        self._saving: _Saving | None = None
        self._leases: dict[str, dict[int, list[Any]]] = collections.defaultdict(dict)
        self._processes: dict[str, Process] = {}
        self._lease = 0
        self._counts: collections.Counter[str] = collections.Counter()
        self._seconds: collections.deque[float] = collections.deque(maxlen=_TIMED_REQUESTS)
        self._stopping = threading.Event()
        _allow_many_files()
        self._context = zmq.Context()
        self._socket = self._context.socket(zmq.ROUTER)
        for option, value in (
            (zmq.LINGER, 0),
            (zmq.MAXMSGSIZE, MAX_FRAME_BYTES),
            (zmq.ROUTER_MANDATORY, 1),
            (zmq.SNDHWM, 64),
            (zmq.RCVHWM, 1024),
        ):
            self._socket.setsockopt(option, value)
        address = _socket_path(self.directory)
        self._socket.bind(f"ipc://{address}")
        self._path = Path(address)
        _publish_address(self.directory, address, epoch)

    # ---- the loop ------------------------------------------------------------------------------

    def run(self) -> None:
        """Serves until `stop`, then writes a last snapshot."""
        poller = zmq.Poller()
        poller.register(self._socket, zmq.POLLIN)
        swept = time.monotonic()
        try:
            while not self._stopping.is_set():
                waiting = self._saving is not None or self._changed_time is not None
                timeout = _POLL_SECONDS if waiting else 10 * _POLL_SECONDS
                if poller.poll(int(timeout * 1000)):
                    self._serve_all()
                if self.host.waiting_for:
                    self._end_recovery()
                self._keep_snapshots()
                if time.monotonic() > swept + _SWEEP_SECONDS:
                    self._sweep()
                    swept = time.monotonic()
            if self._last_snapshot():
                _write(self.directory / _EPOCH, f"{self.host.epoch} stopped")
        finally:
            self.close()

    def stop(self) -> None:
        """Has `run` return. Signal handlers and other threads may call it."""
        self._stopping.set()

    def close(self) -> None:
        """Gives the socket and the directory back. Clients wait for the next server."""
        self._socket.close()
        self._context.term()
        with contextlib.suppress(OSError):
            self._path.unlink()
        os.close(self._lock)

    def _serve_all(self) -> None:
        for _ in range(256):  # Then snapshots get their turn.
            try:
                frames = self._socket.recv_multipart(zmq.NOBLOCK, copy=False)
            except zmq.Again:
                return
            self._serve([frame.buffer for frame in frames])

    def _serve(self, frames: list[Any]) -> None:
        started = time.perf_counter()
        self._counts["bytes received"] += sum(len(frame) for frame in frames)
        number, client = 0, ""
        try:
            number, client, released, place, message = _envelope(frames)
            for lease in released:
                self._leases[client].pop(lease, None)
            payload = self._payload(place, frames)
        except (MalformedMessageError, OSError) as error:
            self._counts["malformed messages"] += 1
            reply: Reply = Refused("malformed", str(error), self.host.epoch)
            self._send(bytes(frames[0]), number, client, reply, [])
            return
        name = type(message).__name__
        try:
            reply, blocks = self.host.handle(message, payload)
        except Exception as error:  # The host has not changed. Others go on.
            _log.exception("%s of %s failed", name, client)
            reply, blocks = Refused("failed", first_line(error), self.host.epoch), []
        if hasattr(message, "process") and (process := Process.parse(message.process)):
            self._processes[client] = process
        self._wanted |= isinstance(message, SnapshotRequest) or self.host.created
        if isinstance(reply, Status):
            reply = replace(reply, counts=self._told(reply), snapshot=self._snapshot)
        if isinstance(reply, Refused) and reply.kind == "malformed":
            self._counts["malformed messages"] += 1
        self._counts[name] += 1
        self._send(bytes(frames[0]), number, client, reply, blocks)
        self._seconds.append(time.perf_counter() - started)

    def _payload(self, place: Any, frames: list[Any]) -> np.ndarray | None:
        if place is not None:
            payload = self._opened.open(Place(*place))
        elif len(frames) > 2:
            payload = (
                np.frombuffer(frames[2], np.uint8) if len(frames[2]) else np.empty(0, np.uint8)
            )
        else:
            return None
        self._counts["bytes written"] += payload.size
        return payload

    def _send(self, peer: bytes, number: int, client: str, reply: Reply, blocks: list[Any]) -> None:
        places = [block.place and astuple(block.place) for block in blocks]
        lease = 0
        if any(places):
            self._lease = lease = self._lease + 1
            held = self._leases[client]
            held[lease] = blocks
            if len(held) > _LEASES_A_CLIENT:
                blocks, places, lease = [], [], 0
                held.clear()
                reply = Refused("malformed", "too many leases", self.host.epoch)
        header = plain.pack([number, lease, places, to_plain(reply)])
        inline = [block.data for block in blocks if block.place is None]
        self._counts["bytes sent"] += len(header) + sum(each.size for each in inline)
        self._counts["bytes leased"] += sum(each[-1] for each in places if each)
        try:
            self._socket.send_multipart([peer, header, *inline], zmq.NOBLOCK)
        except zmq.ZMQError:  # It has gone, or does not read: it asks again if it is there.
            self._counts["replies dropped"] += 1
            self._leases[client].pop(lease, None)

    def _told(self, status: Status) -> dict[str, float]:
        seconds = sorted(self._seconds)
        counts = {**status.counts, **self._counts, "leases": sum(map(len, self._leases.values()))}
        if seconds:
            counts["p50 seconds"] = seconds[len(seconds) // 2]
            counts["p99 seconds"] = seconds[min(len(seconds) * 99 // 100, len(seconds) - 1)]
        return counts

    def _sweep(self) -> None:
        """Takes back what ended processes had leased."""
        for client, process in list(self._processes.items()):
            if process.is_local() and process.has_ended():
                del self._processes[client]
                self._leases.pop(client, None)
                self._opened.forget(process.pid)
        for client in [client for client, leases in self._leases.items() if not leases]:
            del self._leases[client]

    # ---- snapshots -----------------------------------------------------------------------------

    def _keep_snapshots(self) -> None:
        if self._saving is not None:
            if self._saving.is_alive():
                return
            self._end(self._saving)
        now, moment = time.monotonic(), self.host.moment
        if moment == self._saved_moment:
            self._wanted, self._changed_time = False, None
            return
        self._changed_time = self._changed_time or now
        is_due = moment - self._saved_moment >= self._every_writes
        is_due |= self._counts["bytes written"] - self._saved_bytes >= _SNAPSHOT_BYTES
        is_due |= now - self._changed_time >= self._every_seconds
        if self._wanted or is_due:
            self._saving = _Saving(self._snapshots, self.host.state())
            self._wanted, self._changed_time = False, None
            self._saved_bytes = self._counts["bytes written"]
            self._saving.start()

    def _end(self, saving: _Saving) -> None:
        saving.join()
        self._saving = None
        if saving.error is None:
            self.host.is_saved(saving.state)
            self._saved_moment = saving.state.moment
            self._snapshot = f"step_{saving.state.moment:08}"
            self._counts["snapshots"] += 1
        else:
            self._counts["failed snapshots"] += 1
            self._changed_time = time.monotonic()  # Not again at once.
            _log.error("no snapshot could be written: %s", saving.error)

    def _end_recovery(self) -> None:
        """Stops waiting for clients that have had time enough."""
        seconds = time.monotonic() - self._started
        if seconds > _RECOVERY_SECONDS:
            self.host.waiting_for.discard("")  # Those that no snapshot knows.
        if seconds > _LONGEST_RECOVERY_SECONDS and self.host.waiting_for:
            missing = counted(len(self.host.waiting_for), "client")
            _log.warning("%s did not come back in time after a crash: go on without", missing)
            self.host.waiting_for.clear()

    def _last_snapshot(self) -> bool:
        """Writes what no snapshot has. Returns whether there is nothing more."""
        if self._saving is not None:
            self._end(self._saving)
        if self.host.moment != self._saved_moment:
            saving = _Saving(self._snapshots, self.host.state())
            saving.start()
            self._end(saving)
        return self.host.moment == self._saved_moment


class _Saving(threading.Thread):
    """A snapshot that is being written. The blocks of its state do not change meanwhile."""

    def __init__(self, directory: Path, state: HostState):
        super().__init__(name="stepcache snapshot", daemon=True)
        self.directory, self.state = directory, state
        self.error: Exception | None = None

    def run(self) -> None:
        try:
            snapshots.write(self.directory, self.state, lambda rule: ExportedRule(rule).state_types)
        except Exception as error:
            self.error = error


def _envelope(frames: list[Any]) -> tuple[int, str, list[int], Any, Any]:
    """What a request consists of.

    Raises:
        MalformedMessageError: it is none.
    """
    if not 2 <= len(frames) <= 3:
        raise MalformedMessageError(f"{len(frames)} frames")
    try:
        number, client, released, place, message = plain.unpack(bytes(frames[1]))
    except Exception:
        raise MalformedMessageError("its header cannot be read") from None
    fits = (
        plain.fits(number, int)
        and plain.fits(client, str)
        and plain.fits(released, list[int])
        and (place is None or plain.fits(place, tuple[int, int, int, int, int]))
        and len(client) <= 64
    )
    if not fits or (place is not None and not 0 < place[-1] < 1 << 62):
        raise MalformedMessageError("its header is of another type")
    return number, client, released, place, from_plain(message)


# ---- one server a directory -------------------------------------------------------------------


def _lock(directory: Path) -> int:
    descriptor = os.open(directory / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        os.close(descriptor)
        if error.errno not in (errno.EAGAIN, errno.EACCES):
            raise
        raise VariablesError(
            "another process serves these variables already",
            where=str(directory),
            got=f"process {(address(directory) or {}).get('process', '?')}",
            hint="connect to it, or stop it first",
        ) from None
    return descriptor


def _allow_many_files() -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != hard:
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


def _next_epoch(directory: Path) -> tuple[int, bool]:
    """The number of this start, on disk before it is used; and whether the last one was stopped."""
    path = directory / _EPOCH
    try:
        number, _, end = path.read_text().partition(" ")
        epoch, was_stopped = int(number) + 1, end == "stopped"
    except (OSError, ValueError):
        # Higher than any that was counted up to.
        epoch, was_stopped = time.time_ns() // 1000, not path.exists()
    _write(path, str(epoch))
    return epoch, was_stopped


def _alive(state: HostState | None) -> set[str]:
    """The clients that had written before a snapshot, and whose processes are alive."""
    if state is None:
        return set()
    writers = [client for client, applied in state.applied.items() if applied]
    found = {client: Process.parse(state.processes.get(client, "")) for client in writers}
    return {client for client, process in found.items() if process and not process.has_ended()}


def _write(path: Path, text: str) -> None:
    new = path.with_name(f".{path.name}.{os.getpid()}")
    with new.open("w") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    new.replace(path)


def _socket_path(directory: Path) -> str:
    name = hashlib.sha256(str(directory).encode()).hexdigest()[:24]
    for parent in (tempfile.gettempdir(), "/tmp"):
        private = Path(parent) / f"stepcache-{os.geteuid()}"
        path = str(private / f"{name}.ipc")
        if len(path) <= _MAX_SOCKET_PATH:
            make_directory(private)
            return path
    raise VariablesError("there is no directory with a short path for a socket", got=path)


def _publish_address(directory: Path, path: str, epoch: int) -> None:
    data = {"address": f"ipc://{path}", "epoch": epoch, "process": str(Process.current())}
    _write(directory / ADDRESS_FILE, json.dumps(data))
