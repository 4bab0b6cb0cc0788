"""Which copy may serve whom: by version, by steps, and never to those who wrote since."""

import threading
import weakref

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

import stepcache as sc
from stepcache.serving.copies import Copies


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
