"""`SharedEntries`: programs in an object store, which many machines share.

    stepcache-2/program/<digest>          a program
    stepcache-2/export/<digest>           a step that a KEY vouches for, or why it does no longer
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
from collections.abc import Callable
from concurrent.futures import Future
from concurrent.futures import TimeoutError as WaitedTooLong
from dataclasses import dataclass, field
from functools import partial
from typing import Any, TypeVar

from stepcache.errors import StepCacheWarning, warn
from stepcache.storage.disk_store import DiskStore
from stepcache.storage.entry import DamagedEntryError, Refusal, encode, read_header, read_payload
from stepcache.storage.object_store import Object, ObjectStore, Requests, in_short
from stepcache.storage.shared_place import Place
from stepcache.units import counted
from stepcache.weak_objects import WeakObjects

ROOT = "stepcache-2/"

_NAME = re.compile(rf"{ROOT}(program|export|prediction)/([0-9a-f]{{1,128}})(/[\w-]+)?")
_READERS, _WRITERS = 16, 4
_LISTED_SECONDS, _END_SECONDS = 60.0, 2.0
_AHEAD, _MAX_BYTES = 256, 4 << 30

T = TypeVar("T")

_log = logging.getLogger("stepcache")


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

    entries: dict[tuple[str, str], Object] = field(default_factory=dict)  # By kind and digest.

    @classmethod
    def read(cls, objects: ObjectStore) -> Catalogue:
        """Lists a store; objects with other names are not ours."""
        made = cls()
        for each in sorted(objects.listed(ROOT), key=lambda each: (each.time, each.name)):
            found = _NAME.fullmatch(each.name)
            if found and bool(found[3]) == (found[1] == "prediction"):
                made.entries[found[1], found[2]] = each
        return made

    def of_kind(self, wanted: str) -> dict[str, Object]:
        """The entries of a kind, by digest."""
        return {digest: each for (kind, digest), each in self.entries.items() if kind == wanted}


_patience_seconds: dict[str, float] = {}
"""By URL, for all caches of the process: how long calls may still wait; 0 where none asks."""


class SharedEntries:
    """The entries below a URL. Those that come from here are kept on `disk`.

    Attributes:
        url: of the place.
        received: the sizes in bytes of the programs that came from here, by digest, until counted.
        refused: what could not be trusted, the latest 256 in order.

    Nothing here raises because of the store or of what is in it. A store that fails, or that calls
    have waited for as long as they may, is warned of once, and not asked again.
    """

    def __init__(self, place: Place, disk: DiskStore):
        self._objects, self._key, self._disk = ObjectStore(place), place.key, disk
        self._reads = Requests("stepcache get", _READERS)
        self._writes = Requests("stepcache put", _WRITERS)
        self.url, self._writable = place.url, place.writable
        _patience_seconds.setdefault(self.url, place.wait_seconds)
        self.received: dict[str, int] = {}
        self.refused = collections.deque[Refusal](maxlen=256)
        self._lock, self._pid = threading.Lock(), os.getpid()
        self._listing: Future[Catalogue] | None = None
        self._listed_time = 0.0
        self._asked: dict[str, Future[bool]] = {}
        self._run, self._predictions = secrets.token_hex(4), itertools.count()
        _live.add(self)
        weakref.finalize(self, _stop, self._reads, self._writes).atexit = False

    @property
    def is_on(self) -> bool:
        """Whether the store is asked; not in a forked child, where its threads are not."""
        return _patience_seconds[self.url] > 0 and os.getpid() == self._pid

    def begin(self, at_least_of: float = 0.0) -> Future[Catalogue] | None:
        """Asks for the listing in the background, unless there is one of that time or later."""
        with self._lock:
            if self.is_on and (self._listing is None or self._listed_time < at_least_of):
                self._listed_time = time.monotonic()
                if self._writable:  # What is not there may be built at the end: see `Requests`.
                    self._writes.submit(lambda: None)
                read = partial(Catalogue.read, self._objects)
                self._listing = self._reads.submit(read, first=True)
            return self._listing

    def fetch(self, digest: str, kind: str = "program") -> bool:
        """Copies an entry to the disk. Returns whether it is there.

        All calls of the process together wait for the store no longer than they may.
        """
        if any(each.digest == digest for each in list(self._disk.quarantined)):
            return False  # As bad as it is here, it is there.
        catalogue = self._waited_for(self.begin(time.monotonic() - _LISTED_SECONDS))
        there = catalogue.entries.get((kind, digest)) if catalogue is not None else None
        ask = partial(self._ask, kind, digest, first=True)
        return there is not None and bool(self._waited_for(ask(there)))

    def fetch_ahead(self, name: str, programs_in: Callable[[bytes], list[str]]) -> Future[bool]:
        """Copies to the disk, in the background, what the last run of a script has used.

        Args:
            name: of the prediction. If the disk has none, the newest one here is copied.
            programs_in: returns the digests of the programs that the payload of one names.

        Returns:
            Whether the disk has a prediction now; nothing waits for the programs.
        """
        listing = self.begin()

        def copy() -> bool:  # In a thread that reads, after another one has begun to list.
            catalogue = listing.result() if listing is not None else Catalogue()
            if (newest := catalogue.entries.get(("prediction", name))) is not None:
                self._copy("prediction", name, newest)
            prediction = self._disk.peek("prediction", name)
            if prediction is None or prediction.problem is not None:
                return False
            for digest in programs_in(prediction.payload)[:_AHEAD]:
                if (there := catalogue.entries.get(("program", digest))) is not None:
                    self._ask("program", digest, there)
            return True

        return self._reads.submit(copy)

    def _ask(self, kind: str, digest: str, there: Object, *, first: bool = False) -> Future[bool]:
        """Has an entry copied, once in the life of the process."""
        with self._lock:
            asked = self._asked.get(digest)
            # What waits behind others is asked for again, before them.
            if asked is None or (first and not (asked.running() or asked.done())):
                copy = partial(self._copy, kind, digest, there)
                asked = self._asked[digest] = self._reads.submit(copy, first=first)
        return asked

    def _copy(self, kind: str, digest: str, there: Object) -> bool:
        """Copies an entry to the disk, unless it is there; refuses a bad one."""
        if self._disk.holds(kind, digest):
            return True
        try:
            if there.size_bytes > _MAX_BYTES:
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

    def _waited_for(self, future: Future[T] | None) -> T | None:
        """What a request gives; None where the store fails, or has not answered in time."""
        if future is None or not self.is_on:
            return None
        started, why = time.monotonic(), ""
        try:
            return future.result(_patience_seconds[self.url])
        except WaitedTooLong:
            why = "it takes too long; STEPCACHE_REMOTE_SECONDS is the limit"
        except Exception as error:
            if not isinstance(error, FileNotFoundError) or future is self._listing:
                why = f"{type(error).__name__}: {in_short(error)}"
        finally:
            with self._lock:
                before = _patience_seconds[self.url]
                left = max(before - (time.monotonic() - started), 0.001)
                _patience_seconds[self.url] = left if before and not why else 0.0
        if why and before:
            _stop(self._reads, self._writes)
            warn(f"The shared cache {self.url} is not used from now on: {why}", StepCacheWarning)
        return None

    def upload(self, kind: str, digest: str, about: dict[str, Any], payload: bytes) -> None:
        """Writes an entry in the background, if there is none of its digest."""
        self._put(f"{kind}/{digest}", kind, digest, about, payload)

    def upload_prediction(self, name: str, payload: bytes) -> None:
        """Writes in the background what this run of a script has used by now."""
        run = f"{self._run}-{next(self._predictions):04}"
        self._put(f"prediction/{name}/{run}", "prediction", name, {}, payload)

    def _put(
        self, path: str, kind: str, digest: str, about: dict[str, Any], payload: bytes
    ) -> None:
        def write() -> bool:
            return self._objects.put(ROOT + path, signed(self._key, kind, digest, about, payload))

        if self.is_on and self._writable:
            self._writes.submit(write).add_done_callback(self._has_put)

    def _has_put(self, future: Future[bool]) -> None:
        error = None if future.cancelled() else future.exception()
        with self._lock:
            if error is None or not self._writable:
                return
            self._writable = False
        self._writes.stop()
        why = f"{type(error).__name__}: {in_short(error)}"
        if isinstance(error, PermissionError):
            why += "; if that is intended, set STEPCACHE_REMOTE_MODE=read"
        warn(f"Nothing more is written to the shared cache {self.url}: {why}", StepCacheWarning)

    def flush(self, seconds: float | None = None) -> None:
        """Waits until everything is written, but not for longer; what is left then is dropped."""
        left = self._writes.wait(seconds) if os.getpid() == self._pid else 0
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
        each.flush(max(limit - time.monotonic(), 0.0))
