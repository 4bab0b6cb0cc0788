"""nnx modules that are passed to a plain step, which sees them as trees: what then goes wrong.

As under `jax.jit`, its function gets copies. What it does to a copy, and does not return, is lost.
"""

from __future__ import annotations

import functools
import operator
import sys
from typing import Any

from jax.tree_util import keystr, tree_flatten_with_path, tree_leaves

from stepcache.calls.signature import Call
from stepcache.calls.step_spec import StepSpec
from stepcache.errors import StepCacheWarning, warn

_INSTEAD = "stepcache.nnx.step, a drop-in for nnx.jit, updates modules in place"


def warn_of_carried_module(spec: StepSpec, call: Call) -> None:
    """Warns of a call that carries an nnx module."""
    for name in spec.parameters.carry:
        if _variables(call.arguments.get(name)):
            warn(
                f"{spec.name} carries {name!r}, an nnx module: the one that is passed is left "
                f"without its arrays, and another one comes back. {_INSTEAD}",
                StepCacheWarning,
            )


def checking_modules(spec: StepSpec, call: Call) -> StepSpec:
    """The step of a call, which warns if an nnx variable gets a value that is not returned.

    But not of the counts of `nnx.Rngs`, often made for one call. Without variables it is `spec`.
    """
    if not _variables((call.args, call.kwargs)):
        return spec

    @functools.wraps(spec.fun)
    def checked(*args: Any, **kwargs: Any) -> Any:
        named = dict(enumerate(args)) | kwargs
        before = [
            (key, keys, each, tree_leaves(each))
            for key, argument in named.items()
            for keys, each in _variables(argument)
            if not isinstance(each, sys.modules["flax.nnx"].RngState)
        ]
        outputs = spec.fun(*args, **kwargs)
        returned = {id(each) for each in tree_leaves(outputs)}  # Also what is in an `nnx.State`.
        for key, keys, each, old in before:
            new = tree_leaves(each)
            same = len(new) == len(old) and all(map(operator.is_, new, old))
            if not same and not all(id(leaf) in returned for leaf in new):
                name = spec.parameters.name_of(key) if isinstance(key, int) else key
                lost = f"{spec.name} gives {name + keystr(keys)}, an nnx variable, a new value and"
                text = f"{lost} does not return it: as jax.jit, a step works on copies. {_INSTEAD}"
                warn(f"{text}; or return the module", StepCacheWarning)
                break
        return outputs

    return spec.over(checked)


def _variables(tree: Any) -> list[tuple[tuple, Any]]:
    """The variables in the modules of a tree, with JAX's keys.

    Those in an `nnx.State` are values: who passes them knows that they have to be returned.
    """
    nnx = sys.modules.get("flax.nnx")  # Who has nnx modules has imported it.
    module, variable = getattr(nnx, "Pytree", None), getattr(nnx, "Variable", None)
    if module is None or variable is None:
        return []

    def of_kind(kind: type, tree: Any) -> list[tuple[tuple, Any]]:
        leaves = tree_flatten_with_path(tree, is_leaf=lambda x: isinstance(x, kind))[0]
        return [(keys, leaf) for keys, leaf in leaves if isinstance(leaf, kind)]

    return [
        (outer + inner, each)
        for outer, found in of_kind(module, tree)
        for inner, each in of_kind(variable, found)
    ]
