"""`ResidentCall`: the `Variables` of one call, what its program takes, and what is written back."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
from jax.tree_util import keystr

from stepcache import jaxcompat
from stepcache.calls.context import DEFAULT_SCOPE, Scope
from stepcache.calls.step_spec import StepSpec
from stepcache.errors import VariablesError
from stepcache.pods.replicas import compare
from stepcache.resident.form import Form, Place
from stepcache.resident.passing import can_cross_in_program, check_options
from stepcache.variables import transfer
from stepcache.variables.describing import joined
from stepcache.variables.masters import Master, Reader
from stepcache.variables.packing import Packed
from stepcache.variables.plan import Plan
from stepcache.variables.transfer import Meter
from stepcache.variables.variables import Variables, locked


class ResidentCall:
    """The `Variables` of one call.

    Attributes:
        given: the arguments of the call, positional ones and others.
        places: the arguments that have variables; the carried ones first.
        variables: those there are, each once, in the order of their places.
        carried: how many of them are carried.
        meter: counts what moves.

    Raises `VariablesError` if one is carried twice, or where the step's options leave it no place.
    """

    def __init__(self, spec: StepSpec, args: tuple, kwargs: dict[str, Any]):
        self._spec, self.given, self.meter = spec, (args, kwargs), Meter()
        self._session: Any = None
        carry, name_of = spec.parameters.carry, spec.parameters.name_of
        arguments: list[tuple[str, int | str, Any]] = [
            (name_of(position), position, tree) for position, tree in enumerate(args)
        ]
        arguments += [(name, name, kwargs[name]) for name in sorted(kwargs)]
        # In this order, those that are passed more than once have their number from the carry.
        arguments.sort(key=lambda argument: argument[0] not in carry)
        numbers: dict[Variables, int] = {}
        places, self.carried = [], 0
        for name, key, tree in arguments:
            leaves, structure = jax.tree_util.tree_flatten(tree)
            if not (passed := [leaf for leaf in leaves if isinstance(leaf, Variables)]):
                continue
            for each in passed:
                if each in numbers and name in carry:
                    raise VariablesError(
                        "variables are carried twice, and would get two values",
                        where=f"{spec.name}, argument {name}",
                        got=repr(each),
                        hint="pass them once, or pass a copy, from .copy()",
                    )
                numbers.setdefault(each, len(numbers))
            own = (numbers[x] if isinstance(x, Variables) else None for x in leaves)
            places.append(Place(key, name, structure, tuple(own)))
            if name in carry:
                self.carried = len(numbers)
        self.places, self.variables = tuple(places), list(numbers)
        check_options(spec, args, kwargs, read=len(numbers) > self.carried)

    def checked(self, scope: Scope) -> ResidentCall:
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

    def paths(self) -> Iterator[tuple[str, str, Variables]]:
        """Where variables stand: the argument, and the path as rules read it, such as `rest/0`."""
        args, kwargs = self.given
        for place in self.places:
            base = place.name.replace("[", "/").rstrip("]")
            tree = kwargs[place.key] if isinstance(place.key, str) else args[place.key]
            for keys, leaf in jax.tree_util.tree_flatten_with_path(tree)[0]:
                if isinstance(leaf, Variables):
                    inner = keystr(keys, simple=True, separator="/")
                    yield place.name, joined(base, inner), leaf

    def _arguments(self) -> dict[Variables, list[str]]:
        """The arguments that each of the variables is in."""
        names: dict[Variables, list[str]] = {}
        for name, _, each in self.paths():
            if name not in names.setdefault(each, []):
                names[each].append(name)
        return names

    def in_words(self) -> Iterator[str]:
        """A line for each of the variables."""
        for each in self.variables:
            paths = (path for _, path, there in self.paths() if there is each)
            yield f"{' and '.join(paths)}: {each!r}"

    def plan(self) -> Plan:
        """The transfers that the call will make."""
        names, transfers = self._arguments(), []
        self._read_together(values=False)
        for each, reader in self._readers():
            reader = reader._replace(arguments=tuple(names[each]))
            with each._lock:
                master = self._master_of(each)
                transfers += master.plan_take(each.name, reader)
                transfers += master.plan_put(each.name, reader) if reader.carried else ()
        return Plan(tuple(transfers))

    def taken(self) -> tuple[Form, tuple, dict[str, Any]]:
        """The arguments as a program takes them, which may write over what is carried."""
        in_program = self._in_program()
        self._read_together(values=True)

        def take(each: Variables, reader: Reader) -> Packed:
            master = self._master_of(each)
            master.check_not_lost(each.name)
            packed = master.take(reader._replace(in_program=in_program), self.meter)
            return transfer.copied(packed) if jaxcompat.arguments_outlive_calls() else packed

        arguments = self._over(take)
        for source, readers in self._by_source().items():
            source.read_ahead(readers)  # Now: a program may run before its call returns.
        return arguments

    def shown(self) -> tuple[Form, tuple, dict[str, Any]]:
        """The same with `jax.ShapeDtypeStruct`s in the place of buffers."""
        in_program = self._in_program()
        with locked(self.variables):
            return self._over(lambda each, _: self._master_of(each).shapes(in_program=in_program))

    def _over(
        self, value_of: Callable[[Variables, Reader], Packed]
    ) -> tuple[Form, tuple, dict[str, Any]]:
        values = list(itertools.starmap(value_of, self._readers()))
        form = Form(self.places, tuple(value.layout for value in values))
        return form, *form.over(*self.given, [value.buffers for value in values])

    def _read_together(self, *, values: bool) -> None:
        """Has variables of one source looked at, or fetched, as they are at one moment."""
        for source, readers in self._by_source().items():
            source.read_together(readers, values=values)

    def _by_source(self) -> dict[Any, list[tuple[Any, Reader]]]:
        groups: dict[Any, list[tuple[Any, Reader]]] = {}
        for each, reader in self._readers():
            if (source := each._master.source) is not None:
                groups.setdefault(source, []).append((each._master, reader))
        return groups

    def _readers(self) -> Iterator[tuple[Variables, Reader]]:
        for index, each in enumerate(self.variables):
            yield each, Reader(self._session, carried=index < self.carried)

    def _in_program(self) -> bool:
        return bool(self.carried) and can_cross_in_program(self._spec, self.given, self.variables)

    def _master_of(self, each: Variables) -> Master:
        return each._seen_from(self._session.placer if self._session is not None else None)

    def inlined(self) -> tuple[tuple, dict[str, Any]]:
        """The arguments with values in place of variables, for a call inside a transformation."""
        if self.carried or jaxcompat.keeps_what_is_read():
            what = "variables cannot be carried inside another transformation"
            hint = "pass their .value, and assign the result"
            if not self.carried:
                what = "variables are passed inside another transformation, which would keep their "
                what += "values as constants and not see later writes"
                hint = "call the step outside of it, or pass .value as an argument of the function "
                hint += "that is transformed"
            got = ", ".join(map(repr, self.variables))
            raise VariablesError(what, where=self._spec.name, got=got, hint=hint)

        def value_of(leaf: Any) -> Any:
            if not isinstance(leaf, Variables):
                return leaf
            return jax.tree.map(jax.numpy.asarray, leaf.value)  # Some are in numpy's memory.

        return jax.tree_util.tree_map(value_of, self.given)

    def written(self, form: Form, outputs: Any) -> Any:
        """Stores new values in the carried variables, and puts these into the outputs.

        In the outputs there is a tuple of buffers for each of them.
        """

        def put(number: int, buffers: Sequence[Any]) -> Variables:
            value, each = Packed(form.layouts[number], tuple(buffers)), self.variables[number]
            value = transfer.copied(value) if jaxcompat.arguments_outlive_calls() else value
            each._master.put(value, self._session, self.meter)
            return each

        if self.carried:
            return form.put_back(self._spec.parameters.carry, outputs, put)
        return outputs
