"""Training through a host gives the losses of one process."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import stepcache as sc

STEPS, FEATURES, BATCH = 30, 8, 64
INIT = {"w": np.zeros(FEATURES, np.float32), "b": np.float32(0.5)}


def batch(*seed):
    random = np.random.default_rng(seed)
    x = random.standard_normal((BATCH, FEATURES), np.float32)
    return x, np.sin(x @ np.arange(FEATURES, dtype=np.float32) / FEATURES)


@sc.step
def gradients(params, x, y):
    return jax.value_and_grad(lambda p: jnp.mean((x @ p["w"] + p["b"] - y) ** 2))(params)


@pytest.mark.slow
@pytest.mark.parametrize("optimizer", [optax.sgd(0.1), optax.adam(0.05)], ids=["sgd", "adam"])
def test_one_worker_has_the_losses_of_a_plain_loop(connection, name, optimizer):
    served = connection.variables(name, INIT, write=sc.Write(mode="apply", optimizer=optimizer))
    params, state = INIT, optimizer.init(INIT)
    losses, expected = [], []
    for step in range(STEPS):
        loss, update = gradients(served, *batch(step))
        served.push(update)
        losses.append(float(loss))
        loss, update = gradients(params, *batch(step))
        updates, state = optimizer.update(update, state, params)
        params = optax.apply_updates(params, updates)
        expected.append(float(loss))
    np.testing.assert_allclose(losses, expected, rtol=1e-5)
    assert losses[-1] < losses[0] / 2


@pytest.mark.slow
def test_two_workers_in_turn_have_the_losses_of_a_large_batch(shared_server, name):
    """At staleness 0: each of a step's gradients is taken before any of them is pushed."""
    losses, expected, params = [], [], INIT
    with shared_server.connect() as one, shared_server.connect() as other:
        how = sc.Write(mode="apply", optimizer=optax.sgd(0.05))
        workers = [each.variables(name, INIT, write=how) for each in (one, other)]
        for step in range(STEPS):
            found = [gradients(each, *batch(step, rank)) for rank, each in enumerate(workers)]
            for each, (_, update) in zip(workers, found, strict=True):
                each.push(update)
            losses.append(np.mean([loss for loss, _ in found]))
            both = [
                np.concatenate(pair) for pair in zip(batch(step, 0), batch(step, 1), strict=True)
            ]
            loss, update = gradients(params, *both)
            params = jax.tree.map(lambda leaf, change: leaf - 0.1 * change, params, update)
            expected.append(float(loss))
    np.testing.assert_allclose(losses, expected, rtol=1e-4)
