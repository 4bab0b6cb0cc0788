"""`stepcache launch`: runs a script as several ranks on this machine, to try a pod.

Each rank is a process, in which `jax.distributed.initialize()` without arguments finds the others.
Their lines are shown with the rank before each. The first failure ends all.
"""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from typing import IO, TextIO

from stepcache._process_hooks import signals_handled

GRACE_SECONDS = 15.0


def launch(
    target: str,
    arguments: Sequence[str] = (),
    *,
    ranks: int,
    module: bool = False,
    devices: int | None = None,
) -> int:
    """Runs a script as that many ranks on this machine, and waits for them.

    To be called in the main thread: SIGINT and SIGTERM are passed on to the ranks meanwhile. When
    one has failed, the others have 15 seconds to end by themselves, and are killed then.

    Args:
        target: the path of the script, or the name of a module.
        arguments: those of the script.
        ranks: how many.
        module: run a module, as `python -m` does.
        devices: of each rank; None is one, or as many CPU devices as the environment says.

    Returns:
        The exit code of the rank that failed first, 128 and the number of the signal if one killed
        it; 0 when all ranks ended with 0.
    """
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{free.getsockname()[1]}"
    processes: list[subprocess.Popen[bytes]] = []
    copying: list[threading.Thread] = []

    def send(number: int) -> None:
        for process in processes:
            with contextlib.suppress(OSError):
                os.killpg(process.pid, number)

    def copy(stream: IO[bytes], to: TextIO, rank: int) -> None:
        for line in stream:
            with contextlib.suppress(OSError, ValueError):  # As after `| head`.
                to.buffer.write(b"[%d] %s\n" % (rank, line.rstrip(b"\r\n")))
                to.flush()

    with signals_handled((signal.SIGINT, signal.SIGTERM), lambda number, _: send(number)):
        try:
            for rank in range(ranks):
                process = subprocess.Popen(
                    [sys.executable, "-u", *(["-m"] if module else []), target, *arguments],
                    env=rank_environment(rank, ranks, address, devices, os.environ),
                    stdin=None if rank == 0 else subprocess.DEVNULL,
                    stdout=subprocess.PIPE,
                    stderr=subprocess.PIPE,
                    start_new_session=True,  # A signal reaches it once, through this process.
                )
                processes.append(process)
                for stream, to in ((process.stdout, sys.stdout), (process.stderr, sys.stderr)):
                    copying.append(threading.Thread(target=copy, args=(stream, to, rank)))
                    copying[-1].start()
            code, due = 0, float("inf")
            while None in [process.poll() for process in processes] and time.monotonic() < due:
                for rank, process in enumerate(processes):
                    if not code and process.returncode:
                        code, due = process.returncode, time.monotonic() + GRACE_SECONDS
                        text = f"rank {rank} ended with {code}; the others have {GRACE_SECONDS:g} s"
                        print(f"stepcache launch: {text}", file=sys.stderr, flush=True)
                time.sleep(0.02)
        finally:
            send(signal.SIGKILL)
            for thread in copying:
                thread.join(2.0)
    code = next(filter(None, [code, *(process.wait() for process in processes)]), 0)
    return code if code >= 0 else 128 - code


def rank_environment(
    rank: int, ranks: int, address: str, devices: int | None, around: Mapping[str, str]
) -> dict[str, str]:
    """The environment of a rank: that `around`, with a Slurm step, which any JAX reads."""
    count = devices or 1
    environment = {
        **around,
        "SLURM_JOB_ID": around.get("SLURM_JOB_ID", "0"),
        "SLURM_STEP_NODELIST": "localhost",
        "SLURM_NTASKS": str(ranks),
        "SLURM_PROCID": str(rank),
        "SLURM_LOCALID": str(rank),
        "JAX_COORDINATOR_ADDRESS": address,
        "JAX_COORDINATOR_BIND_ADDRESS": address,
        "JAX_LOCAL_DEVICE_IDS": ",".join(map(str, range(rank * count, (rank + 1) * count))),
        "no_grpc_proxy": "127.0.0.1",  # gRPC would ask a proxy for the coordinator, and hang.
    }
    environment.pop("OMPI_MCA_orte_hnp_uri", None)  # JAX would prefer a job of Open MPI.
    if devices is not None:
        environment["JAX_NUM_CPU_DEVICES"] = str(devices)
    return environment
