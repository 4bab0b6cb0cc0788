"""The directory of a host of variables: its lock, the number of hosts, and the epoch."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Iterator, Mapping
from pathlib import Path

from stepcache.errors import VariablesError
from stepcache.link import file_lock
from stepcache.storage.private_files import make_directory, replace_file

_LOCK = "lock"
_EPOCH, _HOSTS, _STOPPED, _WRITERS = "epoch", "hosts", "stopped", "writers"


def make(directory: Path) -> None:
    """Creates a directory for variables, or checks the one that is there.

    Raises:
        VariablesError: it cannot be created.
        CacheDirectoryError: other users can write to the directory.
    """
    with unusable(directory):
        make_directory(directory, "served variables", "name another directory")


@contextlib.contextmanager
def unusable(directory: Path) -> Iterator[None]:
    """Raises `VariablesError` with the directory in the place of an `OSError`."""
    try:
        yield
    except OSError as error:
        what, got = "the directory cannot be served", str(error)
        raise VariablesError(what, where=str(directory), got=got) from error


def lock(directory: Path) -> int:
    """Locks a directory for this process; creates it if it does not exist.

    Returns:
        A file descriptor. Closing it unlocks the directory.

    Raises:
        VariablesError: another process has locked the directory, or it cannot be created.
        CacheDirectoryError: other users can write to the directory.
    """
    make(directory)
    with unusable(directory):
        descriptor = file_lock.lock(directory / _LOCK)
    if descriptor is None:
        process = file_lock.holder(directory / _LOCK)
        raise VariablesError(
            "another process serves these variables already",
            where=str(directory),
            got=f"process {process.pid if process else '?'}",
            hint="connect to that process, or stop it first",
        )
    return descriptor


def check_there(directory: Path, descriptor: int) -> None:
    """Raises `VariablesError` if a directory that `lock` has locked was removed or replaced."""
    try:
        is_there = file_lock.is_there(directory / _LOCK, descriptor)
    except OSError:
        return  # A disk that fails may come back.
    if not is_there:
        raise VariablesError(
            "the directory of the variables was removed or replaced while they were served",
            where=str(directory),
            hint="serve again: running clients repeat the writes that they keep",
        )


def check_hosts(directory: Path, hosts: int) -> None:
    """Stores how many hosts share the variables, as that determines which host holds what.

    Raises:
        VariablesError: an earlier start had another number of hosts.
    """
    path = directory / _HOSTS
    before = str(hosts) if not (directory / _EPOCH).exists() else "1"
    if path.exists():
        before = path.read_text()
    if before != str(hosts):
        raise VariablesError(
            "these variables are divided among another number of hosts",
            where=str(directory),
            expected=f"{before} hosts",
            got=f"{hosts}",
            hint="serve them with the same --hosts, or begin in another directory",
        )
    if hosts > 1:
        replace_file(path, str(hosts))


def next_epoch(directory: Path) -> tuple[int, bool]:
    """Returns the epoch of this start, which it stores, and whether the last one did not crash."""
    path = directory / _EPOCH
    try:
        number, _, end = path.read_text().partition(" ")
        epoch, was_stopped = int(number) + 1, end == _STOPPED
    except (OSError, ValueError):
        # The file is missing or damaged: take a number that no earlier start can have had.
        epoch, was_stopped = time.time_ns() // 1000, not path.exists()
    replace_file(path, str(epoch))
    return epoch, was_stopped


def note_stop(directory: Path, epoch: int) -> None:
    """Stores that this start ends without a crash: a snapshot holds all its writes."""
    replace_file(directory / _EPOCH, f"{epoch} {_STOPPED}")


def writers(directory: Path) -> dict[str, str] | None:
    """Returns the clients that have written, with their processes; None if none were stored."""
    try:
        lines = (directory / _WRITERS).read_text().splitlines(keepends=True)
    except FileNotFoundError:
        return None
    rows = (line.split() for line in lines if line.endswith("\n"))  # A crash may cut the last one.
    return {row[0]: " ".join(row[1:]) for row in rows if row}


def store_writers(directory: Path, clients: Mapping[str, str]) -> None:
    """Stores which clients may write without being added, in the place of all stored before."""
    rows = (f"{client} {process}\n" for client, process in clients.items())
    replace_file(directory / _WRITERS, "".join(rows))


def add_writer(directory: Path, client: str, process: str) -> None:
    """Stores one more client, before its first write is confirmed."""
    with (directory / _WRITERS).open("a", encoding="utf-8") as file:
        file.write(f"\n{client} {process}\n")  # A full disk may have cut the line before.
        file.flush()
        os.fsync(file.fileno())
