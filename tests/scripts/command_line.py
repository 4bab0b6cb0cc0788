"""Options of the command line: some reach the step through closures, some as static arguments."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
from models import init, options

import stepcache as sc


def parse_args():
    parser = options(steps=10)
    parser.add_argument("--activation", choices=("relu", "tanh"), default="relu")
    parser.add_argument("--run-name", default="untitled")
    return parser.parse_args()


def forward(params, x, activation):
    for weights in params[:-1]:
        x = getattr(jax.nn, activation)(x @ weights)
    return x @ params[-1]


def main():
    args = parse_args()
    optimizer = optax.sgd(args.lr)

    @sc.step(static_argnames=("activation", "log_scale"))
    def train_step(params, opt_state, x, y, *, activation, log_scale=False):
        def loss_fn(params):
            loss = jnp.mean((forward(params, x, activation)[:, 0] - y) ** 2)
            return jnp.log(loss) if log_scale else loss / args.layers

        loss, grads = jax.value_and_grad(loss_fn)(params)
        updates, opt_state = optimizer.update(grads, opt_state)
        return optax.apply_updates(params, updates), opt_state, loss

    params = init(args.layers)
    opt_state = optimizer.init(params)
    rng = np.random.default_rng(0)
    for step in range(args.steps):
        x = rng.normal(size=(16, 3)).astype(np.float32)
        y = x[:, 0] * x[:, 1]
        params, opt_state, loss = train_step(
            params, opt_state, x, y, activation=args.activation, log_scale=step % 5 == 4
        )
        print(f"step {step}: loss {loss:.6f}")


if __name__ == "__main__":
    main()
