"""Taking compiled programs out of JAX and putting them back in another process.

XLA serializes its own part, the executable. The rest, what JAX knows of arguments and results, is
written as plain data by `call_codec` and `tree_codec`.
"""

from __future__ import annotations

import contextlib
import hashlib
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from stepcache._changes import Undoing
from stepcache.jaxcompat.call_codec import FIELDS, decode_call, encode_call
from stepcache.jaxcompat.checked_data import NotStorable
from stepcache.jaxcompat.hooks import Find, Load, compile_through
from stepcache.jaxcompat.inspection import outline
from stepcache.jaxcompat.private import CAN_STORE
from stepcache.jaxcompat.stages import Runnable, Staged
from stepcache.jaxcompat.tree_codec import Holder, NotThere, decode_tree, encode_tree, objects_in

if CAN_STORE:
    from jax._src import compiler
    from jax._src.interpreters import pxla
    from jaxlib import lapack, xla_client


Device = Any


def lowered_digest(staged: Staged) -> str:
    """A digest of all that XLA would be given for what was lowered; compiles nothing."""
    if not CAN_STORE:
        return hashlib.sha256(outline(staged.lowered).encode()).hexdigest()
    found: list[str] = []

    def note(digest: str, load: Load) -> None:
        found.append(digest)
        raise _DigestKnown

    with contextlib.suppress(_DigestKnown), Undoing() as undoing, undoing:
        compile_through(undoing, note)
        staged.compile()
    return found[0] if found else ""


class _DigestKnown(Exception):
    """The digest of what XLA would be given is known, and that is all that was wanted."""


def serialize_executable(executable: Any) -> bytes:
    """XLA's part of a program. One that was itself loaded must not be serialized again.

    Raises:
        NotStorable: XLA has no form for a part of it, as for a sort's comparison on CPUs.
    """
    try:
        return executable.client.serialize_executable(executable)
    except jax.errors.JaxRuntimeError as error:
        reason = str(error).partition("\n")[0]
        raise NotStorable(f"XLA cannot serialize it: {reason}") from error


def load_executable(data: bytes, devices: Sequence[Device]) -> Any:
    """Loads XLA's part of a program onto devices, given in the order of its device assignment.

    They need not be those that it was compiled for. The options say so to XLA too, which would
    otherwise go by the numbers of the devices then.
    """
    if _CALLS_LAPACK in data:
        # Through pointers that JAX sets when it lowers such a call; unset, they end the process.
        lapack.prepare_lapack_call("potrf_ffi", np.dtype(np.float32))
    client = devices[0].client
    options = compiler.get_compile_options(
        num_replicas=1,
        num_partitions=len(devices),
        device_assignment=np.array([[device.id for device in devices]]),
        backend=client,
    )
    listed = xla_client.DeviceList(tuple(devices))
    return client.deserialize_executable(data, listed, options)


_CALLS_LAPACK = b"lapack_"  # Begins the names of all its functions, on CPUs.


def program_devices(run: Runnable) -> tuple[Device, ...]:
    """The devices of a program, in the order of its device assignment."""
    return tuple(run.executable._unloaded_executable.device_list)


def why_not_storable(run: Runnable) -> str | None:
    """Why a program cannot be kept outside its process; None where it can."""
    if not CAN_STORE:
        return "this version of JAX, or its public API, gives no way to do it"
    unloaded = getattr(run.executable, "_unloaded_executable", None)
    if unloaded is None:
        return "JAX keeps nothing of it that could be stored"
    if unloaded.host_callbacks or unloaded.keepalive:
        return "it calls back into Python"
    if unloaded.unordered_effects or unloaded.ordered_effects or unloaded.mut or run.effects:
        return "it has side effects"
    if any(jnp.issubdtype(each.dtype, jax.dtypes.extended) for each in run.const_args):
        return "it captured an array of an extended type, such as a random key"
    return None


def describe_call(run: Runnable) -> dict[str, Any]:
    """What JAX knows of a program beside XLA's executable, as plain data for `assemble`.

    Raises:
        NotStorable: a part of it is no plain data.
    """
    why = why_not_storable(run)
    if why:
        raise NotStorable(why)
    unloaded = run.executable._unloaded_executable
    call = {name: getattr(unloaded, name) for name in FIELDS}
    const_args = [np.asarray(each) for each in run.const_args]
    try:
        return encode_call(call, const_args, program_devices(run))
    except NotStorable:
        raise
    except Exception as error:
        raise NotStorable(f"{type(error).__name__}: {error}") from None


def assemble(executable: Any, call: Any, out_tree: Any, devices: Sequence[Device]) -> Runnable:
    """A program of what `load_executable` and `describe_call` gave, on the same devices.

    Raises:
        ValueError, TypeError, KeyError, IndexError: `call` is malformed.
    """
    described, const_args = decode_call(call, devices)
    if out_tree.num_leaves != len(described["output_avals"]):
        raise ValueError("its results are not those of its tree")
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
        **described,
    )
    loaded = unloaded.load()
    return Runnable(loaded, out_tree, loaded.shard_const_args(const_args), frozenset())
