"""Seconds from the first call of a training step to its result, in a fresh process.

The step trains a flax nnx transformer with adamw, 24 layers, about 1,170 leaves. Contenders, each
in processes of their own, in turn:

- JAX's persistent compilation cache, all its thresholds at zero, warm;
- stepcache, warm, its step defined when the parameters are there already (nothing is hidden);
- stepcache, warm, its step defined first, so that loading hides behind building the parameters;
- both with a KEY that vouches for the step, so that its export runs and nothing is traced;
- and both of the first two without anything stored, for comparison.

    python -m benchmarks.restart [--quick]
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

STAGES = ("trace", "lower", "compile")
EVENTS = {
    "trace": "/jax/core/compile/jaxpr_trace_duration",
    "lower": "/jax/core/compile/jaxpr_to_mlir_module_duration",
    "compile": "/jax/core/compile/backend_compile_duration",
}
CONTENDERS = {
    "jax.jit, nothing stored": ("jax", "cold"),
    "jax.jit, persistent cache": ("jax", "warm"),
    "stepcache, nothing stored": ("late", "cold"),
    "stepcache": ("late", "warm"),
    "stepcache, defined first": ("early", "warm"),
    "stepcache, trusted": ("late", "trusted"),
    "stepcache, trusted, defined first": ("early", "trusted"),
}
PEER = "jax.jit, persistent cache"


# ---- in the process that is timed --------------------------------------------------------------


def work(way: str, layers: int, devices: int) -> None:
    """Builds the model, calls the step once, and prints what that took as JSON."""
    import jax

    jax.config.update("jax_num_cpu_devices", devices)
    os.environ.setdefault("NPROC", "32")
    from jax.sharding import AxisType, NamedSharding, PartitionSpec

    import stepcache as sc
    from benchmarks.transformer import make_batch, make_state, make_train_step

    train_step = make_train_step(layers)
    mesh = jax.make_mesh((devices,), ("data",), axis_types=(AxisType.Auto,))
    step = sc.step(train_step, carry="state", batch="batch") if way == "early" else None
    started = time.perf_counter()
    state = jax.device_put(make_state(layers), NamedSharding(mesh, PartitionSpec()))
    batch = jax.device_put(make_batch(), NamedSharding(mesh, PartitionSpec("data")))
    jax.block_until_ready((state, batch))
    parameter_seconds = time.perf_counter() - started
    counts = dict.fromkeys(STAGES, 0)

    def count(event: str, duration: float, **details) -> None:
        for stage, name in EVENTS.items():
            counts[stage] += event == name

    jax.monitoring.register_event_duration_secs_listener(count)
    if way == "jax":
        step = jax.jit(train_step, donate_argnames="state")
    elif step is None:
        step = sc.step(train_step, carry="state", batch="batch")
    with sc.Session(mesh) if way != "jax" else jax.set_mesh(mesh):
        started = time.perf_counter()
        state, loss = step(state, batch)  # type: ignore[misc]
        jax.block_until_ready((state, loss))
        seconds = time.perf_counter() - started
        record = {"seconds": seconds, "parameter_seconds": parameter_seconds, "loss": float(loss)}
        started = time.perf_counter()
        for _ in range(10):
            state, loss = step(state, batch)  # type: ignore[misc]
            jax.block_until_ready(loss)
        record["ten_steps_seconds"] = time.perf_counter() - started
    if way != "jax":
        stats = step.stats()
        stages = (*STAGES, "load", "own")
        record["miss"] = str(step.last_miss)
        record["stages"] = {stage: getattr(stats, f"{stage}_seconds") for stage in stages}
        counts = {"trace": stats.traces, "lower": stats.lowers, "compile": stats.compiles}
        counts["trusted"] = stats.trusted
    print(json.dumps(record | {"counts": counts, "leaves": len(jax.tree.leaves((state, batch)))}))


# ---- around it ---------------------------------------------------------------------------------


def run(contender: str, layers: int, devices: int, stored: Path) -> dict:
    """One fresh process of one contender."""
    way, state = CONTENDERS[contender]
    with tempfile.TemporaryDirectory() as empty:
        directory = str(stored) if state != "cold" else empty
        environment = dict(os.environ, STEPCACHE_DIR="off")
        if state == "trusted":
            environment |= {"STEPCACHE_TRUST": "this commit", "STEPCACHE_PROVE_EVERY": "1000"}
        if way == "jax":
            environment |= {
                "JAX_COMPILATION_CACHE_DIR": directory,
                "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
                "JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES": "-1",
            }
        else:
            Path(directory).chmod(0o700)
            environment["STEPCACHE_DIR"] = directory
        arguments = ["--work", way, "--layers", str(layers), "--devices", str(devices)]
        command = [sys.executable, "-m", "benchmarks.restart", *arguments]
        done = subprocess.run(
            command, env=environment, check=True, capture_output=True, text=True, timeout=900
        )
    return json.loads(done.stdout.splitlines()[-1])


def compare(layers: int, devices: int, rounds: int, colds: int) -> tuple[list, dict]:
    """All contenders of one case, in turn."""
    from benchmarks.harness import Row, quartiles

    results: dict[str, list[dict]] = {name: [] for name in CONTENDERS}
    with tempfile.TemporaryDirectory() as root:
        stored = {
            name: Path(root) / f"{way == 'jax'} {state}"
            for name, (way, state) in CONTENDERS.items()
        }
        for name, (_, state) in CONTENDERS.items():
            stored[name].mkdir(mode=0o700, exist_ok=True)
            if state != "cold":  # Fills what is stored; not timed.
                run(name, layers, devices, stored[name])
        for number in range(rounds):
            for name, (_, state) in CONTENDERS.items():
                if state != "cold" or number < colds:
                    results[name].append(run(name, layers, devices, stored[name]))
    case = f"{layers} layers, {devices} device{'s' if devices > 1 else ''}"
    rows, details = [], {}
    for name, runs in results.items():
        if not runs:
            continue
        low, middle, high = quartiles([each["seconds"] for each in runs])
        peers = results[PEER][: len(runs)]
        ratios = [a["seconds"] / b["seconds"] for a, b in zip(runs, peers, strict=True)]
        ratio_low, ratio, ratio_high = quartiles(ratios)
        rows.append(Row(case, name, middle, low, high, ratio, ratio_low, ratio_high))
        details[f"{case}: {name}"] = {
            key: runs[-1].get(key) for key in ("counts", "stages", "leaves", "parameter_seconds")
        }
        assert all(each["loss"] == runs[0]["loss"] for each in runs)
    return rows, details


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="one small case, one round")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--work", choices=("jax", "late", "early"), help=argparse.SUPPRESS)
    parser.add_argument("--layers", type=int, default=24)
    parser.add_argument("--devices", type=int, default=1)
    options = parser.parse_args()
    if options.work:
        work(options.work, options.layers, options.devices)
        return
    from benchmarks.harness import show, write

    cases = [(12, 1), (24, 1), (24, 4)]
    rounds, colds = options.rounds, 1
    if options.quick:
        cases, rounds, colds = [(1, 1)], 1, 0
    rows, details = [], {}
    for layers, devices in cases:
        more, about = compare(layers, devices, rounds, colds)
        rows, details = rows + more, details | about
        show("first call to its result, fresh process", more)
        for name, each in about.items():
            print(f"{name}: {each['leaves']} leaves, {each['counts']}, {each['stages']}")
        if not options.quick:  # A long run that is cut off keeps what it has.
            print(f"written to {write('restart', rows, details, rounds=rounds)}")


if __name__ == "__main__":
    main()
