"""A Trainer that compiles its own bound method once it knows what it trains."""

import dataclasses
import time
import uuid

import jax
import jax.numpy as jnp
import numpy as np
import optax

import stepcache as sc


@dataclasses.dataclass(frozen=True)
class Options:
    weight_decay: float = 0.0
    log_every: int = 2
    name: str = dataclasses.field(default_factory=lambda: f"rmsprop at {time.ctime()}")
    run: str = dataclasses.field(default_factory=lambda: uuid.uuid4().hex)
    started: float = dataclasses.field(default_factory=time.time)


class Trainer:
    def __init__(self, optimizer, options):
        self.optimizer = optimizer
        self.options = options
        self.steps_done = 0
        self.run_log = []
        self.step = sc.step(self._step, donate_argnums=0)

    def loss(self, params, batch):
        hidden = jax.nn.relu(batch["x"] @ params["in"])
        loss = jnp.mean((hidden @ params["out"] - batch["y"]) ** 2)
        return loss + self.options.weight_decay * optax.tree.norm(params) ** 2

    def _step(self, state, batch):
        params, opt_state = state
        loss, grads = jax.value_and_grad(self.loss)(params, batch)
        updates, opt_state = self.optimizer.update(grads, opt_state, params)
        return (optax.apply_updates(params, updates), opt_state), loss

    def fit(self, params, batches):
        state = (params, self.optimizer.init(params))
        for batch in batches:
            state, loss = self.step(state, batch)
            self.steps_done += 1
            self.run_log.append(float(loss))
            if self.steps_done % self.options.log_every == 0:
                print(f"step {self.steps_done}: loss {self.run_log[-1]:.6f}")
        return state[0]


def batches(count, rows):
    rng = np.random.default_rng(0)
    for _ in range(count):
        x = rng.normal(size=(rows, 4)).astype(np.float32)
        yield {"x": x, "y": np.abs(x).sum(axis=1, keepdims=True)}


if __name__ == "__main__":
    key_in, key_out = jax.random.split(jax.random.key(0))
    params = {
        "in": jax.random.normal(key_in, (4, 8)) / 2,
        "out": jax.random.normal(key_out, (8, 1)) / 3,
    }
    trainer = Trainer(optax.rmsprop(0.01), Options(weight_decay=1e-4))
    params = trainer.fit(params, batches(10, rows=16))
    params = trainer.fit(params, batches(4, rows=8))
    print(f"best {min(trainer.run_log):.6f} of {trainer.steps_done}")
