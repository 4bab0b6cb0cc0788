"""The tasks of one machine: processes that the coordinator starts, found by a directory.

The coordinator imports no JAX.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from stepcache._process_hooks import signals_handled
from stepcache.errors import StepCacheError
from stepcache.link import file_lock
from stepcache.link.processes import Process, socket_path
from stepcache.remote.task_group import TaskGroup
from stepcache.serving.channel import Listener
from stepcache.storage.private_files import make_directory, replace_file

ADDRESS_FILE, LOCK_FILE = "tasks.json", "tasks.lock"


class LocalTasks(TaskGroup):
    """Runs the tasks of a directory until it is stopped.

    Args:
        directory: where clients find the address; logs of the tasks go there too.
        tasks: how many tasks.
        devices: how many devices of each, where these are CPUs.
        owner: a process without which nobody needs the tasks, nor the directory; None for none.

    Raises:
        StepCacheError: other tasks run in this directory, or it cannot be created.
        CacheDirectoryError: other users can write to the directory.
    """

    def __init__(self, directory: Path, tasks: int, devices: int, owner: Process | None = None):
        self.directory = directory = directory.expanduser().resolve()
        try:
            make_directory(directory, "tasks", "name another directory")
            lock = file_lock.lock(directory / LOCK_FILE)
        except OSError as error:
            what, got = "the tasks cannot use this directory", str(error)
            raise StepCacheError(what, where=str(directory), got=got) from error
        if lock is None:
            process = file_lock.holder(directory / LOCK_FILE)
            got = f"process {process.pid if process else '?'}"
            raise StepCacheError(
                "tasks run in this directory already", where=str(directory), got=got
            )
        self._lock, self._devices, self._owner = lock, devices, owner
        self.logs = str(directory)
        self._path = path = socket_path(directory / ADDRESS_FILE)
        self._popens: list[subprocess.Popen] = []
        self._listener = Listener(path)
        size = {"tasks": tasks, "devices": devices}
        data = {"address": path, "process": str(Process.current()), **size}
        try:
            super().__init__(self._listener, tasks)
            replace_file(directory / ADDRESS_FILE, json.dumps(data))
        except BaseException:
            self._unlock()
            raise

    def close(self) -> None:
        """Ends the tasks, and removes the address; and the directory, if only the owner needs it.

        Others may start tasks in the directory once the address is removed, or where the directory
        was removed before: what they have written stays.
        """
        is_ours = False
        with contextlib.suppress(OSError):
            is_ours = file_lock.is_there(self.directory / LOCK_FILE, self._lock)
            if is_ours:
                (self.directory / ADDRESS_FILE).unlink()
        self._unlock()
        super().close()
        # The logs of tasks that have not started are for the owner.
        is_read = self.coordinator.is_ready or (self._owner is not None and self._owner.has_ended())
        if is_ours and self._owner is not None and is_read:
            shutil.rmtree(self.directory, ignore_errors=True)

    def _unlock(self) -> None:
        self._listener.close()
        os.close(self._lock)

    def _launched(self) -> Sequence[subprocess.Popen]:
        self._popens = []
        pod, count = f"127.0.0.1:{free_port()}", self.coordinator.tasks
        for rank in range(count):
            command = [sys.executable, "-m", "stepcache.remote.task", self._path, str(rank)]
            command += [str(count), str(self._devices), pod, str(self.coordinator.incarnation)]
            with (self.directory / f"task{rank}.log").open("ab") as log:
                self._popens.append(
                    subprocess.Popen(
                        command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, cwd="/"
                    )
                )
        return self._popens

    def _is_task(self, task: int, process: Process) -> bool:
        pids = {each.pid: rank for rank, each in enumerate(self._popens)}
        return pids.get(process.pid) == task

    def _how_ended(self, task: int, code: int) -> str:
        if code < 0:
            with contextlib.suppress(ValueError):
                return f"was ended by {signal.Signals(-code).name}{self._last_words(task)}"
        return f"ended with exit code {code}{self._last_words(task)}"

    def _last_words(self, task: int) -> str:
        with contextlib.suppress(OSError):
            lines = (self.directory / f"task{task}.log").read_text(errors="replace").split("\n")
            errors = [line.strip() for line in lines[-40:] if "Error" in line]
            if errors:
                return f" ({errors[-1][:200]})"
        return ""

    def _stopped_tasks(self) -> list[int]:
        return [n for n, each in enumerate(self._popens) if _is_stopped(each.pid)]

    def _is_needed(self) -> bool:
        if self._owner is None or self.coordinator.clients:
            return True
        return not self._had_clients and not self._owner.has_ended()


def address(directory: Path) -> dict[str, Any] | None:
    """Returns address and process of the coordinator of a directory; None for none."""
    try:
        found = json.loads((directory / ADDRESS_FILE).read_text())
    except (OSError, ValueError):
        return None
    return found if isinstance(found, dict) and {"address", "process"} <= found.keys() else None


def _is_stopped(pid: int) -> bool:
    """Whether a process is stopped, as by SIGSTOP; False where the system does not say."""
    with contextlib.suppress(OSError, IndexError):
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "T"
    return False


def free_port() -> int:
    """Returns a port of this machine that nobody uses."""
    with socket.socket() as made:
        made.bind(("", 0))
        return made.getsockname()[1]


def main(arguments: Sequence[str]) -> None:
    """Runs the tasks of a directory: its path, tasks, devices of each, and maybe their owner."""
    directory, tasks, devices, *owner = arguments
    process = Process.parse(owner[0]) if owner else None
    made = LocalTasks(Path(directory), int(tasks), int(devices), process)
    with signals_handled((signal.SIGTERM, signal.SIGINT), lambda *_: made.stop()):
        made.run()
        os._exit(0)
