"""How well `sc.advise` predicts, and how much is lost by doing what it says.

    python -m benchmarks.advice [--quick] [--only WORD]

Each scenario is a step, a value, a number of devices, and how often the value is written; `advise`
is asked once, and then every policy that it ranks is timed, in turn, in loops that wait for each
step. An error is predicted against measured seconds of a step; regret is the time of the policy
that it chooses against the least time of all exact ones with the same placement. What a machine
repeats of its own measurements bounds all this: "repeated" is the share of policies whose first and
last round differ by no more than an error may.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import itertools
import os
import random
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

os.environ["STEPCACHE_DIR"] = tempfile.mkdtemp()  # Links are measured anew.
os.environ.setdefault("NPROC", "32")  # The size of XLA's thread pool: see examples/char_lm.py.

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType
from rich.console import Console
from rich.table import Table

import stepcache as sc
from benchmarks.harness import quartiles, write
from benchmarks.served import HAS_RAY, ray_cluster
from benchmarks.served_processes import served_by
from stepcache.report.advice import Choice

SIZES = ((1 << 16, 1), (1 << 20, 1), (1 << 20, 8), (8 << 20, 1))
"""Bytes of a value, and its leaves."""
WITHIN, ROUNDS, STEPS, BETWEEN = 0.25, 3, 48, 8


@dataclass(frozen=True)
class Case:
    """A policy, the contender, in a scenario: predicted and measured seconds of a step."""

    case: str
    contender: str
    predicted: float
    measured: float
    is_exact: bool
    is_chosen: bool
    rounds: tuple[float, ...]

    @property
    def error(self) -> float:
        return self.predicted / self.measured - 1


@sc.step
def look(value, x):
    return sum(leaf.sum() for leaf in value) + x.sum()


@sc.step
def compute(value, x):
    x = jax.lax.fori_loop(0, 150, lambda _, x: jnp.tanh(x @ x), x)
    return sum(leaf.sum() for leaf in value) + x.sum()


@sc.step(carry="value")
def train(value, x):
    return [leaf * 0.99 for leaf in value], x.sum()


X = np.full((64, 64), 0.01, np.float32)


def tree_of(size: int, leaves: int) -> list[np.ndarray]:
    return [np.ones(size // 4 // leaves, np.float32)] * leaves


def timed(
    scenario: str,
    advice: sc.Advice,
    name: str,
    loop_of: Callable[[Choice], Callable],
    steps: int,
) -> list[Case]:
    """The policies of an advice, each timed in a loop of its own, round by round."""
    choices = [each for each in advice.choices if each.variables == name]
    best, loops = advice.best(name), [loop_of(each) for each in choices]
    seconds: list[list[float]] = [[] for _ in choices]
    for loop in loops:
        loop(4)
    for _ in range(ROUNDS):
        for number in random.sample(range(len(loops)), len(loops)):
            seconds[number].append(loops[number](steps))
    return [
        Case(
            *(scenario, str(each), each.seconds, statistics.median(times)),
            is_exact=not each.freshness
            and (each.placement, each.write) == (best.placement, best.write),
            is_chosen=each is best,
            rounds=tuple(times),
        )
        for each, times in zip(choices, seconds, strict=True)
    ]


def waited(step: Any, *args: Any) -> float:
    """The seconds of a call and of all that it computes."""
    started = time.perf_counter()
    out = step(*args)
    for each in jax.tree.leaves(out, is_leaf=lambda x: isinstance(x, sc.Variables)):
        each.block_until_ready()
    return time.perf_counter() - started


# ---- variables of this process ------------------------------------------------------------------


def placed(devices: int, value: tuple[int, int], kind: str, steps: int) -> list[Case]:
    size, leaves = value
    chosen = jax.devices()[:devices]
    mesh = jax.make_mesh((devices,), ("data",), (AxisType.Auto,), devices=chosen)
    reader, writer, tree = sc.Session(mesh), sc.Session(mesh), tree_of(size, leaves)
    step = {"look": look, "written": look, "compute": compute, "train": train}[kind]
    between = {"look": BETWEEN, "written": 1, "compute": BETWEEN, "train": 1}[kind]

    def made(placement: Any, read: sc.Read) -> sc.Variables:
        with writer:
            return sc.Variables(tree, placement=placement, read=read, name="value")

    x = jax.device_put(X, jax.NamedSharding(mesh, jax.P()))

    def loop_of(choice: Choice) -> Callable[[int], float]:
        value = made(choice.placement, choice.read)

        def loop(count: int) -> float:
            seconds = 0.0
            with reader:
                for number in range(count):
                    if step is not train and number % between == between - 1:
                        with writer:
                            value.assign(tree)
                    seconds += waited(step, value, x)
            return seconds / count

        return loop

    base = made(sc.OnHost(), sc.Read())
    with reader:
        advice = sc.advise(step, base, x, writes_every=between)
    scenario = f"{devices} devices, {size >> 10} KiB in {leaves}, {kind}"
    return timed(scenario, advice, "value", loop_of, steps)


# ---- variables of another process ---------------------------------------------------------------


@contextlib.contextmanager
def server(engine: str) -> Iterator[str]:
    """The address of a server in a process of its own."""
    with tempfile.TemporaryDirectory() as directory:
        name = Path(directory).name
        command = [sys.executable, "-m", "stepcache", "serve", "--variables", directory]
        with served_by(command + ["--ray", name] * (engine == "ray")):
            yield f"local:{directory}" if engine == "local" else f"ray:{name}"


def served(address: str, engine: str, value: tuple[int, int], kind: str, steps: int) -> list[Case]:
    size, leaves = value
    tree, name = tree_of(size, leaves), f"value{size}{leaves}{kind}"
    write = sc.Write("add") if kind == "pushed" else sc.Write()
    with sc.connect(address) as connection, sc.connect(address) as other:
        base = connection.variables(name, tree, read=sc.Read(), write=write)
        writer = other.variables(name, tree)
        update = [jnp.zeros_like(leaf) for leaf in tree]

        def loop_of(choice: Choice) -> Callable[[int], float]:
            value = connection.variables(name, tree, read=choice.read, write=choice.write)

            def loop(count: int) -> float:
                seconds = 0.0
                for number in range(count):
                    if kind == "read" and number % BETWEEN == BETWEEN - 1:
                        writer.assign(tree)
                    seconds += waited(look, value, X)
                    if kind == "pushed":
                        started = time.perf_counter()
                        value.push(update)
                        seconds += time.perf_counter() - started
                value.flush()
                return seconds / count

            return loop

        between = BETWEEN if kind == "read" else 1
        advice = sc.advise(look, base, X, writes_every=between)
        return timed(
            f"{engine}, {size >> 10} KiB in {leaves}, {kind}", advice, name, loop_of, steps
        )


# ---- what comes of it ---------------------------------------------------------------------------


def regrets(cases: list[Case]) -> dict[str, float]:
    """By scenario, how much longer the chosen policy takes than the best exact one."""
    found = {}
    for scenario in dict.fromkeys(each.case for each in cases):
        exact = [each for each in cases if each.case == scenario and each.is_exact]
        chosen = next(each.measured for each in exact if each.is_chosen)
        found[scenario] = chosen / min(each.measured for each in exact) - 1
    return found


def summary(cases: list[Case]) -> dict[str, Any]:
    errors, regret = [abs(each.error) for each in cases], list(regrets(cases).values())
    return {
        "cases": len(cases),
        "scenarios": len(regret),
        "within": statistics.mean(each <= WITHIN for each in errors),
        "repeated": statistics.mean(
            abs(each.rounds[0] / each.rounds[-1] - 1) <= WITHIN for each in cases
        ),
        "error_quartiles": quartiles(errors),
        "regret_median": statistics.median(regret),
        "regret_worst": max(regret),
    }


def show(groups: dict[str, list[Case]]) -> None:
    table = Table(title=f"errors of at most {WITHIN:.0%}, and regret", title_justify="left")
    for name in ("group", "cases", "within", "repeated", "median error", "median regret", "worst"):
        table.add_column(name, justify="left" if name == "group" else "right")
    for name, cases in groups.items():
        of = summary(cases)
        middle = of["error_quartiles"][1]
        shares = of["within"], of["repeated"], middle, of["regret_median"], of["regret_worst"]
        table.add_row(name, str(of["cases"]), *(f"{each:.1%}" for each in shares))
    Console(width=118).print(table)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="show that it runs; no real figures")
    parser.add_argument("--only", default="", help="scenarios that contain this word")
    options = parser.parse_args()
    quick = options.quick
    jax.config.update("jax_num_cpu_devices", 8)
    devices, sizes = ((2,), SIZES[:1]) if quick else ((1, 2, 4, 8), SIZES)
    steps = 8 if quick else STEPS
    groups: dict[str, list[Case]] = {}

    def add(group: str, run: Callable[[], list[Case]]) -> None:
        if options.only not in group:
            return
        started = time.perf_counter()
        groups.setdefault(group, []).extend(run())
        took = time.perf_counter() - started
        print(f"{group}: {len(groups[group])} cases ({took:.1f} s)", file=sys.stderr, flush=True)

    for kind in ("look", "train") if quick else ("look", "written", "compute", "train"):
        for about in itertools.product(devices, sizes):
            add(f"placed, {kind}", functools.partial(placed, *about, kind, steps))
    with ray_cluster() if HAS_RAY and not quick else contextlib.nullcontext():
        for engine in ("local", "ray") if HAS_RAY and not quick else ("local",):
            with server(engine) as address:
                for kind, about in itertools.product(("read", "pushed"), sizes):
                    run = functools.partial(served, address, engine, about, kind, steps)
                    add(f"served, {engine}, {kind}", run)
    every = [each for cases in groups.values() for each in cases]
    show(groups | {"all": every})
    worst = sorted(every, key=lambda each: -abs(each.error))[:12]
    for each in worst if not quick else ():
        print(f"{each.case}, {each.contender}: {each.error:+.0%} of {each.measured * 1e3:.2f} ms")
    if not quick and not options.only:
        figures = {name: summary(cases) for name, cases in (groups | {"all": every}).items()}
        rows: list[Any] = every
        settings = {"rounds": ROUNDS, "steps": STEPS}
        print(f"written to {write('advice', rows, {'groups': figures}, **settings)}")


if __name__ == "__main__":
    main()
