"""States as people have them: flax nnx and linen, equinox, optax."""

import equinox as eqx
import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from flax.training.train_state import TrainState
from jax.sharding import PartitionSpec as P

import stepcache as sc

pytestmark = pytest.mark.filterwarnings("ignore:.*, an nnx module:stepcache.StepCacheWarning")
X = np.linspace(0, 1, 32, dtype=np.float32).reshape(8, 4)


class Net(nnx.Module):
    def __init__(self, rngs):
        self.first = nnx.Linear(4, 16, rngs=rngs)
        self.second = nnx.Linear(16, 2, rngs=rngs)

    def __call__(self, x):
        return self.second(nnx.relu(self.first(x)))


def nnx_split_state():
    graph, params = nnx.split(Net(nnx.Rngs(0)))
    optimizer = optax.adam(0.1)

    def train_step(state, x):
        def loss_of(params):
            return (nnx.merge(graph, params)(x) ** 2).mean()

        loss, gradients = jax.value_and_grad(loss_of)(state["params"])
        updates, moments = optimizer.update(gradients, state["moments"], state["params"])
        return {"params": optax.apply_updates(state["params"], updates), "moments": moments}, loss

    return train_step, {"params": params, "moments": optimizer.init(params)}


def nnx_module():
    def train_step(state, x):
        loss, gradients = nnx.value_and_grad(lambda model: (model(x) ** 2).mean())(state)
        graph, params = nnx.split(state)
        params = jax.tree.map(lambda p, g: p - 0.1 * g, params, gradients)
        return nnx.merge(graph, params), loss

    return train_step, Net(nnx.Rngs(0))


def linen_train_state():
    class LinenNet(nn.Module):
        @nn.compact
        def __call__(self, x):
            return nn.Dense(2)(nn.relu(nn.Dense(16)(x)))

    model = LinenNet()
    params = model.init(jax.random.key(0), X)
    state = TrainState.create(apply_fn=model.apply, params=params, tx=optax.sgd(0.1))

    def train_step(state, x):
        def loss_of(params):
            return (state.apply_fn(params, x) ** 2).mean()

        loss, gradients = jax.value_and_grad(loss_of)(state.params)
        return state.apply_gradients(grads=gradients), loss

    return train_step, state


def equinox_module():
    model = eqx.nn.Linear(4, 2, key=jax.random.key(0))

    def train_step(state, x):
        def loss_of(model):
            return (jax.vmap(model)(x) ** 2).mean()

        loss, gradients = jax.value_and_grad(loss_of)(state)
        return jax.tree.map(lambda p, g: p - 0.1 * g, state, gradients), loss

    return train_step, model


MAKERS = [nnx_split_state, nnx_module, linen_train_state, equinox_module]


def train(step, state, count=4):
    losses = []
    for _ in range(count):
        state, loss = step(state, X)
        losses.append(float(loss))
    return losses


@pytest.mark.sample(every=4)
@pytest.mark.parametrize("make", MAKERS)
def test_trains_as_under_jit(make):
    train_step, state = make()
    expected = train(jax.jit(train_step), state)
    step = sc.step(train_step, carry="state")
    assert train(step, jax.tree.map(jnp.copy, state)) == expected
    assert expected[-1] < expected[0]
    assert step.stats().compiles == 1


@pytest.mark.sample(every=4)
@pytest.mark.parametrize("make", MAKERS)
def test_trains_sharded_in_a_session(make, mesh):
    train_step, state = make()
    expected = train(jax.jit(train_step), state)
    step = sc.step(train_step, carry="state", batch="x")
    rules = [(r"(first|Dense_0)/kernel", P(None, "model")), (r"weight", P("model"))]
    with sc.Session(mesh, rules=[r for r in rules if matches(r[0], make)]):
        losses = train(step, jax.tree.map(jnp.copy, state))
    np.testing.assert_allclose(losses, expected, rtol=1e-5)
    assert step.stats().compiles == 1


def matches(pattern, make):
    return (pattern == "weight") == (make is equinox_module)


def test_optax_states_of_many_kinds():
    for optimizer in (
        optax.adamw(1e-3),
        optax.lion(1e-3),
        optax.chain(optax.clip(1.0), optax.sgd(1)),
    ):
        params = {"w": jnp.ones(4)}

        @sc.step(carry=("params", "moments"))
        def update(params, moments, optimizer=optimizer):
            updates, moments = optimizer.update(params, moments, params)
            return optax.apply_updates(params, updates), moments

        moments = optimizer.init(params)
        for _ in range(3):
            params, moments = update(params, moments)
        assert update.stats().compiles == 1
