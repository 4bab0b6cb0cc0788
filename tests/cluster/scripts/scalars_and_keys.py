"""Numbers, numpy scalars and PRNG keys as arguments, by position and by keyword."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType
from models import noisy_update

import stepcache as sc


@functools.partial(sc.step, carry=("params", "key"), batch="x", static_argnames="kind")
def train_step(params, key, x, rate, step, scale=None, kind="gauss"):
    key, noise_key = jax.random.split(key)
    params, loss = noisy_update(params, jax.random.fold_in(noise_key, step), x, rate, scale, kind)
    return params, key, loss


@sc.step
def accumulate(total, value, count):
    return total + value * count


def schedule(step, peak=0.1, warmup=3):
    return peak * min(1.0, (step + 1) / warmup)


def main():
    jax.distributed.initialize()
    mesh = jax.make_mesh((jax.device_count(),), ("data",), axis_types=(AxisType.Auto,))
    rows = 8 // jax.process_count()
    mine = slice(jax.process_index() * rows, (jax.process_index() + 1) * rows)
    data = np.random.default_rng(0).normal(size=(8, 3)).astype(np.float32)
    with sc.Session(mesh):
        for key in (jax.random.key(0), jax.random.PRNGKey(0)):
            params, total = jnp.zeros(3), 0.0
            for step in range(5):
                params, key, loss = train_step(params, key, data[mine], schedule(step), step)
                total = accumulate(total, loss, step)
                if jax.process_index() == 0:
                    print(f"step {step}: loss {loss:.6f}, total {total:.6f}")
        key, kind = jax.random.key(1), "gauss"
        for step in range(4):
            scale = np.float32(0.5) if step % 2 else None
            kind = "uniform" if step > 1 else kind
            params, key, loss = train_step(
                params, key, x=data[mine], rate=0.05, step=np.int32(step), scale=scale, kind=kind
            )
            if jax.process_index() == 0:
                print(f"scale {scale}, {kind}: loss {loss:.6f}")


if __name__ == "__main__":
    main()
