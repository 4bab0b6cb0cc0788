"""Escape analysis: which of the user's objects no code but the user's own can get hold of.

If a step is the method of a trainer, all that the trainer keeps is in reach of it. Frameworks read
attributes with common names, such as `key` and `state`, of whatever they are given. But they are
not given an object of which the user's code only reads and sets attributes, and calls methods: it
is *confined* to that code, which shows what it reads of that object. Compilers ask the same before
they put an object on the stack (Choi et al., "Escape Analysis for Java", 1999).

In doubt an object escapes.
"""

from __future__ import annotations

import abc
import dis
import functools
import types
import typing
from collections.abc import Iterable, Iterator
from types import CodeType
from typing import Any

from stepcache.fingerprint.bytecode import Names, names_of, parameters_of
from stepcache.fingerprint.instances import SLOT_TYPES
from stepcache.fingerprint.instructions import (
    LOADS_ATTRIBUTE,
    LOADS_GLOBAL,
    instructions_of,
    is_for_call,
)
from stepcache.fingerprint.provenance import USER, is_generated, origin_of
from stepcache.jaxcompat import inspection

Way = tuple[int, str]
"""How code comes to an object: the identity of an owner, and the name of its attribute."""
KEEPS_OBJECTS = "keep objects"
"""Stands among the names that code reads, if a package may have got hold of objects before."""
VARIABLE: Way = (0, "")
"""The way by a variable of which code does no more than to read attributes."""


@functools.lru_cache(maxsize=4096)
def passed_on(code: CodeType) -> frozenset[str]:
    """The variables and attributes whose values code uses for more than to reach attributes.

    Attributes are told by a dot before their names. The name of a method is none of them where it
    is called at once: the method gets the object as its first argument. What is nested in the code
    has variables of its own.
    """
    instructions = instructions_of(code)
    cells = {*code.co_cellvars, *code.co_freevars}
    found: set[str] = set()
    stored: list[tuple[str, str]] = []  # And the local variables that code keeps them in.
    for index, each in enumerate(instructions[:-1]):
        after, name = instructions[index + 1], each.argval
        if each.opname in LOADS_GLOBAL and name == "super":
            of_super = instructions[min(index + 2, len(instructions) - 1)]
            if (after.opname, after.arg) == ("CALL", 0) and not _is_confining(of_super):
                found.update(code.co_varnames[:1])
        if not (_loads_variable(each, cells) or each.opname in _ATTRIBUTES) or is_for_call(each):
            continue
        name = f".{name}" if each.opname in _ATTRIBUTES else name
        if after.opname == "STORE_FAST" and after.argval not in cells:
            stored.append((name, after.argval))
        elif not (_is_confining(after) or _is_compared(instructions[index + 1 : index + 3])):
            found.add(name)
    while more := {name for name, kept_in in stored if kept_in in found} - found:
        found |= more
    return frozenset(found)


_ATTRIBUTES = LOADS_ATTRIBUTE | {"LOAD_SUPER_ATTR"}
_OF_CELLS = frozenset("LOAD_DEREF LOAD_CLASSDEREF LOAD_FROM_DICT_OR_DEREF".split())
_CONFINING = _ATTRIBUTES | frozenset("STORE_ATTR DELETE_ATTR POP_TOP TO_BOOL".split())


def _loads_variable(instruction: dis.Instruction, cells: set[str]) -> bool:
    """Whether an instruction loads the value of a variable of a function's, not its cell."""
    name = instruction.opname
    return name in _OF_CELLS or (name.startswith("LOAD_FAST") and instruction.argval not in cells)


def _is_confining(user: dis.Instruction) -> bool:
    """Whether an instruction does no more with the value that was loaded last."""
    return user.opname in _CONFINING or user.opname.startswith("POP_JUMP_")


def _is_compared(following: list[dis.Instruction]) -> bool:
    """Whether a value is compared with None."""
    found = [(each.opname, each.argval) for each in following]
    return found[:1] == [("LOAD_CONST", None)] and found[1][0] == "IS_OP"


def passes_on(code: CodeType, variable: str) -> bool:
    """Whether code, or what is nested in it, may pass on what a variable stands for."""
    return any(variable in passed_on(each) for each in names_of(code).codes)


def passes_on_self(code: CodeType) -> bool:
    """As `passes_on`, of the first argument. Among `*args` it is passed on with the others."""
    return not code.co_argcount or passes_on(code, code.co_varnames[0])


@functools.lru_cache(maxsize=4096)
def reached_by(code: CodeType, variables: frozenset[str]) -> frozenset[str]:
    """The attributes that code reads of some variables, and of what it reaches by attributes.

    Beside these, of what it keeps in local variables of its own: a module that it imports, or an
    attribute of a global. What is read of the globals themselves, a walk follows by itself.
    """
    instructions = instructions_of(code)
    cells = {*code.co_cellvars, *code.co_freevars}
    standing, known = set(variables), -1
    found: set[str] = set()
    while len(standing) > known:
        known = len(standing)
        is_reached = is_of_global = False
        for each in instructions:
            if each.opname.startswith("STORE_FAST"):
                if is_reached or is_of_global:
                    standing.add(each.argval)
            elif each.opname in _ATTRIBUTES:
                is_reached = is_reached or each.opname == "LOAD_SUPER_ATTR"
                if is_reached:
                    found.add(each.argval)
                continue
            is_reached = _loads_variable(each, cells) and each.argval in standing
            is_of_global = each.opname in LOADS_GLOBAL or each.opname in _IMPORTS
    return frozenset(found)


_IMPORTS = frozenset(("IMPORT_NAME", "IMPORT_FROM"))


def way_to_captured(name: str, names: Names | None) -> Way | None:
    """The way by a variable, if the code that captured it reads attributes of it, and no more."""
    if names is None:  # It is not the user's.
        return None
    return VARIABLE if all(each.attributes for each in names.reads if each.name == name) else None


class Confined:
    """The objects that are confined as far as is known, and what the user's code reads of them."""

    def __init__(self) -> None:
        self.read: set[str] = set()  # The attributes that it reads of them, by name.
        self._ways: dict[int, set[Way]] = {}
        self._classes: dict[int, type] = {}
        self._escaped: set[int] = set()
        self._are_in_doubt = False
        self._found: list[Names] = []  # Of the user's code.
        # Arguments that may be confined, by the code that gets them.
        self._arguments: dict[CodeType, set[str]] = {}

    def __contains__(self, owner: int) -> bool:
        return owner in self._classes

    def meet(self, value: Any, way: Way | None) -> None:
        """Notes how code comes to an object, which has to be kept alive.

        Without a way, it may do anything with the object.
        """
        if way is None:
            self._escaped.add(id(value))
        else:
            self._ways.setdefault(id(value), set()).add(way)

    def confine(self, value: Any) -> int:
        """The identity of an object whose attributes are being noted; 0 if it is not confined."""
        if id(value) in self._escaped or id(value) not in self._ways:
            return 0
        self._classes[id(value)] = type(value)
        return id(value)

    def may_read(self, names: Names) -> None:
        """Notes that a trace may enter code of the user's."""
        self._found.append(names)
        if not _LEADS_ANYWHERE.isdisjoint(names.attributes):
            self.let_all_go()

    def let_all_go(self) -> None:
        """Notes that other code than what is known may come to any object."""
        self._are_in_doubt = True

    def way_to_self(self, function: Any) -> Way | None:
        """The way by which a bound method comes to its object, if it does not pass that on."""
        code = _code_in_python(function)
        first = code.co_varnames[: code.co_argcount][:1] if code is not None else ()
        return self.way_to_argument(function, first[0]) if first else None

    def way_to_argument(self, function: Any, name: str) -> Way | None:
        """As `way_to_self`, for an argument of the user's function."""
        code = _code_in_python(function)
        if code is None or origin_of(function) != USER or name not in parameters_of(code):
            return None
        if passes_on(code, name):
            return None
        self._arguments.setdefault(code, set()).add(name)
        return VARIABLE

    def settle(self) -> set[int]:
        """Removes the objects that are not confined any more; returns their identities."""
        if not self._classes:
            return set()
        methods = {cls: list(_methods(cls)) for cls in {*self._classes.values()}}
        entered = {code for names in self._found for code in names.codes}
        leaking = {
            cls
            for cls, codes in methods.items()
            if None in codes or any(passes_on_self(code) for code in codes if code in entered)
        }
        passed = frozenset().union(*map(passed_on, entered))
        gone: set[int] = set()
        while more := {each for each in self._classes if self._is_out(each, leaking, passed)}:
            gone |= more
            for each in more:
                del self._classes[each]
        of_classes = {code for codes in methods.values() for code in codes}
        for names in self._found:
            self.read |= self._read_by(names, of_classes) - names.keys.keys()
        return gone

    def _is_out(self, owner: int, leaking: set[type], passed: frozenset[str]) -> bool:
        return (
            self._are_in_doubt
            or owner in self._escaped
            or self._classes[owner] in leaking
            or any(
                way != VARIABLE and (way[0] not in self._classes or f".{way[1]}" in passed)
                for way in self._ways[owner]
            )
        )

    def _read_by(self, names: Names, methods: set[CodeType | None]) -> set[str]:
        """What a function, with all that is nested in it, may read of confined objects."""
        code = names.codes[0]
        variables = {*code.co_freevars, *self._arguments.get(code, ())}
        if code in methods:
            variables.update(code.co_varnames[:1])
        return set().union(*(reached_by(each, frozenset(variables)) for each in names.codes))


# By these, code comes from methods, functions and errors to objects that it was not given.
_LEADS_ANYWHERE = frozenset(
    "__self__ __closure__ getclosurevars get_referrers get_referents get_objects obj".split()
)


def _methods(cls: type) -> Iterator[CodeType | None]:
    """The code of what a class may give its objects to; None where that is not the user's."""
    if type(cls) not in _METACLASSES:
        yield None
    for base in cls.__mro__:
        values = vars(base).copy().values() if origin_of(base) == USER else ()
        for function in (each for value in values for each in _given_self(value)):
            if is_generated(getattr(function, "__wrapped__", function)):
                continue  # By `dataclasses`. Where it is entered, all that it reads is noted.
            is_users = type(function) is types.FunctionType and origin_of(function) == USER
            yield function.__code__ if is_users else None


_METACLASSES = (type, abc.ABCMeta, type(typing.Protocol))


def _given_self(value: Any) -> Iterable[Any]:
    """The functions to which an attribute of a class gives the object that it is asked of."""
    if type(value) is property:
        return (each for each in (value.fget, value.fset, value.fdel) if each is not None)
    if type(value) is functools.cached_property:
        return (value.func,)
    if type(value) in _GIVES_NOTHING or not hasattr(type(value), "__get__"):
        return ()
    jitted = inspection.jitted_parts(value)
    return (value,) if jitted is None else jitted[:1]


_GIVES_NOTHING = (staticmethod, classmethod, *SLOT_TYPES)


def _code_in_python(function: Any) -> CodeType | None:
    """The code of a function. What Cython has compiled has one, too, without instructions."""
    return function.__code__ if type(function) is types.FunctionType else None
