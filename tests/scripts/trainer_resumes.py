"""Trainers that keep their weights in attributes, save them, and go on with them when run again."""

import dataclasses
import functools
import time
from pathlib import Path
from typing import Any, NamedTuple

import equinox as eqx
import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

import stepcache as sc
import stepcache.nnx

SAVED = Path("saved")
# JAX and its frameworks, too, have attributes with most of these names.
USUAL_NAMES = """
    args axis batch_stats best buffer cache checkpoint children config count counter data dataset
    depth device devices dtype env epsilon events features flags func function graphdef grads hash
    history hooks hparams i idx index items iteration key keys kind layers leaf leaves length
    loader loss losses max mean mesh metadata metrics min mode momentum mutable name ndim num_steps
    obs opt_state options params parent path rank rng rngs root sampler schedule scope seed shape
    sharding size spec state step submodule sum tags time total train training tree treedef type
    value values variables version width workdir
""".split()


class Network(nn.Module):
    @nn.compact
    def __call__(self, x):
        return nn.Dense(2)(nn.relu(nn.Dense(8)(x)))


class Keeping:
    def __init__(self):
        for name in USUAL_NAMES:
            setattr(self, name, time.time_ns())


class Loss:
    def __init__(self, target):
        self.target = target


class MaskedLoss(Loss):
    """A loss that steps make, whose constructor begins with that of its base."""

    def __init__(self, target, mask):
        super().__init__(target)
        self.mask = mask

    def __call__(self, logits):
        return jnp.mean((logits - self.target) ** 2 * self.mask)


class Trainer(Keeping):
    """Its step takes what it also keeps as `params`, `opt_state` and `rng`."""

    def __init__(self):
        super().__init__()
        self.model = Network()
        self.tx = optax.adam(0.01)
        self.rng = jax.random.key(len([*SAVED.glob("*")]))
        self.params = restored("trainer", self.model.init(jax.random.key(0), jnp.ones((1, 4))))
        self.opt_state = self.tx.init(self.params)
        self.epoch, self.best = len([*SAVED.glob("*")]), float("inf")

    @functools.partial(sc.step, static_argnums=0)
    def train_step(self, params, opt_state, batch, key):
        def loss_fn(params):
            variables, rngs = {"params": params["params"]}, {"dropout": key}
            logits = self.model.apply(variables, batch["obs"], rngs=rngs)
            return MaskedLoss(batch["target"], batch.get("mask", 1.0))(logits)

        loss, grads = jax.value_and_grad(loss_fn)(params)
        updates, opt_state = self.tx.update(grads, opt_state, params)
        return optax.apply_updates(params, updates), opt_state, loss

    def fit(self, batches):
        for batch in batches:
            self.rng, key = jax.random.split(self.rng)
            state = self.params, self.opt_state
            self.params, self.opt_state, loss = self.train_step(*state, batch, key)
            self.best = min(self.best, float(loss))
        save("trainer", self.params)


class Agent(Keeping):
    """Two sets of weights, a replay buffer, and an update that is a bound method."""

    def __init__(self, discount=0.9):
        super().__init__()
        self.net, self.tx, self.discount = Network(), optax.sgd(0.01), discount
        self.params = restored("agent", self.net.init(jax.random.key(1), jnp.ones((1, 4))))
        self.target_params = self.params
        self.obs = draw(16, 4)
        self.update = sc.step(self._update)

    def _update(self, params, target_params, batch):
        def loss_fn(params):
            target = self.discount * self.net.apply(target_params, batch["next"])
            return jnp.mean((self.net.apply(params, batch["obs"]) - target) ** 2)

        updates, _ = self.tx.update(jax.grad(loss_fn)(params), self.tx.init(params))
        return optax.apply_updates(params, updates)

    def fit(self):
        batch = {"obs": self.obs[:8], "next": self.obs[8:]}
        for _ in range(3):
            self.params = self.update(self.params, self.target_params, batch)
        save("agent", self.params)


class Mlp(nnx.Module):
    def __init__(self, rngs):
        self.layer = nnx.Linear(4, 2, rngs=rngs)

    def __call__(self, x):
        return self.layer(x)


class ModuleTrainer(Keeping):
    """The same with modules of nnx, and with a counter that has the name of the optimizer's."""

    def __init__(self):
        super().__init__()
        self.model = Mlp(nnx.Rngs(2))
        nnx.update(self.model, restored("modules", nnx.state(self.model)))
        self.optimizer = nnx.Optimizer(self.model, optax.adam(0.01), wrt=nnx.Param)
        self.step, self.opt_state = jnp.int32(self.model.layer.kernel[0, 0] * 1000), None
        self.train_step = stepcache.nnx.step(self._train_step)

    def _train_step(self, model, optimizer, x):
        loss, grads = nnx.value_and_grad(lambda model: jnp.mean(model(x) ** 2))(model)
        optimizer.update(model, grads)
        return loss

    def fit(self, x):
        for _ in range(3):
            self.train_step(self.model, self.optimizer, x)
            self.step += 1
        save("modules", nnx.state(self.model))


class State(NamedTuple):
    params: Any
    step: Any


@dataclasses.dataclass
class StateTrainer(Keeping):
    """A dataclass that keeps its weights in a named tuple and in a module of equinox."""

    rate: float = 0.1
    state: Any = None

    def __post_init__(self):
        super().__init__()
        self.model = self.params = restored("states", Affine(jnp.ones((4, 2)), jnp.zeros(2)))
        self.state = State(self.model, jnp.int32(len(list(SAVED.glob("*")))))
        self.update_state = sc.step(self._update_state)

    def _update_state(self, state, batch):
        grads = jax.grad(lambda model: jnp.mean((model(batch["obs"]) - batch["target"]) ** 2))(
            state.params
        )
        params = jax.tree.map(lambda each, grad: each - self.rate * grad, state.params, grads)
        return State(params, state.step + 1)

    def fit(self, batch):
        for _ in range(3):
            self.state = self.update_state(self.state, batch)
        save("states", self.state.params)


class Affine(eqx.Module):
    weight: jax.Array
    bias: jax.Array

    def __call__(self, x):
        return x @ self.weight + self.bias


def save(name, weights):
    SAVED.mkdir(exist_ok=True)
    np.savez(SAVED / name, *map(np.asarray, jax.tree.leaves(weights)))


def restored(name, weights):
    if not (SAVED / f"{name}.npz").exists():
        return weights
    leaves = [jnp.asarray(each) for each in np.load(SAVED / f"{name}.npz").values()]
    return jax.tree.unflatten(jax.tree.structure(weights), leaves)


def draw(*shape):
    return np.random.default_rng().normal(size=shape).astype(np.float32)


if __name__ == "__main__":
    trainer = Trainer()
    trainer.fit([{"obs": draw(8, 4), "target": draw(8, 2)} for _ in range(3)])
    Agent().fit()
    ModuleTrainer().fit(draw(8, 4))
    StateTrainer().fit({"obs": draw(8, 4), "target": draw(8, 2)})
    print("a loss:", trainer.best > 0)
