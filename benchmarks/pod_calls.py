"""What a call costs in a pod of two processes with four CPU devices each, beside plain JAX.

The step adds one to every leaf of its state and of its batch, so that no device waits for another
process. Cases, each at 1 and 100 leaves:

- a batch of numpy arrays: `jax.jit` over what `jax.make_array_from_process_local_data` makes of
  them, and a step that is handed the numpy arrays, beside a state of one leaf or `Variables`;
- a state and a batch that are spread over all devices already: `jax.jit` with the state donated,
  and a step over the state as a plain tree, and as `Variables`.

    python -m benchmarks.pod_calls [--quick]
"""

from __future__ import annotations

import argparse
import json
import os
import socket
import subprocess
import sys
from collections.abc import Callable

from benchmarks.harness import Row, interleaved, show, write

PROCESSES, DEVICES = 2, 4
SETTINGS = {"rounds": 41, "batch_seconds": 0.1}
LEAVES = (1, 100)


def add_one(state, batch):
    """The step: no collective, and next to no work."""
    return [x + 1 for x in state], [x + 1 for x in batch]


def host_batches(jax, sc, mesh, count: int, settings) -> list[Row]:
    """Numpy arrays as a batch, and a state of one leaf."""
    import numpy as np
    from jax.sharding import NamedSharding, PartitionSpec

    split = NamedSharding(mesh, PartitionSpec("data"))
    batch = [np.full((DEVICES * 2, 4), number, np.float32) for number in range(count)]
    calls = contenders(
        jax, sc, mesh, 1, batch, lambda: jax.make_array_from_process_local_data(split, batch)
    )
    calls = {"jax.jit of global arrays": calls.pop("jax.jit"), **calls}
    return interleaved(f"host batch, {leaves(count)}", calls, **settings)


def global_arrays(jax, sc, mesh, count: int, settings) -> list[Row]:
    """A state and a batch of one leaf that are spread over the mesh already."""
    batch = global_state(jax, mesh, 1)
    calls = contenders(jax, sc, mesh, count, batch, lambda: batch)
    return interleaved(f"global arrays, {leaves(count)}", calls, **settings)


def contenders(jax, sc, mesh, count: int, batch: list, whole: Callable) -> dict[str, Callable]:
    """Calls with a state of so many leaves. `whole` gives JAX the batch as global arrays."""
    by_jit = jax.jit(add_one, donate_argnums=0)
    by_step, resident = (sc.step(add_one, carry="state", batch="batch") for _ in range(2))
    states = {name: global_state(jax, mesh, count) for name in ("jit", "step")}
    variables = sc.Variables(global_state(jax, mesh, count))

    def call_jit():
        states["jit"], out = by_jit(states["jit"], whole())
        return out

    def call_step():
        states["step"], out = by_step(states["step"], batch)
        return out

    return {
        "jax.jit": call_jit,
        "stepcache": call_step,
        "stepcache, Variables": lambda: resident(variables, batch)[1],
    }


def global_state(jax, mesh, count: int) -> list:
    """Arrays that are split over all devices."""
    import numpy as np
    from jax.sharding import NamedSharding, PartitionSpec

    split = NamedSharding(mesh, PartitionSpec("data"))
    values = [np.zeros((DEVICES, 4), np.float32) for _ in range(count)]
    return jax.make_array_from_process_local_data(split, values)


def leaves(count: int) -> str:
    return f"{count} leaves" if count > 1 else "1 leaf"


def work(rank: int, address: str, quick: bool) -> None:
    """Times all cases, and prints them as JSON."""
    import jax
    from jax.sharding import AxisType

    import stepcache as sc

    jax.config.update("jax_num_cpu_devices", DEVICES)
    jax.distributed.initialize(address, PROCESSES, rank)
    mesh = jax.make_mesh((PROCESSES * DEVICES,), ("data",), axis_types=(AxisType.Auto,))
    settings = SETTINGS | ({"rounds": 3, "batch_seconds": 0.005} if quick else {})
    rows = []
    with sc.Session(mesh, hang_after=None):
        for case in (host_batches, global_arrays):
            for count in LEAVES:
                rows += case(jax, sc, mesh, count, settings)
    print(json.dumps([vars(row) for row in rows]), flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="show that it runs; no real figures")
    parser.add_argument("--rank", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--address", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.rank is not None:
        return work(options.rank, options.address, options.quick)
    with socket.socket() as free:
        free.bind(("localhost", 0))
        address = f"localhost:{free.getsockname()[1]}"
    environment = os.environ | {"STEPCACHE_DIR": "off", "JAX_PLATFORMS": "cpu", "NPROC": "4"}
    command = [sys.executable, "-m", "benchmarks.pod_calls", *sys.argv[1:], "--address", address]
    processes = [
        subprocess.Popen(
            [*command, "--rank", str(rank)],
            env=environment,
            stdout=subprocess.PIPE,
            stderr=None if rank == 0 else subprocess.DEVNULL,
            text=True,
        )
        for rank in range(PROCESSES)
    ]
    outputs = [process.communicate(timeout=1200)[0] for process in processes]
    assert not any(process.returncode for process in processes), outputs
    lines = (line for line in outputs[0].splitlines() if line.startswith("[{"))
    rows = [Row(**row) for row in json.loads(next(lines))]
    show("a hit in a pod, on rank 0; ratios are to the first of a case, round by round", rows)
    if not options.quick:
        settings = SETTINGS | {"processes": PROCESSES, "devices_each": DEVICES}
        print(f"written to {write('pod_calls', rows, {}, **settings)}")


if __name__ == "__main__":
    main()
