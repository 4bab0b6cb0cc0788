"""What the processes of a pod have lowered, compared; and where two programs differ, and why."""

from __future__ import annotations

import contextlib
import hashlib
import zlib
from collections.abc import Mapping, Sequence

from stepcache.distributed.peers import Meeting
from stepcache.errors import AgreementError
from stepcache.events import Change
from stepcache.fingerprint.provenance import USER, file_label, origin_of_file
from stepcache.programs.levels import Lowered
from stepcache.programs.pods.stand import known_to_all
from stepcache.storage import plain
from stepcache.storage.dependency_record import differences
from stepcache.units import readable_ranks

MAX_SHOWN = 12


class Different(Exception):
    """What was lowered here is not what was lowered elsewhere, which is still to be said."""


def judge(
    meeting: Meeting,
    own_rank: int,
    label: str,
    said: Mapping[int, Sequence[str]],
    lowered: Lowered | None,
) -> None:
    """Whether all have lowered the same, of those that have.

    Args:
        meeting: of all.
        own_rank: of this process.
        label: the step, by file and name.
        said: by each: the digest of what it has lowered, and what went wrong.
        lowered: by this process.

    Raises:
        AgreementError: they have not.
    """
    failed = {rank: problem for rank, (_, problem) in sorted(said.items()) if problem}
    if failed:
        told = "; ".join(f"rank {rank}: {problem}" for rank, problem in failed.items())
        raise AgreementError(
            f"not all processes of the pod have the program of {label}: {told}",
            sides=(tuple(failed),),
        )
    digests: dict[str, list[int]] = {}
    for rank, (digest, _) in sorted(said.items()):
        if digest:
            digests.setdefault(digest, []).append(rank)
    if len(digests) < 2:
        return
    sides = sorted(digests.values(), key=lambda ranks: (-len(ranks), ranks))
    own = lowered if own_rank in (sides[0][0], sides[1][0]) else None
    changes, lines = _why_different(meeting, sides[0], sides[1], own)
    everybody = " and ".join(map(readable_ranks, sides))
    raise AgreementError(
        f"{everybody} have lowered different programs of {label}:"
        + "".join(f"\n  {line}" for line in lines),
        changes,
        [tuple(ranks) for ranks in sides],
        hint="what a step computes must not depend on the process that traces it",
    )


def _why_different(
    meeting: Meeting, one: Sequence[int], other: Sequence[int], own: Lowered | None
) -> tuple[list[Change], list[str]]:
    """Where two programs differ first, and what their traces depended on that differs.

    Args:
        meeting: of all.
        one: the ranks of one side. The first of each side tells of its program.
        other: those of another side.
        own: what this process has lowered, if it is one that tells.

    Returns:
        The changes, and a line about each.
    """
    speakers = (one[0], other[0])
    outline, dependencies = own.outline if own is not None else "", {}
    with contextlib.suppress(Exception):  # What cannot be explained is an error all the same.
        dependencies = known_to_all(own.dependencies()) if own is not None else {}
    packed = zlib.compress(plain.pack([outline, dependencies]), 1)
    voices = meeting.hear("outline", packed, patiently=True)
    told = [plain.unpack(zlib.decompress(voices[rank])) for rank in speakers]
    outlines = [outline.splitlines() for outline, _ in told]
    number = next(
        (n for n, (a, b) in enumerate(zip(*outlines, strict=False)) if a != b),
        min(map(len, outlines)),
    )
    source = _source(own, number) if own is not None else ""
    sources = meeting.hear("source", source.encode(), patiently=True)
    places = [sources[rank].decode() for rank in speakers]
    before, after = (
        outline[number].strip() if number < len(outline) else "absent" for outline in outlines
    )
    where = f"{places[1] or places[0]}, in the lowered program".removeprefix(", ")
    elsewhere = places[0] not in ("", places[1]) and places[1]
    note = f"{places[0]} on {readable_ranks(one)}" if elsewhere else ""
    change = Change("code", where, before, after, note)
    # What only one of them has read, it read because it went another way.
    both = told[0][1].keys() & told[1][1].keys()
    dependencies = ({name: each[name] for name in each if name in both} for _, each in told)
    others = [change for change in differences(*dependencies) if change.part != "module"]
    lines = [by_rank(each, speakers[:1], speakers[1:]) for each in others]
    return [change, *others], [by_rank(change, one, other), *lines][:MAX_SHOWN]


def digest_of_lowered(lowered: Lowered | None) -> str:
    """A digest of what was lowered; empty for nothing."""
    return hashlib.sha256(lowered.outline.encode()).hexdigest() if lowered is not None else ""


def _source(lowered: Lowered, number: int) -> str:
    """The line of the user's code that a line of a program comes from, as far as it is known."""
    with contextlib.suppress(Exception):
        for file, line in lowered.sources(number):
            if origin_of_file(file) == USER:
                return f"{file_label(file, None)}:{line}"
    return ""


def by_rank(change: Change, before: Sequence[int], after: Sequence[int]) -> str:
    """A change in a line, with the ranks of both sides."""
    noted = f" ({change.note})" if change.note else ""
    return (
        f"{change.path}{noted}: {readable_ranks(after)} {change.after}; "
        f"{readable_ranks(before)} {change.before}"
    )
