"""Whether a call passes `Variables`, and where: what a step's options require of its arguments.

What serves such calls imports much, and is imported at the first of them.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import jax
from jax.sharding import PartitionSpec, Sharding

from stepcache import jaxcompat
from stepcache.calls.carry import argument_of
from stepcache.calls.step_spec import StepSpec
from stepcache.errors import VariablesError
from stepcache.variables.misuse import NoTree

if TYPE_CHECKING:
    from stepcache.variables.variables import Variables

NOT_A_HIT: Any = object()
"""What a plan gets from a call over buffers that has to enter Python: the usual way is to do that.

No exception: JAX's dispatcher would never again serve such a call by itself.
"""
admitted = threading.local()
"""Its `engine` is the one that this thread's call, in `ResidentRunner.run`, was given to."""


def passes_variables(args: tuple, kwargs: dict[str, Any]) -> bool:
    """Whether there are `Variables` among the arguments of a call."""
    return NoTree._made and bool(variables_in((args, kwargs)))


def variables_in(tree: Any) -> list[Any]:
    """The `Variables` in a tree, in order."""
    return [leaf for leaf in jax.tree_util.tree_leaves(tree) if isinstance(leaf, NoTree)]


def can_cross_in_program(spec: StepSpec, given: Any, variables: Sequence[Variables]) -> bool:
    """Whether the program of a step can itself read values from host memory, and write them back.

    Given the arguments of a call, in any tree, and the variables among them.
    """
    places = any(spec.options.get(name) is not None for name in _PLACING)
    if places or not jaxcompat.PRIVATE_API or jaxcompat.arguments_outlive_calls():
        return False
    if (mesh := variables[0]._mesh) is not None:
        return len(set(mesh.axis_types)) == 1  # JAX reshards over axes of one type only.
    # Without a session's mesh: where the call names no device, or one.
    return (
        not jaxcompat.has_concrete_mesh()
        and all(x.sharding.num_devices == 1 for each in variables for x in each._master.arrays())
        and all(
            leaf.sharding is None or leaf.sharding.num_devices == 1
            for leaf in jax.tree_util.tree_leaves(given)
            if isinstance(leaf, jax.Array | jax.ShapeDtypeStruct)
        )
    )


_PLACING = ("in_shardings", "out_shardings", "device", "backend")


def check_options(spec: StepSpec, args: tuple, kwargs: dict[str, Any], *, read: bool) -> None:
    """Raises `VariablesError` for variables that are static, placed leaf by leaf, or donated and
    not carried; `read` says whether some are not carried.
    """
    options, (positional, *_), roles = spec.options, spec.parameters, spec.parameters.roles
    carry, name_of = spec.parameters.carry, spec.parameters.name_of
    refused = [
        (
            name,
            "variables are donated but not carried, and would lose their value",
            f"write carry={name!r} if the step returns them updated; else do not donate them",
        )
        for name in (*map(name_of, roles.donate_argnums), *roles.donate_argnames)
        if read and name not in carry
    ]
    refused += [
        (
            name,
            "variables cannot be static: their values are not part of a program",
            f"remove {name!r} from static_argnames",
        )
        for name in (*map(name_of, roles.static_argnums), *roles.static_argnames)
    ]
    placing, returned = options.get("in_shardings"), options.get("out_shardings")
    entries = placing if isinstance(placing, tuple | list) else ()
    rows = [("in_shardings", name_of(n), each) for n, each in enumerate(entries)]
    entries = returned if isinstance(returned, tuple | list) else (returned,)
    if not _is_whole(returned):
        rows += [("out_shardings", *row) for row in zip(carry, entries, strict=False)]
    refused += [
        (
            name,
            f"{option} cannot place variables, which have a placement",
            f"write None for {name!r} in {option}; placement=... of Variables places them",
        )
        for option, name, each in rows
        if not _is_whole(each)
    ]
    for name, what, hint in refused:
        for each in variables_in(argument_of(positional, args, kwargs, name)):
            where = f"{spec.name}, argument {name}"
            raise VariablesError(what, where=where, got=repr(each), hint=hint)


def _is_whole(entry: Any) -> bool:
    is_one = entry is None or isinstance(entry, Sharding | PartitionSpec)
    return is_one or jax.tree_util.all_leaves((entry,))
