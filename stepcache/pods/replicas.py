"""Compares the replicas that processes and devices hold of values.

A token is a short text about a value. Processes exchange a digest of their tokens; only where the
digests differ, one process of each side sends its tokens.
"""

from __future__ import annotations

import hashlib
from collections import defaultdict
from collections.abc import Iterable
from typing import Any

import jax
import numpy as np

from stepcache.errors import AgreementError
from stepcache.events import Change
from stepcache.pods.global_arrays import is_key, spans_processes
from stepcache.pods.rounds import Peers, Round, digest_of
from stepcache.units import shortened

Groups = dict[tuple[int, ...], dict[str, str]]
"""Tokens of the values of this process, by path, for each group of ranks that hold replicas."""

Part = tuple[str, Any, slice | None]
"""Path and array of a leaf, and its slice if it is a part of a packed array."""

_BLOCKS, _BLOCK_BYTES = 16, 4096
_SHOWN, _MAX_LINES = 3, 12


def token_of(value: Any, *, whole: bool = False) -> str:
    """Returns a text that is equal for equal arrays or numbers, and shows their first values.

    By default, 16 blocks of 4 KiB are read of an array that is larger than 64 KiB: values of
    another seed, or of another checkpoint, differ everywhere. `whole` reads all of it.
    """
    array = np.asarray(jax.random.key_data(value) if is_key(value) else value)
    if array.size == 1:
        return str(array.item())
    data = np.ascontiguousarray(array).reshape(-1).view(np.uint8)
    hasher = hashlib.sha256()
    if whole or data.size <= _BLOCKS * _BLOCK_BYTES:
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


def compare(round: Round, about: str, groups: Groups) -> None:
    """Compares the values of this process with those of all others, in a round.

    Raises `AgreementError` with the paths and ranks of values that differ, `about` the time of it.
    """

    def compared(usual: dict[str, str], other: dict[str, str]) -> list[Change]:
        # A path that one of them does not hold is no difference.
        paths = [path for path in usual if other.get(path, usual[path]) != usual[path]]
        return [Change("value", path, usual[path], other[path]) for path in paths]

    tokens = {path: token for each in groups.values() for path, token in each.items()}
    digests = {digest_of(ranks): digest_of(sorted(groups[ranks].items())) for ranks in groups}
    what = f"replicated values differ between the ranks, {about}:"
    hint = "make them from the same seed, checkpoint and settings on all processes; pass values "
    hint += "that differ between processes in a batch"
    round.raise_differing(what, round.compare("values", digests).values(), tokens, compared, hint)


def check_replicas(leaves: Iterable[Part], peers: Peers | None, about: str) -> None:
    """Checks that all processes and devices hold the same replicas of values.

    Without `peers`, those are the devices of this process. Raises as `compare`.
    """
    ranks = peers.ranks if peers is not None else (jax.process_index(),)
    groups: Groups = {}
    lines = [f"replicated values differ between the devices of rank {jax.process_index()}:"]
    for path, value, part in leaves:
        if not isinstance(value, jax.Array):
            groups.setdefault(ranks, {})[path] = token_of(value, whole=True)
            continue
        array = jax.random.key_data(value) if is_key(value) else value
        holders, tokens = defaultdict[str, set[int]](set), defaultdict[str, set[str]](set)
        for shard in array.global_shards:
            index = _index_text(shard.index, array.shape)
            holders[index].add(shard.device.process_index)
            if shard.data is not None:  # It is on a device of this process.
                tokens[index].add(token_of(np.asarray(shard.data)[part or ...], whole=True))
        for index, copies in tokens.items():
            token = " and ".join(sorted(copies))
            if len(copies) > 1:
                token = f"its devices hold {token}"
                lines.append(f"{path}{index}: {token}")
            group = tuple(sorted(holders[index])) if spans_processes(array.sharding) else ranks
            groups.setdefault(group, {})[path + index] = token
    if peers is not None:
        with peers.round("check_replicas") as round:
            compare(round, about, groups)
    if len(lines) > 1:
        hint = "jax.shard_map(…, check_vma=False) does not check what its out_specs replicate"
        raise AgreementError("\n  ".join(shortened(lines, 1 + _MAX_LINES)), hint=hint)


def _index_text(index: tuple[slice, ...], shape: tuple[int, ...]) -> str:
    """Returns an index as text; empty for the whole array."""
    bounds = [each.indices(size)[:2] for each, size in zip(index, shape, strict=True)]
    if all(bound == (0, size) for bound, size in zip(bounds, shape, strict=True)):
        return ""
    return f"[{', '.join(f'{start}:{stop}' for start, stop in bounds)}]"
