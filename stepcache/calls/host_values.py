"""Compares values that must be the same on all processes of a pod, by digests."""

from __future__ import annotations

import hashlib
import zlib
from collections.abc import Callable, Iterable, Mapping, Sequence

import jax
import numpy as np

from stepcache.calls.step_spec import Request
from stepcache.distributed.agreement import Round, ranks_in, sides_of
from stepcache.distributed.global_arrays import spans_processes
from stepcache.distributed.peers import Peers
from stepcache.distributed.replicas import SEVERAL, Groups, Part, is_local, replicas_of, token_of
from stepcache.errors import AgreementError
from stepcache.events import Change
from stepcache.storage import plain
from stepcache.units import counted, readable_ranks

_MAX_SHOWN = 12

Differing = dict[str, list[list[list[int]]]]
"""By the name of a group of ranks that should hold the same: the ranks, as spans, that do."""


def replicated_host_values(request: Request) -> dict[str, str] | None:
    """Returns tokens of the host values that every process passes whole, by path.

    None for a call with `jax.ShapeDtypeStruct` in the place of values, as for `step.warm`.
    """
    call, tokens = request.call, {}
    rows = zip(call.leaves, call.paths, request.placed, request.asked, strict=True)
    for value, path, placed, asked in rows:
        sharding = placed.sharding if placed is not None else asked
        if not spans_processes(sharding) or not is_local(value):
            continue
        if isinstance(value, jax.ShapeDtypeStruct):
            return None
        if placed is None or np.shape(value) == placed.shape:
            tokens[path.text] = token_of(value)
    return tokens


def digest_of(tokens: Mapping[str, str] | None) -> str:
    """Returns a digest of values, by their tokens; empty if they are unknown."""
    if tokens is None:
        return ""
    return hashlib.sha256(repr(sorted(tokens.items())).encode()).hexdigest()[:16]


def group_name(ranks: Sequence[int]) -> str:
    """Returns a short name for a group of ranks."""
    return hashlib.sha256(repr(list(ranks)).encode()).hexdigest()[:16]


def differing(digests: Mapping[int, Mapping[str, str]]) -> Differing:
    """Returns the groups whose ranks hold different values; by the digests of each rank."""
    names = sorted({name for found in digests.values() for name in found})
    sides = {
        name: sides_of({rank: found[name] for rank, found in digests.items() if name in found})
        for name in names
    }
    several = {name: each for name, each in sides.items() if len(each) > 1}
    return dict(sorted(several.items(), key=lambda each: each[1]))


def compare_call_values(name: str, request: Request, peers: Peers) -> None:
    """Compares the replicated host values of a call with those of the other processes.

    Raises:
        AgreementError: they differ, or a process did not take part in time.
        RankLostError: a process was lost.
    """
    values = {tuple(peers.ranks): replicated_host_values(request) or {}}
    with peers.round(name, "its first call since it was warmed") as round:
        compare(round, f"before {name}", values)


def compare(round: Round, about: str, groups: Groups, found: Differing | None = None) -> None:
    """Compares values with those of the other processes.

    Args:
        round: an agreement round of all processes.
        about: when the values are compared, for messages.
        groups: the values of this process.
        found: which values differ, if the processes have compared their digests already.

    Raises:
        AgreementError: values differ; it names their paths and the ranks.
    """
    named = {group_name(ranks): tokens for ranks, tokens in groups.items()}
    if found is None:
        own = {name: digest_of(tokens) for name, tokens in named.items()}
        found = plain.unpack(round.merge("values", plain.pack(own), _merge_digests))
    if found:
        _explain(round, about, named, found)


def _merge_digests(contributions: dict[int, bytes]) -> bytes:
    return plain.pack(differing({rank: plain.unpack(x) for rank, x in contributions.items()}))


def check_devices(groups: Groups) -> None:
    """Checks that the devices of this process hold the same values.

    Raises:
        AgreementError: they do not.
    """
    lines = [
        f"{path}: {token}"
        for tokens in groups.values()
        for path, token in tokens.items()
        if token.startswith(SEVERAL)
    ]
    if lines:
        raise AgreementError(
            f"replicated values differ between the devices of rank {jax.process_index()}:\n  "
            + "\n  ".join(_shown(lines)),
            hint="jax.shard_map(…, check_vma=False) does not check what its out_specs replicate",
        )


def check_replicas(
    parts: Callable[[], Iterable[Part]], peers: Peers | None, about: str, *, summed: bool = False
) -> None:
    """Checks that all processes and devices hold the same replicas of values.

    Args:
        parts: returns the values.
        peers: the processes; None for this one alone.
        about: when the values are compared, for messages.
        summed: compare checksums first, and values only where those differ.

    Raises:
        AgreementError: values differ; it names their paths and the ranks.
    """
    ranks = tuple(peers.ranks) if peers is not None else (jax.process_index(),)

    def compare_with_peers(groups: Groups) -> None:
        if peers is not None:
            with peers.round("check_replicas") as round:
                compare(round, about, groups)

    groups = replicas_of(parts(), ranks, summed=summed)
    for check in (compare_with_peers, check_devices):
        try:
            check(groups)
            continue
        except AgreementError as error:
            differing = error
        if summed:  # Raises an error that shows the values.
            check(replicas_of(parts(), ranks))
        raise differing


def _shown(lines: list[str]) -> list[str]:
    more = len(lines) - _MAX_SHOWN
    return [*lines[:_MAX_SHOWN], f"… and {counted(more, 'more value')}"] if more > 0 else lines


def _explain(
    round: Round, about: str, named: Mapping[str, dict[str, str]], found: Differing
) -> None:
    """Compares path by path, between one rank of each side.

    Raises:
        AgreementError: values of the same path differ.
    """
    differing = {name: [ranks_in(spans) for spans in sides] for name, sides in found.items()}
    own = {
        name: named[name]
        for name, sides in differing.items()
        if round.rank in [ranks[0] for ranks in sides]
    }
    received = round.gather("differing values", zlib.compress(plain.pack(own), 1))
    speakers = {ranks[0] for sides in differing.values() for ranks in sides}
    tokens = {each: plain.unpack(zlib.decompress(received[each])) for each in speakers}
    changes, lines, all_sides = [], [], []
    for name, (most, *others) in differing.items():
        usual = tokens[most[0]][name]
        for ranks in others:
            other = tokens[ranks[0]][name]
            # A path that one of them does not hold is no difference.
            paths = [path for path in usual if other.get(path, usual[path]) != usual[path]]
            for path in paths:
                changes.append(Change("value", path, usual[path], other[path]))
                lines.append(
                    f"{path}: {readable_ranks(ranks)} {other[path]}; "
                    f"{readable_ranks(most)} {usual[path]}"
                )
            if paths:
                all_sides += [tuple(most), tuple(ranks)]
    if changes:
        raise AgreementError(
            f"replicated values differ between the ranks, {about}:\n  "
            + "\n  ".join(_shown(lines)),
            changes,
            tuple(dict.fromkeys(all_sides)),
            hint="make them from the same seed, checkpoint and settings on all processes; pass "
            "values that differ between processes in a batch",
        )
