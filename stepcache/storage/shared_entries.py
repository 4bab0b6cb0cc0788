"""`SharedEntries`: programs in an object store, which many machines share.

    stepcache-2/program/<digest>          a program
    stepcache-2/prediction/<name>/<run>   what a run of a script used; the newest counts

Objects have the format of the disk store, are signed with the shared key, and are never changed.
One listing answers all calls of a start for what is not there.
"""

from __future__ import annotations

import collections
import io
import itertools
import logging
import os
import re
import secrets
import threading
import time
import weakref
from collections.abc import Callable, Iterable
from concurrent.futures import Future
from concurrent.futures import TimeoutError as WaitedTooLong
from dataclasses import dataclass, field
from functools import partial
from typing import Any, TypeVar

from stepcache.errors import StepCacheWarning, first_line, warn
from stepcache.storage.disk_store import DiskStore
from stepcache.storage.entry import DamagedEntryError, Refusal, encode, read_header, read_payload
from stepcache.storage.object_store import Object, ObjectStore, Requests
from stepcache.storage.shared_place import Place
from stepcache.units import counted
from stepcache.weak_objects import WeakObjects

ROOT = "stepcache-2/"

_NAME = re.compile(rf"{ROOT}(?:program/([0-9a-f]{{1,128}})|prediction/([0-9a-f]{{1,128}})/[\w-]+)")
_READERS, _WRITERS = 16, 4
_LISTED_SECONDS = 60.0
_MAX_BYTES = {"prediction": 64 << 20, "program": 4 << 30}
_AHEAD, _AHEAD_BYTES = 256, 256 << 20
_END_SECONDS = 2.0

T = TypeVar("T")

_log = logging.getLogger("stepcache")


def program_path(digest: str) -> str:
    """The name of the object of a program."""
    return f"{ROOT}program/{digest}"


def signed(key: bytes, kind: str, digest: str, about: dict[str, Any], payload: bytes) -> bytes:
    """An entry as it is written."""
    return b"".join(encode(key, kind, digest, time.time(), about, payload))


def opened(key: bytes, kind: str, digest: str, data: bytes) -> tuple[dict[str, Any], bytes]:
    """What an entry that was read says of itself, and its payload.

    Raises `DamagedEntryError` if it is not whole, or was not written under this key and name.
    """
    file = io.BytesIO(data)
    header = read_header(file, len(data), key, kind, digest)
    return header.about, read_payload(file, header)


@dataclass(slots=True)
class Catalogue:
    """What a listing has shown."""

    programs: dict[str, Object] = field(default_factory=dict)  # By digest.
    predictions: dict[str, Object] = field(default_factory=dict)  # The newest, by name.

    @classmethod
    def of(cls, objects: Iterable[Object]) -> Catalogue:
        """From a listing; objects with other names are not ours."""
        made = cls()
        for each in sorted(objects, key=lambda each: (each.time, each.name)):
            found = _NAME.fullmatch(each.name)
            if found and found[1]:
                made.programs[found[1]] = each
            elif found:
                made.predictions[found[2]] = each
        return made


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
        received: the sizes in bytes of the programs that came from here, by digest.
        refused: what could not be trusted, the latest 256 in order.

    Nothing here raises because of the store or of what is in it. A store that fails, or that calls
    have waited for as long as they may, is warned of once, and not asked again.
    """

    def __init__(self, place: Place, disk: DiskStore):
        self._objects, self._key, self._disk = ObjectStore(place), place.key, disk
        self._reads = Requests("stepcache get", _READERS)
        self._writes = Requests("stepcache put", _WRITERS)
        self.url, self._writable = place.url, place.writable
        self._patience = _patience.setdefault(self.url, _Patience(place.wait_seconds))
        self.received: dict[str, int] = {}
        self.refused = collections.deque[Refusal](maxlen=256)
        self._lock, self._pid = threading.Lock(), os.getpid()
        self._listing: Future[Catalogue] | None = None
        self._listed = 0.0
        self._asked: dict[str, Future[bool]] = {}
        self._ahead: set[str] = set()  # Of these, those that no call waits for.
        self._counted: set[str] = set()
        self._run, self._predictions = secrets.token_hex(4), itertools.count()
        _live.add(self)
        weakref.finalize(self, _stop, self._reads, self._writes).atexit = False

    @property
    def is_on(self) -> bool:
        """Whether the store is asked; not in a forked child, where its threads are not."""
        return not self._patience.ended and os.getpid() == self._pid

    def begin(self) -> None:
        """Asks for the listing in the background, if nobody has."""
        with self._lock:
            if self._listing is None and self.is_on:
                self._list()

    def _list(self) -> Future[Catalogue]:
        self._listed = time.monotonic()
        if self._writable:  # What is looked for may be built at the end, when no thread starts.
            self._writes.submit(lambda: None)
        self._listing = self._reads.submit(lambda: Catalogue.of(self._objects.listed(ROOT)), True)
        return self._listing

    def _catalogue(self) -> Catalogue:
        """What is there now, or was within the last minute. Waits for the store."""
        if not self.is_on:
            return Catalogue()
        with self._lock:
            listing = self._listing
            if listing is None or time.monotonic() - self._listed > _LISTED_SECONDS:
                listing = self._list()
        return self._waited_for(listing) or Catalogue()

    def fetch(self, digest: str) -> bool:
        """Copies a program to the disk. Returns whether it is there.

        All calls of the process together wait for the store no longer than they may.
        """
        if any(each.digest == digest for each in list(self._disk.quarantined)):
            return False  # As bad as it is here, it is there.
        there = self._catalogue().programs.get(digest)
        return there is not None and bool(self._waited_for(self._ask(digest, there, first=True)))

    def fetch_ahead(self, name: str, programs_in: Callable[[bytes], list[str]]) -> Future[bool]:
        """Copies to the disk, in the background, what the last run of a script has used.

        Args:
            name: of the prediction. If the disk has none, the newest one here is copied.
            programs_in: returns the digests of the programs that the payload of one names.

        Returns:
            Whether the disk has a prediction now; nothing waits for the programs.
        """
        if self._lacking(name, programs_in) == []:
            return self._reads.submit(lambda: True)
        self.begin()
        return self._reads.submit(lambda: self._copy_ahead(name, programs_in))

    def _lacking(self, name: str, programs_in: Callable[[bytes], list[str]]) -> list[str] | None:
        """The programs of a prediction that the disk has not; None if it has no prediction."""
        entry = self._disk.peek("prediction", name)
        if entry is None or entry.problem is not None:
            return None
        try:
            digests = programs_in(entry.payload)
            return [each for each in digests if not self._disk.holds("program", each)]
        except Exception:
            _log.info("the prediction %s cannot be read", name, exc_info=True)
            return None

    def _copy_ahead(self, name: str, programs_in: Callable[[bytes], list[str]]) -> bool:
        """Runs in a thread that reads, after the listing was asked for."""
        catalogue = self._listing.result() if self._listing is not None else Catalogue()
        newest = catalogue.predictions.get(name)
        if newest is not None and not self._disk.holds("prediction", name):
            self._copy("prediction", name, newest)
        lacking, budget_bytes = self._lacking(name, programs_in), _AHEAD_BYTES
        for digest in (lacking or [])[:_AHEAD]:
            there = catalogue.programs.get(digest)
            if there is not None and there.size_bytes <= budget_bytes:
                budget_bytes -= there.size_bytes
                self._ask(digest, there, first=False)
        return lacking is not None

    def taken(self, digest: str) -> int | None:
        """The size of a program that came from here, where it was not counted before."""
        if digest not in self.received or digest in self._counted:
            return None
        self._counted.add(digest)
        return self.received[digest]

    def _ask(self, digest: str, there: Object, *, first: bool) -> Future[bool]:
        """Has a program copied, once in the life of the process."""
        with self._lock:
            asked = self._asked.get(digest)
            # What waits behind others is asked for again, before them.
            if asked is None or (first and digest in self._ahead and asked.cancel()):
                copy = partial(self._copy, "program", digest, there)
                asked = self._asked[digest] = self._reads.submit(copy, first)
                (self._ahead.discard if first else self._ahead.add)(digest)
        return asked

    def _copy(self, kind: str, digest: str, there: Object) -> bool:
        """Copies an entry to the disk. Returns whether that was possible; refuses a bad one."""
        try:
            if there.size_bytes > _MAX_BYTES[kind]:
                raise DamagedEntryError(f"it has {there.size_bytes:,} bytes")
            data = self._objects.get(there.name)
            about, payload = opened(self._key, kind, digest, data)
        except DamagedEntryError as damage:
            self.refused.append(Refusal(kind, digest, str(damage)))
            what = "stepcache does not use what is stored as %s %s in %s: %s"
            _log.warning(what, kind, digest, self.url, damage)
            return False
        if kind == "program":
            self.received[digest] = len(data)
        return self._disk.publish(kind, digest, about, payload)

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
        _stop(self._reads, self._writes)
        warn(f"The shared cache {self.url} is not used from now on: {why}", StepCacheWarning)

    def upload_program(self, digest: str, about: dict[str, Any], payload: bytes) -> None:
        """Writes a program in the background, unless it is there."""
        listing = self._listing
        is_listed = listing is not None and listing.done() and not listing.exception()
        if listing is None or not is_listed or digest not in listing.result().programs:
            self._put(program_path(digest), "program", digest, about, payload)

    def upload_prediction(self, name: str, payload: bytes) -> None:
        """Writes in the background what this run of a script has used by now."""
        path = f"{ROOT}prediction/{name}/{self._run}-{next(self._predictions):04}"
        self._put(path, "prediction", name, {}, payload)

    def _put(
        self, path: str, kind: str, digest: str, about: dict[str, Any], payload: bytes
    ) -> None:
        if self.is_on and self._writable:
            make = partial(signed, self._key, kind, digest, about, payload)
            writing = self._writes.submit(lambda: self._objects.put(path, make()))
            writing.add_done_callback(self._has_put)

    def _has_put(self, future: Future[bool]) -> None:
        error = None if future.cancelled() else future.exception()
        with self._lock:
            if error is None or not self._writable:
                return
            self._writable = False
        self._writes.stop()
        hint = ""
        if isinstance(error, PermissionError):
            hint = "; if that is intended, set STEPCACHE_REMOTE_MODE=read"
        what = f"Nothing is written to the shared cache {self.url} from now on"
        warn(f"{what}: {first_line(error)}{hint}", StepCacheWarning)

    def flush(self) -> None:
        """Waits until everything is written."""
        if os.getpid() == self._pid:
            self._writes.wait()

    def end(self, seconds: float) -> None:
        """Waits for what is being written, but not for longer, and drops the rest."""
        if os.getpid() != self._pid:
            return
        left = self._writes.wait(seconds)
        if left:
            what = "%s to %s: not written at the end; stepcache cache push writes the rest"
            _log.warning(what, counted(left, "upload"), self.url)
        _stop(self._reads, self._writes)


def _stop(*requests: Requests) -> None:
    for each in requests:
        each.stop()


_live: WeakObjects[SharedEntries] = WeakObjects()


def finish_all() -> None:
    """Waits for what is being written, at the end of the process and not for long."""
    limit = time.monotonic() + _END_SECONDS
    for each in _live:
        each.end(max(limit - time.monotonic(), 0.0))
