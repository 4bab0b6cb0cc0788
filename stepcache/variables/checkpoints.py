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
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import numpy as np

from stepcache import _process_hooks, jaxcompat
from stepcache.errors import StepCacheError, VariablesError, first_line, refuse_url
from stepcache.pods.rounds import Peers, peers_of
from stepcache.variables.checkpoint_items import Leaf, is_key, leaves_of, nested, saved_trees
from stepcache.variables.checkpoint_steps import OURS, writing
from stepcache.variables.describing import check_not_tracing
from stepcache.variables.variables import Variables, locked

_log = logging.getLogger("stepcache")
_unfinished: list[Saving] = []
_writing = threading.Lock()  # Two saves at once would wait for each other's signals in orbax.


class Saving:
    """A save that is being written, or has been."""

    def __init__(self, directory: Path):
        self._together = Together(f"saving {directory}", "the checkpoint could not be written")
        self._directory = directory
        self._thread: threading.Thread | None = None
        self._error: Exception | None = None
        self._is_agreed = False

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
        if self._thread is not None:
            self._together.guarded(self._thread.join)
        with contextlib.suppress(ValueError):  # Another thread may wait, too.
            _unfinished.remove(self)
        if not self._is_agreed:
            self._is_agreed = True
            try:
                self._together(self._raise)
            except VariablesError as error:
                self._error = error
        self._raise()

    def _raise(self) -> None:
        if self._error is not None:
            raise self._error

    def _start(self, tree: Any, step: int | None, keep: int) -> None:
        """Copies the arrays to the host, and starts to write them in the background."""
        import orbax.checkpoint as ocp

        def started() -> Any:
            checkpointer = ocp.StandardCheckpointer()
            checkpointer.save(path, tree, custom_metadata=OURS)
            return checkpointer

        with contextlib.ExitStack() as running:
            running.enter_context(_writing)
            place = writing(self._directory, step, keep)
            path = Path(self._together.first(lambda: running.enter_context(place)))
            checkpointer = self._together.guarded(started)
            _finish_before_exit()
            rest = running.pop_all()
        work = functools.partial(self._finish, rest, checkpointer)
        self._thread = threading.Thread(target=work, name="stepcache save")
        try:
            self._thread.start()
        except RuntimeError:  # There can be no more threads.
            self._thread = None
            work()
        _unfinished.append(self)

    def _finish(self, running: contextlib.ExitStack, checkpointer: Any) -> None:
        """Waits until orbax has written all, and removes what is to be replaced."""
        try:
            with running, checkpointer:  # Closing may fail.
                checkpointer.wait_until_finished()
        except Exception as error:
            self._error = error
            _log.error("%s: %s", self._together.label, first_line(error))


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
    _process_hooks.fail_at_exit_if(lambda: any(saving._error for saving in _unfinished))


def save(
    directory: str | os.PathLike,
    *,
    keep: int | None = None,
    asynchronous: bool = False,
    **items: Any,
) -> Saving:
    """Writes variables, pytrees and numbers to one checkpoint, together or not at all.

        sc.save("saves", params=params, moments=moments, step=step, keep=3)

    The checkpoint is `step_00000012` below `directory`, where 12 is the item `step`, if that is a
    whole number, and otherwise the number after the newest. Older checkpoints are removed when the
    new one is complete, so a crash at any moment leaves a whole one. Nothing else in `directory` is
    changed. In a pod, all processes call this inside the session, with a directory that all share;
    one process at a time, or one pod, saves to a directory.

    The checkpoint is orbax's own: `ocp.StandardCheckpointer().restore(path)` gives nested dicts of
    arrays with the keys of the trees, `["params"]["layers"]["0"]["w"]`. The optimizer's state of
    `Variables` is stored beside them as `"params:optimizer"`.

    Args:
        directory: of the checkpoints.
        keep: the number of checkpoints to keep, by default this one alone; of more, those of the
            highest steps beside this one.
        asynchronous: return when the values are copied to the host, and write in the background.
            The next save, and the end of the process, wait for it. An error that neither the next
            save nor `wait()` has raised makes the exit code 1. On Python 3.12.0 to 3.12.2, this
            call itself waits.
        **items: what to save, by name: `Variables`, pytrees of arrays, or numbers.

    Returns:
        The save, whose `wait()` returns when the checkpoint is complete.

    Raises:
        VariablesError: `directory` is a URL, a checkpoint, or being written by another process; the
            step's directory holds something else than a checkpoint of stepcache; an item has a leaf
            that is no array; updates are pending (`Write(every=...)`); or this save, or the
            asynchronous one before it, could not be written.
        RankLostError: a process of the pod was lost.
        AgreementError: not all processes of the pod save, within `Session(agree_timeout=...)`.
        ForkedProcessError: this process was forked after JAX had started.
    """
    check_not_tracing("nothing can be saved", "save")
    jaxcompat.check_not_forked(f"{directory} was to be saved")
    for saving in list(_unfinished):
        saving.wait()
    root, step = path_of(directory), _step_number(items)
    keep = 1 if keep is None else keep
    if isinstance(keep, bool) or operator.index(keep) < 1:
        what = "keep is a number of checkpoints"
        raise VariablesError(what, expected="at least 1", got=f"{keep}")
    saving = Saving(root)
    if (target := getattr(jaxcompat.entered_session(), "target", None)) is not None:
        target.save(root, items, keep, step)
        return saving
    leaves: list[Leaf] = []
    with locked(items.values()):  # All of one moment.
        for name, item in items.items():
            trees = saved_trees(name, item) if isinstance(item, Variables) else {name: item}
            leaves += storable(leaves_of(trees), copied=asynchronous)
        tree = nested(leaves)
    reason = "saves, which all processes have to do together"
    saving._together(lambda: None, reason, patient=False)
    saving._start(tree, step, keep)
    if not asynchronous:
        saving.wait()
    elif _process_hooks.THREADS_END_EARLY:
        join_all()
    return saving


def path_of(directory: str | os.PathLike) -> Path:
    refuse_url(directory, VariablesError, "directory")
    return Path(directory).expanduser().resolve()


def _step_number(items: dict[str, Any]) -> int | None:
    try:
        number = operator.index(items.get("step"))  # type: ignore[arg-type]
    except TypeError:
        return None
    return number if number >= 0 else None


def storable(leaves: list[Leaf], *, copied: bool) -> list[Leaf]:
    """Leaves as orbax takes them; with `copied`, copies of what could change before it is written.

    Without empty ones, which orbax does not store.
    """
    stored = []
    for leaf in leaves:
        value, kind = leaf.value, leaf.kind  # Checks that it is an array, or a number.
        is_deleted = isinstance(value, jax.Array) and value.is_deleted()
        if is_deleted or isinstance(value, jax.ShapeDtypeStruct):
            got = "a donated or deleted array" if is_deleted else "a jax.ShapeDtypeStruct"
            raise VariablesError("a leaf of a checkpoint has no value", where=leaf.path, got=got)
        if isinstance(value, jax.Array):
            value = jax.random.key_data(value) if is_key(value) else value
            if jax.process_count() > 1 and value.is_fully_addressable:
                value = np.asarray(value)  # orbax writes global arrays only.
        else:
            value = np.array(value) if copied else np.asarray(value)
        if 0 not in kind.shape:
            stored.append(leaf._replace(value=value))
    return stored


class Together:
    """Work of the processes that save and restore together: those of the session's mesh, or of all.

    Args:
        label: of the agreement, such as "saving saves".
        what: the error if something else than stepcache fails.
        expected: what else is in that error.
    """

    def __init__(self, label: str, what: str, expected: str | None = None):
        session = jaxcompat.entered_session()
        own = session.peers if session is not None else None
        self._peers: Peers | None = own or peers_of(range(jax.process_count()))
        self.label, self._what, self._expected = label, what, expected

    def guarded(self, work: Callable[[], Any]) -> Any:
        """Does work that waits for the other processes.

        Raises:
            RankLostError: one of them is lost.
            VariablesError: orbax, or the file system, fails.
        """
        watch = self._peers.watch if self._peers is not None else None
        try:
            if watch is not None:
                watch.raise_if_lost()
            return work()
        except Exception as error:
            if watch is not None:
                watch.raise_if_lost_by(error)
            if isinstance(error, StepCacheError):
                raise
            what = f"{self._what}: {first_line(error)}"
            raise VariablesError(what, where=self.label, expected=self._expected) from error

    def first(self, work: Callable[[], Any]) -> str:
        """Does work in the first process alone. Returns its result as text, in all."""
        return self(work if jax.process_index() == 0 else lambda: "", of_first=True)

    def __call__(
        self,
        work: Callable[[], Any],
        reason: str = "",
        *,
        patient: bool = True,
        of_first: bool = False,
    ) -> Any:
        """Does work in each process, and returns its result. If it fails in one, all raise.

        Args:
            work: what each process does.
            reason, patient: see `Peers.round`.
            of_first: return the result of the first process, as text.
        """
        result, failed = None, None
        try:
            result = self.guarded(work)
        except StepCacheError as error:  # A loss is raised by the round, too.
            failed = error
        own = f"-{failed}" if failed is not None else f"+{result if of_first else ''}"
        if self._peers is not None:
            with self._peers.round(self.label, reason, patient=patient) as current:
                differing = current.compare("results", {"result": own})
            texts = differing.get("result", [(own, current.ranks)])
            wrong = [f"rank {ranks[0]}: {text[1:]}" for text, ranks in texts if text[0] == "-"]
            failed = failed or (VariablesError(wrong[0]) if wrong else None)
            own = next((text for text, ranks in texts if 0 in ranks), own)
        if failed is not None:
            raise failed
        return own[1:] if of_first else result
