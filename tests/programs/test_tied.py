"""The same array twice in a call that uses it up, on one device and on eight."""

import warnings

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import stepcache as sc
from stepcache import jaxcompat

pytestmark = pytest.mark.skipif(
    not jaxcompat.PRIVATE_API, reason="what a program uses up is known by the private API alone"
)


@pytest.fixture(params=["one device", "placed on eight", "put on eight"])
def where(request, mesh):
    """Makes an array, and the session to use it in."""
    if request.param == "one device":
        return jnp.ones, sc.Session()
    if request.param == "placed on eight":
        return jnp.ones, sc.Session(mesh)
    return lambda size: jax.device_put(jnp.ones(size), NamedSharding(mesh, P())), sc.Session()


def add_one(state):
    return jax.tree.map(lambda leaf: leaf + 1, state)


def says_tied(step, *args, paths):
    with pytest.raises(sc.CarryError, match="same array") as raised:
        step(*args)
    assert raised.value.where == paths
    assert "jax.tree.map(jnp.copy" in raised.value.hint


def test_the_same_array_twice_in_a_carry(where):
    make, session = where
    step = sc.step(add_one, carry="state")
    with session:
        p = {"w": make(8), "b": make(3)}
        for _ in range(2):
            says_tied(
                step, {"params": p, "ema": p}, paths="state['ema']['b'], state['params']['b']"
            )
        state = step({"params": p, "ema": jax.tree.map(jnp.copy, p)})
        assert float(state["ema"]["w"][0]) == 2


def test_a_warmed_step_says_it_too(where):
    make, session = where
    step = sc.step(add_one, carry="state")
    with session:
        p, q = make(8), make(8)
        step.warm({"a": p, "b": q})
        says_tied(step, {"a": p, "b": p}, paths="state['a'], state['b']")
        assert not p.is_deleted()
        step({"a": p, "b": q})


def test_an_array_that_is_carried_and_read(where):
    make, session = where
    step = sc.step(lambda state, x: (add_one(state), x["x"] * 2), carry="state")
    with session:
        p = make(8)
        says_tied(step, {"p": p}, {"x": p}, paths="state['p'], x['x']")
        step({"p": p}, {"x": make(8)})


def test_two_carries_and_what_is_donated(where):
    make, session = where
    two = sc.step(lambda a, b: (a + 1, b + 1), carry=("a", "b"))
    donated = sc.step(lambda a, b: (a + 1, b * 2), donate_argnums=0)
    with session:
        p = make(8)
        says_tied(two, p, p, paths="a, b")
        says_tied(donated, p, p, paths="a, b")
        says_tied(sc.step(lambda b, a: (a + 1, b * 2), donate_argnames="a"), p, p, paths="b, a")


def test_beside_variables(where):
    make, session = where
    step = sc.step(lambda state, x: (add_one(state), x * 2), carry="state")
    with session:
        p, variables = make(8), sc.Variables(np.ones(4, np.float32))
        says_tied(step, {"p": p, "v": variables}, p, paths="state['p'], x")
        assert variables.version == 0
        step({"p": p, "v": variables}, make(8))
        assert variables.version == 1


def test_what_is_not_used_up_may_be_there_twice(where):
    """As under `jax.jit`: JAX drops what is not used, and donates only what an output can take."""
    make, session = where
    with session:
        p = make(8)
        sc.step(lambda a, b: a + b)(p, p)
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "Some donated buffers were not usable")
            sc.step(lambda a, b: (a.sum() + b.sum()) * jnp.ones(3), donate_argnums=0)(p, p)
        q = p + 0
        sc.step(lambda state, x: (jnp.zeros_like(state), x * 2), carry="state")(q, q)
        q = p + 0
        assert float(sc.step(lambda state, x: state + 1, carry="state")(q, q)[0]) == 2


def test_host_arrays_and_arrays_that_go_to_different_places_may_be_there_twice(mesh):
    step = sc.step(add_one, carry="state")
    n = np.ones(8, np.float32)
    assert float(step({"a": n, "b": n})["b"][0]) == 2
    with sc.Session(mesh, rules=[("state/a", P("data"))]):
        p = jnp.ones(8)
        assert float(step({"a": p, "b": p})["b"][0]) == 2


def test_a_hit_is_not_checked(monkeypatch):
    """JAX's own check remains there."""
    from stepcache import engine

    step = sc.step(add_one, carry="state")
    step({"a": jnp.ones(8), "b": jnp.ones(8)})
    monkeypatch.setattr(engine, "check_tied", None)
    step({"a": jnp.ones(8), "b": jnp.ones(8)})
    p = jnp.ones(8)
    with pytest.raises(Exception, match="donate the same buffer twice"):
        step({"a": p, "b": p})
    with sc.Session(count_hits=True):
        with pytest.raises(TypeError, match="NoneType"):  # Where it is a miss it would be checked.
            sc.step(lambda state: state + 2, carry="state")(p)
