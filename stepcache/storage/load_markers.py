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
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

from stepcache.storage.private_files import CREATE_FLAGS, listed

# A process of another host cannot be checked; it is taken to be loading for this long.
_FOREIGN_LOAD_SECONDS = 600
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
        state, start = fields[0], fields[19]
    except (OSError, IndexError):
        return _start_without_proc(pid)
    return None if state in "ZX" else start  # A zombie loads nothing any more.


def _start_without_proc(pid: int) -> str | None:
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
    """The process that made a name by `unique_name`."""
    return Process.parse(name.rpartition(".")[0])


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
            with contextlib.suppress(OSError):
                path.unlink()


class LoadMarkers:
    """The markers in a directory."""

    def __init__(self, directory: Path, clock: Callable[[], float]):
        self._directory = directory
        self._clock = clock

    def mark(self, kind: str, digest: str) -> Path | None:
        """Notes that this process is about to load an entry; None where it cannot be noted."""
        path = self._directory / f"{kind}.{digest}.{unique_name()}"
        _own[path] = os.getpid()  # For as long as it may be there: a thread may end anywhere.
        try:
            os.close(os.open(path, CREATE_FLAGS, 0o600))
        except OSError:
            _own.pop(path, None)
            return None
        return path

    def unmark(self, path: Path) -> bool:
        """Takes a marker away. Returns whether it was this call that did."""
        try:
            path.unlink()
        except OSError:
            return False
        finally:
            _own.pop(path, None)
        return True

    def killers(self, kind: str, digest: str) -> list[Marker]:
        """Markers of an entry whose loader, on this host, has ended without taking them away."""
        prefix = f"{kind}.{digest}."
        return [marker for marker in self._markers(prefix) if _is_dead(marker)]

    def loading(self) -> set[tuple[str, str]]:
        """The entries that a live process is loading, as far as that can be known."""
        return {
            (marker.kind, marker.digest)
            for marker in self._markers()
            if not _is_dead(marker) and not self._is_forgotten(marker)
        }

    def sweep(self, is_stored: Callable[[str, str], bool]) -> None:
        """Removes obsolete markers: of forgotten processes, or of entries that are not stored."""
        for marker in self._markers():
            orphaned = _is_dead(marker) and not is_stored(marker.kind, marker.digest)
            if orphaned or self._is_forgotten(marker):
                self.unmark(marker.path)

    def _is_forgotten(self, marker: Marker) -> bool:
        if marker.process.is_local():
            return False
        try:
            age_seconds = self._clock() - marker.path.stat().st_mtime
        except OSError:
            return True
        return abs(age_seconds) > _FOREIGN_LOAD_SECONDS

    def _markers(self, prefix: str = "") -> list[Marker]:
        markers = []
        for path in listed(self._directory):
            if not path.name.startswith(prefix) or path.name.count(".") != 5:
                continue
            kind, digest, rest = path.name.split(".", 2)
            process = author(rest)
            if process is not None:
                markers.append(Marker(path, kind, digest, process))
        return markers


def _is_dead(marker: Marker) -> bool:
    return marker.process.is_local() and marker.process.has_ended()
