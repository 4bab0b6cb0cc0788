"""Which processes are loading entries of a directory that several hosts may share, by file names.

A process creates a marker before it loads an entry, and removes it afterwards. A marker whose
process no longer exists means that the process died while it loaded the entry.
"""

from __future__ import annotations

import contextlib
import functools
import os
import re
import secrets
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from stepcache.storage.private_files import CREATE_FLAGS, listed, remove

_MAX_HOST_LETTERS = 48
_WRITTEN = re.compile(r"([0-9]{1,10})\.([0-9]{1,20})\.([A-Za-z0-9-]{1,100})")


class Process(NamedTuple):
    """A process, distinct from earlier and later ones with the same number."""

    pid: int
    # In clock ticks since boot (field 22 of /proc/<pid>/stat); "0" where the system does not say.
    start: str
    # Its host, and there its space of process numbers: containers may share a host's name.
    host: str

    @classmethod
    def current(cls) -> Process:
        """This process. Not to be kept: after a fork it is another one."""
        return _process_of(os.getpid())

    @classmethod
    def parse(cls, text: str) -> Process | None:
        """The process that `str` made the text of; None for any other text."""
        found = _WRITTEN.fullmatch(text)
        return cls(int(found[1]), found[2], found[3]) if found else None

    def __str__(self) -> str:
        return f"{self.pid}.{self.start}.{self.host}"

    def is_local(self) -> bool:
        """Whether it is, or was, a process of this host."""
        return self.host == _host()

    def signal(self, number: int) -> None:
        """Sends a signal to a process of this host, unless it is no more."""
        if not self.has_ended():
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, number)

    def has_ended(self) -> bool:
        """Whether a process of this host is no more."""
        if self == Process.current():
            return False
        start = _start_of(self.pid)
        return start is None or ("0" not in (start, self.start) and start != self.start)


@functools.lru_cache(maxsize=1)
def _process_of(pid: int) -> Process:
    return Process(pid, _start_of(pid) or "0", _host())


def _host() -> str:
    name = re.sub(r"[^A-Za-z0-9-]", "-", os.uname().nodename)[:_MAX_HOST_LETTERS]
    try:
        space = re.sub(r"\D", "", str(Path("/proc/self/ns/pid").readlink()))
    except OSError:
        space = "0"
    return f"{name}-{space}"


def _start_of(pid: int) -> str | None:
    """When a process started, "0" if the system does not tell, None if it is no more."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace")
        # The second field, the name in parentheses, may hold spaces and parentheses.
        fields = stat.rpartition(")")[2].split()
        return None if fields[0] in "ZX" else fields[19]  # A zombie loads nothing any more.
    except (OSError, IndexError):
        pass  # There is no such process, or no such file system.
    try:
        os.kill(pid, 0)
    except (ProcessLookupError, OverflowError):
        return None
    except OSError:
        pass  # It is there, but not ours.
    return "0"


def unique_name() -> str:
    """A file name that no other process, and no other call, makes; `author` reads it."""
    return f"{Process.current()}.{secrets.token_hex(4)}"


def author(name: str) -> Process | None:
    """The process that made a name which ends in one of `unique_name`."""
    return Process.parse(".".join(name.split(".")[-4:-1]))


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
def marked(directory: Path, kind: str, digest: str) -> Iterator[None]:
    """Notes, while it is open, that this process is loading an entry, if that can be noted."""
    path = directory / f"{kind}.{digest}.{unique_name()}"
    _own[path] = pid = os.getpid()  # Before it is there: a thread may end anywhere.
    try:
        with contextlib.suppress(OSError):
            os.close(os.open(path, CREATE_FLAGS, 0o600))
        yield
    finally:
        if pid == os.getpid():  # Not in a child forked in between.
            remove(path)
        _own.pop(path, None)


def killers(directory: Path, kind: str = "", digest: str = "") -> Iterator[Marker]:
    """Markers of an entry, or of all, whose loader on this host has ended without removing them.

    Nobody here can tell what became of a loader on another host: its markers tell nothing.
    """
    for path in listed(directory):
        if path.name.startswith(f"{kind}.{digest}." if kind else "") and path.name.count(".") == 5:
            process = author(path.name)
            if process is not None and process.is_local() and process.has_ended():
                yield Marker(path, *path.name.split(".")[:2], process)
