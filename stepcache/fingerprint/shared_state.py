"""Code that changes for a while what other threads see: a flag, or a stack, that is not its own.

A trace in the background would disturb them. They may find the flag set, or their own entry of the
stack gone, and trace another program than they would alone. Such code sets one variable, attribute
or item at two places, or takes from a list what it has put there.
"""

from __future__ import annotations

import dis
import threading
from collections import defaultdict, deque
from collections.abc import Iterator
from types import CodeType, FrameType
from typing import Any, NamedTuple

from stepcache.fingerprint.callers import FRAMEWORKS
from stepcache.fingerprint.classes import is_plain
from stepcache.fingerprint.findings import Findings
from stepcache.fingerprint.instances import attributes_of
from stepcache.fingerprint.instructions import LOADS_ATTRIBUTE, LOADS_GLOBAL, instructions_of
from stepcache.fingerprint.provenance import INSTALLED, USER, origin_of_file, package_of

ALONE = "not traced beside other threads"
"""Stands among the names that a trace asked for if it changes for a while what others see."""

_PUSHES = frozenset("append appendleft add insert".split())
_POPS = frozenset("pop popleft remove discard popitem clear".split())
_MOVES = _PUSHES | _POPS
_CONTAINERS = (list, deque, dict, set)
_SETS = frozenset(
    dis.opmap[f"{what}_{of}"] for what in ("STORE", "DELETE") for of in ("GLOBAL", "ATTR", "SUBSCR")
)
_LOADS_VARIABLE = LOADS_GLOBAL | {"LOAD_DEREF", "LOAD_FAST", "LOAD_FAST_BORROW"}
_MAKES_ITS_OWN = frozenset(("__init__", "__new__", "__post_init__", "__setattr__"))


class _Write(NamedTuple):
    """A change of what a variable leads to.

    Attributes:
        owner: the identity of its namespace, or of the class of `self`.
        path: the variable, and what is asked of it.
        how: "set", "push" or "pop".
    """

    owner: int
    path: tuple[str, ...]
    how: str


_writes: dict[int, tuple[CodeType, tuple[_Write, ...]]] = {}  # By identity of the code.


def note_writes(code: CodeType, frame: FrameType) -> None:
    """Notes what code that is being entered changes of what it shares."""
    origin = origin_of_file(code.co_filename)
    is_users = origin == USER
    if not is_users and (origin != INSTALLED or package_of(code.co_filename) in FRAMEWORKS):
        return
    calls = not _MOVES.isdisjoint(code.co_names)
    if id(code) in _writes or not (calls or (is_users and not _SETS.isdisjoint(code.co_code[::2]))):
        return
    found = tuple(_writes_of(code, frame))
    _writes[id(code)] = code, tuple(each for each in found if is_users or each.how != "set")


def disturbs_others(recording: Findings) -> bool:
    """Whether a trace changed for a while what other threads see."""
    found: dict[tuple[int, tuple[str, ...]], list[str]] = defaultdict(list)
    for code in recording.entered.values():
        for each in _writes.get(id(code), (code, ()))[1]:
            found[each.owner, each.path].append(each.how)
    return any(how.count("set") > 1 or {"push", "pop"} <= set(how) for how in found.values())


def _writes_of(code: CodeType, frame: FrameType) -> Iterator[_Write]:
    chain: tuple[str, ...] = ()  # The variable on the top of the stack, and what is asked of it.
    below: tuple[str, ...] = ()  # What lies below a key.
    for each in instructions_of(code):
        operation, argument = each.opname, each.argval
        written: tuple[str, ...] = ()
        how = "set"
        if operation in ("STORE_GLOBAL", "DELETE_GLOBAL"):
            written = (argument,)
        elif operation in ("STORE_ATTR", "DELETE_ATTR") and chain:
            written = (*chain, argument)
        elif operation in ("STORE_SUBSCR", "DELETE_SUBSCR"):
            written = below
        elif operation in LOADS_ATTRIBUTE and chain and argument in _MOVES:
            is_container = issubclass(type(_value_at(chain, frame)), _CONTAINERS)
            written = chain if is_container else ()
            how = "push" if argument in _PUSHES else "pop"
        if written and (owner := _owner(written[0], code, frame)):
            yield _Write(owner, written, how)
        is_key = bool(chain) and (operation == "LOAD_CONST" or operation.startswith("LOAD_FAST"))
        below = (*chain, f"[{argument!r}]") if is_key else ()
        if operation in _LOADS_VARIABLE:
            chain = (argument,)
        else:
            chain = (*chain, argument) if chain and operation in LOADS_ATTRIBUTE else ()


def _owner(variable: str, code: CodeType, frame: FrameType) -> int:
    """What a variable belongs to that other threads may share; 0 if it is the code's own."""
    is_own = variable in code.co_varnames or variable in code.co_cellvars
    held = frame.f_locals if is_own or variable in code.co_freevars else frame.f_globals
    value = held.get(variable)
    kind = type(value)
    if issubclass(kind, threading.local):
        return 0
    if is_own:
        is_method = variable == "self" and code.co_name not in _MAKES_ITS_OWN
        return id(kind) if is_method and value is not None and is_plain(kind) else 0
    return id(value) if variable in code.co_freevars else id(held)


def _value_at(chain: tuple[str, ...], frame: FrameType) -> Any:
    name, *rest = chain
    value = frame.f_locals.get(name, frame.f_globals.get(name))
    for each in rest:
        value = attributes_of(value).get(each)
    return value
