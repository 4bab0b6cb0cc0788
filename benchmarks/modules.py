"""Calls of steps over modules: `nnx.jit` and its fast forms, `eqx.filter_jit`, and ours.

    python -m benchmarks.modules

A null step over modules of 1 to 1,000 small variables, and an sgd step of a model, its optimizer
and its metrics, in which every array is touched. "looked at": every variable is read after each
call. The last contenders do without modules: `jax.jit` of `nnx.split` state, and of a plain list.
"""

from __future__ import annotations

import argparse
import functools
import os

os.environ["STEPCACHE_DIR"] = "off"  # What is kept between processes is another affair.

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

from benchmarks.harness import interleaved, show, write
from stepcache import equinox as seqx
from stepcache import nnx as snnx
from stepcache.units import counted


class Bag(nnx.Module):
    """Variables, as an nnx user holds them: in layers of two."""

    def __init__(self, count: int):
        self.layers = nnx.List([Pair(number) for number in range((count + 1) // 2)])
        if count % 2:
            del self.layers[-1].bias


class Pair(nnx.Module):
    def __init__(self, number: int):
        self.kernel = nnx.Param(jnp.full(8, number, jnp.float32))
        self.bias = nnx.Param(jnp.full(8, -number, jnp.float32))


class Layer(eqx.Module):
    """The same in equinox."""

    kernel: jax.Array
    bias: jax.Array | None
    activation: object = jax.nn.relu


class Layers(eqx.Module):
    layers: list[Layer]


def add_one(tree):
    return jax.tree.map(lambda x: x + 1 if eqx.is_array(x) else x, tree)


def null_step(bag):
    nnx.update(bag, add_one(nnx.state(bag)))


def null_steps(count: int) -> dict:
    """A null step, as users of each would write it."""

    def on(make_step, **options):
        bag, step = Bag(count), make_step(null_step, **options)
        last = bag.layers[-1].kernel

        def call():
            step(bag)
            return last[...]

        return call

    def partial(make_step):
        bag = Bag(count)
        last, step = bag.layers[-1].kernel, make_step(bag)

        def call():
            step()
            return last[...]

        return call

    def looked_at(make_step):
        bag = Bag(count)
        variables, step = jax.tree.leaves(bag, is_leaf=_is_variable), make_step(bag)

        def call():
            step()
            return [each[...] for each in variables][-1]

        return call

    def jit_partial(bag):
        return nnx.jit_partial(null_step, bag, graph=False)

    def of_arrays(state):
        step = jax.jit(add_one)

        def call():
            nonlocal state
            state = step(state)
            return state

        return call

    return {
        "nnx.jit": on(nnx.jit),
        "nnx.jit, graph=False": on(nnx.jit, graph=False),
        "nnx.cached_partial": partial(lambda bag: nnx.cached_partial(nnx.jit(null_step), bag)),
        "nnx.jit_partial": partial(jit_partial),
        "nnx.jit_partial, looked at": looked_at(jit_partial),
        "stepcache.nnx": on(snnx.step),
        "stepcache.nnx, graph=False": on(snnx.step, graph=False),
        "stepcache.nnx, donated": on(snnx.step, donate_argnums=0),
        "stepcache.nnx, looked at": looked_at(
            lambda bag: functools.partial(snnx.step(null_step), bag)
        ),
        "jax.jit, nnx.split": of_arrays(nnx.split(Bag(count))[1]),
        "jax.jit, list": of_arrays(jax.tree.leaves(Bag(count))),
    }


def _is_variable(x) -> bool:
    return isinstance(x, nnx.Variable)


def train_step(model, optimizer, metrics, x):
    def loss_fn(model):
        y = x
        for layer in model.layers:
            y = jnp.tanh(y * layer.kernel[...] + layer.bias[...])
        return jnp.mean(y)

    loss, grads = nnx.value_and_grad(loss_fn)(model)
    optimizer.update(model, grads)
    metrics.update(loss=loss)
    return loss


def training(count: int) -> dict:
    """An sgd step with momentum: as many variables again in the optimizer."""
    x = jax.device_put(np.ones(8, np.float32))

    def objects():
        model = Bag(count)
        optimizer = nnx.Optimizer(model, optax.sgd(1e-3, momentum=0.9), wrt=nnx.Param)
        return model, optimizer, nnx.MultiMetric(loss=nnx.metrics.Average("loss"))

    def on(make_step, **options):
        given, step = objects(), make_step(train_step, **options)
        return lambda: step(*given, x)

    def partial(make_step):
        step = make_step(*objects())
        return lambda: step(x)

    return {
        "nnx.jit": on(nnx.jit),
        "nnx.cached_partial": partial(
            lambda *given: nnx.cached_partial(nnx.jit(train_step), *given)
        ),
        "nnx.jit_partial": partial(lambda *given: nnx.jit_partial(train_step, *given, graph=False)),
        "stepcache.nnx": on(snnx.step),
        "stepcache.nnx, donated": on(snnx.step, donate_argnums=(0, 1, 2)),
    }


def filtered(count: int) -> dict:
    """A null step over an equinox module."""

    def looping(make_step, **options):
        pairs = [(jnp.ones(8), jnp.ones(8)) for _ in range((count + 1) // 2)]
        if count % 2:
            pairs[-1] = (pairs[-1][0], None)
        model, step = Layers([Layer(*pair) for pair in pairs]), make_step(add_one, **options)

        def call():
            nonlocal model
            model = step(model)
            return model.layers[-1].kernel

        return call

    return {
        "eqx.filter_jit": looping(eqx.filter_jit),
        "eqx.filter_jit, donated": looping(eqx.filter_jit, donate="all"),
        "stepcache.equinox": looping(seqx.step),
        "stepcache.equinox, donated": looping(seqx.step, donate="all"),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="show that it runs; no real figures")
    quick = parser.parse_args().quick
    settings = {"rounds": 3 if quick else 21, "batch_seconds": 0.005 if quick else 0.05}
    counts = (1,) if quick else (1, 10, 100, 1000)
    rows = []
    for count in counts:
        case = counted(count, "variable")
        rows += interleaved(f"nnx null step, {case}", null_steps(count), **settings)
    for count in counts[1:3] or (2,):  # XLA takes minutes to compile one of 1,000.
        case = counted(count, "variable")
        rows += interleaved(f"nnx sgd step, {case}", training(count), **settings)
    for count in counts:
        case = counted(count, "array")
        rows += interleaved(f"equinox null step, {case}", filtered(count), **settings)
    show("steps over modules", rows)
    if not quick:
        print(f"written to {write('modules', rows, {}, **settings)}")


if __name__ == "__main__":
    main()
