"""What a program over nnx modules is specialized to: everything but the values of their arrays."""

import jax.numpy as jnp
import pytest
from flax import nnx
from flax.nnx import graphlib

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


CHANGES = {
    "a static value": ("first/scale", lambda whole: setattr(whole.first, "scale", 3.0)),
    "a tuple": ("first/names", lambda whole: setattr(whole.first, "names", ("a", "c"))),
    "a function": ("first/activation", lambda whole: setattr(whole.first, "activation", jnp.sin)),
    "a new attribute": ("second/more", lambda whole: setattr(whole.second, "more", None)),
    "what is data": ("second/scale", lambda whole: setattr(whole.second, "scale", nnx.data(2.0))),
    "metadata": ("first/kernel/note", lambda whole: whole.first.kernel.set_metadata(note="text")),
    "the class of a variable": (
        "first/kernel",
        lambda whole: setattr(whole.first, "kernel", nnx.BatchStat(jnp.ones(3))),
    ),
    "the class of a module": ("second", lambda whole: setattr(whole, "second", Other())),
    "sharing": ("second", lambda whole: setattr(whole, "second", whole.first)),
}


@pytest.mark.parametrize("path, change", CHANGES.values(), ids=CHANGES)
def test_a_change_is_seen_and_has_the_path_of_the_attribute(path, change):
    whole, before = Whole(), structure_of(Whole())
    assert structure_of(whole) == before and hash(structure_of(whole)) == hash(before)
    change(whole)
    after = structure_of(whole)
    assert after != before
    old, new = before.settings(), after.settings()
    assert old.get(path) != new.get(path)


def test_the_values_of_variables_are_no_part_of_it():
    whole = Whole()
    before = structure_of(whole)
    whole.first.kernel[...] = jnp.zeros(3)
    assert structure_of(whole) == before
    parts = ["kernel", "parts/0", "parts/1/x"]
    expected = [f"{each}/{part}" for each in ("first", "second") for part in parts]
    assert [path.name for path in structure_of(whole).paths()] == expected
