"""A call that is committed to the device where it would run anyway needs no program of its own."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding, PartitionSpec

import stepcache as sc


def make():
    """A function of its own for each test: two steps over one function share their programs."""

    def function(x, y):
        return {"sum": x + y, "key": jax.random.key(0)}, x * 2

    return function


HERE, OTHER = jax.devices()[0], jax.devices()[2]
FREE = jnp.ones(3)
KINDS = {
    "free": FREE,
    "numpy": np.ones(3, np.float32),
    "here": jax.device_put(FREE, HERE),
    "here by the default": jax.device_put(FREE, jax.sharding.SingleDeviceSharding(HERE)),
}


def places(outputs):
    return [(leaf.devices(), leaf.committed) for leaf in jax.tree.leaves(outputs)]


@pytest.mark.parametrize("first", KINDS)
def test_one_program_whatever_is_committed_here(first):
    function = make()
    step, plain = sc.step(function), jax.jit(function)
    kinds = sorted(itertools.product(KINDS, KINDS), key=lambda pair: pair[0] != first)
    for _ in range(3):
        for x, y in kinds:
            arguments = KINDS[x], KINDS[y]
            assert places(step(*arguments)) == places(plain(*arguments)), (x, y)
    assert (step.stats().misses, step.stats().compiles) == (1, 1)


def test_another_device_is_another_program():
    function = make()
    step, plain = sc.step(function), jax.jit(function)
    for x in (FREE, jax.device_put(FREE, OTHER), jax.device_put(FREE, HERE)):
        assert places(step(x, FREE)) == places(plain(x, FREE))
    assert step.stats().misses == 2


def test_the_default_device_decides_what_is_here():
    function = make()
    step, plain = sc.step(function), jax.jit(function)
    with jax.default_device(OTHER):
        free = jnp.ones(3)
        for x in (free, jax.device_put(free, OTHER), jax.device_put(free, HERE)):
            assert places(step(x, x)) == places(plain(x, x))
    assert step.stats().misses == 2


def test_a_step_that_names_other_devices_takes_what_jax_takes():
    mesh = jax.make_mesh((8,), ("data",), (AxisType.Auto,))
    split = NamedSharding(mesh, PartitionSpec("data"))

    def spread(x):
        return jax.lax.with_sharding_constraint(x * 2, split)

    step, x = sc.step(spread), jnp.arange(8.0)
    assert places(step(x)) == places(jax.jit(spread)(x))
    for _ in range(2):
        with pytest.raises(ValueError, match="incompatible devices"):
            jax.jit(spread)(jax.device_put(x, HERE))
        with pytest.raises(ValueError, match="incompatible devices"):
            step(jax.device_put(x, HERE))
    assert places(step(x)) == places(jax.jit(spread)(x))


def test_under_a_mesh_of_the_user_s_jax_judges():
    step = sc.step(make())
    with jax.set_mesh(jax.make_mesh((8,), ("data",), (AxisType.Auto,))):
        assert places(step(FREE, FREE)) == places(jax.jit(make())(FREE, FREE))
        with pytest.raises(ValueError, match="incompatible devices"):
            step(KINDS["here"], FREE)


def test_donated_carried_and_warmed():
    step = sc.step(lambda state, x: (state + x, x), carry="state")
    step.warm(jax.ShapeDtypeStruct((3,), np.float32), FREE)
    state = jax.device_put(np.ones(3, np.float32), HERE)
    for x in (FREE, KINDS["here"], FREE):
        before = state
        state, _ = step(state, x)
        assert before.is_deleted()
    assert step.stats().misses == 1
    np.testing.assert_array_equal(state, 4)


@pytest.mark.slow
def test_the_next_process_finds_it_whatever_is_committed(tmp_path):
    function = make()
    for x, loads in ((FREE, 0), (KINDS["here"], 1), (KINDS["numpy"], 1)):
        cache = sc.ProgramCache(directory=tmp_path)
        step = sc.step(function)
        with sc.Session(cache=cache):
            assert places(step(x, FREE)) == places(jax.jit(function)(x, FREE))
        cache.flush()
        assert (step.stats().compiles, step.stats().loads) == (1 - loads, loads)
        jax.clear_caches()


def test_hits_that_python_serves():
    function = make()
    step, plain = sc.step(function), jax.jit(function)
    with sc.Session(count_hits=True):
        for x in (FREE, KINDS["here"]) * 3:
            assert places(step(x, x)) == places(plain(x, x))
    assert (step.stats().misses, step.stats().hits) == (1, 5)


def test_gradients_of_integers_come_beside_committed_arrays():
    step = sc.step(jax.grad(lambda x: jnp.sum(x["w"]) * 2, allow_int=True))
    x = {"w": jax.device_put(jnp.ones(3), jax.devices()[0]), "n": jnp.arange(3)}
    for _ in range(2):
        found = step(x)
        assert found["n"].dtype == jax.dtypes.float0 and found["w"].committed
