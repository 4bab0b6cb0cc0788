"""Which copy may serve whom: by version, by steps, and never to those who wrote since."""

import random
import threading
import weakref

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)
from moving import session, watching

import stepcache as sc
from stepcache.variables.copies import Copies
from stepcache.variables.plan import HOST_LINK

V = 4 * 10_000


class Session:
    """Stands for one: something that is known by its identity, and weakly."""


class Store:
    """A value somewhere else, and the copies of it that a process keeps, as a master uses them."""

    def __init__(self, policy):
        self.version, self.fetches, self.copies = 0, 0, Copies(policy)

    def read(self, reader=None) -> int:
        """The version that a reader is given."""
        copy, _ = self.copies.serving(reader, self.version)
        if copy is not None:
            self.copies.served(copy, self.version)
            return copy.value
        self.fetches += 1
        self.copies.keep(self.version, self.version)
        return self.version

    def write(self, writer=None) -> None:
        self.version += 1
        self.copies.saw(writer, self.version)

    def why(self, reader=None) -> str:
        return self.copies.serving(reader, self.version)[1]


# ---- the policy, without arrays --------------------------------------------------------------


def test_nothing_is_kept_without_a_cache():
    store = Store(sc.Read())
    assert [store.read() for _ in range(3)] == [0, 0, 0]
    assert store.fetches == 3
    assert store.why() == "no copy is kept"


def test_a_copy_serves_while_its_version_is_current():
    store = Store(sc.Read(cache="device"))
    assert store.why() == "there is no copy yet"
    assert [store.read() for _ in range(3)] == [0, 0, 0]
    assert store.fetches == 1 and store.why() == "a copy of version 0 is there"
    store.write(Session())
    assert store.why() == "the copy has version 0, and 1 is current"
    assert [store.read() for _ in range(3)] == [1, 1, 1]
    assert store.fetches == 2


@pytest.mark.parametrize("k", [1, 2, 5])
def test_max_staleness_counts_the_steps_after_the_one_that_found_it_current(k):
    store, other = Store(sc.Read(cache="device", max_staleness=k)), Session()
    for _ in range(4):
        store.read()
    store.write(other)
    assert "which max_staleness allows" in store.why()
    assert [store.read() for _ in range(k)] == [0] * k
    assert f"it has served {k} step" in store.why()
    assert store.read() == 1
    assert store.fetches == 2
    for _ in range(3):
        store.write(other)
    assert [store.read() for _ in range(k + 1)] == [1] * k + [4]


def test_further_writes_do_not_make_a_stale_copy_serve_longer():
    store, other = Store(sc.Read(cache="device", max_staleness=2)), Session()
    store.read()
    seen = []
    for _ in range(6):
        store.write(other)
        seen.append(store.read())
    assert seen == [0, 0, 3, 3, 3, 6]


def test_a_look_on_another_thread_does_not_hide_a_write():
    """It looks up what the session knows, and notes it later."""
    store, hashes, wrote = Store(sc.Read(cache="device", max_staleness=9)), [], threading.Event()

    class Slow:
        def __hash__(self):
            if threading.current_thread() is looker:
                hashes.append(0)
                if len(hashes) == 2:
                    writer.start()
                    wrote.wait(0.5)
            return 0

    session = Slow()
    store.read(session)

    def write():
        store.write(session)
        wrote.set()

    writer = threading.Thread(target=write)
    looker = threading.Thread(target=lambda: store.copies.saw(session, 0))
    looker.start()
    looker.join(60)
    writer.join(60)
    assert store.version == 1 and store.read(session) == 1


def test_the_session_that_wrote_reads_its_own():
    store, mine, yours = Store(sc.Read(cache="device", max_staleness=9)), Session(), Session()
    assert store.read(mine) == store.read(yours) == 0
    store.write(mine)
    assert store.read(yours) == 0
    assert "this session wrote it" in store.why(mine)
    assert store.read(mine) == 1
    assert store.read(yours) == 1, "the copy that the other fetched is newer"
    store.write(None)
    assert store.read(mine) == store.read(yours) == 1
    assert store.read(None) == 2, "outside of sessions there is a writer too"


def test_the_session_that_wrote_first_may_miss_what_others_wrote_later():
    store, mine, yours = Store(sc.Read(cache="device", max_staleness=9)), Session(), Session()
    store.write(mine)
    assert store.read(mine) == 1
    store.write(yours)
    assert store.read(mine) == 1
    assert store.read(yours) == 2


def test_a_session_that_looked_is_not_taken_back():
    store, mine, yours = Store(sc.Read(cache="device", max_staleness=9)), Session(), Session()
    store.read(mine)
    store.write(yours)
    store.copies.saw(mine, 1)
    assert "or has seen it" in store.why(mine)
    assert "allows" in store.why(None)
    assert store.read(mine) == 1


def test_the_last_use_of_a_stale_copy_is_known():
    copies = Copies(sc.Read(cache="device", max_staleness=2))
    copies.keep(0, "value")
    copy, _ = copies.serving(None, 0)
    assert not copies.is_last_use(copy, 0), "it is current"
    assert not copies.is_last_use(copy, 1)
    copies.served(copy, 1)
    assert copies.is_last_use(copy, 1)
    copies.served(copy, 1)
    assert copies.serving(None, 1)[0] is None


def test_an_older_value_that_arrives_late_does_not_replace_a_newer():
    """Two threads that fetch from elsewhere may end in the other order."""
    copies = Copies(sc.Read(cache="device", max_staleness=9))
    copies.keep(2, "new")
    copies.keep(1, "old")
    assert copies.serving(None, 2)[0].value == "new"
    copies.saw(mine := Session(), 5)
    copies.saw(mine, 4)
    copies.keep(4, "four")
    assert copies.serving(mine, 5)[0] is None


def test_drop_lets_go_of_everything():
    copies = Copies(sc.Read(cache="device"))
    copies.keep(0, "value")
    copies.drop()
    assert copies.serving(None, 0) == (None, "there is no copy yet")


def test_sessions_are_not_kept_alive():
    copies, session = Copies(sc.Read(cache="device")), Session()
    copies.saw(session, 1)
    gone = weakref.ref(session)
    del session
    assert gone() is None


POLICIES = st.one_of(
    st.just(sc.Read()),
    st.builds(
        sc.Read,
        cache=st.just("device"),
        max_staleness=st.sampled_from([0, 0, 1, 2, 5]),
    ),
)


class StoreOracle(RuleBasedStateMachine):
    """Copies against what their policy promises, in words that do not mention copies."""

    @initialize(policy=POLICIES)
    def start(self, policy):
        self.policy, self.store = policy, Store(policy)
        self.sessions = [Session(), Session(), None]
        self.seen, self.wrote = [0] * 3, [0] * 3
        self.stale_steps = 0

    @rule(who=st.integers(0, 2))
    def write(self, who):
        self.store.write(self.sessions[who])
        self.wrote[who] = self.store.version

    @rule(who=st.integers(0, 2))
    def read(self, who):
        fetches = self.store.fetches
        seen = self.store.read(self.sessions[who])
        assert seen >= self.wrote[who], "an own write is not seen"
        assert seen >= self.seen[who], "what is seen goes back"
        assert seen <= self.store.version
        self.seen[who] = seen
        if seen == self.store.version:
            self.stale_steps = 0
        else:
            self.stale_steps += 1
            assert self.policy.cache is not None
            assert self.stale_steps <= self.policy.max_staleness
        if self.policy.cache is None:
            assert self.store.fetches == fetches + 1

    @invariant()
    @precondition(lambda self: hasattr(self, "store"))
    def one_fetch_serves_a_version(self):
        if self.policy.cache is not None:
            assert self.store.fetches <= self.store.version + 1


def test_no_copy_is_older_than_its_policy_allows():
    run_state_machine_as_test(StoreOracle, settings=settings(stateful_step_count=30))


# ---- the policy, with arrays -----------------------------------------------------------------


def hosted(read, fill=1.0):
    return sc.Variables(np.full(10_000, fill, np.float32), placement=sc.OnHost(), read=read)


def test_without_a_cache_each_call_reads():
    total = sc.step(lambda state: state.sum())
    with session("8"), watching() as moved:
        value = hosted(sc.Read(cache=None))
        for _ in range(3):
            total(value)
    assert [call[HOST_LINK] for call in moved.calls] == [V] * 3


def test_a_newer_value_is_read_in_the_background_for_the_step_after_the_last_late_one():
    total = sc.step(lambda state: state.sum())
    mine, yours = session("8"), session("8")
    with mine:
        value = hosted(sc.Read(cache="device", max_staleness=2))
        total(value)
    with yours:
        value.assign(np.full(10_000, 3, np.float32))
    with mine, watching() as moved:
        (now,) = total.explain(value).plan.transfers
        assert now.route == "none" and float(total(value)) == 10_000
        now, ahead = total.explain(value).plan.transfers
        assert (now.route, now.version) == ("none", 0)
        assert (ahead.route, ahead.version) == ("gather", 1)
        assert ahead.why.endswith("in the background for the next step")
        assert float(total(value)) == 10_000
        assert [call.get(HOST_LINK) for call in moved.calls] == [V]
        (now,) = total.explain(value).plan.transfers
        assert (now.route, now.why) == ("none", "a copy of version 1 is there")
        assert float(total(value)) == 30_000 and len(moved.calls) == 1


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


@pytest.mark.parametrize("k", [1, 3])
def test_a_stale_copy_serves_so_many_steps_more(k):
    """After a write by another session, and on the host, where it leaves nothing on the devices."""
    look = sc.step(lambda state: state.max())
    mine, yours = session("8"), session("8")
    with mine:
        value = sc.Variables(
            np.zeros(10_000, np.float32),
            placement=sc.OnHost(update="host"),
            read=sc.Read(cache="device", max_staleness=k),
            write=sc.Write(mode="add"),
        )
        look(value)
    with yours:
        value.push(np.ones(10_000, np.float32))
    with mine, watching() as moved:
        planned, *ahead = look.explain(value).plan.transfers
        assert (planned.route, planned.version, value.version) == ("none", 0, 1)
        assert len(ahead) == (k == 1)
        assert "which max_staleness allows" in planned.why
        assert [float(look(value)) for _ in range(k + 2)] == [0.0] * k + [1.0, 1.0]
    assert len(moved.calls) == 1
    with yours, watching() as moved:
        value.push(np.ones(10_000, np.float32))
        assert look.explain(value).plan.transfers[0].route == "gather"
        assert float(look(value)) == 2, "it wrote that"
    assert len(moved.calls) == 1
    with mine:
        value.push(np.ones(10_000, np.float32))
    with yours:
        assert float(look(value)) == 2, "it need not know"
        np.testing.assert_array_equal(value.value, 3)
        assert float(look(value)) == 3, "but once it has looked it does"


# ---- the oracle ------------------------------------------------------------------------------

READS = (
    sc.Read(),
    sc.Read(cache="device"),
    sc.Read(cache="device", max_staleness=1),
    sc.Read(cache="device", max_staleness=3),
)


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


def players_toys(reads=READS):
    """Variables to play with: values in this process are stale only where the host updates them, as
    all others have been on the devices when they are written."""
    places = [sc.OnHost(update="host" if read.max_staleness else "device") for read in reads]
    return [
        sc.Variables(numbered(0), placement=placement, read=read, write=sc.Write(mode="add"))
        for placement, read in zip(places, reads, strict=True)
    ]


class Player:
    """One who reads and writes, in a session of its own, and what it has to see from now on.

    Args:
        mesh: of the session.
        variables: to play with.
        looks: the version of each at each look, and the one that was seen, to be shared by players
            who take turns; None where they do not.
    """

    def __init__(self, mesh, variables, looks=None):
        self.session, self.variables, self.looks = session(mesh), variables, looks
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
                self.check_age(which, before, seen)
                self.saw(which, seen)
        if self.looks is not None:
            assert one.version == before + (action in WRITES)

    def saw(self, which: int, seen: int) -> None:
        """Own writes are seen, and what has been seen does not go back."""
        assert seen >= self.least[which], f"{seen} after {self.least[which]}"
        self.least[which] = seen

    def check_age(self, which: int, before: int, seen: int) -> None:
        policy, now = self.variables[which].read, self.variables[which].version
        assert seen <= now and (policy.max_staleness or before <= seen)
        if self.looks is not None:  # A copy serves so many steps after one at which it was current.
            looks = self.looks[which]
            looks.append((now, seen))
            assert seen >= looks[max(0, len(looks) - 1 - policy.max_staleness)][0]


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
        variables.append(sc.Variables(numbered(0), write=sc.Write(mode="add")))
    looks, writes = [[] for _ in variables], [0] * len(variables)
    players = [Player(mesh, variables, looks) for _ in range(3)]
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
    # Without sessions all are one, which wrote whatever was written.
    is_stale = any(seen < now for each in looks for now, seen in each)
    assert is_stale is (mesh != "no mesh"), "nothing was ever stale: nothing was tested"
    assert [number_in(each.value) for each in variables] == writes


@pytest.mark.sample
@pytest.mark.parametrize("mesh", ["no mesh", "1"])
@pytest.mark.parametrize("seed", range(4))
def test_several_threads_at_once(mesh, seed):
    """The seed is in the name of the test that fails. On one device: on CPU, programs that gather
    can deadlock where several threads launch them, under plain `jax.jit` too.
    """
    dice = random.Random(seed)
    reads = dice.sample(READS, 3)
    with session(mesh):
        variables = players_toys(reads)
        for each in variables:
            count.warm(each)
            look.warm(each)
    plans = [[(dice.choice(ACTIONS[:-1]), dice.randrange(3)) for _ in range(60)] for _ in range(4)]
    failures = []

    def work(plan):
        player = Player(mesh, variables)
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
