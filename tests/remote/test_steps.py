"""Steps on tasks give what they give here, and say what they cost."""

import gc

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import AbstractMesh, PartitionSpec

import stepcache as sc
from stepcache.remote.arrays import RemoteArray
from stepcache.remote.messages import HEADER_BYTES

RNG = np.random.default_rng(0)
W = RNG.normal(size=(8, 2)).astype(np.float32)


def batches(count):
    rng = np.random.default_rng(1)
    for _ in range(count):
        x = rng.normal(size=(16, 8)).astype(np.float32)
        yield {"x": x, "y": x @ W}


def zeros():
    return {"w": np.zeros((8, 2), np.float32), "b": np.zeros(2, np.float32)}


def loss_of(params, batch):
    return jnp.mean((batch["x"] @ params["w"] + params["b"] - batch["y"]) ** 2)


def update(state, batch, rate):
    loss, gradients = jax.value_and_grad(loss_of)(state, batch)
    return jax.tree.map(lambda p, g: p - rate * g, state, gradients), {"loss": loss}


def made_step():
    return sc.step(update, carry="state", batch="batch")


def trained(state, count=5):
    step, losses = made_step(), []
    for batch in batches(count):
        state, metrics = step(state, batch, 0.1)
        losses.append(metrics["loss"])
    return state, [float(each) for each in losses]


def expected(count=5):
    state, losses, step = zeros(), [], jax.jit(update)
    for batch in batches(count):
        state, metrics = step(state, batch, 0.1)
        losses.append(float(metrics["loss"]))
    return state, losses


def test_a_plain_carry_gives_the_same_losses(session):
    state, losses = trained(zeros())
    want, want_losses = expected()
    np.testing.assert_allclose(losses, want_losses, rtol=1e-5)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5), state, want)
    assert all(isinstance(each, RemoteArray) for each in jax.tree.leaves(state))


def test_variables_live_on_the_tasks_and_give_the_same_losses(session):
    variables = sc.Variables(zeros(), name="variables")
    state, losses = trained(variables)
    assert state is variables and variables.version == 5
    want, want_losses = expected()
    np.testing.assert_allclose(losses, want_losses, rtol=1e-5)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5), variables.value, want)


def test_batches_are_padded_and_outputs_are_cut(session):
    def mean(batch, mask):
        return (batch * mask).sum() / mask.sum(), 2 * batch

    step = sc.step(mean, batch="batch", pad=sc.Pad("batch", mask="mask", sizes=(8,)))
    with session:
        for rows in (3, 8):
            batch = np.arange(rows, dtype=np.float32)
            found, double = step(batch)
            assert float(found) == batch.mean()
            np.testing.assert_array_equal(double, 2 * batch)
    assert step.stats().misses == 1


def test_a_step_starts_with_one_message_of_at_most_64_bytes(one_task):
    step = sc.step(lambda state: (state * 2, state.sum()), carry="state")
    variables = sc.Variables(np.ones(4, np.float32))
    step(variables)
    sent = one_task._scope.target.connection.sent_bytes
    step(variables)
    before = dict(sent)
    for _ in range(10):
        step(variables)
    assert HEADER_BYTES <= 64
    assert sent["runs"] - before["runs"] == 10 * HEADER_BYTES
    assert sent["other"] == before["other"] and sent["values"] == before["values"]


def test_a_plain_carry_needs_no_more(one_task):
    step = sc.step(lambda state: (state * 2, state.sum()), carry="state")
    state, _ = step(np.ones(4, np.float32))
    state, _ = step(state)
    sent = one_task._scope.target.connection.sent_bytes
    before = sent["runs"]
    for _ in range(10):
        state, _ = step(state)
    assert sent["runs"] - before == 10 * HEADER_BYTES


def test_explain_predicts_the_bytes_of_values_that_are_sent(one_task):
    step = sc.step(lambda state, x: state + x.sum(), carry="state")
    variables = sc.Variables(np.float32(0))
    x = np.ones(1 << 20, np.float32)
    step(variables, x)
    explanation = step.explain(variables, x)
    sent = one_task._scope.target.connection.sent_bytes
    before = sent["values"]
    step(variables, x)
    assert explanation.hit and explanation.moved_bytes == x.nbytes == sent["values"] - before
    assert "tasks" in str(explanation)


def test_outputs_of_one_step_are_arguments_of_another_and_move_nothing(session):
    @sc.step
    def init(key):
        return {"w": jax.random.normal(key, (1 << 10, 64))}

    @sc.step
    def total(tree, scale):
        return scale * tree["w"].sum()

    tree = init(jax.random.key(3))
    sent = session._scope.target.connection.sent_bytes
    before = sent["values"]
    got = total(tree, 2.0)
    assert sent["values"] == before
    want = 2.0 * float(jax.random.normal(jax.random.key(3), (1 << 10, 64)).sum())
    assert float(got) == pytest.approx(want, rel=1e-4)


def test_variables_of_what_a_step_has_made_never_cross_to_the_client(session):
    init = sc.step(lambda key: {"w": jax.random.normal(key, (1 << 10, 64))})
    sent = session._scope.target.connection.sent_bytes
    tree = init(jax.random.key(3))
    before = sum(sent.values())
    variables = sc.Variables(tree, name="made by a step")
    assert sum(sent.values()) - before < 1000
    np.testing.assert_allclose(
        variables.value["w"], jax.random.normal(jax.random.key(3), (1 << 10, 64)), rtol=1e-5
    )


def test_scalars_keys_keywords_and_statics_over_ten_calls(session):
    @sc.step(static_argnames="mode")
    def step(x, key, *, scale, mode="add"):
        noise = jax.random.uniform(key)
        return x * scale + noise if mode == "add" else x * scale

    plain = jax.jit(step._engine.spec.fun, static_argnames="mode")
    for n in range(10):
        for mode in ("add", "none"):
            args = (np.float32(n), jax.random.key(n))
            options = {"scale": n % 3 + 1, "mode": mode}
            assert float(step(*args, **options)) == pytest.approx(float(plain(*args, **options)))
    assert step.stats().misses == 2


def test_an_array_is_looked_at_as_any_other(one_task):
    double = sc.step(lambda x: (x * 2, x.sum()))
    array, total = double(np.arange(6, dtype=np.float32).reshape(2, 3))
    assert array.shape == (2, 3) and array.dtype == np.float32 and array.ndim == 2
    assert len(array) == 2 and array.size == 6 and array.nbytes == 24
    assert float(total) == 15 and int(total) == 15 and total.item() == 15 and bool(total)
    assert f"{total:.2f}" == "15.00" and (total + 1) == 16 and 1 + total == 16
    assert array.tolist() == [[0, 2, 4], [6, 8, 10]] and array[1, 2] == 10
    assert np.asarray(array).sum() == 30 and float(jnp.sum(jnp.asarray(array))) == 30
    assert jax.block_until_ready((array, total))[1] is total
    assert "float32[2, 3]" in repr(array)


def test_batches_are_split_and_fetched_whole(session):
    step = sc.step(lambda x: x * 2, batch="x")
    x = np.arange(8, dtype=np.float32).reshape(4, 2)
    made = step(x)
    np.testing.assert_array_equal(made, x * 2)
    assert "data" in str(step.explain(x))
    with pytest.raises(sc.PlacementError, match="is not divisible"):
        step(np.ones((3, 2), np.float32))


def test_a_step_over_a_tree_of_variables_and_arrays(session):
    @sc.step(carry="state")
    def step(state, x):
        return {"a": state["a"] + x, "b": state["b"] * 2}, state["a"].sum()

    held = sc.Variables(np.ones(3, np.float32), name="held in a tree")
    state = {"a": held, "b": np.ones(2, np.float32)}
    for _ in range(3):
        state, total = step(state, 1.0)
    assert state["a"] is held and isinstance(state["b"], RemoteArray)
    assert float(total) == 9
    np.testing.assert_array_equal(held.value, 4)
    np.testing.assert_array_equal(state["b"], 8)


def test_an_optimizer_of_optax_in_the_carry(session):
    optimizer = optax.adam(0.1)

    def fun(params, state, batch):
        gradients = jax.grad(loss_of)(params, batch)
        updates, state = optimizer.update(gradients, state, params)
        return optax.apply_updates(params, updates), state

    step, plain = sc.step(fun, carry=("params", "state"), batch="batch"), jax.jit(fun)
    params, state = zeros(), optimizer.init(zeros())
    want, want_state = params, state
    for batch in batches(3):
        params, state = step(params, state, batch)
        want, want_state = plain(want, want_state, batch)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4), params, want)
    assert type(state[0]).__name__ == "ScaleByAdamState" and int(state[0].count) == 3


def test_a_carry_whose_weak_types_settle_compiles_once(one_task):
    step = sc.step(lambda state: state + jnp.float32(1), carry="state")
    state = 0.0
    for _ in range(3):
        state = step(state)
    assert float(state) == 3 and step.stats().misses == 1


def test_a_miss_names_what_changed(one_task):
    step = sc.step(lambda x: x.sum())
    step(np.ones(4, np.float32))
    step(np.ones(5, np.float32))
    assert step.stats().misses == 2 and "float32[4]" in str(step.last_miss)
    with sc.no_recompile(), pytest.raises(sc.RecompileError, match=r"float32\[7\]"):
        step(np.ones(7, np.float32))
    step.warm(jax.ShapeDtypeStruct((7,), np.float32))
    with sc.no_recompile():
        assert float(step(np.ones(7, np.float32))) == 7


def test_a_donated_array_cannot_be_used_again(one_task):
    step = sc.step(lambda state: state + 1, carry="state")
    state = step(np.ones(3, np.float32))
    step(state)
    assert state.is_deleted()
    with pytest.raises(sc.TaskError, match="donated to an earlier step"):
        step(state)
    with pytest.raises(sc.TaskError, match="donated to an earlier step"):
        np.asarray(state)


def test_one_array_twice_in_a_carry_is_an_error(one_task):
    step = sc.step(lambda state: {"a": state["a"] + 1, "b": state["b"] * 2}, carry="state")
    state = step({"a": np.ones(3, np.float32), "b": np.ones(3, np.float32)})
    with pytest.raises(sc.CarryError, match="same array in several places"):
        step({"a": state["a"], "b": state["a"]})


def test_a_carry_of_another_type_is_refused(one_task):
    step = sc.step(lambda state: {"w": state["w"].astype(jnp.float16)}, carry="state")
    with pytest.raises(sc.CarryError, match="float16"):
        step({"w": np.ones(3, np.float32)})


def test_what_needs_this_process_is_refused(one_task):
    @sc.step
    def step(x):
        return jax.pure_callback(lambda x: np.asarray(x), x, x)

    with pytest.raises(sc.TaskError, match="cannot run in another process"):
        step(np.ones(3, np.float32))


def test_errors_of_the_users_function_are_their_own(one_task):
    step = sc.step(lambda x: x["missing"])
    with pytest.raises(KeyError, match="missing"):
        step({"x": 1.0})


@pytest.mark.parametrize("way", ["__call__", "warm", "explain"])
def test_jax_says_what_is_wrong_with_a_call(one_task, way):
    step = sc.step(lambda x, name: x + 1)
    with pytest.raises(TypeError, match=r"'name'|argument name|of type .*str"):
        getattr(step, way)(np.ones(2, np.float32), "text")


def test_variables_of_another_session_are_refused(one_task):
    with sc.Session():
        elsewhere = sc.Variables(np.ones(3, np.float32), name="elsewhere")
    step = sc.step(lambda x: x.sum())
    with pytest.raises(sc.TaskError, match="do not live on the tasks"):
        step(elsewhere)


def test_rules_place_what_lives_on_the_tasks(running):
    mesh = AbstractMesh((2,), ("model",))
    rules = [("w", PartitionSpec("model"))]
    with running("1x2").session(mesh=mesh, rules=rules, data_axis=None) as session:
        variables = sc.Variables({"w": np.arange(8, dtype=np.float32)}, name="params")
        double = sc.step(lambda params: jax.tree.map(lambda x: x * 2, params), carry="params")
        assert double(variables) is variables
        np.testing.assert_array_equal(variables.value["w"], np.arange(8) * 2)
        assert "model" in str(double.explain(variables))
    session.close()


def test_arrays_that_nobody_refers_to_are_freed(one_task):
    step = sc.step(lambda x: x + 1)
    connection = one_task._scope.target.connection
    gc.collect()
    for _ in range(300):
        step(np.float32(1))
    assert len(connection._freed) < 200  # The others have been dropped by the tasks.


@pytest.mark.parametrize(
    ("target", "match"),
    [
        ("remote:2x4", "unknown target"),
        ("local:0x4", "there are no tasks"),
        ("local:", "unknown target"),
    ],
)
def test_a_target_that_is_none(target, match):
    with pytest.raises(sc.OptionError, match=match):
        sc.Session(target=target)


def test_a_mesh_that_does_not_fit(running):
    with pytest.raises(sc.OptionError, match="does not fit"):
        running("1x2").session(mesh=AbstractMesh((3,), ("data",)))
    with pytest.raises(sc.OptionError, match="AbstractMesh"):
        running("1x2").session(mesh=jax.make_mesh((1,), ("data",)))


def test_a_closed_session_runs_nothing(running):
    session = running("1x1").session()
    step = session.step(lambda x: x + 1)
    assert float(step(1.0)) == 2
    session.close()
    with pytest.raises(sc.SessionClosedError):
        step(1.0)


def test_repeat_runs_many_steps_with_one_message(session):
    step = made_step()
    variables = sc.Variables(zeros(), name="repeated")
    stacked = jax.tree.map(lambda *each: np.stack(each), *batches(5))
    sent = session._scope.target.connection.sent_bytes
    step.repeat(5).warm(variables, stacked, 0.1)
    runs = session._scope.target.connection.runs
    _, metrics = step.repeat(5)(variables, stacked, 0.1)
    assert session._scope.target.connection.runs == runs + 1 and sent["runs"] > 0
    want, losses = expected()
    np.testing.assert_allclose(metrics["loss"], losses, rtol=1e-5)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5), variables.value, want)


def test_two_steps_over_one_function_are_two(one_task):
    def fun(state):
        return state + 1

    read, write = sc.step(fun), sc.step(fun, carry="state")
    state = write(np.zeros(2, np.float32))
    state = write(state)
    read(state)
    np.testing.assert_array_equal(read(state), 3)
    assert not state.is_deleted()
