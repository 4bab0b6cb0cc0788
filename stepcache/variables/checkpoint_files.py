"""Directories of checkpoints: what a save may replace, atomic replacement, and numbered steps.

A save writes to a hidden directory beside its target, `.{name}.{random}.saving`, holds a lock in it
until it ends, and renames what it wrote to the target. orbax's own `force=True` removes the earlier
checkpoint before it writes the new one, and its `CheckpointManager` removes directories of steps
that it did not write.
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
from collections.abc import Collection
from pathlib import Path
from typing import Any

from stepcache.errors import VariablesError
from stepcache.units import listed

_STEP = re.compile(r"step_(\d{8,})")
_METADATA = "_CHECKPOINT_METADATA"
_EMPTY_SECONDS = 60.0  # A directory that is just being made has no lock yet.
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


def _is_ours(path: Path) -> bool:
    return "stepcache" in custom_metadata(path)


def check_replaceable(path: Path) -> None:
    """Raises `VariablesError` if a save to `path` would destroy more than our own checkpoint."""
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
    if names and not _is_ours(path):
        raise _occupied(path, "a checkpoint that stepcache did not write, or a damaged one")


def _occupied(path: Path, got: str) -> VariablesError:
    what = "a save would destroy what is there"
    hint = "save to another path, or move what is there away"
    expected = "no such path, an empty directory, or a checkpoint that stepcache wrote"
    return VariablesError(what, where=str(path), expected=expected, got=got, hint=hint)


class Staging:
    """A hidden directory beside a target, where one save writes a checkpoint, at `new`."""

    def __init__(self, target: Path):
        self.target = target
        target.parent.mkdir(parents=True, exist_ok=True)
        self._directory = Path(
            tempfile.mkdtemp(prefix=f".{target.name}.", suffix=".saving", dir=target.parent)
        )
        self.new = self._directory / "new"
        # Named "lock" once it is locked: a "lock" that is unlocked is that of an ended process.
        unlocked = self._directory / "unlocked"
        self._lock = os.open(unlocked, os.O_CREAT | os.O_RDWR)
        with contextlib.suppress(OSError):  # A file system without locks.
            fcntl.flock(self._lock, fcntl.LOCK_EX)
            unlocked.rename(self._directory / "lock")

    def publish(self) -> None:
        """Replaces the target by what was written. At each moment one of them is whole."""
        old = self._directory / "old"
        while True:
            check_replaceable(self.target)
            with contextlib.suppress(FileNotFoundError):
                self.target.rename(old)
            try:
                self.new.rename(self.target)
                return
            except OSError:
                if not os.path.lexists(self.target):
                    with contextlib.suppress(FileNotFoundError):
                        old.rename(self.target)
                    raise
            shutil.rmtree(old, ignore_errors=True)  # Another save was faster: replace its own.

    def remove(self, path: Path) -> None:
        """Removes another checkpoint, atomically for its readers."""
        with contextlib.suppress(OSError):  # Another save was faster.
            path.rename(self._directory / path.name)

    def close(self) -> None:
        """Removes the directory, the lock last: without it, nobody would remove the rest."""
        _remove(self._directory)
        os.close(self._lock)


def recover(path: Path) -> None:
    """Cleans up after killed saves to `path`, or to steps below it.

    One that was killed between its two renames has left no target: this puts the earlier one back.
    """
    for parent, name in ((path.parent, re.escape(path.name)), (path, _STEP.pattern)):
        pattern = re.compile(rf"\.(?P<target>{name})\.[a-z0-9_]{{8}}\.saving")
        for _ in range(100):
            matches = [match for each in _names_in(parent) if (match := pattern.fullmatch(each))]
            if not sum(_recover(parent / m.string, parent / m["target"]) for m in matches):
                break
            time.sleep(0.01)


def _recover(directory: Path, target: Path) -> bool:
    """Cleans up after one save. Returns whether it is alive, and between its two renames."""
    old = directory / "old"
    is_between = old.exists() and not os.path.lexists(target)
    with contextlib.suppress(OSError), (directory / "lock").open("r+b") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)  # Fails while its process lives.
        if is_between:
            old.rename(target)
        _remove(directory)
        return False
    with contextlib.suppress(OSError):  # One was killed between the last two removals.
        if directory.stat().st_mtime < time.time() - _EMPTY_SECONDS:
            directory.rmdir()
    return is_between


def _remove(staged: Path) -> None:
    for name in _names_in(staged):
        if name not in ("lock", "unlocked"):
            shutil.rmtree(staged / name, ignore_errors=True)
    shutil.rmtree(staged, ignore_errors=True)


def _names_in(directory: Path) -> list[str]:
    try:
        return sorted(each.name for each in directory.iterdir())
    except OSError:
        return []


def step_path(directory: Path, step: int) -> Path:
    """The path of a step's checkpoint. Raises `VariablesError` if `directory` is one, or a file."""
    if (directory / _METADATA).exists() or (directory.exists() and not directory.is_dir()):
        what = "numbered checkpoints need a directory of their own"
        expected = "a directory that holds checkpoints of steps, or nothing yet"
        got = "a checkpoint" if directory.is_dir() else "a file"
        hint = "with keep=..., name the directory above the checkpoints"
        raise VariablesError(what, where=str(directory), expected=expected, got=got, hint=hint)
    return directory / f"step_{step:08}"


def steps_in(directory: Path) -> list[Path]:
    """The checkpoints of steps below a directory, the newest first."""
    matches = [match for name in _names_in(directory) if (match := _STEP.fullmatch(name))]
    matches.sort(key=lambda match: int(match[1]), reverse=True)
    return [path for match in matches if (path := directory / match.string).is_dir()]


def prune(directory: Path, keep: int, staging: Staging) -> None:
    """Removes all checkpoints of steps but the newest, and never the one that was just written."""
    rest = [path for path in steps_in(directory) if path != staging.target]
    for path in rest[keep - 1 :]:
        with contextlib.suppress(VariablesError):  # What is not ours stays.
            check_replaceable(path)
            staging.remove(path)


def _tree_in(path: Path) -> Path | None:
    """The directory with the tree of a checkpoint of orbax's; None if there is none."""
    found = (each for each in (path, path / "default") if (each / "_METADATA").exists())
    return next(found, None)


def is_composite(path: Path, items: Collection[str]) -> bool:
    """Whether a step of orbax's `CheckpointManager` has a tree for each of some names."""
    return bool(items) and all((path / name / "_METADATA").exists() for name in items)


def find(path: Path, items: Collection[str] = ()) -> Path:
    """The checkpoint at `path`, or the newest whole one of the steps below it.

    In those of orbax's `CheckpointManager` it is the tree that was saved without a name, or the
    directory with a tree for each of the `items`.
    """
    recover(path)
    if (found := _tree_in(path)) is not None:
        return found
    if is_composite(path, items):
        return path
    for each in steps_in(path):  # The newest that is whole.
        if _is_ours(each) and all(
            (each / name).exists() for name in ("_METADATA", "manifest.ocdbt")
        ):
            return each
    numbers = sorted((name for name in _names_in(path) if name.isdecimal()), key=int, reverse=True)
    for number in numbers:
        if (found := _tree_in(path / number)) is not None:
            return found
        if is_composite(path / number, items):
            return path / number
    names = [name for name in _names_in(path) if name != _METADATA][:3]
    got = f"a directory with {listed(names)}" if names else "an empty directory"
    if not path.is_dir():
        got = "a file" if path.exists() else "no such path"
    what = "there is no checkpoint to restore"
    expected = "a directory that stepcache.save or orbax's StandardCheckpointer wrote"
    raise VariablesError(what, where=str(path), expected=expected, got=got)
