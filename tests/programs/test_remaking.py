"""A step that is made anew with another hyperparameter says which."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import stepcache as sc


def make_sgd(rate):
    @sc.step
    def train(w):
        return w - rate * w

    return train


def make_adam(rate):
    optimizer = optax.adam(rate)

    @sc.step
    def train(w):
        updates, _ = optimizer.update(jnp.ones_like(w), optimizer.init(w))
        return optax.apply_updates(w, updates)

    return train


def said(make, *rates):
    for rate in rates:
        step = make(rate)
        step(np.ones(3, np.float32))
    return [each for each in step.last_miss.advice if "captured another number" in each]


@pytest.fixture(autouse=True)
def _cache(tmp_path):
    with sc.Session(cache=sc.ProgramCache(directory=tmp_path)):
        yield


@pytest.mark.parametrize("make", [make_sgd, make_adam])
def test_the_number_is_named(make):
    (advice,) = said(make, 0.1, 0.2)
    assert "0.1 → " in advice and "0.2" in advice and "inject_hyperparams" in advice


def test_the_same_number_is_not():
    assert not said(make_sgd, 0.3, 0.3)
    step = make_sgd(0.5)
    step(np.ones(3, np.float32))
    step(np.ones(4, np.float32))  # This one is not because of the number.
    assert not [each for each in step.last_miss.advice if "captured" in each]


def test_an_injected_number_is_an_argument():
    optimizer = optax.inject_hyperparams(optax.adam)(learning_rate=0.1)

    @sc.step(carry="state")
    def train(state, w):
        updates, state = optimizer.update(jnp.ones_like(w), state)
        return state, optax.apply_updates(w, updates)

    w = np.ones(3, np.float32)
    state = optimizer.init(w)
    for rate in (0.1, 0.2):
        state.hyperparams["learning_rate"] = jnp.float32(rate)
        state, _ = train(state, w)
    assert train.stats().misses == 1, train.last_miss
    jax.block_until_ready(state)
