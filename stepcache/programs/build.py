"""How a program comes to be: trace, lower, compile, each timed; and what a step brings to it.

Tracing, lowering and compiling are JAX's, through its public stages. What is added here is what a
step promises on top of `jax.jit`: the carry is checked and donated, and in a session with a mesh
it leaves the program placed as it entered, so that the next call finds the same program.
"""

from __future__ import annotations

import contextlib
import operator
import time
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import jax
from jax.sharding import Mesh, NamedSharding
from jax.tree_util import keystr

from stepcache import jaxcompat
from stepcache.errors import CarryError
from stepcache.events import Captured
from stepcache.programs.identity import Identity, function_name, identity
from stepcache.programs.key import Key
from stepcache.programs.signature import Call, Leaf, Parameters, short_type
from stepcache.sharding import is_in_type


@dataclass(frozen=True, eq=False, slots=True)
class Recipe:
    """What a step brings to each of its programs: the function and the options, resolved.

    Attributes:
        fun: the user's function.
        name: what to call it.
        options: keywords for `jax.jit`, with the donation of the carry in them.
        jitted: `jax.jit(fun, **options)`, which serves calls under other transformations.
        parameters: the function's parameters and their roles.
        identity: which function it is.
        key_options: `options` as hashable parts of a key.
    """

    fun: Callable
    name: str
    options: dict[str, Any]
    jitted: Any
    parameters: Parameters
    identity: Identity
    key_options: tuple[tuple[str, Hashable], ...]

    @classmethod
    def of(cls, fun: Callable, carry: tuple[str, ...], options: dict[str, Any]) -> Recipe:
        """Resolves a step's options. `jax.jit` judges them and raises as it does."""
        jitted = jaxcompat.jit(fun, **options)
        roles = jaxcompat.argument_roles(jitted, fun, options)
        return cls(
            fun,
            function_name(fun),
            options,
            jitted,
            Parameters.of(fun, roles, carry),
            identity(fun),
            (("carry", carry), *((name, _hashable(options[name])) for name in sorted(options))),
        )

    @property
    def places_outputs(self) -> bool:
        """Whether the user said where outputs go."""
        return "out_shardings" in self.options


def _hashable(value: Any) -> Hashable:
    if isinstance(value, dict):
        return tuple(sorted((name, _hashable(entry)) for name, entry in value.items()))
    try:
        hash(value)
    except TypeError:
        leaves, tree = jax.tree_util.tree_flatten(value, is_leaf=lambda x: x is None)
        return (tuple(leaves), tree)
    return value


@dataclass(frozen=True, eq=False)
class Program:
    """A compiled executable and what is needed to call it.

    Attributes:
        key: what it was built for.
        run: calls it on flat arguments.
        captured: the arrays that became part of it by closure, largest first.
        seconds: what each stage took, in the process that went through it.
        level: 1 if it was loaded without a trace, 2 if it was traced but not compiled, 3 if built.
        facts: what its code depended on when it was traced, where that was asked for.
        used: what that trace used, likewise.
    """

    key: Key
    run: jaxcompat.Runnable
    captured: tuple[Captured, ...]
    seconds: dict[str, float]
    level: int = 3
    facts: dict[str, str] | None = None
    used: Any = None

    @cached_property
    def size_bytes(self) -> int:
        """Size of the generated code; where the platform does not tell, of the optimized HLO."""
        executable = self.run.xla_executable
        size = executable.size_of_generated_code_in_bytes()
        if size > 0:
            return size
        modules = executable.hlo_modules()
        return sum(len(module.as_serialized_hlo_module_proto()) for module in modules)


@dataclass(slots=True)
class Stopwatch:
    """Times the stages of one build, and tells `entered` as each begins."""

    entered: Callable[[str], None]
    seconds: dict[str, float] = field(default_factory=dict)
    current: str = ""

    @contextlib.contextmanager
    def stage(self, name: str):
        self.current = name
        self.entered(name)
        started = time.perf_counter()
        try:
            yield
        finally:
            elapsed = time.perf_counter() - started
            self.seconds[name] = self.seconds.get(name, 0.0) + elapsed


class NotHoldable(Exception):
    """The program depends on objects that it captured: `jax.jit` must serve the call."""


def trace(
    recipe: Recipe, call: Call, placed: Sequence[Leaf], mesh: Mesh | None
) -> jaxcompat.Staged:
    """Traces a step as its program is traced.

    Args:
        recipe: the step.
        call: the call, as it came.
        placed: its leaves where the session places them.
        mesh: the session's mesh, or None.

    Raises:
        CarryError: the first output does not have the carry's tree, shapes and dtypes.
    """
    args, kwargs = call.given
    stand_ins = [
        value if leaf.sharding in (None, given.sharding) else _stand_in(leaf)
        for value, given, leaf in zip(call.leaves, call.signature.leaves, placed, strict=True)
    ]
    if any(map(operator.is_not, stand_ins, call.leaves)):
        args, kwargs = call.rebuilt(stand_ins)
    with jaxcompat.tracing_context(mesh):
        staged = jaxcompat.Staged(recipe.jitted, recipe.fun, recipe.options, args, kwargs)
        if recipe.parameters.carry:
            pins = _check_carry(recipe, call, placed, staged)
            if mesh is not None and not recipe.places_outputs:
                staged.pin_outputs(pins)
    return staged


def _stand_in(leaf: Leaf) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(
        leaf.shape, leaf.dtype, sharding=leaf.sharding, weak_type=leaf.weak_type
    )


def build(
    recipe: Recipe,
    key: Key,
    call: Call,
    placed: Sequence[Leaf],
    mesh: Mesh | None,
    stopwatch: Stopwatch,
    watched: contextlib.AbstractContextManager,
    compiling: contextlib.AbstractContextManager,
) -> tuple[Program, jaxcompat.Staged]:
    """Builds the program of a call.

    Args:
        recipe: the step.
        key: what to build for.
        call: the call, as it came.
        placed: its leaves where the session places them.
        mesh: the session's mesh, or None.
        stopwatch: times the stages.
        watched: held open while the user's function is traced and lowered.
        compiling: held open while XLA compiles.

    Returns:
        The program, and the trace that it was made from.

    Raises:
        NotHoldable: the program captured mutable state, so that only `jax.jit` can run it.
        CarryError: see `trace`.
    """
    with jaxcompat.tracing_context(mesh):
        with watched:
            with stopwatch.stage("trace"):
                staged = trace(recipe, call, placed, mesh)
            if not staged.can_be_held():
                raise NotHoldable
            with stopwatch.stage("lower"):
                staged.lower()
        with stopwatch.stage("compile"), compiling:
            run = staged.compile()
    captured = _name_captured(recipe.fun, jaxcompat.captured_arrays(staged.jaxpr))
    return Program(key, run, captured, stopwatch.seconds), staged


_LARGE_CAPTURE_BYTES = 1 << 20


def _name_captured(fun: Callable, arrays: Sequence[Any]) -> tuple[Captured, ...]:
    large = [array for array in arrays if array.nbytes >= _LARGE_CAPTURE_BYTES]
    if not large:
        return ()
    names = _names_in_scope(fun)
    found = [
        Captured(
            names.get(id(array)) or names.get(id(getattr(array, "base", None))) or "an array",
            short_type(array.shape, array.dtype),
            int(array.nbytes),
        )
        for array in large
    ]
    return tuple(sorted(found, key=lambda captured: -captured.size_bytes))


def _names_in_scope(fun: Callable) -> dict[int, str]:
    """Names of the objects that `fun` sees through its closure, globals and defaults."""
    code = getattr(fun, "__code__", None)
    if code is None:
        return {}
    cells = {}
    for name, cell in zip(code.co_freevars, fun.__closure__ or (), strict=True):
        with contextlib.suppress(ValueError):  # An empty cell.
            cells[name] = cell.cell_contents
    module = getattr(fun, "__globals__", {})
    visible = {name: module[name] for name in code.co_names if name in module} | cells
    names: dict[int, str] = {}
    for name, value in visible.items():
        with contextlib.suppress(Exception):  # A name is not worth failing a build for.
            for keys, leaf in jax.tree_util.tree_flatten_with_path(value)[0]:
                names.setdefault(id(leaf), name + keystr(keys))
    return names


# ---- the carry -------------------------------------------------------------------------------


def _check_carry(
    recipe: Recipe, call: Call, placed: Sequence[Leaf], staged: jaxcompat.Staged
) -> list[NamedSharding | None]:
    """Checks that the carry comes back as it went in.

    Returns:
        For each flat output, the sharding that leaves a carry where it was; None for the rest.

    Raises:
        CarryError: a carry is not passed, or comes back with another tree, shape or dtype.
    """
    names = recipe.parameters.carry
    carries = [_carried_tree(recipe, call, name) for name in names]
    outputs = _outputs_for(recipe, carries, staged.out_tree)
    pins: list[NamedSharding | None] = []
    offset = 0
    for name, before, after in zip(names, carries, outputs, strict=True):
        named = zip(call.paths, placed, strict=True)
        leaves = {path.text: leaf for path, leaf in named if path.argument == name}
        avals = staged.out_avals[offset : offset + after.num_leaves]
        if before != after:
            _refuse_tree(recipe, name, leaves, before, after, avals)
        for (path, leaf), aval in zip(leaves.items(), avals, strict=True):
            if _type_of(leaf) != _type_of(aval):
                _refuse(recipe, path, _type_of(leaf), _type_of(aval))
        pins += map(_pin, leaves.values())
        offset += after.num_leaves
    return pins + [None] * (len(staged.out_avals) - offset)


def _carried_tree(recipe: Recipe, call: Call, name: str) -> Any:
    try:
        return jax.tree_util.tree_structure(call.argument(name))
    except KeyError:
        raise CarryError(
            f"{recipe.name} carries {name!r}, which this call does not pass", where=name
        ) from None


def _outputs_for(recipe: Recipe, carries: list[Any], out_tree: Any) -> list[Any]:
    """The trees of the outputs that update the carries."""
    if [out_tree] == carries:
        return [out_tree]
    node = out_tree.node_data()
    is_sequence = node is not None and node[0] in (tuple, list)
    children = jax.tree_util.treedef_children(out_tree) if is_sequence else []
    if len(children) < len(carries):
        names = recipe.parameters.carry
        single = jax.tree_util.treedef_is_leaf(out_tree)
        raise CarryError(
            f"{recipe.name} does not return its carry first",
            where=", ".join(names),
            expected=f"{', '.join(f'new {name}' for name in names)}, then other outputs",
            got="one array" if single else f"outputs of the form {out_tree}",
            hint="return the updated carry as the first output, or drop carry=",
        )
    return children[: len(carries)]


def _refuse_tree(
    recipe: Recipe, name: str, old: dict[str, Leaf], before: Any, after: Any, avals: Sequence[Any]
):
    """Names the first leaf that only one of two trees has, where leaves can be named at all."""
    new: dict[str, Any] = {}
    with contextlib.suppress(Exception):  # A class may refuse to be built around abstract leaves.
        entries = jax.tree_util.tree_flatten_with_path(after.unflatten(avals))[0]
        new = {name + keystr(keys): aval for keys, aval in entries}
    for path in dict.fromkeys((*old, *new)) if new else ():
        expected, got = _type_of(old.get(path)), _type_of(new.get(path))
        if expected != got:
            _refuse(recipe, path, expected, got)
    _refuse(recipe, name, str(before), str(after))


def _refuse(recipe: Recipe, path: str, expected: str, got: str):
    raise CarryError(
        f"{recipe.name} returns a carry that differs from the one it was given",
        where=path,
        expected=expected,
        got=got,
        hint="the first output must have the tree, shapes and dtypes of the carry; cast or "
        "reshape it back before returning it",
    )


def _type_of(leaf: Any) -> str:
    return "no such leaf" if leaf is None else short_type(leaf.shape, leaf.dtype)


def _pin(leaf: Leaf) -> NamedSharding | None:
    sharding = leaf.sharding
    return sharding if isinstance(sharding, NamedSharding) and not is_in_type(sharding) else None
