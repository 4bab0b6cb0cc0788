"""Items of a checkpoint: what may be one, and how the processes of a pod treat them together."""

from __future__ import annotations

import contextlib
import itertools
import json
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

import jax

from stepcache.errors import StepCacheError, VariablesError, first_line, refuse_url
from stepcache.jaxcompat import coordination
from stepcache.sharding import Company
from stepcache.variables.checkpoint_tree import Name

NOTHING: Name = ("%nothing",)
"""What is stored in a checkpoint without leaves: orbax stores no empty trees."""


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

    _number: int
    _lock: Any

    def _parts(self) -> Parts:
        """What is to be saved. Under the lock."""
        ...

    def _wanted_parts(self, stored: set[str], about: dict[str, Any], partial: bool) -> Parts:
        """What is to be restored, of the parts that are stored."""
        ...

    def _put_parts(self, wanted: Parts, restored: dict[str, list[Any]]) -> None:
        """Takes leaves, of which those are None that were not stored. Under the lock."""
        ...


def joined_part(name: str, part: str) -> str:
    return f"{name}:{part}" if part else name


def check_names(items: dict[str, Any]) -> None:
    for name in items:
        if not name.isidentifier():
            raise VariablesError("items of a checkpoint are named as arguments are", got=repr(name))
    if not items:
        raise VariablesError("nothing is named", expected="params=..., step=... and the like")


@contextlib.contextmanager
def locked(items: dict[str, Any]) -> Iterator[None]:
    """Locks all variables, in the order in which steps lock them."""
    variables = {id(item): item for item in items.values() if isinstance(item, Savable)}
    with contextlib.ExitStack() as stack:
        for each in sorted(variables.values(), key=lambda each: each._number):
            stack.enter_context(each._lock)
        yield


def path_of(directory: str | os.PathLike) -> Path:
    refuse_url(directory, VariablesError, "directory")
    return Path(directory).expanduser().resolve()


def unwritten(path: Path, error: Exception) -> Exception:
    if isinstance(error, StepCacheError):
        return error
    wrapped = VariablesError(
        "the checkpoint could not be written", where=str(path), got=first_line(error)
    )
    wrapped.__cause__ = error
    return wrapped


# ---- pods ----


class Everybody:
    """All processes of JAX's pod, outside of sessions: a loss is noticed by JAX's heartbeats."""

    _exchanges = itertools.count()

    def guarded(self, work: Callable[[], Any]) -> Any:
        return work()

    def wait_for_all(self, label: str, said: bytes = b"") -> dict[int, bytes]:
        service = coordination.service()
        if jax.process_count() == 1 or service is None:
            return {jax.process_index(): said}
        place = f"stepcache/checkpoints/{next(self._exchanges)}"
        service.say(place, jax.process_index(), jax.process_count(), said, None)
        call = coordination.asked(lambda: service.get(coordination.outcome_of(place)))
        while True:
            with contextlib.suppress(TimeoutError):  # So that signals are heeded.
                return coordination.unpack_outcome(call.result(1.0))["voices"]


def of_leader(company: Company, path: Path, work: Callable[[], str]) -> str:
    """Has the first process do something, and returns or raises on all what came of it."""
    error, text = None, ""
    if jax.process_index() == 0:
        try:
            text = work()
        except Exception as raised:
            error = unwritten(path, raised)
    said = json.dumps([error is not None, str(error) if error else text]).encode()
    failed, text = json.loads(company.wait_for_all(f"the checkpoint {path}", said)[0])
    if error is not None:
        raise error
    if failed:
        raise VariablesError(text)
    return text


def raise_together(company: Company, label: str, error: BaseException | None) -> None:
    heard = company.wait_for_all(label, str(error or "").encode())
    if error is not None:
        raise error
    for rank, text in heard.items():
        if text:
            raise VariablesError(f"rank {rank}: {text.decode()}")
