"""Agreement rounds: the processes of a mesh compare what they have, and all read one result.

A comparison costs each process O(1) calls of JAX's coordination service. Each writes its entries,
and increments a counter. The last one groups the ranks by equal values and writes the entries that
differ, for which the others wait. The service accepts one value for each name, so that all
processes read the same result, or the same error.
"""

from __future__ import annotations

import contextlib
import hashlib
import itertools
import logging
import threading
import time
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from typing import Any

from stepcache.errors import AgreementError
from stepcache.events import Change
from stepcache.jaxcompat import coordination
from stepcache.link import plain
from stepcache.pods.hang import AGREE_SECONDS
from stepcache.pods.watch import Watch
from stepcache.units import readable_ranks, shortened

MAX_SIDES = 8
"""How many entries that differ, and values of each, a comparison returns at most."""
CHUNK_BYTES = 1 << 20
"""Of what is sent: the service has a copy of the chunk for each process that waits for it."""
_MAX_LINES = 12  # Of an error.
_LOG_SECONDS = 5.0
_LOOK_SECONDS = 1.0  # Between looks for losses, while waiting; they read from the service.
_GET_SECONDS = 1e6  # Days; a process that waits looks by itself for losses.
_FIRST_SECONDS = 1.0  # The process that arrived first gives up before the others do.

_log = logging.getLogger("stepcache")
Sides = Sequence[tuple[Any, Sequence[int]]]
"""The values of an entry, and the ranks that have each: most ranks first."""


class Peers:
    """The processes of a mesh: makes agreement rounds, and raises if one of them is lost."""

    def __init__(self, ranks: tuple[int, ...], watch: Watch, agree_seconds: float):
        self.rank, self.ranks = watch.rank, ranks  # This process, and all in order.
        self.watch, self.agree_seconds = watch, agree_seconds
        self.name = f"stepcache/{digest_of(ranks)}"
        # All sessions over the same processes count their rounds together.
        new = threading.Lock(), itertools.count(1)
        self._lock, self._numbers = watch.rounds.setdefault(self.name, new)

    @contextlib.contextmanager
    def round(self, label: str, reason: str = "", *, patient: bool = False) -> Iterator[Round]:
        """Context manager of an agreement round; all processes enter it, in the same order.

        Raises `RankLostError` if a process was lost.

        Args:
            label: what the processes agree on, for messages.
            reason: what this process does, in one line: "needs a new program: …".
            patient: wait without a time limit while all processes live.
        """
        self.watch.raise_if_lost()
        with self._lock:
            number = next(self._numbers)
            late_seconds = float("inf") if patient else self.agree_seconds
            current = Round(self, f"{self.name}/{number}", label, reason, late_seconds)
            self.watch.in_round, self.watch.neighbours = True, None
            try:
                yield current
            except coordination.Unreachable as error:
                self.watch.note_unreachable(error)
                self.watch.raise_if_lost()
            finally:
                self.watch.in_round, self.watch.comparing = False, None
                if current.all_came and self.rank == self.ranks[0]:  # All left the one before.
                    self.watch.service.delete(f"{self.name}/{number - 1}/")


def peers_of(ranks: Sequence[int], agree_seconds: float = AGREE_SECONDS) -> Peers | None:
    """Returns the `Peers` of these processes; None for a single one, or without `jax.distributed`.

    An agreement round waits `agree_seconds` for a process that does not take part.
    """
    if len(ranks) < 2 or (service := coordination.service()) is None:
        return None
    return Peers(tuple(ranks), Watch.of_this_process(service), agree_seconds)


class Round:
    """One agreement round. `Peers.round` makes it.

    Names in the service begin with `place`. Processes that have announced that they come, or have
    come, are waited for while they live; others are late after `late_seconds`.
    """

    def __init__(self, peers: Peers, place: str, label: str, reason: str, late_seconds: float):
        self.rank, self.ranks = peers.rank, peers.ranks  # This process, and all in order.
        self.all_came = False  # Whether all processes are known to take part.
        self._watch, self._service, self._place = peers.watch, peers.watch.service, place
        self._label, self._reason, self._late_seconds = label, reason, late_seconds

    def announce(self) -> None:
        """Says that this process takes part, but may need long until it compares anything."""
        self._service.put(f"{self._place}/coming/{self.rank}", b"")

    def compare(self, topic: str, entries: Mapping[str, str]) -> dict[str, Sides]:
        """Returns the entries in which the processes differ: none if all have the same.

        `topic` names the comparison, once in a round. An entry that only some processes have is
        compared between these. Raises `AgreementError` if a process does not take part in time.
        """
        service, place = self._service, f"{self._place}/{topic}"
        service.put(f"{place}/from/{self.rank}", _packed(dict(entries)))
        turn = service.add(f"{place}/count")
        if turn == len(self.ranks):
            # One process alone reads all: the bytes grow with the number of processes.
            listed = service.listed(f"{place}/from/")
            by_rank = {int(rank): _unpacked(listed[rank]) for rank in listed}
            service.put(f"{place}/result", _packed({"sides": _sides(by_rank)}))
        log, late = _LOG_SECONDS, self._late_seconds
        looks = sorted([log, late]) if turn == 1 else [late + _FIRST_SECONDS]
        self._watch.comparing = time.monotonic(), f"{place}/from/"
        result = _unpacked(self._wait(f"{place}/result", looks))
        self._watch.comparing = None
        if missing := result.get("late"):
            what = f"{readable_ranks(missing)} did not take part in the agreement on {self._label} "
            what += f"within {late:.0f} s{result['why']}"
            hint = "make the same calls, with the same shapes and static values, in the same order "
            hint += "on all processes. For a call on one process alone, place its arguments on "
            hint += "that process's devices (jax.device_put), or call it inside sc.Session(). "
            hint += "Session(agree_timeout=…) waits longer"
            raise AgreementError(what, sides=(tuple(missing),), hint=hint)
        self.all_came = True
        return result["sides"]

    def raise_differing(
        self,
        what: str,
        differing: Iterable[Sides],
        own: Any,
        compared: Callable[[Any, Any], Iterable[Change]],
        hint: str,
    ) -> None:
        """Raises an `AgreementError` with a line for each difference, if there are any.

        The first rank of each side of the entries that differ explains them: it sends its `own`
        plain data to all. `compared` returns the differences between those of two ranks.
        """
        pairs = [(sides[0][1], other) for sides in differing for _, other in sides[1:]]
        speakers = sorted({ranks[0] for pair in pairs for ranks in pair})
        if self.rank in speakers:
            self.send("explained", own, len(self.ranks))
        said = {rank: self.receive("explained", rank) for rank in speakers}
        lines, changes, sides = [what], [], []
        for usual, other in pairs:
            for change in compared(said[usual[0]], said[other[0]]):
                noted = f" ({change.note})" if change.note else ""
                after = f"{readable_ranks(other)} {change.after}"
                before = f"{readable_ranks(usual)} {change.before}"
                lines.append(f"{change.path}{noted}: {after}; {before}")
                changes.append(change)
                sides += [tuple(usual), tuple(other)]
        if changes:
            text = "\n  ".join(shortened(lines, 1 + _MAX_LINES))
            raise AgreementError(text, changes, dict.fromkeys(sides), hint=hint)

    def send(self, topic: str, data: Any, receivers: int) -> None:
        """Sends plain data to as many processes, which call `receive`, in chunks."""
        place, packed = f"{self._place}/{topic}/{self.rank}", _packed(data)
        for start in range(0, len(packed), CHUNK_BYTES):
            self._service.put(f"{place}/{start}", packed[start : start + CHUNK_BYTES])
        self._service.put(f"{place}/sent", plain.pack([len(packed), receivers]))

    def receive(self, topic: str, sender: int) -> Any:
        """Waits for the data that a process sends. Raises `RankLostError` if one was lost."""
        place = f"{self._place}/{topic}/{sender}"
        size, receivers = plain.unpack(self._wait(f"{place}/sent"))
        packed = b"".join([self._wait(f"{place}/{start}") for start in range(0, size, CHUNK_BYTES)])
        if self._service.add(f"{place}/received") == receivers:
            self._service.delete(f"{place}/")  # The service keeps all values in memory.
        return _unpacked(packed)

    def _wait(self, name: str, looks: Iterable[float] = ()) -> bytes:
        """Waits for the value of a name in the service.

        After each of the seconds in `looks`, it looks who has not come to the round: those are
        logged, or, when they are late, end it.
        """
        answer: Future[Any] = Future()

        def get() -> None:  # In a thread: one in such a call handles no signals.
            try:
                answer.set_result(self._service.get(name, _GET_SECONDS))
            except Exception as error:
                answer.set_exception(error)

        threading.Thread(target=get, name="stepcache agreement", daemon=True).start()
        started, looks = time.monotonic(), list(looks)
        while True:
            with contextlib.suppress(TimeoutError):
                return answer.result(_LOOK_SECONDS)
            self._watch.raise_if_lost()
            self._watch.look_for_ended()
            if not looks or time.monotonic() < started + looks[0]:
                continue
            is_late = looks.pop(0) >= self._late_seconds
            parts = (name.split("/") for name in self._service.listed(f"{self._place}/"))
            came = {int(rank) for *_, kind, rank in parts if kind in ("coming", "from")}
            missing = sorted({*self.ranks} - came)
            why = f"; rank {self.rank} {self._reason}" if self._reason else ""
            if missing and is_late:  # The first one that writes a result is read by all.
                self._service.put(name, _packed({"late": missing, "why": why}))
            elif missing:
                who, text = readable_ranks(missing), "waiting for %s to agree on %s%s"
                _log.warning(text, who, self._label, why)


def _sides(entries: Mapping[int, Mapping[str, Any]]) -> dict[str, list[tuple[Any, list[int]]]]:
    """Returns the sides of each entry in which ranks differ, the largest first."""
    grouped: dict[str, dict[Any, list[int]]] = {}
    for rank in sorted(entries):
        for name, value in entries[rank].items():
            grouped.setdefault(name, {}).setdefault(value, []).append(rank)
    differing = [(name, [*groups.items()]) for name, groups in grouped.items() if len(groups) > 1]
    return {
        name: sorted(sides, key=lambda side: (-len(side[1]), side[1]))[:MAX_SIDES]
        for name, sides in differing[:MAX_SIDES]
    }


def digest_of(data: Any) -> str:
    """Returns a digest of plain data, which differs from that of any other data."""
    return hashlib.sha256(repr(data).encode()).hexdigest()[:16]


def _packed(data: Any) -> bytes:
    return zlib.compress(plain.pack(data), 1)


def _unpacked(packed: bytes) -> Any:
    return plain.unpack(zlib.decompress(packed))
