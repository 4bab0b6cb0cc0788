"""Pods for tests: real processes on this machine, killed with real signals, under a time limit."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import textwrap
import time
from collections.abc import Container
from dataclasses import dataclass
from pathlib import Path

from tests.cluster.network import Network
from tests.forking import Process, start

ROOT = Path(__file__).parent.parent.parent
PRELUDE = """
import os, signal, sys, time
RANK, COUNT = int(os.environ["RANK"]), int(os.environ["COUNT"])
import jax
jax.config.update("jax_num_cpu_devices", int(os.environ["DEVICES"]))
def wait_for_the_service(host, port):
    # Who connects before it listens tries again only after a second.
    import socket
    with socket.socket() as client:
        while client.connect_ex((host, int(port))):
            time.sleep(0.01)
if RANK:
    wait_for_the_service(*os.environ["ADDRESS"].split(":"))
jax.distributed.initialize(
    os.environ["ADDRESS"], COUNT, RANK, initialization_timeout=60,
    heartbeat_timeout_seconds=HEARTBEAT, shutdown_timeout_seconds=HEARTBEAT,
)
import jax.numpy as jnp, numpy as np
import stepcache as sc
from jax.sharding import AxisType, NamedSharding, PartitionSpec as P
mesh = jax.make_mesh((jax.device_count(),), ("data",), axis_types=(AxisType.Auto,))
def say(*words):
    print(*words, flush=True)
"""
HEARTBEAT_SECONDS = 20


@dataclass
class Rank:
    """What became of one process.

    Attributes:
        code: its exit code; negative for a signal.
        seconds: how long it lived.
        output: what it printed, and its errors after that.
        ended: when, by `time.time`.
    """

    code: int
    seconds: float
    output: str
    ended: float = 0.0

    def said(self, word: str) -> list[str]:
        """What it printed in lines that begin with a word."""
        lines = (line.partition(" ") for line in self.output.splitlines())
        return [rest for first, _, rest in lines if first == word]


def _kill(process: Process) -> None:
    with contextlib.suppress(ProcessLookupError):  # It has ended, and that is not known here yet.
        os.killpg(process.pid, signal.SIGKILL)


def run_pod(
    directory: Path,
    body: str,
    count: int = 2,
    *,
    devices: int = 1,
    limit: float = 90,
    variables: dict[str, str] | None = None,
    of_rank: dict[int, dict[str, str]] | None = None,
    cache: str | Path = "off",
    heartbeat: int = HEARTBEAT_SECONDS,
    stopped: int | None = None,
    network: Network | None = None,
) -> list[Rank]:
    """Runs a script in every rank, and fails if one of them does not end in time.

    Args:
        directory: where to put the script; "{rank}" in `cache` stands for the rank.
        body: the script, after `PRELUDE`.
        count: how many ranks.
        devices: of each.
        limit: seconds.
        variables: of the environment.
        of_rank: more of them, by rank.
        cache: `STEPCACHE_DIR`.
        heartbeat: the seconds without one after which JAX ends all ranks.
        stopped: a rank that stops, to be killed when all others have ended.
        network: what connects the ranks; by default this machine's own.
    """
    processes = _start(
        directory,
        body,
        count,
        devices=devices,
        variables=variables,
        of_rank=of_rank,
        cache=cache,
        heartbeat=heartbeat,
        network=network,
    )
    started, now = time.monotonic(), time.time()
    ended: dict[int, float] = {}
    try:
        while len(ended) < count and time.monotonic() < started + limit:
            for rank, process in enumerate(processes):
                if rank not in ended and process.poll() is not None:
                    ended[rank] = time.monotonic() - started
            if stopped is not None and len(ended) == count - 1 and stopped not in ended:
                _kill(processes[stopped])
            time.sleep(0.01)
    finally:
        for process in processes:
            if process.poll() is None:
                _kill(process)
            process.wait()
    ranks = [
        Rank(
            process.wait(),
            ended.get(rank, limit),
            "".join(_output_of(directory, rank)),
            now + ended.get(rank, limit),
        )
        for rank, process in enumerate(processes)
    ]
    for process in processes:
        left = _group(process.pid)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
            raise AssertionError(f"a rank has left a process behind: {left}")
    _assert_none_hung(ranks, ended)
    return ranks


def _group(pid: int) -> list[str]:
    """The processes of a group, as `/proc` describes them."""
    found = []
    for path in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError, IndexError):
            status = (path / "stat").read_text()
            if status.rpartition(")")[2].split()[2] == str(pid):
                found.append(f"{status[:60]} {(path / 'cmdline').read_text()[:200]}")
    return found


def _output_of(directory: Path, rank: int) -> tuple[str, str]:
    """What a rank has printed, and its errors."""
    said, errors = (directory / name for name in _files_of(rank))
    return said.read_text(errors="replace"), errors.read_text(errors="replace")


def _files_of(rank: int) -> tuple[str, str]:
    """Two files: JAX's threads write errors in the middle of what is said."""
    return f"rank{rank}.txt", f"rank{rank}.errors.txt"


def _assert_none_hung(ranks: list[Rank], ended: Container[int]) -> None:
    hung = [rank for rank in range(len(ranks)) if rank not in ended]
    outputs = "\n".join(f"--- rank {n}\n{each.output[-3000:]}" for n, each in enumerate(ranks))
    assert not hung, f"ranks {hung} hung\n{outputs}"


# What the ranks of a `Pod` run. A script finds what PRELUDE has made, nothing of those before it.
TURNS = """
def take_turns():
    import itertools, linecache, traceback
    from pathlib import Path
    given, home = dict(globals()), Path.cwd()
    for turn in itertools.count(int(os.environ["TURN"])):
        while not (home / f"turn{turn}").exists():
            time.sleep(0.005)
        if not (place := (home / f"turn{turn}").read_text()):
            return
        os.chdir(place)
        linecache.checkcache()
        script, code = os.path.join(place, "pod.py"), 0
        try:
            text = Path(script).read_text(encoding="utf-8")
            exec(compile(text, script, "exec"), given | {"__file__": script})
        except BaseException:
            traceback.print_exc()
            code = 1
        sys.stdout.flush()
        (home / f"part{RANK}").write_text(str(code))
        (home / f"part{RANK}").rename(home / f"ended{turn}.{RANK}")
take_turns()
"""


class Pod:
    """Processes that run one script after the other: a pod for the tests that end none of them.

    Args:
        home: a directory that is theirs alone.
        count: how many ranks.
        devices: of each.
    """

    def __init__(self, home: Path, count: int = 2, *, devices: int = 1):
        self.home, self.count, self.devices = home, count, devices
        self._processes: list[Process] = []
        self._turn = 0

    def run(self, directory: Path, body: str, *, limit: float = 90) -> list[Rank]:
        """Runs a script in every rank, as `run_pod` does in new ones, in a namespace of its own."""
        if not self._processes:
            self._processes = _start(
                self.home,
                TURNS,
                self.count,
                devices=self.devices,
                variables={"TURN": str(self._turn)},
                of_rank=None,
                cache="off",
                heartbeat=HEARTBEAT_SECONDS,
            )
        before = [_output_of(self.home, rank) for rank in range(self.count)]
        (directory / "pod.py").write_text(textwrap.dedent(body), encoding="utf-8")
        ended = self._take_turn(str(directory), limit)
        ranks = []
        for rank, (said, errors) in enumerate(before):
            now = _output_of(self.home, rank)
            output = now[0][len(said) :] + now[1][len(errors) :]
            ranks.append(Rank(*ended.get(rank, (1, limit)), output))
        if len(ended) < self.count:
            self._kill()
        _assert_none_hung(ranks, ended)
        return ranks

    def _take_turn(self, place: str, limit: float) -> dict[int, tuple[int, float]]:
        """The exit codes and seconds of those that have come to the end of a script in time."""
        started = time.monotonic()
        (self.home / "part").write_text(place)
        (self.home / "part").rename(self.home / f"turn{self._turn}")
        ended: dict[int, tuple[int, float]] = {}
        while len(ended) < self.count and time.monotonic() < started + limit:
            for rank in set(range(self.count)) - set(ended):
                code = self.home / f"ended{self._turn}.{rank}"
                if code.exists():
                    ended[rank] = int(code.read_text()), time.monotonic() - started
            if any(process.poll() is not None for process in self._processes):
                break
            time.sleep(0.005)
        self._turn += 1
        return ended

    def _kill(self) -> None:
        for process in self._processes:
            if process.poll() is None:
                _kill(process)
            process.wait()
        self._processes = []

    def close(self) -> None:
        """Ends all processes, which have to end well."""
        if self._processes:
            self._take_turn("", 0)
            codes = [process.wait() for process in self._processes]
            assert not any(codes), [_output_of(self.home, rank) for rank in range(self.count)]


def _start(
    directory: Path,
    body: str,
    count: int,
    *,
    devices: int,
    variables: dict[str, str] | None,
    of_rank: dict[int, dict[str, str]] | None,
    cache: str | Path,
    heartbeat: int,
    network: Network | None = None,
) -> list[Process]:
    """Starts a script in every rank; what it prints goes to files of the directory."""
    script = directory / "pod.py"
    prelude = PRELUDE.replace("HEARTBEAT", str(heartbeat))
    script.write_text(prelude + textwrap.dedent(body), encoding="utf-8")
    with socket.socket() as free:
        free.bind(("localhost", 0))
        host = network.host(0) if network is not None else "localhost"
        address = f"{host}:{free.getsockname()[1]}"
    processes = []
    for rank in range(count):
        environment = os.environ | {
            "RANK": str(rank),
            "COUNT": str(count),
            "DEVICES": str(devices),
            "ADDRESS": address,
            "STEPCACHE_DIR": str(cache).format(rank=rank),
            "JAX_PLATFORMS": "cpu",
            "PYTHONPATH": str(ROOT),
            "NPROC": "4",
        }
        environment |= (variables or {}) | (of_rank or {}).get(rank, {})
        said, errors = (directory / name for name in _files_of(rank))
        said.write_text("")
        errors.write_text("")
        streams = {"stdout": said, "stderr": errors}
        within = network.command(rank) if network is not None else ()
        processes.append(start(script, env=environment, cwd=directory, within=within, **streams))
    return processes


def succeeded(ranks: list[Rank]) -> list[Rank]:
    """The ranks, which all have to have ended well."""
    for number, each in enumerate(ranks):
        assert each.code == 0, f"rank {number} ended with {each.code}\n{each.output[-4000:]}"
    return ranks
