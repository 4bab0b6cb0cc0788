"""Opens the store of a directory of programs, as arguments and the environment say."""

from __future__ import annotations

import contextlib
import os
import sys
import threading
from concurrent.futures import Future
from pathlib import Path
from typing import TYPE_CHECKING, Any

from stepcache import jaxcompat
from stepcache.errors import CacheDirectoryError, OptionError, StepCacheWarning, warn
from stepcache.programs.prediction import prediction_name
from stepcache.programs.store import ProgramStore
from stepcache.storage.disk_store import ROOT, DiskStore
from stepcache.storage.private_files import absolute, default_directory
from stepcache.storage.run_log import RunLog

if TYPE_CHECKING:  # Few processes have a shared cache.
    from stepcache.storage.shared_place import Place

USER_DIRECTORY: Any = object()
"""Stands for the user's own cache directory."""
REMOTE = "STEPCACHE_REMOTE"
DEFAULT_DISK_BYTES = 10 << 30


def open_store(
    directory: Path, max_bytes: int | None, min_build_seconds: float, place: Place | None = None
) -> ProgramStore:
    """Opens, and if need be makes, a directory of programs; with a shared cache if there is one.

    Raises:
        CacheDirectoryError: others can write to it.
    """
    disk = DiskStore(directory, max_bytes)
    run_log = RunLog(disk.root / "runs", disk.writable)
    remote = None
    if place is not None:
        from stepcache.storage.shared_entries import SharedEntries

        remote = SharedEntries(place, disk)
    return ProgramStore(disk, run_log, min_build_seconds, remote)


def open_for(
    directory: Any, max_bytes: int, min_build_seconds: float, remote: Place | str | None
) -> ProgramStore | None:
    """Opens the store of a `ProgramCache`; None where programs are to be kept in memory only.

    Args:
        directory, max_bytes, min_build_seconds: as `ProgramCache` was given them.
        remote: as `asked_place` gives it.

    Raises:
        CacheDirectoryError: `directory` cannot be used, or others can write to it.
    """
    if directory is not None and directory is not USER_DIRECTORY:
        directory = absolute(directory, "ProgramCache(directory)")
    if directory is None or not jaxcompat.CAN_STORE:
        return None
    try:
        path = default_directory() if directory is USER_DIRECTORY else directory
        if path is None:
            return None
        place = _default_place() if isinstance(remote, str) else remote
        ahead = _opened_ahead.pop(path, None) if max_bytes == DEFAULT_DISK_BYTES else None
        store = ahead.result() if ahead is not None and place is None else None
        if store is None:
            store = open_store(path, max_bytes, min_build_seconds, place)
            store.begin()
        store.min_build_seconds = min_build_seconds
        return store
    except CacheDirectoryError as error:
        if directory is not USER_DIRECTORY:
            raise
        warn(f"Programs are not kept on disk: {error}", StepCacheWarning)
        return None


_opened_ahead: dict[Path, Future[ProgramStore | None]] = {}


def look_ahead() -> None:
    """Begins to preload, in a thread, while a script imports and builds its parameters.

    Does nothing where no run of this script has used the user's directory. The script may still
    name another one.
    """
    is_script = hasattr(sys.modules.get("__main__"), "__file__")
    opened = Future[ProgramStore | None]()

    def open_it(path: Path) -> None:
        try:
            store = open_store(path, DEFAULT_DISK_BYTES, 0.0)
            store.begin()
            opened.set_result(store)
        except BaseException:
            opened.set_result(None)  # Whoever opens it for good hears of it.

    with contextlib.suppress(Exception):
        path = default_directory() if is_script and jaxcompat.CAN_STORE else None
        if (
            path is not None
            and (path / ROOT / "entries" / "prediction" / prediction_name()).exists()
        ):
            _opened_ahead[path] = opened
            name = "stepcache preload"
            threading.Thread(target=open_it, args=(path,), name=name, daemon=True).start()


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
