"""The first ten steps of a warm start, with and without the trace that checks the loaded program.

The check runs in the background. XLA computes in one thread here, so that the other core is free
for it; yet cores share caches, memory and, on a virtual machine, more. So the same steps are also
timed unchecked beside another process that keeps that core busy: what is dearer than "not checked"
but no dearer than that is the machine's doing.

    python -m benchmarks.first_steps [--quick]
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
from pathlib import Path

from benchmarks.harness import Row, quartiles, show, write
from benchmarks.restart import run

CHECKED, UNCHECKED = "stepcache", "stepcache, unverified"
CONTENDERS = {
    "not checked": (UNCHECKED, False),
    "checked in the background": (CHECKED, False),
    "not checked, the other core busy": (UNCHECKED, True),
}
BUSY = """
import json
data = {number: [str(other) for other in range(50)] for number in range(200)}
while True:
    json.loads(json.dumps(data))
"""


def first_steps(layers: int, rounds: int) -> list[Row]:
    """The contenders in turn, in fresh processes."""
    os.environ["XLA_FLAGS"] = "--xla_cpu_multi_thread_eigen=false"
    seconds: dict[str, list[float]] = {name: [] for name in CONTENDERS}
    with tempfile.TemporaryDirectory() as root:
        run(CHECKED, layers, 1, Path(root))  # Fills what is stored.
        for _ in range(rounds):
            for name, (contender, beside) in CONTENDERS.items():
                busy = subprocess.Popen([sys.executable, "-c", BUSY]) if beside else None
                try:
                    each = run(contender, layers, 1, Path(root))
                finally:
                    if busy is not None:
                        busy.kill()
                        busy.wait()
                seconds[name].append(each["ten_steps_seconds"])
    rows = []
    for name, times in seconds.items():
        low, middle, high = quartiles(times)
        ratios = [a / b for a, b in zip(times, seconds["not checked"], strict=True)]
        ratio_low, ratio, ratio_high = quartiles(ratios)
        case = f"first ten steps, {layers} layers"
        rows.append(Row(case, name, middle, low, high, ratio, ratio_low, ratio_high))
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="one small case, one round")
    quick = parser.parse_args().quick
    rounds = 1 if quick else 11
    rows = first_steps(1 if quick else 24, rounds)
    show("first ten steps after a warm start", rows)
    if not quick:
        print(f"written to {write('first_steps', rows, {}, rounds=rounds)}")


if __name__ == "__main__":
    main()
