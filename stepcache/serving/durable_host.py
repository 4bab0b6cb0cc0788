"""`DurableHost`: a host of variables and its directory: epochs, snapshots, recovery after a crash.

What every engine needs, and no transport. An engine hands requests to `handle`, and calls `tend`
every few hundredths of a second.
"""

from __future__ import annotations

import collections
import errno
import fcntl
import logging
import os
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np

from stepcache.errors import VariablesError, first_line
from stepcache.serving import snapshots
from stepcache.serving.held import Block, HostState
from stepcache.serving.host import Host
from stepcache.serving.messages import Refused, Reply, Request, SnapshotRequest, Status
from stepcache.serving.optimizers import ExportedRule
from stepcache.storage.load_markers import Process
from stepcache.storage.private_files import make_directory
from stepcache.units import counted

TEND_SECONDS = 0.05
_SNAPSHOT_BYTES = 512 << 20  # After so much written: clients keep what no snapshot has.
_TIMED_REQUESTS = 4096
_RECOVERY_SECONDS, _LONGEST_RECOVERY_SECONDS = 1.5, 5.0
_EPOCH = "epoch"

_log = logging.getLogger("stepcache")


class DurableHost:
    """Holds the variables of one directory. Not thread-safe.

    Args:
        directory: where snapshots are kept. One process at a time has it.
        allocate: gives a block of so many bytes.
        snapshot_seconds: a snapshot is written so long after a write, unless one has been.
        snapshot_writes: and after so many writes.
        recovery_seconds: how long all clients wait after a crash for those that no snapshot knows.

    Attributes:
        directory: absolute.
        host: the state machine.
        counts: what has been done, by name.
        seconds: how long the last requests took.

    Raises:
        VariablesError: another process serves this directory, or its snapshots cannot be read.
        CacheDirectoryError: others can write to the directory.
    """

    def __init__(
        self,
        directory: Path,
        allocate: Callable[[int], Block],
        *,
        snapshot_seconds: float = 30.0,
        snapshot_writes: int = 10_000,
        recovery_seconds: float = _RECOVERY_SECONDS,
    ):
        self.directory = directory.expanduser().resolve()
        self._every_seconds, self._every_writes = snapshot_seconds, snapshot_writes
        self._recovery_seconds = recovery_seconds
        make_directory(self.directory)
        self._lock = _lock(self.directory)
        self._snapshots = self.directory / "snapshots"
        try:
            state, self._snapshot = snapshots.newest(self._snapshots, allocate)
            epoch, was_stopped = _next_epoch(self.directory)
        except BaseException:
            self.close()
            raise
        self.host = Host(epoch, allocate, ExportedRule, state)
        self._started = time.monotonic()
        if not was_stopped:
            self.host.waiting_for = {"", *_alive(state)}
        self._saved_moment, self._saved_bytes = self.host.moment, 0
        self._changed_time: float | None = None
        self._wanted = False
        self._saving: _Saving | None = None
        self.counts: collections.Counter[str] = collections.Counter()
        self.seconds: collections.deque[float] = collections.deque(maxlen=_TIMED_REQUESTS)

    # ---- requests ------------------------------------------------------------------------------

    def handle(
        self, client: str, message: Request, payload: np.ndarray | None
    ) -> tuple[Reply, list[Block]]:
        """Serves a request.

        Args:
            client: who sends it, for the log.
            message: the request.
            payload: the block that came with it; read here, and not kept.

        Returns:
            The reply, and the blocks to send with it.
        """
        name = type(message).__name__
        if payload is not None:
            self.counts["bytes written"] += payload.size
        try:
            reply, blocks = self.host.handle(message, payload)
        except Exception as error:  # The host has not changed. Others go on.
            _log.exception("%s of %s failed", name, client)
            reply, blocks = Refused("failed", first_line(error), self.host.epoch), []
        self._wanted |= isinstance(message, SnapshotRequest) or bool(self.host.unsaved)
        if isinstance(reply, Status):
            reply = replace(reply, counts=self._counted(reply), snapshot=self._snapshot)
        if isinstance(reply, Refused) and reply.kind == "malformed":
            self.counts["malformed messages"] += 1
        self.counts[name] += 1
        return reply, blocks

    def refuse_malformed(self, error: Exception) -> Refused:
        """The reply to what is no message."""
        self.counts["malformed messages"] += 1
        return Refused("malformed", str(error), self.host.epoch)

    def _counted(self, status: Status) -> dict[str, float]:
        seconds = sorted(self.seconds)
        counts = {**status.counts, **self.counts}
        if seconds:
            counts["p50 seconds"] = seconds[len(seconds) // 2]
            counts["p99 seconds"] = seconds[min(len(seconds) * 99 // 100, len(seconds) - 1)]
        return counts

    # ---- recovery and snapshots ----------------------------------------------------------------

    @property
    def is_waiting(self) -> bool:
        """Whether a snapshot is being written, or will be."""
        return self._saving is not None or self._changed_time is not None

    def tend(self) -> None:
        """Does what is due: ends the recovery, begins and ends snapshots."""
        if self.host.waiting_for:
            self._end_recovery()
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
        is_due |= self.counts["bytes written"] - self._saved_bytes >= _SNAPSHOT_BYTES
        is_due |= now - self._changed_time >= self._every_seconds
        if self._wanted or is_due:
            self._saving = _Saving(self._snapshots, self.host.state())
            self._wanted, self._changed_time = False, None
            self._saved_bytes = self.counts["bytes written"]
            self._saving.start()

    def _end(self, saving: _Saving) -> None:
        saving.join()
        self._saving = None
        if saving.error is None:
            self.host.is_saved(saving.state)
            self._saved_moment = saving.state.moment
            self._snapshot = f"step_{saving.state.moment:08}"
            self.counts["snapshots"] += 1
        else:
            self.counts["failed snapshots"] += 1
            self._changed_time = time.monotonic()  # Not again at once.
            _log.error("no snapshot could be written: %s", saving.error)

    def _end_recovery(self) -> None:
        """Stops waiting for clients that have had time enough."""
        seconds = time.monotonic() - self._started
        if seconds > self._recovery_seconds:
            self.host.waiting_for.discard("")  # Those that no snapshot knows.
        if seconds > _LONGEST_RECOVERY_SECONDS and self.host.waiting_for:
            missing = counted(len(self.host.waiting_for), "client")
            _log.warning("%s did not come back in time after a crash: go on without", missing)
            self.host.waiting_for.clear()

    def finish(self) -> bool:
        """Writes what no snapshot has, and notes that this was no crash.

        Returns:
            Whether the last snapshot has everything.
        """
        if self._saving is not None:
            self._end(self._saving)
        if self.host.moment != self._saved_moment:
            saving = _Saving(self._snapshots, self.host.state())
            saving.start()
            self._end(saving)
        is_saved = self.host.moment == self._saved_moment
        if is_saved:
            replace_file(self.directory / _EPOCH, f"{self.host.epoch} stopped")
        return is_saved

    def close(self) -> None:
        """Gives the directory back."""
        os.close(self._lock)


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


# ---- one process a directory -------------------------------------------------------------------


def _lock(directory: Path) -> int:
    descriptor = os.open(directory / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        os.ftruncate(descriptor, 0)
        os.write(descriptor, str(Process.current()).encode())
    except OSError as error:
        holder = os.pread(descriptor, 200, 0).decode(errors="replace")
        os.close(descriptor)
        if error.errno not in (errno.EAGAIN, errno.EACCES):
            raise
        raise VariablesError(
            "another process serves these variables already",
            where=str(directory),
            got=f"process {holder or '?'}",
            hint="connect to it, or stop it first",
        ) from None
    return descriptor


def _next_epoch(directory: Path) -> tuple[int, bool]:
    """The number of this start, on disk before it is used; and whether the last one was stopped."""
    path = directory / _EPOCH
    try:
        number, _, end = path.read_text().partition(" ")
        epoch, was_stopped = int(number) + 1, end == "stopped"
    except (OSError, ValueError):
        # Higher than any that was counted up to.
        epoch, was_stopped = time.time_ns() // 1000, not path.exists()
    replace_file(path, str(epoch))
    return epoch, was_stopped


def _alive(state: HostState | None) -> set[str]:
    """The clients that had written, and whose processes may be alive: of other nodes, all."""
    if state is None:
        return set()
    writers = [client for client, applied in state.applied.items() if applied]
    found = {client: Process.parse(state.processes.get(client, "")) for client in writers}
    return {
        client
        for client, process in found.items()
        if process and not (process.is_local() and process.has_ended())
    }


def replace_file(path: Path, text: str) -> None:
    """Writes a file so that others see all of it or none, also after a crash of the machine."""
    new = path.with_name(f".{path.name}.{os.getpid()}")
    with new.open("w") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    new.replace(path)
