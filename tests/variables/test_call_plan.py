"""Calls that pass the same `Variables` in the same places, again and again."""

import gc
import inspect
import sys
import threading
import time
import weakref

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from comparing import arrays_of, lose
from flax import struct

import stepcache as sc
from stepcache.engine import Engine
from stepcache.errors import TransferBudgetError, VariablesError


@pytest.fixture
def entered(monkeypatch):
    """The calls that found their variables again."""
    calls = []
    run = Engine.run_resident

    def counted(self, args, kwargs):
        calls.append((args, kwargs))
        return run(self, args, kwargs)

    monkeypatch.setattr(Engine, "run_resident", counted)
    return calls


def ramp(start):
    return {"w": np.arange(start, start + 4, dtype=np.float32), "b": np.float32(start)}


def up(tree, by=1.0):
    return jax.tree.map(lambda leaf: leaf + by, tree)


def one(state):
    return up(state)


def with_batch(state, x, scale=1.0):
    return up(state, x.sum() * scale), x * 2


def as_list(state, x):
    return [up(state), x * 2]


def two(first, second, x):
    return up(first, x), up(second, 2 * x), x


def both(state, frozen):
    return up(state, frozen["b"]), frozen["w"] * 2


def read(frozen, x):
    return frozen["w"] * x.sum()


def of_dict(held):
    return {"a": up(held["a"]), "n": held["n"] + 1, "z": [up(held["z"][0]), held["z"][1]]}


def of_dict_and_more(held, x):
    return of_dict(held), x


def of_tuple(held):
    return (up(held[0]),)


@struct.dataclass
class State:
    """As training loops keep it."""

    params: object
    moments: object
    step: object


def of_state(held, x):
    return held.replace(params=up(held.params, x[0]), step=held.step + 1), x


X = np.arange(3, dtype=np.float32)
# The step, its carry, and its arguments: numbers stand for variables.
CASES = {
    "one": (one, "state", (1,), {}),
    "with a batch": (with_batch, "state", (1, X), {}),
    "a scalar by keyword": (with_batch, "state", (1, X), {"scale": 2.0}),
    "a list comes back": (as_list, "state", (1, X), {}),
    "by keyword": (with_batch, "state", (), {"state": 1, "x": X}),
    "two": (two, ("first", "second"), (1, 2, 2.0), {}),
    "two, the second by keyword": (two, ("first", "second"), (1,), {"second": 2, "x": 2.0}),
    "carried in another order": (two, ("second", "first"), (1, 2, 2.0), {}),
    "carried and read": (both, "state", (1, 2), {}),
    "the same twice": (both, "state", (1, 1), {}),
    "the same read first": (lambda frozen, state: both(state, frozen), "state", (1, 1), {}),
    "read": (read, (), (1, X), {}),
    "a dict": (of_dict, "held", ({"z": [1, X], "a": 2, "n": X},), {}),
    "a dict and more": (of_dict_and_more, "held", ({"z": [1, X], "a": 2, "n": X}, X), {}),
    "a tuple alone": (of_tuple, "held", ((1,),), {}),
    "a class of the user's": (of_state, "held", (State(1, 2, X), X), {}),
    "two in a class that is read": (
        lambda held: up(held.params, held.step[0]),
        (),
        (State(1, 2, X),),
        {},
    ),
}
# An order of outputs that the carry names, not the parameters.
_SWAPPED = {"carried in another order"}


def filled(tree, values):
    return jax.tree.map(lambda leaf: values[leaf] if type(leaf) is int else leaf, tree)


def seen(tree):
    """Arrays, with values in the place of variables."""
    return jax.tree.map(lambda leaf: leaf.value if isinstance(leaf, sc.Variables) else leaf, tree)


@pytest.mark.sample(every=4)
@pytest.mark.parametrize("case", CASES)
def test_a_plan_does_what_the_first_call_did(case, entered):
    fun, carry, args, kwargs = CASES[case]
    if case in _SWAPPED:

        def step(first, second, x):
            return up(second, 2 * x), up(first, x), x
    else:
        step = fun
    stepped = sc.step(step, carry=carry)
    variables = {number: sc.Variables(ramp(number)) for number in (1, 2)}
    plain = {number: ramp(number) for number in (1, 2)}
    names = (carry,) if isinstance(carry, str) else carry
    for _ in range(4):
        outputs = stepped(*filled(args, variables), **filled(kwargs, variables))
        expected = step(*filled(args, plain), **filled(kwargs, plain))
        assert jax.tree.structure(seen(outputs)) == jax.tree.structure(expected)
        jax.tree.map(np.testing.assert_allclose, seen(outputs), expected)
        if not names:
            continue
        bound = inspect.signature(step).bind(*args, **kwargs).arguments
        whole = (len(names) == 1 and type(outputs) not in (tuple, list)) or case == "a tuple alone"
        news = [expected] if whole else expected
        for name, new in zip(names, news, strict=False):
            found = jax.tree.leaves(bound[name], is_leaf=lambda leaf: type(leaf) is int)
            flat = jax.tree.flatten(
                new, is_leaf=lambda leaf: isinstance(leaf, dict) and "w" in leaf
            )
            for number, value in zip(found, flat[0], strict=True):
                if type(number) is int:
                    plain[number] = value
    assert len(entered) == 1
    for number, each in variables.items():
        jax.tree.map(np.testing.assert_allclose, each.value, plain[number])


def test_other_variables_in_the_same_place_are_taken_and_written(entered):
    step = sc.step(one, carry="state")
    held = [sc.Variables(ramp(number)) for number in range(20)]
    for _ in range(3):
        for each in held:
            assert step(each) is each
    assert [float(each.value["b"]) for each in held] == [number + 3.0 for number in range(20)]
    assert all(each.version == 3 for each in held)
    few = held[:4]
    for each in few:
        step(each)
    entered.clear()
    for each in few * 3:
        step(each)
    assert not entered


def test_other_variables_inside_the_same_dict(entered):
    step = sc.step(of_dict, carry="held")
    first, second, third = (sc.Variables(ramp(number)) for number in (1, 2, 3))
    held = {"z": [first, X], "a": second, "n": X}
    for _ in range(2):
        step(held)
    held["a"] = third
    step(held)
    held["n"] = sc.Variables(X)
    step(held)
    assert [each.version for each in (first, second, third)] == [4, 2, 2]
    assert held["n"].version == 1


def test_what_is_static_may_change_what_comes_back():
    step = sc.step(
        lambda state, train: (up(state), state["b"]) if train else up(state),
        carry="state",
        static_argnames="train",
    )
    state = sc.Variables(ramp(0))
    for number in range(6):
        outputs = step(state, number % 2 == 0)
        assert (outputs[0] if number % 2 == 0 else outputs) is state
    assert state.version == 6
    assert float(state.value["b"]) == 6


@pytest.mark.parametrize("numbers", [(2,), (-1,), (1, 2), (0,)])
def test_static_arguments_keep_their_places(numbers, entered):
    def add(a, b, c):
        for number, each in enumerate((a, b, c)):
            assert isinstance(each, int) is (number % 3 in {n % 3 for n in numbers})
        (state,) = (each for each in (a, b, c) if isinstance(each, dict))
        return up(state, sum(each for each in (a, b, c) if not isinstance(each, dict)))

    place = 1 if numbers == (0,) else 0
    step = sc.step(add, carry="abc"[place], static_argnums=numbers)
    state, given = sc.Variables(ramp(0)), [0, 0, 0]
    given = [2 if n in {number % 3 for number in numbers} else np.float32(3) for n in range(3)]
    given[place] = state
    expected = sum(float(each) for each in given if each is not state)
    for calls in range(1, 5):
        assert step(*given) is state
        assert float(state.value["b"]) == calls * expected
    assert len(entered) == 1


@pytest.mark.parametrize("static", [(), ("n",), ("m",), ("n", "m")])
@pytest.mark.parametrize("names", [(), ("z",), ("m",), ("n",), ("m", "n", "z")])
def test_keywords_keep_their_places_beside_static_arguments(static, names, entered):
    """They are passed by position, where that is none of a static argument's."""

    def add(x, n=2, *, state, a, m=3, z=0.0):
        assert all(isinstance({"n": n, "m": m}[name], int) for name in static)
        return up(state, 1000 * x + 100 * a + 10 * n + m + z)

    step = sc.step(add, carry="state", static_argnames=static)
    state = sc.Variables(ramp(0))
    more = {"m": 4, "n": 5, "z": np.float32(0.5)}
    given = {name: more[name] for name in names} | {"a": np.float32(6), "state": state}
    by = float(add(7, **given | {"state": np.float32(0)}))
    for calls in range(1, 5):
        assert step(np.float32(7), **given) is state
        assert float(state.value["b"]) == calls * by
    assert len(entered) == 1


def test_all_by_name_beside_a_static_argument(entered):
    step = sc.step(lambda state, n=1: up(state, n), carry="state", static_argnums=1)
    state = sc.Variables(ramp(0))
    for calls in range(1, 5):
        assert step(state=state) is state
        assert float(state.value["b"]) == calls
    assert len(entered) == 1


def test_what_lies_beside_variables_may_change_its_structure(entered):
    step = sc.step(
        lambda held, x: (up(held["v"], len(jax.tree.leaves(held["n"]))), held["n"]), carry=()
    )
    v = sc.Variables(ramp(0))
    others = [1.0, (1.0, 2.0), {"a": 1.0}]
    for _ in range(4):
        for n in others:
            new, same = step({"v": v, "n": n}, 0)
            assert jax.tree.structure(same) == jax.tree.structure(n)
            assert float(new["b"]) == len(jax.tree.leaves(n))
    assert len(entered) == len(others)


def test_more_outputs_than_before_are_not_lost():
    step = sc.step(
        lambda state, *, wants: (up(state), *[state["b"]] * wants),
        carry="state",
        static_argnames="wants",
    )
    state = sc.Variables(ramp(0))
    for wants in (0, 0, 2, 2, 1, 0, 3):
        assert len(step(state, wants=wants)) == 1 + wants
    assert state.version == 7


def test_the_same_variables_under_other_keys(entered):
    step = sc.step(lambda held: jax.tree.map(lambda leaf: leaf + 1, held), carry="held")
    state = sc.Variables(ramp(0))
    for _ in range(3):
        step({"a": state})
        step({"b": state})
    assert len(entered) == 2
    assert state.version == 6


def test_a_new_shape_is_built_and_then_served_by_the_same_plan(entered):
    step = sc.step(with_batch, carry="state")
    state = sc.Variables(ramp(0))
    for size in (3, 3, 5, 5, 3, 5, 3):
        step(state, np.ones(size, np.float32))
    assert len(entered) == 2
    assert step.stats().compiles == 2


def test_plans_end_where_the_context_is_another_one(entered):
    step = sc.step(one, carry="state")
    state = sc.Variables(ramp(0))
    for _ in range(2):
        step(state)
    with pytest.raises(VariablesError, match="inside another transformation"):
        jax.jit(lambda x: (step(state), x)[1])(1.0)
    with jax.disable_jit():
        step(state)
    with jax.debug_nans(True):
        step(state)
        step(state)
    with sc.Session(max_step_bytes=0):
        step(state)
    entered.clear()
    step(state)
    assert not entered
    assert state.version == 7
    assert float(state.value["b"]) == 7


def test_a_budget_counts_the_other_arguments_of_planned_calls():
    step = sc.step(with_batch, carry="state")
    state = sc.Variables(ramp(0))
    batch = np.ones(1000, np.float32)
    for _ in range(3):
        step(state, batch)
    with sc.Session(max_step_bytes=100), pytest.raises(TransferBudgetError):
        step(state, batch)
    assert state.version == 3


def test_nan_checks_keep_the_value():
    step = sc.step(lambda state, x: up(state, jnp.log(x)), carry="state")
    state = sc.Variables(ramp(0))
    with jax.debug_nans(True):
        for _ in range(2):
            step(state, 1.0)
        with pytest.raises(FloatingPointError):
            step(state, -1.0)
    assert state.version == 2
    np.testing.assert_array_equal(state.value["w"], ramp(0)["w"])


def test_a_plan_keeps_no_variables_alive():
    step = sc.step(one, carry="state")
    state = sc.Variables(ramp(0))
    for _ in range(3):
        step(state)
    dead = weakref.ref(state)
    buffers = [weakref.ref(leaf) for leaf in arrays_of(state)]
    del state
    gc.collect()
    assert dead() is None
    assert all(buffer() is None for buffer in buffers)
    assert step(None) is None


def test_a_planned_step_takes_fewer_and_more_arguments():
    step = sc.step(with_batch, carry="state")
    state = sc.Variables(ramp(0))
    for _ in range(2):
        step(state, X)
    with pytest.raises(TypeError, match="'x'"):
        step(state)
    with pytest.raises(TypeError, match="4"):
        step(state, X, 1.0, 2.0)
    with pytest.raises(TypeError, match="a0"):
        step(a0=state, x=X)
    for arguments in ((state, X, 2.0), (state,)):
        step(*arguments, **({} if len(arguments) > 1 else {"x": X}))
    assert float(state.value["b"]) == 3 + 3 + 6 + 3


def test_a_dict_that_changes_during_a_call():
    step = sc.step(lambda held: up(held), carry="held")
    state, other = sc.Variables(ramp(0)), sc.Variables(ramp(100))
    held, outputs = {"a": state}, []
    for _ in range(2):
        step(held)
    thread = threading.Thread(target=lambda: outputs.append(step(held)))
    with state._lock:
        thread.start()
        for _ in range(2):  # It waits for the lock, then.
            while sys._current_frames()[thread.ident].f_code.co_name != "plan":
                time.sleep(0.01)
            time.sleep(0.01)
        held["a"] = other
    thread.join()
    assert outputs[0]["a"] is state
    assert (state.version, other.version) == (3, 0)


def test_a_carry_that_is_lost_is_named():
    step = sc.step(one, carry="state")
    state = sc.Variables(ramp(0), name="weights")
    for _ in range(2):
        step(state)
    lose(state)
    with pytest.raises(VariablesError, match="lost"):
        step(state)


def test_threads_that_share_variables_lose_no_step():
    step = sc.step(with_batch, carry="state")
    state = sc.Variables(ramp(0))
    batch = np.ones(1, np.float32)
    step(state, batch)

    def work():
        for _ in range(200):
            step(state, batch)

    threads = [threading.Thread(target=work) for _ in range(4)]
    for each in threads:
        each.start()
    for each in threads:
        each.join()
    assert state.version == 801
    assert float(state.value["b"]) == 801


def test_a_planned_step_is_still_the_function_to_others():
    step = sc.step(with_batch, carry="state")
    state = sc.Variables(ramp(0))
    for _ in range(2):
        step(state, X)
    assert inspect.signature(step) == inspect.signature(with_batch)
    assert step.__wrapped__ is with_batch
    assert step.__name__ == "with_batch"
    assert jax.jit(step).__name__ == "with_batch"
    plain, _ = step(ramp(0), X)
    np.testing.assert_allclose(plain["b"], 3)
    assert jax.grad(lambda w: sc.step(read)({"w": w}, X).sum())(jnp.ones(4)).shape == (4,)


@pytest.mark.parametrize("first", ["a", "z"])
def test_random_keys_are_served_by_a_plan(first, entered):
    def advance(state):
        return {"k": jax.random.fold_in(state["k"], 1), first: state[first] + 1}

    step = sc.step(advance, carry="state")
    tree = {"k": jax.random.key(0), first: jnp.float32(0)}
    state, expected = sc.Variables(tree), tree
    for _ in range(4):
        assert step(state) is state
        expected = advance(expected)
    assert len(entered) == 1
    assert state.value["k"].dtype == tree["k"].dtype
    np.testing.assert_array_equal(*map(jax.random.key_data, (state.value["k"], expected["k"])))


@pytest.mark.parametrize("count", [1, 8, 9, 20])
def test_outputs_beside_the_carry_come_as_they_are(count, entered):
    step = sc.step(lambda state, x: (up(state), *(x + n for n in range(count))), carry="state")
    state = sc.Variables(ramp(0))
    for calls in range(1, 4):
        same, *rest = step(state, 1.0)
        assert same is state
        assert state.version == calls
        assert [float(each) for each in rest] == [1.0 + n for n in range(count)]
    assert len(entered) == 1


def test_a_planned_step_that_is_cleared_builds_anew(entered):
    step = sc.step(one, carry="state")
    state = sc.Variables(ramp(0))
    for _ in range(3):
        step(state)
    step.clear_cache()
    for _ in range(2):
        step(state)
    assert step.stats().compiles == 2
    assert len(entered) == 2
    assert state.version == 5


def test_calls_of_many_forms_leave_the_engines_of_the_last_ones():
    step = sc.step(lambda **held: sum(jnp.sum(x) for x in jax.tree.leaves(held)))
    state = sc.Variables(ramp(0))
    for number in range(70):
        for _ in range(2):
            assert float(step(**{f"state{number}": state})) == 6
    assert len(step._engine.resident_runner.engines()) == step.stats().programs == 64
    assert float(step(state0=state)) == 6
    step.clear_cache()
    assert step.stats().programs == 0
    assert float(step(state0=state)) == float(step(state69=state)) == 6
