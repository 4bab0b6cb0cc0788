"""A step that raises leaves the values and versions of its variables as they were, or says that a
value is lost: its program had used up the buffers when it failed."""

import contextlib
import threading

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from comparing import assert_same, assert_same_in_numpy, copied, lose
from states import LARGE

import stepcache as sc


def tree(value=0):
    return {
        "layer": {"w": np.full((2, 3), value, np.float32), "b": np.full(3, value, np.float32)},
        "large": np.full(LARGE, value, np.float32),
        "n": np.int32(value),
        "key": jax.random.key(value),
    }


def add_one(state):
    new = jax.tree.map(lambda leaf: leaf + 1, {**state, "key": None})
    return {**new, "key": jax.random.fold_in(state["key"], 1)}


@contextlib.contextmanager
def unchanged(*variables):
    """What must hold for variables around a call that raises, and that they go on as before."""
    before = [(each.value, each.version) for each in variables]
    yield
    for each, (value, version) in zip(variables, before, strict=True):
        assert each.version == version
        assert_same(value, each.value)
    goes_on = sc.step(add_one, carry="state")
    for each, (value, version) in zip(variables, before, strict=True):
        goes_on(each)
        assert each.version == version + 1
        assert_same(goes_on(copied(value)), each.value)


@pytest.fixture(params=["nowhere", "eight devices"])
def session(request, mesh):
    return contextlib.nullcontext() if request.param == "nowhere" else sc.Session(mesh)


def test_a_step_that_raises_while_it_is_traced(session):
    @sc.step(carry="state", static_argnames="failing")
    def step(state, other, failing=False):
        state["layer"]["w"] = state["layer"]["w"] + 1
        if failing:
            raise KeyError("the user's own")
        return add_one(state), other["n"]

    with session:
        variables, other = sc.Variables(tree()), sc.Variables(tree(5))
        with unchanged(variables, other), pytest.raises(KeyError, match="the user's own"):
            step(variables, other, failing=True)
        assert int(step(variables, other)[1]) == 6
        assert int(variables.value["n"]) == 2


# ---- what is no carry ------------------------------------------------------------------------


def carry_error(step, *args):
    with pytest.raises(sc.CarryError) as raised:
        step(*args)
    return raised.value


WRONG = {
    "shape": lambda state: {**state, "large": state["large"][1:]},
    "shape of a small leaf": lambda state: {**state, "layer": {**state["layer"], "b": state["n"]}},
    "dtype": lambda state: {**state, "large": state["large"].astype(jnp.bfloat16)},
    "dtype of a number": lambda state: {**state, "n": state["n"] * 0.5},
    "another key": lambda state: {**state, "key": jax.random.key_data(state["key"])},
    "one more": lambda state: {**state, "more": state["n"]},
    "one less": lambda state: {name: state[name] for name in state if name != "n"},
    "one deeper": lambda state: {**state, "layer": {**state["layer"], "w": [state["n"]]}},
    "a list for a dict": lambda state: {**state, "layer": list(state["layer"].values())},
    "None for a leaf": lambda state: {**state, "n": None},
    "another object": lambda state: jnp.zeros(3),
    "nothing": lambda state: None,
}


@pytest.mark.sample(every=4)
@pytest.mark.parametrize("wrong", WRONG)
def test_what_is_no_carry_is_told_as_of_a_plain_tree(wrong):
    def train_step(state, x):
        return WRONG[wrong](state), x * 2

    expected = carry_error(sc.step(train_step, carry="state"), copied(tree()), 1.0)
    variables = sc.Variables(tree())
    with unchanged(variables):
        raised = carry_error(sc.step(train_step, carry="state"), variables, 1.0)
    assert raised.where == expected.where
    assert (raised.expected, raised.got) == (expected.expected, expected.got)


INSIDE = {
    "shape": lambda state: {**state, "inner": [WRONG["shape"](state["inner"][0])]},
    "one more": lambda state: {**state, "inner": [WRONG["one more"](state["inner"][0])]},
    "one deeper": lambda state: {**state, "inner": [WRONG["one deeper"](state["inner"][0])]},
    "without the array": lambda state: {"inner": state["inner"]},
    "one array more": lambda state: {**state, "y": 1},
    "twice": lambda state: {**state, "inner": state["inner"] * 2},
    "another array": lambda state: {**state, "x": state["x"][1:]},
    "an array deeper": lambda state: {**state, "x": [state["x"]]},
    "nothing": lambda state: {**state, "inner": None},
}


@pytest.mark.sample(every=4)
@pytest.mark.parametrize("wrong", INSIDE)
def test_what_is_no_carry_is_told_of_variables_inside_a_carry(wrong):
    def train_step(state, x):
        return INSIDE[wrong](state), x * 2

    plain = {"inner": [copied(tree())], "x": jnp.zeros(2)}
    expected = carry_error(sc.step(train_step, carry="state"), plain, 1.0)
    variables = sc.Variables(tree())
    with unchanged(variables):
        mixed = {"inner": [variables], "x": jnp.zeros(2)}
        raised = carry_error(sc.step(train_step, carry="state"), mixed, 1.0)
    assert (raised.where, raised.expected, raised.got) == (
        expected.where,
        expected.expected,
        expected.got,
    )


@pytest.mark.sample(every=4)
@pytest.mark.parametrize(
    "returned",
    [
        lambda state, x: x,
        lambda state, x: (x, state),
        lambda state, x: (),
        lambda state, x: {"state": state},
        lambda state, x: None,
    ],
)
def test_a_step_that_does_not_return_its_carry(returned):
    def train_step(state, x):
        return returned(state, x)

    expected = carry_error(sc.step(train_step, carry="state"), copied(tree()), 1.0)
    variables = sc.Variables(tree())
    with unchanged(variables):
        raised = carry_error(sc.step(train_step, carry="state"), variables, 1.0)
    assert str(raised) == str(expected)
    with unchanged(variables), jax.debug_key_reuse(True):  # JAX has to serve the call itself.
        carry_error(sc.step(train_step, carry="state"), variables, 1.0)


def test_the_second_of_two_carries_is_named():
    step = sc.step(lambda a, b: (a, {**b, "n": b["n"] * 0.5}), carry=("a", "b"))
    one, two = sc.Variables(tree()), sc.Variables(tree(1))
    with unchanged(one, two):
        error = carry_error(step, one, two)
    assert error.where == "b['n']" and "int32" in error.expected and "float32" in error.got


def test_a_carry_that_is_not_passed():
    step = sc.step(lambda x, state=None: (state, x), carry="state")
    variables = sc.Variables(tree())
    with unchanged(variables):
        assert carry_error(step, variables).where == "state"


def test_an_output_that_is_no_array():
    variables = sc.Variables(tree())
    with unchanged(variables), pytest.raises(TypeError, match="not a valid JAX type"):
        sc.step(lambda state: ({**state, "n": "text"}, 0), carry="state")(variables)
    with unchanged(variables), pytest.raises(TypeError, match="not a valid JAX type"):
        sc.step(lambda state: (state, "text"), carry="state")(variables)


# ---- what a session forbids ------------------------------------------------------------------


def test_a_recompile_that_is_forbidden(session):
    step = sc.step(lambda state, x: (add_one(state), x), carry="state")
    with session:
        variables = sc.Variables(tree())
        with unchanged(variables), sc.no_recompile(), pytest.raises(sc.RecompileError):
            step(variables, np.ones(8))
        step(variables, np.ones(8))
        with unchanged(variables), pytest.raises(sc.RecompileError, match="x: float"):
            with sc.no_recompile():
                step(variables, np.ones(16))


def test_an_argument_that_cannot_be_placed(mesh):
    step = sc.step(lambda state, x: (add_one(state), x), carry="state", batch="x")
    with sc.Session(mesh):
        variables = sc.Variables(tree())
        with unchanged(variables), pytest.raises(sc.PlacementError, match="x"):
            step(variables, np.ones(7))
        with unchanged(variables), pytest.raises(TypeError):
            step(variables, object())


# ---- while it runs ---------------------------------------------------------------------------


@pytest.mark.sample
@pytest.mark.parametrize("setting", ["jax_debug_nans", "jax_debug_infs"])
@pytest.mark.parametrize("seen_before", [False, True])
def test_a_number_that_jax_is_told_to_refuse(setting, seen_before):
    """JAX runs the function again then, and may find its arguments donated: that is no error of
    ours, but it must not be the end of the value."""

    @sc.step(carry="state")
    def step(state, x):
        return add_one({**state, "large": state["large"] / x}), x

    bad = 0.0 if setting == "jax_debug_infs" else np.nan
    context = jax.debug_infs if setting == "jax_debug_infs" else jax.debug_nans
    variables = sc.Variables(tree(1))
    step(variables, 1.0)
    with context(True):
        if seen_before:
            step(variables, 1.0)
            step(variables, 1.0)
        with unchanged(variables), pytest.raises((FloatingPointError, RuntimeError)):
            step(variables, bad)
        step(variables, 1.0)
    step(variables, 1.0)


def test_a_program_that_fails_once_it_runs_takes_the_value_with_it():
    """It had the buffers for its own, and no second copy is kept. It is said clearly, whether the
    call still waits for the failure or not, and healed by assigning."""

    def refuse(x):
        if x > 1:
            raise ValueError("the user's own callback")
        return np.float32(x)

    @sc.step(carry="state")
    def step(state, x):
        y = jax.pure_callback(refuse, jax.ShapeDtypeStruct((), np.float32), x)
        return add_one({**state, "large": state["large"] + y}), y

    variables = sc.Variables(tree())
    step(variables, np.float32(1))
    kept = variables.value
    with pytest.raises(Exception, match="the user's own callback"):
        step(variables, np.float32(2))
        variables.block_until_ready()
    with pytest.raises(Exception, match=r"the user's own callback|the value is lost"):
        _ = np.asarray(variables.value["large"])
    variables.assign(kept)
    with unchanged(variables):
        pass


def test_a_value_that_is_lost_is_told_and_can_be_assigned():
    variables = sc.Variables(tree(), name="table")
    kept = variables.value
    lose(variables)
    with pytest.raises(sc.VariablesError, match="lost") as raised:
        _ = variables.value
    assert raised.value.where == "table" and "assign" in raised.value.hint
    variables.assign(kept)
    with unchanged(variables):
        pass


def refuse_above_one(x):
    if x > 1:
        raise ValueError("the user's own callback")
    return np.float32(x)


def checked(x):
    """`x`, by a program that fails while it runs where it is above 1."""
    return jax.pure_callback(refuse_above_one, jax.ShapeDtypeStruct((), np.float32), x)


def says_it_is_lost(what, name="table"):
    with pytest.raises(sc.VariablesError, match="the value is lost") as raised:
        what()
    assert raised.value.where == name
    assert "assign(...)" in raised.value.hint and "restore(...)" in raised.value.hint


@pytest.mark.parametrize("calls_before", [0, 1, 3])
def test_everything_says_that_a_value_is_lost(calls_before, tmp_path):
    @sc.step(carry="state")
    def step(state, x):
        return jax.tree.map(lambda leaf: leaf + checked(x), state), x

    read = sc.step(lambda x, state: x + state["w"])
    start = {"w": np.zeros(3, np.float32), "large": np.zeros(LARGE, np.float32)}
    variables = sc.Variables(start, name="table", write=sc.Write(mode="add", every=2))
    read(np.float32(1), variables)
    for _ in range(calls_before):
        step(variables, np.float32(1))
    kept, version = variables.value, variables.version
    sc.save(tmp_path, value=variables)
    assert "lost" not in repr(variables)
    for bring_back in (
        lambda: variables.assign(kept),
        lambda: sc.restore(tmp_path, value=variables),
    ):
        variables.block_until_ready()  # Else the program runs later, and the call does not raise.
        with pytest.raises(Exception, match="the user's own callback"):
            step(variables, np.float32(2))
        assert "the value is lost" in repr(variables) and "the value is lost" in str([variables])
        for _ in range(2):
            says_it_is_lost(lambda: variables.value)
            says_it_is_lost(lambda: step(variables, np.float32(1)))
            says_it_is_lost(lambda: step(variables, 1))
            says_it_is_lost(lambda: read(np.float32(1), variables))
            says_it_is_lost(lambda: variables.push(kept))
            says_it_is_lost(lambda: sc.save(tmp_path, value=variables))
            says_it_is_lost(variables.block_until_ready)
        assert variables.version == version
        bring_back()
        version = variables.version
        assert "lost" not in repr(variables)
        assert_same(kept, variables.value)
        step(variables, np.float32(1))
        version += 1
        variables.assign(kept)
        version += 1


def failing_optimizer():
    """Adds updates up in its state, by a program that fails where they are above 1."""

    def update(updates, state, params=None):
        summed = jax.tree.map(jnp.add, state, updates)
        return jax.tree.map(lambda u: u + checked(u.max()), updates), summed

    return optax.GradientTransformation(lambda params: jax.tree.map(jnp.zeros_like, params), update)


@pytest.mark.parametrize("saved", [True, False])
def test_a_push_that_fails_while_it_runs_loses_the_optimizer_state_too(saved, tmp_path):
    write = sc.Write(mode="apply", optimizer=failing_optimizer())
    variables = sc.Variables({"w": np.ones(3, np.float32)}, name="table", write=write)
    one = {"w": np.ones(3, np.float32)}
    variables.push(one)
    sc.save(tmp_path, value=variables)
    kept = variables.value
    assert kept["w"].tolist() == [3] * 3

    def fails():
        with pytest.raises(Exception, match="the user's own callback"):
            variables.push({"w": np.full(3, 2, np.float32)})
        says_it_is_lost(lambda: variables.push(one))
        says_it_is_lost(lambda: sc.save(tmp_path, value=variables))

    fails()
    if saved:
        sc.restore(tmp_path, value=variables)
        summed = 1
    else:
        variables.assign(kept)  # The state begins anew.
        summed = 0
    assert_same(kept, variables.value)
    variables.push(one)
    assert variables.value["w"].tolist() == [5] * 3
    assert variables._updates.state.packed.buffers[0].tolist() == [summed + 1] * 3
    fails()


def test_a_lost_value_is_restored_with_a_state_that_was_not_made_yet(tmp_path):
    tree_of_ones = {"w": np.ones(3, np.float32), "b": np.ones(2, np.float32)}

    def made():
        write = sc.Write(mode="apply", optimizer=optax.ema(0.5, debias=False))
        return sc.Variables(tree_of_ones, name="table", write=write)

    first, variables = made(), made()
    first.push(tree_of_ones)
    sc.save(tmp_path, value=first)
    lose(variables)
    with pytest.raises(sc.VariablesError, match="elsewhere"):
        sc.restore(tmp_path / "elsewhere", value=variables)
    says_it_is_lost(lambda: variables.value)
    sc.restore(tmp_path, value=variables)
    assert_same(first.value, variables.value)
    for each in (first, variables):
        each.push(tree_of_ones)
    assert_same(first.value, variables.value)


@pytest.mark.parametrize("read", [sc.Read(), sc.Read(cache="device")], ids=str)
def test_a_master_in_host_memory_is_not_lost(read):
    """Random keys stay on the devices, and are copied all the same."""

    @sc.step(carry="state")
    def step(state, x):
        return {"w": state["w"] + checked(x), "key": jax.random.fold_in(state["key"], 1)}

    tree = {"w": np.ones(3, np.float32), "key": jax.random.key(0)}
    variables = sc.Variables(tree, placement=sc.OnHost(), read=read)
    for _ in range(2):
        step(variables, np.float32(1))
        kept = variables.value
        try:
            step(variables, np.float32(2))
        except Exception as error:
            assert "the user's own callback" in str(error)
            assert_same_in_numpy(kept, variables.value)
        else:  # JAX runs it later, and what is written back fails with it.
            with pytest.raises(Exception, match="the user's own callback"):
                _ = variables.value
            variables.assign(kept)


def test_a_step_that_only_reads_loses_nothing_when_it_fails():
    step = sc.step(lambda x, state: checked(x) + state["w"])
    variables = sc.Variables({"w": np.ones(3, np.float32)}, name="table")
    with pytest.raises(Exception, match="the user's own callback"):
        jax.block_until_ready(step(np.float32(2), variables))
    assert variables.value["w"].tolist() == [1] * 3 and "lost" not in repr(variables)


def test_a_value_that_another_thread_works_on_is_not_called_lost():
    """Its buffers are gone for the while of a step."""
    shown = []

    def look(x):
        thread = threading.Thread(target=lambda: shown.append(repr(variables)))
        thread.start()
        thread.join(30)
        return np.float32(x)

    @sc.step(carry="state")
    def step(state, x):
        y = jax.pure_callback(look, jax.ShapeDtypeStruct((), np.float32), x)
        return jax.tree.map(lambda leaf: leaf + y, state), y

    variables = sc.Variables({"w": np.ones(3, np.float32)}, name="table")
    for _ in range(3):
        jax.block_until_ready(step(variables, np.float32(1)))
    assert len(shown) == 3 and not any("lost" in text for text in shown)


def test_an_interrupt_lets_go_of_the_variables():
    @sc.step(carry="state")
    def step(state):
        raise KeyboardInterrupt

    variables, done = sc.Variables(tree()), []
    with unchanged(variables), pytest.raises(KeyboardInterrupt):
        step(variables)
    thread = threading.Thread(target=lambda: done.append(variables.assign(tree(3))))
    thread.start()
    thread.join(30)
    assert done == [None] and variables.version == 2
