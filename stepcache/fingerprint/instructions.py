"""The instructions of code: those that matter, and short stretches of them that are known."""

from __future__ import annotations

import dis
import re
from types import CodeType

LOADS_GLOBAL = frozenset({"LOAD_GLOBAL", "LOAD_NAME", "LOAD_FROM_DICT_OR_GLOBALS"})
LOADS_ATTRIBUTE = frozenset({"LOAD_ATTR", "LOAD_METHOD"})
# They stand between the instructions that matter, and change nothing about the value on the stack.
_TRANSPARENT = frozenset({"CACHE", "PUSH_NULL", "EXTENDED_ARG", "NOP", "RESUME", "PRECALL"})
_OF_VARIABLE = re.compile("(?:LOAD|STORE)_FAST(?:_BORROW)?")


def instructions_of(code: CodeType) -> list[dis.Instruction]:
    """The instructions that matter. Two that Python 3.13 has joined in one are two here."""
    found: list[dis.Instruction] = []
    for each in dis.get_instructions(code):
        if each.opname in _TRANSPARENT:
            continue
        joined = _OF_VARIABLE.findall(each.opname)
        if len(joined) < 2:
            found.append(each)
            continue
        for operation, variable in zip(joined, each.argval, strict=True):
            found.append(each._replace(opname=operation, argval=variable))
    return found


def attribute_asked_for(following: list[dis.Instruction]) -> str | None:
    """The attribute that a call of `getattr` or `hasattr` asks for, if a constant names it.

    Args:
        following: what comes after `getattr` is loaded: `(config.model, "rate", default)`.
    """
    after = _after_chain(following, 0)
    name = following[after].argval if following[after].opname == "LOAD_CONST" else None
    if not (after and isinstance(name, str) and name.isidentifier()):
        return None
    call, count = following[after + 1], 2
    if default := _after_chain(following, after + 1):
        call, count = following[default], 3
    return name if call.opname == "CALL" and call.arg == count else None


def _after_chain(instructions: list[dis.Instruction], start: int) -> int:
    """Where `name.attribute.attribute`, or a constant, ends; 0 where none begins."""
    if not instructions[start].opname.startswith(("LOAD_", "BUILD_")):
        return 0
    end = start + 1
    while instructions[end].opname in LOADS_ATTRIBUTE:
        end += 1
    return end
