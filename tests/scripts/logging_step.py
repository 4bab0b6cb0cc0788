"""A step that logs when it is traced, and a loop that logs its losses."""

import logging

import jax
import jax.numpy as jnp
import numpy as np

import stepcache as sc

logging.basicConfig(format="%(asctime)s %(name)s %(levelname)s: %(message)s")
logger = logging.getLogger(__name__)
logger.setLevel(logging.INFO)


def loss_fn(w, x, y):
    logger.debug("shapes: %s and %s", x.shape, y.shape)
    return jnp.mean((x @ w - y) ** 2)


@sc.step
def train_step(w, x, y):
    logging.getLogger(__name__).info("tracing train_step")
    loss, grads = jax.value_and_grad(loss_fn)(w, x, y)
    return w - 0.1 * grads, loss


def main():
    rng = np.random.default_rng(0)
    w = jnp.zeros(4)
    for step in range(10):
        x = rng.normal(size=(8, 4)).astype(np.float32)
        w, loss = train_step(w, x, x.sum(axis=1))
        print(f"step {step}: loss {loss:.6f}")
        if step % 5 == 0:
            logger.info("step %d", step)
    logger.info("done")


if __name__ == "__main__":
    main()
