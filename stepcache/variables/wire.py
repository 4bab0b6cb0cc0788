"""How values are coded in transit: fewer bits a value, with a bound on the error.

A buffer that coding would not make smaller is sent as it is: integers, and narrow floats.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np

BLOCK = 256
"""Values that share one scale."""
_TYPES: dict[str, Any] = {"bf16": jnp.bfloat16, "int8": jnp.int8}
_LARGEST = 127
ERROR_BOUNDS = {
    None: "",
    "bf16": "off by at most 2⁻⁸ of each value",
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
    """Flat floats, coded in equal parts, and, for "int8", the scales of their blocks."""
    missing = padded_size(wire, flat.shape[0], parts) - flat.shape[0]
    flat = xp.pad(flat, (0, missing))
    if wire == "bf16":
        return (flat.astype(jnp.bfloat16),)
    blocks = flat.astype(xp.float32).reshape(-1, BLOCK)
    largest = xp.max(xp.abs(blocks), axis=1)
    scales = xp.where(largest > 0, largest / _LARGEST, 1.0).astype(xp.float32)
    scaled = xp.clip(xp.round(blocks / scales[:, None]), -_LARGEST, _LARGEST)
    return scaled.astype(jnp.int8).reshape(-1), scales


def decode(wire: str, coded: Sequence[Any], shape: Sequence[int], dtype: Any, xp: Any = jnp) -> Any:
    """The values that were coded, in their shape and dtype."""
    flat = coded[0]
    if wire != "bf16":
        blocks = flat.astype(xp.float32).reshape(-1, BLOCK)
        flat = (blocks * coded[1][:, None]).reshape(-1)
    return flat[: math.prod(shape)].reshape(shape).astype(dtype)
