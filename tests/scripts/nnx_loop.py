"""A flax nnx model with dropout and batch norm, split for a functional training step."""

import jax
import numpy as np
import optax
from flax import nnx
from nnx_models import Classifier, get_batch, loss_and_rest

import stepcache as sc

model = Classifier(4, 3, nnx.Rngs(params=0, dropout=1))
tx = optax.sgd(0.1, momentum=0.9)
graphdef, params, rest = nnx.split(model, nnx.Param, ...)
opt_state = tx.init(params)


@sc.step(donate_argnames=("params", "opt_state"))
def train_step(params, rest, opt_state, x, y):
    def loss_fn(params):
        return loss_and_rest(graphdef, params, rest, x, y)

    (loss, rest), grads = jax.value_and_grad(loss_fn, has_aux=True)(params)
    updates, opt_state = tx.update(grads, opt_state, params)
    return optax.apply_updates(params, updates), rest, opt_state, loss


rng = np.random.default_rng(0)
for step in range(12):
    x, y = get_batch(rng)
    params, rest, opt_state, loss = train_step(params, rest, opt_state, x, y)
    print(f"step {step}: loss {loss:.6f}")

nnx.update(model, params, rest)
print(f"mean of the running mean: {float(model.norm.mean[...].mean()):.6f}")
