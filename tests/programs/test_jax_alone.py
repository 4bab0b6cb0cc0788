"""In a long trace a recording pauses where JAX's code alone runs, and sees all other code."""

import itertools
import sys
import time

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.extend.core import Primitive
from jax.interpreters import ad, mlir

from stepcache.fingerprint import jax_alone, recorder
from stepcache.fingerprint.recorder import Recording


def long_trace(x):
    for _ in range(200):
        x = jnp.sin(x) * 2 + x
    return x


@jax.custom_jvp
def custom(x):
    return x * 3


@custom.defjvp
def rule_of_custom(primals, tangents):
    return custom(*primals), tangents[0] * 3


@jax.jit
def custom_in_jit(x):
    return custom(x) + 1


@jax.custom_vjp
def custom_vjp(x):
    return x * 2


def forward(x):
    return custom_vjp(x), None


def backward(kept, gradient):
    return (gradient * (2.0 if time.time() > 0 else 3.0),)


custom_vjp.defvjp(forward, backward)

twice_p = Primitive("twice of the user's")


@twice_p.def_abstract_eval
def shape_of_twice(x):
    return x


def jvp_of_twice(primals, tangents):
    return twice_p.bind(*primals), twice_p.bind(*tangents)


ad.primitive_jvps[twice_p] = jvp_of_twice


def transpose_of_twice(cotangent, x):
    return (twice_p.bind(cotangent),)


ad.primitive_transposes[twice_p] = transpose_of_twice
mlir.register_lowering(twice_p, mlir.lower_fun(lambda x: x * 2, multiple_results=False))


def late(x):
    return x * 2


numbers = itertools.count()


def of_mine(x, y):
    return late(x) if next(numbers) > 4 else x * y


mine = jnp.frompyfunc(of_mine, 2, 1)


later = itertools.count()


def product_of_mine(x, y, *arguments, **named):
    return late(jax.lax.dot_general(x, y, *arguments)) if next(later) > 4 else x @ y


def linear(x):
    return jax.custom_derivatives.linear_call(
        lambda _, x: x * 2, lambda _, cotangent: late(cotangent), (), x
    )


class Number:
    """Converts itself to an array, in code of the user's."""

    def __jax_array__(self):
        return jnp.ones(3)


def recorded(function, *arguments):
    """The recording of a trace of a function, after a trace which is long enough for pauses."""

    def long(*arguments):
        x = long_trace(arguments[0])
        return function(x, *arguments[1:])

    with Recording() as recording:
        jax.jit(long).trace(*arguments)
    assert recording.unavailable is None
    return recording


X = np.ones(3, np.float32)


@pytest.mark.sample(every=3)
@pytest.mark.parametrize(
    ("function", "seen"),
    [
        (jax.grad(lambda x: custom(x).sum()), [rule_of_custom]),
        (jax.grad(lambda x: custom_in_jit(x).sum()), [rule_of_custom]),
        (jax.grad(lambda x: jax.jit(custom_in_jit)(x).sum()), [rule_of_custom]),
        (jax.grad(lambda x: custom_vjp(x).sum()), [forward, backward]),
        (jax.vmap(jax.grad(lambda x: custom_vjp(x) * 2)), [forward, backward]),
        (lambda x: twice_p.bind(x), [shape_of_twice]),
        (lambda x: jax.jvp(jax.jit(twice_p.bind), (x,), (x,)), [shape_of_twice, jvp_of_twice]),
        (lambda x: jax.lax.scan(lambda c, _: (custom(c), None), x, None, length=3)[0], [custom]),
        (lambda x: x + Number(), [Number.__jax_array__]),
        (jax.grad(lambda x: twice_p.bind(x).sum()), [jvp_of_twice, transpose_of_twice]),
        (jax.grad(lambda x: jax.jit(twice_p.bind)(x).sum()), [transpose_of_twice]),
        (jax.grad(lambda x: linear(x).sum()), [late]),
        (
            lambda x: [
                jnp.einsum("i,i->", x, jnp.ones(3), _dot_general=product_of_mine) for _ in range(8)
            ],
            [product_of_mine],
        ),
        (lambda x: [mine(jnp.ones(size), x[0]) for size in range(1, 9)], [late]),
    ],
)
def test_code_of_the_user_is_seen_in_a_long_trace(function, seen):
    jax.clear_caches()
    codes = recorded(function, X).codes
    for each in seen:
        code = getattr(each, "__code__", None) or each.fun.__code__
        assert code in codes


def test_what_such_code_calls_is_seen():
    jax.clear_caches()
    recording = recorded(jax.grad(lambda x: custom_vjp(x).sum()), X)
    assert any("time.time" in why for why in recording.impure)


def test_a_function_put_into_jax_is_seen(monkeypatch):
    from jax._src import source_info_util

    before = source_info_util.current

    def mine():
        return before()

    with Recording():
        jax.jit(long_trace).trace(X)  # Everything has been seen before.
    monkeypatch.setattr(source_info_util, "current", mine)
    assert not jax_alone.jax_is_whole()
    jax.clear_caches()
    with Recording() as recording:
        jax.jit(long_trace).trace(X)
    assert mine.__code__ in recording.codes


def test_a_rule_put_into_jax_is_seen():
    from jax._src.lax import lax

    jax.clear_caches()
    before = ad.primitive_jvps[lax.sin_p]

    def mine(primals, tangents, **parameters):
        return before(primals, tangents, **parameters)

    ad.primitive_jvps[lax.sin_p] = mine
    try:
        with Recording() as recording:
            jax.jit(lambda x: jax.jvp(long_trace, (x,), (x,))).trace(X)
    finally:
        ad.primitive_jvps[lax.sin_p] = before
        assert mine.__code__ in recording.codes


def test_a_rule_put_into_jax_that_transposes_is_seen():
    from jax._src.interpreters import ad
    from jax._src.lax import lax

    jax.clear_caches()
    tables = (getattr(ad, "fancy_transposes", {}), ad.primitive_transposes)
    table = next(each for each in tables if lax.mul_p in each)
    before = table[lax.mul_p]

    def mine(*arguments, **parameters):
        return before(*arguments, **parameters)

    table[lax.mul_p] = mine
    try:
        with Recording() as recording:
            jax.jit(jax.grad(lambda x: long_trace(x).sum())).trace(X)
    finally:
        table[lax.mul_p] = before
        assert mine.__code__ in recording.codes


def layers(x):
    for _ in range(15):
        y = jnp.einsum("ij,jk->ik", x, x) / 3
        x = jax.nn.softmax(jnp.where(y > 0, y, jnp.tril(y)), axis=-1).reshape(-1)[:9].reshape(3, 3)
        x = jax.nn.gelu(jnp.take(x, jnp.arange(3), axis=0)) + y.mean(axis=0) + jnp.maximum(x, 0)
    return x.sum()


@pytest.mark.sample(every=2)
@pytest.mark.parametrize(
    "function",
    [
        pytest.param(lambda x: long_trace(x).sum(), id="sum"),
        pytest.param(layers, id="layers"),
        pytest.param(jax.vmap(layers), id="vmap", marks=pytest.mark.slow),
    ],
)
def test_the_code_of_jax_that_counts_is_what_counts_without_pauses(monkeypatch, function):
    x = np.ones((3, 3, 3), np.float32) if function is not layers else np.ones((3, 3), np.float32)
    gradient = jax.grad(lambda x: function(x).sum())
    jax.clear_caches()
    with Recording() as paused:
        jax.jit(gradient).trace(x)
    monkeypatch.setattr(jax_alone, "_BINDS_BEFORE_PAUSES", sys.maxsize)
    jax.clear_caches()
    with Recording() as whole:
        jax.jit(gradient).trace(x)
    of_jax = {code for code in whole.codes if "/jax/" in code.co_filename}
    of_jax = {code for code in of_jax if code.co_name != "__eq__"}  # Where hashes happen to agree.
    assert of_jax <= paused.codes


@pytest.mark.skipif(sys.version_info >= (3, 12), reason="sys.monitoring needs no pauses")
def test_a_long_trace_is_watched_in_part(monkeypatch):
    events = {}
    for pauses in (False, True):
        monkeypatch.setattr(jax_alone, "_BINDS_BEFORE_PAUSES", 300 if pauses else sys.maxsize)
        jax.clear_caches()
        seen = []
        monkeypatch.setattr(recorder, "_profiler", lambda seen=seen: lambda *_: seen.append(1))
        with Recording():
            jax.jit(lambda x: jax.jvp(long_trace, (x,), (x,))).trace(X)
        events[pauses] = len(seen)
    assert events[True] < 0.75 * events[False]


def test_a_ufunc_that_jax_calls_in_a_pause():
    with Recording():
        jax_alone._thread.primitives.clear()
        assert jax_alone.stays_in_jax(jnp.add, (), {}) in (True, False)


def test_a_function_with_an_argument_that_cannot_be_hashed_is_watched(monkeypatch):
    monkeypatch.setattr(jax_alone, "_BINDS_BEFORE_PAUSES", 0)
    monkeypatch.setattr(jax_alone, "_holds_no_function", lambda value: True)
    function = jnp.mean.__wrapped__ if hasattr(jnp.mean, "__wrapped__") else jnp.mean
    with Recording():
        assert not jax_alone.jit_runs_jax_alone(function, (None, ([set()],), {}), {})


def test_jax_is_whole():
    assert jax_alone.jax_is_whole()
