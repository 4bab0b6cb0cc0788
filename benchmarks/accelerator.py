"""The figures of the other benchmarks that an accelerator may change, in some five minutes.

Starts of 40 small functions and of a transformer, cold and warm; calls that hit; a training step,
with its state in `Variables`, and with its moments in the host's memory; and reads of variables on
the host.

    python -m benchmarks.accelerator [--quick]

A process may not take the whole memory of the device, as another one is timed beside it:
`XLA_PYTHON_CLIENT_PREALLOCATE=false` is set.
"""

from __future__ import annotations

import argparse
import os
from typing import Any

os.environ["XLA_PYTHON_CLIENT_PREALLOCATE"] = "false"

from benchmarks import small_steps

STARTS = (
    small_steps.Case("functions", 40, warm=False),
    small_steps.Case("functions", 40, warm=True),
    small_steps.Case("layers", 12, warm=True),
)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="show that it runs; no real figures")
    quick = parser.parse_args().quick
    starts: list[Any] = []
    rounds = 1 if quick else 3
    for case in small_steps.QUICK_CASES[:2] if quick else STARTS:
        starts += small_steps.compare(case, rounds)[0]
        print(f"{case.name}: done", flush=True)

    from benchmarks import dispatch, resident, transfers  # They start JAX.
    from benchmarks.harness import interleaved, show, write

    settings = {"rounds": 3 if quick else 15, "batch_seconds": 0.005 if quick else 0.05}
    layers = 1 if quick else 12
    rows = [row for count in (1, 100, 1000) for row in dispatch.by_leaves(count, settings)]
    rows += interleaved(f"training step, {layers} layers", resident.training(layers), **settings)
    held = resident.moments_on_host(layers)
    rows += interleaved(f"moments on the host, {layers} layers", held, **settings)
    megabytes = 2 if quick else 512
    rows += transfers.hiding(1, transfers.computing, "gather", megabytes, **settings)
    more, speeds = transfers.bandwidth(megabytes, **settings)
    rows += more
    show("first call to last result, fresh processes", starts, unit="ms")
    show("calls", rows)
    print(f"GB/s of {megabytes} MiB: {speeds}")
    if not quick:
        figures = {"gigabytes_per_second": speeds}
        about = {"rounds": rounds, "call_rounds": settings["rounds"]}
        print(f"written to {write('accelerator', starts + rows, figures, **about)}")


if __name__ == "__main__":
    main()
