"""`DurableHost`: a host with a directory: epochs, snapshots, images, and recovery after a crash.

All engines share it. An engine passes requests to `handle`, and calls `tend` every `TEND_SECONDS`.

Clients keep their writes until these survive a crash of the host: until a snapshot holds them or,
if the host always restarts on the same machine, an image (see `images`).
"""

from __future__ import annotations

import collections
import logging
import os
import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path

import numpy as np

from stepcache.errors import first_line
from stepcache.link.processes import Process
from stepcache.serving import host_directory, snapshots
from stepcache.serving.held import HostState
from stepcache.serving.host import Host
from stepcache.serving.images import CAN_IMAGE, Images
from stepcache.serving.messages import (
    JoinRequest,
    Refused,
    Reply,
    Request,
    SnapshotRequest,
    Status,
    WriteRequest,
    Written,
)
from stepcache.serving.optimizers import ExportedRule
from stepcache.serving.shared_memory import Block
from stepcache.serving.state_writer import StateWriter
from stepcache.serving.table_files import TableFiles
from stepcache.serving.tables import HeldTable
from stepcache.units import counted

TEND_SECONDS = 0.05
_KEPT_BYTES = 512 << 20  # After so many bytes of writes, an image lets clients forget them.
_CHANGED_BYTES = 512 << 20  # A snapshot frees this much memory of changed rows.
_FREED_ROWS = 1024  # Between two requests: each page takes a call of the kernel.
_TIMED_REQUESTS = 4096
# After a crash: how long to wait for clients that no snapshot knows, and for those that have
# written and may be alive; how often to look whether they are.
_RECOVERY_SECONDS, _LONGEST_RECOVERY_SECONDS, _LOOK_SECONDS = 1.5, 30.0, 1.0
_CHECK_SECONDS = 1.0  # How often to check that the directory is still there.

_log = logging.getLogger("stepcache")


class DurableHost:
    """Holds the variables of one directory. Not thread-safe.

    Args:
        directory: of the snapshots. It is locked for this process.
        allocate: makes a block of this many bytes.
        snapshot_seconds: a write is in a snapshot after this time at the latest.
        snapshot_writes: a snapshot is also written after this many writes.
        hosts: how many hosts share the variables; the same at each start.
        recovery_seconds: after a crash, how long to wait for clients that no snapshot knows.
        has_images: write images too. The host must always restart on this machine.

    Attributes:
        directory: absolute path.
        host: the state machine.
        counts: counters of requests, snapshots and bytes, by name.
        seconds: durations of the last requests.

    Raises:
        VariablesError: another process serves this directory; its files cannot be read or written;
            or they belong to another number of hosts.
        CacheDirectoryError: other users can write to the directory.
    """

    def __init__(
        self,
        directory: Path,
        allocate: Callable[[int], Block],
        *,
        hosts: int = 1,
        snapshot_seconds: float = 30.0,
        snapshot_writes: int = 10_000,
        recovery_seconds: float = _RECOVERY_SECONDS,
        has_images: bool = False,
    ):
        self.directory = directory.expanduser().resolve()
        self._every_seconds, self._every_writes = snapshot_seconds, snapshot_writes
        self._recovery_seconds = recovery_seconds
        self._lock = host_directory.lock(self.directory)
        self._path = path = self.directory / "snapshots"
        self._images = Images(self.directory)
        self.hosts = hosts
        try:
            with host_directory.unusable(self.directory):
                host_directory.check_hosts(self.directory, hosts)
                self._files = TableFiles(self.directory / "tables")
                newest = snapshots.newest(path, allocate, self._files.moment)
                self._unmerged, self._snapshot = newest
                stored = self._unmerged.moment if self._unmerged else 0
                state = self._newer(self._unmerged, allocate)
                if state is not self._unmerged:
                    self._unmerged = None  # The next snapshot holds all rows not in the files.
                epoch, was_stopped = host_directory.next_epoch(self.directory)
                self.host = Host(epoch, allocate, ExportedRule, self._files, state)
                self._files.remove_others({each.key for each in self.host.tables.held.values()})
                known = host_directory.writers(self.directory)
                alive, left = _alive(known or {}, state)
                host_directory.store_writers(self.directory, {**alive, **left})
        except BaseException:
            self.close()
            raise
        self._started = self._checked = self._looked = time.monotonic()
        if not was_stopped:
            self.host.waiting_for = {*alive, *([""] if known is None else [])}
        self._writers = alive
        self._stored = StateWriter("snapshots", self._store, stored)
        self._kept = self._stored  # Once a write is in it, clients may forget the write.
        if has_images and CAN_IMAGE:
            self._kept = StateWriter("images", self._images.write, self.host.moment)
        self._kept_bytes = 0  # Bytes of all writes when `_kept` was begun.
        self._changed_time: float | None = None
        self._is_wanted, self._is_keeping_wanted = stored < self.host.moment, False
        self._to_free: collections.deque[tuple[HeldTable, np.ndarray]] = collections.deque()
        self.counts: collections.Counter[str] = collections.Counter()
        self.seconds: collections.deque[float] = collections.deque(maxlen=_TIMED_REQUESTS)

    def _newer(self, state: HostState | None, allocate: Callable[[int], Block]) -> HostState | None:
        """Returns the state of an image if it is newer than the snapshot's, else the snapshot's."""
        image = self._images.newest(allocate) if CAN_IMAGE else None
        if image is not None and image.moment > (state.moment if state else self._files.moment):
            return image
        self._images.remove()  # From now on, the host may apply other writes than an image holds.
        return state

    def handle(
        self, client: str, message: Request, payload: np.ndarray | None
    ) -> tuple[Reply, list[Block]]:
        """Serves a request of a client, as `Host.handle` does.

        Raises:
            VariablesError: the directory was removed or replaced.
        """
        name = type(message).__name__
        if payload is not None:
            self.counts["bytes written"] += payload.size
        try:
            reply, blocks = self.host.handle(message, payload)
        except Exception as error:  # The host has not changed, and goes on.
            _log.exception("%s of %s failed", name, client)
            reply, blocks = Refused("failed", first_line(error), self.host.epoch), []
        try:
            self._note_writer(message, reply)
        except OSError as error:  # The disk may be full. The client asks again for the reply.
            self._check_there()
            if not self.counts["failed confirmations"]:
                _log.error("the host cannot store who writes: %s", error)
            self.counts["failed confirmations"] += 1
            reply = Refused("recovering", f"it cannot store who writes: {error}", self.host.epoch)
        self._is_keeping_wanted |= bool(self.host.unsaved)
        if isinstance(message, SnapshotRequest):
            self._is_wanted |= message.on_disk
            self._is_keeping_wanted |= not message.on_disk
        if isinstance(reply, Status):
            rest = {"snapshot": self._snapshot, "stored": self._stored.moment, "hosts": self.hosts}
            reply = replace(reply, counts=self._counted(reply), **rest)
        if isinstance(reply, Refused) and reply.kind == "malformed":
            self.counts["malformed messages"] += 1
        self.counts[name] += 1
        return reply, blocks

    def _note_writer(self, message: Request, reply: Reply) -> None:
        """Stores who writes, before the write is confirmed, and who has left with all saved.

        After a crash the host waits for the others.
        """
        if not isinstance(message, JoinRequest | WriteRequest):
            return
        client, writes = message.client, isinstance(reply, Written)
        process, known = self.host.processes.get(client, ""), self._writers.get(client)
        has_left = bool(known) and not process
        if has_left or (writes and known is None and client.isprintable() and " " not in client):
            host_directory.add_writer(self.directory, client, process)
            self._writers[client] = process

    def refuse_malformed(self, error: Exception) -> Refused:
        """Returns the reply to a message that cannot be decoded."""
        self.counts["malformed messages"] += 1
        return Refused("malformed", str(error), self.host.epoch)

    def _counted(self, status: Status) -> dict[str, float]:
        seconds = sorted(self.seconds)
        counts = {**status.counts, **self.counts}
        if seconds:
            counts["p50 seconds"] = seconds[len(seconds) // 2]
            counts["p99 seconds"] = seconds[min(len(seconds) * 99 // 100, len(seconds) - 1)]
        return counts

    @property
    def is_waiting(self) -> bool:
        """Whether `tend` has work to do soon."""
        is_busy = self._stored.is_busy or self._kept.is_busy or bool(self._to_free)
        return is_busy or self._changed_time is not None

    def tend(self) -> None:
        """Ends the recovery, begins and ends snapshots, and frees memory, each when it is due.

        Raises `VariablesError` if the directory was removed or replaced, as `handle` does.
        """
        if time.monotonic() - self._checked > _CHECK_SECONDS:
            self._check_there()
        if self.host.waiting_for:
            self._end_recovery()
            return  # A snapshot must not hold writes that others precede which come again.
        for saved in {self._stored, self._kept}:
            if saved.has_ended:
                self._end(saved)
        now, moment, written = time.monotonic(), self.host.moment, self.counts["bytes written"]
        if moment == self._stored.moment:
            self._is_wanted, self._changed_time = False, None
        else:
            self._changed_time = self._changed_time or now
            is_due = self._is_wanted or moment - self._stored.moment >= self._every_writes
            is_due |= self._changed_bytes() >= _CHANGED_BYTES
            if is_due or now - self._changed_time >= self._every_seconds:
                self._begin(self._stored)
        if moment == self._kept.moment:
            self._is_keeping_wanted = False
        elif self._is_keeping_wanted or written - self._kept_bytes >= _KEPT_BYTES:
            self._begin(self._kept)
        if self._to_free:
            self._files.free(*self._to_free.popleft())

    def _changed_bytes(self) -> int:
        """Upper bound of the memory that snapshots free."""
        tables = self.host.tables.held.values()
        return sum(each.changed_bytes for each in tables if not self._files.is_in_memory(each.key))

    def _check_there(self) -> None:
        self._checked = time.monotonic()
        host_directory.check_there(self.directory, self._lock)

    def _begin(self, saved: StateWriter) -> None:
        if saved.is_busy:
            return
        self._check_there()  # Writing would make another directory of this name.
        saved.begin(self.host.state(on_disk=saved is self._stored))
        if saved is self._stored:
            self._is_wanted, self._changed_time = False, None
        if saved is self._kept:
            self._is_keeping_wanted, self._kept_bytes = False, self.counts["bytes written"]

    def _store(self, state: HostState) -> None:
        """Merges the rows of the previous snapshot into the files of tables; writes a snapshot."""
        if self._unmerged is not None:
            self._files.merge(self._unmerged.tables, self._unmerged.moment)
        snapshots.write(self._path, state)

    def _is_stored(self, state: HostState) -> None:
        """Notes that a snapshot is whole."""
        self._snapshot = f"step_{state.moment:08}"
        tables = self.host.tables
        tables.is_stored(state.tables)
        for name, each in self._unmerged.tables.items() if self._unmerged else ():
            if self._files.is_in_memory(each.key):
                continue
            for start in range(0, each.ids.size, _FREED_ROWS):
                rows = each.ids[start : start + _FREED_ROWS]
                self._to_free.append((tables.held[name], rows))
        self._unmerged = state

    def _end(self, saved: StateWriter) -> None:
        state, error = saved.end()
        if error is None:
            self.host.is_saved(state)
            self.counts[saved.name] += 1
            if saved is self._stored:
                self._is_stored(state)
        else:
            self.counts[f"failed {saved.name}"] += 1
            _log.error("the host could not write one of its %s: %s", saved.name, error)
            if saved is self._stored:
                self._changed_time = time.monotonic()  # Try again after `snapshot_seconds`.

    def _end_recovery(self) -> None:
        """Stops waiting for clients when their time is over."""
        now = time.monotonic()
        seconds, waiting_for = now - self._started, self.host.waiting_for
        if seconds > self._recovery_seconds:
            waiting_for.discard("")  # Stands for clients that no snapshot knows.
        if now - self._looked > _LOOK_SECONDS:
            self._looked = now
            ended = [each for each in waiting_for if _has_ended(self._writers.get(each, ""))]
            waiting_for.difference_update(ended)
        if seconds > _LONGEST_RECOVERY_SECONDS and waiting_for:
            missing = counted(len(waiting_for), "client")
            _log.warning("%s did not reconnect after the crash: the host goes on without", missing)
            waiting_for.clear()

    def finish(self) -> bool:
        """Writes the last snapshot, and stores that the host did not crash.

        If clients have not repeated all writes after a crash, the next start waits for them again.

        Returns:
            Whether the last snapshot holds all writes.

        Raises:
            VariablesError: the directory was removed or replaced.
        """
        for saved in {self._stored, self._kept}:
            if saved.is_busy:
                self._end(saved)
        if self.host.waiting_for:
            return False
        if self.host.moment != self._stored.moment:
            self._begin(self._stored)
            self._end(self._stored)
        is_saved = self.host.moment == self._stored.moment
        if is_saved:
            self._check_there()  # Another host may serve one of this name.
            host_directory.note_stop(self.directory, self.host.epoch)
            self._images.remove()
        return is_saved

    def close(self) -> None:
        """Unlocks the directory."""
        os.close(self._lock)


def _alive(
    known: Mapping[str, str], state: HostState | None
) -> tuple[dict[str, str], dict[str, str]]:
    """Returns the clients, of two sources, that have written and whose processes may be alive.

    Processes on other machines always may. Beside them, those that have left since the snapshot.
    """
    processes = dict(known)
    before = state.processes if state is not None else {}
    if state is not None:
        for client, last in state.applied.items():
            if last.sequence:
                processes.setdefault(client, before.get(client, ""))
    alive = {
        client: text
        for client, text in processes.items()
        if Process.parse(text) and not _has_ended(text)
    }
    return alive, {client: "" for client, text in known.items() if not text and before.get(client)}


def _has_ended(text: str) -> bool:
    """Whether the text is that of a process of this machine that is no more."""
    process = Process.parse(text)
    return process is not None and process.is_local() and process.has_ended()
