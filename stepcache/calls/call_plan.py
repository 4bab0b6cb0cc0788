"""Compiles what a call with `Variables` does, to serve later calls with the same ones.

Nearly all calls of a training loop pass the same `Variables` in the same places. A plan is a Python
function written for these, as `dataclasses` writes methods: it checks that they are the same
objects, gives their buffers to JAX's dispatcher, and puts back what comes out of it. A call costs
about 0.6 µs more than that of `jax.jit`; to find the variables again would cost ten times as much.
"""

from __future__ import annotations

import collections
import functools
import itertools
import keyword
import textwrap
import threading
import weakref
from collections.abc import Callable, Iterator, Sequence
from types import CodeType
from typing import Any

from jax.tree_util import tree_leaves

from stepcache.calls.bound_variables import NOT_A_HIT
from stepcache.calls.over_buffers import Form
from stepcache.calls.residence import Use, carried, comes_alone, put_back
from stepcache.calls.step_spec import StepSpec
from stepcache.variables.checkpoint_items import locked
from stepcache.variables.packing import Packed
from stepcache.variables.variables import Variables

_PLAN = """
def plan({parameters}*args, **kwargs):
    if {checks}:
{locked}
    return other(*given({given}), *args, **kwargs)
"""
# As `with` a lock does, in less time: `taking` calls `acquire`, and no interrupt comes between that
# and `try`.
_LOCKED = """\
for _ in taking{n}:
    try:
{body}
    finally:
        release{n}()
    break
"""
_BODY = """\
out = NOT_A_HIT
try:
    {take}  # Until the end: to free buffers may let another thread look.
    waiting.append(({arguments}))
    # No interrupt comes between what JAX returns and the name `out`, as after a call.
    for out in served:
        if {expected}:
            {put}
            return {outputs}
        if out is not NOT_A_HIT:
            return put_back(out, carried(({given}), kwargs), write)
        break
except (RuntimeError, ValueError) as error:
    waiting.clear()
    if "deleted" not in str(error):  # The usual way says what is.
        raise
except BaseException:
    waiting.clear()
    if out is not NOT_A_HIT:  # Interrupted: what it took is gone.
        put_back(out, carried(({given}), kwargs), write)
    raise
finally:
    {forget}  # The buffers that were passed by name.
"""
_PLANS_PER_STEP = 8
_NESTED = 7  # Python nests no more than 20 blocks, of which each lock takes two.
_FEW = 8  # Outputs that are named one by one, as to slice them takes time.
_NOT_GIVEN = object()


def _given(*args: Any) -> Iterator[Any]:
    """The arguments of a call without defaults of a plan's parameters."""
    return (each for each in args if each is not _NOT_GIVEN)


class _Unplanned(Exception):
    """Such calls cannot be planned."""


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
        names: dict[str, Any] = {"__name__": __name__, "NOT_A_HIT": NOT_A_HIT}
        names |= {"dispatcher": dispatcher, "call": dispatcher.call}
        names |= {"put_back": put_back, "write": _write, "given": _given, "NOT_GIVEN": _NOT_GIVEN}
        names |= {"carried": functools.partial(carried, self._spec), "locked": locked}
        try:
            source = _Source(use, form, outputs, names).text
        except _Unplanned:
            return None
        constants = [value for name, value in names.items() if name.startswith("key")]
        key = (source, form, *constants, *(each._number for each in use.variables))
        with self._lock:
            if key in self._known:
                return None
            if len(self._known) == _PLANS_PER_STEP:
                self._known, self._newest = set(), self._dispatch
            self._known.add(key)
            names["other"] = self._newest
            _add_call(names)
            _add_variables(names, use.variables)
            exec(_compiled(source), names)
            self._newest = functools.update_wrapper(names.pop("plan"), self._newest)
            return self._newest


@functools.lru_cache(maxsize=64)  # Most steps have plans of few forms; to compile one takes 0.3 ms.
def _compiled(source: str) -> CodeType:
    # Named as a file of this package, whose frames JAX hides.
    return compile(source, f"{__file__}:plan", "exec")


def _add_call(names: dict[str, Any]) -> None:
    """Adds an iterator without end, which gives what `call` returns for the last of `waiting`.

    One that is made for each call takes more time. `waiting` is empty but for an instant.
    """
    names["waiting"] = waiting = collections.deque()
    names["served"] = itertools.starmap(names["call"], iter(waiting.pop, None))


def _add_variables(names: dict[str, Any], variables: Sequence[Variables]) -> None:
    """Adds what a plan uses of its variables."""
    for n, each in enumerate(variables):
        # A master has a name of its own: `each._master` would take 0.2 µs, as attributes of
        # `Variables` are looked up in Python.
        names[f"known{n}"] = weakref.ref(each, functools.partial(_forget, names, f"master{n}"))
        names[f"master{n}"] = each._master
        names[f"type{n}"] = type(next(iter(each._master.arrays()), None))
        names[f"taking{n}"] = iter(each._lock.acquire, False)
        names[f"release{n}"] = each._lock.release


def _forget(names: dict[str, Any], master: str, _: Any) -> None:
    """Keeps a master no longer than its variables live."""
    names.pop(master, None)


def _write(each: Variables, buffers: tuple) -> None:
    each._master.write(Packed(each._layout, buffers))


class _Source:
    """The source code of a plan, as `text`; its constants are added to `names`."""

    def __init__(self, use: Use, form: Form, outputs: Any, names: dict[str, Any]):
        args, kwargs = use.given
        if not all(name.isidentifier() and not keyword.iskeyword(name) for name in kwargs):
            raise _Unplanned
        self._number_of = {id(each): number for number, each in enumerate(use.variables)}
        self._positional = [f"a{position}" for position in range(len(args))]
        # The local name of each, once it is known that it is there.
        self._local: dict[int, str] = {}
        self._put: list[str] = []
        checks = [f"len(kwargs) == {len(kwargs)}" if kwargs else "not kwargs", "not args"]
        arguments: dict[int | str, str] = {}
        for key, argument in use.arguments_in_turn():
            where = f"kwargs[{key!r}]" if isinstance(key, str) else self._positional[key]
            if isinstance(key, str):
                checks.append(f"{key!r} in kwargs")
            arguments[key] = _rebuilt(where, argument, self._taken, checks, names)
        if args and arguments[len(args) - 1] == self._positional[-1]:  # Not checked yet.
            checks.append(f"{self._positional[-1]} is not NOT_GIVEN")
        passed = [arguments[key] for key in (*range(len(args)), *form.by_position)]
        by_name = [name for name in kwargs if name not in form.by_position]
        if by_name:
            names["call"] = named = functools.partial(names["call"], **dict.fromkeys(by_name))
            names["named"] = named.keywords
        expected: list[str] = [] if use.carried else ["out is not NOT_A_HIT"]
        returned = "out"
        if use.carried:
            returned = _returned(outputs, use.carry, self._written, expected, names)
        given = "".join(f"{name}, " for name in self._positional)
        take = [_take(n, n < use.carried) for n in range(len(use.variables))]
        body = _BODY.format(
            take="; ".join(take + [f"named[{name!r}] = {arguments[name]}" for name in by_name]),
            arguments="".join(f"{each}, " for each in passed),
            expected=" and ".join(expected),
            put="; ".join(self._put) or "pass",
            outputs=returned,
            given=given,
            forget="; ".join(f"named[{name!r}] = None" for name in by_name) or "pass",
        )
        parameters = "".join(f"{name}=NOT_GIVEN, " for name in self._positional)
        self.text = _PLAN.format(
            parameters=parameters + "/, " * bool(args),
            checks=" and ".join(checks),
            locked=textwrap.indent(_locked(use, body), " " * 8),
            given=given,
        )

    def _taken(self, where: str, each: Variables) -> tuple[str, str]:
        number = self._number_of[id(each)]
        if number in self._local:
            return f"{where} is {self._local[number]}", "()"
        self._local[number] = where
        if where in self._positional:  # A reference to variables that are gone gives None.
            return f"{where} is known{number}() and {where} is not None", f"k{number}"
        self._local[number] = name = f"v{number}"  # Somebody else may change the tree meanwhile.
        check = f"({name} := known{number}()) is not None and {where} is {name}"
        return check, f"k{number}"

    def _written(self, where: str, each: Variables) -> tuple[str, str]:
        number = self._number_of[id(each)]
        new = f"b{number}"
        self._put.append(f"p{number}.buffers = {new}; master{number}.version += 1")
        # Else it may be something else that is a tuple: the carry where it comes not alone.
        first = f"type({new}[0]) is type{number}" if each._layout.buffers else f"not {new}"
        return f"type({new} := {where}) is tuple and {first}", self._local[number]


def _take(number: int, is_carried: bool) -> str:
    if is_carried:
        return f"p{number} = master{number}.packed; k{number} = p{number}.buffers"
    return f"k{number} = master{number}.packed.buffers"


def _locked(use: Use, body: str) -> str:
    """A body that runs under the locks of the variables, in their order."""
    in_order = sorted(range(len(use.variables)), key=lambda n: use.variables[n]._number)
    if rest := in_order[_NESTED:]:
        known = ", ".join(f"known{n}()" for n in rest)
        body = f"with locked([{known}]):\n{textwrap.indent(body, ' ' * 4)}"
    for n in reversed(in_order[:_NESTED]):
        body = _LOCKED.format(n=n, body=textwrap.indent(body, " " * 8))
    return body


def _returned(
    outputs: Any,
    carry: Sequence[Any],
    written: Callable[[str, Variables], tuple[str, str]],
    expected: list[str],
    names: dict[str, Any],
) -> str:
    """An expression for the outputs with the carried variables in them.

    Given the outputs of the first call; `written`, `expected` and `names` are as for `_rebuilt`.
    """
    if comes_alone(outputs, carry):
        return _rebuilt("out", carry[0], written, expected, names)
    kind = type(outputs)
    if kind not in (tuple, list):
        raise _Unplanned
    expected.append(f"type(out) is {kind.__name__} and len(out) == {len(outputs)}")
    news = [_rebuilt(f"out[{i}]", tree, written, expected, names) for i, tree in enumerate(carry)]
    rest = [f"out[{i}]" for i in range(len(carry), len(outputs))]
    if len(rest) > _FEW:
        rest = [f"*out[{len(carry)}:]"]
    return _sequence(kind, news + rest)


def _rebuilt(
    where: str,
    tree: Any,
    leaf: Callable[[str, Variables], tuple[str, str]],
    checks: list[str],
    names: dict[str, Any],
) -> str:
    """An expression for a tree with something else in the place of its `Variables`.

    Given an expression for the tree, and how it was in the first call. `leaf` returns, for
    variables and where they are, what to check and what takes their place. `checks` gets what
    there is to check before the expression is right, and `names` the keys of dicts.
    """
    if isinstance(tree, Variables):
        check, new = leaf(where, tree)
        checks.append(check)
        return new
    if not any(isinstance(each, Variables) for each in tree_leaves(tree)):
        return where
    kind = type(tree)
    if kind not in (dict, list, tuple):
        raise _Unplanned
    checks.append(f"type({where}) is {kind.__name__} and len({where}) == {len(tree)}")
    given = sorted(tree) if kind is dict else range(len(tree))
    keys = list(map(str, given))
    if kind is dict:
        keys = [f"key{len(names) + n}" for n in range(len(tree))]
        names.update(zip(keys, given, strict=True))
        checks.extend(f"{key} in {where}" for key in keys)
    parts = [
        _rebuilt(f"{where}[{key}]", tree[index], leaf, checks, names)
        for key, index in zip(keys, given, strict=True)
    ]
    if kind is dict:
        return f"{{{', '.join(f'{key}: {part}' for key, part in zip(keys, parts, strict=True))}}}"
    return _sequence(kind, parts)


def _sequence(kind: type, parts: list[str]) -> str:
    return f"[{', '.join(parts)}]" if kind is list else f"({', '.join(parts)},)"
