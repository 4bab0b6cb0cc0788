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
FROM_ENVIRONMENT: Any = object()
"""Stands for the shared cache that the environment names."""
REMOTE = "STEPCACHE_REMOTE"
DEFAULT_DISK_BYTES = 10 << 30


def open_store(
    directory: Path, max_bytes: int | None, min_build_seconds: float, place: Place | None = None
) -> ProgramStore:
    """Opens, and if need be makes, a directory of programs; with a shared cache if there is one.

    Raises `CacheDirectoryError` if others can write to it.
    """
    disk = DiskStore(directory, max_bytes)
    run_log = RunLog(disk.root / "runs", disk.writable)
    remote = None
    if place is not None:
        from stepcache.storage.shared_entries import SharedEntries

        remote = SharedEntries(place, disk)
    return ProgramStore(disk, run_log, min_build_seconds, remote)


def open_for(
    directory: Any, max_bytes: int, min_build_seconds: float, remote: Place | None
) -> ProgramStore | None:
    """Opens the store of a `ProgramCache`, and begins to preload.

    Args:
        directory, max_bytes, min_build_seconds: as `ProgramCache` was given them.
        remote: the shared cache, or `FROM_ENVIRONMENT`; None for none.

    Returns:
        The store; None where programs are to be kept in memory only.

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
        if remote is FROM_ENVIRONMENT and max_bytes == DEFAULT_DISK_BYTES:
            ahead = _opened_ahead.pop(path, None)
            if ahead is not None and (store := ahead.result()) is not None:
                store.min_build_seconds = min_build_seconds
                return store
        if remote is FROM_ENVIRONMENT:
            remote = None
            try:
                remote = place_of()
            except (OptionError, CacheDirectoryError) as error:
                warn(f"No shared cache is used: {error}", StepCacheWarning)
        store = open_store(path, max_bytes, min_build_seconds, remote)
        store.begin()
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
    with contextlib.suppress(Exception):
        is_script = hasattr(sys.modules.get("__main__"), "__file__")
        path = default_directory() if is_script and jaxcompat.CAN_STORE else None
        known = path and path / ROOT / "entries" / "prediction" / prediction_name()
        if not (path and known and known.exists()):
            return
        _opened_ahead[path] = opened = Future[ProgramStore | None]()

        def open_it() -> None:
            try:
                store = open_store(path, DEFAULT_DISK_BYTES, 0.0, place_of())
                store.begin()
                opened.set_result(store)
            except BaseException:
                opened.set_result(None)  # Whoever opens it for good hears of it.

        threading.Thread(target=open_it, name="stepcache preload", daemon=True).start()


def place_of(url: str | None = None, where: str = REMOTE) -> Place | None:
    """The shared cache at a URL, by default at that in the environment; None for none, or "off".

    Raises:
        OptionError, CacheDirectoryError: it cannot be used; `where` is what names it.
    """
    url = os.environ.get(REMOTE, "") if url is None else url
    if not url or url.lower() == "off":
        return None
    from stepcache.storage.shared_place import Place

    return Place.of(url, where)
