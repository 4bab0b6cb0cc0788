"""The functions that a function wraps, its code, and how many steps were made of that code."""

from __future__ import annotations

import functools
import threading
import types
import weakref
from collections import Counter
from collections.abc import Iterator
from typing import Any, NamedTuple

from stepcache.origin import file_label, is_users_file

_MAX_LAYERS = 16
_MAX_WRAPPINGS = 256


def layers_of(fun: Any) -> Iterator[Any]:
    """`fun` and what it wraps, from the outside in: transformations, partials, methods, steps."""
    for _ in range(_MAX_LAYERS):
        yield fun
        inner = _wrapped_by(fun)
        if inner is None:
            return
        fun = inner


def _wrapped_by(fun: Any) -> Any:
    if isinstance(fun, types.MethodType | staticmethod | classmethod):
        return fun.__func__
    inner = getattr(fun, "__wrapped__", None)
    if inner is None and isinstance(fun, functools.partial):
        return fun.func
    if inner is None and code_of(fun) is None:
        call = getattr(type(fun), "__call__", None)  # noqa: B004  (which function, not whether)
        return call if isinstance(call, types.FunctionType) else None
    return inner


def code_of(fun: Any) -> types.CodeType | None:
    """The code of a function or a method; None for any other callable."""
    code = getattr(fun, "__code__", None)
    return code if isinstance(code, types.CodeType) else None


def definition_of(fun: Any) -> Any:
    """The user's function under what libraries wrapped around it; None where there is no code."""
    found = None
    for layer in layers_of(fun):
        code = code_of(layer)
        if code is not None:
            found = layer
            if is_users_file(code.co_filename):
                break
    return found


def step_label(fun: Any) -> str:
    """How to name a step in any process: by its file and name."""
    inner = definition_of(fun)
    if inner is None:
        return f"{type(fun).__module__}:{type(fun).__qualname__}"
    return f"{file_label(inner.__code__.co_filename, inner.__module__)}:{inner.__qualname__}"


def function_name(fun: Any) -> str:
    """What to call `fun` in messages; partials are named after what they wrap."""
    if isinstance(fun, functools.partial) and not hasattr(fun, "__name__"):
        return function_name(fun.func)
    return getattr(fun, "__name__", type(fun).__name__)


def place_of(fun: Any) -> str:
    """File and line of the user's innermost function; empty where there is none."""
    codes = [(code, layer) for layer in layers_of(fun) if (code := code_of(layer)) is not None]
    for code, layer in reversed(codes):
        if is_users_file(code.co_filename):
            return f"{file_label(code.co_filename, layer.__module__)}:{code.co_firstlineno}"
    return ""


class Making(NamedTuple):
    """Where the code of a step is, and how many steps of it have been made."""

    place: str = ""  # File and line of the function; empty where it has no code.
    count: int = 1  # 1 for the first step of this code, wrapped as this one is; 2 for the next.


_lock = threading.Lock()
_steps: dict[int, tuple[weakref.ref, Counter[tuple[str, ...]]]] = {}


def count_step(fun: Any) -> Making:
    """Counts a step over `fun`, for as long as the code of `fun` lives.

    Code that is compiled again, as a cell of a notebook is when it is run again, begins at 1. That
    of a library is not counted: `hk.transform(f).apply` is one function for all `f`.
    """
    layers = list(layers_of(fun))
    codes = [code_of(layer) for layer in layers]
    depth = max((depth for depth, code in enumerate(codes) if code is not None), default=None)
    code: Any = None if depth is None else codes[depth]
    if code is None or not is_users_file(code.co_filename):
        return Making()
    wrapping = tuple(
        type(layer).__qualname__ if code is None else f"{code.co_filename}:{code.co_qualname}"
        for layer, code in zip(layers[:depth], codes, strict=False)
    )
    with _lock:
        reference, counts = _steps.get(id(code), (None, Counter()))
        if reference is None or reference() is not code or len(counts) >= _MAX_WRAPPINGS:
            weakref.finalize(code, _steps.pop, id(code), None).atexit = False
            _steps[id(code)] = weakref.ref(code), (counts := Counter())
        counts[wrapping] += 1
        count = counts[wrapping]
    return Making(place_of(fun), count)
