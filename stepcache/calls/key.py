"""`Key`: the named parts that decide, in one process, which program a call needs.

Outside a process, the digest of the lowered module takes its place.
"""

from __future__ import annotations

import functools
import itertools
import threading
import weakref
from collections.abc import Callable, Hashable
from dataclasses import dataclass, field
from typing import NamedTuple

from stepcache.calls.signature import Signature, shorten
from stepcache.events import Change

_lock = threading.Lock()
_numbers = itertools.count(1)
_known: dict[int, tuple[weakref.ref, Identity]] = {}


class Identity(NamedTuple):
    """The identity of a function in this process. Never equal for two functions alive at once.

    Two steps over one function object have the same one, and share their programs.
    """

    number: int  # Unique in this process.
    shared: bool = True  # Whether all steps over the function have this identity.


def identity(fun: Callable) -> Identity:
    """The identity of `fun`. A callable that has no weak references gets a new one each time."""
    with _lock:
        reference, known = _known.get(id(fun), (None, None))
        if known is not None and reference is not None and reference() is fun:
            return known
        made = Identity(next(_numbers))
        try:
            reference = weakref.ref(fun, functools.partial(_known.pop, id(fun)))
        except TypeError:
            return Identity(made.number, shared=False)
        _known[id(fun)] = (reference, made)
        return made


@dataclass(slots=True)  # Not frozen, which would take twice as long to make.
class Key:
    """Everything that decides which program a call needs. Equal keys need the same program."""

    identity: Identity  # Which function the step is.
    signature: Signature  # What the call looks like, after placement.
    mesh: tuple  # The identity of the session's mesh; empty without one.
    # The step's options by name, such as donated arguments and compiler options.
    options: tuple[tuple[str, Hashable], ...]
    # Settings of JAX that change a trace or a compilation, by name.
    environment: tuple[tuple[str, Hashable], ...]
    _hash: int = field(init=False, compare=False, repr=False, default=0)

    def __post_init__(self):
        parts = (self.identity, self.signature, self.mesh, self.options, self.environment)
        self._hash = hash(parts)

    def __hash__(self) -> int:
        return self._hash


def diff_settings(before: Key, after: Key) -> tuple[Change, ...]:
    """Where two keys differ apart from their signatures."""
    changes = []
    if before.mesh != after.mesh:
        old, new = _mesh_sides(before.mesh, after.mesh)
        changes.append(Change("mesh", "mesh", old, new))
    for part, name in (("options", "options"), ("config", "environment")):
        olds, news = dict(getattr(before, name)), dict(getattr(after, name))
        for setting in dict.fromkeys((*olds, *news)):
            old, new = olds.get(setting), news.get(setting)
            if old != new:
                changes.append(Change(part, setting, shorten(str(old)), shorten(str(new))))
    return tuple(changes)


def _mesh_sides(before: tuple, after: tuple) -> tuple[str, str]:
    index = next((i for i, (x, y) in enumerate(zip(before, after, strict=False)) if x != y), 0)

    def text_of(mesh: tuple) -> str:
        return shorten(str(mesh[index] if index else dict(mesh[0]))) if mesh else "none"

    return text_of(before), text_of(after)
