"""`Preloader`: loads, before a step is called, what the last run of this script used of it."""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import jax

from stepcache import jaxcompat
from stepcache.fingerprint.installed_packages import look_at_modules
from stepcache.jaxcompat import coordination, storing
from stepcache.programs.background import LATER, Job, Worker
from stepcache.storage.dependency_record import DependencyRecord
from stepcache.storage.run_log import RunLog

if TYPE_CHECKING:  # Few processes have a shared cache.
    from stepcache.storage.shared_entries import SharedEntries

_PRELOADED_AT_MOST = 256


class Preloader:
    """Loads executables in the background.

    Args:
        run_log: says what the last run used.
        records: reads the records of a lookup.
        read: reads an executable by its digest, and loads it as it is told.
        remote: is asked what there is where no run has used a step.
    """

    def __init__(
        self,
        run_log: RunLog,
        records: Callable[[str], list[DependencyRecord]],
        read: Callable[[str, Callable[[bytes], Any]], Any],
        remote: SharedEntries | None,
    ):
        self._run_log, self._records, self._read, self._remote = run_log, records, read, remote
        self.worker = Worker("stepcache preload", droppable=True, poll_seconds=0.01)
        self._lock = threading.Lock()
        # By digest and numbers of devices.
        self.preloaded: dict[tuple[str, tuple[int, ...]], Job] = {}
        self._taken: set[tuple[str, tuple[int, ...]]] = set()
        self._asked_for: set[str] = set()
        # One job waits for JAX's backend, however many programs there are.
        self._ahead: dict[tuple[str, tuple[int, ...]], None] = {}

    def preload(self, label: str) -> None:
        """Starts loading what the last run of this script used of a step; once."""
        with self._lock:
            if label in self._asked_for:
                return
            self._asked_for.add(label)
        self.worker.submit(functools.partial(self._prepare, label))

    def take(self, digest: str, devices: Sequence[Any]) -> Any:
        """An executable that was loaded for these devices, or is being; None without one."""
        key = (digest, tuple(device.id for device in devices))
        with self._lock:
            ahead = self.preloaded.pop(key, None)
            self._taken.add(key)
        return self.worker.take(ahead) if ahead is not None else None

    def _prepare(self, label: str) -> None:
        rows = [row for row in self._run_log.last_run_of(label) if row.program]
        if self._remote is not None and not rows and coordination.service() is None:
            self._remote.begin()  # In a pod, one of the processes asks for all.
        if not jaxcompat.backends_are_initialized():  # Else the first call may be about to come.
            for lookup in dict.fromkeys(row.lookup for row in rows if row.lookup):
                for record in self._records(lookup):
                    look_at_modules(record.used.modules, record.used.names)
        with self._lock:
            is_waiting = bool(self._ahead)
            self._ahead.update(dict.fromkeys((row.program, tuple(row.devices)) for row in rows))
        if not is_waiting:
            self.worker.submit(self._load_ahead)

    def _load_ahead(self) -> Any:
        """Loads programs, but never starts JAX's backend: that is left to the user's code."""
        if self._ahead and not jaxcompat.backends_are_initialized():
            return LATER
        with self._lock:
            keys, self._ahead = self._ahead, {}
            own = {device.id for device in jax.local_devices()} if keys else set()
            for key in keys:
                known = key in self._taken or key in self.preloaded
                is_of_others = own.isdisjoint(key[1])  # Of another process of a pod, alone.
                if not (known or is_of_others) and len(self.preloaded) < _PRELOADED_AT_MOST:
                    self.preloaded[key] = self.worker.submit(functools.partial(self._load, *key))
        return None

    def _load(self, digest: str, numbers: tuple[int, ...]) -> Any:
        by_number = {device.id: device for device in jax.devices()}
        if not set(numbers) <= by_number.keys():
            return None
        devices = tuple(by_number[number] for number in numbers)
        return self._read(digest, lambda data: storing.load_executable(data, devices))
