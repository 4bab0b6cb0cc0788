"""Epochs over a data set that the batch size does not divide: the last batch is short on all."""

import jax
import numpy as np
import optax
from jax.sharding import AxisType

import stepcache as sc

ROWS, BATCH, EPOCHS = 44, 16, 3
tx = optax.chain(optax.clip_by_global_norm(1.0), optax.sgd(optax.cosine_decay_schedule(0.1, 9)))


@sc.step(carry=["params", "opt_state"], batch=["images", "labels"])
def train_step(params, opt_state, images, labels):
    def loss_fn(params):
        logits = jax.nn.relu(images @ params["hidden"]) @ params["head"]
        losses = optax.softmax_cross_entropy_with_integer_labels(logits, labels)
        return losses.mean(), (logits.argmax(-1) == labels).sum()

    (loss, correct), grads = jax.value_and_grad(loss_fn, has_aux=True)(params)
    updates, opt_state = tx.update(grads, opt_state, params)
    return optax.apply_updates(params, updates), opt_state, loss, correct


def epoch(images, labels, seed):
    order = np.random.default_rng(seed).permutation(len(images))
    for start in range(0, len(order), BATCH):
        mine = np.array_split(order[start : start + BATCH], jax.process_count())
        rows = mine[jax.process_index()]
        yield images[rows], labels[rows]


def main():
    jax.distributed.initialize()
    rng = np.random.default_rng(0)
    labels = rng.integers(0, 3, size=ROWS)
    images = (rng.normal(size=(ROWS, 6)) + labels[:, None]).astype(np.float32)
    params = {
        "hidden": (rng.normal(size=(6, 8)) / 3).astype(np.float32),
        "head": (rng.normal(size=(8, 3)) / 3).astype(np.float32),
    }
    opt_state = tx.init(params)
    mesh = jax.make_mesh((jax.device_count(),), ("data",), axis_types=(AxisType.Auto,))
    with sc.Session(mesh):
        for number in range(EPOCHS):
            losses, right = [], 0
            for batch in epoch(images, labels, number):
                params, opt_state, loss, correct = train_step(params, opt_state, *batch)
                losses.append(loss)
                right += int(correct)
            if jax.process_index() == 0:
                print(f"epoch {number}: loss {np.mean(jax.device_get(losses)):.6f}, {right} right")


if __name__ == "__main__":
    main()
