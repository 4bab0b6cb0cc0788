"""`Peers`: the processes of a session's mesh."""

from __future__ import annotations

import contextlib
import functools
import hashlib
import itertools
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import TypeVar

import jax

from stepcache.distributed.agreement import SAME_CALLS, Round
from stepcache.distributed.failure_detection import Watch
from stepcache.distributed.hang_report import AGREE_SECONDS, HANG_SECONDS, OnHang
from stepcache.errors import AgreementError, RankLostError
from stepcache.jaxcompat import coordination

T = TypeVar("T")


class Peers:
    """The processes of a mesh: makes agreement rounds, and raises if one of them is lost."""

    def __init__(self, ranks: tuple[int, ...], watch: Watch, agree_seconds: float):
        self.rank, self.ranks = watch.rank, ranks  # This process, and all in order.
        self.agree_seconds = agree_seconds  # How long a round waits for one that is missing.
        self._watch, self._name = watch, _name_of(ranks)
        # All sessions over the same processes count their rounds together.
        new = threading.Lock(), itertools.count(1)
        self._lock, self._numbers = watch.rounds.setdefault(self._name, new)

    @contextlib.contextmanager
    def round(self, label: str, reason: str = "", *, patient: bool = False) -> Iterator[Round]:
        """Context manager of an agreement round; all processes enter it, in the same order.

        Args:
            label: what the processes agree on, for messages.
            reason: why this process needs a new program, in one line.
            patient: wait without a time limit while all processes live.
        """
        watch = self._watch
        seconds = float("inf") if patient else self.agree_seconds
        with self._lock, self._given_up_raised():
            number = next(self._numbers)
            place = f"{self._name}/{number}"
            current = Round(place, self.ranks, watch, label, reason, seconds)
            completed = False
            try:
                with watch.agreeing():
                    yield current
                completed = True
            finally:
                current.channel.close(all_received=completed)
            if self.rank == self.ranks[0] and number > 1:
                watch.service.delete(f"{self._name}/{number - 1}/")  # All processes have left it.

    def gather(self, label: str, payload: bytes) -> dict[int, bytes]:
        """Waits for all processes; returns the contribution of each, by rank.

        Raises:
            RankLostError: a process was lost.
        """
        with self.round(label, patient=True) as current:
            return current.gather("gathered", payload)

    def guarded(self, work: Callable[[], T]) -> T:
        """Calls a function that waits for the other processes.

        Raises:
            RankLostError: a process was lost.
        """
        with self._given_up_raised():
            self._watch.loss.raise_if_known()
        try:
            return work()
        except Exception as error:
            self.raise_if_lost_by(error)
            raise

    def raise_if_lost_by(self, error: BaseException) -> None:
        """Raises if a lost process is the cause of an error.

        Raises:
            RankLostError: it is.
            AgreementError: it is, and that process had given up waiting for this one.
        """
        with self._given_up_raised():
            self._watch.suspect(error)

    def enter(self, hang_seconds: float = HANG_SECONDS, on_hang: OnHang = "warn") -> None:
        """Notes that this thread enters a session over these processes."""
        self._watch.enter(self._name, self.ranks, hang_seconds, on_hang)

    def leave(self, error: BaseException | None) -> None:
        """Notes that this thread leaves the session, with an error or without."""
        self._watch.leave(self._name, error)

    @contextlib.contextmanager
    def _given_up_raised(self) -> Iterator[None]:
        """Raises `AgreementError` if the lost processes had given up waiting for this one.

        This process was in another call meanwhile, which failed when they ended.
        """
        try:
            yield
        except RankLostError as lost:
            for rank, text in self._watch.given_up.items():
                if rank in self.ranks and (rank in lost.ranks or not lost.ranks):
                    sides = (rank,), (self.rank,)
                    raise AgreementError(
                        text, sides=sides, where=f"rank {self.rank}", hint=SAME_CALLS
                    ) from lost
            raise


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
    except coordination.Unreachable as error:
        what = f"rank 0 of the pod is lost: its coordination service does not answer ({error})"
        raise RankLostError(what, [0], where=f"rank {jax.process_index()}") from error
    return Peers(tuple(ranks), watch, agree_seconds)


@functools.lru_cache
def _name_of(ranks: tuple[int, ...]) -> str:
    """Names a set of processes; the name is the same on all of them."""
    return f"stepcache/{hashlib.sha256(','.join(map(str, ranks)).encode()).hexdigest()[:12]}"
