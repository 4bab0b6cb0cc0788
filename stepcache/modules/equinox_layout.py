"""Takes equinox modules apart, and builds them, in loops that run in C.

JAX calls Python code of each module's class for both. Here all modules of one depth are opened at
once, and everything in them but arrays is compared, by identity, with what an earlier module had.
"""

from __future__ import annotations

import dataclasses
from collections import deque
from collections.abc import Callable, Sequence
from itertools import repeat
from operator import attrgetter, getitem, is_, itemgetter
from typing import Any

import equinox as eqx
import jax

_CONTAINERS = (list, tuple, dict)
_PLAIN = (*_CONTAINERS, type(None))
_NODES_PER_LEVEL = 4
"""With fewer, on average, JAX's own way is faster."""
_DICT = repeat("__dict__")  # By equinox's own `__getattribute__` it takes six times as long.


def opener(module: Any, leaves: list[Any], tree: Any) -> Callable[[Any], list[Any] | None] | None:
    """What opens modules that are like one, or None.

    It returns the arrays of a module in the order of JAX. It returns None for a module that has
    arrays of other types or in other places, or another object in the place of anything else.

    Args:
        module: the one.
        leaves: of the module.
        tree: its tree structure.
    """
    levels = _levels(tree)
    if levels is None:
        return None
    made = _Opener(levels, leaves)
    arrays = made(module)
    expected = list(filter(eqx.is_array, leaves))
    return made if arrays is not None and _are_same(arrays, expected) else None


def builder(tree: Any, statics: dict[int, Any]) -> Callable[[Sequence[Any]], Any] | None:
    """What builds a module of its arrays as JAX does, or None.

    Args:
        tree: the tree structure.
        statics: number and value of each leaf that is no array.
    """
    levels = _levels(tree)
    if levels is None:
        return None
    made = _Builder(levels, statics)
    arrays = [object() for _ in range(tree.num_leaves - len(statics))]
    leaves, as_built = jax.tree.flatten(made(arrays))
    found = [leaf for number, leaf in enumerate(leaves) if number not in statics]
    return made if as_built == tree and _are_same(found, arrays) else None


class _Node:
    """One object in a module whose leaves are their numbers.

    Attributes:
        content: of a module or a container, by name, key or number.
        is_leaf: the value is a number. What is neither a leaf, a module nor a container is part of
            the tree structure: None, or a static field.
    """

    def __init__(self, value: Any, is_fixed: bool = False):
        self.value, self.content = value, dict[Any, _Node]()
        self.is_module = self.is_container = self.is_leaf = False
        if is_fixed or value is None:
            return
        if isinstance(value, eqx.Module):
            self.is_module = True
            dynamic = {
                each.name
                for each in dataclasses.fields(value)  # pyright: ignore[reportArgumentType]
                if not each.metadata.get("static", False)
            }
            for name, each in vars(value).items():
                self.content[name] = _Node(each, is_fixed=name not in dynamic)
        elif isinstance(value, _CONTAINERS):
            self.is_container = True
            items = value.items() if isinstance(value, dict) else enumerate(value)
            self.content = {key: _Node(each) for key, each in items}
        else:
            self.is_leaf = True


def _levels(tree: Any) -> list[list[_Node]] | None:
    """All objects in a module by depth: first what modules hold, then what containers hold."""
    if not _is_plain(tree):
        return None
    level = [_Node(tree.unflatten(range(tree.num_leaves)))]
    levels = []
    while level:
        levels.append(level)
        level = [each for holder in _holders(level) for each in holder.content.values()]
    return levels if sum(map(len, levels)) >= _NODES_PER_LEVEL * len(levels) else None


def _is_plain(tree: Any) -> bool:
    """Whether a tree consists of modules, and of containers that hold what they show."""
    about, children = tree.node_data(), tree.children()
    if about is not None and about[0] not in _PLAIN and not issubclass(about[0], eqx.Module):
        fields = getattr(about[0], "_fields", None) if issubclass(about[0], tuple) else None
        if fields is None or about[1] is not None or len(fields) != len(children):
            return False
    return all(map(_is_plain, children))


def _holders(level: Sequence[_Node]) -> list[_Node]:
    containers = [node for node in level if node.is_container]
    return [node for node in level if node.is_module] + containers


class _Opener:
    def __init__(self, levels: list[list[_Node]], leaves: list[Any]):
        self._levels = []
        for level in levels:
            holders = _holders(level)
            values = [leaves[node.value] if node.is_leaf else node.value for node in level]
            self._levels.append(
                (
                    list(map(type, values)),
                    _picker([i for i, node in enumerate(level) if node.is_module]),
                    _picker([i for i, node in enumerate(level) if node.is_container]),
                    [len(holder.content) for holder in holders],
                    _picker([i for i, holder in enumerate(holders) for _ in holder.content]),
                    [key for holder in holders for key in holder.content],
                )
            )
        arrays: dict[int, int] = {}
        places, self._fixed = [], []
        for place, node in enumerate(node for level in levels for node in level):
            value = leaves[node.value] if node.is_leaf else node.value
            if node.is_leaf and eqx.is_array(value):
                arrays[node.value] = place
            elif not (node.is_module or node.is_container):
                places.append(place)
                self._fixed.append(value)
        self._arrays_in = _picker([arrays[number] for number in sorted(arrays)])
        self._fixed_in = _picker(places)

    def __call__(self, module: Any) -> list[Any] | None:
        nodes, found = [module], []
        try:
            for types, modules, containers, lengths, owners, keys in self._levels:
                if list(map(type, nodes)) != types:
                    return None
                found += nodes
                attributes = map(object.__getattribute__, modules(nodes), _DICT)
                holders = [*attributes, *containers(nodes)]
                if list(map(len, holders)) != lengths:
                    return None
                nodes = list(map(getitem, owners(holders), keys))
        except KeyError:
            return None
        if not all(map(is_, self._fixed_in(found), self._fixed)):
            return None
        return list(self._arrays_in(found))


class _Builder:
    """Calls `object.__new__` and `object.__setattr__`, as equinox does."""

    def __init__(self, levels: list[list[_Node]], statics: dict[int, Any]):
        nodes = [node for level in levels for node in level]
        leaves = sorted((node for node in nodes if node.is_leaf), key=attrgetter("value"))
        arrays = [node for node in leaves if node.value not in statics]
        fixed = [node for node in leaves if node.value in statics]
        self._fixed = [statics[node.value] for node in fixed]
        others = [
            node for node in nodes if not (node.is_leaf or node.is_module or node.is_container)
        ]
        self._fixed += [node.value for node in others]
        modules = [node for node in nodes if node.is_module]
        self._classes = [type(node.value) for node in modules]
        containers = [
            node for node in reversed(nodes) if node.is_container
        ]  # The inner ones first.
        made = [*arrays, *fixed, *others, *modules, *containers]
        places = {id(node): place for place, node in enumerate(made)}

        def members(node: _Node) -> list[int]:
            return [places[id(each)] for each in node.content.values()]

        self._containers = [(_maker(node), _picker(members(node))) for node in containers]
        self._owners = _picker([places[id(node)] for node in modules for _ in node.content])
        self._names = [name for node in modules for name in node.content]
        self._contents = _picker([place for node in modules for place in members(node)])
        self._root = places[id(nodes[0])]

    def __call__(self, arrays: Sequence[Any]) -> Any:
        made = [*arrays, *self._fixed, *map(object.__new__, self._classes)]
        for make, members in self._containers:
            made.append(make(members(made)))
        owners, contents = self._owners(made), self._contents(made)
        deque(map(object.__setattr__, owners, self._names, contents), maxlen=0)
        return made[self._root]


def _maker(node: _Node) -> Callable[[Sequence[Any]], Any]:
    kind, keys = type(node.value), list(node.content)
    if kind is dict:
        return lambda values: dict(zip(keys, values, strict=True))
    return kind if kind in _CONTAINERS else lambda values: kind(*values)  # A named tuple.


def _picker(places: Sequence[int]) -> Callable[[Sequence[Any]], Sequence[Any]]:
    if len(places) > 1:
        return itemgetter(*places)
    return lambda values: [values[place] for place in places]


def _are_same(first: Sequence[Any], second: Sequence[Any]) -> bool:
    return len(first) == len(second) and all(map(is_, first, second))
