"""What the processes of a pod say to all, over a service that is a dictionary."""

import contextlib
import socket
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stepcache.distributed import pod_events, service_calls
from stepcache.distributed.agreement import MAX_SIDES, Round
from stepcache.distributed.peers import peers_of
from stepcache.distributed.replicas import differing
from stepcache.distributed.service_calls import LimitedService, call_in_thread
from stepcache.errors import AgreementError, RankLostError
from stepcache.jaxcompat import coordination
from stepcache.jaxcompat.coordination import Service, Unreachable
from stepcache.link import plain
from stepcache.programs.pods.reports import (
    CallDecision,
    CallReport,
    ModuleDecision,
    ModuleReport,
    decide_on_calls,
    decide_on_modules,
)
from stepcache.programs.pods.shared_build import _merge_errors


class Names:
    """What is used of JAX's client."""

    def __init__(self):
        self.values: dict[str, bytes] = {}
        self.counts: dict[str, int] = {}
        self.lock = threading.Lock()

    def key_value_set_bytes(self, name, value):
        with self.lock:
            if name in self.values:
                raise RuntimeError(f"ALREADY_EXISTS: {name}")
            self.values[name] = value

    def key_value_increment(self, name, by):
        with self.lock:
            self.counts[name] = self.counts.get(name, 0) + by
            return self.counts[name]

    def blocking_key_value_get_bytes(self, name, milliseconds):
        while name not in self.values:
            time.sleep(0.001)
        return self.values[name]

    def key_value_dir_get_bytes(self, name):
        return [(each, self.values[each]) for each in self.values if each.startswith(name)]


CONTRIBUTIONS = st.dictionaries(st.integers(0, 300), st.sampled_from([b"", b"a", b"b"]), min_size=1)


class Watch:
    """What a round uses of the detection of losses, of one rank."""

    log_everywhere = staticmethod(lambda text, gives_up: None)

    def __init__(self, names, rank):
        self.rank, self.service = rank, Service(names)
        self.loss = SimpleNamespace(raise_if_known=lambda: None, pending_get=self.pending_get)

    @contextlib.contextmanager
    def pending_get(self, name):
        yield call_in_thread(lambda: self.service.get(name))


def exchanged(contributions, merge=None):
    """Runs an exchange of all ranks at once; returns its results by rank, and the service."""
    names, ranks = Names(), sorted(contributions)

    def take_part(rank):
        current = Round("round", ranks, Watch(names, rank), "train", "", 60.0)
        if merge is None:
            return current.gather("topic", contributions[rank])
        return current.merge("topic", contributions[rank], merge)

    with ThreadPoolExecutor(len(ranks)) as pool:
        return dict(zip(ranks, pool.map(take_part, ranks), strict=True)), names


@given(CONTRIBUTIONS)
def test_all_gather_what_each_contributes(contributions):
    results, _ = exchanged(contributions)
    assert all(each == contributions for each in results.values())


def test_a_result_is_short_where_all_contribute_the_same():
    _, names = exchanged(dict.fromkeys(range(100), b"x" * 100))
    assert len(names.values["round/topic/result"]) < 200


def test_one_rank_merges_for_all():
    merges = []

    def merge(contributions):
        merges.append(contributions)
        return b" ".join(contributions.values())

    results, _ = exchanged({2: b"two", 0: b"zero", 1: b"one"}, merge)
    assert set(results.values()) == {b"zero one two"} and len(merges) == 1


def test_a_merge_that_fails_is_an_error_on_all_ranks():
    def merge(contributions):
        raise ValueError("malformed")

    for rank in range(2):
        with pytest.raises(AgreementError, match="could not agree on train: ValueError: malformed"):
            exchanged({rank: b""}, merge)


def test_an_error_does_not_grow_with_the_missing_ranks():
    names = Names()
    current = Round("round", range(0, 4000, 2), Watch(names, 0), "train", "", 0.01)
    with pytest.raises(AgreementError, match=r"ranks 2, 4, .* did not take part"):
        current.merge("topic", b"", lambda contributions: b"")
    assert len(names.values["round/topic/result"]) < 500


def test_what_differs_does_not_grow_with_the_groups():
    """As where all ranks of a mesh hold pairs of shards that differ."""
    groups = {rank: {f"{rank // 2}": f"{rank}"} for rank in range(4000)}
    assert len(plain.pack(differing(groups))) < 500
    assert list(differing({0: {"a": "1"}, 1: {"a": "2", "b": "1"}, 2: {"b": "2"}})) == ["a", "b"]


def decided(reports):
    packed = decide_on_modules({rank: each.packed() for rank, each in reports.items()})
    return ModuleDecision.unpacked(packed), len(packed)


def module(rank, holds="", **other):
    fields = {"module": "m", "program": "p", "holds": holds, "directory": f"directory {rank}"}
    return ModuleReport(**fields | other)


def test_the_first_rank_that_has_the_program_leads():
    decision, _ = decided(
        {rank: module(rank, "disk" if rank in (2, 3) else "") for rank in range(5)}
    )
    roles = decision.roles["p"]
    assert (roles.leader, roles.compiles, roles.receivers) == (2, False, [[0, 1], [4, 4]])
    decision, _ = decided({rank: module(rank, directory="one") for rank in range(5)})
    roles = decision.roles["p"]
    assert (roles.leader, roles.compiles, roles.receivers) == (0, True, [[1, 4]])
    assert roles.shares_directory
    decision, _ = decided({rank: module(rank, "memory" if rank < 2 else "") for rank in range(4)})
    assert (decision.roles["p"].leader, decision.roles["p"].receivers) == (2, [[3, 3]])
    decision, _ = decided({rank: module(rank, "disk") for rank in range(3)})
    assert not decision.roles


def test_each_kind_of_host_has_its_own_leader():
    decision, _ = decided({rank: module(rank, program=f"p{rank % 2}") for rank in range(4)})
    assert {name: roles.leader for name, roles in decision.roles.items()} == {"p0": 0, "p1": 1}
    assert len(decision.sides) == 1


def test_a_decision_does_not_grow_with_the_ranks():
    """Also where each calls something else, lowers its rank, and passes other values."""
    for call in (lambda rank: "call", lambda rank: f"call {rank}", lambda rank: f"call {rank % 2}"):
        reports = {rank: CallReport("train", call(rank), f"{rank}") for rank in range(4000)}
        packed = decide_on_calls({rank: each.packed() for rank, each in reports.items()})
        assert len(packed) < 2000 and len(CallDecision(*plain.unpack(packed)).calls) <= MAX_SIDES
    for other in (
        lambda rank: {},
        lambda rank: {"module": f"module {rank}"},
        lambda rank: {"module": "", "error": f"rank {rank} failed"},
    ):
        decision, size = decided({rank: module(rank, **other(rank)) for rank in range(4000)})
        assert size < 2000 and len(decision.sides) <= MAX_SIDES
    errors = {rank: plain.pack(f"rank {rank} failed") for rank in range(4000)}
    assert len(_merge_errors(errors)) < 500


def test_a_call_may_be_waited_for_again():
    answers = threading.Event()
    call = call_in_thread(lambda: answers.wait(60))
    with pytest.raises(TimeoutError):
        call.result(0.01)
    answers.set()
    assert call.result(10)

    def gone():
        raise Unreachable("gone")

    with pytest.raises(Unreachable, match="gone"):
        call_in_thread(gone).result(10)


def test_a_coordinator_has_ended_only_where_it_took_connections_before(monkeypatch):
    """Where its port never takes one, JAX may have another way there."""
    state = SimpleNamespace(global_state=SimpleNamespace())
    monkeypatch.setattr(coordination, "distributed", state)
    listener = socket.create_server(("127.0.0.1", 0))
    state.global_state.coordinator_address = f"127.0.0.1:{listener.getsockname()[1]}"
    limit = time.monotonic() + 30
    with ThreadPoolExecutor() as pool:
        waiting = pool.submit(
            service_calls.wait_until_coordinator_ends, lambda: time.monotonic() > limit
        )
        connection, _ = listener.accept()
        assert not waiting.done()
        listener.close(), connection.close()
        assert waiting.result(30)
    limit = time.monotonic() + 0.5
    assert not service_calls.wait_until_coordinator_ends(lambda: time.monotonic() > limit)


def test_the_end_of_a_coordinator_is_seen_at_once(monkeypatch):
    """While the main thread computes: JAX aborts this process some tens of milliseconds later."""
    state = SimpleNamespace(global_state=SimpleNamespace())
    monkeypatch.setattr(coordination, "distributed", state)
    seconds = []
    for _ in range(5):
        listener = socket.create_server(("127.0.0.1", 0))
        state.global_state.coordinator_address = f"127.0.0.1:{listener.getsockname()[1]}"
        seen, limit = [], time.monotonic() + 30

        def watch(seen=seen, limit=limit):
            service_calls.wait_until_coordinator_ends(lambda: time.monotonic() > limit)
            seen.append(time.monotonic())

        thread = threading.Thread(target=watch)
        thread.start()
        connection, _ = listener.accept()
        listener.close(), connection.close()
        ended = time.monotonic()
        while not seen:
            sum(range(10_000))
        thread.join()
        seconds.append(seen[0] - ended)
    assert min(seconds) < 0.03, seconds


@pytest.mark.parametrize("waits_in_vain, answers", [(0, True), (3, True), (1000, False)])
def test_a_wait_that_a_suspended_process_has_missed_is_no_loss(monkeypatch, waits_in_vain, answers):
    """All the time of a suspension goes into one wait; the answer may come right after it."""
    waits = []

    class Answer:
        def result(self, seconds):
            waits.append(seconds)
            if len(waits) <= waits_in_vain:
                raise TimeoutError
            return True

    monkeypatch.setattr(service_calls, "call_in_thread", lambda call: Answer())
    limited = LimitedService(Service(None), 10.0)
    if answers:
        assert limited.put("name", b"")
        return
    with pytest.raises(Unreachable, match="within 10 s"):
        limited.put("name", b"")
    assert sum(waits) == pytest.approx(10)


def test_a_service_that_does_not_note_this_process_is_a_lost_rank_0(monkeypatch):
    answered = threading.Event()

    class Silent:
        def key_value_set_bytes(self, name, value):
            answered.wait()

    monkeypatch.setattr(coordination, "service", lambda: Service(Silent()))
    monkeypatch.setattr(pod_events, "START_SECONDS", 0.1)
    with pytest.raises(RankLostError, match="coordination service does not answer") as caught:
        peers_of(range(2))
    assert caught.value.ranks == (0,)
    answered.set()
