import functools
import inspect

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from stepcache import jaxcompat
from stepcache.calls.signature import Leaf, Unreadable, read, shorten
from stepcache.calls.signature_diff import diff, distance
from stepcache.calls.step_spec import StepSpec
from stepcache.jaxcompat import arguments


def parameters(fun, carry=(), **options):
    return StepSpec.of(fun, options, carry).parameters


def signature(*args, **kwargs):
    return read(parameters(lambda *a, **k: None), args, kwargs).signature


# ---- what is read ----------------------------------------------------------------------------


def test_paths_name_the_arguments():
    def f(first, second=2, *rest, last, **others):
        pass

    call = read(
        parameters(f), (1, {"a": [2, 3]}, 4, 5), {"last": {"k": 6}, "extra": (7,), "another": 8}
    )
    assert [path.text for path in call.paths] == [
        "first",
        "second['a'][0]",
        "second['a'][1]",
        "rest[0]",
        "rest[1]",
        "another",
        "extra[0]",
        "last['k']",
    ]
    assert [path.slashed for path in call.paths][1:5] == [
        "second/a/0",
        "second/a/1",
        "rest/0",
        "rest/1",
    ]
    assert call.arguments["last"] == {"k": 6} and call.arguments["first"] == 1


def test_statics_are_apart_by_number_and_by_name():
    def f(a, b, c=3, *, d=4):
        pass

    known = parameters(f, static_argnums=1, static_argnames="d")
    call = read(known, (1, "two", 3), {"d": "four"})
    assert [(static.name, static.value) for static in call.signature.statics] == [
        ("b", "two"),
        ("d", "four"),
    ]
    assert call.args == (1, 3) and call.names == ("a", "c")
    args, kwargs = call.rebuilt([10, 30])
    assert args == (10, "two", 30) and kwargs == {"d": "four"}


@pytest.mark.parametrize(
    "options",
    [
        {"static_argnums": 1},
        {"static_argnums": (-1,)},
        {"static_argnums": (0, 2)},
        {"static_argnames": "c"},
        {"static_argnames": ["b", "d"]},
        {"static_argnums": 0, "static_argnames": "d"},
        {},
    ],
)
def test_roles_by_the_public_api_are_those_that_jax_resolves(options, monkeypatch):
    def f(a, b, c=3, *, d=4):
        pass

    if not jaxcompat.PRIVATE_API:
        pytest.skip("there is only the public API here")
    jitted = jax.jit(f, **options)
    by_jax = jaxcompat.argument_roles(jitted, f, options)
    monkeypatch.setattr(arguments, "PRIVATE_API", False)
    by_us = jaxcompat.argument_roles(jitted, f, options)
    by_position = [{i % 3 for i in roles.static_argnums} for roles in (by_us, by_jax)]
    assert by_position[0] == by_position[1]
    assert set(by_us.static_argnames) == set(by_jax.static_argnames)


def test_leaves(mesh):
    sharding = NamedSharding(mesh, P("data"))
    cases = [
        (3, Leaf((), np.dtype("int32"), True)),
        (3.0, Leaf((), np.dtype("float32"), True)),
        (np.float64(3), Leaf((), np.dtype("float32"), False)),
        (np.ones((2, 3)), Leaf((2, 3), np.dtype("float32"), False)),
        (jnp.ones(4), Leaf((4,), np.dtype("float32"), False)),
        (jax.device_put(np.ones(8), sharding), Leaf((8,), np.dtype("float32"), False, sharding)),
        (
            jax.ShapeDtypeStruct((8,), jnp.bfloat16, sharding=sharding),
            Leaf((8,), np.dtype(jnp.bfloat16), False, sharding),
        ),
    ]
    for value, expected in cases:
        (leaf,) = signature(value).leaves
        assert leaf == expected


@pytest.mark.parametrize("value", ["text", object(), {"a": print}, np.array(["x"]), 2**80])
def test_what_jax_has_to_judge(value):
    with pytest.raises(Unreadable):
        signature(value)


def test_unhashable_statics_are_for_jax_to_judge():
    with pytest.raises(Unreadable):
        read(parameters(lambda a, b: None, static_argnums=1), (1, [2]), {})


def test_partials_and_builtins_have_names():
    assert parameters(functools.partial(lambda x, y: x, 1)).positional == ("y",)
    with pytest.raises(ValueError):
        inspect.signature(max)
    call = read(parameters(max), (1, 2), {})
    assert [path.text for path in call.paths] == ["args[0]", "args[1]"]


# ---- laws ------------------------------------------------------------------------------------

shapes = st.lists(st.integers(0, 3), max_size=2).map(tuple)
dtypes = st.sampled_from([np.float32, np.int32, np.bool_, np.complex64])
leaves = st.one_of(
    st.builds(np.zeros, shapes, dtypes),
    st.builds(lambda shape, dtype: jnp.zeros(shape, dtype), shapes, dtypes),
    st.sampled_from([1, 1.0, True, 1j]),
)
trees = st.recursive(
    leaves,
    lambda inner: st.one_of(
        st.lists(inner, max_size=2),
        st.lists(inner, max_size=2).map(tuple),
        st.dictionaries(st.sampled_from("ab"), inner, max_size=2),
    ),
    max_leaves=4,
)
calls = st.tuples(trees, st.sampled_from([None, 1, 1.0, True, "s", (1, 2)]))


def law(*strategies):
    patient = settings(suppress_health_check=list(HealthCheck))
    return lambda function: patient(given(*strategies)(function))


def jax_key(tree, static):
    """What decides for JAX, said the long way round."""
    flat, structure = jax.tree.flatten(tree)
    types = [(x.shape, x.dtype, x.weak_type) for x in map(jax.typeof, flat)]
    return str(structure), types, type(static), static


@law(calls, calls)
def test_equal_signatures_are_equal_calls(one, other):
    known = parameters(lambda tree, n: None, static_argnums=1)
    a, b = (read(known, call, {}).signature for call in (one, other))
    same = jax_key(*one) == jax_key(*other)
    assert (a == b) == same
    assert not same or hash(a) == hash(b)
    assert (distance(a, b) == 0) == same


@law(calls, calls)
def test_a_difference_is_always_named(one, other):
    known = parameters(lambda tree, n: None, static_argnums=1)
    a, b = (read(known, call, {}) for call in (one, other))
    changes, omitted = diff(a.signature, a.paths, b.signature, b)
    assert bool(changes) == (a.signature != b.signature) and not omitted
    for change in changes:
        assert change.before != change.after, change


@law(calls)
def test_rebuilding_with_the_same_leaves_is_the_call(one):
    call = read(parameters(lambda tree, n: None, static_argnums=1), one, {})
    args, kwargs = call.rebuilt(call.leaves)
    assert jax.tree.structure(args[0]) == jax.tree.structure(one[0]) and args[1:] == one[1:]
    assert not kwargs
    again = jax.tree.leaves(args[0])
    assert all(x is y for x, y in zip(again, jax.tree.leaves(one[0]), strict=True))


def test_diff_describes_a_bounded_number_of_leaves():
    a, b = (read(parameters(lambda t: None), ([np.zeros(n)] * 100,), {}) for n in (1, 2))
    changes, omitted = diff(a.signature, a.paths, b.signature, b, limit=10)
    assert len(changes) == 10 and omitted == 90


def test_shorten_keeps_both_ends():
    text = shorten("a" * 100 + "b" * 100, limit=21)
    assert text == "aaaaaaaaa … bbbbbbbbb"
    assert shorten("one\n two") == "one two"
