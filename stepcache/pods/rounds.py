"""Agreement rounds: the processes of a mesh exchange contributions, and all read the same result.

An exchange costs each process O(1) calls of JAX's coordination service and O(result) bytes. Each
process writes its contribution and increments a counter. The last one reads all contributions,
merges them and writes the result, for which the others wait. The service accepts one value for
each name, so that all processes read the same result, or the same error.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import itertools
import logging
import threading
import time
import zlib
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from typing import Any, TypeVar

import jax

from stepcache.errors import AgreementError, RankLostError
from stepcache.events import Change
from stepcache.jaxcompat import coordination
from stepcache.jaxcompat.coordination import Unreachable
from stepcache.link import plain
from stepcache.pods.hang import AGREE_SECONDS
from stepcache.pods.watch import Watch
from stepcache.units import readable_ranks, spans_of

MAX_SIDES = 8
"""How many groups of differing processes an exchange collects."""
CHUNK_BYTES = 1 << 20
"""The coordination service bounds the size of a message."""
_MAX_SPANS = 32  # Of the ranks of one group, or of those that are missing.
_LOG_SECONDS = 5.0
_LOOK_SECONDS = 0.2  # Between looks for losses, while waiting.
_GET_SECONDS = 600.0
_FIRST_SECONDS = 1.0  # The process that arrived first gives up before the others do.
SAME_CALLS = (
    "make the same calls, with the same shapes and static values, in the same order on all "
    "processes. For a call on one process alone, place its arguments on that process's devices "
    "(jax.device_put), or call it inside sc.Session(). Session(agree_timeout=…) waits longer"
)

_log = logging.getLogger("stepcache")
T = TypeVar("T")
Merge = Callable[[dict[int, bytes]], bytes]
"""Merges the contributions of all ranks. One process calls it, and all read what it returns."""


class Round:
    """One agreement round. `Peers.round` makes it.

    Args:
        place: the prefix of its names in the coordination service; the same on all processes.
        ranks: the processes.
        watch: detects lost processes.
        label: what the processes agree on, for messages.
        reason: what this process needs the agreement for, in one line; may be empty.
        timeout_seconds: how long to wait for processes that do not take part. Those that have
            announced that they will, or have contributed once, are waited for while they live.
    """

    def __init__(
        self,
        place: str,
        ranks: Sequence[int],
        watch: Watch,
        label: str,
        reason: str,
        timeout_seconds: float,
    ):
        self.rank, self.ranks = watch.rank, ranks  # This process, and all in order.
        self._place, self._watch, self._service = place, watch, watch.service
        self._label, self._reason, self._timeout_seconds = label, reason, timeout_seconds
        self._all_came = False

    def announce(self) -> None:
        """Says that this process takes part, but may need long until it contributes."""
        self._service.put(f"{self._place}/coming/{self.rank}", b"")

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
        if self.rank in speakers:
            self.send(topic, zlib.compress(plain.pack(own()), 1), len(self.ranks))
        said = {rank: zlib.decompress(self.receive(topic, rank)) for rank in speakers}
        return {rank: plain.unpack(said[rank]) for rank in speakers}

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
        service, place = self._service, f"{self._place}/{topic}"
        with self._losses_raised():
            service.put(f"{place}/from/{self.rank}", payload)
            turn = service.add(f"{place}/count")
            if turn == len(self.ranks):
                try:
                    result = {"merged": merge(self._contributions(topic))}
                except Exception as error:  # The other processes wait for a result.
                    result = {"failed": f"{type(error).__name__}: {error}"}
                service.put(f"{place}/result", _packed(result))
            # The process that came first gives up before the others do.
            packed = self._wait(f"{place}/result", topic, is_first=turn == 1)
        result = plain.unpack(zlib.decompress(packed))
        if "late" in result:
            raise self._late_error(**result)
        self._all_came = True
        if "failed" in result:
            raise AgreementError(
                f"the ranks could not agree on {self._label}: {result['failed']}",
                hint="run the same version of stepcache on all processes",
            )
        return result["merged"]

    def send(self, name: str, data: bytes, receivers: int) -> None:
        """Sends data to other processes, which call `receive`, in chunks."""
        place = f"{self._place}/{name}/{self.rank}"
        chunks = [data[at : at + CHUNK_BYTES] for at in range(0, len(data), CHUNK_BYTES)]
        for number, chunk in enumerate(chunks):
            self._service.put(f"{place}/{number}", chunk)
        self._service.put(f"{place}/sent", plain.pack([len(chunks), receivers]))

    def receive(self, name: str, sender: int) -> bytes:
        """Waits for the data that a process sends under a name.

        Raises:
            RankLostError: a process was lost.
        """
        place = f"{self._place}/{name}/{sender}"
        with self._losses_raised():
            count, receivers = plain.unpack(self._wait(f"{place}/sent"))
            data = b"".join([self._wait(f"{place}/{number}") for number in range(count)])
            if count and self._service.add(f"{place}/received") == receivers:
                self._service.delete(f"{place}/")  # The service keeps all values in memory.
        return data

    def close(self) -> None:
        """Frees the names of the round before this one, which all processes have left."""
        if self._all_came and self.rank == self.ranks[0]:
            name, _, number = self._place.rpartition("/")
            self._service.delete(f"{name}/{int(number) - 1}/")

    def _contributions(self, topic: str) -> dict[int, bytes]:
        """Returns the contribution of each process to an exchange, by rank, before the merge.

        For one process only: the bytes that it reads grow with the number of processes.
        """
        found = self._service.listed(f"{self._place}/{topic}/from/")
        return {int(rank): found[rank] for rank in sorted(found, key=int)}

    def _wait(self, name: str, topic: str = "", *, is_first: bool = False) -> bytes:
        """Waits for the value of a name. Gives up if a process is missing in an exchange."""
        late = time.monotonic() + self._timeout_seconds + (0 if is_first else _FIRST_SECONDS)
        log_at = time.monotonic() + _LOG_SECONDS
        answer: Future[bytes] = Future()

        def get() -> None:  # In a thread: one in such a call handles no signals.
            try:
                while (value := self._service.get(name, _GET_SECONDS)) is None:
                    pass
                answer.set_result(value)
            except Exception as error:
                answer.set_exception(error)

        threading.Thread(target=get, name="stepcache agreement", daemon=True).start()
        while True:
            with contextlib.suppress(TimeoutError):
                return answer.result(_LOOK_SECONDS)
            self._watch.raise_if_lost()
            self._watch.look_for_ended()
            now = time.monotonic()
            if not topic or self._all_came or now < (min(late, log_at) if is_first else late):
                continue
            coming = {int(rank) for rank in self._service.listed(f"{self._place}/coming/")}
            missing = set(self.ranks) - self._contributions(topic).keys() - coming
            spans = spans_of(missing)[:_MAX_SPANS]
            if missing and now > late:  # The first one that writes a result is read by all.
                result = {"late": spans, "by": self.rank, "reason": self._reason}
                self._service.put(f"{self._place}/{topic}/result", _packed(result))
            elif missing:
                who, text = readable_ranks(ranks_in(spans)), "waiting for %s to agree on %s%s"
                _log.warning(text, who, self._label, self._why(self.rank, self._reason))
            log_at = float("inf")

    @staticmethod
    def _why(rank: int, reason: str) -> str:
        return f"; rank {rank} {reason}" if reason else ""

    @contextlib.contextmanager
    def _losses_raised(self) -> Iterator[None]:
        """Raises `RankLostError` if the service fails because a process is lost."""
        self._watch.raise_if_lost()
        try:
            yield
        except Unreachable as error:
            self._watch.note_loss([0], f"its coordination service does not answer ({error})")
            try:
                self._watch.raise_if_lost()
            except RankLostError as lost:
                raise lost from None  # The other one is of no use to the user.

    def _late_error(self, late: list[list[int]], by: int, reason: str) -> AgreementError:
        """Returns the error of the processes that waited, and of those that came late.

        Args:
            late: spans of the ranks that did not take part in time.
            by: the rank that gave up.
            reason: what that rank needed the agreement for.
        """
        ranks = ranks_in(late)
        why = self._why(by, reason)
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
            hint=SAME_CALLS,
        )


class Peers:
    """The processes of a mesh: makes agreement rounds, and raises if one of them is lost."""

    def __init__(self, ranks: tuple[int, ...], watch: Watch, agree_seconds: float):
        self.rank, self.ranks = watch.rank, ranks  # This process, and all in order.
        self.watch, self._name, self._agree_seconds = watch, _name_of(ranks), agree_seconds
        # All sessions over the same processes count their rounds together.
        new = threading.Lock(), itertools.count(1)
        self._lock, self._numbers = watch.rounds.setdefault(self._name, new)

    @contextlib.contextmanager
    def round(self, label: str, reason: str = "", *, patient: bool = False) -> Iterator[Round]:
        """Context manager of an agreement round; all processes enter it, in the same order.

        Args:
            label: what the processes agree on, for messages.
            reason: what this process does, in one line: "needs a new program: …".
            patient: wait without a time limit while all processes live.
        """
        seconds = float("inf") if patient else self._agree_seconds
        with self._lock:
            place = f"{self._name}/{next(self._numbers)}"
            current = Round(place, self.ranks, self.watch, label, reason, seconds)
            try:
                with self.watch.agreeing():
                    yield current
            finally:
                current.close()

    def gather(
        self, label: str, payload: bytes, reason: str = "", *, patient: bool = True
    ) -> dict[int, bytes]:
        """Waits for all processes; returns the contribution of each, by rank.

        Args:
            label, reason, patient: as for `round`.
            payload: the contribution of this process.

        Raises:
            RankLostError: a process was lost.
            AgreementError: one did not take part in time.
        """
        with self.round(label, reason, patient=patient) as current:
            return current.gather("gathered", payload)

    def guarded(self, work: Callable[[], T]) -> T:
        """Calls a function that waits for the other processes.

        Raises:
            RankLostError: a process was lost.
        """
        self.watch.raise_if_lost()
        try:
            return work()
        except Exception as error:
            self.watch.raise_if_lost_by(error)
            raise

    def enter(self, hang_seconds: float) -> None:
        """Notes that this thread enters a session over these processes."""
        self.watch.enter(self._name, self.ranks, hang_seconds)

    def leave(self, error: BaseException | None) -> None:
        """Says that this thread leaves the session, with an error or without."""
        self.watch.leave(self._name, error)


def peers_of(ranks: Sequence[int], agree_seconds: float = AGREE_SECONDS) -> Peers | None:
    """Returns the `Peers` of these processes; None for a single one, or without `jax.distributed`.

    Args:
        ranks: the processes, in order.
        agree_seconds: how long an agreement round waits for one that does not take part.

    Raises:
        RankLostError: the coordination service, which runs in rank 0, does not answer.
    """
    if len(ranks) < 2 or (service := coordination.service()) is None:
        return None
    try:
        watch = Watch.of_this_process(service)
    except Unreachable as error:
        what = f"rank 0 of the pod is lost: its coordination service does not answer ({error})"
        raise RankLostError(what, [0], where=f"rank {jax.process_index()}") from error
    return Peers(tuple(ranks), watch, agree_seconds)


@functools.lru_cache
def _name_of(ranks: tuple[int, ...]) -> str:
    """Names a set of processes; the name is the same on all of them."""
    return f"stepcache/{hashlib.sha256(','.join(map(str, ranks)).encode()).hexdigest()[:12]}"


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
