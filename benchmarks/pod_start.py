"""Seconds from the first call of a training step to its result, in a pod of four processes.

The step trains a transformer of 12 layers, one CPU device a process, gloo between them.
Contenders, each in processes of their own, in turn:

- plain `jax.jit`, so that every process compiles;
- one compile by hand: the first process serializes its program into a file, by
  `jax.experimental.serialize_executable`, and the others load it, unasked whether it is theirs.
  That is what sharing takes at the least;
- stepcache with nothing stored: one process builds, the others load what it built;
- stepcache, warm: each loads from its own directory;
- `jax.jit`, warm: JAX's cache, in a directory that all share, with its three options set.

The time of a pod is that of its last process. Then how long it takes to agree on a new program:
a tiny step with as many signatures, where nothing else takes long.

    python -m benchmarks.pod_start [--quick]
"""

from __future__ import annotations

import argparse
import json
import os
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from benchmarks.harness import Row, quartiles, show, write

RANKS = 4
CONTENDERS = {
    "jax.jit, every process compiles": ("jax", "none"),
    "by hand, one compiles": ("hand", "none"),
    "stepcache, one compiles": ("stepcache", "none"),
    "stepcache, warm": ("stepcache", "own"),
    "jax.jit, its cache, warm": ("jax", "jax"),
}
PEER = "jax.jit, every process compiles"
WAYS = ("jax", "hand", "stepcache", "agree")
AGREEMENTS = 20


# ---- in the processes that are timed -----------------------------------------------------------


def start(rank: int, address: str):
    """Starts JAX as one of the pod's processes; returns it and the mesh."""
    import jax
    from jax.sharding import AxisType

    jax.config.update("jax_num_cpu_devices", 1)
    ranks = int(os.environ["RANKS"])
    jax.distributed.initialize(address, ranks, rank)
    return jax, jax.make_mesh((ranks,), ("data",), axis_types=(AxisType.Auto,))


def work(way: str, layers: int, rank: int, address: str, directory: str) -> None:
    """Builds the model, calls the step once, and prints what that took as JSON."""
    jax, mesh = start(rank, address)
    import numpy as np
    from jax.experimental import multihost_utils
    from jax.sharding import NamedSharding, PartitionSpec

    import stepcache as sc
    from benchmarks.transformer import BATCH, make_batch, make_state, make_train_step

    train_step = make_train_step(layers)

    def spread(value, spec):
        sharding = NamedSharding(mesh, spec)
        return jax.tree.map(
            lambda each: jax.make_array_from_process_local_data(sharding, each), value
        )

    state = spread(jax.tree.map(np.asarray, make_state(layers)), PartitionSpec())
    batch = spread(make_batch(BATCH // jax.process_count()), PartitionSpec("data"))
    if way == "jax":
        step = jax.jit(train_step, donate_argnames="state")
    elif way == "hand":
        step = by_hand(jax.jit(train_step, donate_argnames="state"), rank, Path(directory))
    else:
        step = sc.step(train_step, carry="state", batch="batch")
    with sc.Session(mesh):
        multihost_utils.sync_global_devices("start")
        started = time.perf_counter()
        state, loss = step(state, batch)
        jax.block_until_ready((state, loss))
        seconds = time.perf_counter() - started
    record: dict = {"seconds": seconds, "loss": float(loss)}
    if isinstance(step, sc.Step):
        stats = step.stats()
        stages = ("load", "trace", "lower", "compile", "agree", "wait", "give")
        record["stages"] = {stage: getattr(stats, f"{stage}_seconds") for stage in stages}
        record["counts"] = [stats.traces, stats.compiles, stats.loads]
    print(json.dumps(record), flush=True)


def by_hand(jitted: Any, rank: int, directory: Path) -> Any:
    """A step that one process compiles, and that the others load from a file."""
    import jax
    from jax.experimental import serialize_executable

    file = directory / "program"

    def step(state, batch):
        if rank == 0:
            compiled = jitted.lower(state, batch).compile()
            file.with_suffix(".new").write_bytes(serialize_executable.serialize(compiled)[0])
            file.with_suffix(".new").rename(file)
            return compiled(state, batch)
        while not file.exists():
            time.sleep(0.002)
        trees = (jax.tree.structure(((state, batch), {})), jax.tree.structure((state, 0)))
        return serialize_executable.deserialize_and_load(file.read_bytes(), *trees)(state, batch)

    return step


def agree(rank: int, address: str) -> None:
    """Calls a tiny step with new signatures, and prints how long each agreement took."""
    jax, mesh = start(rank, address)
    import numpy as np

    import stepcache as sc

    step, seconds, before = sc.step(lambda x: x.sum(), batch="x"), [], 0.0
    with sc.Session(mesh):
        for number in range(AGREEMENTS):
            jax.block_until_ready(step(np.ones(1 + number, np.float32)))
            now = step.stats().agree_seconds
            seconds.append(now - before)
            before = now
    print(json.dumps({"seconds": seconds}), flush=True)


# ---- around them -------------------------------------------------------------------------------


def run(arguments: list[str], directory: Path | None, ranks: int) -> list[dict]:
    """One fresh pod; what its processes printed."""
    with socket.socket() as free:
        free.bind(("localhost", 0))
        address = f"localhost:{free.getsockname()[1]}"
    processes, handed = [], tempfile.TemporaryDirectory()
    for rank in range(ranks):
        own = str(directory / str(rank)) if directory is not None else "off"
        environment = dict(os.environ, STEPCACHE_DIR=own, JAX_PLATFORMS="cpu", NPROC="4")
        environment["RANKS"] = str(ranks)
        if directory is not None and "jax" in arguments:
            environment["JAX_COMPILATION_CACHE_DIR"] = str(directory / "jax")
            environment["JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS"] = "0"
            environment["JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES"] = "-1"
        command = [sys.executable, "-m", "benchmarks.pod_start", *arguments]
        command += ["--rank", str(rank), "--address", address]
        command += ["--directory", handed.name]
        processes.append(
            subprocess.Popen(
                command,
                env=environment,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                text=True,
            )
        )
    outputs = [process.communicate(timeout=600)[0] for process in processes]
    handed.cleanup()
    assert not any(process.returncode for process in processes), outputs
    return [
        json.loads(next(line for line in output.splitlines() if line.startswith("{")))
        for output in outputs
    ]


def starts(layers: int, rounds: int, ranks: int) -> tuple[list[Row], dict]:
    """The contenders in turn."""
    seconds: dict[str, list[float]] = {name: [] for name in CONTENDERS}
    details = {}
    with tempfile.TemporaryDirectory() as root:
        for way in ("stepcache", "jax"):
            run(["--work", way, "--layers", str(layers)], Path(root), ranks)
        for _ in range(rounds):
            for name, (way, stored) in CONTENDERS.items():
                arguments = ["--work", way, "--layers", str(layers)]
                found = run(arguments, Path(root) if stored != "none" else None, ranks)
                assert len({each["loss"] for each in found}) == 1
                seconds[name].append(max(each["seconds"] for each in found))
                details[name] = found
    rows = []
    for name, times in seconds.items():
        low, middle, high = quartiles(times)
        ratio_low, ratio, ratio_high = quartiles(
            [a / b for a, b in zip(times, seconds[PEER], strict=True)]
        )
        case = f"{layers} layers, {ranks} processes"
        rows.append(Row(case, name, middle, low, high, ratio, ratio_low, ratio_high))
    return rows, details


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--quick", action="store_true", help="one small case of two processes, once"
    )
    parser.add_argument(
        "--work", choices=("jax", "hand", "stepcache", "agree"), help=argparse.SUPPRESS
    )
    parser.add_argument("--layers", type=int, default=12, help=argparse.SUPPRESS)
    parser.add_argument("--rank", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--address", help=argparse.SUPPRESS)
    parser.add_argument("--directory", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.work == "agree":
        agree(options.rank, options.address)
    elif options.work:
        work(options.work, options.layers, options.rank, options.address, options.directory)
    else:
        report(options.quick)


def report(quick: bool) -> None:
    """Runs everything, and prints and writes it."""
    rounds, ranks = (1, 2) if quick else (7, RANKS)
    rows, details = starts(1 if quick else 12, rounds, ranks)
    show(f"first call to its result, the last of {ranks} processes", rows)
    taken = run(["--work", "agree"], None, ranks)
    # Of the process that comes last: the others wait for it, too.
    agreements = [min(each) for each in zip(*(rank["seconds"] for rank in taken), strict=True)]
    figures = {
        "stages of the last round": details,
        "agreement_seconds": {
            "median": statistics.median(agreements[1:]),
            "max": max(agreements[1:]),
            "median with waiting": statistics.median(taken[-1]["seconds"][1:]),
        },
    }
    print(figures["agreement_seconds"])
    if not quick:
        print(f"written to {write('pod_start', rows, figures, rounds=rounds)}")


if __name__ == "__main__":
    main()
