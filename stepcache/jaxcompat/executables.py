"""XLA's part of a program, the executable: as bytes, and loaded again.

What JAX knows of a program besides (kept arguments, types, trees, shardings) is never stored: it is
always that of the running process's own lowering.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np

from stepcache.jaxcompat.hooks import binds_callbacks
from stepcache.jaxcompat.private import CAN_STORE
from stepcache.jaxcompat.stages import Runnable

if CAN_STORE:
    from jax._src import compiler
    from jaxlib import lapack, xla_client

Device = Any


class NotStorable(Exception):
    """A program that cannot be kept outside its process, with the reason as its text: one line."""

    def __init__(self, reason: str):
        super().__init__(" ".join(reason.split()))


def why_not_storable(run: Runnable) -> str:
    """Why a program cannot be kept outside its process; empty where it can."""
    unloaded = getattr(run.executable, "_unloaded_executable", None)
    if not CAN_STORE or unloaded is None:
        return "this version of JAX, or its public API, gives no way to do it"
    if unloaded.keepalive or (run.calls_back and not binds_callbacks(unloaded.device_list)):
        return "it calls back into Python"
    return ""


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
    """Loads XLA's part of a program onto devices, given in the order of its device assignment."""
    if _CALLS_LAPACK in data:
        # Through pointers that JAX sets when it lowers such a call; unset, they end the process.
        lapack.prepare_lapack_call("potrf_ffi", np.dtype(np.float32))
    return devices[0].client.deserialize_executable(data, *_where(tuple(devices)))


@functools.lru_cache(maxsize=16)
def _where(devices: tuple[Device, ...]) -> tuple[Any, Any]:
    # The options say it too: XLA would otherwise bind the executable to all devices.
    assignment = np.array([[device.id for device in devices]])
    options = compiler.get_compile_options(1, len(devices), assignment, backend=devices[0].client)
    return xla_client.DeviceList(devices), options


_CALLS_LAPACK = b"lapack_"  # Begins the names of all its functions, on CPUs.
