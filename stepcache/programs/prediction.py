"""Predictions: which executables the last runs of this script used; and their preloading.

A prediction is a hint. A preloaded executable runs only once this process has lowered the step to
the module that it was compiled from; what it costs to be wrong is the time of a load.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import os
import sys
import threading
import time
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from pathlib import Path
from typing import Any, NamedTuple

import jax

from stepcache import _process_hooks, jaxcompat
from stepcache.link import plain
from stepcache.storage.disk_store import DiskStore
from stepcache.storage.entry import EntryInfo
from stepcache.weak_objects import WeakObjects

# XLA loads without Python's lock. For many small steps a second thread costs more than it saves.
_LOADERS, _SMALL_BYTES = 2, 1 << 20
_PRELOADED_AT_MOST, _PRELOADED_BYTES = 512, 1 << 30
_ROWS_A_STEP, _ROWS = 256, 2048
_POLL_SECONDS, _LONGEST_WAIT_SECONDS, _FETCH_SECONDS = 0.01, 120.0, 2.0


class Described(NamedTuple):
    """A call of a step, as any process can compare it."""

    label: str  # The step, by its file and name.
    call: dict[str, str]  # Arguments, static values, options and mesh, by name.
    environment: dict[str, str]  # Settings, flags, versions and devices, by name.

    @property
    def signature(self) -> str:
        """Digest of the call."""
        return digest_of(self.call)


def digest_of(facts: Mapping[str, str]) -> str:
    text = "\0".join(f"{name}\1{facts[name]}" for name in sorted(facts))
    return hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()[:32]


class Prediction(NamedTuple):
    """A program that the last runs of a script used."""

    label: str  # The step, by its file and name.
    signature: str  # Digest of the call: arguments, static values, options, mesh.
    program: str  # Digest of the program, as in its entry.
    platform: str  # Of its devices.
    devices: list[int]  # In the order of its device assignment; none where it calls back.
    file: str  # The file of the step's function; empty where there is none.
    file_digest: str  # Of its content then.
    call: dict[str, str]  # What `signature` is the digest of, by name.
    environment: str  # Digest of the settings, flags and versions; see `Predictions.environment`.
    run: str  # The run that has used it last.
    time: float  # When it did, in seconds since the epoch.


_TYPES = (str, str, str, str, list, str, str, dict, str, str, float)  # Of its fields.


@functools.cache  # At the end of the process `__main__` may be gone.
def prediction_name() -> str:
    """Names the predictions for this script. The ranks of a pod have the same."""
    path = getattr(sys.modules.get("__main__"), "__file__", None)
    script = Path(path).resolve().parts[-2:] if path else ("<interactive>", Path.cwd().name)
    return hashlib.sha256("\0".join(script).encode()).hexdigest()


@functools.lru_cache(maxsize=1024)
def _file_digest(file: str, stamp: tuple[int, int]) -> str:
    return hashlib.sha256(Path(file).read_bytes()).hexdigest()[:16]


def file_digest(file: str) -> str:
    """A digest of a file's content; empty where it cannot be read."""
    try:
        found = os.stat(file)  # noqa: PTH116
        return _file_digest(file, (found.st_mtime_ns, found.st_size))
    except (OSError, ValueError):
        return ""


class Predictions:
    """What the last runs of this script used, and what this run uses.

    Kept in one entry of the disk store. If several processes write it at once, the last one wins.
    """

    def __init__(self, disk: DiskStore):
        self._disk, self._run = disk, os.urandom(4).hex()
        self.begin()
        _live.add(self)

    def begin(self) -> None:
        """Knows nothing: as it is made, and in a forked child."""
        self._lock = threading.RLock()
        self._known: dict[str, list[Prediction]] | None = None  # Of the last runs, by label.
        self._environments: dict[str, dict[str, str]] = {}
        self._used: dict[tuple[str, str, str], Prediction] = {}  # In this run, by its first fields.
        self._written: set[str] = set()  # The labels whose rows are those of this run by now.
        self.is_new = False  # Whether this run has used what is not written yet.

    def _read(self) -> dict[str, list[Prediction]]:
        entry = self._disk.read("prediction", prediction_name())
        if entry is None:
            return {}
        found: dict[str, list[Prediction]] = {}
        try:
            environments, rows = plain.unpack(entry.payload)
            for row in (Prediction(*each) for each in rows):
                if tuple(map(type, row)) != _TYPES:
                    raise ValueError("a row has a field of another type")
                found.setdefault(row.label, []).append(row)
            self._environments = {**environments, **self._environments}
        except (TypeError, ValueError) as error:
            self._disk.discard("prediction", prediction_name(), f"it is malformed: {error}")
        return found

    def _known_rows(self) -> dict[str, list[Prediction]]:
        with self._lock:
            if self._known is None:
                self._known = self._read()
            return self._known

    def of_last_run(self) -> list[Prediction]:
        """Of each step, what the last run that used it has used, in the order of use."""
        known = self._known_rows().values()
        latest = (row for rows in known for row in rows if row.run == rows[0].run)
        return sorted(latest, key=lambda row: row.time)

    def find(self, label: str, signature: str) -> Prediction | None:
        """The program that the latest run used last for a call; None if none is known."""
        return next((row for row in self.of_step(label) if row.signature == signature), None)

    def of_step(self, label: str) -> Sequence[Prediction]:
        """All that is known of a step, the latest first."""
        return self._known_rows().get(label, ())

    def environment(self, row: Prediction) -> dict[str, str]:
        """The settings, flags and versions under which a program was compiled."""
        return self._environments.get(row.environment, {})

    def note(self, row: Prediction, environment: dict[str, str]) -> bool:
        """Notes the use of a program; returns whether an earlier run used it for such a call."""
        known = next((each for each in self.of_step(row.label) if each[:3] == row[:3]), None)
        is_told = known is not None and known._replace(run=row.run, time=row.time) == row
        with self._lock:
            self._environments[row.environment] = environment
            self._used[row[:3]] = row._replace(run=self._run)
            if len(self._used) > _ROWS:
                del self._used[next(iter(self._used))]
            self.is_new |= not is_told or row.label in self._written
        return known is not None

    def write(self) -> bytes:
        """Writes what this run has used so far beside what others have; returns that."""
        with self._lock:
            self.is_new, used = False, dict(self._used)
            self._written = labels = {label for label, _, _ in used}
            calls = {name[:2] for name in used}
            others = self._read()  # Another process may have written since.
            rows: list[Prediction] = []
            for label in dict.fromkeys((*labels, *others)):
                own = [row for row in used.values() if row.label == label]
                rest = [row for row in others.get(label, ()) if row[:2] not in calls]
                rows += [*own[::-1], *rest][:_ROWS_A_STEP]
            rows = rows[:_ROWS]
            environments = {row.environment: self.environment(row) for row in rows}
            payload = plain.pack([environments, [list(row) for row in rows]])
        self._disk.publish("prediction", prediction_name(), {"programs": len(rows)}, payload)
        return payload


def programs_in(payload: bytes) -> list[str]:
    """The digests of the programs that the entry of `Predictions` names."""
    return [Prediction(*row).program for row in plain.unpack(payload)[1]]


def compile_seconds(entry: EntryInfo) -> float:
    """What XLA took for a program that is stored; 0 where the entry does not tell."""
    seconds: Any = (entry.header or {}).get("seconds")
    return seconds.get("compile", 0.0) if plain.fits(seconds, dict[str, float]) else 0.0


_Key = tuple[str, tuple[int, ...]]  # Digest of a program, and the numbers of its devices.


class Preloader:
    """Loads, in threads, the executables that are predicted, before the steps are called.

    They are read at once, and loaded once the user's own code has started JAX's backend: here it
    is not started, as `jax.distributed.initialize` and the like come before it.

    Args:
        disk: has the executables.
        predictions: of this script.
    """

    def __init__(self, disk: DiskStore, predictions: Predictions):
        self._disk, self._predictions = disk, predictions
        self.begin()
        _live.add(self)

    def begin(self) -> None:
        """Has nothing: as it is made, and in a forked child, where its threads are not."""
        self._executor = ThreadPoolExecutor(_LOADERS, "stepcache preload")
        self.loads: dict[_Key, tuple[Prediction, Future[Any]]] = {}
        self.compile_seconds: dict[str, float] = {}  # Of what is loaded, by digest.
        self._taken: set[_Key] = set()
        self._lock = threading.Lock()
        self.preparing: Future[None] | None = None
        self.is_stopping = False

    def start(self, fetched: Future[Any] | None = None) -> None:
        """Starts to preload; once, and after what is fetched from a shared cache."""
        if self.preparing is None:
            with contextlib.suppress(RuntimeError):  # Too many threads, or Python is about to end.
                self.preparing = self._executor.submit(self._prepare, fetched)

    def _prepare(self, fetched: Future[Any] | None) -> None:
        """Reads the bytes of what is predicted, and has them loaded once there is a backend."""
        if fetched is not None:
            wait([fetched], _FETCH_SECONDS)
        limit, size_bytes = time.monotonic() + _LONGEST_WAIT_SECONDS, 0
        executables: list[tuple[Prediction, bytes]] = []
        for row in self._predictions.of_last_run()[:_PRELOADED_AT_MOST]:
            if self.is_stopping or size_bytes > _PRELOADED_BYTES:
                break
            if not row.devices or file_digest(row.file) != row.file_digest:
                continue  # Its code has changed, so that it probably needs another program.
            if (entry := self._disk.read("program", row.program)) is not None:
                executables.append((row, entry.payload))
                self.compile_seconds[row.program] = compile_seconds(entry)
                size_bytes += len(entry.payload)
        while executables and not jaxcompat.backends_are_initialized():
            if self.is_stopping or time.monotonic() > limit:
                return
            time.sleep(_POLL_SECONDS)
        waiting = deque[tuple[Prediction, bytes, Future[Any]]]()
        for row, data in executables:
            key = row.program, tuple(row.devices)
            with self._lock:
                if key not in self._taken and key not in self.loads:
                    self.loads[key] = row, (load := Future())
                    waiting.append((row, data, load))
        are_small = size_bytes < _SMALL_BYTES * len(executables)
        for _ in range(min(len(waiting), 1 if are_small else _LOADERS)):
            with contextlib.suppress(RuntimeError):  # No other thread can be started.
                self._executor.submit(self._load, waiting, executables[0][0].program)

    def _load(self, waiting: deque[tuple[Prediction, bytes, Future[Any]]], first: str) -> None:
        """Loads what waits, one after the other, with as little of Python as can be."""
        with self._disk.loading("program", first) as go_on, contextlib.suppress(IndexError):
            while not self.is_stopping:
                row, data, load = waiting.popleft()
                executable = None
                if load.set_running_or_notify_cancel():
                    go_on(row.program)
                    try:
                        if devices := _devices(row.platform, row.devices):
                            executable = jaxcompat.load_executable(data, devices)
                    except Exception as error:
                        why = f"XLA does not load it: {type(error).__name__}: {error}"
                        self._disk.discard("program", row.program, why)
                    finally:
                        load.set_result(executable)

    def take(self, digest: str, devices: Iterable[Any]) -> Any:
        """The executable of a program, on these devices; None where its load has not begun.

        Waits for a load that has begun.
        """
        key = digest, tuple(device.id for device in devices)
        with self._lock:
            self._taken.add(key)
            _, load = self.loads.pop(key, (None, None))
        return None if load is None or load.cancel() else load.result()

    def drop(self, label: str, signature: str) -> None:
        """Drops what was predicted for a call, which has another program."""
        for key, (row, load) in list(self.loads.items()):
            if (row.label, row.signature) == (label, signature):
                load.cancel()
                self.loads.pop(key, None)


def _devices(platform: str, numbers: Sequence[int]) -> tuple[Any, ...]:
    """Devices by their numbers; none where any does not exist, or none is of this process."""
    try:
        by_number = {device.id: device for device in jax.devices(platform or None)}
        found = tuple(by_number[number] for number in numbers)
    except (RuntimeError, KeyError):  # There is no such platform here, or no such device.
        return ()
    return found if any(device.process_index == jax.process_index() for device in found) else ()


_live: WeakObjects[Predictions | Preloader] = WeakObjects()


@_process_hooks.before_threads_end
def _stop() -> None:
    """Begins no more loads when the process ends, which waits for those under way."""
    for each in _live:
        if isinstance(each, Preloader):
            each.is_stopping = True


_process_hooks.at_fork(after_in_child=lambda: [each.begin() for each in _live])
