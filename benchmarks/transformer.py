"""What benchmarks train: a transformer of flax nnx, with adamw."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

WIDTH, HEADS, VOCABULARY, CONTEXT, BATCH = 64, 4, 128, 32, 8
OPTIMIZER = optax.adamw(1e-3)


class Block(nnx.Module):
    def __init__(self, rngs: nnx.Rngs):
        self.norm1, self.norm2 = (nnx.LayerNorm(WIDTH, rngs=rngs) for _ in range(2))
        self.attention = nnx.MultiHeadAttention(HEADS, WIDTH, decode=False, rngs=rngs)
        self.up = nnx.Linear(WIDTH, 4 * WIDTH, rngs=rngs)
        self.down = nnx.Linear(4 * WIDTH, WIDTH, rngs=rngs)

    def __call__(self, x):
        mask = jnp.tril(jnp.ones((CONTEXT, CONTEXT), bool))
        x = x + self.attention(self.norm1(x), mask=mask)
        return x + self.down(nnx.gelu(self.up(self.norm2(x))))


class Transformer(nnx.Module):
    def __init__(self, layers: int, rngs: nnx.Rngs):
        self.embed = nnx.Embed(VOCABULARY, WIDTH, rngs=rngs)
        self.position = nnx.Embed(CONTEXT, WIDTH, rngs=rngs)
        self.blocks = nnx.List([Block(rngs) for _ in range(layers)])
        self.norm = nnx.LayerNorm(WIDTH, rngs=rngs)
        self.head = nnx.Linear(WIDTH, VOCABULARY, rngs=rngs)

    def __call__(self, tokens):
        x = self.embed(tokens) + self.position(jnp.arange(CONTEXT))
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


def make_model(layers: int) -> Transformer:
    return Transformer(layers, nnx.Rngs(0))


def make_train_step(layers: int) -> Callable:
    """`train_step(state, batch) -> (state, loss)`."""
    graph = nnx.graphdef(nnx.eval_shape(lambda: make_model(layers)))

    def train_step(state, batch):
        def loss_of(params):
            logits = nnx.merge(graph, params)(batch["inputs"])
            losses = optax.softmax_cross_entropy_with_integer_labels(logits, batch["targets"])
            return losses.mean()

        loss, gradients = jax.value_and_grad(loss_of)(state["params"])
        updates, moments = OPTIMIZER.update(gradients, state["optimizer"], state["params"])
        return {"params": optax.apply_updates(state["params"], updates), "optimizer": moments}, loss

    return train_step


def make_state(layers: int) -> dict[str, Any]:
    """What the first step begins with."""
    params = nnx.state(make_model(layers))
    return {"params": params, "optimizer": OPTIMIZER.init(params)}


def make_batch(rows: int = BATCH) -> dict[str, np.ndarray]:
    tokens = np.zeros((rows, CONTEXT), np.int32)
    return {"inputs": tokens, "targets": tokens}
