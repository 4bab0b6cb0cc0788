"""Every change that stepcache makes inside JAX, and how it ends.

docs/process.md lists them for users. Functions of JAX are replaced only while a step is lowered or
compiled, and other threads get through to what was there; settings are hooked for as long as
stepcache is imported.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import inspect
import os
import re
import threading
import weakref
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

from jax.errors import JaxRuntimeError

from stepcache._changes import Shared, Undoing
from stepcache.jaxcompat.private import CAN_STORE, PRIVATE_API

if PRIVATE_API:
    from jax._src import source_info_util, traceback_util, util
    from jax._src.interpreters import mlir
if CAN_STORE:
    from jax._src import cache_key, compiler
    from jax._src.compilation_cache import get_executable_and_time

    _BINDS_CALLBACKS = "host_callbacks" in inspect.signature(get_executable_and_time).parameters


@dataclass(eq=False, repr=False)
class Compilation:
    """What JAX is about to have XLA compile."""

    name: str  # Of the module.
    devices: tuple[Any, ...]  # In the order of the device assignment.
    # Whether it calls back. What it calls is bound when it is loaded, and is not in the digest.
    calls_back: bool
    key: Callable[[], str]  # Gives its key in JAX's own persistent cache, if it has one.
    load: Callable[[bytes], Any]  # Loads an executable for them that was serialized elsewhere.
    compile: Callable[[], Any]  # Compiles it, without JAX's persistent cache.
    serialized: bytes = b""  # Once compiled, what can be serialized only before it runs.

    @functools.cached_property
    def digest(self) -> str:
        """A digest of all that XLA is given: module, options, flags, versions and topology.

        So paths of dumps and of autotuning results are not in it. Empty for a program that calls
        back where `binds_callbacks` is false. It takes time to digest arrays in the module.
        """
        return self.key().rpartition("-")[2]


class _OfThread(threading.local):
    everywhere: ClassVar[Callable[[Compilation], Any] | None] = None  # Where there is no `obtain`.
    obtain: Callable[[Compilation], Any] | None = None
    is_lowering = False
    context: tuple[Any, int] = (None, 0)  # The one in use for lowering, and how often it was used.


_of_thread = _OfThread()


def compile_through(undoing: Undoing, obtain: Callable[[Compilation], Any]) -> None:
    """Has `obtain` give the executable where JAX would compile, or ask its own persistent cache.

    In this thread, until `undoing` ends.
    """
    undoing.add(setattr, _of_thread, "obtain", _of_thread.obtain)
    _of_thread.obtain = obtain
    for each in (_compile, _hash):
        undoing.use(each)


def compile_all(undoing: Undoing, obtain: Callable[[Compilation], Any]) -> None:
    """Has `obtain` give the executables of all else that this process compiles.

    But what several processes compile, or a profile guides, is left to JAX.
    """
    undoing.add(setattr, _OfThread, "everywhere", None)
    _OfThread.everywhere = obtain
    undoing.use(_compile)


def reuse_contexts(undoing: Undoing) -> None:
    """Has this thread's lowerings share MLIR contexts until `undoing` ends, as from jax 0.12 on.

    To make one takes most of the lowering of a small function. Each serves ten modules, so that
    what MLIR interns in it does not pile up.
    """
    if PRIVATE_API and not hasattr(mlir, "_thread_local_context"):
        undoing.add(setattr, _of_thread, "is_lowering", _of_thread.is_lowering)
        _of_thread.is_lowering = True
        undoing.use(_context)


class _Replacement(Shared):
    """Replaces a function of a module of JAX, for its users' threads alone.

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
        obtain = _of_thread.obtain
        backend, module, devices, options, host_callbacks, executable_devices = args[:6]
        if obtain is None and not (any(args[6:]) or any(named.values()) or _spans(devices.flat)):
            obtain = _OfThread.everywhere
        if obtain is None:
            return found(*args, **named)

        def load(data: bytes) -> Any:
            bound = (host_callbacks,) if host_callbacks else ()
            return backend.deserialize_executable(data, executable_devices, options, *bound)

        def key() -> str:
            has_key = not host_callbacks or binds_callbacks(executable_devices)
            return cache_key.get(module, devices, options, backend) if has_key else ""

        def compile_it() -> Any:
            to_xla = backend, module, executable_devices, options, host_callbacks
            executable = compiler.backend_compile_and_load(*to_xla)
            # On CPUs, XLA serializes the comparison of a sort only before that has run.
            if backend.platform == "cpu" and b"sort" in mlir.module_to_bytecode(module):
                with contextlib.suppress(JaxRuntimeError):  # Then it cannot be stored.
                    compilation.serialized = backend.serialize_executable(executable)
            return executable

        name = str(module.operation.attributes["sym_name"]).strip('"')
        about = name, tuple(executable_devices), bool(host_callbacks)
        compilation = Compilation(*about, key, load, compile_it)
        return obtain(compilation)

    return compile_or_get_cached


def binds_callbacks(devices: Iterable[Any]) -> bool:
    """Whether a program that calls back can be loaded, as by JAX's own cache; not in a pod."""
    return _BINDS_CALLBACKS and not _spans(devices)


def _spans(devices: Iterable[Any]) -> bool:
    """Whether devices are of several processes."""
    return len({device.process_index for device in devices}) > 1


def _hash_over(found: Callable) -> Callable:
    def hash_accelerator_config(hasher, accelerators, *rest):
        """XLA's fingerprint of the topology of a pod differs between its processes.

        On CPUs it names the features of the processor, so they are named here.
        """
        if _of_thread.obtain is None or not _spans(accelerators.flat):
            return found(hasher, accelerators, *rest)
        for device in accelerators.flat:
            hasher.update(f"{device.device_kind} {device.process_index};".encode())
        if accelerators.flat[0].platform == "cpu":
            hasher.update(cpu_features().encode())

    return hash_accelerator_config


def _context_over(found: Callable) -> Callable:
    def make_ir_context():
        if not _of_thread.is_lowering:
            return found()
        _of_thread.is_lowering = False  # What is lowered meanwhile is not to be in this context.
        context, uses = _of_thread.context
        if context is None or uses >= _MODULES_A_CONTEXT:
            context, uses = found(), 0
        _of_thread.context = context, uses + 1
        return context

    return make_ir_context


_MODULES_A_CONTEXT = 10
if PRIVATE_API:
    _context = _Replacement(mlir, "make_ir_context", _context_over)
if CAN_STORE:
    _compile = _Replacement(compiler, "compile_or_get_cached", _compile_over)
    _hash = _Replacement(cache_key, "_hash_accelerator_config", _hash_over)


def cpu_features() -> str:
    """A digest of the model and the features of this machine's processor."""
    try:
        first_core = Path("/proc/cpuinfo").read_text().partition("\n\n")[0]  # Cores are alike.
    except OSError:
        first_core = os.uname().machine
    lines = re.findall(r"^(?:flags|Features|model name).*", first_core, re.MULTILINE)
    return hashlib.sha256("\n".join(lines or [first_core]).encode()).hexdigest()[:16]


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

    cache_keys = cache_info


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
