"""An equinox model, partitioned into its arrays and the rest."""

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax

import stepcache as sc


class Regressor(eqx.Module):
    layers: list
    scale: jax.Array

    def __init__(self, key):
        first, second = jax.random.split(key)
        self.layers = [
            eqx.nn.Linear(3, 16, key=first),
            jax.nn.gelu,
            eqx.nn.MLP(16, 1, 8, 1, key=second),
        ]
        self.scale = jnp.ones(())

    def __call__(self, x):
        for layer in self.layers:
            x = layer(x)
        return self.scale * x[0]


model = Regressor(jax.random.key(0))
params, static = eqx.partition(model, eqx.is_inexact_array)
optimizer = optax.adam(3e-3)
opt_state = optimizer.init(params)


def loss_fn(params, x, y):
    model = eqx.combine(params, static)
    return jnp.mean((jax.vmap(model)(x) - y) ** 2)


@sc.step(donate_argnums=(0, 1))
def make_step(params, opt_state, x, y):
    loss, grads = jax.value_and_grad(loss_fn)(params, x, y)
    updates, opt_state = optimizer.update(grads, opt_state, params)
    return eqx.apply_updates(params, updates), opt_state, loss


rng = np.random.default_rng(0)
for step in range(10):
    x = rng.normal(size=(16, 3)).astype(np.float32)
    params, opt_state, loss = make_step(params, opt_state, x, x.sum(axis=1))
    print(f"step {step}: loss {loss:.6f}")
model = eqx.combine(params, static)
print(f"prediction {model(jnp.ones(3)):.6f}")
