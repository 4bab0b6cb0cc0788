"""Pads arrays of a tree along one axis, and cuts them."""

from __future__ import annotations

import math
from typing import Any

import jax
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from stepcache import jaxcompat
from stepcache.jaxcompat import Tracer
from stepcache.sharding import axes_of, is_in_type
from stepcache.variables.packing import is_key_type


def is_array(leaf: Any) -> bool:
    return hasattr(leaf, "shape") and hasattr(leaf, "dtype")


def with_size(leaf: Any, axis: int, size: int) -> jax.ShapeDtypeStruct:
    """Returns the shape of an array with another size of an axis."""
    shape = (*leaf.shape[:axis], size, *leaf.shape[axis + 1 :])
    sharding = leaf.sharding if isinstance(leaf, jax.ShapeDtypeStruct) else None
    dtype = jax.dtypes.canonicalize_dtype(leaf.dtype, allow_extended_dtype=True)
    return jax.ShapeDtypeStruct(shape, dtype, sharding=sharding)


def filled(leaf: Any, axis: int, padded: int, row: int) -> Any:
    """Appends copies of one of its rows to an array; zeros if it has none."""
    size = leaf.shape[axis]
    if size == padded or isinstance(leaf, np.ma.MaskedArray):  # JAX does not take these.
        return leaf
    if isinstance(leaf, jax.ShapeDtypeStruct):
        return with_size(leaf, axis, padded)
    if not size:
        zeros = jax.lax.full if is_key_type(leaf.dtype) else np.full
        return zeros(with_size(leaf, axis, padded).shape, 0, leaf.dtype)
    row %= size
    if not isinstance(leaf, np.ndarray) and not _is_numpys(leaf):
        rows = np.arange(padded)
        return _rows_of(leaf, axis, np.where(rows < size, rows, row), padded)
    leaf = np.asarray(leaf)
    shape = (*leaf.shape[:axis], padded - size, *leaf.shape[axis + 1 :])
    added = np.broadcast_to(np.take(leaf, [row], axis=axis), shape)
    return np.concatenate([leaf, added], axis=axis)


def kept(leaf: Any, axis: int, size: int) -> Any:
    """Returns the first rows of an array."""
    if isinstance(leaf, jax.ShapeDtypeStruct):
        return with_size(leaf, axis, size)
    if _is_numpys(leaf):
        return jax.device_put(np.asarray(leaf)[(slice(None),) * axis + (slice(size),)])
    return _rows_of(leaf, axis, slice(size), size)


def _rows_of(leaf: Any, axis: int, rows: Any, size: int) -> Any:
    """Returns so many rows. On Explicit axes of a mesh they are split as they were, if possible."""
    at = (slice(None),) * axis + (rows,)
    if not isinstance(leaf, jax.Array) or not is_in_type(sharding := jax.typeof(leaf).sharding):
        return leaf[at]
    spec = list(sharding.spec)
    if size % math.prod(sharding.mesh.shape[name] for name in axes_of(spec[axis])):
        spec[axis] = None
    out = NamedSharding(sharding.mesh, PartitionSpec(*spec))
    of_array: Any = None if isinstance(leaf, Tracer) else leaf.sharding
    with jaxcompat.tracing_context(of_array and of_array.mesh):
        return jax.sharding.auto_axes(lambda leaf: leaf[at], out_sharding=out)(leaf)


def _is_numpys(leaf: Any) -> bool:
    """Returns whether numpy can view an array without a copy, and steps accept numpy's for it.

    Such arrays are padded and cut by numpy: JAX would compile a program for each size.
    """
    return (
        isinstance(leaf, jax.Array)
        and not isinstance(leaf, Tracer)
        and not is_key_type(leaf.dtype)
        and not leaf.committed
        and next(iter(leaf.devices())).platform == "cpu"
    )
