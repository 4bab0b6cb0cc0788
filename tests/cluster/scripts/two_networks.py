"""A generator and a critic with a step each, in turn, on weights that a rule splits."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

import stepcache as sc


@dataclasses.dataclass(frozen=True)
class Config:
    rank: int
    rows: int = 8
    latent: int = 4
    width: int = 8
    lr: float = 0.05

    @property
    def is_main(self):
        return self.rank == 0


def mlp(params, x):
    return jnp.tanh(x @ params["hidden"]) @ params["out"]


def make_steps(config):
    optimizers = {name: optax.adam(config.lr) for name in ("critic", "generator")}

    def update(name, loss_fn, state):
        if config.is_main:
            print(f"tracing {name}")
        loss, grads = jax.value_and_grad(loss_fn)(state["params"])
        updates, moments = optimizers[name].update(grads, state["moments"])
        return {"params": optax.apply_updates(state["params"], updates), "moments": moments}, loss

    @sc.step(carry="critic", batch="real")
    def critic_step(critic, generator, real, key):
        fake = mlp(generator["params"], jax.random.normal(key, (len(real), config.latent)))

        def loss_fn(params):
            scores = jax.nn.softplus(-mlp(params, real)) + jax.nn.softplus(mlp(params, fake))
            return scores.mean()

        return update("critic", loss_fn, critic)

    @sc.step(carry="generator")
    def generator_step(generator, critic, key):
        def loss_fn(params):
            noise = jax.random.normal(key, (config.rows, config.latent))
            return jax.nn.softplus(-mlp(critic["params"], mlp(params, noise))).mean()

        return update("generator", loss_fn, generator)

    def init(name, seed, inputs, outputs):
        rng = np.random.default_rng(seed)
        params = {
            "hidden": rng.normal(size=(inputs, config.width)).astype(np.float32),
            "out": (rng.normal(size=(config.width, outputs)) / 3).astype(np.float32),
        }
        return {"params": params, "moments": optimizers[name].init(params)}

    states = init("critic", 0, 2, 1), init("generator", 1, config.latent, 2)
    return critic_step, generator_step, *states


def main():
    jax.distributed.initialize()
    config = Config(rank=jax.process_index())
    critic_step, generator_step, critic, generator = make_steps(config)
    mesh = jax.make_mesh((jax.device_count(),), ("data",), axis_types=(AxisType.Auto,))
    key = jax.random.key(0)
    with sc.Session(mesh, rules=[("hidden$", P(None, "data")), ("out$", P("data"))]):
        for step in range(5):
            real = np.random.default_rng(step).normal(size=(config.rows, 2)).astype(np.float32) + 2
            real = np.split(real, jax.process_count())[config.rank]
            key, first, second = jax.random.split(key, 3)
            critic, critic_loss = critic_step(critic, generator, real, first)
            generator, generator_loss = generator_step(generator, critic, second)
            if config.is_main:
                print(f"step {step}: loss {critic_loss:.5f}")
                print(f"generator: loss {generator_loss:.5f}")


if __name__ == "__main__":
    main()
