"""What it costs that a step reads and writes its state: resident `Variables` beside plain trees.

    python -m benchmarks.resident [--quick]

Each contender carries its state from call to call. Cases: a null step, which reads and rewrites
every leaf, over 1 to 1,000 small leaves and over the state of flax nnx transformers with adamw; the
training steps of these; then the ways in which variables can be passed, at one leaf. First calls
are those of steps that no process has built before, from the call to its result. Last, a step whose
optimizer's moments are in the host's memory, beside the same step as one would write it by hand.
"""

from __future__ import annotations

import argparse
import gc
import os
import time

os.environ["STEPCACHE_DIR"] = "off"  # What is kept between processes is another affair.

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

import stepcache as sc
from benchmarks.harness import Row, compared, interleaved, show, write
from benchmarks.transformer import (
    OPTIMIZER,
    make_batch,
    make_model,
    make_state,
    make_train_step,
)
from stepcache.units import counted


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

    resident, packed, plain = (sc.step(null_step, carry="state") for _ in range(3))

    def call_nnx():
        nnx_null_step(*objects)
        return jax.tree.leaves(nnx.state(objects[0]))[-1]

    return {
        "jax.jit": looping(jax.jit(null_step, donate_argnames="state"), fresh()),
        "stepcache, resident": looping(resident, sc.Variables(state)),
        "stepcache, packed": looping(packed, sc.Variables(state, pack=True)),
        "stepcache, plain tree": looping(plain, fresh()),
        "nnx.jit": call_nnx,
    }


def small(count: int):
    leaves = [np.full(8, float(index), np.float32) for index in range(count)]
    return leaves, (Bag([jnp.asarray(leaf) for leaf in leaves]),)


def model_state(layers: int):
    model = make_model(layers)
    held = nnx.Optimizer(model, OPTIMIZER, wrt=nnx.Param)
    return jax.tree.map(np.asarray, make_state(layers)), (model, held)


def training(layers: int) -> dict:
    train_step, batch = make_train_step(layers), jax.device_put(make_batch())
    state, _ = model_state(layers)
    by_jit = jax.jit(train_step, donate_argnames="state")
    by_step = sc.step(train_step, carry="state")
    return {
        "jax.jit": looping(by_jit, jax.tree.map(jnp.array, state), batch),
        "stepcache, resident": looping(by_step, sc.Variables(state), batch),
    }


def ways() -> dict[str, dict]:
    """The ways in which variables can be passed, one leaf each."""

    def two(first, second):
        return null_step(first), null_step(second)

    def named(*, state):
        return null_step(state)

    def summed(state):
        return sum(leaf.sum() for leaf in state)

    leaf, _ = small(1)

    def arrays():
        return jax.tree.map(jnp.array, leaf)

    def looping_two(step, *states):
        def call():
            nonlocal states
            states = step(*states)
            return states

        return call

    def looping_named(step, state):
        def call():
            nonlocal state
            state = step(state=state)
            return state

        return call

    def twice(make):
        return {"first": make(), "second": make()}

    def reading(step, state):
        return lambda: step(state)

    def variables():
        return sc.Variables(leaf)

    by_jit, by_step = jax.jit(two, donate_argnums=(0, 1)), sc.step(two, carry=("first", "second"))
    jit_named, step_named = (
        jax.jit(named, donate_argnames="state"),
        sc.step(named, carry="state"),
    )
    jit_null, step_null = (
        jax.jit(null_step, donate_argnames="state"),
        sc.step(null_step, carry="state"),
    )
    jit_sum, step_sum = jax.jit(summed), sc.step(summed)
    return {
        "two carries": {
            "jax.jit": looping_two(by_jit, arrays(), arrays()),
            "stepcache, resident": looping_two(by_step, variables(), variables()),
        },
        "a dict of two": {
            "jax.jit": looping(jit_null, twice(arrays)),
            "stepcache, resident": looping(step_null, twice(variables)),
        },
        "by keyword": {
            "jax.jit": looping_named(jit_named, arrays()),
            "stepcache, resident": looping_named(step_named, variables()),
        },
        "read only": {
            "jax.jit": reading(jit_sum, arrays()),
            "stepcache, resident": reading(step_sum, variables()),
        },
    }


def first_calls(case: str, function, state, rest: tuple, rounds: int) -> list[Row]:
    """Seconds of first calls, over functions of their own, so that nobody finds anything built."""

    def copied():
        def anew(state, *rest):
            return function(state, *rest)

        return anew

    def by_jit():
        step, given = jax.jit(copied(), donate_argnames="state"), jax.tree.map(jnp.array, state)
        return lambda: step(given, *rest)

    def by_variables(**options):
        step, given = sc.step(copied(), carry="state"), sc.Variables(state, **options)

        def call():
            outputs = step(given, *rest)
            given.block_until_ready()
            return outputs if rest == () else outputs[1:]

        return call

    def seconds(make) -> float:
        call = make()
        gc.collect()  # Else it collects, in every other round, what the calls before it have left.
        started = time.perf_counter()
        outputs = call()
        jax.block_until_ready([x for x in jax.tree.leaves(outputs) if isinstance(x, jax.Array)])
        return time.perf_counter() - started

    makers = {"jax.jit": by_jit, "stepcache, resident": by_variables}
    seconds(by_jit)
    measured: dict[str, list[float]] = {name: [] for name in makers}
    for number in range(rounds):
        for name in sorted(makers, reverse=bool(number % 2)):
            measured[name].append(seconds(makers[name]))
    return compared(f"first call, {case}", measured)


def moments_on_host(layers: int) -> dict:
    """Adamw whose moments are in the host's memory, by hand and with `Variables`."""
    train_step, batch = make_train_step(layers), jax.device_put(make_batch())
    state = jax.tree.map(np.asarray, make_state(layers))
    device = jax.devices()[0]
    here = jax.sharding.SingleDeviceSharding(device)
    there = jax.sharding.SingleDeviceSharding(device, memory_kind="pinned_host")

    def split(params, moments, batch):
        new, loss = train_step({"params": params, "optimizer": moments}, batch)
        return new["params"], new["optimizer"], loss

    def inside(params, moments, batch):
        return split(params, jax.device_put(moments, here), batch)

    donated = ("params", "moments")
    outside = jax.jit(split, donate_argnames=donated)
    within = jax.jit(inside, donate_argnames=donated, out_shardings=(here, there, here))

    def by_hand(step, before, after):
        params = jax.tree.map(jnp.array, state["params"])
        moments = jax.device_put(jax.tree.map(jnp.array, state["optimizer"]), there)

        def call():
            nonlocal params, moments
            params, moments, loss = step(params, before(moments), batch)
            moments = after(moments)
            return loss

        return call

    step = sc.step(split, carry=donated)
    held = sc.Variables(state["params"]), sc.Variables(state["optimizer"], placement=sc.OnHost())
    return {
        "copies by hand": by_hand(
            outside,
            lambda tree: jax.device_put(tree, here),
            lambda tree: jax.device_put(tree, there),
        ),
        "copies in the program": by_hand(within, lambda tree: tree, lambda tree: tree),
        "stepcache, OnHost": lambda: step(*held, batch)[2],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="show that it runs; no real figures")
    quick = parser.parse_args().quick
    settings = {"rounds": 3 if quick else 21, "batch_seconds": 0.005 if quick else 0.05}
    long = {**settings, "batch_seconds": 10 * settings["batch_seconds"]}
    counts = (1,) if quick else (1, 10, 30, 100, 300, 1000)
    models = (1,) if quick else (12, 24)
    rows, firsts, first_rounds = [], [], 1 if quick else 5
    for count in counts:
        leaves, objects = small(count)
        case = counted(count, "leaf")
        rows += interleaved(f"null step, {case}", contenders(leaves, objects), **settings)
        firsts += first_calls(case, null_step, leaves, (), first_rounds)
    for case, pair in ways().items():
        rows += interleaved(f"null step, {case}", pair, **settings)
    for layers in models:
        state, batch = model_state(layers)[0], jax.device_put(make_batch())
        rows += interleaved(f"training step, {layers} layers", training(layers), **long)
        case = f"training step, {layers} layers"
        firsts += first_calls(case, make_train_step(layers), state, (batch,), min(3, first_rounds))
    case = f"moments on the host, {models[0]} layers"
    rows += interleaved(case, moments_on_host(models[0]), **long)
    show("a step that carries its state", rows)
    show("first calls", firsts, "ms")
    if not quick:
        print(f"written to {write('resident', rows + firsts, {}, **settings)}")


if __name__ == "__main__":
    main()
