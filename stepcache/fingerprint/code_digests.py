"""The digest of a piece of code: what it does, wherever it stands."""

from __future__ import annotations

import dis
import functools
import hashlib
import itertools
import re
from types import CodeType
from typing import Any

from stepcache.fingerprint.bytecode import LOCAL_ACCESS, parameters_of


@functools.lru_cache(maxsize=8192)
def code_digest(code: CodeType) -> str:
    """A digest of what code does, whatever the file and the line it stands in.

    Docstrings, comments, file names, line numbers and names of local variables do not count.
    """
    hasher = hashlib.sha256()
    _feed_code(code, hasher)
    return hasher.hexdigest()[:16]


def _feed_code(code: CodeType, hasher: Any) -> None:
    for part in (
        code.co_name,
        code.co_argcount,
        code.co_posonlyargcount,
        code.co_kwonlyargcount,
        code.co_flags,
        code.co_names,
        _variables_that_count(code),
        code.co_freevars,
        code.co_cellvars,
        code.co_code,
        code.co_exceptiontable,
    ):
        hasher.update(f"{part!r};".encode())
    for constant in _constants_that_count(code):
        _feed_constant(constant, hasher)


def _variables_that_count(code: CodeType) -> tuple:
    """The parameters, by which code is called; of other local variables only their number."""
    variables = tuple(map(without_address, itertools.count(), code.co_varnames))
    if not LOCAL_ACCESS.isdisjoint(code.co_names):
        return variables
    return (*variables[: len(parameters_of(code))], len(variables))


def without_address(number: int, name: str) -> str:
    """The name of a parameter; with its number for the address that beartype writes into some."""
    return _ADDRESS.sub(str(number), name)


_ADDRESS = re.compile("(?<=^__beartype_object_)[0-9]+$")


def _constants_that_count(code: CodeType) -> tuple:
    """The constants of code, with its docstring masked where no instruction loads it."""
    constants = code.co_consts
    if code.co_name == "__hash__" and code.co_filename.startswith("<attrs generated "):
        # attrs writes the hash of the class's name into it, which is another in each process.
        return tuple(each for each in constants if not isinstance(each, int | tuple))
    if not constants or not isinstance(constants[0], str | None):
        return constants
    # Pairs of operation and argument, which `EXTENDED_ARG` before it makes a larger one.
    operations, arguments = code.co_code[::2], code.co_code[1::2]
    before = b"\0" + operations
    loaded = any(
        operation in _LOADS_CONSTANT and not argument and previous != dis.EXTENDED_ARG
        for previous, operation, argument in zip(before, operations, arguments, strict=False)
    )
    return constants if loaded else (None, *constants[1:])


_LOADS_CONSTANT = frozenset(
    dis.opmap[name] for name in ("LOAD_CONST", "RETURN_CONST") if name in dis.opmap
)


def _feed_constant(constant: Any, hasher: Any) -> None:
    if isinstance(constant, CodeType):
        hasher.update(b"code(")
        _feed_code(constant, hasher)
        hasher.update(b")")
    elif isinstance(constant, tuple):
        hasher.update(b"tuple(")
        for each in constant:
            _feed_constant(each, hasher)
        hasher.update(b")")
    elif isinstance(constant, frozenset):
        hasher.update(f"frozenset{sorted(map(_tagged, constant))};".encode())
    else:
        hasher.update(_tagged(constant).encode())


def _tagged(constant: Any) -> str:
    return f"{type(constant).__name__}:{constant!r};"
