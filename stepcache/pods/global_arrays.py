"""Places values on devices, also on those of several processes of a pod: global arrays."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax
import numpy as np
from jax.sharding import Sharding, SingleDeviceSharding

from stepcache import jaxcompat


def spans_processes(sharding: Sharding | None) -> bool:
    """Returns whether a device of a sharding belongs to another process."""
    return sharding is not None and not sharding.is_fully_addressable


def placed(value: Any, sharding: Sharding | None, *, may_alias: bool | None = None) -> jax.Array:
    """Does what `jax.device_put` does; in a pod, each process passes the whole value."""
    if isinstance(value, np.ndarray) and may_alias is not False and _is_numeric(value.dtype):
        with jaxcompat.explicit_transfer():  # In a tenth of the time that `jax.device_put` takes.
            return global_array(value, sharding)
    is_global = isinstance(value, jax.Array) and not value.is_fully_addressable
    if is_global and is_key(value):  # Which `jax.device_put` does not take.
        data = placed(jax.random.key_data(value), sharding, may_alias=may_alias)
        return jax.random.wrap_key_data(data, impl=jax.random.key_impl(value))
    if is_global or not spans_processes(sharding):
        return jax.device_put(value, sharding, may_alias=may_alias)
    return global_array(value, sharding)


def global_array(
    value: Any, sharding: Sharding | None, shape: tuple[int, ...] | None = None
) -> jax.Array:
    """Returns an array, perhaps over devices of several processes, made of this process's part.

    Compares nothing between processes and gathers nothing, as `jax.device_put` would.

    Args:
        value: a numpy array, or one on devices of this process.
        sharding: of the array; None for an uncommitted one on JAX's default device.
        shape: of the array; by default the value's. Along dimensions where it differs, the value is
            this process's part.
    """
    shape = np.shape(value) if shape is None else shape
    if is_key(value):
        data = np.asarray(jax.random.key_data(value))
        data = global_array(data, sharding, (*shape, *data.shape[value.ndim :]))
        return jax.random.wrap_key_data(data, impl=jax.random.key_impl(value))
    part = np.asarray(value)
    dtype = jax.dtypes.canonicalize_dtype(part.dtype)
    at = sharding or SingleDeviceSharding(jaxcompat.default_device())
    make = _maker(at, shape, part.shape, dtype, committed=sharding is not None)
    return make(part if part.dtype == dtype else part.astype(dtype))


@functools.lru_cache(maxsize=4096)
def _maker(
    sharding: Sharding,
    shape: tuple[int, ...],
    part_shape: tuple[int, ...],
    dtype: np.dtype,
    committed: bool,
) -> Callable[[np.ndarray], jax.Array]:
    """Returns a function that makes an array of this process's part.

    Computes once, and not at each call as `jax.make_array_from_process_local_data` does, which
    device gets which slice of the part.
    """
    make = jaxcompat.maker_of_arrays(sharding, shape, dtype, committed=committed)
    indices: Any = sharding.addressable_devices_indices_map(shape).values()
    if sharding.is_fully_replicated:
        return lambda part: make([part] * len(indices))
    slices = []  # Of the part, by dimension and device.
    for n, size in enumerate(sharding.shard_shape(shape)):
        given = [index[n] for index in indices]
        if part_shape[n] != shape[n]:
            starts = sorted({each.start or 0 for each in given})
            if len(starts) * size != part_shape[n]:  # Which JAX will say.
                return lambda part: jax.make_array_from_process_local_data(sharding, part, shape)
            numbers = [starts.index(each.start or 0) for each in given]
            given = [slice(number * size, (number + 1) * size) for number in numbers]
        slices.append(given)
    keys = [*zip(*slices, strict=True)]
    return lambda part: make([part[key] for key in keys])


@functools.cache
def _is_numeric(dtype: np.dtype) -> bool:
    """Returns whether JAX has arrays of a dtype, other than those of float0."""
    return dtype.isnative and (dtype == np.bool_ or jax.numpy.issubdtype(dtype, np.number))


def is_key(value: Any) -> bool:
    """Returns whether a value is an array of PRNG keys, or a template for one."""
    return jax.numpy.issubdtype(getattr(value, "dtype", float), jax.dtypes.prng_key)


def pending_ranks() -> set[int]:
    """Returns the processes whose devices hold a part of an array that is still being computed;
    this one, too.
    """
    return {
        device.process_index
        for array in jax.live_arrays()
        if not (array.is_deleted() or array.is_ready())
        for device in array.sharding.device_set
    }
