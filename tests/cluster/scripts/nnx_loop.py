"""A flax nnx model with dropout and batch norm, split for a functional step; all at top level."""

import jax
import numpy as np
import optax
from flax import nnx
from jax.sharding import AxisType

import stepcache as sc

jax.distributed.initialize()
RANK, COUNT = jax.process_index(), jax.process_count()


class Classifier(nnx.Module):
    def __init__(self, features: int, classes: int, rngs: nnx.Rngs):
        self.hidden = nnx.Linear(features, 16, rngs=rngs)
        self.norm = nnx.BatchNorm(16, rngs=rngs)
        self.dropout = nnx.Dropout(0.1, rngs=rngs)
        self.head = nnx.Linear(16, classes, rngs=rngs)

    def __call__(self, x):
        x = nnx.relu(self.norm(self.hidden(x)))
        return self.head(self.dropout(x))


model = Classifier(4, 3, nnx.Rngs(params=0, dropout=1))
tx = optax.sgd(0.1, momentum=0.9)
graphdef, params, rest = nnx.split(model, nnx.Param, ...)
opt_state = tx.init(params)
mesh = jax.make_mesh((jax.device_count(),), ("data",), axis_types=(AxisType.Auto,))


@sc.step(carry=("params", "rest", "opt_state"), batch=("x", "y"))
def train_step(params, rest, opt_state, x, y):
    def loss_fn(params):
        model = nnx.merge(graphdef, params, rest, copy=True)
        model.train()
        logits = model(x)
        loss = optax.softmax_cross_entropy_with_integer_labels(logits, y).mean()
        _, _, new_rest = nnx.split(model, nnx.Param, ...)
        return loss, new_rest

    (loss, rest), grads = jax.value_and_grad(loss_fn, has_aux=True)(params)
    updates, opt_state = tx.update(grads, opt_state, params)
    return optax.apply_updates(params, updates), rest, opt_state, loss


rng = np.random.default_rng(0)
with sc.Session(mesh):
    for step in range(6):
        y = rng.integers(0, 3, size=24)
        x = (rng.normal(size=(24, 4)) + y[:, None]).astype(np.float32)
        x, y = np.split(x, COUNT)[RANK], np.split(y, COUNT)[RANK]
        params, rest, opt_state, loss = train_step(params, rest, opt_state, x, y)
        if RANK == 0:
            print(f"step {step}: loss {loss:.5f}")

nnx.update(model, jax.device_get(params), jax.device_get(rest))
if RANK == 0:
    print(f"running mean: loss {float(model.norm.mean[...].mean()):.5f}")
