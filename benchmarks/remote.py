"""Steps on tasks: what starting one costs, beside a call here and TensorFlow 1's session.

- *null*: a step over four numbers, its result waited for each time.
- *in flight*: the same, 16 of them under way.
- *training step*: an MLP of some 20 ms a step, one after the other.
- *repeat*: 100 null steps in one call, per step.

Where Ray is installed, a task of its engine is measured, too.

TensorFlow runs in a process of its own, with a session callable on one or two tasks of a local
cluster: a variable on each is added to. It may be installed elsewhere: `--tensorflow PYTHON`.

    python -m benchmarks.remote [--quick] [--tensorflow PYTHON]
"""

from __future__ import annotations

import argparse
import functools
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from typing import Any

os.environ["JAX_PLATFORMS"] = "cpu"

import jax
import jax.numpy as jnp
import numpy as np

import stepcache as sc
from benchmarks import light_tasks
from benchmarks.harness import Row, compared, show, write
from benchmarks.served import HAS_RAY, ray_cluster
from benchmarks.served_processes import served_by
from stepcache.remote.messages import HEADER_BYTES

IN_FLIGHT, REPEATS = 16, 100
RAY_NAME = "remote-benchmark"
_TF = "TF 1 session callable"

TENSORFLOW = """
import json, sys, time
import tensorflow.compat.v1 as tf
tf.disable_eager_execution()
if sys.argv[2:]:
    task, *addresses = sys.argv[2:]
    server = tf.train.Server({"worker": addresses}, job_name="worker", task_index=int(task))
    print("serving", flush=True)
    server.join()
import contextlib, socket, subprocess
with contextlib.ExitStack() as held:
    free = [held.enter_context(socket.socket()) for _ in range(int(sys.argv[1]))]
    for each in free:
        each.bind(("localhost", 0))
    addresses = ["localhost:%d" % each.getsockname()[1] for each in free]
quiet = {"stdout": subprocess.PIPE, "stderr": subprocess.DEVNULL}
servers = [
    subprocess.Popen([sys.executable, "-c", TEXT, sys.argv[1], str(task), *addresses], **quiet)
    for task in range(len(addresses))
]
for each in servers:
    each.stdout.readline()
with tf.Session("grpc://" + addresses[0]) as session:
    updates = []
    for task in range(len(addresses)):
        with tf.device("/job:worker/task:%d" % task):
            state = tf.get_variable("state%d" % task, initializer=tf.zeros(4))
            updates.append(tf.assign_add(state, tf.ones(4)).op)
    run = session.make_callable(tf.group(*updates))
    session.run(tf.global_variables_initializer())
    for _ in range(200):
        run()
    print("ready", flush=True)
    for line in sys.stdin:
        count = int(line)
        started = time.perf_counter()
        for _ in range(count):
            run()
        print((time.perf_counter() - started) / count, flush=True)
for each in servers:
    each.kill()
"""


@sc.step(carry="state")
def null(state: Any) -> tuple[Any, Any]:
    return state + 1, state.sum()


@sc.step(carry="params")
def train(params: Any, x: Any) -> tuple[Any, Any]:
    def loss_of(params: Any) -> Any:
        hidden = x
        for layer in params:
            hidden = jnp.tanh(hidden @ layer)
        return jnp.mean(hidden**2)

    loss, slopes = jax.value_and_grad(loss_of)(params)
    return jax.tree.map(lambda p, g: p - 1e-3 * g, params, slopes), loss


class Contender:
    """A session, with variables of its own."""

    def __init__(self, session: sc.Session):
        self.session = session
        self.step, self.train = null, train
        with session:
            self.state = sc.Variables(np.zeros(4, np.float32))
            layers = [np.eye(512, dtype=np.float32)] * 4
            self.params = sc.Variables(layers)
            self.x = sc.step(lambda: jnp.ones((512, 512)))()
        self.many = null.repeat(REPEATS)

    def null(self, count: int) -> None:
        for _ in range(count):
            _, total = null(self.state)
            total.block_until_ready()

    def in_flight(self, count: int) -> None:
        for _ in range(count // IN_FLIGHT):
            for _ in range(IN_FLIGHT):
                _, total = null(self.state)
            total.block_until_ready()

    def training(self, count: int) -> None:
        for _ in range(count):
            _, loss = train(self.params, self.x)
        loss.block_until_ready()

    def repeat(self, count: int) -> None:
        for _ in range(count // REPEATS):
            _, totals = self.many(self.state)
            totals.block_until_ready()


CASES = {
    "a null step": ("null", 200),
    "null steps, 16 in flight": ("in_flight", 320),
    "a training step": ("training", 10),
    "repeat(100), per null step": ("repeat", 400),
}
WITH_TENSORFLOW = ("null", "in_flight")


class TensorFlow:
    """TensorFlow 1's session callable, in another process."""

    def __init__(self, python: str, tasks: int):
        self._process = subprocess.Popen(
            [python, "-c", f"TEXT = {TENSORFLOW!r}\n{TENSORFLOW}", str(tasks)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
        )
        assert self._process.stdout is not None and self._process.stdout.readline() == "ready\n"

    def seconds(self, count: int) -> float:
        assert self._process.stdin is not None and self._process.stdout is not None
        print(count, file=self._process.stdin, flush=True)
        return float(self._process.stdout.readline())

    def close(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait()


def timed(contender: Contender, name: str, count: int) -> float:
    with contender.session:
        started = time.perf_counter()
        getattr(contender, name)(count)
        return (time.perf_counter() - started) / count


def measured(rounds: int, tensorflow: str | None) -> list[Row]:
    here = Contender(sc.Session())
    one, two = (Contender(sc.Session(target=f"local:{n}x1")) for n in (1, 2))
    others = [TensorFlow(tensorflow, tasks) for tasks in (1, 2)] if tensorflow else []
    rows = []
    for case, (name, count) in CASES.items():
        ways = ways_of({"in this process": here, "on one task": one}, name, count)
        on_two = ways_of({"on two tasks": two}, name, count)
        if others and name in WITH_TENSORFLOW:
            by_tensorflow = [{_TF: functools.partial(each.seconds, count)} for each in others]
            rows += in_turn(case, by_tensorflow[0] | ways, rounds)
            rows += in_turn(f"{case}, two tasks", by_tensorflow[1] | on_two, rounds)
        else:
            rows += in_turn(case, ways | on_two, rounds)
    for each in (*others, one.session, two.session):
        each.close()
    return rows


def measured_on_ray(rounds: int, tensorflow: str | None) -> list[Row]:
    """By themselves, for Ray's processes take a part of the machine."""
    command = ["-m", "stepcache", "serve", "--tasks", "1x1", "--ray", RAY_NAME]
    rows = []
    with ray_cluster(), served_by([sys.executable, *command]):
        here, ray = Contender(sc.Session()), Contender(sc.Session(target=f"ray:{RAY_NAME}"))
        other = TensorFlow(tensorflow, 1) if tensorflow else None
        for case, (name, count) in CASES.items():
            ways = ways_of({"in this process": here, "on one task of Ray": ray}, name, count)
            if other is not None and name in WITH_TENSORFLOW:
                ways = {_TF: functools.partial(other.seconds, count), **ways}
            rows += in_turn(f"{case}, beside Ray", ways, rounds)
        if other is not None:
            other.close()
        ray.session.close()
    return rows


def ways_of(
    contenders: dict[str, Contender], name: str, count: int
) -> dict[str, Callable[[], float]]:
    return {each: functools.partial(timed, held, name, count) for each, held in contenders.items()}


def in_turn(case: str, ways: dict[str, Callable[[], float]], rounds: int) -> list[Row]:
    for way in ways.values():
        way()
    seconds: dict[str, list[float]] = {each: [] for each in ways}
    for _ in range(rounds):
        for each, way in ways.items():
            seconds[each].append(way())
    return compared(case, seconds)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="two rounds; writes no results")
    parser.add_argument("--tensorflow", help="a Python that has TensorFlow")
    parser.add_argument("--rounds", type=int, default=15)
    options = parser.parse_args()
    rounds = 2 if options.quick else options.rounds
    rows = measured(rounds, options.tensorflow)
    curve = [light_tasks.measured(tasks) for tasks in (1, 10, 100, 1000)]
    if HAS_RAY:
        rows += measured_on_ray(rounds, options.tensorflow)
    show("steps on tasks", rows)
    print(f"{HEADER_BYTES} bytes start a step")
    for each in curve:
        print(json.dumps({name: round(value, 6) for name, value in each.items()}))
    if not options.quick:
        figures = {"header_bytes": HEADER_BYTES, "tasks": curve}
        print(write("remote", rows, figures, rounds=options.rounds, in_flight=IN_FLIGHT))


if __name__ == "__main__":
    sys.exit(main())
