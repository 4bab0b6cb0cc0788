"""Which process made, or holds, what several processes and hosts can see; and where it listens."""

from __future__ import annotations

import contextlib
import functools
import hashlib
import os
import re
import secrets
import tempfile
from pathlib import Path
from typing import NamedTuple

from stepcache.errors import CacheDirectoryError
from stepcache.storage.private_files import make_directory

_MAX_HOST_LETTERS = 48
_MAX_SOCKET_PATH = 100  # Of 107 that the system allows.
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


def socket_path(directory: Path) -> str:
    """Returns a path for the socket of a directory, short enough and in a private directory."""
    name = hashlib.sha256(str(directory).encode()).hexdigest()[:24]
    for parent in (tempfile.gettempdir(), "/tmp"):
        private = Path(parent) / f"stepcache-{os.geteuid()}"
        path = str(private / f"{name}.ipc")
        if len(path) <= _MAX_SOCKET_PATH:
            make_directory(private, "sockets", "set TMPDIR to another directory")
            return path
    raise CacheDirectoryError("there is no directory with a short path for a socket", got=path)
