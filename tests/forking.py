"""Starts Python scripts in processes forked from one that has imported JAX.

A test that starts ten processes would spend ten seconds of CPU on importing JAX. Here one process
imports it, and what else stepcache and training scripts import, but not stepcache. Each script runs
in a fork of that process, as `__main__`, with its own environment, streams, directory and process
group, and ends as any other process ends: signals, exit codes and exit handlers are real.

What Python and JAX read once, when they start, is read by the forking process: there is one for
each set of values of such variables. What forks have in common, and other processes have not, is
the seed of Python's hashes and where its objects lie in memory: tests that depend on these start a
Python of their own, as all do where this is not Linux.
"""

from __future__ import annotations

import atexit
import gc
import json
import os
import select
import signal
import socket
import subprocess
import sys
import threading
import time
import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import CodeType

IMPORTS = """
    jax jax.numpy jax.experimental.multihost_utils jax.experimental.serialize_executable
    click msgpack platformdirs rich.console rich.live rich.progress rich.spinner rich.table
    rich.tree
    flax.linen flax.nnx flax.training.train_state optax
""".split()
READ_AT_START = ("JAX_", "XLA_", "PYTHON", "LD_", "OMP_", "OPENBLAS_")
"""Prefixes of variables that Python, JAX or their libraries read when they are imported."""
READ_LATER = "PYTHONBREAKPOINT"  # Ray sets it.
CAN_FORK = sys.platform == "linux"
POLL_SECONDS = 0.01
MESSAGE_BYTES = 1 << 20


class Forked:
    """A process, with what tests use of `subprocess.Popen`."""

    def __init__(self, pid: int, source: _Source):
        self.pid, self._source = pid, source
        self.returncode: int | None = None

    def poll(self) -> int | None:
        if self.returncode is None:
            self._source.read()
        return self.returncode

    def wait(self) -> int:
        while (code := self.poll()) is None:
            time.sleep(POLL_SECONDS)
        return code

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            os.kill(self.pid, number)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)


class _Source:
    """The process that forks, as the tests see it."""

    def __init__(self, environment: Mapping[str, str]):
        self._channel, theirs = socket.socketpair(type=socket.SOCK_SEQPACKET)
        self._lock = threading.RLock()
        self._living: dict[int, Forked] = {}  # Numbers of processes are used again.
        command = f"exec(__import__('tests.forking').forking.serve({theirs.fileno()}))"
        self._process = subprocess.Popen(
            [sys.executable, "-c", command],
            env=environment,
            cwd=Path(__file__).parent.parent,
            stdin=subprocess.DEVNULL,
            pass_fds=[theirs.fileno()],
            start_new_session=True,
        )
        theirs.close()

    def close(self) -> None:
        """Ends it."""
        self._channel.close()
        self._process.wait()

    def fork(self, **what: object) -> Forked:
        forked = None
        with self._lock:
            self._channel.sendall(json.dumps(what).encode())
            while forked is None:
                forked = self._read_one()
        return forked

    def read(self) -> None:
        """Notes which processes have ended."""
        with self._lock:
            while select.select([self._channel], [], [], 0)[0]:
                self._read_one()

    def _read_one(self) -> Forked | None:
        """Reads one message: returns the process that started, or None where one has ended."""
        message = self._channel.recv(MESSAGE_BYTES)
        assert message, "the process that forks has gone"
        told = json.loads(message)
        if "code" in told:
            self._living.pop(told["pid"]).returncode = told["code"]
            return None
        forked = self._living[told["pid"]] = Forked(told["pid"], self)
        return forked


Process = Forked | subprocess.Popen


_sources: dict[tuple[tuple[str, str], ...], _Source] = {}
_lock = threading.Lock()


def _source(environment: Mapping[str, str]) -> _Source:
    """The process that forks those that start with such variables."""
    read = tuple(
        (k, v)
        for k, v in sorted(environment.items())
        if k.startswith(READ_AT_START) and k != READ_LATER
    )
    with _lock:
        if read not in _sources:
            others = {k: v for k, v in os.environ.items() if not k.startswith(READ_AT_START)}
            _sources[read] = _Source(others | dict(read))
            atexit.register(_sources[read].close)
        return _sources[read]


def start(
    script: Path,
    arguments: Sequence[str] = (),
    *,
    env: Mapping[str, str],
    cwd: Path,
    stdout: Path,
    stderr: Path,
    fork: bool = True,
    within: Sequence[str] = (),
) -> Process:
    """Starts a script in a process and process group of its own; streams are appended to files.

    `within` is a command that runs another one, as `nice` does.
    """
    if fork and CAN_FORK and not within:
        return _source(env).fork(
            script=str(script),
            arguments=list(arguments),
            env=dict(env),
            cwd=str(cwd),
            streams=[os.devnull, str(stdout), str(stderr)],
        )
    with stdout.open("ab") as out, stderr.open("ab") as errors:
        return subprocess.Popen(
            [*within, sys.executable, str(script), *arguments],
            env=env,
            cwd=cwd,
            stdin=subprocess.DEVNULL,
            stdout=out,
            stderr=errors,
            start_new_session=True,
        )


# ---- in the process that forks ------------------------------------------------------------------


def serve(number: int) -> CodeType:
    """Forks as it is asked to. Returns in each fork, with the code of its script for `__main__`."""
    for name in IMPORTS:
        __import__(name)
    gc.collect()
    gc.freeze()  # Collections in the forks pass over what was imported, and copy none of it.
    channel = socket.socket(fileno=number)
    children: set[int] = set()
    while True:
        if select.select([channel], [], [], POLL_SECONDS if children else None)[0]:
            message = channel.recv(MESSAGE_BYTES)
            if not message:
                os._exit(0)
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # Numpy's library for linear algebra has threads.
                pid = os.fork()
            if pid == 0:
                channel.close()
                return _become(**json.loads(message))
            _own_group(pid)
            children.add(pid)
            channel.sendall(json.dumps({"pid": pid}).encode())
        for pid in list(children):
            ended, status = os.waitpid(pid, os.WNOHANG)
            if ended:
                children.remove(pid)
                told = {"pid": pid, "code": os.waitstatus_to_exitcode(status)}
                channel.sendall(json.dumps(told).encode())


def _own_group(pid: int) -> None:
    """Called on both sides of a fork: each may go on before the other one does."""
    try:
        os.setpgid(pid, pid)
    except (PermissionError, ProcessLookupError):
        assert pid


def _become(
    script: str, arguments: list[str], env: dict[str, str], cwd: str, streams: list[str]
) -> CodeType:
    """Makes this fork the process of a script, as `python script` does."""
    import numpy as np

    _own_group(0)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    for number, path in enumerate(streams):
        flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT if number else os.O_RDONLY
        opened = os.open(path, flags, 0o666)
        os.dup2(opened, number)
        os.close(opened)
    os.environ.clear()
    os.environ.update(env)
    os.chdir(cwd)
    np.random.seed()
    sys.argv[:] = [script, *arguments]
    sys.path[0] = str(Path(script).parent)
    for name in ("tests", "tests.forking"):
        sys.modules.pop(name, None)
    main = sys.modules["__main__"].__dict__
    main.update(__file__=script, __cached__=None)
    return compile(Path(script).read_bytes(), script, "exec")
