"""Transformations and decorators over a step, and steps over those: each answers for itself.

Whatever wraps a function copies its `__dict__`, as `functools.wraps` does. A step must answer for
its own function whatever has been copied onto it, and must give nothing of its own away.
"""

import copy
import functools
import importlib.util
import inspect
import pickle
import subprocess
import sys
import weakref

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import stepcache as sc

SCALAR, VECTOR, BATCH = (2.0,), (jnp.arange(1.0, 4.0),), (jnp.arange(8.0),)
WRAPPERS = {}


def wrapper(*args):
    """Registers a way to wrap a function, with arguments to call the result with."""

    def register(wrap):
        WRAPPERS[wrap.__name__] = (wrap, args)
        return wrap

    return register


def cubed(x):
    return x**3 + 1.0


for transformation, given in {
    jax.grad: SCALAR,
    jax.value_and_grad: SCALAR,
    jax.vmap: VECTOR,
    jax.checkpoint: SCALAR,
    jax.jit: SCALAR,
    jax.jacfwd: VECTOR,
    jax.jacrev: VECTOR,
    jax.hessian: SCALAR,
    jax.named_call: SCALAR,
    jax.pmap: BATCH,
    sc.step: SCALAR,
}.items():
    wrapper(*given)(transformation)


@wrapper(2.0)
def grad_of_grad(fun):
    return jax.grad(jax.grad(fun))


@wrapper(2.0, 1.0)
def jvp(fun):
    return lambda x, tangent: jax.jvp(fun, (x,), (tangent,))


@wrapper(2.0)
def linearized(fun):
    return functools.wraps(fun)(lambda x: jax.linearize(fun, x)[1](1.0))


@wrapper(2.0)
def custom_jvp(fun):
    wrapped = jax.custom_jvp(fun)
    wrapped.defjvp(lambda primals, tangents: (fun(*primals), 100.0 * tangents[0]))
    return wrapped


@wrapper(2.0)
def custom_vjp(fun):
    wrapped = jax.custom_vjp(fun)
    wrapped.defvjp(lambda x: (fun(x), x), lambda x, g: (100.0 * g,))
    return wrapped


@wrapper(2.0)
def grad_of_custom_vjp(fun):
    return jax.grad(custom_vjp(fun))


@wrapper()
def partial(fun):
    return functools.partial(fun, 2.0)


@wrapper(2.0)
def partial_of_nothing(fun):
    return functools.partial(fun)


@wrapper(2.0)
def decorated(fun):
    return functools.wraps(fun)(lambda x: -fun(x))


@wrapper(2.0)
def decorated_twice(fun):
    return decorated(decorated(decorated(fun)))


@wrapper(2.0)
def with_a_copied_dict(fun):
    def negated(x):
        return -fun(x)

    vars(negated).update(vars(fun))
    return negated


@wrapper(2.0)
def lru_cached(fun):
    cached = functools.lru_cache(maxsize=4)(lambda factor: lambda x: factor * fun(x))
    return functools.wraps(fun)(lambda x: cached(3.0)(x))


@wrapper(2.0)
def lru_cache(fun):
    return functools.lru_cache(maxsize=0)(fun)


@wrapper(2.0)
def with_methods_of_another(fun):
    """What a decorator hands on by hand: methods of another jitted function."""
    wrapped = functools.wraps(fun)(lambda x: -fun(x))
    other = jax.jit(lambda x: x)
    for name in ("lower", "trace", "eval_shape", "clear_cache"):
        setattr(wrapped, name, getattr(other, name))
    wrapped.stats = wrapped.explain = wrapped.warm = lambda *_: "another's"
    wrapped._engine = wrapped._options = None
    return wrapped


class Negated:
    def __init__(self, fun):
        functools.update_wrapper(self, fun)
        self.fun = fun

    def __call__(self, x):
        return -self.fun(x)

    def method(self, x):
        return self(x)


@wrapper(2.0)
def callable_object(fun):
    return Negated(fun)


@wrapper(2.0)
def bound_method(fun):
    return Negated(fun).method


@wrapper(2.0)
def static_method(fun):
    return type("Holder", (), {"method": staticmethod(fun)}).method


@wrapper(2.0)
def class_method(fun):
    return type("Holder", (), {"method": classmethod(lambda cls, x: 2.0 * fun(x))}).method


def assert_equal(found, expected):
    jax.tree.map(np.testing.assert_allclose, found, expected)


@pytest.mark.sample(every=4)
@pytest.mark.parametrize("name", WRAPPERS)
def test_a_step_over_a_wrapped_step_answers_for_itself(name):
    wrap, args = WRAPPERS[name]
    inner = sc.step(cubed_of_its_own := lambda x: cubed(x))
    wrapped = wrap(inner)
    outer, expected = sc.step(wrapped), wrap(lambda x: cubed(x))(*args)
    assert outer.stats().misses == 0 and outer.last_miss is None
    assert not outer.explain(*args).hit
    assert_equal(outer.lower(*args).compile()(*args), expected)
    assert_equal(outer.trace(*args).lower().compile()(*args), expected)
    shapes = jax.tree.map(lambda x: (np.shape(x), jnp.result_type(x)), expected)
    assert jax.tree.map(lambda x: (x.shape, x.dtype), outer.eval_shape(*args)) == shapes
    outer.warm(*args)
    assert outer.stats().misses == 1 and outer.last_miss.reason == "first call"
    assert_equal(outer(*args), expected)
    assert outer.explain(*args).hit and outer.stats().misses == 1
    assert inner.stats().misses == 0 and inner.last_miss is None
    assert_equal(inner(2.0), cubed(2.0))
    assert inner.stats().misses == 1 and outer.stats().misses == 1
    inner.clear_cache()
    assert inner.stats().programs == 0 and not inner.explain(2.0).hit
    assert outer.stats().programs == 1
    outer.clear_cache()
    assert not outer.explain(*args).hit and outer.stats().programs == 0
    assert_equal(outer(*args), expected)
    assert outer.last_miss.reason == "cleared"
    assert outer.__wrapped__ is wrapped and inner.__wrapped__ is cubed_of_its_own


@pytest.mark.sample(every=6)
@pytest.mark.parametrize("name", WRAPPERS)
def test_a_wrapped_step_is_what_the_wrapped_function_is(name):
    wrap, args = WRAPPERS[name]
    inner, plain = sc.step(lambda x: cubed(x)), lambda x: cubed(x)
    wrapped, expected = wrap(inner), wrap(plain)
    assert_equal(wrapped(*args), expected(*args))
    assert_equal(jax.jit(wrapped)(*args), expected(*args))
    given = [*vars(wrapped)] if hasattr(wrapped, "__dict__") else []
    if type(wrapped) is type(expected) and not isinstance(wrapped, sc.step(plain).__class__):
        names = {*dir(expected), *(vars(inner) if given else ())}
        assert {*given} <= names
    inner(2.0)
    assert inner.stats().misses >= 1 and inner.explain(2.0).hit
    assert_equal(inner.lower(2.0).compile()(2.0), cubed(2.0))


@pytest.mark.sample(every=6)
@pytest.mark.parametrize("name", WRAPPERS)
def test_a_step_over_a_wrapped_step_is_a_function_like_any_other(name):
    wrap, args = WRAPPERS[name]
    wrapped = wrap(sc.step(lambda x: cubed(x)))
    outer, expected = sc.step(wrapped), wrap(lambda x: cubed(x))(*args)
    assert inspect.signature(outer) == inspect.signature(wrapped)
    assert_equal(copy.copy(outer)(*args), expected)
    assert_equal(jax.jit(outer)(*args), expected)
    assert_equal(functools.partial(outer)(*args), expected)
    assert_equal(type("Holder", (), {"method": staticmethod(outer)})().method(*args), expected)
    assert weakref.ref(outer)() is outer


def test_a_step_keeps_nothing_of_its_own_where_a_wrapper_copies():
    assert {*vars(sc.step(cubed))} <= {*functools.WRAPPER_ASSIGNMENTS, "__wrapped__"}


def test_what_a_user_keeps_in_a_step_goes_where_a_function_would_take_it():
    step = sc.step(cubed)
    step.rate = 3
    assert functools.wraps(step)(lambda x: x).rate == 3
    assert sc.step(step).rate == 3 and sc.step(jax.grad(step)).rate == 3


@sc.step
def module_step(x):
    return cubed(x)


def test_steps_of_a_module_are_pickled_by_name_and_others_by_their_function():
    assert pickle.loads(pickle.dumps(module_step)) is module_step
    assert copy.deepcopy(module_step) is module_step
    other = sc.step(cubed, donate_argnums=())
    copied = pickle.loads(pickle.dumps(other))
    assert copied is not other and copied(2.0) == 9.0
    assert copied.__wrapped__ is cubed
    assert copy.deepcopy(sc.step(functools.partial(cubed, 2.0)))() == 9.0


MAIN = """
import pickle, sys
import numpy as np
from ray import cloudpickle
import stepcache as sc

@sc.step(static_argnames="n")
def step(x, n=2):
    return x * n

class Model:
    @sc.step
    def double(x):
        return x * 2

def use(x):
    return step(x) + Model.double(x)

assert pickle.loads(pickle.dumps(step)) is step
assert use(np.ones(2))[0] == 4
sys.stdout.buffer.write(cloudpickle.dumps((step, use)))
"""
ELSEWHERE = """
import pickle, sys
import numpy as np

step, use = pickle.load(sys.stdin.buffer)
assert (step(np.ones(2), n=3)[0], use(np.ones(2))[0]) == (3, 4)
"""


@pytest.mark.slow
def test_cloudpickle_sends_the_steps_of_a_script_to_other_processes():
    """As it does with what is under `jax.jit`. Ray, dask and joblib pickle by it."""
    if not importlib.util.find_spec("ray"):  # To import it here would fix how it authenticates.
        pytest.skip("needs Ray's cloudpickle")
    sent = subprocess.run([sys.executable, "-c", MAIN], capture_output=True, check=True)
    command = [sys.executable, "-c", ELSEWHERE]
    done = subprocess.run(command, input=sent.stdout, capture_output=True, check=False)
    assert done.returncode == 0, done.stderr.decode()


def test_custom_derivatives_of_a_step_take_keywords_and_defaults():
    """JAX binds the arguments of a function to its signature, and not those of a partial."""

    @jax.custom_vjp
    @sc.step
    def scaled(x, y=3.0):
        return x * y

    scaled.defvjp(lambda x, y: (scaled(x, y), (x, y)), lambda kept, g: (g * kept[1] * 100, g))
    assert scaled(2.0) == scaled(x=2.0, y=3.0) == 6.0
    assert jax.grad(scaled)(2.0) == jax.grad(lambda x: scaled(x, y=3.0))(2.0) == 300.0

    @jax.custom_jvp
    @sc.step
    def product(x, y):
        return x * y

    product.defjvp(lambda primals, tangents: (product(*primals), tangents[0] * 7))
    assert jax.grad(lambda x: product(x, y=3.0))(2.0) == 7.0


def test_listeners_of_events_may_take_the_name_alone():
    heard = []

    def listen(event):
        heard.append(event)

    jax.monitoring.register_event_listener(listen)
    try:
        assert sc.step(lambda x: x * 2)(2.0) == 4.0
    finally:
        jax.monitoring.unregister_event_listener(listen)
    assert any(each.startswith("/stepcache/") for each in heard)
