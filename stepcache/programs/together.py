"""Builds a program together with the other processes of a pod.

Every process traces and lowers the step. Before a new program first runs, each reports its call and
what it has lowered, and all read one decision: a difference is an error on all of them; else one
process of each kind of host has or compiles the executable, and the others take it from there.
"""

from __future__ import annotations

import contextlib
import hashlib
import logging
import zlib
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import jax
import numpy as np

from stepcache import jaxcompat
from stepcache.calls.step_spec import Request
from stepcache.errors import AgreementError, first_line
from stepcache.events import Change
from stepcache.link import plain
from stepcache.origin import file_label, is_users_file
from stepcache.pods.global_arrays import spans_processes
from stepcache.pods.replicas import (
    Differing,
    compare,
    differing,
    digest_of,
    group_name,
    is_local,
    token_of,
)
from stepcache.pods.rounds import MAX_SIDES, Peers, Round, by_rank, ranks_in, sides_of
from stepcache.programs.build import Stopwatch
from stepcache.programs.earlier_runs import Described, differences
from stepcache.programs.module_difference import difference
from stepcache.programs.store import Publication
from stepcache.units import listed, readable_ranks, spans_of

# These may differ between the hosts of a pod, and where a process was started may, too.
_MAY_DIFFER = (
    "environment CPU",
    "environment argv",
    "environment device kind",
    "environment devices",
    "environment python",
    "environment system",
)
_PLAIN = (str, bytes, int, float, complex, type(None))
_MAX_SHOWN = 12
_FAILED, _STORED, _SENT = b"failed ", b"stored", b"sent "
_log = logging.getLogger("stepcache")


class Report(NamedTuple):
    """What a process reports when it has lowered the step. Digests are short."""

    label: str  # The step, by file and name.
    call: str  # Digest of what must be the same in all calls.
    values: str  # Digest of the replicated host values; empty if they are unknown.
    module: str = ""  # Digest of the lowered module, without locations; empty where that failed.
    program: str = ""  # Digest of the program; hosts of one kind have the same.
    holds: str = ""  # "memory", "disk", or empty where it needs the executable.
    directory: str = ""  # Names the directory of stored programs; empty for none.
    error: str = ""  # Why there is no module.


class Roles(NamedTuple):
    """Who does what for one program, on the hosts of one kind."""

    leader: int  # Has it on disk, or compiles it: the lowest such rank.
    compiles: bool  # Whether the leader has to compile it.
    receivers: list[list[int]]  # Spans of the ranks that take it from the leader.
    shares_directory: bool  # Whether they find it in the leader's directory.


class Decision(NamedTuple):
    """What follows from all reports; the same on all processes, and of a size that does not grow
    with their number. Ranks are spans.
    """

    calls: list[tuple[str, list[list[int]]]]  # Label and ranks of each different call.
    failed: list[tuple[str, list[list[int]]]]  # Each error, and the ranks that have it.
    modules: list[list[list[int]]]  # The ranks of each different module.
    values: Differing  # Ranks with different host values.
    knows_values: bool  # Whether all processes reported their host values.
    roles: dict[str, Roles]  # By the digest of the program.


def decide(packed: dict[int, bytes]) -> bytes:
    """Merges packed `Report`s to a packed `Decision`."""
    reports = {rank: Report(*plain.unpack(each)) for rank, each in sorted(packed.items())}
    calls = sides_of({rank: (each.label, each.call) for rank, each in reports.items()})
    failed = sides_of({rank: each.error for rank, each in reports.items() if each.error})
    modules = sides_of({rank: each.module for rank, each in reports.items() if each.module})
    group = group_name(list(reports))
    values = {rank: {group: each.values} for rank, each in reports.items() if each.values}
    roles = {}
    for program in {each.program for each in reports.values()} - {""}:
        alike = {rank: each for rank, each in reports.items() if each.program == program}
        needing = [rank for rank, each in alike.items() if not each.holds]
        having = [rank for rank, each in alike.items() if each.holds == "disk"]
        if needing:
            leader = (having or needing)[0]
            receivers = [rank for rank in needing if rank != leader]
            directories = {alike[rank].directory for rank in (leader, *receivers)}
            shares = len(directories) == 1 and "" not in directories
            roles[program] = Roles(leader, not having, spans_of(receivers), shares)
    return plain.pack(
        Decision(
            [(reports[spans[0][0]].label, spans) for spans in calls],
            [(reports[spans[0][0]].error, spans) for spans in failed],
            modules,
            differing(values),
            len(values) == len(reports),
            roles,
        )
    )


def _call_facts(described: Described, request: Request) -> dict[str, str]:
    """What must be the same in the calls of all processes.

    Of a static object that is its class: its attributes may name the rank, and not be used.
    """
    facts = described.call | described.environment
    for static in request.key.signature.statics:
        values = static.value if isinstance(static.value, tuple) else (static.value,)
        if not all(isinstance(each, _PLAIN) for each in values):
            facts[f"static {static.name}"] = static.kind.__qualname__
    return {name: fact for name, fact in facts.items() if name not in _MAY_DIFFER}


def _replicated_host_values(request: Request) -> dict[str, str] | None:
    """Tokens of the host values that every process passes whole, by path.

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


def compare_call_values(name: str, request: Request, peers: Peers) -> None:
    """Compares the replicated host values of a call with those of the other processes.

    Raises `AgreementError` if they differ or one is late, `RankLostError` if one was lost.
    """
    values = {tuple(peers.ranks): _replicated_host_values(request) or {}}
    with peers.round(name, "its first call since it was warmed") as round:
        compare(round, f"before {name}", values)


class Together:
    """The part of this process while all build one program. `building` makes it.

    Attributes:
        data: the executable, serialized, where this process has sent or received it.
        is_published: whether it is stored.
        has_agreed: whether this process has reported.
        knows_values: whether the processes have compared the host values of the call.
    """

    def __init__(
        self, round: Round, request: Request, described: Described, cache: Any, watch: Stopwatch
    ):
        self._round, self._request, self._described = round, request, described
        self._cache, self._store, self._stopwatch = cache, cache.store(), watch
        self._staged: jaxcompat.Staged | None = None
        self._roles: Roles | None = None  # None where nobody needs the executable.
        self.has_agreed = False
        self.data, self.is_published, self.knows_values = b"", False, False

    def agree(self, staged: jaxcompat.Staged, program: str) -> None:
        """Compares the calls, and what all have lowered.

        Args:
            staged: the step, lowered.
            program: digest of what XLA is given; empty where this process has compiled it already.

        Raises:
            AgreementError: they differ.
        """
        self._staged, store = staged, self._store
        holds = directory = ""
        if self._cache.holds_module(program):
            holds = "memory"
        elif store is not None and store.disk.holds("program", program):
            holds = "disk"
        if store is not None:
            with contextlib.suppress(OSError):  # There is no key yet.
                directory = store.disk.vouch(b"the name of this directory").hex()[:16]
        module = _short_digest(jaxcompat.module_outline(staged.lowered))
        self._decide(module=module, program=program, holds=holds, directory=directory)

    def _decide(self, **lowered: str) -> None:
        self.has_agreed = True
        facts, label = _call_facts(self._described, self._request), self._described.label
        values = _replicated_host_values(self._request)
        call = _short_digest("\0".join(f"{name}\1{facts[name]}" for name in sorted(facts)))
        report = Report(label, call, digest_of(values) if values is not None else "", **lowered)
        decision = Decision(*plain.unpack(self._round.merge("report", plain.pack(report), decide)))
        if len(decision.calls) > 1:
            self._raise_different_calls(decision.calls, facts)
        if decision.failed:
            if report.error:
                return
            texts = [
                f"{readable_ranks(ranks_in(spans))}: {each}" for each, spans in decision.failed
            ]
            raise AgreementError(
                f"not all ranks have the program of {label}: {'; '.join(texts)}",
                sides=(tuple(rank for _, spans in decision.failed for rank in ranks_in(spans)),),
            )
        if len(decision.modules) > 1:
            self._raise_different_modules([ranks_in(spans) for spans in decision.modules])
        groups = {tuple(self._round.ranks): values or {}}
        compare(self._round, f"before {label}", groups, decision.values)
        self.knows_values = decision.knows_values
        if report.program in decision.roles:
            self._roles = Roles(*decision.roles[report.program])

    def _raise_different_calls(self, calls: list[tuple[str, Any]], facts: dict[str, str]) -> None:
        sides = [(label, ranks_in(spans)) for label, spans in calls]
        all_ranks = [tuple(ranks) for _, ranks in sides]
        label, usual = sides[0]
        if len({label for label, _ in sides}) > 1:
            named = [f"{readable_ranks(ranks)}: {label}" for label, ranks in sides]
            raise AgreementError(
                f"the ranks call different steps: {'; '.join(named)}",
                sides=all_ranks,
                hint="call the same steps in the same order on all processes",
            )
        speakers = [ranks[0] for ranks in all_ranks]
        explained = self._round.explained_by("the call", speakers, lambda: facts)
        changes: list[Change] = []
        lines = []
        for ranks in all_ranks[1:]:
            found = differences(explained[speakers[0]], explained[ranks[0]])
            changes += found
            lines += [by_rank(change, usual, ranks) for change in found]
        raise AgreementError(
            f"the ranks call {label} differently:\n  " + "\n  ".join(lines[:_MAX_SHOWN]),
            changes,
            all_ranks,
            hint="make the same call, with the same options and settings, on all processes",
        )

    def _raise_different_modules(self, sides: list[list[int]]) -> None:
        """Raises an error with the first line at which two modules differ."""
        speakers, staged = (sides[0][0], sides[1][0]), self._staged
        assert staged is not None
        texts = self._round.explained_by("module text", speakers, staged.module_text())
        found = difference(*(texts[rank] for rank in speakers), is_users_file, file_label)
        changes = list(found.changes) if found is not None else []
        lines = [by_rank(change, sides[0], sides[1]) for change in changes]
        if found is not None and found.more:
            lines.append(f"and {found.more} more places")
        named = [*map(readable_ranks, sides), *["more"] * (len(sides) == MAX_SIDES)]
        raise AgreementError(
            f"{listed(named)} lowered different programs of {self._described.label}:"
            + "".join(f"\n  {line}" for line in lines),
            changes,
            [tuple(ranks) for ranks in sides],
            hint="run the same code on all processes; what a step computes must not depend on its "
            "rank",
        )

    def obtain(
        self, compilation: jaxcompat.Compilation, before_compiling: Callable[[], None]
    ) -> tuple[Any, str]:
        """Returns the executable, and where it was: one process has or compiles it, the others
        load it.

        Raises:
            AgreementError: the process that was to compile it could not.
        """
        roles, round, store = self._roles, self._round, self._store
        if (executable := self._cache.executable(compilation)) is not None:
            return executable, "memory"
        if roles is not None and roles.compiles:
            before_compiling()  # On each of them: a session that forbids it raises on all.
        receivers = ranks_in(roles.receivers) if roles is not None else []
        if roles is None or (round.rank != roles.leader and round.rank not in receivers):
            return self._alone(compilation, before_compiling)
        if round.rank == roles.leader:
            said = _FAILED
            try:
                executable, source = self._alone(compilation, before_compiling)
                with self._stopwatch.stage("give"):
                    said = self._given(compilation, executable, source) if receivers else said
            except Exception as error:
                said += first_line(error).encode()
                raise
            finally:
                if receivers:  # They wait for it.
                    with self._stopwatch.stage("give"):
                        round.send("program", said, len(receivers))
            return executable, source
        with self._stopwatch.stage("wait"):
            said = round.receive("program", roles.leader)
        if said.startswith(_FAILED):
            raise AgreementError(
                f"not all ranks have the program of {self._described.label}: "
                f"rank {roles.leader}: {said.removeprefix(_FAILED).decode()}",
                sides=((roles.leader,),),
            )
        try:
            if said == _STORED and store is not None:
                self.is_published = True
                entry = store.disk.read("program", compilation.digest)
                data = entry.payload if entry is not None else b""
            else:
                data = self.data = zlib.decompress(said.removeprefix(_SENT))
            if data:
                return compilation.load(data), f"rank {roles.leader}"
        except Exception as error:
            text = "rank %d compiles %s for itself: it cannot load what rank %d sent (%s)"
            _log.warning(text, round.rank, self._described.label, roles.leader, error)
            self.data = b""
        return self._alone(compilation, before_compiling)

    def _alone(
        self, compilation: jaxcompat.Compilation, before_compiling: Callable[[], None]
    ) -> tuple[Any, str]:
        found = self._store.find(compilation, self._stopwatch.stage) if self._store else None
        if found is not None:
            return found
        before_compiling()
        with self._stopwatch.stage("compile"):
            return compilation.compile(), "compiled"

    def _given(self, compilation: jaxcompat.Compilation, executable: Any, source: str) -> bytes:
        """Serializes an executable for the others; stores it at once if they look for it there."""
        store, roles, staged = self._store, self._roles, self._staged
        assert roles is not None and staged is not None
        if source != "compiled":
            entry = store.disk.read("program", compilation.digest) if store is not None else None
            self.data, self.is_published = entry.payload if entry is not None else b"", True
        else:
            try:
                self.data = jaxcompat.serialize_executable(executable)
            except jaxcompat.NotStorable as error:
                _log.info("each rank compiles %s for itself: %s", self._described.label, error)
            if self.data and roles.shares_directory and store is not None:
                publication = Publication(
                    compilation.digest,
                    executable,
                    staged.module_text(),
                    dict(self._stopwatch.seconds),
                    data=self.data,
                )
                self.is_published = not store.publish(publication, self._described.label)
        is_there = self.is_published and roles.shares_directory
        return _STORED if is_there else _SENT + zlib.compress(self.data, 1)

    def fail(self, error: Exception) -> None:
        """Tells the others, who wait for this process, that it has no program."""
        if not self.has_agreed:
            self._decide(error=first_line(error))


@contextlib.contextmanager
def building(
    peers: Peers,
    name: str,
    request: Request,
    described: Described,
    cache: Any,
    stopwatch: Stopwatch,
    reason: str,
) -> Iterator[Together]:
    """Context manager of a build of one program by all processes.

    Args:
        peers: the processes.
        name: the step.
        request: the call.
        described: the call, in words.
        cache: the `ProgramCache`.
        stopwatch: times the stages.
        reason: why the call needs a new program, in one line.

    Raises:
        AgreementError: the processes do not make the same call, do not lower the same module, or
            one of them did not take part in time.
        RankLostError: a process was lost.
    """
    with peers.round(name, reason) as round:
        round.announce()  # A trace may take minutes.
        together = Together(round, request, described, cache, stopwatch)
        try:
            yield together
        except Exception as error:
            with stopwatch.stage("agree"):
                together.fail(error)
            raise


def _short_digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:32]
