"""Builds a program together with the other processes of a pod.

Every process traces and lowers the step. Before a new program first runs, all compare their calls
and what they have lowered: a difference is an error on all of them. Else one process of each kind
of host has or compiles the executable, and the others take it from there.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Iterator
from typing import Any

import jax
import numpy as np

from stepcache import jaxcompat
from stepcache.calls.step_spec import Request
from stepcache.errors import AgreementError, first_line
from stepcache.events import Change
from stepcache.pods.global_arrays import spans_processes
from stepcache.pods.replicas import compare, is_local, token_of
from stepcache.pods.rounds import Peers, Round, Sides
from stepcache.programs.earlier_runs import differences
from stepcache.programs.module_difference import difference
from stepcache.programs.prediction import Described, digest_of
from stepcache.programs.store import Publication
from stepcache.units import listed, readable_ranks

# These may differ between the hosts of a pod, and where a process was started may, too.
_MAY_DIFFER = {
    f"environment {name}" for name in ("CPU", "argv", "device kind", "devices", "python", "system")
}
_PLAIN = (str, bytes, int, float, complex, type(None))
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
    """Raises `AgreementError` if the replicated host values of a call differ between processes."""
    with peers.round(name, "calls it for the first time since it was warmed") as round:
        compare(round, f"before {name}", {peers.ranks: _replicated_host_values(request) or {}})


def givers(digest: str, sides: Sides) -> tuple[int, list[int], bool]:
    """Returns who gives the program of a digest, who takes it, and whether it has to be compiled.

    The lowest rank that has it on disk gives it, or else the lowest one that needs it. The `sides`
    are what all ranks have reported: the digests of their programs, and where they hold them.
    """
    alike = {value.removeprefix(f"{digest} "): ranks for value, ranks in sides if digest in value}
    having, needing = alike.get("disk", ()), alike.get("", ())
    if not needing:
        return -1, [], False
    giver = (having or needing)[0]
    return giver, [rank for rank in needing if rank != giver], not having


class Together:
    """The part of this process while all build one program. `building` makes it."""

    def __init__(self, round: Round, request: Request, described: Described, cache: Any):
        self._round, self._request, self._described = round, request, described
        self._cache, self._store, self._module = cache, cache.store(), lambda: ""
        self._giver: int | None = None  # The rank that sends its executable to this process.
        self.receivers = 0  # How many wait for the executable of this process.
        self._compiles = self._shares_directory = False
        self.has_agreed = False  # Whether this process has compared what it has with the others.
        self.knows_values = False  # Whether all have compared the host values of the call.

    def agree(self, staged: jaxcompat.Staged | None, program: str, error: str = "") -> None:
        """Compares the calls, and what all have lowered.

        Args:
            staged: the step, lowered; None where that has failed.
            program: digest of what XLA is given; empty where this process has compiled it already.
            error: why it has failed.

        Raises:
            AgreementError: they differ; not where this process has an error of its own.
        """
        self.has_agreed, store, round = True, self._store, self._round
        label = self._described.label
        facts = {"step": label, **_call_facts(self._described, self._request)}
        values, module, holds, directory = None, "", "memory", ""
        if staged is not None:
            values, self._module = _replicated_host_values(self._request), staged.module_text()
            module = digest_of({"": jaxcompat.module_outline(staged.lowered)})[:16]
        if program and not self._cache.holds_module(program):
            holds = "disk" if store is not None and store.disk.holds("program", program) else ""
        if store is not None and not holds:  # Others have no use for it.
            with contextlib.suppress(OSError):  # There is no key yet.
                directory = store.disk.vouch(b"the name of this directory").hex()[:8]
        entries = {
            "step": label,
            "call": digest_of(facts)[:16],
            "error": error,
            "module": module,
            "values": digest_of(values)[:16] if values is not None else "",
            "program": f"{program[:16]} {holds}",
            "directory": directory,
        }
        differing = round.compare("report", entries)
        if error and "call" not in differing:  # Which may explain the error.
            return
        if "call" in differing:
            are_others = "step" in differing
            what = f"the ranks call {'different steps' if are_others else f'{label} differently'}:"
            hint = "make the same calls, with the same options and settings, in the same order on "
            hint += "all processes"
            round.raise_differing(what, [differing["call"]], facts, differences, hint)
        if "error" in differing:
            failed = [(error, ranks) for error, ranks in differing["error"] if error]
            said = "; ".join(f"{readable_ranks(ranks)}: {error}" for error, ranks in failed)
            what = f"not all ranks have the program of {label}: {said}"
            raise AgreementError(what, sides=[tuple(ranks) for _, ranks in failed])
        if "module" in differing:
            who = listed([readable_ranks(ranks) for _, ranks in differing["module"]])
            what = f"{who} lowered different programs of {label}:"
            hint = "run the same code on all processes; what a step computes must not depend on "
            hint += "its rank"
            two = differing["module"][:2]  # The texts are large.
            round.raise_differing(what, [two], self._module(), _module_changes, hint)
        sides = {name: differing.get(name, [(entries[name], round.ranks)]) for name in entries}
        self.knows_values = "" not in [digest for digest, _ in sides["values"]]
        if values is not None and self.knows_values and "values" in differing:
            compare(round, f"before {label}", {round.ranks: values})
        giver, takers, self._compiles = givers(program[:16], sides["program"])
        self._giver = giver if round.rank in takers else None
        self.receivers = len(takers) if round.rank == giver else 0
        self._shares_directory = bool(directory) and "directory" not in differing

    def take(
        self, compilation: jaxcompat.Compilation, before_compiling: Callable[[], None]
    ) -> tuple[Any, str, bytes]:
        """Returns the executable that another process has or compiles, that process, and what it
        has sent; None where this one is to have it by itself.

        Raises `AgreementError` if the other process could not compile it.
        """
        if self._compiles:
            before_compiling()  # On each of them: a session that forbids it raises on all.
        if self._giver is None:
            return None, "", b""
        how, data = self._round.receive("program", self._giver)
        label, giver = self._described.label, f"rank {self._giver}"
        if how == "failed":
            what = f"not all ranks have the program of {label}: {giver}: {data}"
            raise AgreementError(what, sides=((self._giver,),))
        try:
            if how == "sent":
                return compilation.load(data) if data else None, giver, data
            entry = self._store.disk.read("program", compilation.digest)
            return compilation.load(entry.payload) if entry is not None else None, giver, b""
        except Exception as error:
            text = "rank %d compiles %s for itself: it cannot load what %s sent (%s)"
            _log.warning(text, self._round.rank, label, giver, error)
            return None, "", b""

    def give(self, compilation: jaxcompat.Compilation, executable: Any, source: str) -> bytes:
        """Gives the others an executable that this process was to have; stores it at once if they
        look for it there. Returns it, serialized, if that was needed.
        """
        store, label, data, is_stored = self._store, self._described.label, b"", False
        if not self.receivers:
            return b""
        if source == "compiled":
            try:
                data = jaxcompat.serialize_executable(executable)
            except jaxcompat.NotStorable as error:
                _log.info("each rank compiles %s for itself: %s", label, error)
            if data and self._shares_directory:
                about = compilation.digest, executable, self._module, {}
                is_stored = not store.publish(Publication(*about, data=data), label)
        elif not (is_stored := self._shares_directory):
            entry = store.disk.read("program", compilation.digest)
            data = entry.payload if entry is not None else b""
        said = ("stored", b"") if is_stored else ("sent", data)
        self._round.send("program", said, self.receivers)
        self.receivers = 0
        return data if source == "compiled" else b""


@contextlib.contextmanager
def building(
    peers: Peers, name: str, request: Request, described: Described, cache: Any, reason: str
) -> Iterator[Together]:
    """Context manager of a build of one program by all processes.

    `described` is the call in words, `reason` why it needs a new program, in one line. Raises
    `AgreementError` if the processes do not make the same call, do not lower the same module, or
    one of them does not take part in time; `RankLostError` if one was lost.
    """
    with peers.round(name, f"needs a new program: {reason}") as round:
        round.announce()  # A trace may take minutes.
        together = Together(round, request, described, cache)
        try:
            yield together
        except BaseException as error:  # The others wait for this process.
            if together.receivers:
                round.send("program", ("failed", first_line(error)), together.receivers)
            elif not together.has_agreed and isinstance(error, Exception):
                together.agree(None, "", first_line(error))
            raise


def _module_changes(usual: str, other: str) -> tuple[Change, ...]:
    found = difference(usual, other)
    return found.changes if found is not None else (Change("code", "module", "one", "another"),)
