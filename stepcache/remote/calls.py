"""Calls of steps that tasks run: what their arguments refer to, and what becomes of the outputs."""

import functools
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import numpy as np

from stepcache import jaxcompat
from stepcache.calls.over_buffers import argument_of
from stepcache.calls.step_spec import Request, StepSpec
from stepcache.errors import TaskError
from stepcache.remote.arrays import ArrayType, RemoteArray
from stepcache.remote.connection import Connection
from stepcache.remote.variables import master_of
from stepcache.variables.variables import Variables


@dataclass(frozen=True)
class RemoteProgram:
    """A program that the tasks hold.

    Attributes:
        number: by which they know it.
        out_tree: tree of the outputs.
        outputs: each output.
        donated: numbers of the arguments, among the leaves, that it takes.
        seconds: what each stage took.
    """

    number: int
    out_tree: Any
    outputs: tuple[ArrayType, ...]
    donated: frozenset[int]
    seconds: dict[str, float]


def kind_of(leaf: Any) -> Any:
    """What a plan depends on in a leaf of the arguments; None for one that is not planned."""
    kind = type(leaf)
    if kind is RemoteArray:
        return leaf._type.number
    if kind is Variables:
        return leaf._number, getattr(leaf._master, "number", None)
    if kind is np.ndarray:
        return leaf.shape, leaf.dtype
    if kind in (float, int, bool) or isinstance(leaf, np.generic):
        return kind
    if isinstance(leaf, jax.Array) and not isinstance(leaf, jaxcompat.Tracer):
        return leaf.shape, leaf.dtype, leaf.aval.weak_type
    return None


class Held(NamedTuple):
    """A leaf of variables in a call."""

    number: int
    index: int


class Groups:
    """References to arrays, with neighbours in one."""

    def __init__(self) -> None:
        self.rows: list[tuple] = []

    def add(self, kind: str, ago: int, index: int, count: int) -> None:
        last = self.rows[-1] if self.rows else None
        if last is not None and last[:2] == ("o", ago) and last[2] + last[3] == index:
            self.rows[-1] = ("o", ago, last[2], last[3] + count)
        else:
            self.rows.append((kind, ago, index, count))

    def add_feed(self) -> None:
        last = self.rows[-1] if self.rows else None
        if last is not None and last[0] == "f":
            self.rows[-1] = ("f", last[1] + 1)
        else:
            self.rows.append(("f", 1))


class Arguments:
    """The arguments of a call, with stand-ins for what lives on the tasks.

    Attributes:
        given: the arguments.
        shown: the arguments with stand-ins.
        sources: what each stand-in stands for, by its identity.
    """

    def __init__(self, target: Any, args: tuple, kwargs: dict[str, Any]):
        self._target, self.given = target, (args, kwargs)
        self.sources: dict[int, Any] = {}
        self._kept: list[Any] = []  # Stand-ins, which are known by their identity.
        self.shown = (
            tuple(map(self._shown, args)),
            {name: self._shown(tree) for name, tree in kwargs.items()},
        )

    def _shown(self, tree: Any) -> Any:
        leaves, structure = jax.tree_util.tree_flatten(tree)
        if not any(isinstance(x, Variables | RemoteArray | jax.Array) for x in leaves):
            return tree
        return structure.unflatten(map(self._stand_in, leaves))

    def _stand_in(self, leaf: Any) -> Any:
        if isinstance(leaf, RemoteArray):
            self.sources[id(leaf._stand_in)] = leaf
            return leaf._stand_in
        if isinstance(leaf, Variables):
            return self._of_variables(leaf)
        if isinstance(leaf, jax.Array) and not isinstance(leaf, jaxcompat.Tracer):
            made = jaxcompat.stand_in(leaf.shape, leaf.dtype, leaf.aval.weak_type, None)
            self.sources[id(made)] = leaf
            self._kept.append(made)
            return made
        return leaf

    def _of_variables(self, variables: Variables) -> Any:
        master = master_of(variables)
        if master.target is not self._target:
            raise TaskError(
                "the variables live on the tasks of another session", where=variables.name
            )
        master.check_not_lost(variables.name)
        for index, each in enumerate(master.stand_ins):
            self.sources[id(each)] = Held(master.number, index)
        return master.layout.tree.unflatten(master.stand_ins)


class CallPlan:
    """How calls that look alike are made.

    Attributes:
        name: of the step.
        request: the call.
        program: its program.
        rows: for each leaf of the arguments, where variables are one leaf: the number of its first
            leaf in the program, how many it has there, and its type if it is sent.
        writes: which variables are written: number, first output, number of outputs.
        outputs: what becomes of the outputs.
        has_statics: whether the call passes static arguments.
        is_step: whether the step is one of the user's: others are not cancelled.
    """

    is_step = True

    def __init__(
        self, spec: StepSpec, request: Request, arguments: Arguments, program: RemoteProgram
    ):
        self.name, self.request, self.program = spec.name, request.described(), program
        self.rows: list[tuple[int, int, Any]] = []
        self.has_statics = bool(request.call.signature.statics)
        first = 0
        for leaf in self.dynamic_leaves(*arguments.given):
            count = _leaves_in(leaf)
            sent = None if isinstance(leaf, Variables | RemoteArray) else request.leaves[first]
            self.rows.append((first, count, sent))
            first += count
        self.writes: list[tuple[int, int, int]] = []
        self.outputs = Outputs(program)
        offset = 0
        for name in spec.parameters.carry:
            args, kwargs = arguments.given
            given = argument_of(spec.parameters.positional, args, kwargs, name)
            for leaf in jax.tree_util.tree_leaves(given):
                count = _leaves_in(leaf)
                if isinstance(leaf, Variables):
                    self.writes.append((master_of(leaf).number, offset, count))
                    self.outputs.written.append(leaf)
                offset += count
            self.outputs.carry(given)

    def dynamic_leaves(self, args: tuple, kwargs: dict[str, Any]) -> list[Any]:
        """Returns the leaves of the arguments that are not static."""
        call = self.request.call
        dynamic = [args[position] for position in call.positions]
        return jax.tree_util.tree_leaves((dynamic, {name: kwargs[name] for name in call.kwargs}))


def _leaves_in(leaf: Any) -> int:
    return len(leaf._master.layout.slots) if isinstance(leaf, Variables) else 1


class Outputs:
    """What becomes of the outputs of a run.

    Attributes:
        written: the variables that are carried.
    """

    def __init__(self, program: RemoteProgram):
        self._program = program
        self._carried: list[tuple[Any, list[Variables | None]]] = []
        self._opened: list[Any] = []
        self.written: list[Variables] = []
        self._inside: frozenset[int] = frozenset()

    def carry(self, given: Any) -> None:
        """Adds an argument that is carried, as it was given."""
        leaves, structure = jax.tree_util.tree_flatten(given)
        self._carried.append((structure, [x if isinstance(x, Variables) else None for x in leaves]))
        self._opened.append(jax.tree_util.tree_structure(_opened(given)))
        offset, inside = 0, []
        for _, variables in self._carried:
            for each in variables:
                count = 1 if each is None else _leaves_in(each)
                inside += [] if each is None else range(offset, offset + count)
                offset += count
        self._inside = frozenset(inside)

    def tree(self, connection: Connection, incarnation: int, run: int) -> Any:
        """Returns what the step returns."""
        program = self._program
        leaves: list[Any] = [
            None
            if index in self._inside
            else RemoteArray(connection, incarnation, run, index, each)
            for index, each in enumerate(program.outputs)
        ]
        return self._with_variables(leaves) if self.written else program.out_tree.unflatten(leaves)

    def _with_variables(self, leaves: list[Any]) -> Any:
        new: list[Any] = []
        offset = 0
        for structure, variables in self._carried:
            values = []
            for each in variables:
                values.append(leaves[offset] if each is None else each)
                offset += 1 if each is None else _leaves_in(each)
            new.append(structure.unflatten(values))
        node, children = self._node
        if node is None:
            return new[0]
        for each in children[len(new) :]:
            new.append(each.unflatten(leaves[offset : offset + each.num_leaves]))
            offset += each.num_leaves
        return node(new) if node in (tuple, list) else node(*new)

    @functools.cached_property
    def _node(self) -> tuple[Any, list[Any]]:
        """The class of the outputs, and their trees; None for a carry that is returned alone."""
        tree = self._program.out_tree
        if [tree] == self._opened:
            return None, []
        return tree.node_data()[0], jax.tree_util.treedef_children(tree)


def _opened(tree: Any) -> Any:
    """A tree with the trees of variables in their places."""

    def opened(leaf: Any) -> Any:
        if not isinstance(leaf, Variables):
            return leaf
        return leaf._master.layout.tree.unflatten(range(len(leaf._master.layout.slots)))

    return jax.tree_util.tree_map(opened, tree)
