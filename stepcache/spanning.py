"""Arrays that span the processes of a pod, made of what each process holds."""

from __future__ import annotations

from typing import Any

import jax
import numpy as np
from jax.sharding import Sharding


def spans_processes(sharding: Sharding | None) -> bool:
    """Whether some device of a sharding belongs to another process."""
    return sharding is not None and not sharding.is_fully_addressable


def part_of(sharding: Sharding | None, shape: tuple[int, ...]) -> tuple[int, ...]:
    """The shape of this process's part of an array; empty where it has the whole."""
    if sharding is None or sharding.is_fully_replicated:
        return ()
    try:
        shard = sharding.shard_shape(shape)
    except ValueError:  # It does not divide: JAX will say so.
        return ()
    indices = list(sharding.addressable_devices_indices_map(shape).values())
    starts = (
        {index[dimension].start for index in indices if index is not None}
        for dimension in range(len(shape))
    )
    part = tuple(len(each) * size for each, size in zip(starts, shard, strict=True))
    return part if part != shape else ()


def placed(value: Any, sharding: Sharding | None, *, may_alias: bool | None = None) -> jax.Array:
    """As `jax.device_put`, also onto devices of several processes, each of which has the value."""
    if not spans_processes(sharding):
        return jax.device_put(value, sharding, may_alias=may_alias)
    assert sharding is not None
    if is_key(value):
        data = placed(jax.random.key_data(value), sharding, may_alias=may_alias)
        return jax.random.wrap_key_data(data, impl=jax.random.key_impl(value))
    if isinstance(value, jax.Array) and not value.is_fully_addressable:
        return jax.device_put(value, sharding, may_alias=may_alias)
    return spanning(value, sharding)


def spanning(value: Any, sharding: Sharding, shape: tuple[int, ...] | None = None) -> jax.Array:
    """An array over devices of several processes, of this process's part or of the whole.

    Nothing is compared between processes, and nothing gathered: `jax.device_put` would do both.

    Args:
        value: a numpy array, or one on devices of this process.
        sharding: where the array belongs.
        shape: of the whole; by default the value's. Along a dimension in which it differs from the
            value's, the value is this process's part.
    """
    whole = np.shape(value) if shape is None else shape
    if is_key(value):
        data = np.asarray(jax.random.key_data(value))
        data = spanning(data, sharding, (*whole, *data.shape[len(whole) :]))
        return jax.random.wrap_key_data(data, impl=jax.random.key_impl(value))
    return jax.make_array_from_process_local_data(sharding, np.asarray(value), whole)


def is_key(value: Any) -> bool:
    """Whether a value is an array of random keys."""
    return isinstance(value, jax.Array) and jax.numpy.issubdtype(value.dtype, jax.dtypes.prng_key)
