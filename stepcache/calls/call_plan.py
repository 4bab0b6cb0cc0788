"""Serves calls with the same `Variables` in the same places as an earlier one.

Nearly all calls of a training loop pass the same `Variables` in the same places. A plan knows them
by identity: it gives their buffers to JAX's dispatcher, and puts back what comes out of it. To find
the variables again, as the first call does, would cost ten times as much.
"""

from __future__ import annotations

import collections
import functools
import itertools
import threading
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from jax.tree_util import tree_leaves

from stepcache.calls.bound_variables import NOT_A_HIT
from stepcache.calls.over_buffers import Form
from stepcache.calls.residence import Use, carried, comes_alone, put_back
from stepcache.calls.step_spec import StepSpec
from stepcache.variables.packing import Packed
from stepcache.variables.variables import Variables, locked

_PLANS_PER_STEP = 8


class _Unplanned(Exception):
    """Such calls cannot be planned."""


class _Other(Exception):
    """A tree of another form than in the call that was planned."""


class CallPlans:
    """The plans of one step. Each passes on the calls that it does not serve, the last one to
    `dispatch`.
    """

    def __init__(self, spec: StepSpec, dispatch: Callable[..., Any]):
        self._spec, self._dispatch, self._newest = spec, dispatch, dispatch
        self._known: set[Any] = set()
        self._lock = threading.Lock()

    def add(self, use: Use, form: Form, outputs: Any, dispatcher: Any) -> Callable[..., Any] | None:
        """Makes a plan for calls that pass the same `Variables` in the same places.

        Args:
            use: the variables of such a call.
            form: what its program's arguments were.
            outputs: what its program returned, with a tuple of buffers for each value.
            dispatcher: the `Dispatcher` of that form. Its `call` takes tuples of buffers, runs the
                step over them, and gives `NOT_A_HIT` where it would enter Python.

        Returns:
            What is to serve all calls of the step now; None where that stays as it is: there is a
            plan already, a value does not live on its devices, or variables are inside something
            else than dicts, lists and tuples.
        """
        if not all(each._master.is_resident for each in use.variables):
            return None
        try:
            ports = [
                (key, port)
                for key, tree in use.arguments_in_turn()
                if (port := _Port.of(tree)) is not None
            ]
            returned = _returned(outputs, use.carry) if use.carried else None
        except _Unplanned:
            return None
        args, kwargs = use.given
        places = [(key, port.form) for key, port in ports]
        back = returned.form if returned is not None else None
        numbers = tuple(each._number for each in use.variables)
        key = (form, len(args), tuple(kwargs), repr(places), repr(back), numbers)
        with self._lock:
            if key in self._known:
                return None
            if len(self._known) == _PLANS_PER_STEP:
                self._known, self._newest = set(), self._dispatch
            self._known.add(key)
            plan = _plan(self._spec, use, form, ports, returned, dispatcher, self._newest)
            self._newest = functools.update_wrapper(plan, self._newest)
            return self._newest


class _Port:
    """The places of `Variables` in a tree of dicts, lists and tuples."""

    @classmethod
    def of(cls, tree: Any) -> _Port | None:
        """None for a tree without `Variables`. Raises `_Unplanned` for one of other containers."""
        is_one, inner = isinstance(tree, Variables), tree
        if not is_one and not any(isinstance(each, Variables) for each in tree_leaves(tree)):
            return None
        kind = type(tree)
        if not is_one and kind not in (dict, list, tuple):
            raise _Unplanned
        keys = () if is_one else sorted(tree) if kind is dict else range(len(tree))
        parts = [(key, port) for key in keys if (port := cls.of(inner[key])) is not None]
        return cls(None if is_one else kind, 0 if is_one else len(tree), parts)

    def __init__(self, kind: type | None, size: int, parts: list[tuple[Any, _Port]]):
        self._kind, self._size, self._parts = kind, size, parts  # Of `Variables`: None, 0, [].
        self.form: Any = kind and (kind.__name__, size, [(key, port.form) for key, port in parts])

    def get(self, tree: Any) -> list[Any]:
        """What is in these places of a tree. Raises `_Other` or `KeyError` if it has others."""
        if self._kind is None:
            return [tree]
        if type(tree) is not self._kind or len(tree) != self._size:
            raise _Other
        return [each for key, port in self._parts for each in port.get(tree[key])]

    def fill(self, tree: Any, things: Iterator[Any]) -> Any:
        """The tree with something else in these places."""
        if self._kind is None:
            return next(things)
        filled: Any = dict(tree) if self._kind is dict else list(tree)
        for key, port in self._parts:
            filled[key] = port.fill(tree[key], things)
        return tuple(filled) if self._kind is tuple else filled


def _returned(outputs: Any, carry: Sequence[Any]) -> _Port:
    """Where outputs of a program have what it carries, given those of the first call."""
    if comes_alone(outputs, carry):
        port = _Port.of(carry[0])
        assert port is not None
        return port
    if type(outputs) not in (tuple, list):
        raise _Unplanned
    parts = [(n, port) for n, tree in enumerate(carry) if (port := _Port.of(tree)) is not None]
    return _Port(type(outputs), len(outputs), parts)


def _plan(
    spec: StepSpec,
    use: Use,
    form: Form,
    ports: list[tuple[int | str, _Port]],
    returned: _Port | None,
    dispatcher: Any,
    other: Callable[..., Any],
) -> Callable[..., Any]:
    """A function for calls like one; it gives all others to `other`."""
    args, kwargs = use.given
    count, names = len(args), kwargs.keys()
    by_name = [name for name in kwargs if name not in form.by_position]
    masters = [each._master for each in use.variables]
    kinds = [type(next(iter(each.arrays()), None)) for each in masters[: use.carried]]
    find, take, split, join = _in_places(use, form, ports, returned, by_name)
    one_lock = use.variables[0]._lock if len(use.variables) == 1 else None
    call = functools.partial(dispatcher.call, **dict.fromkeys(by_name))
    # An iterator without end, which gives what the call returns for the last of `waiting`: no
    # interrupt comes between what JAX returns and the name `out`, as after a call.
    waiting: collections.deque[Any] = collections.deque()
    served = itertools.starmap(call if by_name else dispatcher.call, iter(waiting.pop, None))
    # A plan keeps no variables alive, and no buffers of theirs.
    ids = [*map(id, use.variables)]

    def forget(_: Any) -> None:
        ids.clear()
        masters.clear()

    references = [weakref.ref(each, forget) for each in use.variables]

    def plan(*args: Any, **kwargs: Any) -> Any:
        found = ()
        if len(args) == count and (kwargs.keys() == names if kwargs else not names):
            found = find(args, kwargs)
        if not found or [*map(id, found)] != ids or not references:
            return other(*args, **kwargs)
        with one_lock or locked(found):
            out: Any = NOT_A_HIT
            try:
                values = [each.packed for each in masters]
                taken = [each.buffers for each in values]
                waiting.append(take(args, kwargs, taken, call.keywords))
                for out in served:
                    if out is NOT_A_HIT:
                        break
                    news = split(out)
                    for new, kind in zip(news, kinds, strict=False):
                        # Else it may be something else that is a tuple.
                        if type(new) is not tuple or (type(new[0]) if new else _NONE) is not kind:
                            return put_back(out, carried(spec, args, kwargs), _write)
                    for master, value, new in zip(masters, values, news, strict=False):
                        value.buffers = new
                        master.version += 1
                    return join(out, found)
            except (RuntimeError, ValueError) as error:
                waiting.clear()
                if "deleted" not in str(error):  # The usual way says what is.
                    raise
            except _OTHER:
                waiting.clear()
                if out is not NOT_A_HIT:
                    return put_back(out, carried(spec, args, kwargs), _write)
            except BaseException:
                waiting.clear()
                if out is not NOT_A_HIT:  # Interrupted: what it took is gone.
                    put_back(out, carried(spec, args, kwargs), _write)
                raise
            finally:
                if by_name:  # The buffers that were passed by name.
                    call.keywords.update(dict.fromkeys(by_name))
        return other(*args, **kwargs)

    return plan


def _in_places(
    use: Use,
    form: Form,
    ports: list[tuple[int | str, _Port]],
    returned: _Port | None,
    by_name: list[str],
) -> tuple[Callable, Callable, Callable, Callable]:
    """What finds the variables of a call, makes the arguments of its program, finds in its outputs
    what they carry, and puts the variables there. One variable that stands alone is simple.
    """
    args, kwargs = use.given
    key, port = ports[0]
    if len(ports) == 1 and port.form is None and isinstance(key, int) and not kwargs:

        def take_one(args: tuple, kwargs: dict, taken: list, named: dict) -> list[Any]:
            passed = [*args]
            passed[key] = taken[0]
            return passed

        find, take = (lambda args, kwargs: (args[key],)), take_one
    else:
        number_of = {id(each): number for number, each in enumerate(use.variables)}
        holders = {True: kwargs, False: args}
        given = [x for key, port in ports for x in port.get(holders[isinstance(key, str)][key])]
        numbers = [number_of[id(each)] for each in given]
        first = [numbers.index(number) for number in range(len(use.variables))]

        def find(args: tuple, kwargs: dict) -> Sequence[Any]:
            found: list[Any] = []
            try:
                for key, port in ports:
                    found += port.get(kwargs[key] if isinstance(key, str) else args[key])
            except _OTHER:
                return ()
            same = all(found[first[n]] is each for n, each in zip(numbers, found, strict=True))
            return [found[place] for place in first] if same else ()

        def take(args: tuple, kwargs: dict, taken: list, named: dict) -> list[Any]:
            # What comes again is empty there.
            things = iter([taken[n] if first[n] == k else () for k, n in enumerate(numbers)])
            passed, rest = [*args], dict(kwargs)
            for key, port in ports:
                holder: Any = rest if isinstance(key, str) else passed
                holder[key] = port.fill(holder[key], things)
            named.update((name, rest[name]) for name in by_name)
            return passed + [rest[name] for name in form.by_position]

    if returned is None:
        return find, take, lambda out: (), lambda out, found: out
    if returned.form is None:
        return find, take, lambda out: (out,), lambda out, found: found[0]
    return find, take, returned.get, lambda out, found: returned.fill(out, iter(found))


_NONE, _OTHER = type(None), (_Other, LookupError)


def _write(each: Variables, buffers: tuple) -> None:
    if each._master.packed.buffers is not buffers:  # An interrupt may come after that.
        each._master.write(Packed(each._layout, buffers))
