"""A flax nnx model whose small variables lie in buffers between the calls of its step."""

import numpy as np
import optax
from flax import nnx
from nnx_models import Classifier, get_batch

from stepcache import nnx as snnx

model = Classifier(4, 3, nnx.Rngs(params=0, dropout=1))
optimizer = nnx.Optimizer(model, optax.adamw(1e-2), wrt=nnx.Param)


def loss_fn(model, x, y):
    logits = model(x)
    return optax.softmax_cross_entropy_with_integer_labels(logits, y).mean()


@snnx.step(pack=True)
def train_step(model, optimizer, x, y):
    loss, grads = nnx.value_and_grad(loss_fn)(model, x, y)
    optimizer.update(model, grads)
    return loss


rng = np.random.default_rng(0)
for step in range(12):
    loss = train_step(model, optimizer, *get_batch(rng))
    if step % 5 == 0:  # A look at a value, in between.
        total = float(abs(model.hidden.kernel[...]).sum())
        print(f"step {step}: loss {loss:.6f}, sum {total:.6f}")
print(f"steps {int(optimizer.step[...])}")
