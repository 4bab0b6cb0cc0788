"""`save`: writes variables, pytrees and numbers to a directory that orbax reads too.

Nested dicts of arrays by path, with versions and the like in orbax's custom metadata. How paths
become keys stands in `checkpoint_tree.py`, what may be replaced in `checkpoint_files.py`.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import operator
import os
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from stepcache import _process_hooks
from stepcache.errors import StepCacheError, VariablesError
from stepcache.sharding import Company, current_company
from stepcache.variables import checkpoint_files as files
from stepcache.variables.checkpoint_items import (
    NOTHING,
    Everybody,
    Savable,
    check_names,
    joined_part,
    locked,
    of_leader,
    path_of,
    raise_together,
    unwritten,
)
from stepcache.variables.checkpoint_tree import (
    Leaf,
    is_key,
    kind_of,
    leaves_of,
    nested,
    storable,
)
from stepcache.variables.describing import check_not_tracing

_log = logging.getLogger("stepcache")


class Saving:
    """A save that is being written, or has been."""

    def __init__(self, path: Path, company: Company):
        self._path, self._company = path, company
        self._thread: threading.Thread | None = None
        self._error: BaseException | None = None
        self._met = False
        self._lock = threading.Lock()

    @property
    def done(self) -> bool:
        """Whether all is written, or has failed."""
        return self._thread is None or not self._thread.is_alive()

    def wait(self) -> None:
        """Waits until the checkpoint is whole. In a pod, all processes call it.

        Raises:
            VariablesError: it could not be written. What was there before is still there.
            RankLostError: a process of the pod has gone.
        """
        with self._lock:
            if self._thread is not None:
                self._company.guarded(self._thread.join)
                with contextlib.suppress(ValueError):
                    _unfinished.remove(self)
            if not self._met:
                self._met = True
                raise_together(self._company, f"saving {self._path}", self._error)
            elif self._error is not None:
                raise self._error

    def _run(self, finish: Callable[[], None]) -> None:
        try:
            finish()
        except Exception as error:
            self._error = unwritten(self._path, error)

    def _run_behind(self, finish: Callable[[], None]) -> None:
        def run() -> None:
            self._run(finish)
            if self._error is not None:
                _log.error("%s", self._error)

        self._thread = threading.Thread(target=run, name="stepcache save")
        _unfinished.append(self)
        self._thread.start()


_unfinished: list[Saving] = []
_writing = threading.Lock()  # Orbax confuses the signals of two saves at once.


def join_all() -> None:
    for saving in list(_unfinished):
        if saving._thread is not None:
            saving._thread.join()


@functools.cache
def _finish_before_exit() -> None:
    """Has the process write before it ends: orbax needs threads, which Python refuses soon."""
    _process_hooks.before_threads_end(join_all)


def save(
    directory: str | os.PathLike,
    *,
    keep: int | None = None,
    asynchronous: bool = False,
    **items: Any,
) -> Saving:
    """Writes variables, pytrees and numbers to one checkpoint, together or not at all.

        sc.save("saves", params=params, moments=moments, step=step, keep=3)

    What is there is replaced when all is written, so a crash at any moment leaves the old
    checkpoint or the new one, whole. Only a checkpoint that stepcache wrote, or an empty directory,
    is ever replaced. In a pod all processes call it, inside the session; the directory has to be
    one that all see.

    The checkpoint is orbax's own: `ocp.StandardCheckpointer().restore(path)` gives nested dicts of
    arrays with the keys of the trees, `["params"]["layers"]["0"]["w"]`. The optimizer's state of
    `Variables` is stored beside them as `"params:optimizer"`, and what was pushed and not yet
    written (`Write(every=...)`) as `"params:pending"`.

    Args:
        directory: where to.
        keep: makes it one of several checkpoints: it is written to `step_00000012` below
            `directory`, and all but those of the `keep` highest steps are removed. Needs `step=`.
        asynchronous: return when the values are copied to the host, and write behind. The next save
            waits for this one, and so does the end of the process; on Python 3.12.0 to 3.12.2,
            where it could not, this call does.
        **items: what to save, by name: `Variables`, pytrees of arrays, or numbers.

    Returns:
        The save, whose `wait()` waits until it is whole.

    Raises:
        VariablesError: `directory` is a URL or holds something else than a checkpoint of ours, an
            item has a leaf that is no array, or it cannot be written; or the earlier asynchronous
            save could not.
        RankLostError: a process of the pod has gone.
    """
    check_not_tracing("nothing can be saved", "save")
    for saving in list(_unfinished):
        saving.wait()
    root = path_of(directory)
    tree, about = _collected(items, copied=asynchronous)
    number = _step_number(items, keep) if keep is not None else 0
    company = current_company() or Everybody()
    staging: files.Staging | None = None
    target = root

    def prepare() -> str:
        nonlocal staging, target
        target = root if keep is None else files.step_path(root, number)
        files.recover(target)
        files.check_replaceable(target)
        staging = files.Staging(target)
        return str(staging.new)

    saving = Saving(target, company)
    new = Path(of_leader(company, root, prepare))
    _writing.acquire()
    try:
        checkpointer = company.guarded(lambda: _write(new, tree, about))
    except BaseException as error:
        _writing.release()
        if staging is not None:
            staging.close()
        if isinstance(error, StepCacheError) or not isinstance(error, Exception):
            raise
        raise unwritten(root, error) from error

    def finish() -> None:
        try:
            checkpointer.wait_until_finished()
            if staging is not None:
                staging.publish()
                if keep is not None:
                    files.prune(root, keep, target, staging)
        finally:
            checkpointer.close()
            _writing.release()
            if staging is not None:
                staging.close()

    if asynchronous:
        _finish_before_exit()
        saving._run_behind(finish)
        if _process_hooks.THREADS_END_EARLY:
            company.guarded(join_all)
    else:
        company.guarded(lambda: saving._run(finish))
        saving.wait()
    return saving


def _write(path: Path, tree: Any, about: dict[str, Any]) -> Any:
    """Starts to write. Arrays are copied to the host before it returns."""
    import orbax.checkpoint as ocp

    checkpointer = ocp.StandardCheckpointer()
    checkpointer.save(path, tree, custom_metadata=about)
    return checkpointer


def _step_number(items: dict[str, Any], keep: int) -> int:
    if isinstance(keep, bool) or operator.index(keep) < 1:
        raise VariablesError(
            "keep is a number of checkpoints", expected="at least 1", got=f"{keep}"
        )
    try:
        number = operator.index(items["step"])
    except (KeyError, TypeError):
        number = -1
    if number < 0:
        raise VariablesError(
            "keep=... numbers checkpoints by their step",
            where="step",
            expected="step= a whole number",
            got=repr(items["step"]) if "step" in items else "none",
        )
    return number


def _collected(items: dict[str, Any], *, copied: bool) -> tuple[dict[str, Any], dict[str, Any]]:
    """Orbax's tree of all items, at one moment, and the metadata that goes with it."""
    check_names(items)
    versions: dict[str, Any] = {}
    leaves: list[Leaf] = []
    with locked(items):
        for name, item in items.items():
            if not isinstance(item, Savable):
                leaves += leaves_of(name, item)
                continue
            parts = item._parts()
            versions[name] = parts.about
            for part, tree in parts.trees.items():
                leaves += leaves_of(joined_part(name, part), tree)
    values, special = {}, []
    for leaf in leaves:
        value, kind = storable(leaf, copied=copied), kind_of(leaf)
        if 0 not in kind.shape:
            values[leaf.name] = value
        if 0 in kind.shape or is_key(leaf.value):  # Orbax stores no empty arrays.
            special.append([list(leaf.name), kind.dtype, list(kind.shape)])
    about = {"variables": versions, "leaves": special}
    return nested(values or {NOTHING: np.zeros(1)}), {"stepcache": about}
