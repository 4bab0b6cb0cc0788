"""Compares the programs that the processes of a pod lowered, and says where and why two differ."""

from __future__ import annotations

import contextlib
import hashlib
from collections.abc import Sequence

from stepcache.distributed.agreement import MAX_SIDES, Round, by_rank, ranks_in, sides_of
from stepcache.errors import AgreementError
from stepcache.events import Change
from stepcache.fingerprint.dependencies import differences
from stepcache.fingerprint.provenance import USER, file_label, origin_of_file
from stepcache.programs.pods.roles import without_host
from stepcache.programs.resolution import Lowered
from stepcache.storage import plain
from stepcache.units import listed, readable_ranks

MAX_SHOWN = 12


def digest_of_lowered(lowered: Lowered | None) -> str:
    """Returns a digest of a lowered program; empty for none."""
    return hashlib.sha256(lowered.outline.encode()).hexdigest() if lowered is not None else ""


def merge_lowered(contributions: dict[int, bytes]) -> bytes:
    """Merges contributions that begin with the digest of a lowered program and an error text.

    Returns the packed [errors with their ranks, groups of ranks with equal digests].
    """
    said = {rank: plain.unpack(each)[:2] for rank, each in contributions.items()}
    errors = {rank: error for rank, (_, error) in said.items() if error}
    failed = [(errors[spans[0][0]], spans) for spans in sides_of(errors)]
    return plain.pack([failed, sides_of({rank: each for rank, (each, _) in said.items() if each})])


def check_lowered(round: Round, label: str, merged: bytes, lowered: Lowered | None) -> None:
    """Checks that all processes lowered the same program of a step.

    Args:
        round, label: the agreement round, and the step by file and name.
        merged: from `merge_lowered`.
        lowered: by this process; None if it lowered nothing.

    Raises:
        AgreementError: they did not, or one failed.
    """
    failed, digests = plain.unpack(merged)
    if failed:
        texts = [f"{readable_ranks(ranks_in(spans))}: {error}" for error, spans in failed]
        raise AgreementError(
            f"not all ranks have the program of {label}: {'; '.join(texts)}",
            sides=(tuple(rank for _, spans in failed for rank in ranks_in(spans)),),
        )
    if len(digests) < 2:
        return
    sides = [ranks_in(spans) for spans in digests]
    own = lowered if round.rank in (sides[0][0], sides[1][0]) else None
    changes, lines = _explain(round, sides[0], sides[1], own)
    named = [*map(readable_ranks, sides), *["more"] * (len(sides) == MAX_SIDES)]
    raise AgreementError(
        f"{listed(named)} lowered different programs of {label}:"
        + "".join(f"\n  {line}" for line in lines),
        changes,
        [tuple(ranks) for ranks in sides],
        hint="run the same code on all processes; what a step computes must not depend on its rank",
    )


def _explain(
    round: Round, one: Sequence[int], other: Sequence[int], own: Lowered | None
) -> tuple[list[Change], list[str]]:
    """Returns the first difference of two lowered programs and of what they depend on.

    Args:
        round: the agreement round.
        one, other: the ranks of each side, of which the first sends its program.
        own: the program of this process, if it is one of these two.

    Returns:
        The changes, and a line about each.
    """
    speakers = (one[0], other[0])

    def outline_and_dependencies() -> list:
        dependencies = {}
        with contextlib.suppress(Exception):  # The error is raised without an explanation too.
            dependencies = without_host(own.dependencies()) if own is not None else {}
        return [own.outline if own is not None else "", dependencies]

    programs = list(round.explained_by("outline", speakers, outline_and_dependencies).values())
    outlines = [outline.splitlines() for outline, _ in programs]
    number = next(
        (n for n, (a, b) in enumerate(zip(*outlines, strict=False)) if a != b),
        min(map(len, outlines)),
    )
    places = list(round.explained_by("source", speakers, lambda: _source(own, number)).values())
    before, after = (
        outline[number].strip() if number < len(outline) else "absent" for outline in outlines
    )
    where = f"{places[1] or places[0]}, in the lowered program".removeprefix(", ")
    elsewhere = places[0] not in ("", places[1]) and places[1]
    note = f"{places[0]} on {readable_ranks(one)}" if elsewhere else ""
    change = Change("code", where, before, after, note)
    # A dependency of only one side is a consequence: that side took another branch.
    both = programs[0][1].keys() & programs[1][1].keys()
    dependencies = ({name: each[name] for name in each if name in both} for _, each in programs)
    others = [change for change in differences(*dependencies) if change.part != "module"]
    lines = [by_rank(each, speakers[:1], speakers[1:]) for each in others]
    return [change, *others], [by_rank(change, one, other), *lines][:MAX_SHOWN]


def _source(lowered: Lowered | None, number: int) -> str:
    """Returns file and line of the user's code behind a line of a program; empty if unknown."""
    if lowered is None:
        return ""
    with contextlib.suppress(Exception):
        for file, line in lowered.sources(number):
            if origin_of_file(file) == USER:
                return f"{file_label(file, None)}:{line}"
    return ""
