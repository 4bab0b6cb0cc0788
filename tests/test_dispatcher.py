import contextlib
import gc
import itertools
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import stepcache as sc
from stepcache import jaxcompat

needs_cpp = pytest.mark.skipif(
    not jaxcompat.PRIVATE_API, reason="about JAX's C++ dispatcher, which is not in use"
)


@pytest.fixture
def no_more_builds(monkeypatch):
    """From the call of the fixture's value on, a build raises: what runs then is a hit."""

    def start():
        def refuse(*args, **kwargs):
            raise AssertionError("built")

        monkeypatch.setattr("stepcache.programs.resolve.build", refuse)

    return start


def test_a_hit_builds_nothing(no_more_builds):
    f = sc.step(lambda x: x * 2)
    f(np.ones(3)), f(jnp.ones(4))
    no_more_builds()
    f(np.ones(3)), f(jnp.ones(3)), f(jnp.ones(4))
    with pytest.raises(AssertionError, match="built"):
        f(np.ones(5))


@needs_cpp
def test_a_hit_does_not_enter_python(monkeypatch):
    f = sc.step(lambda x: x * 2)
    x = jnp.ones(3)
    f(x)
    monkeypatch.setattr(f._engine, "request", None)
    np.testing.assert_array_equal(f(x), 2.0)
    assert f._cache_size() == 1


@needs_cpp
@pytest.mark.parametrize(
    "context",
    [
        contextlib.nullcontext,
        sc.Session,
        lambda: sc.Session(cache=sc.ProgramCache()),
        lambda: sc.Session(jax.make_mesh((8,), ("data",))),
        lambda: jax.enable_checks(True),
        lambda: jax.default_prng_impl("rbg"),
    ],
    ids=["plain", "session", "cache", "mesh", "checks", "keys"],
)
def test_a_hit_compares_nothing_in_python(context):
    """While JAX's dispatcher compares, no other thread may come in between and change its table."""
    step, x = sc.step(lambda x: x * 2), np.ones(8)
    for _ in range(2):  # Another session of the same kind finds the entries of the first.
        with context():
            step(x), step(x)
    with context():
        step(x)
        calls = []
        sys.setprofile(lambda frame, event, value: calls.append((event, frame.f_code.co_name)))
        try:
            step(x)
        finally:
            sys.setprofile(None)
    entered = [name for event, name in calls if event == "call"]
    compared = list(itertools.takewhile(lambda name: name != "cc_shard_arg", entered))
    assert compared == []  # What puts host values on a mesh comes after the comparison.


@needs_cpp
def test_eviction_also_clears_the_dispatcher():
    cache = sc.ProgramCache(None, max_memory_programs=2)
    f = sc.step(lambda x: x * 2)
    with sc.Session(jax.make_mesh((1,), ("data",)), cache=cache):
        for size in (1, 2, 3):
            f(np.ones(size))
        # The two programs that are left come back by a trip through Python, and no build.
        with sc.no_recompile():
            f(np.ones(2)), f(np.ones(3))
        assert f._cache_size() == 2
        with sc.no_recompile(), pytest.raises(sc.RecompileError):
            f(np.ones(1))


def test_a_program_in_constant_use_is_not_evicted():
    """Its hits are served by the dispatcher, which the cache does not see."""
    cache = sc.ProgramCache(max_memory_programs=8)
    hot, other = sc.step(lambda x: x * 2), sc.step(lambda x: x * 3)
    x = jnp.ones(3)
    with sc.Session(jax.make_mesh((1,), ("data",)), cache=cache):
        for size in range(1, 40):
            hot(x), hot(x)
            other(np.ones(size))
    assert hot.stats().misses == 1 and hot.stats().evictions == 0
    assert other.stats().evictions > 0


def test_an_evicted_program_is_let_go():
    def goes_again(x):
        return jnp.sin(x)

    cache = sc.ProgramCache(max_memory_programs=1)
    f = sc.step(goes_again)
    with sc.Session(jax.make_mesh((1,), ("data",)), cache=cache):
        for size in range(1, 8):
            f(np.ones(size))
        assert live_executables("goes_again") == 1, "somebody still holds evicted executables"


def live_executables(function: str) -> int:
    """How many programs of a function there are in this process."""
    gc.collect()
    living = jax.devices()[0].client.live_executables()
    return sum(function in module.name for each in living for module in each.hlo_modules())


@needs_cpp
def test_a_program_with_effects_always_comes_through_python():
    f = sc.step(lambda x: jax.debug.callback(lambda: None) or x)
    for _ in range(3):
        f(1)
    assert f._cache_size() == 0 or f.stats().hits == 2
    assert f.stats().compiles == 1


def test_keyword_order_is_no_difference():
    f = sc.step(lambda a, b: a)
    f(a=1, b=2.0)
    with sc.no_recompile():
        f(b=2.0, a=1)


@pytest.mark.slow
def test_a_private_name_that_is_gone_is_warned_of_once_and_missed_by_nobody():
    import subprocess
    import sys

    code = """
import warnings
from jax._src import tree_util
del tree_util.equality_errors_pytreedef  # One that JAX itself can do without here.
with warnings.catch_warnings(record=True) as caught:
    warnings.simplefilter("always")
    import stepcache as sc
(warning,) = [w for w in caught if issubclass(w.category, sc.StepCacheWarning)]
assert "jax._src.tree_util.equality_errors_pytreedef" in str(warning.message), warning.message
step = sc.step(lambda x: x * 2)
assert int(step(2)) == int(step(2)) == 4 and step.stats().compiles == 1
"""
    subprocess.run([sys.executable, "-c", code], check=True, timeout=120)
