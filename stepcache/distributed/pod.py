"""`Pod`: the processes of one mesh, as JAX's coordination service brings them together."""

from __future__ import annotations

import contextlib
import hashlib
import logging
import secrets
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, TypeVar

from stepcache.distributed.failure_detection import HANG_SECONDS, OnHang, Watch
from stepcache.distributed.peers import Meeting
from stepcache.distributed.relay import Relay, own_host, parent_of
from stepcache.errors import AgreementError, RankLostError
from stepcache.jaxcompat import coordination
from stepcache.jaxcompat.coordination import Brief, Unreachable, coordinator_address
from stepcache.storage import plain
from stepcache.units import readable_ranks

PIECE_BYTES = 1 << 20
"""What is handed out travels in pieces: the service keeps each in memory, and bounds a message."""
RELAYED_BYTES = 4 << 20
"""What is as large goes from process to process, and not through the service."""
AGREE_SECONDS = 60.0
"""How long to wait, by default, for a process that has not come to agree on a program."""
_WINDOW = 32
_LOOK_SECONDS = 0.2  # Whether a loss is known here; the service is not asked.
_LOG_AFTER_SECONDS = 5.0
_FIRST_SECONDS = 1.0  # For the one that has waited for longest to give up before the others do.

T = TypeVar("T")
_log = logging.getLogger("stepcache")
_pods: dict[tuple[int, ...], Pod] = {}
_lock = threading.Lock()


class Pod:
    """The processes of a mesh. One object for each set of them.

    Args:
        ranks: theirs, in order.
        watch: knows who has gone.

    Attributes:
        rank: of this process.
        ranks: as given.
        service: of the watch.
        watch: as given.
        name: the same on all of them.
    """

    def __init__(self, ranks: tuple[int, ...], watch: Watch):
        self.rank, self.ranks = watch.rank, ranks
        self.service, self.watch = watch.service, watch
        everybody = ",".join(map(str, ranks))
        self.name = f"stepcache/{hashlib.sha256(everybody.encode()).hexdigest()[:12]}"
        self._meetings = 0
        self._lock = threading.Lock()

    @contextlib.contextmanager
    def meeting(self, label: str, why: str, agree_seconds: float) -> Iterator[Meeting]:
        """Comes together with the other processes, one meeting at a time.

        Args:
            label: what about, for people.
            why: why this process needs it, in one line.
            agree_seconds: how long to wait for a process that has not come.
        """
        with self._lock, self.telling_why():
            self._meetings += 1
            name = f"{self.name}/{self._meetings}"
            with self.watch.meeting(), _Meeting(self, name, label, why, agree_seconds) as meeting:
                yield meeting
            if self.rank == self.ranks[0] and self._meetings > 1:
                self.service.delete(f"{self.name}/{self._meetings - 1}/")  # All have left it.

    @contextlib.contextmanager
    def telling_why(self) -> Iterator[None]:
        """Raises `AgreementError` where the others have gone because they had waited for too long.

        They waited for a process that was in another call, which ends only when they do.
        """
        try:
            yield
        except RankLostError as lost:
            for rank, text in self.watch.given_up.items():
                if rank in self.ranks and (rank in lost.ranks or not lost.ranks):
                    raise AgreementError(
                        text, sides=((rank,), (self.rank,)), where=f"rank {self.rank}", hint=_HINT
                    ) from lost
            raise


class PodOfSession:
    """A pod, with the patience of one session: the `Peers` of its programs."""

    def __init__(self, pod: Pod, agree_seconds: float):
        self.pod, self.agree_seconds = pod, agree_seconds
        self.rank, self.ranks = pod.rank, pod.ranks

    def meeting(self, label: str, why: str) -> contextlib.AbstractContextManager[Meeting]:
        """As `Peers` has it."""
        return self.pod.meeting(label, why, self.agree_seconds)

    def suspect(self, error: BaseException) -> None:
        """As `Peers` has it."""
        with self.pod.telling_why():
            self.pod.watch.suspect(error)

    def enter(self, hang_seconds: float = HANG_SECONDS, on_hang: OnHang = "warn") -> None:
        """This thread enters a session over these processes."""
        self.pod.watch.enter(self.pod.name, self.ranks, hang_seconds, on_hang)

    def leave(self, error: BaseException | None) -> None:
        """This thread leaves it."""
        self.pod.watch.leave(self.pod.name, error)

    def guarded(self, work: Callable[[], T]) -> T:
        """As `Company` has it."""
        with self.pod.telling_why():
            self.pod.watch.raise_if_lost()
        try:
            return work()
        except Exception as error:
            self.suspect(error)
            raise

    def wait_for_all(self, label: str, said: bytes = b"") -> dict[int, bytes]:
        """As `Company` has it."""
        with self.meeting(label, "") as meeting:
            return meeting.hear("here", said, patiently=True)


def peers_of(ranks: Sequence[int], agree_seconds: float = AGREE_SECONDS) -> PodOfSession | None:
    """These processes; None for one process, or where JAX has no service for them.

    Args:
        ranks: theirs, in order.
        agree_seconds: how long to wait for one that has not come.
    """
    if len(ranks) < 2:
        return None
    service = coordination.service()
    if service is None:
        return None
    with _lock:
        watch, pod = Watch.of_this_process(service), _pods.get(tuple(ranks))
        if pod is None or pod.watch is not watch:
            pod = _pods[tuple(ranks)] = Pod(tuple(ranks), watch)
        return PodOfSession(pod, agree_seconds)


class _Meeting:
    """One meeting.

    Whoever comes last writes down what all have said, as `Service.say` has it. Whoever came first
    says who is missing, and writes down that somebody is when it has waited for too long. A name
    is given its value once, so all read the same.
    """

    def __init__(self, pod: Pod, name: str, label: str, why: str, agree_seconds: float):
        self._pod, self._name = pod, name
        self._label, self._why, self._agree_seconds = label, why, agree_seconds
        self._relays: list[Relay] = []

    def __enter__(self) -> _Meeting:
        return self

    def __exit__(self, *exception) -> None:
        for each in self._relays:  # All have what they came for.
            each.close()

    def hear(
        self, topic: str, said: bytes, *, patiently: bool = False, brief: Brief | None = None
    ) -> dict[int, bytes]:
        """As `Meeting` has it."""
        service, ranks, place = self._pod.service, self._pod.ranks, f"{self._name}/{topic}"
        outcome = coordination.outcome_of(place)

        def missing() -> list[int]:
            there = service.said(place)
            return [rank for rank in ranks if rank not in there]

        def give_up() -> None:
            if service.put(f"{place}/given up", b"1") and (who := missing()):
                late = {"late": who, "by": self._pod.rank, "why": self._why}
                if service.put(outcome, coordination.pack_outcome(**late)):
                    self._pod.watch.tell(self._late(**late).what, gives_up=True)

        with self._knowing_of_losses():
            turn = service.say(place, self._pod.rank, len(ranks), said, brief)
            if turn == len(ranks):  # It is there.
                packed = service.get(outcome)
            else:
                is_first, never = turn == 1, float("inf")
                bound = self._agree_seconds + (0 if is_first else _FIRST_SECONDS)
                log_seconds = _LOG_AFTER_SECONDS if is_first else never
                bound = never if patiently else bound
                packed = self._wait(outcome, missing, bound, give_up, log_seconds)
        found = coordination.unpack_outcome(packed)
        if "failed" in found:
            raise AgreementError(
                f"the processes do not understand what they say of {self._label}: "
                f"{found['failed']}",
                hint="run the same version of stepcache on all of them",
            )
        if "late" in found:
            raise self._late(**found)
        return found["voices"]

    def said(self, topic: str) -> dict[int, bytes]:
        """As `Meeting` has it."""
        with self._knowing_of_losses():
            return self._pod.service.said(f"{self._name}/{topic}")

    def hand_out(self, name: str, data: bytes, takers: Sequence[int]) -> None:
        """As `Meeting` has it."""
        service, place = self._pod.service, f"{self._name}/{name}/{self._pod.rank}"
        pieces = [data[at : at + PIECE_BYTES] for at in range(0, len(data), PIECE_BYTES)] or [b""]
        with self._knowing_of_losses():
            source = self._relayed(data, len(takers)) if len(data) >= RELAYED_BYTES else None
            service.put(f"{place}/begin", plain.pack([len(pieces), source]))
            if source is not None:
                takers = plain.unpack(self._wait(f"{place}/left", lambda: takers))
            for number, piece in enumerate(pieces if takers else ()):
                if number >= _WINDOW:
                    self._take_back(place, number - _WINDOW, takers)
                service.put(f"{place}/{number}", piece)

    def _take_back(self, place: str, number: int, takers: Sequence[int]) -> None:
        """Frees a piece when all have it."""
        for rank in takers:
            self._wait(f"{place}/taken/{number}/{rank}", lambda rank=rank: [rank])
        self._pod.service.delete(f"{place}/{number}")

    def take(self, name: str, giver: int) -> bytes:
        """As `Meeting` has it."""
        service, place = self._pod.service, f"{self._name}/{name}/{giver}"
        count, source = plain.unpack(self._wait(f"{place}/begin", lambda: [giver]))
        data = self._fetched(place, giver, source) if source is not None else None
        if data is not None:
            return data
        pieces = []
        for number in range(count):
            pieces.append(self._wait(f"{place}/{number}", lambda: [giver]))
            if number + _WINDOW < count:
                service.put(f"{place}/taken/{number}/{self._pod.rank}", b"1")
        return b"".join(pieces)

    def _relayed(self, data: bytes, takers: int) -> dict[str, Any] | None:
        """Where some takers find bytes; None where no relay can be set up."""
        token = secrets.token_bytes(32)
        try:
            relay = Relay(own_host(coordinator_address()), token, data, complete=True)
        except OSError as error:
            _log.info("what is handed out goes through the coordination service: %s", error)
            return None
        self._relays.append(relay)
        about = {"address": list(relay.address), "token": token, "size_bytes": len(data)}
        return about | {"digest": hashlib.sha256(data).digest(), "takers": takers}

    def _fetched(self, place: str, giver: int, source: dict[str, Any]) -> bytes | None:
        """What is handed out, by relays; None where this process has to get it in pieces.

        Who comes first is nearer to the giver. The last one that has it, or has not got it, says
        who needs pieces.
        """
        service, data = self._pod.service, None
        with self._knowing_of_losses():
            number = service.add(f"{place}/joined")
            try:
                data = self._by_relay(f"{place}/at", number, giver, source)
            except OSError as error:
                service.put(f"{place}/at/{number}", plain.pack(None))
                service.put(f"{place}/failed/{self._pod.rank}", b"1")
                _log.info("what rank %d hands out comes in pieces: %s", giver, error)
            if service.add(f"{place}/ended") == source["takers"]:
                left = sorted(map(int, service.listed(f"{place}/failed/")))
                service.put(f"{place}/left", plain.pack(left))
        return data

    def _by_relay(self, places: str, number: int, giver: int, source: dict[str, Any]) -> bytes:
        data, address = bytearray(source["size_bytes"]), source["address"]
        relay = Relay(own_host(coordinator_address()), source["token"], data, complete=False)
        self._relays.append(relay)
        self._pod.service.put(f"{places}/{number}", plain.pack(list(relay.address)))
        if parent := parent_of(number):
            address = plain.unpack(self._wait(f"{places}/{parent}", lambda: [giver]))
        if address is None:
            raise ConnectionError("the process that was to pass it on cannot")
        relay.fetch(tuple(address), self._pod.watch.raise_if_lost)
        if hashlib.sha256(data).digest() != source["digest"]:
            raise ConnectionError("what came is not what was handed out")
        return bytes(data)

    def _wait(
        self,
        name: str,
        missing: Callable[[], Iterable[int]],
        bound_seconds: float = float("inf"),
        give_up: Callable[[], None] | None = None,
        log_seconds: float = _LOG_AFTER_SECONDS,
    ) -> bytes:
        """Waits for a value, in one call of the service.

        Args:
            name: its name.
            missing: says who is being waited for; asks the service.
            bound_seconds: for how long, before `give_up`; without that, for as long as all live.
            give_up: gives the name a value when the time is over, in one of those that wait.
            log_seconds: after how long to say who is missing.
        """
        watch, started = self._pod.watch, time.monotonic()
        with self._knowing_of_losses(), watch.asking(name) as call:
            while True:
                with contextlib.suppress(TimeoutError):
                    return call.result(_LOOK_SECONDS)
                watch.raise_if_lost()
                waited = time.monotonic() - started
                if waited > log_seconds:
                    log_seconds = float("inf")
                    self._say_who_is_missing(missing, waited, tell_all=give_up is not None)
                if waited > bound_seconds and give_up is not None:
                    bound_seconds = float("inf")
                    give_up()

    def _say_who_is_missing(
        self, missing: Callable[[], Iterable[int]], waited: float, *, tell_all: bool
    ) -> None:
        """Logs it; or, once for all that wait, has all processes log it."""
        if tell_all and not self._pod.service.put(f"{self._name}/waiting", b"1"):
            return
        who = readable_ranks(missing())
        text = (
            f"rank {self._pod.rank} has waited for {who} for {waited:.0f} s, to "
            f"agree on {self._label}"
            + (f"; its call is new there: {self._why}" if self._why else "")
        )
        if tell_all:
            self._pod.watch.tell(text)
        else:
            _log.warning("%s", text)

    @contextlib.contextmanager
    def _knowing_of_losses(self) -> Iterator[None]:
        """Raises `RankLostError` where it is why something went wrong, or never came."""
        self._pod.watch.raise_if_lost()
        try:
            yield
        except Unreachable as error:
            self._pod.watch.service_has_gone(str(error))
            self._pod.watch.raise_if_lost()
            raise

    def _late(self, late: list[int], by: int, why: str) -> AgreementError:
        """The error of one that has waited, or is late itself.

        Args:
            late: those that have not come.
            by: who has waited for them.
            why: why that one came.
        """
        reason = f"; the call of rank {by} was new: {why}" if why else ""
        if self._pod.rank in late:
            return AgreementError(
                f"rank {self._pod.rank}, this one, came too late to agree on {self._label}: the "
                f"others have given up{reason}",
                sides=(tuple(late),),
            )
        return AgreementError(
            f"{readable_ranks(late)} did not come to agree on {self._label}, within "
            f"{self._agree_seconds:.0f} s{reason}",
            sides=(tuple(late),),
            expected=f"a call that needs a new program, on {readable_ranks(self._pod.ranks)}",
            got=f"none on {readable_ranks(late)}: there runs something else, or a known program",
            hint=_HINT,
        )


_HINT = (
    "make the same calls, of the same shapes and static values, in the same order on all "
    "processes; a call of one process alone needs all its arguments on devices of its own "
    "(jax.device_put), or sc.Session() around it; Session(agree_timeout=…) waits longer"
)
