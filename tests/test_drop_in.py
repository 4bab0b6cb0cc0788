"""`stepcache.step` in the place of `jax.jit`: each case runs under both, and must not differ.

A case takes `jit`, and returns a tree of results or raises. Results are compared with their dtypes,
weak types, shardings and committedness; errors by type and text.
"""

import dataclasses
import functools
import gc
import inspect
import re
import threading
import traceback
import weakref

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding, SingleDeviceSharding
from jax.sharding import PartitionSpec as P

import stepcache as sc

CASES = {}


def case(function):
    CASES[function.__name__] = function
    return function


def describe(x):
    if isinstance(x, jax.Array) and jax.dtypes.issubdtype(x.dtype, jax.dtypes.prng_key):
        return ("key", x.shape, str(x.dtype), describe(jax.random.key_data(x)))
    if isinstance(x, jax.Array):
        return (np.asarray(x), x.dtype, x.weak_type, x.committed, str(x.sharding))
    return x


def outcome(function, jit):
    try:
        result = function(jit)
    except Exception as error:
        # Addresses, and the place of a definition inside this file, are not part of an error.
        text = re.sub(r"0x[0-9a-f]+", "0x", str(error))
        return type(error), text
    return jax.tree.map(describe, result)


# ---- ways to write it ------------------------------------------------------------------------


@case
def bare(jit):
    return jit(lambda x: x + 1)(3)


@case
def decorator_with_options(jit):
    @functools.partial(jit, static_argnames="n")
    def power(x, n=2):
        return x**n

    return power(3.0), power(3.0, n=3), power(3.0, 3), power(x=3.0)


@case
def method(jit):
    class Model:
        scale = 3

        @jit
        def apply(self, x):
            return x * 2

        @functools.partial(jit, static_argnums=0)
        def scaled(self, x):
            return x * self.scale

        @staticmethod
        @jit
        def double(x):
            return x * 2

        @classmethod
        def make(cls):
            return jit(cls.double)(4)

    jax.tree_util.register_pytree_node(Model, lambda m: ((), None), lambda *_: Model())
    model = Model()
    return model.apply(1.0), model.scaled(2.0), Model.double(3), Model.make()


@case
def partial_lambda_and_callable(jit):
    class Callable:
        def __call__(self, x):
            return x - 1

    return (
        jit(functools.partial(jnp.add, 2))(3),
        jit(functools.partial(lambda x, *, y: x * y, y=2))(3.0),
        jit(Callable())(3),
        jit(jnp.sin)(1.0),
        jit(max, static_argnums=(0, 1))(3, 4),
    )


WITHOUT_WEAK_REFERENCES = []


@case
def callable_without_weak_references(jit):
    class Callable:
        __slots__ = ()

        def __call__(self, x):
            return x + 1

    # Kept, for JAX would take another function at its address for this one, and end the process.
    WITHOUT_WEAK_REFERENCES.append(Callable())
    f = jit(WITHOUT_WEAK_REFERENCES[-1])
    return f(1), f(1), f(2.0)


@case
def keywords_defaults_and_varargs(jit):
    def f(a, b=2, *rest, c=3, **others):
        return a, b, rest, c, others

    g = jit(f)
    return g(1), g(1, 5), g(1, 2, 3, 4), g(1, c=9), g(1, z=2, y=1), g(a=1, b=2)


@case
def names_and_docs(jit):
    @jit
    def documented(x: int) -> int:
        """Says so."""
        return x

    import inspect

    return (
        documented.__name__,
        documented.__doc__,
        documented.__qualname__,
        str(inspect.signature(documented)),
        documented.__wrapped__(3),
        callable(documented),
        isinstance(documented, jax.stages.Wrapped),
    )


# ---- arguments -------------------------------------------------------------------------------


@case
def scalars_and_weak_types(jit):
    f = jit(lambda x: x * 2)
    return [
        f(x) for x in (1, 1.5, True, 2 + 1j, np.int8(3), np.float64(1), np.arange(3), jnp.int32(4))
    ]


@case
def promotion_follows_weak_types(jit):
    f = jit(lambda x, y: x + y)
    half = jnp.ones(2, jnp.bfloat16)
    return f(half, 1.0), f(half, np.float32(1)), f(half, jnp.float32(1)), f(1, 2.0)


@case
def pytrees(jit):
    tree = {"a": [1, (2.0, None)], "b": np.ones((2, 2)), "c": {}}
    return jit(lambda t: t)(tree), jit(lambda t: [t, None])(tree)


@case
def order_of_dictionary_keys(jit):
    f = jit(lambda t: t)
    return f({"b": 1, "a": 2.0}), f({"a": 2.0, "b": 1})


@case
def prng_keys(jit):
    f = jit(lambda key: (jax.random.split(key), jax.random.normal(key, (2,))))
    batched = jit(jax.vmap(lambda key: jax.random.uniform(key)))
    return f(jax.random.key(0)), f(jax.random.key(1)), batched(jax.random.split(jax.random.key(2)))


@case
def raw_prng_keys(jit):
    return jit(lambda key: jax.random.normal(key))(jax.random.PRNGKey(0))


@case
def zero_sized_and_low_precision(jit):
    f = jit(lambda x: x + x)
    types = (jnp.float8_e4m3fn, jnp.int4, jnp.bool_, jnp.bfloat16, jnp.uint8)
    return f(np.zeros((0, 3))), [f(jnp.ones(2, dtype)).astype(float) for dtype in types]


@case
def static_arguments(jit):
    seen = []

    def f(x, n):
        seen.append(n)
        return x * n

    g = jit(f, static_argnums=1)
    results = [g(2, n) for n in (1, True, 1.0, 1, 2)]
    h = jit(f, static_argnums=-1)
    return results, list(seen), h(2, 5), jit(f, static_argnames=("n",))(2, n=3)


@case
def numbers_and_names_in_other_forms(jit):
    def f(x, n):
        return x * n

    x = jnp.ones(4)
    return (
        jit(f, static_argnames={"n"})(2, n=3),
        jit(f, static_argnames=(name for name in ("n",)))(2, n=3),
        jit(f, static_argnums=np.array([1]))(2, 3),
        jit(f, static_argnums=np.int64(1), donate_argnums=np.int64(0))(x, 3),
        x.is_deleted(),
    )


@case
def static_arguments_by_equality(jit):
    class Config:
        def __init__(self, n):
            self.n = n

        def __eq__(self, other):
            return self.n == other.n

        def __hash__(self):
            return self.n

    traced = []

    @functools.partial(jit, static_argnums=0)
    def f(config, x):
        traced.append(config.n)
        return x + config.n

    return f(Config(1), 1), f(Config(1), 2), f(Config(2), 1), traced


@case
def unhashable_static(jit):
    return jit(lambda x, n: x, static_argnums=1)(1, [1])


@case
def not_an_array(jit):
    return jit(lambda x: x)("text")


@case
def not_an_array_deep_inside(jit):
    return jit(lambda x: x)({"a": [1, object()]})


@case
def date(jit):
    return jit(lambda x: x)(np.datetime64("2020"))


@case
def object_array(jit):
    return jit(lambda x: x)(np.array([None, "a"], dtype=object))


@case
def overflowing_integer(jit):
    return jit(lambda x: x)(2**80)


@case
def missing_argument(jit):
    def f(x, y):
        return x

    return jit(f)(1)


@case
def not_callable(jit):
    return jit(3)


@case
def static_and_donated(jit):
    return jit(lambda x: x, static_argnames="x", donate_argnames="x")


@case
def argnums_out_of_range(jit):
    return jit(lambda x: x, static_argnums=3)


@case
def negative_static_out_of_range(jit):
    return jit(lambda a, b=3: b, static_argnums=-3)()


@case
def tree_that_validates_its_leaves(jit):
    @functools.partial(jax.tree_util.register_dataclass, data_fields=["x"], meta_fields=[])
    @dataclasses.dataclass
    class Vector:
        x: jax.Array

        def __post_init__(self):
            assert self.x.ndim == 1

    return jit(lambda vector: vector.x * 2)(Vector(jnp.ones(2)))


@case
def static_that_cannot_be_printed(jit):
    class Silent:
        def __init__(self, n):
            self.n = n

        def __repr__(self):
            raise RuntimeError("repr")

    f = jit(lambda x, s: x * s.n, static_argnums=1)
    return f(1.0, Silent(1)), f(1.0, Silent(2))


@case
def static_that_compares_only_with_its_kind(jit):
    class Picky:
        def __hash__(self):
            return 0

        def __eq__(self, other):
            if not isinstance(other, Picky):
                raise TypeError("compared")
            return True

    f = jit(lambda x, s: x, static_argnums=1)
    return f(1.0, Picky()), f(1.0, 5), f(1.0, Picky()), f(1.0, 0)


@case
def static_that_cannot_be_compared(jit):
    class Incomparable:
        def __hash__(self):
            return 1

        def __eq__(self, other):
            raise NotImplementedError("eq")

    f = jit(lambda x, s: x, static_argnums=1)
    f(1.0, 1), f(1.0, Incomparable())
    try:
        f(1.0, Incomparable())
    except ValueError as error:
        return "comparable" in str(error)


@case
def abstract_argument(jit):
    return jit(lambda x: x)({"a": np.ones(2), "b": jax.ShapeDtypeStruct((2,), np.int32)})


@case
def no_function(jit):
    return jit(None)


# ---- transformations -------------------------------------------------------------------------


@case
def transformations(jit):
    f = jit(lambda x: jnp.sin(x) * x)
    xs = jnp.arange(3.0)
    return (
        jax.grad(f)(1.0),
        jax.vmap(f)(xs),
        jax.jit(f)(2.0),
        jit(jax.grad(f))(1.0),
        jax.jvp(f, (1.0,), (1.0,)),
        jax.vjp(f, 2.0)[1](1.0),
        jax.hessian(f)(1.0),
        jax.linearize(f, 1.0)[1](1.0),
        jax.checkpoint(f)(3.0),
        jax.grad(jax.checkpoint(f))(3.0),
        jax.lax.scan(lambda c, x: (f(c) + x, f(x)), 0.0, xs),
        jax.eval_shape(f, 1.0).shape,
        str(jax.make_jaxpr(lambda x: f(x))(1.0)).count("sin"),
        jit(lambda x: f(f(x)))(1.0),
    )


@case
def custom_derivative(jit):
    @jax.custom_vjp
    def f(x):
        return x**2

    f.defvjp(lambda x: (f(x), x), lambda x, g: (g * 100,))
    return jax.grad(jit(f))(3.0), jax.grad(jit(lambda x: f(x) + 1))(2.0)


@case
def shard_map(jit):
    mesh = jax.make_mesh((8,), ("i",))
    f = jit(lambda x: jax.lax.psum(x, "i"))
    g = jax.shard_map(f, mesh=mesh, in_specs=P("i"), out_specs=P())
    return g(jnp.arange(8.0)), jit(g)(jnp.arange(8.0))


@case
def disabled(jit):
    traced = []

    @jit
    def f(x):
        traced.append(isinstance(x, jax.core.Tracer))
        return x if x > 0 else -x

    with jax.disable_jit():
        result = f(-3.0)
    return result, traced


@case
def concrete_call_inside_a_trace(jit):
    f = jit(lambda x: x * 2)
    return jax.jit(lambda x: x + f(np.ones(3)))(1.0)


@case
def constants_at_compile_time(jit):
    f = jit(lambda x: x * 2)

    def g(x):
        with jax.ensure_compile_time_eval():
            n = int(f(3))
        return x * n

    return jit(g)(2.0)


@case
def leaked_tracer(jit):
    leaks = []
    jit(lambda x: leaks.append(x) or x)(1.0)
    try:
        jit(lambda x: x)(leaks[0])
    except jax.errors.UnexpectedTracerError:
        return "refused"


@case
def tracer_to_bool(jit):
    try:
        jit(lambda x: 1 if x else 2)(1.0)
    except jax.errors.TracerBoolConversionError:
        return "refused"


# ---- control flow and effects ----------------------------------------------------------------


@case
def control_flow(jit):
    return (
        jit(lambda x: jax.lax.cond(x > 0, lambda: x, lambda: -x))(-2.0),
        jit(lambda i: jax.lax.switch(i, [lambda: 1, lambda: 2, lambda: 3]))(1),
        jit(lambda n: jax.lax.while_loop(lambda c: c < n, lambda c: c * 2, 1))(100),
        jit(lambda n: jax.lax.fori_loop(0, n, lambda i, c: c + i, 0))(5),
    )


@case
def debug_print(jit):
    import contextlib
    import io

    @jit
    def f(x):
        jax.debug.print("x={x}", x=x, ordered=True)
        return x + 1

    with contextlib.redirect_stdout(io.StringIO()) as printed:
        results = [f(i) for i in range(3)]
        jax.effects_barrier()
    return results, printed.getvalue()


@case
def ordered_callback(jit):
    seen = []

    @jit
    def f(x):
        jax.experimental.io_callback(lambda v: seen.append(int(v)), None, x, ordered=True)
        return x * 2

    results = [f(i) for i in range(4)]
    jax.effects_barrier()
    return results, seen


@case
def unordered_callback(jit):
    seen = []

    @jit
    def f(x):
        jax.debug.callback(lambda v: seen.append(int(v)), x)
        return x

    results = [f(i) for i in range(4)]
    jax.effects_barrier()
    return results, sorted(seen)


@case
def pure_callback(jit):
    def host(x):
        return np.asarray(x) * 3

    f = jit(lambda x: jax.pure_callback(host, jax.ShapeDtypeStruct((2,), jnp.float32), x))
    return f(np.ones(2, np.float32)), f(np.zeros(2, np.float32))


@case
def mutable_reference_as_argument(jit):
    ref = jax.new_ref(jnp.zeros(3))

    @jit
    def f(ref, x):
        ref[...] += x
        return x * 2

    return f(ref, 1.0), f(ref, 2.0), ref[...]


@case
def mutable_reference_captured(jit):
    ref = jax.new_ref(jnp.zeros(()))

    @jit
    def f(x):
        ref[...] += x
        return x

    return f(1.0), f(2.0), ref[...]


# ---- donation --------------------------------------------------------------------------------


@case
def donation(jit):
    f = jit(lambda x, y: x + y, donate_argnums=0)
    x, y = jnp.ones(4), jnp.ones(4)
    return f(x, y), x.is_deleted(), y.is_deleted()


@case
def donation_by_name(jit):
    f = jit(lambda x, y: x + y, donate_argnames=("y",))
    x, y = jnp.ones(4), jnp.ones(4)
    return f(x, y=y), x.is_deleted(), y.is_deleted()


@case
def donated_array_used_again(jit):
    f = jit(lambda x: x + 1, donate_argnums=0)
    x = jnp.ones(4)
    f(x)
    return f(x)


@case
def donated_array_used_again_with_effects(jit):
    def g(x):
        jax.debug.callback(lambda: None)
        return x + 1

    f = jit(g, donate_argnums=0)
    x = jnp.ones(4)
    f(x)
    return f(x)


# ---- where things run ------------------------------------------------------------------------


@case
def committed_inputs(jit):
    device = jax.devices()[3]
    f = jit(lambda x: x + 1)
    x = jax.device_put(jnp.ones(2), device)
    with jax.default_device(jax.devices()[2]):
        uncommitted = f(np.ones(2))
    return f(x), f(np.ones(2)), f(jnp.ones(2)), uncommitted


@case
def incompatible_devices(jit):
    a, b = (jax.device_put(jnp.ones(2), device) for device in jax.devices()[:2])

    def add(x, y):
        return x + y

    return jit(add)(a, b)


@case
def shardings_in_and_out(jit):
    mesh = jax.make_mesh((4, 2), ("a", "b"))
    sharded, whole = NamedSharding(mesh, P("a")), NamedSharding(mesh, P())
    x = np.arange(8.0).reshape(8, 1)
    placed = jax.device_put(x, sharded)
    return (
        jit(lambda x: x * 2, in_shardings=sharded, out_shardings=whole)(x),
        jit(lambda x, y: (x, y), in_shardings=(sharded, None), out_shardings=(None, whole))(x, x),
        jit(lambda t: t, in_shardings=({"a": sharded, "b": None},))({"a": x, "b": x}),
        jit(lambda x: x)(placed),
        jit(lambda x: x, in_shardings=sharded)(placed),
        jit(lambda x: x, out_shardings=SingleDeviceSharding(jax.devices()[1]))(x),
    )


@case
def sharding_that_does_not_match(jit):
    mesh = jax.make_mesh((8,), ("a",))
    x = jax.device_put(np.arange(8.0), NamedSharding(mesh, P("a")))
    f = jit(lambda x: x, in_shardings=NamedSharding(mesh, P()))
    f(np.arange(8.0))
    return f(x)


@case
def sharding_that_does_not_divide(jit):
    mesh = jax.make_mesh((8,), ("a",))

    def f(x):
        return x

    return jit(f, in_shardings=NamedSharding(mesh, P("a")))(np.ones(6))


@case
def shardings_of_another_tree(jit):
    mesh = jax.make_mesh((8,), ("a",))

    def f(x):
        return x

    return jit(f, in_shardings=({"a": NamedSharding(mesh, P("a"))},))([1, 2])


@case
def keywords_with_in_shardings(jit):
    mesh = jax.make_mesh((8,), ("a",))
    return jit(lambda x: x, in_shardings=NamedSharding(mesh, P("a")))(x=np.ones(8))


@case
def specs_under_a_mesh(jit):
    mesh = jax.make_mesh((8,), ("a",), axis_types=(jax.sharding.AxisType.Auto,))
    f = jit(lambda x: jax.lax.with_sharding_constraint(x * 2, P("a")), in_shardings=P("a"))
    with jax.set_mesh(mesh):
        return f(np.arange(8.0)), f(np.arange(16.0))


@case
def explicit_mesh(jit):
    mesh = jax.make_mesh((8,), ("a",), axis_types=(jax.sharding.AxisType.Explicit,))
    with jax.set_mesh(mesh):
        x = jax.device_put(np.arange(8.0), P("a"))
        return jit(lambda x: str(jax.typeof(x)) and x * 2)(x)


@case
def device_and_backend(jit):
    import warnings

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return jit(lambda x: x, device=jax.devices()[2])(1.0), jit(lambda x: x, backend="cpu")(1.0)


@case
def other_options(jit):
    return (
        jit(lambda x, y: x, keep_unused=True)(1.0, 2.0),
        jit(lambda x: x * 2, inline=True)(2.0),
        jax.jit(lambda x: jit(lambda y: y * 2, inline=True)(x))(2.0),
        jit(lambda x: x + 1, compiler_options={"xla_cpu_enable_fast_math": True})(1.0),
    )


@case
def wrong_compiler_option(jit):
    return jit(lambda x: x, compiler_options={"xla_no_such_option": True})(1.0)


# ---- settings --------------------------------------------------------------------------------


@case
def settings_change_between_calls(jit):
    f = jit(lambda x: x * 2)
    results = [f(np.float64(1.5))]
    with jax.enable_x64(True):
        results.append(f(np.float64(1.5)))
    results.append(f(np.float64(1.5)))
    with jax.default_matmul_precision("float32"):
        results.append(jit(lambda x: x @ x)(jnp.ones((2, 2))))
    return results


@case
def nan_check(jit):
    f = jit(lambda x: jnp.log(x))
    ok = f(1.0)
    try:
        with jax.debug_nans(True):
            f(-1.0)
    except FloatingPointError as error:
        return ok, str(error)


@case
def nan_check_on_first_call(jit):
    try:
        with jax.debug_nans(True):
            jit(lambda x: jnp.log(x))(-1.0)
    except FloatingPointError as error:
        return str(error)


@case
def rank_promotion(jit):
    with jax.numpy_rank_promotion("raise"):
        return jit(lambda x, y: x + y)(np.ones((2, 3)), np.ones(3))


@case
def no_tracing(jit):
    f = jit(lambda x: x + 1)
    f(1)
    with jax.no_tracing():
        return f(2), f(3)


# ---- ahead of time ---------------------------------------------------------------------------


@case
def stages(jit):
    f = jit(lambda x, n: x * n, static_argnums=1)
    traced = f.trace(jnp.ones(2), 3)
    lowered = f.lower(jax.ShapeDtypeStruct((2,), jnp.float32), 3)
    compiled = lowered.compile()
    return (
        str(traced.jaxpr),
        "stablehlo" in lowered.as_text(),
        compiled(jnp.ones(2)),
        f.eval_shape(jnp.ones(2), 3).shape,
        f.eval_shape(jnp.ones(2), 3).dtype,
    )


@case
def clear_cache(jit):
    traced = []
    f = jit(lambda x: traced.append(1) or x)
    f(1), f(1)
    before = (len(traced), f._cache_size())
    f.clear_cache()
    after = f._cache_size()
    f(1)
    return before, after, len(traced)


@case
def clear_caches_of_jax(jit):
    number = [1]
    f = jit(lambda x: x * number[0])
    before = f(1)
    number[0] = 2
    jax.clear_caches()
    return before, f(1)


@case
def functions_are_freed_at_once(jit):
    def make():
        def function(x):
            return x

        jit(function)(1.0)
        return weakref.ref(function)

    gc.collect()
    gc.disable()
    try:
        return make()() is None
    finally:
        gc.enable()


@case
def many_programs(jit):
    traced = []
    f = jit(lambda x, n: traced.append(n) or x, static_argnums=1)
    for _ in range(2):
        for n in range(30):
            f(1.0, n)
    return len(traced)


@case
def exported(jit):
    exported = jax.export.export(jit(lambda x: x * 2))(jax.ShapeDtypeStruct((2,), jnp.float32))
    return exported.call(jnp.ones(2))


# ---- errors ----------------------------------------------------------------------------------


@case
def user_error(jit):
    @jit
    def f(x):
        raise KeyError("mine")

    return f(1)


@case
def user_error_is_not_cached(jit):
    fail = [True]

    @jit
    def f(x):
        if fail:
            raise ValueError("not yet")
        return x + 1

    try:
        f(1)
    except ValueError:
        fail.clear()
    return f(1)


@case
def shape_error(jit):
    @jit
    def f(x, y):
        return x @ y

    return f(np.ones((2, 3)), np.ones((2, 3)))


@case
def frames_of_a_user_error(jit):
    def inner(x):
        raise ZeroDivisionError

    def outer(x):
        return inner(x)

    def user(f):
        f(1)

    try:
        user(jit(outer))
    except ZeroDivisionError as error:
        return [frame.name for frame in traceback.extract_tb(error.__traceback__)]


@case
def returns_no_array(jit):
    return jit(lambda x: "text")(1)


@case
def threads(jit):
    traced = []
    f = jit(lambda x: traced.append(1) or x * 2)
    results = [None] * 8

    def work(i):
        results[i] = f(np.float32(i))

    workers = [threading.Thread(target=work, args=(i,)) for i in range(8)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    return results


@pytest.mark.sample(every=4)
@case
def it_has_the_signature_of_the_function_however_it_is_asked_for(jit):
    def function(a, b=1, *rest, c: int = 2, **others):
        return a

    f = jit(function)
    asked = inspect.signature, functools.partial(inspect.signature, follow_wrapped=False)
    return [str(each(f)) for each in (*asked, inspect.getfullargspec)], inspect.unwrap(f).__name__


@pytest.mark.parametrize("name", CASES)
def test_means_what_jit_means(name):
    by_jit, by_step = (outcome(CASES[name], jit) for jit in (jax.jit, sc.step))
    assert jax.tree.structure(by_jit) == jax.tree.structure(by_step), (by_jit, by_step)
    for x, y in zip(jax.tree.leaves(by_jit), jax.tree.leaves(by_step), strict=True):
        np.testing.assert_array_equal(x, y)


@pytest.mark.parametrize("of", [jnp.searchsorted, lambda a, b: jnp.interp(a, b, 2 * b)])
def test_a_function_of_jax_that_is_a_high_primitive_is_cached(of, tmp_path):
    """From jax 0.12 on `searchsorted` is one, which JAX expands between trace and lowering."""

    def start():
        step, a, b = sc.step(of), jnp.asarray([0.5, 2.5]), jnp.arange(4.0)
        cache = sc.ProgramCache(tmp_path / "programs")
        with sc.Session(cache=cache):
            for _ in range(3):
                assert jnp.array_equal(step(a, b), jax.jit(of)(a, b))
        cache.flush()
        return step.stats()

    assert (start().delegated, start().compiles) == (0, 0)
