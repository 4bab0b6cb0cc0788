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
from stepcache.variables.variables import holding

_AGAIN = SimpleNamespace(packed=SimpleNamespace(buffers=()))
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
    locks, are_few = [each._lock for each in in_order], len(masters) <= 2
    first, last = locks[0], locks[-1]
    over_buffers = engine.dispatcher.call
    are_arguments = all(
        isinstance(place.key, int) and treedef_is_leaf(place.tree) for place in form.places
    )
    # Where variables are: the positions of arguments, or numbers among all that `form` finds.
    numbers = [n for place in form.places for n in place.numbers if n is not None]
    spots: list[Any] = list(range(len(numbers)))
    if are_arguments:
        spots = [place.key for place in form.places]
    expected = [(at, masters[n]) for at, n in zip(spots, numbers, strict=True)]
    firsts = [spots[numbers.index(n)] for n in range(len(masters))]
    fills = [(at, master if at in firsts else _AGAIN) for at, master in expected]
    turns: list[tuple[int, Any, int, type]] = []  # If all that is carried comes back as variables.
    if are_arguments:
        by_name = dict(zip((place.name for place in form.places), numbers, strict=True))
        back = [by_name[name] for name in carry if name in by_name]
        kinds = [type(next(iter(masters[n].arrays()), ())) for n in back]
        if len(back) == len(carry):
            turns = [(at, masters[n], firsts[n], kinds[at]) for at, n in enumerate(back)]
    # A plan keeps no variables alive, and no buffers of theirs. It serves while they live.
    alive = [engine]

    def forget(_: Any) -> None:
        for each in (alive, masters, expected, fills, turns):
            each.clear()

    alive += [weakref.ref(each, forget) for each in call.variables]

    def put_back(found: Sequence[Any], out: Any, *, is_alone: bool | None = None) -> Any:
        def put(number: int, buffers: Any) -> Any:
            master = masters[number]
            if master.packed.buffers is not buffers:  # An interrupt may come after that.
                master.write(Packed(master.layout, buffers))
            return found[firsts[number]]

        return form.put_back(carry, out, put, is_alone=is_alone) if carried else out

    def plan(*args: Any, **kwargs: Any) -> Any:
        if not alive or len(args) != count or (kwargs.keys() != names if kwargs else names):
            return other(*args, **kwargs)
        try:
            found = args if are_arguments else form.found(args, kwargs)
        except (ValueError, KeyError):  # Arguments of another structure.
            return other(*args, **kwargs)
        for at, master in expected:
            if getattr(found[at], "_master", None) is not master:
                return other(*args, **kwargs)
        out: Any = NOT_A_HIT
        with first, last if are_few else holding(locks):
            try:
                if are_arguments:
                    passed, named = [*args], kwargs
                    for at, master in fills:
                        passed[at] = master.packed.buffers
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
                    carries = [found[spot] for _, _, spot, _ in turns]
                    return carries[0] if is_alone else type(out)([*carries, *out[len(carries) :]])
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
