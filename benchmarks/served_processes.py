"""Processes that the contenders of `benchmarks.served` are made of."""

from __future__ import annotations

import contextlib
import json
import os
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

ROWS, WIDTH, BATCH = 1 << 22, 64, 32
"""The table: how many rows of how many numbers, and how many of them an iteration reads."""


class Group:
    """Processes that run iterations when they are told to."""

    def __init__(self, commands: list[list[str]]):
        environment = os.environ | {"JAX_PLATFORMS": "cpu", "TF_CPP_MIN_LOG_LEVEL": "3"}
        self._processes = [
            subprocess.Popen(
                command,
                env=environment,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                text=True,
            )
            for command in commands
        ]
        for process in self._processes:
            self._answer(process)

    @staticmethod
    def _answer(process: subprocess.Popen) -> dict[str, Any]:
        assert process.stdout is not None
        for line in process.stdout:
            if line.startswith("{"):
                return json.loads(line)
        raise SystemExit(f"{process.args} has ended")

    def ask(self, *lines: str) -> list[dict[str, Any]]:
        """Gives a line to each of the first processes. Returns their answers, when all have one."""
        asked = self._processes[: len(lines)]
        for process, line in zip(asked, lines, strict=True):
            assert process.stdin is not None
            process.stdin.write(f"{line}\n")
            process.stdin.flush()
        return [self._answer(each) for each in asked]

    def run(self, iterations: int) -> float:
        """Seconds of one iteration of one worker, while all run."""
        answers = self.ask(*[str(iterations)] * len(self._processes))
        return float(np.mean([each["seconds"] for each in answers])) / iterations

    def end(self) -> None:
        for process in self._processes:
            process.kill()
            process.wait()


def serve_commands(work: Callable[[int], None]) -> None:
    """Runs iterations as they are asked for, and says how long they took."""
    print(json.dumps({"seconds": 0.0}), flush=True)
    for line in sys.stdin:
        started = time.perf_counter()
        work(int(line))
        print(json.dumps({"seconds": time.perf_counter() - started}), flush=True)


@contextlib.contextmanager
def served_by(command: list[str]) -> Iterator[None]:
    """A process that serves until it is told to end."""
    server = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL)
    assert server.stdout is not None
    server.stdout.readline()
    try:
        yield
    finally:
        server.terminate()
        server.wait()


def working(workers: int, address: str, size: int) -> Iterator[Group]:
    command = [sys.executable, "-m", "benchmarks.served", "--worker", address, str(size)]
    group = Group([command] * workers)
    try:
        yield group
    finally:
        group.end()


def free_port() -> int:
    with socket.socket() as listening:
        listening.bind(("127.0.0.1", 0))
        return listening.getsockname()[1]
