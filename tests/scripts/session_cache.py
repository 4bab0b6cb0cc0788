"""A session that only says where programs are kept, and an array that the user has placed."""

from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np

import stepcache as sc

HERE = Path(__file__).parent


@sc.step(donate_argnums=0)
def train_step(w, x, y):
    loss, grads = jax.value_and_grad(lambda w: jnp.mean((jnp.tanh(x @ w) - y) ** 2))(w)
    return w - 0.5 * grads, loss


@sc.step
def evaluate(w, x, y):
    return jnp.mean(jnp.sign(x @ w) == jnp.sign(y))


def main():
    rng = np.random.default_rng(0)
    device = jax.devices()[1]
    w = jax.device_put(jnp.zeros(4), device)
    cache = sc.ProgramCache(HERE / "my-programs", max_bytes=50_000_000)
    with sc.Session(cache=cache):
        for step in range(10):
            x = rng.normal(size=(15, 4)).astype(np.float32)
            y = np.sign(x[:, 0] + x[:, 1])
            w, loss = train_step(w, x, y)
            print(f"step {step}: loss {loss:.6f}")
        print(f"accuracy {evaluate(w, x, y):.4f}")
        mean = evaluate(jnp.ones(4), jnp.asarray(x), jnp.asarray(y))
        print(f"accuracy of another model {mean:.4f}, on", [d.id for d in mean.devices()])
    print("the state is on", [d.id for d in w.devices()])


main()
