"""All ranks train; rank 0 alone evaluates now and then, on its own device, and keeps the best."""

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import multihost_utils
from jax.sharding import AxisType

import stepcache as sc


def loss_fn(params, batch):
    hidden = jnp.tanh(batch["x"] @ params["in"])
    return jnp.mean((hidden @ params["out"] - batch["y"]) ** 2)


@sc.step(carry="params", batch="batch")
def train_step(params, batch):
    loss, grads = jax.value_and_grad(loss_fn)(params, batch)
    return jax.tree.map(lambda p, g: p - 0.1 * g, params, grads), loss


@sc.step
def eval_step(params, batch):
    return loss_fn(params, batch), {name: jnp.abs(value).max() for name, value in params.items()}


@jax.jit
def worst(params, batch):
    return jnp.abs(jnp.tanh(batch["x"] @ params["in"]) @ params["out"] - batch["y"]).max()


def make_batch(seed, rows):
    x = np.random.default_rng(seed).normal(size=(rows, 4)).astype(np.float32)
    return {"x": x, "y": x.prod(axis=1)}


def main():
    jax.distributed.initialize()
    rank, count = jax.process_index(), jax.process_count()
    keys = jax.random.split(jax.random.key(0))
    params = {"in": jax.random.normal(keys[0], (4, 8)) / 2, "out": jax.random.normal(keys[1], (8,))}
    mesh = jax.make_mesh((jax.device_count(),), ("data",), axis_types=(AxisType.Auto,))
    held_out = make_batch(1000, 10)  # No number of devices divides it.
    best = np.inf
    with sc.Session(mesh):
        for step in range(8):
            batch = jax.tree.map(lambda x: np.split(x, count)[rank], make_batch(step, 8))
            params, loss = train_step(params, batch)
            if rank == 0:
                print(f"step {step}: loss {loss:.6f}")
            if step % 3 == 2 and rank == 0:
                mine = jax.device_get(params)
                device = jax.local_devices()[0]
                value, sizes = eval_step(*jax.device_put((mine, held_out), device))
                print(f"held out: loss {value:.6f}, sizes {sizes['in']:.6f} {sizes['out']:.6f}")
                print(f"worst {worst(mine, held_out):.6f}")
                best = min(best, float(value))
    if rank == 0:  # After the training, without the others.
        value, _ = eval_step(jax.device_get(params), held_out)
        print(f"at the end: loss {value:.6f}, best {best:.6f}")
    multihost_utils.sync_global_devices("the end")


if __name__ == "__main__":
    main()
