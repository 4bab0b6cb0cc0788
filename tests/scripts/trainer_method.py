"""A class with a decorated method, whose `self` is static, as JAX's FAQ shows it."""

import functools

import jax
import jax.numpy as jnp
import numpy as np

import stepcache as sc


class LinearModel:
    def __init__(self, learning_rate, l2):
        self.learning_rate = learning_rate
        self.l2 = l2

    def predict(self, params, x):
        return x @ params["w"] + params["b"]

    def loss(self, params, x, y):
        return jnp.mean((self.predict(params, x) - y) ** 2) + self.l2 * jnp.sum(params["w"] ** 2)

    @functools.partial(sc.step, static_argnums=0)
    def update(self, params, x, y):
        loss, grads = jax.value_and_grad(self.loss)(params, x, y)
        params = jax.tree.map(lambda p, g: p - self.learning_rate * g, params, grads)
        return params, loss


def main():
    rng = np.random.default_rng(1)
    model = LinearModel(learning_rate=0.1, l2=1e-3)
    params = {"w": jnp.zeros(3), "b": jnp.zeros(())}
    for step in range(12):
        x = rng.normal(size=(20, 3)).astype(np.float32)
        y = x @ np.array([1.0, -2.0, 0.5], np.float32) + 3.0
        params, loss = model.update(params, x, y)
        print(f"step {step}: loss {loss:.6f}")
    print("weights", np.round(np.asarray(params["w"]), 4).tolist())


main()
