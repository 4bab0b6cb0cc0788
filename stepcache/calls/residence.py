"""Calls that pass `Variables`: which buffers the program takes, and where outputs are stored.

The step's function sees their trees, its program their buffers. What a carried value becomes is put
back into the same `Variables`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
from jax.tree_util import keystr

from stepcache import jaxcompat
from stepcache.calls import bound_variables
from stepcache.calls.bound_variables import variables_of
from stepcache.calls.carry import argument_of
from stepcache.calls.context import DEFAULT_SCOPE, Scope
from stepcache.calls.over_buffers import Again, mapped
from stepcache.calls.step_spec import StepSpec
from stepcache.errors import VariablesError
from stepcache.pods.replicas import Part, check_replicas, compare
from stepcache.pods.rounds import Peers
from stepcache.variables import transfer
from stepcache.variables.describing import joined, named_leaves
from stepcache.variables.masters import Master, Reader, Source
from stepcache.variables.packing import Layout, Packed
from stepcache.variables.plan import Plan
from stepcache.variables.transfer import Meter
from stepcache.variables.variables import Variables, locked


class Use:
    """The `Variables` of one call.

    Attributes:
        given: the arguments of the call, positional ones and others.
        carry: those that are carried; None for one that is not passed.
        variables: those there are, carried ones first.
        carried: how many of them are carried.
        meter: counts what moves.

    Raises `VariablesError` if one is carried twice, or where the step's options leave it no place.
    """

    def __init__(self, spec: StepSpec, args: tuple, kwargs: dict[str, Any]):
        self._spec, self.given = spec, (args, kwargs)
        self.carry = carried(spec, args, kwargs)
        self._session: Any = None
        self._layouts: dict[Variables, Layout] = {}
        self.meter = Meter()
        self.variables = self._find()
        bound_variables.check_options(spec, args, kwargs, read=len(self.variables) > self.carried)

    def _find(self) -> list[Variables]:
        found: list[Variables] = []
        for name, tree in zip(self._spec.parameters.carry, self.carry, strict=True):
            for each in variables_of(tree):
                if each in found:
                    raise VariablesError(
                        "variables are carried twice, and would get two values",
                        where=f"{self._spec.name}, argument {name}",
                        got=repr(each),
                        hint="pass them once, or pass a copy, from .copy()",
                    )
                found.append(each)
        self.carried = len(found)
        for _, tree in self.arguments_in_turn():
            for each in variables_of(tree):
                if each not in found:
                    found.append(each)
        return found

    def checked(self, scope: Scope) -> Use:
        """The same, after a look at the variables' mesh and rules."""
        self._session = scope if scope is not DEFAULT_SCOPE else None
        for index, each in enumerate(self.variables):
            each._check_usable(scope.mesh, writes=index < self.carried)
            if scope.placer is not None and each not in scope.seen:
                scope.seen.add(each)
                scope.match_rules(each._paths())
        return self

    def compare_values(self, scope: Scope) -> None:
        """Raises `AgreementError`, once, if other processes made the variables of other values."""
        new = [each for each in self.variables if each._made_of]
        peers = scope.peers if new else None
        if peers is None:
            return
        names = self._arguments()
        tokens = {
            joined(names[each][0], path): token
            for each in new
            for path, token in each._made_of.items()
        }
        step, made = self._spec.name, ", ".join(each.name for each in new)
        with peers.round(step, f"passes new variables ({made})") as round:
            compare(round, f"in variables that {step} is called with", {tuple(peers.ranks): tokens})
        for each in new:
            each._made_of = {}

    def arguments_in_turn(self) -> Iterator[tuple[int | str, Any]]:
        """Position or name of each argument, and itself: the carried ones first.

        In this order, variables that are passed more than once are recognized.
        """
        args, kwargs = self.given
        positional, carry = self._spec.parameters.positional, self._spec.parameters.carry
        given: list[tuple[str, int | str, Any]] = [
            (positional[i] if i < len(positional) else "", i, argument)
            for i, argument in enumerate(args)
        ]
        given += [(name, name, kwargs[name]) for name in sorted(kwargs)]
        for first in (True, False):
            yield from ((key, tree) for name, key, tree in given if (name in carry) is first)

    def places(self) -> Iterator[tuple[str, str, Variables]]:
        """Where variables stand: the argument, and the path as rules read it, such as `rest/0`."""
        args, kwargs = self.given
        name_of = self._spec.parameters.name_of
        named = [(name_of(index), tree) for index, tree in enumerate(args)]
        for name, tree in (*named, *kwargs.items()):
            base = name.replace("[", "/").rstrip("]")
            for keys, leaf in jax.tree_util.tree_flatten_with_path(tree)[0]:
                if isinstance(leaf, Variables):
                    yield name, joined(base, keystr(keys, simple=True, separator="/")), leaf

    def _arguments(self) -> dict[Variables, list[str]]:
        """The arguments that each of the variables is in."""
        names: dict[Variables, list[str]] = {}
        for name, _, each in self.places():
            if name not in names.setdefault(each, []):
                names[each].append(name)
        return names

    def buffer_paths(self) -> set[str]:
        """The paths, in the program's arguments, of the leaves that are buffers of variables."""
        return {
            f"{path}/{index}"
            for _, path, each in self.places()
            for index in range(len(each._layout.buffers))
        }

    def told(self) -> Iterator[str]:
        """A line for each of the variables."""
        for each in self.variables:
            paths = (path for _, path, there in self.places() if there is each)
            yield f"{' and '.join(paths)}: {each!r}"

    def plan(self) -> Plan:
        """The transfers that the call will make."""
        names, transfers = self._arguments(), []
        self._read_together(values=False)
        for index, each in enumerate(self.variables):
            reader = Reader(self._session, tuple(names[each]), index < self.carried)
            with each._lock:
                transfers += self._master_of(each).plan(each.name, reader)
        return Plan(tuple(transfers))

    def taken(self) -> tuple[tuple, dict[str, Any]]:
        """The arguments as a program takes them, which may write over what is carried."""
        in_program = self._in_program()
        self._read_together(values=True)

        def take(each: Variables, carried: bool) -> Packed:
            master = self._master_of(each)
            master.check_not_lost(each.name)
            reader = Reader(self._session, (), carried, in_program)
            packed = master.take(reader, self.meter)
            self._layouts[each] = packed.layout
            return transfer.copied(packed) if jaxcompat.arguments_outlive_calls() else packed

        arguments = self._replaced(take)
        for source, readers in self._by_source().items():
            source.read_ahead(readers)  # Now: a program may run before its call returns.
        return arguments

    def _read_together(self, *, values: bool) -> None:
        """Has variables of one source looked at, or fetched, as they are at one moment."""
        for source, readers in self._by_source().items():
            source.read_together(readers, values=values)

    def _by_source(self) -> dict[Source, list[tuple[Any, Reader]]]:
        groups: dict[Source, list[tuple[Any, Reader]]] = {}
        for index, each in enumerate(self.variables):
            if (source := each._master.source) is not None:
                reader = Reader(self._session, (), index < self.carried)
                groups.setdefault(source, []).append((each._master, reader))
        return groups

    def shown(self) -> tuple[tuple, dict[str, Any]]:
        in_program = self._in_program()
        return self._replaced(
            lambda each, _: self._master_of(each).described(in_program=in_program)
        )

    def _in_program(self) -> bool:
        return bool(self.carried) and bound_variables.can_cross_in_program(
            self._spec, self.given, self.variables
        )

    def _master_of(self, each: Variables) -> Master:
        return each._seen_from(self._session.placer if self._session is not None else None)

    def _replaced(self, value_of: Callable[[Variables, bool], Any]) -> tuple[tuple, dict[str, Any]]:
        """The arguments with the variables replaced, given whether each is carried.

        What comes more than once is asked for once; carried arguments, the first time, have it.
        """
        values = [value_of(each, index < self.carried) for index, each in enumerate(self.variables)]
        used = [False] * len(values)

        def stand_in(leaf: Any) -> Any:
            if not isinstance(leaf, Variables):
                return leaf
            index = self.variables.index(leaf)
            if used[index]:
                return Again(index)
            used[index] = True
            return values[index]

        args, kwargs = list(self.given[0]), dict(self.given[1])
        for key, argument in self.arguments_in_turn():
            holder: Any = args if isinstance(key, int) else kwargs
            is_one = isinstance(argument, Variables)
            holder[key] = stand_in(argument) if is_one else mapped(stand_in, argument)
        return tuple(args), kwargs

    def inlined(self) -> tuple[tuple, dict[str, Any]]:
        """The arguments with values in place of variables, for a call inside a transformation."""
        if self.carried:
            raise VariablesError(
                "variables cannot be carried inside another transformation",
                where=self._spec.name,
                got=repr(self.variables[0]),
                hint="pass their .value, and assign the result",
            )
        if jaxcompat.keeps_what_is_read():
            raise VariablesError(
                "variables are passed inside another transformation, which would keep their values "
                "as constants and not see later writes",
                where=self._spec.name,
                got=", ".join(map(repr, self.variables)),
                hint="call the step outside of it, or pass .value as an argument of the function "
                "that is transformed",
            )

        def value_of(leaf: Any) -> Any:
            if not isinstance(leaf, Variables):
                return leaf
            return jax.tree.map(jax.numpy.asarray, leaf.value)  # Some are in numpy's memory.

        args = tuple(mapped(value_of, tree) for tree in self.given[0])
        return args, {name: mapped(value_of, tree) for name, tree in self.given[1].items()}

    def written(self, outputs: Any) -> Any:
        """Stores new values in the carried variables, and puts these into the outputs.

        In the outputs there is a tuple of buffers for each of them.
        """

        def put(each: Variables, buffers: tuple) -> None:
            value = Packed(self._layouts[each], buffers)
            value = transfer.copied(value) if jaxcompat.arguments_outlive_calls() else value
            each._master.put(value, self._session, self.meter)

        if self.carried:
            outputs = put_back(outputs, self.carry, put)
        for index, each in enumerate(self.variables):
            reader = Reader(self._session, carried=index < self.carried)
            self._master_of(each).ahead(reader, self.meter)
        return outputs


def carried(spec: StepSpec, args: tuple, kwargs: dict[str, Any]) -> list[Any]:
    """The arguments of a call that are carried; None for one that is not passed."""
    parameters = spec.parameters
    return [argument_of(parameters.positional, args, kwargs, name) for name in parameters.carry]


def put_back(outputs: Any, carry: Sequence[Any], put: Callable[[Variables, tuple], None]) -> Any:
    """Has `put` store returned buffers in the carried variables, which go into the outputs.

    There, a tuple of buffers is in the place of each of the variables.
    """

    def commit(old: Any, new: Any) -> Any:
        leaves, structure = jax.tree_util.tree_flatten(old)
        if not any(isinstance(leaf, Variables) for leaf in leaves):
            return new
        news = structure.flatten_up_to(new)
        for index, leaf in enumerate(leaves):
            if isinstance(leaf, Variables):
                put(leaf, news[index])
                news[index] = leaf
        return structure.unflatten(news)

    if comes_alone(outputs, carry):
        return commit(carry[0], outputs)
    news = map(commit, carry, outputs)
    return type(outputs)((*news, *outputs[len(carry) :]))


def comes_alone(outputs: Any, carry: Sequence[Any]) -> bool:
    """Whether outputs with tuples of buffers are the carry, and not several of which it is one.

    A carry that is a list or a tuple, and comes back alone, looks like several outputs.
    """
    if len(carry) != 1:
        return False
    leaves, structure = jax.tree_util.tree_flatten(carry[0])
    bare = [
        tuple(range(len(leaf._layout.buffers))) if isinstance(leaf, Variables) else 0
        for leaf in leaves
    ]
    tree = jax.tree_util.tree_structure(structure.unflatten(bare))
    return tree == jax.tree_util.tree_structure(outputs)


def check_tree(tree: Any, peers: Peers | None, about: str) -> None:
    """Raises `AgreementError` if replicas of values in a tree differ, on devices or processes."""
    with locked(jax.tree_util.tree_leaves(tree)):
        check_replicas(_parts_of(tree), peers, about)


def _parts_of(tree: Any) -> Iterator[Part]:
    """Path and array of what is in a tree; the leaves of variables in the place of those."""
    for path, leaf in named_leaves(tree)[0]:
        if isinstance(leaf, Variables):
            yield from leaf._parts_on_devices()
        else:
            yield path, leaf, None
