"""Variables that live on tasks: writes, checkpoints, names."""

import threading

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import PartitionSpec as P

import stepcache as sc
import stepcache.remote.variables
from stepcache.remote.arrays import RemoteArray


def tree():
    return {"w": np.arange(6, dtype=np.float32).reshape(2, 3), "b": np.ones(3, np.float32)}


def same(a, b):
    jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, rtol=1e-6), a, b)


def test_value_assign_and_version(session):
    variables = sc.Variables(tree(), name="assigned")
    same(variables.value, tree())
    assert variables.version == 0 and variables.nbytes == 36
    variables.assign(jax.tree.map(lambda x: x * 2, tree()))
    same(variables.value, jax.tree.map(lambda x: x * 2, tree()))
    assert variables.version == 1
    with pytest.raises(sc.VariablesError, match="another type"):
        variables.assign({"w": np.ones((2, 2), np.float32), "b": np.ones(3, np.float32)})


def test_updates_are_added_on_the_tasks(session):
    variables = sc.Variables(tree(), name="added to", write=sc.Write(mode="add"))
    variables.push(tree())
    doubled = sc.step(lambda params: jax.tree.map(lambda x: x * 2, params))(variables)
    assert isinstance(doubled["w"], RemoteArray)
    variables.push(doubled)  # Never crosses to the client.
    same(variables.value, jax.tree.map(lambda x: x * 6, tree()))
    assert variables.version == 2


@pytest.mark.sample(every=2)
def test_an_optimizer_runs_on_the_tasks(session):
    optimizer = optax.chain(optax.clip_by_global_norm(1.0), optax.adam(0.1))
    variables = sc.Variables(
        tree(), name="optimized", write=sc.Write(mode="apply", optimizer=optimizer)
    )
    gradients = sc.step(lambda p: jax.tree.map(lambda x: 2 * x, p))
    value, state = tree(), optimizer.init(tree())
    for _ in range(4):
        variables.push(gradients(variables))
        updates, state = optimizer.update(jax.tree.map(lambda x: 2 * x, value), state, value)
        value = optax.apply_updates(value, updates)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4), variables.value, value)


def test_the_state_of_an_optimizer_lies_as_its_parameters_on_the_tasks(session):
    variables = sc.Variables(
        tree(),
        name="split",
        placement=sc.Sharded([("^split/w", P("data"))]),
        write=sc.Write(mode="apply", optimizer=optax.adam(0.1)),
    )
    variables.push(tree())
    slots = variables._master.state._layout.slots
    found = {slot.path: tuple(slot.sharding.spec) for slot in slots}
    assert found["0/mu/w"] == found["0/nu/w"] == ("data",)
    assert set(found["0/mu/b"]) <= {None} and found["0/count"] == ()
    value, optimizer = tree(), optax.adam(0.1)
    updates, _ = optimizer.update(tree(), optimizer.init(value), value)
    same(variables.value, optax.apply_updates(value, updates))


def test_sums_of_every_are_added_up_here(session):
    variables = sc.Variables(tree(), name="summed", write=sc.Write(mode="add", every=3))
    for _ in range(3):
        variables.push(tree())
    assert variables.version == 1
    same(variables.value, jax.tree.map(lambda x: x * 4, tree()))


@pytest.mark.sample(every=2)
def test_random_keys_and_narrow_types(session):
    value = {"key": jax.random.key(7), "x": jnp.ones(3, jnp.bfloat16), "n": np.int32(4)}
    variables = sc.Variables(value, name="of many types")
    got = variables.value
    assert jax.random.key_data(got["key"]).tolist() == jax.random.key_data(value["key"]).tolist()
    assert got["x"].dtype == jnp.bfloat16 and got["n"] == 4

    @sc.step(carry="state")
    def step(state):
        key, own = jax.random.split(state["key"])
        return {**state, "key": key, "n": state["n"] + 1}, jax.random.uniform(own)

    _, drawn = step(variables)
    _, own = jax.random.split(value["key"])
    assert float(drawn) == pytest.approx(float(jax.random.uniform(own)))
    assert variables.value["n"] == 5


def test_a_checkpoint_of_the_tasks_is_restored_there_and_here(session, tmp_path):
    write = sc.Write(mode="apply", optimizer=optax.adam(0.1))
    variables = sc.Variables(tree(), name="saved", write=write)
    variables.push(tree())
    value = variables.value
    extra = sc.step(lambda x: x + 1)(np.float32(1))
    sc.save(tmp_path / "saves", params=variables, step=3, extra=extra)
    variables.push(tree())
    after = variables.value
    restored = sc.restore(tmp_path / "saves", params=variables, step=0, extra=np.float32(0))
    assert restored["step"] == 3 and restored["extra"] == 2 and restored["params"] is variables
    same(variables.value, value)
    variables.push(tree())  # With the optimizer's state as it was.
    same(variables.value, after)

    with sc.Session():
        here = sc.Variables(jax.tree.map(np.zeros_like, tree()), write=write)
        sc.restore(tmp_path / "saves", params=here, step=0, extra=np.float32(0))
        same(here.value, value)
        here.push(tree())
        same(here.value, after)


def test_to_wait_for_variables_is_to_wait_for_the_step_that_writes_them(session):
    variables = sc.Variables(tree(), name="awaited")
    spin = sc.step(
        lambda state: jax.lax.fori_loop(
            0, 100, lambda _, x: jax.tree.map(lambda y: jnp.sin(y), x), state
        ),
        carry="state",
    )
    spin(variables)
    assert variables.block_until_ready() is variables
    connection, run = variables._master._connection, max(variables._master._runs)
    assert run and connection.done >= run


def test_a_checkpoint_before_the_first_push_has_an_optimizer_too(session, tmp_path):
    write = sc.Write(mode="apply", optimizer=optax.adam(0.1))
    variables = sc.Variables(tree(), name="not pushed", write=write)
    sc.save(tmp_path / "saves", params=variables)
    variables.push(tree())
    after = variables.value
    sc.restore(tmp_path / "saves", params=variables)
    variables.push(tree())
    same(variables.value, after)


def test_updates_that_are_pending_have_to_be_written_before_a_save(session, tmp_path):
    variables = sc.Variables(tree(), name="pending", write=sc.Write(mode="add", every=3))
    variables.push(tree())
    with pytest.raises(sc.VariablesError, match="updates are pending"):
        sc.save(tmp_path / "saves", params=variables)
    variables.flush()
    value = variables.value
    sc.save(tmp_path / "saves", params=variables)
    variables.push(tree())
    sc.restore(tmp_path / "saves", params=variables)
    variables.flush()  # What was pending was of the value before.
    same(variables.value, value)


def test_a_checkpoint_from_here_is_restored_by_the_tasks(session, tmp_path):
    with sc.Session():
        here = sc.Variables(tree())
        sc.save(tmp_path / "one", value=here)
    variables = sc.Variables(jax.tree.map(np.zeros_like, tree()), name="restored")
    sc.restore(tmp_path / "one", value=variables)
    same(variables.value, tree())


def test_a_checkpoint_with_other_leaves_is_refused_and_changes_nothing(session, tmp_path):
    sc.save(tmp_path / "other", params=sc.Variables({"other": np.ones(2, np.float32)}))
    variables = sc.Variables(tree(), name="not restored")
    with pytest.raises(sc.VariablesError, match="do not match the checkpoint"):
        sc.restore(tmp_path / "other", params=variables)
    same(variables.value, tree())
    with pytest.raises(FileNotFoundError, match="no checkpoint to restore"):
        sc.restore(tmp_path / "none", params=variables)


@pytest.mark.parametrize("batch_bytes", [1, 20, 1 << 28])
def test_all_types_are_saved_and_restored_in_several_messages(
    session, tmp_path, monkeypatch, batch_bytes
):
    monkeypatch.setattr(stepcache.remote.variables, "_BATCH_BYTES", batch_bytes)
    value = {
        "key": jax.random.key(7),
        "key of another kind": jax.random.key(3, impl="rbg"),
        "keys": jax.random.split(jax.random.key(1), 2),
        "narrow": jnp.arange(4, dtype=jnp.bfloat16),
        "none": np.zeros((0, 3), np.float32),
        "number": np.int32(4),
        "rows": np.arange(8, dtype=np.float32).reshape(2, 4),
        "true": np.array([True, False]),
    }
    split = sc.Sharded([("rows", P("data"))])
    variables = sc.Variables(value, name=f"of all types {batch_bytes}", placement=split)
    saving = sc.save(tmp_path, state=variables, step=2, asynchronous=True)
    others = {name: x[::-1] for name, x in value.items() if x.ndim}
    rbg = jax.random.key(4, impl="rbg")
    others |= {"key": jax.random.key(8), "key of another kind": rbg, "number": np.int32(5)}
    variables.assign(others)
    saving.wait()
    assert sc.restore(tmp_path, state=variables, step=0)["step"] == 2
    assert variables.version == 2

    def shown(x):
        is_key = jnp.issubdtype(x.dtype, jax.dtypes.prng_key)
        return np.asarray(jax.random.key_data(x) if is_key else x).tolist()

    assert jax.tree.map(shown, variables.value) == jax.tree.map(shown, value)
    only_rows = sc.Variables({"rows": np.zeros((2, 4), np.float32)}, name=f"rows {batch_bytes}")
    sc.restore(tmp_path, partial=True, state=only_rows)
    assert only_rows.value["rows"].tolist() == value["rows"].tolist()


def test_random_keys_that_a_step_returned_are_saved_and_restored(session, tmp_path):
    keys = sc.step(lambda key: jax.random.split(key, 3))(jax.random.key(5))
    sc.save(tmp_path, keys=keys, step=1)
    expected = jax.random.key_data(jax.random.split(jax.random.key(5), 3))
    for template in (keys, jax.random.split(jax.random.key(0), 3)):
        found = sc.restore(tmp_path, keys=template, step=0)["keys"]
        np.testing.assert_array_equal(jax.random.key_data(found), expected)


def test_a_restore_that_is_interrupted_while_it_sends_changes_nothing(
    session, tmp_path, monkeypatch
):
    write = sc.Write(mode="apply", optimizer=optax.adam(0.1))
    both = [sc.Variables(tree(), name=f"interrupted {n}", write=write) for n in range(2)]
    sc.save(tmp_path, a=both[0], b=both[1])
    for each in both:
        each.push(tree())
    before = [each.value for each in both]
    calls, put = [], stepcache.remote.variables._put

    def interrupted(*args):
        calls.append(args)
        if len(calls) == 4:  # The last one: a value and a state of each.
            raise KeyboardInterrupt
        return put(*args)

    with monkeypatch.context() as patch:
        patch.setattr(stepcache.remote.variables, "_put", interrupted)
        with pytest.raises(KeyboardInterrupt):
            sc.restore(tmp_path, a=both[0], b=both[1])
    assert len(calls) == 4 and [each.version for each in both] == [1, 1]
    same([each.value for each in both], before)
    sc.restore(tmp_path, a=both[0], b=both[1])
    same([each.value for each in both], [tree(), tree()])


def test_a_checkpoint_is_of_one_moment(session, tmp_path):
    """Though another thread runs steps, which write both variables."""
    both = [sc.Variables(np.float32(0), name=f"of one moment {n}") for n in range(2)]
    grow = sc.step(lambda a, b: (a + 1, b + 1), carry=("a", "b"))
    ends = threading.Event()

    def work():
        with session:
            while not ends.is_set():
                grow(*both)

    worker = threading.Thread(target=work)
    worker.start()
    try:
        for n in range(5):
            sc.save(tmp_path / str(n), a=both[0], b=both[1])
    finally:
        ends.set()
        worker.join()
    for n in range(5):
        found = sc.restore(tmp_path / str(n), a=np.float32(0), b=np.float32(0))
        assert found["a"] == found["b"]


def test_a_name_with_other_leaves_is_refused(session):
    sc.Variables(tree(), name="twice")
    again = sc.Variables(jax.tree.map(np.zeros_like, tree()), name="twice")
    same(again.value, tree())  # The tasks hold a value of this name.
    with pytest.raises(sc.TaskError, match="with other leaves"):
        sc.Variables({"x": np.ones(2, np.float32)}, name="twice")


def test_variables_cannot_be_copied_or_used_elsewhere(session):
    variables = sc.Variables(tree(), name="here only")
    with pytest.raises(sc.TaskError, match="cannot be copied"):
        variables.copy()
    step = sc.step(lambda p: p["b"].sum())
    with sc.Session(), pytest.raises((sc.TaskError, sc.VariablesError)):
        step(variables)


@pytest.mark.parametrize(
    ("option", "value"),
    [("placement", sc.OnHost()), ("read", sc.Read(cache="device")), ("pack", True)],
)
def test_options_without_effect_are_refused(one_task, option, value):
    with pytest.raises(sc.OptionError, match=f"{option} has no effect"):
        sc.Variables(tree(), **{option: value})
