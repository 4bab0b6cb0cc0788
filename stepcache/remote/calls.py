"""Calls of steps that tasks run: what their arguments refer to, and what becomes of the outputs."""

import itertools
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import numpy as np

from stepcache import jaxcompat
from stepcache.calls.carry import argument_of
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
        given, shown: the arguments without and with stand-ins.
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
    """How calls of a step that look alike are made.

    Attributes:
        rows: for each leaf of the arguments, where variables are one leaf: the number of its first
            leaf in the program, how many it has there, and its type if it is sent.
        writes: which variables are written: number, first output, number of outputs.
        outputs: what becomes of the outputs.
        has_statics: whether the call passes static arguments.
    """

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
        args, kwargs = arguments.given
        carried = [
            argument_of(spec.parameters.positional, args, kwargs, name)
            for name in spec.parameters.carry
        ]
        self.outputs = Outputs(program, carried)
        self.writes: list[tuple[int, int, int]] = []
        offset = 0
        for leaf in jax.tree_util.tree_leaves(carried):
            if isinstance(leaf, Variables):
                self.writes.append((master_of(leaf).number, offset, _leaves_in(leaf)))
            offset += _leaves_in(leaf)

    def dynamic_leaves(self, args: tuple, kwargs: dict[str, Any]) -> list[Any]:
        """Returns the leaves of the arguments that are not static."""
        call = self.request.call
        dynamic = [args[position] for position in call.positions]
        return jax.tree_util.tree_leaves((dynamic, {name: kwargs[name] for name in call.kwargs}))


def _leaves_in(leaf: Any) -> int:
    return len(leaf._master.layout.slots) if isinstance(leaf, Variables) else 1


class Outputs:
    """What becomes of the outputs of a run of a program, which carries some arguments.

    Attributes:
        written: the variables among these arguments.
    """

    def __init__(self, program: RemoteProgram, carried: list[Any]):
        self._types, tree = program.outputs, program.out_tree
        numbers = itertools.count()

        def of_carry(leaf: Any) -> Any:
            """Returns the number of the output for a leaf; variables stay in their place."""
            taken = list(itertools.islice(numbers, _leaves_in(leaf)))
            return leaf if isinstance(leaf, Variables) else taken[0]

        returned = [jax.tree_util.tree_map(of_carry, each) for each in carried]
        if carried and [tree] != [jax.tree_util.tree_structure(_opened(each)) for each in carried]:
            for rest in jax.tree_util.treedef_children(tree)[len(carried) :]:
                returned.append(rest.unflatten(itertools.islice(numbers, rest.num_leaves)))
            node = tree.node_data()[0]
            made = node(returned) if node in (tuple, list) else node(*returned)
        else:  # The carry is returned alone, or there is none.
            made = returned[0] if carried else tree.unflatten(range(tree.num_leaves))
        self._leaves, self._tree = jax.tree_util.tree_flatten(made)
        self.written = [leaf for leaf in self._leaves if isinstance(leaf, Variables)]

    def tree(self, connection: Connection, incarnation: int, run: int) -> Any:
        """Returns what the step returns."""
        return self._tree.unflatten(
            each
            if isinstance(each, Variables)
            else RemoteArray(connection, incarnation, run, each, self._types[each])
            for each in self._leaves
        )


def _opened(tree: Any) -> Any:
    """A tree with the trees of variables in their places."""

    def opened(leaf: Any) -> Any:
        if not isinstance(leaf, Variables):
            return leaf
        return leaf._master.layout.tree.unflatten(range(len(leaf._master.layout.slots)))

    return jax.tree_util.tree_map(opened, tree)
