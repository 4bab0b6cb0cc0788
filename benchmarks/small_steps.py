"""Many small steps, as test suites and notebooks have them, and one model: what a start costs.

Each contender runs in fresh processes, in turn with its peer:

- cold, nothing stored: plain `jax.jit` and stepcache;
- warm, from a directory that an earlier process filled: JAX's persistent compilation cache, all its
  thresholds at zero, and stepcache, whose steps are called at once, or a second after they were
  defined, as where a script builds its data in between.

Two times are taken: seconds from the first call to the last result, where each step is called once
and waited for, and seconds from there to the end of the process.

    python -m benchmarks.small_steps [--quick] [--rounds N] [--only WORDS]
"""

from __future__ import annotations

import argparse
import json
import math
import os
import random
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

COLD = {
    "jax.jit, nothing stored": "jax",
    "stepcache, nothing stored": "stepcache",
}
WARM = {
    "jax.jit, persistent cache": "jax",
    "stepcache, second start": "stepcache",
    "stepcache, defined a second before": "stepcache",
}
AHEAD = {"stepcache, defined a second before": 1.0}
BODIES = (
    "jnp.tanh(x * {constant}) + jnp.cos(x)",
    "jax.nn.softmax(x @ x.T / {constant}).sum(axis=0)",
    "jnp.where(x > {constant}, x**2, -x).mean()",
    "(x - x.mean()) / jnp.sqrt(x.var() + {constant})",
    "jnp.concatenate([x, x * {constant}], axis=1).max(axis=1)",
)


@dataclass(frozen=True)
class Case:
    """What one process runs.

    Attributes:
        kind: "functions" (all different), "namesakes" (so are these, and all are named `f`, as the
            tests of a file have them; a third calls a helper), "closures" (of one factory), or
            "layers" (of the model).
        count: how many of them.
        warm: whether a directory was filled before.
    """

    kind: str
    count: int
    warm: bool

    @property
    def name(self) -> str:
        what = f"{self.count} {self.kind if self.count > 1 else self.kind[:-1]}"
        return f"{what}, {'warm' if self.warm else 'cold'}"


CASES = (
    Case("functions", 40, warm=False),
    Case("namesakes", 200, warm=False),
    Case("layers", 12, warm=False),
    *(Case("functions", count, warm=True) for count in (1, 40, 400)),
    Case("namesakes", 200, warm=True),
    *(Case("closures", count, warm=True) for count in (12, 100)),
    Case("layers", 12, warm=True),
)
QUICK_CASES = (
    Case("functions", 4, warm=False),
    Case("functions", 4, warm=True),
    Case("namesakes", 3, warm=True),
    Case("closures", 4, warm=True),
)


def module_source(case: Case) -> str:
    """A module with the functions of a case in a list, `FUNCTIONS`."""
    lines = ["import jax", "import jax.numpy as jnp", ""]
    if case.kind == "closures":
        lines += ["def make(rate):", "    def step(x):"]
        lines += ["        return x - rate * jnp.sin(x), (x**2).sum()", "    return step", ""]
        lines += [f"FUNCTIONS = [make(0.01 * (1 + n)) for n in range({case.count})]"]
    elif case.kind == "namesakes":
        lines += ["def helper(y):", "    return jnp.sqrt(jnp.abs(y) + 1)", ""]
        for number in range(case.count):
            body = BODIES[number % len(BODIES)].format(constant=round(0.1 + number * 0.01, 2))
            body = f"helper({body})" if number % 3 == 0 else body
            lines += [f"def case_{number}():", "    def f(x):", f"        return {body}"]
            lines += ["    return f", ""]
        names = ", ".join(f"case_{number}()" for number in range(case.count))
        lines += [f"FUNCTIONS = [{names}]"]
    else:
        for number in range(case.count):
            body = BODIES[number % len(BODIES)].format(constant=round(0.1 + number * 0.01, 2))
            lines += [f"def step_{number}(x):", f"    return {body}", ""]
        names = ", ".join(f"step_{number}" for number in range(case.count))
        lines += [f"FUNCTIONS = [{names}]"]
    return "\n".join(lines) + "\n"


# ---- in the process that is timed --------------------------------------------------------------


def work(way: str, kind: str, count: int, ahead_seconds: float) -> None:
    """Calls each step once, and prints what that took, and when it was over, as JSON."""
    import jax
    import numpy as np

    import stepcache as sc

    jax.devices()  # To start the backend is nobody's step.
    calls: list[tuple[Callable, tuple]] = []
    if kind == "layers":
        from benchmarks.transformer import make_batch, make_state, make_train_step

        # Before the step is defined, so that nothing hides behind it.
        arguments = jax.block_until_ready((make_state(count), jax.device_put(make_batch())))
        train_step = make_train_step(count)
        if way == "jax":
            step = jax.jit(train_step, donate_argnames="state")
        else:
            step = sc.step(train_step, carry="state")
        calls.append((step, arguments))
    else:
        from functions import FUNCTIONS  # type: ignore[import-not-found]

        wrap = jax.jit if way == "jax" else sc.step
        for number, function in enumerate(FUNCTIONS):
            shape = (8, 3) if kind == "closures" else (2 + number % 7, 3)
            calls.append((wrap(function), (np.linspace(0, 1, 24).reshape(8, 3)[: shape[0]],)))
    time.sleep(ahead_seconds)
    outputs = []
    started = time.perf_counter()
    for step, arguments in calls:
        outputs.append(jax.block_until_ready(step(*arguments)))
    record: dict[str, Any] = {"seconds": time.perf_counter() - started, "counts": None}
    record["backend"] = jax.default_backend()
    record["sum"] = sum(float(np.abs(leaf).sum()) for leaf in jax.tree.leaves(outputs))
    if way == "stepcache":
        stats = [step.stats() for step, _ in calls]  # type: ignore[attr-defined]
        names = ("traces", "compiles", "loads")
        record["counts"] = {name: sum(getattr(each, name) for each in stats) for name in names}
    print(json.dumps(record | {"over": time.monotonic()}), flush=True)


# ---- around it ---------------------------------------------------------------------------------


def run(case: Case, way: str, stored: Path, module: Path, ahead: float = 0.0) -> dict[str, Any]:
    """One fresh process; `stored` is the directory of its programs, `module` of its functions."""
    environment = dict(os.environ, STEPCACHE_DIR="off")
    if way == "stepcache":
        environment["STEPCACHE_DIR"] = str(stored)
    elif case.warm:
        environment |= {
            "JAX_COMPILATION_CACHE_DIR": str(stored),
            "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
            "JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES": "-1",
        }
    path = [str(module), environment.get("PYTHONPATH", "")]
    environment["PYTHONPATH"] = os.pathsep.join(filter(None, path))
    arguments = ["--work", way, "--kind", case.kind, "--count", str(case.count)]
    arguments += ["--ahead", str(ahead)]
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks.small_steps", *arguments],
        env=environment,
        check=True,
        stdout=subprocess.PIPE,
        text=True,
        timeout=900,
    )
    ended = time.monotonic()  # A clock that all processes of the machine share.
    record = json.loads(done.stdout.splitlines()[-1])
    return record | {"end_seconds": ended - record.pop("over")}


def one_round(case: Case, root: Path, shuffler: random.Random) -> dict[str, dict[str, Any]]:
    """Each contender once. Every warm start begins with the directory as the first left it."""
    results = {}
    contenders = list((WARM if case.warm else COLD).items())
    shuffler.shuffle(contenders)
    for name, way in contenders:
        stored = root / way
        shutil.rmtree(stored, ignore_errors=True)
        if case.warm:
            shutil.copytree(root / f"{way}, filled", stored)
        else:
            stored.mkdir(mode=0o700)
        results[name] = run(case, way, stored, root, AHEAD.get(name, 0.0))
    return results


def compare(case: Case, rounds: int) -> tuple[list, list, dict[str, Any]]:
    """All contenders of one case; rows of the start, rows of the end, and details."""
    contenders = WARM if case.warm else COLD
    shuffler = random.Random(0)
    with tempfile.TemporaryDirectory() as name:
        root = Path(name)
        (root / "functions.py").write_text(module_source(case))
        for way in ("jax", "stepcache"):  # Not timed. It writes the modules' bytecode, too.
            (root / way).mkdir(mode=0o700)
            run(case, way, root / way, root)
            (root / way).rename(root / f"{way}, filled")
        results = [one_round(case, root, shuffler) for _ in range(rounds)]
    every = [each for one in results for each in one.values()]
    sums = {each["sum"] for each in every}
    # Of programs for GPUs, XLA chooses parts by timing them, so they round differently.
    tolerance = 0.0 if all(each["backend"] == "cpu" for each in every) else 1e-3
    agree = math.isclose(min(sums), max(sums), rel_tol=tolerance)
    assert agree, f"{case.name}: the contenders disagree: {sums}"
    starts = _rows(case.name, contenders, results, "seconds")
    ends = _rows(f"end, {case.name}", contenders, results, "end_seconds")
    details = {f"{case.name}: {name}": results[-1][name]["counts"] for name in contenders}
    return starts, ends, details


def _rows(case: str, contenders: Sequence[str] | dict, results: list[dict], key: str) -> list:
    from benchmarks.harness import Row, quartiles

    rows, peer = [], next(iter(contenders))
    for name in contenders:
        low, middle, high = quartiles([one[name][key] for one in results])
        ratios = quartiles([one[name][key] / one[peer][key] for one in results])
        rows.append(Row(case, name, middle, low, high, ratios[1], ratios[0], ratios[2]))
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="a few functions, one round")
    parser.add_argument("--rounds", type=int, help="5, or 1 with --quick")
    parser.add_argument("--only", default="", help="only cases whose name contains these words")
    parser.add_argument("--work", choices=("jax", "stepcache"), help=argparse.SUPPRESS)
    parser.add_argument("--kind", help=argparse.SUPPRESS)
    parser.add_argument("--count", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--ahead", type=float, default=0.0, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.work:
        work(options.work, options.kind, options.count, options.ahead)
        return
    from benchmarks.harness import show, write

    rounds = options.rounds or (1 if options.quick else 5)
    cases = [
        case for case in (QUICK_CASES if options.quick else CASES) if options.only in case.name
    ]
    starts, ends, details = [], [], {}
    for case in cases:
        more_starts, more_ends, more_details = compare(case, rounds)
        starts, ends, details = starts + more_starts, ends + more_ends, details | more_details
        print(f"{case.name}: done", file=sys.stderr)
    show("first call to last result, fresh processes", starts, unit="ms")
    show("last result to the end of the process", ends, unit="ms")
    for name, counts in details.items():
        if counts:
            print(f"{name}: {counts}")
    if not options.quick and not options.only:
        print(f"written to {write('small_steps', starts + ends, details, rounds=rounds)}")


if __name__ == "__main__":
    main()
