"""Which function a step is, within one process.

Two steps over one function object share their programs. What a function depends on, for comparison
with other processes, is in `fingerprint/`.
"""

from __future__ import annotations

import functools
import itertools
import threading
import weakref
from collections.abc import Callable
from dataclasses import dataclass

from stepcache.calls.layers import function_name

_lock = threading.Lock()
_numbers = itertools.count(1)
_known: dict[int, tuple[weakref.ref, Identity]] = {}


@dataclass(frozen=True, slots=True)
class Identity:
    """The identity of a function in this process. Never equal for two functions alive at once.

    Attributes:
        name: of the function.
        number: unique in this process.
        shared: whether all steps over the function have this identity.
    """

    name: str
    number: int
    shared: bool = True

    def __str__(self) -> str:
        return f"{self.name}#{self.number}"


def identity(fun: Callable) -> Identity:
    """The identity of `fun`. A callable that has no weak references gets a new one each time."""
    name = f"{getattr(fun, '__module__', None)}.{function_name(fun)}"
    with _lock:
        reference, known = _known.get(id(fun), (None, None))
        if known is not None and reference is not None and reference() is fun:
            return known
        made = Identity(name, next(_numbers))
        try:
            reference = weakref.ref(fun, functools.partial(_forget, id(fun)))
        except TypeError:
            return Identity(name, made.number, shared=False)
        _known[id(fun)] = (reference, made)
        return made


def _forget(key: int, _: weakref.ref) -> None:
    _known.pop(key, None)
