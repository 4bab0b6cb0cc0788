"""Agreement rounds: the processes of a mesh exchange contributions, and all read the same result.

An exchange costs each process O(1) calls of JAX's coordination service and O(result) bytes. Each
process writes its contribution and increments a counter. The last one reads all contributions,
merges them and writes the result, for which the others wait in a single call. The service accepts
one value for each name, so that all processes read the same result, or the same error.
"""

from __future__ import annotations

import contextlib
import time
import zlib
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from typing import Any

from stepcache.distributed.broadcast import Channel
from stepcache.distributed.failure_detection import Watch
from stepcache.errors import AgreementError, RankLostError
from stepcache.events import Change
from stepcache.jaxcompat.coordination import Unreachable
from stepcache.link import plain
from stepcache.units import readable_ranks, spans_of

MAX_SIDES = 8
"""How many groups of differing processes an exchange collects."""
_MAX_SPANS = 32  # Of the ranks of one group, or of those that are missing.
_POLL_SECONDS = 0.2  # Between checks for a known loss; the service is not asked.
_LOG_SECONDS = 5.0
_FIRST_SECONDS = 1.0  # The process that arrived first gives up before the others do.

Merge = Callable[[dict[int, bytes]], bytes]
"""Merges the contributions of all ranks. One process calls it, and all read what it returns."""


class Round:
    """One agreement round. `Peers.round` makes it.

    Args:
        name: the prefix of its names in the coordination service; the same on all processes.
        ranks: the processes.
        watch: detects lost processes.
        label: what the processes agree on, for messages.
        reason: why this process needs the agreement, in one line; may be empty.
        timeout_seconds: how long the first exchange waits for processes that do not take part.
            Later exchanges wait for as long as all processes live.
    """

    def __init__(
        self,
        name: str,
        ranks: Sequence[int],
        watch: Watch,
        label: str,
        reason: str,
        timeout_seconds: float,
    ):
        self.rank, self.ranks = watch.rank, ranks  # The first: this process.
        self.channel = Channel(name, watch, self._wait)  # From one process to others.
        self._name, self._watch, self._service = name, watch, watch.service
        self._label, self._reason = label, reason
        self._timeout_seconds, self._bound_seconds = timeout_seconds, timeout_seconds

    def gather(self, topic: str, payload: bytes) -> dict[int, bytes]:
        """Returns what every process contributes, by rank. Equal contributions travel once."""
        groups = plain.unpack(self.merge(topic, payload, _grouped))
        return {rank: each for each, spans in groups for rank in ranks_in(spans)}

    def explained_by(
        self, topic: str, speakers: Sequence[int], own: Callable[[], Any]
    ) -> dict[int, Any]:
        """Returns what a few processes explain to all, by rank.

        Args:
            topic: as for `merge`.
            speakers: the processes that explain, such as the first one of each side.
            own: returns what this process explains; called only if it is a speaker.
        """
        said = own() if self.rank in speakers else None
        received = self.gather(topic, zlib.compress(plain.pack(said), 1))
        return {rank: plain.unpack(zlib.decompress(received[rank])) for rank in speakers}

    def merge(self, topic: str, payload: bytes, merge: Merge) -> bytes:
        """Returns the merged contributions of all processes.

        Args:
            topic: names the exchange; the same on all processes, used once in a round.
            payload: the contribution of this process.
            merge: see `Merge`.

        Raises:
            AgreementError: a process did not take part in time.
            RankLostError: a process was lost.
        """
        service, place = self._service, f"{self._name}/{topic}"
        with self._losses_raised():
            service.put(f"{place}/from/{self.rank}", payload)
            turn = service.add(f"{place}/count")
            if turn == len(self.ranks):
                service.put(f"{place}/result", self._merged(topic, merge))
                packed = service.get(f"{place}/result")
            else:
                bound = self._bound_seconds + (0 if turn == 1 else _FIRST_SECONDS)
                due = [(bound, lambda: self._give_up(topic))]
                if turn == 1:
                    due.append((_LOG_SECONDS, lambda: self._log_missing(topic)))
                packed = self._wait(f"{place}/result", due)
        self._bound_seconds = float("inf")
        result = plain.unpack(zlib.decompress(packed))
        if "late" in result:
            raise self._late_error(**result)
        if "failed" in result:
            raise AgreementError(
                f"the ranks could not agree on {self._label}: {result['failed']}",
                hint="run the same version of stepcache on all processes",
            )
        return result["merged"]

    def _merged(self, topic: str, merge: Merge) -> bytes:
        try:
            result = {"merged": merge(self.contributions(topic))}
        except Exception as error:  # The other processes wait for a result.
            result = {"failed": f"{type(error).__name__}: {error}"}
        return _packed(result)

    def contributions(self, topic: str) -> dict[int, bytes]:
        """Returns the contribution of each process to an exchange, by rank, before the merge.

        For one process only: the bytes that it reads grow with the number of processes.
        """
        found = self._service.listed(f"{self._name}/{topic}/from/")
        return {int(rank): found[rank] for rank in sorted(found, key=int)}

    def _wait(self, name: str, due: Iterable[tuple[float, Callable[[], None]]] = ()) -> bytes:
        """Waits for the value of a name, in one call of the service.

        Calls the functions that are `due` after some seconds if that time passes without a value.
        """
        pending = sorted(due, key=lambda each: each[0])
        started = time.monotonic()
        with self._losses_raised(), self._watch.loss.pending_get(name) as call:
            while True:
                with contextlib.suppress(TimeoutError):
                    return call.result(_POLL_SECONDS)
                self._watch.loss.raise_if_known()
                if pending and time.monotonic() > started + pending[0][0]:
                    pending.pop(0)[1]()

    def _missing(self, topic: str) -> list[list[int]]:
        """Returns the spans of ranks that have not contributed; of very many, the first ones."""
        return spans_of(set(self.ranks) - self.contributions(topic).keys())[:_MAX_SPANS]

    def _give_up(self, topic: str) -> None:
        """Writes an error as the result. Only the first process that calls this does."""
        place = f"{self._name}/{topic}"
        if self._service.put(f"{place}/given up", b"1") and (late := self._missing(topic)):
            result = {"late": late, "by": self.rank, "reason": self._reason}
            if self._service.put(f"{place}/result", _packed(result)):
                self._watch.log_everywhere(self._late_error(**result).what, gives_up=True)

    def _log_missing(self, topic: str) -> None:
        """Has all processes log, once in a round, which ranks are missing."""
        if self._service.put(f"{self._name}/logged", b"1") and (late := self._missing(topic)):
            why = f"; rank {self.rank} needs a new program: {self._reason}" if self._reason else ""
            self._watch.log_everywhere(
                f"rank {self.rank} has waited {_LOG_SECONDS:.0f} s for "
                f"{readable_ranks(ranks_in(late))} to agree on {self._label}{why}"
            )

    @contextlib.contextmanager
    def _losses_raised(self) -> Iterator[None]:
        """Raises `RankLostError` if the service fails because a process is lost."""
        self._watch.loss.raise_if_known()
        try:
            yield
        except Unreachable as error:
            self._watch.lose_service(str(error))
            try:
                self._watch.loss.raise_if_known()
            except RankLostError as lost:
                raise lost from None  # The other one is of no use to the user.
            raise

    def _late_error(self, late: list[list[int]], by: int, reason: str) -> AgreementError:
        """Returns the error of the processes that waited, and of those that came late.

        Args:
            late: spans of the ranks that did not take part in time.
            by: the rank that gave up.
            reason: why that rank needed the agreement.
        """
        ranks = ranks_in(late)
        why = f"; rank {by} needs a new program: {reason}" if reason else ""
        if self.rank in ranks:
            return AgreementError(
                f"rank {self.rank}, this process, came too late to the agreement on {self._label}: "
                f"the other ranks had given up{why}",
                sides=(tuple(ranks),),
            )
        return AgreementError(
            f"{readable_ranks(ranks)} did not take part in the agreement on {self._label} within "
            f"{self._timeout_seconds:.0f} s{why}",
            sides=(tuple(ranks),),
            expected=f"a call that needs a new program, on {readable_ranks(self.ranks)}",
            got=f"no such call on {readable_ranks(ranks)}",
            hint=SAME_CALLS,
        )


SAME_CALLS = (
    "make the same calls, with the same shapes and static values, in the same order on all "
    "processes. For a call on one process alone, place its arguments on that process's devices "
    "(jax.device_put), or call it inside sc.Session(). Session(agree_timeout=…) waits longer"
)


def sides_of(values: Mapping[int, Hashable]) -> list[list[list[int]]]:
    """Groups ranks by equal values: the spans of ranks of each group, the largest group first.

    Returns at most `MAX_SIDES` groups, and of each a few spans, so that the size of a
    disagreement does not grow with the number of processes.
    """
    groups: dict[Hashable, list[int]] = {}
    for rank, value in sorted(values.items()):
        groups.setdefault(value, []).append(rank)
    ordered = sorted(groups.values(), key=lambda ranks: (-len(ranks), ranks))
    return [spans_of(ranks)[:_MAX_SPANS] for ranks in ordered[:MAX_SIDES]]


def ranks_in(spans: Iterable[Sequence[int]]) -> list[int]:
    """Returns the ranks of spans, each of which is a first and a last rank."""
    return [rank for low, high in spans for rank in range(low, high + 1)]


def by_rank(change: Change, before: Sequence[int], after: Sequence[int]) -> str:
    """Returns a line that says what the ranks of both sides have."""
    noted = f" ({change.note})" if change.note else ""
    return (
        f"{change.path}{noted}: {readable_ranks(after)} {change.after}; "
        f"{readable_ranks(before)} {change.before}"
    )


def _grouped(contributions: dict[int, bytes]) -> bytes:
    groups: dict[bytes, list[int]] = {}
    for rank, each in contributions.items():
        groups.setdefault(each, []).append(rank)
    return plain.pack([[each, spans_of(ranks)] for each, ranks in groups.items()])


def _packed(result: dict[str, Any]) -> bytes:
    return zlib.compress(plain.pack(result), 1)
