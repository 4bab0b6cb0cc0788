"""Four workers train one model, each at its own pace, on variables that a server holds.

Half-way the server and a worker are killed (kill -9) and started again. Each push of a worker that
lives counts exactly once: another of the server's variables counts them.

    python examples/async_workers.py
"""

import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from functools import partial
from typing import Any

os.environ["JAX_PLATFORMS"] = "cpu"  # Each worker could have a GPU of its own.

import jax
import jax.numpy as jnp
import numpy as np
import optax

import stepcache as sc

WORKERS, PUSHES, FEATURES, HIDDEN, BATCH = 4, 150, 32, 256, 256


def model(params, x):
    return jnp.tanh(x @ params["in"]) @ params["out"]


@sc.step
def gradients(params, x, y):
    return jax.value_and_grad(lambda params: jnp.mean((model(params, x) - y) ** 2))(params)


def data(seed: int) -> tuple[np.ndarray, np.ndarray]:
    """A batch of inputs, and targets: a sine of a fixed projection."""
    random = np.random.default_rng(seed)
    x = random.normal(size=(BATCH, FEATURES)).astype(np.float32)
    direction = np.random.default_rng(0).normal(size=FEATURES) / FEATURES**0.5
    return x, np.sin(2 * x @ direction).astype(np.float32)


def variables(server: Any) -> tuple[sc.Variables, sc.Variables]:
    random = np.random.default_rng(1)
    init = {"in": random.normal(size=(FEATURES, HIDDEN)) / FEATURES**0.5, "out": np.zeros(HIDDEN)}
    params = server.variables(
        "params",
        {name: leaf.astype(np.float32) for name, leaf in init.items()},
        read=sc.Read(cache="device", max_staleness=4),
        write=sc.Write(mode="apply", optimizer=optax.adam(3e-3)),
    )
    return params, server.variables("pushes", np.zeros(WORKERS), write=sc.Write(mode="add"))


def work(directory: str, rank: int) -> None:
    with sc.connect(f"local:{directory}") as server:
        params, pushes = variables(server)
        for number in range(PUSHES):
            loss, update = gradients(params, *data(1000 * rank + number))
            params.push(update)
            pushes.push(np.eye(WORKERS, dtype=np.float32)[rank])
            print(json.dumps({"rank": rank, "push": number, "loss": float(loss)}), flush=True)


def main() -> None:
    with tempfile.TemporaryDirectory() as directory:
        command = [sys.executable, "-m", "stepcache", "serve", "--variables", directory]
        serve = partial(subprocess.Popen, [*command, "--snapshot-every", "1s"])
        scripts = [[sys.executable, __file__, directory, str(rank)] for rank in range(WORKERS)]
        server = serve()
        with sc.connect(f"local:{directory}") as connection:
            params, pushes = variables(connection)
            first, _ = gradients(params, *data(7))
            workers = [subprocess.Popen(script) for script in scripts]
            while pushes.value.sum() < WORKERS * PUSHES / 2:
                time.sleep(0.05)
            for process in (server, workers[0]):
                process.send_signal(signal.SIGKILL)
                process.wait()
            server, workers[0] = serve(), subprocess.Popen(scripts[0])
            for process in workers:
                assert process.wait() == 0
            loss = np.mean((model(params.value, data(7)[0]) - data(7)[1]) ** 2)
            print(f"loss {float(first):.3f} → {float(loss):.3f}; pushes by worker: {pushes.value}")
            assert loss < first / 4
            assert all(pushes.value[1:] == PUSHES) and pushes.value[0] >= PUSHES
        server.terminate()
        server.wait()


if __name__ == "__main__":
    work(sys.argv[1], int(sys.argv[2])) if len(sys.argv) > 1 else main()
