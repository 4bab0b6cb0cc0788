"""Flags of absl: the step reads one by the registry, one by its holder; one differs in each run."""

import tempfile

import jax
import jax.numpy as jnp
import numpy as np
from absl import app, flags
from models import init

import stepcache as sc

FLAGS = flags.FLAGS
LR = flags.DEFINE_float("lr", 0.1, "Learning rate.")
flags.DEFINE_integer("layers", 2, "Number of layers.")
flags.DEFINE_string("workdir", tempfile.mkdtemp(), "Where to write.")
flags.DEFINE_integer("steps", 5, "Number of steps.")


@sc.step(carry="params")
def train_step(params, x):
    def loss_fn(params):
        h = x
        for weights in params[:-1]:
            h = jnp.tanh(h @ weights)
        return jnp.mean((h @ params[-1]) ** 2) / FLAGS.layers

    loss, grads = jax.value_and_grad(loss_fn)(params)
    return jax.tree.map(lambda p, g: p - LR.value * g, params, grads), loss


def main(_):
    params = init(FLAGS.layers)
    x = np.random.default_rng(0).normal(size=(16, 3)).astype(np.float32)
    for step in range(FLAGS.steps):
        params, loss = train_step(params, x)
        print(f"step {step}: loss {loss:.6f}")


if __name__ == "__main__":
    app.run(main)
