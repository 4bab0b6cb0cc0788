"""Calls steps of twelve models three times each, and prints what came out. Not a test.

`python trust_child.py [NAME…]`. Each is a function that returns a step and its arguments; the carry
is the first one.
"""

import hashlib
import json
import sys
from collections import namedtuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import stepcache as sc

traced = []
X = np.linspace(-1, 1, 24, dtype=np.float32).reshape(8, 3)
Y = np.linspace(0, 1, 8, dtype=np.float32).reshape(8, 1)
Metrics = namedtuple("Metrics", "loss norm")


def _mean(value):
    return jnp.mean(jnp.square(value))


def _params(dtype=jnp.float32):
    keys = jax.random.split(jax.random.key(0), 2)
    return {
        "in": {"kernel": jax.random.normal(keys[0], (3, 16), dtype), "bias": jnp.zeros(16, dtype)},
        "out": {"kernel": jax.random.normal(keys[1], (16, 1), dtype)},
    }


def _forward(params, x):
    hidden = jnp.tanh(x @ params["in"]["kernel"] + params["in"]["bias"])
    return hidden @ params["out"]["kernel"]


def _trained(tx):
    def train(state, x, y):
        traced.append("train")
        params, opt_state = state
        loss, grads = jax.value_and_grad(lambda p: _mean(_forward(p, x) - y))(params)
        updates, opt_state = tx.update(grads, opt_state, params)
        norm = optax.global_norm(grads)
        return (optax.apply_updates(params, updates), opt_state), Metrics(loss, [norm, None])

    return train


def linen():
    import flax.linen as nn
    from flax.training import train_state

    class Net(nn.Module):
        @nn.compact
        def __call__(self, x, deterministic=False):
            x = nn.LayerNorm()(nn.relu(nn.Dense(16)(x)))
            return nn.Dense(1)(nn.Dropout(0.5, deterministic=deterministic)(x))

    net = Net()
    keys = {"params": jax.random.key(0), "dropout": jax.random.key(1)}
    params = net.init(keys, X)["params"]
    made = {"apply_fn": net.apply, "params": params, "tx": optax.adamw(1e-2)}
    state = train_state.TrainState.create(**made)

    @sc.step(carry="state")
    def train(state, x, y, key):
        traced.append("train")

        def loss(params):
            return _mean(state.apply_fn({"params": params}, x, rngs={"dropout": key}) - y)

        value, grads = jax.value_and_grad(loss)(state.params)
        return state.apply_gradients(grads=grads), {"loss": value}

    return train, (state, X, Y, jax.random.key(2))


def nnx():
    from flax import nnx

    import stepcache.nnx as snnx

    class Net(nnx.Module):
        def __init__(self, rngs):
            self.first, self.norm = nnx.Linear(3, 16, rngs=rngs), nnx.BatchNorm(16, rngs=rngs)
            self.second = nnx.Linear(16, 1, rngs=rngs)

        def __call__(self, x):
            return self.second(nnx.relu(self.norm(self.first(x))))

    model = Net(nnx.Rngs(0))
    optimizer = nnx.Optimizer(model, optax.adam(1e-2), wrt=nnx.Param)

    @snnx.step
    def train(model, optimizer, x, y):
        traced.append("train")
        loss, grads = nnx.value_and_grad(lambda model: _mean(model(x) - y))(model)
        optimizer.update(model, grads)
        return loss

    def call(model, optimizer, x, y):
        loss = train(model, optimizer, x, y)
        return loss, nnx.state((model, optimizer))

    call.stats = train.stats
    return call, (model, optimizer, X, Y)


def equinox():
    import equinox as eqx

    import stepcache.equinox as seqx

    model = eqx.nn.MLP(3, 1, 16, 2, key=jax.random.key(0))
    tx = optax.adam(1e-2)

    @seqx.step(donate="none")
    def train(model, opt_state, x, y):
        traced.append("train")
        loss, grads = eqx.filter_value_and_grad(lambda m: _mean(jax.vmap(m)(x) - y))(model)
        updates, opt_state = tx.update(grads, opt_state)
        return eqx.apply_updates(model, updates), opt_state, loss

    return train, (model, tx.init(eqx.filter(model, eqx.is_array)), X, Y)


def haiku():
    """In haiku's form: parameters and state by the names of modules, in dicts of dicts."""
    key = jax.random.key(0)
    params = {"net/~/linear": {"w": jax.random.normal(key, (3, 1)), "b": jnp.zeros(1)}}
    state = {"net/~/norm/~/mean_ema": {"counter": jnp.zeros((), jnp.int32), "hidden": jnp.ones(3)}}

    def apply(params, state, x):
        ema = state["net/~/norm/~/mean_ema"]
        hidden = 0.9 * ema["hidden"] + 0.1 * x.mean(0)
        state = {"net/~/norm/~/mean_ema": {"counter": ema["counter"] + 1, "hidden": hidden}}
        linear = params["net/~/linear"]
        return (x - hidden) @ linear["w"] + linear["b"], state

    @sc.step(carry="both")
    def train(both, x, y):
        traced.append("train")
        params, state = both

        def loss(params):
            out, new = apply(params, state, x)
            return _mean(out - y), new

        grads, state = jax.grad(loss, has_aux=True)(params)
        return (optax.apply_updates(params, jax.tree.map(lambda g: -0.1 * g, grads)), state), state

    return train, ((params, state), X, Y)


def optax_chain():
    schedule = optax.cosine_decay_schedule(1e-2, 100)
    tx = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(schedule), optax.ema(0.9))
    params = _params()
    return sc.step(_trained(tx), carry="state"), ((params, tx.init(params)), X, Y)


def variables():
    held = sc.Variables(_params(), name="params", placement=sc.Replicated())

    @sc.step(carry="params")
    def train(params, x, y):
        traced.append("train")
        loss, grads = jax.value_and_grad(lambda p: _mean(_forward(p, x) - y))(params)
        return optax.apply_updates(params, jax.tree.map(lambda g: -0.1 * g, grads)), loss

    def call(params, x, y):
        loss = train(params, x, y)[1]
        return loss, params.value

    call.stats = train.stats
    return call, (held, X, Y)


def padded():
    @sc.step(pad=sc.Pad("x", sizes=(16,), mask="mask"))
    def evaluate(params, x, mask=None):
        traced.append("evaluate")
        return jnp.sum(jnp.where(mask[:, None], _forward(params, x), 0)), _forward(params, x)

    return evaluate, (_params(), X)


def sharded():
    mesh = jax.make_mesh((4, 2), ("data", "model"), axis_types=(AxisType.Auto,) * 2)
    tx = optax.adam(1e-2)
    params = jax.tree.map(
        lambda x: jax.device_put(x, NamedSharding(mesh, P(*[None] * (x.ndim - 1), "model"))),
        {"in": _params()["in"]},
    ) | {"out": jax.device_put(_params()["out"], NamedSharding(mesh, P()))}
    step = sc.step(_trained(tx), carry="state", batch=("x", "y"))
    session = sc.Session(mesh)

    def call(*args):
        with session:
            return step(*args)

    call.stats = step.stats
    return call, ((params, tx.init(params)), X, Y)


def bfloat16():
    tx = optax.sgd(jnp.bfloat16(1e-2), momentum=0.9)
    params = _params(jnp.bfloat16)
    args = (params, tx.init(params)), X.astype(jnp.bfloat16), Y.astype(jnp.bfloat16)
    return sc.step(_trained(tx), carry="state"), args


def keys():
    @sc.step(carry="key")
    def draw(key, legacy):
        traced.append("draw")
        key, other = jax.random.split(key)
        fast = jax.random.key(3, impl="rbg")
        drawn = jax.random.normal(other, (4,)), jax.random.uniform(legacy, (2,))
        return key, {"drawn": drawn, "other": other, "fast": jax.random.split(fast)}

    return draw, (jax.random.key(0), jax.random.PRNGKey(1))


def weak_types():
    @sc.step(carry="state", static_argnames=("mode", "times"), donate_argnames="spare")
    def count(state, x, spare, *, mode, times=2, rate=0.5):
        traced.append("count")
        total, number = state
        scaled = x * rate if mode == "scale" else x
        total = total + sum(scaled.sum() for _ in range(times))
        return (total, number + 1), (2.0 * times, rate, spare + 1, number * 2)

    def call(state, x):
        return count(state, x, jnp.ones(3), mode="scale", rate=0.25)

    call.stats = count.stats
    return call, ((0.0, 0), X)


def nested():
    mesh = jax.make_mesh((8,), ("data",), axis_types=(AxisType.Auto,))
    inner = jax.jit(lambda x: jnp.sort(jnp.fft.fft(x).real))

    @jax.custom_vjp
    def half(x):
        return x / 2

    half.defvjp(lambda x: (half(x), None), lambda _, g: (g / 2,))

    @sc.step(out_shardings=None)
    def solve(x, matrix):
        traced.append("solve")
        factor = jnp.linalg.cholesky(matrix @ matrix.T + jnp.eye(3))
        scanned = jax.lax.scan(lambda c, row: (c + half(row), c), x[0], x)
        looped = jax.lax.while_loop(lambda v: v.sum() < 10, lambda v: v + 1, x)
        chosen = jax.lax.cond(x.sum() > 0, lambda x: x, lambda x: -x, looped)
        split = jax.shard_map(
            lambda v: jax.lax.psum(v, "data"), mesh=mesh, in_specs=P("data"), out_specs=P()
        )
        return inner(chosen[0]), factor, scanned, split(jnp.ones(8)), jax.grad(half)(3.0)

    return solve, (X, jnp.arange(9.0).reshape(3, 3))


MODELS = [linen, nnx, equinox, haiku, optax_chain, variables, padded, sharded]
MODELS += [bfloat16, keys, weak_types, nested]
CARRYING = [linen, haiku, optax_chain, sharded, bfloat16, keys, weak_types]


def _bits(leaf):
    if isinstance(leaf, jax.Array) and jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key):
        return "key", str(leaf.dtype), _bits(jax.random.key_data(leaf))
    if not isinstance(leaf, jax.Array):
        return type(leaf).__name__
    data = hashlib.sha256(np.asarray(leaf).tobytes()).hexdigest()[:16]
    where = sorted(device.id for device in leaf.sharding.device_set)
    return str(leaf.aval), leaf.weak_type, leaf.committed, where, str(leaf.sharding), data


def main():
    jax.config.update("jax_num_cpu_devices", 8)
    for make in MODELS if len(sys.argv) < 2 else [globals()[name] for name in sys.argv[1:]]:
        traced.clear()
        step, (first, *rest) = make()
        seen = []
        for _ in range(3):
            out = step(first, *rest)
            if make in CARRYING:
                first = out[0]
            tree = str(jax.tree.structure(out)).replace("\n", "")
            seen.append([_bits(leaf) for leaf in jax.tree.leaves(out)] + [len(tree)])
        stats = step.stats()
        counts = {"traced": len(traced), "trusted": stats.trusted, "compiles": stats.compiles}
        print(json.dumps([make.__name__, seen, counts]))


if __name__ == "__main__":
    main()
