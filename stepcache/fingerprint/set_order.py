"""Code that loops over a set: the order of texts in one is another in each process.

Found by walking back from each operation that takes values in order to what it takes them from: a
set that the code makes, a variable or an attribute, or what a function of some name returns.
"""

from __future__ import annotations

import dis
import re
from collections.abc import Iterator
from types import CodeType, FrameType
from typing import Any, NamedTuple

from stepcache.fingerprint.callers import calls_matter
from stepcache.fingerprint.findings import Findings
from stepcache.fingerprint.instances import attributes_of
from stepcache.fingerprint.instructions import LOADS_ATTRIBUTE, LOADS_GLOBAL
from stepcache.fingerprint.known_packages import THE_SAME_IN_ANY_ORDER
from stepcache.fingerprint.provenance import (
    PYTHON,
    USER,
    file_label,
    origin_of,
    origin_of_file,
    package_of,
)

_WHY = "it loops over a set, whose order may be another in each process"


class _Way(NamedTuple):
    """A variable, and the attributes that are read from it, in order."""

    is_global: bool
    name: str
    attributes: tuple[str, ...]


class _Loops(NamedTuple):
    """What a code object takes values from in order, and which sets it hands on."""

    over_set: bool = False  # A set that it makes.
    ways: frozenset[_Way] = frozenset()  # Variables and attributes.
    calls: frozenset[str] = frozenset()  # What functions and variables of these names give.
    makes: frozenset[str] = frozenset()  # The names under which it hands on sets.


_NONE = _Loops()
over_sets_of_packages: set[int] = set()
"""Code of packages, by identity, that was entered while a variable of it led to such a set."""
_loops: dict[int, tuple[CodeType, _Loops]] = {}  # By identity; the code is held to keep that.


def loops_over_given(code: CodeType, frame: FrameType) -> bool:
    """Whether code that is being entered loops over a set which one of its variables leads to."""
    if _is_passed_over(code.co_filename):
        return False
    if origin_of_file(code.co_filename) != USER and not _is_given_set(code, frame):
        return False  # To look at the instructions of each takes long.
    ways = _loops_of(code).ways if _may_take(code) else ()
    return any(_is_ordered_anew(_found(way, frame)) for way in ways)


def where_looped_over(recording: Findings) -> list[str]:
    """Where code that a trace entered loops over a set, and why that matters."""
    entered = recording.entered.values()
    codes = [code for code in entered if not _is_passed_over(code.co_filename)]
    loops = [_loops_of(code) if _may_make(code) else _NONE for code in codes]
    made = frozenset().union(*(each.makes for each in loops))
    given = recording.over_sets | over_sets_of_packages
    return [
        f"{file_label(code.co_filename, None)}:{code.co_qualname}: {_WHY}"
        for code, each in zip(codes, loops, strict=True)
        if each.over_set or id(code) in given or (made and _takes_from(code, made))
    ]


def _takes_from(code: CodeType, made: frozenset[str]) -> bool:
    """Whether code loops over what functions or variables of some names give."""
    names = (*code.co_names, *code.co_freevars)
    return not (made.isdisjoint(names) or made.isdisjoint(_loops_of(code).calls))


def _is_passed_over(filename: str) -> bool:
    """Whether the code of a file gives the same whatever the order of sets is."""
    return (
        origin_of_file(filename) == PYTHON
        or not calls_matter(filename)
        or package_of(filename) in THE_SAME_IN_ANY_ORDER
    )


def _is_given_set(code: CodeType, frame: FrameType) -> bool:
    """Whether a variable of code that is being entered, or an attribute of one, is a set."""
    values = [*frame.f_locals.values()]
    spaces = [attributes_of(value) for value in values if origin_of(type(value)) != PYTHON]
    values += [
        space[name]
        for space in (frame.f_globals, *spaces)
        for name in code.co_names
        if name in space
    ]
    return any(map(_is_ordered_anew, values))


def _may_make(code: CodeType) -> bool:
    """Whether code may make a set."""
    return (
        not _BUILDS.isdisjoint(code.co_code[::2])
        or not (_MAKERS | _VIEWS).isdisjoint(code.co_names)
        or any(_is_ordered_anew(each) or _makes_set(each) for each in code.co_consts)
    )


def _may_take(code: CodeType) -> bool:
    """Whether code may take values from something in order."""
    names = (*code.co_names, *code.co_varnames, *code.co_freevars, *code.co_cellvars)
    return not (_TAKING.isdisjoint(code.co_code[::2]) and _TAKERS.isdisjoint(names))


def _makes_set(value: Any) -> bool:
    """Whether a constant is the code of a comprehension that makes a set (until Python 3.11)."""
    return type(value) is CodeType and value.co_name == "<setcomp>"


def _is_ordered_anew(value: Any) -> bool:
    """Whether a value is a set whose order need not be the same in another process."""
    if type(value) is set or type(value) is frozenset:
        return len(value) > 1 and not all(map(_is_hashed_alike, value))
    return False


def _is_hashed_alike(value: Any) -> bool:
    """Whether the hash of a value is the same in each process."""
    if type(value) is tuple:
        return all(map(_is_hashed_alike, value))
    return type(value) in (bool, int, float, complex)


def _found(way: _Way, frame: FrameType) -> Any:
    """What a variable or an attribute is while code is entered. Runs nothing of the user's."""
    value = (frame.f_globals if way.is_global else frame.f_locals).get(way.name)
    for attribute in way.attributes:
        kind = type(value)
        classes = [*_MRO(kind), *(_MRO(value) if issubclass(kind, type) else ())]
        spaces = [attributes_of(value), *map(_SPACE, classes)]
        value = next((each[attribute] for each in spaces if attribute in each), None)
    return value


_MRO, _SPACE = (vars(type)[name].__get__ for name in ("__mro__", "__dict__"))


def _loops_of(code: CodeType) -> _Loops:
    known = _loops.get(id(code))
    if known is None:
        try:
            found = _Search(code).result()
        except (IndexError, ValueError):  # Of a Python whose instructions are not known here.
            found = _Loops(over_set=True)
        known = _loops[id(code)] = code, found
    return known[1]


_BUILDS = {dis.opmap["BUILD_SET"]}
_UNPACKS = ("UNPACK_SEQUENCE", "LIST_EXTEND", "GET_YIELD_FROM_ITER")
_TAKING = {dis.opmap[name] for name in ("GET_ITER", "CALL_FUNCTION_EX", *_UNPACKS)}
_TAKERS = frozenset("list tuple enumerate zip map filter iter sum reduce join fromkeys".split())
_COMBINE = frozenset("union intersection difference symmetric_difference".split())
_MAKERS = _COMBINE | {"set", "frozenset"}
_VIEWS = frozenset(("keys", "items"))
# To these it is no matter in which order they are given values.
_UNORDERED = frozenset("sorted any all min max len".split()) | _MAKERS


class _Operation(NamedTuple):
    """One instruction, with one variable at most."""

    name: str
    argval: Any
    arg: int
    effect: int  # How many more values there are on the stack after it.
    symbol: str  # Of an operator.


_OF_VARIABLE = re.compile("(LOAD|STORE)_FAST(?:_BORROW|_CHECK)?")
_SKIPPED = frozenset("CACHE RESUME NOP EXTENDED_ARG TO_BOOL PRECALL KW_NAMES NOT_TAKEN".split())
_CALLS = ("CALL", "CALL_KW")
_ADDS = ("SET_ADD", "LIST_APPEND", "MAP_ADD")
_DEEPER = {"FOR_ITER": 1, "END_FOR": -1}


def _operations_of(code: CodeType) -> Iterator[_Operation]:
    for each in dis.get_instructions(code):
        name, arg = each.opname, each.arg or 0
        if name in _SKIPPED:
            continue
        variables = _OF_VARIABLE.findall(name)
        if variables and "CLEAR" not in name:
            values = each.argval if len(variables) > 1 else (each.argval,)
            for kind, variable in zip(variables, values, strict=True):
                yield _Operation(f"{kind}_FAST", variable, arg, 1 if kind == "LOAD" else -1, "")
            continue
        if name in _CALLS:
            effect = -1 - arg - (name == "CALL_KW")
        else:
            effect = dis.stack_effect(each.opcode, each.arg, jump=False)
        if name == "END_FOR":
            effect += 1  # What jumps to it leaves one value more than what stands before it.
        yield _Operation(name, each.argval, arg, effect, each.argrepr.rstrip("="))


class _Search:
    """Looks at the operations of one code object. An expression is told by where it ends."""

    def __init__(self, code: CodeType):
        self._code, self._all = code, list(_operations_of(code))
        self._stores: dict[str, list[int]] = {}
        for index, each in enumerate(self._all):
            if each.name == "STORE_FAST":
                self._stores.setdefault(each.argval, []).append(index)
        self._over_set = False
        self._ways: set[_Way] = set()
        self._calls: set[str] = set()

    def result(self) -> _Loops:
        for index, each in enumerate(self._all):
            for end in self._taken_by(index, each):
                self._take(end, frozenset())
        makes = {self._handed_on_as(index, each) for index, each in enumerate(self._all)} - {None}
        calls = frozenset(self._calls)
        return _Loops(self._over_set, frozenset(self._ways), calls, frozenset(map(str, makes)))

    def _taken_by(self, index: int, each: _Operation) -> list[int]:
        """The expressions that an operation takes values from in order."""
        if each.name == "GET_ITER":
            return [] if self._is_unordered(index) else [index - 1]
        if each.name in _UNPACKS:
            is_one = (each.name, each.arg) == ("UNPACK_SEQUENCE", 1)  # As `(size,) = sizes`.
            return [] if is_one else [index - 1]
        if each.name == "CALL_FUNCTION_EX":
            return [self._start(index - 1) - 1 if each.arg & 1 else index - 1]
        if each.name in _CALLS and self._callee(index) in _TAKERS:
            return self._arguments(index)[0]
        return []

    def _handed_on_as(self, index: int, each: _Operation) -> str | None:
        """The name under which an operation hands on a set, if it does."""
        if each.name == "RETURN_CONST":
            return self._code.co_name if _is_ordered_anew(each.argval) else None
        if each.name not in ("RETURN_VALUE", "STORE_ATTR", "STORE_DEREF", "STORE_GLOBAL"):
            return None
        end = self._start(index - 1) - 1 if each.name == "STORE_ATTR" else index - 1
        name = self._code.co_name if each.name == "RETURN_VALUE" else each.argval
        return name if self._is_set(end) else None

    def _take(self, end: int, followed: frozenset[str]) -> None:
        """Notes what an expression is from which values are taken in order."""
        each = self._all[max(end, 0)]
        if self._is_set(end):
            self._over_set = True
        elif each.name in _CALLS:
            self._calls.update(filter(None, [self._callee(end)]))
        elif way := self._way(end):
            self._ways.add(way)
            if way.attributes or each.name != "LOAD_FAST":
                self._calls.add([way.name, *way.attributes][-1])
            elif way.name not in followed:
                for store in self._stores.get(way.name, ()):
                    self._take(store - 1, followed | {way.name})

    def _way(self, end: int) -> _Way | None:
        start = end
        while start > 0 and self._all[start].name in LOADS_ATTRIBUTE:
            start -= 1
        each = self._all[max(start, 0)]
        is_global = each.name in LOADS_GLOBAL
        if not is_global and each.name not in ("LOAD_FAST", "LOAD_DEREF"):
            return None
        attributes = tuple(load.argval for load in self._all[start + 1 : end + 1])
        return _Way(is_global, each.argval, attributes)

    def _is_set(self, end: int, followed: frozenset[str] = frozenset()) -> bool:
        """Whether an expression makes a set."""
        each = self._all[max(end, 0)]
        if each.name == "LOAD_CONST":
            return _is_ordered_anew(each.argval)
        if each.name == "SET_UPDATE":
            before = self._all[end - 1]
            return before.name != "LOAD_CONST" or _is_ordered_anew(before.argval)
        if each.name == "LOAD_FAST" and each.argval not in followed:
            stores = self._stores.get(each.argval, ())
            return any(self._is_set(at - 1, followed | {each.argval}) for at in stores)
        if each.name == "BINARY_OP" and each.symbol in ("|", "&", "-", "^"):
            sides = end - 1, self._start(end - 1) - 1
            return any(self._is_set(at, followed) or self._is_view(at) for at in sides)
        if each.name in _CALLS and self._calls_python(end, _MAKERS):
            return True
        return each.name == "BUILD_SET" or self._comprehends_set(end)

    def _is_view(self, end: int) -> bool:
        return self._all[max(end, 0)].name in _CALLS and self._callee(end) in _VIEWS

    def _comprehends_set(self, end: int) -> bool:
        """Whether an expression is a comprehension that makes a set."""
        each = self._all[max(end, 0)]
        if (each.name, each.arg) == ("CALL", 0) and self._all[end - 1].name == "GET_ITER":
            start = self._start(end - 1)
            made = self._all[max(0, start - 3) : start]  # Until Python 3.11, it is a function.
            return any(_makes_set(load.argval) for load in made)
        while each.name == "STORE_FAST" and self._all[end - 1].name == "SWAP":
            end -= 2
            each = self._all[end]
        if "END_FOR" not in (each.name, self._all[end - 1].name):
            return False
        adding = (load.name for load in reversed(self._all[:end]) if load.name in _ADDS)
        return next(adding, "") == "SET_ADD"

    def _is_unordered(self, index: int) -> bool:
        """Whether a comprehension makes a set, or gives what it makes to what needs no order.

        Args:
            index: of the `GET_ITER` at its beginning; not of a comprehension, the answer is no.
        """
        after, following = index + 2, self._all[index + 1]
        if following.name == "LOAD_FAST_AND_CLEAR":
            after, depth = index + 1, 0
            while depth or self._all[after].name != "END_FOR":
                after += 1
                depth += _DEEPER.get(self._all[after].name, 0)
            after += 1 + (self._all[after + 1].name in ("POP_TOP", "POP_ITER"))
            while (self._all[after].name, self._all[after + 1].name) == ("SWAP", "STORE_FAST"):
                after += 2
        elif (following.name, following.arg) != ("CALL", 0):
            return False
        return self._comprehends_set(after - 1) or self._goes_unordered(after)

    def _goes_unordered(self, index: int) -> bool:
        """Whether what has been made before an operation is given to what needs no order."""
        above = 0  # How many values lie above it.
        for at in range(index, len(self._all)):
            each = self._all[at]
            if each.name in _CALLS and each.arg + (each.name == "CALL_KW") > above:
                return self._calls_python(at, _UNORDERED)
            if above + each.effect < 0 or "JUMP" in each.name:
                break
            above += each.effect
        return False

    def _start(self, end: int) -> int:
        """Where an expression begins; 0 if that is not known."""
        missing = 1
        for index in range(end, -1, -1):
            missing -= self._all[index].effect
            if missing <= 0:
                return index
        return 0

    def _arguments(self, index: int) -> tuple[list[int], int]:
        """The arguments of a call, and the operation before them, which loads what is called."""
        call, ends, end = self._all[index], [], index - 1
        for _ in range(call.arg + (call.name == "CALL_KW")):
            ends.append(end)
            end = self._start(end) - 1
        return ends, end - (self._all[max(end, 0)].name == "PUSH_NULL")

    def _calls_python(self, index: int, names: frozenset[str]) -> bool:
        """Whether a function of Python's, or a method of sets, is called: not `x.at[0].set(1)`."""
        name = self._callee(index)
        return name in names and (
            name in _COMBINE or self._load_of_callee(index).name not in LOADS_ATTRIBUTE
        )

    def _load_of_callee(self, index: int) -> _Operation:
        return self._all[max(self._arguments(index)[1], 0)]

    def _callee(self, index: int) -> str | None:
        """The name of what is called, if it is loaded by one."""
        each = self._load_of_callee(index)
        is_named = each.name.startswith("LOAD_") and isinstance(each.argval, str)
        return each.argval if is_named else None
