"""Builds a program together with the other processes of a pod.

Every process traces and lowers the step. Before a new program first runs, all compare their calls
and what they have lowered: a difference is an error on all of them. Else one process of each kind
of host has or compiles the executable, and the others take it from there.
"""

from __future__ import annotations

import contextlib
import hashlib
import logging
import zlib
from collections.abc import Callable, Iterator
from typing import Any

import jax
import numpy as np

from stepcache import jaxcompat
from stepcache.calls.step_spec import Request
from stepcache.errors import AgreementError, first_line
from stepcache.origin import file_label, is_users_file
from stepcache.pods.global_arrays import spans_processes
from stepcache.pods.replicas import compare, digest_of, is_local, token_of
from stepcache.pods.rounds import Peers, Round, Sides, disagreement
from stepcache.programs.earlier_runs import Described, differences
from stepcache.programs.module_difference import difference
from stepcache.programs.store import Publication
from stepcache.units import listed, readable_ranks

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
_FAILED, _STORED, _SENT = b"-", b"=", b"+"
_log = logging.getLogger("stepcache")


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


def givers(digest: str, sides: Sides) -> tuple[int, tuple[int, ...], bool]:
    """Returns who gives an executable to whom, on the hosts that need the same one.

    Args:
        digest: of the program of these hosts.
        sides: what ranks have reported of their programs: the digest, and whether they hold it.

    Returns:
        The lowest rank that has it on disk, or else the lowest that needs it; those that take it
        from there; and whether the first one has to compile it.
    """
    alike = {value.removeprefix(f"{digest} "): ranks for value, ranks in sides if digest in value}
    having, needing = alike.get("disk", ()), alike.get("", ())
    leader = (having or needing)[0] if needing else -1
    return leader, tuple(rank for rank in needing if rank != leader), not having


class Together:
    """The part of this process while all build one program. `building` makes it.

    Attributes:
        has_agreed: whether this process has compared what it has with the others.
        knows_values: whether the processes have compared the host values of the call.
    """

    def __init__(self, round: Round, request: Request, described: Described, cache: Any):
        self._round, self._request, self._described = round, request, described
        self._cache, self._store, self._staged = cache, cache.store(), None
        self._leader, self._receivers, self._compiles = -1, (), False
        self._shares_directory = self.has_agreed = self.knows_values = False

    def agree(self, staged: jaxcompat.Staged, program: str) -> None:
        """Compares the calls, and what all have lowered.

        Args:
            staged: the step, lowered.
            program: digest of what XLA is given; empty where this process has compiled it already.

        Raises:
            AgreementError: they differ.
        """
        store, holds, directory = self._store, "", ""
        if not program or self._cache.holds_module(program):
            holds = "memory"
        elif store is not None and store.disk.holds("program", program):
            holds = "disk"
        if store is not None:
            with contextlib.suppress(OSError):  # There is no key yet.
                directory = store.disk.vouch(b"the name of this directory").hex()[:8]
        self._staged, program = staged, f"{program} {holds}"
        module = _digest(jaxcompat.module_outline(staged.lowered))
        differing = self._compare({"module": module, "program": program, "directory": directory})
        sides = differing.get("program", [(program, self._round.ranks)])
        self._leader, self._receivers, self._compiles = givers(program.split(" ")[0], sides)
        self._shares_directory = bool(directory) and "directory" not in differing

    def _compare(self, lowered: dict[str, str], error: str = "") -> dict[str, Sides]:
        """Compares the calls, and what was lowered or why that failed; returns what may differ."""
        self.has_agreed, label, hint = True, self._described.label, ""
        facts = _call_facts(self._described, self._request)
        values = _replicated_host_values(self._request) if not error else None
        differing = self._round.compare(
            "report",
            {
                "label": label,
                "call": _digest("\0".join(f"{name}\1{facts[name]}" for name in sorted(facts))),
                "error": error,
                "values": digest_of(values) if values is not None else "",
                **lowered,
            },
        )
        if error:  # It is raised here.
            return {}
        named = {
            name: "; ".join(f"{readable_ranks(ranks)}: {value}" for value, ranks in sides if value)
            for name, sides in differing.items()
        }
        if "label" in differing:
            what, found = f"the ranks call different steps: {named['label']}", []
            hint = "call the same steps in the same order on all processes"
            sides = differing["label"]
        elif "call" in differing:
            sides = differing["call"]
            each = [[ranks for _, ranks in sides]]
            found = self._round.explain("call", each, lambda: facts, differences)
            what = f"the ranks call {label} differently:"
            hint = "make the same call, with the same options and settings, on all processes"
        elif "error" in differing:
            what, found = f"not all ranks have the program of {label}: {named['error']}", []
            sides = [side for side in differing["error"] if side[0]]
        elif "module" in differing:
            sides = differing["module"]
            each = [[ranks for _, ranks in sides[:2]]]  # Their texts are large.
            text = self._staged.module_text()
            found = self._round.explain("module", each, text, _module_changes)
            who = listed([readable_ranks(ranks) for _, ranks in sides])
            what = f"{who} lowered different programs of {label}:"
            hint = "run the same code on all processes; what a step computes must not depend on "
            hint += "its rank"
        else:
            digests = [value for value, _ in differing.get("values", [])]
            self.knows_values = values is not None and "" not in digests
            if self.knows_values and digests:
                compare(self._round, f"before {label}", {tuple(self._round.ranks): values})
            return differing
        raise disagreement(what, found, hint, [ranks for _, ranks in sides])

    def take(
        self, compilation: jaxcompat.Compilation, before_compiling: Callable[[], None]
    ) -> tuple[Any, str, bytes]:
        """Returns the executable that another process has or compiles, that process, and what it
        has sent; None where this one is to have it by itself.

        Raises:
            AgreementError: the other process could not compile it.
        """
        if self._compiles:
            before_compiling()  # On each of them: a session that forbids it raises on all.
        if self._round.rank not in self._receivers:
            return None, "", b""
        said = self._round.receive("program", self._leader)
        label, leader = self._described.label, f"rank {self._leader}"
        if said.startswith(_FAILED):
            what = f"not all ranks have the program of {label}: {leader}: {said[1:].decode()}"
            raise AgreementError(what, sides=((self._leader,),))
        try:
            if said != _STORED:
                data = zlib.decompress(said[1:])
                return compilation.load(data) if data else None, leader, data
            entry = self._store.disk.read("program", compilation.digest)
            return compilation.load(entry.payload) if entry is not None else None, leader, b""
        except Exception as error:
            text = "rank %d compiles %s for itself: it cannot load what %s sent (%s)"
            _log.warning(text, self._round.rank, label, leader, error)
            return None, "", b""

    def give(self, compilation: jaxcompat.Compilation, executable: Any, source: str) -> bytes:
        """Gives the others an executable that this process was to have; stores it at once if they
        look for it there. Returns it, serialized, if that was needed.
        """
        store, label = self._store, self._described.label
        if self._round.rank != self._leader or not self._receivers:
            return b""
        data, is_stored = b"", source != "compiled"
        if not is_stored:
            try:
                data = jaxcompat.serialize_executable(executable)
            except jaxcompat.NotStorable as error:
                _log.info("each rank compiles %s for itself: %s", label, error)
        elif not self._shares_directory:
            entry = store.disk.read("program", compilation.digest)
            data = entry.payload if entry is not None else b""
        if data and self._shares_directory:
            module = self._staged.module_text()
            published = Publication(compilation.digest, executable, module, {}, data=data)
            is_stored = not store.publish(published, label)
        is_there = is_stored and self._shares_directory
        self._send(_STORED if is_there else _SENT + zlib.compress(data, 1))
        return data if source == "compiled" else b""

    def _send(self, said: bytes) -> None:
        receivers, self._receivers = len(self._receivers), ()
        self._round.send("program", said, receivers)

    def fail(self, error: Exception) -> None:
        """Tells the others, who wait for this process, that it has no program."""
        if not self.has_agreed:
            self._compare({}, first_line(error))
        elif self._round.rank == self._leader and self._receivers:
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


def _module_changes(usual: str, other: str) -> tuple:
    found = difference(usual, other, is_users_file, file_label)
    return found.changes if found is not None else ()


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:32]
