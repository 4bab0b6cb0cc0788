"""The example of the README, whose printed output the README shows."""

import jax.numpy as jnp
import numpy as np

import stepcache as sc


@sc.step(carry="state")
def train_step(state, batch):
    error = batch["x"] @ state["w"] - batch["y"]
    return {"w": state["w"] - 0.1 * batch["x"].T @ error / len(error)}, jnp.mean(error**2)


state = {"w": np.zeros(3, np.float32)}
for rows in (32, 32, 31):
    batch = {"x": np.ones((rows, 3), np.float32), "y": np.ones(rows, np.float32)}
    state, loss = train_step(state, batch)
    print(f"{rows} rows, loss {loss:.3f}")
print(train_step.last_miss)
