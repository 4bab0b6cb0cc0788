"""Data parallel over eight devices: the state is replicated, the batch is split."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import AxisType

import stepcache as sc

optimizer = optax.adam(0.02)


def loss_fn(params, batch):
    hidden = jnp.tanh(batch["image"] @ params["in"]["kernel"] + params["in"]["bias"])
    logits = hidden @ params["out"]["kernel"]
    return optax.softmax_cross_entropy_with_integer_labels(logits, batch["label"]).mean()


@sc.step(carry="state", batch="batch")
def train_step(state, batch):
    loss, grads = jax.value_and_grad(loss_fn)(state["params"], batch)
    updates, opt_state = optimizer.update(grads, state["opt_state"])
    params = optax.apply_updates(state["params"], updates)
    return {"params": params, "opt_state": opt_state, "step": state["step"] + 1}, loss


def init(key):
    key_in, key_out = jax.random.split(key)
    params = {
        "in": {"kernel": jax.random.normal(key_in, (16, 8)) / 4, "bias": jnp.zeros(8)},
        "out": {"kernel": jax.random.normal(key_out, (8, 4)) / 3},
    }
    return {"params": params, "opt_state": optimizer.init(params), "step": 0}


def main():
    mesh = jax.make_mesh((jax.device_count(),), ("data",), axis_types=(AxisType.Auto,))
    rng = np.random.default_rng(0)
    templates = rng.normal(size=(4, 16))
    with sc.Session(mesh):
        state = init(jax.random.key(0))
        for _ in range(10):
            label = rng.integers(0, 4, size=64)
            image = templates[label] + rng.normal(size=(64, 16))
            batch = {"image": image.astype(np.float32), "label": label}
            state, loss = train_step(state, batch)
            print(f"step {state['step']}: loss {loss:.6f}")
        print("the bias is at", state["params"]["in"]["bias"].sharding.spec or "every device")
        print(f"{len(state['step'].devices())} devices, {train_step.stats().misses} miss")


if __name__ == "__main__":
    main()
