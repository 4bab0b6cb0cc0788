"""The captured numbers that tell a step from the one made before it from the same code."""

from __future__ import annotations

import contextlib
import functools
import sys
import types
from typing import Any

import numpy as np

_MOST_PARTS, _CODES_REMEMBERED = 512, 256
_latest: dict[str, dict[str, Any]] = {}  # By where the code is.


def advice_on_remaking(place: str, fun: Any) -> str:
    """What to do about a captured number that another step of the code at `place` had otherwise."""
    numbers = _captured_numbers(fun)
    before = _latest.pop(place, numbers)
    _latest[place] = numbers
    if len(_latest) > _CODES_REMEMBERED:
        _latest.pop(next(iter(_latest)), None)
    changed = [name for name, number in numbers.items() if before.get(name, number) != number]
    if not changed:
        return ""
    listed = "; ".join(f"{name}: {before[name]} → {numbers[name]}" for name in changed[:3])
    text = f"the step made before captured another number ({listed}): pass it as an argument"
    if "optax" in sys.modules:
        text += ", or use optax.inject_hyperparams(optax.adam)(learning_rate=...) for an optimizer"
    return text


def _captured_numbers(fun: Any) -> dict[str, Any]:
    """The numbers in closures, partials, methods and tuples that a function leads to, by path."""
    found, seen, waiting = dict[str, Any](), set[int](), [("", fun)]
    while waiting and len(seen) < _MOST_PARTS:
        name, value = waiting.pop()
        parts: dict[str, Any] = {}
        if isinstance(value, int | float | complex | np.generic):
            found[name.lstrip(".")] = value
        elif id(value) in seen:
            continue
        elif isinstance(value, types.FunctionType):
            with contextlib.suppress(ValueError):  # A variable that has no value yet.
                names, cells = value.__code__.co_freevars, value.__closure__ or ()
                parts = {name: cell.cell_contents for name, cell in zip(names, cells, strict=True)}
        elif isinstance(value, functools.partial):
            parts = {"func": value.func, "args": value.args, **value.keywords}
        elif isinstance(value, types.MethodType):
            parts = {"self": value.__self__, "function": value.__func__}
        elif isinstance(value, tuple):  # As of optax: functions in a named tuple.
            names = getattr(value, "_fields", range(len(value)))
            parts = {str(each): part for each, part in zip(names, value, strict=False)}
        elif hasattr(value, "__wrapped__"):
            parts = {"function": value.__wrapped__}
        seen.add(id(value))
        waiting += [(f"{name}.{each}", part) for each, part in parts.items()]
    return found
