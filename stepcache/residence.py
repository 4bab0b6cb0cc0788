"""Calls of a step that pass `Variables`: its function sees their trees, its program their buffers.

The program of such a call takes and returns buffers, a few arrays in the place of thousands, and
takes them apart inside XLA. What a carried value becomes is put back into the same `Variables`.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
from jax.tree_util import keystr

from stepcache.errors import VariablesError
from stepcache.programs.carry import refuse, refuse_tree, type_of
from stepcache.programs.recipe import Recipe
from stepcache.programs.signature import Parameters
from stepcache.scope import Scope
from stepcache.variables.masters import Reader
from stepcache.variables.packing import Layout, Packed
from stepcache.variables.plan import Plan
from stepcache.variables.transfer import Meter
from stepcache.variables.variables import Variables, any_variables

_PLAIN = frozenset((int, float, bool, complex, str, bytes, type(None)))


def passes_variables(args: tuple, kwargs: dict[str, Any]) -> bool:
    """Whether there are `Variables` among the arguments of a call."""
    return any_variables() and any(
        isinstance(leaf, Variables) for leaf in jax.tree_util.tree_leaves((args, kwargs))
    )


# ---- the function, over buffers --------------------------------------------------------------


class _Again:
    """Stands for `Variables` that are in the call already, by their number among them."""

    __slots__ = ("number",)

    def __init__(self, number: int):
        self.number = number

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Again) and self.number == other.number

    def __hash__(self) -> int:
        return hash(self.number)


jax.tree_util.register_static(_Again)


def _is_stand_in(node: Any) -> bool:
    return isinstance(node, Packed | _Again)


def over_buffers(recipe: Recipe) -> Recipe:
    """The recipe of a step whose arguments are buffers where they were `Variables`."""
    fun, parameters = recipe.fun, recipe.parameters

    @functools.wraps(fun)
    def on_buffers(*args: Any, **kwargs: Any) -> Any:
        carried = [_argument(parameters, args, kwargs, name) for name in parameters.carry]
        seen: list[Any] = []
        for tree in (*carried, args, kwargs):
            for node in jax.tree_util.tree_leaves(tree, is_leaf=_is_stand_in):
                if isinstance(node, Packed) and all(node is not other for other, _ in seen):
                    seen.append((node, node.value()))
        values = {id(node): value for node, value in seen}

        def opened(node: Any) -> Any:
            if isinstance(node, _Again):
                return seen[node.number][1]
            return values[id(node)] if isinstance(node, Packed) else node

        outputs = fun(
            *(_mapped(opened, argument) for argument in args),
            **{name: _mapped(opened, argument) for name, argument in kwargs.items()},
        )
        return _closed(recipe, outputs, carried, [_mapped(opened, tree) for tree in carried])

    return Recipe.of(on_buffers, parameters.carry, recipe.options)


def _mapped(change: Callable[[Any], Any], tree: Any) -> Any:
    """A tree with its stand-ins changed; one without any as it is."""
    leaves, structure = jax.tree_util.tree_flatten(tree, is_leaf=_is_stand_in)
    if not any(map(_is_stand_in, leaves)):
        return tree
    return structure.unflatten([change(leaf) for leaf in leaves])


def _argument(parameters: Parameters, args: tuple, kwargs: dict[str, Any], name: str) -> Any:
    """An argument by its name; None if it is not passed."""
    if name in kwargs:
        return kwargs[name]
    try:
        return args[parameters.positional.index(name)]
    except (ValueError, IndexError):
        return None


def _closed(recipe: Recipe, outputs: Any, carried: Sequence[Any], opened: Sequence[Any]) -> Any:
    """The outputs, with buffers where a carry had some; what has another form as it is."""
    if not any(map(_is_stand_in, _leaves(carried))):
        return outputs
    names = recipe.parameters.carry
    structure = jax.tree_util.tree_structure
    if len(names) == 1 and structure(outputs) == structure(opened[0]):
        return _packed(recipe, names[0], carried[0], outputs)
    if type(outputs) not in (tuple, list) or len(outputs) < len(names):
        return outputs
    news = map(functools.partial(_packed, recipe), names, carried, outputs)
    return type(outputs)((*news, *outputs[len(names) :]))


def _leaves(tree: Any) -> list[Any]:
    return jax.tree_util.tree_leaves(tree, is_leaf=_is_stand_in)


def _packed(recipe: Recipe, name: str, template: Any, new: Any) -> Any:
    if isinstance(template, Packed):
        return _packed_value(recipe, name, template.layout, new)
    if not any(map(_is_stand_in, _leaves(template))):
        return new

    def pack(node: Any, value: Any) -> Any:
        return _packed_value(recipe, name, node.layout, value) if _is_stand_in(node) else value

    try:
        return jax.tree_util.tree_map(pack, template, new, is_leaf=_is_stand_in)
    except ValueError:
        return new  # It is no tree of this form, which will be said of it.


def _packed_value(recipe: Recipe, name: str, layout: Layout, new: Any) -> Packed:
    leaves, structure = jax.tree_util.tree_flatten(new)
    leaves = [leaf if hasattr(leaf, "aval") else jax.numpy.asarray(leaf) for leaf in leaves]
    numbers = jax.tree_util.tree_flatten_with_path(layout.tree.unflatten(range(len(layout.slots))))[
        0
    ]
    if structure != layout.tree:
        old = {name + keystr(keys): layout.slots[number] for keys, number in numbers}
        refuse_tree(recipe.name, name, old, layout.tree, structure, leaves)
    for (keys, number), leaf in zip(numbers, leaves, strict=True):
        slot = layout.slots[number]
        if (slot.shape, slot.dtype) != (leaf.shape, leaf.dtype):
            refuse(recipe.name, name + keystr(keys), type_of(slot), type_of(leaf))
    return Packed(tuple(layout.pack(leaves)), layout)


# ---- one call --------------------------------------------------------------------------------


class Use:
    """The `Variables` of one call.

    Args:
        recipe: the step.
        args: positional arguments.
        kwargs: keyword arguments.

    Attributes:
        variables: those there are, carried ones first.
        carried: how many of them are carried.
        meter: counts what moves.

    Raises:
        VariablesError: one is carried twice.
    """

    __slots__ = ("_args", "_kwargs", "_recipe", "_session", "carried", "meter", "variables")

    def __init__(self, recipe: Recipe, args: tuple, kwargs: dict[str, Any]):
        self._recipe, self._args, self._kwargs = recipe, args, kwargs
        self._session: Any = None
        self.meter = Meter()
        found: list[Variables] = []
        for name in recipe.parameters.carry:
            for each in _variables_of(_argument(recipe.parameters, args, kwargs, name)):
                if each in found:
                    raise VariablesError(
                        "variables are carried twice, and would get two values",
                        where=f"{recipe.name}, argument {name}",
                        got=repr(each),
                        hint="pass them once, or make two of them",
                    )
                found.append(each)
        self.carried = len(found)
        for tree in (*args, *(kwargs[name] for name in sorted(kwargs))):
            found += (each for each in _variables_of(tree) if each not in found)
        self.variables = found

    def held(self, scope: Scope) -> Use:
        """As a context: nobody else writes the variables meanwhile.

        Raises:
            VariablesError: they lie on another mesh than this session's.
        """
        self._session = scope if scope.placer is not None else None
        for each in self.variables:
            each.check_usable(scope.mesh)
        return self

    def __enter__(self) -> Use:
        for each in self._in_order():
            each.lock.acquire()
        return self

    def __exit__(self, *exception) -> None:
        for each in self._in_order():
            each.lock.release()

    def _in_order(self) -> Sequence[Variables]:
        if len(self.variables) == 1:
            return self.variables
        return sorted(self.variables, key=lambda each: each.number)

    def taken(self) -> tuple[tuple, dict[str, Any]]:
        """The arguments as a program takes them, which may write over what is carried."""
        return self._given(self._take)

    def _take(self, each: Variables, carried: bool) -> Packed:
        return each.take(Reader(self._session, carried=carried), self.meter)

    def _arguments(self) -> dict[int, list[str]]:
        """For each of the variables, by number, the arguments that it is in."""
        names: dict[int, list[str]] = {}
        name_of = self._recipe.parameters.name_of
        given = [(name_of(index), tree) for index, tree in enumerate(self._args)]
        for name, tree in (*given, *self._kwargs.items()):
            for each in _variables_of(tree):
                names.setdefault(each.number, []).append(name)
        return names

    def holds(self, argument: str, path: str) -> bool:
        """Whether a leaf of the program's arguments is a buffer of variables."""
        passed = {name for names in self._arguments().values() for name in names}
        return argument in passed and "/buffers/" in path

    def told(self) -> Iterator[str]:
        """A line for each of the variables."""
        names = self._arguments()
        for each in self.variables:
            yield f"{' and '.join(names[each.number])}: {each!r}"

    def plan(self) -> Plan:
        """The transfers of the call, which are still to come."""
        names = self._arguments()
        return Plan(
            tuple(
                planned
                for index, each in enumerate(self.variables)
                for planned in each.plan(
                    Reader(self._session, tuple(names[each.number]), index < self.carried)
                )
            )
        )

    def shown(self) -> tuple[tuple, dict[str, Any]]:
        """The arguments as a program would take them."""
        return self._given(lambda each, carried: each.described())

    def inlined(self) -> tuple[tuple, dict[str, Any]]:
        """The arguments inside another transformation, where values are constants.

        Raises:
            VariablesError: variables are carried, and cannot be written there.
        """
        if self.carried:
            raise VariablesError(
                "variables cannot be carried inside another transformation",
                where=self._recipe.name,
                got=repr(self.variables[0]),
                hint="pass their .value, and assign what comes back",
            )
        args = tuple(map(_values_in, self._args))
        return args, {name: _values_in(tree) for name, tree in self._kwargs.items()}

    def _given(self, value_of: Callable[[Variables, bool], Any]) -> tuple[tuple, dict[str, Any]]:
        """The arguments, with something else in the place of the variables.

        Args:
            value_of: gives it, for variables and whether they are carried. What comes more than
                once is asked for once; carried arguments, the first time, have the value itself.
        """
        values = [value_of(each, index < self.carried) for index, each in enumerate(self.variables)]
        used = [False] * len(values)

        def stand_in(leaf: Any) -> Any:
            if not isinstance(leaf, Variables):
                return leaf
            index = self.variables.index(leaf)
            if used[index]:
                return _Again(index)
            used[index] = True
            return values[index]

        positional, carry = self._recipe.parameters.positional, self._recipe.parameters.carry
        args, kwargs = list(self._args), dict(self._kwargs)
        for first in (True, False):  # Carried arguments take the values themselves.
            for index, argument in enumerate(args):
                name = positional[index] if index < len(positional) else ""
                if (name in carry) is first and type(argument) not in _PLAIN:
                    args[index] = _substituted(argument, stand_in)
            for name in sorted(kwargs):
                if (name in carry) is first and type(kwargs[name]) not in _PLAIN:
                    kwargs[name] = _substituted(kwargs[name], stand_in)
        return tuple(args), kwargs

    def written(self, outputs: Any) -> Any:
        """Puts the new values of carried variables into them, and them into the outputs."""
        outputs = self._put(outputs)
        for each in self.variables:
            each.ahead(self.meter)
        return outputs

    def _put(self, outputs: Any) -> Any:
        if not self.carried:
            return outputs
        carried = iter(self.variables[: self.carried])

        def commit(node: Any) -> Any:
            if not isinstance(node, Packed):
                return node
            each = next(carried)
            each.put(node, self._session, self.meter)
            return each

        if type(outputs) is Packed:
            return commit(outputs)
        if type(outputs) in (tuple, list):
            names = len(self._recipe.parameters.carry)
            news = (_substituted(tree, commit) for tree in outputs[:names])
            return type(outputs)((*news, *outputs[names:]))
        return _substituted(outputs, commit)


def _variables_of(tree: Any) -> Iterator[Variables]:
    if isinstance(tree, Variables):
        yield tree
    elif type(tree) not in _PLAIN and not isinstance(tree, jax.Array):
        for leaf in jax.tree_util.tree_leaves(tree):
            if isinstance(leaf, Variables):
                yield leaf


def _substituted(tree: Any, change: Callable[[Any], Any]) -> Any:
    if isinstance(tree, Variables | Packed):
        return change(tree)
    if isinstance(tree, jax.Array):
        return tree
    leaves, structure = jax.tree_util.tree_flatten(tree, is_leaf=_is_packed)
    changed = [change(leaf) for leaf in leaves]
    if all(old is new for old, new in zip(leaves, changed, strict=True)):
        return tree
    return structure.unflatten(changed)


def _is_packed(node: Any) -> bool:
    return isinstance(node, Packed)


def _values_in(tree: Any) -> Any:
    return _substituted(tree, lambda leaf: leaf.value if isinstance(leaf, Variables) else leaf)
