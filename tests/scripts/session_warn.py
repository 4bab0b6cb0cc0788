"""A session that does nothing but warn of recompiles, on a machine with several devices."""

import jax
import jax.numpy as jnp
import numpy as np

import stepcache as sc


@sc.step(carry="state")
def train_step(state, batch):
    def loss_fn(w):
        return jnp.mean((batch["x"] @ w - batch["y"]) ** 2)

    loss, grads = jax.value_and_grad(loss_fn)(state["w"])
    return {"w": state["w"] - 0.1 * grads, "step": state["step"] + 1}, loss


def get_batch(rng):
    x = rng.normal(size=(16, 4)).astype(np.float32)
    return {"x": x, "y": x[:, 0] - x[:, 3]}


rng = np.random.default_rng(0)
state = {"w": jnp.zeros(4), "step": jnp.zeros((), jnp.int32)}
state, loss = train_step(state, get_batch(rng))  # Before the session: it has to change nothing.
print(f"first loss {loss:.6f}")

with sc.Session(on_miss="warn"):
    for _ in range(10):
        state, loss = train_step(state, get_batch(rng))
        print(f"step {state['step']}: loss {loss:.6f}")

print(f"{jax.device_count()} devices; the state is on", [d.id for d in state["w"].devices()])
print("misses:", train_step.stats().misses)
