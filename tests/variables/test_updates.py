"""What `push` does: assigned, added, or handed to an optimizer, wherever the master copy lives."""

import contextlib
import warnings

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from comparing import arrays_of
from jax.sharding import PartitionSpec as P

import stepcache as sc

RULES = [("w$", P("data"))]
PLACEMENTS = {
    "on the devices": sc.Replicated(),
    "on the host": sc.OnHost(),
    "on the host, computed there": sc.OnHost(update="host"),
    "sharded": sc.Sharded(RULES),
    "on the host, sharded": sc.OnHost(on_device=sc.Sharded(RULES)),
}


def tree(scale: float = 1.0, dtype=np.float32):
    random = np.random.default_rng(0)
    w, b = random.normal(size=(16, 300)), random.normal(size=3)
    return {"w": (scale * w).astype(dtype), "b": (scale * b).astype(dtype)}


@pytest.fixture(params=["nowhere", "eight devices"])
def session(request, mesh):
    return contextlib.nullcontext() if request.param == "nowhere" else sc.Session(mesh)


@pytest.fixture(params=PLACEMENTS)
def placement(request, session):
    found = PLACEMENTS[request.param]
    if "sharded" in request.param and not isinstance(session, sc.Session):
        pytest.skip("there is no mesh to split over")
    return found


def near(a, b):
    jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, rtol=2e-6, atol=1e-6), a, b)


@pytest.mark.sample
def test_an_update_is_added(session, placement):
    with session:
        variables = sc.Variables(tree(), placement=placement, write=sc.Write(mode="add"))
        variables.push(tree(0.5))
        variables.push(jax.tree.map(jnp.asarray, tree(0.25)))
        assert variables.version == 2
        near(variables.value, tree(1.75))


@pytest.mark.sample
def test_updates_add_up_before_they_are_written(session, placement):
    with session:
        variables = sc.Variables(tree(), placement=placement, write=sc.Write(mode="add", every=3))
        update = tree(1.0)
        versions = []
        for _ in range(7):
            variables.push(update)
            versions.append(variables.version)
            update["w"] += 0  # In place: what was pushed is not the caller's any more.
        update["w"][:] = np.nan
        assert versions == [0, 0, 1, 1, 1, 2, 2]
        near(variables.value, tree(7.0))
        variables.push(tree(1.0)), variables.push(tree(1.0))
        assert variables.version == 3
        near(variables.value, tree(10.0))
        variables.push(tree(1.0)), variables.flush(), variables.flush()
        assert variables.version == 4
        near(variables.value, tree(11.0))


@pytest.mark.sample
@pytest.mark.parametrize("make", [lambda: optax.adamw(1e-2), lambda: optax.sgd(0.1, momentum=0.9)])
@pytest.mark.parametrize("pack", [False, True])
def test_an_optimizer_runs_where_the_master_lives(session, placement, make, pack):
    optimizer = make()
    value, state = tree(), optimizer.init(tree())
    with session:
        variables = sc.Variables(
            tree(),
            placement=placement,
            write=sc.Write(mode="apply", optimizer=optimizer),
            pack=pack,
        )
        kinds = {array.sharding.memory_kind for array in arrays_of(variables)}
        for index in range(4):
            updates, state = optimizer.update(tree(0.1 * index), state, value)
            value = optax.apply_updates(value, updates)
            variables.push(tree(0.1 * index))
        assert variables.version == 4
        near(variables.value, value)
        assert {array.sharding.memory_kind for array in arrays_of(variables)} == kinds


def test_an_optimizer_takes_gradients_of_another_dtype():
    write = sc.Write(mode="apply", optimizer=optax.sgd(1.0))
    variables = sc.Variables(tree(), write=write)
    variables.push(jax.tree.map(lambda leaf: leaf.astype(jnp.bfloat16), tree(0.0)))
    assert variables.value["w"].dtype == np.float32
    near(variables.value, tree())


def test_assign_is_what_push_does_by_default():
    variables = sc.Variables(tree())
    variables.push(tree(3.0))
    assert variables.version == 1
    jax.tree.map(np.testing.assert_array_equal, variables.value, tree(3.0))


@pytest.mark.parametrize("mode", ["assign", "add", "apply"])
@pytest.mark.parametrize(
    ("change", "named"),
    [
        (lambda update: update.pop("b"), "b"),
        (lambda update: update.update(b=np.zeros(4, np.float32)), "float32[4]"),
        (lambda update: update.update(b="text"), "str"),
    ],
)
def test_an_update_of_another_form_changes_nothing(mode, change, named):
    optimizer = optax.sgd(0.1) if mode == "apply" else None
    variables = sc.Variables(tree(), write=sc.Write(mode=mode, optimizer=optimizer), name="table")
    update = tree()
    change(update)
    with pytest.raises(sc.VariablesError) as raised:
        variables.push(update)
    assert named in str(raised.value) and "table" in str(raised.value)
    assert variables.version == 0
    jax.tree.map(np.testing.assert_array_equal, variables.value, tree())


def test_an_update_of_another_dtype_is_not_added():
    variables = sc.Variables(tree(), write=sc.Write(mode="add"))
    update = tree()
    update["b"] = update["b"].astype(np.float16)
    with pytest.raises(sc.VariablesError, match="float16"):
        variables.push(update)


def test_an_optimizer_that_raises_changes_nothing(session, placement):
    def broken(updates, state, params=None):
        raise ValueError("the optimizer's own")

    optimizer = optax.GradientTransformation(optax.sgd(0.1).init, broken)
    with session:
        variables = sc.Variables(
            tree(), placement=placement, write=sc.Write(mode="apply", optimizer=optimizer)
        )
        with pytest.raises(ValueError, match="the optimizer's own"):
            variables.push(tree())
        assert variables.version == 0
        near(variables.value, tree())


@pytest.mark.sample(every=8)
@pytest.mark.parametrize("way", ["push", "flush"])
@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt])
def test_updates_stay_pending_when_their_sum_cannot_be_written(way, error, session, placement):
    raised = []

    def update(updates, state, params=None):
        if not raised:
            raised.append(error("the optimizer's own"))
            raise raised[0]
        return updates, state

    optimizer = optax.GradientTransformation(optax.identity().init, update)
    write = sc.Write(mode="apply", optimizer=optimizer, every=3)
    with session:
        variables = sc.Variables(tree(0.0), placement=placement, write=write)
        variables.push(tree(1.0)), variables.push(tree(2.0))
        with pytest.raises(error):
            variables.push(tree(4.0)) if way == "push" else variables.flush()
        assert variables.version == 0
        variables.flush()
        assert variables.version == 1
        near(variables.value, tree(3.0))


@pytest.mark.sample
def test_an_update_may_be_donated_while_it_is_pending(session, placement):
    with session:
        write = sc.Write(mode="add", every=2)
        variables = sc.Variables(tree(0.0), placement=placement, write=write)
        for scale in (1.0, 2.0):
            update = jax.tree.map(jnp.asarray, tree(scale))
            variables.push(update)
            jax.tree.map(lambda leaf: leaf.delete(), update)
        near(variables.value, tree(3.0))


@pytest.mark.sample(every=9)
@pytest.mark.parametrize("pack", [False, True])
def test_moments_take_the_type_that_gradients_give_them(session, placement, pack, tmp_path):
    """As without `Variables`; what is saved and what moves is counted by it."""
    optimizer = optax.adam(1e-2)
    value = jax.tree.map(lambda leaf: leaf.astype(jnp.bfloat16), tree())
    state = optimizer.init(value)
    options = {"write": sc.Write(mode="apply", optimizer=optimizer), "pack": pack}
    with session, warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Some donated buffers were not usable")
        variables = sc.Variables(value, placement=placement, **options)
        for scale in (0.1, 0.2, 0.3):
            updates, state = optimizer.update(tree(scale), state, value)
            value = optax.apply_updates(value, updates)
            variables.push(tree(scale))
        jax.tree.map(
            lambda x, y: np.testing.assert_allclose(x, y, rtol=1e-2), variables.value, value
        )
        held = variables._updates.state
        assert [slot.dtype for slot in held.layout.slots] == [
            x.dtype for x in jax.tree.leaves(state)
        ]
        assert [x.dtype for x in held.arrays()] == [x.dtype for x in held.layout.buffers]
        sc.save(tmp_path / "saved", value=variables)
        again = sc.Variables(tree(0.0, jnp.bfloat16), placement=placement, **options)
        sc.restore(tmp_path / "saved", value=again)
        for each in (variables, again):
            each.push(tree(0.4))
        jax.tree.map(np.testing.assert_array_equal, variables.value, again.value)


def test_a_restored_state_lies_where_the_optimizer_runs(tmp_path):
    def made():
        write = sc.Write(mode="apply", optimizer=optax.adam(1e-2))
        return sc.Variables(tree(), placement=sc.OnHost(update="host"), write=write)

    with jax.default_device(jax.devices()[3]):
        saved, restored = made(), made()
        saved.push(tree())
        sc.save(tmp_path, value=saved)
        sc.restore(tmp_path, value=restored)
    for each in (saved, restored):
        devices = [array.devices() for array in each._updates.state.arrays()]
        assert devices == [{jax.devices("cpu")[0]}] * 5


def test_a_session_reads_what_it_pushed(one_device_mesh):
    policy = sc.Read(cache="device")
    read = sc.step(lambda state: state["b"] * 1)
    with sc.Session(one_device_mesh):
        variables = sc.Variables(
            tree(), placement=sc.OnHost(), read=policy, write=sc.Write(mode="add")
        )
        read(variables)
        variables.push(tree())
        np.testing.assert_allclose(read(variables), 2 * tree()["b"], rtol=1e-6)
