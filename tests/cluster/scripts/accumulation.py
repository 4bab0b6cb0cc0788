"""Gradients of micro-batches added up by a scan, an average of weights, and an early stop."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.experimental import multihost_utils
from jax.sharding import AxisType

import stepcache as sc

MICRO = 2
tx = optax.sgd(0.2)


@sc.step(carry="state", batch="batch")
def train_step(state, batch):
    micro = jax.tree.map(lambda x: x.reshape(-1, MICRO, *x.shape[1:]).swapaxes(0, 1), batch)

    def loss_fn(params, part):
        return jnp.mean((part["x"] @ params - part["y"]) ** 2)

    def add(total, part):
        loss, grads = jax.value_and_grad(loss_fn)(state["params"], part)
        return total + grads, loss

    total, losses = jax.lax.scan(add, jnp.zeros_like(state["params"]), micro)
    updates, opt_state = tx.update(total / MICRO, state["opt_state"])
    params = optax.apply_updates(state["params"], updates)
    return {"params": params, "opt_state": opt_state}, losses.mean()


@sc.step(carry="average")
def update_average(average, params, decay):
    return optax.incremental_update(params, average, 1 - decay)


def main():
    jax.distributed.initialize()
    params = np.zeros(3, np.float32)
    state = {"params": params, "opt_state": tx.init(params)}
    average = params.copy()
    mesh = jax.make_mesh((jax.device_count(),), ("data",), axis_types=(AxisType.Auto,))
    with sc.Session(mesh):
        for step in range(100):
            x = np.random.default_rng(step).normal(size=(8, 3)).astype(np.float32)
            x = np.split(x, jax.process_count())[jax.process_index()]
            state, loss = train_step(state, {"x": x, "y": x @ np.arange(3, dtype=np.float32)})
            average = update_average(average, state["params"], 0.9 if step > 2 else 0.5)
            if jax.process_index() == 0:
                print(f"step {step}: loss {loss:.6f}")
            # The clock, or a signal, may say so on one rank only.
            stop = jax.process_index() == 0 and loss < 0.5
            if multihost_utils.broadcast_one_to_all(np.asarray(stop)):
                break
    if jax.process_index() == 0:
        print(f"the average: loss {np.abs(jax.device_get(average)).sum():.6f}")


if __name__ == "__main__":
    main()
