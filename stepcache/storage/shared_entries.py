"""`SharedEntries`: programs in an object store, which many machines share.

Entries have the format of the disk store, are signed with the shared key, and are never changed.
`shared_names.py` says where they lie. One listing answers all lookups of a start that find nothing;
with the first one that finds something, what the same run has built besides is fetched, too.
"""

from __future__ import annotations

import collections
import io
import logging
import os
import secrets
import threading
import time
import weakref
from collections.abc import Callable
from concurrent.futures import Future
from concurrent.futures import TimeoutError as WaitedTooLong
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar

from stepcache.errors import StepCacheWarning, first_line, warn
from stepcache.storage.dependency_record import (
    Address,
    DependencyRecord,
    pack_records,
    unpack_records,
)
from stepcache.storage.disk_store import DiskStore
from stepcache.storage.entry import DamagedEntryError, Header, Refusal, read_payload, read_stored
from stepcache.storage.object_store import ObjectStore
from stepcache.storage.shared_names import ROOT, Catalogue, Name, opened, program_path, signed
from stepcache.storage.shared_place import Place
from stepcache.units import counted
from stepcache.weak_objects import WeakObjects

_LISTED_SECONDS = 60.0
_RECORDS_READ = 8
_MAX_BYTES = {"step": 64 << 20, "verified": 1 << 20, "program": 4 << 30}
_AHEAD, _AHEAD_BYTES = 256, 256 << 20
_END_SECONDS = 2.0

T = TypeVar("T")
_Read = Callable[[Header, io.BytesIO], T]

_log = logging.getLogger("stepcache")


@dataclass(slots=True)
class _Patience:
    """How long calls may still wait for a store, and why they do not any more."""

    seconds: float
    ended: str = ""


_patience: dict[str, _Patience] = {}
"""By URL: what one cache of the process has found out holds for all."""


class SharedEntries:
    """The entries below a URL. Those that come from here are kept on `disk`.

    Attributes:
        url: of the place.
        received: the sizes in bytes of the executables that came from here, by digest.
        refused: what could not be trusted, the latest 256 in order.

    Nothing here raises because of the store or of what is in it. A store that fails, or that calls
    have waited for as long as they may, is warned of once, and not asked again.
    """

    def __init__(self, place: Place, disk: DiskStore):
        self._objects, self._key, self._disk = ObjectStore(place), place.key, disk
        self.url, self._writable = place.url, place.writable
        self._patience = _patience.setdefault(self.url, _Patience(place.wait_seconds))
        self.received: dict[str, int] = {}
        self.refused = collections.deque[Refusal](maxlen=256)
        self._lock, self._pid = threading.Lock(), os.getpid()
        self._listing: Future[Catalogue] | None = None
        self._listed = 0.0
        self._asked: dict[str, Future[Any]] = {}
        self._runs_fetched: set[str] = set()
        self._counted: set[str] = set()
        self._forgotten: set[tuple[str, str, str]] = set()
        self._run = secrets.token_hex(4)
        _live.add(self)
        weakref.finalize(self, self._objects.writes.stop).atexit = False

    @property
    def is_on(self) -> bool:
        """Whether the store is asked; not in a forked child, where its threads are not."""
        return not self._patience.ended and os.getpid() == self._pid

    def begin(self) -> None:
        """Asks for the listing, if nobody has."""
        with self._lock:
            if self._listing is None and self.is_on:
                self._list()

    def _list(self) -> Future[Catalogue]:
        self._listed = time.monotonic()
        if self._writable:  # What is looked for may have to be built.
            self._objects.writes.stay()
        self._listing = self._objects.listed(ROOT, Catalogue.of)
        return self._listing

    def _catalogue(self) -> Catalogue:
        """What is there now, or was within the last minute."""
        if not self.is_on:
            return Catalogue()
        with self._lock:
            listing = self._listing
            if listing is None or time.monotonic() - self._listed > _LISTED_SECONDS:
                listing = self._list()
        return self._waited_for(listing) or Catalogue()

    def records(self, lookup: str) -> list[DependencyRecord]:
        """The latest records of a lookup."""
        names = self._catalogue().steps.get(lookup, [])
        names = [name for name in names if name[:3] not in self._forgotten][:_RECORDS_READ]
        asked = [self._record(name, first=True) for name in names]
        if names and not self._disk.holds("program", names[0].program):
            self._program(names[0].program, first=True)
        found = [self._waited_for(each) for each in asked]
        return [each for each in found if each is not None]

    def fetch(self, program: str) -> bool:
        """Copies an executable to the disk. Returns whether it is there."""
        if any(each.digest == program for each in list(self._disk.quarantined)):
            return False  # As bad as it is here, it is there.
        if program not in self._catalogue().programs:
            return False
        return bool(self._waited_for(self._program(program, first=True)))

    def fetch_run_of(self, lookup: str, record: DependencyRecord) -> None:
        """Begins to fetch what was built by the run that has written a record."""
        catalogue, wanted = self._catalogue(), Name.of(lookup, record)
        alike = (name for name in catalogue.steps.get(lookup, []) if name[:3] == wanted[:3])
        run = next((name.run for name in alike), None)
        if run is None or run in self._runs_fetched:
            return
        self._runs_fetched.add(run)
        budget = _AHEAD_BYTES
        for name in catalogue.runs[run][:_AHEAD]:
            program = catalogue.programs.get(name.program)
            budget -= program.size_bytes if program is not None else 0
            if program is None or budget < 0 or self._disk.holds("step", name.lookup):
                continue
            self._record(name)
            if not self._disk.holds("program", name.program):
                self._program(name.program)

    def taken(self, program: str) -> int | None:
        """The size of an executable that came from here, where it was not counted before."""
        if program not in self.received or program in self._counted:
            return None
        self._counted.add(program)
        return self.received[program]

    def is_verified(self, lookup: str, record: DependencyRecord) -> bool:
        """Whether a start has verified a record. Asks the store, so not to be called by a call."""
        name = Name.of(lookup, record)
        if not self.is_on or name[:3] not in self._known().verified:
            return False
        check = partial(self._checked, "verified", lookup, lambda header, _: header.about)
        try:
            about = self._objects.get(name.verified_path, check).result(_END_SECONDS)
        except Exception as error:
            _log.info("%s: %s cannot be read: %s", self.url, name.verified_path, error)
            return False
        return about is not None and about.get("name") == list(name[:3])

    def _known(self) -> Catalogue:
        """What the latest listing has shown; nothing where there is none yet."""
        listing = self._listing
        return listing.result() if listing and _succeeded(listing) else Catalogue()

    def _record(self, name: Name, *, first: bool = False) -> Future[DependencyRecord | None]:
        def read(header: Header, file: io.BytesIO) -> DependencyRecord:
            (record,) = unpack_records(read_payload(file, header))
            if Name.of(name.lookup, record)[:3] != name[:3]:
                raise DamagedEntryError("it has the name of another one")
            return record

        return self._once(name.path, name.size_bytes, read, first)

    def _program(self, digest: str, *, first: bool = False) -> Future[bool | None]:
        def keep(header: Header, file: io.BytesIO) -> bool:
            stored = read_stored(file, header)
            self.received[digest] = file.tell()
            return self._disk.publish("program", digest, header.about, stored)

        there = self._catalogue().programs.get(digest)
        return self._once(program_path(digest), there.size_bytes if there else 0, keep, first)

    def _once(self, path: str, size_bytes: int, read: _Read[T], first: bool) -> Future[T | None]:
        """Asks for an object, once in the life of the process."""
        with self._lock:
            asked = self._asked.get(path)
            if asked is None:
                kind, digest = path.removeprefix(ROOT).split("/")[:2]
                if size_bytes > _MAX_BYTES[kind]:
                    asked = Future()
                    asked.set_result(self._refuse(kind, digest, f"it has {size_bytes:,} bytes"))
                else:
                    checked = partial(self._checked, kind, digest, read)
                    asked = self._objects.get(path, checked, first=first)
                self._asked[path] = asked
            elif first:
                self._objects.reads.hurry(asked)
        return asked

    def _checked(self, kind: str, digest: str, read: _Read[T], data: bytes) -> T | None:
        """What `read` makes of an entry; None if it is refused."""
        try:
            return read(*opened(self._key, kind, digest, data))
        except (DamagedEntryError, ValueError) as error:
            return self._refuse(kind, digest, str(error))

    def _refuse(self, kind: str, digest: str, reason: str) -> None:
        self.refused.append(Refusal(kind, digest, reason))
        what = "stepcache does not use what is stored as %s %s in %s: %s"
        _log.warning(what, kind, digest, self.url, reason)

    def _waited_for(self, future: Future[T]) -> T | None:
        """What a request gives; None where the store fails, or has not answered in time."""
        if not self.is_on:
            return None
        patience, started = self._patience, time.monotonic()
        try:
            return future.result(max(patience.seconds, 0.0))
        except WaitedTooLong:
            self._turn_off("it takes too long; STEPCACHE_REMOTE_SECONDS is the limit")
        except Exception as error:
            if not isinstance(error, FileNotFoundError) or future is self._listing:
                self._turn_off(first_line(error))
        finally:
            patience.seconds -= time.monotonic() - started
        return None

    def _turn_off(self, why: str) -> None:
        with self._lock:
            if self._patience.ended:
                return
            self._patience.ended = why
        self._objects.reads.stop()
        self._objects.writes.stop()
        warn(f"The shared cache {self.url} is not used from now on: {why}", StepCacheWarning)

    def upload(
        self, address: Address, digest: str, record: DependencyRecord | None, data: bytes
    ) -> None:
        """Writes a build, in the background.

        Without a record every start has to trace it. `data` is the executable, of this digest;
        empty where it is there.
        """

        def put_record(program: Future[bool] | None = None) -> None:
            if record is not None and (program is None or _succeeded(program)):
                path = Name.of(address.digest, record, self._run).path
                about, payload = pack_records(address.label, [record])
                self._put(path, "step", address.digest, about, payload)

        if not data or digest in self._known().programs:
            return put_record()
        program = self._put(program_path(digest), "program", digest, {"label": address.label}, data)
        # After the executable: a reader looks for it as soon as it sees the record.
        program.add_done_callback(put_record)

    def upload_verified(self, lookup: str, record: DependencyRecord) -> None:
        """Writes that a start has verified a record."""
        name = Name.of(lookup, record)
        self._put(name.verified_path, "verified", lookup, {"name": list(name[:3])}, b"")

    def _put(
        self, path: str, kind: str, digest: str, about: dict[str, Any], payload: bytes
    ) -> Future[bool]:
        """Writes an entry in the background, if its path is free."""
        if not self.is_on or not self._writable:
            dropped: Future[bool] = Future()
            dropped.cancel()
            return dropped
        make = partial(signed, self._key, kind, digest, about, payload)
        future = self._objects.put(path, make)
        future.add_done_callback(self._has_put)
        return future

    def _has_put(self, future: Future[Any]) -> None:
        error = None if future.cancelled() else future.exception()
        with self._lock:
            if error is None or not self._writable:
                return
            self._writable = False
        self._objects.writes.stop()
        hint = ""
        if isinstance(error, PermissionError):
            hint = "; if that is intended, set STEPCACHE_REMOTE_MODE=read"
        what = f"Nothing is written to the shared cache {self.url} from now on"
        warn(f"{what}: {first_line(error)}{hint}", StepCacheWarning)

    def forget(self, lookup: str, record: DependencyRecord) -> None:
        """Removes a record that a trace has proved wrong."""
        wrong = Name.of(lookup, record)
        self._forgotten.add(wrong[:3])
        names = self._catalogue().steps.get(lookup, [])
        paths = [name.path for name in names if name[:3] == wrong[:3]]
        if paths and self._writable and self.is_on:
            self._objects.delete([*paths, wrong.verified_path]).add_done_callback(self._has_put)

    def flush(self) -> None:
        """Waits until everything is written."""
        if os.getpid() == self._pid:
            self._objects.writes.wait()

    def end(self, seconds: float) -> None:
        """Waits for what is being written, but not for longer, and drops the rest."""
        if os.getpid() != self._pid:
            return
        left = self._objects.writes.wait(seconds)
        if left:
            told = "%s to %s: not written at the end; stepcache cache push writes the rest"
            _log.warning(told, counted(left, "upload"), self.url)
        self._objects.reads.stop()
        self._objects.writes.stop()


def _succeeded(future: Future[Any] | None) -> bool:
    return bool(future and future.done() and not future.cancelled() and not future.exception())


_live: WeakObjects[SharedEntries] = WeakObjects()


def finish_all() -> None:
    """Waits for what is being written, at the end of the process and not for long."""
    limit = time.monotonic() + _END_SECONDS
    for each in _live:
        each.end(max(limit - time.monotonic(), 0.0))
