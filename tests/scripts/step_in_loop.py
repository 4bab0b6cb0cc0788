"""Steps made where they are used: in a loop, of a lambda, of a partial."""

import functools

import jax
import jax.numpy as jnp
import numpy as np

import stepcache as sc


def objective(w, x, power):
    return jnp.sum(jnp.abs(x @ w - 1.0) ** power)


rng = np.random.default_rng(0)
x = rng.normal(size=(12, 4)).astype(np.float32)

for power in (1.5, 2.0, 3.0):
    descend = sc.step(lambda w: w - 0.01 * jax.grad(objective)(w, x, power))
    measure = sc.step(functools.partial(objective, power=power))
    w = jnp.zeros(4)
    for _ in range(5):
        w = descend(w)
        print(f"power {power}: loss {measure(w, x):.6f}")


def smooth(w):
    return (w + jnp.roll(w, 1)) / 2


for _ in range(10):
    w = sc.step(smooth)(w)
print(f"loss {objective(w, x, 2.0):.6f}")
