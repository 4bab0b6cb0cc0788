"""A flax nnx model with dropout and batch norm, split for a functional step; all at top level."""

import jax
import numpy as np
import optax
from flax import nnx
from jax.sharding import AxisType
from nnx_models import Classifier, get_batch, loss_and_rest

import stepcache as sc

jax.distributed.initialize()
RANK, COUNT = jax.process_index(), jax.process_count()

model = Classifier(4, 3, nnx.Rngs(params=0, dropout=1))
tx = optax.sgd(0.1, momentum=0.9)
graphdef, params, rest = nnx.split(model, nnx.Param, ...)
opt_state = tx.init(params)
mesh = jax.make_mesh((jax.device_count(),), ("data",), axis_types=(AxisType.Auto,))


@sc.step(carry=("params", "rest", "opt_state"), batch=("x", "y"))
def train_step(params, rest, opt_state, x, y):
    def loss_fn(params):
        return loss_and_rest(graphdef, params, rest, x, y)

    (loss, rest), grads = jax.value_and_grad(loss_fn, has_aux=True)(params)
    updates, opt_state = tx.update(grads, opt_state, params)
    return optax.apply_updates(params, updates), rest, opt_state, loss


rng = np.random.default_rng(0)
with sc.Session(mesh):
    for step in range(6):
        x, y = get_batch(rng)
        x, y = np.split(x, COUNT)[RANK], np.split(y, COUNT)[RANK]
        params, rest, opt_state, loss = train_step(params, rest, opt_state, x, y)
        if RANK == 0:
            print(f"step {step}: loss {loss:.5f}")

nnx.update(model, jax.device_get(params), jax.device_get(rest))
if RANK == 0:
    print(f"running mean: loss {float(model.norm.mean[...].mean()):.5f}")
