"""Everything placed by hand, as a script without sessions does: global state, global batches."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import stepcache as sc

tx = optax.adam(0.03)


def init(key):
    keys = jax.random.split(key)
    params = {
        "w1": jax.random.normal(keys[0], (4, 16)) / 2,
        "w2": jax.random.normal(keys[1], (16,)),
    }
    return params, tx.init(params)


def train_step(params, opt_state, batch):
    def loss_fn(params):
        return jnp.mean((jnp.tanh(batch["x"] @ params["w1"]) @ params["w2"] - batch["y"]) ** 2)

    loss, grads = jax.value_and_grad(loss_fn)(params)
    updates, opt_state = tx.update(grads, opt_state)
    return optax.apply_updates(params, updates), opt_state, {"loss": loss, "rows": len(batch["x"])}


def main():
    jax.distributed.initialize()
    mesh = jax.make_mesh((jax.device_count(),), ("data",), axis_types=(AxisType.Auto,))
    replicated, split = NamedSharding(mesh, P()), NamedSharding(mesh, P("data"))
    step_fn = sc.step(
        train_step,
        in_shardings=(replicated, replicated, split),
        out_shardings=(replicated, replicated, replicated),
        donate_argnums=(0, 1),
    )
    params, opt_state = sc.step(init, out_shardings=replicated)(jax.random.key(0))
    to_global = functools.partial(jax.make_array_from_process_local_data, split)
    with sc.Session(mesh):
        for step in range(6):
            x = np.random.default_rng(step).normal(size=(16, 4)).astype(np.float32)
            x = np.split(x, jax.process_count())[jax.process_index()]
            batch = jax.tree.map(to_global, {"x": x, "y": x[:, 0] ** 2})
            params, opt_state, metrics = step_fn(params, opt_state, batch)
            if jax.process_index() == 0:
                print(f"step {step}: loss {metrics['loss']:.6f} of {metrics['rows']} rows")


if __name__ == "__main__":
    main()
