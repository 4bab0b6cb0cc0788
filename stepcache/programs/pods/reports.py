"""What each process reports about a call that needs a new program, and what follows for all."""

from __future__ import annotations

import hashlib
from dataclasses import astuple, dataclass

from stepcache.calls.step_spec import Request
from stepcache.distributed.agreement import sides_of
from stepcache.distributed.replicas import Differing, differing, group_name
from stepcache.link import plain
from stepcache.programs.earlier_runs import Described
from stepcache.units import spans_of

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


def call_facts(described: Described, request: Request) -> dict[str, str]:
    """What must be the same on all processes before a step is traced.

    Of a static object that is its class: its attributes may name the rank, and not be used.
    """
    facts = described.call | described.environment
    for static in request.key.signature.statics:
        values = static.value if isinstance(static.value, tuple) else (static.value,)
        if not all(isinstance(each, _PLAIN) for each in values):
            facts[f"static {static.name}"] = static.kind.__qualname__
    return {name: fact for name, fact in facts.items() if name not in _MAY_DIFFER}


@dataclass(frozen=True, slots=True)
class CallReport:
    """What a process reports before it traces the step. Digests are short."""

    label: str  # The step, by file and name.
    call: str  # Digest of `call_facts`.
    values: str  # Digest of the replicated host values; empty if they are unknown.

    def packed(self) -> bytes:
        return plain.pack(astuple(self))


@dataclass(frozen=True, slots=True)
class CallDecision:
    """What follows from the reports of the call; the same on all processes."""

    # Label and ranks, as spans, of each different call; more than one is an error.
    calls: list[tuple[str, list[list[int]]]]
    values: Differing  # Ranks with different host values, as spans.
    knows_values: bool  # Whether all processes reported their host values.


def decide_on_calls(packed: dict[int, bytes]) -> bytes:
    """Merges packed `CallReport`s to a packed `CallDecision`; its size does not grow with ranks."""
    reports = {rank: CallReport(*plain.unpack(each)) for rank, each in sorted(packed.items())}
    calls = sides_of({rank: (each.label, each.call) for rank, each in reports.items()})
    name = group_name(list(reports))
    values = {rank: {name: each.values} for rank, each in reports.items() if each.values}
    named = [(reports[spans[0][0]].label, spans) for spans in calls]
    decision = CallDecision(named, differing(values), len(values) == len(reports))
    return plain.pack(astuple(decision))


@dataclass(frozen=True, slots=True)
class ModuleReport:
    """What a process reports when it has lowered the step."""

    module: str  # Digest of the lowered module, without locations; empty where it failed.
    program: str  # Digest of the program; hosts of one kind have the same.
    holds: str  # "memory", "disk", or empty where it needs the executable.
    directory: str  # Names the directory of stored programs; empty for none.
    error: str = ""  # Why there is no module.

    def packed(self) -> bytes:
        return plain.pack(astuple(self))


@dataclass(frozen=True, slots=True)
class Roles:
    """Who does what for one program, on the hosts of one kind."""

    leader: int  # Has it on disk, or compiles it: the lowest such rank.
    compiles: bool  # Whether the leader has to compile it.
    receivers: list[list[int]]  # Spans of the ranks that take it from the leader.
    shares_directory: bool  # Whether they find it in the leader's directory.


@dataclass(frozen=True, slots=True)
class ModuleDecision:
    """What follows from the reports of the modules; the same on all processes."""

    failed: list[tuple[str, list[list[int]]]]  # Error and ranks, as spans.
    sides: list[list[list[int]]]  # Ranks, as spans, of each different module.
    roles: dict[str, Roles]  # By the digest of the program.

    @classmethod
    def unpacked(cls, packed: bytes) -> ModuleDecision:
        failed, sides, roles = plain.unpack(packed)
        return cls(failed, sides, {program: Roles(*each) for program, each in roles.items()})


def decide_on_modules(packed: dict[int, bytes]) -> bytes:
    """Merges packed `ModuleReport`s to a packed `ModuleDecision`."""
    reports = {rank: ModuleReport(*plain.unpack(each)) for rank, each in sorted(packed.items())}
    failed = sides_of({rank: each.error for rank, each in reports.items() if each.error})
    errors = [(reports[spans[0][0]].error, spans) for spans in failed]
    sides = sides_of({rank: each.module for rank, each in reports.items() if each.module})
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
            roles[program] = astuple(Roles(leader, not having, spans_of(receivers), shares))
    return plain.pack([errors, sides, roles])


def short_digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:32]
