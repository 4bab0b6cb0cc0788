"""Serves calls with the same `Variables` in the same places as an earlier one.

Nearly all calls of a training loop pass the same `Variables` in the same places. A plan knows them
by identity: it gives their buffers to JAX's dispatcher, and puts back what comes out of it. To find
the variables again, as the first call does, would cost ten times as much.
"""

from __future__ import annotations

import functools
import itertools
import weakref
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

from jax.tree_util import treedef_is_leaf

from stepcache.resident.call import ResidentCall
from stepcache.resident.form import Form
from stepcache.resident.passing import NOT_A_HIT
from stepcache.variables.packing import Packed
from stepcache.variables.variables import locked


_AGAIN = SimpleNamespace(packed=Packed(None, ()))
"""In the place of the master where variables come again: their argument is empty there."""


def plan_of(
    carry: Sequence[str],
    call: ResidentCall,
    form: Form,
    is_alone: bool,
    engine: Any,
    other: Callable[..., Any],
) -> Callable[..., Any]:
    """A function that serves calls which pass the same `Variables` in the same places as one.

    Where each of the variables is an argument by itself, it does without a look at trees.

    Args:
        carry: the names of the arguments that the step carries.
        call, form: such a call, and the form that it had over buffers.
        is_alone: whether its program returns the carry alone.
        engine: runs the step over buffers. Its dispatcher gives `NOT_A_HIT` where it would enter
            Python.
        other: gets all other calls.
    """
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
        for each in (ids, masters, fills, turns):
            each.clear()

    keeps = engine, [weakref.ref(each, forget) for each in call.variables]
    over_buffers = engine.dispatcher.call
    keys: list[Any] = [place.key for place in form.places]
    are_arguments = all(
        isinstance(place.key, int) and treedef_is_leaf(place.tree) for place in form.places
    )
    fills: list[tuple[int, Any]] = []
    turns: list[tuple[int, Any, int, type]] = []  # If all that is carried comes back as variables.
    if are_arguments:
        rows = enumerate(zip(keys, numbers, strict=True))
        fills = [(key, masters[n] if firsts[n] == at else _AGAIN) for at, (key, n) in rows]
        by_name = dict(zip((place.name for place in form.places), numbers, strict=True))
        back = [by_name[name] for name in carry if name in by_name]
        kinds = [type(next(iter(masters[n].arrays()), ())) for n in back]
        if len(back) == len(carry):
            turns = [(at, masters[n], firsts[n], kinds[at]) for at, n in enumerate(back)]

    def put_back(found: Sequence[Any], out: Any, *, is_alone: bool | None = None) -> Any:
        def put(number: int, buffers: Any) -> Any:
            master = masters[number]
            if master.packed.buffers is not buffers:  # An interrupt may come after that.
                master.write(Packed(master.layout, buffers))
            return found[firsts[number]]

        return form.put_back(carry, out, put, is_alone=is_alone) if carried else out

    def plan(*args: Any, **kwargs: Any) -> Any:
        if len(args) != count or (kwargs.keys() != names if kwargs else names):
            return other(*args, **kwargs)
        try:
            found = [args[key] for key in keys] if are_arguments else form.found(args, kwargs)
        except (ValueError, KeyError):  # Arguments of another structure.
            return other(*args, **kwargs)
        if [*map(id, found)] != ids or not keeps:
            return other(*args, **kwargs)
        out: Any = NOT_A_HIT
        with first, last if are_few else locked(found):
            try:
                if are_arguments:
                    passed, named = [*args], kwargs
                    for key, master in fills:
                        passed[key] = master.packed.buffers
                else:
                    taken = [each.packed.buffers for each in masters]
                    passed, named = form.over(args, kwargs, taken)
                run = functools.partial(over_buffers, **named) if named else over_buffers
                # A loop: no interrupt comes between what JAX returns and the name `out`, as after
                # a call.
                for out in itertools.starmap(run, (passed,)):
                    if out is NOT_A_HIT:
                        break
                    if not turns:
                        return put_back(found, out, is_alone=is_alone)
                    outputs = (out,) if is_alone else out
                    for at, _, _, kind in turns:
                        new = outputs[at]
                        if (type(new[0]) if type(new) is tuple and new else type(new)) is not kind:
                            return put_back(found, out)  # Another output, which is a tuple too.
                    for at, master, _, _ in turns:
                        master.packed.buffers = outputs[at]
                        master.version += 1
                    if is_alone:
                        return found[0]
                    carries = [found[place] for _, _, place, _ in turns]
                    return type(out)([*carries, *out[len(carries) :]])
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
