"""`BuildLock`: of the processes that need one program, one compiles it and the others wait.

Each program is one byte of a file that is never written, under a record lock of POSIX: the system
frees what a process that ends has locked, children inherit nothing, and to lock and unlock costs a
few microseconds. Threads of one process do not keep each other waiting.

It saves work, and nothing depends on it: where no lock can be had, each compiles for itself.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import weakref
from pathlib import Path

_ALONE, _SHARED = fcntl.LOCK_EX | fcntl.LOCK_NB, fcntl.LOCK_SH | fcntl.LOCK_NB


class _File:
    """The file of a directory. One for a process: to close it unlocks all that is locked in it."""

    def __init__(self, path: Path):
        flags = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC
        self.descriptor = os.open(path, flags, 0o600)
        weakref.finalize(self, os.close, self.descriptor)

    def lock(self, kind: int, digest: str) -> bool:
        """Changes the lock of a program; False where that of another process forbids it."""
        try:
            fcntl.lockf(self.descriptor, kind, 1, int(digest[:15], 16))
        except (BlockingIOError, PermissionError):
            return False
        return True


_files: weakref.WeakValueDictionary[Path, _File] = weakref.WeakValueDictionary()


class Building:
    """A program that this process is about to compile. It is unlocked when nothing holds this."""

    def __init__(self, file: _File | None = None, digest: str = ""):
        self._file, self._digest = file, digest
        self.is_locked = False  # Whether other processes wait.

    def release(self, *, was_stored: bool = False) -> None:
        """Lets other processes go on. They load the program if it was stored.

        Else a shared lock tells them, until this process ends, that they are to compile it
        themselves: to wait for each other would not help.
        """
        file, self._file, self.is_locked = self._file, None, False
        if file is not None:
            with contextlib.suppress(OSError):
                file.lock(fcntl.LOCK_UN if was_stored else _SHARED, self._digest)

    def __del__(self) -> None:
        try:  # noqa: SIM105  (At the end of Python, `contextlib` may be gone before.)
            self.release()
        except Exception:
            pass


UNLOCKED = Building()
"""Stands for the lock of a program for which no process waits."""


class BuildLock:
    """Locks programs by their digests, in a file that is made if it is not there."""

    def __init__(self, path: Path):
        self._path = path
        self._file: _File | None = None

    def try_lock(self, digest: str) -> Building | None:
        """Has this process compile a program; None while another one is compiling it.

        The `Building` is not locked where another process could not store what it compiled.
        """
        try:
            if self._file is None:
                self._file = _files.get(self._path) or _File(self._path)
                self._file = _files.setdefault(self._path, self._file)
            # Made before anything is locked: an interrupt may come at any moment.
            building = Building(self._file, digest)
            building.is_locked = self._file.lock(_ALONE, digest)
            if not building.is_locked:
                if not self._file.lock(_SHARED, digest):
                    return None
                # Or the other has ended between the two.
                building.is_locked = self._file.lock(_ALONE, digest)
            return building
        except OSError:
            return UNLOCKED
