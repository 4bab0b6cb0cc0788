"""Taking compiled programs out of JAX and putting them back in another process.

XLA serializes its own part, the executable. The rest, what JAX knows of arguments and results, is
pickled; reading it back admits the classes it is made of and nothing else.
"""

from __future__ import annotations

import contextlib
import hashlib
import io
import pickle
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from stepcache.jaxcompat.private import PRIVATE_API
from stepcache.jaxcompat.stages import Runnable, Staged, outline

if PRIVATE_API:
    from jax._src import cache_key, compiler, tree_util
    from jax._src import lib as jax_lib
    from jax._src.interpreters import pxla

    xla_client: Any = getattr(jax_lib, "xla_client")  # noqa: B009  (a reexport, to type checkers)

    CAN_STORE = (
        hasattr(cache_key, "get")
        and hasattr(cache_key, "_hash_accelerator_config")
        and hasattr(compiler, "compile_or_get_cached")
        and hasattr(compiler, "backend_compile_and_load")
        and hasattr(compiler, "get_compile_options")
        and hasattr(pxla, "UnloadedMeshExecutable")
        and hasattr(jax.tree_util.PyTreeDef, "from_node_data_and_children")
    )
else:
    CAN_STORE = False


class NotStorable(Exception):
    """A program that cannot be kept outside its process, with the reason as its text."""


# ---- compiling, with a store in between --------------------------------------------------------

Device = Any
Load = Callable[[bytes], Any]
Find = Callable[[str, Load], Any]


class _Compiling(threading.local):
    find: Find | None = None


_compiling = _Compiling()
_hook_lock = threading.Lock()


@contextlib.contextmanager
def compiling_through(find: Find) -> Iterator[None]:
    """Asks `find` before XLA compiles in this thread, and keeps JAX's persistent cache out.

    Args:
        find: is given a digest of all that XLA is given (module, options, flags, versions,
            topology, as JAX's own cache key has them), and a function that loads an executable of
            this kind from bytes. Returns the loaded executable, or None to have it compiled.
    """
    _install_hook()
    before, _compiling.find = _compiling.find, find
    try:
        yield
    finally:
        _compiling.find = before


def lowered_digest(staged: Staged) -> str:
    """A digest of all that XLA would be given for what was lowered; compiles nothing."""
    if not CAN_STORE:
        return hashlib.sha256(outline(staged.lowered).encode()).hexdigest()
    found: list[str] = []

    def note(digest: str, load: Load) -> None:
        found.append(digest)
        raise _DigestKnown

    with compiling_through(note), contextlib.suppress(_DigestKnown):
        staged.compile()
    return found[0] if found else ""


class _DigestKnown(Exception):
    """The digest of what XLA would be given is known, and that is all that was wanted."""


def _install_hook() -> None:
    with _hook_lock:
        original = compiler.compile_or_get_cached
        if getattr(original, "_stepcache", False):
            return

        def compile_or_get_cached(
            backend,
            computation,
            devices,
            options,
            host_callbacks,
            executable_devices,
            *rest,
            **named,
        ):
            find = _compiling.find
            if find is None or host_callbacks:
                return original(
                    backend,
                    computation,
                    devices,
                    options,
                    host_callbacks,
                    executable_devices,
                    *rest,
                    **named,
                )

            def load(data: bytes) -> Any:
                return backend.deserialize_executable(data, executable_devices, options)

            digest = cache_key.get(computation, devices, options, backend).rpartition("-")[2]
            loaded = find(digest, load)
            if loaded is not None:
                return loaded
            return compiler.backend_compile_and_load(
                backend, computation, executable_devices, options, host_callbacks
            )

        compile_or_get_cached._stepcache = True
        compiler.compile_or_get_cached = compile_or_get_cached
        original_hash = cache_key._hash_accelerator_config

        def hash_accelerator_config(hasher, accelerators, *rest):
            """XLA's fingerprint of the topology of a pod differs between its processes."""
            if _compiling.find is None or not _span_processes(accelerators):
                return original_hash(hasher, accelerators, *rest)
            for device in accelerators.flat:
                hasher.update(f"{device.device_kind} {device.process_index};".encode())

        cache_key._hash_accelerator_config = hash_accelerator_config


def _span_processes(devices: Any) -> bool:
    return len({device.process_index for device in devices.flat}) > 1


# ---- executables ------------------------------------------------------------------------------


def serialize_executable(executable: Any) -> bytes:
    """XLA's part of a program. One that was itself loaded must not be serialized again."""
    return executable.client.serialize_executable(executable)


def load_executable(data: bytes, devices: Sequence[Device]) -> Any:
    """Loads XLA's part of a program onto devices, given in the order of its device assignment.

    They need not be those that it was compiled for. The options say so to XLA too, which would
    otherwise go by the numbers of the devices then.
    """
    assignment = np.array([[device.id for device in devices]])
    options = compiler.get_compile_options(
        num_replicas=1, num_partitions=len(devices), device_assignment=assignment
    )
    listed = xla_client.DeviceList(tuple(devices))
    return devices[0].client.deserialize_executable(data, listed, options)


def program_devices(run: Runnable) -> tuple[Device, ...]:
    """The devices of a program, in the order of its device assignment."""
    return tuple(run.executable._unloaded_executable.device_list)


_KEPT = (
    "input_avals",
    "input_shardings",
    "output_avals",
    "output_shardings",
    "committed",
    "name",
    "kept_var_idx",
    "xla_in_layouts",
    "dispatch_in_layouts",
    "xla_out_layouts",
)
_MUST_BE_EMPTY = ("unordered_effects", "ordered_effects", "keepalive", "host_callbacks", "mut")


def why_not_storable(run: Runnable) -> str | None:
    """Why a program cannot be kept outside its process; None where it can."""
    if not CAN_STORE:
        return "this version of JAX, or its public API, gives no way to do it"
    unloaded = getattr(run.executable, "_unloaded_executable", None)
    if unloaded is None:
        return "JAX keeps nothing of it that could be stored"
    if unloaded.host_callbacks or unloaded.keepalive:
        return "it calls back into Python"
    if any(getattr(unloaded, name) for name in _MUST_BE_EMPTY) or run.effects:
        return "it has side effects"
    if any(jnp.issubdtype(each.dtype, jax.dtypes.extended) for each in run.const_args):
        return "it captured an array of an extended type, such as a random key"
    return None


def pickle_call(run: Runnable) -> bytes:
    """What JAX knows of a program beside XLA's executable: arguments, results, where they are.

    Raises:
        NotStorable: a part of it cannot be pickled.
    """
    why = why_not_storable(run)
    if why:
        raise NotStorable(why)
    unloaded = run.executable._unloaded_executable
    interned: dict[Any, Any] = {}
    state = {name: _intern(getattr(unloaded, name), interned) for name in _KEPT}
    state["const_args"] = [np.asarray(each) for each in run.const_args]
    buffer = io.BytesIO()
    try:
        _Pickler(buffer, program_devices(run)).dump(state)
    except Exception as error:
        raise NotStorable(f"{type(error).__name__}: {error}") from None
    return buffer.getvalue()


def _intern(value: Any, known: dict[Any, Any]) -> Any:
    """Makes equal shardings and types one object, so that each is written once."""
    if isinstance(value, list | tuple):
        return type(value)(known.setdefault((type(each), each), each) for each in value)
    return value


def assemble(executable: Any, call: bytes, out_tree: Any, devices: Sequence[Device]) -> Runnable:
    """Puts a program together again.

    Args:
        executable: from `load_executable`.
        call: from `pickle_call`.
        out_tree: the tree of the outputs.
        devices: as for `load_executable`.

    Raises:
        pickle.UnpicklingError: `call` holds something that it may not.
    """
    state = _Unpickler(io.BytesIO(call), devices).load()
    const_args = state.pop("const_args")
    unloaded = pxla.UnloadedMeshExecutable(
        xla_executable=executable,
        device_list=xla_client.DeviceList(tuple(devices)),
        backend=devices[0].client,
        unordered_effects=[],
        ordered_effects=[],
        keepalive=[],
        host_callbacks=[],
        mut=None,
        all_args_info=None,
        pgle_profiler=None,
        **state,
    )
    loaded = unloaded.load()
    return Runnable(loaded, out_tree, loaded.shard_const_args(const_args), frozenset())


# ---- pickles ----------------------------------------------------------------------------------


class _Pickler(pickle.Pickler):
    def __init__(self, file: Any, devices: Sequence[Device] = ()):
        super().__init__(file, protocol=5)
        self._positions = {device: index for index, device in enumerate(devices)}

    def persistent_id(self, obj: Any) -> Any:
        if isinstance(obj, jax.Device):
            return ("device", self._positions[obj])
        if type(obj).__name__ == "PRNGImpl" and _generators().get(obj.name) is obj:
            return ("random generator", obj.name)  # Made of functions; known by its name.
        return None


def _generators() -> dict[str, Any]:
    """The implementations of random keys, by name."""
    places = (sys.modules.get(name) for name in ("jax._src.random.prng", "jax._src.prng"))
    return next((vars(module)["prngs"] for module in places if hasattr(module, "prngs")), {})


_FUNCTIONS_ADMITTED = {
    ("numpy._core.multiarray", "_reconstruct"),
    ("numpy._core.multiarray", "scalar"),
    ("numpy._core.numeric", "_frombuffer"),
    ("jax._src.tree_util", "default_registry"),
    ("jaxlib._jax", "pytree"),
    ("copyreg", "_reconstructor"),
    ("builtins", "getattr"),
}
_PACKAGES_ADMITTED = ("jax", "jaxlib", "ml_dtypes", "flax", "optax", "numpy")
_BUILTINS_ADMITTED = frozenset(
    "set frozenset complex bytearray slice range int float str bool tuple list dict object".split()
)


class _Unpickler(pickle.Unpickler):
    """Admits data: classes of arrays, shardings, trees, and of pytree nodes known here already."""

    def __init__(self, file: Any, devices: Sequence[Device] = ()):
        super().__init__(file)
        self._devices = devices

    def persistent_load(self, pid: Any) -> Any:
        kind, name = pid
        if kind == "device" and isinstance(name, int):
            return self._devices[name]
        if kind == "random generator" and name in _generators():
            return _generators()[name]
        raise pickle.UnpicklingError(f"unknown reference {pid!r}")

    def find_class(self, module: str, name: str) -> Any:
        if module == "builtins" and name in _BUILTINS_ADMITTED:
            return super().find_class(module, name)
        found: Any = sys.modules.get(module)
        for part in name.split("."):
            found = getattr(found, part, None)
        top = module.partition(".")[0]
        of_jax = module.startswith("jax._src.") and name.startswith("_unpickle_")
        if found is not None and (of_jax or (module, name) in _FUNCTIONS_ADMITTED):
            return found
        if isinstance(found, type) and (
            (top in _PACKAGES_ADMITTED and found.__module__.partition(".")[0] == top)
            or found in tree_util._registry
            or (module in ("collections", "enum") and top == module)
        ):
            return found
        raise pickle.UnpicklingError(f"{module}.{name} may not be part of a stored program")


# ---- trees ------------------------------------------------------------------------------------

_MAX_KNOWN_SUBTREES = 4096


def encode_tree(tree: Any, known: Any) -> Any:
    """A tree structure as plain data; parts that are parts of `known` too are named by position.

    Raises:
        NotStorable: a node keeps something that cannot be pickled.
    """
    positions: dict[tuple[int, int], list[tuple[tuple[int, ...], Any]]] = {}
    for position, subtree in _subtrees(known):
        positions.setdefault((subtree.num_nodes, subtree.num_leaves), []).append(
            (position, subtree)
        )
    return _encode(tree, positions)


def _subtrees(tree: Any) -> Iterator[tuple[tuple[int, ...], Any]]:
    """The inner nodes of a tree, from the root down, with their positions."""
    level: list[tuple[tuple[int, ...], Any]] = [((), tree)]
    count = 0
    while level and count < _MAX_KNOWN_SUBTREES:
        yield from level
        count += len(level)
        level = [
            ((*position, index), child)
            for position, node in level
            for index, child in enumerate(node.children())
            if child.num_nodes > 1
        ]


def _encode(tree: Any, positions: dict) -> Any:
    data = tree.node_data()
    if data is None:
        return "leaf"
    kind, extra = data
    if kind is type(None):
        return "none"
    children = tree.children()
    if children:
        for position, subtree in positions.get((tree.num_nodes, tree.num_leaves), ()):
            with contextlib.suppress(Exception):  # What a node keeps may refuse to be compared.
                if subtree == tree:
                    return ["known", list(position)]
    if kind in (tuple, list):
        return [kind.__name__, [_encode(child, positions) for child in children]]
    if kind is dict and all(type(key) in (str, int) for key in extra):
        return ["dict", list(extra), [_encode(child, positions) for child in children]]
    buffer = io.BytesIO()
    try:
        _Pickler(buffer).dump((kind, extra))
        _Unpickler(io.BytesIO(buffer.getvalue())).load()
    except Exception as error:
        raise NotStorable(
            f"its outputs hold a {kind.__qualname__} that cannot be stored ({error})"
        ) from None
    return ["node", buffer.getvalue(), [_encode(child, positions) for child in children]]


def decode_tree(code: Any, known: Any) -> Any:
    """The tree structure that `encode_tree` wrote.

    Raises:
        pickle.UnpicklingError: it holds something that it may not.
        ValueError, TypeError, IndexError, KeyError: it is malformed.
    """
    if code == "leaf":
        return jax.tree_util.tree_structure(0)
    if code == "none":
        return jax.tree_util.tree_structure(None)
    kind, *rest = code
    if kind == "known":
        for index in rest[0]:
            known = known.children()[index]
        return known
    children = [decode_tree(child, known) for child in rest[-1]]
    data: Any
    if kind == "dict":
        data = (dict, list(rest[0]))
    elif kind == "node":
        data = _Unpickler(io.BytesIO(rest[0])).load()
    else:
        data = ({"tuple": tuple, "list": list}[kind], None)
    registry = tree_util.default_registry
    return jax.tree_util.PyTreeDef.from_node_data_and_children(registry, data, children)
