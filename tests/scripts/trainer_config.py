"""A trainer whose configuration names its run, makes its directory and draws its seed by itself.

It is a field of the model, and is passed to the loss.
"""

import argparse
import dataclasses
import os
import tempfile
import time
import uuid

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax.training import train_state

import stepcache as sc


@dataclasses.dataclass
class Config:
    rate: float = 1e-3
    width: int = 8
    name: str = dataclasses.field(default_factory=lambda: f"run-{uuid.uuid4().hex[:6]}")
    directory: str = dataclasses.field(default_factory=lambda: tempfile.mkdtemp(dir="."))
    seed: int = dataclasses.field(default_factory=os.getpid)


class Network(nn.Module):
    config: Config

    @nn.compact
    def __call__(self, x):
        return nn.Dense(1)(nn.relu(nn.Dense(self.config.width)(x)))


class State(train_state.TrainState):
    averages: dict


def loss_of(params, apply, batch, config):
    predicted = apply({"params": params}, batch["x"])
    decay = sum(jnp.sum(each**2) for each in jax.tree.leaves(params))
    return jnp.mean((predicted - batch["y"]) ** 2) + config.rate * decay


class Base:
    def __init__(self, config):
        self.config, self.started, self.lines = config, time.time(), []

    def log(self, **values):
        self.lines.append(values)


class Trainer(Base):
    def __init__(self, config):
        super().__init__(config)
        self.network, self.steps = Network(config), 0
        tx = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(config.rate))
        params = self.network.init(jax.random.key(config.seed), jnp.ones((1, 3)))["params"]
        averages = jax.tree.map(jnp.copy, params)
        self.state = State.create(
            apply_fn=self.network.apply, params=params, tx=tx, averages=averages
        )
        self.train_step = sc.step(self._train, carry="state")
        self.eval_step = sc.step(self._evaluate)

    def _train(self, state, batch, key):
        noisy = {**batch, "x": batch["x"] + 0.1 * jax.random.normal(key, batch["x"].shape)}
        arguments = state.params, state.apply_fn, noisy, self.config
        loss, gradients = jax.value_and_grad(loss_of)(*arguments)
        state = state.apply_gradients(grads=gradients)
        averages = optax.incremental_update(state.params, state.averages, 0.1)
        return state.replace(averages=averages), {"loss": loss}

    def _evaluate(self, params, batch):
        return loss_of(params, self.network.apply, batch, self.config)

    def fit(self, steps):
        random = np.random.default_rng()
        for number in range(steps):
            size = 8 if number < steps - 1 else 5
            batch = {"x": random.normal(size=(size, 3)).astype("f4"), "y": np.ones((size, 1), "f4")}
            key = jax.random.key(number)
            self.state, metrics = self.train_step(self.state, batch, key)
            self.steps += 1
            self.log(step=self.steps, **{name: float(each) for name, each in metrics.items()})
        return float(self.eval_step(self.state.averages, batch))


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=5)
    print("a loss:", Trainer(Config()).fit(parser.parse_args().steps) > 0)
