"""How a program comes to be: trace, lower, compile, each timed; and what a step brings to it.

Tracing, lowering and compiling are JAX's, through its public stages. What is added here is what a
step promises on top of `jax.jit`: the carry is checked and donated, and in a session with a mesh
it leaves the program placed as it entered, so that the next call finds the same program.
"""

from __future__ import annotations

import contextlib
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
from stepcache.programs.fingerprint import Fingerprint, fingerprint, function_name
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
        fingerprint: what its code depends on.
        key_options: `options` as hashable parts of a key.
    """

    fun: Callable
    name: str
    options: dict[str, Any]
    jitted: Any
    parameters: Parameters
    fingerprint: Fingerprint
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
            fingerprint(fun),
            tuple((name, _hashable(options[name])) for name in sorted(options)),
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
        compiled: the `jax.stages.Compiled`.
        run: calls it on flat arguments.
        captured: the arrays that became part of it by closure, largest first.
        trace_seconds: time of JAX's tracing.
        lower_seconds: time of JAX's lowering.
        compile_seconds: time of XLA.
    """

    key: Key
    compiled: Any
    run: jaxcompat.Runnable
    captured: tuple[Captured, ...]
    trace_seconds: float
    lower_seconds: float
    compile_seconds: float

    @cached_property
    def size_bytes(self) -> int:
        """Size of the generated code; where the platform does not tell, of the optimized HLO."""
        executable = self.compiled.runtime_executable()
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


def trace(recipe: Recipe, call: Call, placed: Sequence[Leaf], mesh: Mesh | None) -> Any:
    """Traces a step as its program is traced.

    Args:
        recipe: the step.
        call: the call, as it came.
        placed: its leaves where the session places them.
        mesh: the session's mesh, or None.

    Raises:
        CarryError: the first output does not have the carry's tree, shapes and dtypes.
    """
    stand_ins = [
        value if leaf.sharding in (None, given.sharding) else _stand_in(leaf)
        for value, given, leaf in zip(call.leaves, call.signature.leaves, placed, strict=True)
    ]
    args, kwargs = call.rebuilt(stand_ins)
    with jaxcompat.tracing_context(mesh):
        traced = recipe.jitted.trace(*args, **kwargs)
        if not recipe.parameters.carry:
            return traced
        outputs = _CarryOutputs.of(recipe, call, traced.out_info)
        outputs.check(call, placed)
        if mesh is None or recipe.places_outputs:
            return traced
        pinned = jaxcompat.jit(
            recipe.fun, **recipe.options, out_shardings=outputs.shardings(call, placed)
        )
        return pinned.trace(*args, **kwargs)


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
) -> Program:
    """Builds the program of a call.

    Raises:
        NotHoldable: the program captured mutable state, so that only `jax.jit` can run it.
        CarryError: see `trace`.
    """
    with jaxcompat.tracing_context(mesh):
        with stopwatch.stage("trace"):
            traced = trace(recipe, call, placed, mesh)
        if not jaxcompat.can_be_held(traced):
            raise NotHoldable
        with stopwatch.stage("lower"):
            lowered = traced.lower()
        with stopwatch.stage("compile"):
            compiled = lowered.compile()
    seconds = stopwatch.seconds
    return Program(
        key,
        compiled,
        jaxcompat.runnable(traced, compiled),
        _name_captured(recipe.fun, jaxcompat.captured_arrays(traced.jaxpr)),
        seconds["trace"],
        seconds["lower"],
        seconds["compile"],
    )


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
        for keys, leaf in jax.tree_util.tree_flatten_with_path(value)[0]:
            names.setdefault(id(leaf), name + keystr(keys))
    return names


@dataclass(frozen=True, slots=True)
class _CarryOutputs:
    """The part of a step's outputs that updates its carry.

    Attributes:
        names: the carried arguments.
        outputs: for each, the output that updates it.
        bare: the step returns its one carry and nothing else.
        rest: how many outputs follow.
    """

    step: str
    names: tuple[str, ...]
    outputs: tuple[Any, ...]
    bare: bool
    rest: int

    @classmethod
    def of(cls, recipe: Recipe, call: Call, out_info: Any) -> _CarryOutputs:
        names = recipe.parameters.carry
        for name in names:
            try:
                call.argument(name)
            except KeyError:
                raise CarryError(
                    f"{recipe.name} carries {name!r}, which this call does not pass", where=name
                ) from None
        if len(names) == 1:
            structure = jax.tree_util.tree_structure(call.argument(names[0]))
            if jax.tree_util.tree_structure(out_info) == structure:
                return cls(recipe.name, names, (out_info,), True, 0)
        if not isinstance(out_info, tuple | list) or len(out_info) < len(names):
            raise CarryError(
                f"{recipe.name} does not return its carry first",
                where=", ".join(names),
                expected=f"{', '.join(f'new {name}' for name in names)}, then other outputs",
                got=f"outputs of type {type(out_info).__name__}",
                hint="return the updated carry as the first output, or drop carry=",
            )
        count = len(names)
        return cls(recipe.name, names, tuple(out_info[:count]), False, len(out_info) - count)

    def check(self, call: Call, placed: Sequence[Leaf]) -> None:
        """Raises CarryError where an output differs from the carry it updates."""
        paths = call.paths
        for name, output in zip(self.names, self.outputs, strict=True):
            before = {
                path.text: leaf
                for path, leaf in zip(paths, placed, strict=True)
                if path.argument == name
            }
            after = {
                name + keystr(keys): leaf
                for keys, leaf in jax.tree_util.tree_flatten_with_path(output)[0]
            }
            for path in dict.fromkeys((*before, *after)):
                expected, got = (_type_of(side.get(path)) for side in (before, after))
                if expected != got:
                    self._fail(path, expected, got)
            trees = [jax.tree_util.tree_structure(x) for x in (call.argument(name), output)]
            if trees[0] != trees[1]:
                self._fail(name, *map(str, trees))

    def _fail(self, path: str, expected: str, got: str):
        raise CarryError(
            f"{self.step} returns a carry that differs from the one it was given",
            where=path,
            expected=expected,
            got=got,
            hint="the first output must have the tree, shapes and dtypes of the carry; "
            "cast or reshape it back before returning it",
        )

    def shardings(self, call: Call, placed: Sequence[Leaf]) -> Any:
        """`out_shardings` that leave the carry where it was, and the rest to the compiler."""
        args, kwargs = call.signature.tree.unflatten(map(_pin, placed))
        pins = dict(zip(call.names, args, strict=True)) | kwargs
        carried = tuple(pins[name] for name in self.names)
        return carried[0] if self.bare else (*carried, *(None,) * self.rest)


def _type_of(leaf: Any) -> str:
    return "no such leaf" if leaf is None else short_type(leaf.shape, leaf.dtype)


def _pin(leaf: Leaf) -> NamedSharding | None:
    sharding = leaf.sharding
    return sharding if isinstance(sharding, NamedSharding) and not is_in_type(sharding) else None
