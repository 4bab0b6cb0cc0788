"""A flax nnx model with dropout and batch norm, and its loss."""

import numpy as np
import optax
from flax import nnx


class Classifier(nnx.Module):
    def __init__(self, features: int, classes: int, rngs: nnx.Rngs):
        self.hidden = nnx.Linear(features, 16, rngs=rngs)
        self.norm = nnx.BatchNorm(16, rngs=rngs)
        self.dropout = nnx.Dropout(0.1, rngs=rngs)
        self.head = nnx.Linear(16, classes, rngs=rngs)

    def __call__(self, x):
        x = nnx.relu(self.norm(self.hidden(x)))
        return self.head(self.dropout(x))


def loss_and_rest(graphdef, params, rest, x, y):
    model = nnx.merge(graphdef, params, rest, copy=True)
    model.train()
    loss = optax.softmax_cross_entropy_with_integer_labels(model(x), y).mean()
    return loss, nnx.split(model, nnx.Param, ...)[2]


def get_batch(rng):
    y = rng.integers(0, 3, size=24)
    return (rng.normal(size=(24, 4)) + y[:, None]).astype(np.float32), y
