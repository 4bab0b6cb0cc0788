"""The disk store: what is kept for other processes, least recently used first out. Knows no JAX.

Layout, under `<directory>/v2/`: `key`, `entries/<kind>/<digest>`, `tmp/`, `loading/` (load markers)
and `quarantine/`. `compiling`, `runs/` and `activity/` belong to other files of this wing. Readers
and writers take no lock: a file appears whole, by a rename, or not at all, and that a file vanishes
between two looks is normal.

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
import re
import secrets
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

from stepcache.errors import CacheDirectoryError, OptionError, StepCacheWarning, warn
from stepcache.link.processes import author, unique_name
from stepcache.storage import private_files
from stepcache.storage.entry import (
    DamagedEntryError,
    EntryInfo,
    Refusal,
    encode,
    read_header,
    read_payload,
)
from stepcache.storage.load_markers import killers, marked

ROOT, EARLIER_ROOT = "v2", "v1"
_KIND = re.compile(r"[a-z][a-z0-9_]{0,23}")
_DIGEST = re.compile(r"[0-9a-f]{1,128}")
_TOUCH_SECONDS, _TEMPORARY_SECONDS = 60, 3600
_MAX_QUARANTINED_FILES, _REFUSALS_REMEMBERED = 16, 256
_LOOKED_THROUGH_EVERY = 64
# The fault of the moment, not of the file or of the directory.
_PASSING = {errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.ESTALE, errno.EAGAIN, errno.EINTR}

_log = logging.getLogger("stepcache")
_warned_of: set[Path] = set()


class DiskStore:
    """Named bytes in a directory that any number of processes and threads share.

    Args:
        directory: where; made if it is not there, for this user alone.
        max_bytes: bound on the size of all entries; None for no bound. A single entry larger than
            that is still kept, alone. The newest 16 files in quarantine come on top.
        clock: tells the time in seconds since the epoch.

    Attributes:
        directory: as given.
        root: the part of it that this version uses. Absolute, as a process may change directory.
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
        self.directory, self.root = directory, Path(os.path.abspath(directory)) / ROOT
        self.quarantined = collections.deque[Refusal](maxlen=_REFUSALS_REMEMBERED)
        self._max_bytes, self._clock = max_bytes, clock
        self._known_key, self._not_written_because = b"", ""
        self._shunned: set[tuple[str, str]] = set()  # Bad entries that could not be moved away.
        # How much may be stored before the entries are looked through for what has to leave.
        self._room_bytes = self._unseen_writes = 0
        try:
            self._prepare()
            self._sweep()
        except FileNotFoundError:
            pass  # It was removed at this moment. The first publish will tell.
        except OSError as error:
            self._stop_writing(error)

    def _prepare(self) -> bytes:
        """Makes what is missing of the layout. Returns the key that is in use now.

        Raises `CacheDirectoryError` if another user can change it, `OSError` if it cannot be made.
        """
        if self._known_key and private_files.load_key(self.root / "key") == self._known_key:
            return self._known_key  # Else somebody has removed the directory.
        private_files.make_directory(self.root.parent)
        private_files.make_directory(self.root)
        for name in ("entries", "tmp", "loading", "quarantine"):
            (self.root / name).mkdir(mode=0o700, exist_ok=True)
        temporary = self.root / "tmp" / unique_name()
        self._known_key = private_files.ensure_key(self.root / "key", temporary)
        return self._known_key

    def _sweep(self) -> None:
        """Removes what processes that were ended have left behind."""
        entries, loading, tmp = (self.root / name for name in ("entries", "loading", "tmp"))
        for marker in killers(loading):
            if not os.path.lexists(entries / marker.kind / marker.digest):
                private_files.remove(marker.path)
        for path in (*private_files.listed(tmp), *private_files.listed(loading)):
            process = author(path.name)
            with contextlib.suppress(OSError):
                if process is not None and process.is_local():
                    is_left = path.parent == tmp and process.has_ended()
                else:
                    is_left = self._clock() - path.lstat().st_mtime > _TEMPORARY_SECONDS
                if is_left:
                    path.unlink()

    @property
    def writable(self) -> bool:
        """Whether `publish` still tries to store anything."""
        return not self._not_written_because

    def vouch(self, what: bytes) -> bytes:
        """The HMAC of bytes under this directory's key. Raises `OSError` if there is none."""
        return hmac.digest(self._key(), what, "sha256")

    def _key(self, *, anew: bool = False) -> bytes:
        """The key; with `anew`, the one that another process may have put there since."""
        if anew or not self._known_key:
            with contextlib.suppress(CacheDirectoryError, OSError):
                private_files.check_directory(self.root.parent)
                private_files.check_directory(self.root)
                self._known_key = private_files.load_key(self.root / "key") or self._known_key
        if not self._known_key:
            raise OSError(errno.EAGAIN, "there is no key to check it with", str(self.directory))
        return self._known_key

    def _path(self, kind: str, digest: str) -> Path:
        """Where an entry is. Raises `OptionError` if `kind` or `digest` cannot be a name."""
        for name, value, pattern in (("kind", kind, _KIND), ("digest", digest, _DIGEST)):
            if not isinstance(value, str) or not pattern.fullmatch(value):
                raise OptionError(
                    f"This cannot be the {name} of a stored entry",
                    where=name,
                    expected=f"what matches {pattern.pattern}",
                    got=repr(value),
                )
        return self.root / "entries" / kind / digest

    def read(self, kind: str, digest: str) -> EntryInfo | None:
        """The entry of a name, or None where there is none that can be trusted.

        A bad one is moved to quarantine, and so is one whose last loader has not survived it. Put
        `loading` around this and the use of what it returns.
        """
        if not self.holds(kind, digest) or (kind, digest) in self._shunned:
            return None
        # Whoever takes a marker away acts on it: an entry published since is not to blame.
        found, remove = list(killers(self.root / "loading", kind, digest)), private_files.remove
        taken = [each for each in found if remove(each.path) or os.path.lexists(each.path)]
        if taken:
            pids = ", ".join(str(marker.process.pid) for marker in taken)
            self.discard(kind, digest, f"process {pids} ended while it was loading it")
        info = None if found else self._examine(kind, digest, whole=True, refuse=True)
        if info is None or info.problem is not None:
            return None
        now = self._clock()
        if abs(now - info.used_time) >= _TOUCH_SECONDS:
            with contextlib.suppress(OSError):
                os.utime(self._path(kind, digest), (now, now))
        return info

    def peek(self, kind: str, digest: str) -> EntryInfo | None:
        """An entry with its payload, or None: it is not used, nor moved if it is bad."""
        return self._examine(kind, digest, whole=True)

    def loading(self, kind: str, digest: str) -> contextlib.AbstractContextManager[Callable]:
        """Notes, for as long as it is open, that this process is loading an entry.

        If the process does not come back, the next `read` of the entry refuses it. The function
        that it gives goes on to an entry of another digest.
        """
        self._path(kind, digest)
        return marked(self.root / "loading", kind, digest)

    def _examine(
        self, kind: str, digest: str, *, whole: bool = False, refuse: bool = False
    ) -> EntryInfo | None:
        """Examines an entry: None if absent, else with a `problem` if it is bad.

        With `whole`, the payload is read too; with `refuse`, a bad entry is put in quarantine.
        """
        path, found = self._path(kind, digest), None
        with contextlib.ExitStack() as stack:
            try:
                file = stack.enter_context(os.fdopen(os.open(path, private_files.READ_FLAGS), "rb"))
                found = os.fstat(file.fileno())
                try:
                    header = read_header(file, found.st_size, self._key(), kind, digest)
                except DamagedEntryError:
                    file.seek(0)
                    header = read_header(file, found.st_size, self._key(anew=True), kind, digest)
                payload = read_payload(file, header) if whole else b""
                size_bytes, times = found.st_size, (header.created_time, found.st_mtime)
                return EntryInfo(kind, digest, header.about, size_bytes, *times, payload=payload)
            except (FileNotFoundError, NotADirectoryError):
                return None
            except DamagedEntryError as damage:
                problem = str(damage)
            except OSError as error:
                problem = f"it cannot be read ({error.strerror})"
                refuse = refuse and error.errno not in _PASSING
            if refuse:  # While the file is open, so that no other one can have its inode.
                self.discard(kind, digest, problem, found)
        size_bytes, used_time = (found.st_size, found.st_mtime) if found else (0, 0.0)
        return EntryInfo(kind, digest, None, size_bytes, None, used_time, problem)

    def publish(self, kind: str, digest: str, header: dict[str, Any], payload: bytes) -> bool:
        """Stores an entry, in the place of one of the same name.

        It is there whole or not at all, whatever happens. If the entries are then more than the
        bound allows, the least recently used ones leave; not this one.

        Args:
            kind, digest: its name: a short lower-case identifier, and lower-case hex.
            header: what to say of it, for msgpack; at most 16 MiB.
            payload: its bytes.

        Returns:
            Whether it is stored. Where the directory cannot be written, or is full, it is not; that
            is warned of once, and nothing is written from then on.

        Raises `OptionError` if `header` cannot be packed.
        """
        path = self._path(kind, digest)
        if self.writable:
            try:
                now = self._clock()
                pieces = encode(self._prepare(), kind, digest, now, header, payload)
                self._write(path, pieces, now)
                self._shunned.discard((kind, digest))
                self._make_room(sum(map(len, pieces)), path)
                return True
            except (OSError, CacheDirectoryError) as error:
                self._stop_writing(error)
                if self.writable:
                    _log.warning("stepcache could not store %s %s: %s", kind, digest, error)
        if not self.writable and self.root not in _warned_of:
            _warned_of.add(self.root)
            warn(
                f"The program cache in {self.directory} cannot be written "
                f"({self._not_written_because}): programs are not kept on disk from now on; those "
                "that are there are still used",
                StepCacheWarning,
            )
        return False

    def _write(self, path: Path, pieces: Iterable[bytes], now: float) -> None:
        temporary = self.root / "tmp" / unique_name()
        try:
            private_files.create(temporary, pieces, now)
            path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            for killer in killers(self.root / "loading", path.parent.name, path.name):
                private_files.remove(killer.path)  # What it died of is about to be replaced.
            if path.is_dir():
                private_files.remove(path)
            temporary.replace(path)
        except BaseException:
            with contextlib.suppress(OSError):
                temporary.unlink()
            raise
        # The directory is not synced: a power cut may undo the rename, which is a miss.

    def _stop_writing(self, error: Exception) -> None:
        if not isinstance(error, OSError) or error.errno not in _PASSING:
            why = getattr(error, "strerror", None)
            self._not_written_because = why or str(error).partition("\n")[0]

    def _make_room(self, stored_bytes: int, keep: Path) -> None:
        """Removes what has to leave for the bound to hold, after so many bytes were stored."""
        if self._max_bytes is None:
            return
        # All are looked through near the bound, and now and then: other processes store some too.
        self._room_bytes -= stored_bytes
        self._unseen_writes += 1
        is_near = self._room_bytes < self._max_bytes // 8
        if is_near or self._unseen_writes >= _LOOKED_THROUGH_EVERY:
            self.prune(self._max_bytes, keep=keep)
            self._room_bytes, self._unseen_writes = self._max_bytes - self.size_bytes(), 0

    def _found(self, kind: str | None = None) -> Iterator[EntryInfo]:
        """The entries there are, of one kind or all, not read. Other names are not ours."""
        for directory in private_files.listed(self.root / "entries"):
            if not _KIND.fullmatch(directory.name) or kind not in (None, directory.name):
                continue
            for path in private_files.listed(directory):
                with contextlib.suppress(OSError):
                    if _DIGEST.fullmatch(path.name):
                        seen, name = path.lstat(), (directory.name, path.name)
                        yield EntryInfo(*name, None, seen.st_size, None, seen.st_mtime)

    def entries(self, kind: str | None = None, *, whole: bool = False) -> Iterator[EntryInfo]:
        """What is stored, of one kind or all, in no order. Damaged entries have a `problem`.

        With `whole`, the payloads are checked too, and damaged entries put in quarantine.
        """
        for found in self._found(kind):
            info = self._examine(found.kind, found.digest, whole=whole, refuse=whole)
            if info is not None:
                yield info._replace(payload=b"")

    def holds(self, kind: str, digest: str) -> bool:
        """Whether there is an entry of a name, whatever its worth."""
        return os.path.lexists(self._path(kind, digest))

    def size_bytes(self) -> int:
        """Size of all entries in bytes."""
        return sum(found.size_bytes for found in self._found())

    def prune(
        self,
        max_bytes: int | None = None,
        unused_since: float | None = None,
        keep: Path | None = None,
    ) -> list[EntryInfo]:
        """Removes entries, the least recently used first; not the one whose file is to `keep`.

        What was not used after `unused_since`, in seconds since the epoch, goes; then others, until
        no more than `max_bytes` are left.
        """
        found = sorted(self._found(), key=lambda each: each.used_time)
        left_bytes, removed = sum(each.size_bytes for each in found), []
        for each in found:
            path = self._path(each.kind, each.digest)
            is_idle = unused_since is not None and each.used_time <= unused_since
            is_too_much = max_bytes is not None and left_bytes > max_bytes
            if (is_idle or is_too_much) and path != keep:
                info = self._examine(each.kind, each.digest)
                if private_files.remove(path) and info is not None:
                    removed.append(info)
                left_bytes -= each.size_bytes
        return removed

    def clear(self) -> int:
        """Removes all entries, what is in quarantine, and what earlier versions stored.

        Returns how many entries there were.
        """
        for path in private_files.listed(self.root / "quarantine"):
            private_files.remove(path)
        private_files.remove(self.root.with_name(EARLIER_ROOT))
        paths = [self._path(found.kind, found.digest) for found in self._found()]
        return sum(map(private_files.remove, paths))

    def discard(
        self, kind: str, digest: str, reason: str, seen: os.stat_result | None = None
    ) -> None:
        """Refuses an entry: its file goes to quarantine.

        Args:
            kind, digest: its name.
            reason: what is wrong with it.
            seen: the file that is meant; one that was published since stays.
        """
        path, quarantine = self._path(kind, digest), self.root / "quarantine"
        self.quarantined.append(Refusal(kind, digest, reason))
        what = "stepcache does not use what is stored as %s %s in %s: %s"
        _log.warning(what, kind, digest, self.directory, reason)
        number = f"{round(self._clock() * 1e6):020d}"  # So that names sort by age.
        try:
            if seen is not None and not os.path.samestat(seen, path.lstat()):
                return
            path.rename(quarantine / f"{number}.{kind}.{digest}.{secrets.token_hex(4)}")
        except OSError:
            if not private_files.remove(path) and os.path.lexists(path):
                self._shunned.add((kind, digest))
        for path in sorted(private_files.listed(quarantine))[:-_MAX_QUARANTINED_FILES]:
            private_files.remove(path)
