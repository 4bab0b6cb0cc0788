"""Copies of variables on the host: current at each step, whatever sessions and threads do."""

import random
import threading

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from moving import session, watching

import stepcache as sc
from stepcache.variables.plan import HOST_LINK

V = 4 * 10_000


def hosted(read, fill=1.0):
    return sc.Variables(np.full(10_000, fill, np.float32), placement=sc.OnHost(), read=read)


def test_without_a_cache_each_call_reads():
    total = sc.step(lambda state: state.sum())
    with session("8"), watching() as moved:
        value = hosted(sc.Read(cache=None))
        for _ in range(3):
            total(value)
    assert [call[HOST_LINK] for call in moved.calls] == [V] * 3


def test_a_failing_step_does_not_lose_the_next_read():
    @sc.step(carry="state", static_argnames="fail")
    def step(state, fail=False):
        if fail:
            raise RuntimeError("in the trace")
        return state + 1

    for read in (sc.Read(), sc.Read(cache="device")):
        with session("8"):
            value = hosted(read)
            step(value)
            with pytest.raises(RuntimeError):
                step(value, fail=True)
            step(value)
            np.testing.assert_array_equal(value.value, 3)


# ---- the oracle ------------------------------------------------------------------------------

READS = (sc.Read(), sc.Read(cache="device"))


def numbered(number):
    """A value whose every element is the number of its version."""
    return {"a": np.full(5_003, number, np.float32), "b": np.full((), number, np.int32)}


def number_in(tree) -> int:
    """The version that a value is of, all of it."""
    numbers = {int(x) for leaf in jax.tree.leaves(tree) for x in np.unique(np.asarray(leaf))}
    assert len(numbers) == 1, f"parts of several versions: {numbers}"
    return numbers.pop()


@sc.step(carry="state")
def count(state):
    return jax.tree.map(lambda x: x + jnp.ones((), x.dtype), state)


@sc.step
def look(state):
    return jax.tree.map(lambda x: x * jnp.ones((), x.dtype), state)


def players_toys():
    """Variables to play with."""
    kinds = [{"placement": sc.OnHost(), "read": read} for read in READS]
    return [sc.Variables(numbered(0), write=sc.Write("add"), **kind) for kind in (*kinds, {})]


class Player:
    """One who reads and writes, in a session of its own, and what it has to see from now on.

    Args:
        mesh: of the session.
        variables: to play with.
        take_turns: whether nobody else plays meanwhile.
    """

    def __init__(self, mesh, variables, *, take_turns):
        self.session, self.variables, self.take_turns = session(mesh), variables, take_turns
        self.least = [0] * len(variables)

    def play(self, action: str, which: int) -> None:
        one = self.variables[which]
        before = one.version
        with self.session:
            if action == "count":
                count(one)
                self.saw(which, before + 1)
            elif action in ("assign", "push"):
                with one._lock:
                    write = one.assign if action == "assign" else one.push
                    write(numbered(one.version + 1 if action == "assign" else 1))
                    self.saw(which, one.version)
            elif action == "value":
                seen = number_in(one.value)
                assert before <= seen <= one.version
                self.saw(which, seen)
            else:
                seen = number_in(look(one))
                assert before <= seen <= one.version
                self.saw(which, seen)
        if self.take_turns:
            assert one.version == before + (action in WRITES)

    def saw(self, which: int, seen: int) -> None:
        """Own writes are seen, and what has been seen does not go back."""
        assert seen >= self.least[which], f"{seen} after {self.least[which]}"
        self.least[which] = seen


ACTIONS = ("count", "push", "push", "assign", "value", "look", "look", "look", "look", "fail")
WRITES = ("count", "push", "assign")


def failing(one, mesh):
    def fail(state):
        raise RuntimeError("in the trace")

    with session(mesh), pytest.raises(RuntimeError):
        sc.step(fail, carry="state")(one)


@pytest.mark.slow
@pytest.mark.parametrize("mesh", ["no mesh", "1", "8"])
@pytest.mark.parametrize("seed", range(3))
def test_several_sessions_take_turns(mesh, seed):
    """The seed is in the name of the test that fails."""
    dice = random.Random(seed)
    with session(mesh):
        variables = players_toys()
    writes = [0] * len(variables)
    players = [Player(mesh, variables, take_turns=True) for _ in range(3)]
    for _ in range(300):
        player, which = dice.choice(players), dice.randrange(len(variables))
        action = dice.choice(ACTIONS)
        if action == "fail":
            if dice.random() < 0.2:
                failing(variables[which], mesh)
        else:
            player.play(action, which)
            writes[which] += action in WRITES
        assert [each.version for each in variables] == writes
    assert [number_in(each.value) for each in variables] == writes


@pytest.mark.sample
@pytest.mark.parametrize("mesh", ["no mesh", "1"])
@pytest.mark.parametrize("seed", range(4))
def test_several_threads_at_once(mesh, seed):
    """The seed is in the name of the test that fails. On one device: on CPU, programs that gather
    can deadlock where several threads launch them, under plain `jax.jit` too.
    """
    dice = random.Random(seed)
    with session(mesh):
        variables = players_toys()
        for each in variables:
            count.warm(each)
            look.warm(each)
    plans = [[(dice.choice(ACTIONS[:-1]), dice.randrange(3)) for _ in range(60)] for _ in range(4)]
    failures = []

    def work(plan):
        player = Player(mesh, variables, take_turns=False)
        try:
            for action, which in plan:
                player.play(action, which)
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=work, args=(plan,), daemon=True) for plan in plans]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(100)
    assert not any(thread.is_alive() for thread in threads), "deadlock"
    assert not failures, failures
    writes = [
        sum(w == which and a in WRITES for plan in plans for a, w in plan) for which in range(3)
    ]
    assert [each.version for each in variables] == writes
    assert [number_in(each.value) for each in variables] == writes
