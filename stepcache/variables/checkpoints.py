"""`save` and `restore`: variables, pytrees and numbers in directories that orbax reads and writes.

Nested dicts of arrays by path, with versions and the like in orbax's custom metadata. How paths
become keys stands in `checkpoint_tree.py`, what may be replaced in `checkpoint_files.py`.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import json
import logging
import operator
import os
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

import jax
import numpy as np

from stepcache import _process_hooks
from stepcache.errors import StepCacheError, VariablesError, first_line, refuse_url
from stepcache.jaxcompat import coordination
from stepcache.sharding import Company, current_company
from stepcache.units import listed
from stepcache.variables import checkpoint_files as files
from stepcache.variables.checkpoint_tree import (
    Kind,
    Leaf,
    Name,
    compatible,
    empty_like,
    escape,
    is_key,
    kind_of,
    leaves_of,
    like,
    nested,
    sharding_for,
    storable,
)
from stepcache.variables.describing import check_not_tracing

_log = logging.getLogger("stepcache")
_NOTHING: Name = ("%nothing",)  # Orbax stores no empty trees.


@dataclass
class Parts:
    """What a checkpoint holds, or is to hold, of some variables.

    Attributes:
        trees: of arrays or `jax.ShapeDtypeStruct`s: "" the value, "optimizer" its state, "pending"
            the sum of the updates that are not written yet.
        about: the version, the write mode, and how many updates are pending; empty where what is
            stored was no `Variables`.
        state: where the optimizer's state is to be put.
    """

    trees: dict[str, Any]
    about: dict[str, Any] = field(default_factory=dict)
    state: Any = None


@runtime_checkable
class Savable(Protocol):
    """`Variables`, as they are saved and restored."""

    number: int
    lock: Any

    def parts(self) -> Parts:
        """What is to be saved. Under the lock."""
        ...

    def wanted_parts(self, stored: set[str], about: dict[str, Any], partial: bool) -> Parts:
        """What is to be restored, of the parts that are stored."""
        ...

    def put_parts(self, wanted: Parts, restored: dict[str, list[Any]]) -> None:
        """Takes leaves, of which those are None that were not stored. Under the lock."""
        ...


# ---- saving --------------------------------------------------------------------------------------


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
                _raise_together(self._company, f"saving {self._path}", self._error)
            elif self._error is not None:
                raise self._error

    def _run(self, finish: Callable[[], None]) -> None:
        try:
            finish()
        except Exception as error:
            self._error = _unwritten(self._path, error)

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


def _join_all() -> None:
    for saving in list(_unfinished):
        if saving._thread is not None:
            saving._thread.join()


@functools.cache
def _finish_before_exit() -> None:
    """Has the process write before it ends: orbax needs threads, which Python refuses soon."""
    _process_hooks.before_threads_end(_join_all)


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
            waits for this one, and so does the end of the process.
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
    root = _path(directory)
    tree, about = _collected(items, copied=asynchronous)
    number = _step_number(items) if keep is not None else 0
    if keep is not None and (isinstance(keep, bool) or operator.index(keep) < 1):
        raise VariablesError(
            "keep is a number of checkpoints", expected="at least 1", got=f"{keep}"
        )
    company = current_company() or _Everybody()
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
    new = Path(_of_leader(company, root, prepare))
    _writing.acquire()
    try:
        checkpointer = company.guarded(lambda: _write(new, tree, about))
    except BaseException as error:
        _writing.release()
        if staging is not None:
            staging.close()
        if isinstance(error, StepCacheError) or not isinstance(error, Exception):
            raise
        raise _unwritten(root, error) from error

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


def _unwritten(path: Path, error: Exception) -> Exception:
    if isinstance(error, StepCacheError):
        return error
    wrapped = VariablesError(
        "the checkpoint could not be written", where=str(path), got=first_line(error)
    )
    wrapped.__cause__ = error
    return wrapped


def _step_number(items: dict[str, Any]) -> int:
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
    _check_names(items)
    versions: dict[str, Any] = {}
    leaves: list[Leaf] = []
    with _locked(items):
        for name, item in items.items():
            if not isinstance(item, Savable):
                leaves += leaves_of(name, item)
                continue
            parts = item.parts()
            versions[name] = parts.about
            for part, tree in parts.trees.items():
                leaves += leaves_of(_joined_part(name, part), tree)
    values, special = {}, []
    for leaf in leaves:
        value, kind = storable(leaf, copied=copied), kind_of(leaf)
        if 0 not in kind.shape:
            values[leaf.name] = value
        if 0 in kind.shape or is_key(leaf.value):  # Orbax stores no empty arrays.
            special.append([list(leaf.name), kind.dtype, list(kind.shape)])
    about = {"variables": versions, "leaves": special}
    return nested(values or {_NOTHING: np.zeros(1)}), {"stepcache": about}


def _joined_part(name: str, part: str) -> str:
    return f"{name}:{part}" if part else name


def _check_names(items: dict[str, Any]) -> None:
    for name in items:
        if not name.isidentifier():
            raise VariablesError("items of a checkpoint are named as arguments are", got=repr(name))
    if not items:
        raise VariablesError("nothing is named", expected="params=..., step=... and the like")


@contextlib.contextmanager
def _locked(items: dict[str, Any]) -> Iterator[None]:
    """Locks all variables, in the order in which steps lock them."""
    variables = {id(item): item for item in items.values() if isinstance(item, Savable)}
    with contextlib.ExitStack() as stack:
        for each in sorted(variables.values(), key=lambda each: each.number):
            stack.enter_context(each.lock)
        yield


# ---- restoring -----------------------------------------------------------------------------------


def restore(directory: str | os.PathLike, *, partial: bool = False, **items: Any) -> dict[str, Any]:
    """Reads a checkpoint: what `save` wrote, or orbax's `StandardCheckpointer`.

        step = sc.restore("saves", params=params, moments=moments, step=0)["step"]

    Leaves are found by their paths, whatever the order in which they were saved, and go to where
    the variables or templates live now, whatever mesh they were saved on. Variables change only
    when all has been read. In a pod all processes call it, inside the session.

    Args:
        directory: where the checkpoint is; of numbered ones (`keep=`), the directory above them:
            the one of the highest step is taken.
        partial: restore what is asked for and stored. What is stored and not asked for is ignored;
            what is not stored stays as it is, and a line in the log of "stepcache" names it.
        **items: what to restore, by name. `Variables` are restored in place; their versions never
            go back. Trees of arrays or `jax.ShapeDtypeStruct`s, and numbers, are templates: they
            say which leaves there are, of what shapes, dtypes and shardings.

    Returns:
        The restored values by name; for `Variables` the same objects.

    Raises:
        VariablesError: `directory` is a URL, there is no checkpoint or a damaged one, or a leaf is
            missing, new, or of another shape or dtype.
        RankLostError: a process of the pod has gone.
    """
    check_not_tracing("nothing can be restored", "restore")
    _join_all()
    root = _path(directory)
    _check_names(items)
    company = current_company() or _Everybody()
    found = Path(_of_leader(company, root, lambda: str(_found(root))))
    return company.guarded(lambda: _restore(found, items, partial))


def _found(root: Path) -> Path:
    with _damage(root):
        files.recover(root)
        found = files.newest_whole(root)
    if found is None:
        raise VariablesError(
            "there is no checkpoint to restore",
            where=str(root),
            expected="a directory that stepcache.save or orbax's StandardCheckpointer wrote",
            got=files.described(root),
        )
    return found


def _restore(path: Path, items: dict[str, Any], partial: bool) -> dict[str, Any]:
    import orbax.checkpoint as ocp

    with ocp.Checkpointer(ocp.PyTreeCheckpointHandler()) as checkpointer:
        with _damage(path):
            stored = _Stored(path, checkpointer.metadata(path), set(items))
        wanted = {
            name: item.wanted_parts(stored.parts_of(name), stored.versions.get(name, {}), partial)
            for name, item in items.items()
            if isinstance(item, Savable)
        }
        trees = {
            (name, part): tree
            for name, item in items.items()
            for part, tree in (wanted[name].trees if name in wanted else {"": item}).items()
        }
        leaves = {at: leaves_of(_joined_part(*at), tree) for at, tree in trees.items()}
        for (name, part), each in leaves.items():
            if part == "pending":  # Updates for an optimizer may be of other types than the value.
                leaves[name, part] = [stored.typed(leaf) for leaf in each]
        every = [leaf for each in leaves.values() for leaf in each]
        _check_same(path, stored, every, partial)
        with _damage(path):
            read = stored.read(checkpointer, every)
    for name, parts in wanted.items():
        parts.about = stored.versions.get(name, {})
    restored = dict(items)
    for name, item in items.items():
        if not isinstance(item, Savable):
            mine = [read.get(leaf.name, leaf.value) for leaf in leaves[name, ""]]
            restored[name] = jax.tree_util.tree_structure(item).unflatten(mine)
    with _locked(items):
        for name, parts in wanted.items():
            got = {
                part: [read.get(leaf.name) for leaf in leaves[name, part]] for part in parts.trees
            }
            items[name].put_parts(parts, got)
    return restored


class _Stored:
    """What a checkpoint holds.

    Args:
        path: its directory.
        metadata: orbax's.
        asked: the names of the items to restore.

    Attributes:
        kinds: what the leaves are, by name.
        versions: what was stored about variables.
    """

    def __init__(self, path: Path, metadata: Any, asked: set[str]):
        self._path = path
        flat, self._structure = jax.tree_util.tree_flatten_with_path(metadata.item_metadata.tree)
        about = files.custom_metadata(path)
        ours = about.get("stepcache", {})
        self.versions: dict[str, Any] = ours.get("variables", {})
        plain = [
            tuple(jax.tree_util.keystr((key,), simple=True) for key in keys) for keys, _ in flat
        ]
        if "stepcache" in about:
            self._names: list[Name] = plain
        elif files.is_ours(about):
            self._names = [_name_by_number(name[0], about["leaves"]) for name in plain]
            self.versions = {"value": {"version": about["version"], "mode": "apply", "pending": 0}}
        else:
            # Orbax's user has saved one tree without a name: it is what `Variables.restore` wants.
            alone = asked == {"value"} and all(name[:1] != ("value",) for name in plain)
            prefix = ("value",) if alone else ()
            self._names = [(*prefix, *map(escape, name)) for name in plain]
        rows = zip(self._names, flat, strict=True)
        self.kinds = {name: Kind(np.dtype(x.dtype).name, tuple(x.shape)) for name, (_, x) in rows}
        self.kinds.pop(_NOTHING, None)
        for name, dtype, shape in ours.get("leaves", ()):
            self.kinds[tuple(name)] = Kind(dtype, tuple(shape))

    def parts_of(self, item: str) -> set[str]:
        """Which parts of some variables have leaves here."""
        heads = {name[0].partition(":") for name in self.kinds}
        return {part for head, _, part in heads if head == item}

    def typed(self, leaf: Leaf) -> Leaf:
        """A leaf that is to be read in the type in which it was stored."""
        if leaf.name not in self.kinds:
            return leaf
        shape, sharding = leaf.value.shape, leaf.value.sharding
        dtype = np.dtype(self.kinds[leaf.name].dtype)
        return leaf._replace(value=jax.ShapeDtypeStruct(shape, dtype, sharding=sharding))

    def read(self, checkpointer: Any, leaves: list[Leaf]) -> dict[Name, Any]:
        """Reads the leaves that are here, each to where its template lives."""
        import orbax.checkpoint as ocp

        by_name = {leaf.name: leaf.value for leaf in leaves}
        targets, ways = [], []
        for name in self._names:
            where = sharding_for(by_name[name]) if name in by_name else None
            targets.append(np.zeros(()) if name in by_name else ...)
            ways.append(
                ocp.ArrayRestoreArgs(sharding=where)
                if where is not None
                else ocp.RestoreArgs(restore_type=np.ndarray)
            )
        read = {}
        if any(target is not ... for target in targets):
            args = ocp.args.PyTreeRestore(
                item=self._structure.unflatten(targets),
                restore_args=self._structure.unflatten(ways),
            )
            tree = checkpointer.restore(self._path, args=args)
            read = dict(zip(self._names, self._structure.flatten_up_to(tree), strict=True))
        return {
            name: like(value, read[name] if name in read else empty_like(value))
            for name, value in by_name.items()
            if name in self.kinds
        }


def _name_by_number(number: str, rows: list[Any]) -> Name:
    """The name of a leaf in the first format, which numbered leaves and listed their paths."""
    if not number.isdecimal():
        return _NOTHING
    path = rows[int(number)][0]
    of_state = path.startswith("optimizer state/")
    path = path.removeprefix("optimizer state/")
    item = "value:optimizer" if of_state else "value"
    return (item, *path.split("/")) if path else (item,)


def _check_same(path: Path, stored: _Stored, leaves: list[Leaf], partial: bool) -> None:
    names = {leaf.name for leaf in leaves}
    absent = [leaf for leaf in leaves if leaf.name not in stored.kinds]
    more = [name for name in stored.kinds if name not in names]
    for leaf in leaves:
        kind = stored.kinds.get(leaf.name)
        if kind is not None and not compatible(kind, leaf):
            raise _another(path, leaf.path, f"{kind_of(leaf)}", f"{kind}")
    if partial:
        if absent:
            text = "%s has no leaves %s: they stay as they are"
            _log.warning(text, path, listed([leaf.path for leaf in absent]))
        return
    hint = "restore(..., partial=True) restores what both have"
    if absent:
        raise _another(path, absent[0].path, f"{kind_of(absent[0])}", "no such leaf", hint)
    if more:
        raise _another(path, "/".join(more[0]), "no such leaf", f"{stored.kinds[more[0]]}", hint)


def _another(
    path: Path, where: str, expected: str, got: str, hint: str | None = None
) -> VariablesError:
    what = f"another value was stored in {path}"
    return VariablesError(what, where=where, expected=expected, got=got, hint=hint)


@contextlib.contextmanager
def _damage(path: Path) -> Iterator[None]:
    try:
        yield
    except StepCacheError:
        raise
    except Exception as error:
        raise VariablesError(
            "there is nothing that can be restored",
            where=str(path),
            expected="a whole checkpoint that stepcache.save or orbax's StandardCheckpointer wrote",
            got=first_line(error),
        ) from error


# ---- pods ----------------------------------------------------------------------------------------


class _Everybody:
    """All processes of JAX's pod, outside of sessions: a loss is noticed by JAX's heartbeats."""

    _exchanges = itertools.count()

    def guarded(self, work: Callable[[], Any]) -> Any:
        return work()

    def wait_for_all(self, label: str, said: bytes = b"") -> dict[int, bytes]:
        service = coordination.service()
        if jax.process_count() == 1 or service is None:
            return {jax.process_index(): said}
        place = f"stepcache/checkpoints/{next(self._exchanges)}"
        service.put(f"{place}/{jax.process_index()}", said)
        heard = {}
        for rank in range(jax.process_count()):
            while rank not in heard:
                answer = service.get(f"{place}/{rank}", 1.0)
                heard |= {} if answer is None else {rank: answer}
        return heard


def _of_leader(company: Company, path: Path, work: Callable[[], str]) -> str:
    """Has the first process do something, and returns or raises on all what came of it."""
    error, text = None, ""
    if jax.process_index() == 0:
        try:
            text = work()
        except Exception as raised:
            error = _unwritten(path, raised)
    said = json.dumps([error is not None, str(error) if error else text]).encode()
    failed, text = json.loads(company.wait_for_all(f"the checkpoint {path}", said)[0])
    if error is not None:
        raise error
    if failed:
        raise VariablesError(text)
    return text


def _raise_together(company: Company, label: str, error: BaseException | None) -> None:
    heard = company.wait_for_all(label, str(error or "").encode())
    if error is not None:
        raise error
    for rank, text in heard.items():
        if text:
            raise VariablesError(f"rank {rank}: {text.decode()}")


def _path(directory: str | os.PathLike) -> Path:
    refuse_url(directory, VariablesError, "directory")
    return Path(directory).expanduser().resolve()
