"""`BuildLock`: of the processes that need one program, one compiles it and the others wait.

It saves work, and nothing depends on it: where no lock can be had, each compiles for itself.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import time
from pathlib import Path

from stepcache.link import file_lock
from stepcache.link.processes import Process

_LOOKS, _LOOK_SECONDS = 3, 0.01


class Building:
    """A program that this process is about to compile. It is unlocked when nothing holds this."""

    def __init__(self, path: Path):
        self._path, self._pid = path, os.getpid()
        # Of the file; None where nothing could be locked. It is kept before the file is locked:
        # an interrupt may come at any moment.
        self._descriptor: int | None = None
        self.is_locked = False  # Whether other processes wait.

    def lock(self) -> bool:
        """Locks the file of the program; False if another thread or process has. Raises `OSError`.

        `is_locked` remains false where the file was removed meanwhile, when it was released.
        """
        self._descriptor = file_lock.open_file(self._path)
        if not file_lock.lock_opened(self._descriptor):
            return False
        self.is_locked = file_lock.is_there(self._path, self._descriptor)
        return True

    def release(self) -> None:
        """Unlocks the program, whether it was compiled or not. Not in a forked child."""
        descriptor, self._descriptor = self._descriptor, None
        was_locked, self.is_locked = self.is_locked, False
        if descriptor is not None:
            if was_locked and self._pid == os.getpid():
                self._path.unlink(missing_ok=True)  # Before others can have locked it.
                fcntl.flock(descriptor, fcntl.LOCK_UN)  # Children may have it open, too.
            os.close(descriptor)

    def __del__(self) -> None:
        with contextlib.suppress(Exception):  # At the end of Python, all may be gone before.
            self.release()


class BuildLock:
    """Locks programs by their digests, with a file for each that is locked in a directory."""

    def __init__(self, directory: Path):
        self._directory = directory

    def try_lock(self, digest: str) -> Building | None:
        """Locks a program for `release`; None while another thread or process has locked it."""
        path = self._directory / digest
        for _ in range(_LOOKS):
            building = Building(path)
            try:
                self._directory.mkdir(mode=0o700, parents=True, exist_ok=True)
                is_free = building.lock()
            except OSError:
                break
            if building.is_locked:
                return building
            building.release()
            if not (is_free or _is_orphaned(path)):
                return None
            if not is_free:  # Whoever locked it just now may not have written yet that it did.
                time.sleep(_LOOK_SECONDS)
        return Building(path)

    def release(self, building: Building) -> None:
        """Unlocks a program."""
        building.release()

    def was_left(self, digest: str) -> bool:
        """Whether the process that had locked a program ended before it could release it.

        Or another one has taken over from it.
        """
        path = self._directory / digest
        return path.exists() and file_lock.holder(path) != Process.current()

    def is_held_by_a_live_process(self, digest: str) -> bool:
        """Whether another process, which has not ended, has locked a program.

        Of this process none is waited for: a thread that has the lock may wait for the caller.
        """
        path = self._directory / digest
        try:
            with path.open("rb") as file:
                fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            return not _is_orphaned(path) and file_lock.holder(path) != Process.current()
        except OSError:
            pass
        return False


def _is_orphaned(path: Path) -> bool:
    """Whether who has locked a file has ended, and a child that it forked has it open."""
    owner = file_lock.holder(path)
    return owner is not None and owner.is_local() and owner.has_ended()
