"""`CallPlan`: serves a call with the same modules as an earlier one, without looking for arrays.

nnx finds the arrays of a module by a walk over all of its objects, at each call and in Python. A
plan remembers the variables that were found, and checks, in loops that run in C, that the objects
still have the same attributes. All that a walk would see but the values of variables is compared.
"""

from __future__ import annotations

import operator
import weakref
from collections.abc import Callable, Iterable
from itertools import chain
from typing import Any

import jax
import numpy as np
from flax import nnx
from flax.nnx import graphlib
from flax.nnx.pytreelib import PytreeState

from stepcache.modules.module_state import ModuleState, Outcome
from stepcache.modules.nnx_graph import GraphCall
from stepcache.modules.nnx_variables import has_modules, metadata_of, value_of

_ARRAYS = (jax.Array, np.ndarray, np.generic, int, float, bool, complex, str, type(None))
_PLANS_PER_STEP = 4


class Unplanned(Exception):
    """Such calls cannot be planned."""


class CallPlan:
    """Serves calls that pass the same modules, by position, in the same places.

    A plan does not keep the modules themselves alive. It is made before a program serves the call:
    what another thread changes meanwhile is seen at the next one. Raises `Unplanned` for modules
    that are inside other arguments, or hold something that no plan can compare.
    """

    def __init__(self, args: tuple, kwargs: dict[str, Any], call: GraphCall):
        places = [place for place, each in enumerate(args) if graphlib.is_graph_node(each)]
        if not places or len(places) != len(call.states) or not call.is_flat:
            raise Unplanned
        self._count, self._names = len(args), frozenset(kwargs)
        self._others = [place for place in range(len(args)) if place not in places]
        self._variables = call.variables
        self._contents = _Contents(call.objects, [args[place] for place in places])
        self._rows, start = [], 0
        for place, state in zip(places, call.states, strict=True):
            part = slice(start, start + len(state.values))
            self._rows.append((place, weakref.ref(args[place]), state.structure, part))
            start = part.stop

    def serves(self, args: tuple, kwargs: dict[str, Any]) -> bool:
        """Whether a call passes the same modules, and these are as they were but for values."""
        if len(args) != self._count or kwargs.keys() != self._names:
            return False
        for place, root, _, _ in self._rows:
            if args[place] is not root():
                return False
        for each in (*(args[place] for place in self._others), *kwargs.values()):
            if not isinstance(each, _ARRAYS) and has_modules(each):
                return False
        return self._contents.are_unchanged([args[place] for place, _, _, _ in self._rows])

    def run(self, step: Callable[..., Outcome], args: tuple, kwargs: dict[str, Any]) -> Any:
        """Runs a call."""
        taken, values = list(args), list(map(value_of, self._variables))
        for place, _, structure, part in self._rows:
            taken[place] = ModuleState(structure, values[part])
        outcome = step(*taken, **kwargs)
        if GraphCall.write(self._variables, outcome):
            return outcome.outputs
        return GraphCall(args, kwargs).finish(outcome)

    def when_gone(self, forget: Callable[[Any], None]) -> None:
        """Has `forget` called when a module of the calls is gone."""
        self._rows = [
            (place, weakref.ref(root(), forget), structure, part)
            for place, root, structure, part in self._rows
        ]


def planned(args: tuple, kwargs: dict[str, Any], call: GraphCall) -> CallPlan | None:
    """The plan for calls like this one; None where there can be none."""
    try:
        return CallPlan(args, kwargs, call)
    except Unplanned:
        return None


class _Contents:
    """Everything in modules, as nnx would find it, to be compared; it keeps no root alive."""

    def __init__(self, objects: graphlib.RefMap, roots: list[Any]):
        of_roots = set(map(id, roots))
        self._variables = [each for each in objects if isinstance(each, nnx.Variable)]
        self._inner = [
            each for each in objects if not (isinstance(each, nnx.Variable) or id(each) in of_roots)
        ]
        self._dicts: list[dict] = []
        self._lists: list[list] = []
        for each in (*roots, *self._inner):
            about = graphlib.get_node_impl(each)
            if not isinstance(each, nnx.Pytree) or about is None:
                raise Unplanned
            for _, value in about.flatten(each)[0]:
                if not isinstance(value, graphlib.StaticElem):
                    self._follow(value.value if isinstance(value, graphlib.DataElem) else value)
        self._keys, self._values = self._now(roots)
        self._types = self._types_now(roots)
        if of_roots <= set(map(id, self._values)):
            raise Unplanned  # It would never be known that they are gone.
        self._metadata = [dict(metadata_of(each)) for each in self._variables]

    def _follow(self, value: Any) -> None:
        """Looks for what may be changed in a container that nnx looks into."""
        if isinstance(value, nnx.Pytree) or graphlib.get_node_impl(value) is None:
            return
        children: Iterable = ()
        if isinstance(value, tuple):
            children = value
        elif isinstance(value, list):
            self._lists.append(value)
            children = value
        elif isinstance(value, dict):
            self._dicts.append(value)
            children = value.values()
        elif isinstance(value, nnx.State):
            self._dicts.append(vars(value))
            children = vars(value).values()
        elif value is not None and not isinstance(value, PytreeState):
            raise Unplanned
        for child in children:
            self._follow(child)

    def _now(self, roots: list[Any]) -> tuple[list[Any], list[Any]]:
        dicts = [*map(vars, roots), *map(vars, self._inner), *self._dicts]
        values = chain(chain.from_iterable(map(dict.values, dicts)), *self._lists)
        return list(chain.from_iterable(dicts)), list(values)

    def _types_now(self, roots: list[Any]) -> list[type]:
        return list(map(type, chain(roots, self._inner, self._variables)))

    def are_unchanged(self, roots: list[Any]) -> bool:
        """Whether all is as it was, but for the values of variables."""
        keys, values = self._now(roots)
        return (
            len(values) == len(self._values)
            and all(map(operator.is_, values, self._values))
            and keys == self._keys
            and self._types_now(roots) == self._types
            and list(map(metadata_of, self._variables)) == self._metadata
        )


class CallPlans:
    """The plans of one step, for the modules that it was called with of late."""

    def __init__(self) -> None:
        self._plans: list[CallPlan] = []

    def find(self, args: tuple, kwargs: dict[str, Any]) -> CallPlan | None:
        """The plan that serves a call."""
        return next((each for each in self._plans if each.serves(args, kwargs)), None)

    def add(self, plan: CallPlan) -> None:
        """Has a plan serve calls, until one of its modules is gone."""
        plans = weakref.ref(self)

        def forget(_: Any) -> None:
            alive = plans()
            if alive is not None:
                alive.drop(plan)

        plan.when_gone(forget)
        self._plans = [plan, *self._plans[: _PLANS_PER_STEP - 1]]

    def drop(self, plan: CallPlan) -> None:
        """Forgets a plan."""
        self._plans = [each for each in self._plans if each is not plan]

    def clear(self) -> None:
        """Forgets all plans."""
        self._plans = []
