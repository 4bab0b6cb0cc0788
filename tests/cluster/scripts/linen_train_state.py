"""flax linen: a TrainState with batch statistics, a train step and an eval step."""

from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax.training import common_utils, train_state
from jax.sharding import AxisType

import stepcache as sc


class TrainState(train_state.TrainState):
    batch_stats: Any


class Net(nn.Module):
    classes: int = 3

    @nn.compact
    def __call__(self, x, train=True):
        x = nn.Conv(4, (3, 3), use_bias=False)(x)
        x = nn.relu(nn.BatchNorm(use_running_average=not train, momentum=0.9)(x))
        return nn.Dense(self.classes)(x.reshape(len(x), -1))


def create_train_state(key, learning_rate):
    model = Net()
    variables = jax.jit(model.init)(key, jnp.ones((1, 6, 6, 1)))
    tx = optax.chain(optax.add_decayed_weights(1e-4), optax.sgd(learning_rate, momentum=0.9))
    return TrainState.create(
        apply_fn=model.apply,
        params=variables["params"],
        tx=tx,
        batch_stats=variables["batch_stats"],
    )


def cross_entropy(logits, labels):
    return -jnp.mean(jnp.sum(common_utils.onehot(labels, 3) * jax.nn.log_softmax(logits), -1))


@sc.step(carry="state", batch="batch")
def train_step(state, batch):
    def loss_fn(params):
        logits, updates = state.apply_fn(
            {"params": params, "batch_stats": state.batch_stats},
            batch["image"],
            mutable=["batch_stats"],
        )
        return cross_entropy(logits, batch["label"]), (updates, logits)

    (loss, (updates, logits)), grads = jax.value_and_grad(loss_fn, has_aux=True)(state.params)
    state = state.apply_gradients(grads=grads, batch_stats=updates["batch_stats"])
    return state, {"loss": loss, "accuracy": jnp.mean(logits.argmax(-1) == batch["label"])}


@sc.step(batch="batch")
def eval_step(state, batch):
    variables = {"params": state.params, "batch_stats": state.batch_stats}
    return cross_entropy(state.apply_fn(variables, batch["image"], train=False), batch["label"])


def get_batch(step, rows=12):
    rng = np.random.default_rng(step)
    label = rng.integers(0, 3, size=rows)
    image = rng.normal(size=(rows, 6, 6, 1)) + label[:, None, None, None]
    batch = {"image": image.astype(np.float32), "label": label.astype(np.int32)}
    share = rows // jax.process_count()
    mine = slice(jax.process_index() * share, (jax.process_index() + 1) * share)
    return {name: value[mine] for name, value in batch.items()}


def main():
    jax.distributed.initialize()
    mesh = jax.make_mesh((jax.device_count(),), ("data",), axis_types=(AxisType.Auto,))
    state = create_train_state(jax.random.key(0), 0.02)
    history = []
    with sc.Session(mesh):
        for step in range(6):
            state, metrics = train_step(state, get_batch(step))
            history.append(metrics)
            if step % 3 == 2:
                held_out = eval_step(state, get_batch(99))
                if jax.process_index() == 0:
                    print(f"held out: loss {held_out:.5f}")
    summary = jax.tree.map(lambda *x: float(np.mean(x)), *jax.device_get(history))
    if jax.process_index() == 0:
        for step, metrics in enumerate(history):
            print(f"step {step}: loss {metrics['loss']:.5f}")
        print(f"step {int(state.step)}: mean loss {summary['loss']:.5f}")


if __name__ == "__main__":
    main()
