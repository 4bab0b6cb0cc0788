"""Values that the processes of a pod hold alike, compared: each says a digest of them."""

from __future__ import annotations

import hashlib
import zlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Protocol

import jax
import numpy as np

from stepcache.calls.step_spec import Request
from stepcache.distributed.global_arrays import spans_processes
from stepcache.distributed.peers import Peers
from stepcache.distributed.replicas import SEVERAL, Groups, Part, is_own, replicas_of, token_of
from stepcache.errors import AgreementError
from stepcache.events import Change
from stepcache.jaxcompat.coordination import Brief
from stepcache.storage import plain
from stepcache.units import counted, readable_ranks

_MAX_SHOWN = 12
MAX_SIDES = 8
"""How many differing processes tell what they hold."""

Differing = dict[str, list[list[int]]]
"""By the name of a group of processes: those of it that hold the same, most of them first."""


class Hear(Protocol):
    """As `Meeting.hear`."""

    def __call__(
        self, topic: str, said: bytes, *, brief: Brief | None = None
    ) -> Mapping[int, bytes]: ...


def handed_in_whole(request: Request) -> dict[str, str] | None:
    """The host values of a call that every process hands in whole: token by path.

    None for a call that some of them are only described in, as for `step.warm`.
    """
    call, tokens = request.call, {}
    rows = zip(call.leaves, call.paths, request.placed, request.asked, strict=True)
    for value, path, placed, asked in rows:
        sharding = placed.sharding if placed is not None else asked
        if not spans_processes(sharding) or not is_own(value):
            continue
        if isinstance(value, jax.ShapeDtypeStruct):
            return None
        if placed is None or np.shape(value) == placed.shape:
            tokens[path.text] = token_of(value)
    return tokens


def digest_of(tokens: Mapping[str, str] | None) -> str:
    """A digest of values by their tokens; empty where they are not known."""
    if tokens is None:
        return ""
    return hashlib.sha256(repr(sorted(tokens.items())).encode()).hexdigest()[:16]


def compare(
    hear: Hear, rank: int, about: str, groups: Groups, said: Mapping[int, str] | None = None
) -> None:
    """Compares values with those of the other processes.

    Args:
        hear: says something on a topic, and returns what all say, by rank.
        rank: of this process.
        about: what the values are for.
        groups: the values.
        said: the digest that each has said already, where there is one group only.

    Raises:
        AgreementError: values differ that are one; with their paths, and the ranks.
    """
    named = {_name(ranks): tokens for ranks, tokens in groups.items()}
    if said is not None:
        differing = _differing(
            {each: dict.fromkeys(named, digest) for each, digest in said.items() if digest}
        )
    else:
        own = {name: digest_of(tokens) for name, tokens in named.items()}
        differing = plain.unpack(hear("values", plain.pack(own), brief=_brief)[rank])
    if differing:
        _explain(hear, rank, about, named, differing)


def _name(ranks: Sequence[int]) -> str:
    """A short name for some processes."""
    return hashlib.sha256(repr(list(ranks)).encode()).hexdigest()[:16]


def _differing(digests: Mapping[int, Mapping[str, str]]) -> Differing:
    """The groups whose processes, by rank, have not the same digest."""
    sides: dict[str, dict[str, list[int]]] = {}
    for rank, found in sorted(digests.items()):
        for name, digest in found.items():
            sides.setdefault(name, {}).setdefault(digest, []).append(rank)
    ordered = {
        name: sorted(each.values(), key=lambda ranks: (-len(ranks), ranks))
        for name, each in sides.items()
        if len(each) > 1
    }
    return dict(sorted(ordered.items(), key=lambda each: each[1]))


def _brief(voices: dict[int, bytes]) -> dict[int, bytes]:
    differing = _differing({rank: plain.unpack(voice) for rank, voice in voices.items()})
    return dict.fromkeys(voices, plain.pack(differing))


def check_devices(groups: Groups) -> None:
    """Whether the devices of this process hold the same.

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
            f"values that are the same on all devices differ on those of rank "
            f"{jax.process_index()}:\n  " + "\n  ".join(_shown(lines)),
            hint="jax.shard_map(…, check_vma=False) believes what its out_specs say of replicas",
        )


def check_replicas(
    parts: Callable[[], Iterable[Part]], peers: Peers | None, about: str, *, summed: bool = False
) -> None:
    """Checks that what several processes, or devices, hold of the same values is the same.

    Args:
        parts: gives the values.
        peers: the processes; None for this one alone.
        about: on what occasion, for people.
        summed: compare checksums first, and values only where those differ.

    Raises:
        AgreementError: values differ; it names their paths, and the ranks.
    """
    ranks = tuple(peers.ranks) if peers is not None else (jax.process_index(),)

    def meet(groups: Groups) -> None:
        assert peers is not None
        with peers.meeting("check_replicas", "") as meeting:
            compare(meeting.hear, peers.rank, about, groups)

    groups = replicas_of(parts(), ranks, summed=summed)
    for check in (check_devices,) if peers is None else (meet, check_devices):
        try:
            check(groups)
            continue
        except AgreementError as error:
            differing = error
        if summed:  # Says which values they are.
            check(replicas_of(parts(), ranks))
        raise differing


def _shown(lines: list[str]) -> list[str]:
    more = len(lines) - _MAX_SHOWN
    return [*lines[:_MAX_SHOWN], f"… and {counted(more, 'more value')}"] if more > 0 else lines


def _explain(
    hear: Hear,
    rank: int,
    about: str,
    named: Mapping[str, dict[str, str]],
    differing: Differing,
) -> None:
    """Compares path by path, on one rank for each digest.

    Raises:
        AgreementError: values of the same path differ.
    """
    own = {
        name: named[name]
        for name, sides in differing.items()
        if rank in [ranks[0] for ranks in sides[:MAX_SIDES]]
    }
    heard = hear("differing values", zlib.compress(plain.pack(own), 1))
    speakers = {ranks[0] for sides in differing.values() for ranks in sides[:MAX_SIDES]}
    tokens = {each: plain.unpack(zlib.decompress(heard[each])) for each in speakers}
    changes, lines, all_sides = [], [], []
    for name, (most, *others) in differing.items():
        usual = tokens[most[0]][name]
        for ranks in others[: MAX_SIDES - 1]:
            found = tokens[ranks[0]][name]
            paths = [path for path in usual if found.get(path, usual[path]) != usual[path]]
            for path in paths:
                changes.append(Change("value", path, usual[path], found[path]))
                lines.append(
                    f"{path}: {readable_ranks(ranks)} {found[path]}; "
                    f"{readable_ranks(most)} {usual[path]}"
                )
            if paths:
                all_sides += [tuple(most), tuple(ranks)]
    if not changes:
        return  # What one of them does not hold at all is no difference.
    raise AgreementError(
        f"values that are the same on all processes differ, {about}:\n  "
        + "\n  ".join(_shown(lines)),
        changes,
        tuple(dict.fromkeys(all_sides)),
        hint="make them from the same seed, checkpoint and settings on all processes; what differs "
        "by process belongs into a batch",
    )
