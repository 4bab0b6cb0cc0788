"""Options of the command line, the rank among them, as many a tutorial has it."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import AxisType
from models import init, options

import stepcache as sc


def parse_args():
    parser = options(steps=6)
    parser.add_argument("--coordinator")
    parser.add_argument("--num-processes", type=int)
    parser.add_argument("--process-id", type=int)
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

    params = init(args.layers)
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
