"""`RowOptimizer`: how the server of a table updates rows."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np

from stepcache.variables.policy import check, check_choices, is_number


@dataclass(frozen=True, slots=True)
class RowOptimizer:
    """How `push` updates rows of a served table. Only the rows of the update change.

        sc.RowOptimizer("adagrad", learning_rate=0.1)

    Attributes:
        name: "add" or "assign", without other options; or "sgd", "adagrad" or "adam", whose updates
            are gradients. Adam counts steps for each row, and updates moments only with the row.
        learning_rate: for "sgd", "adagrad" and "adam"; more than 0.
        b1, b2: decay rates of Adam's two moments.
        eps: added to the divisor.

    Raises:
        OptionError: a field has no such value.

    Adagrad for sparse features: Duchi et al. (2011).
    """

    name: Literal["add", "assign", "sgd", "adagrad", "adam"] = "add"
    learning_rate: float = 0.0
    b1: float = 0.9
    b2: float = 0.999
    eps: float = 1e-8

    def __post_init__(self):
        check_choices(self, name=tuple(UPDATED))
        takes_gradients = self.name not in ("add", "assign")
        is_legal = is_number(self.learning_rate, int | float)
        what = "learning_rate does not fit the optimizer"
        expected = "a number > 0" if takes_gradients else '0: "add" and "assign" take none'
        fits = is_legal and (self.learning_rate > 0) is takes_gradients
        check(fits, what, "RowOptimizer", expected, self.learning_rate)
        for name in ("learning_rate", "b1", "b2", "eps"):
            object.__setattr__(self, name, float(getattr(self, name)))


def _adagrad(how: RowOptimizer, rows: Any, update: Any, state: dict[str, Any]) -> Any:
    state["squares"] += update * update
    return rows - how.learning_rate * update / (np.sqrt(state["squares"]) + how.eps)


def _adam(how: RowOptimizer, rows: Any, update: Any, state: dict[str, Any]) -> Any:
    """Lazy Adam: the moments of rows without an update stay as they are."""
    state["count"] += 1
    state["mean"] += (1 - how.b1) * (update - state["mean"])
    state["squares"] += (1 - how.b2) * (update * update - state["squares"])
    count = state["count"].reshape(-1, *(1,) * (rows.ndim - 1))
    mean = state["mean"] / (1 - how.b1**count)
    squares = state["squares"] / (1 - how.b2**count)
    return rows - how.learning_rate * mean / (np.sqrt(squares) + how.eps)


STATE = {"adagrad": ("squares",), "adam": ("count", "mean", "squares")}
"""Arrays of each optimizer's state. "count" has one number for each row, the others its shape."""

UPDATED: dict[str, Callable[..., Any]] = {
    "add": lambda how, rows, update, state: rows + update,
    "assign": lambda how, rows, update, state: update,
    "sgd": lambda how, rows, update, state: rows - how.learning_rate * update,
    "adagrad": _adagrad,
    "adam": _adam,
}
"""Functions of an optimizer, rows, an update and state, which they change, that return new rows."""
