"""An epoch of ragged batches: what padding to a few sizes costs, and saves.

Each contender trains in a fresh process, with nothing stored: an MLP on batches of 1 to 512 rows,
drawn at random, the same for all. One has every batch filled up to 512 rows by its data loader. The
time is from the first call to the last result, with all that is compiled in between.

    python -m benchmarks.padding [--quick] [--rounds N]
"""

from __future__ import annotations

import argparse
import json
import os
import random
import subprocess
import sys
import time
from typing import Any

from benchmarks.harness import compared, show, write

CONTENDERS = {
    "jax.jit, a program for each size": "jit",
    "jax.jit, all batches of 512 rows": "fixed",
    "stepcache, padded to powers of two": "pad",
}
WIDTH, LARGEST = 256, 512


def work(way: str, batches: int) -> None:
    """Trains, and prints seconds and the number of programs as JSON."""
    import jax
    import jax.numpy as jnp
    import numpy as np

    import stepcache as sc

    def train_step(state: Any, batch: Any, mask: Any) -> tuple[Any, Any]:
        def loss_of(state: Any) -> Any:
            hidden = batch["x"]
            for layer in state[:-1]:
                hidden = jax.nn.relu(hidden @ layer)
            errors = (hidden @ state[-1])[:, 0] - batch["y"]
            return jnp.sum(errors**2 * mask) / jnp.sum(mask)

        loss, slopes = jax.value_and_grad(loss_of)(state)
        return jax.tree.map(lambda leaf, slope: leaf - 1e-3 * slope, state, slopes), loss

    randomly = np.random.default_rng(0)
    sizes = randomly.integers(1, LARGEST + 1, batches)
    rows = randomly.standard_normal((LARGEST, WIDTH), np.float32)
    shapes = [(WIDTH, WIDTH)] * 4 + [(WIDTH, 1)]
    state: Any = [randomly.standard_normal(shape, np.float32) / 16 for shape in shapes]
    if way == "pad":
        step: Any = sc.step(train_step, carry="state", pad=sc.Pad("batch", mask="mask"))
    else:
        step = jax.jit(train_step, donate_argnums=0)
    jax.devices()
    started = time.perf_counter()
    for size in sizes:
        count = LARGEST if way == "fixed" else size
        batch = {"x": rows[:count], "y": rows[:count, 0]}
        if way == "pad":
            state, loss = step(state, batch)
        else:
            state, loss = step(state, batch, np.arange(count) < size)
    jax.block_until_ready((state, loss))
    seconds = time.perf_counter() - started
    programs = step.stats().compiles if way == "pad" else step._cache_size()
    padding = step.stats().padding if way == "pad" else 0.0
    print(json.dumps({"seconds": seconds, "programs": programs, "padding": padding}))


def run(way: str, batches: int) -> dict[str, Any]:
    """One fresh process."""
    command = [sys.executable, "-m", "benchmarks.padding", "--work", way, "--batches", str(batches)]
    environment = dict(os.environ, STEPCACHE_DIR="off")
    done = subprocess.run(command, env=environment, check=True, stdout=subprocess.PIPE, text=True)
    return json.loads(done.stdout.splitlines()[-1])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="few batches, one round")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--work", help=argparse.SUPPRESS)
    parser.add_argument("--batches", type=int, default=200)
    given = parser.parse_args()
    if given.work:
        return work(given.work, given.batches)
    rounds, batches = (1, 20) if given.quick else (given.rounds, given.batches)
    records: dict[str, list[dict[str, Any]]] = {name: [] for name in CONTENDERS}
    shuffler = random.Random(0)
    for _ in range(rounds):
        order = list(CONTENDERS)
        shuffler.shuffle(order)
        for name in order:
            records[name].append(run(CONTENDERS[name], batches))
    case = f"{batches} batches of 1 to {LARGEST} rows"
    rows = compared(
        case, {name: [each["seconds"] for each in records[name]] for name in CONTENDERS}
    )
    show("an epoch of ragged batches", rows, "ms")
    figures = {
        name: {k: each[-1][k] for k in ("programs", "padding")} for name, each in records.items()
    }
    print(json.dumps(figures, indent=1))
    if not given.quick:
        print(f"written to {write('padding', rows, figures, rounds=rounds)}")


if __name__ == "__main__":
    main()
