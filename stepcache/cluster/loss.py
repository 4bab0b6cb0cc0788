"""Who of a pod has gone: found out, told to all, and made an error of.

A process that dies closes its connections, so that a collective of its neighbours fails at once;
but others wait for those neighbours, and JAX ends them all only when heartbeats have failed. Here
whoever notices says so in the coordination service, and every process hangs up on the others, so
that no collective waits any more. Of one that falls silent only the heartbeats tell: then there are
the seconds for which JAX's abort is put off.
"""

from __future__ import annotations

import contextlib
import itertools
import logging
import os
import queue
import re
import sys
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from typing import Any, TypeVar

import jax

from stepcache import _process_hooks
from stepcache._process_hooks import is_aborting
from stepcache.cluster.connections import (
    accepted_at,
    connected_by,
    hang_up,
    listening,
    machine,
    started,
)
from stepcache.errors import RankLostError, first_line
from stepcache.jaxcompat import coordination
from stepcache.jaxcompat.coordination import Service, Unreachable
from stepcache.programs import plain
from stepcache.units import readable_ranks

_SLICE_SECONDS = 0.5
_LOOK_SECONDS = 0.75  # After the answers that come in a slice of time.
_ANSWER_SECONDS = 1.0
_LAST_ONE_SECONDS = 3.0
_POLL_SECONDS = 0.02
_LOST, _HERE, _WHO, _LEFT = (f"stepcache/{name}" for name in ("lost", "here", "who", "left"))
_OF_TRANSPORT = re.compile(
    r"gloo|nccl|connection (reset|closed|refused)|socket closed|broken pipe|heartbeat|"
    r"coordination ?service|UNAVAILABLE",
    re.IGNORECASE,
)
T = TypeVar("T")
_log = logging.getLogger("stepcache")
_making = threading.Lock()


class Watch:
    """Knows whether all processes of the pod are there.

    Args:
        service: JAX's coordination service.

    Attributes:
        rank: of this process.
        service: the same; a call of it raises `RankLostError` rather than wait for what has gone.
    """

    _made: Watch | None = None

    def __init__(self, service: Service):
        self.service = _Guarded(service, self)
        self.rank = jax.process_index()
        self._others: dict[int, dict] = {}
        self._known = threading.Event()
        self._error: RankLostError | None = None
        self._hanging_up = threading.Lock()
        self._hung_up = False
        about = {
            "machine": machine(),
            "pid": os.getpid(),
            "started": started(os.getpid()),
            "listens": listening(),
        }
        self.service.put(f"{_WHO}/{self.rank}", plain.pack(about))
        # Not a daemon: Python's end must not find a thread inside JAX.
        threading.Thread(target=self._run, name="stepcache pod", daemon=False).start()
        _process_hooks.at_exit(self._leave)
        _process_hooks.put_off_aborts()

    @classmethod
    def of_this_process(cls, service: Service) -> Watch:
        """The one watch of this process."""
        with _making:
            if cls._made is None:
                cls._made = cls(service)
            return cls._made

    # ---- noticing --------------------------------------------------------------------------------

    def raise_if_lost(self) -> None:
        """Raises what is known.

        Raises:
            RankLostError: a process has gone.
        """
        if self._error is not None:
            raise self._error

    def look_at(self, ranks: Callable[[], Iterable[int]]) -> None:
        """Looks whether processes, if they are on this machine, are alive, and the service is.

        Args:
            ranks: says which processes; asked where the service is there.

        Raises:
            RankLostError: one is not.
        """
        self.raise_if_lost()
        gone = [rank for rank in ranks() if self._is_gone(rank)]
        if gone:
            self._declare("its process has ended", gone)
            self._known.wait(2 * (_SLICE_SECONDS + _ANSWER_SECONDS))
            self.raise_if_lost()

    def look_at_service(self) -> None:
        """Looks whether the coordination service is there.

        Raises:
            Unreachable: it is not.
        """
        if not self._is_connected():
            raise Unreachable("its connection is closed")

    def _is_connected(self) -> bool:
        return self.rank == 0 or connected_by(coordination.coordinator_port())

    def _is_gone(self, rank: int) -> bool:
        about = self._all().get(rank)
        if about is None or about["machine"] != machine():
            return False
        return started(about["pid"]) != about["started"]

    def meet(self) -> None:
        """Notes who the others are. To be called when all have made their watches."""
        self._all()

    def _all(self) -> dict[int, dict]:
        """What every process has said of itself."""
        if len(self._others) < jax.process_count():
            for name, packed in self.service.listed(f"{_WHO}/").items():
                self._others[int(name)] = plain.unpack(packed)
        return self._others

    def suspect(self, error: BaseException) -> None:
        """Finds out whether an error means that a process has gone.

        Raises:
            RankLostError: it does; the error is its cause.
        """
        if isinstance(error, RankLostError):
            return
        if not self._known.is_set():
            if not _OF_TRANSPORT.search(str(error)):
                return
            try:
                self.look_at_service()
                self._declare(first_line(error), ())
            except Unreachable as unreachable:
                self.service_has_gone(first_line(unreachable))
            self._known.wait(2 * (_SLICE_SECONDS + _ANSWER_SECONDS))
        if self._error is not None:
            raise self._error from error

    def beside(self, work: Callable[[], T], look: Callable[[], None]) -> T:
        """Does something in another thread, so that this one need not wait for what never comes.

        Args:
            work: what.
            look: called now and then; what it raises ends the waiting.
        """
        answers: queue.SimpleQueue = queue.SimpleQueue()

        def call() -> None:
            try:
                answers.put((work(), None))
            except BaseException as error:
                answers.put((None, error))

        # A daemon: it may still be waiting when the process ends.
        thread = threading.Thread(target=call, name="stepcache service", daemon=True)
        try:
            thread.start()
        except RuntimeError:  # Python is about to end, and starts no thread any more.
            return work()
        while True:
            try:
                answer, error = answers.get(timeout=_LOOK_SECONDS)
            except queue.Empty:
                look()
                continue
            if error is not None:
                raise error
            return answer

    def _declare(self, why: str, ranks: Sequence[int]) -> None:
        self.service.put(_LOST, plain.pack({"by": self.rank, "why": why, "ranks": list(ranks)}))

    def service_has_gone(self, why: str) -> None:
        """The coordination service does not answer: it lives in the process of rank 0.

        Nor does JAX's client once it ends this process, whoever's heartbeats it was that stopped.
        """
        self._hang_up()
        if is_aborting() and self._is_connected():
            self._note((), None, "heartbeats have stopped, and JAX ends this process")
        else:
            self._note([0], None, f"its coordination service does not answer ({why})")
        _process_hooks.pass_on_abort()

    # ---- all the time ----------------------------------------------------------------------------

    def _run(self) -> None:
        try:
            for turn in itertools.count():
                if not threading.main_thread().is_alive() or self._known.is_set():
                    return
                self.look_at_service()
                found = self.service.get(_LOST, _SLICE_SECONDS)
                if found is not None:
                    self._judge(**plain.unpack(found))
                elif turn % 2 and is_aborting():  # Milliseconds, where there are many threads.
                    raise Unreachable("JAX ends this process")
        except Unreachable as error:
            if not threading.main_thread().is_alive():
                return
            if self._is_shut_down(error):
                _process_hooks.restore_aborts()
            else:
                self.service_has_gone(first_line(error))

    def _is_shut_down(self, error: Unreachable) -> bool:
        """Whether `jax.distributed.shutdown` has been called, which cancels what is under way."""
        deadline = time.monotonic() + _ANSWER_SECONDS
        while "CANCELLED" in str(error) and time.monotonic() < deadline:
            if coordination.service() is None:
                return True
            time.sleep(_POLL_SECONDS)
        return coordination.service() is None

    def _judge(self, by: int, why: str, ranks: list[int]) -> None:
        """Somebody says that somebody has gone. If he does not say who: who does not answer."""
        self.service.put(f"{_HERE}/{self.rank}", b"1")
        self._all()
        self._hang_up()
        deadline = time.monotonic() + _ANSWER_SECONDS
        silent = set(ranks)
        while not ranks and time.monotonic() < deadline:
            silent = set(self._all()) - {int(rank) for rank in self.service.listed(f"{_HERE}/")}
            if not silent:
                break
            time.sleep(_POLL_SECONDS)
        self._note(sorted(silent), by, why)

    def _note(self, ranks: Sequence[int], by: int | None, why: str) -> None:
        if self._known.is_set():
            return
        what = f"{readable_ranks(ranks)} of the pod has gone"
        if not ranks and by is None:
            what = "a process of the pod has fallen silent"
        elif not ranks:
            what = f"rank {by} cannot reach the others of the pod, though all are there"
        elif by not in (None, self.rank, *ranks):
            what += f", as rank {by} noticed"
        self._error = RankLostError(
            f"{what}: {why}",
            ranks,
            where=f"rank {self.rank}",
            hint="start again, on as many processes as there are: Variables.restore reads what any "
            "number of them saved",
        )
        self._known.set()
        _log.error("%s", self._error.what)

    def _hang_up(self) -> None:
        """Closes the connections to the other processes, but for those of the service."""
        with self._hanging_up:
            if not self._hung_up:
                self._hung_up = True
                ends = {rank: about["listens"] for rank, about in self._others.items()}
                own = ends.pop(self.rank, [])
                hang_up(own, itertools.chain(*ends.values()), coordination.coordinator_port())

    # ---- the end ---------------------------------------------------------------------------------

    def _leave(self) -> None:
        """The end of the process. Where an exception ends it, it says so; a lost pod is left at
        once, and by rank 0 last: the service ends with it, and JAX then aborts the others.
        """
        error = getattr(sys, "last_value", None)
        if coordination.service() is None or (error is None and not self._known.is_set()):
            return  # The user, or JAX, ends the pod in its own way.
        if is_aborting():  # JAX's client does not answer then, and all leave.
            return coordination.abandon()
        there = self._error is None or 0 not in self._error.ranks
        with contextlib.suppress(Unreachable):
            if there and not self._known.is_set():
                self._declare(f"it ended with {first_line(error)}", [self.rank])
            if there:
                self.service.put(f"{_LEFT}/{self.rank}", b"1")
            if self.rank == 0:
                self._wait_for_the_others()
        coordination.abandon()

    def _wait_for_the_others(self) -> None:
        """Until those who have not gone say that they leave, and then have left."""
        gone = self._error.ranks if self._error is not None else ()
        staying = set(self._all()) - {0, *gone}
        deadline = time.monotonic() + _LAST_ONE_SECONDS
        while staying and time.monotonic() < deadline:
            staying -= {int(rank) for rank in self.service.listed(f"{_LEFT}/")}
            time.sleep(_POLL_SECONDS)
        while accepted_at(coordination.coordinator_port()) > 1 and time.monotonic() < deadline:
            time.sleep(_POLL_SECONDS)  # One is this process's own.


class _Guarded(Service):
    """A service that nobody waits for when it has gone: its calls are made by other threads."""

    def __init__(self, service: Service, watch: Watch):
        super().__init__(service.client)
        self._watch = watch

    def put(self, name: str, value: bytes) -> bool:
        return self._call(super().put, name, value)

    def get(self, name: str, timeout_seconds: float) -> bytes | None:
        return self._call(super().get, name, timeout_seconds)

    def listed(self, directory: str) -> dict[str, bytes]:
        return self._call(super().listed, directory)

    def add(self, name: str) -> int:
        return self._call(super().add, name)

    def delete(self, name: str) -> None:
        self._call(super().delete, name)

    def _call(self, function: Callable, *args: Any) -> Any:
        return self._watch.beside(lambda: function(*args), self._look)

    def _look(self) -> None:
        self._watch.look_at_service()
        if is_aborting():
            raise Unreachable("JAX ends this process")
