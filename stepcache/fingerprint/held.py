"""Whether objects still hold the same objects as when they were looked at.

Told by identity, and nearly all of it in C: a small step leads to some fifty thousand objects of
the libraries that it uses, and that nothing in them was replaced is asked at each miss.
"""

from __future__ import annotations

import ctypes
import functools
import gc
import operator
import sys
import sysconfig
import types
from collections.abc import Iterable
from itertools import chain
from typing import Any

from stepcache.fingerprint.provenance import PYTHON, origin_of

CONTAINERS = frozenset((dict, list, tuple, set, frozenset))
_CHANGEABLE = frozenset((list, set))
_CONTAINERS_DEEP = 4


class Held:
    """Classes, functions and containers, with what could be replaced inside them."""

    def __init__(self) -> None:
        self._owners: dict[int, Any] = {}
        self._inside: list[Any] = []
        self._dicts: dict[int, dict] = {}
        self._keys: list[Any] = []
        self._values: list[Any] = []

    def hold(self, values: Iterable[Any]) -> None:
        """Adds values: of a class its members, of a function its code and defaults."""
        values = list(values)
        classes = [
            each for each in values if issubclass(type(each), type) and not is_immutable(each)
        ]
        owners = gc.get_referents(*map(vars, classes))  # The dictionaries behind the proxies.
        for each in classes:
            members = vars(each).values()
            if origin_of(each) == PYTHON:  # It may keep a registry of its own.
                members = [member for member in members if type(member) not in CONTAINERS]
            values += members
        owners += [each for each in values if type(each) is types.FunctionType]
        owners += filter(
            None, map(function_in, (each for each in values if type(each) in _METHODS))
        )
        containers = [each for each in values if type(each) in CONTAINERS]
        containers += filter(None, map(registered_with, owners))
        dictionaries: list[dict] = []
        for _ in range(_CONTAINERS_DEEP):
            dicts = [each for each in containers if type(each) is dict]
            others = [each for each in containers if type(each) is not dict]
            inner = [*_keys(dicts), *_values(dicts), *chain.from_iterable(others)]
            dictionaries += dicts
            owners += [each for each in others if type(each) in _CHANGEABLE]
            owners += [each for each in inner if type(each) is types.FunctionType]
            containers = [each for each in inner if type(each) in CONTAINERS]
        self._add(owners, dictionaries)

    def add(self, other: Held) -> None:
        """Adds all that another one holds."""
        self._add(other._owners.values(), other._dicts.values())

    def _add(self, owners: Iterable[Any], dicts: Iterable[dict]) -> None:
        # Each once: many modules import the same functions.
        new, new_dicts = _by_identity(owners, self._owners), _by_identity(dicts, self._dicts)
        self._owners |= new
        self._inside += gc.get_referents(*new.values())
        self._dicts |= new_dicts
        self._keys += _keys(new_dicts.values())
        self._values += _values(new_dicts.values())

    def is_same(self) -> bool:
        """Whether nothing was replaced since."""
        # A function's `__code__` is not asked for: that calls audit hooks each time.
        dicts = self._dicts.values()
        return (
            are_same(gc.get_referents(*self._owners.values()), self._inside)
            and are_same(_keys(dicts), self._keys)
            and are_same(_values(dicts), self._values)
        )


def are_same(now: list[Any], known: list[Any]) -> bool:
    """Whether two lists hold the same objects."""
    if len(now) != len(known):
        return False
    if _LISTS_ARE_READABLE:
        return _addresses(now) == _addresses(known)
    return all(map(operator.is_, now, known))


def _addresses(values: list[Any]) -> bytes:
    """The addresses of the objects in a list, as they stand in CPython's memory.

    To compare these takes a fiftieth of the time of asking `is` of each pair.
    """
    if not values:
        return b""
    items = ctypes.c_size_t.from_address(id(values) + _ITEMS_AT).value
    return ctypes.string_at(items, len(values) * _WORD)


_WORD = ctypes.sizeof(ctypes.c_void_p)
_LENGTH_AT, _ITEMS_AT = 2 * _WORD, 3 * _WORD


def _lists_are_readable() -> bool:
    """Whether lists lie in memory as in CPython since 3.0: head, length, address of the items."""
    if sys.implementation.name != "cpython" or sysconfig.get_config_var("Py_GIL_DISABLED"):
        return False
    tried = [object() for _ in range(5)]
    if ctypes.c_ssize_t.from_address(id(tried) + _LENGTH_AT).value != len(tried):
        return False
    addresses = b"".join(id(each).to_bytes(_WORD, sys.byteorder) for each in tried)
    return _addresses(tried) == addresses


_LISTS_ARE_READABLE = _lists_are_readable()


def _by_identity(values: Iterable[Any], known: dict[int, Any]) -> dict[int, Any]:
    """Values by their identities, without those that are known."""
    values = list(values)
    new = dict(zip(map(id, values), values, strict=True))
    for each in new.keys() & known.keys():
        del new[each]
    return new


def _keys(dicts: Iterable[dict]) -> list[Any]:
    return list(chain.from_iterable(dicts))


def _values(dicts: Iterable[dict]) -> list[Any]:
    return list(chain.from_iterable(map(dict.values, dicts)))


def is_immutable(cls: type) -> bool:
    """Whether Python refuses to set attributes of a class."""
    return not cls.__flags__ & _HEAP_TYPE or bool(cls.__flags__ & _IMMUTABLE_TYPE)


_IMMUTABLE_TYPE, _HEAP_TYPE = 1 << 8, 1 << 9  # Py_TPFLAGS_IMMUTABLETYPE, Py_TPFLAGS_HEAPTYPE


def function_in(value: Any) -> types.FunctionType | None:
    """A function written in Python, by itself or in a property or a method of a class."""
    if type(value) in _METHODS:
        value = value.fget if type(value) is property else value.__func__
    return value if type(value) is types.FunctionType else None


_METHODS = frozenset((property, staticmethod, classmethod))


def registered_with(function: Any) -> dict[type, Any]:
    """The functions that `functools.singledispatch` calls in the place of one; none of others."""
    if type(function) is types.FunctionType and function.__globals__ is _OF_FUNCTOOLS:
        registry = vars(function).get("registry")
        if type(registry) is types.MappingProxyType:
            (found,) = gc.get_referents(registry)
            return found
    return {}


_OF_FUNCTOOLS = vars(functools)
