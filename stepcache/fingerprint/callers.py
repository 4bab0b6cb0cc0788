"""Who made a call that a trace is watched for: the user's code, a framework, an import or a log."""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import enum
import functools
import inspect
import linecache
import logging
import reprlib
import tokenize
import traceback
import typing
import warnings
import weakref
from pathlib import Path
from types import CodeType, FrameType

import jax.monitoring

from stepcache import events
from stepcache.fingerprint import imports
from stepcache.fingerprint.known_packages import FRAMEWORKS, OF_JAX
from stepcache.fingerprint.provenance import (
    INSTALLED,
    PYTHON,
    file_label,
    origin_of_file,
    package_of,
)

# Numbers its calls at random, to find them in the stack of an error.
_NUMBERS_CALLS = "/equinox/_jit.py"
CHECKS_TYPES = "<@beartype("
"""Begins the file name of code that beartype makes: it picks an item of a container at random, to
check the type of that one, and passes on what it was given."""
OF_EQUINOX = "<generated_"
"""Begins the file name of code that equinox makes: it takes modules to pieces and together."""
# Modules of Python that traces use for themselves: what their code reads, and which functions
# written in C it calls, is for its own ends alone.
FOR_THEMSELVES = frozenset(
    str(module.__file__)
    for module in (
        *(collections, contextlib, dataclasses, enum, functools, inspect, linecache, reprlib),
        *(tokenize, typing, weakref),
    )
)
# Asks for its thread, in case that an array of objects is in itself, as `reprlib` does.
_SHOWS_ARRAYS = "/numpy/_core/arrayprint.py"
_BYSTANDERS = (
    f"{Path(logging.__file__).parent}/",
    warnings.formatwarning.__code__.co_filename,
    traceback.print_exc.__code__.co_filename,
)
_LISTENERS = frozenset(
    (logging.__file__, jax.monitoring.record_event.__code__.co_filename, events.__file__)
)
_FINDING = frozenset(("_find_spec", "_get_spec", "_path_hooks"))


@functools.lru_cache(maxsize=8192)
def calls_matter(filename: str) -> bool:
    """Whether what the code of a file calls may be what a trace depends on."""
    if origin_of_file(filename) == INSTALLED:
        for_itself = filename.endswith((_NUMBERS_CALLS, _SHOWS_ARRAYS))
        return package_of(filename) not in FRAMEWORKS and not for_itself
    return filename not in FOR_THEMSELVES and not filename.startswith((CHECKS_TYPES, OF_EQUINOX))


def is_import_hook(frame: FrameType) -> bool:
    """Whether Python's import system asked this code for a module, as it asks all of its hooks.

    A hook does not depend on what is imported: setuptools' is asked wherever setuptools is
    installed.
    """
    caller, filename = frame.f_back, frame.f_code.co_filename
    while caller is not None and caller.f_code.co_filename == filename:
        caller = caller.f_back
    if caller is None:
        return False
    return caller.f_code.co_name in _FINDING and is_of_imports(caller.f_code)


def is_bystander(frame: FrameType | None) -> bool:
    """Whether code runs on behalf of a log or of a listener, which the trace does not see."""
    while frame is not None:
        if frame.f_code.co_filename in _LISTENERS:
            return True
        frame = frame.f_back
    return False


def is_for_caches_of_jax(frame: FrameType) -> bool:
    """Whether JAX asks for a hash, with which it looks into its caches alone."""
    caller = frame.f_back
    while caller is not None and caller.f_code.co_name == "__hash__":
        caller = caller.f_back
    return caller is not None and package_of(caller.f_code.co_filename) in OF_JAX


def responsible(frame: FrameType | None) -> str | None:
    """Where the call came from: the nearest frame that is not of Python's own library.

    Returns:
        `package/file:function`; None where it came from a framework, from a bystander such as
        logging, or from a package that is being imported.
    """
    while frame is not None:
        filename = frame.f_code.co_filename
        origin = origin_of_file(filename)
        if origin == PYTHON and passes_by(frame):
            return None
        package = package_of(filename) if origin == INSTALLED else ""
        if package in FRAMEWORKS or (package and filename.endswith(_NUMBERS_CALLS)):
            return None
        if origin != PYTHON and package != "numpy":
            if imports.of_this_thread().passes_over(frame.f_code):
                return None
            label = file_label(filename, frame.f_globals.get("__name__"))
            return f"{label}:{frame.f_code.co_qualname}"
        frame = frame.f_back
    return None


def passes_by(frame: FrameType) -> bool:
    """Whether code of Python's imports a module, or works for a log, and so not for a trace."""
    code = frame.f_code
    is_import = code.co_name == "_find_and_load" and is_of_imports(code)
    return is_import or code.co_filename.startswith(_BYSTANDERS)


def is_of_imports(code: CodeType) -> bool:
    """Whether code is of Python's import system, which opens no files on a trace's behalf."""
    return code.co_filename.startswith("<frozen importlib")
