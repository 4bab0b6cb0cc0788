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


def codes(wire: str | None, dtype: Any, size: int, parts: int = 1) -> bool:
    """Whether `size` values of a dtype are coded on this wire: floats that it makes smaller."""
    if wire is None or not jnp.issubdtype(dtype, jnp.floating):
        return False
    return coded_bytes(wire, size, parts) < size * np.dtype(dtype).itemsize


def coded_arrays(wire: str, size: int, parts: int = 1) -> list[tuple[int, Any]]:
    """Size and dtype of the arrays of coded values, which are as many whole blocks in each part."""
    unit = parts if wire == "bf16" else BLOCK * parts
    padded = -(-size // unit) * unit
    scales = [] if wire == "bf16" else [(padded // BLOCK, np.dtype(np.float32))]
    return [(padded, np.dtype(_TYPES[wire])), *scales]


def coded_bytes(wire: str, size: int, parts: int = 1) -> int:
    """Bytes that are sent for `size` values in equal parts."""
    return sum(count * dtype.itemsize for count, dtype in coded_arrays(wire, size, parts))


def encode(wire: str, flat: Any, parts: int = 1, xp: Any = jnp) -> tuple[Any, ...]:
    """Flat floats in equal parts; for "int8", scales too. Blocks with inf or NaN decode as NaNs."""
    missing = coded_arrays(wire, flat.shape[0], parts)[0][0] - flat.shape[0]
    flat = xp.pad(flat, (0, missing)) if missing else flat
    with np.errstate(all="ignore"):  # Of what is not finite, or underflows.
        if wire == "bf16":
            return (flat.astype(jnp.bfloat16),)
        if xp is not np:
            return _scaled(flat, xp)
        chunks = [_scaled(flat[n : n + _CHUNK], np) for n in range(0, flat.size, _CHUNK)]
        return tuple(map(np.concatenate, zip(*chunks, strict=True)))


_CHUNK = 256 * BLOCK  # Numbers coded at a time: numpy's temporary arrays fit in the CPU's cache.


def _scaled(flat: Any, xp: Any) -> tuple[Any, Any]:
    """Whole blocks, each in parts of its largest value, and the scales."""
    blocks = flat.astype(xp.float32).reshape(-1, BLOCK)
    scales = xp.max(xp.abs(blocks), axis=1) / xp.float32(_LARGEST)
    scales = xp.where(scales == 0, xp.float32(1), scales)
    scaled = xp.clip(xp.round(blocks / scales[:, None]), -_LARGEST, _LARGEST)
    return scaled.astype(jnp.int8).reshape(-1), scales


def decode(wire: str, coded: Sequence[Any], shape: Sequence[int], dtype: Any, xp: Any = jnp) -> Any:
    """The values that were coded, in their shape and dtype."""
    flat = coded[0]
    with np.errstate(all="ignore"):  # Of what is not finite, or underflows.
        if wire != "bf16":
            blocks = flat.astype(xp.float32).reshape(-1, BLOCK)
            flat = (blocks * coded[1][:, None]).reshape(-1)
        return flat[: math.prod(shape)].reshape(shape).astype(dtype)
