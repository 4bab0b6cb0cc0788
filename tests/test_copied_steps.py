"""Copies of steps, and steps from a pickle, have every option of the step."""

import copy
import pickle

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import stepcache as sc
import stepcache.equinox as seqx
import stepcache.nnx as snnx


def train(state, batch, scale=1):
    return state + scale * batch.sum(), batch.mean()


def of_model(model, x):
    return model(x)


def add(x, y):
    return x.sum() + y


def module():
    return nnx.Linear(2, 2, rngs=nnx.Rngs(0))


OPTIONS = {"carry": "state", "batch": "batch", "static_argnames": "scale"}
ONES = np.ones((4,), np.float32)
# Of each kind of step: how it is made, and how it is called.
KINDS = {
    "plain": (
        lambda: sc.step(add, static_argnames=("y",), donate_argnums=0),
        lambda step: step(jnp.ones(4), y=1),
    ),
    "carry": (lambda: sc.step(train, **OPTIONS), lambda step: step(0.0, ONES, scale=2)),
    "repeated": (
        lambda: sc.step(train, **OPTIONS).repeat(3),
        lambda step: step(0.0, np.ones((3, 4), np.float32), scale=2),
    ),
    "padded": (lambda: sc.step(add, pad=sc.Pad("x", sizes=(8,))), lambda step: step(ONES, 1.0)),
    "nnx": (
        lambda: snnx.step(of_model, batch="x", donate_argnames="x"),
        lambda step: step(module(), jnp.ones((1, 2))),
    ),
    "nnx, as a tree": (
        lambda: snnx.step(of_model, graph=False),
        lambda step: step(module(), jnp.ones((1, 2))),
    ),
    "equinox": (
        lambda: seqx.step(add, donate="warn-except-first", batch="x"),
        lambda step: step(ONES, ONES[0]),
    ),
    "an equinox module": (
        lambda: seqx.step(eqx.nn.Linear(2, 2, key=jax.random.key(0))),
        lambda step: step(jnp.ones(2)),
    ),
}
COPIES = {
    "copy": copy.copy,
    "deepcopy": copy.deepcopy,
    "pickle": lambda step: pickle.loads(pickle.dumps(step)),
}


@pytest.mark.sample(every=3)
@pytest.mark.filterwarnings("ignore:Some donated buffers were not usable")
@pytest.mark.parametrize("kind", KINDS)
def test_a_copy_has_every_option(kind):
    make, call = KINDS[kind]
    step = make()
    for is_called in (False, True):
        expected = call(make())
        for name, of in COPIES.items():
            made = of(step)
            assert str(made._options) == str(step._options), (name, is_called)
            if isinstance(step, sc.Step):
                assert made._engine.spec.parameters == step._engine.spec.parameters
                assert made._engine.spec.pads == step._engine.spec.pads
            jax.tree.map(np.testing.assert_array_equal, call(made), expected)
        call(step)


def test_a_copy_of_a_repeated_step_splits_its_batches_as_the_step_does():
    """On the second dimension: the first one counts the times."""
    with sc.Session(jax.make_mesh((8,), ("data",))) as session:
        step = session.step(train, carry="state", batch="batch").repeat(3)
        for of in (copy.copy, copy.deepcopy):
            state, means = of(step)(0.0, np.ones((3, 8), np.float32))
            assert (float(state), means.shape) == (24.0, (3,))


@snnx.step
def named(model, x):
    return model(x)


def test_steps_of_modules_are_pickled_by_name():
    assert pickle.loads(pickle.dumps(named)) is named and copy.copy(named) is named
