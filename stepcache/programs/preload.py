"""`Preloader`: loads, before a step is called, what the last run of this script used of it."""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any

import jax

from stepcache import jaxcompat
from stepcache.fingerprint.installed_packages import look_at_modules
from stepcache.jaxcompat import coordination, storing
from stepcache.programs.background import LATER, Job, Worker
from stepcache.storage.dependency_record import DependencyRecord
from stepcache.storage.run_log import Row, RunLog

if TYPE_CHECKING:  # Few processes have a shared cache.
    from stepcache.storage.shared_entries import SharedEntries

_PRELOADED_AT_MOST = 256

_Key = tuple[str, str, tuple[int, ...]]  # The digest of a program, and its devices, as `named`.


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
        self.preloaded: dict[_Key, Job] = {}
        self._taken: set[_Key] = set()
        self._asked_for: set[str] = set()
        # One job waits for JAX's backend, however many programs there are.
        self._ahead: dict[_Key, None] = {}

    def preload(self, label: str) -> None:
        """Starts loading what the last run of this script used of a step; once."""
        with self._lock:
            if label in self._asked_for:
                return
            self._asked_for.add(label)
        self.worker.submit(functools.partial(self._prepare, label))

    def take(self, digest: str, devices: Sequence[Any]) -> Any:
        """An executable that was loaded for these devices, or is being; None without one."""
        key = (digest, *named(devices))
        with self._lock:
            ahead = self.preloaded.pop(key, None)
            self._taken.add(key)
        return self.worker.take(ahead) if ahead is not None else None

    def _prepare(self, label: str) -> None:
        rows = [row for row in self._run_log.last_run_of(label) if row.program]
        if self._remote is not None and not rows and coordination.service() is None:
            self._remote.begin()  # In a pod, one of the processes asks for all.
        if not jaxcompat.backends_are_initialized():  # Else the first call may be about to come.
            self._look(rows)
        with self._lock:
            is_waiting = bool(self._ahead)
            keys = ((row.program, row.platform, tuple(row.devices)) for row in rows)
            self._ahead.update(dict.fromkeys(keys))
        if not is_waiting:
            self.worker.submit(self._load_ahead)

    def look_ahead(self) -> None:
        """Examines what the last run of this script used of modules.

        Of one step: most steps of a script use the same.
        """
        self._look([row for row in self._run_log.last_run() if row.lookup][:1])

    def _look(self, rows: Iterable[Row]) -> None:
        for lookup in dict.fromkeys(row.lookup for row in rows if row.lookup):
            for record in self._records(lookup):
                look_at_modules(record.used.modules, record.used.names)

    def _load_ahead(self) -> Any:
        """Loads programs, but never starts JAX's backend: that is left to the user's code."""
        if self._ahead and not jaxcompat.backends_are_initialized():
            return LATER
        with self._lock:
            keys, self._ahead = self._ahead, {}
            for key in keys:
                is_new = key not in self._taken and key not in self.preloaded
                if is_new and len(self.preloaded) < _PRELOADED_AT_MOST:
                    digest, platform, numbers = key
                    if devices := _devices(platform, numbers):
                        load = functools.partial(storing.load_executable, devices=devices)
                        job = functools.partial(self._read, digest, load)
                        self.preloaded[key] = self.worker.submit(job)
        return None


def named(devices: Sequence[Any]) -> tuple[str, tuple[int, ...]]:
    """What to call the devices of a program: those of one platform have one number each."""
    return devices[0].platform if devices else "", tuple(device.id for device in devices)


def _devices(platform: str, numbers: tuple[int, ...]) -> tuple[Any, ...]:
    """Devices by their names; none where any does not exist, or all are of other processes."""
    try:
        by_number = {device.id: device for device in jax.devices(platform or None)}
        found = tuple(by_number[number] for number in numbers)
    except (RuntimeError, KeyError):  # There is no such platform here, or no such device.
        return ()
    here = jax.process_index(platform or None)
    return found if any(device.process_index == here for device in found) else ()
