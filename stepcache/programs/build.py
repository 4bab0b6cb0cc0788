"""Builds programs: trace, lower, digest, take or compile.

Tracing, lowering and compiling are JAX's. A program always comes from this process's own lowering;
the one thing that is taken from elsewhere is XLA's executable, of the very same module. What is
added on top of `jax.jit` is what a step promises: the carry is checked and donated, and in a
session with a mesh it leaves the program placed as it entered.
"""

from __future__ import annotations

import contextlib
import functools
import operator
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import jax
from jax.tree_util import keystr

from stepcache import jaxcompat
from stepcache._changes import Undoing
from stepcache._process_hooks import rare_collections
from stepcache.calls.carry import check_carry, settled_leaves
from stepcache.calls.key import Key
from stepcache.calls.signature import short_type
from stepcache.calls.step_spec import Request, StepSpec
from stepcache.events import Captured, StageStarted, recorder
from stepcache.programs.store import ProgramStore, Publication, take_or_compile
from stepcache.programs.worker import tracing
from stepcache.storage.building import UNLOCKED


@dataclass(eq=False, repr=False)
class Program:
    """An executable and what is needed to call it, of this process's own lowering."""

    key: Key
    run: jaxcompat.Runnable
    captured: tuple[Captured, ...]  # The arrays in it by closure, the largest first.
    seconds: dict[str, float]  # What each stage took.
    # Where the executable was: "memory", "preloaded", "disk", "remote" or "rank N"; "compiled".
    source: str = "compiled"
    # Digest of what XLA was given; empty where only this process can have the program.
    digest: str = ""
    is_committed: bool = True  # False where nothing commits its outputs, as JAX would.
    # Of calls with the carry that it returns, if only weak types tell these from calls of `key`.
    settled_key: Key | None = None

    @functools.cached_property
    def size_bytes(self) -> int:
        """Size of the generated code; where the platform does not tell, of the optimized HLO."""
        executable = self.run.xla_executable
        size = executable.size_of_generated_code_in_bytes()
        if size > 0:
            return size
        modules = executable.hlo_modules()
        return sum(len(module.as_serialized_hlo_module_proto()) for module in modules)


@dataclass(eq=False, repr=False, slots=True)
class Stopwatch:
    """Times the stages of one build. Where it builds a step, emits an event as each begins."""

    step: str = ""  # Its name.
    build_id: int = 0  # Of its events; 0 for what is no step's.
    seconds: dict[str, float] = field(default_factory=dict)  # Of each, without those within it.
    current: str = ""  # The one entered last.
    _within: list[str] = field(default_factory=list)
    _timed: float = 0.0

    @contextlib.contextmanager
    def stage(self, name: str):
        self.current = name
        self._within.append(name)
        if self.build_id:
            recorder.emit(StageStarted(self.step, self.build_id, name))
        started, timed = time.perf_counter(), self._timed
        try:
            yield
            self.current = self._within[0]
        finally:
            self._within.pop()
            if self.build_id and self._within:
                recorder.emit(StageStarted(self.step, self.build_id, self._within[-1]))
            elapsed = time.perf_counter() - started
            own = elapsed - (self._timed - timed)
            self.seconds[name] = self.seconds.get(name, 0.0) + own
            self._timed = timed + elapsed


class NotHoldable(Exception):
    """The program depends on captured objects, so that only `jax.jit` can run it."""


def build(
    spec: StepSpec,
    request: Request,
    stopwatch: Stopwatch,
    held: Mapping[tuple[str, tuple[Any, ...]], Program],
    store: ProgramStore | None,
    before_compiling: Callable[[Callable[[], str], str], None],
    together: Any = None,
    release: Any = None,
) -> tuple[Program, Publication]:
    """Builds the program of a call; returns it, and what is needed to store it.

    Args:
        spec: the step.
        request: the call.
        stopwatch: times the stages.
        held: the programs that this process holds already, by their digests and devices. A step
            that is made anew finds its executable there.
        store: the executables outside this process; None where there are none.
        before_compiling: called when XLA has to compile, with what gives the lowered module as
            text, and the digest; it may raise.
        together: the `Together` of this process where those of a pod build the program together.
        release: the `Release` of the call, where a KEY may vouch for it.

    Raises:
        NotHoldable: the program captured mutable state, so that only `jax.jit` can run it.
        CarryError: see `trace`.
        StaleProgramError: the KEY does not vouch for the step as it is.
        AgreementError: another process lowers another program.
    """
    stage = stopwatch.stage
    source, digest, building, serialized = "compiled", "", UNLOCKED, b""

    def obtain(compilation: jaxcompat.Compilation) -> Any:
        """The executable of the module: held here, stored, of another rank, or compiled."""
        nonlocal source, digest, building, serialized
        is_kept = together is not None or not is_large(captured)  # Else its digest takes too long.
        digest = compilation.digest if is_kept else ""
        if release is not None:
            release.check(digest, module, spec.name)
        if together is not None:
            with stage("agree"):
                together.agree(staged, digest)
        known = held.get((digest, compilation.devices)) if is_kept else None
        if known is not None and not compilation.calls_back:  # What it calls is bound in it.
            source = "memory"
            return known.run.xla_executable
        kept, about = (store if is_kept else None), lambda: before_compiling(module, digest)
        if together is not None:
            with stage("wait"):
                executable, source, serialized = together.take(compilation, about)
            if executable is not None:
                return executable
        executable, source, building = take_or_compile(compilation, kept, stage, about)
        serialized = compilation.serialized
        if together is not None:
            with stage("give"):
                serialized = together.give(compilation, executable, source) or serialized
        return executable

    try:
        with Undoing() as while_tracing, while_tracing:
            while_tracing.hold(jaxcompat.tracing_context(request.mesh))
            while_tracing.use(tracing)
            while_tracing.use(rare_collections)
            with stage("trace"):
                staged = (release.trace if release is not None else trace)(spec, request)
            if not staged.can_be_held():
                raise NotHoldable
            captured = _name_captured(spec.source, jaxcompat.captured_arrays(staged.jaxpr))
            with stage("lower"):
                if staged.lowered is None:
                    staged.lower()
        module = staged.module_text()
        with stage("load"):
            run = staged.compile(obtain)
        if together is not None and not together.has_agreed:  # JAX had it already.
            with stage("agree"):
                together.agree(staged, "")
    except BaseException:
        building.release()
        raise
    is_committed = release is None or release.is_committed
    program = Program(request.key, run, captured, stopwatch.seconds, source, digest, is_committed)
    about = module, stopwatch.seconds, captured, building, serialized
    return program, Publication(digest, run.xla_executable, *about)


def trace(spec: StepSpec, request: Request) -> jaxcompat.Staged:
    """Traces a step as its program is traced, in the `jaxcompat.tracing_context` of the call.

    Carried leaves that are weakly typed, as Python scalars are, and come back with a type of their
    own, are traced with that, as `lax.scan` does: what comes back then finds the same program.

    Args:
        spec: the step.
        request: the call.

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
    settled: tuple[int, ...] = ()
    while True:
        staged = jaxcompat.Staged(spec.jitted, spec.fun, spec.options, args, kwargs)
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


_LARGE_CAPTURE_BYTES, _STORED_CAPTURE_BYTES = 1 << 20, 64 << 20


def is_large(captured: Sequence[Captured]) -> bool:
    """Whether a program holds so many bytes that to digest and to load it takes seconds."""
    return sum(each.size_bytes for each in captured) > _STORED_CAPTURE_BYTES


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
