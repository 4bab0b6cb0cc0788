"""Which processes of a pod have gone, or hang: found out, told to all, and made an error of.

Each process has two daemon threads. One waits in a single call of the coordination service for the
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
fraction of a second; `RankLostError` is raised, or printed, before that, where there is time.
"""

from __future__ import annotations

import contextlib
import logging
import os
import queue
import re
import select
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any, Literal

import jax

from stepcache.cluster.hang_report import Movement, Row, table
from stepcache.engine import latest_call
from stepcache.errors import RankLostError, first_line
from stepcache.jaxcompat import coordination
from stepcache.jaxcompat.coordination import Service, Unreachable
from stepcache.programs import plain
from stepcache.units import readable_ranks

HANG_SECONDS = 60.0
"""After how long without a movement a report of all ranks is logged, by default."""
OnHang = Literal["warn", "error"]

_LOOK_SECONDS = 1.0
_ANSWER_SECONDS = 5.0
_STILL_SECONDS = 4.0  # A thread that has not moved for that long seems to wait for others.
_RAISE_SECONDS = 3.0  # To raise what is known, for a main thread that waits for a device.
_LEAVE_SECONDS = 30.0  # To end, for one that does something else.
_LAST_ONE_SECONDS = 8.0
_ASK_AGAIN_SECONDS = 20.0
_ERROR_LENGTH = 120
_PROBES, _PROBE_SECONDS = 10, 0.01
_FOREVER_SECONDS = 20 * 86400.0  # In milliseconds it is still a 32-bit number.
_NEWS, _WHO, _ROLL, _LEFT = (f"stepcache/{name}" for name in ("news", "who", "roll", "left"))
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
    """

    _made: Watch | None = None

    def __init__(self, service: Service):
        self.service, self.rank = service, jax.process_index()
        self._error: RankLostError | None = None
        self._known = threading.Event()
        self._told = self._raised = self._closed = False
        self._inbox: queue.SimpleQueue = queue.SimpleQueue()
        self._heard = self._taken = 0  # Pieces of news: that have come, that have been acted on.
        self._movement = Movement(threading.main_thread().ident or 0)
        self._sessions: dict[str, list] = {}  # As in `Row`.
        self._inside: list[tuple[str, Sequence[int], float, OnHang]] = []
        self._left_at = time.monotonic()
        self._failure = ""  # How this process is about to end, if by an error.
        self._ended = ""
        self._heard_left: set[tuple[str, int]] = set()
        self._someone_ended = self._reported_hang = False
        self._ask_after = self._list_after = 0.0  # By the monotonic clock.
        self._meeting_since = float("inf")
        self._pid = os.getpid()
        self._machine = f"{_WHO}/{_machine()}"
        self._neighbours: dict[int, int] = {}
        service.put(f"{self._machine}/{self.rank}", str(self._pid).encode())
        coordination.replace_shutdown(self._shut_down)
        self._threads = [
            threading.Thread(target=target, name=f"stepcache {name}", daemon=True)
            for name, target in (("news", self._listen), ("watch", self._watch))
        ]
        for thread in self._threads:
            thread.start()

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
            self._inbox.put(("suspicion", first_line(error)))
            for _ in range(_PROBES):  # A port is closed a little later than connections are.
                if self.rank and coordination.coordinator_refuses():
                    self.service_has_gone(first_line(error))
                if self._known.wait(_PROBE_SECONDS):
                    break
            self._known.wait(2 * _ANSWER_SECONDS)
        if self._error is not None:
            self._raised = True
            raise self._error from error

    def service_has_gone(self, why: str) -> None:
        """The coordination service does not answer: it lives in the process of rank 0."""
        self._note_loss([0], f"its coordination service does not answer ({why})", "")

    # ---- the thread that waits for news ----------------------------------------------------------

    def _listen(self) -> None:
        with contextlib.suppress(Unreachable):
            while True:
                number = self._heard
                packed = self.service.get(f"{_NEWS}/{number}", _FOREVER_SECONDS)
                if packed is None:
                    continue
                news = plain.unpack(packed)
                self._heard = number + 1
                self._inbox.put((number, news))
                if news["kind"] == "lost":  # The last ones; so the end finds no thread in a call.
                    return
        self._inbox.put(("unreachable", ""))

    def _give_news(self, kind: str, **more: Any) -> int | None:
        """Gives the next news; None where others have been faster, whose news is read first."""
        number = self._heard if kind == "lost" else self._taken
        news = plain.pack({"kind": kind, "by": self.rank, **more})
        return number if self.service.put(f"{_NEWS}/{number}", news) else None

    def _tell_loss(self, ranks: Iterable[int], why: str, report: str = "") -> None:
        self._told = True
        while not self._known.is_set():
            if self._give_news("lost", ranks=sorted(ranks), why=why, table=report) is not None:
                return
            time.sleep(0.01)

    # ---- the thread that watches -----------------------------------------------------------------

    def _watch(self) -> None:
        while not self._closed:
            try:
                with contextlib.suppress(queue.Empty):
                    self._take(*self._inbox.get(timeout=_LOOK_SECONDS))
                    while True:
                        self._take(*self._inbox.get_nowait())
                if self._known.is_set():
                    self._end_if_stuck()
                elif not self._told:
                    self._look()
            except Unreachable as error:
                if self._is_shut_down():
                    return
                self.service_has_gone(first_line(error))

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
                self._inbox.put((number, news))
            return
        self._taken = max(self._taken, number + 1)
        if news["kind"] == "left":
            self._heard_left.add((news["mesh"], news["number"]))
        elif news["kind"] == "ended":
            self._someone_ended = True
        elif news["kind"] == "roll" and news["by"] != self.rank:
            self._answer(number)
            self._ask_after = time.monotonic() + 2 * _ANSWER_SECONDS
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
        if max(still, meeting) > _LOOK_SECONDS:
            self._look_at_neighbours()
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
                self._give_news("ended")
        elif not self._inside and time.monotonic() > self._left_at + _LOOK_SECONDS:
            for mesh, (number, left) in list(self._sessions.items()):
                if left and (mesh, number) not in self._heard_left and not _pending_ranks():
                    self._give_news("left", mesh=mesh, number=number)

    def _note_failure(self) -> None:
        error = getattr(sys, "last_value", None)
        if error is not None and not threading.main_thread().is_alive():
            self._failure = f"ended by {first_line(error)}"

    def _look_at_neighbours(self) -> None:
        """Looks whether the other processes of this machine run, where the system shows that."""
        if time.monotonic() > self._list_after:  # Some may have come since.
            self._list_after = time.monotonic() + _ANSWER_SECONDS
            listed = self.service.listed(f"{self._machine}/")
            self._neighbours = {int(rank): int(pid) for rank, pid in listed.items()}
        gone = [rank for rank, pid in self._neighbours.items() if _has_ended(pid)]
        if gone:
            self._inquire("its process has ended")

    # ---- roll calls ------------------------------------------------------------------------------

    def _row(self) -> Row:
        self._movement.look()
        movement = self._movement
        return Row(
            movement.where, movement.still_seconds, latest_call(), self._ended, self._sessions
        )

    def _answer(self, number: int) -> None:
        self.service.put(f"{_ROLL}/{number}/{self.rank}", plain.pack(self._row().packed()))

    def _call_roll(self) -> tuple[dict[int, Row], dict[int, str]] | None:
        """Has all say where they are. None where another rank's news is to be read before.

        Returns:
            What they said, and who did not answer: with its process, "its process has ended".
        """
        number = self._within_seconds(lambda: self._give_news("roll"))
        if number is None:
            return None
        self._taken = number + 1
        self._answer(number)
        names = self.service.listed(f"{_WHO}/")
        pids = {int(name.rpartition("/")[2]): (name, int(pid)) for name, pid in names.items()}
        here = self._machine.removeprefix(f"{_WHO}/") + "/"
        deadline, pause = time.monotonic() + _ANSWER_SECONDS, 0.02
        while True:
            answers = self.service.listed(f"{_ROLL}/{number}/")
            rows = {int(rank): Row(**plain.unpack(row)) for rank, row in answers.items()}
            silent = dict.fromkeys(pids.keys() - rows.keys(), "does not answer")
            for rank in silent:
                name, pid = pids[rank]
                if name.startswith(here) and _has_ended(pid):
                    silent[rank] = "its process has ended"
            if "does not answer" not in silent.values() or time.monotonic() > deadline:
                return rows, silent
            pause = min(2 * pause, 0.5)
            time.sleep(pause)

    def _within_seconds(self, call: Callable[[], int | None]) -> int | None:
        """Makes a call that never returns where the process of rank 0 is stopped."""
        answers: queue.SimpleQueue = queue.SimpleQueue()

        def make() -> None:
            try:
                answers.put((call(), None))
            except Unreachable as error:
                answers.put((None, error))

        threading.Thread(target=make, name="stepcache call", daemon=True).start()
        try:
            answer, error = answers.get(timeout=2 * _ANSWER_SECONDS)
        except queue.Empty:
            raise Unreachable(f"no answer within {2 * _ANSWER_SECONDS:.0f} s") from None
        if error is not None:
            raise error
        return answer

    def _inquire(self, why: str, of_transport: bool = False) -> bool:
        """Finds out who has gone, and tells all. False where that has to be asked again.

        Args:
            why: what makes this process ask.
            of_transport: it is an error of a collective, so that something is wrong for certain.
        """
        found = self._call_roll()
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
        found = self._call_roll()
        if found is None:
            return
        rows, silent = found
        if silent:  # A second time, to be certain.
            found = self._call_roll()
            if found is None:
                return
            silent = {rank: why for rank, why in found[1].items() if rank in silent}
        text = f"nothing has moved for {seconds:g} s"
        if silent:
            self._tell_loss(silent, f"{text}, and it does not answer", table(rows, silent))
        elif on_hang == "error":
            self._tell_loss((), text, table(rows))
        else:
            self._give_news("hang", text=f"{text} in rank {self.rank}. {table(rows)}")

    # ---- a loss ----------------------------------------------------------------------------------

    def _note_loss(self, ranks: list[int], why: str, report: str) -> None:
        if self._known.is_set():
            return
        what = f"{readable_ranks(ranks)} of the pod has gone" if ranks else "the pod is broken"
        where = f"rank {self.rank}"
        self._error = RankLostError(
            f"{what}: {why}" + (f". {report}" if report else ""),
            ranks,
            where=f"{where}, {call}" if (call := latest_call()) else where,
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
        bound = _LEAVE_SECONDS
        if movement.waits_for_device and not self._raised:
            bound = _RAISE_SECONDS
        if min(movement.still_seconds, time.monotonic() - self._known_at) < bound:
            return
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
                self._known.wait(_ANSWER_SECONDS)
        if self._known.is_set() or self._failure:
            with contextlib.suppress(Unreachable):
                self._say_goodbye()
            coordination.abandon()
        else:
            ending = not threading.main_thread().is_alive()
            self._ended = "ended its script" if ending else "called jax.distributed.shutdown()"
            shut_down()
        self._closed = True
        for thread in self._threads:
            thread.join(2 * _LOOK_SECONDS)

    def _say_goodbye(self) -> None:
        """Leaves a broken pod: rank 0 last, as the service ends with it."""
        gone = set(self._error.ranks) if self._error is not None else set()
        if 0 in gone - {self.rank}:
            return
        self.service.put(f"{_LEFT}/{self.rank}", b"1")
        deadline = time.monotonic() + _LAST_ONE_SECONDS
        names = self.service.listed(f"{_WHO}/") if self.rank == 0 else ()
        staying = {int(name.rpartition("/")[2]) for name in names} - gone
        while staying and time.monotonic() < deadline:
            staying -= {int(rank) for rank in self.service.listed(f"{_LEFT}/")}
            time.sleep(0.1)


def _pending_ranks() -> set[int]:
    """The processes whose devices hold a part of an array that is still being computed."""
    return {
        device.process_index
        for array in jax.live_arrays()
        if not (array.is_fully_addressable or array.is_deleted() or array.is_ready())
        for device in array.sharding.device_set
    }


def _machine() -> str:
    """Names this machine, and the numbering of its processes."""
    parts = [socket.gethostname()]
    with contextlib.suppress(OSError):
        parts.append(Path("/proc/sys/kernel/random/boot_id").read_text().strip())
        parts.append(str(Path("/proc/self/ns/pid").stat().st_ino))
    return "-".join(parts)


def _has_ended(pid: int) -> bool:
    """Whether a process of this machine has certainly ended."""
    if not hasattr(os, "pidfd_open"):
        return False
    try:
        file = os.pidfd_open(pid)
    except ProcessLookupError:
        return True
    except OSError:
        return False
    try:
        poll = select.poll()
        poll.register(file, select.POLLIN)
        return bool(poll.poll(0))
    finally:
        os.close(file)
