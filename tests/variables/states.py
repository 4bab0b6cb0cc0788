"""States as people have them, and steps that train them."""

from typing import Any, NamedTuple

import equinox as eqx
import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from flax.training.train_state import TrainState

from stepcache import jaxcompat
from stepcache.variables.packing import PACKED_BELOW_BYTES

LARGE = (PACKED_BELOW_BYTES // 128, 64)
"""The shape of a float32 leaf that is a buffer of its own."""

X = np.linspace(0, 1, 32, dtype=np.float32).reshape(8, 4)


class Point(NamedTuple):
    x: Any
    y: Any


def ramp(shape, dtype=np.float32):
    return (np.arange(np.prod(shape)) % 7 + 0.3).astype(dtype).reshape(shape)


def advance(x):
    """Something that every kind of leaf can do, and that rounds where it can."""
    if jnp.issubdtype(x.dtype, jax.dtypes.prng_key):
        return jax.vmap(lambda key: jax.random.fold_in(key, 1))(x.reshape(-1)).reshape(x.shape)
    if x.dtype == bool:
        return ~x
    if jnp.issubdtype(x.dtype, jnp.integer):
        return x + 1
    return x * 1.1 + 0.3


def every_kind_of_leaf():
    def train_step(state, x):
        return jax.tree.map(advance, state), (state["large"].T @ state["large"], x.sum())

    state = {}
    narrow = ("int4",) if jaxcompat.PRIVATE_API else ()  # JAX's stages mistake their layout.
    for kind in ("float32", "bfloat16", "float16", "float8_e4m3fn", "int32", "uint8", *narrow):
        state[kind] = {"a": ramp((5, 7), jnp.dtype(kind)), "b": ramp((3,), jnp.dtype(kind))}
    return train_step, state | {
        "bool": [np.array([True, False]), np.array(True)],
        "complex": (ramp(3, np.complex64) * 1j, ramp(2, np.complex64)),
        "empty": {"a": np.zeros((0, 3), np.float32), "b": np.zeros((2, 0), np.float32)},
        "scalars": [np.float32(3), jnp.float32(2), jnp.ones(())],
        "numbers": [2, 0.5, 1j, True],
        "keys": {"one": jax.random.key(0), "rbg": jax.random.key(1, impl="rbg")},
        "old key": jax.random.PRNGKey(3),
        "large": ramp(LARGE),
        "large bfloat16": ramp((LARGE[0], 2 * LARGE[1]), jnp.bfloat16),
        "none": None,
        "named": Point(ramp(2), (ramp(2), None, [])),
        "nothing": {},
    }


def one_array():
    return lambda state, x: (state * 1.1 + x.sum(), None), ramp((3, 2))


def no_leaf():
    return lambda state, x: (state, x * 2), {"a": None, "b": ()}


def sum_of_squares(outputs):
    return (outputs**2).mean()


def adamw_and_a_schedule():
    optimizer = optax.chain(
        optax.clip_by_global_norm(1.0), optax.adamw(optax.cosine_decay_schedule(0.1, 10))
    )
    params = {"layers": [{"kernel": ramp((4, 4)), "bias": ramp(4)} for _ in range(3)]}

    def train_step(state, x):
        def loss_of(params):
            h = x
            for layer in params["layers"]:
                h = jnp.tanh(h @ layer["kernel"] + layer["bias"])
            return sum_of_squares(h)

        loss, gradients = jax.value_and_grad(loss_of)(state["params"])
        updates, moments = optimizer.update(gradients, state["moments"], state["params"])
        return {"params": optax.apply_updates(state["params"], updates), "moments": moments}, loss

    return train_step, {"params": params, "moments": optimizer.init(params)}


class Net(nnx.Module):
    def __init__(self, rngs):
        self.first = nnx.Linear(4, 16, rngs=rngs)
        self.norm = nnx.BatchNorm(16, rngs=rngs)
        self.dropout = nnx.Dropout(0.5, rngs=rngs)
        self.second = nnx.Linear(16, 2, rngs=rngs)

    def __call__(self, x):
        return self.second(self.dropout(nnx.relu(self.norm(self.first(x)))))


def nnx_module():
    """Batch statistics and the counts of random streams are written while the loss is computed."""

    def train_step(state, x):
        loss, gradients = nnx.value_and_grad(lambda model: sum_of_squares(model(x)))(state)
        params = nnx.state(state, nnx.Param)
        nnx.update(state, jax.tree.map(lambda p, g: p - 0.1 * g, params, gradients))
        return state, loss

    return train_step, Net(nnx.Rngs(0))


def nnx_module_and_optimizer():
    model = Net(nnx.Rngs(0))

    def train_step(state, x):
        model, optimizer = state
        loss, gradients = nnx.value_and_grad(lambda model: sum_of_squares(model(x)))(model)
        optimizer.update(model, gradients)
        return (model, optimizer), loss

    # Gradients of the first bias are nearly zero. With a smaller `eps`, Adam would take whole steps
    # by how they round.
    return train_step, (model, nnx.Optimizer(model, optax.adamw(0.01, eps=1e-3), wrt=nnx.Param))


def linen_train_state():
    class LinenNet(nn.Module):
        @nn.compact
        def __call__(self, x):
            return nn.Dense(2)(nn.relu(nn.Dense(16)(x)))

    model = LinenNet()
    params = model.init(jax.random.key(0), X)
    state = TrainState.create(apply_fn=model.apply, params=params, tx=optax.adam(0.1))

    def train_step(state, x):
        loss, gradients = jax.value_and_grad(lambda p: sum_of_squares(state.apply_fn(p, x)))(
            state.params
        )
        return state.apply_gradients(grads=gradients), loss

    return train_step, state


def equinox_module():
    model = eqx.nn.MLP(4, 2, 8, 2, key=jax.random.key(0))
    arrays, static = eqx.partition(model, eqx.is_array)

    def train_step(state, x):
        def loss_of(arrays):
            return sum_of_squares(jax.vmap(eqx.combine(arrays, static))(x))

        loss, gradients = jax.value_and_grad(loss_of)(state)
        return jax.tree.map(lambda p, g: p - 0.1 * g, state, gradients), loss

    return train_step, arrays


# ---- states that tell at a glance ------------------------------------------------------------


def tree_of(value):
    return {"a": np.full(3, value, np.float32), "b": np.full((2, 2), value, np.float32)}


def number(tree):
    """The one number that a tree is full of."""
    (only,) = {float(each) for leaf in jax.tree.leaves(tree) for each in np.ravel(leaf)}
    return only
