"""Each line of the README's table "you have / write" is something that works."""

import re
from pathlib import Path

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import linen, nnx
from flax.training.train_state import TrainState

import stepcache as sc
from stepcache import equinox as seqx
from stepcache import nnx as snnx

X = np.ones((4, 3), np.float32)


def state_of():
    model = linen.Dense(2)
    params = model.init(jax.random.key(0), X)
    return TrainState.create(apply_fn=model.apply, params=params, tx=optax.sgd(0.1))


def descend(state, batch):
    loss, grads = jax.value_and_grad(lambda p: (state.apply_fn(p, batch) ** 2).mean())(state.params)
    return state.apply_gradients(grads=grads), loss


def jitted():
    assert np.array_equal(sc.step(lambda x: x + 1)(X), jax.jit(lambda x: x + 1)(X))


def train_state():
    step, state = sc.step(descend, carry="state", batch="batch"), state_of()
    other, theirs = state_of(), jax.jit(descend)
    for _ in range(3):
        state, loss = step(state, X)
        other, expected = theirs(other, X)
        assert loss == expected
    assert state.step == 3 and step.stats().misses == 1


def nnx_step():
    model = nnx.Linear(3, 3, rngs=nnx.Rngs(0))

    @snnx.step
    def count(model):
        model.bias[...] += 1

    count(model)
    assert model.bias[0] == 1


def filter_jit():
    model = eqx.nn.MLP(3, 3, 4, 1, key=jax.random.key(0))
    assert seqx.step(lambda model, x: jax.vmap(model)(x))(model, X).shape == (4, 3)


def injected_rate():
    optimizer = optax.inject_hyperparams(optax.adam)(learning_rate=1e-3)

    @sc.step(carry=("params", "opt_state"))
    def update(params, opt_state):
        updates, opt_state = optimizer.update(params, opt_state)
        return optax.apply_updates(params, updates), opt_state

    params = jnp.ones(3, jnp.float32)
    opt_state = optimizer.init(params)
    for rate in (1e-3, 1e-2, 1e-1):
        opt_state.hyperparams["learning_rate"] = jnp.float32(rate)
        params, opt_state = update(params, opt_state)
    assert update.stats().misses == 1


def checkpoint(directory):
    state = {"w": jnp.arange(3.0)}
    sc.save(directory / "saved", state=state)
    found = sc.restore(directory / "saved", state={"w": jnp.zeros(3)})["state"]
    assert np.array_equal(found["w"], state["w"])


ROWS = {
    "`@jax.jit`": jitted,
    "`@jax.jit` over a flax `TrainState`": train_state,
    "`@nnx.jit`": nnx_step,
    "`@eqx.filter_jit`": filter_jit,
    "`optax.adam(rate)` for each new rate": injected_rate,
    "`ocp.StandardCheckpointer().save(path, state)`": checkpoint,
}


def test_each_line_of_the_table_works(tmp_path):
    readme = Path(__file__).parents[2].joinpath("README.md").read_text(encoding="utf-8")
    table = re.search(r"\| you have \| write \|\n\| --- \| --- \|\n(.*?)\n\n", readme, re.S)
    assert table and [line.split(" | ")[0][2:] for line in table[1].splitlines()] == list(ROWS)
    for row in ROWS.values():
        row(tmp_path) if row is checkpoint else row()
