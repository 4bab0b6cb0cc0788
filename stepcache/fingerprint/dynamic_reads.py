"""Whether code of an installed package may read attributes of an object that it does not name.

Pure: bytecode in, an answer out. What code does with its own `self` does not count: of an object
whose class inherits from a package's, all attributes are noted anyway.
"""

from __future__ import annotations

import dis
from types import CodeType

from stepcache.fingerprint.instructions import (
    LOADS_ATTRIBUTE,
    attribute_asked_for,
    instructions_of,
    passes_on_what_it_is_asked_for,
)

READS_ANY = "read any attribute"
"""Stands among the names that code reads for all of them."""

_BY_NAME = frozenset(("getattr", "hasattr", "getattr_static"))
_OF_WHOLE = frozenset(("vars", "dir", "getmembers"))
_BY_TEXT = frozenset(("attrgetter", "methodcaller", "__getattr__"))
_ALL = _BY_NAME | _OF_WHOLE | _BY_TEXT | {"__dict__"}
_OWN = frozenset(("self", "cls", "mcs", "mcls"))
MATCH_CLASS = dis.opmap["MATCH_CLASS"]
_LOADS_NAME = ("LOAD_GLOBAL", "LOAD_NAME", "LOAD_ATTR", "LOAD_METHOD")


def may_read_any(code: CodeType) -> bool:
    """Whether code may ask another object than its own for attributes by computed names."""
    if _ALL.isdisjoint(code.co_names) and MATCH_CLASS not in code.co_code[::2]:
        return False
    instructions = instructions_of(code)
    for index, instruction in enumerate(instructions):
        name = instruction.argval
        if instruction.opname == "MATCH_CLASS" and instruction.arg:  # By `__match_args__`.
            return True
        if instruction.opname not in _LOADS_NAME or name not in _ALL:
            continue
        if name == code.co_name == "__getattr__":  # As `super().__getattr__(name)` does.
            continue
        if name == "__dict__":
            if not _is_own(instructions[index - 1]):
                return True
            continue
        following = instructions[index + 1 :]
        is_known = len(following) > 2 and (
            _is_harmless(following, by_name=name in _BY_NAME)
            or (name == "getattr" and passes_on_what_it_is_asked_for(code, following))
        )
        if name in _BY_TEXT or not is_known:
            return True
    return False


def _is_own(instruction: dis.Instruction) -> bool:
    return instruction.opname.startswith("LOAD_FAST") and instruction.argval in _OWN


def _is_harmless(following: list[dis.Instruction], by_name: bool) -> bool:
    """Whether a call reads from `self` itself, or the attribute that a constant names."""
    if following[0].opname == "CALL":  # Without arguments.
        return True
    if _is_own(following[0]) and following[1].opname not in LOADS_ATTRIBUTE:
        return True
    return by_name and attribute_asked_for(following) is not None
