"""What tells a step from the one that was made before it from the same function."""

from __future__ import annotations

import sys
import threading
from collections import OrderedDict

from stepcache.events import Change
from stepcache.fingerprint.dependencies import differences

_FUNCTIONS_REMEMBERED = 256

_lock = threading.Lock()
_latest: OrderedDict[str, dict[str, str]] = OrderedDict()


def captured_numbers(label: str, dependencies: dict[str, str]) -> tuple[Change, ...]:
    """The numbers that a new step captures, where the one made before captured others.

    Args:
        label: of the function.
        dependencies: those of the step that are known before it is traced.
    """
    with _lock:
        before = _latest.pop(label, None)
        _latest[label] = dependencies
        if len(_latest) > _FUNCTIONS_REMEMBERED:
            _latest.popitem(last=False)
    if before is None or before == dependencies:
        return ()
    changes = differences(before, dependencies)
    return tuple(each for each in changes if _is_number(each.before) and _is_number(each.after))


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


def _is_number(text: str) -> bool:
    try:
        complex(text)
    except ValueError:
        return False
    return True
