"""The carry: a step returns it first, as it was given: same tree, shapes, dtypes and placement."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NoReturn

import jax
from jax.sharding import NamedSharding
from jax.tree_util import keystr

from stepcache import jaxcompat
from stepcache.calls.signature import Call, Parameters, short_type
from stepcache.calls.step_spec import Request, StepSpec
from stepcache.errors import CarryError, DonationError
from stepcache.sharding import is_in_type


def check_carry(
    spec: StepSpec, request: Request, staged: jaxcompat.Staged
) -> list[NamedSharding | None]:
    """Checks that the carry comes back as it went in. What is in host memory is not donated.

    Returns:
        For each flat output, the sharding that leaves a carry where it was; None for the rest.

    Raises `CarryError` if a carry is not passed, or comes back with another tree, shape or dtype.
    """
    names = spec.parameters.carry
    call = request.call
    arguments = call.arguments
    for name in names:
        if name not in arguments:
            what = f"{spec.name} carries {name!r}, which this call does not pass"
            raise CarryError(what, where=name)
    carries = [jax.tree_util.tree_structure(arguments[name]) for name in names]
    outputs = _outputs_for(spec, carries, staged.out_tree)
    pins: list[NamedSharding | None] = []
    offset = 0
    for name, before, after in zip(names, carries, outputs, strict=True):
        named = zip(call.paths, request.leaves, strict=True)
        leaves = [(path.text, leaf) for path, leaf in named if path.argument == name]
        avals = staged.out_avals[offset : offset + after.num_leaves]
        if before != after:
            refuse_tree(spec.name, name, dict(leaves), before, after, avals)
        for (path, leaf), aval in zip(leaves, avals, strict=True):
            same = (leaf.shape, leaf.dtype) == (aval.shape, aval.dtype)
            if not same and (expected := type_of(leaf)) != (got := type_of(aval)):
                refuse(spec.name, path, expected, got)
            at = leaf.sharding  # On the Explicit axes of a mesh, the type of the output decides.
            pins.append(at if isinstance(at, NamedSharding) and not is_in_type(at) else None)
        offset += after.num_leaves
    pins += [None] * (len(staged.out_avals) - offset)
    hosted = {number for number, on_host in spec.buffers(call).items() if on_host}
    if not hosted:
        return pins
    staged.keep_arguments(hosted)
    if request.mesh is None:
        staged.name_memories(request.device)
        return pins
    free = staged.free_outputs(request.mesh)
    return [pin or other for pin, other in zip(pins, free, strict=True)]


def settled_leaves(spec: StepSpec, request: Request, out_avals: Sequence[Any]) -> tuple[int, ...]:
    """The numbers of the carried leaves that are weakly typed, and do not come back so.

    To be called with the outputs of a trace that `check_carry` has passed.
    """
    if not any(leaf.weak_type for leaf in request.leaves):
        return ()
    pairs = zip(carried_leaves(spec, request), out_avals, strict=False)
    return tuple(n for n, aval in pairs if request.leaves[n].weak_type and not aval.weak_type)


def carried_leaves(spec: StepSpec, request: Request) -> list[int]:
    """The numbers of the leaves that the first outputs update, in the order of these outputs."""
    paths = list(enumerate(request.call.paths))
    return [n for name in spec.parameters.carry for n, path in paths if path.argument == name]


def check_tied(spec: StepSpec, request: Request, run: jaxcompat.Runnable) -> None:
    """Raises `DonationError` if a donated array is passed twice in a call.

    JAX raises without naming the arguments, and 0.10.2 crashes on several devices.
    """
    call = request.call
    arrays = [id(value) for value in call.leaves if isinstance(value, jax.Array)]
    roles = spec.parameters.roles
    if not (roles.donate_argnums or roles.donate_argnames) or len(set(arrays)) == len(arrays):
        return
    found: dict[tuple[int, Any], list[int]] = {}
    for index, (value, leaf) in enumerate(zip(call.leaves, request.leaves, strict=True)):
        if isinstance(value, jax.Array):  # What goes to another place is copied on its way.
            found.setdefault((id(value), leaf.sharding), []).append(index)
    tied = [indices for indices in found.values() if len(indices) > 1]
    overwrites = run.taken_arguments() if tied else {}
    for indices in tied:
        taken = [index for index in indices if index in overwrites]
        if len(taken) > 1 and any(overwrites[index] for index in taken):
            raise DonationError(
                f"{spec.name} gets the same array in several places, and donates it",
                where=", ".join(call.paths[index].text for index in taken),
                expected="a separate array for each leaf that is carried or donated",
                got=str(request.leaves[taken[0]]),
                hint="pass a copy in one of the places, by jax.tree.map(jnp.copy, ...)",
            )


class OverStep:
    """Called in the place of a step's function.

    No function, so that whatever asks for code, a file or a signature finds those of the step's.
    """

    def __init__(self, fun: Callable, name: str, parameters: Parameters):
        self._carry, self._positional = parameters.carry, parameters.positional
        self.__wrapped__, self.__module__ = fun, getattr(fun, "__module__", "")
        self.__name__ = self.__qualname__ = name

    def __repr__(self) -> str:
        return repr(self.__wrapped__)

    def _parts(
        self, outputs: Any, carried: Sequence[Any]
    ) -> tuple[tuple, Any, Callable[[tuple, Any], Any]]:
        """What `carry_and_rest` returns. Raises `CarryError` where it returns None."""
        parts = carry_and_rest(outputs, carried)
        if parts is None:
            refuse_outputs(self.__name__, self._carry, jax.tree_util.tree_structure(outputs))
        return parts


def carry_and_rest(
    outputs: Any, carried: Sequence[Any]
) -> tuple[tuple, Any, Callable[[tuple, Any], Any]] | None:
    """The carry in some outputs, the other outputs, and how to put both together again.

    None if the outputs do not begin with the carry.
    """
    structure, count = jax.tree_util.tree_structure, len(carried)
    if not carried:
        return (), outputs, lambda new, rest: rest
    if [structure(outputs)] == [*map(structure, carried)]:
        return (outputs,), (), lambda new, rest: new[0]
    kind = type(outputs)
    if kind not in (tuple, list) or len(outputs) < count:
        return None
    return tuple(outputs[:count]), tuple(outputs[count:]), lambda new, rest: kind((*new, *rest))


def argument_of(positional: Sequence[str], args: tuple, kwargs: dict[str, Any], name: str) -> Any:
    """An argument by its name; None if it is not passed."""
    if name in kwargs:
        return kwargs[name]
    try:
        return args[positional.index(name)]
    except (ValueError, IndexError):
        return None


def _outputs_for(spec: StepSpec, carries: list[Any], out_tree: Any) -> list[Any]:
    """The trees of the outputs that update the carries."""
    if [out_tree] == carries:
        return [out_tree]
    node = out_tree.node_data()
    is_sequence = node is not None and node[0] in (tuple, list)
    children = jax.tree_util.treedef_children(out_tree) if is_sequence else []
    if len(children) < len(carries):
        refuse_outputs(spec.name, spec.parameters.carry, out_tree)
    return children[: len(carries)]


def refuse_outputs(step: str, names: Sequence[str], out_tree: Any) -> NoReturn:
    """Raises the `CarryError` of a step whose outputs do not begin with the carry."""
    single = jax.tree_util.treedef_is_leaf(out_tree)
    raise CarryError(
        f"{step} does not return its carry first",
        where=", ".join(names),
        expected=f"{', '.join(f'new {name}' for name in names)}, then other outputs",
        got="one array" if single else f"outputs of the form {out_tree}",
        hint="return the updated carry as the first output, or drop carry=",
    )


def refuse_tree(
    step: str, name: str, old: Mapping[str, Any], before: Any, after: Any, avals: Sequence[Any]
) -> NoReturn:
    """Raises a `CarryError` for the first leaf in which two trees differ, if leaves have names."""
    new: dict[str, Any] = {}
    with contextlib.suppress(Exception):  # A class may refuse to be built around abstract leaves.
        entries = jax.tree_util.tree_flatten_with_path(after.unflatten(avals))[0]
        new = {name + keystr(keys): aval for keys, aval in entries}
    for path in dict.fromkeys((*old, *new)) if new else ():
        expected, got = type_of(old.get(path)), type_of(new.get(path))
        if expected != got:
            refuse(step, path, expected, got)
    refuse(step, name, str(before), str(after))


def refuse(step: str, path: str, expected: str, got: str) -> NoReturn:
    """Raises the `CarryError` of a step that returns a carry with another type or placement."""
    raise CarryError(
        f"{step} returns a carry that differs from the one it was given",
        where=path,
        expected=expected,
        got=got,
        hint="the first output must have the tree, shapes and dtypes of the carry; cast or "
        "reshape it back before returning it",
    )


def type_of(leaf: Any) -> str:
    return "no such leaf" if leaf is None else short_type(leaf.shape, leaf.dtype)


def note_deleted(error: Exception, call: Call) -> None:
    """Names the argument that JAX's "has been deleted" is about."""
    deleted = [
        path.text
        for value, path in zip(call.leaves, call.paths, strict=True)
        if isinstance(value, jax.Array) and value.is_deleted()
    ]
    if deleted:
        named = ", ".join(deleted[:3]) + (", …" if len(deleted) > 3 else "")
        error.add_note(
            f"stepcache: {named} has been deleted, or donated to an earlier call (a carry always "
            "is); use the array that the call returned in its place"
        )
