"""Python numbers, numpy scalars, old and new PRNG keys, None and strings among the arguments."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
from models import noisy_update

import stepcache as sc


@functools.partial(sc.step, static_argnames="kind")
def train_step(params, key, x, rate, scale=None, kind="gauss"):
    key, noise_key = jax.random.split(key)
    params, loss = noisy_update(params, noise_key, x, rate, scale, kind)
    return params, key, loss


@sc.step
def accumulate(total, value, count):
    return total + value * count


x = np.random.default_rng(0).normal(size=(8, 3)).astype(np.float32)
for key in (jax.random.key(0), jax.random.PRNGKey(0)):
    params, total = jnp.zeros(3), 0.0
    for step in range(6):
        rate = 0.1 / (1 + step)  # A Python float: another value, the same program.
        params, key, loss = train_step(params, key, x, rate)
        total = accumulate(total, loss, step)
        print(f"step {step}: loss {loss:.6f}, total {total:.6f}")

key = jax.random.key(1, impl="rbg")
for step in range(4):
    scale = np.float32(0.5) if step % 2 else None
    kind = "uniform" if step > 1 else "gauss"
    params, key, loss = train_step(params, key, x, 0.05, scale, kind=kind)
    print(f"scale {scale}, {kind}: loss {loss:.6f}")
