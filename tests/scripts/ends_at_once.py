"""A step that is called once; then the script is over, as `--how` says."""

import argparse
import sys

import jax
import jax.numpy as jnp
import numpy as np

import stepcache as sc

parser = argparse.ArgumentParser()
parser.add_argument("--how", choices=("falls off", "exits", "raises"), default="falls off")
args = parser.parse_args()


@sc.step
def fit(x, y):
    def descend(w, _):
        loss, grads = jax.value_and_grad(lambda w: jnp.mean((x @ w - y) ** 2))(w)
        return w - 0.1 * grads, loss

    return jax.lax.scan(descend, jnp.zeros(x.shape[1]), length=50)


x = np.random.default_rng(0).normal(size=(32, 5)).astype(np.float32)
w, losses = fit(x, x.sum(axis=1))
print(f"loss {losses[-1]:.6f}", flush=True)
if args.how == "exits":
    sys.exit(3)
if args.how == "raises":
    raise RuntimeError("the data set ends here")
