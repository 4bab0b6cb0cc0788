"""`Gathering`: the processes of a pod agree on one new program.

First each says what it is about to bring. Where they differ, that is an error on all of them.
Then one that has the program on its disk, or else the first one, which builds it, hands it to those
that have not: what the trace told while XLA compiles, and then the program. What is made on one
kind of host serves on that kind only, so there is one such process for each kind. At the end each
says what it holds, and nothing runs before all hold the same.
"""

from __future__ import annotations

import hashlib
import zlib
from collections.abc import Sequence
from dataclasses import dataclass

from stepcache.errors import AgreementError, first_line
from stepcache.events import Change
from stepcache.programs import plain
from stepcache.programs.archive import Answer, Archive
from stepcache.programs.candidate import (
    Candidate,
    Traced,
    agree,
    differences,
    digest_facts,
    pack_candidates,
    unpack_candidates,
)
from stepcache.programs.pods.peers import Meeting, Peers
from stepcache.programs.question import Question
from stepcache.units import readable_ranks

# What one host may have and another not: then one of each kind builds what all agree on.
_OF_HOST = (
    "environment CPU",
    "environment device kind",
    "environment devices",
    "environment system",
    "environment topology",
)


@dataclass(frozen=True, slots=True)
class Stand:
    """What a process says before it brings a program.

    Attributes:
        label: the step, by file and name.
        facts: digest of what all have to have in common.
        host: digest of what decides whether a program made by one loads on the other.
        directory: names the directory of programs; empty for none.
        program: digest of the program that it has on disk; empty for none.
        trusts: whether it would run that without tracing the step.
    """

    label: str
    facts: str
    host: str
    directory: str
    program: str
    trusts: bool

    def packed(self) -> bytes:
        return plain.pack([getattr(self, name) for name in self.__slots__])

    @classmethod
    def unpacked(cls, data: bytes) -> Stand:
        return cls(*plain.unpack(data))


def common_facts(question: Question) -> dict[str, str]:
    """What all processes have to have in common. To be asked before any candidate is looked at."""
    return {name: fact for name, fact in question.base.facts.items() if name not in _OF_HOST}


def stand_of(
    question: Question, facts: dict[str, str], answer: Answer, archive: Archive | None
) -> Stand:
    """What this process says."""
    host = question.base.facts
    return Stand(
        question.address.label,
        digest_facts(facts),
        digest_facts({name: host.get(name, "") for name in _OF_HOST}),
        archive.name() if archive is not None else "",
        answer.candidate.program if answer.candidate is not None else "",
        archive is None or archive.verify != "before",
    )


class Gathering:
    """One meeting about one program, from first words to last.

    Args:
        meeting: with the other processes.
        peers: who they are.
        question: this process's.
        facts: what has to be the same on all.
        stand: what it says.

    Attributes:
        giver: the rank that hands the program out, or builds it, for this kind of host.
        builds: whether it has to build it first.
    """

    def __init__(
        self,
        meeting: Meeting,
        peers: Peers,
        question: Question,
        facts: dict[str, str],
        stand: Stand,
    ):
        self._meeting, self._peers, self._question = meeting, peers, question
        self._facts, self._stand = facts, stand
        voices = meeting.hear("stand", stand.packed())
        self._stands = {rank: Stand.unpacked(voice) for rank, voice in sorted(voices.items())}
        self._check_same()
        trusted = all(each.trusts for each in self._stands.values())
        self._alike = [rank for rank, each in self._stands.items() if each.host == stand.host]
        having = [rank for rank in self._alike if self._stands[rank].program and trusted]
        self.builds = not having
        self.giver = having[0] if having else self._alike[0]
        self._received: tuple[Candidate | None, bytes, str] | None = None

    # ---- who differs -----------------------------------------------------------------------------

    def _check_same(self) -> None:
        """Raises where the processes are not about to run the same.

        Raises:
            AgreementError: what differs, and between which of them.
        """
        sides: dict[tuple, list[int]] = {}
        for rank, stand in self._stands.items():
            sides.setdefault((stand.label, stand.facts), []).append(rank)
        if len(sides) == 1:
            return
        ordered = sorted(sides.items(), key=lambda side: (-len(side[1]), side[1]))
        most, others = ordered[0], ordered[1:]
        labels = [label for (label, _), _ in ordered]
        if len(set(labels)) > 1:
            calls = "; ".join(f"{readable_ranks(ranks)}: {label}" for (label, _), ranks in ordered)
            raise AgreementError(
                f"the processes of the pod call different steps: {calls}",
                sides=[tuple(ranks) for _, ranks in ordered],
                hint="call the same steps in the same order on all of them",
            )
        speakers = {ranks[0] for _, ranks in ordered}
        own = self._facts if self._peers.rank in speakers else {}
        voices = self._meeting.hear("facts", zlib.compress(plain.pack(own), 1), patiently=True)
        facts = {rank: plain.unpack(zlib.decompress(voices[rank])) for rank in speakers}
        changes: list[Change] = []
        lines = []
        for _, ranks in others:
            for change in differences(facts[most[1][0]], facts[ranks[0]]):
                changes.append(change)
                lines.append(
                    f"{change.path}{_noted(change)}: {readable_ranks(ranks)} {change.after}; "
                    f"{readable_ranks(most[1])} {change.before}"
                )
        raise AgreementError(
            f"the processes of the pod are about to run different programs of {labels[0]}:\n  "
            + "\n  ".join(lines[:12]),
            changes,
            [tuple(ranks) for _, ranks in ordered],
            hint="all processes have to make the same call, with the same code and settings",
        )

    # ---- the program -----------------------------------------------------------------------------

    @property
    def gives(self) -> bool:
        """Whether this process hands the program out."""
        return self.giver == self._peers.rank

    @property
    def has_it(self) -> bool:
        """Whether this process has the program on its own disk."""
        return bool(self._stand.program) and self._stand.program == self._given().program

    @property
    def builds_again(self) -> bool:
        """Whether another process builds it too, for another kind of host."""
        return self.builds and self.gives and self.giver != min(self._stands)

    def _given(self) -> Stand:
        return self._stands[self.giver]

    @property
    def takers(self) -> list[int]:
        """Those that have to be handed the program."""
        program = self._given().program
        others = [rank for rank in self._alike if rank != self.giver]
        return [r for r in others if self.builds or self._stands[r].program != program]

    @property
    def all_share(self) -> bool:
        """Whether all look into one directory."""
        return all(
            each.directory and each.directory == self._stand.directory
            for each in self._stands.values()
        )

    def tell(self, traced: Traced | None, why_not: str = "") -> None:
        """Hands out what the trace told.

        Args:
            traced: that; None where there is nothing that others can use.
            why_not: why not.
        """
        if self.takers:
            told = plain.pack([traced.packed() if traced is not None else None, why_not])
            self._meeting.hand_out("trace", zlib.compress(told, 1), self.takers)

    def told(self) -> tuple[Traced | None, str]:
        """What the trace of the other process has told, as it gave it."""
        told = zlib.decompress(self._meeting.take("trace", self.giver))
        traced, why_not = plain.unpack(told)
        return Traced.unpacked(traced) if traced is not None else None, why_not

    def give(self, label: str, candidate: Candidate | None, data: bytes, why_not: str = "") -> None:
        """Hands the program out.

        Args:
            label: the step, by file and name.
            candidate: the build; None where there is none that others can use.
            data: the executable; empty where all find it in the directory.
            why_not: why not.
        """
        if self.takers:
            packed = pack_candidates(label, [candidate])[1] if candidate is not None else b""
            given = plain.pack([packed, zlib.compress(data, 1), why_not])
            self._meeting.hand_out("program", given, self.takers)

    def receive(self) -> tuple[Candidate | None, bytes, str]:
        """What the other process hands out, as it gave it. It has to be taken, wanted or not."""
        if self._received is None:
            packed, data, why_not = plain.unpack(self._meeting.take("program", self.giver))
            candidate = unpack_candidates(packed)[0] if packed else None
            self._received = candidate, zlib.decompress(data), why_not
        return self._received

    def differing(self, traced: Traced) -> tuple[Change, ...]:
        """What of a trace of another process is not so here."""
        found = self._question.with_used(traced.used)
        told = {name: fact for name, fact in traced.facts.items() if name not in _OF_HOST}
        facts = {name: fact for name, fact in found.facts.items() if name not in _OF_HOST}
        return () if agree(told, facts) else differences(told, facts)

    # ---- the end ---------------------------------------------------------------------------------

    def conclude(
        self,
        outline: str,
        error: BaseException | None,
        level: int = 0,
        seconds: dict[str, float] | None = None,
    ) -> dict[int, tuple[int, dict[str, float]]]:
        """Says what this process holds, and hears what the others do.

        Args:
            outline: the lowered module, as text.
            error: why it holds nothing.
            level: how it came by its program.
            seconds: what that took, by stage.

        Returns:
            Level and seconds of all, by rank.

        Raises:
            AgreementError: another one holds something else, or nothing.
        """
        problem = first_line(error) if error is not None else ""
        digest = hashlib.sha256(outline.encode()).hexdigest() if not problem else ""
        rounded = {stage: round(value, 4) for stage, value in (seconds or {}).items()}
        said = [digest, problem, level, rounded]
        voices = self._meeting.hear("held", plain.pack(said), patiently=True)
        held = {rank: plain.unpack(voice) for rank, voice in sorted(voices.items())}
        if error is not None:
            return {}  # It is raised here as it is.
        label = self._stand.label
        failed = {rank: problem for rank, (_, problem, *_) in held.items() if problem}
        if failed:
            told = "; ".join(f"rank {rank}: {problem}" for rank, problem in failed.items())
            raise AgreementError(
                f"not all processes of the pod have the program of {label}: {told}",
                sides=(tuple(failed),),
            )
        digests: dict[str, list[int]] = {}
        for rank, (digest, *_) in held.items():
            digests.setdefault(digest, []).append(rank)
        if len(digests) > 1:
            sides = sorted(digests.values(), key=lambda ranks: (-len(ranks), ranks))
            changes = self._differing_lines(outline, sides)
            all_sides = " and ".join(map(readable_ranks, sides))
            raise AgreementError(
                f"{all_sides} have traced different programs of {label}:\n  "
                + "\n  ".join(map(str, changes)),
                changes,
                [tuple(ranks) for ranks in sides],
                hint="what a step computes must not depend on the process that traces it",
            )
        return {rank: (level, seconds) for rank, (_, _, level, seconds) in held.items()}

    def _differing_lines(self, outline: str, sides: Sequence[Sequence[int]]) -> list[Change]:
        """The first line in which two of the programs differ."""
        speakers = [ranks[0] for ranks in sides[:2]]
        own = outline if self._peers.rank in speakers else ""
        voices = self._meeting.hear("outline", zlib.compress(own.encode(), 1), patiently=True)
        one, other = (zlib.decompress(voices[rank]).decode() for rank in speakers)
        for before, after in zip(one.splitlines(), other.splitlines(), strict=False):
            if before != after:
                where = "in the lowered program"
                return [Change("code", where, before.strip(), after.strip())]
        return []


def _noted(change: Change) -> str:
    return f" ({change.note})" if change.note else ""
