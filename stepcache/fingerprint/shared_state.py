"""Code that changes what other threads see: a flag, a count, or a stack, that is not its own.

A trace in the background would disturb them. They may find the flag set, a tracer in the list, or
their own entry of the stack gone, and trace another program than they would alone. Of the user's
code any such change counts; of packages, that they take from a list what they have put there, for
most of them only fill caches.
"""

from __future__ import annotations

import dis
import itertools
import threading
from collections import defaultdict, deque
from collections.abc import Container, Iterator
from types import CodeType, FrameType
from typing import Any, NamedTuple

from stepcache.fingerprint.classes import is_plain
from stepcache.fingerprint.findings import Findings
from stepcache.fingerprint.instances import attributes_of
from stepcache.fingerprint.instructions import LOADS_ATTRIBUTE, LOADS_GLOBAL, instructions_of
from stepcache.fingerprint.known_packages import FRAMEWORKS
from stepcache.fingerprint.provenance import INSTALLED, USER, origin_of_file, package_of
from stepcache.fingerprint.tokens import GENERATORS

ALONE = "not traced beside other threads"
"""Stands among the names that a trace asked for if it changes what others see."""

_PUSHES = frozenset("append appendleft add insert".split())
_POPS = frozenset("pop popleft remove discard popitem clear".split())
_MOVES = _PUSHES | _POPS
_CONTAINERS = (list, deque, dict, set)
_SETS = frozenset(
    dis.opmap[f"{what}_{of}"]
    for what in ("STORE", "DELETE")
    for of in ("GLOBAL", "DEREF", "ATTR", "SUBSCR")
)
_LOADS_VARIABLE = LOADS_GLOBAL | {"LOAD_DEREF", "LOAD_FAST", "LOAD_FAST_BORROW"}
_TAKES_OUT = LOADS_ATTRIBUTE | LOADS_GLOBAL | {"LOAD_DEREF", "BINARY_SUBSCR", "FOR_ITER"}
_SETTERS = frozenset(("setattr", "delattr"))
# What draws from a generator of random numbers. Where its state is not put back, the step is traced
# at each start (`left_by_traces.moved_on`), and not checked.
_DRAWS = frozenset(name for kind in GENERATORS for name in dir(kind) if name[0] != "_")
_CHANGES = _MOVES | _SETTERS | _DRAWS
_MAKES_ITS_OWN = frozenset(("__init__", "__new__", "__post_init__", "__setattr__"))


class _Write(NamedTuple):
    """A change of what a variable leads to.

    Attributes:
        owner: the identity of its namespace; of an argument, of its class.
        path: the variable, and what is asked of it.
        how: "set", "push" or "pop"; of the user's code always "set".
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
    names = _CHANGES if is_users else _MOVES
    sets = is_users and not _SETS.isdisjoint(code.co_code[::2])
    if id(code) in _writes or not (sets or not names.isdisjoint(code.co_names)):
        return
    found = _writes_of(code, frame)
    if is_users:
        _writes[id(code)] = code, tuple(each._replace(how="set") for each in found)
    else:
        _writes[id(code)] = code, tuple(each for each in found if each.how != "set")


def disturbs_others(recording: Findings) -> bool:
    """Whether a trace changed what other threads see."""
    found: dict[str, set[tuple]] = defaultdict(set)
    for code in recording.entered.values():
        for each in _writes.get(id(code), (code, ()))[1]:
            found[each.how].add((each.owner, each.path))
    return bool(found["set"]) or not found["push"].isdisjoint(found["pop"])


def _writes_of(code: CodeType, frame: FrameType) -> Iterator[_Write]:
    chain: tuple[str, ...] = ()  # The variable on the top of the stack, and what is asked of it.
    below: tuple[str, ...] = ()  # What lies below a key.
    copied: tuple[str, ...] = ()  # What `+=` will be stored to.
    called = ""  # The function that lies below that, if it is `setattr` or `delattr`.
    instructions = instructions_of(code)
    shared = _shared_locals(code, instructions)
    for each in instructions:
        operation, argument = each.opname, each.argval
        written: tuple[str, ...] = ()
        how = "set"
        is_key = bool(chain) and (operation == "LOAD_CONST" or operation.startswith("LOAD_FAST"))
        if operation in ("STORE_GLOBAL", "DELETE_GLOBAL") or (
            operation in ("STORE_DEREF", "DELETE_DEREF") and argument in code.co_freevars
        ):
            written = (argument,)
        elif operation in ("STORE_ATTR", "DELETE_ATTR"):
            written = (*(chain or copied), argument) if chain or copied else ()
        elif operation in ("STORE_SUBSCR", "DELETE_SUBSCR"):
            written = below or copied
        elif called in _SETTERS and is_key:
            written, called = (*chain, str(argument)), ""
        elif operation in LOADS_ATTRIBUTE and chain and argument in _MOVES | _DRAWS:
            found = _value_at(chain, frame)
            is_changed = issubclass(type(found), _CONTAINERS if argument in _MOVES else GENERATORS)
            is_unknown = found is None and chain[0] in shared and argument in _MOVES
            written = chain if is_changed or is_unknown else ()
            how = "push" if argument in _PUSHES else "pop"
        if written and (owner := _owner(written, code, frame, shared)):
            yield _Write(owner, written, how)
        copied = (below or chain or copied) if operation == "COPY" else (() if written else copied)
        below = (*chain, f"[{argument!r}]") if is_key else ()
        if operation in LOADS_GLOBAL and argument in _SETTERS:
            called, chain = argument, ()
        elif operation in _LOADS_VARIABLE:
            chain = (argument,)
        else:
            chain = (*chain, argument) if chain and operation in LOADS_ATTRIBUTE else ()


def _shared_locals(code: CodeType, instructions: list[dis.Instruction]) -> set[str]:
    """The local variables that are taken out of something, as `layer` in `for layer in layers`."""
    return {
        each.argval
        for before, each in itertools.pairwise(instructions)
        if each.opname == "STORE_FAST" and before.opname in _TAKES_OUT
    }


def _owner(
    written: tuple[str, ...], code: CodeType, frame: FrameType, shared: Container[str]
) -> int:
    """What a variable belongs to that other threads may share; 0 if it is the code's own."""
    variable = written[0]
    is_own = variable in code.co_varnames or variable in code.co_cellvars
    held = frame.f_locals if is_own or variable in code.co_freevars else frame.f_globals
    value = held.get(variable)
    kind = type(value)
    if issubclass(kind, threading.local):
        return 0
    if not is_own:
        return id(value) if variable in code.co_freevars else id(held)
    is_item = len(written) == 2 and written[1].startswith("[")  # Of metrics, most of the time.
    if variable in shared and variable not in held:
        return 0 if is_item else id(code)
    is_argument = variable in code.co_varnames[: code.co_argcount]
    is_shared = variable == "self" or (is_argument and len(written) > 1 and not is_item)
    is_shared = is_shared and code.co_name not in _MAKES_ITS_OWN
    return id(kind) if is_shared and value is not None and is_plain(kind) else 0


def _value_at(chain: tuple[str, ...], frame: FrameType) -> Any:
    name, *rest = chain
    value = frame.f_locals.get(name, frame.f_globals.get(name))
    for each in rest:
        value = attributes_of(value).get(each)
    return value
