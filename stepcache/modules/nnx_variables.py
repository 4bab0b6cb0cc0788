"""What nnx keeps in a `Variable`, read and written at the speed of C."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import jax
from flax import nnx
from flax.nnx import graphlib, variablelib

value_of: Callable[[nnx.Variable], Any] = vars(nnx.Variable)["_raw_value"].__get__
"""The raw value of a variable."""

metadata_of: Callable[[nnx.Variable], dict] = vars(nnx.Variable)["_var_metadata"].__get__
"""The metadata of a variable; not a copy."""

_set_value = vars(nnx.Variable)["_raw_value"].__set__


def set_values(variables: Iterable[nnx.Variable], values: Iterable[Any]) -> None:
    """Gives variables new raw values, as `set_raw_value` does outside of a trace."""
    for _ in map(_set_value, variables, values):
        pass


def is_module(x: Any) -> bool:
    """Whether nnx follows an object: a module, optimizer or metric, or a variable alone."""
    return graphlib.is_graph_node(x) or isinstance(x, nnx.Variable)


def has_modules(tree: Any) -> bool:
    """Whether there are modules in a tree."""
    return any(map(is_module, jax.tree.leaves(tree, is_leaf=is_module)))


def is_reference(x: Any) -> bool:
    """Whether a program writes to an object by itself: JAX's references, and variables of them."""
    return isinstance(x, variablelib.HijaxVariable) or variablelib.is_array_ref(x)
