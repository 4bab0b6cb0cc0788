"""Seconds from the first call of a step to its result, in fresh processes that share a cache.

Each process has an empty directory of programs, as on a new machine; behind it is an S3 server
(moto, in a process of its own) with a proxy that delays each answer. Two cases: a flax nnx
transformer of 12 layers with adamw, one step; and 40 small steps, called one after the other, where
40 round trips would show. Contenders:

- nothing stored, and no shared cache: what a start costs without one;
- the directory of an earlier start, warm;
- the shared cache, filled by an earlier process, with answers that take 0, 20 and 50 ms more;
- a shared cache that refuses connections, one that never answers, and one that holds nothing.

    python -m benchmarks.remote_cache [--quick]
"""

from __future__ import annotations

import argparse
import json
import os
import secrets
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

NOTHING = "nothing stored"
CONTENDERS: dict[str, dict[str, Any]] = {
    NOTHING: {},
    "directory, warm": {"directory": "warm"},
    "shared, 0 ms": {"remote": "filled"},
    "shared, 20 ms": {"remote": "filled", "latency": 0.02},
    "shared, 50 ms": {"remote": "filled", "latency": 0.05},
    "shared, empty, 50 ms": {"remote": "empty", "latency": 0.05},
    "shared, refuses": {"remote": "refuses"},
    "shared, hangs": {"remote": "filled", "hang": True},
}


# ---- in the process that is timed --------------------------------------------------------------


def work(layers: int, steps: int) -> None:
    """Calls each step once, and prints what that took as JSON."""
    import jax
    import jax.numpy as jnp
    import numpy as np

    import stepcache as sc

    if layers:
        from benchmarks.transformer import make_batch, make_state, make_train_step

        defined = [sc.step(make_train_step(layers), carry="state", batch="batch")]
        arguments = jax.block_until_ready((make_state(layers), make_batch()))
    else:
        defined = [sc.step(_small(number)) for number in range(steps)]
        arguments = (jnp.ones((16, 16)),)
        np.asarray(arguments[0])
    started = time.perf_counter()
    for step in defined:
        jax.block_until_ready(step(*arguments))
    seconds = time.perf_counter() - started
    names = ("traces", "compiles", "loads", "remote_loads", "remote_bytes", "remote_seconds")
    stats = [step.stats() for step in defined]
    sums = {name: sum(getattr(each, name) for each in stats) for name in names}
    print(json.dumps({"seconds": seconds, **sums}))


def _small(number: int):
    import jax.numpy as jnp

    def small(x):
        for layer in range(3):
            x = jnp.tanh(x @ x) * (number + layer)
        return x

    small.__name__ = small.__qualname__ = f"small{number}"
    return small


# ---- around it ---------------------------------------------------------------------------------


def run(server, case: list[str], directory: Path, remote: str, variables=None) -> dict:
    """One fresh process."""
    directory.mkdir(mode=0o700, exist_ok=True)
    environment = os.environ | server.environment | {"STEPCACHE_DIR": str(directory)}
    environment |= {"STEPCACHE_REMOTE": remote or "off", **(variables or {})}
    command = [sys.executable, "-m", "benchmarks.remote_cache", "--work", *case]
    started = time.perf_counter()
    done = subprocess.run(
        command, env=environment, check=True, capture_output=True, text=True, timeout=600
    )
    result = json.loads(done.stdout.splitlines()[-1])
    result["process_seconds"] = time.perf_counter() - started
    result["warnings"] = done.stderr.count("StepCacheWarning")
    return result


def compare(name: str, case: list[str], rounds: int) -> tuple[list, dict]:
    """All contenders of one case, in turn."""
    from benchmarks.harness import compared, spread
    from tests.object_server import BUCKET, ObjectServer

    results: dict[str, list[dict]] = {each: [] for each in CONTENDERS}
    with tempfile.TemporaryDirectory() as root, ObjectServer() as server:
        key = Path(root) / "key"
        key.write_text(secrets.token_hex(32))
        key.chmod(0o600)
        os.environ["STEPCACHE_KEY_FILE"] = str(key)
        filled = f"s3://{BUCKET}/filled"
        run(server, case, Path(root) / "warm", filled)  # Fills both; not timed.
        for number in range(rounds):
            for contender, how in CONTENDERS.items():
                place = how.get("directory") or f"{number} {contender}"
                remote, variables = (
                    {"empty": f"s3://{BUCKET}/{number}"}.get(
                        how.get("remote", ""), filled if "remote" in how else ""
                    ),
                    {},
                )
                if how.get("remote") == "refuses":
                    variables = {"AWS_ENDPOINT_URL": "http://127.0.0.1:9"}
                server.behave(latency=how.get("latency", 0.0), hang=how.get("hang", False))
                result = run(server, case, Path(root) / place, remote, variables)
                result["requests"] = sum(server.behave().values())
                results[contender].append(result)
    seconds = {each: [run["seconds"] for run in runs] for each, runs in results.items()}
    names = ("traces", "compiles", "remote_loads", "remote_bytes", "requests", "warnings")
    details = {
        f"{name}: {each}": {
            **{key: runs[-1][key] for key in names},
            "remote_seconds": spread([run["remote_seconds"] for run in runs]),
            "process_seconds": spread([run["process_seconds"] for run in runs]),
        }
        for each, runs in results.items()
    }
    return compared(name, seconds), details


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="small cases, one round")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--work", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--layers", type=int, default=0)
    parser.add_argument("--steps", type=int, default=0)
    options = parser.parse_args()
    if options.work:
        work(options.layers, options.steps)
        return
    from benchmarks.harness import show, write

    layers, steps, rounds = (1, 4, 1) if options.quick else (12, 40, options.rounds)
    cases = {
        f"{layers} layers, one step": ["--layers", str(layers)],
        f"{steps} small steps": ["--steps", str(steps)],
    }
    rows, details = [], {}
    for name, case in cases.items():
        more, about = compare(name, case, rounds)
        rows, details = rows + more, details | about
        show("first calls to their results, fresh process", more, unit="ms")
        for each, figures in about.items():
            print(f"{each}: {figures}")
    if not options.quick:
        print(f"written to {write('remote_cache', rows, details, rounds=rounds)}")


if __name__ == "__main__":
    main()
