"""Tokens of values: short texts by which processes compare their replicas of a value."""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Callable, Iterable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from stepcache.distributed.global_arrays import is_key, spans_processes

Groups = dict[tuple[int, ...], dict[str, str]]
"""Tokens of the values of this process, by path, for each group of ranks that hold replicas."""

Part = tuple[str, Any, slice | None]
"""Path and array of a leaf, and its slice if it is a part of a packed array."""

SEVERAL = "its devices hold "
"""The prefix of a token of replicas that differ between the devices of one process."""
_READ_WHOLE_BYTES = 1 << 16
_BLOCKS, _BLOCK_BYTES = 16, 4096
_SHOWN = 3


def token_of(value: Any, *, whole: bool = False) -> str:
    """Returns a text that is equal for equal values, and shows the first of them.

    Args:
        value: an array, in the memory of this process, or a number.
        whole: read all of it. By default, of one larger than 64 KiB, 16 blocks of 4 KiB are read:
            values of another seed, or of another checkpoint, differ everywhere.
    """
    array = np.asarray(jax.random.key_data(value) if is_key(value) else value)
    if array.size == 1:
        return str(array.item())
    data = np.ascontiguousarray(array).reshape(-1).view(np.uint8)
    hasher = hashlib.sha256()
    if whole or data.size <= _READ_WHOLE_BYTES:
        hasher.update(data.data)
    else:
        for start in np.linspace(0, data.size - _BLOCK_BYTES, _BLOCKS).astype(int):
            hasher.update(data[start : start + _BLOCK_BYTES].data)
    shown = " ".join(map(str, array.reshape(-1)[:_SHOWN]))
    more = " …" if array.size > _SHOWN else ""
    return f"[{shown}{more}] (digest {hasher.hexdigest()[:12]})"


def is_local(value: Any) -> bool:
    """Returns whether a value belongs to this process alone: a number, or a local array."""
    return not isinstance(value, jax.Array) or value.is_fully_addressable


def replicas_of(leaves: Iterable[Part], ranks: tuple[int, ...], *, summed: bool = False) -> Groups:
    """Returns the tokens of the values of this process, by the ranks that hold replicas.

    Args:
        leaves: the values.
        ranks: the processes that hold replicas of local arrays.
        summed: of an array above 64 KiB, read only a checksum that each device computes of its
            shard; of a packed array, one of all its leaves.
    """
    groups: Groups = {}
    read: dict[tuple[int, str], list[np.ndarray]] = {}
    if summed:
        leaves = _checksums(leaves)
    for path, value, part in leaves:
        if not isinstance(value, jax.Array) or (is_local(value) and len(value.devices()) == 1):
            groups.setdefault(ranks, {})[path] = token_of(value, whole=True)
            continue
        array = jax.random.key_data(value) if is_key(value) else value
        holders: dict[str, set[int]] = {}
        for device, index in array.sharding.devices_indices_map(array.shape).items():
            holders.setdefault(_index_text(index, array.shape), set()).add(device.process_index)
        shards: dict[str, list[Any]] = {}
        for shard in array.addressable_shards:
            shards.setdefault(_index_text(shard.index, array.shape), []).append(shard.data)
        for index, held in shards.items():
            key = (id(value), index)
            copies = read.get(key) or [np.asarray(each) for each in held]
            if part is not None:
                read[key] = copies
            tokens = sorted({token_of(each[part or ...], whole=True) for each in copies})
            several = SEVERAL if len(tokens) > 1 else ""
            group = tuple(sorted(holders[index])) if spans_processes(array.sharding) else ranks
            groups.setdefault(group, {})[path + index] = several + " and ".join(tokens)
    return groups


def _checksums(
    leaves: Iterable[Part],
) -> list[Part]:
    """Replaces large leaves on a mesh by arrays of checksums, one of each device's shard."""
    found: dict[int, Part] = {}
    for path, value, part in leaves:
        if _is_summed(value):
            if id(value) not in found:
                found[id(value)] = path, _summed(value.sharding, value.ndim)(value), None
        else:
            found[len(found)] = path, value, part
    return list(found.values())


def _is_summed(value: Any) -> bool:
    """Returns whether a checksum by the devices is cheaper than to read the value."""
    return (
        isinstance(value, jax.Array)
        and isinstance(value.sharding, NamedSharding)
        and not is_key(value)
        and value.nbytes > _READ_WHOLE_BYTES
    )


@functools.lru_cache(maxsize=1024)
def _summed(sharding: NamedSharding, dimensions: int) -> Callable[[jax.Array], jax.Array]:
    """Returns a program in which each device sums up its shard, without communication."""
    spec = PartitionSpec(*sharding.spec, *(None,) * (dimensions - len(sharding.spec)))
    apart = jax.shard_map(
        lambda shard: _checksum(shard).reshape((1,) * dimensions),
        mesh=sharding.mesh,
        in_specs=spec,
        out_specs=spec,
        check_vma=False,
    )
    return jax.jit(apart)


def _checksum(x: jax.Array) -> jax.Array:
    """Returns a sum of all words, each times an odd number, which changes with any of them."""
    if jnp.issubdtype(x.dtype, jnp.complexfloating):
        x = jnp.stack([x.real, x.imag])
    bits = jnp.iinfo if jnp.issubdtype(x.dtype, jnp.integer) else jnp.finfo
    if x.dtype == bool or bits(x.dtype).bits < 8:
        x = x.astype(jnp.float32)
    words = jax.lax.bitcast_convert_type(x, jnp.dtype(f"uint{min(8 * x.dtype.itemsize, 32)}"))
    words = words.reshape(-1).astype(jnp.uint32)
    factors = jax.lax.iota(jnp.uint32, words.size) * jnp.uint32(2654435761) | jnp.uint32(1)
    return jnp.sum(words * factors, dtype=jnp.uint32)


def _index_text(index: tuple[slice, ...], shape: tuple[int, ...]) -> str:
    """Returns an index as text; empty for the whole array."""
    bounds = [each.indices(size)[:2] for each, size in zip(index, shape, strict=True)]
    if all(bound == (0, size) for bound, size in zip(bounds, shape, strict=True)):
        return ""
    return f"[{', '.join(f'{start}:{stop}' for start, stop in bounds)}]"
