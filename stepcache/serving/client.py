"""`Client`: numbers the writes of one process, and repeats those that the host may have lost.

The client keeps each write until a snapshot or an image of the host holds it. When the host has
restarted, the client joins it again, and repeats in order the writes that the host lacks. The host
applies each write once.
"""

from __future__ import annotations

import logging
import os
import secrets
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from stepcache.errors import ServerLostError, VariablesError, first_line
from stepcache.link.processes import Process
from stepcache.serving import transport
from stepcache.serving.messages import (
    BlockLayout,
    Described,
    DescribeRequest,
    Joined,
    JoinRequest,
    ReadRequest,
    Refused,
    Request,
    RowsRequest,
    SnapshotRequest,
    Status,
    StatusRequest,
    Values,
    WriteRequest,
    Written,
)
from stepcache.serving.shared_memory import Block
from stepcache.serving.transport import Transport, Version
from stepcache.serving.unsaved import Sent, Unsaved

_TRANSIENT = ("epoch", "gap", "recovering")
_WITH_TYPES = ("create", "rows")
_ADDING, _NOT_CONFIRMED = ("add", "apply", "rows"), (1 << 62, 0)  # After all that was confirmed.
_TOLD_SECONDS, _LEAVING_SECONDS = 5.0, 1.0
_KEPT_SECONDS = 0.5  # How often a client that has written checks whether the host has restarted.

_log = logging.getLogger("stepcache")


class Client:
    """The client of one host. Thread-safe: it makes one request at a time.

    Args:
        connect: makes the transport of a client, given its name.
        where: address of the host, for errors.
        timeout: how long a request may take in seconds, a restart of the host included.
        max_unsaved_bytes: bound on the writes that are kept. A write beyond it waits.
        keeps: call `keep` in a thread; otherwise the caller must.
    """

    def __init__(
        self,
        connect: Callable[[str], Transport],
        where: str,
        timeout: float = 60.0,
        max_unsaved_bytes: int = 1 << 30,
        keeps: bool = True,
    ):
        self.name, self.where = secrets.token_hex(16), where
        self._timeout, self._max_unsaved_bytes, self._keeps = timeout, max_unsaved_bytes, keeps
        self._transport = connect(self.name)
        self._pid = os.getpid()
        self._own_lock = threading.RLock()
        self._epoch: int | None = None
        self._unsaved = Unsaved()
        self._is_flushed, self._is_closed = True, False
        self._keeper: threading.Thread | None = None

    @property
    def _lock(self) -> threading.RLock:
        if self._pid != os.getpid():  # It may be locked for ever, and numbers would come twice.
            raise VariablesError(
                "this connection belongs to the process that this one was forked from",
                where=self.where,
                hint="connect in this process",
            )
        return self._own_lock

    def write(
        self,
        name: str,
        mode: str,
        layout: BlockLayout,
        leaves: Sequence[Any],
        base: int = 0,
        rule: bytes = b"",
        on_kept: Callable[[], None] = lambda: None,
    ) -> Version:
        """Writes exactly once.

        Args:
            name, mode, base, rule: as in `WriteRequest`.
            layout: layout of the block that is sent.
            leaves: the leaves in it. They are copied.
            on_kept: called once the host has applied the write, or this client keeps it to repeat
                it.

        Raises:
            VariablesError: the host refused the write.
            ServerLostError: the host did not answer in time. It gets the write with the next
                request of this client, if it has not got it already; unless this client keeps as
                many bytes as it may.
        """
        with self._lock:
            deadline = time.monotonic() + self._timeout
            self._save_until(self._max_unsaved_bytes - layout.size_bytes, deadline)
            block = self._transport.allocate(layout.size_bytes)
            layout.fill(block.data, leaves)
            types = layout.types if mode in _WITH_TYPES else []
            row = (self.name, self._unsaved.next, self._epoch or 0, name, mode, base, types, rule)
            sent = Sent(WriteRequest(*row, serial=self._unsaved.serial), block)
            self._is_flushed = False
            try:
                self._unsaved.add(sent)
                if self._keeps and self._keeper is None:
                    self._keeper = transport.keep_in_thread(self.keep, _KEPT_SECONDS)
                self._settle(deadline, sent)
                reply = self._send(sent, deadline)
            except BaseException:
                on_kept()
                raise
            if isinstance(reply, Written):
                on_kept()
                return Version(reply.number, reply.token, reply.moment, reply.epoch)
            self._unsaved.drop(sent)
            raise transport.refusal(reply, name)

    def create(self, name: str, mode: str, *what: Any, **more: Any) -> Version:
        """Creates variables or a table, unless they exist; the arguments are those of `write`.

        Returns once a snapshot or an image holds them. Other processes may write to them then, and
        no crash of this process and of the host can lose them.
        """
        deadline = time.monotonic() + self._timeout
        while True:
            version = self.write(name, mode, *what, **more)
            if self.is_saved_at_last(name, deadline):
                return version

    def is_saved_at_last(self, name: str, deadline: float | None = None) -> bool:
        """Waits until a snapshot or an image holds variables; False if the host has lost them."""
        deadline = deadline or time.monotonic() + self._timeout
        while (found := self.describe(name)) is not None:
            if found.is_saved:
                return True
            if time.monotonic() > deadline:
                raise self._lost()
            self._transport.pause()
        return False

    def _send(self, sent: Sent, deadline: float) -> Any:
        """Sends a write until the host confirms or refuses it; returns the reply."""
        while True:
            if sent.request.epoch != self._epoch:
                sent.request = replace(sent.request, epoch=self._epoch)
            reply = self._request(sent.request, sent.block, deadline).message
            if isinstance(reply, Written):
                sent.stamp = (reply.epoch, reply.moment)
                self._unsaved.forget(reply.saved)
                return reply
            if not isinstance(reply, Refused) or reply.kind not in _TRANSIENT:
                return reply
            self._join(deadline)
            if reply.kind == "recovering":
                self._transport.pause()

    def _settle(self, deadline: float, last: Sent | None = None) -> None:
        """Joins the host if that was not done, and sends the writes that are not confirmed.

        Each is sent when the ones before it are confirmed; `last` by the caller.
        """
        if self._epoch is None:
            self._join(deadline)
        for sent in self._unsaved.not_confirmed:
            if sent is not last and not isinstance(reply := self._send(sent, deadline), Written):
                self._give_up(sent, reply)

    def _save_until(self, most_bytes: int, deadline: float) -> None:
        """Has writes of this client saved until those that are kept have at most so many bytes."""
        while self._unsaved and self._unsaved.size_bytes > most_bytes:
            self._settle(deadline)
            self._request(SnapshotRequest(on_disk=False), None, deadline)
            self._join(deadline)
            if self._unsaved:
                self._transport.pause()

    def _join(self, deadline: float) -> None:
        """Joins the host, and repeats the writes that it had confirmed and has lost."""
        while True:
            joined = self._say_joined(deadline)
            if joined.lost:
                text = "%s has restarted from an older snapshot: %d writes of this process are lost"
                _log.error(text, self.where, joined.lost)
            if self._repeat(joined, deadline):
                epoch = joined.epoch
                if epoch == self._epoch or self._say_joined(deadline, epoch).epoch == epoch:
                    self._epoch = epoch
                    return

    def _say_joined(self, deadline: float, complete: int = 0) -> Joined:
        first = self._unsaved[0].request.sequence if self._unsaved else self._unsaved.next
        message = JoinRequest(self.name, str(Process.current()), first, complete)
        joined = self._expected(self._request(message, None, deadline).message, Joined)
        self._unsaved.forget(joined.saved)
        return joined

    def _repeat(self, joined: Joined, deadline: float) -> bool:
        """Repeats the writes that the host lacks. Returns False if it must be joined again."""
        for sent in self._unsaved:
            is_sent_again = sent.stamp is not None or sent.request.mode in _ADDING
            if is_sent_again and sent.request.sequence > joined.applied:
                # Without a base: others may have read it, and have written since.
                stamp = sent.stamp or _NOT_CONFIRMED
                request = replace(sent.request, epoch=joined.epoch, base=0, stamp=stamp)
                reply = self._request(request, sent.block, deadline).message
                is_refused = isinstance(reply, Refused)
                if is_refused and reply.kind in _TRANSIENT:
                    return False
                if is_refused and sent.stamp is not None:
                    self._give_up(sent, reply)
                    return False  # The writes after it have other numbers now.
            if sent.stamp is None:
                break  # `_settle` sends it, once all clients have joined, and those after it.
        return True

    def _give_up(self, sent: Sent, refused: Any) -> None:
        text, why = "%s: a write of %s is lost: %s", getattr(refused, "why", refused)
        _log.error(text, self.where, sent.request.name, why)
        self._unsaved.drop(sent)

    def read(
        self, names: Sequence[str], known: Sequence[int], *, values: bool = True
    ) -> tuple[list[Version], list[np.ndarray | None]]:
        """Reads variables as of one moment, after all writes of this client; see `ReadRequest`.

        Returns:
            The versions, and the block of each, or None where the caller has it. A block does not
            change while an array refers to it.

        Raises:
            VariablesError: the host does not have the variables.
            ServerLostError: the host did not answer in time.
        """
        deadline = time.monotonic() + self._timeout
        with self._lock:
            message = ReadRequest([*names], [*known], values)
            reply, data = self._read(message, None, deadline, ", ".join(names))
        blocks = iter(data)
        found = [next(blocks) if is_sent else None for is_sent in reply.sent]
        return transport.versions_of(reply), found

    def rows(self, name: str, asked: np.ndarray, epoch: int = -1) -> tuple[Version, np.ndarray]:
        """Reads rows of a table, after all writes of this client.

        `asked` is the block of a `RowsRequest`. Returns the version of the table, and the block of
        the rows.
        """
        deadline = time.monotonic() + self._timeout
        with self._lock:
            block = self._transport.allocate(asked.nbytes)
            block.data[:] = asked.view(np.uint8)
            reply, (data,) = self._read(RowsRequest(name, epoch), block, deadline, name)
        return transport.versions_of(reply)[0], data

    def _read(
        self, message: Request, block: Block | None, deadline: float, where: str
    ) -> tuple[Values, list[np.ndarray]]:
        """Reads once the host has all writes of this client; returns the reply and its blocks."""
        while True:
            self._settle(deadline)
            received = self._request(message, block, deadline)
            reply = received.message
            if isinstance(reply, Values) and reply.epoch == self._epoch:
                return reply, received.blocks
            is_transient = isinstance(reply, Refused) and reply.kind in _TRANSIENT
            if not is_transient and not isinstance(reply, Values):
                raise transport.refusal(reply, where)
            self._join(deadline)
            if is_transient:
                self._transport.pause()

    def describe(self, name: str) -> Described | None:
        """Asks for types and version of some variables; None if the host does not have them."""
        with self._lock:
            deadline = time.monotonic() + self._timeout
            if self._epoch is None:
                self._join(deadline)
            reply = self._request(DescribeRequest(name), None, deadline).message
        if isinstance(reply, Refused) and reply.kind == "unknown":
            return None
        return self._expected(reply, Described, name)

    def status(self) -> Status:
        """Asks for contents and counters of the host."""
        with self._lock:
            reply = self._request(StatusRequest(), None, time.monotonic() + self._timeout).message
        return self._expected(reply, Status)

    def _expected(self, reply: Any, kind: type, name: str | None = None) -> Any:
        if not isinstance(reply, kind):
            raise transport.refusal(reply, name or self.where)
        return reply

    def flush(self) -> None:
        """Waits until a snapshot on disk holds all writes of this client."""
        deadline = time.monotonic() + self._timeout
        wanted: tuple[int, float] = 0, 0  # The epoch that has all writes, and its moment then.
        with self._lock:
            while not self._is_flushed:
                self._settle(deadline)
                reply = self._request(SnapshotRequest(on_disk=True), None, deadline).message
                status = self._expected(reply, Status)
                if status.epoch == self._epoch:
                    if wanted[0] != self._epoch:  # A restart is perhaps from an earlier moment.
                        wanted = status.epoch, status.counts["writes"]
                    self._is_flushed = status.stored >= wanted[1]
                self._join(deadline)
                if not self._is_flushed:
                    self._transport.pause()
                    if time.monotonic() > deadline:
                        raise self._lost(f"has stored {status.stored:,} of {wanted[1]:,} writes in")

    def keep(self, timeout: float = _KEPT_SECONDS) -> bool:
        """Joins a host that has restarted, and drops saved writes. Returns False once closed."""
        if self._lock.acquire(blocking=False):
            try:
                if not self._is_closed:
                    self._join(time.monotonic() + timeout)
            except ServerLostError:
                pass
            finally:
                self._lock.release()
        return not self._is_closed

    def _request(self, message: Request, block: Block | None, deadline: float) -> Any:
        if self._is_closed:
            raise VariablesError("the connection has been closed", where=self.where)
        received = self._transport.request(message, block, deadline)
        if received is None:
            raise self._lost()
        return received

    def _lost(self, what: str = "has not answered in") -> ServerLostError:
        kept = f"; {self._unsaved} are kept" if self._unsaved else ""
        return ServerLostError(
            f"the host of the variables {what} {self._timeout:g} s{kept}",
            where=self.where,
            hint="start `stepcache serve` again; writes that no snapshot has are then repeated",
        )

    def close(self) -> None:
        """Closes the connection once all writes are saved, or warns after `timeout` instead."""
        if self._pid != os.getpid():  # It is its parent's.
            return
        with self._lock:
            if self._is_closed:
                return
            try:
                self._save_all(time.monotonic() + self._timeout)
            except (ServerLostError, VariablesError) as error:
                _log.warning("%s is closed: %s", self.where, first_line(error))
            finally:
                self._is_closed = True
                self._transport.close()

    def _save_all(self, deadline: float) -> None:
        """Has all writes of this client saved, and leaves: the host will not wait for it again."""
        try:
            self._save_until(-1, min(deadline, time.monotonic() + _TOLD_SECONDS))
        except ServerLostError:
            if time.monotonic() >= deadline:
                raise
            text = "%s: %s are not saved yet: closing waits for the host, %g s at most"
            _log.warning(text, self.where, self._unsaved, self._timeout)
            self._save_until(-1, deadline)
        if self._epoch is not None and self._unsaved.next > 1:
            left = JoinRequest(self.name, "", self._unsaved.next, self._epoch)
            self._transport.request(left, None, time.monotonic() + _LEAVING_SECONDS)
