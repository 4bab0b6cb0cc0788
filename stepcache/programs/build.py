"""Builds programs: traces, lowers and compiles, and times each stage.

Tracing, lowering and compiling are JAX's, through its public stages. What is added here is what a
step promises on top of `jax.jit`: the carry is checked and donated, and in a session with a mesh
it leaves the program placed as it entered, so that the next call finds the same program.
"""

from __future__ import annotations

import contextlib
import operator
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import jax
from jax.tree_util import keystr

from stepcache import jaxcompat
from stepcache._changes import Undoing
from stepcache.calls.carry import check_carry, settled_leaves
from stepcache.calls.key import Key
from stepcache.calls.nnx_modules import checking_modules, passes_modules
from stepcache.calls.signature import short_type
from stepcache.calls.step_spec import Request, StepSpec
from stepcache.events import Captured


@dataclass(frozen=True, eq=False)
class Program:
    """A compiled executable and what is needed to call it."""

    key: Key
    run: jaxcompat.Runnable
    captured: tuple[Captured, ...]  # The arrays in it by closure, the largest first.
    seconds: dict[str, float]  # What each stage took, in the process that went through it.
    level: int = 3  # 1 if it was loaded without a trace, 2 if traced but not compiled, 3 if built.
    traces: int = 0  # How often the step was traced for it; twice where a library changed.
    # What its code depended on when it was traced, and what the trace used; if that was asked for.
    dependencies: dict[str, str] | None = None
    used: Any = None
    lowered: str = ""  # Digest of the input of XLA; empty where it was not computed.
    # Of calls with the carry that it returns, if only weak types tell these from calls of `key`.
    settled_key: Key | None = None

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
    """Times the stages of one build; calls `entered` with the name of each as it begins."""

    entered: Callable[[str], None]
    seconds: dict[str, float] = field(default_factory=dict)  # Of each, without those within it.
    times: Counter[str] = field(default_factory=Counter)  # How often each was entered.
    current: str = ""  # The one entered last.
    _within: list[str] = field(default_factory=list)
    _timed: float = 0.0

    @contextlib.contextmanager
    def stage(self, name: str):
        self.current = name
        self._within.append(name)
        self.entered(name)
        self.times[name] += 1
        started, timed = time.perf_counter(), self._timed
        try:
            yield
            self.current = self._within[0]
        finally:
            self._within.pop()
            if self._within:
                self.entered(self._within[-1])
            elapsed = time.perf_counter() - started
            own = elapsed - (self._timed - timed)
            self.seconds[name] = self.seconds.get(name, 0.0) + own
            self._timed = timed + elapsed


class NotHoldable(Exception):
    """The program depends on captured objects, so that only `jax.jit` can run it."""


def trace(spec: StepSpec, request: Request) -> jaxcompat.Staged:
    """Traces a step as its program is traced.

    Carried leaves that are weakly typed, as Python scalars are, and come back with a type of their
    own, are traced with that, as `lax.scan` does: what comes back then finds the same program.

    Raises:
        CarryError: the first output does not have the carry's tree, shapes and dtypes.
    """
    call = request.call
    args, kwargs = call.given
    leaves = request.key.signature.leaves if request.commits else request.leaves
    stand_ins = [
        value
        if leaf.sharding == given.sharding or (leaf.sharding is None and not request.commits)
        else leaf.stand_in()
        for value, given, leaf in zip(call.leaves, call.signature.leaves, leaves, strict=True)
    ]
    if any(map(operator.is_not, stand_ins, call.leaves)):
        args, kwargs = call.rebuilt(stand_ins)
    fun, jitted = spec.fun, spec.jitted
    if passes_modules(call):
        fun = checking_modules(spec)
        jitted = jaxcompat.jit(fun, **spec.options)
    settled: tuple[int, ...] = ()
    with jaxcompat.tracing_context(request.mesh):
        while True:
            staged = jaxcompat.Staged(jitted, fun, spec.options, args, kwargs)
            if not spec.parameters.carry:
                return staged
            pins = check_carry(spec, request, staged)
            known, settled = settled, settled_leaves(spec, request, staged.out_avals)
            if settled == known:
                break
            for number in settled:
                stand_ins[number] = leaves[number].settled().stand_in()
            args, kwargs = call.rebuilt(stand_ins)
        if request.mesh is not None and not spec.places_outputs:
            staged.pin_outputs(pins)
    return staged


def build(
    spec: StepSpec,
    request: Request,
    stopwatch: Stopwatch,
    watch: Callable[[Undoing], None] = lambda undoing: None,
    compile_through: Callable[[Undoing, jaxcompat.Staged], None] = lambda undoing, staged: None,
    is_traced_alone: Callable[[jaxcompat.Staged], bool] = lambda staged: False,
) -> tuple[Program, jaxcompat.Staged]:
    """Builds the program of a call.

    Args:
        spec: the step.
        request: the call.
        stopwatch: times the stages.
        watch: called before the user's function is traced; what it changes is undone when that is
            traced and lowered.
        compile_through: given the trace before XLA compiles; what it changes is undone after it.
        is_traced_alone: given the trace, whether what `watch` has changed is undone before it is
            lowered.

    Returns:
        The program, and the trace that it was made from.

    Raises:
        NotHoldable: the program captured mutable state, so that only `jax.jit` can run it.
        CarryError: see `trace`.
    """
    with Undoing() as undoing, undoing:
        undoing.hold(jaxcompat.tracing_context(request.mesh))
        with Undoing() as watching, watching:
            with stopwatch.stage("trace"):
                watch(watching)
                staged = trace(spec, request)
            if not staged.can_be_held():
                raise NotHoldable
            if is_traced_alone(staged):
                watching.close()
            with stopwatch.stage("lower"):
                staged.lower()
        with stopwatch.stage("compile"), Undoing() as compiling, compiling:
            compile_through(compiling, staged)
            run = staged.compile()
    captured = _name_captured(spec.fun, jaxcompat.captured_arrays(staged.jaxpr))
    program = Program(
        request.key, run, captured, stopwatch.seconds, traces=stopwatch.times["trace"]
    )
    return program, staged


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
