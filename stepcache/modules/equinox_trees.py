"""Arguments and outputs as `eqx.filter_jit` divides them: arrays are traced, all else is static."""

from __future__ import annotations

import dataclasses
import inspect
import types
import weakref
from collections.abc import Callable, Iterator, Sequence
from itertools import compress
from typing import Any

import equinox as eqx
import jax
from jax.tree_util import GetAttrKey, keystr

from stepcache.calls.layers import function_name, layers_of
from stepcache.jaxcompat.inspection import calls_back
from stepcache.modules.module_state import ModuleState, Outcome, OverModules, text_of

ARRAY = object()  # Stands for an array in a tree that is only looked at.
_STRUCTURES_PER_STEP = 256


class _LeafPath(GetAttrKey):
    """Path of a leaf in an argument: `layers/3/weight` for rules, and JAX's text for messages."""

    def __init__(self, keys: tuple):
        super().__init__(keystr(keys, simple=True, separator="/"))
        self.text = keystr(keys)

    def __str__(self) -> str:
        return self.text


class TreeStructure:
    """All of a tree but its arrays: what `equinox.partition` calls static, and the tree itself.

    Attributes:
        tree: the `PyTreeDef`, which holds the static fields of modules.
        statics: the leaves that are no arrays: number, type and value of each. The type, because
            for Python `1`, `1.0` and `True` are equal.
    """

    __slots__ = ("__weakref__", "_hash", "statics", "tree")

    def __init__(self, tree: Any, statics: tuple[tuple[int, type, Any], ...]):
        self.tree, self.statics, self._hash = tree, statics, None

    def __eq__(self, other: object) -> bool:
        if self is other:
            return True
        if not isinstance(other, TreeStructure):
            return False
        return self.tree == other.tree and self.statics == other.statics

    def __hash__(self) -> int:
        if self._hash is None:
            self._hash = hash((self.tree, self.statics))
        return self._hash

    def __repr__(self) -> str:
        return f"{self.tree} with {[value for _, _, value in self.statics]}"

    def built(self, arrays: Sequence[Any]) -> Any:
        """The tree of these arrays."""
        leaves = list(arrays)
        for number, _, value in self.statics:
            leaves.insert(number, value)
        return self.tree.unflatten(leaves)

    def _outlined(self) -> Any:
        return self.built([ARRAY] * (self.tree.num_leaves - len(self.statics)))

    def paths(self) -> list[Any]:
        """The path of each array, in order."""
        leaves = jax.tree_util.tree_flatten_with_path(self._outlined())[0]
        return [_LeafPath(keys) for keys, leaf in leaves if leaf is ARRAY]

    def settings(self) -> dict[str, str]:
        """What there is beside arrays: other leaves, static fields, classes of modules; by path."""
        return {
            keystr(keys, simple=True, separator="/"): text_of(value)
            for keys, value in settings_of(self._outlined(), ())
        }


def settings_of(tree: Any, keys: tuple) -> Iterator[tuple[tuple, Any]]:
    if isinstance(tree, eqx.Module):
        yield keys, type(tree)
        for each in dataclasses.fields(tree):
            if each.metadata.get("static", False) and hasattr(tree, each.name):
                yield (*keys, GetAttrKey(each.name)), getattr(tree, each.name)

    def is_inner_module(x: Any) -> bool:
        return isinstance(x, eqx.Module) and x is not tree

    for inner, leaf in jax.tree_util.tree_flatten_with_path(tree, is_leaf=is_inner_module)[0]:
        if is_inner_module(leaf):
            yield from settings_of(leaf, (*keys, *inner))
        elif leaf is not ARRAY:
            yield (*keys, *inner), leaf


def is_array_or_shape(x: Any) -> bool:
    """Whether equinox traces something, or would trace the array that it stands for."""
    return eqx.is_array(x) or isinstance(x, jax.ShapeDtypeStruct)


class Partitioned:
    """Divides trees as `eqx.partition` does. Equal structures are one object, found at once."""

    def __init__(self) -> None:
        self._known: dict[TreeStructure, TreeStructure] = {}

    def __call__(self, tree: Any, is_array: Callable[[Any], bool] = eqx.is_array) -> Any:
        """A `ModuleState` in the place of a tree; an array as it is.

        Raises:
            TypeError: something static has no hash.
        """
        if is_array(tree):
            return tree
        state = partitioned(tree, is_array)
        if len(self._known) >= _STRUCTURES_PER_STEP:
            self._known.clear()
        state.structure = self._known.setdefault(state.structure, state.structure)
        return state


def partitioned(tree: Any, is_array: Callable[[Any], bool] = eqx.is_array) -> ModuleState:
    """The arrays of a tree, and its `TreeStructure`."""
    leaves, treedef = jax.tree.flatten(tree)
    are_arrays = list(map(is_array, leaves))
    statics = tuple(
        (number, type(leaf), leaf) for number, leaf in enumerate(leaves) if not are_arrays[number]
    )
    return ModuleState(TreeStructure(treedef, statics), list(compress(leaves, are_arrays)))


def built(tree: Any) -> Any:
    """The tree of which `Partitioned` made a `ModuleState`."""
    return tree.structure.built(tree.values) if isinstance(tree, ModuleState) else tree


class OverTrees(OverModules):
    """Calls a function on the trees that its arguments stand for, and returns an `Outcome` of one.

    `Outcome.about` says whether the program calls back into Python. A callable that is no plain
    function is an argument too, the first: its arrays are traced, and callables that are equal but
    for these share their programs.

    It knows its function weakly: steps over one function share it, as long as that lives.

    Attributes:
        takes_callable: whether the first argument is what to call.
        has_called_back: whether any program calls back; None before the first trace.
    """

    def __init__(self, definition: Any, name: str, signature: inspect.Signature, is_plain: bool):
        super().__init__(name, getattr(definition, "__module__", ""))
        self._definition, self.takes_callable = weakref.ref(definition), not is_plain
        self.has_called_back: bool | None = None
        parameters = list(signature.parameters.values())
        if self.takes_callable:
            free = "self" if "self" not in signature.parameters else "_self"
            parameters.insert(0, inspect.Parameter(free, inspect.Parameter.POSITIONAL_ONLY))
        self.__signature__ = inspect.Signature([_without_values(each) for each in parameters])

    @property
    def __wrapped__(self) -> Any:
        return self._definition()

    def __call__(self, *args: Any, **kwargs: Any) -> Outcome:
        given = list(map(built, args))
        fun = given.pop(0) if self.takes_callable else self.__wrapped__
        outputs = fun(*given, **{name: built(value) for name, value in kwargs.items()})
        may_raise = calls_back()
        self.has_called_back = bool(self.has_called_back) or may_raise
        return Outcome(may_raise, ((), partitioned(outputs)))


def _without_values(parameter: inspect.Parameter) -> inspect.Parameter:
    """A parameter without its default and annotation, which may refer to the function."""
    is_required = parameter.default is parameter.empty
    return parameter.replace(
        default=parameter.empty if is_required else None, annotation=parameter.empty
    )


_made: weakref.WeakKeyDictionary[Any, dict[tuple, OverTrees]] = weakref.WeakKeyDictionary()


def over_trees(fun: Any, signature: inspect.Signature) -> OverTrees:
    """What a step runs in the place of a callable; the same one for all steps over a function.

    Of other callables it is the same for all of one code, name and signature, as in `filter_jit`:
    `seqx.step(model)`, made anew in each epoch, is traced once.
    """
    is_plain = isinstance(fun, types.FunctionType)
    layers = [fun] if is_plain else list(layers_of(fun))
    functions = (each for each in reversed(layers) if isinstance(each, types.FunctionType))
    definition = next(functions, type(fun))
    parameters = tuple((each.name, each.kind) for each in signature.parameters.values())
    name = function_name(fun)
    made = _made.setdefault(definition, {})
    key = (name, is_plain, parameters)
    return made.setdefault(key, OverTrees(definition, name, signature, is_plain))
