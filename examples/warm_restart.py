"""The same training script twice, in fresh processes: where do the seconds of a start go?

Prints what each start took by stage, side by side. Both trace and lower the step. The second one
compiles nothing: it lowers the same module, whose executable was loaded while the parameters were
built.

    python examples/warm_restart.py
"""

import json
import os
import subprocess
import sys
import tempfile
import time

import jax
import numpy as np
import optax
from flax import nnx
from rich import print
from rich.table import Table

import stepcache as sc

WIDTH, LAYERS = 128, 12


class Model(nnx.Module):
    def __init__(self, rngs: nnx.Rngs):
        self.layers = nnx.List([nnx.Linear(WIDTH, WIDTH, rngs=rngs) for _ in range(LAYERS)])
        self.norms = nnx.List([nnx.LayerNorm(WIDTH, rngs=rngs) for _ in range(LAYERS)])

    def __call__(self, x):
        for layer, norm in zip(self.layers, self.norms, strict=True):
            x = x + nnx.gelu(layer(norm(x)))
        return x


def train() -> None:
    """One run: three steps, then what the start has cost as one line of JSON."""
    optimizer = optax.adamw(1e-3)
    graph = nnx.graphdef(nnx.eval_shape(lambda: Model(nnx.Rngs(0))))

    @sc.step(carry="state")
    def train_step(state, batch):
        def loss_of(params):
            return ((nnx.merge(graph, params)(batch) - 1) ** 2).mean()

        loss, gradients = jax.value_and_grad(loss_of)(state["params"])
        updates, moments = optimizer.update(gradients, state["moments"], state["params"])
        return {"params": optax.apply_updates(state["params"], updates), "moments": moments}, loss

    params = nnx.state(Model(nnx.Rngs(0)))
    state, batch = {"params": params, "moments": optimizer.init(params)}, np.ones((8, WIDTH))
    started = time.perf_counter()
    state, loss = train_step(state, batch)
    seconds = {"the first call, in all": time.perf_counter() - started}
    for _ in range(2):
        state, loss = train_step(state, batch)
    stats = train_step.stats()
    for stage in ("trace", "lower", "load", "compile"):
        seconds[stage] = getattr(stats, f"{stage}_seconds")
    counts = [stats.traces, stats.lowers, stats.compiles, stats.loads]
    record = {"seconds": seconds, "counts": counts, "loss": float(loss)}
    json.dump(record | {"miss": str(train_step.last_miss)}, sys.stdout)


def main() -> None:
    runs = []
    with tempfile.TemporaryDirectory() as directory:
        for _ in range(2):
            environment = dict(os.environ, STEPCACHE_DIR=directory)
            command = [sys.executable, __file__, "train"]
            done = subprocess.run(command, env=environment, check=True, capture_output=True)
            runs.append(json.loads(done.stdout))
    first, second = runs
    table = Table("seconds", "first run", "second run", title="from the first call to its result")
    for stage, seconds in first["seconds"].items():
        table.add_row(stage, f"{seconds:.3f}", f"{second['seconds'][stage]:.3f}")
    print(table, second["miss"])
    assert first["counts"] == [1, 1, 1, 0] and second["counts"] == [1, 1, 0, 1]
    assert first["loss"] == second["loss"]


if __name__ == "__main__":
    train() if "train" in sys.argv else main()
