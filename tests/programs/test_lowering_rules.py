"""Which traces are lowered by JAX's own code alone, so that their lowering need not be recorded."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.custom_partitioning import custom_partitioning
from jax.extend.core import Primitive
from jax.extend.random import define_prng_impl
from jax.interpreters import mlir

from stepcache.fingerprint.lowering_rules import code_of_lowering

X = np.ones(4, np.float32)


def code_of(function, *args):
    return code_of_lowering(jax.jit(function).trace(*args).jaxpr)


@jax.custom_jvp
def of_mine(x):
    return jnp.sin(x)


of_mine.defjvp(lambda primals, tangents: (of_mine(*primals), tangents[0] * 2))


@jax.custom_vjp
def also_of_mine(x):
    return jnp.sin(x)


also_of_mine.defvjp(lambda x: (jnp.sin(x), x), lambda x, y: (x * y,))


BY_JAX = {
    "arithmetic": (lambda x: jnp.tanh(x @ x) + 1, X),
    "gradient": (jax.grad(lambda x: jax.nn.gelu(x).sum()), X),
    "loop": (lambda x: jax.lax.scan(lambda c, y: (c + y, c), 0.0, x), X),
    "branches": (lambda x: jax.lax.cond(x.sum() > 0, jnp.sin, jnp.cos, x), X),
    "random keys": (
        lambda key: jax.random.normal(jax.random.split(key)[0], (3,)),
        jax.random.key(0),
    ),
    "raw keys": (lambda key: jax.random.uniform(key), jax.random.PRNGKey(0)),
    "decomposition": (lambda x: jnp.linalg.svd(jnp.outer(x, x)), X),
    "custom_jvp": (of_mine, X),
    "gradient of custom_jvp": (jax.grad(lambda x: of_mine(x).sum()), X),
    "custom_vjp": (also_of_mine, X),
    "reduction by a function": (
        lambda x: jax.lax.reduce(x, np.float32(0), lambda a, b: a + b, (0,)),
        X,
    ),
}


@pytest.mark.parametrize("case", BY_JAX)
def test_jax_alone_lowers(case):
    codes = code_of(*BY_JAX[case])
    assert codes and all("jax" in code.co_filename for code in codes.values())
    assert any(code.co_name == "jaxpr_subcomp" for code in codes.values())


def primitive(rule, **options):
    made = Primitive("made_here")
    made.def_abstract_eval(lambda x: x)
    mlir.register_lowering(made, rule, **options)
    return made.bind


def keys_of_mine():
    impl = define_prng_impl(
        key_shape=(2,),
        seed=lambda seed: jnp.full(2, seed, np.uint32),
        split=lambda key, shape: jnp.broadcast_to(key, (*shape, 2)),
        random_bits=lambda key, width, shape: jnp.full(shape, key[0], np.uint32),
        fold_in=lambda key, data: key + data,
        name="mine",
        tag="mine",
    )
    return jax.random.key(0, impl=impl)


@custom_partitioning
def partitioned(x):
    return x * 2


partitioned.def_partition(
    partition=lambda mesh, args, result: (mesh, lambda x: x * 2, None, None),
    infer_sharding_from_operands=lambda mesh, args, result: result.sharding,
    sharding_rule="i -> i",
)


def rule(context, x):
    return [x]


OTHERS = {
    "my rule": lambda: (primitive(rule), X),
    "my rule for one platform": lambda: (primitive(rule, platform="cpu"), X),
    "my rule in a partial": lambda: (primitive(functools.partial(rule)), X),
    "my function in JAX's rule": lambda: (primitive(mlir.lower_fun(jax.jit(lambda x: [x]))), X),
    "my rule inside a loop": lambda: (
        lambda x: jax.lax.fori_loop(0, 3, lambda _, y: primitive(rule)(y), x),
        X,
    ),
    "callback": lambda: (lambda x: jax.pure_callback(np.sin, x, x), X),
    "my random keys": lambda: (lambda key: jax.random.bits(key), keys_of_mine()),
    "my partitioning": lambda: (partitioned, X),
}


@pytest.mark.parametrize("case", OTHERS)
def test_others_may_lower(case):
    assert code_of(*OTHERS[case]()) is None
