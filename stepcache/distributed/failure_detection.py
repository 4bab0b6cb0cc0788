"""Detects lost and hanging processes of a pod, and raises `RankLostError` on all others.

Each process runs daemon threads. One waits in a single call of JAX's coordination service for the
next event of the pod: `left` (a rank left a session), `ended` (a rank's script ended), `roll` (all
ranks say where they are), `hang`, `log` and `lost`. The other one checks every second, without the
service, whether the thread that entered the session moves and whether the processes of this
machine run. A quiet pod makes no calls.

A rank that ends by an error announces its own loss. A killed rank is detected by its neighbours,
whose collectives fail, and by processes of the same machine. A rank that does not answer a roll
call is lost. If the main thread still waits for a device a few seconds after a loss, it cannot
raise: then the error is printed and the process exits.

Rank 0 runs the coordination service. When it is killed, JAX aborts all other processes within a
fraction of a second, which Python cannot prevent. A third thread holds a connection to rank 0 and
logs the loss at once; the main thread raises it if it runs Python code. The abort begins about when
the connection closes, and takes tens of milliseconds, for a stack trace. On a machine so busy that
these threads get no CPU meanwhile, nothing is logged.
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
from typing import Any

import jax

from stepcache._process_hooks import quick_switching
from stepcache.distributed import hang_report, service_calls
from stepcache.distributed.global_arrays import pending_ranks
from stepcache.distributed.hang_report import Movement, OnHang, Row, table
from stepcache.distributed.loss import Loss
from stepcache.distributed.pod_events import ANSWER_SECONDS, ENDED, PodEvents
from stepcache.errors import AgreementError, RankLostError, first_line
from stepcache.jaxcompat import coordination
from stepcache.jaxcompat.coordination import Service, Unreachable

_LOOK_SECONDS = 1.0
_STILL_SECONDS = 4.0  # A thread that has not moved for this long may wait for other processes.
_ASK_AGAIN_SECONDS = 20.0
_ERROR_LENGTH = 120
_PROBES, _PROBE_SECONDS = 10, 0.01
_OF_TRANSPORT = re.compile(
    r"gloo|nccl|connection (reset|closed|refused)|socket closed|broken pipe|heartbeat|"
    r"coordination ?service|UNAVAILABLE",
    re.IGNORECASE,
)
_log = logging.getLogger("stepcache")
_making = threading.Lock()


class Watch:
    """Watches the processes of the pod. One object in each process."""

    _made: Watch | None = None

    def __init__(self, service: Service):
        self.service, self.rank = service, jax.process_index()
        # By rank, the errors of processes that have given up waiting for others.
        self.given_up: dict[int, str] = {}
        # By mesh, lock and counter of the agreement rounds.
        self.rounds: dict[str, tuple[threading.Lock, Iterator[int]]] = {}
        self._announced = self._closed = self._has_failed = False
        self._events = PodEvents(service, self.rank)
        self.loss = Loss(self.rank, service, self._events)
        self._movement = Movement(threading.main_thread().ident or 0)
        # Replaced, not changed: the watching thread reads them while others enter and leave.
        self._sessions: dict[str, list] = {}  # As in `Row`.
        self._inside: list[tuple[str, Sequence[int], float, OnHang]] = []
        self._entering = threading.Lock()
        self._left_at = time.monotonic()
        self._failure = ""  # The error by which this process is about to end.
        self._ended = ""
        self._heard_left: set[tuple[str, int]] = set()
        self._someone_ended = self._reported_hang = False
        self._ask_after = self._others_ask_until = 0.0  # By the monotonic clock.
        self._agreeing_since = float("inf")
        self._pid = os.getpid()
        coordination.replace_shutdown(self._shut_down)
        self._thread = threading.Thread(target=self._watch, name="stepcache watch", daemon=True)
        self._thread.start()
        if self.rank:
            name = "stepcache coordinator"
            threading.Thread(target=self._watch_coordinator, name=name, daemon=True).start()

    @classmethod
    def of_this_process(cls, service: Service) -> Watch:
        """Returns the watch of this process; a new one after JAX has connected to a new service."""
        with _making:
            made = cls._made
            if made is None or made._closed or made.service.client is not service.client:
                made = cls._made = cls(service)
            return made

    def enter(self, mesh: str, ranks: Sequence[int], hang_seconds: float, on_hang: OnHang) -> None:
        """Notes that this thread enters a session, and watches its movement from now on.

        Args:
            mesh: names the processes of the session's mesh.
            ranks: these processes.
            hang_seconds: how long the thread may stand still; may be infinite.
            on_hang: whether a longer wait is logged, or an error of all processes.
        """
        self._movement = Movement(threading.get_ident())
        with self._entering:
            others = dict(self._sessions)
            number, _ = others.pop(mesh, (0, ""))
            self._sessions = others | {mesh: [number + 1, ""]}
            self._inside = [*self._inside, (mesh, ranks, hang_seconds, on_hang)]

    def leave(self, mesh: str, error: BaseException | None) -> None:
        """Notes that the thread leaves the session, with an error or without."""
        with self._entering:
            inside = self._inside.copy()
            for entered in reversed(inside):
                if entered[0] == mesh:
                    inside.remove(entered)
                    break
            self._inside = inside
        if mesh in self._sessions and all(name != mesh for name, *_ in self._inside):
            how = f" by {first_line(error)[:_ERROR_LENGTH]}" if error is not None else ""
            self._sessions[mesh][1] = f"left its session{how}"
        if isinstance(error, SystemExit) and error.code:
            self._failure = f"ended by SystemExit: {error.code}"
        self._left_at = time.monotonic()

    @contextlib.contextmanager
    def agreeing(self) -> Iterator[None]:
        """Context manager of an agreement round, during which other ranks may end."""
        self._agreeing_since = time.monotonic()
        try:
            yield
        finally:
            self._agreeing_since = float("inf")
            self._events.expect_new_neighbours()

    def log_everywhere(self, text: str, *, gives_up: bool = False) -> None:
        """Makes all processes log a line; an error of this one if it gives up waiting."""
        if not self.loss.known.is_set():
            self._append("log", text=text, gives_up=gives_up)

    def suspect(self, error: BaseException) -> None:
        """Raises if a lost process is the cause of an error.

        Raises:
            RankLostError: it is.
        """
        if isinstance(error, RankLostError | AgreementError) or self._closed:
            return
        if not self.loss.known.is_set():
            of_jax = isinstance(error, RuntimeError | ValueError)  # Sockets raise others.
            if not (of_jax and _OF_TRANSPORT.search(str(error))):
                return
            self._events.inbox.put(("suspicion", first_line(error)))
            for _ in range(_PROBES):  # Rank 0's port closes a little later than its connections.
                if self.rank and service_calls.coordinator_refuses():
                    self.lose_service(first_line(error))
                if self.loss.known.wait(_PROBE_SECONDS):
                    break
            self.loss.known.wait(2 * ANSWER_SECONDS)
        self.loss.raise_if_known(error)

    def lose_service(self, why: str) -> None:
        """Notes the loss of the coordination service, and so of rank 0, which runs it."""
        self._note_loss([0], f"its coordination service does not answer ({why})")

    def _note_loss(self, ranks: Sequence[int], why: str, report: str = "") -> None:
        self.loss.note(ranks, why, report, log=not self._failure)

    def _announce_loss(self, ranks: Iterable[int], why: str, report: str = "") -> None:
        self._announced = True
        self._append("lost", ranks=sorted(ranks), why=why, table=report)

    def _announce_failure(self) -> None:
        self._announce_loss([self.rank], _after(self._failure, hang_report.latest_call()))

    def _append(self, kind: str, **more: Any) -> None:
        """Appends an event, after those that other ranks append meanwhile."""
        while not self._events.over and self._events.append(kind, **more) is None:
            time.sleep(0.01)

    def _watch(self) -> None:
        while not self._closed:
            try:
                with contextlib.suppress(queue.Empty):
                    self._handle(*self._events.inbox.get(timeout=_LOOK_SECONDS))
                    while True:
                        self._handle(*self._events.inbox.get_nowait())
                if self.loss.known.is_set():
                    self.loss.exit_if_stuck(self._movement)
                elif not self._announced:
                    self._look()
            except Unreachable as error:
                if self._is_shut_down():
                    return
                self.lose_service(first_line(error))
            except Exception:  # The thread must go on, as it alone detects losses.
                if not self._has_failed:
                    _log.exception("the detection of lost processes failed once, and goes on")
                self._has_failed = True
                time.sleep(_LOOK_SECONDS)

    def _watch_coordinator(self) -> None:
        """Logs the loss of rank 0 before JAX's abort, which has begun, ends this process."""
        if service_calls.wait_until_coordinator_ends(self._is_shut_down):
            with quick_switching():  # JAX's abort does not wait for the 5 ms of a thread switch.
                self.lose_service(ENDED)

    def _is_shut_down(self) -> bool:
        return bool(self._closed or self._ended) or coordination.service() is None

    def _handle(self, number: Any, event: Any) -> None:
        if number == "unreachable":
            if not self._is_shut_down():
                self.lose_service("its connection is closed")
            return
        if number == "suspicion":
            if not (self._announced or self.loss.known.is_set()) and not self._inquire(event, True):
                time.sleep(0.01)
                self._events.inbox.put((number, event))
            return
        self._events.note_handled(number)
        by = event["by"]
        match event["kind"]:
            case "left":
                self._heard_left.add((event["mesh"], event["number"]))
            case "ended":
                self._someone_ended = True
            case "log":
                if event["gives_up"]:
                    self.given_up[by] = event["text"]
                if not (event["gives_up"] and by == self.rank):
                    _log.warning("%s", event["text"])
            case "roll" if by != self.rank:
                self._events.answer(number, self._row())
                self._ask_after = self._others_ask_until = time.monotonic() + 2 * ANSWER_SECONDS
            case "hang":
                self._reported_hang = True
                _log.warning("%s", event["text"])
            case "lost":
                noticed = "" if by in event["ranks"] else f" (rank {by} noticed)"
                self._note_loss(event["ranks"], f"{event['why']}{noticed}", event["table"])

    def _look(self) -> None:
        movement = self._movement
        movement.look()
        still = movement.still_seconds
        agreeing = time.monotonic() - self._agreeing_since
        if still < _LOOK_SECONDS / 2 and agreeing < 0:
            self._reported_hang = False
        self._announce_end()
        may_ask = time.monotonic() > self._others_ask_until
        if max(still, agreeing) > _LOOK_SECONDS and may_ask and self._events.ended_neighbours():
            self._inquire(ENDED)
        inside = self._inside
        if not inside or time.monotonic() < self._ask_after:
            return
        mesh, _, hang_seconds, on_hang = inside[-1]
        waits = still > _STILL_SECONDS and movement.waits_for_device
        left = (mesh, self._sessions[mesh][0]) in self._heard_left
        if (self._someone_ended and (waits or agreeing > _STILL_SECONDS)) or (left and waits):
            self._ask_after = time.monotonic() + _ASK_AGAIN_SECONDS
            self._inquire("")
        elif max(still, agreeing) > hang_seconds and not self._reported_hang:
            self._report_hang(hang_seconds, on_hang if still > hang_seconds else "warn")

    def _announce_end(self) -> None:
        """Announces how this process ended or left its session, as others may wait for it."""
        main = threading.main_thread()
        if not main.is_alive() and self._movement.thread == main.ident:
            self._note_failure()
            if self._failure:
                return self._announce_failure()
            self._ended = self._ended or "ended its script"
        if self._ended:
            if not self._someone_ended:
                self._events.append("ended")
        elif not self._inside and time.monotonic() > self._left_at + _LOOK_SECONDS:
            for mesh, (number, left) in list(self._sessions.items()):
                if left and (mesh, number) not in self._heard_left and not pending_ranks():
                    self._events.append("left", mesh=mesh, number=number)

    def _note_failure(self) -> None:
        error = getattr(sys, "last_value", None)
        if error is not None and not threading.main_thread().is_alive():
            self._failure = f"ended by {first_line(error)}"

    def _row(self) -> Row:
        movement, call = self._movement, hang_report.latest_call()
        movement.look()
        return Row(movement.where, movement.still_seconds, call, self._ended, self._sessions)

    def _inquire(self, why: str, of_transport: bool = False) -> bool:
        """Determines and announces which ranks are lost; returns False if it must be tried again.

        Args:
            why: why this process asks.
            of_transport: a collective failed, so that some rank must be lost.
        """
        found = self._events.call_roll(self._row())
        if found is None:
            return False
        rows, silent = found
        lost = {rank for rank, reason in silent.items() if reason == ENDED or of_transport}
        if lost:
            why = "; ".join(dict.fromkeys(silent[rank] for rank in sorted(lost)))
        else:
            outside = self._outside(rows, of_transport)
            if not outside and not of_transport:
                return True
            lost = set(outside)
            others = "while others wait for it" if lost else ""
            why = "; ".join(filter(None, (*dict.fromkeys(outside.values()), why, others)))
        self._announce_loss(lost, why, table(rows, silent))
        return True

    def _outside(self, rows: dict[int, Row], of_transport: bool) -> dict[int, str]:
        """Returns how other ranks left the session that this process is in, by rank."""
        inside = self._inside
        mesh, ranks, *_ = inside[-1] if inside else ("", rows)
        number = self._sessions[mesh][0] if mesh else 0
        # A local computation may take long: then no other rank is waited for.
        pending = set() if of_transport else pending_ranks()
        outside = {}
        for rank in sorted(set(ranks) & rows.keys() - {self.rank}):
            how, call = rows[rank].how_left(mesh, number), rows[rank].call
            if how and (rank in pending or not pending):
                outside[rank] = _after(how, call)
        return outside

    def _report_hang(self, seconds: float, on_hang: OnHang) -> None:
        if (found := self._events.call_roll(self._row())) is None:
            return
        rows, silent = found
        if silent:  # Call a second time, to be certain.
            if (found := self._events.call_roll(self._row())) is None:
                return
            silent = {rank: why for rank, why in found[1].items() if rank in silent}
        text = f"no progress for {seconds:g} s"
        if silent:
            self._announce_loss(silent, f"{text}, and it does not answer", table(rows, silent))
        elif on_hang == "error":
            self._announce_loss((), text, table(rows))
        else:
            self._events.append("hang", text=f"{text} in rank {self.rank}. {table(rows)}")

    def _shut_down(self, shut_down: Callable[[], None]) -> None:
        """Replaces `jax.distributed.shutdown`, which JAX also calls at exit.

        JAX waits there for all processes. A process that an error ends, or whose pod is broken,
        announces that and leaves without waiting.
        """
        if os.getpid() != self._pid:
            return shut_down()
        self._note_failure()
        with contextlib.suppress(Unreachable):
            if self._failure and not self.loss.known.is_set():
                self._announce_failure()
                self.loss.known.wait(ANSWER_SECONDS)
        if self.loss.known.is_set() or self._failure:
            with contextlib.suppress(Unreachable):
                self.loss.end_calls()
                self.loss.leave_pod()
            coordination.abandon()
        else:
            ending = not threading.main_thread().is_alive()
            self._ended = "ended its script" if ending else "called jax.distributed.shutdown()"
            shut_down()
        self._closed = True
        for thread in (self._thread, self._events.thread):
            thread.join(2 * _LOOK_SECONDS)


def _after(how: str, call: str) -> str:
    return f"{how}, after {call}" if call else how
