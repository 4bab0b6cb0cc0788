"""Every change that stepcache makes inside JAX, and how it ends.

docs/process.md lists them for users. Functions of JAX are replaced only while a program is compiled
through `compile_through`, and while a `CallReplacement` is in use; settings are hooked for as
long as stepcache is imported.
"""

from __future__ import annotations

import contextlib
import functools
import os
import sys
import threading
import weakref
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import jax

from stepcache._changes import Shared, Undoing
from stepcache._process_hooks import set_profile
from stepcache.jaxcompat.private import CAN_STORE, PRIVATE_API

if PRIVATE_API:
    from jax._src import source_info_util, traceback_util, util
if CAN_STORE:
    from jax._src import cache_key, compiler, core, pjit
    from jax._src.interpreters import partial_eval

LOG_OF_CALLBACKS = ("jax._src.callback", "jax.pure_callback failed")
"""Logger and message of an error in a callback, which is raised as well."""

Load = Callable[[bytes], Any]
Find = Callable[[str, Load], Any]


class _Compiling(threading.local):
    find: Find | None = None


_compiling = _Compiling()


def compile_through(undoing: Undoing, find: Find) -> None:
    """Asks `find` before XLA compiles in this thread, and keeps JAX's persistent cache out.

    Args:
        undoing: until its end.
        find: is given a digest of all that XLA is given (module, options, flags, versions,
            topology, as JAX's own cache key has them), and a function that loads an executable of
            this kind from bytes. Returns the loaded executable, or None to have it compiled.
    """
    undoing.add(setattr, _compiling, "find", _compiling.find)
    _compiling.find = find
    for each in (_compile, _hash):
        undoing.use(each)


class _Replacement(Shared):
    """Replaces a function of a module of JAX; other threads get through to what was found.

    If ours has been replaced in turn, the replacement stays, and calls ours.

    Args:
        module, name: of the function.
        over: makes the replacement over the function that is found, which it may call.
    """

    def __init__(self, module: Any, name: str, over: Callable[[Callable], Callable]):
        super().__init__()
        self._module, self._name, self._over = module, name, over
        self._found: Any = None
        self._ours: Any = None

    def _make(self, users: int) -> bool:
        if not users:
            self._found = getattr(self._module, self._name)
            self._ours = self._over(self._found)
            setattr(self._module, self._name, self._ours)
        return True

    def _undo(self) -> None:
        if getattr(self._module, self._name) is self._ours:
            setattr(self._module, self._name, self._found)


def _compile_over(found: Callable) -> Callable:
    def compile_or_get_cached(*args, **named):
        find = _compiling.find
        backend, computation, devices, options, host_callbacks, executable_devices = args[:6]
        if find is None or host_callbacks:
            return found(*args, **named)

        def load(data: bytes) -> Any:
            return backend.deserialize_executable(data, executable_devices, options)

        digest = cache_key.get(computation, devices, options, backend).rpartition("-")[2]
        loaded = find(digest, load)
        if loaded is not None:
            return loaded
        return compiler.backend_compile_and_load(
            backend, computation, executable_devices, options, host_callbacks
        )

    return compile_or_get_cached


def _hash_over(found: Callable) -> Callable:
    def hash_accelerator_config(hasher, accelerators, *rest):
        """XLA's fingerprint of the topology of a pod differs between its processes."""
        processes = {device.process_index for device in accelerators.flat}
        if _compiling.find is None or len(processes) == 1:
            return found(hasher, accelerators, *rest)
        for device in accelerators.flat:
            hasher.update(f"{device.device_kind} {device.process_index};".encode())

    return hash_accelerator_config


Judge = Callable[[Any, tuple, dict], bool]
"""Says yes or no to a call, by its first argument, the other positional and the keyword ones."""


class CallReplacement(_Replacement):
    """Replaces a function of JAX: one of `WATCHED_BINDS` and its kind.

    Args:
        holder, name: of the function.
        may_pause: whether the profile of a recording may pause below a call.
        may_stay: whether a pause may go on below a call. Neither is watched itself.
    """

    def __init__(self, holder: Any, name: str, may_pause: Judge, may_stay: Judge):
        over = functools.partial(_with_pauses, may_pause=may_pause, may_stay=may_stay)
        super().__init__(holder, name, over)


def _those_of_jax(*places: tuple[Any, str]) -> tuple[tuple[Any, str], ...]:
    return tuple((holder, name) for holder, name in places if hasattr(holder, name))


WATCHED_BINDS = WATCHED_JITS = WATCHED_ENDS = ()
if CAN_STORE:
    WATCHED_BINDS = ((core.Primitive, "bind"), (jax.numpy.ufunc, "__call__"))
    WATCHED_JITS = _those_of_jax((pjit, "_infer_params"), (pjit, "_run_python_pjit"))
    WATCHED_ENDS = _those_of_jax((partial_eval.JaxprStackFrame, "to_jaxpr"))
"""Functions below which JAX spends most of a trace: what binds primitives, what calls a function
under `jax.jit`, and what collects the equations of a trace."""

_paused = threading.local()
"""Of this thread: `profile`, that of a recording which has paused below a watched call."""


def pause_nothing() -> None:
    """Forgets a pause that was interrupted, where a recording begins in this thread."""
    _paused.profile = None


def _profile_to_pause() -> Any:
    """The profile of a recording in this thread; None where there is none but beside the user's."""
    profile = sys.getprofile()
    return None if getattr(profile, "_stepcache_users", profile) is not None else profile


@contextlib.contextmanager
def recording_paused() -> Iterator[None]:
    """Context manager for stepcache's own work in a trace, which a recording need not see."""
    profile = _profile_to_pause()
    if profile is not None:
        set_profile(None)
    try:
        yield
    finally:
        if profile is not None:
            set_profile(profile)


def _with_pauses(found: Callable, may_pause: Judge, may_stay: Judge) -> Callable:
    """A function in the place of another one; see `CallReplacement`."""

    @functools.wraps(found)
    def function(first: Any, *args: Any, **named: Any) -> Any:
        profile = getattr(_paused, "profile", None)
        if profile is None:
            profile = _profile_to_pause()
            if profile is None:
                return found(first, *args, **named)
            set_profile(None)
            if not may_pause(first, args, named):
                set_profile(profile)
                return found(first, *args, **named)
            _paused.profile = profile
            try:
                return found(first, *args, **named)
            finally:
                _paused.profile = None
                set_profile(profile)
        if may_stay(first, args, named):
            return found(first, *args, **named)
        _paused.profile = None
        set_profile(profile)
        try:
            return found(first, *args, **named)
        finally:
            set_profile(None)
            _paused.profile = profile

    return function


REPLACED = {
    ("jax._src.compiler", "compile_or_get_cached"),
    ("jax._src.cache_key", "_hash_accelerator_config"),
}
"""Module and name of the functions that are replaced while a program is compiled."""

if CAN_STORE:
    _compile = _Replacement(compiler, "compile_or_get_cached", _compile_over)
    _hash = _Replacement(cache_key, "_hash_accelerator_config", _hash_over)


def call_on_changed_settings(holders: Iterable[Any], changed: Callable[[], None]) -> None:
    """Has a function called after settings of JAX have changed, for all threads or for one.

    The hooks that the settings had before are called first.
    """

    def then_changed(hook: Callable | None) -> Callable:
        def hooks(value: Any) -> None:
            if hook is not None:
                hook(value)
            changed()

        return hooks

    for holder in holders:
        for name in ("_update_global_hook", "_update_thread_local_hook", "_update_hook"):
            if hasattr(holder, name):
                setattr(holder, name, then_changed(getattr(holder, name)))


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


def hide_frames(directory: str) -> None:
    """Takes the files below `directory` for JAX's own: no user's code, in errors and metadata."""
    if PRIVATE_API:
        traceback_util.register_exclusion(directory)
        source_info_util.register_exclusion(directory + os.sep)
