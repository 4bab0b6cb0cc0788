"""Functions written in C that a trace calls: what each call of one may depend on.

Such a function is told by `decided_by`: what a method does follows from the class that it is of.
"""

from __future__ import annotations

import datetime
import io
import sys
from types import BuiltinFunctionType, ModuleType, NoneType
from typing import Any

from stepcache.fingerprint.known_packages import COMPILED_OF_MUJOCO
from stepcache.fingerprint.nondeterminism import name_of_method, why_impure

IMPURE_MODULES = COMPILED_OF_MUJOCO | frozenset(
    ("time", "posix", "nt", "_thread", "_socket", "_random", "_posixsubprocess", "_uuid")
)
_OF_IMPURE_CLASSES = frozenset(("random", "_random", "datetime", "numpy.random.mtrand"))
# Modules whose functions and classes open no files.
_OPEN_NOTHING = frozenset(
    "builtins sys gc atexit time datetime _thread re _sre math operator _operator functools "
    "_functools itertools collections _collections _abc weakref _weakref types _warnings "
    "contextvars _contextvars _codecs _bisect _heapq _struct array binascii zlib _json _string "
    "unicodedata _decimal decimal _hashlib _md5 _sha1 _sha2 _sha256 _sha512 _sha3 "
    "_blake2 numpy jax jaxlib nanobind flax optax".split()
)
_OF_FILES = {"posix": ("open", "listdir", "scandir"), "numpy": ("fromfile",)}
_OF_FILES["nt"] = _OF_FILES["posix"]
_OWNERS_OF_ALL = (type, ModuleType, NoneType)  # What their instances have is of any kind.
_CAPSULE = type(datetime.datetime_CAPI)


def decided_by(function: Any, owner: Any) -> Any:
    """What says which function a trace calls, of those written in C.

    Args:
        function: what is called.
        owner: what it is a method of; None of a class.

    Returns:
        The class of the owner; the owner where it is a class; the function where it is a module's.
    """
    kind = type(owner)
    if owner is None or kind is ModuleType or kind is _CAPSULE or kind.__module__ == _PYBIND:
        return function
    return owner if issubclass(kind, type) else kind


_PYBIND = "pybind11_builtins"  # The module of what each of pybind11's functions is bound to.


def decides(known: Any) -> bool:
    """Whether all calls that are told by `known` are alike."""
    if issubclass(type(known), type):
        return not issubclass(known, _OWNERS_OF_ALL)
    return type(known) is BuiltinFunctionType


def may_be_impure(known: Any) -> bool:
    """Whether calls that are told by `known` need not give the same in each run."""
    if issubclass(type(known), type):
        return any(each.__module__ in _OF_IMPURE_CLASSES for each in known.__mro__)
    if getattr(known, "__module__", None) in IMPURE_MODULES:
        return type(known) is not BuiltinFunctionType or why_call_is_impure(known) is not None
    return False


def is_harmless(known: Any) -> bool:
    """Whether no call that is told by `known` needs to be seen again, in any trace."""
    return decides(known) and not may_be_impure(known) and opens_nothing(known)


def opens_nothing(known: Any) -> bool:
    """Whether no call that is told by `known` opens a file or lists a directory."""
    module = getattr(known, "__module__", None)
    if module in _OF_FILES:
        return known.__name__ not in _OF_FILES[module]
    if known is io.StringIO or known is io.BytesIO:
        return True
    return isinstance(module, str) and module.partition(".")[0] in _OPEN_NOTHING


def why_call_is_impure(function: Any) -> str | None:
    """Why a call of a function written in C does not give the same in each run; None if it does."""
    name = _name_of_builtin(function)
    return why_impure(name) if name is not None else None


def _name_of_builtin(function: Any) -> str | None:
    owner = getattr(function, "__self__", None)
    name = getattr(function, "__name__", "")
    module = getattr(function, "__module__", None)
    if owner is None or type(owner).__name__ == "module" or module in COMPILED_OF_MUJOCO:
        return f"{module}.{name}" if module else None
    if isinstance(owner, type):
        return name_of_method(owner, name)
    if isinstance(owner, datetime.datetime) and (owner.tzinfo is None or name == "astimezone"):
        return f"datetime.datetime.{name}"
    for module, generator, public in _HIDDEN_GENERATORS:
        if owner is getattr(sys.modules.get(module), generator, None):
            return f"{public}.{name}"
    return None


# The generators of random numbers that modules keep for themselves.
_HIDDEN_GENERATORS = (
    ("random", "_inst", "random"),
    ("numpy.random.mtrand", "_rand", "numpy.random"),
)
