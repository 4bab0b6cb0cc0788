"""A plain step that gets nnx modules takes them as trees, and says so where that loses updates."""

import warnings

import jax
import numpy as np
import pytest
from flax import nnx

import stepcache as sc

X = np.ones((2, 3), np.float32)


def make():
    return nnx.Linear(3, 3, rngs=nnx.Rngs(0))


def descend(model, x):
    grads = nnx.grad(lambda model: model(x).sum())(model)
    nnx.update(model, jax.tree.map(lambda p, g: p - g, nnx.state(model), grads))


def test_an_update_that_is_lost_is_warned_of_once():
    @sc.step
    def train_step(x, *, models):
        descend(models["a"], x)
        return x * 2

    with pytest.warns(sc.StepCacheWarning, match="does not return it") as warned:
        result = train_step(X, models={"a": make()})
    assert np.array_equal(result, X * 2)
    (about,) = map(str, [each.message for each in warned])
    assert "models['a']." in about and "stepcache.nnx.step" in about
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        train_step(X, models={"a": make()})


def test_random_streams_may_be_made_for_one_call():
    @sc.step
    def noisy(x, rngs):
        return x + rngs.normal()

    with warnings.catch_warnings():
        warnings.simplefilter("error")
        first, second = noisy(X, nnx.Rngs(0)), noisy(X, nnx.Rngs(0))
    assert np.array_equal(first, second)


def test_a_module_that_is_read_or_returned_is_none():
    @sc.step
    def train_step(model, x):
        descend(model, x)
        return model, model(x)

    model = make()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        new, _ = train_step(model, X)
        assert np.array_equal(sc.step(lambda m, x: m(x))(model, X), jax.jit(lambda m: m(X))(model))
    assert not np.array_equal(new.kernel[...], model.kernel[...])


def test_a_module_whose_state_is_returned_is_none():
    """As in flax's example of Gemma: the caller updates its modules by the state."""

    @sc.step
    def train_step(model, rngs, x):
        descend(model, x + rngs.normal())
        return nnx.state((model, rngs)), model(x)

    @sc.step
    def half(model, x):
        descend(model, x)
        return nnx.state(model)["kernel"]

    model, rngs = make(), nnx.Rngs(0)
    before = np.asarray(model.kernel[...])
    for count in (1, 2):
        state, _ = train_step(model, rngs, X)
        nnx.update((model, rngs), state)
        assert rngs.default.count[...] == count
    assert not np.array_equal(model.kernel[...], before)
    with pytest.warns(sc.StepCacheWarning, match=r"model\.bias"):
        half(model, X)


def test_states_are_values():
    """Who passes a state knows that it has to be returned, and drops it on purpose."""
    graphdef, state = nnx.split(nnx.BatchNorm(3, rngs=nnx.Rngs(0)))
    assert sc.step(lambda state, x: nnx.merge(graphdef, state)(x))(state, X).shape == (2, 3)


def test_a_module_that_is_carried_is_warned_of():
    @sc.step(carry="model")
    def train_step(model, x):
        descend(model, x)
        return model, model(x)

    with pytest.warns(sc.StepCacheWarning, match=r"carries 'model'.*stepcache\.nnx\.step"):
        model, _ = train_step(make(), X)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        train_step(model, X)
