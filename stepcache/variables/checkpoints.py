"""`save`: writes variables, pytrees and numbers to a directory that orbax can read too.

Arrays are stored as nested dicts by path, versions and the like in orbax's custom metadata.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import operator
import os
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jax
import numpy as np

from stepcache import _process_hooks, jaxcompat
from stepcache.errors import StepCacheError, VariablesError, first_line, refuse_url
from stepcache.pods.rounds import Peers, peers_of
from stepcache.variables import checkpoint_files as files
from stepcache.variables.checkpoint_items import (
    NOTHING,
    Leaf,
    Name,
    Savable,
    check_names,
    is_key,
    joined_part,
    kind_of,
    leaves_of,
    locked,
)
from stepcache.variables.describing import check_not_tracing

_log = logging.getLogger("stepcache")
_UNWRITTEN = "the checkpoint could not be written"
_unfinished: list[Saving] = []
_writing = threading.Lock()  # Two saves at once would wait for each other's signals in orbax.


class Saving:
    """A save that is being written, or has been."""

    def __init__(self, root: Path, keep: int | None, step: int):
        self._root, self._keep, self._step = root, keep, step
        self._pod = processes()
        self._staging: files.Staging | None = None  # Of the first process.
        self._checkpointer: Any = None
        self._held = contextlib.ExitStack()  # What is to be let go of when it ends.
        self._thread: threading.Thread | None = None
        self._error: BaseException | None = None
        self._agreed = False
        self._lock = threading.Lock()

    @property
    def done(self) -> bool:
        """Whether all is written, or the save has failed."""
        return self._thread is None or not self._thread.is_alive()

    def wait(self) -> None:
        """Waits until the checkpoint is complete. In a pod, all processes call it.

        Raises:
            VariablesError: it could not be written. The checkpoint before it is still there.
            RankLostError: a process of the pod was lost.
        """
        with self._lock:
            if self._thread is not None:
                self._pod.guarded(self._thread.join)
                with contextlib.suppress(ValueError):
                    _unfinished.remove(self)
            agreed, self._agreed = self._agreed, True
            label, own = f"saving {self._root}", str(self._error or "").encode()
            received = {} if agreed else self._pod.gather(label, own)
        if self._error is not None:
            raise self._error
        for rank, text in received.items():
            if text:
                raise VariablesError(f"rank {rank}: {text.decode()}")

    def _start(self, tree: Any, metadata: dict[str, Any]) -> None:
        """Copies the arrays to the host, and starts to write them."""
        label, reason = f"saving {self._root}", "saves, which all processes have to do together"
        self._pod.gather(label, b"", reason, patient=False)
        try:
            new = of_leader(self._pod, self._root, self._prepare, _UNWRITTEN)
            self._held.enter_context(_writing)
            with damage_as_error(self._root, _UNWRITTEN):
                self._checkpointer = self._pod.guarded(lambda: _write(new, tree, metadata))
        except BaseException:
            self._held.close()
            raise

    def _prepare(self) -> Path:
        target = self._root if self._keep is None else files.step_path(self._root, self._step)
        files.recover(target)
        files.check_replaceable(target)
        self._staging = files.Staging(target)
        self._held.callback(self._staging.close)
        return self._staging.new

    def _finish(self) -> None:
        """Waits until orbax has written all, and publishes it."""
        try:
            with damage_as_error(self._root, _UNWRITTEN), self._checkpointer:  # Closing may fail.
                self._checkpointer.wait_until_finished()
                if self._staging is not None:
                    self._staging.publish()
                    if self._keep is not None:
                        files.prune(self._root, self._keep, self._staging)
        except StepCacheError as error:
            self._error = error
        finally:
            self._held.close()
        if self._error is not None and self._thread is not None:
            _log.error("%s", self._error)

    def _finish_now(self) -> None:
        try:
            self._pod.guarded(self._finish)
        finally:
            self._held.close()
        self.wait()

    def _finish_behind(self) -> None:
        _finish_before_exit()
        self._thread = threading.Thread(target=self._finish, name="stepcache save")
        _unfinished.append(self)
        try:
            self._thread.start()
        except RuntimeError:  # There can be no more threads.
            self._thread = None
            _unfinished.remove(self)
            self._finish_now()
        if _process_hooks.THREADS_END_EARLY:
            self._pod.guarded(join_all)


def _write(path: Path, tree: Any, metadata: dict[str, Any]) -> Any:
    """Starts to write. Arrays are copied to the host before it returns."""
    import orbax.checkpoint as ocp

    checkpointer = ocp.StandardCheckpointer()
    checkpointer.save(path, tree, custom_metadata=metadata)
    return checkpointer


def join_all() -> None:
    """Waits for all saves of this process."""
    for saving in list(_unfinished):
        if saving._thread is not None:
            saving._thread.join()


@functools.cache
def _finish_before_exit() -> None:
    """Has the process finish all saves before Python refuses new threads, which orbax needs; and
    end with an error if one has failed, and nobody has heard of it.
    """
    _process_hooks.before_threads_end(join_all)
    _process_hooks.fail_at_exit_if(lambda: any(each._error for each in _unfinished))


def save(
    directory: str | os.PathLike,
    *,
    keep: int | None = None,
    asynchronous: bool = False,
    **items: Any,
) -> Saving:
    """Writes variables, pytrees and numbers to one checkpoint, together or not at all.

        sc.save("saves", params=params, moments=moments, step=step, keep=3)

    An earlier checkpoint is replaced after the new one is complete, so a crash at any moment leaves
    one of them whole. Only an empty directory, or a checkpoint that stepcache wrote, is replaced.
    In a pod, all processes call this inside the session, with a directory that all share.

    The checkpoint is orbax's own: `ocp.StandardCheckpointer().restore(path)` gives nested dicts of
    arrays with the keys of the trees, `["params"]["layers"]["0"]["w"]`. The optimizer's state of
    `Variables` is stored beside them as `"params:optimizer"`, and the sum of pending updates
    (`Write(every=...)`) as `"params:pending"`.

    Args:
        directory: of the checkpoint.
        keep: the number of checkpoints to keep: each is written to `step_00000012` below
            `directory`, and all but those of the `keep` highest steps are removed. Needs `step=`.
        asynchronous: return when the values are copied to the host, and write in the background.
            The next save, and the end of the process, wait for it. An error that neither the next
            save nor `wait()` has raised makes the exit code 1. On Python 3.12.0 to 3.12.2, this
            call itself waits.
        **items: what to save, by name: `Variables`, pytrees of arrays, or numbers.

    Returns:
        The save, whose `wait()` returns when the checkpoint is complete.

    Raises:
        VariablesError: `directory` is a URL or holds something else than a checkpoint of stepcache,
            an item has a leaf that is no array, or this save, or the asynchronous one before it,
            could not be written.
        RankLostError: a process of the pod was lost.
        AgreementError: not all processes of the pod save, within `Session(agree_timeout=...)`.
        ForkedProcessError: this process was forked after JAX had started.
    """
    check_not_tracing("nothing can be saved", "save")
    jaxcompat.check_not_forked(f"{directory} was to be saved")
    for saving in list(_unfinished):
        saving.wait()
    root, step = path_of(directory), _step_number(items, keep) if keep is not None else 0
    scope = jaxcompat.entered_session()
    if (target := getattr(scope, "target", None)) is not None:
        return target.save(root, items, keep, step)
    tree, metadata = _collected(items, copied=asynchronous)
    saving = Saving(root, keep, step)
    saving._start(tree, metadata)
    if asynchronous:
        saving._finish_behind()
    else:
        saving._finish_now()
    return saving


def write_leaves(
    root: Path, leaves: list[Leaf], about: dict[str, Any], keep: int | None, step: int
) -> None:
    """Writes named leaves, and `about` variables, to a checkpoint; in a pod, by all processes."""
    saving = Saving(root, keep, step)
    saving._start(*_stored_form(leaves, about, copied=False))
    saving._finish_now()


def path_of(directory: str | os.PathLike) -> Path:
    refuse_url(directory, VariablesError, "directory")
    return Path(directory).expanduser().resolve()


def _step_number(items: dict[str, Any], keep: int) -> int:
    if isinstance(keep, bool) or operator.index(keep) < 1:
        what = "keep is a number of checkpoints"
        raise VariablesError(what, expected="at least 1", got=f"{keep}")
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
    """orbax's tree of all items, as of one moment, and the metadata that goes with it."""
    check_names(items)
    about: dict[str, Any] = {}
    leaves: list[Leaf] = []
    with locked(items.values()):
        for name, item in items.items():
            trees = {"": item}
            if isinstance(item, Savable):
                trees, about[name] = item._parts()
            for part, tree in trees.items():
                leaves += leaves_of(joined_part(name, part), tree)
        return _stored_form(leaves, about, copied=copied)


def _stored_form(
    leaves: list[Leaf], about: dict[str, Any], *, copied: bool
) -> tuple[dict[str, Any], dict[str, Any]]:
    """orbax's tree of some leaves, and the metadata that goes with it."""
    values, special = {}, []
    for leaf in leaves:
        value, kind = _storable(leaf, copied=copied), kind_of(leaf)
        is_empty = 0 in kind.shape  # orbax stores no empty arrays.
        if not is_empty:
            values[leaf.name] = value
        if is_empty or is_key(leaf.value):
            special.append([list(leaf.name), kind.dtype, list(kind.shape)])
    metadata = {"stepcache": {"variables": about, "leaves": special}}
    return _nested(values or {NOTHING: np.zeros(1)}), metadata


def _storable(leaf: Leaf, *, copied: bool) -> Any:
    """A leaf as orbax takes it; with `copied`, a copy, if it could change before it is written."""
    kind_of(leaf)
    value: Any = leaf.value
    is_template = isinstance(value, jax.ShapeDtypeStruct)
    if is_template or (isinstance(value, jax.Array) and value.is_deleted()):
        what = "a leaf of a checkpoint has no value"
        got = "a jax.ShapeDtypeStruct" if is_template else "an array that was donated or deleted"
        raise VariablesError(what, where=leaf.path, got=got)
    if not isinstance(value, jax.Array):
        return np.array(value) if copied else np.asarray(value)
    value = jax.random.key_data(value) if is_key(value) else value
    if jax.process_count() > 1 and value.is_fully_addressable:  # orbax writes global arrays only.
        return np.asarray(value)
    return value


def _nested(values: dict[Name, Any]) -> dict[str, Any]:
    """Values by name as nested dicts."""
    tree: dict[str, Any] = {}
    for name, value in values.items():
        node = tree
        for part in name[:-1]:
            node = node.setdefault(part, {})
        node[name[-1]] = value
    return tree


class Alone:
    """Stands for `Peers` in a process that has none."""

    def guarded(self, work: Callable[[], Any]) -> Any:
        return work()

    def gather(self, label: str, payload: bytes, *_: Any, **__: Any) -> dict[int, bytes]:
        return {jax.process_index(): payload}


def processes() -> Peers | Alone:
    """Returns the processes of the session's mesh; outside of sessions, all of JAX's pod."""
    session = jaxcompat.entered_session()
    peers = session.peers if session is not None else None
    return peers or peers_of(range(jax.process_count())) or Alone()


def of_leader(
    pod: Peers | Alone, path: Path, work: Callable[[], Path], what: str, expected: str | None = None
) -> Path:
    """Does some work in the first process, and returns its path, or raises its error, in all."""
    error, said = None, b""
    if jax.process_index() == 0:
        try:
            with damage_as_error(path, what, expected):
                said = b"+" + str(work()).encode()
        except StepCacheError as raised:
            error, said = raised, str(raised).encode()
    answer = pod.gather(f"the checkpoint {path}", said)[0].decode()
    if error is not None:
        raise error
    if not answer.startswith("+"):
        raise VariablesError(answer)
    return Path(answer[1:])


@contextlib.contextmanager
def damage_as_error(path: Path, what: str, expected: str | None = None) -> Iterator[None]:
    """Raises `VariablesError` for errors of orbax and the file system."""
    try:
        yield
    except StepCacheError:
        raise
    except Exception as error:
        got = first_line(error)
        raise VariablesError(what, where=str(path), expected=expected, got=got) from error
