"""Logistic regression with optax; the last batch of an epoch is short."""

import jax
import jax.numpy as jnp
import numpy as np
import optax

import stepcache as sc

EPOCHS = 3
BATCH_SIZE = 32

rng = np.random.default_rng(0)
features = rng.normal(size=(100, 5)).astype(np.float32)
labels = (features @ rng.normal(size=5) > 0).astype(np.float32)

optimizer = optax.adam(optax.cosine_decay_schedule(0.1, decay_steps=100))


def loss_fn(params, batch):
    logits = batch["x"] @ params["w"] + params["b"]
    return optax.sigmoid_binary_cross_entropy(logits, batch["y"]).mean()


@sc.step
def train_step(params, opt_state, batch):
    loss, grads = jax.value_and_grad(loss_fn)(params, batch)
    updates, opt_state = optimizer.update(grads, opt_state, params)
    return optax.apply_updates(params, updates), opt_state, loss


params = {"w": jnp.zeros(5), "b": jnp.zeros(())}
opt_state = optimizer.init(params)
for epoch in range(EPOCHS):
    order = rng.permutation(len(features))
    losses = []
    for start in range(0, len(order), BATCH_SIZE):
        rows = order[start : start + BATCH_SIZE]
        batch = {"x": features[rows], "y": labels[rows]}
        params, opt_state, loss = train_step(params, opt_state, batch)
        losses.append(float(loss))
    print(f"epoch {epoch}: loss {np.mean(losses):.6f}, last batch of {len(rows)}: {losses[-1]:.6f}")
