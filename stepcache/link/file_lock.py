"""A file that one process at a time has locked; it says which."""

from __future__ import annotations

import errno
import fcntl
import os
from pathlib import Path

from stepcache.link.processes import Process


def lock(path: Path) -> int | None:
    """Locks a file for this process, and creates it if it does not exist.

    Returns:
        A file descriptor; closing it unlocks the file. None if another process has locked it.
    """
    descriptor = open_file(path)
    try:
        is_locked = lock_opened(descriptor)
    except OSError:
        os.close(descriptor)
        raise
    if is_locked:
        return descriptor
    os.close(descriptor)
    return None


def open_file(path: Path) -> int:
    """Opens a file for `lock_opened`, and creates it if it does not exist."""
    return os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)


def lock_opened(descriptor: int) -> bool:
    """Locks an open file for this process; False if another process has locked it."""
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        os.ftruncate(descriptor, 0)
        os.write(descriptor, str(Process.current()).encode())
    except OSError as error:
        if error.errno not in (errno.EAGAIN, errno.EACCES):
            raise
        return False
    return True


def holder(path: Path) -> Process | None:
    """Returns the process that has locked a file last; None if the file does not say."""
    try:
        return Process.parse(path.read_text(errors="replace"))
    except OSError:
        return None


def is_there(path: Path, descriptor: int) -> bool:
    """Returns whether a path leads to a file that is open: not if it was removed or replaced.

    Raises `OSError` if the disk does not say.
    """
    opened = os.fstat(descriptor)
    try:
        found = path.stat()
    except (FileNotFoundError, NotADirectoryError):
        return False
    return (found.st_dev, found.st_ino) == (opened.st_dev, opened.st_ino)
