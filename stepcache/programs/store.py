"""`ProgramStore`: executables outside this process, by the digest of what XLA is given.

They are preloaded, on disk, or in a shared cache behind it. Whoever asks has lowered the step: the
digest is that of its own module and of all that compiling depends on.
"""

from __future__ import annotations

import functools
import logging
import time
import zlib
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar

import jax

from stepcache import jaxcompat
from stepcache._changes import Undoing
from stepcache.events import Captured
from stepcache.programs.prediction import (
    Described,
    Prediction,
    Predictions,
    Preloader,
    compile_seconds,
    digest_of,
    file_digest,
    prediction_name,
    programs_in,
)
from stepcache.programs.worker import Worker, compiling
from stepcache.storage.building import UNLOCKED, Building, BuildLock
from stepcache.storage.disk_store import DiskStore
from stepcache.storage.run_log import Row, RunLog, script_name

if TYPE_CHECKING:  # Few processes have a shared cache.
    from stepcache.storage.shared_entries import SharedEntries

_POLL_SECONDS, _QUIET_SECONDS, _MODULE_BYTES = 0.02, 0.5, 8 << 20

_log = logging.getLogger("stepcache")

Stage = Callable[[str], AbstractContextManager[Any]]
Method = TypeVar("Method", bound=Callable)


def _no_matter_of_the_step(what: str, instead: Any = None) -> Callable[[Method], Method]:
    """Logs that a method could not do `what`; it returns `instead`, and the step goes on."""

    def guarded(method: Any) -> Any:
        @functools.wraps(method)
        def call(*args: Any, **kwargs: Any) -> Any:
            try:
                return method(*args, **kwargs)
            except Exception:
                _log.exception("stepcache could not %s", what)
                return instead

        return call

    return guarded


@dataclass(eq=False, repr=False, slots=True)
class Publication:
    """A program that was compiled here, on its way to the disk."""

    digest: str
    executable: Any
    module: Callable[[], str]  # Gives the lowered module as text, with locations.
    seconds: dict[str, float]
    captured: tuple[Captured, ...] = ()
    # The lock until it is stored: other processes wait for it.
    building: Building = UNLOCKED
    data: bytes = b""  # Serialized, where that was needed before.


class ProgramStore:
    """The programs of one directory.

    Args:
        disk: keeps the entries.
        run_log: keeps the runs.
        min_build_seconds: as for `ProgramCache`.
        remote: what other machines have compiled.
    """

    def __init__(
        self,
        disk: DiskStore,
        run_log: RunLog,
        min_build_seconds: float,
        remote: SharedEntries | None,
    ):
        self.disk, self.run_log, self.remote = disk, run_log, remote
        self.min_build_seconds = min_build_seconds
        self.worker = Worker("stepcache store", after=self._write_predictions)
        self.predictions = Predictions(disk)
        self.saved_seconds = 0.0  # What earlier runs took to compile what this one has loaded.
        self._has_published = False  # Whether this run has stored what other machines may lack.
        self.preloader = Preloader(disk, self.predictions)
        self._locks = BuildLock(disk.root / "compiling") if disk.writable else None

    @_no_matter_of_the_step("begin to preload programs")
    def begin(self) -> None:
        """Begins to preload what the last runs of this script used."""
        fetched = self.remote and self.remote.fetch_ahead(prediction_name(), programs_in)
        self.preloader.start(fetched)

    @_no_matter_of_the_step("look for a program")
    def find(self, compilation: jaxcompat.Compilation, stage: Stage) -> tuple[Any, str] | None:
        """The executable of a lowered module, loaded, and where it was; None if there is none."""
        digest, devices = compilation.digest, compilation.devices
        if (executable := self.preloader.take(digest, devices)) is not None:
            self.saved_seconds += self.preloader.compile_seconds.get(digest, 0.0)
            return executable, "preloaded"
        if (executable := self._load(compilation)) is not None:
            return executable, "disk"
        if self.remote is not None and self.remote.is_on:
            with stage("remote"):
                was_fetched = self.remote.fetch(digest)
            if was_fetched and (executable := self._load(compilation)) is not None:
                return executable, "remote"
        return None

    def _load(self, compilation: jaxcompat.Compilation) -> Any:
        digest = compilation.digest
        if not self.disk.holds("program", digest):
            return None
        with self.disk.loading("program", digest):
            entry = self.disk.read("program", digest)
            if entry is None:
                return None
            try:
                executable = compilation.load(entry.payload)
                self.saved_seconds += compile_seconds(entry)
                return executable
            except Exception as error:
                why = f"XLA does not load it: {type(error).__name__}: {error}"
                self.disk.discard("program", digest, why)
                return None

    @_no_matter_of_the_step("wait for another process")
    def lock_or_find(
        self, compilation: jaxcompat.Compilation, stage: Stage
    ) -> Building | tuple[Any, str] | None:
        """Waits while another process compiles the program.

        Returns:
            What `find` returns, where the other process has stored it; else a lock, under which
            this process is to compile it.
        """
        if self._locks is None:
            return None
        digest, building = compilation.digest, self._locks.try_lock(compilation.digest)
        if building is None:
            with stage("wait"):
                while (building := self._locks.try_lock(digest)) is None:
                    time.sleep(_POLL_SECONDS)
        # Another one may have stored it since this process has looked.
        found = self.find(compilation, stage) if self.disk.holds("program", digest) else None
        if found is not None:
            building.release(was_stored=True)
        return found or building

    @_no_matter_of_the_step("store a program", "it is not stored: see the log")
    def publish(self, publication: Publication, label: str) -> str:
        """Stores a program of the step of this label; returns why not, an empty text if it has.

        Where it has not, the caller lets other processes go on, by `publication.building`.
        """
        if sum(publication.seconds.values()) < self.min_build_seconds:
            return f"it was built in less than {self.min_build_seconds} s"
        try:
            executable = publication.executable
            serialized = publication.data or jaxcompat.serialize_executable(executable)
        except jaxcompat.NotStorable as error:
            return str(error)
        module = zlib.compress(publication.module().encode(), 1)
        about = {
            "label": label,
            "seconds": {name: round(value, 4) for name, value in publication.seconds.items()},
            "captured": [[x.name, x.type, x.size_bytes] for x in publication.captured],
            "module": module if len(module) <= _MODULE_BYTES else b"",
        }
        if not self.disk.publish("program", publication.digest, about, serialized):
            return "the directory cannot be written"
        publication.building.release(was_stored=True)
        self._has_published = True
        if self.remote is not None:
            self.remote.upload("program", publication.digest, about, serialized)
        return ""

    @_no_matter_of_the_step("read the module of a program", "")
    def module_of(self, digest: str) -> str:
        """The lowered module of a stored program, as text with locations; empty if unknown."""
        info = self.disk.peek("program", digest)
        packed = (info.header or {}).get("module", b"") if info is not None else b""
        return zlib.decompress(packed).decode() if packed else ""

    def note_use(
        self, described: Described, digest: str, devices: Sequence[Any], file: str = ""
    ) -> None:
        """Notes that this run uses a program, so that the next one preloads it.

        Args:
            described: the call.
            digest, devices: of its program.
            file: where the function of the step is; empty where it is in none.
        """
        row = Prediction(
            described.label,
            described.signature,
            digest,
            devices[0].platform if devices else "",
            [device.id for device in devices],
            file,
            file_digest(file),
            described.call,
            digest_of(described.environment),
            "",
            time.time(),
        )
        if not self.predictions.note(row, described.environment):
            self.preloader.drop(row.label, row.signature)

    def _write_predictions(self) -> None:
        if not self.predictions.is_new or self.worker.has_more():
            return
        # What other steps use, which are being started, is written with it.
        self.worker.is_urgent.wait(_QUIET_SECONDS)
        if not self.worker.has_more():
            payload = self.predictions.write()
            if self.remote is not None and self._has_published:
                self.remote.upload_prediction(prediction_name(), payload)

    @_no_matter_of_the_step("write its run log")
    def log(self, event: str, step: str, label: str, **details: Any) -> None:
        """Writes a row of this run, of this moment."""
        rank, processes = 0, 1
        if jaxcompat.backends_are_initialized():
            rank, processes = jax.process_index(), jax.process_count()
        details = {"rank": rank, "processes": processes} | details
        self.run_log.add(Row(event, self.run_log.clock(), script_name(), step, label, **details))

    def flush(self) -> None:
        """Waits until everything compiled so far is stored."""
        self.worker.flush()
        if self.remote is not None:
            self.remote.flush()


def take_or_compile(
    compilation: jaxcompat.Compilation,
    store: ProgramStore | None,
    stage: Stage,
    before_compiling: Callable[[], None] = lambda: None,
) -> tuple[Any, str, Building]:
    """Takes the executable of a lowered module from a store, or has XLA compile it.

    Returns:
        The executable; where it was, as in `Program.source`; and the lock under which it is to be
        stored, if it was compiled.
    """
    found = None
    if store is not None and compilation.digest:
        # One of the processes that need it compiles it; the others wait, and load it.
        found = store.find(compilation, stage) or store.lock_or_find(compilation, stage)
    if isinstance(found, tuple):
        return *found, UNLOCKED
    building = found or UNLOCKED
    try:
        before_compiling()
        with Undoing() as while_compiling, while_compiling, stage("compile"):
            while_compiling.use(compiling)
            return compilation.compile(), "compiled", building
    except BaseException:
        building.release()
        raise
