"""Steps that are taken back before they begin: what they carry stays, on all tasks."""

import os
import signal
import threading

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import stepcache as sc
from tests.remote.processes import tasks_of

CANCELLED = "the step was cancelled before it began"
X = np.ones((128, 128), np.float32)
TURNS = np.int32(200)


@sc.step(carry="state", batch="batch")
def train(state, batch, x, turns):
    """Takes as long as `turns` says."""
    x = jax.lax.fori_loop(0, turns, lambda _, x: jnp.tanh(x @ x), x)
    return jax.tree.map(lambda leaf: leaf + 1, state), batch.mean() + 0 * x.sum()


@sc.step
def doubled(x):
    return 2 * x


@pytest.fixture(scope="module")
def busy(session):
    """Calls `train` so often that most calls have not begun when it returns."""

    def calls(state, count=25):
        looked = []
        for _ in range(count):
            state, mean = train(state, np.ones(4, np.float32), X, TURNS)
            looked.append(mean)
        return state, looked

    return calls


def cancelled(looked):
    """Whether each was cancelled."""
    found = []
    for each in looked:
        try:
            found.append(float(each) != 1)
        except sc.TaskError as error:
            assert CANCELLED in str(error)
            found.append(True)
    return found


@pytest.mark.sample(every=4)
@pytest.mark.parametrize("kind", ["tree", "variables"])
def test_training_goes_on_from_the_last_step_that_was_not_cancelled(session, busy, kind):
    tree = {"a": np.zeros(3, np.float32), "b": (np.float32(0),)}
    state = tree if kind == "tree" else sc.Variables(tree, name=f"state of {kind}")
    state, first = busy(state)
    count = session.cancel()
    assert count > 0
    found = cancelled(first)
    assert found == [False] * (25 - count) + [True] * count
    for leaf in jax.tree.leaves(state) if kind == "tree" else ():
        leaf.block_until_ready()
    made = sc.Variables(first[-1], name=f"cancelled with {kind}")
    state, again = busy(state, 2)
    assert cancelled(again) == [False, False] and session.cancel() == 0
    with pytest.raises(sc.TaskError, match=f"^{CANCELLED}"):
        _ = made.value
    value = state if kind == "tree" else state.value
    for leaf in jax.tree.leaves(value):
        np.testing.assert_array_equal(leaf, 27 - count)


@pytest.mark.slow
def test_what_is_given_a_cancelled_output_is_cancelled_with_it(session, busy):
    """A push of it, too, and the optimizer's state is whole."""
    tree = {"w": np.float32(1)}
    write = sc.Write("apply", optimizer=optax.sgd(0.5, momentum=0.9))
    weights = sc.Variables(tree, name="weights", write=write)
    state = sc.Variables(np.float32(0), name="state")
    state, (mean,) = busy(state, 1)
    doubled.warm(mean)
    weights.push({"w": mean})
    looked = doubled(busy(state)[1][-1])
    session.cancel()
    weights.push({"w": looked})
    for look in (looked.tolist, looked.block_until_ready, doubled(looked).block_until_ready):
        with pytest.raises(sc.TaskError, match=f"^{CANCELLED}"):
            look()
    assert weights.value["w"] == 0.5
    weights.push({"w": np.float32(1)})
    assert weights.value["w"] == np.float32(0.5 - 0.5 * 1.9)


@pytest.mark.slow
def test_pushes_and_what_they_need_are_not_cancelled(session, busy):
    write = sc.Write("apply", optimizer=optax.sgd(0.5, momentum=0.9))
    other, weights = (sc.Variables(np.float32(1), name=n, write=write) for n in "ab")
    other.push(np.float32(1))  # Compiles what the pushes need.
    state, _ = busy(sc.Variables(np.float32(0), name="busy"))
    weights.push(np.float32(1))
    assert session.cancel() > 0
    weights.push(np.float32(1))
    assert weights.value == np.float32(0.5 - 0.5 * 1.9) and state.value < 25


def test_a_first_state_that_was_cancelled(session, busy):
    before, _ = busy(sc.Variables(np.float32(0), name="before"), 1)
    busy(doubled(np.ones(2, np.float32)), 1)
    busy(before)
    made = doubled(np.ones(2, np.float32))
    assert session.cancel() > 0
    state, (mean,) = busy(made, 1)
    with pytest.raises(sc.TaskError, match=CANCELLED):
        np.asarray(state)
    with pytest.raises(sc.TaskError, match=CANCELLED):
        float(mean)


@pytest.mark.slow
@pytest.mark.parametrize(
    "session", ["2x1", pytest.param("1x2", marks=pytest.mark.slow)], indirect=True
)
def test_another_thread_cancels_what_a_call_waits_for(session, busy):
    state, _ = busy(sc.Variables(np.float32(0), name="waited for"), 2)
    assert state.value == 2
    timer = threading.Timer(0.05, session.cancel)
    timer.start()
    state, looked = busy(state, 60)
    timer.join()
    found = cancelled(looked)
    assert True in found and not found[-1]
    assert state.value == 2 + found.count(False)


def test_after_ctrl_c(session, busy):
    state, looked = busy(sc.Variables(np.float32(0), name="interrupted"))
    before = signal.signal(signal.SIGALRM, signal.default_int_handler)
    signal.setitimer(signal.ITIMER_REAL, 0.05)
    try:
        with pytest.raises(KeyboardInterrupt):
            looked[-1].block_until_ready()
            signal.pause()  # Were it done so soon.
    finally:
        signal.signal(signal.SIGALRM, before)
    count = session.cancel()
    assert state.value == 25 - count


def test_clients_cancel_what_is_their_own(running):
    first, second = running("2x1").session(), running("2x1").session()
    with first:
        mine = sc.Variables(np.float32(0), name="mine")
        train.warm(mine, np.ones(2, np.float32), X, TURNS)
    with second:
        theirs = sc.Variables(np.float32(0), name="theirs")
        train.warm(theirs, np.ones(2, np.float32), X, TURNS)
    with first:
        for _ in range(20):
            mine, mean = train(mine, np.ones(2, np.float32), X, TURNS)
    with second:
        theirs, other = train(theirs, np.ones(2, np.float32), X, np.int32(1))
    count = first.cancel()
    assert count
    with second:
        assert float(other) == 1 and theirs.value == 1
    with first:
        assert mine.value == 20 - count
        with pytest.raises(sc.TaskError, match=CANCELLED):
            float(mean)
    first.close()
    second.close()


@pytest.mark.slow
def test_tasks_that_are_lost_during_a_cancel(running):
    with running("2x1").session() as session:
        state = sc.Variables(np.float32(0), name="state")
        for _ in range(10):
            state, _ = train(state, np.ones(2, np.float32), X, TURNS)
        _, (_, task) = tasks_of(session)
        os.kill(task, signal.SIGKILL)
        with pytest.raises(sc.RankLostError):
            session.cancel()
            _ = state.value
        state.assign(np.float32(5))
        assert session.cancel() == 0 and state.value == 5
    session.close()


def test_sessions_that_cannot_cancel(running):
    with pytest.raises(sc.OptionError, match="only steps that run on tasks"):
        sc.Session().cancel()
    session = running("1x1").session()
    session.close()
    with pytest.raises(sc.TaskError, match="closed"):
        session.cancel()
