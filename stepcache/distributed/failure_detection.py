"""Which processes of a pod have gone, or hang: found out, told to all, and made an error of.

Each process has daemon threads. One waits in a single call of the coordination service for the
next piece of *news*: `left` (a rank left a session), `ended` (a rank's script ended), `roll` (all
say where they are), `hang` and `lost`. Any rank may give news; the first that gives number n has
given it, and all get it. The other thread looks every second at this process alone, without the
service: whether the thread that entered the session moves, and whether processes of this machine
run. A pod where nothing happens makes no calls.

A rank that ends by an error says so itself. One that was killed is noticed by its neighbours, whose
collectives fail, and by processes of the same machine. Who of the others does not answer a roll
call is lost. Where the main thread still waits for a device a few seconds after a loss is known,
nothing can make it raise: then the error is printed here, and the process ends.

Rank 0 runs the coordination service. When its process is killed, JAX aborts all others within a
fraction of a second, and no Python can prevent it. A third thread, which holds a connection to rank
0, logs before that who has gone; where the main thread is in Python's hands, it raises too.
"""

from __future__ import annotations

import contextlib
import logging
import os
import queue
import re
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, wait
from typing import Any, Literal

import jax

from stepcache.distributed import hang_report
from stepcache.distributed.hang_report import Movement, Row, table
from stepcache.distributed.news import ANSWER_SECONDS, News
from stepcache.errors import RankLostError, first_line
from stepcache.jaxcompat import coordination
from stepcache.jaxcompat.coordination import Service, Unreachable, asked
from stepcache.units import readable_ranks

HANG_SECONDS = 60.0
"""After how long without a movement a report of all ranks is logged, by default."""
OnHang = Literal["warn", "error"]

_LOOK_SECONDS = 1.0
_STILL_SECONDS = 4.0  # A thread that has not moved for that long seems to wait for others.
_RAISE_SECONDS = 3.0  # To raise what is known, for a main thread that waits for a device.
_LEAVE_SECONDS = 30.0  # To end, for one that has raised it and waits again.
_LAST_ONE_SECONDS = 8.0
_ASK_AGAIN_SECONDS = 20.0
_ERROR_LENGTH = 120
_PROBES, _PROBE_SECONDS = 10, 0.01
_NO_ANSWER = b"no answer: a process has gone"
_OF_TRANSPORT = re.compile(
    r"gloo|nccl|connection (reset|closed|refused)|socket closed|broken pipe|heartbeat|"
    r"coordination ?service|UNAVAILABLE",
    re.IGNORECASE,
)
_log = logging.getLogger("stepcache")
_making = threading.Lock()


class Watch:
    """Knows whether all processes of the pod are there, and in the same sessions.

    Args:
        service: JAX's coordination service.

    Attributes:
        rank: of this process.
        service: as given.
        given_up: by rank, why a process has given up waiting for others.
    """

    _made: Watch | None = None

    def __init__(self, service: Service):
        self.service, self.rank = service, jax.process_index()
        self.given_up: dict[int, str] = {}
        self._error: RankLostError | None = None
        self._known, self._noting = threading.Event(), threading.Lock()
        self._told = self._raised = self._closed = False
        self._news = News(service, self.rank)
        self._movement = Movement(threading.main_thread().ident or 0)
        self._sessions: dict[str, list] = {}  # As in `Row`.
        self._inside: list[tuple[str, Sequence[int], float, OnHang]] = []
        self._left_at = time.monotonic()
        self._failure = ""  # How this process is about to end, if by an error.
        self._ended = ""
        self._heard_left: set[tuple[str, int]] = set()
        self._someone_ended = self._reported_hang = False
        self._ask_after = self._others_ask_until = 0.0  # By the monotonic clock.
        self._meeting_since = float("inf")
        self._left_calls: dict[Future[bytes], str] = {}  # The names that they wait for.
        self._pid = os.getpid()
        coordination.replace_shutdown(self._shut_down)
        self._thread = threading.Thread(target=self._watch, name="stepcache watch", daemon=True)
        self._thread.start()
        if self.rank:
            name = "stepcache coordinator"
            threading.Thread(target=self._watch_coordinator, name=name, daemon=True).start()

    @classmethod
    def of_this_process(cls, service: Service) -> Watch:
        """The one watch of this process, for as long as JAX's service is the same."""
        with _making:
            made = cls._made
            if made is None or made._closed or made.service.client is not service.client:
                made = cls._made = cls(service)
            return made

    # ---- in the threads that use it --------------------------------------------------------------

    def enter(self, mesh: str, ranks: Sequence[int], hang_seconds: float, on_hang: OnHang) -> None:
        """A thread enters a session; from now on its movements are watched.

        Args:
            mesh: names the processes of the session's mesh.
            ranks: theirs.
            hang_seconds: how long nothing may move; infinite for any time.
            on_hang: what happens then.
        """
        self._movement = Movement(threading.get_ident())
        number, _ = self._sessions.pop(mesh, (0, ""))
        self._sessions[mesh] = [number + 1, ""]
        self._inside.append((mesh, ranks, hang_seconds, on_hang))

    def leave(self, mesh: str, error: BaseException | None) -> None:
        """The thread leaves a session, on account of an error or not."""
        for entered in reversed(self._inside):
            if entered[0] == mesh:
                self._inside.remove(entered)
                break
        if mesh in self._sessions and all(name != mesh for name, *_ in self._inside):
            how = f" by {first_line(error)[:_ERROR_LENGTH]}" if error is not None else ""
            self._sessions[mesh][1] = f"left its session{how}"
        if isinstance(error, SystemExit) and error.code:
            self._failure = f"ended by SystemExit: {error.code}"
        self._left_at = time.monotonic()

    @contextlib.contextmanager
    def meeting(self) -> Any:
        """While processes agree: the last one may take its time, unless it has ended."""
        self._meeting_since = time.monotonic()
        try:
            yield
        finally:
            self._meeting_since = float("inf")
            self._news.some_may_be_new()

    @contextlib.contextmanager
    def asking(self, name: str) -> Iterator[Future[bytes]]:
        """While a value is waited for. A call that is left in the middle ends with the pod."""

        def get() -> bytes:
            value = self.service.get(name)
            if value == _NO_ANSWER:
                self._known.wait(2 * ANSWER_SECONDS)
                raise Unreachable("a process has gone")
            return value

        call = asked(get)
        try:
            yield call
        except BaseException:
            self._left_calls[call] = name
            raise

    def tell(self, text: str, *, gives_up: bool = False) -> None:
        """Has all processes log a line.

        Args:
            text: the line.
            gives_up: it is why this process, where it is an error, has given up waiting.
        """
        while not (self._news.over or self._known.is_set()):
            if self._news.give("said", text=text, gives_up=gives_up) is not None:
                return
            time.sleep(0.01)

    def raise_if_lost(self) -> None:
        """Raises what is known.

        Raises:
            RankLostError: a process has gone.
        """
        if self._error is not None:
            self._raised = True
            raise self._error

    def suspect(self, error: BaseException) -> None:
        """Finds out whether an error means that a process has gone.

        Raises:
            RankLostError: it does; the error is its cause.
        """
        if isinstance(error, RankLostError) or self._closed:
            return
        if not self._known.is_set():
            if not _OF_TRANSPORT.search(str(error)):
                return
            self._news.inbox.put(("suspicion", first_line(error)))
            for _ in range(_PROBES):  # A port is closed a little later than connections are.
                if self.rank and coordination.coordinator_refuses():
                    self.service_has_gone(first_line(error))
                if self._known.wait(_PROBE_SECONDS):
                    break
            self._known.wait(2 * ANSWER_SECONDS)
        if self._error is not None:
            self._raised = True
            raise self._error from error

    def service_has_gone(self, why: str) -> None:
        """The coordination service does not answer: it lives in the process of rank 0."""
        self._note_loss([0], f"its coordination service does not answer ({why})", "")

    def _tell_loss(self, ranks: Iterable[int], why: str, report: str = "") -> None:
        self._told = True
        while not self._news.over:
            if self._news.give("lost", ranks=sorted(ranks), why=why, table=report) is not None:
                return
            time.sleep(0.01)

    # ---- the thread that watches -----------------------------------------------------------------

    def _watch(self) -> None:
        while not self._closed:
            try:
                with contextlib.suppress(queue.Empty):
                    self._take(*self._news.inbox.get(timeout=_LOOK_SECONDS))
                    while True:
                        self._take(*self._news.inbox.get_nowait())
                if self._known.is_set():
                    self._end_if_stuck()
                elif not self._told:
                    self._look()
            except Unreachable as error:
                if self._is_shut_down():
                    return
                self.service_has_gone(first_line(error))

    def _watch_coordinator(self) -> None:
        """JAX's abort is under way then: there is time for a line, before other threads get on."""
        if coordination.wait_until_coordinator_ends(self._is_shut_down):
            self.service_has_gone("its process has ended")

    def _is_shut_down(self) -> bool:
        return bool(self._closed or self._ended) or coordination.service() is None

    def _take(self, number: Any, news: Any) -> None:
        if number == "unreachable":
            if not self._is_shut_down():
                self.service_has_gone("its connection is closed")
            return
        if number == "suspicion":
            if not (self._told or self._known.is_set()) and not self._inquire(news, True):
                time.sleep(0.01)
                self._news.inbox.put((number, news))
            return
        self._news.took(number)
        if news["kind"] == "left":
            self._heard_left.add((news["mesh"], news["number"]))
        elif news["kind"] == "said":
            if news["gives_up"]:
                self.given_up[news["by"]] = news["text"]
            if not (news["gives_up"] and news["by"] == self.rank):
                _log.warning("%s", news["text"])
        elif news["kind"] == "ended":
            self._someone_ended = True
        elif news["kind"] == "roll" and news["by"] != self.rank:
            self._news.answer(number, self._row())
            self._ask_after = self._others_ask_until = time.monotonic() + 2 * ANSWER_SECONDS
        elif news["kind"] == "hang":
            self._reported_hang = True
            _log.warning("%s", news["text"])
        elif news["kind"] == "lost":
            by = "" if news["by"] in news["ranks"] else f" (rank {news['by']} noticed)"
            self._note_loss(news["ranks"], f"{news['why']}{by}", news["table"])

    def _look(self) -> None:
        movement = self._movement
        movement.look()
        still = movement.still_seconds
        meeting = time.monotonic() - self._meeting_since
        if still < _LOOK_SECONDS / 2 and meeting < 0:
            self._reported_hang = False
        self._announce()
        may_ask = time.monotonic() > self._others_ask_until
        if max(still, meeting) > _LOOK_SECONDS and may_ask and self._news.ended_neighbours():
            self._inquire("its process has ended")
        if not self._inside or time.monotonic() < self._ask_after:
            return
        mesh, _, hang_seconds, on_hang = self._inside[-1]
        waits = still > _STILL_SECONDS and movement.waits_for_device
        left = (mesh, self._sessions[mesh][0]) in self._heard_left
        if (self._someone_ended and (waits or meeting > _STILL_SECONDS)) or (left and waits):
            self._ask_after = time.monotonic() + _ASK_AGAIN_SECONDS
            self._inquire("")
        elif max(still, meeting) > hang_seconds and not self._reported_hang:
            self._report_hang(hang_seconds, on_hang if still > hang_seconds else "warn")

    def _announce(self) -> None:
        """Tells the others, who may wait for this process, how it ended or left its session."""
        main = threading.main_thread()
        if not main.is_alive() and self._movement.thread == main.ident:
            self._note_failure()
            if self._failure:
                return self._tell_loss([self.rank], self._failure)
            self._ended = self._ended or "ended its script"
        if self._ended:
            if not self._someone_ended:
                self._news.give("ended")
        elif not self._inside and time.monotonic() > self._left_at + _LOOK_SECONDS:
            for mesh, (number, left) in list(self._sessions.items()):
                if left and (mesh, number) not in self._heard_left and not _pending_ranks():
                    self._news.give("left", mesh=mesh, number=number)

    def _note_failure(self) -> None:
        error = getattr(sys, "last_value", None)
        if error is not None and not threading.main_thread().is_alive():
            self._failure = f"ended by {first_line(error)}"

    # ---- roll calls ------------------------------------------------------------------------------

    def _row(self) -> Row:
        self._movement.look()
        movement = self._movement
        return Row(
            movement.where,
            movement.still_seconds,
            hang_report.latest_call(),
            self._ended,
            self._sessions,
        )

    def _inquire(self, why: str, of_transport: bool = False) -> bool:
        """Finds out who has gone, and tells all. False where that has to be asked again.

        Args:
            why: what makes this process ask.
            of_transport: it is an error of a collective, so that something is wrong for certain.
        """
        found = self._news.call_roll(self._row())
        if found is None:
            return False
        rows, silent = found
        lost = {rank for rank, reason in silent.items() if "ended" in reason or of_transport}
        if lost:
            reasons = dict.fromkeys(silent[rank] for rank in sorted(lost))
            why = "; ".join(reasons)
        else:
            mesh, ranks, *_ = self._inside[-1] if self._inside else ("", rows)
            number = self._sessions[mesh][0] if mesh else 0
            outside = {rank: rows[rank].gone(mesh, number) for rank in ranks if rank in rows}
            if not of_transport:  # A local computation may take its time.
                pending = _pending_ranks()
                outside = {
                    rank: outside[rank] for rank in outside if rank in pending or not pending
                }
            lost = {rank for rank, how in outside.items() if how and rank != self.rank}
            if not lost and not of_transport:
                return True
            calls = {rank: f", after {rows[rank].call}" if rows[rank].call else "" for rank in lost}
            hows = dict.fromkeys(f"{outside[rank]}{calls[rank]}" for rank in sorted(lost))
            others = "while others wait for it" if lost else ""
            why = "; ".join(filter(None, (*hows, why, others)))
        self._tell_loss(lost, why, table(rows, silent))
        return True

    def _report_hang(self, seconds: float, on_hang: OnHang) -> None:
        found = self._news.call_roll(self._row())
        if found is None:
            return
        rows, silent = found
        if silent:  # A second time, to be certain.
            found = self._news.call_roll(self._row())
            if found is None:
                return
            silent = {rank: why for rank, why in found[1].items() if rank in silent}
        text = f"nothing has moved for {seconds:g} s"
        if silent:
            self._tell_loss(silent, f"{text}, and it does not answer", table(rows, silent))
        elif on_hang == "error":
            self._tell_loss((), text, table(rows))
        else:
            self._news.give("hang", text=f"{text} in rank {self.rank}. {table(rows)}")

    # ---- a loss ----------------------------------------------------------------------------------

    def _note_loss(self, ranks: list[int], why: str, report: str) -> None:
        with self._noting:
            if not self._known.is_set():
                self._note_first_loss(ranks, why, report)

    def _note_first_loss(self, ranks: list[int], why: str, report: str) -> None:
        what = f"{readable_ranks(ranks)} of the pod has gone" if ranks else "the pod is broken"
        where = f"rank {self.rank}"
        self._error = RankLostError(
            f"{what}: {why}" + (f". {report}" if report else ""),
            ranks,
            where=f"{where}, {call}" if (call := hang_report.latest_call()) else where,
            hint="start again, on as many processes as there are: Variables.restore reads what any "
            "number of them saved",
        )
        self._known_at = time.monotonic()
        self._known.set()
        if not self._failure:
            _log.error("%s", self._error.what)

    def _end_if_stuck(self) -> None:
        """Ends the process where its main thread will not raise what is known.

        It is in a call that only the lost rank could end. Python cannot interrupt that.
        """
        movement = self._movement
        movement.look()
        still = min(movement.still_seconds, time.monotonic() - self._known_at)
        if not movement.waits_for_device:  # It goes on by itself.
            return
        if still < (_LEAVE_SECONDS if self._raised else _RAISE_SECONDS):
            return
        threading.Timer(2 * _LAST_ONE_SECONDS, os._exit, (1,)).start()  # If a stream blocks.
        with contextlib.suppress(Exception):
            for stream in (sys.stdout, sys.stderr):
                stream.flush()
            name = f"{RankLostError.__module__}.{RankLostError.__qualname__}"
            place = f"the thread waits at {movement.where}, and cannot raise this"
            sys.stderr.write(f"{name}: {self._error}\n{place}\n")
            sys.stderr.flush()
        with contextlib.suppress(Unreachable):
            self._say_goodbye()
        os._exit(1)

    # ---- the end ---------------------------------------------------------------------------------

    def _shut_down(self, shut_down: Callable[[], None]) -> None:
        """In the place of `jax.distributed.shutdown`, which JAX also calls at exit.

        JAX waits for all processes. One that an error ends, or whose pod is broken, must not: it
        tells the others, and leaves.
        """
        if os.getpid() != self._pid:
            return shut_down()
        self._note_failure()
        with contextlib.suppress(Unreachable):
            if self._failure and not self._known.is_set():
                self._tell_loss([self.rank], self._failure)
                self._known.wait(ANSWER_SECONDS)
        if self._known.is_set() or self._failure:
            with contextlib.suppress(Unreachable):
                self._end_calls()
                self._say_goodbye()
            coordination.abandon()
        else:
            ending = not threading.main_thread().is_alive()
            self._ended = "ended its script" if ending else "called jax.distributed.shutdown()"
            shut_down()
        self._closed = True
        for thread in (self._thread, self._news.thread):
            thread.join(2 * _LOOK_SECONDS)

    def _end_calls(self) -> None:
        """Ends the calls that were left: no thread may come back from one while Python ends."""
        if self._news.over:  # All know of the loss, or will, and heed no other answer.
            for call, name in self._left_calls.items():
                if not call.done():
                    self.service.put(name, _NO_ANSWER)
            wait(self._left_calls, 2 * _LOOK_SECONDS)

    def _say_goodbye(self) -> None:
        """Leaves a broken pod: rank 0 last, as the service ends with it."""
        gone = set(self._error.ranks) if self._error is not None else set()
        if 0 in gone - {self.rank}:
            return
        self._news.say_goodbye(gone if self.rank == 0 else None, _LAST_ONE_SECONDS)


def _pending_ranks() -> set[int]:
    """The processes whose devices hold a part of an array that is still being computed."""
    return {
        device.process_index
        for array in jax.live_arrays()
        if not (array.is_fully_addressable or array.is_deleted() or array.is_ready())
        for device in array.sharding.device_set
    }
