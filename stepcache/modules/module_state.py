"""`ModuleState`: a module in the arguments of a program, flat, and what stands beside it."""

from __future__ import annotations

import operator
from typing import Any

import jax


class ModuleState:
    """One module in the place where it was in a call, or is in its outputs.

    Attributes:
        values: its arrays, in the order of the structure.
        structure: the rest of it, which can be hashed and compared. Its `paths()` are JAX's keys of
            the arrays, in order: each has the path for rules, such as `layers/3/kernel`, as `name`.
            Its `settings()` describe all else, by such paths.
    """

    __slots__ = ("structure", "values")

    def __init__(self, structure: Any, values: Any):
        self.structure, self.values = structure, values


jax.tree_util.register_pytree_with_keys(
    ModuleState,
    lambda state: (list(zip(state.structure.paths(), state.values, strict=True)), state.structure),
    ModuleState,
    operator.attrgetter("values", "structure"),
)


def is_state(x: Any) -> bool:
    """Whether a module's state stands in the place of a module."""
    return isinstance(x, ModuleState)


class Outcome:
    """What a program over modules returns."""

    __slots__ = ("about", "outputs", "states")
    is_exportable = True  # `programs.trust` makes it of a plain value and its children again.

    def __init__(self, about: Any, children: Any):
        self.about = about  # Plain values about the call, which are no arrays.
        self.states, self.outputs = children  # The modules' new values; what the function returned.


jax.tree_util.register_pytree_node(
    Outcome, lambda outcome: ((outcome.states, outcome.outputs), outcome.about), Outcome
)
