"""The disk store: what is kept for other processes, least recently used first out. Knows no JAX.

Loading an entry runs code, so every byte that is returned has been authenticated with this user's
key. A damaged file never raises: it is a miss, listed in `DiskStore.quarantined`.
"""

from __future__ import annotations

import collections
import contextlib
import errno
import hmac
import logging
import os
import stat
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, BinaryIO

from stepcache.errors import CacheDirectoryError, OptionError, StepCacheWarning, warn
from stepcache.storage import private_files
from stepcache.storage.directory import EntryDirectory, Found
from stepcache.storage.entry import (
    DamagedEntryError,
    EntryInfo,
    ForeignEntryError,
    Header,
    HeaderTooLargeError,
    Refusal,
    encode,
    read_header,
    read_payload,
)

_ATTEMPTS = 3
_TOUCH_SECONDS = 60
_MAX_QUARANTINED_BYTES = 1 << 30
_REFUSALS_REMEMBERED = 256
# The fault of the moment, not of the file or of the directory.
_PASSING = {errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.ESTALE, errno.EAGAIN, errno.EINTR}

_log = logging.getLogger("stepcache")
_warned_of: set[str] = set()


class DiskStore:
    """Named bytes in a directory that any number of processes and threads share.

    Args:
        directory: where; made if it is not there, for this user alone.
        max_bytes: bound on the size of all entries; None for no bound. A single entry larger than
            that is still kept, alone. What is in quarantine comes on top: at most 32 files, and a
            quarter of `max_bytes`, or 1 GiB without a bound.
        clock: tells the time in seconds since the epoch.

    Attributes:
        directory: as given.
        quarantined: what was refused in this process, the latest 256 in order.

    Raises `CacheDirectoryError` if another user owns the directory or can write to it, and
    `OptionError` if `max_bytes` is not positive, or a `kind` or `digest` cannot be a name. A
    directory that cannot be written serves reads.
    """

    def __init__(
        self,
        directory: Path,
        max_bytes: int | None = None,
        *,
        clock: Callable[[], float] = time.time,
    ):
        if max_bytes is not None and max_bytes < 1:
            raise OptionError("max_bytes must be positive", where="DiskStore", got=repr(max_bytes))
        self.directory = directory
        self.quarantined = collections.deque[Refusal](maxlen=_REFUSALS_REMEMBERED)
        self._max_bytes, self._clock = max_bytes, clock
        quarantine_bytes = _MAX_QUARANTINED_BYTES if max_bytes is None else max_bytes // 4
        self._files = EntryDirectory(directory, quarantine_bytes, clock, self._reached)
        self._not_written_because: str | None = None
        # Bad entries that could not be moved away.
        self._shunned: set[tuple[str, str]] = set()
        try:
            self._files.prepare()
            self._files.try_to_write()
            self._files.sweep()
        except FileNotFoundError:
            pass  # It was removed at this moment. The first publish will tell.
        except OSError as error:
            self._stop_writing(error)
            self._reload_key()

    @property
    def root(self) -> Path:
        """The part of the directory that this version of stepcache uses."""
        return self._files.root

    @property
    def writable(self) -> bool:
        """Whether `publish` still tries to store anything."""
        return self._not_written_because is None

    def read(self, kind: str, digest: str) -> EntryInfo | None:
        """The entry of a name, or None where there is none that can be trusted.

        A bad one is moved to quarantine, and so is one whose last loader has not survived it. Put
        `loading` around this and the use of what it returns.
        """
        known = self.holds(kind, digest) and (kind, digest) not in self._shunned
        if not known or self._has_killed(kind, digest):
            return None
        info = self._examine(kind, digest, whole=True, use=True)
        return info if info is not None and info.problem is None else None

    def peek(self, kind: str, digest: str) -> EntryInfo | None:
        """An entry with its payload, or None: it is not used, nor moved if it is bad."""
        return self._examine(kind, digest, whole=True, refuse=False)

    def vouch(self, what: bytes) -> bytes:
        """The HMAC of bytes under this directory's key. `what` begins with their purpose.

        Raises `OSError` if there is no key.
        """
        return hmac.digest(self._key(), what, "sha256")

    def _key(self) -> bytes:
        if self._files.key is None:
            self._reload_key()
        if self._files.key is None:
            raise OSError(errno.EAGAIN, "there is no key to check it with", str(self.directory))
        return self._files.key

    def _reload_key(self) -> bool:
        """Takes up the key that is in use now. Returns whether it is another one."""
        before = self._files.key
        with contextlib.suppress(CacheDirectoryError):
            self._files.current_key()
        return self._files.key != before

    @contextlib.contextmanager
    def loading(self, kind: str, digest: str) -> Iterator[None]:
        """Notes, for as long as it is open, that this process is loading an entry.

        The entry is not evicted meanwhile. If the process does not come back, the next `read` of
        the entry refuses it. To hold against eviction, it must be open before `read`.
        """
        self._files.path(kind, digest)
        pid, marker = os.getpid(), self._files.markers.mark(kind, digest)
        try:
            yield
        finally:
            if marker is not None and os.getpid() == pid:  # Not in a child forked in between.
                self._files.markers.unmark(marker)

    def _has_killed(self, kind: str, digest: str) -> bool:
        killers = self._files.markers.killers(kind, digest)
        # Whoever takes a marker away acts on it: an entry published since is not to blame.
        unmark = self._files.markers.unmark
        taken = [each for each in killers if unmark(each.path) or os.path.lexists(each.path)]
        if taken:
            pids = ", ".join(str(marker.process.pid) for marker in taken)
            self.discard(kind, digest, f"process {pids} ended while it was loading it")
        return bool(killers)

    def _examine(
        self, kind: str, digest: str, *, whole: bool = False, use: bool = False, refuse: bool = True
    ) -> EntryInfo | None:
        """Examines an entry: None if absent, else with a `problem` if it is bad.

        With `whole`, the payload is read too, and a bad entry put in quarantine if `refuse` says
        so; with `use`, it is noted that it is used now.
        """
        path, found, refused = self._files.path(kind, digest), None, whole and refuse
        with contextlib.ExitStack() as stack:
            try:
                found = path.lstat()
                if not stat.S_ISREG(found.st_mode):
                    raise DamagedEntryError("it is not a file")
                file = stack.enter_context(os.fdopen(os.open(path, private_files.READ_FLAGS), "rb"))
                found = os.fstat(file.fileno())
                header = self._read_header(file, found.st_size, kind, digest)
                payload = read_payload(file, header) if whole else b""
                now = self._clock()
                if use and abs(now - found.st_mtime) >= _TOUCH_SECONDS:
                    with contextlib.suppress(OSError):
                        os.utime(file.fileno(), (now, now))
                size_bytes, times = found.st_size, (header.created_time, found.st_mtime)
                return EntryInfo(kind, digest, header.about, size_bytes, *times, payload=payload)
            except (FileNotFoundError, NotADirectoryError):
                return None
            except DamagedEntryError as damage:
                problem = str(damage)
            except OSError as error:
                problem = f"it cannot be read ({error.strerror})"
                refused = refused and error.errno not in _PASSING
            if refused:  # While the file is open, so that no other one can have its inode.
                self.discard(kind, digest, problem, found)
        size_bytes, used_time = (found.st_size, found.st_mtime) if found else (0, 0.0)
        return EntryInfo(kind, digest, None, size_bytes, None, used_time, problem)

    def _read_header(self, file: BinaryIO, file_bytes: int, kind: str, digest: str) -> Header:
        try:
            return read_header(file, file_bytes, self._key(), kind, digest)
        except ForeignEntryError:
            # Another process may have put a new key there.
            if not self._reload_key():
                raise
            file.seek(0)
            return read_header(file, file_bytes, self._key(), kind, digest)

    def publish(self, kind: str, digest: str, header: dict[str, Any], payload: bytes) -> bool:
        """Stores an entry, in the place of one of the same name.

        It is there whole or not at all, whatever happens. If the entries are then more than the
        bound allows, the least recently used ones leave; not this one, nor one that a live process
        is loading.

        Args:
            kind, digest: its name: a short lower-case identifier, and lower-case hex.
            header: what to say of it, for msgpack; at most 16 MiB.
            payload: its bytes.

        Returns:
            Whether it is stored. Where the directory cannot be written, or is full, it is not; that
            is warned of once, and nothing is written from then on.

        Raises `OptionError` if `header` cannot be packed.
        """
        self._files.path(kind, digest)
        if not self.writable:
            self._warn_of_it()
            return False
        try:
            stored_bytes = self._store(kind, digest, header, payload)
        except HeaderTooLargeError as error:
            _log.warning("stepcache does not store %s %s: its header has %s", kind, digest, error)
            return False
        except (OSError, CacheDirectoryError) as error:
            self._stop_writing(error)
            if self.writable:
                _log.warning("stepcache could not store %s %s: %s", kind, digest, error)
            else:
                self._warn_of_it()
            return False
        self._shunned.discard((kind, digest))
        if self._max_bytes is not None:
            self._files.make_room(self._max_bytes, stored_bytes, (kind, digest))
        self._reached("evicted")
        return True

    def _store(self, kind: str, digest: str, header: dict[str, Any], payload: bytes) -> int:
        """Writes an entry. Returns the size of its file."""
        for attempt in range(_ATTEMPTS):
            try:
                known = None if attempt else self._files.current_key()
                key, now = known or self._files.prepare(), self._clock()
                pieces = encode(key, kind, digest, now, header, payload)
                self._files.put(kind, digest, pieces, now)
                return sum(map(len, pieces))
            except FileNotFoundError:
                # Somebody removed the directory meanwhile: it is made anew.
                if attempt == _ATTEMPTS - 1:
                    raise
        raise AssertionError("the last attempt returns or raises")

    def _reached(self, stage: str) -> None:
        """Called at each stage of a publish; tests end the process here."""

    def _stop_writing(self, error: Exception) -> None:
        if not isinstance(error, OSError) or error.errno not in _PASSING:
            why = getattr(error, "strerror", None)
            self._not_written_because = why or str(error).partition("\n")[0]

    def _warn_of_it(self) -> None:
        place = os.path.abspath(self.directory)
        if place in _warned_of:
            return
        _warned_of.add(place)
        warn(
            f"The program cache in {self.directory} cannot be written "
            f"({self._not_written_because}): programs are not kept on disk from now on; those that "
            "are there are still used",
            StepCacheWarning,
        )

    def entries(self, kind: str | None = None, *, whole: bool = False) -> Iterator[EntryInfo]:
        """What is stored, of one kind or all, in no order. Damaged entries have a `problem`.

        With `whole`, the payloads are checked too, and damaged entries put in quarantine.
        """
        for found in self._files.found(kind):
            info = self._examine(found.kind, found.digest, whole=whole)
            if info is not None:
                yield replace(info, payload=b"")

    def holds(self, kind: str, digest: str | None = None) -> bool:
        """Whether there is an entry of a kind, or the one of a digest, whatever its worth."""
        if digest is None:
            return any(True for _ in self._files.found(kind))
        return os.path.lexists(self._files.path(kind, digest))

    def size_bytes(self) -> int:
        """Size of all entries in bytes."""
        return sum(found.size_bytes for found in self._files.found())

    def prune(
        self, max_bytes: int | None = None, unused_since: float | None = None
    ) -> list[EntryInfo]:
        """Removes entries, the least recently used first. What a live process is loading stays.

        What was not used after `unused_since`, in seconds since the epoch, goes; then others, until
        no more than `max_bytes` are left.
        """
        removed: list[EntryInfo] = []
        if unused_since is not None:
            all_of_them = self._files.victims(0)
            removed += self._removed(each for each in all_of_them if each.used_time <= unused_since)
        if max_bytes is not None:
            removed += self._removed(self._files.victims(max_bytes))
        return removed

    def _removed(self, victims: Iterable[Found]) -> list[EntryInfo]:
        seen = ((each, self._examine(each.kind, each.digest)) for each in victims)
        return [info for each, info in seen if private_files.remove(each.path) and info is not None]

    def clear(self) -> int:
        """Removes all entries, what is in quarantine, and what earlier versions stored.

        Returns how many entries there were.
        """
        return self._files.clear()

    def discard(
        self, kind: str, digest: str, reason: str, seen: os.stat_result | None = None
    ) -> None:
        """Refuses an entry, as one that is damaged: its file goes to quarantine.

        Args:
            kind, digest: its name.
            reason: what is wrong with it.
            seen: the file that is meant; one that was published since stays.
        """
        self._files.path(kind, digest)
        self.quarantined.append(Refusal(kind, digest, reason))
        _log.warning(
            "stepcache does not use what is stored as %s %s in %s: %s",
            *(kind, digest, self.directory, reason),
        )
        if not self._files.set_aside(kind, digest, seen):
            self._shunned.add((kind, digest))
