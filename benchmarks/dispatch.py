"""What a call costs: stepcache beside `jax.jit`, `equinox.filter_jit` and `nnx.jit`.

    python -m benchmarks.dispatch [--quick]

The step reads and rewrites every leaf of a tree of scalars. Cases: 1, 100 and 1,000 leaves; two
shapes that alternate; leaves on 8 devices. Then stepcache's own share of a miss, and resident
memory over 2,000 signatures under a bound of 64 programs.
"""

from __future__ import annotations

import argparse
import itertools
import os
import resource
from pathlib import Path

os.environ["STEPCACHE_DIR"] = (
    "off"  # What the disk costs, and saves, is benchmarks.restart's affair.
)

import jax

if not jax.config.jax_platforms or "cpu" in jax.config.jax_platforms:
    jax.config.update("jax_num_cpu_devices", 8)

import equinox
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import NamedSharding, PartitionSpec

import stepcache as sc
from benchmarks.harness import interleaved, show, spread, write

LEAVES = (1, 100, 1000)


def null_step(tree):
    return jax.tree.map(lambda x: x + 1, tree)


class Bag(nnx.Module):
    """`count` scalars, as an nnx user holds them."""

    def __init__(self, count: int):
        self.values = nnx.List([nnx.Param(jnp.zeros(())) for _ in range(count)])


def nnx_step(bag: Bag):
    for value in bag.values:
        value[...] = value[...] + 1


def scalars(count: int, shape=(), sharding=None) -> list[jax.Array]:
    return [jax.device_put(jnp.zeros(shape), sharding) for _ in range(count)]


def by_leaves(count: int, settings) -> list:
    tree, bag = scalars(count), Bag(count)
    by_jit, by_step = jax.jit(null_step), sc.step(null_step)
    by_equinox, by_nnx = equinox.filter_jit(null_step), nnx.jit(nnx_step)

    def call_nnx():
        by_nnx(bag)
        return bag.values[0][...]

    contenders = {
        "jax.jit": lambda: by_jit(tree),
        "stepcache": lambda: by_step(tree),
        "equinox.filter_jit": lambda: by_equinox(tree),
        "nnx.jit": call_nnx,
    }
    case = f"{count:,} leaves" if count > 1 else "1 leaf"
    return interleaved(case, contenders, **settings)


def alternating(count: int, settings) -> list:
    trees = [scalars(count, (2,)), scalars(count, (3,))]
    contenders = {}
    for name, make in (("jax.jit", jax.jit), ("stepcache", sc.step)):
        turn, compiled = itertools.cycle(trees), make(null_step)
        contenders[name] = lambda turn=turn, compiled=compiled: compiled(next(turn))
    return interleaved(f"{count:,} leaves, two shapes in turn", contenders, **settings)


def many_devices(count: int, settings) -> list:
    # A call is long here, and eight devices share few cores: longer batches, or noise is all.
    settings = {**settings, "batch_seconds": 4 * settings["batch_seconds"]}
    mesh = jax.make_mesh((jax.device_count(),), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
    tree = scalars(count, (jax.device_count(),), NamedSharding(mesh, PartitionSpec("data")))
    by_jit, by_step = jax.jit(null_step), sc.step(null_step)
    contenders = {"jax.jit": lambda: by_jit(tree), "stepcache": lambda: by_step(tree)}
    rows = interleaved(f"{count:,} leaves, {jax.device_count()} devices", contenders, **settings)
    with sc.Session(mesh):
        in_session = {"jax.jit": lambda: by_jit(tree), "stepcache": lambda: by_step(tree)}
        case = f"{count:,} leaves, {jax.device_count()} devices, in a session"
        return rows + interleaved(case, in_session, **settings)


def own_share_of_a_miss(count: int, misses: int, make) -> dict[str, float]:
    """stepcache's own milliseconds of a miss: everything but JAX's trace, lower and compile."""
    milliseconds = []
    step = sc.step(lambda tree: null_step(tree))  # A function of its own, with programs of its own.
    for size in range(1, misses + 2):
        before = step.stats().own_seconds
        step.warm([make(size) for _ in range(count)])
        milliseconds.append((step.stats().own_seconds - before) * 1e3)
    return spread(milliseconds[1:])  # The first also imports and fills caches.


def resident_megabytes() -> float:
    status = Path("/proc/self/status")
    if status.exists():
        line = next(x for x in status.read_text().splitlines() if x.startswith("VmRSS"))
        return int(line.split()[1]) / 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20


def memory_over_signatures(signatures: int, bound: int) -> list[float]:
    """Resident megabytes after each tenth of so many distinct signatures."""
    step = sc.step(lambda x: jnp.tanh(x) * 2)
    readings = []
    mesh = jax.make_mesh((1,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
    cache = sc.ProgramCache(max_memory_programs=bound)
    with sc.Session(mesh, cache=cache):
        for size in range(1, signatures + 1):
            step(np.zeros(size, np.float32))
            if size % (signatures // 10) == 0:
                readings.append(round(resident_megabytes(), 1))
    stats = step.stats()
    assert stats.compiles == signatures and stats.programs == bound, stats
    return readings


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="show that it runs; no real figures")
    quick = parser.parse_args().quick
    settings = {"rounds": 3 if quick else 41, "batch_seconds": 0.005 if quick else 0.05}
    counts = LEAVES[:2] if quick else LEAVES
    rows = [row for count in counts for row in by_leaves(count, settings)]
    rows += [row for count in counts[1:] for row in alternating(count, settings)]
    rows += [row for count in counts[1:] for row in many_devices(count, settings)]
    show("a hit; ratios are to jax.jit, paired round by round", rows)
    misses = {
        kind: own_share_of_a_miss(1000, 2 if quick else 15, make)
        for kind, make in (
            ("jax arrays", jnp.zeros),
            ("numpy arrays", lambda size: np.zeros(size, np.float32)),
        )
    }
    for kind, miss in misses.items():
        print(
            f"own share of a miss, 1,000 leaves, {kind}: median {miss['median']:.1f} ms, "
            f"{miss['min']:.1f} … {miss['max']:.1f}"
        )
    signatures = 100 if quick else 2000
    memory = memory_over_signatures(signatures, 64)
    print(f"resident MB over {signatures:,} signatures, at most 64 programs held: {memory}")
    figures = {"own_miss_milliseconds": misses, "resident_megabytes": memory}
    if not quick:
        print(f"written to {write('dispatch', rows, figures, **settings)}")


if __name__ == "__main__":
    main()
