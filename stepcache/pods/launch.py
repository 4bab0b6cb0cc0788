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
from pathlib import Path
from typing import IO, TextIO

from stepcache._process_hooks import signals_handled
from stepcache.errors import StepCacheError

GRACE_SECONDS = 15.0
_POLL_SECONDS = 0.02


def launch(
    target: str,
    arguments: Sequence[str] = (),
    *,
    ranks: int,
    module: bool = False,
    devices: int | None = None,
) -> int:
    """Runs a script as that many ranks on this machine, and waits for them.

    To be called in the main thread: SIGINT and SIGTERM are passed on to the ranks meanwhile. Ranks
    have 15 seconds to end by themselves when one has failed, and again after SIGTERM.

    Args:
        target: the path of the script, or the name of a module.
        arguments: those of the script.
        ranks: how many.
        module: run a module, as `python -m` does.
        devices: of each rank; None is one, or as many CPU devices as the environment says.

    Returns:
        The exit code of the rank that failed first, 128 and the number of the signal if one killed
        it; 0 when all ranks ended with 0.

    Raises:
        StepCacheError: there is no such script.
    """
    if not (module or Path(target).is_file()):
        raise StepCacheError("there is no script to launch", where=target)
    with socket.socket() as free:
        free.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        free.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{free.getsockname()[1]}"
    processes: list[subprocess.Popen[bytes]] = []
    copying: list[threading.Thread] = []
    lock = threading.Lock()

    def send(number: int) -> None:
        for process in processes:
            with contextlib.suppress(OSError):
                os.killpg(process.pid, number)

    def copy(stream: IO[bytes], to: TextIO, rank: int) -> None:
        for line in stream:
            with lock, contextlib.suppress(OSError, ValueError):  # As after `| head`.
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
            code, due, number = 0, float("inf"), signal.SIGTERM
            while None in [process.poll() for process in processes]:
                for rank, process in enumerate(processes):
                    if not code and process.returncode:
                        code, due = process.returncode, time.monotonic() + GRACE_SECONDS
                        text = f"rank {rank} ended with {code}; the others have {GRACE_SECONDS:g} s"
                        print(f"stepcache launch: {text}", file=sys.stderr, flush=True)
                if time.monotonic() > due:
                    send(number)
                    due, number = time.monotonic() + GRACE_SECONDS, signal.SIGKILL
                time.sleep(_POLL_SECONDS)
        finally:
            send(signal.SIGKILL)
            for thread in copying:
                thread.join(2.0)
    code = code or next(filter(None, (process.wait() for process in processes)), 0)
    return code if code >= 0 else 128 - code


def rank_environment(
    rank: int, ranks: int, address: str, devices: int | None, around: Mapping[str, str]
) -> dict[str, str]:
    """The environment variables of one rank of a launcher that has those `around`.

    They describe a Slurm step, which all versions of JAX read.
    """
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
    }
    environment.pop("OMPI_MCA_orte_hnp_uri", None)  # JAX would prefer a job of Open MPI.
    asked = "xla_force_host_platform_device_count" in around.get("XLA_FLAGS", "")
    if devices is not None or not (asked or "JAX_NUM_CPU_DEVICES" in around):
        environment["JAX_NUM_CPU_DEVICES"] = str(count)
    # gRPC would ask a proxy for the coordinator, and hang.
    others = around.get("no_grpc_proxy") or around.get("no_proxy")
    environment["no_grpc_proxy"] = f"{others},127.0.0.1" if others else "127.0.0.1"
    return environment
