"""States of training that steps make, of the model and the optimizer that they are given or hold.

As flax's guide to sharded training has it: `jax.jit(init, static_argnums=…)` makes the state.
"""

import functools

import flax.linen as nn
import jax
import jax.numpy as jnp
import optax
from flax.training.train_state import TrainState

import stepcache as sc


class Network(nn.Module):
    width: int

    @nn.compact
    def __call__(self, x):
        return nn.Dense(1)(nn.relu(nn.Dense(self.width)(x)))


@functools.partial(sc.step, static_argnums=(2, 3))
def made_of_statics(key, x, model, optimizer):
    params = model.init(key, x)["params"]
    return TrainState.create(apply_fn=model.apply, params=params, tx=optimizer)


MODEL, OPTIMIZER = Network(4), optax.sgd(0.1)


def initial(key, x):
    return MODEL.init(key, x)["params"]


@sc.step
def made_of_globals(key, x):
    params = initial(key, x)
    return {"states": [TrainState.create(apply_fn=MODEL.apply, params=params, tx=OPTIMIZER)]}


def made_by(key, x, model, optimizer):
    params = model.init(key, x)["params"]
    return TrainState.create(apply_fn=model.apply, params=params, tx=optimizer)


class Trainer:
    def __init__(self, rate):
        self.model, self.optimizers = Network(6), {"main": optax.adam(rate)}
        self.init = sc.step(self._init)
        self.train = sc.step(self._train, carry="state")

    def _init(self, key, x):
        return made_by(key, x, self.model, self.optimizers["main"])

    def _train(self, state, x, y):
        def loss_of(params):
            return jnp.mean((state.apply_fn({"params": params}, x) - y) ** 2)

        loss, gradients = jax.value_and_grad(loss_of)(state.params)
        return state.apply_gradients(grads=gradients), loss


def main():
    key, x, y = jax.random.key(0), jnp.ones((2, 3)), jnp.ones((2, 1))
    model, optimizer = Network(5), optax.adamw(1e-3)
    state = made_of_statics(key, x, model, optimizer)
    assert state.apply_fn == model.apply and state.tx is optimizer
    state = made_of_globals(key, x)["states"][0]
    assert state.apply_fn == MODEL.apply and state.tx is OPTIMIZER
    captured = Network(7), optax.sgd(0.2)
    made = sc.step(functools.partial(made_by, model=captured[0], optimizer=captured[1]))
    assert made(key, x).tx is captured[1]

    def made_of_cells(key, x):
        return made_by(key, x, *captured)

    state = sc.step(made_of_cells)(key, x)
    assert state.apply_fn == captured[0].apply and state.tx is captured[1]
    trainer = Trainer(1e-2)
    state = trainer.init(key, x)
    assert state.apply_fn == trainer.model.apply
    for _ in range(3):
        state, loss = trainer.train(state, x, y)
    print(f"loss {loss:.6f}")


if __name__ == "__main__":
    main()
