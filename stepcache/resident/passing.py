"""Whether a call passes `Variables`, and where: what a step's options require of its arguments.

What serves such calls imports much, and is imported at the first of them.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable, Iterator, Sequence
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
    return NoTree._made and any(
        isinstance(leaf, NoTree) for leaf in jax.tree_util.tree_leaves((args, kwargs))
    )


def variables_of(tree: Any) -> Iterator[Any]:
    """The `Variables` in an argument, in order."""
    if isinstance(tree, NoTree):
        yield tree
    elif type(tree) not in _PLAIN and not isinstance(tree, jax.Array):
        leaves = jax.tree_util.tree_leaves(tree)
        yield from (leaf for leaf in leaves if isinstance(leaf, NoTree))


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


_PLAIN = frozenset((int, float, bool, complex, str, bytes, type(None)))
_PLACING = ("in_shardings", "out_shardings", "device", "backend")


def check_options(spec: StepSpec, args: tuple, kwargs: dict[str, Any], *, read: bool) -> None:
    """Raises `VariablesError` for variables that are static, placed leaf by leaf, or donated and
    not carried; `read` says whether some are not carried.
    """
    for name, what, hint in _refused(spec, read):
        for each in variables_of(argument_of(spec.parameters.positional, args, kwargs, name)):
            where = f"{spec.name}, argument {name}"
            raise VariablesError(what, where=where, got=repr(each), hint=hint)


def _refused(spec: StepSpec, read: bool) -> Iterator[tuple[str, str, str]]:
    """The arguments that may not be `Variables`, why not, and what to do."""
    roles = spec.parameters.roles
    for name in _donated(spec) if read else ():
        yield (
            name,
            "variables are donated but not carried, and would lose their value",
            f"write carry={name!r} if the step returns them updated; else do not donate them",
        )
    statics = {*map(spec.parameters.name_of, roles.static_argnums), *roles.static_argnames}
    for name in sorted(statics):
        yield (
            name,
            "variables cannot be static: their values are not part of a program",
            f"remove {name!r} from static_argnames",
        )
    for option, entries in _placed_by_leaf(spec.options, spec.parameters.carry):
        for name in (_name(spec, entry) for entry in entries):
            yield (
                name,
                f"{option} cannot place variables, which have a placement",
                f"write None for {name!r} in {option}; placement=... of Variables places them",
            )


def _donated(spec: StepSpec) -> Iterable[str]:
    """The donated arguments that are not carried."""
    for option in ("donate_argnums", "donate_argnames"):
        value = spec.options.get(option)
        for each in (value,) if isinstance(value, int | str) else value or ():
            name = _name(spec, each)
            if name not in spec.parameters.carry:
                yield name


def _name(spec: StepSpec, each: int | str) -> str:
    parameters = spec.parameters.positional
    if isinstance(each, int) and -len(parameters) <= each < len(parameters):
        return parameters[each]
    return str(each)


def _placed_by_leaf(
    options: dict[str, Any], carry: tuple[str, ...]
) -> Iterator[tuple[str, list[int | str]]]:
    """The options that place arguments or carries leaf by leaf, and which of them."""
    given = options.get("in_shardings")
    if isinstance(given, tuple | list):
        yield "in_shardings", [n for n, each in enumerate(given) if not _is_whole(each)]
    given = options.get("out_shardings")
    if not _is_whole(given):
        named = zip(carry, given if isinstance(given, tuple | list) else (given,), strict=False)
        yield "out_shardings", [name for name, each in named if not _is_whole(each)]


def _is_whole(entry: Any) -> bool:
    is_one = entry is None or isinstance(entry, Sharding | PartitionSpec)
    return is_one or jax.tree_util.all_leaves((entry,))
