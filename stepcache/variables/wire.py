"""How values are coded on their way: fewer bits, and a bound on the error that this makes.

A buffer that the code would not make smaller goes as it is: integers, and floats that are narrow.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from stepcache.errors import VariablesError, first_line

BLOCK = 256
"""Values that share one scale."""
_TYPES: dict[str, Any] = {"bf16": jnp.bfloat16, "fp8": jnp.float8_e4m3fn, "int8": jnp.int8}
_LARGEST = {"fp8": 448.0, "int8": 127.0}
_BOUNDS = {
    "bf16": "off by at most 2⁻⁸ of each value",
    "fp8": f"off by at most 2⁻⁴ of each value, or 2⁻¹⁸ of the largest of its {BLOCK}",
    "int8": f"off by at most 1/254 of the largest of its {BLOCK} values",
}


def codes(wire: str | None, dtype: Any) -> bool:
    """Whether values of a dtype are coded on this wire."""
    if wire is None or not jnp.issubdtype(dtype, jnp.floating):
        return False
    return np.dtype(dtype).itemsize > np.dtype(_TYPES[wire]).itemsize


def error_bound(wire: str | None) -> str:
    """The error of a value that was coded, in words; empty where none is made."""
    return _BOUNDS[wire] if wire is not None else ""


def padded_size(wire: str, size: int, parts: int) -> int:
    """Values on the wire: blocks are whole, and there are as many for each of the parts."""
    unit = parts if wire == "bf16" else BLOCK * parts
    return -(-size // unit) * unit


def coded_bytes(wire: str, size: int, parts: int) -> int:
    """Bytes on the wire for so many values, split into parts."""
    padded = padded_size(wire, size, parts)
    scales = 0 if wire == "bf16" else padded // BLOCK * 4
    return padded * np.dtype(_TYPES[wire]).itemsize + scales


def encode(wire: str, flat: Any, parts: int = 1, xp: Any = jnp) -> tuple[Any, ...]:
    """Codes flat values: what crosses, and for blocks their scales.

    Args:
        wire: "bf16", "fp8" or "int8".
        flat: floats, of one dimension.
        parts: how many equal parts are to be split off.
        xp: `jax.numpy` on the devices, `numpy` on a host.
    """
    missing = padded_size(wire, flat.shape[0], parts) - flat.shape[0]
    flat = xp.pad(flat, (0, missing))
    if wire == "bf16":
        return (flat.astype(jnp.bfloat16),)
    blocks = flat.astype(xp.float32).reshape(-1, BLOCK)
    largest = xp.max(xp.abs(blocks), axis=1)
    scales = xp.where(largest > 0, largest / _LARGEST[wire], 1.0).astype(xp.float32)
    scaled = blocks / scales[:, None]
    if wire == "int8":
        scaled = xp.clip(xp.round(scaled), -127, 127)
    return scaled.astype(_TYPES[wire]).reshape(-1), scales


def decode(wire: str, coded: Sequence[Any], shape: Sequence[int], dtype: Any, xp: Any = jnp) -> Any:
    """The values again."""
    flat = coded[0]
    if wire != "bf16":
        blocks = flat.astype(xp.float32).reshape(-1, BLOCK)
        flat = (blocks * coded[1][:, None]).reshape(-1)
    return flat[: math.prod(shape)].reshape(shape).astype(dtype)


def check_wire(wire: str | None, where: str) -> None:
    """Whether the devices of this process know the type of a wire.

    Raises:
        VariablesError: they do not.
    """
    why = why_no_fp8() if wire == "fp8" else ""
    if why:
        raise VariablesError(
            "the devices have no fp8",
            where=where,
            expected='wire="bf16" or "int8"',
            got=why,
        )


@functools.cache
def why_no_fp8() -> str:
    """Why the devices cannot convert from and to fp8; empty if they can."""
    fp8 = _TYPES["fp8"]
    try:
        jax.jit(lambda x: x.astype(fp8).astype(jnp.float32)).lower(np.ones(1, np.float32)).compile()
    except Exception as error:
        return first_line(error)
    return ""
