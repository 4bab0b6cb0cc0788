"""A sweep: twenty steps of one factory, which differ in what they have closed over."""

import jax
import jax.numpy as jnp
import numpy as np

import stepcache as sc


def make_train_step(rate, momentum):
    @sc.step(carry="state")
    def train_step(state, x, y):
        def loss_fn(w):
            return jnp.mean((x @ w - y) ** 2)

        loss, grads = jax.value_and_grad(loss_fn)(state["w"])
        velocity = momentum * state["velocity"] - rate * grads
        return {"w": state["w"] + velocity, "velocity": velocity}, loss

    return train_step


rng = np.random.default_rng(0)
x = rng.normal(size=(16, 3)).astype(np.float32)
y = x @ np.array([1.0, 2.0, 3.0], np.float32)

results = {}
for momentum in (0.0, 0.9):
    for rate in np.linspace(0.01, 0.1, 10).tolist():
        train_step = make_train_step(rate, momentum)
        state = {"w": jnp.zeros(3), "velocity": jnp.zeros(3)}
        for _ in range(3):
            state, loss = train_step(state, x, y)
        results[rate, momentum] = float(loss)
        print(f"rate {rate:.2f}, momentum {momentum}: loss {loss:.6f}")
print("best:", min(results, key=results.get))
