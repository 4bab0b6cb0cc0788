"""The tasks of one machine, and their coordinator: a process that starts them and orders commands.

The coordinator imports no JAX. It is the parent of the tasks: it knows at once when one ends, ends
the others, which could only wait for it in a collective, and starts all of them again.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import zmq

from stepcache._process_hooks import signals_handled
from stepcache.errors import StepCacheError
from stepcache.remote.coordinator import Coordinator, Output
from stepcache.remote.messages import MAX_BODY_BYTES, Kind, Message, packed, parse
from stepcache.serving.messages import MalformedMessageError
from stepcache.storage.load_markers import Process
from stepcache.storage.private_files import make_directory, replace_file, socket_path

ADDRESS_FILE = "tasks.json"
_POLL_MS = 200
_SWEEP_SECONDS = 0.5
_GRACE_SECONDS = 3.0
_MAX_RESTARTS_AT_ONCE = 5  # Tasks that end before they have joined are not started for ever.
_log = logging.getLogger("stepcache")


class LocalTasks:
    """Runs the tasks of a directory until it is stopped.

    Args:
        directory: where clients find the address; logs of the tasks go there too.
        tasks: how many tasks.
        devices: how many devices of each, where these are CPUs.
        owner: a process without which nobody needs the tasks; None for none.

    Raises:
        StepCacheError: other tasks run in this directory.
        CacheDirectoryError: other users can write to the directory.
    """

    def __init__(self, directory: Path, tasks: int, devices: int, owner: Process | None = None):
        make_directory(directory)
        if (found := address(directory)) is not None:
            other = Process.parse(found["process"])
            if other is not None and not other.has_ended():
                raise StepCacheError("tasks run in this directory already", where=str(directory))
        self.directory, self._devices, self._owner = directory, devices, owner
        self.coordinator = Coordinator(tasks)
        self._stopping = threading.Event()
        self._context = zmq.Context()
        self._socket = self._context.socket(zmq.ROUTER)
        for option, value in (
            (zmq.LINGER, 0),
            (zmq.MAXMSGSIZE, MAX_BODY_BYTES),
            (zmq.ROUTER_MANDATORY, 1),
            (zmq.SNDHWM, 0),
            (zmq.RCVHWM, 0),
        ):
            self._socket.setsockopt(option, value)
        self._path = Path(socket_path(directory / ADDRESS_FILE))
        with contextlib.suppress(FileNotFoundError):
            self._path.unlink()
        self._address = f"ipc://{self._path}"
        self._socket.bind(self._address)
        self._processes: list[subprocess.Popen] = []
        self._peers: dict[bytes, int] = {}  # Clients by their connection.
        self._connections: dict[int, bytes] = {}
        self._tasks: dict[bytes, int] = {}
        self._task_connections: dict[int, bytes] = {}
        self._failures, self._had_clients = 0, False
        self._start()
        data = {"address": self._address, "process": str(Process.current()), "tasks": tasks}
        replace_file(directory / ADDRESS_FILE, json.dumps(data))

    # ---- the loop --------------------------------------------------------------------------------

    def run(self) -> None:
        """Passes messages on until `stop`, or until nobody needs the tasks any more."""
        self._socket.rcvtimeo = _POLL_MS
        swept = time.monotonic()
        try:
            while not self._stopping.is_set():
                with contextlib.suppress(zmq.Again):
                    self._receive()
                if time.monotonic() > swept + _SWEEP_SECONDS:
                    self._sweep()
                    swept = time.monotonic()
        finally:
            self.close()

    def stop(self) -> None:
        """Makes `run` return. Signal handlers and other threads may call it."""
        self._stopping.set()

    def close(self) -> None:
        """Ends the tasks, and removes the address."""
        with contextlib.suppress(OSError):
            (self.directory / ADDRESS_FILE).unlink()
        self._end_tasks()
        self._socket.close()
        self._context.term()
        with contextlib.suppress(OSError):
            self._path.unlink()

    def _receive(self) -> None:
        connection, *frames = self._socket.recv_multipart()
        task = self._tasks.get(connection)
        try:
            message = parse(frames)
            if task is not None:
                self._send(self.coordinator.from_task(task, message))
            elif message.kind is Kind.HELLO and not message.client and message.incarnation:
                self._task_joined(connection, message)
            elif message.kind is Kind.STOP:
                self.stop()
            else:
                self._from_client(connection, message)
        except MalformedMessageError as error:
            self.coordinator.counts["malformed"] += 1
            body = packed(why=f"malformed message: {error}", kind="malformed")
            self._send_to(connection, Message(Kind.REFUSED, body=body))
        except Exception:  # One client must not end the others' tasks.
            self.coordinator.counts["malformed"] += 1
            _log.exception("a message could not be handled")

    def _task_joined(self, connection: bytes, message: Message) -> None:
        about = message.data(dict[str, Any])
        task, text = about.pop("task", None), about.get("process")
        process = Process.parse(text) if isinstance(text, str) else None
        pids = {each.pid: rank for rank, each in enumerate(self._processes)}
        is_ours = process is not None and type(task) is int and pids.get(process.pid) == task
        if not is_ours or message.incarnation != self._incarnation:
            raise MalformedMessageError(f"it is of no task: {text!r}")
        self._tasks[connection], self._task_connections[task] = task, connection
        self._failures = 0
        self._send(self.coordinator.joined(task, about))

    def _from_client(self, connection: bytes, message: Message) -> None:
        number = self._peers.get(connection, 0)
        output = self.coordinator.from_client(number, message)
        if message.kind is Kind.HELLO and output.clients:
            number = output.clients[0][0]
            self._peers[connection], self._connections[number] = number, connection
            self._had_clients = True
        self._send(output)
        if message.kind is Kind.BYE:
            self._forget(number)

    def _send(self, output: Output) -> None:
        for message in output.tasks:
            frames = message.frames()
            for connection in self._task_connections.values():
                self._send_frames(connection, frames)
        for number, message in output.clients:
            if (connection := self._connections.get(number)) is not None:
                self._send_to(connection, message)

    def _send_to(self, connection: bytes, message: Message) -> None:
        self._send_frames(connection, message.frames())

    def _send_frames(self, connection: bytes, frames: list[Any]) -> None:
        with contextlib.suppress(zmq.ZMQError):  # It has ended.
            self._socket.send_multipart([connection, *frames], zmq.NOBLOCK)

    # ---- processes -------------------------------------------------------------------------------

    @property
    def _incarnation(self) -> int:
        return self.coordinator.incarnation

    def _start(self) -> None:
        self.coordinator.started()
        self._tasks.clear()
        self._task_connections.clear()
        pod = f"127.0.0.1:{_free_port()}"
        count = self.coordinator.tasks
        for rank in range(count):
            command = [sys.executable, "-m", "stepcache.remote.task", self._address, str(rank)]
            command += [str(count), str(self._devices), pod, str(self._incarnation)]
            with (self.directory / f"task{rank}.log").open("ab") as log:
                self._processes.append(
                    subprocess.Popen(
                        command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, cwd="/"
                    )
                )

    def _sweep(self) -> None:
        """Notes tasks and clients that have ended."""
        ended = {n: code for n, each in enumerate(self._processes) if (code := each.poll())}
        ended |= {n: 0 for n, each in enumerate(self._processes) if each.returncode == 0}
        if ended:
            self._tasks_lost(ended)
        for number, text in list(self.coordinator.processes()):
            process = Process.parse(text)
            if process is not None and process.is_local() and process.has_ended():
                self._send(self.coordinator.left(number))
                self._forget(number)
        if self._owner is None or self.coordinator.clients:
            return
        if self._had_clients or self._owner.has_ended():
            self.stop()

    def _tasks_lost(self, ended: dict[int, int]) -> None:
        how = ", ".join(f"task {n} {_how(code)}" for n, code in sorted(ended.items()))
        last = self._last_words(min(ended))
        _log.warning("%s; all tasks are started again%s", how, last)
        self._send(self.coordinator.lost(f"{how}{last}", sorted(ended)))
        self._end_tasks()
        self._failures += 1
        if self._failures > _MAX_RESTARTS_AT_ONCE:
            _log.error("the tasks end before they have joined; see %s", self.directory)
            self.stop()
            return
        self._start()

    def _last_words(self, task: int) -> str:
        with contextlib.suppress(OSError):
            lines = (self.directory / f"task{task}.log").read_text(errors="replace").split("\n")
            errors = [line.strip() for line in lines[-40:] if "Error" in line]
            if errors:
                return f" ({errors[-1][:200]})"
        return ""

    def _end_tasks(self) -> None:
        for each in self._processes:
            with contextlib.suppress(ProcessLookupError):
                each.kill()
        for each in self._processes:
            each.wait()
        self._processes.clear()

    def _forget(self, number: int) -> None:
        connection = self._connections.pop(number, None)
        if connection is not None:
            self._peers.pop(connection, None)


def address(directory: Path) -> dict[str, Any] | None:
    """Returns address and process of the coordinator of a directory; None for none."""
    try:
        found = json.loads((directory / ADDRESS_FILE).read_text())
    except (OSError, ValueError):
        return None
    return found if isinstance(found, dict) and {"address", "process"} <= found.keys() else None


def _how(code: int) -> str:
    if code < 0:
        with contextlib.suppress(ValueError):
            return f"was ended by {signal.Signals(-code).name}"
    return f"ended with exit code {code}"


def _free_port() -> int:
    with socket.socket() as made:
        made.bind(("127.0.0.1", 0))
        return made.getsockname()[1]


def main(arguments: Sequence[str]) -> None:
    """Runs the tasks of a directory: its path, tasks, devices of each, and maybe their owner."""
    directory, tasks, devices, *owner = arguments
    made = LocalTasks(
        Path(directory), int(tasks), int(devices), Process.parse(owner[0]) if owner else None
    )
    with signals_handled((signal.SIGTERM, signal.SIGINT), lambda *_: made.stop()):
        made.run()
        os._exit(0)
