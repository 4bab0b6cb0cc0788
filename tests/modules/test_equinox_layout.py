"""Modules that are opened and built at once are what JAX would have found and made."""

from collections import namedtuple
from itertools import pairwise
from operator import is_
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import stepcache as sc
from stepcache import equinox as seqx
from stepcache.modules import equinox_layout, equinox_state

BOTH = pytest.mark.parametrize("jit", [eqx.filter_jit, seqx.step])
Pair = namedtuple("Pair", "first second")


class Part(eqx.Module):
    kernel: jax.Array
    bias: jax.Array | None = None
    activation: Any = jax.nn.relu
    name: tuple = eqx.field(static=True, default=("part",))


class Whole(eqx.Module):
    parts: list
    named: dict
    pair: object = None
    empty: object = ()


def part(number=1.0, **more):
    return Part(jnp.full(2, number), **more)


def whole():
    named = {"b": part(3), "a": jnp.ones(1), "c": [np.ones(2), {}, ()]}
    return Whole([part(1), part(2, bias=jnp.ones(1))], named, Pair(part(4), 2), [None, []])


def shared():
    same = part(5)
    return Whole([same, same, same.kernel], {"same": same})


def trained():
    model = eqx.nn.MLP(2, 2, 4, 2, key=jax.random.key(0))
    return Whole([model], {}, optax.adam(1e-3).init(eqx.filter(model, eqx.is_array)))


def called() -> Any:
    function: Any = part()
    return Whole([part().__repr__, eqx.Partial(function, 1), eqx.filter_vmap(called)], {})


MODULES = {
    "all containers": whole,
    "shared arrays": shared,
    "a model and its optimizer": trained,
    "convolutions": lambda: eqx.nn.Conv2d(2, 3, (2, 2), key=jax.random.key(0)),
    "methods and wrappers": called,
    "nothing": eqx.nn.Identity,
}


@pytest.fixture(autouse=True)
def of_any_size(monkeypatch):
    monkeypatch.setattr(equinox_layout, "_NODES_PER_LEVEL", 0)


def same(first, second):
    return len(first) == len(second) and all(map(is_, first, second))


def arrays_of(module):
    return list(filter(eqx.is_array, jax.tree.leaves(module)))


def opener_of(module) -> Any:
    leaves, tree = jax.tree.flatten(module)
    return equinox_layout.opener(module, leaves, tree)


def inner(module):
    """All modules and containers in it."""
    found = [module]
    for each in found:
        content = vars(each) if isinstance(each, eqx.Module) else each
        values = content.values() if isinstance(content, dict) else content
        kinds = eqx.Module | list | tuple | dict
        found += [value for value in values if isinstance(value, kinds)]
    return found


@pytest.mark.parametrize("make", MODULES.values(), ids=MODULES)
def test_arrays_are_found_in_jax_s_order(make):
    module = make()
    open_module = opener_of(module)
    new = jax.tree.map(lambda x: x + 1 if eqx.is_array(x) else x, module)
    for each in (module, new):
        assert same(open_module(each), arrays_of(each))


@pytest.mark.parametrize("make", MODULES.values(), ids=MODULES)
def test_modules_are_built_as_jax_builds_them(make):
    leaves, tree = jax.tree.flatten(make())
    statics = {i: leaf for i, leaf in enumerate(leaves) if not eqx.is_array(leaf)}
    build: Any = equinox_layout.builder(tree, statics)
    built, other = (build(list(filter(eqx.is_array, leaves))) for _ in range(2))
    by_jax = tree.unflatten(leaves)
    assert jax.tree.structure(built) == tree and same(jax.tree.leaves(built), leaves)
    for first, second, third in zip(inner(built), inner(by_jax), inner(other), strict=True):
        assert type(first) is type(second)
        if isinstance(first, eqx.Module):
            assert list(vars(first)) == list(vars(second))
        assert first is not third or first is second or first == ()


def set_(module, name, value):
    object.__setattr__(module, name, value)


CHANGES = {
    "an item": lambda whole: whole.parts.__setitem__(0, part(9)),
    "an array in a list": lambda whole: whole.named["c"].__setitem__(0, np.zeros(2)),
    "an array of another kind": lambda whole: whole.named["c"].__setitem__(0, jnp.zeros(2)),
    "one more item": lambda whole: whole.parts.append(part(9)),
    "one item less": lambda whole: whole.parts.pop(),
    "something in the empty": lambda whole: whole.empty[1].append(jnp.zeros(1)),
    "another key": lambda whole: whole.named.update(d=whole.named.pop("a")),
    "order of keys": lambda whole: whole.named.update(b=whole.named.pop("b")),
    "an array": lambda whole: set_(whole.parts[0], "kernel", jnp.zeros(2)),
    "an array that was None": lambda whole: set_(whole.parts[0], "bias", jnp.zeros(2)),
    "None that was an array": lambda whole: set_(whole.parts[1], "bias", None),
    "a static leaf": lambda whole: set_(whole.parts[0], "activation", jnp.sin),
    "a static field": lambda whole: set_(whole.parts[0], "name", ("other",)),
    "a missing field": lambda whole: object.__delattr__(whole.parts[0], "name"),
    "an attribute that is no field": lambda whole: set_(whole.parts[0], "more", jnp.zeros(2)),
    "a container": lambda whole: set_(whole, "pair", tuple(whole.pair)),
    "a class": lambda whole: set_(whole.parts[0], "__class__", Other),
    "all attributes": lambda whole: set_(whole.parts[0], "__dict__", dict(vars(part(7)))),
}


class Other(Part):
    pass


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
def test_a_change_is_seen(change):
    module = whole()
    open_module, before = opener_of(module), jax.tree.structure(module)
    change(module)
    arrays = open_module(module)
    assert arrays is None or same(arrays, arrays_of(module))
    assert arrays is None or jax.tree.structure(module) == before


@pytest.mark.sample(every=4)
@BOTH
@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
def test_a_step_sees_a_change(jit, change):
    step = jit(lambda whole: (whole, sum(each.sum() for each in arrays_of(whole))))
    module = whole()
    for _ in range(5):
        module, _ = step(module)
    change(module)
    expected = sum(each.sum() for each in arrays_of(module))
    for _ in range(3):
        returned, total = step(module)
        assert total == expected
        assert jax.tree.structure(returned) == jax.tree.structure(module)


@BOTH
def test_models_of_one_class_take_turns(jit):
    def step(first, second):
        traced.append(1)
        return second, first, second.activation(first.kernel - second.kernel)

    traced, step = [], jit(step)
    kinds = [jnp.sin, jnp.cos, jnp.tan, jnp.tanh, jnp.exp, jnp.abs]
    models = [part(number, activation=kind) for number, kind in enumerate(kinds)]
    for _ in range(4):
        for first, second in pairwise(models):
            one, two, out = step(first, second)
            assert (one.activation, two.activation) == (second.activation, first.activation)
            expected = second.activation(first.kernel - second.kernel)
            assert np.allclose(out, expected)
    assert len(traced) == len(kinds) - 1


def test_what_is_known_is_not_flattened_by_jax(monkeypatch):
    step = seqx.step(lambda whole: jax.tree.map(lambda x: x * 2 if eqx.is_array(x) else x, whole))
    module = whole()
    for _ in range(3):
        module = step(module)

    def fail(*_):
        raise AssertionError

    monkeypatch.setattr(jax.tree, "flatten", fail)
    monkeypatch.setattr(equinox_state.ModuleStructure, "built", fail)
    with sc.no_recompile():
        assert step(module).named["b"].kernel[0] == 3 * 2**4


def test_what_only_jax_can_open():
    class Registered:
        def __init__(self, x):
            self.x = x

    jax.tree_util.register_pytree_node(
        Registered, lambda r: ((r.x,), None), lambda _, c: Registered(*c)
    )
    module = Whole([Registered(jnp.ones(2))], {})
    assert opener_of(module) is None
    step = seqx.step(lambda module: jax.tree.map(lambda x: x + 1, module))
    for _ in range(4):
        module = step(module)
    assert module.parts[0].x[0] == 5
