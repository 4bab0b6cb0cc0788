"""What code objects of libraries read: names of installed modules, attributes of any object."""

from __future__ import annotations

import abc
import argparse
import ast
import collections
import dis
import functools
import logging
import re
import sys
import threading
import types
from collections.abc import Iterable
from pathlib import Path
from typing import Any, NamedTuple

from stepcache.fingerprint.asked_by_name import keeps_settings
from stepcache.fingerprint.bytecode import (
    READS_SETTINGS,
    SHOWS_ARGUMENTS,
    SHOWS_NAMESPACES,
    names_of,
)
from stepcache.fingerprint.callers import FOR_THEMSELVES
from stepcache.fingerprint.compiled_calls import why_call_is_impure
from stepcache.fingerprint.dynamic_reads import MATCH_CLASS, READS_ANY, may_read_any
from stepcache.fingerprint.escapes import KEEPS_OBJECTS
from stepcache.fingerprint.instructions import (
    LOADS_ATTRIBUTE,
    instructions_of,
    is_for_call,
    mere_keys,
)
from stepcache.fingerprint.known_packages import ASK_THEIR_OWN, NAMED_BY_THEMSELVES, TRUSTED
from stepcache.fingerprint.nondeterminism import NUMPYS_NOW, asks_numpy_for_now, why_impure
from stepcache.fingerprint.provenance import (
    INSTALLED,
    PYTHON,
    file_label,
    origin_of,
    origin_of_file,
    package_of,
)
from stepcache.fingerprint.tokens import is_special
from stepcache.jaxcompat import inspection


class Reads(NamedTuple):
    """What some code objects of libraries read, together."""

    modules: list[str]  # Those that the code comes from.
    names: dict[str, str]  # What it reads of these and of others, by module, with spaces between.
    attributes: frozenset[str]  # All names and strings in it: what it may read of any object.
    asked_for: frozenset[str]  # Those that it may ask of objects which do not have them.
    draws: tuple[str, ...]  # Where it may ask numpy's generator or clock, which no recording sees.
    by_code: tuple[_Read, ...]  # What each of them reads.

    def of_others(self, names: dict[str, bool]) -> set[str]:
        """Those among some names that code may read of an object of the user's.

        To each belongs whether it can be called: to call another one would be an error.
        """
        return {
            name
            for name, can_be_called in names.items()
            if name in self.attributes
            and any(
                name in each.attributes
                and _may_be_of_the_users(each.code, each.module, name, can_be_called)
                for each in self.by_code
            )
        }


class _Read(NamedTuple):
    """As `Reads`, of one code object, which is held so that it keeps its identity."""

    code: types.CodeType
    module: str | None  # None for a compiler's, and for others.
    names: dict[str, set[str]]
    attributes: set[str]
    asked_for: set[str]
    draws: tuple[str, ...] = ()


_reads: dict[int, _Read] = {}
_together: dict[tuple[int, frozenset[int]], tuple[dict, Reads]] = {}
_REMEMBERED = 32
_lock = threading.RLock()


def reads_of(codes: Iterable[types.CodeType], of_jax: dict[int, types.CodeType]) -> Reads:
    """What the code objects among some that come from libraries read.

    Args:
        codes: from anywhere.
        of_jax: more, by identity, that count in all traces. They are many, and mostly those of the
            trace before, in the same dictionary: it is not to be changed.
    """
    others = (code for code in codes if _is_of_library(code.co_filename))
    installed = {id(code): code for code in others if id(code) not in of_jax}
    if not (installed or of_jax):
        return _NOTHING
    key = id(of_jax), frozenset(installed)
    with _lock:
        if key not in _together:
            installed |= {i: code for i, code in of_jax.items() if _is_of_library(code.co_filename)}
            unknown = [code for each, code in installed.items() if each not in _reads]
            by_file = _modules_by_file() if unknown else {}
            for code in unknown:
                _reads[id(code)] = _read_by(code, by_file)
            if len(_together) >= _REMEMBERED:
                _together.clear()
            # The dictionary is held, so that it keeps its identity.
            _together[key] = of_jax, _put_together([_reads[each] for each in installed])
        return _together[key][1]


_NOTHING = Reads([], {}, frozenset(), frozenset(), (), ())


@functools.lru_cache(maxsize=8192)
def _is_of_library(filename: str) -> bool:
    """Whether code of a file may read attributes of the user's objects.

    Of Python's own library not what JAX's traces use for themselves.
    """
    origin = origin_of_file(filename)
    return origin == INSTALLED or (origin == PYTHON and not filename.startswith(_USED_BY_TRACES))


_USED_BY_TRACES = (
    *FOR_THEMSELVES,
    *(f"{Path(str(package.__file__)).parent}/" for package in (collections, logging, re)),
    *(str(module.__file__) for module in (abc, ast, threading, types)),
    str(sys.modules["_weakrefset"].__file__),
    "<",
)


def _put_together(reads: list[_Read]) -> Reads:
    names: dict[str, set[str]] = {}
    for read in reads:
        for owner, each in read.names.items():
            names.setdefault(owner, set()).update(each)
    return Reads(
        sorted({read.module for read in reads if read.module is not None}),
        {owner: " ".join(sorted(each)) for owner, each in sorted(names.items())},
        frozenset().union(*(read.attributes for read in reads)),
        frozenset().union(*(read.asked_for for read in reads)),
        tuple(each for read in reads for each in read.draws),
        tuple(reads),
    )


def _read_by(code: types.CodeType, by_file: dict[str, str]) -> _Read:
    is_pythons = origin_of_file(code.co_filename) == PYTHON
    module = None if is_pythons else by_file.get(code.co_filename)
    found: dict[str, set[str]] = {}
    if module is not None and not _is_known_by_file(module):
        found[module] = {code.co_qualname.partition(".")[0]}
        _add_names(found, module, vars(sys.modules[module]), code.co_names, 3)
        found[module] &= vars(sys.modules[module]).keys()
    strings = {each for each in code.co_consts if isinstance(each, str) and each.isidentifier()}
    if (module or "").partition(".")[0] == "stepcache":  # It asks no object of the user's.
        return _Read(code, module, found, set(), set())
    is_jaxs = inspection.asks_for_known_names(code.co_filename)
    is_asking = not _ASKING.isdisjoint(code.co_names)
    keys = mere_keys(code) if is_asking and not is_jaxs else set()
    if MATCH_CLASS in code.co_code[::2]:
        tuples = (each for each in code.co_consts if isinstance(each, tuple))
        strings.update(each for names in tuples for each in names if isinstance(each, str))
        keys = set()
    named = {*code.co_names, *strings}
    asked_for = strings - keys if is_asking else set()
    if is_pythons or package_of(code.co_filename) not in ASK_THEIR_OWN:
        asked_for |= _asked_for_by_others(code)
        asked_for |= set() if is_pythons else {KEEPS_OBJECTS}
    if is_jaxs:
        named &= inspection.ASKED_BY_JAX
        asked_for &= inspection.ASKED_BY_JAX
    draws: list[str] = []
    if module is not None and package_of(code.co_filename) not in TRUSTED:
        draws = _draws(code, module, vars(sys.modules[module]))
    return _Read(code, module, found, named, asked_for, tuple(draws))


def _draws(code: types.CodeType, module: str, space: dict) -> list[str]:
    """Where code asks numpy's own generator, or its clock: no recording sees what Cython calls."""
    reasons = [why_impure(NUMPYS_NOW)] if asks_numpy_for_now(code) else []
    numpys = sys.modules.get("numpy.random")
    values = [space.get(name) for name in code.co_names]
    may_be = any(each is numpys or type(each) is types.MethodType for each in values)
    if numpys is not None and (may_be or "random" in code.co_names):
        own = getattr(numpys.random_sample, "__self__", None)
        for read in names_of(code).reads:
            value = space.get(read.name) if read.kind == "global" else None
            for name in read.attributes:
                value = vars(value).get(name) if type(value) is types.ModuleType else None
            if type(value) is types.MethodType and value.__self__ is own:
                reasons.append(why_call_is_impure(value))
    where = f"{file_label(code.co_filename, module)}:{code.co_qualname}"
    return [f"{where}: {why}" for why in reasons if why is not None]


def _asked_for_by_others(code: types.CodeType) -> set[str]:
    """What code may ask of any object, if it is not of a framework.

    What frameworks look for by computed names they look for in objects of their own classes.
    """
    asked_for = set(code.co_names) if "AttributeError" in code.co_names else set()
    if may_read_any(code):
        asked_for.add(READS_ANY)
    asked_for |= names_of(code).attributes & {SHOWS_NAMESPACES, READS_SETTINGS}
    if keeps_settings(code.co_filename):
        asked_for.discard(READS_SETTINGS)  # Whoever calls it is seen.
    if code.co_filename == argparse.__file__:
        asked_for.add(SHOWS_ARGUMENTS)
    return asked_for


_ASKING = frozenset(("getattr", "hasattr"))


@functools.lru_cache(maxsize=4096)
def _may_be_of_the_users(
    code: types.CodeType, module: str | None, name: str, can_be_called: bool
) -> bool:
    """Whether code that has this name, or string, may read such an attribute of a user's object.

    It does not where the string is a mere key, or that of a framework which does not ask by it;
    where it reads a global, an attribute of an installed module or of a class in one
    (`ir.Location.file`); or one of `self` in a class of a framework, such as the `start_time` with
    which JAX measures how long it traces: of an object whose class inherits from theirs, all
    attributes are noted.
    """
    package = (module or "").partition(".")[0]
    if name == "name" and package in NAMED_BY_THEMSELVES:
        return False
    if MATCH_CLASS in code.co_code[::2] and any(
        isinstance(each, tuple) and name in each for each in code.co_consts
    ):
        return True
    may_ask = package not in ASK_THEIR_OWN or not _ASKING.isdisjoint(code.co_names)
    if may_ask and name in code.co_consts and name not in mere_keys(code):
        return True
    space = vars(sys.modules[module]) if module in sys.modules else {}
    is_method = package in ASK_THEIR_OWN and code.co_varnames[: code.co_argcount][:1] == ("self",)
    is_own, owner = False, None
    for instruction in instructions_of(code):
        operation, argument = instruction.opname, instruction.argval
        if is_method and operation.startswith("STORE_FAST") and argument == "self":
            return True
        is_known = is_own and not instruction.is_jump_target  # As of `(it or self).name`.
        is_read = instruction.opcode in dis.hasname and operation not in _NO_ATTRIBUTE
        is_read = is_read and (can_be_called or not is_for_call(instruction))
        if argument == name and is_read and not is_known:
            return True
        if operation == "LOAD_GLOBAL":
            owner = _owner(space.get(str(argument)))
        elif operation in LOADS_ATTRIBUTE and owner is not None and is_known:
            owner = _owner(vars(owner).get(str(argument)))
        else:
            owner = None
        is_self = is_method and operation.startswith("LOAD_FAST") and argument == "self"
        is_own = owner is not None or is_self
    return False


def _owner(value: Any) -> types.ModuleType | type | None:
    """Returns a value whose attributes are not those of a user's object, or None."""
    is_class = issubclass(type(value), type) and origin_of(value) == INSTALLED
    return value if is_class or type(value) is types.ModuleType else None


_NO_ATTRIBUTE = frozenset("LOAD_GLOBAL LOAD_NAME STORE_ATTR STORE_GLOBAL IMPORT_NAME".split())


def _modules_by_file() -> dict[str, str]:
    return {
        file: name
        for name, module in sys.modules.copy().items()
        if name != "__main__" and (file := getattr(module, "__file__", None))
    }


def _add_names(
    found: dict[str, set[str]], owner: str, space: dict, names: tuple[str, ...], depth: int
) -> None:
    for name in names:
        value = space.get(name, sys.modules.get(name) if "." in name else None)
        if type(value) is types.ModuleType and _is_known_by_file(value.__name__):
            continue
        if name in space and not is_special(name):
            found.setdefault(owner, set()).add(name)
        if type(value) is types.ModuleType and depth and value.__name__ in sys.modules:
            file = getattr(value, "__file__", None)
            if file and origin_of_file(file) == INSTALLED:
                _add_names(found, value.__name__, vars(value), names, depth - 1)


def _is_known_by_file(module: str) -> bool:
    """Modules whose names are not looked at: jaxlib's bindings are loaded bit by bit while a
    program is lowered, and stepcache's own are not to be replaced.
    """
    return module.partition(".")[0] in ("jaxlib", "stepcache")
