"""Tokens of values: short texts by which processes compare what each of them holds of one value."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from typing import Any

import jax
import numpy as np

from stepcache.spanning import is_key, spans_processes

Groups = dict[tuple[int, ...], dict[str, str]]
"""By the processes that hold the same: what this one of them holds, token by path."""

SEVERAL = "its devices hold "
"""How the token of what differs between the devices of one process begins."""
_READ_WHOLE_BYTES = 1 << 16
_BLOCKS, _BLOCK_BYTES = 16, 4096
_SHOWN = 3


def token_of(value: Any, *, whole: bool = False) -> str:
    """A text that is equal for equal values, and shows the beginning of one.

    Args:
        value: an array, in the memory of this process, or a number.
        whole: read all of it. Else, of one larger than 64 KiB, 16 blocks of 4 KiB, evenly spread:
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


def is_own(value: Any) -> bool:
    """Whether a value is in the memory of this process alone: a number, or a local array."""
    return not isinstance(value, jax.Array) or value.is_fully_addressable


def replicas_of(leaves: Iterable[tuple[str, Any, slice | None]], ranks: tuple[int, ...]) -> Groups:
    """What this process holds, and others hold too, read whole.

    Args:
        leaves: path and array, and where only a part of a flat array is meant, which.
        ranks: the processes that hold the same of what is no array over several of them.
    """
    groups: Groups = {}
    read: dict[tuple[int, str], list[np.ndarray]] = {}
    for path, value, part in leaves:
        if not isinstance(value, jax.Array) or (is_own(value) and len(value.devices()) == 1):
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


def _index_text(index: tuple[slice, ...], shape: tuple[int, ...]) -> str:
    """Which part of an array, for people; empty for the whole."""
    bounds = [each.indices(size)[:2] for each, size in zip(index, shape, strict=True)]
    if all(bound == (0, size) for bound, size in zip(bounds, shape, strict=True)):
        return ""
    return f"[{', '.join(f'{start}:{stop}' for start, stop in bounds)}]"
