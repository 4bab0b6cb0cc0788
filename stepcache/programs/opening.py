"""Opens the archive of a directory of programs, as arguments and the environment say."""

from __future__ import annotations

import contextlib
import functools
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from stepcache.errors import CacheDirectoryError, OptionError, StepCacheWarning, warn
from stepcache.jaxcompat import storing
from stepcache.programs.archive import Archive
from stepcache.programs.background import Worker
from stepcache.storage.content_index import ContentIndex
from stepcache.storage.disk_store import DiskStore
from stepcache.storage.private_files import absolute, default_directory
from stepcache.storage.run_log import RunLog, has_run
from stepcache.storage.starts import Starts

if TYPE_CHECKING:  # Few processes have a shared cache.
    from stepcache.storage.shared_place import Place

VERIFY = ("background", "before", "off")
USER_DIRECTORY: Any = object()
"""Stands for the user's own cache directory."""
REMOTE = "STEPCACHE_REMOTE"


def open_archive(
    directory: Path,
    max_bytes: int | None,
    verify: str,
    min_build_seconds: float,
    place: Place | None = None,
) -> Archive:
    """Opens, and if need be makes, a directory of programs; with a shared cache if there is one.

    Raises:
        CacheDirectoryError: others can write to it.
    """
    disk = DiskStore(directory, max_bytes)
    run_log = RunLog(directory / "v1" / "runs", disk.writable)
    starts = Starts(directory / "v1" / "starts", disk.writable)
    remote = None
    if place is not None:
        from stepcache.storage.shared_entries import SharedEntries

        remote = SharedEntries(place, disk)
    contents = ContentIndex(directory / "v1" / "contents", disk.writable)
    return Archive(disk, starts, run_log, contents, verify, min_build_seconds, remote)


def open_for(
    directory: Any,
    max_bytes: int,
    verify: str | None,
    min_build_seconds: float,
    remote: Place | str | None,
) -> Archive | None:
    """Opens the archive of a `ProgramCache`; None where programs are to be kept in memory only.

    Args:
        directory, max_bytes, verify, min_build_seconds: as `ProgramCache` was given them.
        remote: as `asked_place` gives it.

    Raises:
        CacheDirectoryError: `directory` cannot be used, or others can write to it.
    """
    if directory is not None and directory is not USER_DIRECTORY:
        directory = absolute(directory, "ProgramCache(directory)")
    if directory is None or not storing.CAN_STORE:
        return None
    try:
        path = default_directory() if directory is USER_DIRECTORY else directory
        if path is None:
            return None
        place = _default_place() if isinstance(remote, str) else remote
        verify = verify or default_verify()
        found = _opened.pop((path, max_bytes), None) if place is None else None
        if found is None:
            return open_archive(path, max_bytes, verify, min_build_seconds, place)
        found.verify, found.min_build_seconds = verify, min_build_seconds
        return found
    except CacheDirectoryError as error:
        if directory is not USER_DIRECTORY:
            raise
        warn(f"Programs are not kept on disk: {error}", StepCacheWarning)
        return None


def look_ahead() -> None:
    """Examines in the background, while a program imports, what its last run used of JAX.

    Does nothing where no run of this script has used the user's directory. The program may still
    name another one.
    """
    is_script = hasattr(sys.modules.get("__main__"), "__file__")
    with contextlib.suppress(Exception):  # It will be told when the directory is opened for good.
        path = default_directory() if is_script and storing.CAN_STORE else None
        if path is not None and has_run(path / "v1" / "runs"):
            _ahead.submit(functools.partial(_look_ahead, path))


def _look_ahead(path: Path) -> None:
    with contextlib.suppress(Exception):
        archive = open_archive(path, DEFAULT_DISK_BYTES, VERIFY[0], 0.0)
        _opened[path, DEFAULT_DISK_BYTES] = archive
        archive.preloader.look_ahead()


DEFAULT_DISK_BYTES = 10 << 30
_ahead = Worker("stepcache preload", droppable=True)
_opened: dict[tuple[Path, int], Archive] = {}  # By directory and `max_bytes`.


def default_verify() -> str:
    """`STEPCACHE_VERIFY`."""
    asked = os.environ.get("STEPCACHE_VERIFY", "") or VERIFY[0]
    if asked not in VERIFY:
        expected = ", ".join(map(repr, VERIFY))
        warn(f"STEPCACHE_VERIFY is {asked!r}, and not one of {expected}", StepCacheWarning)
        return VERIFY[0]
    return asked


def asked_place(remote: str | None, directory: Any) -> Place | str | None:
    """The shared cache of a `ProgramCache`: None without one; a text for what the environment says.

    Raises:
        OptionError, CacheDirectoryError: it cannot be used.
    """
    if remote is None:
        return REMOTE
    if remote.lower() == "off":
        return None
    if directory is None:
        what = "A shared cache needs a directory, for the programs that come from it"
        raise OptionError(what, where="ProgramCache(directory=None)", got=f"remote={remote!r}")
    return _place(remote, "ProgramCache(remote)")


def place_in_environment() -> Place | None:
    """The shared cache that `STEPCACHE_REMOTE` names; None for none.

    Raises:
        OptionError, CacheDirectoryError: it cannot be used.
    """
    asked = os.environ.get(REMOTE, "")
    return _place(asked, REMOTE) if asked and asked.lower() != "off" else None


def _place(url: str, where: str) -> Place:
    from stepcache.storage.shared_place import Place

    return Place.of(url, where)


def _default_place() -> Place | None:
    """As `place_in_environment`; one that cannot be used is warned of."""
    try:
        return place_in_environment()
    except (OptionError, CacheDirectoryError) as error:
        warn(f"No shared cache is used: {error}", StepCacheWarning)
        return None
