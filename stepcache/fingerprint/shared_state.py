"""Code that changes for a while what other threads see: a flag, or a stack, that is not its own.

A trace in the background would disturb them. They may find the flag set, or their own entry of the
stack gone, and trace another program than they would alone. Such code sets one variable, attribute
or item twice, at two places or as it is entered twice, or takes from a list what it has put there.
"""

from __future__ import annotations

import dis
import threading
from collections import defaultdict, deque
from collections.abc import Iterator
from types import CodeType, FrameType
from typing import Any, NamedTuple

from stepcache.fingerprint import active_recordings as active
from stepcache.fingerprint.classes import is_plain
from stepcache.fingerprint.findings import Findings
from stepcache.fingerprint.instances import attributes_of
from stepcache.fingerprint.instructions import LOADS_ATTRIBUTE, LOADS_GLOBAL, instructions_of
from stepcache.fingerprint.known_packages import FRAMEWORKS
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
_SETTERS = frozenset(("setattr", "delattr"))
_MAKES_ITS_OWN = frozenset(("__init__", "__new__", "__post_init__", "__setattr__"))


class _Write(NamedTuple):
    """A change of what a variable leads to.

    Attributes:
        owner: the identity of its namespace; of an argument, of its class.
        path: the variable, but for an argument, and what is asked of it.
        how: "set", "push" or "pop".
        argument: its name; empty for another variable.
    """

    owner: int
    path: tuple[str, ...]
    how: str
    argument: str

    def of(self, frame: FrameType) -> tuple[int, tuple[str, ...], int]:
        """Identifies what it changes, where code is entered."""
        value = frame.f_locals.get(self.argument) if self.argument else None
        return self.owner, self.path, id(value)


_writes: dict[int, tuple[CodeType, tuple[_Write, ...]]] = {}  # By identity of the code.


def note_writes(code: CodeType, frame: FrameType) -> None:
    """Notes what code that is being entered changes of what it shares."""
    known = _writes.get(id(code))
    if known is None:
        origin = origin_of_file(code.co_filename)
        is_users = origin == USER
        if not is_users and (origin != INSTALLED or package_of(code.co_filename) in FRAMEWORKS):
            return
        names = _MOVES | _SETTERS if is_users else _MOVES
        sets = is_users and not _SETS.isdisjoint(code.co_code[::2])
        if not sets and names.isdisjoint(code.co_names):
            return
        found = tuple(_writes_of(code, frame))
        known = code, tuple(each for each in found if is_users or each.how != "set")
        _writes[id(code)] = known
    sets = [each.of(frame) for each in known[1] if each.how == "set"]
    for recording in active.current() if sets else ():
        before = len(recording.written)
        recording.written.update(sets)
        if len(recording.written) < before + len(sets):
            recording.settings.add(ALONE)


def has_to_be_seen_again(code: CodeType) -> bool:
    """Whether it matters that a trace enters some code twice."""
    sets = any(each.how == "set" for each in _writes.get(id(code), (code, ()))[1])
    return sets and any(ALONE not in each.settings for each in active.current())


def disturbs_others(recording: Findings) -> bool:
    """Whether a trace changed for a while what other threads see."""
    found: dict[str, set[tuple]] = defaultdict(set)
    for code in recording.entered.values():
        for each in _writes.get(id(code), (code, ()))[1]:
            found[each.how].add((each.owner, each.path))
    return ALONE in recording.settings or not found["push"].isdisjoint(found["pop"])


def _writes_of(code: CodeType, frame: FrameType) -> Iterator[_Write]:
    chain: tuple[str, ...] = ()  # The variable on the top of the stack, and what is asked of it.
    below: tuple[str, ...] = ()  # What lies below a key.
    is_setter = False  # Whether below that lies `setattr`.
    for each in instructions_of(code):
        operation, argument = each.opname, each.argval
        written: tuple[str, ...] = ()
        how = "set"
        is_key = bool(chain) and (operation == "LOAD_CONST" or operation.startswith("LOAD_FAST"))
        if operation in ("STORE_GLOBAL", "DELETE_GLOBAL"):
            written = (argument,)
        elif operation in ("STORE_ATTR", "DELETE_ATTR") and chain:
            written = (*chain, argument)
        elif operation in ("STORE_SUBSCR", "DELETE_SUBSCR"):
            written = below
        elif is_setter and is_key:
            written, is_setter = (*chain, str(argument)), False
        elif operation in LOADS_ATTRIBUTE and chain and argument in _MOVES:
            is_container = issubclass(type(_value_at(chain, frame)), _CONTAINERS)
            written = chain if is_container else ()
            how = "push" if argument in _PUSHES else "pop"
        if written and (owner := _owner(written[0], code, frame, operation)):
            variable, *rest = written
            argument = variable if variable in code.co_varnames else ""
            yield _Write(owner, tuple(rest) if argument else written, how, argument)
        below = (*chain, f"[{argument!r}]") if is_key else ()
        if operation in LOADS_GLOBAL and argument in _SETTERS:
            is_setter, chain = True, ()
        elif operation in _LOADS_VARIABLE:
            chain = (argument,)
        else:
            chain = (*chain, argument) if chain and operation in LOADS_ATTRIBUTE else ()


def _owner(variable: str, code: CodeType, frame: FrameType, operation: str) -> int:
    """What a variable belongs to that other threads may share; 0 if it is the code's own."""
    is_own = variable in code.co_varnames or variable in code.co_cellvars
    held = frame.f_locals if is_own or variable in code.co_freevars else frame.f_globals
    value = held.get(variable)
    kind = type(value)
    if issubclass(kind, threading.local):
        return 0
    if is_own:
        is_argument = variable in code.co_varnames[: code.co_argcount]
        is_shared = variable == "self" or (is_argument and not operation.endswith("_SUBSCR"))
        is_shared = is_shared and code.co_name not in _MAKES_ITS_OWN
        return id(kind) if is_shared and value is not None and is_plain(kind) else 0
    return id(value) if variable in code.co_freevars else id(held)


def _value_at(chain: tuple[str, ...], frame: FrameType) -> Any:
    name, *rest = chain
    value = frame.f_locals.get(name, frame.f_globals.get(name))
    for each in rest:
        value = attributes_of(value).get(each)
    return value
