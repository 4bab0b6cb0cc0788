"""Builds a program together with the other processes of a pod.

Every process traces and lowers the step. Before it is traced, all compare their calls; before XLA
compiles, what they have lowered. Then one process of each kind of host has or compiles the
executable, and the others load it. Nothing runs before all have it.
"""

from __future__ import annotations

import contextlib
import logging
import zlib
from collections.abc import Callable, Sequence
from typing import Any

from stepcache import jaxcompat
from stepcache.calls.step_spec import Request, StepSpec
from stepcache.distributed.agreement import MAX_SIDES, Round, by_rank, ranks_in
from stepcache.distributed.peers import Peers
from stepcache.distributed.replicas import compare, digest_of
from stepcache.errors import AgreementError, first_line
from stepcache.events import Change
from stepcache.link import plain
from stepcache.origin import file_label, is_users_file
from stepcache.programs.build import Program, Stopwatch, build
from stepcache.programs.earlier_runs import Described, differences
from stepcache.programs.module_difference import difference
from stepcache.programs.pods.host_values import replicated_host_values
from stepcache.programs.pods.reports import (
    CallDecision,
    CallReport,
    ModuleDecision,
    ModuleReport,
    Roles,
    call_facts,
    decide_on_calls,
    decide_on_modules,
    short_digest,
)
from stepcache.programs.store import ProgramStore, Publication
from stepcache.units import listed, readable_ranks

_MAX_SHOWN = 12

_log = logging.getLogger("stepcache")


def build_together(
    spec: StepSpec,
    request: Request,
    stopwatch: Stopwatch,
    cache: Any,
    before_compiling: Callable[[Callable[[], str], str], None],
    peers: Peers,
    described: Described,
    reason: str,
) -> tuple[Program, Publication, bool]:
    """Builds a program together with the other processes.

    Args:
        spec, request, stopwatch, before_compiling: as for `build`.
        cache: the `ProgramCache`.
        peers: the processes.
        described: the call.
        reason: why the call needs a new program, in one line.

    Returns:
        The program, what is needed to store it, and whether the processes have compared the host
        values of the call.

    Raises:
        AgreementError: the processes do not make the same call, do not lower the same module, or
            one of them did not take part in time.
        RankLostError: a process was lost.
    """
    with peers.round(spec.name, reason) as round:
        with stopwatch.stage("agree"):
            knows_values = _agree_on_call(round, request, described)
        together = Together(round, described.label, cache, stopwatch)
        arguments = spec, request, stopwatch, cache.executable, cache.store(), before_compiling
        try:
            program, publication = build(*arguments, together)
        except Exception as error:
            with stopwatch.stage("agree"):
                together.fail(error)
            raise
    if together.data and not together.is_published:
        publication.data = together.data
    return program, publication, knows_values


def _agree_on_call(round: Round, request: Request, described: Described) -> bool:
    """Compares the calls of all processes. Returns whether their host values were compared."""
    facts, values = call_facts(described, request), replicated_host_values(request)
    call = short_digest("\0".join(f"{name}\1{facts[name]}" for name in sorted(facts)))
    report = CallReport(described.label, call, digest_of(values) if values is not None else "")
    merged = round.merge("call", report.packed(), decide_on_calls)
    decision = CallDecision(*plain.unpack(merged))
    if len(decision.calls) > 1:
        _raise_different_calls(round, decision, facts)
    compare(round, f"before {described.label}", {tuple(round.ranks): values or {}}, decision.values)
    return decision.knows_values


def _raise_different_calls(round: Round, decision: CallDecision, facts: dict[str, str]) -> None:
    """Raises an error that says what differs between the calls of the processes."""
    sides = [(label, ranks_in(spans)) for label, spans in decision.calls]
    all_ranks = [tuple(ranks) for _, ranks in sides]
    label, usual = sides[0]
    if len({label for label, _ in sides}) > 1:
        calls = [f"{readable_ranks(ranks)}: {label}" for label, ranks in sides]
        raise AgreementError(
            f"the ranks call different steps: {'; '.join(calls)}",
            sides=all_ranks,
            hint="call the same steps in the same order on all processes",
        )
    speakers = [ranks[0] for ranks in all_ranks]
    explained = round.explained_by("the call", speakers, lambda: facts)
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


class Together:
    """The part of this process while all build one program.

    Attributes:
        data: the executable, serialized, where this process has sent or received it.
        is_published: whether it is stored.
    """

    def __init__(self, round: Round, label: str, cache: Any, stopwatch: Stopwatch):
        self._round, self._label = round, label
        self._cache, self._store, self._stopwatch = cache, cache.store(), stopwatch
        self._roles: Roles | None = None  # None where nobody needs the executable.
        self._staged: jaxcompat.Staged | None = None
        self._has_reported = self._has_concluded = False
        self.data, self.is_published = b"", False

    def agree(self, staged: jaxcompat.Staged) -> None:
        """Compares what all have lowered. Raises `AgreementError` if they differ."""
        self._staged, program = staged, jaxcompat.digest_of(staged)
        module, store = jaxcompat.module_outline(staged.lowered), self._store
        holds = directory = ""
        if self._cache.holds_module(program):
            holds = "memory"
        elif store is not None and store.disk.holds("program", program):
            holds = "disk"
        if store is not None:
            with contextlib.suppress(OSError):  # There is no key yet.
                directory = store.disk.vouch(b"the name of this directory").hex()[:16]
        report = ModuleReport(short_digest(module), program, holds, directory)
        decision = self._merge(report)
        if len(decision.sides) > 1:
            self._raise_different_modules(decision, module)
        self._roles = decision.roles.get(program)

    def _merge(self, report: ModuleReport) -> ModuleDecision:
        self._has_reported = True
        merged = self._round.merge("module", report.packed(), decide_on_modules)
        decision = ModuleDecision.unpacked(merged)
        if decision.failed and not report.error:
            self._raise_failed(decision.failed)
        return decision

    def _raise_failed(self, failed: Sequence[tuple[str, Any]]) -> None:
        texts = [f"{readable_ranks(ranks_in(spans))}: {error}" for error, spans in failed]
        raise AgreementError(
            f"not all ranks have the program of {self._label}: {'; '.join(texts)}",
            sides=(tuple(rank for _, spans in failed for rank in ranks_in(spans)),),
        )

    def _raise_different_modules(self, decision: ModuleDecision, module: str) -> None:
        """Raises an error with the first line at which two modules differ."""
        sides = [ranks_in(spans) for spans in decision.sides]
        speakers, staged = (sides[0][0], sides[1][0]), self._staged
        assert staged is not None
        texts = self._round.explained_by("module text", speakers, staged.module_text())
        one, other = (texts[rank] for rank in speakers)
        found = difference(one, other, is_users_file, file_label)
        changes = list(found.changes) if found is not None else []
        lines = [by_rank(change, sides[0], sides[1]) for change in changes]
        if found is not None and found.more:
            lines.append(f"and {found.more} more places")
        named = [*map(readable_ranks, sides), *["more"] * (len(sides) == MAX_SIDES)]
        raise AgreementError(
            f"{listed(named)} lowered different programs of {self._label}:"
            + "".join(f"\n  {line}" for line in lines),
            changes,
            [tuple(ranks) for ranks in sides],
            hint="run the same code on all processes; what a step computes must not depend on its "
            "rank",
        )

    def obtain(
        self, compilation: jaxcompat.Compilation, before_compiling: Callable[[], None]
    ) -> tuple[Any, str]:
        """The executable, and where it was: one process has or compiles it, the others load it."""
        roles, stage = self._roles, self._stopwatch.stage
        if (executable := self._cache.executable(compilation)) is not None:
            return executable, "memory"
        if roles is not None and roles.compiles:
            before_compiling()  # On each of them: a session that forbids it raises on all.
        rank, receivers = self._round.rank, ranks_in(roles.receivers) if roles else []
        if roles is None:
            return self._alone(compilation, before_compiling)
        if rank == roles.leader:
            return self._lead(compilation, before_compiling, len(receivers))
        if rank in receivers:
            with stage("wait"):
                data = zlib.decompress(self._round.channel.receive("program", roles.leader))
            if not data and roles.shares_directory and self._store is not None:
                data, self.is_published = _stored_bytes(self._store, compilation.digest), True
            try:
                if data:
                    self.data = data
                    return compilation.load(data), f"rank {roles.leader}"
            except Exception as error:
                text = "rank %d compiles %s for itself: it cannot load what rank %d sent (%s)"
                _log.warning(text, rank, self._label, roles.leader, error)
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

    def _lead(
        self,
        compilation: jaxcompat.Compilation,
        before_compiling: Callable[[], None],
        receivers: int,
    ) -> tuple[Any, str]:
        """Loads or compiles the executable, and sends it to the others."""
        store, roles = self._store, self._roles
        assert roles is not None
        packed = zlib.compress(b"")
        try:
            executable, source = self._alone(compilation, before_compiling)
            with self._stopwatch.stage("give"):
                if receivers and source == "compiled":
                    self._serialize(compilation.digest, executable)
                elif receivers and store is not None:
                    self.data, self.is_published = _stored_bytes(store, compilation.digest), True
                if not (self.is_published and roles.shares_directory):
                    packed = zlib.compress(self.data, 1)
        finally:
            if receivers:  # They wait for it, or then compile for themselves.
                with self._stopwatch.stage("give"):
                    self._round.channel.send("program", packed)
        return executable, source

    def _serialize(self, digest: str, executable: Any) -> None:
        """Serializes what was compiled; stores it at once where the others look for it there."""
        store, roles, staged = self._store, self._roles, self._staged
        assert roles is not None and staged is not None
        try:
            self.data = jaxcompat.serialize_executable(executable)
        except jaxcompat.NotStorable as error:
            _log.info("each rank compiles %s for itself: %s", self._label, error)
            return
        if roles.shares_directory and store is not None:
            seconds = dict(self._stopwatch.seconds)
            publication = Publication(
                digest, executable, staged.module_text(), seconds, data=self.data
            )
            self.is_published = not store.publish(publication, self._label)

    def conclude(self) -> None:
        """Waits until all have the program. Raises `AgreementError` if one has not."""
        self._has_concluded = True
        merged = self._round.merge("held", plain.pack(""), _merge_errors)
        if failed := plain.unpack(merged):
            self._raise_failed(failed)

    def fail(self, error: Exception) -> None:
        """Tells the others, who wait for this process, that it has no program."""
        if not self._has_reported:
            self._merge(ModuleReport("", "", "", "", first_line(error)))
        elif not (self._has_concluded or isinstance(error, AgreementError)):
            self._has_concluded = True
            self._round.merge("held", plain.pack(first_line(error)), _merge_errors)


def _stored_bytes(store: ProgramStore, digest: str) -> bytes:
    """A stored executable, for another process; empty where there is none."""
    entry = store.disk.read("program", digest)
    return entry.payload if entry is not None else b""


def _merge_errors(contributions: dict[int, bytes]) -> bytes:
    """Merges the errors of all ranks to a packed list of each error with its ranks, as spans."""
    errors = {rank: plain.unpack(each) for rank, each in contributions.items()}
    failed: dict[str, list[list[int]]] = {}
    for rank, error in sorted(errors.items()):
        if error:
            failed.setdefault(error, []).append([rank, rank])
    return plain.pack(list(failed.items())[:MAX_SIDES])
