"""Serves calls with the same `Variables` in the same places as an earlier one.

Nearly all calls of a training loop pass the same `Variables` in the same places. A plan knows them
by identity: it gives their buffers to JAX's dispatcher, and puts back what comes out of it. To find
the variables again, as the first call does, would cost ten times as much.
"""

from __future__ import annotations

import functools
import itertools
import threading
import weakref
from collections.abc import Callable, Sequence
from typing import Any

from jax.tree_util import treedef_is_leaf

from stepcache.calls.step_spec import StepSpec
from stepcache.resident.call import ResidentCall
from stepcache.resident.form import Form, Place
from stepcache.resident.passing import NOT_A_HIT
from stepcache.variables.packing import Packed
from stepcache.variables.variables import locked

_PLANS_PER_STEP = 8


class CallPlans:
    """The plans of one step. Each passes on the calls that it does not serve, the last one to
    `dispatch`.
    """

    def __init__(self, spec: StepSpec, dispatch: Callable[..., Any]):
        self._spec, self._dispatch, self._newest = spec, dispatch, dispatch
        self._known: set[Any] = set()
        self._lock = threading.Lock()

    def add(
        self, call: ResidentCall, form: Form, outputs: Any, engine: Any
    ) -> Callable[..., Any] | None:
        """Makes a plan for calls that pass the same `Variables` in the same places.

        Args:
            call: such a call.
            form: that it had over buffers.
            outputs: what its program returned, with a tuple of buffers for each value.
            engine: runs the step over buffers. Its dispatcher gives `NOT_A_HIT` where it would
                enter Python.

        Returns:
            What is to serve all calls of the step now; None where that stays as it is: there is a
            plan already, or a value does not live on its devices.
        """
        if not all(each._master.is_resident for each in call.variables):
            return None
        args, kwargs = call.given
        carry = self._spec.parameters.carry
        is_alone = call.carried > 0 and form.comes_alone(carry, outputs)
        numbers = tuple(each._number for each in call.variables)
        key = (form, len(args), tuple(kwargs), is_alone, numbers)
        with self._lock:
            if key in self._known:
                return None
            if len(self._known) == _PLANS_PER_STEP:
                self._known, self._newest = set(), self._dispatch
            self._known.add(key)
            plan = _plan(carry, call, form, is_alone, engine, self._newest)
            self._newest = functools.update_wrapper(plan, self._newest)
            return self._newest


def _plan(
    carry: Sequence[str],
    call: ResidentCall,
    form: Form,
    is_alone: bool,
    engine: Any,
    other: Callable[..., Any],
) -> Callable[..., Any]:
    """A function for calls like one; it gives all others to `other`."""
    args, kwargs = call.given
    count, names, carried = len(args), kwargs.keys(), call.carried
    masters = [each._master for each in call.variables]
    in_order = sorted(call.variables, key=lambda each: each._number)
    first, last, are_few = in_order[0]._lock, in_order[-1]._lock, len(masters) <= 2
    # The number of the variables at each of their places, and where each of them comes first.
    numbers = [n for place in form.places for n in place.numbers if n is not None]
    firsts = [numbers.index(n) for n in range(len(masters))]
    # A plan keeps no variables alive, and no buffers of theirs.
    ids = [id(call.variables[n]) for n in numbers]

    def forget(_: Any) -> None:
        ids.clear()
        masters.clear()

    keeps = engine, [weakref.ref(each, forget) for each in call.variables]
    over_buffers = engine.dispatcher.call
    take, fill = _arguments(form, numbers, firsts)
    back, split, join = _outputs(form, carry, is_alone, firsts)
    turns, kinds = range(len(back)), [type(next(iter(masters[n].arrays()), ())) for n in back]

    def put_back(found: Sequence[Any], out: Any) -> Any:
        def put(number: int, buffers: Any) -> Any:
            master = masters[number]
            if master.packed.buffers is not buffers:  # An interrupt may come after that.
                master.write(Packed(master.layout, buffers))
            return found[firsts[number]]

        return form.put_back(carry, out, put) if carried else out

    def plan(*args: Any, **kwargs: Any) -> Any:
        if len(args) != count or (kwargs.keys() != names if kwargs else names):
            return other(*args, **kwargs)
        try:
            found, nodes = take(args, kwargs)
        except (ValueError, KeyError):  # Arguments of another structure.
            return other(*args, **kwargs)
        if [*map(id, found)] != ids or not keeps:
            return other(*args, **kwargs)
        out: Any = NOT_A_HIT
        with first, last if are_few else locked(found):
            try:
                taken = [each.packed.buffers for each in masters]
                passed, named = fill(args, kwargs, nodes, taken)
                run = functools.partial(over_buffers, **named) if named else over_buffers
                # A loop: no interrupt comes between what JAX returns and the name `out`, as after
                # a call.
                for out in itertools.starmap(run, (passed,)):
                    if out is NOT_A_HIT:
                        break
                    if not carried:
                        return out
                    news, nodes = split(out)
                    for turn in turns:
                        new = news[turn]
                        kind = type(new[0]) if type(new) is tuple and new else type(new)
                        if kind is not kinds[turn]:  # Another output, which is a tuple too.
                            return put_back(found, out)
                    for turn in turns:
                        masters[back[turn]].packed.buffers = news[turn]
                        masters[back[turn]].version += 1
                    return join(out, found, nodes)
            except (RuntimeError, ValueError) as error:
                if out is not NOT_A_HIT:  # Outputs of another structure.
                    return put_back(found, out)
                if "deleted" not in str(error):  # The usual way says what is.
                    raise
            except BaseException:
                if out is not NOT_A_HIT:  # Interrupted: what it took is gone.
                    put_back(found, out)
                raise
        return other(*args, **kwargs)

    return plan


def _arguments(
    form: Form, numbers: Sequence[int], firsts: Sequence[int]
) -> tuple[Callable[..., Any], Callable[..., Any]]:
    """What finds the variables of a call, and what makes the arguments of its program.

    Where variables come again, they are empty there. Those that stand alone are found sooner.
    """
    takes = [(n, firsts[n] == at) for at, n in enumerate(numbers)]
    keys: list[Any] = [place.key for place in form.places]
    trees = [place.tree for place in form.places]
    if all(map(treedef_is_leaf, trees)) and all(isinstance(key, int) for key in keys):
        alone = [(key, *taken) for key, taken in zip(keys, takes, strict=True)]

        def take(args: Any, kwargs: dict) -> tuple[list[Any], Any]:
            return [args[key] for key in keys], None

        def fill(args: tuple, kwargs: dict, nodes: Any, taken: list) -> tuple[list[Any], dict]:
            passed = [*args]
            for key, n, is_first in alone:
                passed[key] = taken[n] if is_first else ()
            return passed, kwargs

        return take, fill
    rows = [(key, isinstance(key, str), tree) for key, tree in zip(keys, trees, strict=True)]
    spots = [spot for spot, _ in _spots(form.places)]

    def take_inside(args: tuple, kwargs: dict) -> tuple[list[Any], Any]:
        nodes = [
            tree.flatten_up_to((kwargs if is_named else args)[key]) for key, is_named, tree in rows
        ]
        return [nodes[row][at] for row, at in spots], nodes

    def fill_inside(args: tuple, kwargs: dict, nodes: Any, taken: list) -> tuple[list[Any], dict]:
        for (row, at), (n, is_first) in zip(spots, takes, strict=True):
            nodes[row][at] = taken[n] if is_first else ()
        passed: list[Any] = [*args]
        named = dict(kwargs)
        for (key, is_named, tree), own in zip(rows, nodes, strict=True):
            holder: Any = named if is_named else passed
            holder[key] = tree.unflatten(own)
        return passed, named

    return take_inside, fill_inside


def _outputs(
    form: Form, carry: Sequence[str], is_alone: bool, firsts: Sequence[int]
) -> tuple[list[int], Callable[..., Any], Callable[..., Any]]:
    """The numbers of the variables that come back, in turn; what finds their new buffers in the
    outputs of a program, and what puts the variables there.
    """
    by_name = {place.name: place for place in form.places}
    rows = [(at, by_name[name]) for at, name in enumerate(carry) if name in by_name]
    turns = _spots([place for _, place in rows])
    spots, back = [spot for spot, _ in turns], [n for _, n in turns]
    count, places = len(carry), [firsts[n] for n in back]
    if len(rows) == count and all(treedef_is_leaf(place.tree) for _, place in rows):
        if is_alone:
            return back, lambda out: ((out,), None), lambda out, found, nodes: found[0]
        return (
            back,
            lambda out: (out[:count], None),
            lambda out, found, nodes: type(out)([found[at] for at in places] + [*out[count:]]),
        )

    def split(out: Any) -> tuple[list[Any], Any]:
        tops = (out,) if is_alone else out
        nodes = [place.tree.flatten_up_to(tops[at]) for at, place in rows]
        return [nodes[row][at] for row, at in spots], nodes

    def join(out: Any, found: list[Any], nodes: Any) -> Any:
        for (row, at), place in zip(spots, places, strict=True):
            nodes[row][at] = found[place]
        tops = [out] if is_alone else [*out]
        for (at, place), own in zip(rows, nodes, strict=True):
            tops[at] = place.tree.unflatten(own)
        return tops[0] if is_alone else type(out)(tops)

    return back, split, join


def _spots(places: Sequence[Place]) -> list[tuple[tuple[int, int], int]]:
    """Which of the places each of the variables is in, and which leaf of it; and their number."""
    return [
        ((row, at), n)
        for row, place in enumerate(places)
        for at, n in enumerate(place.numbers)
        if n is not None
    ]
