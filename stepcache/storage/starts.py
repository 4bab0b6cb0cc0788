"""How often each stored record was started, and whether a start has verified it.

One small file a record, one letter an event, appended: "s" for a start, "v" for a verification. The
file of a lookup has what its wrong records depended on.
"""

from __future__ import annotations

import contextlib
import os
from pathlib import Path

from stepcache.storage.private_files import READ_FLAGS, listed

_APPEND_FLAGS = READ_FLAGS | os.O_RDWR | os.O_CREAT | os.O_APPEND
_MAX_FILES, _COUNTED_EVERY = 8192, 256
_MAX_EVENTS = 1 << 16


class Starts:
    """The starts of the records of one directory of programs."""

    def __init__(self, directory: Path, writable: bool = True):
        self._directory, self._writable = directory, writable
        self._room = 0  # So many files may be made before they are counted again.

    def note_start(self, name: str) -> bool:
        """Counts a start. Returns whether it should be verified.

        That is so until one start has been, and at the 2nd, 4th, 8th … start in any case.
        """
        events = self._append(name, b"s")
        number = events.count(b"s") + 1
        return b"v" not in events or number & (number - 1) == 0

    def note_verified(self, name: str) -> None:
        """Notes that a trace gave the same program."""
        self._append(name, b"v")

    def note_verified_elsewhere(self, name: str) -> None:
        """Notes of a record that is new here that others have started and verified it."""
        if not self._append(name, b""):
            self._append(name, b"ssv")

    def note_wrong(self, name: str, lookup: str, dependencies: str) -> None:
        """Drops what is known of a record that was wrong, and notes what it depended on."""
        with contextlib.suppress(OSError):
            (self._directory / name).unlink()
        self._append(lookup, dependencies.encode())

    def wrong(self, lookup: str) -> str:
        """What the wrong records of a lookup depended on, one after the other."""
        return self._append(lookup, b"").decode(errors="replace")

    def _append(self, name: str, event: bytes) -> bytes:
        """Adds to the events of a record, if that is possible. Returns those before."""
        path, earlier = f"{self._directory}{os.sep}{name}", b""
        is_added = self._writable and event != b""
        flags, mode = (_APPEND_FLAGS, "r+b") if is_added else (READ_FLAGS, "rb")
        with contextlib.suppress(OSError):
            try:
                descriptor = os.open(path, flags, 0o600)
            except FileNotFoundError:
                if not is_added:
                    return b""
                self._directory.mkdir(mode=0o700, parents=True, exist_ok=True)
                descriptor = os.open(path, flags, 0o600)
            with os.fdopen(descriptor, mode, buffering=0) as file:
                earlier = file.read(_MAX_EVENTS) or b""
                if is_added:
                    file.write(event)
            if is_added and not earlier:
                self._make_room()
        return earlier

    def _make_room(self) -> None:
        self._room -= 1
        if self._room >= 0:
            return
        self._room = _COUNTED_EVERY
        paths = listed(self._directory)
        if len(paths) >= _MAX_FILES:
            for path in sorted(paths, key=lambda each: each.stat().st_mtime)[: _MAX_FILES // 2]:
                path.unlink(missing_ok=True)
