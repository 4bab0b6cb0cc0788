"""Steps that fail on the tasks: what they say, what they keep, and what can be done after that."""

import gc

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import stepcache as sc
from stepcache.remote import messages
from stepcache.remote.messages import Kind, Message, decode, packed
from stepcache.remote.target import Target
from stepcache.remote.task import Task
from tests.remote.test_clients import interrupted

NO_MEMORY = "Out of memory"


@sc.step
def impossible(x):
    return jnp.zeros(1 << 44, jnp.float32) + x


@sc.step(carry="state")
def add(state, x):
    return jax.tree.map(lambda leaf: leaf + x.sum(), state), x.sum()


@sc.step(carry="state")
def add_and_fail(state, x):
    return state + x, jnp.zeros(1 << 44, jnp.float32) + x


def failed():
    """An output of a step that has failed."""
    return impossible(np.float32(1))


@pytest.fixture(scope="module", params=["1x1", "2x1"])
def known(request, running):
    """A session on tasks that know when they start a step whether the steps before have failed."""
    with running(request.param).session() as made:
        yield made
    made.close()


@pytest.mark.parametrize("kind", ["tree", "variables"])
def test_a_step_that_is_given_a_failed_output_keeps_what_it_carries(known, kind):
    tree = {"a": np.ones(3, np.float32), "b": np.float32(2)}
    state = tree if kind == "tree" else sc.Variables(tree, name="given a failed output")
    state, _ = add(state, np.float32(1))
    state, total = add(state, failed())
    for look in (total.block_until_ready, lambda: float(total)):
        with pytest.raises(sc.TaskError, match=f"a step failed on the tasks: .*{NO_MEMORY}"):
            look()
    if kind == "variables":  # Until it is written again.
        with pytest.raises(sc.TaskError, match=NO_MEMORY):
            _ = state.value
    else:
        assert float(state["b"].block_until_ready()) == 3
    state, total = add(state, np.float32(1))
    value = state if kind == "tree" else state.value
    assert float(total) == 1 and float(value["b"]) == 4
    np.testing.assert_array_equal(value["a"], 3)


def test_what_fails_while_it_runs_is_an_error_of_all_that_needs_it(one_task):
    """Two devices fail later than the call."""
    state, total = add(np.ones(3, np.float32), failed())
    for look in (total.block_until_ready, lambda: float(total), state.block_until_ready):
        with pytest.raises(sc.TaskError, match=f"a step failed on the tasks: .*{NO_MEMORY}"):
            look()


def test_variables_that_are_passed_twice_keep_their_value(one_task):
    twice = sc.step(lambda state, other: state + other, carry="state")
    state = sc.Variables(np.float32(3), name="twice in a call")
    twice(state, state)
    with pytest.raises(sc.TaskError, match="the same array in several places"):
        _ = state.value
    add(state, np.float32(1))
    assert state.value == 4


@pytest.mark.sample(every=2)
def test_what_a_failed_step_has_lost_can_be_restored(session, tmp_path):
    write = sc.Write("apply", optimizer=optax.sgd(0.5, momentum=0.9))
    state = sc.Variables(np.ones(4, np.float32), name="lost by a step", write=write)
    state.push(np.ones(4, np.float32))
    sc.save(tmp_path, state=state)
    add_and_fail(state, np.float32(1))
    add(state, np.float32(1))
    with pytest.raises(sc.TaskError, match=NO_MEMORY):
        _ = state.value
    with pytest.raises(sc.TaskError, match=NO_MEMORY):
        sc.save(tmp_path, state=state)
    sc.restore(tmp_path, state=state)
    np.testing.assert_array_equal(state.value, 0.5)
    state.push(np.ones(4, np.float32))
    np.testing.assert_array_equal(state.value, np.float32(0.5 - 0.5 * 1.9))


def test_variables_of_a_failed_output_blame_no_other_step(session):
    bad, good = failed(), add(np.float32(0), np.float32(1))[1]
    made = sc.Variables({"bad": bad}, name="made of a failed output")
    state = sc.Variables(np.zeros(2, np.float32), name="assigned a failed output")
    assert float(good.block_until_ready()) == 1
    with pytest.raises(sc.TaskError, match=NO_MEMORY):
        _ = made.value
    state.assign(add_and_fail(np.zeros(2, np.float32), np.float32(1))[0])
    add(state, np.float32(1))  # With no value from before.
    with pytest.raises(sc.TaskError, match=NO_MEMORY):
        _ = state.value
    state.assign(np.ones(2, np.float32))
    np.testing.assert_array_equal(state.value, 1)


def test_updates_are_pushed_outside_of_the_session_too(running):
    session = running("1x1").session()
    with session:
        write = sc.Write("apply", optimizer=optax.sgd(0.5))
        added = sc.Variables(np.float32(1), name="added", write=sc.Write("add"))
        applied = sc.Variables(np.float32(1), name="applied", write=write)
    added.push(np.float32(2))
    applied.push(np.float32(1))
    assert added.value == 3 and applied.value == 0.5
    session.close()


def test_after_ctrl_c_in_a_call_the_same_call_works(one_task):

    def is_interrupted(number):
        """Whether the first call of a call form has so many lines."""
        state = sc.Variables(np.float32(0), name=f"call form {number}")
        add.warm(state, np.float32(1))
        found = interrupted(lambda: add(state, np.float32(1)), Target._run, number)
        before = state.value
        add(state, np.float32(1))
        assert state.value == before + 1
        return found

    number = 0
    while is_interrupted(number):
        number += 1
    assert number > 20


def test_a_message_that_is_too_large_changes_nothing(one_task, monkeypatch):
    step = sc.step(lambda state, tree: state + sum(tree.values()).sum(), carry="state")
    state = sc.Variables(np.float32(0), name="not sent")
    tree = {str(n): np.ones(1000, np.float32) for n in range(4)}
    step.warm(state, tree)
    with monkeypatch.context() as patch:
        patch.setattr(messages, "MAX_MESSAGE_BYTES", 10_000)
        with pytest.raises(sc.TaskError, match=r"a message would have 16\.\d kB"):
            step(state, tree)
    assert state.value == 0
    step(state, tree)
    assert state.value == 4000


class Replies:
    """Stands for the channel of a task."""

    def __init__(self):
        self.received = bytearray()

    def send(self, data):
        self.received += data

    def flush(self):
        return True


def test_a_reply_that_is_too_large_fails_alone(monkeypatch):
    """The coordinator would take it for no message, and end the task."""
    replies = Replies()
    task = Task(replies, 1, shares=False)  # type: ignore[arg-type]
    task._arrays.keep(1, 1, [jnp.ones(1000)])
    body = packed(refs=[["o", 0, 0, 1]], first=7, only_look=False, **{"from": 1})
    monkeypatch.setattr(messages, "MAX_MESSAGE_BYTES", 2000)
    task._carry_out(Message(Kind.FETCH, 1, 1, 7, 1, body))
    reply = decode(replies.received)
    assert reply is not None and reply.kind is Kind.FAILED
    assert "a message would have 4.1 kB" in reply.data()["why"]


def test_a_failed_step_leaves_nothing_of_what_it_has_taken(one_task):
    """Else a loop of failing steps would fill the memory of the tasks."""
    gc.collect()
    state = add(np.ones(1 << 20, np.float32), np.float32(0))[0]
    for _ in range(3):
        state, bad = add_and_fail(state, np.float32(1))
        with pytest.raises(sc.TaskError, match=NO_MEMORY):
            bad.block_until_ready()
    with pytest.raises(sc.TaskError, match=NO_MEMORY):
        np.asarray(state)
