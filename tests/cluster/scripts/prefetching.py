"""A thread reads and places batches ahead; metrics are gathered; rank 0 draws samples."""

import queue
import threading

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import multihost_utils
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import stepcache as sc


class Prefetch:
    """Batches on devices, at most two ahead."""

    def __init__(self, batches, sharding):
        self.queue = queue.Queue(maxsize=2)
        self.batches, self.sharding = batches, sharding
        self.thread = threading.Thread(target=self._fill, daemon=True)
        self.thread.start()

    def _fill(self):
        for batch in self.batches:
            self.queue.put(jax.tree.map(self._put, batch))
        self.queue.put(None)

    def _put(self, x):
        return jax.make_array_from_process_local_data(self.sharding, x)

    def __iter__(self):
        while (batch := self.queue.get()) is not None:
            yield batch


def read(steps):
    for step in range(steps):
        tokens = np.random.default_rng(step).integers(0, 12, size=(8, 6))
        tokens = np.split(tokens, jax.process_count())[jax.process_index()]
        yield {"inputs": tokens[:, :-1], "targets": tokens[:, 1:]}


def logits_of(params, tokens):
    return jnp.tanh(params["embed"][tokens]) @ params["out"]


@sc.step(carry="params", batch="batch")
def train_step(params, batch):
    def loss_fn(params):
        scores = jax.nn.log_softmax(logits_of(params, batch["inputs"]))
        losses = -jnp.take_along_axis(scores, batch["targets"][..., None], axis=-1)[..., 0]
        return losses.mean(), losses.mean(axis=1)

    (_, losses), grads = jax.value_and_grad(loss_fn, has_aux=True)(params)
    return jax.tree.map(lambda p, g: p - g, params, grads), losses


@jax.jit
def sample(params, key):
    def next_token(token, key):
        token = jax.random.categorical(key, logits_of(params, token))
        return token, token

    return jax.lax.scan(next_token, jnp.int32(0), jax.random.split(key, 5))[1]


def main():
    jax.distributed.initialize()
    rng = np.random.default_rng(0)
    params = {"embed": rng.normal(size=(12, 8)), "out": rng.normal(size=(8, 12)) / 3}
    params = jax.tree.map(np.float32, params)
    mesh = jax.make_mesh((jax.device_count(),), ("data",), axis_types=(AxisType.Auto,))
    with sc.Session(mesh):
        for step, batch in enumerate(Prefetch(read(6), NamedSharding(mesh, P("data")))):
            params, losses = train_step(params, batch)
            losses = multihost_utils.process_allgather(losses, tiled=True)
            if jax.process_index() == 0:
                print(f"step {step}: loss {losses.mean():.6f} of {len(losses)}")
                if step % 3 == 2:
                    tokens = sample(jax.device_get(params), jax.random.key(step))
                    print("sample", *tokens.tolist())


if __name__ == "__main__":
    main()
