"""An equinox model with batch norm, as `filter_jit` takes it."""

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax

from stepcache import equinox as seqx


class Regressor(eqx.Module):
    first: eqx.nn.Linear
    norm: eqx.nn.BatchNorm
    rest: eqx.nn.MLP
    power: int = eqx.field(static=True)

    def __init__(self, key):
        keys = jax.random.split(key)
        self.first = eqx.nn.Linear(3, 16, key=keys[0])
        self.norm = eqx.nn.BatchNorm(16, "batch", mode="batch")
        self.rest = eqx.nn.MLP(16, "scalar", 16, 1, activation=jax.nn.gelu, key=keys[1])
        self.power = 2

    def __call__(self, x, state):
        x, state = self.norm(self.first(x) ** self.power, state)
        return self.rest(x), state


model, state = eqx.nn.make_with_state(Regressor)(jax.random.key(0))
optimizer = optax.adam(1e-2)
opt_state = optimizer.init(eqx.filter(model, eqx.is_inexact_array))


@eqx.filter_value_and_grad(has_aux=True)
def loss_fn(model, state, x, y):
    run = jax.vmap(model, axis_name="batch", in_axes=(0, None), out_axes=(0, None))
    predicted, state = run(x, state)
    return jnp.mean((predicted - y) ** 2), state


@seqx.step(donate="all")
def make_step(model, state, opt_state, x, y):
    (loss, state), grads = loss_fn(model, state, x, y)
    updates, opt_state = optimizer.update(grads, opt_state, eqx.filter(model, eqx.is_array))
    return eqx.apply_updates(model, updates), state, opt_state, loss


rng = np.random.default_rng(0)
for step in range(10):
    x = rng.normal(size=(16, 3)).astype(np.float32)
    model, state, opt_state, loss = make_step(model, state, opt_state, x, x.sum(axis=1))
    print(f"step {step}: loss {loss:.6f}")
