"""The instructions of code: those that matter, and short stretches of them that are known."""

from __future__ import annotations

import collections
import dis
import re
import sys
from collections.abc import Iterable
from types import CodeType
from typing import Any

LOADS_GLOBAL = frozenset({"LOAD_GLOBAL", "LOAD_NAME", "LOAD_FROM_DICT_OR_GLOBALS"})
LOADS_ATTRIBUTE = frozenset({"LOAD_ATTR", "LOAD_METHOD"})
# They stand between the instructions that matter, and change nothing about the value on the stack.
_TRANSPARENT = frozenset({"CACHE", "PUSH_NULL", "EXTENDED_ARG", "NOP", "RESUME", "PRECALL"})
# The field that says whether an instruction is jumped to; since Python 3.13 a label.
_TARGET = "label" if "label" in dis.Instruction._fields else "is_jump_target"
_OF_VARIABLE = re.compile("(?:LOAD|STORE)_FAST(?:_BORROW)?")


def instructions_of(code: CodeType) -> list[dis.Instruction]:
    """The instructions that matter. Two that Python 3.13 has joined in one are two here.

    What is jumped to is the first one that matters there.
    """
    found: list[dis.Instruction] = []
    target: dict[str, Any] = {}
    for each in dis.get_instructions(code):
        if each.is_jump_target:
            target = {_TARGET: getattr(each, _TARGET)}
        if each.opname in _TRANSPARENT:
            continue
        each, target = each._replace(**target) if target else each, {}
        joined = _OF_VARIABLE.findall(each.opname)
        if len(joined) < 2:
            found.append(each)
            continue
        for operation, variable in zip(joined, each.argval, strict=True):
            found.append(each._replace(opname=operation, argval=variable))
    return found


def mere_counts(instructions: list[dis.Instruction]) -> set[str]:
    """Variables and attributes of which code only counts on the number, as by `self.calls += 1`."""
    counted: collections.Counter[str] = collections.Counter()
    for index, each in enumerate(instructions):
        if each.opname != "BINARY_OP" or each.argrepr not in ("+=", "-=") or index < 2:
            continue
        load, number = instructions[index - 2 : index]
        store = next((i for i in instructions[index + 1 :] if i.opname != "SWAP"), each)
        is_constant = number.opname in _LOADS_CONSTANT and isinstance(number.argval, (int, float))
        if is_constant and (load.opname, store.opname) in _COUNTED and load.argval == store.argval:
            counted[load.argval] += 2
    named = dis.hasname + dis.hasfree
    used = collections.Counter(each.argval for each in instructions if each.opcode in named)
    return {name for name, count in counted.items() if used[name] == count}


_LOADS_CONSTANT = ("LOAD_CONST", "LOAD_SMALL_INT")
_COUNTED = {(f"LOAD_{of}", f"STORE_{of}") for of in ("ATTR", "GLOBAL", "DEREF")}


def attribute_asked_for(following: list[dis.Instruction]) -> str | None:
    """The attribute that a call of `getattr` or `hasattr` asks for, if a constant names it.

    Args:
        following: what comes after `getattr` is loaded: `(config.model, "rate", default)`.
    """
    arguments = simple_arguments(following)
    if len(arguments) not in (2, 3) or arguments[1][0].opname != "LOAD_CONST":
        return None
    name = arguments[1][0].argval
    return name if isinstance(name, str) and name.isidentifier() else None


def passes_on_what_it_is_asked_for(code: CodeType, following: list[dis.Instruction]) -> bool:
    """Whether a call of `getattr` is that of a wrapper's `__getattr__`, for the name it was given.

    Other code names the attribute then, or asks the wrapper for a computed one.

    Args:
        code: what calls.
        following: what comes after `getattr` is loaded: `(self.env, name)`.
    """
    arguments = simple_arguments(following)
    if code.co_name != "__getattr__" or code.co_argcount != 2 or len(arguments) not in (2, 3):
        return False
    given = code.co_varnames[1]
    is_bound_anew = any(
        each.argval == given and not each.opname.startswith("LOAD_")
        for each in instructions_of(code)
    )
    (load, *attributes) = arguments[1]
    return (
        load.opname.startswith("LOAD_FAST")
        and load.argval == given
        and not (attributes or is_bound_anew)
    )


def simple_arguments(following: list[dis.Instruction]) -> list[list[dis.Instruction]]:
    """The arguments of a call, if each is a constant or a chain: `name.attribute.attribute`.

    Args:
        following: what comes after the function is loaded.
    """
    arguments, start = [], 0
    while end := _after_chain(following, start):
        arguments.append(following[start:end])
        start = end
    call = following[start]
    return arguments if (call.opname, call.arg) == ("CALL", len(arguments)) else []


def _after_chain(instructions: list[dis.Instruction], start: int) -> int:
    """Where a chain or a constant, or an empty container, ends; 0 where none begins."""
    if not instructions[start].opname.startswith(("LOAD_", "BUILD_")):
        return 0
    end = start + 1
    while instructions[end].opname in LOADS_ATTRIBUTE:
        end += 1
    return end


def is_for_call(instruction: dis.Instruction) -> bool:
    """Whether an attribute is loaded to be called at once."""
    is_marked = sys.version_info >= (3, 12) and bool((instruction.arg or 0) & 1)
    loads_either = instruction.opname in ("LOAD_ATTR", "LOAD_SUPER_ATTR")
    return instruction.opname == "LOAD_METHOD" or (loads_either and is_marked)


def begins_with_bases(code: CodeType, instructions: list[dis.Instruction]) -> bool:
    """Whether a constructor names its own kind only for its bases: `super().__init__(width)`.

    So it makes no other object, and no object anew.
    """
    return code.co_name in ("__init__", "__new__") and all(
        is_for_call(each) and _is_asked_of_super(instructions, index)
        for index, each in enumerate(instructions)
        if each.argval == code.co_name
    )


def needs_its_class_for_bases(codes: Iterable[CodeType]) -> bool:
    """Whether a method needs its class only for its bases: `super().predict(x)`.

    So it makes no object of it.

    Args:
        codes: of the method, and of what it defines.
    """
    using = [instructions_of(code) for code in codes if "__class__" in code.co_freevars]
    return all(
        each.offset in _loads_for_super(instructions)
        for instructions in using
        for each in instructions
        if each.argval == "__class__" and "DEREF" in each.opname
    )


def _loads_for_super(instructions: list[dis.Instruction]) -> set[int]:
    """The offsets at which a class is loaded for `super(A, self)`; since Python 3.12, `super()`."""
    found = set()
    for index, each in enumerate(instructions):
        if each.opname in LOADS_GLOBAL and each.argval == "super":
            following = instructions[index + 1 : index + 4]
            loads, asked = following[:2], [(each.opname, each.arg) for each in following[2:]]
            is_asked = asked == [("CALL", 2)] or "LOAD_SUPER_ATTR" in dict(asked)
            if is_asked and all(each.opname in _SINGLE_LOADS for each in loads):
                found.add(loads[0].offset)
    return found


def _is_asked_of_super(instructions: list[dis.Instruction], index: int) -> bool:
    """Whether an attribute is loaded of `super()`, without arguments."""
    if instructions[index].opname == "LOAD_SUPER_ATTR":  # Since Python 3.12.
        return not (instructions[index].arg or 0) & 2
    before = [(each.opname, each.argval) for each in instructions[max(0, index - 2) : index]]
    return before == [("LOAD_GLOBAL", "super"), ("CALL", 0)]


def only_compares(instructions: list[dis.Instruction], name: str) -> bool:
    """Whether code asks for the class of objects only to compare or to name it.

    As the methods that `dataclasses` generates do: `other.__class__ is self.__class__`. So no
    instance is made of it.
    """
    for index, instruction in enumerate(instructions):
        if instruction.argval != name or not instruction.opname.startswith("LOAD_"):
            continue
        following = instructions[index + 1 :]
        if name == "type":  # The class is there when it has been called, with one chain of names.
            arguments = simple_arguments(following)
            if instruction.opname not in LOADS_GLOBAL or len(arguments) != 1:
                return False
            following = following[len(arguments[0]) + 1 :]
        if following and following[0].argval in ("__name__", "__qualname__"):
            continue
        if following and following[0].opname in _SINGLE_LOADS:  # What it is compared with.
            following = following[1:]
            if following and following[0].argval == "__class__":
                following = following[1:]
        if not following or following[0].opname not in ("IS_OP", "COMPARE_OP"):
            return False
    return True


_SINGLE_LOADS = ("LOAD_FAST", "LOAD_GLOBAL", "LOAD_NAME", "LOAD_DEREF", "LOAD_FAST_BORROW")


def where_classes_are_tested(code: CodeType, instructions: list[dis.Instruction]) -> set[int]:
    """The offsets at which code loads a class only to ask whether an object is one of its kind.

    As in `isinstance(x, (A, module.B))`, `type(x) is A`, `case A(rate=rate)`; or only for its
    bases: `super(A, self)`.
    """
    calls = set() if _TESTS.isdisjoint(code.co_names) else _calls_of_tests(code)
    found = _loads_for_super(instructions)
    for index, each in enumerate(instructions):
        if each.opname == "IS_OP" or each.offset in calls:
            found.update(_loads_before(instructions, index))
        elif each.opname == "MATCH_CLASS":  # A constant between them has names of attributes.
            found.update(_loads_before(instructions, index - 1))
    return found


def _calls_of_tests(code: CodeType) -> set[int]:
    """The offsets at which `isinstance` and `issubclass` are called with two plain arguments."""
    instructions = [each for each in dis.get_instructions(code) if each.opname != "PRECALL"]
    found = set()
    for index, each in enumerate(instructions):
        if each.opname in LOADS_GLOBAL and each.argval in _TESTS:
            above = 0  # How many values lie above it.
            for after in instructions[index + 1 :]:
                count = after.arg or 0
                if after.opcode in _JUMPS or after.is_jump_target or after.opname in _MOVES:
                    break
                if after.opname == "CALL" and above <= count:
                    if above == count == 2:
                        found.add(after.offset)
                    break
                is_call = after.opname == "CALL"
                above += -1 - count if is_call else dis.stack_effect(after.opcode, after.arg)
    return found


_TESTS = frozenset(("isinstance", "issubclass"))
_MOVES = ("SWAP", "COPY")


def _loads_before(instructions: list[dis.Instruction], end: int) -> list[int]:
    """The offsets of the globals in the expression before `end`: `a`, `(a, b.c)`, `a | None`.

    Empty if it is another one, or if only a part of it is certain to run before `end`.
    """
    found: list[int] = []
    missing, at = 1, end
    while missing:
        if at == 0 or instructions[at].is_jump_target:
            return []
        at -= 1
        each = instructions[at]
        if each.opname == "BUILD_TUPLE":
            missing += (each.arg or 0) - 1
        elif each.opname == "BINARY_OP" and each.argrepr == "|":
            if instructions[at - 1].opname != "LOAD_CONST":
                return []  # An object of the user's on the left would be given the class.
            missing += 1
        elif each.opname in LOADS_GLOBAL:
            found.append(each.offset)
            missing -= 1
        elif each.opname == "LOAD_CONST" or each.opname.startswith("LOAD_FAST"):
            missing -= 1
        elif each.opname != "LOAD_ATTR" or is_for_call(each):
            return []
    return found


def mere_keys(code: CodeType) -> set[Any]:
    """The constants that code only compares, or uses as keys: `batch["image"]`, `{"params": p}`.

    They are not names of attributes that the code asks for. A class that takes a key for the name
    of an attribute has code of its own, which asks by computed names. The keys of a dictionary that
    is written out are one constant, a tuple.
    """
    pairs = zip(code.co_code[::2], code.co_code[1::2], strict=True)
    if not any(
        op == _EXTENDED or (op == _CONSTANT and type(code.co_consts[arg]) in _KEYS)
        for op, arg in pairs
    ):
        return set()  # As of most code, and to look at instructions takes long.
    instructions = list(dis.get_instructions(code))
    keys: set[Any] = set()
    others: set[Any] = set()
    for index, each in enumerate(instructions):
        if each.opcode == _CONSTANT and type(each.argval) in _KEYS:
            (keys if _is_key(instructions, index) else others).add(each.argval)
    return keys - others


def _is_key(instructions: list[dis.Instruction], index: int) -> bool:
    """Whether what the constant at `index` is taken from the stack for is such a use."""
    before = instructions[max(0, index - 1)]
    if is_for_call(before) and before.argval in _METHODS_BY_KEY:
        following = instructions[index + 1 : index + 4]
        called = [each for each in following if each.opname in ("CALL", "PRECALL")]
        return bool(called) and called[0].arg in (1, 2)
    above = 0  # How many values lie above it.
    for each in instructions[index + 1 :]:
        if each.opcode in _JUMPS or each.opname in _MOVES:
            return False
        now = above + dis.stack_effect(each.opcode, each.arg, jump=False)
        if now <= above and now <= 0:
            return _is_use_as_key(each, above)
        above = now
    return False


def _is_use_as_key(user: dis.Instruction, above: int) -> bool:
    if user.opname == "BUILD_MAP":
        return above % 2 == 1
    if user.opname == "COMPARE_OP":
        return True
    if user.opname == "CONTAINS_OP":
        return above == 1
    is_subscript = user.opname == "BINARY_OP" and user.argrepr == "[]"
    return above == 0 and (is_subscript or user.opname in _BY_KEY)


_CONSTANT, _EXTENDED = dis.opmap["LOAD_CONST"], dis.opmap["EXTENDED_ARG"]
_KEYS = (str, tuple)
_BY_KEY = frozenset(("BINARY_SUBSCR", "STORE_SUBSCR", "DELETE_SUBSCR", "BUILD_CONST_KEY_MAP"))
_JUMPS = frozenset((*dis.hasjrel, *dis.hasjabs))
_METHODS_BY_KEY = frozenset(("get", "pop", "setdefault"))
