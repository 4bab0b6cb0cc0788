"""What a checkpoint may hold: `Variables` in parts, pytrees and numbers, leaf by leaf.

A leaf is stored below its item under the keys of its path, as text: `params/layers/0/w`. Text that
orbax cannot store is percent-encoded, and so are keys that differ by more than their text.
"""

from __future__ import annotations

import collections
import contextlib
from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.tree_util import keystr

from stepcache.errors import VariablesError
from stepcache.sharding import current_reader
from stepcache.variables.describing import abstract, joined
from stepcache.variables.masters import Master
from stepcache.variables.packing import is_key_type
from stepcache.variables.policy import Write
from stepcache.variables.transfer import Meter
from stepcache.variables.updates import Updates

Name = tuple[str, ...]
NOTHING: Name = ("%nothing",)
"""The name of what is stored in a checkpoint without leaves: orbax stores no empty trees."""


class Savable:
    """The half of `Variables` that checkpoints use."""

    name: str
    write: Write
    value: Any
    _number: int
    _lock: Any
    _master: Master
    _updates: Updates
    _made_of: dict[str, str]
    _moving: Callable[..., contextlib.AbstractContextManager[Meter]]

    def _parts(self) -> tuple[dict[str, Any], dict[str, Any]]:
        """Trees to save ("" the value, "optimizer" its state, "pending" the updates that are), and
        what is saved about them. Under the lock.
        """
        master, updates = self._master, self._updates
        trees = {"": self.value}
        if (state := updates.state) is not None:
            state.check_not_lost(self.name)
            with self._moving("save") as meter:
                trees["optimizer"] = state.layout.tree.unflatten(state.leaves(meter))
        if (pending := updates.pending_leaves) is not None:
            trees["pending"] = master.layout.tree.unflatten(pending)
        about = {"version": master.version, "mode": self.write.mode, "pending": updates.pending}
        return trees, about

    def _wanted_parts(
        self, stored: set[str], about: dict[str, Any], partial: bool
    ) -> tuple[dict[str, Any], Master | None]:
        """Templates of the trees to restore, of those stored, and the state to write over."""
        wanted = {"": self._master.templates()}
        is_same_mode = about.get("mode") == self.write.mode
        if "pending" in stored and is_same_mode:
            wanted["pending"] = self._master.templates()
        # A checkpoint from before the first push has no state.
        has_state = "optimizer" in stored or not (is_same_mode or partial)
        has_state = has_state and self.write.mode == "apply" and not self._master.applies_updates
        state = self._updates.state if has_state else None
        written = (self._master,) if state is None else (self._master, state)
        with self._lock, self._moving("restore", *written) as meter:
            if has_state:
                state = self._updates.ready_state(self._master, meter)
                wanted["optimizer"] = state.templates()
        return wanted, state

    def _check_parts(self, restored: dict[str, list[Any]], state: Master | None) -> None:
        """Raises `VariablesError` if leaves are to stay that are lost. Under the lock."""
        for part, master in (("", self._master), ("optimizer", state)):
            stay = [leaf is None for leaf in restored.get(part, ())]
            if master is not None and any(stay) and (part or not all(stay)):
                master.check_not_lost(self.name)

    def _put_parts(
        self, restored: dict[str, list[Any]], state: Master | None, about: dict[str, Any]
    ) -> None:
        """Takes the leaves that were restored, or None for those that stay. Under the lock."""
        reader, leaves = current_reader(), restored[""]
        for slot, leaf in zip(self._master.layout.slots, leaves, strict=True):
            if leaf is not None:
                self._made_of.pop(slot.path, None)
        with self._moving("restore") as meter:
            if not leaves or any(leaf is not None for leaf in leaves):
                self._master.version = max(self._master.version, about.get("version", 0) - 1)
                self._master.assign(_filled(leaves, self._master, meter), reader, meter)
            if state is not None:
                own = _filled(restored["optimizer"], state, meter)
                self._updates.state = self._updates.held_state(
                    state.layout.tree.unflatten(own), self._master, meter
                )
            elif about.get("mode") == "apply":
                self._updates.state = None
        if about:
            pending = restored.get("pending")
            if pending is not None:  # No update is pending for leaves that were not stored.
                pairs = zip(pending, self._master.layout.slots, strict=True)
                pending = [np.zeros(s.shape, s.dtype) if x is None else x for x, s in pairs]
            self._updates.resume(pending, about["pending"])


def _filled(leaves: list[Any], master: Master, meter: Meter) -> list[Any]:
    """Leaves, with the current ones in the place of None."""
    if all(leaf is not None for leaf in leaves):
        return leaves
    pairs = zip(leaves, master.leaves(meter), strict=True)
    return [now if leaf is None else leaf for leaf, now in pairs]


def joined_part(name: str, part: str) -> str:
    return f"{name}:{part}" if part else name


def check_names(items: dict[str, Any]) -> None:
    for name in items:
        if not name.isidentifier():
            what = "the name of an item is not a Python identifier"
            raise VariablesError(what, expected="a name such as params", got=repr(name))
    if not items:
        raise VariablesError("there are no items", expected="params=..., step=... and the like")


@contextlib.contextmanager
def locked(items: Iterable[Any]) -> Iterator[None]:
    """Locks the variables among some items, in one order everywhere: two threads never wait for
    each other. An interrupt while it waits for one lets go of the others.
    """
    variables = {item for item in items if isinstance(item, Savable)}
    with contextlib.ExitStack() as stack:
        for each in sorted(variables, key=lambda each: each._number):
            stack.enter_context(each._lock)
        yield


class Leaf(NamedTuple):
    """A leaf of an item: an array, a number, or a `jax.ShapeDtypeStruct`."""

    name: Name
    path: str  # The same in messages.
    value: Any


def escape(text: str) -> str:
    """A key as it is stored: one that is empty or has a `/` would not come back."""
    return text.replace("%", "%25").replace("/", "%2F") or "%"


def leaves_of(item: str, tree: Any) -> list[Leaf]:
    """The leaves of an item. Equal paths get equal names, whatever the order of the leaves."""
    flat, _ = jax.tree_util.tree_flatten_with_path(tree)
    siblings = collections.defaultdict(set)
    for keys, _ in flat:
        for depth, key in enumerate(keys):
            siblings[keys[:depth], key_text(key)].add(key)
    names = []
    for keys, _ in flat:
        parts = [item]
        for depth, key in enumerate(keys):
            text = escape(key_text(key))
            if len(siblings[keys[:depth], key_text(key)]) > 1:  # Such as 1 and "1".
                kind = type(getattr(key, "key", key)).__name__
                text += "" if kind == "str" else f"%{kind}"
            parts.append(text)
        names.append(tuple(parts))
    counts = collections.Counter(map(".".join, names))  # orbax joins keys by dots.
    leaves, taken = [], set()
    for name, (keys, value) in zip(names, flat, strict=True):
        if counts[".".join(name)] > 1:
            name = tuple(part.replace(".", "%2E") for part in name)
        while name in taken:  # A node of a user's class that gives two children one key.
            name = (*name[:-1], f"{name[-1]}%again")
        taken.add(name)
        path = joined(item, keystr(keys, simple=True, separator="/"))
        leaves.append(Leaf(name, path, value))
    return leaves


def key_text(key: Any) -> str:
    """A key of a path as text."""
    return keystr((key,), simple=True)


def is_key(value: Any) -> bool:
    """Whether this is an array of random keys, or a template for one."""
    dtype = getattr(value, "dtype", None)
    return dtype is not None and is_key_type(dtype)


def is_number(value: Any) -> bool:
    return isinstance(value, bool | int | float | complex) and not isinstance(value, np.generic)


class Kind(NamedTuple):
    """The name of a leaf's dtype, and its shape."""

    dtype: str
    shape: tuple[int, ...]

    def __str__(self) -> str:
        return f"{self.dtype}{list(self.shape)}"


def kind_of(leaf: Leaf) -> Kind:
    """Dtype and shape of a leaf. Raises `VariablesError` if it is no array and no number."""
    value: Any = leaf.value
    if is_number(value) and (number := np.asarray(value)).dtype != object:  # One of 64 bits.
        return Kind(number.dtype.name, ())
    if isinstance(value, jax.ShapeDtypeStruct) or abstract(value) is not None:
        return Kind(getattr(value.dtype, "name", str(value.dtype)), tuple(value.shape))
    what = "a leaf of a checkpoint is not an array"
    expected = "a jax.Array, a numpy array, or a number of at most 64 bits"
    got = f"{value!r} of type {type(value).__name__}"[:100]
    hint = "remove leaves that are not arrays from the tree"
    raise VariablesError(what, where=leaf.path, expected=expected, got=got, hint=hint)
