"""Four workers train a recommender whose table of a million items no worker holds.

A server holds the table and the dense layers. A step looks up the rows of its batch, and pushes
their gradients; adagrad and adam run in the server. Copies of rows on a worker's device may serve
for 0, 4 or 16 more steps, and a worker adds up the gradients of 1, 2 or 4 steps before it sends
them. The first run has all workers wait for each other. In the run with 4, server and a worker are
killed half-way (kill -9) and started again: what was sent counts exactly once.

    python examples/async_embeddings.py --plot losses.png
"""

import argparse
import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

os.environ["JAX_PLATFORMS"] = "cpu"  # Each worker could have a GPU of its own.

import jax
import jax.numpy as jnp
import numpy as np
import optax

import stepcache as sc

ITEMS, WIDTH, FEATURES, BATCH, WORKERS = 1_000_000, 16, 32, 1024, 4
# For how many steps copies serve, and of how many the gradients are added up.
MODES = {
    "synchronous": (0, 1),
    "staleness 0": (0, 1),
    "staleness 4": (4, 2),
    "staleness 16": (16, 4),
}


class Clicks:
    """Users who meet items, and click or not: drawn by a generator, the same for all workers.

    The r-th item is met with a probability in proportion to (r + 10) ** -1.2. A user is a vector of
    features, an item a vector of tastes, and a click is as likely as the logistic of 3 times how
    well they fit.
    """

    def __init__(self):
        random = np.random.default_rng(0)
        self.tastes = random.standard_normal((ITEMS, WIDTH), np.float32) / WIDTH**0.5
        self.projection = random.standard_normal((FEATURES, WIDTH), np.float32) / FEATURES**0.5
        self.sums = np.cumsum((np.arange(ITEMS) + 10.0) ** -1.2)

    def batch(self, *seed: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Features of users (BATCH, FEATURES), numbers of items (BATCH,), and clicks (BATCH,)."""
        random = np.random.default_rng(seed)
        users = random.standard_normal((BATCH, FEATURES), np.float32)
        items = np.searchsorted(self.sums, random.uniform(0, self.sums[-1], BATCH))
        fits = 3 * ((users @ self.projection) * self.tastes[items]).sum(axis=1)
        return users, items, random.uniform(size=BATCH) < 1 / (1 + np.exp(-fits))


def loss_of(params: Any, rows: jax.Array, items: Any, users: Any, clicks: Any) -> jax.Array:
    wanted = jnp.tanh(users @ params["in"]) @ params["out"]
    logits = (wanted * items.spread(rows)).sum(axis=1)
    return optax.sigmoid_binary_cross_entropy(logits, clicks).sum()


@sc.step
def gradients(params, items, users, clicks):
    differentiated = jax.value_and_grad(loss_of, argnums=(0, 1))
    loss, (for_params, for_rows) = differentiated(params, items.values, items, users, clicks)
    return loss / BATCH, jax.tree.map(lambda leaf: leaf / BATCH, for_params), for_rows


def served(
    server: Any, staleness: int = 0, every: int = 1
) -> tuple[sc.Variables, Any, sc.Variables]:
    """The dense layers, the table, and the number of pushes of each worker."""
    random = np.random.default_rng(1)
    shapes = {"in": (FEATURES, 64), "out": (64, WIDTH)}
    read = sc.Read(cache="device", max_staleness=staleness)
    params = server.variables(
        "params",
        {n: random.standard_normal(s, np.float32) / s[0] ** 0.5 for n, s in shapes.items()},
        read=read,
        write=sc.Write(mode="apply", optimizer=optax.adam(1e-2), every=every),
    )
    how = sc.RowOptimizer("adagrad", learning_rate=0.2)
    policy = {"read": read, "every": every}
    items = server.table("items", ITEMS, (WIDTH,), stddev=0.1, optimizer=how, **policy)
    pushes = server.variables("pushes", np.zeros(WORKERS), write=sc.Write(mode="add"))
    return params, items, pushes


def work(arguments: argparse.Namespace) -> None:
    """What one worker does. It writes a line of JSON for each step."""
    moved: list[int] = []
    sc.recorder.subscribe(
        lambda event: moved.append(
            dict(getattr(event, "link_bytes", ())).get("server ↔ process", 0)
        )
    )
    clicks, rank = Clicks(), arguments.rank
    log = Path(arguments.directory, f"{rank}.jsonl")
    with sc.connect(f"local:{arguments.directory}") as server, log.open("a") as lines:
        params, items, pushes = served(server, *MODES[arguments.mode])
        while (done := int(pushes.value[rank])) < arguments.steps:
            while arguments.mode == "synchronous" and pushes.value.min() < done:
                time.sleep(0.001)
            moved.clear()
            users, ids, clicked = clicks.batch(1, rank, done)
            rows = items.lookup(ids)
            loss, for_params, for_rows = gradients(params, rows, users, clicked)
            items.push(rows, for_rows)
            params.push(for_params)
            pushes.push(np.eye(WORKERS)[rank])
            line = {"step": done, "loss": float(loss), "bytes": sum(moved), "time": time.time()}
            print(json.dumps(line), file=lines, flush=True)


def train(mode: str, steps: int, directory: str) -> list[dict[str, Any]]:
    """Trains in one mode. Returns the lines of all workers, in the order of time."""
    serve = [sys.executable, "-m", "stepcache", "serve", "--variables", directory]
    serve += ["--snapshot-every", "2s"]
    script = [sys.executable, __file__, "--directory", directory, "--mode", mode]

    with contextlib.ExitStack() as stack:

        def start(command: list[str]) -> subprocess.Popen:
            process = stack.enter_context(subprocess.Popen(command))
            stack.callback(process.kill)  # Where it has not ended by then.
            return process

        def worker(rank: int) -> subprocess.Popen:
            return start([*script, "--steps", str(steps), "--rank", str(rank)])

        server, workers = start(serve), [worker(rank) for rank in range(WORKERS)]
        connection = stack.enter_context(sc.connect(f"local:{directory}"))
        pushes = served(connection)[2]
        if mode == "staleness 4":
            while pushes.value.sum() < WORKERS * steps / 2:
                time.sleep(0.05)
            for process in (server, workers[0]):
                process.send_signal(signal.SIGKILL)
                process.wait()
            server, workers[0] = start(serve), worker(0)
        assert [each.wait() for each in workers] == [0] * WORKERS
        assert pushes.value.tolist() == [steps] * WORKERS
        server.terminate()
        assert server.wait() == 0
    logs = Path(directory).glob("*.jsonl")
    lines = [json.loads(line) for log in logs for line in log.read_text().splitlines()]
    return sorted(lines, key=lambda line: line["time"])


def plot(runs: dict[str, list[dict[str, Any]]], path: str) -> None:
    from matplotlib import figure

    axes = (drawn := figure.Figure((11, 4), layout="constrained")).subplots(1, 2)
    for mode, lines in runs.items():
        losses = np.convolve([line["loss"] for line in lines], np.ones(40) / 40, "valid")
        moved = np.cumsum([line["bytes"] for line in lines])[39:] / 1e6
        axes[0].plot(np.arange(losses.size) + 39, losses, label=mode)
        axes[1].plot(moved, losses, label=mode)
    axes[0].set(xlabel="steps of all workers", ylabel="loss, mean of 40 steps")
    axes[1].set(xlabel="MB to and from the server")
    axes[1].legend()
    drawn.savefig(path)


def main(arguments: argparse.Namespace) -> None:
    runs = {}
    for mode in MODES:
        with tempfile.TemporaryDirectory() as directory:
            runs[mode] = lines = train(mode, arguments.steps, directory)
        losses, moved = [line["loss"] for line in lines], sum(line["bytes"] for line in lines)
        first, last = np.mean(losses[:WORKERS]), np.mean(losses[-len(losses) // 10 :])
        seconds = lines[-1]["time"] - lines[0]["time"]
        speed = f"{len(lines) / seconds:4.0f} steps/s, {moved / len(lines) / 1e3:5.1f} kB a step"
        print(f"{mode:12}  loss {first:.3f} → {last:.3f}, {speed}", flush=True)
        assert last < 0.57, "it has not learned"
    if arguments.plot:
        plot(runs, arguments.plot)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=100, help="of each worker")
    parser.add_argument("--plot", help="where to draw the losses, as a PNG (needs matplotlib)")
    parser.add_argument("--mode", default="synchronous", help=argparse.SUPPRESS)
    parser.add_argument("--directory", help=argparse.SUPPRESS)
    parser.add_argument("--rank", type=int, help=argparse.SUPPRESS)
    given = parser.parse_args()
    main(given) if given.rank is None else work(given)
