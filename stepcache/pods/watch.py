"""Tells the other processes of a pod how this one ends, and raises `RankLostError` for their ends.

All processes read one sequence of events from JAX's coordination service. A rank that raises, ends
its script or leaves its session says so there before it goes. One daemon thread in each process
waits for the next event in a blocking call. If none comes for twenty seconds, the lowest rank
appends a tick, so that all threads wake, and each looks whether its main thread moves. Twenty
seconds become two when a rank has gone while others may wait for it.

A killed rank says nothing. Its neighbours' collectives fail, and processes of the same machine see
that it has ended; elsewhere JAX's heartbeats end the pod. If the main thread still waits for a
device a few seconds after a loss, it cannot raise: then the thread prints the error and ends the
process. Rank 0 runs the service: when it is killed, JAX aborts all other processes within a
second, with a message of its own.
"""

from __future__ import annotations

import contextlib
import logging
import os
import re
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import jax

from stepcache import _process_hooks
from stepcache.errors import AgreementError, RankLostError, first_line
from stepcache.jaxcompat import coordination
from stepcache.jaxcompat.coordination import Service, Unreachable
from stepcache.link import plain
from stepcache.link.processes import Process
from stepcache.pods.global_arrays import pending_ranks
from stepcache.pods.hang import Movement, latest_call, stacks
from stepcache.units import readable_ranks

TICK_SECONDS = 20.0
_SOON_SECONDS = 2.0  # Between ticks when a rank has gone, for `_ALERT_SECONDS`.
_ALERT_SECONDS = 60.0
_STILL_SECONDS = 4.0  # A thread that has not moved for this long may wait for other processes.
_ANSWER_SECONDS = 5.0  # How long other ranks may take to say what they know, or to be seen.
_RAISE_SECONDS = 3.0  # How long the main thread may wait for a device before it raises a loss.
_LEAVE_SECONDS = 30.0  # How long it may wait for a device after it has raised the loss.
_LAST_SECONDS = 6.0  # How long rank 0, and with it the service, outlives a loss.
_KEPT_EVENTS = 1024  # A process that was suspended reads what it has missed.
OF_TRANSPORT = re.compile(
    r"gloo|nccl|connection (reset|closed|refused)|socket closed|broken pipe|heartbeat|"
    r"coordination ?service|UNAVAILABLE",
    re.IGNORECASE,
)
_EVENTS, _RANKS, _FIRST = (f"stepcache/{name}" for name in ("events", "ranks", "first"))
_SCRIPT, _LAST_NUMBER = "script", 1 << 60  # Who ends its script leaves all sessions to come.
_log = logging.getLogger("stepcache")
_making = threading.Lock()


class Watch:
    """What this process says to its pod, and hears of it. One object in each process."""

    _made: Watch | None = None

    def __init__(self, service: Service):
        self.service, self.rank, self._pid = service, jax.process_index(), os.getpid()
        # By mesh, lock and counter of the agreement rounds.
        self.rounds: dict[str, tuple[threading.Lock, Iterator[int]]] = {}
        self.lost = threading.Event()  # Set with the first loss; later ones are not recorded.
        self._error: RankLostError | None = None
        self._lost_at, self._noting, self._saying = 0.0, threading.Lock(), threading.Lock()
        self._raised = self._closed = self._has_failed = self._reported_hang = False
        self._failure = self._ended = ""  # How this process is about to end.
        self._movement = Movement(threading.main_thread().ident or 0)
        # Sessions entered: name and ranks of their mesh, and `hang_after`.
        self._entered: list[tuple[str, Sequence[int], float]] = []
        self._numbers: dict[str, int] = {}  # Of the latest session that was entered, by mesh.
        # Number and end of the sessions that were left, by mesh, and of the script.
        self._unsaid: dict[str, tuple[int, str]] = {}
        self.in_round = False
        self.comparing: tuple[float, str] | None = None  # Since when, and where all write.
        self.neighbours: dict[int, Process] | None = None  # Those of this machine, by rank.
        self._alert_until = 0.0
        boot = Path("/proc/sys/kernel/random/boot_id")  # Two machines may share a name.
        here = f"{boot.read_text().strip()}-{Process.current().host}" if boot.exists() else ""
        self._machine, self._next = here or f"of rank {self.rank}", 0
        self._said: dict[str, Any] = {}  # By this process of itself.
        try:
            self._say("process", Process.current())
            known = {int(name): event for name, event in service.listed(f"{_EVENTS}/").items()}
            lost = [number for number in known if plain.unpack(known[number])["kind"] == "lost"]
            self._next = min(lost, default=max(known, default=-1) + 1)
        except Unreachable as error:
            self.note_unreachable(error)
        coordination.replace_shutdown(self._shut_down)
        _process_hooks.before_threads_end(self._say_failure)
        _process_hooks.at_exit(self._say_end)
        self._thread = threading.Thread(target=self._watch, name="stepcache watch", daemon=True)
        self._thread.start()

    @classmethod
    def of_this_process(cls, service: Service) -> Watch:
        """Returns the watch of this process; a new one after JAX has connected to a new service."""
        with _making:
            if cls._made is None or cls._made.service.client is not service.client:
                cls._made = cls(service)
            return cls._made

    def enter(self, mesh: str, ranks: Sequence[int], hang_seconds: float) -> None:
        """Notes that this thread enters a session, and watches its movement from now on."""
        self._movement = Movement(threading.get_ident())
        self._numbers[mesh] = self._numbers.get(mesh, 0) + 1
        self._unsaid.pop(mesh, None)
        self._entered = [*self._entered, (mesh, ranks, hang_seconds)]

    def leave(self, mesh: str, error: BaseException | None) -> None:
        """Says that the thread leaves its session, with an error or without."""
        at = [number for number, entered in enumerate(self._entered) if entered[0] == mesh]
        self._entered = [each for number, each in enumerate(self._entered) if number not in at[-1:]]
        if isinstance(error, SystemExit) and error.code:
            self._failure = f"ended by SystemExit: {error.code}"
        if len(at) == 1 and not self.lost.is_set():
            how = f" by {first_line(error)}" if error is not None else ""
            end = f"left its session{how}, after {latest_call()}"
            self._unsaid = {**self._unsaid, mesh: (self._numbers[mesh], end)}
            self._say_out()

    def raise_if_lost(self, cause: BaseException | None = None) -> None:
        """Raises `RankLostError` if a process is known to be lost."""
        if self._error is not None:
            self._raised = True
            raise self._error from cause

    def raise_if_lost_by(self, error: BaseException) -> None:
        """Raises `RankLostError` if a lost process is the cause of an error."""
        if isinstance(error, RankLostError | AgreementError) or self._closed:
            return
        if not self.lost.is_set():
            of_jax = isinstance(error, RuntimeError | ValueError)  # Sockets raise others.
            if not (of_jax and OF_TRANSPORT.search(str(error))):
                return
            self._append("suspect")
            deadline = time.monotonic() + _ANSWER_SECONDS
            while not self.lost.wait(0.2) and time.monotonic() < deadline:
                with contextlib.suppress(Unreachable):  # Which the watching thread notices.
                    self.look_for_ended()  # A killed process takes a while to end.
            if not self.lost.is_set():  # Nobody says so, or can see it.
                self._append("lost", ranks=[], text=f"a collective failed: {first_line(error)}")
            self.lost.wait(_ANSWER_SECONDS)
        self.raise_if_lost(error)

    def look_for_ended(self) -> bool:
        """Says which ranks of this machine are lost, if the processes of any have ended."""
        if self.neighbours is None:
            said = self._said_by_ranks(self._machine)
            self.neighbours = {rank: Process(*said[rank]["process"]) for rank in said}
        ended = [rank for rank, process in self.neighbours.items() if process.has_ended()]
        if ended and not self.lost.is_set():
            self.neighbours = {}  # It is said once, though this process may hear of it later.
            self._append("lost", ranks=sorted(ended), text="its process has ended")
        return bool(ended)

    def note_loss(self, ranks: Sequence[int], why: str) -> None:
        """Records and logs a loss, unless one is recorded."""
        with self._noting:
            if self.lost.is_set():
                return
            are = "is" if len(ranks) == 1 else "are"
            who = f"{readable_ranks(ranks)} of the pod {are} lost" if ranks else "the pod is broken"
            hint = "start again, on as many processes as there are: sc.restore reads what any "
            hint += "number of processes saved"
            where = f"rank {self.rank}, {latest_call()}"
            self._error = RankLostError(f"{who}: {why}", ranks, where=where, hint=hint)
            self._lost_at = time.monotonic()
            self.lost.set()
            if not self._failure:
                _log.error("%s", self._error.what)

    def note_unreachable(self, error: Unreachable) -> None:
        """Records the loss of rank 0, which runs the coordination service."""
        self.note_loss([0], f"its coordination service does not answer ({first_line(error)})")

    def _append(self, kind: str, *, or_not: bool = False, **more: Any) -> None:
        """Appends an event, which all handle: after those that others append, or then not."""
        event, number = plain.pack({"kind": kind, "by": self.rank, **more}), self._next
        with contextlib.suppress(Unreachable):  # Which the watching thread notices.
            while not self.service.put(f"{_EVENTS}/{number}", event) and not or_not:
                number += 1

    def _say(self, what: str, value: Any) -> None:
        """Says something of this process, beside what it has said before."""
        with contextlib.suppress(Unreachable), self._saying:
            self._said[what] = value
            place = f"{_RANKS}/{self._machine}/{self.rank}"
            self.service.put(place, plain.pack(self._said), replace=True)

    def _said_by_ranks(self, machine: str = "") -> dict[int, dict[str, Any]]:
        """Returns what ranks have said of themselves: those of a machine, or all."""
        listed = self.service.listed(f"{_RANKS}/{machine}")
        return {int(name.rpartition("/")[2]): plain.unpack(said) for name, said in listed.items()}

    def _say_out(self) -> None:
        """Says what this process has left, once no device computes for others: they wait for that.

        The first process that leaves a session has all look often for a while.
        """
        if self._unsaid and not pending_ranks() - {self.rank}:
            unsaid, self._unsaid = self._unsaid, {}
            for place, (number, how) in unsaid.items():
                self._say(place, [number, how])
                with contextlib.suppress(Unreachable):
                    if self.service.put(f"{_FIRST}/{place} {number}", b"1"):
                        self._append("out")

    def _watch(self) -> None:
        while not (self._closed or self.lost.is_set()):
            try:
                pause = _SOON_SECONDS if time.monotonic() < self._alert_until else TICK_SECONDS
                # The lowest rank is the first, and wakes the others.
                event = self.service.get(f"{_EVENTS}/{self._next}", pause + min(self.rank, 50) / 4)
                if event is None:
                    self._append("tick", or_not=True)
                    self.service.delete(f"{_EVENTS}/{self._next - _KEPT_EVENTS}")
                    continue
                number, self._next = self._next, self._next + 1
                match plain.unpack(event):
                    case {"kind": "out"}:
                        self._alert_until = time.monotonic() + _ALERT_SECONDS
                    case {"kind": "suspect"}:
                        self.neighbours = None
                        for _ in range(10):  # Here too it may be ending.
                            if self.look_for_ended() or self.lost.wait(0.2):
                                break
                    case {"kind": "hang", "text": text}:
                        self._report_hang(number, text)
                    case {"kind": "lost", "by": by, "ranks": ranks, "text": text}:
                        noticed = "" if by in ranks else f" (rank {by} noticed)"
                        self.note_loss(ranks, text + noticed)
                if not (self.lost.is_set() or self._ended):
                    self._look()
            except Unreachable as error:
                if self._closed or self._ended or coordination.service() is None:
                    return
                self.note_unreachable(error)
            except Exception:  # The thread must go on, as it alone detects losses.
                if not self._has_failed:
                    _log.exception("the detection of lost processes failed once, and goes on")
                self._has_failed = True
                time.sleep(1.0)
        while not self._closed:
            self._exit_if_stuck()
            time.sleep(0.5)

    def _look(self) -> None:
        """Looks whether the thread of the session waits for a rank that has gone, or hangs."""
        still = self._movement.look()
        since, entries = self.comparing or (float("inf"), "")
        agreeing = max(time.monotonic() - since, 0.0)
        self._say_out()
        if not self._entered:
            return
        mesh, ranks, hang_seconds = self._entered[-1]
        if still < 0.5 and not agreeing:
            self._reported_hang = False
        waits = still > _STILL_SECONDS and self._movement.waits_for_device and not self.in_round
        if waits or agreeing > _STILL_SECONDS:
            self.look_for_ended()
            if time.monotonic() < self._alert_until:
                left: dict[int, str] = {}
                for rank, said in self._said_by_ranks().items():
                    number, how = said.get(_SCRIPT) or said.get(mesh, (0, ""))
                    if rank in ranks and number >= self._numbers[mesh]:
                        left[rank] = how
                if agreeing:  # Who has left had written before all that it compares.
                    gone = left.keys() - {int(rank) for rank in self.service.listed(entries)}
                else:  # What one rank alone computes may take long: nobody is to come.
                    gone = left.keys() & (pending_ranks() or left)
                if gone:
                    why = "; ".join(dict.fromkeys(left[rank] for rank in sorted(gone)))
                    text = f"{why}, while rank {self.rank} waits at {self._movement.where}"
                    return self._append("lost", ranks=sorted(gone), text=text)
        if max(still, agreeing) > hang_seconds and not self._reported_hang:
            text = f"no progress for {hang_seconds:g} s in rank {self.rank}"
            self._append("hang", or_not=True, text=text)

    def _report_hang(self, number: int, text: str) -> None:
        """Logs the stacks of this process; rank 0 also where all are, once they have said it."""
        self._reported_hang = True
        self._movement.look()
        self._say("at", [number, f"{latest_call()}, {self._movement.where}"])
        _log.warning("%s; rank %d is here:\n%s", text, self.rank, stacks())
        if self.rank == 0 and not self.lost.wait(_ANSWER_SECONDS):
            places: dict[str, list[int]] = {}
            for rank, said in sorted(self._said_by_ranks().items()):
                of_hang, place = said.get("at", (-1, ""))
                places.setdefault(place if of_hang == number else "no answer", []).append(rank)
            rows = [f"{readable_ranks(places[place])}: {place}" for place in places]
            _log.warning("%s. The ranks are here:\n  %s", text, "\n  ".join(rows))

    def _exit_if_stuck(self) -> None:
        """Ends the process if its main thread cannot raise the loss: it is in a call that only the
        lost rank could end, which Python cannot interrupt.
        """
        still = min(self._movement.look(), time.monotonic() - self._lost_at)
        limit = _LEAVE_SECONDS if self._raised else _RAISE_SECONDS
        if not self._movement.waits_for_device or still < limit:
            return
        self._leave_pod()
        if self._closed or not self._movement.look():
            return  # The ends of other ranks have ended its call.
        _process_hooks.exit_after(_LAST_SECONDS)  # A stream may block.
        with contextlib.suppress(Exception):
            sys.stdout.flush()
            name = f"{RankLostError.__module__}.{RankLostError.__qualname__}"
            place = f"the thread waits at {self._movement.where}, and cannot raise this error"
            print(f"{name}: {self._error}\n{place}", file=sys.stderr, flush=True)
        os._exit(1)

    def _say_failure(self) -> None:
        """Says that this process is lost, if an error has ended its script."""
        error = getattr(sys, "last_value", None)
        if error is not None and not self._failure:
            self._failure = f"ended by {first_line(error)}"
        if self._failure and not (self._closed or self.lost.is_set() or os.getpid() != self._pid):
            self._append("lost", ranks=[self.rank], text=f"{self._failure}, after {latest_call()}")
            self.lost.wait(_ANSWER_SECONDS)

    def _say_end(self, how: str = "ended its script") -> None:
        """Says that this process ends, once its devices compute nothing for others."""
        if self._closed or self._ended or self._failure or os.getpid() != self._pid:
            return
        self._unsaid = {**self._unsaid, _SCRIPT: (_LAST_NUMBER, f"{how}, after {latest_call()}")}
        while self._unsaid and not self.lost.is_set():
            self._say_out()
            time.sleep(0.05)
        self._ended = how  # From now on JAX has no backend to ask for arrays.

    def _shut_down(self, shut_down: Callable[[], None]) -> None:
        """Replaces `jax.distributed.shutdown`, which JAX also calls at exit.

        JAX waits there for all processes. A process that an error ends, or whose pod is broken,
        leaves without waiting.
        """
        if os.getpid() != self._pid:
            return shut_down()
        self._say_end("called jax.distributed.shutdown()")
        if self.lost.is_set() or self._failure:
            self._closed = True  # This thread waits, but is not stuck.
            self._leave_pod()
            coordination.abandon()
        else:
            shut_down()
        self._closed = True
        self._thread.join(2.0)

    def _leave_pod(self) -> None:
        """Leaves a broken pod; rank 0 last: JAX aborts the others when its service ends."""
        if self.rank == 0:
            time.sleep(max(self._lost_at + _LAST_SECONDS - time.monotonic(), 0.0))
