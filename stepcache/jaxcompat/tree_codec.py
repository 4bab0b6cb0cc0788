"""The tree structure of a program's outputs as plain data, and back.

A part that is a part of the arguments' tree too is named by its position there, and so is what a
node keeps beside its children, if a node of the arguments keeps the same. Other nodes are named by
their class, which has to be loaded already and known to JAX as a node. What they keep is written
value by value: nothing that the data names is imported or called. What is no plain data, and is
held by the step's function, is named by how that leads to it.

What is no plain data raises `NotStorable`. What is read back and is malformed, or names a class
that is not there, raises `ValueError`, `TypeError`, `IndexError` or `KeyError`.
"""

from __future__ import annotations

import contextlib
import dataclasses
import enum
import functools
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, Protocol

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec as P

from stepcache.jaxcompat.call_codec import (
    SCALAR_TYPE,
    decode_dtype,
    decode_spec,
    encode_dtype,
    encode_spec,
)
from stepcache.jaxcompat.checked_data import (
    NotStorable,
    NotThere,
    item_at,
    name_of,
    named,
)
from stepcache.jaxcompat.private import CAN_STORE

if CAN_STORE:
    from jax._src import tree_util

_MAX_KNOWN_SUBTREES = 4096
_MAX_DEPTH = 100  # Msgpack has a limit of 511, and a node is two containers.


class Holder(Protocol):
    """Writes objects by names, or functions by their code, that mean the same in each process."""

    def encode(self, value: Any, encode: Callable[[Any], Any]) -> Any:
        """The object as plain data, made with `encode`; None where there is none of it."""
        ...

    def decode(self, data: Any, decode: Callable[[Any], Any]) -> Any:
        """The object. Raises `NotThere` where this process does not have it."""
        ...


def encode_tree(tree: Any, known: Any, holder: Holder | None = None) -> Any:
    """A tree structure as plain data.

    Args:
        tree: of the outputs.
        known: the tree of the arguments, which the decoder has too.
        holder: of other objects that the decoder has.
    """
    try:
        code = _TreeEncoder(known, holder).encode(tree)
        if decode_tree(code, known, holder) == tree:
            return code
        why = "as another one"
    except NotStorable:
        raise
    except Exception as error:  # What a node keeps may refuse to be compared.
        why = f"{type(error).__name__}: {error}"
    raise NotStorable(f"the tree of its outputs would not be read back as it is: {why}")


class _TreeEncoder:
    def __init__(self, known: Any, holder: Holder | None):
        self._holder = holder
        self._subtrees: dict[tuple[int, int], list[tuple[list[int], Any]]] = {}
        self._extras: dict[type, list[tuple[list[int], Any]]] = {}
        for position, subtree in _subtrees(known):
            size = (subtree.num_nodes, subtree.num_leaves)
            self._subtrees.setdefault(size, []).append((position, subtree))
            data = subtree.node_data()
            if data is not None and data[1] is not None:
                self._extras.setdefault(data[0], []).append((position, data[1]))

    def encode(self, tree: Any) -> Any:
        data = tree.node_data()
        if data is None:
            return "leaf"
        kind, extra = data
        if kind is type(None):
            return "none"
        children = tree.children()
        if children:
            same_size = self._subtrees.get((tree.num_nodes, tree.num_leaves), ())
            position = _position_of(tree, same_size, _are_ordered_alike)
            if position is not None:
                return ["known", position]
        parts = [self.encode(child) for child in children]
        if kind in (tuple, list):
            return [kind.__name__, parts]
        if kind is dict:
            return ["dict", [encode_value(key) for key in extra], parts]
        try:
            return ["node", name_of(kind, _check_node_class), encode_value(extra), parts]
        except NotStorable:
            position = _position_of(extra, self._extras.get(kind, ()), _is_written_alike)
            if position is not None:
                return ["like", position, parts]
            for position, other in self._extras.get(kind, ()):
                if hasattr(other, "less") and (gone := other.gone_in(extra)) is not None:
                    return ["less", position, gone, parts]
        try:
            return ["node", self._class(kind), encode_value(extra, self._holder), parts]
        except NotStorable as error:
            raise NotStorable(
                f"its outputs hold a {kind.__qualname__} that cannot be stored: {error}"
            ) from None

    def _class(self, kind: type) -> Any:
        """A class by its module and its name, or by how the step's function leads to it."""
        try:
            return name_of(kind, _check_node_class)
        except NotStorable:
            held = None if self._holder is None else self._holder.encode(kind, encode_value)
            if held is None:
                raise
            return {"held": held}


def _position_of(
    value: Any, places: Sequence[tuple[list[int], Any]], alike: Callable[[Any, Any], bool]
) -> list[int] | None:
    for position, other in places:
        with contextlib.suppress(Exception):  # What a node keeps may refuse to be compared.
            if other is value or (other == value and alike(other, value)):
                return position
    return None


def _are_ordered_alike(tree: Any, other: Any) -> bool:
    """Whether the nodes of equal trees keep equal values in one order, as of a mapping's keys."""
    data, others = tree.node_data(), other.node_data()
    if data is None:
        return True
    return _is_written_alike(data[1], others[1]) and all(
        map(_are_ordered_alike, tree.children(), other.children())
    )


def _is_written_alike(value: Any, other: Any) -> bool:
    """Whether equal values have one text: `True` equals `1`, and dicts may be ordered otherwise."""
    return value is other or repr(value) == repr(other)


def _subtrees(tree: Any) -> Iterator[tuple[list[int], Any]]:
    """The inner nodes of a tree, from the root down, with their positions."""
    level: list[tuple[list[int], Any]] = [([], tree)]
    count = 0
    while level and count < _MAX_KNOWN_SUBTREES:
        yield from level
        count += len(level)
        level = [
            ([*position, index], child)
            for position, node in level
            for index, child in enumerate(node.children())
            if child.num_nodes > 1
        ]


def decode_tree(code: Any, known: Any, holder: Holder | None = None, depth: int = 0) -> Any:
    """The tree structure that `encode_tree` wrote."""
    if code == "leaf":
        return jax.tree_util.tree_structure(0)
    if code == "none":
        return jax.tree_util.tree_structure(None)
    if depth > _MAX_DEPTH:
        raise ValueError(f"a tree is more than {_MAX_DEPTH} nodes deep")
    kind, *rest = code
    if kind == "known":
        return _subtree_at(known, *rest)
    *about, parts = rest
    children = [decode_tree(part, known, holder, depth + 1) for part in parts]
    data: Any
    if kind in ("tuple", "list") and not about:
        data = (tuple if kind == "tuple" else list, None)
    elif kind == "dict":
        data = (dict, list({decode_value(key): None for key in about[0]}))
        if len(data[1]) != len(children):
            raise ValueError("a dict has another number of keys than of values")
    elif kind == "like":
        data = _subtree_at(known, *about).node_data()
        _check_node_class(data[0])
    elif kind == "less":
        position, gone = about
        cls, extra = _subtree_at(known, position).node_data()
        data = (cls, extra.less(gone))
        _check_node_class(cls)
    elif kind == "node":
        name, extra = about
        if isinstance(name, dict) and holder is not None:
            cls = holder.decode(name["held"], decode_value)
            _check_node_class(cls)
        else:
            cls = named(name, _check_node_class)
        data = (cls, decode_value(extra, holder))
    else:
        raise ValueError(f"unknown node {kind!r:.80}")
    if _is_named_tuple(data[0]) and len(children) != len(data[0]._fields):
        raise ValueError(f"a {data[0].__name__} has another number of fields")
    registry = tree_util.default_registry
    return jax.tree_util.PyTreeDef.from_node_data_and_children(registry, data, children)


def _subtree_at(tree: Any, position: Any) -> Any:
    for index in position:
        tree = item_at(tree.children(), index)
    return tree


_WITH_A_KIND_OF_THEIR_OWN = (tuple, list, dict, type(None))


def _check_node_class(found: Any) -> None:
    """Raises `ValueError` unless it is a class that JAX takes apart: registered, or named tuple."""
    if not isinstance(found, type) or found in _WITH_A_KIND_OF_THEIR_OWN:
        raise ValueError(f"{found!r:.80} is no class of nodes")
    if not (found in tree_util._registry or _is_named_tuple(found)):
        raise NotThere(f"{found!r:.80} is no class of nodes")


def _is_named_tuple(found: type) -> bool:
    return issubclass(found, tuple) and isinstance(getattr(found, "_fields", None), tuple)


CODECS: dict[str, tuple[type, Callable[[Any], Any], Callable[[Any], Any]]] = {}
"""Of classes of other rooms, by name: what takes an object apart, and makes one of its parts.

The parts are what `encode_value` takes.
"""


def _in_order(values: Iterable[Any]) -> list[Any]:
    """The same for sets that are equal, whatever the order in which they were filled."""
    return sorted(values, key=lambda each: (type(each).__qualname__, repr(each)))


_PLAIN = (type(None), bool, float, str, bytes)
# By name: the class, what takes an object of it apart, and what makes one of its parts.
_MADE_OF_PARTS: dict[str, tuple[type, Callable[[Any], list], Callable[[list], Any]]] = {
    "tuple": (tuple, list, tuple),
    "list": (list, list, list),
    "set": (set, _in_order, set),
    "frozenset": (frozenset, _in_order, frozenset),
    "dict": (dict, lambda value: list(value.items()), dict),
    "complex": (complex, lambda value: [value.real, value.imag], lambda parts: complex(*parts)),
    "slice": (slice, lambda value: [value.start, value.stop, value.step], lambda p: slice(*p)),
    "range": (range, lambda value: [value.start, value.stop, value.step], lambda p: range(*p)),
}
# Flax's dicts that can be hashed, by module and name.
_MAPPINGS = {"flax.typing": "HashableMapping", "flax.core.frozen_dict": "FrozenDict"}
# What mjx keeps for an array beside the children of a node, by module and name.
_ARRAYS = {"mujoco.mjx._src.dataclasses": "_NumPyArrayHashWrapper"}
# Dataclasses of flax, which hold the structure of a module.
_GRAPHS = "flax.nnx.graphlib"
_RECORDS = "GraphDef NodeDef VariableDef TreeNodeDef NodeRef ArrayRefDef NodeAttr LeafAttr Static"
_BUILT_IN = {kind.__name__: kind for kind in (bool, int, float, complex, str, bytes, tuple, list)}
_BUILT_IN |= {kind.__name__: kind for kind in (dict, set, frozenset, type(None))}


def encode_value(value: Any, holder: Holder | None = None) -> Any:
    """What a node keeps beside its children, as plain data."""
    kind = type(value)
    if kind in _PLAIN:
        return value
    if kind is int:
        small = -(1 << 63) <= value < 1 << 63
        size_bytes = value.bit_length() // 8 + 1
        return value if small else ["int", value.to_bytes(size_bytes, "little", signed=True)]
    cls, take_apart, _ = _MADE_OF_PARTS.get(kind.__name__, (None, list, list))
    if kind is cls:
        return [kind.__name__, [encode_value(each, holder) for each in take_apart(value)]]
    if (apart := _taken_apart(value)) is not None:
        form, name, parts = apart
        return [form, [name, encode_value(parts, holder)]]
    if kind is P:
        return ["spec", encode_spec(value)]
    if kind is jax.tree_util.PyTreeDef:
        return ["tree", _TreeEncoder(_LEAF, holder).encode(value)]
    if isinstance(value, enum.Enum) and kind.__members__.get(value._name_) is value:
        return ["member", [*name_of(kind, _check_enum), value._name_]]
    if (found := _encode_type(value)) is not None:
        return found
    if holder is not None:
        held = holder.encode(value, functools.partial(encode_value, holder=holder))
        if held is not None:
            return ["held", held]
    raise NotStorable(f"{kind.__qualname__} cannot be written as plain data: {value!r:.80}")


def _taken_apart(value: Any) -> tuple[str, str, Any] | None:
    """The form of an object, the name of its class, and its parts; None where it has none."""
    kind = type(value)
    name, module = kind.__name__, kind.__module__
    if name in CODECS and kind is CODECS[name][0]:
        return "made", name, CODECS[name][1](value)
    if module == _GRAPHS and name in _RECORDS.split():
        return "record", name, [getattr(value, each.name) for each in dataclasses.fields(kind)]
    if _MAPPINGS.get(module) == kind.__qualname__ and kind is _known_class(_MAPPINGS, module):
        return "mapping", module, dict(value)
    if _ARRAYS.get(module) == kind.__qualname__ and kind is _known_class(_ARRAYS, module):
        array = value.array
        return "array", module, [array.dtype, array.shape, array.tobytes()]
    return None


def objects_in(tree: Any) -> list[Any]:
    """What the nodes of a tree keep that is no plain data, in an order that equal trees share."""
    found: dict[int, Any] = {}
    _find_objects(tree, found)
    return [*found.values()]


def _find_objects(value: Any, found: dict[int, Any]) -> None:
    kind, parts = type(value), ()
    if kind is jax.tree_util.PyTreeDef:
        parts = [(value.node_data() or (None, None))[1], *value.children()]
    elif kind in (set, frozenset) or kind in _PLAIN or kind is int:
        pass
    elif kind is _MADE_OF_PARTS.get(kind.__name__, (None,))[0]:
        parts = _MADE_OF_PARTS[kind.__name__][1](value)
    elif (apart := _taken_apart(value)) is not None:
        parts = apart[2:]
    elif issubclass(kind, tuple):
        parts = tuple.__iter__(value)
    elif id(value) not in found:
        found[id(value)] = value
    for part in parts:
        _find_objects(part, found)


def _encode_type(value: Any) -> Any:
    if isinstance(value, np.dtype):
        return ["dtype", encode_dtype(value)]
    if isinstance(value, np.generic):  # `np.float64` is a float, too, but no plain one.
        return ["scalar", [encode_dtype(value.dtype), value.tobytes()]]
    if isinstance(value, SCALAR_TYPE) and getattr(jnp, value.dtype.name, None) is value:
        return ["jnp", encode_dtype(value.dtype)]
    if isinstance(value, type):
        if _BUILT_IN.get(value.__name__) is value:
            return ["builtin", value.__name__]
        if issubclass(value, np.generic) and np.dtype(value).type is value:
            return ["numpy", encode_dtype(np.dtype(value))]
    return None


def _check_enum(found: Any) -> None:
    if not isinstance(found, type) or not issubclass(found, enum.Enum):
        raise ValueError(f"{found!r:.80} is no enumeration")


_LEAF: Any = jax.tree_util.tree_structure(0)


def decode_value(code: Any, holder: Holder | None = None, depth: int = 0) -> Any:
    """Reads what `encode_value` wrote."""
    if type(code) is int or type(code) in _PLAIN:
        return code
    kind, content = code
    if depth > _MAX_DEPTH:
        raise ValueError(f"a value is more than {_MAX_DEPTH} containers deep")
    if kind in _MADE_OF_PARTS:
        parts = [decode_value(each, holder, depth + 1) for each in content]
        return _MADE_OF_PARTS[kind][2](parts)
    if kind in _MAKERS:
        name, parts = content
        return _MAKERS[kind](name, decode_value(parts, holder, depth + 1))
    if kind == "tree":
        return decode_tree(content, _LEAF, holder, depth + 1)
    if kind == "held" and holder is not None:
        return holder.decode(
            content, functools.partial(decode_value, holder=holder, depth=depth + 1)
        )
    return _DECODERS[kind](content)


def _known_class(known: dict[str, str], module: str) -> Any:
    return vars(sys.modules[module])[known[module]]


def _array(module: str, parts: Any) -> Any:
    dtype, shape, content = parts
    return _known_class(_ARRAYS, module)(np.frombuffer(content, dtype).reshape(shape).copy())


def _record(name: str) -> Any:
    if name not in _RECORDS.split():
        raise ValueError(f"{name!r:.80} is no part of the structure of a module")
    return vars(sys.modules[_GRAPHS])[name]


_MAKERS: dict[str, Callable[[str, Any], Any]] = {
    "made": lambda name, parts: CODECS[name][2](parts),
    "record": lambda name, fields: _record(name)(*fields),
    "mapping": lambda module, pairs: _known_class(_MAPPINGS, module)(dict(pairs)),
    "array": _array,
}


def _scalar(content: Any) -> Any:
    (value,) = np.frombuffer(content[1], decode_dtype(content[0]))
    return value


def _member(content: Any) -> Any:
    *name, member = content
    return named(name, _check_enum).__members__[member]


_DECODERS: dict[str, Callable[[Any], Any]] = {
    "int": lambda content: int.from_bytes(content, "little", signed=True),
    "member": _member,
    "scalar": _scalar,
    "spec": decode_spec,
    "dtype": decode_dtype,
    "jnp": lambda content: getattr(jnp, decode_dtype(content).name),
    "builtin": _BUILT_IN.__getitem__,
    "numpy": lambda content: decode_dtype(content).type,
}
