"""Where a call is made: our contexts in JAX's own keys, its settings, its mesh, its tracing.

What decides a program but is no argument of the call lives here, and what says that JAX has to
serve the call itself. Looking into the process and its devices is for `inspection`.
"""

from __future__ import annotations

import contextlib
import functools
import threading
from collections.abc import Hashable, Iterable
from typing import Any

import jax
from jax.sharding import AbstractMesh

from stepcache import _process_hooks
from stepcache.errors import ForkedProcessError
from stepcache.jaxcompat.hooks import call_on_changed_settings
from stepcache.jaxcompat.private import PRIVATE_API

if PRIVATE_API:
    from jax._src import config as jax_config
    from jax._src import core, xla_bridge
    from jax._src import mesh as mesh_lib
else:  # To import it takes a fifth as long as to import stepcache.
    from jax.extend.core import get_opaque_trace_state


# What our contexts hold is compared in C, by identity or as a tuple. JAX's dispatcher looks a call
# up while it compares, and an `__eq__` of Python's would let other threads change its tables then.


class ContextToken:
    """A value of one of our contexts in JAX's keys, compared by identity."""

    __slots__ = ("__weakref__",)


class ValueToken(tuple[Hashable, ...]):
    """A value of one of our contexts in JAX's keys, compared by the values in it."""

    __slots__ = ()


_session_context = jax.make_user_context(None)
_settings_context = jax.make_user_context(None)

# Settings that change what a program does or how it is compiled, but that JAX leaves out of its
# dispatcher's key: without our help a hit would go on serving the program of the old setting.
_WATCHED = tuple(
    """
    jax_debug_nans jax_debug_infs jax_enable_checks jax_default_prng_impl jax_enable_custom_prng
    jax_legacy_prng_key jax_disable_most_optimizations jax_optimization_level
    jax_exec_time_optimization_effort jax_memory_fitting_level jax_memory_fitting_effort
    jax_compiler_enable_remat_pass jax_disable_bwd_checks jax_refs_to_pins
    jax_bcoo_cusparse_lowering jax_ragged_dot_use_ragged_dot_instruction jax_use_magma
    jax_mosaic_allow_hlo jax_pallas_poison_buffers
    """.split()
)
# Read one by one where the trace context's own list is out of reach.
_TRACE_SETTINGS = tuple(
    """
    jax_enable_x64 jax_default_matmul_precision jax_default_device jax_numpy_dtype_promotion
    jax_numpy_rank_promotion jax_threefry_partitionable jax_random_seed_offset
    jax_use_shardy_partitioner jax_softmax_custom_jvp jax_debug_key_reuse
    """.split()
)
_MISSING = ()  # What `setting` gives then.


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
    return tuple((name, value) for name in names if (value := setting(name)) is not _MISSING)


def _watch_settings() -> tuple[tuple[str, ...], ValueToken]:
    """Puts the watched settings into JAX's dispatch key, by a hook on each that says it changed.

    Returns their names and their values now; settings as they are now leave no mark in JAX's keys.
    """
    by_name: dict[str, Any] = jax_config.config._value_holders
    names = tuple(name for name in _WATCHED if name in by_name)
    holders = [by_name[name] for name in names]
    local_holders = [holder for holder in holders if hasattr(holder, "get_local")]
    unset = jax_config.config_ext.unset

    def mark(values: Iterable[Hashable]) -> ValueToken | None:
        settings = ValueToken(values)
        return None if settings == defaults else settings

    def global_values() -> Iterable[Hashable]:
        return (h.get_global() if h in local_holders else h.value for h in holders)

    def refresh() -> None:
        _settings_context.set_global(mark(global_values()))
        overridden = any(holder.get_local() is not unset for holder in local_holders)
        local = mark(holder.value for holder in holders) if overridden else unset
        _settings_context._obj.set_local(local)

    defaults = ValueToken(tuple(global_values()))
    call_on_changed_settings(holders, refresh)
    return names, defaults


_watched_names, _watched_defaults = _watch_settings() if PRIVATE_API else ((), ValueToken(()))


def environment() -> tuple[tuple[str, Hashable], ...]:
    """Name and value of every setting that changes what a trace or a compilation gives."""
    if not PRIVATE_API:
        mesh = ("mesh", jax.sharding.get_mesh())
        return (*_settings(_TRACE_SETTINGS), mesh, *_settings(_WATCHED))
    watched = _settings_context.value
    watched = _watched_defaults if watched is None else watched
    return _named(jax_config.trace_context(), mesh_lib.get_concrete_mesh(), watched)


@functools.lru_cache(maxsize=128)
def _named(context: tuple, mesh: Any, watched: ValueToken) -> tuple[tuple[str, Hashable], ...]:
    settings = dict(zip(jax_config.trace_context_names(), context, strict=True))
    settings.pop("axis_env_state", None)
    # What our own contexts hold is no setting: a key says apart what of it decides a program.
    ours = (ContextToken, ValueToken)
    traced = [
        (name, None if isinstance(x, ours) else x)
        for name, x in settings.items()
        # A trace may import Pallas, and with it come these settings, which are off then.
        if not name.startswith("pallas_") or x
    ]
    return (*traced, ("mesh", mesh), *zip(_watched_names, watched, strict=True))


_TOP_TRACE_STATE = None if PRIVATE_API else get_opaque_trace_state(convention="flax")


def is_tracing() -> bool:
    """Whether a transformation is active, so that operations become part of its program."""
    if PRIVATE_API:
        return not core.trace_state_clean()
    return get_opaque_trace_state(convention="flax") != _TOP_TRACE_STATE


def keeps_what_is_read() -> bool:
    """True inside a transformation that would keep a value read now as a constant.

    `jax.eval_shape` is one: JAX gives its trace to `jax.jit` of the same function.
    `jax.ensure_compile_time_eval` asks for constants, and without jit nothing is kept.
    """
    return is_tracing() and not (setting("eager_constant_folding") or jit_is_disabled())


def must_delegate() -> bool:
    """True under settings whose checks live in JAX's own call path."""
    names = ["jax_debug_key_reuse", "jax_enable_pgle"]
    if not PRIVATE_API:
        names += ["jax_debug_nans", "jax_debug_infs"]
    return any(setting(name) for name in names)


def jit_is_disabled() -> bool:
    """True under `jax.disable_jit`."""
    return bool(setting("jax_disable_jit"))


def arguments_outlive_calls() -> bool:
    """Whether something may use the arguments of a call after it.

    JAX runs a function again to find the NaN in its results, and without jit the function holds the
    arrays themselves.
    """
    return jit_is_disabled() or bool(setting("jax_debug_nans") or setting("jax_debug_infs"))


def has_concrete_mesh() -> bool:
    """True where the caller has set a mesh of their own."""
    return not _concrete_mesh().empty


def _concrete_mesh() -> Any:
    return mesh_lib.get_concrete_mesh() if PRIVATE_API else jax.sharding.get_mesh()


class _Entered(threading.local):
    session: Any = None
    token: ContextToken | None = None


_entered = _Entered()


def entered_session() -> Any:
    """What the innermost `entering` of this thread was given first; None outside of one."""
    return _entered.session


@contextlib.contextmanager
def entering(session: Any, token: ContextToken | None):
    """Enters a session in this thread; `token` identifies it in JAX's keys, unless it is None."""
    before = _entered.session, _entered.token
    try:
        with _session_context(token):
            _entered.session, _entered.token = session, token
            yield
    finally:
        _entered.session, _entered.token = before


def carried_settings() -> contextlib.AbstractContextManager:
    """The settings that hold in this thread alone, to be entered in another one.

    With the public API, only the session and the mesh.
    """
    values: dict[Any, Any] = {}
    if PRIVATE_API:
        everything: dict[str, Any] = jax_config.config._value_holders
        local = {h: h.get_local() for h in everything.values() if hasattr(h, "get_local")}
        unset = jax_config.config_ext.unset
        values = {holder: value for holder, value in local.items() if value is not unset}
    mesh, session, token = _concrete_mesh(), _entered.session, _entered.token

    @contextlib.contextmanager
    def enter():
        with contextlib.ExitStack() as stack:
            for holder, value in values.items():
                stack.callback(holder.set_local, holder.get_local())
                holder.set_local(value)
            if session is not None:
                stack.enter_context(entering(session, token))
            if not mesh.empty:
                stack.enter_context(jax.set_mesh(mesh))
            yield

    return enter()


def backends_are_initialized() -> bool:
    """True once JAX has started a backend in this process."""
    return not PRIVATE_API or xla_bridge.backends_are_initialized()


_was_running: list[bool] = []  # Whether JAX was, at each fork that led to this process.
_process_hooks.at_fork(after_in_child=lambda: _was_running.append(backends_are_initialized()))


def check_not_forked(what: str) -> None:
    """Raises `ForkedProcessError` in a child of a process where JAX had started its threads."""
    if any(_was_running):
        raise ForkedProcessError(
            f"{what} in a forked process, but JAX was already running in its parent, and its "
            "threads do not survive a fork",
            hint='start workers with multiprocessing.get_context("spawn"), or fork before the '
            "first use of JAX",
        )


@contextlib.contextmanager
def tracing_context(mesh: Any):
    """What holds while a program is traced and lowered: a mesh, unless the caller has set one."""
    with contextlib.ExitStack() as stack:
        if mesh is not None and not has_concrete_mesh():
            is_described = isinstance(mesh, AbstractMesh)  # Other processes have its devices.
            set_mesh = jax.sharding.use_abstract_mesh if is_described else jax.set_mesh
            stack.enter_context(set_mesh(mesh))
        if not PRIVATE_API:  # Else hooks keep the watched settings in JAX's keys all the time.
            stack.enter_context(_settings_context(ValueToken(_settings(_WATCHED))))
        yield
