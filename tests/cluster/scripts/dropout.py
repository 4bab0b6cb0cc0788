"""Dropout with a key that is folded with the step number, and one drawn on the host."""

from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import struct
from jax.sharding import AxisType

import stepcache as sc


class Encoder(nn.Module):
    width: int = 16
    rate: float = 0.2

    @nn.compact
    def __call__(self, x, *, train: bool):
        for _ in range(2):
            x = nn.gelu(nn.Dense(self.width)(x))
            x = nn.Dropout(self.rate, deterministic=not train)(x)
        return nn.Dense(1)(x)[..., 0]


@struct.dataclass
class State:
    step: int
    params: Any
    opt_state: Any
    key: jax.Array


model = Encoder()
tx = optax.adamw(1e-2)


@sc.step(carry="state", batch="batch", static_argnames="train")
def step_fn(state, batch, dropout_key=None, *, train):
    if dropout_key is None:
        dropout_key = jax.random.fold_in(state.key, state.step)

    def loss_fn(params):
        out = model.apply(
            {"params": params}, batch["x"], train=train, rngs={"dropout": dropout_key}
        )
        return jnp.mean((out - batch["y"]) ** 2)

    if not train:
        return state, loss_fn(state.params)
    loss, grads = jax.value_and_grad(loss_fn)(state.params)
    updates, opt_state = tx.update(grads, state.opt_state, state.params)
    params = optax.apply_updates(state.params, updates)
    return state.replace(step=state.step + 1, params=params, opt_state=opt_state), loss


def get_batch(step):
    x = np.random.default_rng(step).normal(size=(16, 4)).astype(np.float32)
    x = np.split(x, jax.process_count())[jax.process_index()]
    return {"x": x, "y": np.sin(x).sum(axis=1)}


def main():
    jax.distributed.initialize()
    key, init_key = jax.random.split(jax.random.key(42))
    init = jax.jit(model.init, static_argnames="train")
    params = init(init_key, jnp.ones((1, 4)), train=False)["params"]
    state = State(step=0, params=params, opt_state=tx.init(params), key=key)
    mesh = jax.make_mesh((jax.device_count(),), ("data",), axis_types=(AxisType.Auto,))
    key = jax.random.key(7)
    with sc.Session(mesh):
        for step in range(6):
            key, dropout_key = jax.random.split(key)
            given = dropout_key if step > 3 else None
            state, loss = step_fn(state, get_batch(step), given, train=True)
            state, held_out = step_fn(state, get_batch(99), train=False)
            if jax.process_index() == 0:
                print(f"step {state.step}: loss {loss:.6f}, held out {held_out:.6f}")


if __name__ == "__main__":
    main()
