"""Everything that depends on JAX's private names, and on which version of JAX is installed.

No other file of the package touches `jax._src`, `jaxlib` internals, `jax.extend` or
`jax.experimental`. Each function here has a public-API fallback, used where a private name is gone
(one warning says so) or where `STEPCACHE_DISPATCH=public` asks for it.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import os
import warnings
import weakref
from collections.abc import Callable, Hashable, Iterable, Sequence
from typing import Any, NamedTuple

import jax
import jax.core
import jax.extend.core
from jax.extend.core import get_opaque_trace_state, jaxprs_in_params

from stepcache.errors import StepCacheWarning

# Bound once, so that a program which replaces `jax.jit` cannot make a step call itself.
jit = jax.jit
Tracer = jax.core.Tracer

try:
    from jax._src import (
        api_util,
        core,
        dispatch,
        dtypes,
        pjit,
        source_info_util,
        stages,
        traceback_util,
        tree_util,
        util,
    )
    from jax._src import config as jax_config
    from jax._src import lib as jax_lib
    from jax._src import mesh as mesh_lib
    from jax._src.interpreters import mlir, partial_eval, pxla

    _jax: Any = getattr(jax_lib, "_jax")  # noqa: B009  (a reexport, to type checkers)

    _PRIVATE_NAMES = (
        (_jax, "pjit", "PjitFunctionCache"),
        (pjit, "_get_fastpath_data", "_infer_params", "_infer_params_cached"),
        (pjit, "_resolve_and_lower", "convert_to_metaty"),
        (stages, "DeviceAssignmentMismatchError", "_device_assignment_mismatch_error"),
        (mlir, "LoweringParameters"),
        (dtypes, "InvalidInputException"),
        (pxla, "JitGlobalCppCacheKeys", "cc_shard_arg", "ExecuteReplicated"),
        (partial_eval, "trace_to_jaxpr"),
        (jax_config, "trace_context", "trace_context_names", "config"),
        (core, "trace_state_clean", "shaped_abstractify", "check_eval_args"),
        (traceback_util, "api_boundary", "register_exclusion"),
        (source_info_util, "register_exclusion"),
        (tree_util, "dispatch_registry", "equality_errors_pytreedef"),
        (mesh_lib, "get_concrete_mesh"),
        (dispatch, "check_arg"),
        (util, "test_event", "register_cache"),
        (api_util, "maybe_recursive_nan_check", "InternalFloatingPointError"),
    )
    _gone = [
        f"{module.__name__}.{name}"
        for module, *names in _PRIVATE_NAMES
        for name in names
        if not hasattr(module, name)
    ]
except ImportError as import_error:
    _gone = [str(import_error)]

if _gone:
    warnings.warn(
        f"jax {jax.__version__} lacks {', '.join(_gone)}: stepcache falls back to JAX's public "
        "API, where a call costs more",
        StepCacheWarning,
        stacklevel=2,
    )

PRIVATE_API = not _gone and os.environ.get("STEPCACHE_DISPATCH", "cpp") != "public"


# ---- contexts: values that are part of JAX's own tracing and dispatch keys --------------------


class ContextToken:
    """A value of one of our contexts in JAX's keys. Compared by identity."""

    __slots__ = ("__weakref__",)


class ValueToken(ContextToken):
    """Stands for some values, and is compared by them."""

    __slots__ = ("values",)

    def __init__(self, values: tuple[Hashable, ...]):
        self.values = values

    def __eq__(self, other: object) -> bool:
        return isinstance(other, ValueToken) and self.values == other.values

    def __hash__(self) -> int:
        return hash(self.values)


session_context = jax.make_user_context(None)
_settings_context = jax.make_user_context(None)
# Traces made in it are made anew, down to the functions that were traced before outside it.
recording_context = jax.make_user_context(None)

# Settings that change what a program does or how it is compiled, but that JAX leaves out of its
# dispatcher's key: without our help a hit would go on serving the program of the old setting.
_WATCHED = (
    "jax_debug_nans",
    "jax_debug_infs",
    "jax_enable_checks",
    "jax_default_prng_impl",
    "jax_enable_custom_prng",
    "jax_legacy_prng_key",
    "jax_disable_most_optimizations",
    "jax_optimization_level",
    "jax_exec_time_optimization_effort",
    "jax_memory_fitting_level",
    "jax_memory_fitting_effort",
    "jax_compiler_enable_remat_pass",
    "jax_disable_bwd_checks",
    "jax_refs_to_pins",
    "jax_bcoo_cusparse_lowering",
    "jax_ragged_dot_use_ragged_dot_instruction",
    "jax_use_magma",
    "jax_mosaic_allow_hlo",
    "jax_pallas_poison_buffers",
)
# Read one by one where the trace context's own list is out of reach.
_TRACE_SETTINGS = (
    "jax_enable_x64",
    "jax_default_matmul_precision",
    "jax_default_device",
    "jax_numpy_dtype_promotion",
    "jax_numpy_rank_promotion",
    "jax_threefry_partitionable",
    "jax_random_seed_offset",
    "jax_use_shardy_partitioner",
    "jax_softmax_custom_jvp",
    "jax_debug_key_reuse",
)


_MISSING = ()


def setting(name: str) -> Any:
    """The value of a setting of JAX in this thread; `()` where this version has none."""
    value = getattr(jax.config, name, _MISSING)
    if value is not _MISSING:
        return value
    try:
        return jax.config.read(name)  # Flags that have no context manager have no attribute.
    except AttributeError:
        return _MISSING


def _settings(names: Iterable[str]) -> tuple[tuple[str, Hashable], ...]:
    values = ((name, setting(name)) for name in names)
    return tuple((name, value) for name, value in values if value is not _MISSING)


def _watch_settings() -> tuple[tuple[str, ...], ValueToken]:
    """Puts the watched settings into JAX's dispatch key, by a hook on each that says it changed.

    Returns:
        The names of the watched settings, and their values now. Settings as they are now leave no
        mark in JAX's keys.
    """
    by_name: dict[str, Any] = jax_config.config._value_holders
    names = tuple(name for name in _WATCHED if name in by_name)
    holders = [by_name[name] for name in names]
    local_holders = [holder for holder in holders if hasattr(holder, "get_local")]
    unset = jax_config.config_ext.unset

    def mark(values: Iterable[Hashable]) -> ValueToken | None:
        settings = ValueToken(tuple(values))
        return None if settings == defaults else settings

    def global_values() -> Iterable[Hashable]:
        return (h.get_global() if h in local_holders else h.value for h in holders)

    def refresh(*_) -> None:
        _settings_context.set_global(mark(global_values()))
        overridden = any(holder.get_local() is not unset for holder in local_holders)
        local = mark(holder.value for holder in holders) if overridden else unset
        _settings_context._obj.set_local(local)

    def then_refresh(hook: Callable | None) -> Callable:
        def hooks(value: Any) -> None:
            if hook is not None:
                hook(value)
            refresh()

        return hooks

    defaults = ValueToken(tuple(global_values()))
    for holder in holders:
        if holder in local_holders:
            holder._update_global_hook = then_refresh(holder._update_global_hook)
            holder._update_thread_local_hook = then_refresh(holder._update_thread_local_hook)
        else:
            holder._update_hook = then_refresh(holder._update_hook)
    return names, defaults


_watched_names, _watched_defaults = _watch_settings() if PRIVATE_API else ((), ValueToken(()))


def environment() -> tuple[tuple[str, Hashable], ...]:
    """Name and value of every setting that changes what a trace or a compilation gives."""
    if not PRIVATE_API:
        return (
            *_settings(_TRACE_SETTINGS),
            ("mesh", jax.sharding.get_mesh()),
            *_settings(_WATCHED),
        )
    watched = _settings_context.value or _watched_defaults
    return _named(jax_config.trace_context(), mesh_lib.get_concrete_mesh(), watched)


@functools.lru_cache(maxsize=128)
def _named(context: tuple, mesh: Any, watched: ValueToken) -> tuple[tuple[str, Hashable], ...]:
    settings = zip(jax_config.trace_context_names(), context, strict=True)
    return (
        *((n, v) for n, v in settings if n != "axis_env_state" and not isinstance(v, ContextToken)),
        ("mesh", mesh),
        *zip(_watched_names, watched.values, strict=True),
    )


_TOP_TRACE_STATE = get_opaque_trace_state(convention="flax")


def is_tracing() -> bool:
    """True inside a transformation: whatever runs now becomes part of somebody else's program."""
    if PRIVATE_API:
        return not core.trace_state_clean()
    return get_opaque_trace_state(convention="flax") != _TOP_TRACE_STATE


def must_delegate() -> bool:
    """True under settings whose checks live in JAX's own call path."""
    names = ["jax_debug_key_reuse", "jax_enable_pgle"]
    if not PRIVATE_API:
        names += ["jax_debug_nans", "jax_debug_infs"]
    return any(setting(name) for name in names)


def jit_is_disabled() -> bool:
    """True under `jax.disable_jit`."""
    return bool(setting("jax_disable_jit"))


def has_concrete_mesh() -> bool:
    """True where the caller has set a mesh of their own."""
    mesh = mesh_lib.get_concrete_mesh() if PRIVATE_API else jax.sharding.get_mesh()
    return not mesh.empty


@contextlib.contextmanager
def _in_settings(values: dict[Any, Any], mesh: Any, session: Any):
    before = {holder: holder.get_local() for holder in values}
    for holder, value in values.items():
        holder.set_local(value)
    try:
        with contextlib.ExitStack() as stack:
            if session is not None:
                stack.enter_context(session_context(session))
            if mesh is not None:
                stack.enter_context(jax.set_mesh(mesh))
            yield
    finally:
        for holder, value in before.items():
            holder.set_local(value)


def carried_settings() -> contextlib.AbstractContextManager:
    """The settings that hold in this thread alone, to be entered in another one."""
    unset = jax_config.config_ext.unset
    everything: dict[str, Any] = jax_config.config._value_holders
    holders = [holder for holder in everything.values() if hasattr(holder, "get_local")]
    values = {h: value for h in holders if (value := h.get_local()) is not unset}
    mesh = mesh_lib.get_concrete_mesh()
    return _in_settings(values, None if mesh.empty else mesh, session_context.value)


def backends_are_initialized() -> bool:
    """True once JAX has started a backend in this process."""
    if not PRIVATE_API:
        return True
    from jax._src import xla_bridge

    return xla_bridge.backends_are_initialized()


# ---- arguments ------------------------------------------------------------------------------


class ArgumentRoles(NamedTuple):
    """Static arguments as `jax.jit` resolved them from its options."""

    static_argnums: tuple[int, ...]
    static_argnames: tuple[str, ...]


def argument_roles(jitted: Any, fun: Callable, options: dict[str, Any]) -> ArgumentRoles:
    """Which arguments are static, by number and by name."""
    if PRIVATE_API:
        info = jitted._jit_info
        return ArgumentRoles(tuple(info.static_argnums), tuple(info.static_argnames))
    numbers, names = (
        _as_tuple(options.get("static_argnums")),
        _as_tuple(options.get("static_argnames")),
    )
    try:
        parameters = inspect.signature(fun).parameters.values()
    except (TypeError, ValueError):
        return ArgumentRoles(numbers or (), names or ())
    positional = [p.name for p in parameters if p.kind is p.POSITIONAL_OR_KEYWORD]
    if numbers is None and names is not None:
        numbers = tuple(i for i, name in enumerate(positional) if name in names)
    elif names is None and numbers is not None:
        names = tuple(name for i, name in enumerate(positional) if i in numbers)
    count = max(1, len(positional))
    return ArgumentRoles(tuple(i % count if i < 0 else i for i in numbers or ()), names or ())


def _as_tuple(value: Any) -> tuple | None:
    if value is None or isinstance(value, tuple):
        return value
    return tuple(value) if isinstance(value, Iterable) and not isinstance(value, str) else (value,)


def abstract(x: Any) -> Any:
    """The abstract value of an argument leaf.

    Raises:
        TypeError: `x` is no array, scalar or `ShapeDtypeStruct`.
    """
    if PRIVATE_API:
        return core.shaped_abstractify(x)
    if isinstance(x, jax.ShapeDtypeStruct):
        dtype = jax.dtypes.canonicalize_dtype(x.dtype, allow_extended_dtype=True)
        return jax.core.ShapedArray(x.shape, dtype, weak_type=x.weak_type)
    return jax.typeof(x)


def is_array_type(aval: Any) -> bool:
    """False for mutable references and for the types that JAX lowers further itself."""
    return type(aval) is jax.core.ShapedArray


@functools.lru_cache(maxsize=4096)
def _is_default_layout(layout: Any, sharding: Any, aval: Any) -> bool:
    if PRIVATE_API:
        return pxla.is_default_layout(layout, sharding, aval)
    return layout.major_to_minor == tuple(range(len(aval.shape))) and not layout.tiling


def custom_layout(x: Any, aval: Any) -> Any:
    """The layout of an array or `ShapeDtypeStruct` on its devices; None for the default one."""
    array_format = getattr(x, "format", None)
    layout = getattr(array_format, "layout", None)
    if layout is None or x.sharding is None:
        return None
    return None if _is_default_layout(layout, x.sharding, aval) else layout


def tree_differences(before: Any, after: Any) -> list[tuple[tuple, str, str, str]]:
    """Key path, both sides and an explanation for each place where two tree structures differ."""
    if not PRIVATE_API:
        return [((), str(before), str(after), "the structures differ")]
    return list(tree_util.equality_errors_pytreedef(before, after))


# ---- traces and programs ----------------------------------------------------------------------


@contextlib.contextmanager
def tracing_context(mesh: Any):
    """What holds while a program is traced and lowered.

    Args:
        mesh: the context mesh, unless it is None or the caller has set one.
    """
    with contextlib.ExitStack() as stack:
        if mesh is not None and not has_concrete_mesh():
            stack.enter_context(jax.set_mesh(mesh))
        if not PRIVATE_API:  # Else hooks keep the watched settings in JAX's keys all the time.
            stack.enter_context(_settings_context(ValueToken(_settings(_WATCHED))))
        yield


def captured_arrays(jaxpr: Any) -> list[Any]:
    """The arrays that a trace captured by closure, those of nested functions included."""
    seen: dict[int, Any] = {}
    stack, visited = [jaxpr], set()
    while stack:
        current = stack.pop()
        if id(current) in visited:
            continue
        visited.add(id(current))
        seen.update((id(const), const) for const in getattr(current, "consts", ()) or ())
        inner = getattr(current, "jaxpr", current)
        for equation in inner.eqns:
            if equation.params:
                for value in equation.params.values():
                    if hasattr(value, "consts"):
                        stack.append(value)
                stack.extend(jaxprs_in_params(equation.params))
    return [const for const in seen.values() if hasattr(const, "nbytes")]


def forget_traces(jitted: Any, fun: Callable) -> None:
    """Drops what JAX keeps for `fun`: its traces, and with them the modules they were lowered to.

    JAX keeps each trace as long as the function lives; a bounded cache of programs over an
    unbounded cache of traces would still grow.
    """
    if not PRIVATE_API:
        jitted.clear_cache()
        return
    try:
        partial_eval.trace_to_jaxpr.evict_weakref(fun)
        pjit._infer_params_cached.evict_weakref(fun)
    except TypeError:  # A callable without weak references: JAX kept nothing for it.
        jitted.clear_cache()


class Runnable(NamedTuple):
    """What is needed to run a compiled program on flat arguments.

    Attributes:
        executable: the `jax.stages.Compiled`; with the private API, the executable inside.
        out_tree: the tree of the outputs.
        const_args: arrays that the program takes before its arguments.
        effects: the program's effects.
    """

    executable: Any
    out_tree: Any
    const_args: Sequence[Any] = ()
    effects: Any = ()

    def __call__(self, leaves: list, args: tuple, kwargs: dict) -> tuple[Any, Any]:
        """Runs the program.

        Args:
            leaves: the flat dynamic arguments.
            args: the dynamic positional arguments, for the public API.
            kwargs: the dynamic keyword arguments, for the public API.

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
        util.test_event("jit_cpp_cache_miss")
        out_leaves = self.executable.unsafe_call(*self.const_args, *leaves)
        fast_path = pjit._get_fastpath_data(
            self.executable,
            self.out_tree,
            leaves,
            out_leaves,
            self.effects,
            [],
            None,
            self.const_args,
        )
        return jax.tree_util.tree_unflatten(self.out_tree, out_leaves), fast_path

    @property
    def xla_executable(self) -> Any:
        """The loaded executable of XLA."""
        if PRIVATE_API:
            return self.executable.xla_extension_executable()
        return self.executable.runtime_executable()


class Staged:
    """A traced step on its way to a program.

    JAX's public stages rebuild the argument tree around their own placeholders, which a class that
    validates its leaves may refuse; a plain call of `jax.jit` never does that. So with the private
    API the same lowering is done on flat leaves, as such a call does it.

    Args:
        jitted: `jax.jit(fun, **options)`.
        fun: the user's function.
        options: of `jax.jit`.
        args: positional arguments, static ones included.
        kwargs: keyword arguments.

    Attributes:
        jaxpr: the trace.
        out_tree: the tree of the outputs.
        out_avals: their abstract values, flat.
    """

    def __init__(self, jitted: Any, fun: Callable, options: dict, args: tuple, kwargs: dict):
        self._given = (jitted, fun, options, args, kwargs)
        if PRIVATE_API:
            inferred, self._leaves = pjit._infer_params(jitted._fun, jitted._jit_info, args, kwargs)
            self._params, self._consts = inferred.params, inferred.consts
            self.jaxpr, self.out_tree = inferred.params["jaxpr"], inferred.out_tree
            self.out_avals = list(self.jaxpr.out_avals)
        else:
            self._traced = jitted.trace(*args, **kwargs)
            self._consts = ()
            self.jaxpr, self.out_tree = self._traced.jaxpr, self._traced.out_tree
            self.out_avals = jax.tree_util.tree_leaves(self._traced.out_info)

    def pin_outputs(self, pins: Sequence[Any]) -> None:
        """Says where outputs go: one sharding for each flat output, None to leave it open."""
        if PRIVATE_API:
            self._params = dict(self._params, out_shardings=self._pinned(self._params, pins))
        else:
            _, fun, options, args, kwargs = self._given
            tree = jax.tree_util.tree_unflatten(self.out_tree, pins)
            self._traced = jit(fun, **options, out_shardings=tree).trace(*args, **kwargs)

    @staticmethod
    def _pinned(params: dict, pins: Sequence[Any]) -> tuple:
        both = zip(pins, params["out_shardings"], strict=True)
        return tuple(old if pin is None else pin for pin, old in both)

    def as_traced(self) -> Any:
        """The same as a `jax.stages.Traced`."""
        if not PRIVATE_API:
            return self._traced
        jitted, _, _, args, kwargs = self._given
        traced = jitted.trace(*args, **kwargs)
        traced._params = dict(traced._params, out_shardings=self._params["out_shardings"])
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
            self._lowered = self._traced.lower()
            return
        for leaf in self._leaves:
            dispatch.check_arg(leaf)
        types = [pjit.convert_to_metaty(leaf) for leaf in self._leaves]
        try:
            self._lowered = pjit._resolve_and_lower(
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
            message = stages._device_assignment_mismatch_error(
                name, error.args[0], types, "jit", names
            )
            raise ValueError(message) from None

    def outline(self) -> str:
        """The lowered module as text, without locations."""
        lowered: Any = self._lowered
        return str(lowered.stablehlo()) if PRIVATE_API else lowered.as_text()

    def compile(self) -> Runnable:
        """Compiles what was lowered."""
        lowered: Any = self._lowered
        compiled = lowered.compile()
        if not PRIVATE_API:
            return Runnable(compiled, self.out_tree)
        const_args = compiled.shard_const_args(lowered.const_args)
        return Runnable(compiled, self.out_tree, const_args, self.jaxpr.effects)


class _Unraised(Exception):
    """Never raised; stands for JAX's error where the private API is out of reach."""


FloatingPointCheckError = api_util.InternalFloatingPointError if PRIVATE_API else _Unraised
InvalidInputError = dtypes.InvalidInputException if PRIVATE_API else _Unraised


def explain_floating_point_error(error: Any, fun: Any, args: tuple, kwargs: dict):
    """Calls `fun` eagerly to find the operation that made a NaN; always raises."""
    if getattr(fun, "_apply_primitive", False):  # It is one operation already.
        raise FloatingPointError(f"invalid value ({error.ty}) encountered in {fun.__qualname__}")
    api_util.maybe_recursive_nan_check(error, fun, args, kwargs)


class _ClearedWithCaches:
    """What JAX calls in `jax.clear_caches()`."""

    def __init__(self, clear: Callable[[], None]):
        self._clear = weakref.WeakMethod(clear)

    def cache_clear(self) -> None:
        clear = self._clear()
        if clear is not None:
            clear()

    def cache_info(self) -> None:
        """JAX asks its caches for this when it is debugged; there is nothing to say."""

    def cache_keys(self) -> list:
        return []


def call_on_clear_caches(clear: Callable[[], None]) -> object:
    """Has `jax.clear_caches()` call a bound method, as long as the returned object lives."""
    registered = _ClearedWithCaches(clear)
    if PRIVATE_API:
        util.register_cache(registered, "stepcache")
    return registered


# ---- dispatch ---------------------------------------------------------------------------------


def make_dispatcher(
    fun: Callable, name: str, miss: Callable, roles: ArgumentRoles, capacity: int
) -> Any:
    """JAX's own C++ dispatcher over our miss callback.

    Args:
        fun: called as it is under `jax.disable_jit`.
        name: shown by profilers.
        miss: `(*args, **kwargs) -> (outputs, fast path data or None, drop the entry)`.
        roles: the static arguments.
        capacity: signatures that the dispatcher keeps.
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


def hide_frames(directory: str) -> None:
    """Takes the files below `directory` for JAX's own: no user's code, in errors and metadata."""
    if PRIVATE_API:
        traceback_util.register_exclusion(directory)
        source_info_util.register_exclusion(directory + os.sep)


def api_boundary(fun: Callable) -> Callable:
    """Marks a function at whose border JAX filters tracebacks."""
    return traceback_util.api_boundary(fun) if PRIVATE_API else fun
