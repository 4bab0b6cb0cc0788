"""What a later start compares of a module: everything but the values of its arrays."""

import equinox as eqx
import jax
import jax.numpy as jnp
import pytest
from flax import nnx
from flax.nnx import graphlib

from stepcache import equinox as seqx
from stepcache import nnx as snnx
from stepcache.fingerprint.visitor import Walk
from stepcache.modules.nnx_graph import GraphStructure


class Part(nnx.Module):
    def __init__(self):
        self.kernel = nnx.Param(jnp.ones(3))
        self.scale, self.names = 2.0, ("a", "b")
        self.activation = jnp.tanh
        self.parts = nnx.data([nnx.Param(jnp.ones(2)), {"x": jnp.zeros(1)}])


class Other(Part):
    pass


class Whole(nnx.Module):
    def __init__(self):
        self.first, self.second = Part(), Part()


def structure_of(module):
    return GraphStructure(graphlib.flatten(module, with_paths=False, graph=True)[0])


def dependencies(module):
    return dependencies_of("arguments[0] (ModuleState)", structure_of(module))


def dependencies_of(path, value):
    walk = Walk(None)
    walk.value(path, value)
    found = walk.fingerprint()
    assert not found.untrackable
    return found.dependencies


def change_container(whole):
    whole.first.parts[1]["y"] = jnp.zeros(1)


CHANGES = {
    "a static value": lambda whole: setattr(whole.first, "scale", 3.0),
    "its type": lambda whole: setattr(whole.first, "scale", 2),
    "a tuple": lambda whole: setattr(whole.first, "names", ("a", "c")),
    "a function": lambda whole: setattr(whole.first, "activation", jnp.sin),
    "a new attribute": lambda whole: setattr(whole.second, "more", None),
    "what is data": lambda whole: setattr(whole.second, "scale", nnx.data(2.0)),
    "metadata": lambda whole: whole.first.kernel.set_metadata(note="text"),
    "the class of a variable": lambda whole: setattr(whole.first, "kernel", nnx.BatchStat(1.0)),
    "the class of a module": lambda whole: setattr(whole, "second", Other()),
    "sharing": lambda whole: setattr(whole, "second", whole.first),
    "sharing of a variable": lambda whole: setattr(whole.second, "kernel", whole.first.kernel),
    "a container": change_container,
}


@pytest.mark.parametrize("change", CHANGES)
def test_a_change_is_seen(change):
    whole, before = Whole(), dependencies(Whole())
    assert dependencies(whole) == before
    old = structure_of(whole)
    CHANGES[change](whole)
    assert dependencies(whole) != before
    assert structure_of(whole) != old or change == "its type"  # To nnx, 2 and 2.0 are the same.


def test_the_values_of_variables_are_no_part_of_it():
    whole, before = Whole(), dependencies(Whole())
    whole.first.kernel[...] = jnp.zeros(3)
    assert dependencies(whole) == before


def test_a_change_has_the_path_of_the_attribute():
    whole, before = Whole(), dependencies(Whole())
    whole.first.scale = 3.0
    after = dependencies(whole)
    assert {name for name in after if after[name] != before[name]} == {"arguments[0].first.scale"}
    parts = ["kernel", "parts/0", "parts/1/x"]
    expected = [f"{each}/{part}" for each in ("first", "second") for part in parts]
    assert structure_of(whole).paths() == expected


def tripled(module, by=3):
    return jax.tree.map(lambda x: x * by if eqx.is_array(x) else x, module)


@pytest.mark.parametrize(
    "step, make_module",
    [(seqx.step, lambda: eqx.nn.MLP(2, 2, 4, 2, key=jax.random.key(0))), (snnx.step, Part)],
    ids=["equinox", "nnx"],
)
def test_what_a_step_has_in_memory_is_no_dependency_of_one_that_calls_it(step, make_module):
    inner, module = step(tripled), make_module()

    def outer(module):
        return inner(module)

    before = dependencies_of("outer", outer)
    for _ in range(3):
        inner(module)
    assert dependencies_of("outer", outer) == before
    inner = step(tripled, keep_unused=True)
    assert dependencies_of("outer", outer) != before
    inner = step(lambda module, by=3: module)
    assert dependencies_of("outer", outer) != before
