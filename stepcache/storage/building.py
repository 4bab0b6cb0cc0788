"""`BuildLock`: of the processes that need one program, one compiles it and the others wait.

It saves work, and nothing depends on it: where no lock can be had, each compiles for itself.
"""

from __future__ import annotations

import fcntl
import os
import time
from pathlib import Path

from stepcache.link import file_lock
from stepcache.link.processes import Process

_LOOKS, _LOOK_SECONDS = 40, 0.05


class Building:
    """A program that this process is about to compile. It is unlocked when nothing holds this."""

    def __init__(self, path: Path):
        self._path, self._pid = path, os.getpid()
        self.descriptor: int | None = None  # Of the file; None where nothing could be locked.
        self.is_locked = False  # Whether other processes wait.

    def release(self) -> None:
        """Unlocks the program, whether it was compiled or not. Not in a forked child."""
        descriptor, self.descriptor = self.descriptor, None
        was_locked, self.is_locked = self.is_locked, False
        if descriptor is not None:
            if was_locked and self._pid == os.getpid():
                self._path.unlink(missing_ok=True)  # Before others can have locked it.
                fcntl.flock(descriptor, fcntl.LOCK_UN)  # Children may have it open, too.
            os.close(descriptor)

    def __del__(self) -> None:
        try:  # noqa: SIM105  (At the end of Python, `contextlib` may be gone before.)
            self.release()
        except Exception:
            pass


class BuildLock:
    """Locks programs by their digests, with a file for each that is locked in a directory."""

    def __init__(self, directory: Path):
        self._directory = directory

    def try_lock(self, digest: str) -> Building | None:
        """Locks a program for `release`; None while another thread or process has locked it."""
        path = self._directory / digest
        while True:
            building = Building(path)
            try:
                self._directory.mkdir(mode=0o700, parents=True, exist_ok=True)
                # The descriptor is kept before it is locked: an interrupt may come at any moment.
                building.descriptor = file_lock.open_file(path)
                is_free = file_lock.lock_opened(building.descriptor)
                building.is_locked = is_free and file_lock.is_there(path, building.descriptor)
            except OSError:
                break
            if building.is_locked:
                return building
            building.release()
            if not is_free and not _is_orphaned(path):
                return None
            if not is_free:
                break
        return Building(path)

    def was_left(self, digest: str) -> bool:
        """Whether the process that had locked a program was ended, or another one took over."""
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
    """Whether who has locked a file has ended, and a child that it forked has it open.

    Or another process has locked it just now, and not written yet that it did. So it looks again.
    """
    for _ in range(_LOOKS):
        owner = file_lock.holder(path)
        if owner is None or not owner.is_local() or not owner.has_ended():
            return False
        time.sleep(_LOOK_SECONDS)
    return True
