"""The files of the disk store: places, whole writes, quarantine. What is in them is not read here.

Layout, under `<directory>/v2/`: `key`, `entries/<kind>/<digest>`, `tmp/`, `loading/` (load markers)
and `quarantine/`. `building/`, `runs/` and `activity/` belong to other files of this wing. To
write, no lock is taken by anyone: a file appears whole, by a rename, or not at all, and that a file
vanishes between two looks is normal.
"""

from __future__ import annotations

import contextlib
import os
import re
import secrets
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import NamedTuple

from stepcache.errors import OptionError
from stepcache.storage import private_files
from stepcache.storage.load_markers import LoadMarkers, author, unique_name

ROOT = "v2"
EARLIER_ROOTS = ("v1",)

_KIND = re.compile(r"[a-z][a-z0-9_]{0,23}")
_DIGEST = re.compile(r"[0-9a-f]{1,128}")
_TEMPORARY_SECONDS = 3600
_MAX_QUARANTINED_FILES = 32
_LOOKED_THROUGH_EVERY = 64


class Found(NamedTuple):
    """A file that lies where an entry should; kind and digest are those of its place."""

    kind: str
    digest: str
    path: Path
    size_bytes: int
    used_time: float


class EntryDirectory:
    """The directory of a disk store.

    What is in quarantine is bounded by bytes, and by 32 files. `reached` is told each stage of a
    write.

    Attributes:
        root: where everything is. Absolute, for the process may change its directory.
        key: authenticates the entries; None until it is read.
        markers: who is loading what.
    """

    def __init__(
        self,
        directory: Path,
        max_quarantined_bytes: int,
        clock: Callable[[], float],
        reached: Callable[[str], None],
    ):
        self.root = Path(os.path.abspath(directory)) / ROOT
        self._entries, self._tmp = self.root / "entries", self.root / "tmp"
        self._quarantine = self.root / "quarantine"
        self._max_quarantined_bytes = max_quarantined_bytes
        self._clock, self._reached = clock, reached
        self.key: bytes | None = None
        # How much may be stored before the entries are looked through for what has to leave.
        self._room_bytes = self._unseen_writes = 0
        self.markers = LoadMarkers(self.root / "loading", clock)

    def prepare(self) -> bytes:
        """Makes what is missing of the layout. Returns the key that is in use now.

        Raises `CacheDirectoryError` if another user can change it, `OSError` if it cannot be made.
        """
        private_files.make_directory(self.root.parent)
        private_files.make_directory(self.root)
        for name in ("entries", "tmp", "loading", "quarantine"):
            (self.root / name).mkdir(mode=0o700, exist_ok=True)
        self.key = private_files.ensure_key(self.root / "key", self._tmp / unique_name())
        return self.key

    def try_to_write(self) -> None:
        """Raises OSError if nothing can be written."""
        path = self._tmp / unique_name()
        os.close(os.open(path, private_files.CREATE_FLAGS, 0o600))
        path.unlink()

    def current_key(self) -> bytes | None:
        """Takes up, and returns, the key that is in use now; None where there is no trusted one.

        Raises `CacheDirectoryError` if another user can change the directory.
        """
        try:
            private_files.check_directory(self.root.parent)
            private_files.check_directory(self.root)
        except OSError:
            return None
        key = private_files.load_key(self.root / "key")
        self.key = key or self.key
        return key

    def sweep(self) -> None:
        """Removes what processes that were ended have left behind."""
        for path in private_files.listed(self._tmp):
            process = author(path.name)
            with contextlib.suppress(OSError):
                old = self._clock() - path.lstat().st_mtime > _TEMPORARY_SECONDS
                if old or (process and process.is_local() and process.has_ended()):
                    path.unlink()
        self.markers.sweep(lambda kind, digest: self.path(kind, digest).exists())

    def path(self, kind: str, digest: str) -> Path:
        """Where an entry is. Raises `OptionError` if `kind` or `digest` cannot be a name."""
        for name, value, pattern in (("kind", kind, _KIND), ("digest", digest, _DIGEST)):
            if not isinstance(value, str) or not pattern.fullmatch(value):
                raise OptionError(
                    f"This cannot be the {name} of a stored entry",
                    where=name,
                    expected=f"what matches {pattern.pattern}",
                    got=repr(value),
                )
        return self._entries / kind / digest

    def found(self, kind: str | None = None) -> Iterator[Found]:
        """The entries there are, of one kind or all. Files with other names are not ours."""
        for directory in private_files.listed(self._entries):
            if not _KIND.fullmatch(directory.name) or kind not in (None, directory.name):
                continue
            for path in private_files.listed(directory):
                with contextlib.suppress(OSError):
                    if _DIGEST.fullmatch(path.name):
                        seen = path.lstat()
                        name = (directory.name, path.name)
                        yield Found(*name, path, seen.st_size, seen.st_mtime)

    def put(self, kind: str, digest: str, pieces: Iterable[bytes], used_time: float) -> None:
        """Writes an entry, whole, over one of the same name. Raises `OSError` if it cannot."""
        path, temporary = self.path(kind, digest), self._tmp / unique_name()
        try:
            self._write(temporary, pieces, used_time)
            path.parent.mkdir(mode=0o700, exist_ok=True)
            for killer in self.markers.killers(kind, digest):
                self.markers.unmark(killer.path)  # What it died of is about to be replaced.
            try:
                temporary.replace(path)
            except IsADirectoryError:
                self.set_aside(kind, digest)
                temporary.replace(path)
            self._reached("renamed")
        except BaseException:
            with contextlib.suppress(OSError):
                temporary.unlink()
            raise
        # The directory is not synced: a power cut may undo the rename, which is a miss.

    def _write(self, temporary: Path, pieces: Iterable[bytes], used_time: float) -> None:
        descriptor = os.open(temporary, private_files.CREATE_FLAGS, 0o600)
        try:
            self._reached("opened")
            for piece in pieces:
                view = memoryview(piece)
                while view:
                    view = view[os.write(descriptor, view) :]
                    self._reached("written in part")
            with contextlib.suppress(OSError):  # Some file systems set no times.
                os.utime(descriptor, (used_time, used_time))
            self._reached("written")
            os.fsync(descriptor)
            self._reached("synced")
        finally:
            os.close(descriptor)

    def make_room(self, max_bytes: int, stored_bytes: int, keep: tuple[str, str]) -> None:
        """Removes what has to leave for the bound to hold, after so many bytes were stored.

        All entries are looked through where they may be near the bound, and now and then, as other
        processes store some too.
        """
        self._room_bytes -= stored_bytes
        self._unseen_writes += 1
        if self._room_bytes < max_bytes // 8 or self._unseen_writes >= _LOOKED_THROUGH_EVERY:
            for victim in self.victims(max_bytes, keep):
                private_files.remove(victim.path)
            self._room_bytes = max_bytes - sum(each.size_bytes for each in self.found())
            self._unseen_writes = 0

    def victims(self, max_bytes: int, keep: tuple[str, str] | None = None) -> Iterator[Found]:
        """What has to leave for the bound to hold, least recently used first."""
        found = sorted(self.found(), key=lambda each: each.used_time)
        excess_bytes = sum(each.size_bytes for each in found) - max_bytes
        spared = (self.markers.loading() if excess_bytes > 0 else set()) | {keep}
        for each in found:
            if excess_bytes <= 0:
                return
            if (each.kind, each.digest) not in spared:
                excess_bytes -= each.size_bytes
                yield each

    def set_aside(self, kind: str, digest: str, seen: os.stat_result | None = None) -> bool:
        """Moves an entry to quarantine, and removes there what is too much.

        If it is not the file that was `seen`, but was published since, it is left where it is.
        Returns whether what was seen is out of the way.
        """
        path = self.path(kind, digest)
        number = f"{round(self._clock() * 1e6):020d}"  # So that names sort by age.
        refuge = self._quarantine / f"{number}.{kind}.{digest}.{secrets.token_hex(4)}"
        try:
            if seen is not None and not os.path.samestat(seen, path.lstat()):
                return True
            path.rename(refuge)
        except OSError:
            private_files.remove(path)
            return not os.path.lexists(path)
        total_bytes = 0
        for count, path in enumerate(sorted(private_files.listed(self._quarantine), reverse=True)):
            with contextlib.suppress(OSError):
                total_bytes += path.lstat().st_size
            if count >= _MAX_QUARANTINED_FILES or total_bytes > self._max_quarantined_bytes:
                private_files.remove(path)
        return True

    def clear(self) -> int:
        """Removes everything that is stored. Returns how many entries there were."""
        for path in private_files.listed(self._quarantine):
            private_files.remove(path)
        for name in EARLIER_ROOTS:
            private_files.remove(self.root.with_name(name))
        return sum(private_files.remove(found.path) for found in self.found())
