"""Which processes are loading entries of a directory that several hosts may share, by file names.

A process creates a marker before it loads an entry, and removes it afterwards. A marker whose
process no longer exists means that the process died while it loaded the entry.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

from stepcache.link.processes import Process, author, unique_name
from stepcache.storage.private_files import CREATE_FLAGS, listed, remove


class Marker(NamedTuple):
    """A note that a process is loading an entry, or was when it ended."""

    path: Path
    kind: str
    digest: str
    process: Process


_own: dict[Path, int] = {}
"""The existing markers and the processes that created them; a fork copies this."""


def take_own_away() -> None:
    """Removes the markers of this process, which is ending normally.

    An entry that a thread is still loading has not killed the process.
    """
    for path, pid in list(_own.items()):
        if pid == os.getpid():
            remove(path)


@contextlib.contextmanager
def marked(directory: Path, kind: str, digest: str) -> Iterator[Callable[[str], None]]:
    """Notes, while it is open, that this process is loading an entry, if that can be noted.

    With the function that it gives, it goes on to another entry of the kind.
    """
    name = unique_name()
    path = directory / f"{kind}.{digest}.{name}"
    _own[path] = pid = os.getpid()  # Before it is there: a thread may end anywhere.

    def go_on(digest: str) -> None:
        nonlocal path
        before, path = path, directory / f"{kind}.{digest}.{name}"
        _own[path] = _own.pop(before)
        with contextlib.suppress(OSError):
            before.rename(path)  # Which is one call of the system, and not three.

    try:
        with contextlib.suppress(OSError):
            os.close(os.open(path, CREATE_FLAGS, 0o600))
        yield go_on
    finally:
        if pid == os.getpid():  # Not in a child forked in between.
            remove(path)
        _own.pop(path, None)


def killers(directory: Path, kind: str = "", digest: str = "") -> Iterator[Marker]:
    """Markers of an entry, or of all, whose loader on this host has ended without removing them.

    Nobody here can tell what became of a loader on another host: its markers tell nothing.
    """
    for path in listed(directory):
        parts = path.name.split(".")
        if len(parts) == 6 and (not kind or parts[:2] == [kind, digest]):
            process = author(path.name)
            if process is not None and process.is_local() and process.has_ended():
                yield Marker(path, parts[0], parts[1], process)
