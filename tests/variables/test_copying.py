"""`Variables.copy`: other variables of the same value, that go their own way."""

import jax
import numpy as np
import optax
import pytest
from comparing import assert_same, lose, on_devices
from jax.sharding import PartitionSpec as P
from states import every_kind_of_leaf

import stepcache as sc

PLACEMENTS = {
    "resident": sc.Replicated(),
    "split": sc.Sharded([("large", P("data"))]),
    "hosted": sc.OnHost(),
}


@pytest.mark.sample
@pytest.mark.filterwarnings("ignore::stepcache.UnmatchedRuleWarning")
@pytest.mark.parametrize("pack", [False, True])
@pytest.mark.parametrize("placement", PLACEMENTS)
def test_a_copy_has_the_same_value_and_place_and_neither_sees_the_others_writes(
    placement, pack, mesh
):
    advance, tree = every_kind_of_leaf()
    step, x = sc.step(advance, carry="state"), np.ones(3, np.float32)
    session = sc.Session(mesh)
    with session:
        one = sc.Variables(tree, placement=PLACEMENTS[placement], name="online", pack=pack)
        step(one, x)
    other = one.copy()  # Outside of the session: it lies where the first one does.
    assert (one.version, other.version) == (1, 0)
    assert (other.name, other.placement, other.nbytes) == ("online", one.placement, one.nbytes)
    assert repr(other) == repr(one).replace("version 1", "version 0")
    before = on_devices(one)
    assert_same(before, on_devices(other))
    built = step.stats().misses
    with session:
        assert step(other, x)[0] is other
        assert_same(before, on_devices(one))
        after = on_devices(other)
        step(one, x)
        step(one, x)
        assert_same(after, on_devices(other))
    assert (one.version, other.version, step.stats().misses) == (3, 1, built)


@pytest.mark.parametrize("placement", [sc.Replicated(), sc.OnHost(), sc.OnHost(update="host")])
def test_pending_updates_and_optimizer_state_are_not_copied(placement):
    write = sc.Write(mode="apply", optimizer=optax.sgd(1.0, momentum=0.5), every=2)
    one = sc.Variables({"w": np.zeros(2, np.float32)}, placement=placement, write=write)
    push = {"w": np.ones(2, np.float32)}
    for _ in range(3):
        one.push(push)
    other = one.copy()
    assert other.write is one.write
    other.push(push)  # The first of two for the copy, the second for the other.
    one.push(push)
    assert other.value["w"].tolist() == [-2, -2] and one.value["w"].tolist() == [-5, -5]
    other.push(push)  # Without the momentum of the first two.
    assert other.value["w"].tolist() == [-4, -4]


def test_what_nobody_placed_may_still_follow_other_arguments():
    one = sc.Variables({"w": jax.numpy.ones(3)})
    other = one.copy()
    other.assign({"w": jax.numpy.zeros(3)})
    assert (one.value["w"].tolist(), other.value["w"].tolist()) == ([1] * 3, [0] * 3)
    assert not other.value["w"].committed


@pytest.mark.parametrize("transform", [jax.jit, jax.vmap, lambda f: jax.grad(lambda x: f(x).sum())])
def test_no_copies_are_made_inside_a_transformation(transform):
    one = sc.Variables({"w": np.ones(2)}, name="table")

    def copies(x):
        one.copy()
        return x

    with pytest.raises(sc.VariablesError, match=r"cannot be copied(.|\n)*at: table"):
        transform(copies)(np.ones(2))


def test_a_lost_value_is_not_copied():
    one = sc.Variables({"w": np.ones(2)}, name="table")
    lose(one)
    with pytest.raises(sc.VariablesError, match="the value is lost"):
        one.copy()
    one.assign({"w": np.zeros(2)})
    assert one.copy().value["w"].tolist() == [0, 0]
