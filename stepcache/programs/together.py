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
from stepcache.pods.replicas import compare, digest_of, is_local, token_of
from stepcache.pods.rounds import MAX_SIDES, Peers, Round, by_rank, ranks_in, sides_of
from stepcache.programs.earlier_runs import Described, differences
from stepcache.programs.module_difference import difference
from stepcache.programs.store import Publication
from stepcache.units import listed, readable_ranks, shortened, spans_of

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
_FAILED, _STORED, _SENT = b"-", b"=", b"+"
_log = logging.getLogger("stepcache")


class Report(NamedTuple):
    """What a process reports when it has lowered the step. Digests are short."""

    label: str  # The step, by file and name.
    call: str  # Digest of what must be the same in all calls.
    error: str = ""  # Why there is no module.
    module: str = ""  # Digest of the lowered module, without locations.
    values: str = ""  # Digest of the replicated host values; empty if they are unknown.
    program: str = ""  # Digest of the program; hosts of one kind have the same.
    holds: str = ""  # "memory", "disk", or empty where it needs the executable.
    directory: str = ""  # Names the directory of stored programs; empty for none.


class Roles(NamedTuple):
    """Who does what for one program, on the hosts of one kind."""

    leader: int  # Has it on disk, or compiles it: the lowest such rank.
    compiles: bool  # Whether the leader has to compile it.
    receivers: list[list[int]]  # Spans of the ranks that take it from the leader.
    shares_directory: bool  # Whether they find it in the leader's directory.


class Decision(NamedTuple):
    """What follows from all reports; the same on all processes, and of a size that does not grow
    with their number.
    """

    differing: str  # The first field of `Report` that must not differ, and does; or empty.
    sides: list[list[Any]]  # Each of its values, and the spans of the ranks that have it.
    knows_values: bool  # Whether all processes reported their host values.
    roles: dict[str, Roles]  # By the digest of the program.


def decide(packed: dict[int, bytes]) -> bytes:
    """Merges packed `Report`s to a packed `Decision`."""
    reports = {rank: Report(*plain.unpack(each)) for rank, each in sorted(packed.items())}
    knows_values = all(each.values for each in reports.values())
    for field in ("label", "call", "error", "module", *["values"] * knows_values):
        values = {rank: getattr(each, field) for rank, each in reports.items()}
        if len(set(values.values())) > 1 or (field == "error" and values[min(values)]):
            sides = [[values[spans[0][0]], spans] for spans in sides_of(values)]
            return plain.pack(Decision(field, sides, knows_values, {}))
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
    return plain.pack(Decision("", [], knows_values, roles))


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
    with peers.round(name, "calls it for the first time since it was warmed") as round:
        compare(round, f"before {name}", values)


class Together:
    """The part of this process while all build one program. `building` makes it.

    Attributes:
        has_agreed: whether this process has reported.
        knows_values: whether the processes have compared the host values of the call.
    """

    def __init__(self, round: Round, request: Request, described: Described, cache: Any):
        self._round, self._request, self._described = round, request, described
        self._cache, self._store, self._staged = cache, cache.store(), None
        self._roles, self._receivers = Roles(-1, False, [], False), []
        self.has_agreed = self.knows_values = False

    def agree(self, staged: jaxcompat.Staged, program: str) -> None:
        """Compares the calls, and what all have lowered.

        Args:
            staged: the step, lowered.
            program: digest of what XLA is given; empty where this process has compiled it already.

        Raises:
            AgreementError: they differ.
        """
        store, holds, directory = self._store, "", ""
        if self._cache.holds_module(program):
            holds = "memory"
        elif store is not None and store.disk.holds("program", program):
            holds = "disk"
        if store is not None:
            with contextlib.suppress(OSError):  # There is no key yet.
                directory = store.disk.vouch(b"the name of this directory").hex()[:16]
        self._staged = staged
        module = _short_digest(jaxcompat.module_outline(staged.lowered))
        self._report(module=module, program=program, holds=holds, directory=directory)

    def _report(self, **lowered: str) -> None:
        self.has_agreed = True
        facts, values = _call_facts(self._described, self._request), None
        if not lowered.get("error"):
            values = _replicated_host_values(self._request)
        call = _short_digest("\0".join(f"{name}\1{facts[name]}" for name in sorted(facts)))
        digest = digest_of(values) if values is not None else ""
        report = Report(self._described.label, call, values=digest, **lowered)
        decision = Decision(*plain.unpack(self._round.merge("report", plain.pack(report), decide)))
        if decision.differing:
            if not (decision.differing == "error" and report.error):
                self._raise_differing(decision, facts, values or {})
            return
        self.knows_values = decision.knows_values
        if report.program in decision.roles:
            self._roles = Roles(*decision.roles[report.program])
            self._receivers = ranks_in(self._roles.receivers)

    def _raise_differing(
        self, decision: Decision, facts: dict[str, str], values: dict[str, str]
    ) -> None:
        """Raises an error that says what differs, and on which ranks."""
        what, label = decision.differing, self._described.label
        if what == "values":
            return compare(self._round, f"before {label}", {tuple(self._round.ranks): values})
        sides = [(value, ranks_in(spans)) for value, spans in decision.sides]
        all_ranks = [tuple(ranks) for _, ranks in sides]
        said = "; ".join(f"{readable_ranks(ranks)}: {value}" for value, ranks in sides if value)
        if what == "label":
            hint = "call the same steps in the same order on all processes"
            raise AgreementError(
                f"the ranks call different steps: {said}", (), all_ranks, hint=hint
            )
        if what == "error":
            failed = [ranks for value, ranks in zip(sides, all_ranks, strict=True) if value[0]]
            raise AgreementError(f"not all ranks have the program of {label}: {said}", (), failed)
        usual, *others = all_ranks
        own: Callable[[], Any] = lambda: facts  # noqa: E731
        if what == "module" and self._staged is not None:
            own, others = self._staged.module_text(), others[:1]  # It is large.
        speakers = [usual[0], *(ranks[0] for ranks in others)]
        explained = self._round.explained_by(what, speakers, own)
        changes: list[Change] = []
        lines = []
        for ranks in others:
            one, other = explained[usual[0]], explained[ranks[0]]
            compared = None
            if what == "call":
                found = differences(one, other)
            else:
                compared = difference(one, other, is_users_file, file_label)
                found = compared.changes if compared is not None else ()
            changes += found
            lines += [by_rank(change, usual, ranks) for change in found]
            if compared is not None and compared.more:
                lines.append(f"and {compared.more} more places")
        named = [*map(readable_ranks, all_ranks), *["more"] * (len(sides) == MAX_SIDES)]
        texts = {
            "call": f"the ranks call {label} differently:",
            "module": f"{listed(named)} lowered different programs of {label}:",
        }
        hints = {
            "call": "make the same call, with the same options and settings, on all processes",
            "module": "run the same code on all processes; what a step computes must not depend "
            "on its rank",
        }
        text = "\n  ".join([texts[what], *shortened(lines, _MAX_SHOWN)])
        raise AgreementError(text, changes, all_ranks, hint=hints[what])

    def take(
        self, compilation: jaxcompat.Compilation, before_compiling: Callable[[], None]
    ) -> tuple[Any, str, bytes]:
        """Returns the executable that another process has or compiles, that process, and what it
        has sent; None where this one is to have it by itself.

        Raises:
            AgreementError: the other process could not compile it.
        """
        roles, rank, store = self._roles, self._round.rank, self._store
        if roles.compiles:
            before_compiling()  # On each of them: a session that forbids it raises on all.
        if rank not in self._receivers:
            return None, "", b""
        said = self._round.receive("program", roles.leader)
        label, leader = self._described.label, f"rank {roles.leader}"
        if said.startswith(_FAILED):
            raise AgreementError(
                f"not all ranks have the program of {label}: {leader}: {said[1:].decode()}",
                sides=((roles.leader,),),
            )
        try:
            if said != _STORED:
                data = zlib.decompress(said[1:])
                return compilation.load(data) if data else None, leader, data
            entry = store.disk.read("program", compilation.digest) if store is not None else None
            return compilation.load(entry.payload) if entry is not None else None, leader, b""
        except Exception as error:
            text = "rank %d compiles %s for itself: it cannot load what %s sent (%s)"
            _log.warning(text, rank, label, leader, error)
            return None, "", b""

    def give(self, compilation: jaxcompat.Compilation, executable: Any, source: str) -> bytes:
        """Gives the others an executable that this process was to have; stores it at once if they
        look for it there. Returns it, serialized, if that was needed.
        """
        store, roles, label = self._store, self._roles, self._described.label
        if self._round.rank != roles.leader or not self._receivers:
            return b""
        data, is_stored, module = b"", source != "compiled", lambda: ""
        if not is_stored:
            try:
                data = jaxcompat.serialize_executable(executable)
            except jaxcompat.NotStorable as error:
                _log.info("each rank compiles %s for itself: %s", label, error)
        elif not roles.shares_directory and store is not None:
            entry = store.disk.read("program", compilation.digest)
            data = entry.payload if entry is not None else b""
        if data and roles.shares_directory and store is not None:
            module = self._staged.module_text() if self._staged is not None else module
            published = Publication(compilation.digest, executable, module, {}, data=data)
            is_stored = not store.publish(published, label)
        is_there = is_stored and roles.shares_directory
        self._send(_STORED if is_there else _SENT + zlib.compress(data, 1))
        return data if source == "compiled" else b""

    def _send(self, said: bytes) -> None:
        receivers, self._receivers = len(self._receivers), []
        self._round.send("program", said, receivers)

    def fail(self, error: Exception) -> None:
        """Tells the others, who wait for this process, that it has no program."""
        if not self.has_agreed:
            self._report(error=first_line(error))
        elif self._round.rank == self._roles.leader and self._receivers:
            self._send(_FAILED + first_line(error).encode())


@contextlib.contextmanager
def building(
    peers: Peers,
    name: str,
    request: Request,
    described: Described,
    cache: Any,
    reason: str,
) -> Iterator[Together]:
    """Context manager of a build of one program by all processes.

    Args:
        peers: the processes.
        name: the step.
        request: the call.
        described: the call, in words.
        cache: the `ProgramCache`.
        reason: why the call needs a new program, in one line.

    Raises:
        AgreementError: the processes do not make the same call, do not lower the same module, or
            one of them did not take part in time.
        RankLostError: a process was lost.
    """
    with peers.round(name, f"needs a new program: {reason}") as round:
        round.announce()  # A trace may take minutes.
        together = Together(round, request, described, cache)
        try:
            yield together
        except Exception as error:
            together.fail(error)
            raise


def _short_digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:32]
