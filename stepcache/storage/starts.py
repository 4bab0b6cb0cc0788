"""How often each stored record was started, and whether a start has verified it.

One small file a record, one letter an event, appended: "s" for a start, "v" for a verification.
"""

from __future__ import annotations

import contextlib
import os
from pathlib import Path

from stepcache.storage.private_files import CREATE_FLAGS, READ_FLAGS, listed

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
        events = self._events(name)
        self._append(name, b"s")
        number = events.count(b"s") + 1
        return b"v" not in events or number & (number - 1) == 0

    def note_verified(self, name: str) -> None:
        """Notes that a trace gave the same program."""
        self._append(name, b"v")

    def note_verified_elsewhere(self, name: str) -> None:
        """Notes of a record that is new here that others have started and verified it."""
        if not self._events(name):
            self._append(name, b"ssv")

    def forget(self, name: str) -> None:
        """Drops what is known of a record."""
        with contextlib.suppress(OSError):
            (self._directory / name).unlink()

    def _events(self, name: str) -> bytes:
        try:
            with os.fdopen(os.open(self._directory / name, READ_FLAGS), "rb") as file:
                return file.read(_MAX_EVENTS)
        except OSError:
            return b""

    def _append(self, name: str, event: bytes) -> None:
        if not self._writable:
            return
        path = self._directory / name
        with contextlib.suppress(OSError):
            try:
                descriptor = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_NOFOLLOW)
            except FileNotFoundError:
                self._directory.mkdir(mode=0o700, parents=True, exist_ok=True)
                self._make_room()
                descriptor = os.open(path, CREATE_FLAGS | os.O_APPEND, 0o600)
            with os.fdopen(descriptor, "wb", buffering=0) as file:
                file.write(event)

    def _make_room(self) -> None:
        self._room -= 1
        if self._room >= 0:
            return
        self._room = _COUNTED_EVERY
        paths = listed(self._directory)
        if len(paths) >= _MAX_FILES:
            for path in sorted(paths, key=lambda each: each.stat().st_mtime)[: _MAX_FILES // 2]:
                path.unlink(missing_ok=True)
