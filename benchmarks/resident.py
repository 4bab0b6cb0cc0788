"""What it costs that a step reads and writes its state: resident `Variables` beside plain trees.

    python -m benchmarks.resident [--quick]

Each contender carries its state from call to call. Cases: a null step, which reads and rewrites
every leaf, over 1 and 1,000 small leaves and over the state of a 24-layer flax nnx transformer with
adamw; then that model's real training step. Last, how the null step depends on the size below which
leaves share a buffer.
"""

from __future__ import annotations

import argparse
import os

os.environ["STEPCACHE_DIR"] = "off"  # What is kept between processes is another affair.

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

import stepcache as sc
from benchmarks.harness import interleaved, show, write
from benchmarks.transformer import (
    OPTIMIZER,
    make_batch,
    make_model,
    make_state,
    make_train_step,
)
from stepcache.variables import packing


def null_step(state):
    return jax.tree.map(lambda x: x + jnp.ones((), x.dtype), state)


def looping(step, state, *rest):
    """Calls a step again and again on what it returned."""

    def call():
        nonlocal state
        outputs = step(state, *rest)
        state = outputs[0] if rest else outputs
        return outputs[1] if rest else state

    return call


class Bag(nnx.Module):
    """Arrays, as an nnx user holds them."""

    def __init__(self, leaves):
        self.values = nnx.List([nnx.Param(leaf) for leaf in leaves])


@nnx.jit
def nnx_null_step(*objects):
    for each in objects:
        nnx.update(each, null_step(nnx.state(each)))


def contenders(state, objects) -> dict:
    """A null step over one state, as users of each would write it."""

    def fresh():
        return jax.tree.map(jnp.array, state)

    step = sc.step(null_step, carry="state")

    def call_nnx():
        nnx_null_step(*objects)
        return jax.tree.leaves(nnx.state(objects[0]))[-1]

    return {
        "jax.jit": looping(jax.jit(null_step, donate_argnames="state"), fresh()),
        "stepcache, resident": looping(step, sc.Variables(state)),
        "stepcache, plain tree": looping(step, fresh()),
        "nnx.jit": call_nnx,
    }


def small(count: int):
    leaves = [np.full(8, float(index), np.float32) for index in range(count)]
    return leaves, (Bag([jnp.asarray(leaf) for leaf in leaves]),)


def model_state(layers: int):
    model = make_model(layers)
    held = nnx.Optimizer(model, OPTIMIZER, wrt=nnx.Param)
    return jax.tree.map(np.asarray, make_state(layers)), (model, held)


def training(layers: int, settings) -> list:
    train_step, batch = make_train_step(layers), jax.device_put(make_batch())
    state, _ = model_state(layers)
    by_jit = jax.jit(train_step, donate_argnames="state")
    by_step = sc.step(train_step, carry="state")
    rows = {
        "jax.jit": looping(by_jit, jax.tree.map(jnp.array, state), batch),
        "stepcache, resident": looping(by_step, sc.Variables(state), batch),
    }
    return interleaved(f"training step, {layers} layers", rows, **settings)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="show that it runs; no real figures")
    quick = parser.parse_args().quick
    settings = {"rounds": 3 if quick else 31, "batch_seconds": 0.005 if quick else 0.1}
    layers = 2 if quick else 24
    rows, details = [], {}
    state, objects = model_state(layers)
    cases = {"1 leaf": small(1), "1,000 leaves": small(100 if quick else 1000)}
    count = len(jax.tree.leaves(state))
    cases[f"{layers} layers and adamw, {count:,} leaves"] = (state, objects)
    for case, (tree, held) in cases.items():
        rows += interleaved(f"null step, {case}", contenders(tree, held), **settings)
        layout = sc.Variables(tree).layout
        details[case] = {"leaves": len(layout.slots), "buffers": len(layout.buffers)}
    long = {**settings, "batch_seconds": 10 * settings["batch_seconds"]}
    rows += training(layers, long)
    show("a step that carries its state", rows)
    step, usual = sc.step(null_step, carry="state"), packing.PACKED_BELOW_BYTES
    by_size = {}
    for kilobytes in (0, 1, 4, 16, 64, 256, 1024):
        packing.PACKED_BELOW_BYTES = kilobytes << 10
        by_size[f"{kilobytes} KiB"] = looping(step, sc.Variables(state))
    packing.PACKED_BELOW_BYTES = usual
    sizes = interleaved("null step, leaves packed below", by_size, **settings)
    show("by the size below which leaves share a buffer", sizes)
    if not quick:
        print(f"written to {write('resident', rows + sizes, details, **settings)}")


if __name__ == "__main__":
    main()
