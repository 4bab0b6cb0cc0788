"""What each process reports about a call that needs a new program, and what follows for all."""

from __future__ import annotations

from dataclasses import astuple, dataclass
from typing import Any

from stepcache.distributed.agreement import sides_of
from stepcache.distributed.replicas import Differing, differing, digest_of, group_name
from stepcache.fingerprint.dependencies import digest_dependencies, kind_of
from stepcache.programs.archive import Archive
from stepcache.programs.lookup import Lookup, LookupResult
from stepcache.storage import plain

_ASKED_AT_MOST = 8
# These may differ between hosts. A program loads only on a host on which all of them are the same.
_OF_HOST = (
    "environment CPU",
    "environment device kind",
    "environment devices",
    "environment system",
    "environment topology",
)
_OF_CALL = ("argument", "options", "mesh", "config", "environment")
# Values inside the tree of the arguments, a dataclass's rank for one, may differ between ranks.
_OF_CALL_BY_NAME = ("arguments", "package jax", "package jaxlib")
# Where a process was started may differ. What JAX reads of it is among the settings too.
_OF_PROCESS = ("environment argv", "environment python")


@dataclass(frozen=True, slots=True)
class Dependencies:
    """What a call depends on before it is traced, without what may differ between hosts."""

    # Leaves, shardings, statics, options, settings and flags: the same on all processes.
    call: dict[str, str]
    # Code, closures and globals. If they differ, each traces, and lowered programs are compared.
    code: dict[str, str]

    @classmethod
    def of(cls, lookup: Lookup) -> Dependencies:
        """Returns those of a lookup, before any record is read."""
        call, code = {}, {}
        statics = {f"static {static.name}" for static in lookup.statics}
        for name, dependency in without_host(lookup.base.dependencies).items():
            # Of a static object the class belongs to the call; its attributes may not be used.
            is_static = name in statics and not dependency.startswith(("code ", "see "))
            of_call = kind_of(name) in _OF_CALL or name in _OF_CALL_BY_NAME
            of_call = of_call and name not in _OF_PROCESS
            (call if is_static or of_call else code)[name] = dependency
        return cls(call, code)


def without_host(dependencies: dict[str, str]) -> dict[str, str]:
    """Returns the dependencies that must not differ between hosts."""
    return {name: dependency for name, dependency in dependencies.items() if name not in _OF_HOST}


@dataclass(frozen=True, slots=True)
class CallReport:
    """What a process contributes to the agreement on a new program. Digests are short."""

    label: str  # The step, by file and name.
    call: str  # Digest of what must be the same on all processes.
    code: str  # Digest of the other dependencies that are known before a trace.
    host: str  # Digest of the kind of host. Programs are shared among hosts of one kind.
    directory: str  # Identifies the directory of stored programs; empty for none.
    has_programs: bool  # Whether that directory holds any program.
    program: str  # Digest of the program in it for this call; empty for none.
    loads_untraced: bool  # Whether this process would run that program without a trace.
    values: str  # Digest of the replicated host values; empty if they are unknown.

    def packed(self) -> bytes:
        return plain.pack(astuple(self))

    @classmethod
    def of(
        cls,
        lookup: Lookup,
        dependencies: Dependencies,
        result: LookupResult,
        archive: Archive | None,
        values: dict[str, str] | None,
    ) -> CallReport:
        """Returns the report of this process."""
        base = lookup.base.dependencies
        return cls(
            lookup.address.label,
            digest_dependencies(dependencies.call)[:16],
            digest_dependencies(dependencies.code)[:16],
            digest_dependencies({name: base.get(name, "") for name in _OF_HOST})[:16],
            archive.name()[:16] if archive is not None else "",
            archive is not None and archive.has_programs(),
            result.record.program[:16] if result.record is not None else "",
            archive is None or archive.verify != "before",
            digest_of(values) if values is not None else "",
        )


@dataclass(frozen=True, slots=True)
class Roles:
    """Who does what for a new program, on the hosts of one kind."""

    # Sends the program to the others: the lowest rank that has it on disk, or else the lowest.
    leader: int
    builds: bool  # Whether the leader has to build it.
    code: str  # Digest of the leader's dependencies.
    program: str  # Digest of the leader's stored program; empty if it builds one.
    followers: int  # How many ranks receive the program.
    # Ranks that look for the executable on their disks before the leader compiles it; one for each
    # directory, and only a few.
    asked: list[int]


@dataclass(frozen=True, slots=True)
class Decision:
    """What follows from the reports of all processes; the same on all of them."""

    # Label and ranks, as spans, of each different call; more than one is an error.
    calls: list[tuple[str, list[list[int]]]]
    values: Differing  # Ranks with different host values, as spans.
    knows_values: bool  # Whether all processes reported their host values.
    compares_lowered: bool  # Whether lowered programs are compared before XLA compiles them.
    shares_directory: bool  # Whether all processes use one directory.
    first: int  # The lowest rank.
    roles: dict[str, Roles]  # By kind of host.

    @classmethod
    def unpacked(cls, packed: bytes) -> Decision:
        """From `decide`."""
        *rest, roles = plain.unpack(packed)
        return cls(*rest, roles={host: Roles(*each) for host, each in roles.items()})


def decide(packed: dict[int, bytes]) -> bytes:
    """Merges the packed reports of all ranks to a packed `Decision`.

    Its size does not grow with the number of processes.
    """
    unpacked = {each: CallReport(*plain.unpack(each)) for each in set(packed.values())}
    reports = {rank: unpacked[each] for rank, each in sorted(packed.items())}
    calls = sides_of({rank: (each.label, each.call) for rank, each in reports.items()})
    name = group_name(list(reports))
    values = {rank: {name: each.values} for rank, each in reports.items() if each.values}
    untraced = all(each.loads_untraced for each in reports.values())
    by_host: dict[str, dict[int, CallReport]] = {}
    for rank, each in reports.items():
        by_host.setdefault(each.host, {})[rank] = each
    roles = {host: _roles_on(alike, untraced) for host, alike in by_host.items()}
    directories = {each.directory for each in reports.values()}
    decision = Decision(
        calls=[(reports[spans[0][0]].label, spans) for spans in calls],
        values=differing(values),
        knows_values=len(values) == len(reports),
        compares_lowered=len({each.code for each in reports.values()}) > 1
        and any(each.builds for each in roles.values()),
        shares_directory=len(directories) == 1 and "" not in directories,
        first=min(reports),
        roles=roles,
    )
    return plain.pack(astuple(decision))


def _roles_on(reports: dict[int, CallReport], untraced: bool) -> Roles:
    """Returns the roles on the hosts of one kind, by the reports of their ranks."""
    having = [rank for rank, each in reports.items() if each.program and untraced]
    leader = (having or list(reports))[0]
    own = reports[leader]
    followers = [
        rank
        for rank, each in reports.items()
        if rank != leader and (not having or each.program != own.program)
    ]
    by_directory: dict[Any, int] = {}
    for rank, each in reports.items():
        if each.has_programs:
            by_directory.setdefault(each.directory or rank, rank)
    by_directory.pop(own.directory or leader, None)
    asked = sorted(by_directory.values())[:_ASKED_AT_MOST] if not having else []
    return Roles(leader, not having, own.code, own.program, len(followers), asked)
