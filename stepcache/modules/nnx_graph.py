"""Modules in nnx's graph mode: what a function does to them is done to the same objects.

The modules of a call are flattened as one graph, so that what is shared is taken once. The function
gets copies inside the trace. What comes out says, for each object, which one of the call it was.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from itertools import chain
from typing import Any

import jax
from flax import nnx
from flax.nnx import extract, graphlib

from stepcache.calls.layers import function_name
from stepcache.calls.signature import AttributePath
from stepcache.modules.module_state import ModuleState, Outcome, is_state
from stepcache.modules.nnx_variables import is_module, is_reference, set_values
from stepcache.units import text_of


class GraphStructure:
    """All of a module but its arrays, as nnx's graph mode sees it."""

    __slots__ = ("__weakref__", "graphdef")

    def __init__(self, graphdef: graphlib.GraphDef):
        self.graphdef = graphdef

    def __eq__(self, other: object) -> bool:
        if self is other:
            return True
        return isinstance(other, GraphStructure) and self.graphdef == other.graphdef

    def __hash__(self) -> int:
        return hash(self.graphdef)

    def __repr__(self) -> str:
        return repr(self.graphdef)

    def paths(self) -> list[AttributePath]:
        """The path of each array, in order."""
        arrays = graphlib.VariableDef | graphlib.LeafAttr
        items = self.items()
        return [AttributePath(_text(path)) for path, item in items if isinstance(item, arrays)]

    def settings(self) -> dict[str, str]:
        """What there is beside arrays: static attributes, and the classes of modules; by path."""
        found: dict[str, str] = {}
        for path, item in self.items():
            if isinstance(item, graphlib.Static) and not str(path[-1]).startswith("_pytree__"):
                found[_text(path)] = text_of(item.value)
            elif isinstance(item, graphlib.NodeDef | graphlib.VariableDef):
                found[_text(path)] = text_of(item.type)
            if isinstance(item, graphlib.VariableDef):
                named = item.metadata.items()
                found.update((_text((*path, name)), text_of(value)) for name, value in named)
        return found

    def items(self) -> Iterator[tuple[tuple, Any]]:
        """All nodes of the graph, and the attributes that are no nodes, with their paths."""
        return _items(iter(self.graphdef.nodes), iter(self.graphdef.attributes), ())


def _texts(graphdefs: Iterable[graphlib.GraphDef]) -> list[str]:
    """All static attributes, as texts."""
    items = chain.from_iterable(GraphStructure(each).items() for each in graphdefs)
    return [repr(item.value) for _, item in items if isinstance(item, graphlib.Static)]


def _items(
    nodes: Iterator[Any], attributes: Iterator[Any], path: tuple
) -> Iterator[tuple[tuple, Any]]:
    node = next(nodes)
    yield path, node
    for _ in range(node.num_attributes if isinstance(node, graphlib.NodeDef) else 0):
        key, kind = next(attributes)
        if isinstance(kind, graphlib.NodeAttr):
            yield from _items(nodes, attributes, (*path, key))
        else:
            yield (*path, key), kind


def _text(path: tuple) -> str:
    return "/".join(map(str, path))


NOTHING_ELSE = (False, False)
"""`Outcome.about` where values of variables are all that has changed: see `OverGraphs`."""


@jax.tree_util.register_static
class Known(int):
    """Stands in the outputs for an object of the arguments, by its number among these."""

    __slots__ = ()


class GraphCall:
    """The arguments of a call as its program takes them: `ModuleState` in the place of modules."""

    def __init__(self, args: tuple, kwargs: dict[str, Any]):
        self.objects = graphlib.RefMap()  # The number of each: modules and variables.
        self.states = list[ModuleState]()  # Of the modules, in order.

        def take(x: Any) -> Any:
            if not is_module(x):
                return x
            about, values = graphlib.flatten(
                x, ref_index=self.objects, with_paths=False, graph=True
            )
            self.states.append(ModuleState(GraphStructure(about), values))
            return self.states[-1]

        self.args, self.kwargs = jax.tree.map(take, (args, kwargs), is_leaf=is_module)
        self.variables = [each for each in self.objects if isinstance(each, nnx.Variable)]
        count = sum(len(state.values) for state in self.states)
        self.is_flat = len(self.variables) == count  # They hold all arrays of the modules.

    @property
    def is_direct(self) -> bool:
        """Whether a step can serve the call, for there are no references in it."""
        return not any(map(is_reference, self.objects))

    @staticmethod
    def write(variables: Sequence[nnx.Variable], outcome: Outcome) -> bool:
        """Gives the variables of flat states their new values, if that is all there is to do."""
        if outcome.about != NOTHING_ELSE:
            return False
        set_values(variables, chain.from_iterable(outcome.states))
        return True

    @staticmethod
    def keeps_structure(outcome: Outcome) -> bool:
        """Whether the modules are as they were, but for the values of variables."""
        return not outcome.about[0]

    def finish(self, outcome: Outcome) -> Any:
        """Gives the modules their new states, and returns the outputs with modules in them."""
        if self.is_flat and self.write(self.variables, outcome):
            return outcome.outputs
        is_changed, _ = outcome.about
        if is_changed:
            news = [(state.structure.graphdef, state.values) for state in outcome.states]
        else:
            same = (state.structure.graphdef.with_same_outer_index() for state in self.states)
            news = list(zip(same, outcome.states, strict=True))
        objects = graphlib.IndexMap()
        for graphdef, values in news:
            self._build(graphdef, values, objects)

        def close(x: Any) -> Any:
            if is_state(x):
                return self._build(x.structure.graphdef, x.values, objects)
            return objects[int(x)] if isinstance(x, Known) else x

        def is_closed(x: Any) -> bool:
            return is_state(x) or isinstance(x, Known)

        return jax.tree.map(close, outcome.outputs, is_leaf=is_closed)

    def _build(self, graphdef: graphlib.GraphDef, values: Any, objects: Any) -> Any:
        """Makes an object, or makes one of the call what a graphdef says, and numbers it."""
        known = graphlib.IndexMap.from_refmap(self.objects)
        return graphlib.unflatten(
            graphdef, list(values), index_ref=objects, outer_index_outer_ref=known
        )


class OverGraphs:
    """Calls a function on the modules that its arguments hold, and returns what they became.

    `Outcome.states` are lists of values; where the function changed more of some module than the
    values of variables, each is a `ModuleState`, and the first of `Outcome.about` is true. The
    second says whether there are modules among the outputs.

    No function, so that whatever asks for code, a file or a signature finds those of the user's.
    """

    def __init__(self, fun: Any):
        self.__name__ = self.__qualname__ = function_name(fun)
        self.__module__, self.__wrapped__ = getattr(fun, "__module__", ""), fun

    def __repr__(self) -> str:
        return repr(self.__wrapped__)

    def __call__(self, *args: Any, **kwargs: Any) -> Outcome:
        objects, modules, before = graphlib.IndexMap(), [], []

        def open_(x: Any) -> Any:
            if not is_state(x):
                return x
            graphdef = x.structure.graphdef
            modules.append(graphlib.unflatten(graphdef, list(x.values), index_ref=objects))
            before.append(graphdef.with_same_outer_index())
            return modules[-1]

        args, kwargs = jax.tree.map(open_, (args, kwargs), is_leaf=is_state)
        outputs = self.__wrapped__(*args, **kwargs)
        numbers, known = graphlib.RefMap(), graphlib.RefMap.from_indexmap(objects)
        returned: list[Any] = []

        def state_of(module: Any) -> ModuleState:
            extract.check_consistent_aliasing(module, None)  # Is it a captured one?
            graphdef, values = graphlib.flatten(
                module, ref_index=numbers, ref_outer_index=known, with_paths=False, graph=True
            )
            return ModuleState(GraphStructure(graphdef), values)

        def close(x: Any) -> Any:
            if not is_module(x):
                return x
            state = state_of(x)
            root = state.structure.graphdef.nodes[0]
            returned.append(Known(root.index) if isinstance(root, graphlib.NodeRef) else state)
            return returned[-1]

        states = list(map(state_of, modules))
        outputs = jax.tree.map(close, outputs, is_leaf=is_module)
        after = [state.structure.graphdef for state in states]
        # By their texts, too: an attribute that was `1` and is `True` or `1.0` is another one.
        is_changed = after != before or _texts(after) != _texts(before)
        news = states if is_changed else [state.values for state in states]
        return Outcome((is_changed, bool(returned)), (news, outputs))
