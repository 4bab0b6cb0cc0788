"""`save`: writes variables, pytrees and numbers to a directory that orbax can read too.

A leaf is stored below its item under the keys of its path, as text: `params/layers/0/w`. Variables
with an optimizer are two trees: `params` is the value, `params:optimizer` the optimizer's state.
"""

from __future__ import annotations

import concurrent.futures
import contextlib
import functools
import logging
import operator
import os
import re
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.tree_util import keystr

from stepcache import _process_hooks, jaxcompat
from stepcache.errors import StepCacheError, VariablesError, first_line, refuse_url
from stepcache.pods.global_arrays import is_key
from stepcache.pods.rounds import Peers, peers_of
from stepcache.units import readable_ranks
from stepcache.variables.checkpoint_steps import OURS, writing
from stepcache.variables.describing import check_array, check_not_tracing
from stepcache.variables.masters import Master
from stepcache.variables.variables import Variables, locked

_log = logging.getLogger("stepcache")
_unfinished: list[Saving] = []
_saving = threading.Lock()  # Two saves at once would wait for each other's signals in orbax.


class Saving:
    """A save that is being written, or has been."""

    def __init__(self, directory: Path):
        self._together = Together(f"saving {directory}", "the checkpoint could not be written")
        self._written: concurrent.futures.Future[None] = concurrent.futures.Future()
        self._failure: VariablesError | None = None
        self._agreeing = threading.Lock()

    @property
    def done(self) -> bool:
        """Whether all is written, or the save has failed."""
        return self._written.done()

    def wait(self) -> None:
        """Waits until the checkpoint is complete. In a pod, all processes call it.

        Raises:
            VariablesError: it could not be written. The checkpoint before it is still there.
            RankLostError: a process of the pod was lost.
        """
        with self._agreeing:  # Another thread may wait, too.
            if self in _unfinished:
                try:
                    self._together(self._written.result)
                except VariablesError as error:
                    self._failure = error
                _unfinished.remove(self)
        if self._failure is not None:
            raise self._failure

    def _finish(self, checkpointer: Any, running: contextlib.ExitStack) -> None:
        """Waits until orbax has written all, and leaves the contexts."""
        try:
            with running:  # It removes what is replaced. Closing may fail.
                checkpointer.wait_until_finished()
            self._written.set_result(None)
        except Exception as error:
            self._written.set_exception(error)
            _log.error("%s: %s", self._together.label, first_line(error))


def join_all() -> None:
    """Waits for all saves of this process."""
    concurrent.futures.wait([saving._written for saving in list(_unfinished)])


@functools.cache
def _finish_before_exit() -> None:
    """Has the process finish all saves before Python refuses new threads, which orbax needs; and
    end with an error if one has failed, and nobody has heard of it.
    """
    _process_hooks.before_threads_end(join_all)
    _process_hooks.fail_at_exit_if(
        lambda: any(each.done and each._written.exception() for each in _unfinished)
    )


def save(
    directory: str | os.PathLike, *, keep: int = 1, asynchronous: bool = False, **items: Any
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
        RankLostError, DeadlineError: a process or a task was lost, or tasks do not answer in time.
        AgreementError: not all processes of the pod save, within `Session(agree_timeout=...)`.
        ForkedProcessError: this process was forked after JAX had started.
    """
    check_not_tracing("nothing can be saved", "save")
    jaxcompat.check_not_forked(f"{directory} was to be saved")
    root = path_of(directory)
    if isinstance(keep, bool) or operator.index(keep) < 1:
        what = "keep is a number of checkpoints"
        raise VariablesError(what, expected="at least 1", got=f"{keep}")
    import orbax.checkpoint as ocp

    with _saving, contextlib.ExitStack() as running:
        for unfinished in list(_unfinished):
            unfinished.wait()
        saving, step = Saving(root), None
        with contextlib.suppress(KeyError, TypeError):  # There may be none, or something else.
            step = given if (given := operator.index(items["step"])) >= 0 else None

        def collected() -> dict[str, Any]:
            with locked(items.values()):  # All of one moment.
                leaves: list[Leaf] = []
                for name, item in items.items():  # Leaves of variables are copies.
                    is_copied = asynchronous and not isinstance(item, Variables)
                    leaves += storable(leaves_of(dict(saved_trees(name, item))), copied=is_copied)
                return nested(leaves)

        together = saving._together
        # First: what lies on the hosts of a pod is gathered by all of them.
        together(lambda: None, "saves, which all processes have to do together", patient=False)
        tree = together(collected)
        begin = functools.partial(running.enter_context, writing(root, step, keep))
        path = Path(together(begin, of_first=True))
        checkpointer = running.enter_context(ocp.StandardCheckpointer())
        # Not `together`: others may wait in orbax for one that fails.
        together.guarded(lambda: checkpointer.save(path, tree, custom_metadata=OURS))
        _finish_before_exit()
        finish = functools.partial(saving._finish, checkpointer, running.pop_all())
        try:
            threading.Thread(target=finish, name="stepcache save").start()
        except RuntimeError:  # There can be no more threads.
            finish()
        _unfinished.append(saving)  # Not before: after an interrupt nobody would finish it.
    if not asynchronous:
        saving.wait()
    elif _process_hooks.THREADS_END_EARLY:
        join_all()
    return saving


def path_of(directory: str | os.PathLike) -> Path:
    refuse_url(directory, VariablesError, "directory")
    return Path(directory).expanduser().resolve()


def storable(leaves: list[Leaf], *, copied: bool) -> list[Leaf]:
    """Leaves as orbax takes them, without empty ones; with `copied`, copies of what could change
    before it is written.
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


class Kind(NamedTuple):
    """The name of a leaf's dtype, and its shape. A random key's are those of its data."""

    dtype: str
    shape: tuple[int, ...]

    def __str__(self) -> str:
        return f"{self.dtype}{list(self.shape)}"


class Leaf(NamedTuple):
    """A leaf of an item: an array, a number, or a `jax.ShapeDtypeStruct`."""

    keys: tuple[str, ...]  # Of the item, and of the path in it.
    value: Any

    @property
    def path(self) -> str:
        return "/".join(self.keys)

    @property
    def kind(self) -> Kind:
        """Raises `VariablesError` if the leaf is no array and no number."""
        value: Any = getattr(self.value, "_stand_in", self.value)  # One on tasks.
        if is_number(value) and (number := np.asarray(value)).dtype != object:  # One of 64 bits.
            value = number
        if not isinstance(value, jax.ShapeDtypeStruct):
            check_array(value, self.path)
        value = jax.eval_shape(jax.random.key_data, value) if is_key(value) else value
        return Kind(np.dtype(value.dtype).name, tuple(value.shape))


def key_text(key: Any) -> str:
    """A key of a path as text."""
    return keystr((key,), simple=True)


def is_number(value: Any) -> bool:
    return isinstance(value, bool | int | float | complex) and not isinstance(value, np.generic)


def leaves_of(trees: dict[str, Any]) -> list[Leaf]:
    """The leaves of some items, in the order of their trees."""
    return [
        Leaf((name, *map(key_text, keys)), value)
        for name, tree in trees.items()
        for keys, value in jax.tree_util.tree_flatten_with_path(tree)[0]
    ]


def nested(leaves: list[Leaf]) -> dict[str, Any]:
    """The values of some leaves as nested dicts, which is what orbax stores.

    Raises `VariablesError` if there are none, or two would be one in the checkpoint.
    """
    if not leaves:
        raise VariablesError("there is nothing to save", expected="an array, or a number")
    tree: dict[str, Any] = {}
    names: set[str] = set()
    for leaf in leaves:
        *above, last = leaf.keys
        node = tree
        for key in above:
            node = node.setdefault(key, {}) if type(node) is dict else node
        name = ".".join(filter(None, re.split("[/.]", leaf.path)))  # At least so orbax names it.
        if type(node) is not dict or last in node or name in names:
            what = "two leaves have the same path in a checkpoint"
            expected = 'keys that differ by more than their type (1 and "1"), "/" and "."'
            raise VariablesError(what, where=leaf.path, expected=expected, hint="rename a key")
        node[last] = leaf.value
        names.add(name)
    return tree


def masters_of(name: str, variables: Variables, *, has_state: bool = True) -> dict[str, Master]:
    """The master copies of the trees that variables are stored as, by name: their value, and if
    `has_state`, an optimizer's state. Under their lock.
    """
    masters = {name: variables._master}
    with variables._moving() as meter:
        state = variables._updates.saved_state(variables._master, meter) if has_state else None
    return masters if state is None else masters | {f"{name}:optimizer": state}


def saved_trees(name: str, item: Any) -> Iterator[tuple[str, Any]]:
    """The trees that an item is stored as, by name. Under the lock of variables."""
    if not isinstance(item, Variables):
        yield name, item
        return
    item._updates.check_none_pending()
    for part, master in masters_of(name, item).items():
        master.check_not_lost(item.name)
        with item._moving() as meter:
            yield part, master.layout.tree.unflatten(master.leaves(meter))


class Together:
    """Work of the processes that save and restore together: all of a pod, as orbax needs them.

    `label` is that of the agreement, such as "saving saves", `what` the error if something else
    than stepcache fails. Raises `VariablesError` in a session over some of the processes.
    """

    def __init__(self, label: str, what: str):
        own = getattr(jaxcompat.entered_session(), "peers", None)
        self._peers: Peers | None = own or peers_of(range(jax.process_count()))
        self.label, self._what = label, what
        if own is not None and len(own.ranks) < jax.process_count():
            what = "checkpoints are written and read by all processes of a pod together"
            hint = "call it in all processes, inside a session over all of them, or outside"
            got = f"a session over {readable_ranks(own.ranks)}"
            raise VariablesError(what, where=label, got=got, hint=hint)

    def guarded(self, work: Callable[[], Any]) -> Any:
        """Does work that waits for the other processes. Raises `RankLostError` if one of them is
        lost, `VariablesError` if orbax, or the file system, fails.
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
            raise VariablesError(what, where=self.label) from error

    def __call__(
        self,
        work: Callable[[], Any],
        reason: str = "",
        *,
        patient: bool = True,
        of_first: bool = False,
    ) -> Any:
        """Does work in each process, and returns its result. If it fails in one, all raise.

        With `of_first` the first process does it alone, and all get its result, as text. `reason`
        and `patient` are those of `Peers.round`.
        """
        result, failed, said = None, None, "+"
        try:
            if not of_first or jax.process_index() == 0:
                result = self.guarded(work)
                said += str(result) if of_first else ""
        except StepCacheError as error:  # A loss is raised by the round, too.
            failed, said = error, f"-{error}"
        sides = [(said, (0,))]
        if self._peers is not None:
            with self._peers.round(self.label, reason, patient=patient) as current:
                sides = current.compare("results", {"result": said}).get("result", sides)
        if failed is not None:
            raise failed
        for text, ranks in sides:
            if text[0] == "-":
                raise VariablesError(f"rank {ranks[0]}: {text[1:]}")
        return max(text for text, _ in sides)[1:] if of_first else result  # Others say nothing.
