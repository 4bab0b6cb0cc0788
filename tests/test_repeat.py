"""`step.repeat(n)`: n steps in one call."""

import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import stepcache as sc


def update(state, batch, rate=0.1):
    loss = jnp.mean((batch @ state["w"] - 1.0) ** 2)
    return {"w": state["w"] - rate * batch.mean(0)}, {"loss": loss}


def state():
    return {"w": np.ones(4, np.float32)}


def batches(count, size=8):
    return np.random.default_rng(0).normal(size=(count, size, 4)).astype(np.float32)


def one_by_one(count):
    plain, current, losses = jax.jit(update), state(), []
    for batch in batches(count):
        current, metrics = plain(current, batch)
        losses.append(metrics["loss"])
    return current, np.stack(losses)


def made():
    return sc.step(update, carry="state", batch="batch")


def test_it_is_as_many_steps_one_by_one():
    step = made().repeat(5)
    got, metrics = step(state(), batches(5))
    want, losses = one_by_one(5)
    np.testing.assert_allclose(got["w"], want["w"], rtol=1e-5)
    np.testing.assert_allclose(metrics["loss"], losses, rtol=1e-5)


def test_it_runs_over_variables():
    variables = sc.Variables(state())
    got, metrics = made().repeat(5)(variables, batches(5))
    assert got is variables and variables.version == 1
    np.testing.assert_allclose(variables.value["w"], one_by_one(5)[0]["w"], rtol=1e-5)
    assert metrics["loss"].shape == (5,)


def test_batches_are_split_on_their_second_dimension():
    mesh = jax.make_mesh((8,), ("data",))
    step = made().repeat(3)
    with sc.Session(mesh):
        explanation = step.explain(state(), batches(3))
        got, _ = step(state(), batches(3))
    assert "batches, split along 'data'" in str(explanation) and "P(None, 'data'" in str(
        explanation
    )
    np.testing.assert_allclose(got["w"], one_by_one(3)[0]["w"], rtol=1e-5)


def test_a_carry_that_is_returned_alone_and_two_carries():
    alone = sc.step(lambda x: x * 2, carry="x").repeat(4)
    assert float(alone(jnp.float32(1))) == 16

    @sc.step(carry=("a", "b"))
    def both(a, b, c):
        return a + b, b + c, a

    a, b, seen = both.repeat(3)(jnp.float32(0), jnp.float32(1), 1.0)
    assert (float(a), float(b)) == (6, 4) and seen.tolist() == [0, 1, 3]


def test_one_step_for_one_count_and_one_compilation():
    step = made()
    assert step.repeat(3) is step.repeat(3) and step.repeat(3) is not step.repeat(4)
    current = state()
    for _ in range(3):
        current, _ = step.repeat(3)(current, batches(3))
    assert step.repeat(3).stats().compiles == 1 and step.stats().misses == 0


def test_batches_of_another_number_are_an_error():
    with pytest.raises(sc.OptionError, match=r"batch[\s\S]*first dimension of 4[\s\S]*\[3, 8, 4\]"):
        made().repeat(4)(state(), batches(3))
    with pytest.raises(sc.OptionError, match=r"first dimension of 2[\s\S]*float32\[\]"):
        made().repeat(2)(state(), jnp.float32(1.0))


@pytest.mark.parametrize(
    ("step", "count", "match"),
    [
        (sc.step(lambda x: x), 3, "without a carry"),
        (sc.step(lambda x: x, carry="x"), 0, "whole number"),
        (sc.step(lambda x: x, carry="x"), 2.0, "whole number"),
        (sc.step(lambda x, y: x, carry="x", pad=sc.Pad("y")), 2, "pads"),
        (sc.step(lambda x: x, carry="x", in_shardings=None), 2, "in_shardings"),
    ],
)
def test_what_cannot_be_repeated(step, count, match):
    with pytest.raises(sc.OptionError, match=match):
        step.repeat(count)


SCRIPT = """
import jax.numpy as jnp, numpy as np, stepcache as sc
@sc.step(carry="state", batch="batch")
def step(state, batch):
    return state + batch.sum(), batch.mean()
many = step.repeat(4)
print(float(many(jnp.float32(0), np.ones((4, 2), np.float32))[0]), many.stats().compiles)
many.stats
sc.current_session().cache.flush()
"""


@pytest.mark.slow
def test_a_later_start_does_not_compile_it(tmp_path):
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    import os

    for compiles in "10":
        result = subprocess.run(
            [sys.executable, script],
            capture_output=True,
            text=True,
            env={**os.environ, "STEPCACHE_DIR": str(tmp_path / "cache")},
            check=True,
        )
        assert result.stdout.split() == ["8.0", compiles], result.stderr
