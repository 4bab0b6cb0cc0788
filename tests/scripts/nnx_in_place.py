"""A flax nnx model, optimizer and metrics, updated in place by steps."""

import numpy as np
import optax
from flax import nnx
from nnx_models import Classifier, get_batch

from stepcache import nnx as snnx

model = Classifier(4, 3, nnx.Rngs(params=0, dropout=1))
optimizer = nnx.Optimizer(model, optax.adamw(1e-2), wrt=nnx.Param)
metrics = nnx.MultiMetric(loss=nnx.metrics.Average("loss"), accuracy=nnx.metrics.Accuracy())


def loss_fn(model, x, y):
    logits = model(x)
    return optax.softmax_cross_entropy_with_integer_labels(logits, y).mean(), logits


@snnx.step
def train_step(model, optimizer, metrics, x, y):
    (loss, logits), grads = nnx.value_and_grad(loss_fn, has_aux=True)(model, x, y)
    optimizer.update(model, grads)
    metrics.update(loss=loss, logits=logits, labels=y)
    return loss


@snnx.step(graph=False)
def eval_step(model, x, y):
    return loss_fn(model, x, y)[0]


rng = np.random.default_rng(0)
for step in range(12):
    x, y = get_batch(rng)
    loss = train_step(model, optimizer, metrics, x, y)
    print(f"step {step}: loss {loss:.6f}")

model.eval()
print(f"test loss {eval_step(model, *get_batch(rng)):.6f}")
print(f"steps {int(optimizer.step[...])}, accuracy {metrics.compute()['accuracy']:.4f}")
