"""The captured numbers that tell a step from the one made before it from the same code."""

from __future__ import annotations

import functools
import sys
import threading
import types
from collections import OrderedDict
from typing import Any

import numpy as np

_DEEPEST, _MOST, _CODES_REMEMBERED = 8, 512, 256
_lock = threading.Lock()
_latest: OrderedDict[str, dict[str, str]] = OrderedDict()  # By where the code is.


def advice_on_remaking(place: str, fun: Any) -> str:
    """What to do about a captured number that another step of this code had otherwise; or "".

    Args:
        place: where the code of the step is.
        fun: its function.
    """
    numbers = _captured_numbers(fun)
    with _lock:
        before = _latest.pop(place, numbers)
        _latest[place] = numbers
        if len(_latest) > _CODES_REMEMBERED:
            _latest.popitem(last=False)
    changed = [name for name in numbers if before.get(name, numbers[name]) != numbers[name]]
    if not changed:
        return ""
    listed = "; ".join(f"{name}: {before[name]} → {numbers[name]}" for name in changed[:3])
    text = f"the step made before captured another number ({listed}): pass it as an argument"
    if "optax" in sys.modules:
        text += (
            ", or, of an optimizer, keep it in its state: "
            "optax.inject_hyperparams(optax.adam)(learning_rate=...)"
        )
    return text


def _captured_numbers(fun: Any) -> dict[str, str]:
    """The numbers in closures, partials, methods' objects and tuples that a function leads to."""
    found: dict[str, str] = {}
    seen: set[int] = set()
    waiting = [("", fun, 0)]
    while waiting and len(seen) < _MOST:
        name, value, depth = waiting.pop()
        if isinstance(value, int | float | complex | np.generic) and name:
            found[name.lstrip(".")] = str(value)
            continue
        if id(value) in seen or depth > _DEEPEST:
            continue
        seen.add(id(value))
        for part, each in _parts(value).items():
            waiting.append((f"{name}.{part}", each, depth + 1))
    return found


def _parts(value: Any) -> dict[str, Any]:
    if isinstance(value, types.FunctionType):
        cells = zip(value.__code__.co_freevars, value.__closure__ or (), strict=True)
        return {name: cell.cell_contents for name, cell in cells if _is_filled(cell)}
    if isinstance(value, functools.partial):
        return {
            "func": value.func,
            **dict(zip("0123456789", value.args, strict=False)),
        } | value.keywords
    if isinstance(value, types.MethodType):
        return {"self": value.__self__, "function": value.__func__}
    if isinstance(value, tuple):
        names = getattr(value, "_fields", range(len(value)))
        return {str(name): each for name, each in zip(names, value, strict=False)}
    if hasattr(value, "__wrapped__"):
        return {"function": value.__wrapped__}
    return {}


def _is_filled(cell: types.CellType) -> bool:
    try:
        return cell.cell_contents is not cell
    except ValueError:
        return False
