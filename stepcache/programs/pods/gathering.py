"""`Gathering`: the processes of a pod agree on one new program.

First each says which call it makes. Where the calls differ, that is an error on all of them. Where
the code differs, or what it reads, each traces the step, and what was lowered is compared before
anything is compiled; only where that differs too, it is an error. Then one that has the program on
its disk, or else the first one, which builds it, hands it to those that have not: what the trace
told while XLA compiles, and then the program. What is made on one kind of host serves on that kind
only, so there is one such process for each kind. At the end each says what it holds, and nothing
runs before all hold the same.
"""

from __future__ import annotations

import contextlib
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
from stepcache.programs.fingerprint.origin import USER, file_label, origin_of_file
from stepcache.programs.levels import Lowered
from stepcache.programs.pods.peers import Meeting, Peers
from stepcache.programs.pods.values import compare, digest_of
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
_OF_CALL = ("arguments", "mesh", "package jax", "package jaxlib")
_BEGIN_OF_CALL = ("argument ", "option ", "config ", "environment ")
# Read from where a process was started; what of it JAX heeds is a setting too.
_OF_PROCESS = ("environment variable ", "environment argv", "environment python")


@dataclass(frozen=True, slots=True)
class Facts:
    """What a call depends on before it is traced, but for what is a matter of each host.

    Attributes:
        call: what the call is: leaves, shardings, statics, options, settings, flags. The same on
            all processes, or it is an error.
        code: the rest, as code, closures and globals. Where it differs, the step is traced, and
            what is lowered decides.
    """

    call: dict[str, str]
    code: dict[str, str]

    @classmethod
    def of(cls, question: Question) -> Facts:
        """Those of a question. To be asked before any candidate is looked at."""
        call, code = {}, {}
        statics = {f"static {static.name}" for static in question.statics}
        for name, fact in question.base.facts.items():
            if name in _OF_HOST:
                continue
            # Of a static object it is its class; what it holds may or may not be used.
            is_static = name in statics and not fact.startswith(("code ", "see "))
            (call if is_static or _is_of_call(name) else code)[name] = fact
        return cls(call, code)


def _is_of_call(name: str) -> bool:
    of_call = name in _OF_CALL or name.startswith(_BEGIN_OF_CALL)
    return of_call and not name.startswith(_OF_PROCESS)


class Different(Exception):
    """What was lowered here is not what was lowered elsewhere, which is still to be said."""


@dataclass(frozen=True, slots=True)
class Stand:
    """What a process says before it brings a program.

    Attributes:
        label: the step, by file and name.
        call: digest of what all have to have in common.
        code: digest of what the step is known to depend on otherwise.
        host: digest of what decides whether a program made by one loads on the other.
        directory: names the directory of programs; empty for none.
        program: digest of the program that it has on disk; empty for none.
        trusts: whether it would run that without tracing the step.
        values: digest of the host values that it hands in whole; empty where they are unknown.
    """

    label: str
    call: str
    code: str
    host: str
    directory: str
    program: str
    trusts: bool
    values: str

    def packed(self) -> bytes:
        return plain.pack([getattr(self, name) for name in self.__slots__])

    @classmethod
    def unpacked(cls, data: bytes) -> Stand:
        return cls(*plain.unpack(data))


def stand_of(
    question: Question,
    facts: Facts,
    answer: Answer,
    archive: Archive | None,
    values: dict[str, str] | None,
) -> Stand:
    """What this process says."""
    host = question.base.facts
    return Stand(
        question.address.label,
        digest_facts(facts.call),
        digest_facts(facts.code),
        digest_facts({name: host.get(name, "") for name in _OF_HOST}),
        archive.name() if archive is not None else "",
        answer.candidate.program if answer.candidate is not None else "",
        archive is None or archive.verify != "before",
        digest_of(values),
    )


class Gathering:
    """One meeting about one program, from first words to last.

    Args:
        meeting: with the other processes.
        peers: who they are.
        question: this process's.
        facts: what this call depends on.
        values: the host values that it hands in whole; None where they are unknown.
        stand: what it says.

    Attributes:
        giver: the rank that hands the program out, or builds it, for this kind of host.
        builds: whether it has to build it first.
        has_compared: whether the host values of all processes were known, and the same.

    Raises:
        AgreementError: the processes do not make the same call, or hand in other values.
    """

    def __init__(
        self,
        meeting: Meeting,
        peers: Peers,
        question: Question,
        facts: Facts,
        values: dict[str, str] | None,
        stand: Stand,
    ):
        self._meeting, self._peers, self._question = meeting, peers, question
        self._facts, self._stand = facts, stand
        voices = meeting.hear("stand", stand.packed())
        self._stands = {rank: Stand.unpacked(voice) for rank, voice in sorted(voices.items())}
        self._check_same()
        said = {rank: each.values for rank, each in self._stands.items()}
        everybody = tuple(peers.ranks)
        compare(self._hear, peers.rank, f"before {stand.label}", {everybody: values or {}}, said)
        self.has_compared = all(said.values())
        by_host: dict[str, list[int]] = {}
        for rank, each in self._stands.items():
            by_host.setdefault(each.host, []).append(rank)
        having = {host: self._having(ranks) for host, ranks in by_host.items()}
        self._alike = by_host[stand.host]
        self.builds = not having[stand.host]
        self.giver = (having[stand.host] or self._alike)[0]
        several = len({each.code for each in self._stands.values()}) > 1
        self._to_compare = several and not all(having.values())
        self._told: tuple[Traced | None, str] | None = None
        self._received: tuple[Candidate | None, bytes, str] | None = None

    def _hear(self, topic: str, said: bytes) -> dict[int, bytes]:
        return self._meeting.hear(topic, said, patiently=True)

    def _having(self, ranks: Sequence[int]) -> list[int]:
        """Those that have the program on disk, where all would run that without a trace."""
        trusted = all(each.trusts for each in self._stands.values())
        return [rank for rank in ranks if self._stands[rank].program and trusted]

    # ---- who differs -----------------------------------------------------------------------------

    def _check_same(self) -> None:
        """Raises where the processes are not about to run the same.

        Raises:
            AgreementError: what differs, and between which of them.
        """
        sides: dict[tuple, list[int]] = {}
        for rank, stand in self._stands.items():
            sides.setdefault((stand.label, stand.call), []).append(rank)
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
        own = self._facts.call if self._peers.rank in speakers else {}
        voices = self._meeting.hear("facts", zlib.compress(plain.pack(own), 1), patiently=True)
        facts = {rank: plain.unpack(zlib.decompress(voices[rank])) for rank in speakers}
        changes: list[Change] = []
        lines = []
        for _, ranks in others:
            found = differences(facts[most[1][0]], facts[ranks[0]])
            changes += found
            lines += [_by_rank(change, most[1], ranks) for change in found]
        raise AgreementError(
            f"the processes of the pod are about to run different programs of {labels[0]}:\n  "
            + "\n  ".join(lines[:_MAX_SHOWN]),
            changes,
            [tuple(ranks) for _, ranks in ordered],
            hint="all processes have to make the same call, with the same options and settings",
        )

    # ---- the program -----------------------------------------------------------------------------

    @property
    def gives(self) -> bool:
        """Whether this process hands the program out."""
        return self.giver == self._peers.rank

    @property
    def traces(self) -> bool:
        """Whether this process traces the step without waiting for what another one's trace told:
        it hands out what it builds, or it is known to depend on other things.
        """
        return self.gives or self._stand.code != self._given().code

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
        if self._told is None:
            told = zlib.decompress(self._meeting.take("trace", self.giver))
            traced, why_not = plain.unpack(told)
            self._told = (Traced.unpacked(traced) if traced is not None else None), why_not
        return self._told

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
        """What the other process hands out, as it gave it."""
        if self._received is None:
            packed, data, why_not = plain.unpack(self._meeting.take("program", self.giver))
            candidate = unpack_candidates(packed)[0] if packed else None
            self._received = candidate, zlib.decompress(data), why_not
        return self._received

    def take_all(self) -> None:
        """Takes what is handed out, wanted or not: who hands it out waits for that."""
        with contextlib.suppress(Exception):
            self.told()
            self.receive()

    def differing(self, traced: Traced) -> tuple[Change, ...]:
        """What of a trace of another process is not so here."""
        told = _known_to_all(traced.facts)
        facts = _known_to_all(self._question.with_used(traced.used).facts)
        return () if agree(told, facts) else differences(told, facts)

    # ---- what was lowered ------------------------------------------------------------------------

    def compare(self, lowered: Lowered | None, error: BaseException | None = None) -> None:
        """Compares what was lowered before XLA compiles it, where processes are known to depend on
        different things. Each of them has to call it, once or more often.

        Args:
            lowered: by this process; None where it waits for another one's trace.
            error: why it has lowered nothing.

        Raises:
            AgreementError: another one has lowered something else, or nothing.
        """
        if not self._to_compare:
            return
        self._to_compare = False
        said = [_digest(lowered), first_line(error) if error is not None else ""]
        voices = self._meeting.hear("lowered", plain.pack(said), patiently=True)
        if error is None:
            self._judge({rank: plain.unpack(voice) for rank, voice in voices.items()}, lowered)

    def conclude(
        self,
        lowered: Lowered | None,
        error: BaseException | None,
        level: int = 0,
        seconds: dict[str, float] | None = None,
    ) -> dict[int, tuple[int, dict[str, float]]]:
        """Says what this process holds, and hears what the others do.

        Args:
            lowered: what its program was lowered to.
            error: why it holds nothing.
            level: how it came by its program.
            seconds: what that took, by stage.

        Returns:
            Level and seconds of all, by rank.

        Raises:
            AgreementError: another one holds something else, or nothing.
        """
        rounded = {stage: round(value, 4) for stage, value in (seconds or {}).items()}
        said = [_digest(lowered), first_line(error) if error is not None else "", level, rounded]
        voices = self._meeting.hear("held", plain.pack(said), patiently=True)
        held = {rank: plain.unpack(voice) for rank, voice in sorted(voices.items())}
        if error is not None:
            return {}  # It is raised here as it is.
        self._judge({rank: said[:2] for rank, said in held.items()}, lowered)
        return {rank: (level, seconds) for rank, (_, _, level, seconds) in held.items()}

    def _judge(self, said: dict[int, list[str]], lowered: Lowered | None) -> None:
        """Whether all have lowered the same, of those that have.

        Args:
            said: by each: the digest of what it has lowered, and what went wrong.
            lowered: by this process.

        Raises:
            AgreementError: they have not.
        """
        label = self._stand.label
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
        changes, lines = self._why_different(sides[0], sides[1], lowered)
        everybody = " and ".join(map(readable_ranks, sides))
        raise AgreementError(
            f"{everybody} have lowered different programs of {label}:"
            + "".join(f"\n  {line}" for line in lines),
            changes,
            [tuple(ranks) for ranks in sides],
            hint="what a step computes must not depend on the process that traces it",
        )

    def _why_different(
        self, one: Sequence[int], other: Sequence[int], lowered: Lowered | None
    ) -> tuple[list[Change], list[str]]:
        """The first line in which two programs differ, and what else their traces depended on."""
        speakers = (one[0], other[0])
        if self._peers.rank not in speakers:
            lowered = None
        own = ["", {}]
        if lowered is not None:
            with contextlib.suppress(
                Exception
            ):  # What cannot be explained is an error all the same.
                own = [lowered.outline, {}]
                own = [lowered.outline, _known_to_all(lowered.facts())]
        voices = self._meeting.hear("outline", zlib.compress(plain.pack(own), 1), patiently=True)
        told = [plain.unpack(zlib.decompress(voices[rank])) for rank in speakers]
        outlines = [outline.splitlines() for outline, _ in told]
        number = next(
            (n for n, (a, b) in enumerate(zip(*outlines, strict=False)) if a != b),
            min(map(len, outlines)),
        )
        source = "" if lowered is None else _source(lowered, number)
        sources = self._meeting.hear("source", source.encode(), patiently=True)
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
        facts = ({name: each[name] for name in each if name in both} for _, each in told)
        others = [change for change in differences(*facts) if change.part != "module"]
        lines = [_by_rank(each, speakers[:1], speakers[1:]) for each in others]
        return [change, *others], [_by_rank(change, one, other), *lines][:_MAX_SHOWN]


_MAX_SHOWN = 12


def _digest(lowered: Lowered | None) -> str:
    return hashlib.sha256(lowered.outline.encode()).hexdigest() if lowered is not None else ""


def _known_to_all(facts: dict[str, str]) -> dict[str, str]:
    return {name: fact for name, fact in facts.items() if name not in _OF_HOST}


def _source(lowered: Lowered, number: int) -> str:
    """The line of the user's code that a line of a program comes from, as far as it is known."""
    with contextlib.suppress(Exception):
        for file, line in lowered.sources(number):
            if origin_of_file(file) == USER:
                return f"{file_label(file, None)}:{line}"
    return ""


def _by_rank(change: Change, before: Sequence[int], after: Sequence[int]) -> str:
    noted = f" ({change.note})" if change.note else ""
    return (
        f"{change.path}{noted}: {readable_ranks(after)} {change.after}; "
        f"{readable_ranks(before)} {change.before}"
    )
