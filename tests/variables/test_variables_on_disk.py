"""Programs over `Variables` are kept on disk like any other.

As in `test_second_life`, the same source made anew stands for a later process.
"""

import sys
import textwrap
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from comparing import assert_same
from states import LARGE

import stepcache as sc
from stepcache import jaxcompat

pytestmark = pytest.mark.skipif(
    not jaxcompat.PRIVATE_API, reason="programs are stored through JAX's private API"
)

BUILT, LOADED = (1, 1, 0), (1, 0, 1)

SOURCE = """
RATE = 0.5

def updated(leaf):
    return leaf * RATE + 1

@sc.step(carry="state")
def step(state, batch, table=None):
    new = {**state, "w": updated(state["w"]), "n": state["n"] + 1}
    return new, (batch.sum(), table)
"""


def tree():
    return {
        "w": np.linspace(0, 1, 12, dtype=np.float32).reshape(3, 4),
        "b": np.ones(3, np.float32),
        "large": np.ones(LARGE, np.float32),
        "key": jax.random.key(0),
        "n": 0,
    }


BATCH = np.ones((8, 2), np.float32)


def live(tmp_path, source=SOURCE, make=tree, calls=2, session=None, look=None, pack=False):
    """One life: the step and the variables after some calls."""
    module = types.ModuleType("life")
    path = tmp_path / "life.py"
    path.write_text(textwrap.dedent(source))
    module.__dict__.update(jax=jax, jnp=jnp, np=np, sc=sc, __file__=str(path))
    sys.modules["life"] = module
    exec(compile(path.read_text(), str(path), "exec"), module.__dict__)
    cache = sc.ProgramCache(tmp_path / "programs")
    with sc.Session(session, cache=cache):
        variables = sc.Variables(make(), pack=pack)
        if look is not None:
            look(module.step, variables)
        for _ in range(calls):
            state, _ = module.step(variables, BATCH)
            assert state is variables
    cache.flush()
    return module.step, variables


def levels(step):
    """Traces, compiles, loads."""
    stats = step.stats()
    assert stats.misses == 1
    return stats.traces, stats.compiles, stats.loads


@pytest.mark.parametrize("on_mesh", [False, True])
def test_a_second_life_compiles_nothing(on_mesh, tmp_path, mesh):
    session = mesh if on_mesh else None
    first, variables = live(tmp_path, session=session)
    assert levels(first) == BUILT
    second, again = live(tmp_path, session=session)
    assert levels(second) == LOADED, second.last_miss
    assert_same(variables.value, again.value)
    assert again.version == 2


def test_the_plain_tree_and_variables_are_two_programs(tmp_path):
    live(tmp_path)

    def plain(step, variables):
        step(jax.tree.map(jnp.asarray, tree()), BATCH)

    step, _ = live(tmp_path, look=plain)
    assert (step.stats().compiles, step.stats().loads) == (1, 1)


def test_the_first_start_with_variables_says_only_that(tmp_path):
    """What wraps the function of a step over `Variables` is nothing that the user has changed."""

    def plain(step, variables):
        step(jax.tree.map(jnp.asarray, tree()), BATCH)

    live(tmp_path, look=plain, calls=0)
    step, _ = live(tmp_path, calls=1)
    assert step.last_miss.reason == "other run"
    assert [str(each) for each in step.last_miss.changes] == ["state: arrays → Variables"]


def test_two_programs_of_one_step_are_both_found(tmp_path):
    def both(step, variables):
        step(variables, np.ones((4, 2), np.float32))
        step(variables, BATCH, np.ones(3, np.float32))
        step(state=variables, batch=BATCH, table=variables)

    def other_way(step, variables):
        step(state=variables, batch=BATCH, table=variables)
        step(variables, BATCH, np.ones(3, np.float32))
        step(variables, np.ones((4, 2), np.float32))

    first, _ = live(tmp_path, look=both)
    assert first.stats().compiles == 4
    second, _ = live(tmp_path, look=other_way)
    assert (second.stats().compiles, second.stats().loads) == (0, 4), second.last_miss


@pytest.mark.sample(every=3)
@pytest.mark.parametrize(
    ("old", "new", "told"),
    [
        ("RATE = 0.5", "RATE = 0.25", "0.25"),
        ("leaf * RATE + 1", "leaf * RATE + 2", "updated"),
        ('state["n"] + 1', 'state["n"] + 2', "in step"),
    ],
)
def test_a_change_of_the_function_is_seen(old, new, told, tmp_path):
    live(tmp_path)
    changed, variables = live(tmp_path, SOURCE.replace(old, new))
    assert levels(changed) == BUILT
    assert told in str(changed.last_miss)
    again, after = live(tmp_path, SOURCE.replace(old, new))
    assert levels(again) == LOADED
    assert_same(variables.value, after.value)


@pytest.mark.sample(every=2)
@pytest.mark.parametrize(
    "change",
    [
        {"b": np.ones((3, 1), np.float32)},
        {"b": np.ones(3, jnp.bfloat16)},
        {"b": [np.ones(3, np.float32)]},
        {"key": jax.random.key(0, impl="rbg")},
    ],
    ids=str,
)
def test_another_tree_is_found_again(change, tmp_path):
    live(tmp_path)
    other, variables = live(tmp_path, make=lambda: {**tree(), **change})
    assert levels(other) in (BUILT, LOADED), "a module knows no names"
    again, after = live(tmp_path, make=lambda: {**tree(), **change})
    assert levels(again) == LOADED
    assert_same(variables.value, after.value)


def test_leaves_in_another_order_or_under_other_names_are_read_where_they_lie(tmp_path):
    """The buffers are the same, and so may the module be: what lies where is not."""
    source = """
    @sc.step(carry="state")
    def step(state, batch):
        return {**state, "a": state["a"] + 1}, batch.sum()
    """

    def make(**leaves):
        return lambda: {name: np.full(3, leaves[name], np.float32) for name in leaves}

    for leaves in ({"a": 1, "b": 2}, {"Z": 0, "a": 1}, {"a": 1, "c": 2}):
        step, variables = live(tmp_path, source, make(**leaves), calls=1)
        assert float(variables.value["a"][0]) == 2
        assert sum(levels(step)[1:]) == 1


def test_packed_leaves_are_another_program(tmp_path):
    live(tmp_path)
    other, variables = live(tmp_path, pack=True)
    assert len(variables._layout.buffers) < len(variables._layout.slots)
    assert levels(other) == BUILT
    again, after = live(tmp_path, pack=True)
    assert levels(again) == LOADED
    assert_same(variables.value, after.value)
    first, _ = live(tmp_path)
    assert levels(first) == LOADED


def test_explain_tells_before_and_after(tmp_path):
    said = []

    def look(step, variables):
        said.append(step.explain(variables, BATCH))

    step, variables = live(tmp_path, look=look)
    assert not said[0].hit and variables.version == 2
    assert step.stats().misses == 1, "explaining builds nothing"
    second, _ = live(tmp_path, look=look)
    assert not said[1].hit and said[1].predicted and "on disk" in str(said[1])
    with sc.Session(cache=sc.ProgramCache(None)):
        variables = sc.Variables(tree(), name="table")
        second(variables, BATCH)
        explanation = second.explain(variables, BATCH)
    assert explanation.hit and "'table', version 1" in str(explanation)


def test_warm_in_a_second_life(tmp_path):
    live(tmp_path)

    def warm(step, variables):
        step.warm(variables, jax.ShapeDtypeStruct(BATCH.shape, BATCH.dtype))
        assert levels(step) == LOADED

    step, _ = live(tmp_path, look=warm)
    assert levels(step) == LOADED


def test_variables_of_the_same_layout_share_a_place_in_a_call(tmp_path):
    """Read and carried, twice and once: which is which is part of the program."""
    source = """
    @sc.step(carry="state")
    def step(state, one, two):
        return {"w": state["w"] + 1}, (one["w"] - two["w"]).sum()
    """

    def call(order):
        cache = sc.ProgramCache(tmp_path / "programs")
        module = types.ModuleType("life")
        path = tmp_path / "life.py"
        path.write_text(textwrap.dedent(source))
        module.__dict__.update(sc=sc, __file__=str(path))
        sys.modules["life"] = module
        exec(compile(path.read_text(), str(path), "exec"), module.__dict__)
        with sc.Session(cache=cache):
            values = [sc.Variables({"w": np.full(2, 10.0**n, np.float32)}) for n in range(3)]
            _, difference = module.step(*(values[index] for index in order))
        cache.flush()
        return float(difference), levels(module.step)

    orders = {(0, 1, 2): -180, (0, 2, 1): 180, (0, 0, 1): -18, (0, 1, 0): 18, (0, 1, 1): 0}
    for order, expected in orders.items():
        assert call(order)[0] == expected
    for order, expected in orders.items():
        assert call(order) == (expected, LOADED)
