"""`ModuleState`: a module in the arguments of a program, flat, and what stands beside it."""

from __future__ import annotations

import operator
from collections.abc import Hashable, Sequence
from typing import Any, Protocol

import jax
from jax.tree_util import GetAttrKey


class Structure(Hashable, Protocol):
    """All of a module but its arrays. Equal structures need the same program."""

    def paths(self) -> Sequence[str]:
        """The path of each array, in order, such as `layers/3/kernel`."""
        ...


class AttributePath(GetAttrKey):
    """The path of an array in a module: `layers/3/kernel` for rules, `.layers[3].kernel` else."""

    def __str__(self) -> str:
        parts = self.name.split("/") if self.name else []
        return "".join(f"[{part}]" if part.isdigit() else f".{part}" for part in parts)


class ModuleState:
    """One module in the place where it was in a call, or is in its outputs.

    Attributes:
        values: its arrays, in the order of the structure.
        structure: the rest of it.
    """

    __slots__ = ("structure", "values")

    def __init__(self, structure: Structure, values: Sequence[Any]):
        self.structure, self.values = structure, values


jax.tree_util.register_pytree_with_keys(
    ModuleState,
    lambda state: (
        list(zip(map(AttributePath, state.structure.paths()), state.values, strict=True)),
        state.structure,
    ),
    ModuleState,
    operator.attrgetter("values", "structure"),
)


def is_state(x: Any) -> bool:
    """Whether a module's state stands in the place of a module."""
    return isinstance(x, ModuleState)


class Outcome:
    """What a program over modules returns.

    Attributes:
        states: the new values of the modules of the arguments.
        outputs: of the function.
        about: plain values that say how to give these back.
    """

    __slots__ = ("about", "outputs", "states")

    def __init__(self, about: tuple, children: Sequence[Any]):
        self.about = about
        self.states, self.outputs = children


jax.tree_util.register_pytree_node(
    Outcome, lambda outcome: ((outcome.states, outcome.outputs), outcome.about), Outcome
)


class OverModules:
    """What a program runs in the place of a function over modules.

    No function, so that whatever asks for code, a file or a signature finds those of the user's.
    """

    def __init__(self, fun: Any, name: str):
        self.__wrapped__, self.__module__ = fun, getattr(fun, "__module__", "")
        self.__name__ = self.__qualname__ = name

    def __repr__(self) -> str:
        return repr(self.__wrapped__)
