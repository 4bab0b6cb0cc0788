"""A carry whose types or places settle in the first step: the second one needs no new program."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import stepcache as sc

X = np.ones(4, np.float32)


def train_step(state, x):
    """`steps` stays weakly typed, the others do not."""
    new = {
        "steps": state["steps"] + 1,
        "seen": state["seen"] + jnp.int32(x.shape[0]),
        "loss": 0.9 * state["loss"] + 0.1 * x.mean(),
    }
    return new, state["loss"] * x


def begin():
    return {"steps": 0, "seen": 0, "loss": 0.0}


def test_one_program_serves_all_steps():
    calls = []

    @sc.step(carry="state")
    def step(state, x):
        calls.append(1)
        return train_step(state, x)

    plain, state, expected = jax.jit(train_step), begin(), begin()
    for _ in range(4):
        state, out = step(state, X)
        expected, same = plain(expected, X)
        assert jax.tree.map(lambda a, b: (a.aval, a == b), state, expected) == jax.tree.map(
            lambda a, b: (b.aval, True), state, expected
        )
        np.testing.assert_array_equal(out, same)
    assert (step.stats().misses, step.stats().compiles, len(calls)) == (1, 1, 2)
    (said,) = step.last_miss.advice
    assert "state['loss'] (float32[])" in said and "steps" not in said
    step(begin(), X)
    assert step.stats().misses == 1


def test_what_settles_by_what_has_settled():
    @sc.step(carry=("a", "b"))
    def step(a, b):
        return b * 1.0, b + jnp.float32(1)  # `a` settles, as `b` has.

    a, b = 0.0, 0.0
    for _ in range(3):
        a, b = step(a, b)
    assert step.stats().misses == 1 and (float(a), float(b)) == (2, 3)


def test_what_stays_weak_is_traced_weak():
    @sc.step(carry="state")
    def step(state, w):
        scale = 1 / (state["step"] + 1)  # Weakly typed, so that `w` stays what it is.
        return {"step": state["step"] + 1}, w * scale

    state = {"step": 0}
    for _ in range(2):
        state, out = step(state, jnp.ones(3, jnp.bfloat16))
        assert out.dtype == jnp.bfloat16
    assert step.stats().misses == 1 and not step.last_miss.advice


def test_variables_settle_too():
    step, state = sc.step(train_step, carry="state"), sc.Variables(begin())
    for _ in range(3):
        state, _ = step(state, X)
    assert step.stats().misses == 1 and float(state.value["seen"]) == 12


def test_in_a_session_with_a_mesh(mesh):
    step, state = sc.step(train_step, carry="state", batch="x"), begin()
    with sc.Session(mesh):
        for _ in range(3):
            state, _ = step(state, X)
    assert step.stats().misses == 1


def test_what_is_warmed_serves_where_nothing_may_be_built():
    step, state = sc.step(train_step, carry="state"), begin()
    with sc.Session(on_miss="error"):
        step.warm(state, X)
        for _ in range(3):
            state, _ = step(state, X)


@pytest.mark.parametrize("start", [begin, lambda: jax.tree.map(jnp.asarray, begin())])
def test_the_next_process_compiles_nothing(start, tmp_path):
    for compiles in (1, 0):
        cache = sc.ProgramCache(directory=tmp_path)
        step, state = sc.step(train_step, carry="state"), start()
        with sc.Session(cache=cache, on_miss="compile" if compiles else "error"):
            for _ in range(3):
                state, _ = step(state, X)
        cache.flush()
        assert (step.stats().misses, step.stats().compiles) == (1, compiles)
        jax.clear_caches()


def test_a_carry_that_is_committed_by_what_a_step_reads():
    step, state = sc.step(train_step, carry="state"), begin()
    for _ in range(3):
        state, out = step(state, jax.device_put(X, jax.devices()[2]))
    assert step.stats().misses == 1
    assert {leaf.device for leaf in jax.tree.leaves((state, out))} == {jax.devices()[2]}
    assert all(leaf.committed for leaf in jax.tree.leaves((state, out)))


def test_after_the_program_is_dropped():
    step = sc.step(train_step, carry="state")
    cache = sc.ProgramCache(directory=None, max_memory_programs=1)
    with sc.Session(cache=cache):
        state, _ = step(begin(), X)
        for _ in range(3):
            state, _ = step(state, X)
        np.testing.assert_allclose(state["seen"], 16)
