"""A trainer whose attributes are called as JAX calls things of its own."""

import argparse

import jax
import jax.numpy as jnp

import stepcache as sc


class Trainer:
    def __init__(self, factor, run):
        self.factor = factor
        self.data = self.step = self.seed = self.host = self.counter = self.context = run

    @sc.step(static_argnums=0)
    def train(self, x):
        keys = jax.random.split(jax.random.key(0))
        noise = jax.lax.map(jnp.sin, jax.vmap(jax.random.normal)(keys)).sum()
        return jax.jit(jnp.multiply)(x, self.factor) + noise


parser = argparse.ArgumentParser()
parser.add_argument("--factor", type=float, default=2.0)
parser.add_argument("--run", default="first")
args = parser.parse_args()
trainer = Trainer(args.factor, args.run)
print(f"loss {trainer.train(jnp.ones(())):.6f}")
