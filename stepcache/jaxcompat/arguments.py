"""What a call is given: which arguments are static, and what JAX sees in the leaves."""

from __future__ import annotations

import contextlib
import functools
import inspect
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import jax
import jax.core
import numpy as np
from jax.sharding import NamedSharding, Sharding, SingleDeviceSharding

from stepcache.jaxcompat.private import PRIVATE_API

if PRIVATE_API:
    from jax._src import array as array_lib
    from jax._src import config, core, tree_util
    from jax._src.interpreters import pxla

Tracer = jax.core.Tracer
PINNED_HOST = "pinned_host"
"""The memory of the host that JAX's programs know, as `jax.memory.Space.Host`."""


class ArgumentRoles(NamedTuple):
    """Static and donated arguments, by number and by name, as `jax.jit` resolves its options."""

    static_argnums: tuple[int, ...]
    static_argnames: tuple[str, ...]
    donate_argnums: tuple[int, ...] = ()
    donate_argnames: tuple[str, ...] = ()


def argument_roles(jitted: Any, fun: Callable, options: dict[str, Any]) -> ArgumentRoles:
    """The roles of the arguments of `jitted`, which is `jax.jit(fun, **options)`."""
    if PRIVATE_API:
        info = jitted._jit_info
        return ArgumentRoles(*(tuple(getattr(info, name)) for name in ArgumentRoles._fields))
    try:
        parameters = list(inspect.signature(fun).parameters.values())
    except (TypeError, ValueError):
        parameters = []
    positional = [p.name for p in parameters if p.kind is p.POSITIONAL_OR_KEYWORD]
    count = max(1, len(positional))

    def resolved(numbers: tuple | None, names: tuple | None) -> tuple[tuple, tuple]:
        if numbers is None and names is not None:
            numbers = tuple(i for i, name in enumerate(positional) if name in names)
        elif names is None and numbers is not None:
            names = tuple(name for i, name in enumerate(positional) if i in numbers)
        return tuple(i % count if i < 0 and parameters else i for i in numbers or ()), names or ()

    given = [_as_tuple(options.get(name)) for name in ArgumentRoles._fields]
    return ArgumentRoles(*resolved(*given[:2]), *resolved(*given[2:]))


def _as_tuple(value: Any) -> tuple | None:
    if value is None or isinstance(value, tuple):
        return value
    return tuple(value) if isinstance(value, Iterable) and not isinstance(value, str) else (value,)


def abstract(x: Any) -> Any:
    """The abstract value of an argument leaf.

    Raises:
        TypeError: `x` is no array, scalar or `ShapeDtypeStruct`.
    """
    if PRIVATE_API:
        return core.shaped_abstractify(x)
    if isinstance(x, jax.ShapeDtypeStruct):
        dtype = jax.dtypes.canonicalize_dtype(x.dtype, allow_extended_dtype=True)
        return jax.core.ShapedArray(x.shape, dtype, weak_type=x.weak_type)
    return jax.typeof(x)


def committed(array: jax.Array, is_committed: bool = True) -> jax.Array:
    """The same array, in the same memory, committed to its device or free to follow others.

    JAX commits whatever has been in a memory that was named. There is no public way back, and
    without the private one the array is returned as it is.
    """
    if not PRIVATE_API or not isinstance(array, jax.Array) or array.committed == is_committed:
        return array
    if jax.numpy.issubdtype(array.dtype, jax.dtypes.prng_key):
        data = committed(jax.random.key_data(array), is_committed)
        return jax.random.wrap_key_data(data, impl=jax.random.key_impl(array))
    parts = [shard.data for shard in array.addressable_shards]
    return array_lib.ArrayImpl(array.aval, array.sharding, parts, committed=is_committed)


def default_device() -> Any:
    """The device that JAX chooses for what nobody has placed."""
    chosen = jax.config.jax_default_device  # type: ignore[attr-defined]
    if isinstance(chosen, str):
        return jax.local_devices(backend=chosen)[0]
    return chosen or jax.local_devices()[0]


class _StandIn(jax.ShapeDtypeStruct):
    """Stands for an array that has a place without being committed to it, or in the host's memory.

    JAX takes a `jax.ShapeDtypeStruct` with a sharding for a committed array, and, unless that is a
    `NamedSharding`, for one in the memory of the device.
    """

    __slots__ = ("_committed",)


if PRIVATE_API:

    def _abstract(stand_in: _StandIn) -> Any:
        aval = core.ShapedArray(stand_in.shape, stand_in.dtype, stand_in.weak_type)
        is_there = getattr(stand_in.sharding, "memory_kind", None) == PINNED_HOST
        return aval.update(memory_space=core.MemorySpace.Host) if is_there else aval

    core.pytype_aval_mappings[_StandIn] = _abstract


def stand_in(
    shape: tuple[int, ...],
    dtype: Any,
    weak_type: bool,
    sharding: Sharding | None,
    *,
    on_host: bool = False,
) -> jax.ShapeDtypeStruct:
    """A `jax.ShapeDtypeStruct` for an array, uncommitted without a sharding.

    Args:
        shape, dtype, weak_type, sharding: of the array.
        on_host: whether it lies in the host's memory, where no sharding says so.
    """
    is_there = on_host or getattr(sharding, "memory_kind", None) == PINNED_HOST
    if not is_there or isinstance(sharding, NamedSharding):
        return jax.ShapeDtypeStruct(shape, dtype, sharding=sharding, weak_type=weak_type)
    there = sharding or SingleDeviceSharding(default_device(), memory_kind=PINNED_HOST)
    made = _StandIn(shape, dtype, sharding=there, weak_type=weak_type)
    object.__setattr__(made, "_committed", sharding is not None)
    return made


def is_committed(stand_in: jax.ShapeDtypeStruct) -> bool:
    """Whether JAX takes a stand-in for an array that is committed to its devices."""
    return stand_in.sharding is not None and getattr(stand_in, "_committed", True)


def is_on_host(x: Any) -> bool:
    """Whether an argument leaf lies in the memory of the host that JAX's programs know."""
    return getattr(getattr(x, "sharding", None), "memory_kind", None) == PINNED_HOST


def maker_of_arrays(
    sharding: Sharding, shape: tuple[int, ...], dtype: Any, *, committed: bool
) -> Callable[[Sequence[np.ndarray]], jax.Array]:
    """A function that makes an array of its shards on the devices of this process.

    It takes them in the order of `sharding.addressable_devices_indices_map(shape)`. A CPU device
    may use the memory of a shard as it is. `jax.transfer_guard` judges it as an implicit transfer.
    """
    devices = list(sharding.addressable_devices_indices_map(shape))
    if not PRIVATE_API:
        if not committed:
            return lambda shards: jax.device_put(shards[0])
        kind = sharding.memory_kind
        places = [SingleDeviceSharding(each, memory_kind=kind) for each in devices]
        return lambda shards: jax.make_array_from_single_device_arrays(
            shape, sharding, jax.device_put(list(shards), places)
        )
    aval = core.update_aval_with_sharding(jax.core.ShapedArray(shape, dtype), sharding)
    return lambda shards: pxla.batched_device_put(aval, sharding, shards, devices, committed)


def explicit_transfer() -> contextlib.AbstractContextManager[None]:
    """A context in which `jax.transfer_guard` judges transfers as those of `jax.device_put`."""
    return config.explicit_device_put_scope() if PRIVATE_API else contextlib.nullcontext()


@functools.lru_cache(maxsize=4096)
def _is_default_layout(layout: Any, sharding: Any, aval: Any) -> bool:
    if PRIVATE_API:
        return pxla.is_default_layout(layout, sharding, aval)
    return layout.major_to_minor == tuple(range(len(aval.shape))) and not layout.tiling


def custom_layout(x: Any, aval: Any) -> Any:
    """The layout of an array or `ShapeDtypeStruct` on its devices; None for the default one."""
    array_format = getattr(x, "format", None)
    layout = getattr(array_format, "layout", None)
    if layout is None or x.sharding is None:
        return None
    return None if _is_default_layout(layout, x.sharding, aval) else layout


def tree_differences(before: Any, after: Any) -> list[tuple[tuple, str, str, str]]:
    """Key path, both sides and an explanation for each place where two tree structures differ."""
    if not PRIVATE_API:
        return [((), str(before), str(after), "the structures differ")]
    return list(tree_util.equality_errors_pytreedef(before, after))


def key_impl(like: Any) -> Any:
    """The implementation of random keys, given some, or what has their shape and dtype."""
    impl: list[Any] = []
    keys = jax.ShapeDtypeStruct(like.shape, like.dtype)
    jax.eval_shape(lambda keys: impl.append(jax.random.key_impl(keys)), keys)
    return impl[0]
