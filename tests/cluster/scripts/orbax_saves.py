"""orbax saves the state every k steps, from all ranks; a second loop goes on from a save."""

import shutil
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint as ocp
from jax.experimental import multihost_utils
from jax.sharding import AxisType, NamedSharding, PartitionSpec

import stepcache as sc

STEPS, SAVE_EVERY = 7, 2
optimizer = optax.adam(0.05)
saves = Path("orbax-saves").absolute()


@sc.step(carry="state", batch="batch")
def train_step(state, batch):
    def loss_fn(params):
        return jnp.mean((jnp.tanh(batch["x"] @ params["w"]) @ params["v"] - batch["y"]) ** 2)

    loss, grads = jax.value_and_grad(loss_fn)(state["params"])
    updates, opt_state = optimizer.update(grads, state["opt_state"])
    params = optax.apply_updates(state["params"], updates)
    return {"params": params, "opt_state": opt_state, "step": state["step"] + 1}, loss


def init_state():
    keys = jax.random.split(jax.random.key(3))
    params = {"w": jax.random.normal(keys[0], (3, 8)), "v": jax.random.normal(keys[1], (8,)) / 3}
    return {"params": params, "opt_state": optimizer.init(params), "step": jnp.int32(0)}


def get_batch(step):
    x = np.random.default_rng(step).normal(size=(8, 3)).astype(np.float32)
    x = np.split(x, jax.process_count())[jax.process_index()]
    return {"x": x, "y": x[:, 0] - x[:, 1]}


def train(mesh, manager, state, first):
    for step in range(first, STEPS):
        state, loss = train_step(state, get_batch(step))
        if jax.process_index() == 0:
            print(f"step {step}: loss {loss:.6f}")
        if (step + 1) % SAVE_EVERY == 0:
            manager.save(step + 1, args=ocp.args.StandardSave(state))
    manager.wait_until_finished()
    return state


def main():
    jax.distributed.initialize()
    if jax.process_index() == 0:
        shutil.rmtree(saves, ignore_errors=True)
    multihost_utils.sync_global_devices("the directory is empty")
    mesh = jax.make_mesh((jax.device_count(),), ("data",), axis_types=(AxisType.Auto,))
    options = ocp.CheckpointManagerOptions(max_to_keep=2, create=True)
    with ocp.CheckpointManager(saves, options=options) as manager, sc.Session(mesh):
        train(mesh, manager, init_state(), 0)
    with ocp.CheckpointManager(saves, options=options) as manager, sc.Session(mesh):
        replicated = NamedSharding(mesh, PartitionSpec())
        like = jax.tree.map(
            lambda x: jax.ShapeDtypeStruct(jnp.shape(x), x.dtype, sharding=replicated), init_state()
        )
        state = manager.restore(manager.latest_step(), args=ocp.args.StandardRestore(like))
        train(mesh, manager, state, int(state["step"]))


if __name__ == "__main__":
    main()
