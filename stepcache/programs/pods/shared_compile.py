"""A shared compile: the processes of a pod agree on a new program, one of them has it or builds it,
and the others load it.

First each reports its call. If the calls differ, all raise. If the dependencies differ, each traces
the step, and the lowered programs are compared before XLA compiles one. Then the leader, a rank
that has the program on disk or else the first one, sends it to its followers: what the trace
depends on while XLA compiles, and the executable after that. Before it compiles, it asks a few
others for the executable. Each kind of host has its own leader. In the end all compare what they
hold, and nothing runs before that.
"""

from __future__ import annotations

from stepcache.calls.global_arguments import replicated_host_values
from stepcache.calls.step_spec import StepSpec
from stepcache.distributed.agreement import Round, by_rank, ranks_in
from stepcache.distributed.peers import Peers
from stepcache.distributed.replicas import compare
from stepcache.errors import AgreementError
from stepcache.events import Change
from stepcache.fingerprint.dependencies import differences
from stepcache.programs.levels import Levels
from stepcache.programs.lookup import Lookup, LookupResult
from stepcache.programs.pods.follower import Follower
from stepcache.programs.pods.leader import Leader
from stepcache.programs.pods.lowered import MAX_SHOWN
from stepcache.programs.pods.roles import CallReport, Decision, Dependencies, decide
from stepcache.programs.resolution import MissedCall, Resolution
from stepcache.units import readable_ranks


def resolve_together(
    levels: Levels, spec: StepSpec, call: MissedCall, peers: Peers, reason: str
) -> Resolution:
    """Resolves a miss together with the other processes of a pod.

    Args:
        levels, spec: of the step.
        call, peers: the call and the processes.
        reason: why the call needs a new program, in one line.

    Raises:
        AgreementError: the processes do not make the same call, do not lower the same program, or
            one of them did not take part in time.
        RankLostError: a process was lost.
    """
    archive, stopwatch = call.archive, call.stopwatch
    with peers.round(spec.name, reason) as round:
        with stopwatch.stage("hash"):
            lookup = Lookup(spec, call.request)
            dependencies = Dependencies.of(lookup)
            values = replicated_host_values(call.request)
        result = LookupResult()
        if archive is not None:
            with stopwatch.stage("read"):
                # One rank asks the shared cache; the others take the program from it.
                asks = round.rank == min(round.ranks)
                result = archive.look_up(lookup, stopwatch.stage if asks else None)
        with stopwatch.stage("agree"):
            report = CallReport.of(lookup, dependencies, result, archive, values)
            decision = Decision.unpacked(round.merge("call", report.packed(), decide))
            if len(decision.calls) > 1:
                _raise_different_calls(round, decision, dependencies)
            groups = {tuple(round.ranks): values or {}}
            compare(round, f"before {report.label}", groups, decision.values)
        roles = decision.roles[report.host]
        part = Leader if roles.leader == round.rank else Follower
        return part(round, decision, roles, report, levels, call, lookup, result).resolve()


def _raise_different_calls(round: Round, decision: Decision, dependencies: Dependencies) -> None:
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
    explained = round.explained_by("the call", speakers, lambda: dependencies.call)
    changes: list[Change] = []
    lines = []
    for ranks in all_ranks[1:]:
        found = differences(explained[speakers[0]], explained[ranks[0]])
        changes += found
        lines += [by_rank(change, usual, ranks) for change in found]
    raise AgreementError(
        f"the ranks call {label} differently:\n  " + "\n  ".join(lines[:MAX_SHOWN]),
        changes,
        all_ranks,
        hint="make the same call, with the same options and settings, on all processes",
    )
