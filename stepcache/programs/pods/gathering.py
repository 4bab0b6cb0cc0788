"""`Gathering`: the processes of a pod agree on one new program.

First each says which call it makes. Where the calls differ, that is an error on all of them. Where
the code differs, or what it reads, each traces the step, and what was lowered is compared before
anything is compiled; only where that differs too, it is an error. Then one that has the program on
its disk, or else the first one, which builds it, hands it to those that have not: what the trace
told while XLA compiles, and then the program. Before it has XLA compile what it lowered, it asks
the others whether that is on their disks. What is made on one kind of host serves on that kind
only, so there is one such process for each kind. At the end each says what it holds, and nothing
runs before all hold the same.
"""

from __future__ import annotations

import contextlib
import zlib
from collections.abc import Callable, Sequence

from stepcache.calls.host_values import MAX_SIDES, compare
from stepcache.distributed.peers import Meeting, Peers
from stepcache.errors import AgreementError, first_line
from stepcache.events import Change
from stepcache.jaxcompat.coordination import Brief
from stepcache.programs.levels import Lowered
from stepcache.programs.lookup import Lookup
from stepcache.programs.pods.lowered import MAX_SHOWN, by_rank, digest_of_lowered, judge
from stepcache.programs.pods.stand import OF_ONE, Facts, Stand, brief, known_to_all
from stepcache.storage import plain
from stepcache.storage.dependency_record import (
    DependencyRecord,
    Traced,
    agree,
    differences,
    pack_records,
    unpack_records,
)
from stepcache.units import readable_ranks

_ASKED_AT_MOST = 8


class Gathering:
    """One meeting about one program, from first words to last.

    Args:
        meeting: with the other processes.
        peers: who they are.
        lookup: this process's.
        dependencies: what this call depends on.
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
        lookup: Lookup,
        dependencies: Facts,
        values: dict[str, str] | None,
        stand: Stand,
    ):
        self._meeting, self._peers, self._question = meeting, peers, lookup
        self._dependencies, self._stand = dependencies, stand
        voices = meeting.hear("stand", stand.packed(), brief=brief)
        unpacked = {voice: Stand.unpacked(voice) for voice in set(voices.values())}
        self._stands = {rank: unpacked[voice] for rank, voice in voices.items()}
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
        codes = {each.code for each in self._stands.values()}
        several = len(codes) > 1 or OF_ONE in codes
        self._to_compare = several and not all(having.values())
        self._told: tuple[Traced | None, str] | None = None
        self._received: tuple[DependencyRecord | None, bytes, str] | None = None
        self._has_asked = False

    def _hear(self, topic: str, said: bytes, brief: Brief | None = None) -> dict[int, bytes]:
        return self._meeting.hear(topic, said, patiently=True, brief=brief)

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
        most, others = ordered[0], ordered[1:MAX_SIDES]
        labels = [label for (label, _), _ in ordered]
        if len(set(labels)) > 1:
            calls = "; ".join(f"{readable_ranks(ranks)}: {label}" for (label, _), ranks in ordered)
            raise AgreementError(
                f"the processes of the pod call different steps: {calls}",
                sides=[tuple(ranks) for _, ranks in ordered],
                hint="call the same steps in the same order on all of them",
            )
        speakers = {ranks[0] for _, ranks in (most, *others)}
        own = self._dependencies.call if self._peers.rank in speakers else {}
        voices = self._meeting.hear(
            "dependencies", zlib.compress(plain.pack(own), 1), patiently=True
        )
        dependencies = {rank: plain.unpack(zlib.decompress(voices[rank])) for rank in speakers}
        changes: list[Change] = []
        lines = []
        for _, ranks in others:
            found = differences(dependencies[most[1][0]], dependencies[ranks[0]])
            changes += found
            lines += [by_rank(change, most[1], ranks) for change in found]
        raise AgreementError(
            f"the processes of the pod are about to run different programs of {labels[0]}:\n  "
            + "\n  ".join(lines[:MAX_SHOWN]),
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

    @property
    def _asked(self) -> list[int]:
        """Those that are asked for an executable before it is built: one for each directory, but
        not more than a few.
        """
        by_directory = {
            each.directory or rank: rank
            for rank, each in reversed(self._stands.items())
            if rank in self._alike and each.stocked
        }
        by_directory.pop(self._given().directory or self.giver, None)
        return sorted(by_directory.values())[:_ASKED_AT_MOST] if self.builds else []

    def ask(self, digest: str) -> bytes:
        """Asks the others for the executable of what was lowered here, before XLA compiles it.

        Args:
            digest: of what XLA is about to be given; empty where there is nothing to ask for.

        Returns:
            The executable; empty where none of them has it.
        """
        asked = [] if self._has_asked else self._asked
        self._has_asked = True
        if not asked:
            return b""
        self._meeting.hand_out("wanted", plain.pack(digest), asked)
        if not digest:
            return b""
        having = [rank for rank in asked if plain.unpack(self._meeting.take("has it", rank))]
        self._meeting.hand_out("giver", plain.pack(having[:1]), asked)
        return self._meeting.take("executable", having[0]) if having else b""

    def answer(self, find: Callable[[str], bytes]) -> None:
        """Answers the one that builds, where that asks this process for the executable.

        Args:
            find: gives a stored executable by its digest; empty where there is none.
        """
        if self._has_asked or self._peers.rank not in self._asked:
            return
        self._has_asked = True
        digest = plain.unpack(self._meeting.take("wanted", self.giver))
        if not digest:
            return
        data = find(digest)
        self._meeting.hand_out("has it", plain.pack(bool(data)), [self.giver])
        if plain.unpack(self._meeting.take("giver", self.giver)) == [self._peers.rank]:
            self._meeting.hand_out("executable", data, [self.giver])

    def tell(self, traced: Traced | None, why_not: str = "") -> None:
        """Hands out what the trace told.

        Args:
            traced: that; None where there is nothing that others can use.
            why_not: why not.
        """
        self.ask("")  # If it has asked before, that stands.
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

    def give(
        self, label: str, record: DependencyRecord | None, data: bytes, why_not: str = ""
    ) -> None:
        """Hands the program out.

        Args:
            label: the step, by file and name.
            record: the build; None where there is none that others can use.
            data: the executable; empty where all find it in the directory.
            why_not: why not.
        """
        if self.takers:
            packed = pack_records(label, [record])[1] if record is not None else b""
            given = plain.pack([packed, zlib.compress(data, 1), why_not])
            self._meeting.hand_out("program", given, self.takers)

    def receive(self) -> tuple[DependencyRecord | None, bytes, str]:
        """What the other process hands out, as it gave it."""
        if self._received is None:
            packed, data, why_not = plain.unpack(self._meeting.take("program", self.giver))
            record = unpack_records(packed)[0] if packed else None
            self._received = record, zlib.decompress(data), why_not
        return self._received

    def take_all(self) -> None:
        """Takes what is handed out, wanted or not: who hands it out waits for that."""
        with contextlib.suppress(Exception):
            self.answer(lambda digest: b"")
            self.told()
            self.receive()

    def differing(self, traced: Traced) -> tuple[Change, ...]:
        """What of a trace of another process is not so here."""
        told = known_to_all(traced.dependencies)
        dependencies = known_to_all(self._question.with_used(traced.used).dependencies)
        return () if agree(told, dependencies) else differences(told, dependencies)

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
        said = [digest_of_lowered(lowered), first_line(error) if error is not None else ""]
        voices = self._meeting.hear("lowered", plain.pack(said), patiently=True)
        if error is None:
            said = {rank: plain.unpack(voice) for rank, voice in voices.items()}
            judge(self._meeting, self._peers.rank, self._stand.label, said, lowered)

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
            Level and seconds of the others, by rank; on the first process only, and only where the
            others do not write their own into the directory that all share.

        Raises:
            AgreementError: another one holds something else, or nothing.
        """
        rounded = {stage: round(value, 4) for stage, value in (seconds or {}).items()}
        said = [
            digest_of_lowered(lowered),
            first_line(error) if error is not None else "",
            level,
            rounded,
        ]
        voices = self._hear("held", plain.pack(said), _without_times)
        if error is not None:
            return {}  # It is raised here as it is.
        own_rank = self._peers.rank
        digests = {rank: plain.unpack(voice) for rank, voice in voices.items()}
        judge(self._meeting, own_rank, self._stand.label, digests, lowered)
        if self.all_share or own_rank != min(self._stands):
            return {}
        held = {rank: plain.unpack(voice) for rank, voice in self._meeting.said("held").items()}
        return {rank: (each[2], each[3]) for rank, each in held.items() if rank != own_rank}


def _without_times(voices: dict[int, bytes]) -> dict[int, bytes]:
    return {rank: plain.pack(plain.unpack(voice)[:2]) for rank, voice in voices.items()}
