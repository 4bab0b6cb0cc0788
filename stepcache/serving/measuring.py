"""Measures how long served variables take to read and to push, on a server of its own.

What a running server holds must not be written, and what it is asked twice for it has at hand.
"""

from __future__ import annotations

import contextlib
import os
import select
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jax
import numpy as np

from stepcache.errors import VariablesError
from stepcache.serving.connecting import connect
from stepcache.variables.link_times import LinkTimes, keep, kept_times, machine_of, today
from stepcache.variables.masters import Reader
from stepcache.variables.policy import Read, Write
from stepcache.variables.transfer import Meter

SIZES = (1 << 12, 1 << 16, 1 << 20, 1 << 22, 1 << 24)
_RUNS, _PAUSE_SECONDS, _START_SECONDS = 12, 0.003, 60.0
_KEPT = {
    "check": Read(cache="device"),
    "ahead": Read(cache="device", prefetch=True),
}
_OPERATIONS = ("fetch", "push", *_KEPT)


def served_times(address: str) -> LinkTimes:
    """Returns the times of variables that a server holds; measures them unless they are known.

    They are kept as those of links are, for each engine. Operations are `fetch`, a read of a new
    version to the devices; `push`, of an update; `check`, a read that finds its copy current;
    and `ahead`, a read of what was fetched ahead, which starts the next one.

    Args:
        address: of a server; another one of its engine is started, and ended.

    Raises:
        VariablesError: it does not start.
    """
    engine = address.partition(":")[0]
    machine = f"{machine_of(jax.devices()[:1])}, a server by {engine}"
    kept = kept_times(machine, _OPERATIONS)
    if not kept:
        with own_server(address) as own:
            kept.append(_measured(machine, own))
        keep(kept[0])
    return kept[0]


@contextlib.contextmanager
def own_server(like: str) -> Iterator[str]:
    """Context manager of a server of the same engine as another one; gives its address.

    The server ends with this process, however that ends. `VariablesError` if it does not start.
    """
    engine = like.partition(":")[0]
    with tempfile.TemporaryDirectory(prefix="stepcache-") as directory:
        command = [sys.executable, "-m", "stepcache", "serve", "--variables", directory]
        command += ["--until-input-ends"]
        place, environment = directory, os.environ | {"JAX_PLATFORMS": "cpu"}
        if engine == "ray":
            import ray

            place = Path(directory).name
            command += ["--ray", place]
            environment["RAY_ADDRESS"] = ray.get_runtime_context().gcs_address
        process = subprocess.Popen(
            command,
            env=environment,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
        )
        try:
            assert process.stdout is not None
            ready = select.select([process.stdout], [], [], _START_SECONDS)[0]
            if not ready or not process.stdout.readline():
                raise VariablesError("a server to measure does not start", where=" ".join(command))
            yield f"{engine}:{place}"
        finally:
            process.terminate()
            try:
                process.wait(_START_SECONDS)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


def _measured(machine: str, address: str) -> LinkTimes:
    seconds: dict[str, float] = {}
    with connect(address) as server:
        for size in SIZES:
            seconds |= {f"{name} {size}": took for name, took in _timed(server, size).items()}
    return LinkTimes(machine, today(), seconds, {}, 0.0)


def _timed(server: Any, size: int) -> dict[str, float]:
    """The seconds of reads and pushes of a value of some size."""
    tree, name = np.ones(size // 4, np.float32), str(size)
    times: dict[str, list[float]] = {}
    update = jax.block_until_ready(jax.numpy.zeros(size // 4, np.float32))
    write = Write(mode="add")
    value = server.variables(name, tree, read=Read(), write=write)

    def took(key: str, run: Callable[[], Any]) -> None:
        started = time.perf_counter()
        run()
        times.setdefault(key, []).append(time.perf_counter() - started)

    for _ in range(_RUNS):
        took("push", lambda: value.push(update))
        took("fetch", lambda: _read(value))
    for key, read in _KEPT.items():
        kept = server.variables(name, tree, read=read, write=write)
        for _ in range(_RUNS):
            value.push(update)
            _read(kept)  # The new version; then what takes none.
            time.sleep(_PAUSE_SECONDS * read.prefetch)
            took(key, lambda kept=kept: _read(kept))
    return {key: statistics.median(some[_RUNS // 3 :]) for key, some in times.items()}


def _read(variables: Any) -> None:
    """Reads as a step does, which waits for the value."""
    master, reader = variables._master, [(variables._master, Reader(None))]
    master.source.read_together(reader, values=True)
    jax.block_until_ready(master.take(reader[0][1], Meter()).buffers)
    master.source.read_ahead(reader)
