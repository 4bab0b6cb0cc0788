"""`Loss`: records the loss of a process of the pod, raises it, and ends a stuck process."""

from __future__ import annotations

import contextlib
import logging
import os
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, wait

from stepcache.distributed import hang_report
from stepcache.distributed.hang_report import Movement
from stepcache.distributed.pod_events import ANSWER_SECONDS, PodEvents
from stepcache.distributed.service_calls import call_in_thread
from stepcache.errors import RankLostError
from stepcache.jaxcompat.coordination import Service, Unreachable
from stepcache.units import readable_ranks

_RAISE_SECONDS = 3.0  # How long the main thread may wait for a device before it raises a loss.
_LEAVE_SECONDS = 30.0  # How long it may wait for a device after it has raised the loss.
_LAST_ONE_SECONDS = 8.0
_END_CALLS_SECONDS = 2.0
_NO_ANSWER = b"no answer: a process is lost"
_log = logging.getLogger("stepcache")


class Loss:
    """The loss of processes of the pod. Only the first is recorded; `known` is set from then on."""

    def __init__(self, rank: int, service: Service, events: PodEvents):
        self._rank, self._service, self._events = rank, service, events
        self.known, self._noting = threading.Event(), threading.Lock()
        self._error: RankLostError | None = None
        self._raised = False
        self._known_at = 0.0
        self._abandoned: dict[Future[bytes], str] = {}  # Calls in progress, and their names.

    def raise_if_known(self, cause: BaseException | None = None) -> None:
        """Raises the error of the loss, if a process is lost.

        Raises:
            RankLostError: a process is lost.
        """
        if self._error is not None:
            self._raised = True
            if cause is not None:
                raise self._error from cause
            raise self._error

    @contextlib.contextmanager
    def pending_get(self, name: str) -> Iterator[Future[bytes]]:
        """Context manager of a call that waits for a value; if left early, it ends with the pod."""

        def get() -> bytes:
            value = self._service.get(name)
            if value == _NO_ANSWER:
                self.known.wait(2 * ANSWER_SECONDS)
                raise Unreachable("a process is lost")
            return value

        call = call_in_thread(get)
        try:
            yield call
        except BaseException:
            self._abandoned[call] = name
            raise

    def note(self, ranks: Sequence[int], why: str, report: str = "", *, log: bool = True) -> None:
        """Records and logs a loss, unless one is recorded."""
        with self._noting:
            if self.known.is_set():
                return
            are = "is" if len(ranks) == 1 else "are"
            what = (
                f"{readable_ranks(ranks)} of the pod {are} lost" if ranks else "the pod is broken"
            )
            where = f"rank {self._rank}"
            self._error = RankLostError(
                f"{what}: {why}" + (f". {report}" if report else ""),
                ranks,
                where=f"{where}, {call}" if (call := hang_report.latest_call()) else where,
                hint="start again, on as many processes as there are: sc.restore reads what any "
                "number of processes saved",
            )
            self._known_at = time.monotonic()
            self.known.set()
            if log:
                _log.error("%s", self._error.what)

    def exit_if_stuck(self, movement: Movement) -> None:
        """Ends the process if its main thread cannot raise the loss: it is in a call that only the
        lost rank could end, which Python cannot interrupt.
        """
        movement.look()
        still = min(movement.still_seconds, time.monotonic() - self._known_at)
        had_raised = self._raised
        limit = _LEAVE_SECONDS if had_raised else _RAISE_SECONDS
        if not movement.waits_for_device or still < limit:
            return
        in_any_case = threading.Timer(2 * _LAST_ONE_SECONDS, os._exit, (1,))  # A stream may block.
        in_any_case.start()
        with contextlib.suppress(Exception):
            sys.stdout.flush()
            name = f"{RankLostError.__module__}.{RankLostError.__qualname__}"
            place = f"the thread waits at {movement.where}, and cannot raise this error"
            sys.stderr.write(f"{name}: {self._error}\n{place}\n")
            sys.stderr.flush()
        with contextlib.suppress(Unreachable):
            self.leave_pod()
        if self._raised and not had_raised:  # The ends of other ranks have ended its call.
            return in_any_case.cancel()
        os._exit(1)

    def end_calls(self) -> None:
        """Ends abandoned calls, as no thread may return from one while Python shuts down."""
        if self._events.over:  # All ranks know of the loss and read no other values.
            for call, name in self._abandoned.items():
                if not call.done():
                    self._service.put(name, _NO_ANSWER)
            wait(self._abandoned, _END_CALLS_SECONDS)

    def leave_pod(self) -> None:
        """Leaves a broken pod; rank 0 waits for the others, as the service ends with it."""
        lost = set(self._error.ranks) if self._error is not None else set()
        if 0 not in lost - {self._rank}:
            self._events.leave(lost if self._rank == 0 else None, _LAST_ONE_SECONDS)
