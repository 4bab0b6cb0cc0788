"""From a function to a program that runs: traced, lowered, compiled; and what JAX keeps of it."""

from __future__ import annotations

import contextlib
import functools
import re
import weakref
from collections.abc import Callable, Collection, Sequence
from typing import Any, NamedTuple

import jax
from jax.sharding import AxisType, Mesh, NamedSharding, Sharding, SingleDeviceSharding
from jax.sharding import PartitionSpec as P

from stepcache._changes import Undoing
from stepcache.jaxcompat.arguments import ArgumentRoles, committed
from stepcache.jaxcompat.hooks import Compilation, compile_through, reuse_contexts
from stepcache.jaxcompat.private import CAN_STORE, PRIVATE_API

if PRIVATE_API:
    from jax._src import api_util, core, dispatch, dtypes, pjit, stages, traceback_util, tree_util
    from jax._src import config as jax_config
    from jax._src.interpreters import mlir, partial_eval, pxla
    from jax._src.util import test_event
    from jaxlib import _jax  # type: ignore[attr-defined]

# Bound once, so that a program which replaces `jax.jit` cannot make a step call itself.
_jit = jax.jit


def jit(fun: Callable, **options: Any) -> Any:
    """`jax.jit(fun, **options)`, with JAX's own methods whatever attributes `fun` has.

    For a callable without weak references JAX raises `TypeError` when that is called, and keeps an
    empty entry for its address: a second `jax.jit` of what lies there then ends the process, at
    least up to jaxlib 0.12.0. So its place is taken by a function that raises the same.
    """
    if callable(fun) and not isinstance(fun, staticmethod):  # Of others JAX says what is wrong.
        try:
            weakref.ref(fun)
        except TypeError as error:
            error.add_note("Where a class has __slots__, '__weakref__' has to be one of them.")
            fun = functools.wraps(fun, updated=())(functools.partial(_refuse, error))
    jitted = _jit(fun, **options)
    unhide_methods(jitted)
    return jitted


def _refuse(error: Exception, *args: Any, **kwargs: Any) -> None:
    raise error


def unhide_methods(wrapper: Any) -> None:
    """Deletes what `functools.wraps` copied onto `wrapper` and hides a method of its class."""
    copied, cls = vars(wrapper), type(wrapper)
    for name in [each for each in copied if not each.startswith("__") and hasattr(cls, each)]:
        del copied[name]


def make_dispatcher(
    fun: Callable, name: str, miss: Callable, roles: ArgumentRoles, capacity: int
) -> Any:
    """JAX's own C++ dispatcher over our miss callback, which keeps `capacity` signatures.

    `dispatcher.py` says what it is given. Profilers show `name`.
    """
    dispatcher = _jax.pjit(
        name,
        fun,
        traceback_util.api_boundary(miss),
        roles.static_argnums,
        roles.static_argnames,
        pxla.JitGlobalCppCacheKeys(),
        tree_util.dispatch_registry,
        pxla.cc_shard_arg,
        _jax.PjitFunctionCache(capacity=capacity),
    )
    dispatcher._fun = fun  # Where JAX's NaN check of a hit looks for the function to call eagerly.
    dispatcher.__name__, dispatcher.__wrapped__ = name, fun  # Where JAX looks for source and name.
    return dispatcher


class Runnable(NamedTuple):
    """What is needed to run a compiled program on flat arguments."""

    executable: Any  # The `jax.stages.Compiled`; with the private API, the executable inside.
    out_tree: Any  # Of the outputs.
    const_args: Sequence[Any] = ()  # Arrays that the program takes before its arguments.
    effects: Any = ()

    def __call__(self, leaves: list, args: tuple, kwargs: dict) -> tuple[Any, Any]:
        """Runs the program on flat dynamic arguments; through the public API, on the others.

        Returns:
            The outputs, and what the C++ dispatcher needs to serve the same call by itself (None
            where it cannot: effects, callbacks).
        """
        if not PRIVATE_API:
            return self.executable(*args, **kwargs), None
        for leaf in leaves:
            dispatch.check_arg(leaf)
        core.check_eval_args(leaves)
        # JAX marks each run outside its dispatcher by this event, and so do we: what counts them
        # for jax.jit counts them for a step.
        test_event("jit_cpp_cache_miss")
        out_leaves = self.executable.unsafe_call(*self.const_args, *leaves)
        about = (self.executable, self.out_tree, leaves, out_leaves, self.effects)
        fast_path = pjit._get_fastpath_data(*about, [], None, self.const_args)
        return jax.tree_util.tree_unflatten(self.out_tree, out_leaves), fast_path

    @property
    def xla_executable(self) -> Any:
        """The loaded executable of XLA."""
        if PRIVATE_API:
            return self.executable.xla_extension_executable()
        return self.executable.runtime_executable()

    @property
    def device_order(self) -> tuple[Any, ...]:
        """Its devices in the order of its device assignment; empty where JAX does not tell."""
        unloaded = getattr(self.executable, "_unloaded_executable", None)
        return tuple(unloaded.device_list) if unloaded is not None else ()

    @property
    def calls_back(self) -> bool:
        """Whether it calls back into Python; false where JAX does not tell."""
        unloaded = getattr(self.executable, "_unloaded_executable", None)
        return unloaded is not None and bool(unloaded.host_callbacks)

    @property
    def devices(self) -> set[Any]:
        """The devices that it runs on."""
        return set(self.xla_executable.local_devices())

    @property
    def out_avals(self) -> Sequence[Any]:
        """The abstract values of the outputs, flat; none where the private API is out of reach."""
        return getattr(self.executable, "out_avals", ()) if PRIVATE_API else ()

    @property
    def output_shardings(self) -> list[Any]:
        """The sharding of each output."""
        if PRIVATE_API:
            return list(self.executable._out_shardings)
        return jax.tree_util.tree_leaves(self.executable.output_shardings)

    def taken_arguments(self) -> dict[int, bool]:
        """The flat arguments that the program takes, and for each whether it writes over it.

        JAX drops arguments that are not used, and donates only what an output can take. Empty where
        the private API is out of reach, or the platform does not show its module.
        """
        kept = getattr(self.executable, "_kept_var_idx", None)
        modules = self.xla_executable.hlo_modules() if kept is not None else ()
        if kept is None or not modules:
            return {}
        header = modules[0].to_string().partition("\n")[0]
        overwritten = {int(number) for number in _ALIASED_PARAMETER.findall(header)}
        numbers = enumerate(index - len(self.const_args) for index in sorted(kept))
        return {index: number in overwritten for number, index in numbers}


def recommitted(outputs: Any, fast_path: Any, *, is_committed: bool) -> tuple[Any, Any]:
    """What `Runnable` returned, with all arrays committed to their devices.

    Or with uncommitted ones where JAX chose the device: a program that moves something between
    memories commits all that it returns.
    """

    def changes(sharding: Any) -> bool:
        return is_committed or isinstance(sharding, SingleDeviceSharding)

    def changed(x: Any) -> Any:
        return committed(x, is_committed) if changes(getattr(x, "sharding", None)) else x

    outputs = jax.tree_util.tree_map(changed, outputs)
    if fast_path is not None:
        pairs = zip(fast_path.out_committed, fast_path.out_shardings, strict=True)
        now = [is_committed if changes(sharding) else given for given, sharding in pairs]
        fast_path = fast_path._replace(out_committed=now)
    return outputs, fast_path


_ELEMENTS_SHOWN = 1 << 16
# In the header of a module: `input_output_alias={ {0}: (2, {}, may-alias) }`.
_ALIASED_PARAMETER = re.compile(r"\((\d+), \{[\d, ]*\}, (?:may|must)-alias\)")


def _over_plain_types(params: dict[str, Any]) -> dict[str, Any]:
    """A trace whose high primitives are expanded, as `jax.jit` does if only intermediates are high.

    From jax 0.12 on, `jnp.searchsorted` is one; `jnp.interp` and `jnp.histogram` call it.
    """
    jaxpr, expand = params["jaxpr"], getattr(partial_eval, "lower_jaxpr2", None)
    if expand is None or not getattr(jaxpr, "is_high", False):
        return params
    if any(getattr(aval, "is_high", False) for aval in (*jaxpr.in_avals, *jaxpr.out_avals)):
        return params
    return dict(params, jaxpr=expand(jaxpr))


class Staged:
    """A traced step on its way to a program.

    JAX's public stages rebuild the argument tree around their own placeholders, which a class that
    validates its leaves may refuse; a plain call of `jax.jit` never does that. So with the private
    API the same lowering is done on flat leaves, as such a call does it.

    Args:
        jitted: `jax.jit(fun, **options)`.
        fun, options: of `jitted`.
        args, kwargs: the arguments, static ones included.

    Attributes:
        jaxpr: the trace.
        out_tree, out_avals: of the outputs, the second flat.
        lowered: after `lower`, the lowered module; for `outline`.
    """

    def __init__(self, jitted: Any, fun: Callable, options: dict, args: tuple, kwargs: dict):
        self._given = (jitted, fun, options, args, kwargs)
        self.lowered: Any = None
        if PRIVATE_API:
            inferred, self._leaves = pjit._infer_params(jitted._fun, jitted._jit_info, args, kwargs)
            self._params, self._consts = _over_plain_types(inferred.params), inferred.consts
            self.jaxpr, self.out_tree = self._params["jaxpr"], inferred.out_tree
            self.out_avals = list(self.jaxpr.out_avals)
        else:
            self._traced = jitted.trace(*args, **kwargs)
            self._consts = ()
            self.jaxpr, self.out_tree = self._traced.jaxpr, self._traced.out_tree
            self.out_avals = jax.tree_util.tree_leaves(self._traced.out_info)

    def pin_outputs(self, pins: Sequence[Any]) -> None:
        """Says where outputs go: one sharding for each flat output, None to leave it open."""
        if PRIVATE_API:
            both = zip(pins, self._params["out_shardings"], strict=True)
            pinned = tuple(old if pin is None else pin for pin, old in both)
            self._params = dict(self._params, out_shardings=pinned)
        else:
            _, fun, options, args, kwargs = self._given
            tree = jax.tree_util.tree_unflatten(self.out_tree, pins)
            self._traced = jit(fun, **options, out_shardings=tree).trace(*args, **kwargs)

    def keep_arguments(self, numbers: Collection[int]) -> None:
        """Says which flat arguments are not donated, whatever the options say of the others."""
        if PRIVATE_API and numbers:
            donated = enumerate(self._params["donated_invars"])
            kept = tuple(given and number not in numbers for number, given in donated)
            self._params = dict(self._params, donated_invars=kept)

    def name_memories(self, device: Any) -> None:
        """Says in which memory of a device each argument and each result lies.

        Unless all are named, JAX lets a result overwrite a donated argument in another memory. So
        nothing is donated where the function itself names several devices.
        """
        jaxpr = getattr(self.jaxpr, "jaxpr", self.jaxpr)
        inner = (sharding for sharding, _ in dispatch.get_intermediate_shardings(jaxpr))
        devices = next((each.device_set for each in inner if isinstance(each, Sharding)), {device})
        if len(devices) > 1:
            self.keep_arguments(range(len(self._leaves)))
            return
        (device,) = devices

        def at(aval: Any) -> SingleDeviceSharding:
            kind = core.mem_space_to_kind(aval.memory_space)
            return SingleDeviceSharding(device, memory_kind=kind)

        self._params = dict(
            self._params,
            in_shardings=tuple(map(at, self.jaxpr.in_avals)),
            out_shardings=tuple(map(at, self.jaxpr.out_avals)),
        )

    def free_outputs(self, mesh: Mesh) -> list[NamedSharding | None]:
        """Shardings for the flat outputs that name their memories, and nothing else."""

        def somewhere(aval: Any) -> NamedSharding | None:
            if AxisType.Explicit in aval.sharding.mesh.axis_types:
                return None  # Its type says.
            spec = P(*[P.UNCONSTRAINED] * aval.ndim)
            kind = core.mem_space_to_kind(aval.memory_space)
            return NamedSharding(mesh, spec, memory_kind=kind)

        return [somewhere(aval) for aval in self.out_avals]

    def as_traced(self) -> Any:
        """The same as a `jax.stages.Traced`."""
        if not PRIVATE_API:
            return self._traced
        jitted, _, _, args, kwargs = self._given
        traced = jitted.trace(*args, **kwargs)
        names = ("in_shardings", "out_shardings", "donated_invars")
        changed = {name: self._params[name] for name in names}
        traced._params = dict(traced._params, **changed)
        return traced

    def can_be_held(self) -> bool:
        """False where the program cannot be kept apart from the objects it captured."""
        inner = getattr(self.jaxpr, "jaxpr", self.jaxpr)
        effects = getattr(self.jaxpr, "effects", ())
        classes = {base.__name__ for effect in effects for base in type(effect).__mro__}
        return not (self._consts or getattr(inner, "is_high", False) or "RefEffect" in classes)

    def lower(self) -> None:
        """Lowers the trace."""
        if not PRIVATE_API:
            self.lowered = self._traced.lower()
            return
        for leaf in self._leaves:
            dispatch.check_arg(leaf)
        types = [pjit.convert_to_metaty(leaf) for leaf in self._leaves]
        try:
            with Undoing() as undoing, undoing:
                reuse_contexts(undoing)
                self.lowered = pjit._resolve_and_lower(
                    types,
                    **self._params,
                    lowering_platforms=None,
                    lowering_parameters=mlir.LoweringParameters(),
                    pgle_profiler=None,
                )
        except stages.DeviceAssignmentMismatchError as error:
            fun = self._given[1]
            name = getattr(fun, "__qualname__", getattr(fun, "__name__", str(fun)))
            names = self.jaxpr.debug_info.safe_arg_names(len(types))
            about = (name, error.args[0], types, "jit", names)
            raise ValueError(stages._device_assignment_mismatch_error(*about)) from None

    def exported(self, name: str) -> tuple[bytes, list[int], bool]:
        """What was lowered, as `jax.export` serializes it, over flat arguments.

        Returns:
            The bytes; the numbers of the arguments that it takes, as the others are not used; and
            whether JAX commits the outputs to their devices.
        """
        from jax import export  # It takes long to import.

        about = self.lowered.compile_args
        kept = sorted(about["kept_var_idx"])

        def step(*leaves: Any) -> Any:
            given = dict(zip(kept, leaves, strict=True))
            return core.jaxpr_as_fun(self.jaxpr)(*map(given.get, range(len(self._leaves))))

        step.__name__ = name  # As profiles show it.
        taken = [self._leaves[number] for number in kept]
        # For this very version of JAX: its operations are lowered as `jax.jit` does it.
        with jax_config.export_ignore_forward_compatibility(True):
            data = bytes(export.export(_jit(step))(*taken).serialize())
        return data, kept, about["committed"]

    def module_text(self) -> Callable[[], str]:
        """Gives what was lowered as text with locations, but for large arrays that it captured.

        It holds on to no array of the trace.
        """
        if not PRIVATE_API:
            return functools.partial(self.lowered.as_text, debug_info=True)
        text = self.lowered.stablehlo().operation.get_asm
        return functools.partial(text, enable_debug_info=True, large_elements_limit=_ELEMENTS_SHOWN)

    def compile(self, obtain: Callable[[Compilation], Any] | None = None) -> Runnable:
        """Makes a program of what was lowered, with the executable that `obtain` gives.

        `obtain` is not called where JAX has compiled this very lowering before in this process.
        """
        with Undoing() as undoing, undoing:
            if obtain is not None and CAN_STORE:
                compile_through(undoing, obtain)
                obtain = None
            about = "", (), False, str, lambda _: None, self.lowered.compile
            compiled = obtain(Compilation(*about)) if obtain else self.lowered.compile()
        if not PRIVATE_API:
            return Runnable(compiled, self.out_tree)
        const_args = compiled.shard_const_args(self.lowered.const_args)
        return Runnable(compiled, self.out_tree, const_args, self.jaxpr.effects)


def forget_traces(jitted: Any, fun: Callable) -> None:
    """Drops what JAX keeps for `fun`: its traces, and with them the modules they were lowered to.

    JAX keeps each trace as long as the function lives; a bounded cache of programs over an
    unbounded cache of traces would still grow.
    """
    if PRIVATE_API:
        with contextlib.suppress(TypeError):  # A callable without weak references.
            partial_eval.trace_to_jaxpr.evict_weakref(fun)
            pjit._infer_params_cached.evict_weakref(fun)
            return
    jitted.clear_cache()


class _Unraised(Exception):
    """Stands for an error of JAX where the private API is out of reach."""


FloatingPointCheckError = api_util.InternalFloatingPointError if PRIVATE_API else _Unraised
InvalidInputError = dtypes.InvalidInputException if PRIVATE_API else _Unraised


def explain_floating_point_error(error: Any, fun: Any, args: tuple, kwargs: dict):
    """Calls `fun` eagerly to find the operation that made a NaN; always raises."""
    api_util.maybe_recursive_nan_check(error, fun, args, kwargs)
