"""What a start of a step costs with many tasks: light ones, which run nothing, over real sockets.

The coordinator is as in use, in a process of its own; another process answers for all tasks; this
one is the client. `benchmarks.remote` calls it.
"""

from __future__ import annotations

import os
import selectors
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from stepcache.link.processes import Process
from stepcache.remote.messages import Kind, Message, decode, packed
from stepcache.remote.task_group import TaskGroup
from stepcache.serving.channel import Channel, Listener
from stepcache.serving.shared_memory import allow_many_files

RUNS = 200
_SECONDS = 60  # That one answer may take.
_FORM = {"program": 1, "refs": [], "takes": [], "writes": []}


class _Light:
    """Stands for the process of a task."""

    returncode = None

    def poll(self) -> int | None:
        return None

    def wait(self, timeout: float | None = None) -> None:
        pass

    def kill(self) -> None:
        pass


class _Group(TaskGroup):
    def _launched(self) -> list[Any]:
        return [_Light() for _ in range(self.coordinator.tasks)]

    def _how_ended(self, task: int, code: int) -> str:
        return ""


def answer(path: str, count: int) -> None:
    """Answers for all tasks, until the coordinator ends."""
    allow_many_files()
    selector = selectors.DefaultSelector()
    for task in range(count):
        channel = Channel.to(path, decode)
        about = {"task": task, "process": str(Process.current()), "devices": count}
        channel.send(Message(Kind.HELLO, 0, 1, body=packed(platform="cpu", **about)).encoded())
        selector.register(channel, selectors.EVENT_READ, channel)
    while True:
        for key, _ in selector.select():
            while (message := key.data.receive()) is not None:
                if message.kind is Kind.RUN:
                    done = Message(Kind.DONE, message.client, 1, message.number)
                    key.data.send(done.encoded())


def measured(count: int) -> dict[str, float]:
    """Seconds and messages of a run, with so many tasks."""
    with tempfile.TemporaryDirectory() as directory:
        path = str(Path(directory) / "socket")
        command = [sys.executable, "-m", "benchmarks.light_tasks"]
        group = subprocess.Popen([*command, "group", path, str(count)], stdout=subprocess.PIPE)
        assert group.stdout is not None
        group.stdout.readline()
        tasks = subprocess.Popen([*command, "answer", path, str(count)], stderr=subprocess.DEVNULL)
        try:
            return {"tasks": count} | _timed(Channel.to(path, decode), group.pid)
        finally:
            group.kill()
            group.wait()
            tasks.kill()
            tasks.wait()


def _timed(channel: Channel[Message], coordinator: int) -> dict[str, float]:
    def received(kind: Kind) -> Message:
        until = time.monotonic() + _SECONDS
        while (message := channel.receive()) is None or message.kind is not kind:
            if time.monotonic() > until:
                raise TimeoutError(f"no {kind.name} has come")
            if message is None:
                channel.wait(1)
        return message

    body = packed(name="", process=str(Process.current()), watch="")
    channel.send(Message(Kind.HELLO, body=body).encoded())
    while not (welcome := received(Kind.WELCOME)).incarnation:
        client = welcome.client
    client = welcome.client or client
    for number in range(1, RUNS + 2):
        if number == 2:
            seconds = [time.perf_counter(), time.process_time(), _cpu_seconds(coordinator)]
        form = {"body": packed(form=_FORM)} if number == 1 else {}
        data = Message(Kind.RUN, client, 1, number, 1, **form).encoded()
        channel.send(data)
        while received(Kind.DONE).number < number:
            pass
    ended = [time.perf_counter(), time.process_time(), _cpu_seconds(coordinator)]
    names = ("seconds", "client_seconds", "coordinator_seconds")
    spent = {name: (b - a) / RUNS for name, a, b in zip(names, seconds, ended, strict=True)}
    return {"client_messages": 1, "client_bytes": len(data), **spent}


def _cpu_seconds(process: int) -> float:
    fields = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


if __name__ == "__main__":
    what, path, count = sys.argv[1], sys.argv[2], int(sys.argv[3])
    if what == "answer":
        answer(path, count)
    made = _Group(Listener(path), count)
    print("serving", flush=True)
    made.run()
