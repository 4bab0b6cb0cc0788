"""Equinox modules as a program takes them: arrays are traced, and everything else is static."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from itertools import compress
from operator import is_
from typing import Any

import equinox as eqx
import jax
import numpy as np

from stepcache.calls.layers import function_name
from stepcache.fingerprint.visitor import WITH_THEIR_CLASS
from stepcache.jaxcompat.tree_codec import CODECS
from stepcache.modules.equinox_layout import Builder, Opener, builder, opener
from stepcache.modules.module_state import ModuleState, Outcome, OverModules, is_state
from stepcache.variables.describing import named_leaves

_MODULES = (eqx.Module, eqx.nn.State)


def is_module(x: Any) -> bool:
    """Whether an object is taken as one: a module, or the state of stateful layers."""
    return issubclass(type(x), _MODULES)  # To ask a module for its `__class__` runs Python code.


class ModuleStructure:
    """All of a module but its arrays."""

    __slots__ = ("__weakref__", "statics", "tree")

    def __init__(self, tree: Any, statics: tuple[tuple[int, Any], ...]):
        self.tree, self.statics = tree, statics  # Number and value of each leaf that is no array.

    def __eq__(self, other: object) -> bool:
        if self is other:
            return True
        if not isinstance(other, ModuleStructure):
            return False
        return self.tree == other.tree and self.statics == other.statics

    def __hash__(self) -> int:
        return hash((self.tree, self.statics))

    def __repr__(self) -> str:
        return f"{self.tree} with {dict(self.statics)}"

    def paths(self) -> list[str]:
        """The path of each array, in order."""
        statics = dict(self.statics)
        return [path for number, path in enumerate(self._all_paths()) if number not in statics]

    def settings(self) -> dict[str, str]:
        """The leaves that are no arrays, by path."""
        paths = self._all_paths()
        return {paths[number]: repr(value) for number, value in self.statics}

    def gone_in(self, other: ModuleStructure) -> list[int] | None:
        """The numbers of the leaves that are None in another module, where all else is the same.

        Gradients have None in the place of what is no array of floats.
        """
        paths = set(other._all_paths())
        gone = [number for number, path in enumerate(self._all_paths()) if path not in paths]
        less = self.less(gone)
        return gone if less == other and repr(less) == repr(other) else None

    def less(self, gone: Sequence[int]) -> ModuleStructure:
        """The structure with None in the place of some leaves, by their numbers."""
        statics, numbers = dict(self.statics), range(self.tree.num_leaves)
        left = self.tree.unflatten(None if number in gone else number for number in numbers)
        leaves, tree = jax.tree.flatten(left)
        rows = ((new, statics[old]) for new, old in enumerate(leaves) if old in statics)
        return ModuleStructure(tree, tuple(rows))

    def _all_paths(self) -> list[str]:
        numbered = self.tree.unflatten(range(self.tree.num_leaves))
        return [path for path, _ in named_leaves(numbered)[0]]

    def built(self, values: Sequence[Any]) -> Any:
        """The module."""
        leaves = list(values)
        for number, value in self.statics:
            leaves.insert(number, value)
        return self.tree.unflatten(leaves)


CODECS[ModuleStructure.__name__] = (
    ModuleStructure,
    lambda structure: [structure.tree, structure.statics],
    lambda parts: ModuleStructure(*parts),
)


class Fixed:
    """A static value in the place of an argument or an output."""

    __slots__ = ("value",)

    def __init__(self, about: tuple[type, Any], _: Any = ()):
        self.value = about[1]


jax.tree_util.register_pytree_node(Fixed, lambda x: ((), (type(x.value), x.value)), Fixed)
WITH_THEIR_CLASS.add(Fixed)


def taken(tree: Any) -> Any:
    """A tree with `ModuleState` for modules and `Fixed` for static leaves, which need a hash."""
    if is_module(tree) or eqx.is_array(tree):  # As most arguments: `tree.map` takes some 4 µs.
        return _take(tree)
    return jax.tree.map(_take, tree, is_leaf=is_module)


def with_stand_ins(take: Callable[..., Any], *trees: Any) -> Any:
    """What `take` makes of trees in which a `jax.ShapeDtypeStruct` is an array."""
    hidden: dict[int, tuple[Any, Any]] = {}

    def hide(x: Any) -> Any:
        if not isinstance(x, jax.ShapeDtypeStruct):
            return x
        array = np.empty(0)
        hidden[id(array)] = array, x
        return array

    def show(x: Any) -> Any:
        return hidden[id(x)][1] if id(x) in hidden else x

    return jax.tree.map(show, take(*jax.tree.map(hide, trees)))


def _take_output(x: Any) -> Any:
    """As `_take`; what a program returns needs no hash."""
    try:
        return _take(x)
    except TypeError:
        if not is_module(x):
            return Fixed((type(x), x))
        leaves, tree = jax.tree.flatten(x)
        return _Known(leaves, tree).state_of(leaves)


def _take(x: Any) -> Any:
    if not is_module(x):
        if eqx.is_array(x):
            return x
        hash(x)
        return Fixed((type(x), x))
    recent = _recent.get(type(x), ())
    for each in recent:
        structure, arrays_in = each
        arrays = arrays_in(x)
        if arrays is not None:
            if each is not recent[0]:
                _remember(type(x), each)
            return ModuleState(structure, arrays)
    leaves, tree = jax.tree.flatten(x)
    known = _known.get(tree)
    if known is None or not known.fits(leaves):
        known = _Known(leaves, tree)
        hash(known.structure.statics)
        _make_room(_known)
        _known[tree] = known
    if known.is_met_often() and (arrays_in := opener(x, leaves, tree)) is not None:
        _remember(type(x), (known.structure, arrays_in))
    return known.state_of(leaves)


def _remember(kind: type, opened: _Opened) -> None:
    others = [each for each in _recent.get(kind, ()) if each is not opened]
    if kind not in _recent:
        _make_room(_recent)
    _recent[kind] = (opened, *others[: _RECENT_OF_A_CLASS - 1])


def _make_room(table: dict) -> None:
    """Drops the oldest rows of a table, which other threads may change meanwhile."""
    for oldest in [*table][: 1 - _KNOWN_AT_MOST]:
        table.pop(oldest, None)


class _Known:
    """The structure of the latest module with some tree, to be recognized by its leaves."""

    def __init__(self, leaves: list[Any], tree: Any):
        self.is_array = list(map(eqx.is_array, leaves))
        self._types = list(map(type, leaves))
        self._is_static = [not each for each in self.is_array]
        self._statics = list(compress(leaves, self._is_static))
        numbers = compress(range(len(leaves)), self._is_static)
        self.structure = ModuleStructure(tree, tuple(zip(numbers, self._statics, strict=True)))
        self._met = 0

    def state_of(self, leaves: list[Any]) -> ModuleState:
        """The state of a module with these leaves."""
        return ModuleState(self.structure, list(compress(leaves, self.is_array)))

    def fits(self, leaves: list[Any]) -> bool:
        """Whether other leaves are arrays in the same places, and the same objects elsewhere."""
        statics = compress(leaves, self._is_static)
        return list(map(type, leaves)) == self._types and all(map(is_, statics, self._statics))

    def is_met_often(self) -> bool:
        """Whether to make an opener: at the second time, the fourth, the eighth, and so on.

        It takes as long as some calls do, and the opener may never fit again.
        """
        self._met += 1
        return self._met > 1 and self._met & (self._met - 1) == 0


_KNOWN_AT_MOST = 256
_RECENT_OF_A_CLASS = 4
_Opened = tuple[ModuleStructure, Opener]
_known: dict[Any, _Known] = {}
_recent: dict[type, tuple[_Opened, ...]] = {}
"""By class, what opens the modules met of late, the latest first."""


def _built(state: ModuleState) -> Any:
    return state.structure.built(state.values)


class Builders:
    """Builds the modules that a step returns, over and over of the same few structures."""

    def __init__(self) -> None:
        self._made: dict[int, tuple[ModuleStructure, Builder]] = {}

    def clear(self) -> None:
        """Drops what was made."""
        self._made.clear()

    def __call__(self, state: ModuleState) -> Any:
        """The module."""
        structure = state.structure
        made = self._made.get(id(structure))
        if made is None:
            if len(self._made) >= _KNOWN_AT_MOST:
                self._made.clear()
            build = builder(structure.tree, dict(structure.statics)) or structure.built
            made = self._made[id(structure)] = structure, build
        return made[1](state.values)


def given_back(tree: Any, build: Callable[[ModuleState], Any] = _built) -> Any:
    """The tree of which `taken` made another one; `build` makes the modules."""
    if type(tree) is tuple:
        return tuple(given_back(each, build) for each in tree)
    if is_state(tree):
        return build(tree)
    if isinstance(tree, jax.Array):
        return tree

    def give(x: Any) -> Any:
        if is_state(x):
            return build(x)
        return x.value if isinstance(x, Fixed) else x

    return jax.tree.map(give, tree, is_leaf=_is_taken)


def _is_taken(x: Any) -> bool:
    return is_state(x) or isinstance(x, Fixed)


class OverTrees(OverModules):
    """Calls a function on the modules and static values that its arguments stand for.

    Of a function with arrays in it, these are an argument too, and `call` gets them first.
    """

    def __init__(self, fun: Any, signature: inspect.Signature, call: Callable | None = None):
        super().__init__(fun, function_name(fun))
        self.__signature__, self._call = signature, call

    def __call__(self, *args: Any, **kwargs: Any) -> Outcome:
        args, kwargs = given_back((args, kwargs))
        outputs = (self._call or self.__wrapped__)(*args, **kwargs)
        return Outcome((), ((), jax.tree.map(_take_output, outputs, is_leaf=is_module)))
