"""Pods for tests: real processes on this machine, killed with real signals, under a time limit."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
import textwrap
import time
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parent.parent.parent
PRELUDE = """
import os, signal, sys, time
RANK, COUNT = int(os.environ["RANK"]), int(os.environ["COUNT"])
import jax
jax.config.update("jax_num_cpu_devices", int(os.environ["DEVICES"]))
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
        output: what it printed, and its errors after that.
        seconds: how long it lived.
    """

    code: int
    output: str
    seconds: float

    def said(self, word: str) -> list[str]:
        """What it printed in lines that begin with a word."""
        lines = (line.partition(" ") for line in self.output.splitlines())
        return [rest for first, _, rest in lines if first == word]


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
    stopped: int | None = None,
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
        stopped: a rank that stops, to be killed when all others have ended.
    """
    script = directory / "pod.py"
    prelude = PRELUDE.replace("HEARTBEAT", str(HEARTBEAT_SECONDS))
    script.write_text(prelude + textwrap.dedent(body), encoding="utf-8")
    with socket.socket() as free:
        free.bind(("localhost", 0))
        address = f"localhost:{free.getsockname()[1]}"
    started = time.monotonic()
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
        # Two files: JAX's threads write errors in the middle of what is said. To append, so that no
        # write can overwrite another one.
        for name in (f"rank{rank}.txt", f"rank{rank}.errors.txt"):
            (directory / name).unlink(missing_ok=True)
        with (
            (directory / f"rank{rank}.txt").open("ab") as said,
            (directory / f"rank{rank}.errors.txt").open("ab") as errors,
        ):
            processes.append(
                subprocess.Popen(
                    [sys.executable, str(script)],
                    env=environment,
                    stdout=said,
                    stderr=errors,
                    cwd=directory,
                    start_new_session=True,
                )
            )
    ended: dict[int, float] = {}
    try:
        while len(ended) < count and time.monotonic() < started + limit:
            for rank, process in enumerate(processes):
                if rank not in ended and process.poll() is not None:
                    ended[rank] = time.monotonic() - started
            if stopped is not None and len(ended) == count - 1 and stopped not in ended:
                os.killpg(processes[stopped].pid, signal.SIGKILL)
            time.sleep(0.01)
    finally:
        for process in processes:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
    texts = [
        "".join(
            (directory / name).read_text(errors="replace")
            for name in (f"rank{rank}.txt", f"rank{rank}.errors.txt")
        )
        for rank in range(count)
    ]
    ranks = [
        Rank(process.returncode, text, ended.get(rank, limit))
        for rank, (process, text) in enumerate(zip(processes, texts, strict=True))
    ]
    for process in processes:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
            raise AssertionError("a rank has left a process behind")
    hung = [rank for rank in range(count) if rank not in ended]
    outputs = "\n".join(f"--- rank {n}\n{each.output[-3000:]}" for n, each in enumerate(ranks))
    assert not hung, f"ranks {hung} hung\n{outputs}"
    return ranks


def succeeded(ranks: list[Rank]) -> list[Rank]:
    """The ranks, which all have to have ended well."""
    for number, each in enumerate(ranks):
        assert each.code == 0, f"rank {number} ended with {each.code}\n{each.output[-4000:]}"
    return ranks
