"""Served variables beside TensorFlow's parameter server: each worker reads, computes and pushes.

One iteration of a worker reads a variable, finds its maximum, and adds a value of the same size
that depends on it. Cases: a scalar, 16 MB and 100 MB of float32, and 32 random rows of a table of
1 GB (4,194,304 rows of 64), with 1, 2 and 4 workers. A sample is the time of one iteration of one
worker, while all of them run. Contenders are timed in turn.

TensorFlow runs as `ParameterServerStrategy`: a coordinator schedules the function on its workers.
It may be installed elsewhere: `--tensorflow PYTHON` names an interpreter that has it. "stepcache,
ray" is an actor on this machine; "stepcache, ray calls" one that is called through Ray, as
processes of other machines do. "Ray, an actor" is what Ray itself takes: an actor that holds an
array, returns it, and adds to it. "JAX, no server" computes, copies and adds in the worker alone.

A case with large pages has `GLIBC_TUNABLES=glibc.malloc.hugetlb=1` in all processes of all
contenders.

    python -m benchmarks.served [--quick] [--tensorflow PYTHON] [--only WORD]
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.util
import os
import random
import secrets
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.harness import Row, compared, quartiles, show, write
from benchmarks.served_processes import (
    BATCH,
    ROWS,
    WIDTH,
    Group,
    serve_commands,
    served_by,
    working,
)
from benchmarks.served_tensorflow import tensorflow_group

SIZES = {"scalar": 1, "16 MB": 4 << 20, "100 MB": 25 << 20, "32 rows of 1 GB": 0}
WORKERS = (1, 2, 4)
STORE_BYTES = 2 << 30
HAS_RAY = importlib.util.find_spec("ray") is not None
SETTINGS = {"rounds": 7, "sample_seconds": 0.7}


# ---- stepcache ---------------------------------------------------------------------------------


def stepcache_worker(address: str, size: int) -> None:
    import stepcache as sc

    update_of = sc.step(largest_times_zero_plus_one)
    connection = sc.connect(address)
    if not size:
        return serve_commands(rows_worker(connection, sc))
    variables = connection.variables(
        f"value{size}", np.zeros(size, np.float32), write=sc.Write(mode="add")
    )

    def work(iterations: int) -> None:
        for _ in range(iterations):
            variables.push(update_of(variables))

    work(2)
    serve_commands(work)


def largest_times_zero_plus_one(value):
    import jax.numpy as jnp

    return jnp.full(value.shape, jnp.max(value) * 0 + 1, value.dtype)


def rows_worker(connection, sc) -> Callable[[int], None]:
    import jax.numpy as jnp

    table = connection.table("table", ROWS, (WIDTH,), optimizer=sc.RowOptimizer("sgd", 0.1))
    ids = np.random.default_rng(0)

    @sc.step
    def update_of(rows):
        return jnp.full(rows.values.shape, jnp.max(rows.spread()) * 0 + 1)

    def work(iterations: int) -> None:
        for _ in range(iterations):
            rows = table.lookup(ids.integers(0, ROWS, BATCH))
            table.push(rows, update_of(rows))

    work(2)
    connection.flush()
    return work


@contextlib.contextmanager
def stepcache_group(workers: int, size: int, engine: str) -> Iterator[Group]:
    with tempfile.TemporaryDirectory() as directory:
        name = Path(directory).name
        address = f"local:{directory}" if engine == "local" else f"ray:{name}"
        command = [sys.executable, "-m", "stepcache", "serve", "--variables", directory]
        if engine == "ray":
            command += ["--ray", name]
        elif engine == "ray calls":
            command = [sys.executable, "-m", "benchmarks.served", "--serve-calls", directory]
        with served_by(command):
            yield from working(workers, address, size)


def serve_calls(directory: Path) -> None:
    """Serves from an actor that all processes call through Ray, until SIGTERM."""
    from stepcache.serving import ray_engine

    ray_engine.initialise()
    ray_engine.start(directory.name, directory, shares=False)
    signals = {signal.SIGTERM, signal.SIGINT}
    signal.pthread_sigmask(signal.SIG_BLOCK, signals)
    print("serving", flush=True)
    signal.sigwait(signals)
    ray_engine.stop(directory.name)


def alone_worker(size: int) -> None:
    """What an iteration takes at least: the step, a copy of its result, and a sum."""
    import jax

    update_of = jax.jit(largest_times_zero_plus_one)
    value, sent, new = (np.zeros(size, np.float32) for _ in range(3))

    def work(iterations: int) -> None:
        for _ in range(iterations):
            np.copyto(sent, np.asarray(update_of(value)))
            np.add(value, sent, out=new)

    work(2)
    serve_commands(work)


# ---- Ray ---------------------------------------------------------------------------------------

_RAY = f"""
import sys, ray
ray.init("local", object_store_memory={STORE_BYTES}, include_dashboard=False, log_to_driver=False)
print(ray.get_runtime_context().gcs_address, flush=True)
sys.stdin.read()
"""


@contextlib.contextmanager
def ray_cluster() -> Iterator[None]:
    """A Ray of its own for all processes of the benchmark."""
    os.environ |= {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": secrets.token_hex(32)}
    pipe = subprocess.PIPE
    head = subprocess.Popen([sys.executable, "-c", _RAY], stdin=pipe, stdout=pipe, text=True)
    assert head.stdout is not None
    os.environ["RAY_ADDRESS"] = head.stdout.readline().strip()
    try:
        yield
    finally:
        head.communicate()  # It ends when its input does.


class Array:
    """What the actor of "Ray, an actor" holds: an array, or the rows of a table."""

    def __init__(self, size: int):
        self._value = np.zeros(size if size else (ROWS, WIDTH), np.float32)

    def read(self, ids=None):
        return self._value if ids is None else self._value[ids]

    def add(self, update, ids=None) -> None:
        if ids is None:
            self._value = self._value + update
        else:
            self._value[ids] -= 0.1 * update


def actor_worker(name: str, size: int) -> None:
    import jax
    import ray

    ray.init(address="auto", log_to_driver=False, namespace="bench")
    actor: Any = ray.remote(Array).options(name=name, get_if_exists=True, lifetime="detached")
    actor = actor.remote(size)
    update_of, random = jax.jit(largest_times_zero_plus_one), np.random.default_rng(0)

    def work(iterations: int) -> None:
        for _ in range(iterations):
            ids = () if size else (random.integers(0, ROWS, BATCH),)
            update = np.asarray(update_of(ray.get(actor.read.remote(*ids))))
            ray.get(actor.add.remote(ray.put(update) if update.nbytes > 1 << 16 else update, *ids))

    work(2)
    serve_commands(work)


@contextlib.contextmanager
def actor_group(workers: int, size: int) -> Iterator[Group]:
    name = f"array{size}-{workers}"
    yield from working(workers, f"actor:{name}", size)
    code = f"import ray; ray.init('auto', namespace='bench'); ray.kill(ray.get_actor('{name}'))"
    subprocess.run([sys.executable, "-c", code], stderr=subprocess.DEVNULL, check=True)


# ---- in turn -----------------------------------------------------------------------------------


def copy_seconds(size: int) -> float:
    """What it takes to copy so many values into memory that is there already."""
    source, target = np.ones(size, np.float32), np.ones(size, np.float32)
    times = []
    for _ in range(9):
        started = time.perf_counter()
        np.copyto(target, source)
        times.append(time.perf_counter() - started)
    return quartiles(times)[1]


def groups_of(name: str, workers: int, python: str | None, stack: Any) -> dict[str, Group]:
    """Starts the contenders of a case."""
    size = SIZES[name]
    groups = {}
    if python:
        group = stack.enter_context(tensorflow_group(python, workers, size))
        groups["TensorFlow, parameter server"] = group
    for engine in ("local", "ray", "ray calls") if HAS_RAY else ("local",):
        if engine != "ray calls" or workers == 1:
            group = stack.enter_context(stepcache_group(workers, size, engine))
            groups[f"stepcache, {engine}"] = group
    if HAS_RAY and workers == 1:
        groups["Ray, an actor"] = stack.enter_context(actor_group(workers, size))
    if size and workers == 1:
        alone = contextlib.contextmanager(working)(workers, "alone:", size)
        groups["JAX, no server"] = stack.enter_context(alone)
    return groups


def measured(
    case: tuple[str, int, bool], python: str | None, rounds: int, seconds: float
) -> list[Row]:
    name, workers, has_large_pages = case
    with contextlib.ExitStack() as stack:
        if has_large_pages:
            os.environ["GLIBC_TUNABLES"] = "glibc.malloc.hugetlb=1"
        try:
            groups = groups_of(name, workers, python, stack)
        finally:
            os.environ.pop("GLIBC_TUNABLES", None)
        counts = {}
        for label, group in groups.items():
            group.run(2)
            counts[label] = max(2, int(seconds / group.run(3)))
        times: dict[str, list[float]] = {label: [] for label in groups}
        shuffler = random.Random(0)
        for _ in range(rounds):
            for label in shuffler.sample(list(groups), len(groups)):
                times[label].append(groups[label].run(counts[label]))
    title = f"{name}, {workers} worker{'s' if workers > 1 else ''}"
    title += ", large pages" if has_large_pages else ""
    print(f"{title}: done", flush=True)
    return compared(title, times)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--tensorflow", help="a Python that has TensorFlow")
    parser.add_argument("--only", default="", help="only the cases with this word")
    parser.add_argument("--worker", nargs=2, help=argparse.SUPPRESS)
    parser.add_argument("--serve-calls", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.serve_calls:
        return serve_calls(options.serve_calls)
    if options.worker:
        engine, _, name = options.worker[0].partition(":")
        if engine == "alone":
            return alone_worker(int(options.worker[1]))
        if engine == "actor":
            return actor_worker(name, int(options.worker[1]))
        return stepcache_worker(options.worker[0], int(options.worker[1]))
    settings = {"rounds": 2, "sample_seconds": 0.1} if options.quick else SETTINGS
    sizes, workers = (["32 rows of 1 GB"], [1]) if options.quick else (list(SIZES), WORKERS)
    sizes = [name for name in sizes if options.only in name]
    cases = [(name, count, False) for name in sizes for count in workers]
    cases += [(name, count, True) for name in sizes for count in workers if SIZES[name] >= 25 << 20]
    with ray_cluster() if HAS_RAY else contextlib.nullcontext():
        rows = [
            row for case in cases for row in measured(case, options.tensorflow, *settings.values())
        ]
    show("one iteration of one worker: read, compute, push", rows)
    copied = {name: copy_seconds(SIZES[name]) for name in sizes if SIZES[name]}
    figures = {"seconds of a memory copy": copied}
    print(figures)
    if not options.quick and not options.only:
        print(f"written to {write('served', rows, figures, workers=list(WORKERS), **SETTINGS)}")


if __name__ == "__main__":
    main()
