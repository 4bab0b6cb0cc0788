"""The usual loop of flax linen: a TrainState, a train step and an eval step."""

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax.training.train_state import TrainState

import stepcache as sc


class MLP(nn.Module):
    width: int = 16

    @nn.compact
    def __call__(self, x):
        x = nn.tanh(nn.Dense(self.width)(x))
        return nn.Dense(1)(x)[..., 0]


def create_train_state(key, learning_rate):
    model = MLP()
    params = model.init(key, jnp.ones((1, 2)))["params"]
    tx = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(learning_rate))
    return TrainState.create(apply_fn=model.apply, params=params, tx=tx)


@sc.step(carry="state")
def train_step(state, batch):
    def loss_fn(params):
        predictions = state.apply_fn({"params": params}, batch["x"])
        return jnp.mean((predictions - batch["y"]) ** 2)

    loss, grads = jax.value_and_grad(loss_fn)(state.params)
    return state.apply_gradients(grads=grads), {"loss": loss, "grad": optax.global_norm(grads)}


@sc.step
def eval_step(state, batch):
    predictions = state.apply_fn({"params": state.params}, batch["x"])
    return jnp.abs(predictions - batch["y"]).max()


def get_batch(rng):
    x = rng.uniform(-1, 1, size=(32, 2)).astype(np.float32)
    return {"x": x, "y": np.sin(3 * x[:, 0]) + x[:, 1]}


def main():
    state = create_train_state(jax.random.key(0), 0.01)
    rng = np.random.default_rng(0)
    held_out = get_batch(rng)
    for step in range(10):
        state, metrics = train_step(state, get_batch(rng))
        print(f"step {step}: loss {metrics['loss']:.6f}, gradient {metrics['grad']:.6f}")
        if step % 5 == 4:
            print(f"worst error {eval_step(state, held_out):.6f}")


if __name__ == "__main__":
    main()
