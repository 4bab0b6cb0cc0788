"""How values are coded in transit: fewer bits a value, with a bound on the error.

A buffer that coding would not make smaller is sent as it is: integers, and narrow floats.
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
ERROR_BOUNDS = {
    None: "",
    "bf16": "off by at most 2⁻⁸ of each value",
    "fp8": f"off by at most 2⁻⁴ of each value, or 2⁻¹⁸ of the largest of its {BLOCK}",
    "int8": f"off by at most 1/254 of the largest of its {BLOCK} values",
}


def codes(wire: str | None, dtype: Any) -> bool:
    """Whether values of a dtype are coded on this wire."""
    if wire is None or not jnp.issubdtype(dtype, jnp.floating):
        return False
    return np.dtype(dtype).itemsize > np.dtype(_TYPES[wire]).itemsize


def padded_size(wire: str, size: int, parts: int) -> int:
    """The number of values that are sent: whole blocks, equally many in each part."""
    unit = parts if wire == "bf16" else BLOCK * parts
    return -(-size // unit) * unit


def coded_bytes(wire: str, size: int, parts: int) -> int:
    """Bytes that are sent for `size` values in equal parts."""
    padded = padded_size(wire, size, parts)
    scales = 0 if wire == "bf16" else padded // BLOCK * 4
    return padded * np.dtype(_TYPES[wire]).itemsize + scales


def encode(wire: str, flat: Any, parts: int = 1, xp: Any = jnp) -> tuple[Any, ...]:
    """Flat floats, coded in equal parts, and, but for "bf16", the scales of their blocks."""
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
    """The values that were coded, in their shape and dtype."""
    flat = coded[0]
    if wire != "bf16":
        blocks = flat.astype(xp.float32).reshape(-1, BLOCK)
        flat = (blocks * coded[1][:, None]).reshape(-1)
    return flat[: math.prod(shape)].reshape(shape).astype(dtype)


def check_wire(wire: str | None, where: str) -> None:
    """Raises `VariablesError` if the devices of this process do not have the type of a wire."""
    if wire == "fp8" and (why := why_no_fp8()):
        expected = 'wire="bf16" or "int8"'
        raise VariablesError("the devices have no fp8", where=where, expected=expected, got=why)


@functools.cache
def why_no_fp8() -> str:
    """The error of a program that converts to fp8 and back; empty if the devices can."""
    fp8 = _TYPES["fp8"]
    try:
        jax.jit(lambda x: x.astype(fp8).astype(jnp.float32)).lower(np.ones(1, np.float32)).compile()
    except Exception as error:
        return first_line(error)
    return ""
