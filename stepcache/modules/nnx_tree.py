"""Modules in nnx's tree mode (`graph=False`): pytrees, of which the values of variables may change.

What nnx checks and which variables it gives new values are its own code's to say.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any

import jax
from flax import nnx
from flax.nnx import extract, graphlib
from flax.nnx.transforms.compilation import SimpleJitFn
from flax.typing import HashableMapping

from stepcache.modules.module_state import ModuleState, Outcome, OverModules, is_state
from stepcache.modules.nnx_graph import GraphStructure
from stepcache.modules.nnx_variables import (
    has_modules,
    is_reference,
    metadata_of,
    set_values,
    value_of,
)
from stepcache.variables.describing import named_leaves


def _is_variable(x: Any) -> bool:
    return isinstance(x, nnx.Variable)


class TreeStructure:
    """All of an argument but its arrays."""

    __slots__ = ("__weakref__", "kinds", "tree")

    def __init__(self, tree: Any, kinds: tuple[tuple[type, HashableMapping] | None, ...]):
        self.tree = tree  # With variables as leaves.
        self.kinds = kinds  # Type and metadata of each leaf that is a variable; None for arrays.

    def __eq__(self, other: object) -> bool:
        if self is other:
            return True
        if not isinstance(other, TreeStructure):
            return False
        return self.tree == other.tree and self.kinds == other.kinds

    def __hash__(self) -> int:
        return hash((self.tree, self.kinds))

    def __repr__(self) -> str:
        return f"{self.tree} of {self.kinds}"

    def paths(self) -> list[str]:
        """The path of each array, in order."""
        numbered = self.tree.unflatten(range(self.tree.num_leaves))
        return [path for path, _ in named_leaves(numbered)[0]]

    def settings(self) -> dict[str, str]:
        """What there is beside arrays: static attributes, and the classes of modules; by path."""
        module = self.built([None] * len(self.kinds))
        graphdef, _ = graphlib.flatten(module, with_paths=False, graph=True)
        return GraphStructure(graphdef).settings()

    def built(self, values: Any) -> Any:
        """The argument, with new variables."""
        return self.tree.unflatten(
            value if kind is None else kind[0].from_metadata(value, dict(kind[1]))
            for kind, value in zip(self.kinds, values, strict=True)
        )


class TreeCall:
    """As `GraphCall`, with `ModuleState` in the place of arguments that hold variables."""

    held = ()

    def __init__(self, args: tuple, kwargs: dict[str, Any]):
        extract.check_no_aliases("jit", args=args, kwargs=kwargs)
        self._given = (args, kwargs)
        self.states, self.variables, self.is_flat = list[ModuleState](), list[nnx.Variable](), True
        self.args = tuple(map(self._take, args))
        self.kwargs = {name: self._take(kwargs[name]) for name in sorted(kwargs)}

    def _take(self, argument: Any) -> Any:
        if not has_modules(argument):
            return argument
        leaves, tree = jax.tree.flatten(argument, is_leaf=_is_variable)
        kinds, values = [], []
        for leaf in leaves:
            if not _is_variable(leaf):
                self.is_flat = False
                kinds.append(None)
                values.append(leaf)
                continue
            self.variables.append(leaf)
            is_known = not is_reference(leaf)
            kinds.append((type(leaf), HashableMapping(metadata_of(leaf))) if is_known else None)
            values.append(leaf.get_raw_value() if is_known else leaf)
        self.states.append(ModuleState(TreeStructure(tree, tuple(kinds)), values))
        return self.states[-1]

    @property
    def objects(self) -> graphlib.RefMap:
        """Modules and variables, as nnx's graph mode finds them; for plans."""
        found = graphlib.RefMap()
        for each in jax.tree.leaves(self._given, is_leaf=graphlib.is_graph_node):
            if graphlib.is_graph_node(each):
                graphlib.flatten(each, ref_index=found, with_paths=False, graph=True)
        return found

    @property
    def is_direct(self) -> bool:
        """Whether a step can serve the call, for there are no references in it."""
        values = (value for state in self.states for value in state.values)
        return not any(map(is_reference, (*self.variables, *values)))

    @staticmethod
    def write(variables: Sequence[nnx.Variable], outcome: Outcome) -> bool:
        """Gives variables their new values and metadata."""
        numbers, news = outcome.about
        set_values([variables[number] for number in numbers], outcome.states)
        for number, metadata in news:
            variables[number].set_metadata(dict(metadata))
        return True

    @staticmethod
    def keeps_structure(outcome: Outcome) -> bool:
        """Whether the variables are as they were, but for their values."""
        return not outcome.about[1]

    def finish(self, outcome: Outcome) -> Any:
        """Gives variables their new values and metadata, and returns the outputs."""
        self.write(self.variables, outcome)
        return outcome.outputs


class OverTrees(OverModules):
    """Calls a function on the arguments that its arguments stand for.

    `Outcome.states` are the values of variables that nnx gives new ones; `Outcome.about` has the
    numbers of these, and numbers and metadata of variables whose metadata was changed. Arguments
    are donated by numbers and names: their variables all get new values.
    """

    def __init__(self, fun: Any, name: str, numbers: Collection[int], names: Collection[str]):
        super().__init__(fun, name)
        self._numbers, self._names = frozenset(numbers), frozenset(names)

    def __call__(self, *args: Any, **kwargs: Any) -> Outcome:
        def open_(x: Any) -> Any:
            return x.structure.built(x.values) if is_state(x) else x

        args, kwargs = jax.tree.map(open_, (args, kwargs), is_leaf=is_state)
        given = extract.labeled(args=args, kwargs=kwargs)
        paths = jax.tree_util.tree_flatten_with_path(given, is_leaf=_is_variable)[0]
        found = [(path, leaf) for path, leaf in paths if _is_variable(leaf)]
        numbers = {path: number for number, (path, _) in enumerate(found)}
        donated = (self._numbers, self._names)
        run = SimpleJitFn(
            self.__wrapped__, None, None, *donated, graph=False, update_shardings=(None,)
        )
        outputs, (updates,) = run(*args, **kwargs)
        changed = [(numbers[path], variable) for path, variable in updates]
        news = tuple(
            (number, HashableMapping(metadata_of(variable)))
            for number, variable in changed
            if metadata_of(variable) != metadata_of(found[number][1])
        )
        about = (tuple(number for number, _ in changed), news)
        return Outcome(about, ([value_of(variable) for _, variable in changed], outputs))
