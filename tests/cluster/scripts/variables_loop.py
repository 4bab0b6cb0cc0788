"""`sc.Variables` for parameters and moments, saved every few steps, looked at by all ranks."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import AxisType

import stepcache as sc

tx = optax.adamw(0.02)


@sc.step(carry=("params", "moments"), batch="batch")
def train_step(params, moments, batch):
    def loss_fn(params):
        hidden = jax.nn.silu(batch["x"] @ params["in"]["kernel"] + params["in"]["bias"])
        return jnp.mean((hidden @ params["out"]["kernel"] - batch["y"]) ** 2)

    loss, grads = jax.value_and_grad(loss_fn)(params)
    updates, moments = tx.update(grads, moments, params)
    return optax.apply_updates(params, updates), moments, loss


@sc.step(batch="batch")
def eval_step(params, batch):
    hidden = jax.nn.silu(batch["x"] @ params["in"]["kernel"] + params["in"]["bias"])
    return jnp.mean((hidden @ params["out"]["kernel"] - batch["y"]) ** 2)


def get_batch(step):
    rng = np.random.default_rng((step, 5))
    x = rng.uniform(-1, 1, size=(16, 3)).astype(np.float32)
    rows = np.arange(16).reshape(jax.process_count(), -1)[jax.process_index()]
    return {"x": x[rows], "y": np.cos(x[rows]).sum(axis=1, keepdims=True)}


def main():
    jax.distributed.initialize()
    rng = np.random.default_rng(0)
    fresh = {
        "in": {
            "kernel": rng.normal(size=(3, 12)).astype(np.float32),
            "bias": np.zeros(12, np.float32),
        },
        "out": {"kernel": (rng.normal(size=(12, 1)) / 4).astype(np.float32)},
    }
    mesh = jax.make_mesh((jax.device_count(),), ("data",), axis_types=(AxisType.Auto,))
    with sc.Session(mesh):
        params = sc.Variables(fresh, name="params")
        moments = sc.Variables(tx.init(fresh), placement=sc.OnHost(), name="moments")
        for step in range(6):
            params, moments, loss = train_step(params, moments, get_batch(step))
            if jax.process_index() == 0:
                print(f"step {step}: loss {loss:.6f}")
            if step % 2 == 1:
                sc.save("saves", params=params, moments=moments, step=step + 1, keep=2)
                held_out = eval_step(params, get_batch(99))
                if jax.process_index() == 0:
                    print(f"held out: loss {held_out:.6f}")
        bias = np.asarray(params.value["in"]["bias"])
    if jax.process_index() == 0:
        print(f"bias: loss {np.abs(bias).sum():.6f}")


if __name__ == "__main__":
    main()
