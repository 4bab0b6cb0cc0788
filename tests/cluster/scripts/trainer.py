"""A Trainer that knows its rank, compiles its own methods, and keeps times and losses."""

import time

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import AxisType

import stepcache as sc


class Batches:
    """The part of one process of a data set that is shuffled alike on all of them."""

    def __init__(self, rank, count, rows=24, per_batch=8):
        rng = np.random.default_rng(1)
        self.x = rng.normal(size=(rows, 4)).astype(np.float32)
        self.y = np.abs(self.x).sum(axis=1, keepdims=True)
        self.rank, self.count, self.per_batch = rank, count, per_batch

    def epoch(self, number):
        order = np.random.default_rng(number).permutation(len(self.x))
        share = self.per_batch // self.count
        for start in range(0, len(order), self.per_batch):
            rows = order[start + self.rank * share : start + (self.rank + 1) * share]
            yield {"x": self.x[rows], "y": self.y[rows]}


class Trainer:
    def __init__(self, optimizer, log_every=2):
        self.rank = jax.process_index()
        self.world_size = jax.process_count()
        self.is_main = self.rank == 0
        self.started = time.time()
        self.optimizer = optimizer
        self.log_every = log_every
        self.global_step = 0
        self.run_log, self.seconds = [], []
        self.train_step = sc.step(self._train_step, carry="state", batch="batch")
        self.eval_step = sc.step(self._eval_step, batch="batch")

    def log(self, text):
        if self.is_main:
            print(text, flush=True)

    def loss(self, params, batch):
        hidden = jax.nn.relu(batch["x"] @ params["in"])
        return jnp.mean((hidden @ params["out"] - batch["y"]) ** 2)

    def _train_step(self, state, batch):
        self.log("tracing")
        params, opt_state = state
        loss, grads = jax.value_and_grad(self.loss)(params, batch)
        updates, opt_state = self.optimizer.update(grads, opt_state, params)
        return (optax.apply_updates(params, updates), opt_state), {"loss": loss}

    def _eval_step(self, params, batch):
        return self.loss(params, batch)

    def fit(self, params, batches, epochs):
        state = (params, self.optimizer.init(params))
        for epoch in range(epochs):
            for batch in batches.epoch(epoch):
                began = time.perf_counter()
                state, metrics = self.train_step(state, batch)
                self.global_step += 1
                if self.global_step % self.log_every == 0:
                    self.run_log.append(float(metrics["loss"]))
                    self.log(f"step {self.global_step}: loss {self.run_log[-1]:.6f}")
                self.seconds.append(time.perf_counter() - began)
            held_out = [self.eval_step(state[0], batch) for batch in batches.epoch(99)]
            self.log(f"epoch {epoch} after {time.time() - self.started:.1f} s")
            self.log(f"held out: loss {np.mean([float(loss) for loss in held_out]):.6f}")
        return state[0]


def main():
    jax.distributed.initialize()
    key_in, key_out = jax.random.split(jax.random.PRNGKey(0))
    params = {
        "in": jax.random.normal(key_in, (4, 8)) / 2,
        "out": jax.random.normal(key_out, (8, 1)) / 3,
    }
    mesh = jax.make_mesh((jax.device_count(),), ("data",), axis_types=(AxisType.Auto,))
    trainer = Trainer(optax.rmsprop(0.01))
    with sc.Session(mesh):
        trainer.fit(params, Batches(trainer.rank, trainer.world_size), epochs=2)


if __name__ == "__main__":
    main()
