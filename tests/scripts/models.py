"""For scripts here and in `tests/cluster/scripts`: a model in a file of its own."""

import argparse

import jax
import jax.numpy as jnp
import numpy as np


def options(steps):
    """The options of a training script."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--lr", type=float, default=0.05)
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--steps", type=int, default=steps)
    return parser


def init(layers):
    keys = jax.random.split(jax.random.key(0), layers + 1)
    sizes = [3] + [8] * layers + [1]
    return [
        jax.random.normal(key, shape) / np.sqrt(shape[0])
        for key, shape in zip(keys, zip(sizes, sizes[1:]))
    ]


def noisy_update(params, key, x, rate, scale, kind):
    """Fits all of `x` to 1, with noise."""
    sample = jax.random.normal if kind == "gauss" else jax.random.uniform
    noise = 0.01 * sample(key, x.shape)

    def loss_fn(params):
        return jnp.mean(((x + noise) @ params - 1.0) ** 2)

    loss, grads = jax.value_and_grad(loss_fn)(params)
    if scale is not None:
        grads = grads * scale
    return params - rate * grads, loss
