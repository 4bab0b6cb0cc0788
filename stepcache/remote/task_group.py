"""`TaskGroup`: the loop of a coordinator, over sockets: it starts tasks and passes messages on.

Engines say how clients find the socket, and how processes are started. The coordinator is the
owner of the tasks: it knows at once when one ends, ends the others, which could only wait for it in
a collective, and starts all of them again.
"""

from __future__ import annotations

import contextlib
import logging
import socket
import subprocess
import threading
import time
from collections.abc import Sequence
from typing import Any, Protocol

from stepcache.errors import first_line
from stepcache.link.processes import Process
from stepcache.remote.coordinator import Coordinator, Output
from stepcache.remote.messages import MAX_MESSAGE_BYTES, Kind, Message, decode, packed
from stepcache.serving.channel import Channel, Channels
from stepcache.serving.messages import MalformedMessageError
from stepcache.serving.shared_memory import allow_many_files

_STOP_SECONDS = 0.2  # After which `stop`, called by a signal handler, takes effect.
_SWEEP_SECONDS = 1.0
_END_SECONDS = 2.0  # That a task may take to end after its connection.
_ALONE_SECONDS = 10.0  # That other tasks may take to end a run which failed on one.
_MAX_UNSENT_BYTES = 2 * MAX_MESSAGE_BYTES  # To a client that does not read; then it is cut off.
_MAX_RESTARTS_AT_ONCE = 5  # Tasks that end before they have joined are not started for ever.
_log = logging.getLogger("stepcache")


class Launched(Protocol):
    """The process of a task, as `subprocess.Popen` is one."""

    returncode: int | None

    def poll(self) -> int | None: ...

    def wait(self, timeout: float | None = None) -> Any: ...

    def kill(self) -> None: ...


class TaskGroup:
    """Runs tasks, and passes on what clients ask of them, until it is stopped.

    An engine says how they are started, and how they end: `_launched` to `_is_needed`.

    Args:
        listener: a bound stream socket, which the group then owns.
        tasks: how many tasks.
        key: what clients and tasks have to send first; empty where the socket is private.
    """

    logs = "their logs"
    """Where the output of tasks goes, for messages."""

    def __init__(self, listener: socket.socket, tasks: int, key: bytes = b""):
        allow_many_files()
        self.coordinator = Coordinator(tasks)
        self._stopping = threading.Event()
        self._peers = Channels(listener, lambda made: _Peer(made, decode, key))
        self._processes: Sequence[Launched] = ()
        self._clients: dict[int, _Peer] = {}
        self._tasks: dict[int, _Peer] = {}
        self._failures, self._had_clients = 0, False
        self._alone: dict[tuple[int, int], float] = {}  # Failed on some tasks; since when.
        self._start()

    def _launched(self) -> Sequence[Launched]:
        """Starts the tasks of this incarnation."""
        raise NotImplementedError

    def _is_task(self, task: int, process: Process) -> bool:
        """Whether a process that says so is a task."""
        return 0 <= task < self.coordinator.tasks

    def _how_ended(self, task: int, code: int) -> str:
        """Says how a task has ended."""
        raise NotImplementedError

    def _stopped_tasks(self) -> list[int]:
        """Returns the tasks that are known to be stopped, as by SIGSTOP."""
        return []

    def _is_needed(self) -> bool:
        """Whether somebody needs the tasks."""
        return True

    def run(self) -> None:
        """Passes messages on until `stop`, or until nobody needs the tasks any more."""
        swept = time.monotonic()
        try:
            while not self._stopping.is_set():
                for peer, found in self._peers.received(_STOP_SECONDS):
                    self._handle(peer, found)
                if time.monotonic() > swept + _SWEEP_SECONDS:
                    self._sweep()
                    swept = time.monotonic()
        finally:
            self.close()

    def stop(self) -> None:
        """Makes `run` return. Signal handlers and other threads may call it."""
        self._stopping.set()

    def close(self) -> None:
        """Ends the tasks."""
        self._end_tasks()
        self._peers.close()

    def _handle(self, peer: _Peer, message: Message | Exception) -> None:
        """Takes what a client or a task has sent; closes the connection after an error."""
        if isinstance(message, Exception):
            if isinstance(message, MalformedMessageError):
                self._malformed(peer, Message(Kind.HELLO), message)
            self._close(peer)
            return
        try:
            if peer.task is not None:
                self._send(self.coordinator.from_task(peer.task, message))
            elif message.kind is Kind.HELLO and not message.client and message.incarnation:
                self._task_joined(peer, message)
            elif message.kind is Kind.HANG and peer.client:
                self._hang(peer, message)
            else:
                self._from_client(peer, message)
        except MalformedMessageError as error:
            self._malformed(peer, message, error)
        except Exception:  # One client must not end the others' tasks.
            self.coordinator.counts["malformed"] += 1
            _log.exception("a message could not be handled")

    def _malformed(self, peer: _Peer, message: Message, error: Exception) -> None:
        self.coordinator.counts["malformed"] += 1
        body = packed(why=f"malformed message: {error}", kind="malformed")
        about = peer.client, self._incarnation, message.number, int(message.kind)
        self._send_to(peer, Message(Kind.REFUSED, *about, body).encoded())

    def _task_joined(self, peer: _Peer, message: Message) -> None:
        about = message.data(dict[str, Any])
        task, text = about.pop("task", None), about.get("process")
        process = Process.parse(text) if isinstance(text, str) else None
        is_ours = process is not None and type(task) is int and self._is_task(task, process)
        if not is_ours or message.incarnation != self._incarnation:
            raise MalformedMessageError(f"it is of no task: {text!r}")
        peer.task = task
        self._tasks[task] = peer
        self._failures = 0
        self._send(self.coordinator.joined(task, about))

    def _from_client(self, peer: _Peer, message: Message) -> None:
        if message.kind is Kind.HELLO and peer.client:
            raise MalformedMessageError("it has introduced itself before")
        if message.kind is Kind.HELLO:
            self._close_ended()
        output = self.coordinator.from_client(peer.client, message)
        if message.kind is Kind.HELLO and output.clients:
            peer.client = output.clients[0][0]
            self._clients[peer.client] = peer
            self._had_clients = True
        self._send(output)

    def _send(self, output: Output) -> None:
        for message in output.tasks:
            data = message.encoded()
            for peer in list(self._tasks.values()):
                self._send_to(peer, data)
        for number, message in output.clients:
            if (peer := self._clients.get(number)) is not None:
                self._send_to(peer, message.encoded())
        if output.lost is not None:
            before = self._incarnation
            self._sweep()  # If one has ended, that is the reason.
            if self._incarnation == before:
                self._lost(*output.lost)

    def _send_to(self, peer: _Peer, data: bytes) -> None:
        peer.sent += 1
        self._peers.send(peer, data)
        # A task may be slow: clients limit what they have under way.
        if peer.task is None and peer.unsent_bytes > _MAX_UNSENT_BYTES:
            self._close(peer)

    def _close(self, peer: _Peer) -> None:
        """Closes a connection, and notes that the client or the task at its end has ended."""
        self._peers.close_one(peer)
        if self._clients.get(peer.client) is peer:
            del self._clients[peer.client]
            self._send(self.coordinator.left(peer.client))
        if peer.task is not None and self._tasks.get(peer.task) is peer:
            del self._tasks[peer.task]
            process = self._processes[peer.task]
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(_END_SECONDS)
            if process.returncode is None:  # It cannot go on without its connection.
                process.kill()
                process.wait()
            self._sweep()

    @property
    def _incarnation(self) -> int:
        return self.coordinator.incarnation

    def _start(self) -> None:
        self.coordinator.started()
        self._processes = self._launched()

    def _sweep(self) -> None:
        """Notes tasks and clients that have ended."""
        codes = {n: each.poll() for n, each in enumerate(self._processes)}
        ended = {n: code for n, code in codes.items() if code is not None}
        if ended:
            hows = (f"task {n} {self._how_ended(n, code)}" for n, code in sorted(ended.items()))
            self._lost(", ".join(hows), sorted(ended))
        failed, now = self.coordinator.failed_alone(), time.monotonic()
        self._alone = {key: self._alone.get(key, now) for key in failed}
        if late := [key for key, since in self._alone.items() if now > since + _ALONE_SECONDS]:
            self._lost(*failed[late[0]])
        self._close_ended()
        if not self._is_needed():
            self.stop()

    def _close_ended(self) -> None:
        """Notes clients that have ended, whose sockets may not say so.

        A process that a client has forked keeps its socket open. And a client that comes back must
        not find itself connected, because what it sent before is still being read.
        """
        for number, text in self.coordinator.processes():
            process = Process.parse(text)
            if process is not None and process.is_local() and process.has_ended():
                self._close(self._clients[number])

    def _hang(self, peer: _Peer, message: Message) -> None:
        """Says where the tasks are, and ends those that are stopped; but not while the client has
        not read all that was sent to it.
        """
        if message.number < peer.sent:
            return
        about = message.data(dict[str, Any])
        stopped = self._stopped_tasks()
        why = f"no progress for {about['seconds']:g} s: {self.coordinator.where()}"
        if stopped:
            why += f"; stopped: {', '.join(f'task {n}' for n in stopped)}"
            self._lost(why, stopped)
        else:
            reply = Message(Kind.HANG, peer.client, self._incarnation, body=packed(why=why))
            self._send_to(peer, reply.encoded())

    def _lost(self, why: str, ranks: list[int]) -> None:
        """Ends all tasks, as they could only wait for the lost ones, and starts them again."""
        _log.warning("%s; all tasks are started again", why)
        self._send(self.coordinator.lost(why, ranks))
        self._end_tasks()
        self._failures += 1
        why = "the tasks end before they have joined"
        if self._failures <= _MAX_RESTARTS_AT_ONCE:
            try:
                return self._start()
            except Exception as error:
                why = f"the tasks cannot be started again: {first_line(error)}"
        _log.error("%s; see %s", why, self.logs)
        self.stop()

    def _end_tasks(self) -> None:
        for peer in self._tasks.values():
            self._peers.close_one(peer)
        self._tasks.clear()
        for each in self._processes:
            with contextlib.suppress(ProcessLookupError):
                each.kill()
        for each in self._processes:
            each.wait()
        self._processes = ()


class _Peer(Channel[Message]):
    """A connection, and who is at its other end: a client, a task, or nobody known."""

    def __init__(self, *args: Any):
        super().__init__(*args)
        self.client = 0
        self.task: int | None = None
        self.sent = 0  # Messages.
