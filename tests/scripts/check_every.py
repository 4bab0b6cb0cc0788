"""A cautious user: what the step depends on is compared at every call, over two shapes."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax

import stepcache as sc

CONFIG = {"decay": 0.9, "clip": 1.0}
CALLS = []


@functools.lru_cache
def make_optimizer(clip):
    return optax.chain(optax.clip(clip), optax.adam(0.05))


@sc.step
def train_step(params, opt_state, average, batch):
    CALLS.append("traced")

    def loss_fn(params):
        return optax.huber_loss(batch[:, :2] @ params["w"] + params["b"], batch[:, 2]).mean()

    loss, grads = jax.value_and_grad(loss_fn)(params)
    updates, opt_state = make_optimizer(CONFIG["clip"]).update(grads, opt_state, params)
    average = CONFIG["decay"] * average + (1 - CONFIG["decay"]) * loss
    return optax.apply_updates(params, updates), opt_state, average, loss


rng = np.random.default_rng(0)
params = {"w": jnp.zeros(2), "b": jnp.zeros(())}
opt_state = make_optimizer(CONFIG["clip"]).init(params)
average = jnp.zeros(())
with sc.Session(cache=sc.ProgramCache(check_every=1)):
    for step in range(12):
        batch = rng.normal(size=(7 if step % 4 == 3 else 16, 3)).astype(np.float32)
        batch[:, 2] = batch[:, 0] - 2 * batch[:, 1]
        params, opt_state, average, loss = train_step(params, opt_state, average, batch)
        print(f"step {step}: loss {loss:.6f}, average {average:.6f}")
