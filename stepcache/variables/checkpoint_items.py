"""What a checkpoint holds: pytrees, numbers and `Variables`, leaf by leaf.

A leaf is stored below its item under the keys of its path, as text: `params/layers/0/w`. Variables
with an optimizer are two trees: `params` is the value, `params:optimizer` the optimizer's state.
"""

from __future__ import annotations

import re
from collections.abc import Collection
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.tree_util import keystr

from stepcache.errors import VariablesError
from stepcache.pods.global_arrays import is_key
from stepcache.sharding import current_reader
from stepcache.variables.describing import check_array
from stepcache.variables.masters import Master
from stepcache.variables.variables import Variables


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
        value: Any = self.value
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

    Raises:
        VariablesError: there are none, or two would be one in the checkpoint.
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


def saved_trees(name: str, variables: Variables) -> dict[str, Any]:
    """The trees of variables that are saved. Under their lock."""
    master, updates, trees = variables._master, variables._updates, {name: variables.value}
    updates.check_none_pending()
    if variables.write.mode == "apply" and not master.applies_updates:
        with variables._moving() as meter:
            state = updates.state = updates.ready_state(master, meter)
            state.check_not_lost(variables.name)
            trees[f"{name}:optimizer"] = state.layout.tree.unflatten(state.leaves(meter))
    return trees


def masters_to_restore(
    name: str, variables: Variables, stored: Collection[str], partial: bool
) -> dict[str, Master]:
    """What describes each tree that is restored to some variables, by its name in the checkpoint.

    Args:
        name, variables: of the item.
        stored: the names of the trees in the checkpoint.
        partial: whether to do without an optimizer's state that is not stored.
    """
    master, state = variables._master, f"{name}:optimizer"
    masters, is_asked = {name: master}, state in stored or not partial
    if is_asked and variables.write.mode == "apply" and not master.applies_updates:
        with variables._lock, variables._moving() as meter:
            masters[state] = variables._updates.ready_state(master, meter)
    return masters


def put_trees(
    name: str, variables: Variables, read: dict[str, tuple[Master, list]], version: int
) -> None:
    """Writes trees that were read: to each its master, and its leaves; None for those not stored.

    Those stay as they are. The version is the one that was stored, or higher. Under the lock.
    """
    (master, leaves), updates = read[name], variables._updates

    def completed(part: str) -> Any:
        whose, stored = read[part]
        if any(leaf is None for leaf in stored):
            pairs = zip(stored, whose.leaves(meter), strict=True)
            return [now if leaf is None else leaf for leaf, now in pairs]
        return stored

    for slot, leaf in zip(master.layout.slots, leaves, strict=True):
        if leaf is not None:  # The processes of a pod need not compare what they made it of.
            variables._made_of.pop(slot.path, None)
    with variables._moving() as meter:
        if not leaves or any(leaf is not None for leaf in leaves):
            master.version = max(master.version, version - 1)
            master.assign(completed(name), current_reader(), meter)
            updates.resume(None, 0)
        if (state := f"{name}:optimizer") in read:
            tree = read[state][0].layout.tree.unflatten(completed(state))
            updates.state = updates.held_state(tree, master, meter)
