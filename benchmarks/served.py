"""Served variables beside TensorFlow's parameter server: each worker reads, computes and pushes.

One iteration of a worker reads a variable, finds its maximum, and adds a value of the same size
that depends on it. Cases: a scalar, 16 MB and 100 MB of float32, and 32 random rows of a table of
1 GB (4,194,304 rows of 64), with 1, 2 and 4 workers. A sample is the time of one iteration of one
worker, while all of them run. Contenders are timed in turn.

TensorFlow runs as `ParameterServerStrategy`: a coordinator schedules the function on its workers.
It may be installed elsewhere: `--tensorflow PYTHON` names an interpreter that has it. "Ray, an
actor" is what Ray itself takes: an actor that holds an array, returns it, and adds to it.

    python -m benchmarks.served [--quick] [--tensorflow PYTHON] [--only WORD]
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.util
import json
import os
import random
import secrets
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.harness import Row, compared, quartiles, show, write

ROWS, WIDTH, BATCH = 1 << 22, 64, 32
SIZES = {"scalar": 1, "16 MB": 4 << 20, "100 MB": 25 << 20, "32 rows of 1 GB": 0}
WORKERS = (1, 2, 4)
STORE_BYTES = 2 << 30
HAS_RAY = importlib.util.find_spec("ray") is not None
SETTINGS = {"rounds": 9, "sample_seconds": 1.0}


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
    def _answer(process: subprocess.Popen) -> float:
        assert process.stdout is not None
        for line in process.stdout:
            if line.startswith("{"):
                return json.loads(line)["seconds"]
        raise SystemExit(f"{process.args} has ended")

    def run(self, iterations: int) -> float:
        """Seconds of one iteration of one worker, while all run."""
        for process in self._processes:
            assert process.stdin is not None
            process.stdin.write(f"{iterations}\n")
            process.stdin.flush()
        return float(np.mean([self._answer(each) for each in self._processes])) / iterations

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
        command = [sys.executable, "-m", "stepcache.cli", "serve", "--variables", directory]
        is_local = engine == "local"
        address = f"local:{directory}" if is_local else f"ray:{Path(directory).name}"
        if not is_local:
            command += ["--ray", Path(directory).name]
        with served_by(command):
            yield from working(workers, address, size)


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


# ---- Ray ---------------------------------------------------------------------------------------

_RAY = f"""
import sys, ray
ray.init(object_store_memory={STORE_BYTES}, include_dashboard=False, log_to_driver=False)
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


# ---- TensorFlow --------------------------------------------------------------------------------

_TENSORFLOW = (
    f"""
ROWS, WIDTH, BATCH = {ROWS}, {WIDTH}, {BATCH}
"""
    + """
import json, os, sys, time
import tensorflow as tf
role, index, size, workers = sys.argv[1], *map(int, sys.argv[2:5])
spec = tf.train.ClusterSpec(json.loads(sys.argv[5]))
if role != "chief":
    tf.distribute.Server(spec, job_name=role, task_index=index, protocol="grpc").join()
resolver = tf.distribute.cluster_resolver.SimpleClusterResolver(
    spec, rpc_layer="grpc", task_type="chief", task_id=0
)
strategy = tf.distribute.ParameterServerStrategy(resolver)
coordinator = tf.distribute.coordinator.ClusterCoordinator(strategy)
with strategy.scope():
    variable = tf.Variable(tf.zeros([size] if size else [ROWS, WIDTH]))

@tf.function
def step():
    if size:
        largest = tf.reduce_max(variable.read_value())
        variable.assign_add(tf.fill([size], largest * 0 + 1))
    else:
        ids = tf.random.uniform([BATCH], 0, ROWS, tf.int64)
        rows = tf.nn.embedding_lookup(variable, ids)
        update = tf.fill(tf.shape(rows), tf.reduce_max(rows) * 0 + 1)
        variable.scatter_sub(tf.IndexedSlices(0.1 * update, ids))

def work(iterations):
    for _ in range(iterations * workers):
        coordinator.schedule(step)
    coordinator.join()

work(2)
print(json.dumps({"seconds": 0.0}), flush=True)
for line in sys.stdin:
    started = time.perf_counter()
    work(int(line))
    print(json.dumps({"seconds": time.perf_counter() - started}), flush=True)
"""
)


@contextlib.contextmanager
def tensorflow_group(python: str, workers: int, size: int) -> Iterator[Group]:
    cluster = {
        "chief": [f"127.0.0.1:{free_port()}"],
        "ps": [f"127.0.0.1:{free_port()}"],
        "worker": [f"127.0.0.1:{free_port()}" for _ in range(workers)],
    }
    roles = [("ps", 0), *(("worker", index) for index in range(workers))]
    rest = [str(size), str(workers), json.dumps(cluster)]
    environment = os.environ | {"TF_CPP_MIN_LOG_LEVEL": "3"}
    silent = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL, "env": environment}
    servers = [
        subprocess.Popen([python, "-c", _TENSORFLOW, role, str(index), *rest], **silent)
        for role, index in roles
    ]
    try:
        group = Group([[python, "-c", _TENSORFLOW, "chief", "0", *rest]])
        yield group
        group.end()
    finally:
        for process in servers:
            process.kill()
            process.wait()


def free_port() -> int:
    with socket.socket() as listening:
        listening.bind(("127.0.0.1", 0))
        return listening.getsockname()[1]


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


def measured(name: str, workers: int, python: str | None, rounds: int, seconds: float) -> list[Row]:
    size = SIZES[name]
    with contextlib.ExitStack() as stack:
        groups = {}
        if python:
            group = stack.enter_context(tensorflow_group(python, workers, size))
            groups["TensorFlow, parameter server"] = group
        for engine in ("local", "ray") if HAS_RAY else ("local",):
            group = stack.enter_context(stepcache_group(workers, size, engine))
            groups[f"stepcache, {engine}"] = group
        if HAS_RAY:
            groups["Ray, an actor"] = stack.enter_context(actor_group(workers, size))
        counts = {}
        for label, group in groups.items():
            group.run(2)
            counts[label] = max(2, int(seconds / group.run(3)))
        times: dict[str, list[float]] = {label: [] for label in groups}
        shuffler = random.Random(0)
        for _ in range(rounds):
            for label in shuffler.sample(list(groups), len(groups)):
                times[label].append(groups[label].run(counts[label]))
    case = f"{name}, {workers} worker{'s' if workers > 1 else ''}"
    print(f"{case}: done", flush=True)
    return compared(case, times)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--tensorflow", help="a Python that has TensorFlow")
    parser.add_argument("--only", default="", help="only the cases with this word")
    parser.add_argument("--worker", nargs=2, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.worker:
        engine, _, name = options.worker[0].partition(":")
        if engine == "actor":
            return actor_worker(name, int(options.worker[1]))
        return stepcache_worker(options.worker[0], int(options.worker[1]))
    settings = {"rounds": 2, "sample_seconds": 0.1} if options.quick else SETTINGS
    sizes, workers = (
        (["scalar", "32 rows of 1 GB"], [1]) if options.quick else (list(SIZES), WORKERS)
    )
    sizes = [name for name in sizes if options.only in name]
    with ray_cluster() if HAS_RAY else contextlib.nullcontext():
        rows = [
            row
            for name in sizes
            for count in workers
            for row in measured(name, count, options.tensorflow, *settings.values())
        ]
    show("one iteration of one worker: read, compute, push", rows)
    copied = {name: copy_seconds(SIZES[name]) for name in sizes if SIZES[name]}
    figures = {"seconds of a memory copy": copied}
    print(figures)
    if not options.quick and not options.only:
        print(f"written to {write('served', rows, figures, workers=list(WORKERS), **SETTINGS)}")


if __name__ == "__main__":
    main()
