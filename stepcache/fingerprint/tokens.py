"""Tokens: short texts that are equal in two processes where the values are, and only there.

Pure functions of plain values, keys and arrays. Nothing of the user's is called.
"""

from __future__ import annotations

import enum
import hashlib
import random
from collections import deque
from collections.abc import Iterable
from typing import Any

import numpy as np

ATOMS = (type(None), bool, int, float, complex, str, bytes, type(Ellipsis), type(NotImplemented))

_MISSING = object()
_SHOWN = 60
_PLAIN_CONTAINERS = (tuple, list, dict, set, frozenset, deque)
_PLAIN_ITEMS = 512


def atom(value: Any) -> str:
    """The token of a plain value; a long one by its digest."""
    text = repr(value)
    if len(text) > _SHOWN:
        text = f"{text[:24]}… {digest([text])}"
    plain = type(value) in (str, int, float, bool, type(None))
    return text if plain else f"{type(value).__name__} {text}"


def plain_text(value: Any) -> str | None:
    """All of a value that is made of plain values and tuples; None for any other."""
    if type(value) in ATOMS:
        return repr(value)
    if type(value) is not tuple:
        return None
    texts = [plain_text(each) for each in value]
    return None if None in texts else f"({', '.join(texts)})"  # type: ignore[arg-type]


def container_text(value: Any, depth: int = 3) -> str | None:
    """All of a value that is made of plain values and Python's containers; None for any other."""
    kind = type(value)
    if kind in ATOMS:
        return repr(value)
    if kind not in _PLAIN_CONTAINERS or not depth or len(value) > _PLAIN_ITEMS:
        return None
    if kind is dict:
        texts = [container_text(each, depth) for each in value.copy().items()]
    else:
        texts = [container_text(each, depth - 1) for each in list(value)]
    if None in texts:
        return None
    ordered: Any = sorted(texts) if kind in (set, frozenset) else texts  # type: ignore[type-var]
    return f"{kind.__name__}({', '.join(ordered)})"


STATE, OF_ITERATOR = " (state)", " (iterator)"
"""In names of dependencies: the state of a generator of random numbers; a part of an iterator."""


def random_state(value: Any) -> str | None:
    """The state of a generator of random numbers, which says what it will give next, or None."""
    kind = type(value)  # An object may answer for its class by what it does not show.
    if not issubclass(kind, GENERATORS):
        return None
    if any(value is each for each in _OF_THE_PROCESS) or issubclass(kind, random.SystemRandom):
        return "not its own"  # Where a trace draws from it, the recording says so.
    if issubclass(kind, np.random.Generator):
        return _state_text(value.bit_generator.state)
    if issubclass(kind, np.random.BitGenerator):
        return _state_text(value.state)
    if issubclass(kind, np.random.RandomState):
        return _state_text(np.random.RandomState.get_state(value))
    return _state_text(random.Random.getstate(value))


def _state_text(state: Any) -> str:
    if isinstance(state, dict):
        state = tuple(state.items())
    if isinstance(state, tuple):
        return digest(map(_state_text, state))
    return repr(state.tolist() if isinstance(state, np.ndarray) else state)


GENERATORS = (np.random.Generator, np.random.BitGenerator, np.random.RandomState, random.Random)
_OF_THE_PROCESS = (
    getattr(np.random.mtrand, "_rand", _MISSING),
    getattr(random, "_inst", _MISSING),
)


def short(text: str) -> str:
    """A text that is not too long to show."""
    return text if len(text) <= _SHOWN else f"{text[:40]}… {digest([text])}"


def digest(texts: Iterable[str]) -> str:
    """A digest of texts, one after the other."""
    whole = "".join(f"{len(text)} {text}" for text in texts)
    return hashlib.sha256(whole.encode(errors="surrogatepass")).hexdigest()[:16]


def key_text(key: Any) -> str:
    """A key of a dictionary; one that is an object by its type alone."""
    return repr(key) if type(key) in ATOMS else qualified_name(type(key))


def is_special(name: str) -> bool:
    """Whether Python gives a name its meaning; others with two underscores are only private."""
    return name.startswith("__") and name.endswith("__")


def qualified_name(value: Any) -> str:
    """The full name of a class, a function or a member of an enumeration."""
    if issubclass(type(value), enum.Enum):
        return f"{qualified_name(type(value))}.{value.name}"
    module = getattr(value, "__module__", "")
    return f"{module if isinstance(module, str) else ''}.{getattr(value, '__qualname__', '')}"


def attribute_of(value: Any, name: str) -> Any:
    """An attribute as Python finds it; None if the value's own `__getattr__` would be asked."""
    find: Any = type.__getattribute__ if issubclass(type(value), type) else object.__getattribute__
    try:
        return find(value, name)
    except Exception:
        return None
