"""Takes equinox modules apart, and builds them, in loops that run in C.

JAX runs Python code of each module's class for both. Here all modules of one depth are opened at
once, and everything in them but arrays is compared, by identity, with what an earlier module had.
"""

from __future__ import annotations

import dataclasses
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from itertools import chain, repeat
from operator import attrgetter, getitem, is_, itemgetter
from typing import Any

import equinox as eqx
import jax

_CONTAINERS = (list, tuple, dict)
_PLAIN = (*_CONTAINERS, type(None))
_NODES_PER_LEVEL = 4
"""With fewer, on average, JAX's own way is faster."""
_DICT = repeat("__dict__")  # By equinox's own `__getattribute__` it takes six times as long.

Opener = Callable[[Any], list[Any] | None]
Builder = Callable[[Sequence[Any]], Any]


def opener(module: Any, leaves: Sequence[Any], tree: Any) -> Opener | None:
    """What opens modules that are like one, or None.

    It returns the arrays of a module in the order of JAX. It returns None for a module that has
    arrays of other types or in other places, or another object in the place of anything else.
    """
    levels = _levels(tree)
    if levels is None:
        return None
    made = _Opener(levels, leaves)
    arrays = made(module)
    expected = list(filter(eqx.is_array, leaves))
    return made if arrays is not None and _are_same(arrays, expected) else None


def builder(tree: Any, statics: dict[int, Any]) -> Builder | None:
    """What builds a module of its arrays and `statics`, its other leaves by number, or None."""
    levels = _levels(tree)
    if levels is None:
        return None
    made = _Builder(levels, statics)
    arrays = list(range(tree.num_leaves - len(statics)))
    leaves, as_built = jax.tree.flatten(made(arrays))
    found = [leaf for number, leaf in enumerate(leaves) if number not in statics]
    return made if as_built == tree and _are_same(found, arrays) else None


class _Node:
    """An object in a module whose leaves are their numbers.

    Its kind is "module", "container" or "leaf"; or "fixed", as None and static fields are.
    """

    def __init__(self, value: Any, *, is_fixed: bool = False):
        self.value, self.kind = value, "leaf"
        self.content: dict[Any, _Node] = {}  # By name, key or number.
        if is_fixed or value is None:
            self.kind = "fixed"
        elif isinstance(value, eqx.Module):
            self.kind = "module"
        elif isinstance(value, _CONTAINERS):
            self.kind = "container"

    def open(self) -> Iterable[_Node]:
        """Looks for the content, and returns it."""
        value = self.value
        if self.kind == "module":
            fields = dataclasses.fields(value)
            dynamic = {each.name for each in fields if not each.metadata.get("static", False)}
            self.content = {
                name: _Node(each, is_fixed=name not in dynamic)
                for name, each in vars(value).items()
            }
        elif self.kind == "container":
            items = value.items() if isinstance(value, dict) else enumerate(value)
            self.content = {key: _Node(each) for key, each in items}
        return self.content.values()


def _of(kind: str, nodes: Iterable[_Node]) -> list[_Node]:
    return [node for node in nodes if node.kind == kind]


def _holders(level: Sequence[_Node]) -> list[_Node]:
    return _of("module", level) + _of("container", level)


def _levels(tree: Any) -> list[list[_Node]] | None:
    """All objects in a module, by depth; None where only JAX may look for them, or is faster."""
    trees = [tree]
    for each in trees:
        about, children = each.node_data(), each.children()
        if about is not None and not _is_plain(about[0], about[1], len(children)):
            return None
        trees += children
    level = [_Node(tree.unflatten(range(tree.num_leaves)))]
    levels, count = [], 0
    while level:
        levels.append(level)
        count += len(level)
        level = [each for holder in _holders(level) for each in holder.open()]
    return levels if count >= _NODES_PER_LEVEL * len(levels) else None


def _is_plain(kind: type, about: Any, count: int) -> bool:
    """Whether objects are modules, or containers that hold what they show."""
    if kind in _PLAIN or issubclass(kind, eqx.Module):
        return True
    fields = getattr(kind, "_fields", None) if issubclass(kind, tuple) else None
    return about is None and fields is not None and len(fields) == count


class _Opener:
    def __init__(self, levels: Sequence[Sequence[_Node]], leaves: Sequence[Any]):
        def value_of(node: _Node) -> Any:
            return leaves[node.value] if node.kind == "leaf" else node.value

        self._levels = []
        for level in levels:
            kinds, holders = [node.kind for node in level], _holders(level)
            self._levels.append(
                (
                    [type(value_of(node)) for node in level],
                    _picker([i for i, kind in enumerate(kinds) if kind == "module"]),
                    _picker([i for i, kind in enumerate(kinds) if kind == "container"]),
                    [len(holder.content) for holder in holders],
                    _picker([i for i, holder in enumerate(holders) for _ in holder.content]),
                    [key for holder in holders for key in holder.content],
                )
            )
        arrays, fixed = dict[int, int](), dict[int, Any]()
        for place, node in enumerate(chain.from_iterable(levels)):
            if node.kind == "leaf" and eqx.is_array(leaves[node.value]):
                arrays[node.value] = place
            elif node.kind in ("leaf", "fixed"):
                fixed[place] = value_of(node)
        self._arrays_in = _picker([arrays[number] for number in sorted(arrays)])
        self._fixed_in, self._fixed = _picker(list(fixed)), list(fixed.values())

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
    def __init__(self, levels: Sequence[Sequence[_Node]], statics: dict[int, Any]):
        nodes = list(chain.from_iterable(levels))
        leaves = sorted(_of("leaf", nodes), key=attrgetter("value"))
        arrays = [node for node in leaves if node.value not in statics]
        static = [node for node in leaves if node.value in statics]
        fixed, modules = _of("fixed", nodes), _of("module", nodes)
        containers = _of("container", reversed(nodes))  # The inner ones first.
        order = [*arrays, *static, *fixed, *modules, *containers]
        places = {id(node): place for place, node in enumerate(order)}

        def members(node: _Node) -> list[int]:
            return [places[id(each)] for each in node.content.values()]

        self._fixed = [*(statics[node.value] for node in static), *(node.value for node in fixed)]
        self._classes = [type(node.value) for node in modules]
        self._containers = [(_maker(node), _picker(members(node))) for node in containers]
        self._owners = _picker([places[id(node)] for node in modules for _ in node.content])
        self._names: list[Any] = [name for node in modules for name in node.content]
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
    kind: Any = type(node.value)
    keys = list(node.content)
    if kind is dict:
        return lambda values: dict(zip(keys, values, strict=True))
    return kind if kind in _CONTAINERS else lambda values: kind(*values)  # A named tuple.


def _picker(places: Sequence[int]) -> Callable[[Sequence[Any]], Sequence[Any]]:
    if len(places) > 1:
        pick: Any = itemgetter(*places)
        return pick
    return lambda values: [values[place] for place in places]


def _are_same(first: Sequence[Any], second: Sequence[Any]) -> bool:
    return len(first) == len(second) and all(map(is_, first, second))
