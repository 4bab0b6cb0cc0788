"""Directories of checkpoints: a checkpoint for each step, `step_00000012`.

orbax writes a checkpoint beside its place, and renames it when it is whole. So each `step_…` is
whole at any moment, and what a killed save leaves has another name. orbax's `CheckpointManager` is
not used: it removes steps that it did not write, leaves out saves without a word, and leaves what
killed saves have written.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import re
import shutil
from collections.abc import Collection, Iterator
from pathlib import Path
from typing import Any

from stepcache.errors import VariablesError

OURS: dict[str, Any] = {"stepcache": {}}
"""What orbax's custom metadata say of a checkpoint of stepcache."""

# A replaced checkpoint is there until the new one of its step is whole.
_STEP = re.compile(r"step_(?P<number>\d{8,})(?P<replaced>\.replaced)?")
_UNFINISHED = re.compile(r"step_\d{8,}\.(removed|replaced|orbax-checkpoint-tmp.*)")


class NoCheckpointError(VariablesError, FileNotFoundError):
    """There is no checkpoint to restore."""


def is_ours(path: Path) -> bool:
    """Whether stepcache has written a checkpoint."""
    try:
        metadata = json.loads((path / "_CHECKPOINT_METADATA").read_text())
        return OURS.keys() <= metadata["custom_metadata"].keys()
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return False


def names_in(directory: Path) -> list[str]:
    return sorted(path.name for path in directory.iterdir()) if directory.is_dir() else []


def step_path(directory: Path, step: int) -> Path:
    return directory / f"step_{step:08}"


def steps_in(directory: Path) -> list[Path]:
    """The checkpoints of steps below a directory, the newest first."""
    matches = filter(None, map(_STEP.fullmatch, names_in(directory)))
    order = sorted((int(m["number"]), m["replaced"] is None, m.string) for m in matches)
    return [directory / name for *_, name in reversed(order)]


@contextlib.contextmanager
def writing(directory: Path, step: int | None, keep: int) -> Iterator[Path]:
    """Context manager of a save: yields the path of its checkpoint, where nothing is yet.

    Its number is `step`; None for the one after the newest. Leaves this one, `keep - 1` others, the
    newest, and nothing that this save, or one that was killed, did not finish.
    """
    if _is_tree(directory):
        what = "a save would write into another checkpoint"
        hint = "name another directory: each save makes one of its step below it"
        raise VariablesError(what, where=str(directory), got="a checkpoint", hint=hint)
    directory.mkdir(parents=True, exist_ok=True)
    with _locked(directory):
        _clean(directory)
        if step is None:
            step = next((int(path.stem[5:]) + 1 for path in steps_in(directory)), 0)
        target = step_path(directory, step)
        if target.exists():
            if not is_ours(target):
                what = "a save would replace what stepcache did not write, or what is damaged"
                hint = "move it away, or save to another directory"
                raise VariablesError(what, where=str(target), hint=hint)
            target.rename(target.with_suffix(".replaced"))
        try:
            yield target
            others = [path for path in steps_in(directory) if path.stem != target.name]
            for path in list(filter(is_ours, others))[keep - 1 :]:
                with contextlib.suppress(OSError):  # Its readers see all of it, or nothing.
                    path.rename(path.with_suffix(".removed"))
        finally:
            _clean(directory)


@contextlib.contextmanager
def _locked(directory: Path) -> Iterator[None]:
    """Context manager of the only process that saves to a directory. A killed one has no lock."""
    opened = os.open(directory, os.O_RDONLY)
    try:
        try:
            fcntl.flock(opened, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            what = "another process is writing a checkpoint to this directory"
            hint = "have each program save to a directory of its own"
            raise VariablesError(what, where=str(directory), hint=hint) from None
        except OSError:
            pass  # A file system without locks.
        yield
    finally:
        with contextlib.suppress(OSError):
            fcntl.flock(opened, fcntl.LOCK_UN)  # A forked child may have it open.
        os.close(opened)


def _clean(directory: Path) -> None:
    """Removes what saves did not finish, and puts back what they would have replaced."""
    for path in map(directory.joinpath, names_in(directory)):
        if _UNFINISHED.fullmatch(path.name):
            if path.suffix == ".replaced" and not path.with_suffix("").exists():
                path.rename(path.with_suffix(""))
            else:
                shutil.rmtree(path, ignore_errors=True)


def find(path: Path, items: Collection[str]) -> Path | None:
    """The checkpoint at `path`, or the newest of the steps below it; None if there is none.

    In those of orbax's `CheckpointManager`, which are named by their number alone, it is the tree
    that was saved without a name, or the directory with a tree for some of the `items`.
    """
    own = filter(is_ours, steps_in(path))
    numbers = sorted(filter(str.isdecimal, names_in(path)), key=int, reverse=True)
    for step in (path, *own, *map(path.joinpath, numbers)):
        for tree in (step, step / "default"):
            if _is_tree(tree):
                return tree
        if trees_in(step, items):
            return step
    return None


def _is_tree(path: Path) -> bool:
    return (path / "_METADATA").exists()


def trees_in(path: Path, items: Collection[str]) -> list[str]:
    """The items of which a step of orbax's `CheckpointManager` has a tree by their name."""
    return [name for name in items if not _is_tree(path) and _is_tree(path / name)]
