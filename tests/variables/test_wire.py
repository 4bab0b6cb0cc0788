"""Codes on the wire: how far a value may be off, and how many bytes it takes."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays

import stepcache as sc
from stepcache.variables.wire import BLOCK, coded_arrays, coded_bytes, codes, decode, encode

BOUNDS = {
    "bf16": lambda values, largest: np.abs(values) * 2.0**-8,
    "int8": lambda values, largest: largest / 254,
}
NUMBERS = st.floats(-(2.0**100), 2.0**100, width=32, allow_subnormal=False)


def largest_of_blocks(values):
    padded = np.zeros(-(-values.size // BLOCK) * BLOCK)
    padded[: values.size] = np.abs(values)
    return np.repeat(padded.reshape(-1, BLOCK).max(axis=1), BLOCK)[: values.size]


@pytest.mark.parametrize("wire", BOUNDS)
@given(
    values=arrays.arrays(np.float32, st.integers(1, 700), elements=NUMBERS),
    parts=st.sampled_from([1, 3, 8]),
)
def test_no_value_is_off_by_more_than_its_bound(wire, values, parts):
    coded = encode(wire, values, parts, xp=np)
    again = decode(wire, coded, values.shape, values.dtype, xp=np)
    bound = BOUNDS[wire](values.astype(np.float64), largest_of_blocks(values))
    tiny = np.finfo(np.float32).tiny * 1e3  # Below, floats themselves are coarse.
    error = np.abs(again.astype(np.float64) - values)
    assert (error <= bound * (1 + 1e-5) + tiny).all()
    assert sum(each.nbytes for each in coded) == coded_bytes(wire, values.size, parts)
    assert all(each.shape[0] % parts == 0 for each in coded)
    rows = [(each.size, each.dtype) for each in coded]
    assert rows == coded_arrays(wire, values.size, parts)


@pytest.mark.parametrize("wire", BOUNDS)
def test_a_host_and_a_device_code_alike(wire):
    values = np.random.default_rng(0).normal(size=1000).astype(np.float32)
    on_host = encode(wire, values, 4, xp=np)
    on_device = jax.jit(lambda x: encode(wire, x, 4))(values)
    again = decode(wire, on_host, values.shape, values.dtype, xp=np)
    np.testing.assert_allclose(
        again, decode(wire, on_device, values.shape, values.dtype), rtol=1e-6, atol=1e-6
    )
    zeros = encode(wire, np.zeros(7, np.float32), 1, xp=np)
    np.testing.assert_array_equal(decode(wire, zeros, (7,), np.dtype("float32"), xp=np), 0)


def test_only_what_gets_smaller_is_coded():
    size = 10 * BLOCK
    assert codes("bf16", np.dtype("float32"), size) and not codes("bf16", jnp.bfloat16, size)
    assert codes("int8", jnp.bfloat16, size) and codes("int8", np.dtype("float16"), size)
    assert not any(codes(wire, np.dtype("int32"), size) for wire in BOUNDS)
    assert not codes(None, np.dtype("float32"), size)
    assert codes("bf16", np.dtype("float32"), 1) and not codes("int8", np.dtype("float32"), 10)
    assert not codes("bf16", np.dtype("float32"), 0)


@pytest.mark.parametrize("xp", [np, jnp], ids=["numpy", "jax"])
@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
@pytest.mark.filterwarnings("error")
def test_what_is_not_finite_does_not_become_a_number(bad, xp):
    values = np.ones(2 * BLOCK, np.float32)
    values[3] = bad
    coded = encode("int8", xp.asarray(values), xp=xp)
    again = np.asarray(decode("int8", coded, values.shape, values.dtype, xp=xp))
    assert np.isnan(again[:BLOCK]).all() and np.allclose(again[BLOCK:], 1)
    (coded,) = encode("bf16", xp.asarray(values), xp=xp)
    np.testing.assert_array_equal(np.asarray(coded, np.float32), values)


@pytest.mark.parametrize("wire", BOUNDS)
@pytest.mark.parametrize("route", ["each", "fanout", "gather"])
def test_a_read_is_coded_and_a_carry_is_not(wire, route, mesh):
    value = np.random.default_rng(0).normal(size=(100, 70)).astype(np.float32)
    with sc.Session(mesh):
        variables = sc.Variables(
            {"w": value, "n": np.arange(4000)},
            placement=sc.OnHost(),
            read=sc.Read(wire=wire, route=route),
        )
        look = sc.step(lambda state: (state["w"] * 1, state["n"] * 1))
        plan = look.explain(variables).plan
        w, n = look(variables)
        assert look.stats().moved_bytes == plan.bytes and plan.transfers[0].error_bound
        error = np.abs(np.asarray(w, np.float64) - value)
        bound = BOUNDS[wire](value.astype(np.float64), np.abs(value).max())
        assert error.max() > 0 and (error <= bound * (1 + 1e-5)).all()
        np.testing.assert_array_equal(n, np.arange(4000))
        # What is written back was read as it is: the master does not drift.
        keep = sc.step(lambda state: jax.tree.map(lambda leaf: leaf * 1, state), carry="state")
        for _ in range(3):
            keep(variables)
        assert not keep.explain(variables).plan.transfers[0].error_bound
        np.testing.assert_array_equal(variables.value["w"], value)
