"""What tells a step from the one that was made before it from the same function."""

from __future__ import annotations

import sys
import threading
from collections import OrderedDict

from stepcache.events import Change
from stepcache.fingerprint.dependencies import differences

_FUNCTIONS_REMEMBERED = 256

_lock = threading.Lock()
_BEGINNINGS = frozenset("0123456789-.(ni")  # Of a number as text: `(1+2j)`, `nan`, `inf`.
_latest: OrderedDict[str, dict[str, str]] = OrderedDict()


def captured_numbers(label: str, dependencies: dict[str, str]) -> tuple[Change, ...]:
    """The numbers that a new step captures, where the one made before captured others.

    They are among the `dependencies` that are known before a trace. The label names the function.
    """
    numbers = {name: token for name, token in dependencies.items() if number_of(token) is not None}
    with _lock:
        before = _latest.pop(label, numbers)
        _latest[label] = numbers
        if len(_latest) > _FUNCTIONS_REMEMBERED:
            _latest.popitem(last=False)
    if before == numbers:
        return ()
    common = before.keys() & numbers.keys()
    return differences(*({name: each[name] for name in common} for each in (before, numbers)))


def advice(changes: tuple[Change, ...]) -> str:
    """What to do about a captured number that varies; empty for none."""
    if not changes:
        return ""
    told = "; ".join(f"{each.path}: {each.before} → {each.after}" for each in changes[:3])
    text = f"the step made before captured another number ({told}): pass it as an argument"
    if "optax" in sys.modules:
        text += (
            ", or, of an optimizer, keep it in its state: "
            "optax.inject_hyperparams(optax.adam)(learning_rate=...)"
        )
    return text


def number_of(token: str) -> complex | None:
    """The number that a dependency is; None if it is none."""
    if token[:1] not in _BEGINNINGS:
        return None
    try:
        return complex(token)
    except ValueError:
        return None
