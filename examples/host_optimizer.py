"""Adam's moments in the host's memory: twice the parameters' bytes that no device has to hold.

Trains a small model on all devices (8 CPU devices where there is nothing else), once with moments
on every device and once with `OnHost()`, and prints what lies in which memory between the steps.
The update runs on the devices both times, so every loss is the same, to the last bit.

    python examples/host_optimizer.py
"""

import os
from pathlib import Path

import jax

if jax.config.jax_platforms == "cpu" or not any(Path("/dev").glob("nvidia[0-9]*")):
    jax.config.update("jax_num_cpu_devices", 8)
    os.environ.setdefault("NPROC", "32")  # The size of XLA's thread pool: see char_lm.py.

import jax.numpy as jnp
import numpy as np
import optax
from rich import print
from rich.table import Table

import stepcache as sc

WIDTH, LAYERS, BATCH, STEPS = 384, 4, 64, 30
random = np.random.default_rng(0)
weights = random.normal(size=(LAYERS, WIDTH, WIDTH)).astype(np.float32) / WIDTH**0.5
parameters = {f"layer{number}": layer for number, layer in enumerate(weights)}
batches = random.normal(size=(STEPS, BATCH, WIDTH)).astype(np.float32)
optimizer = optax.adam(1e-3)


@sc.step(carry=("params", "moments"), batch="batch")
def train_step(params, moments, batch):
    def loss_of(params):
        x = batch
        for layer in params.values():
            x = jnp.tanh(x @ layer)
        return jnp.mean((x - jnp.tanh(batch)) ** 2)

    loss, gradients = jax.value_and_grad(loss_of)(params)
    updates, moments = optimizer.update(gradients, moments, params)
    return optax.apply_updates(params, updates), moments, loss


def live_bytes() -> dict[str, int]:
    """What lies in the devices' own memory, on all of them, and what in their host's."""
    found = {"devices": {}, "host": {}}
    for array in jax.live_arrays():
        kind = "host" if array.sharding.memory_kind == "pinned_host" else "devices"
        for shard in array.addressable_shards:  # What several arrays share counts once.
            found[kind][shard.device, shard.data.unsafe_buffer_pointer()] = shard.data.nbytes
    return {kind: sum(buffers.values()) for kind, buffers in found.items()}


def train(placement) -> tuple[list[float], dict[str, int], int]:
    """Losses, live bytes between steps, and the bytes of the moments."""
    params = sc.Variables(parameters, name="params")
    moments = sc.Variables(optimizer.init(parameters), placement=placement, name="moments")
    losses = []
    for batch in batches:
        params, moments, loss = train_step(params, moments, batch)
        losses.append(float(loss))
    return losses, live_bytes(), moments.nbytes


mesh = jax.make_mesh((jax.device_count(),), ("data",), (jax.sharding.AxisType.Auto,))
with sc.Session(mesh):
    losses, before, size = train(sc.Replicated())
    losses_offloaded, after, _ = train(sc.OnHost())
table = Table("MB between steps", *(f"on the {kind}" for kind in before))
table.add_row("Adam's moments on each device", *(f"{each / 1e6:.1f}" for each in before.values()))
table.add_row("Adam's moments on the host", *(f"{each / 1e6:.1f}" for each in after.values()))
saved, devices = before["devices"] - after["devices"], jax.device_count()
print(table, f"{saved / 1e6:.1f} MB saved on {devices} devices, {size / 1e6:.1f} MB on each")
print(f"loss {losses[0]:.3f} → {losses[-1]:.3f} in {STEPS} steps, the same both times")
assert losses_offloaded == losses and losses[-1] < losses[0]
assert saved == size * devices and size <= after["host"] < 1.01 * size
