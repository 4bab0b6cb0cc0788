"""Options of the command line, the rank among them, as many a tutorial has it."""

import argparse

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import AxisType

import stepcache as sc


def parse_args():
    parser = argparse.ArgumentParser()
    parser.add_argument("--coordinator")
    parser.add_argument("--num-processes", type=int)
    parser.add_argument("--process-id", type=int)
    parser.add_argument("--lr", type=float, default=0.05)
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--steps", type=int, default=6)
    parser.add_argument("--rows", type=int, default=16, help="of the batch of all processes")
    return parser.parse_args()


def main():
    args = parse_args()
    jax.distributed.initialize(args.coordinator, args.num_processes, args.process_id)
    is_main = jax.process_index() == 0
    optimizer = optax.adam(args.lr)

    def forward(params, x):
        for weights in params[:-1]:
            x = jnp.tanh(x @ weights)
        return (x @ params[-1])[:, 0]

    @sc.step(carry=("params", "opt_state"), batch=("x", "y"))
    def train_step(params, opt_state, x, y):
        if args.process_id == 0:
            print("tracing the train step")

        def loss_fn(params):
            return jnp.mean((forward(params, x) - y) ** 2) / args.layers

        loss, grads = jax.value_and_grad(loss_fn)(params)
        updates, opt_state = optimizer.update(grads, opt_state)
        return optax.apply_updates(params, updates), opt_state, loss

    keys = jax.random.split(jax.random.key(0), args.layers + 1)
    sizes = [3] + [8] * args.layers + [1]
    params = [
        jax.random.normal(key, shape) / np.sqrt(shape[0])
        for key, shape in zip(keys, zip(sizes, sizes[1:]))
    ]
    opt_state = optimizer.init(params)
    mesh = jax.make_mesh((jax.device_count(),), ("data",), axis_types=(AxisType.Auto,))
    rng = np.random.default_rng(0)
    rows = args.rows // jax.process_count()
    with sc.Session(mesh):
        for step in range(args.steps):
            x = rng.normal(size=(args.rows, 3)).astype(np.float32)
            y = x[:, 0] * x[:, 1]
            mine = slice(jax.process_index() * rows, (jax.process_index() + 1) * rows)
            params, opt_state, loss = train_step(params, opt_state, x[mine], y[mine])
            if is_main:
                print(f"step {step}: loss {loss:.6f}")


if __name__ == "__main__":
    main()
