"""What the processes of a pod say to all, over a service that is a dictionary."""

import threading
import time
import traceback
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stepcache.errors import AgreementError, RankLostError
from stepcache.jaxcompat.coordination import Service, Unreachable
from stepcache.link import plain
from stepcache.pods.replicas import _differing
from stepcache.pods.rounds import MAX_SIDES, Round
from stepcache.pods.watch import Watch
from stepcache.programs.together import Decision, Report, Roles, decide


class Names:
    """What is used of JAX's client."""

    def __init__(self):
        self.values: dict[str, bytes] = {}
        self.counts: dict[str, int] = {}
        self.lock = threading.Lock()

    def key_value_set_bytes(self, name, value, replace=False):
        with self.lock:
            if name in self.values and not replace:
                raise RuntimeError(f"ALREADY_EXISTS: {name}")
            self.values[name] = value

    def key_value_increment(self, name, by):
        with self.lock:
            self.counts[name] = self.counts.get(name, 0) + by
            return self.counts[name]

    def blocking_key_value_get_bytes(self, name, milliseconds):
        deadline = time.monotonic() + milliseconds / 1000
        while name not in self.values:
            if time.monotonic() > deadline:
                raise RuntimeError("DEADLINE_EXCEEDED")
            time.sleep(0.001)
        return self.values[name]

    def key_value_delete(self, name):
        with self.lock:
            for each in [x for x in self.values if x.startswith(name)]:
                del self.values[each]

    def key_value_dir_get_bytes(self, name):
        return [(each, self.values[each]) for each in self.values if each.startswith(name)]


CONTRIBUTIONS = st.dictionaries(st.integers(0, 300), st.sampled_from([b"", b"a", b"b"]), min_size=1)


def watching(names, rank):
    """What a round uses of the detection of losses, of one rank."""
    return SimpleNamespace(
        rank=rank,
        service=Service(names),
        raise_if_lost=lambda: None,
        look_for_ended=lambda: None,
        log_everywhere=lambda text, gives_up: None,
    )


def exchanged(contributions, merge=None):
    """Runs an exchange of all ranks at once; returns its results by rank, and the service."""
    names, ranks = Names(), sorted(contributions)

    def take_part(rank):
        current = Round("round", ranks, watching(names, rank), "train", "", 60.0)
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
    current = Round("round", range(0, 4000, 2), watching(names, 0), "train", "", 0.01)
    with pytest.raises(AgreementError, match=r"ranks 2, 4, .* did not take part"):
        current.merge("topic", b"", lambda contributions: b"")
    assert len(names.values["round/topic/result"]) < 500


def test_what_differs_does_not_grow_with_the_groups():
    """As where all ranks of a mesh hold pairs of shards that differ."""
    groups = {rank: {f"{rank // 2}": f"{rank}"} for rank in range(4000)}

    def differing(groups):
        return _differing({rank: plain.pack(each) for rank, each in groups.items()})

    assert len(differing(groups)) < 500
    found = plain.unpack(differing({0: {"a": "1"}, 1: {"a": "2", "b": "1"}, 2: {"b": "2"}}))
    assert list(found) == ["a", "b"]


def decided(reports):
    packed = decide({rank: plain.pack(each) for rank, each in reports.items()})
    decision = Decision(*plain.unpack(packed))
    roles = {program: Roles(*each) for program, each in decision.roles.items()}
    return decision._replace(roles=roles), len(packed)


def report(rank, holds="", **other):
    fields = {"module": "m", "program": "p", "holds": holds, "directory": f"directory {rank}"}
    return Report(**{"label": "train", "call": "call", "values": "same"} | fields | other)


def test_the_first_rank_that_has_the_program_leads():
    decision, _ = decided(
        {rank: report(rank, "disk" if rank in (2, 3) else "") for rank in range(5)}
    )
    roles = decision.roles["p"]
    assert (roles.leader, roles.compiles, roles.receivers) == (2, False, [[0, 1], [4, 4]])
    decision, _ = decided({rank: report(rank, directory="one") for rank in range(5)})
    roles = decision.roles["p"]
    assert (roles.leader, roles.compiles, roles.receivers) == (0, True, [[1, 4]])
    assert roles.shares_directory
    decision, _ = decided({rank: report(rank, "memory" if rank < 2 else "") for rank in range(4)})
    assert (decision.roles["p"].leader, decision.roles["p"].receivers) == (2, [[3, 3]])
    decision, _ = decided({rank: report(rank, "disk") for rank in range(3)})
    assert not decision.roles


def test_each_kind_of_host_has_its_own_leader():
    decision, _ = decided({rank: report(rank, program=f"p{rank % 2}") for rank in range(4)})
    assert {name: roles.leader for name, roles in decision.roles.items()} == {"p0": 0, "p1": 1}
    assert decision.differing == ""


def test_a_decision_does_not_grow_with_the_ranks():
    """Also where each calls something else, lowers its rank, and passes other values."""
    for other in (
        lambda rank: {"values": f"{rank}"},
        lambda rank: {"call": f"call {rank}"},
        lambda rank: {"call": f"call {rank % 2}"},
        lambda rank: {"module": f"module {rank}"},
        lambda rank: {"module": "", "program": "", "error": f"rank {rank} failed"},
    ):
        decision, size = decided({rank: report(rank, **other(rank)) for rank in range(4000)})
        assert size < 2000 and decision.differing and 1 < len(decision.sides) <= MAX_SIDES


def test_who_announces_itself_is_waited_for():
    names = Names()
    late, early = (Round("round", (0, 1), watching(names, n), "train", "", 0.2) for n in (1, 0))
    late.announce()

    def come():
        time.sleep(1.5)
        return late.merge("topic", b"late", lambda found: found[1])

    with ThreadPoolExecutor() as pool:
        coming = pool.submit(come)
        assert early.merge("topic", b"early", lambda found: found[1]) == b"late"
        assert coming.result() == b"late"


def test_chunks_arrive_whole_and_are_freed_by_the_last_receiver(monkeypatch):
    monkeypatch.setattr("stepcache.pods.rounds.CHUNK_BYTES", 10)
    names, data = Names(), bytes(range(256))
    rounds = [Round("round", range(3), watching(names, n), "train", "", 9.0) for n in range(3)]
    rounds[0].send("program", data, 2)
    assert rounds[1].receive("program", 0) == data
    assert any("/program/" in name for name in names.values)
    assert rounds[2].receive("program", 0) == data
    assert not any("/program/" in name for name in names.values)


def test_what_some_explain_may_be_larger_than_a_message(monkeypatch):
    """As the text of a module."""
    monkeypatch.setattr("stepcache.pods.rounds.CHUNK_BYTES", 10)
    names = Names()

    def take_part(rank):
        current = Round("round", range(3), watching(names, rank), "train", "", 9.0)
        return current.explained_by(
            "text", (0, 2), lambda: f"{rank}" + "".join(map(chr, range(99)))
        )

    with ThreadPoolExecutor(3) as pool:
        found = list(pool.map(take_part, range(3)))
    assert found[0] == found[1] == found[2] and sorted(found[0]) == [0, 2]
    assert found[0][2] == "2" + "".join(map(chr, range(99)))
    assert not any("/text/" in name for name in names.values), "it is freed"


def test_a_loss_is_shown_without_the_call_that_failed_of_it():
    watch = object.__new__(Watch)
    watch.rank, watch.service = 1, Service(Names())
    watch.lost, watch._noting = threading.Event(), threading.Lock()
    watch._error, watch._failure = None, ""
    round = Round("round", (0, 1), watch, "train", "", 1.0)
    with pytest.raises(RankLostError, match="rank 0 of the pod is lost") as raised:
        with round._losses_raised():
            raise Unreachable("a process is lost")
    assert "Unreachable" not in "".join(traceback.format_exception(raised.value))


def test_a_name_has_one_value_unless_it_is_replaced():
    service = Service(Names())
    assert service.put("name", b"1") and not service.put("name", b"2")
    assert service.get("name", 1.0) == b"1" and service.get("nothing", 0.01) is None
    assert service.put("name", b"3", replace=True) and service.get("name", 1.0) == b"3"
    assert service.listed("na") == {"me": b"3"}
