"""Directories of checkpoints: what a save may replace, atomic replacement, and numbered steps.

A save writes into a hidden directory beside its target, `.{name}.{random}.saving`, whose lock it
holds while it lives, and renames what it wrote to the target at the end. The contents of
checkpoints are the business of `checkpoints.py`.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import re
import shutil
import tempfile
import time
from pathlib import Path
from typing import Any

from stepcache.errors import VariablesError
from stepcache.units import listed

_CONTAINER = re.compile(r"\.(?P<name>.+)\.[a-z0-9_]{8}\.saving")
_STEP = re.compile(r"step_(\d{8,})")
_METADATA = "_CHECKPOINT_METADATA"
# What orbax writes at the top of a checkpoint.
_ORBAX_NAMES = re.compile(
    r"_CHECKPOINT_METADATA|_METADATA|_sharding|array_metadatas|commit_success\.txt|d|"
    r"manifest\.ocdbt|ocdbt\.process_\d+"
)


def custom_metadata(path: Path) -> dict[str, Any]:
    """What was saved beside the arrays of a checkpoint; empty where `path` is no checkpoint."""
    try:
        return json.loads((path / _METADATA).read_text())["custom_metadata"] or {}
    except (OSError, ValueError, KeyError, TypeError):
        return {}


def is_whole(path: Path) -> bool:
    """Whether a directory has what every checkpoint of ours has."""
    return (
        is_ours(custom_metadata(path))
        and (path / "_METADATA").exists()
        and (path / "manifest.ocdbt").exists()
    )


def is_ours(metadata: dict[str, Any]) -> bool:
    """Whether stepcache wrote a checkpoint. The first format had no name of its own."""
    return "stepcache" in metadata or {"version", "leaves"} <= metadata.keys()


def check_replaceable(path: Path) -> None:
    """Checks that a save to `path` destroys nothing but an earlier checkpoint of ours.

    Raises:
        VariablesError: there is a file, another directory, or a checkpoint with more inside it.
    """
    try:
        names = sorted(each.name for each in path.iterdir())
    except FileNotFoundError:
        return
    except NotADirectoryError:
        if not os.path.lexists(path):
            return
        raise _occupied(path, "a file") from None
    others = [name for name in names if not _ORBAX_NAMES.fullmatch(name)]
    if path in (Path.cwd(), *Path.cwd().parents):
        raise _occupied(path, "the working directory, or one above it")
    if others:
        kind = "a checkpoint" if len(others) < len(names) else "a directory"
        more = f" and {len(others) - 3} more" if len(others) > 3 else ""
        raise _occupied(path, f"{kind} with {', '.join(others[:3])}{more} inside")
    if names and not is_ours(custom_metadata(path)):
        raise _occupied(path, "a checkpoint that stepcache did not write, or a damaged one")


def _occupied(path: Path, got: str) -> VariablesError:
    return VariablesError(
        "a save would destroy what is there",
        where=str(path),
        expected="no such path, an empty directory, or a checkpoint that stepcache wrote",
        got=got,
        hint="save to another path, or move what is there away",
    )


class Staging:
    """A hidden directory beside a target, in which one save writes a checkpoint.

    Args:
        target: where the checkpoint is going to be.

    Attributes:
        new: where to write it first.
    """

    def __init__(self, target: Path):
        self._target = target
        target.parent.mkdir(parents=True, exist_ok=True)
        self._directory = Path(
            tempfile.mkdtemp(prefix=f".{target.name}.", suffix=".saving", dir=target.parent)
        )
        self.new = self._directory / "new"
        # Renamed when it is locked: whoever finds it unlocked knows that its writer has ended.
        unlocked = self._directory / "unlocked"
        self._lock = os.open(unlocked, os.O_CREAT | os.O_RDWR)
        with contextlib.suppress(OSError):  # A file system without locks.
            fcntl.flock(self._lock, fcntl.LOCK_EX)
            unlocked.rename(self._directory / "lock")

    def publish(self) -> None:
        """Puts what was written in the place of the target: at each moment one of them is whole.

        Raises:
            VariablesError: something else has come to lie there meanwhile.
        """
        old = self._directory / "old"
        while True:
            check_replaceable(self._target)
            with contextlib.suppress(FileNotFoundError):
                self._target.rename(old)
            try:
                self.new.rename(self._target)
                return
            except OSError:
                if not os.path.lexists(self._target):
                    with contextlib.suppress(FileNotFoundError):
                        old.rename(self._target)
                    raise
            shutil.rmtree(old, ignore_errors=True)  # Another save was faster: replace its own.

    def remove(self, path: Path) -> None:
        """Removes a checkpoint in one go for those who look."""
        with contextlib.suppress(OSError):  # Another save was faster.
            path.rename(self._directory / path.name)

    def close(self) -> None:
        """Removes what is left."""
        shutil.rmtree(self._directory, ignore_errors=True)
        os.close(self._lock)


def recover(path: Path) -> None:
    """Undoes what saves to `path`, or to steps below it, have left that were killed.

    One that was killed between its two renames has left no target: the earlier one is put back.
    """
    _recover_in(path.parent, path.name)
    _recover_in(path, None)


def _recover_in(parent: Path, name: str | None) -> None:
    for _ in range(100):
        between = False
        for container in _containers(parent, name):
            match = _CONTAINER.fullmatch(container.name)
            assert match
            target, old = parent / match["name"], container / "old"
            is_missing = old.exists() and not os.path.lexists(target)
            with _lock_of_ended(container) as ended, contextlib.suppress(OSError):
                if ended:
                    if is_missing:
                        old.rename(target)
                    shutil.rmtree(container, ignore_errors=True)
            between |= is_missing and not ended
        if not between:
            return
        time.sleep(0.01)  # Its writer is between two renames.


def _containers(parent: Path, name: str | None) -> list[Path]:
    try:
        names = sorted(each.name for each in parent.iterdir())
    except OSError:
        return []
    matches = [match for each in names if (match := _CONTAINER.fullmatch(each))]
    return [
        parent / match.string
        for match in matches
        if (match["name"] == name if name is not None else _STEP.fullmatch(match["name"]))
    ]


@contextlib.contextmanager
def _lock_of_ended(container: Path):
    """Holds the lock of a save whose process has ended; False where it lives, or nobody knows."""
    try:
        lock = os.open(container / "lock", os.O_RDWR)
    except OSError:
        yield False
        return
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        ended = True
    except OSError:
        ended = False
    try:
        yield ended
    finally:
        os.close(lock)


def step_path(directory: Path, step: int) -> Path:
    """Where the checkpoint of a step lies.

    Raises:
        VariablesError: `directory` is a checkpoint itself, or a file.
    """
    if (directory / _METADATA).exists() or (directory.exists() and not directory.is_dir()):
        raise VariablesError(
            "numbered checkpoints need a directory of their own",
            where=str(directory),
            expected="a directory that holds checkpoints of steps, or nothing yet",
            got="a checkpoint" if directory.is_dir() else "a file",
            hint="with keep=..., name the directory above the checkpoints",
        )
    return directory / f"step_{step:08}"


def steps_in(directory: Path) -> dict[int, Path]:
    """The checkpoints of steps below a directory, the newest first."""
    found = {}
    with contextlib.suppress(OSError):
        for path in directory.iterdir():
            match = _STEP.fullmatch(path.name)
            if match and path.is_dir():
                found[int(match[1])] = path
    return dict(sorted(found.items(), reverse=True))


def prune(directory: Path, keep: int, written: Path, staging: Staging) -> None:
    """Removes all checkpoints of steps but the newest, and never the one that was just written."""
    rest = [path for path in steps_in(directory).values() if path != written]
    for path in rest[keep - 1 :]:
        with contextlib.suppress(VariablesError):  # What is not ours stays.
            check_replaceable(path)
            staging.remove(path)


def described(path: Path) -> str:
    """What is at a path that is no checkpoint."""
    if not path.exists():
        return "no such path"
    if not path.is_dir():
        return "a file"
    names = listed(sorted(each.name for each in path.iterdir())[:3])
    return f"a directory with {names}" if names else "an empty directory"


def newest_whole(path: Path) -> Path | None:
    """The checkpoint at `path`, or the newest whole one of the steps below it."""
    if (path / _METADATA).exists() or (path / "_METADATA").exists():
        return path
    return next((each for each in steps_in(path).values() if is_whole(each)), None)
