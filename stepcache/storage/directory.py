"""The files of the disk store: places, whole writes, quarantine. What is in them is not read here.

Layout, under `<directory>/v1/`: `key`, `entries/<kind>/<digest>`, `tmp/`, `loading/` (load markers)
and `quarantine/`. `runs/` belongs to another room. No lock is taken by anyone: a file appears
whole, by a rename, or not at all, and that a file vanishes between two looks is normal.
"""

from __future__ import annotations

import contextlib
import os
import re
import secrets
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

from stepcache.errors import CacheDirectoryError, OptionError
from stepcache.storage import private_files
from stepcache.storage.load_markers import LoadMarkers, author, unique_name

_KIND = re.compile(r"[a-z][a-z0-9_]{0,23}")
_DIGEST = re.compile(r"[0-9a-f]{1,128}")
_TEMPORARY_SECONDS = 3600
_MAX_QUARANTINED_FILES = 32
_PUBLISHES_UNSEEN = 256


class Found(NamedTuple):
    """A file that lies where an entry should; kind and digest are those of its place."""

    kind: str
    digest: str
    path: Path
    size_bytes: int
    used_time: float


class _Seen(NamedTuple):
    """What the entries came to when they were last looked through, and what was stored since."""

    stamp: Any = None
    size_bytes: int = 0
    publishes: int = 0


class EntryDirectory:
    """The directory of a disk store.

    What is in quarantine is bounded by bytes, and by 32 files. `reached` is told each stage of a
    write.

    Attributes:
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
        # Absolute, for the process may change its directory.
        self._root = Path(os.path.abspath(directory)) / "v1"
        self._entries, self._tmp = self._root / "entries", self._root / "tmp"
        self._quarantine = self._root / "quarantine"
        self._max_quarantined_bytes = max_quarantined_bytes
        self._clock, self._reached = clock, reached
        self.key: bytes | None = None
        self._seen = _Seen()
        self.markers = LoadMarkers(self._root / "loading", clock)

    def prepare(self) -> bytes:
        """Makes what is missing of the layout. Returns the key that is in use now.

        Raises `CacheDirectoryError` if another user can change it, `OSError` if it cannot be made.
        """
        private_files.make_directory(self._root.parent)
        private_files.make_directory(self._root)
        for name in ("entries", "tmp", "loading", "quarantine"):
            (self._root / name).mkdir(mode=0o700, exist_ok=True)
        temporary = self._tmp / unique_name()
        self.key = private_files.ensure_key(self._root / "key", temporary)
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
            private_files.check_directory(self._root.parent)
            private_files.check_directory(self._root)
        except OSError:
            return None
        key = private_files.load_key(self._root / "key")
        self.key = key or self.key
        return key

    def reload_key(self) -> bool:
        """Takes up the key that is in use now. Returns whether it is another one."""
        before = self.key
        with contextlib.suppress(CacheDirectoryError):
            self.current_key()
        return self.key != before

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

    def stamp(self) -> Any:
        """Differs from an earlier one where entries have come or gone since."""
        stamps = []
        for directory in private_files.listed(self._entries):
            with contextlib.suppress(OSError):
                stamps.append((directory.name, directory.stat().st_mtime_ns))
        return sorted(stamps)

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

    def make_room(self, max_bytes: int, before: Any, keep: tuple[str, str]) -> None:
        """Removes what has to leave for the bound to hold; looks through all only where it may not.

        `before` is the stamp of the entries before the one to `keep` was stored.
        """
        if before == self._seen.stamp and self._seen.publishes < _PUBLISHES_UNSEEN:
            with contextlib.suppress(OSError):
                size_bytes = self._seen.size_bytes + self.path(*keep).lstat().st_size
                if size_bytes <= max_bytes:
                    publishes = self._seen.publishes + 1
                    self._seen = _Seen(self.stamp(), size_bytes, publishes)
                    return
        found = list(self.found())
        size_bytes = sum(each.size_bytes for each in found)
        for victim in self._victims(found, max_bytes, keep):
            if private_files.remove(victim.path):
                size_bytes -= victim.size_bytes
        self._seen = _Seen(self.stamp(), size_bytes, 0)

    def victims(self, max_bytes: int) -> Iterator[Found]:
        """What has to leave for the bound to hold, least recently used first."""
        return self._victims(list(self.found()), max_bytes, None)

    def _victims(
        self, found: list[Found], max_bytes: int, keep: tuple[str, str] | None
    ) -> Iterator[Found]:
        found = sorted(found, key=lambda each: each.used_time)
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
        self._bound_quarantine()
        return True

    def _bound_quarantine(self) -> None:
        total_bytes = 0
        for count, path in enumerate(sorted(private_files.listed(self._quarantine), reverse=True)):
            with contextlib.suppress(OSError):
                total_bytes += path.lstat().st_size
            if count >= _MAX_QUARANTINED_FILES or total_bytes > self._max_quarantined_bytes:
                private_files.remove(path)

    def clear_quarantine(self) -> None:
        """Removes what is in quarantine."""
        for path in private_files.listed(self._quarantine):
            private_files.remove(path)
