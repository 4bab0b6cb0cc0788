"""What the processes of a pod say to all, over a service that is a dictionary."""

import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stepcache.errors import AgreementError, RankLostError
from stepcache.events import Change
from stepcache.jaxcompat.coordination import Service, Unreachable
from stepcache.link.processes import Process
from stepcache.pods.rounds import MAX_SIDES, Peers, Round, _packed, _sides
from stepcache.pods.watch import Watch
from stepcache.programs.together import givers


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


def peers_over(names, rank, ranks):
    """Peers whose detection of losses sees none."""
    watch = object.__new__(Watch)
    watch.service, watch.rank, watch.rounds = Service(names), rank, {}
    watch.lost, watch._noting = threading.Event(), threading.Lock()
    watch._error, watch._failure = None, ""
    watch.look_for_ended = lambda: None
    return Peers(tuple(ranks), watch, 9.0)


def round_over(names, rank, ranks, seconds=9.0):
    return Round(peers_over(names, rank, ranks), "round", "train", "", seconds)


def at_once(ranks, take_part):
    """What all ranks return who take part at the same time, by rank; and the service."""
    names = Names()
    with ThreadPoolExecutor(len(ranks)) as pool:
        returned = pool.map(lambda rank: take_part(names, rank), ranks)
        return dict(zip(ranks, returned, strict=True)), names


@given(st.dictionaries(st.integers(0, 20), st.dictionaries(st.sampled_from("ab"), st.text())))
def test_all_know_the_entries_that_differ(entries):
    def take_part(names, rank):
        return round_over(names, rank, sorted(entries)).compare("topic", entries[rank])

    results, _ = at_once(sorted(entries), take_part) if entries else ({}, None)
    for differing in results.values():
        for name in "ab":
            values = {rank: each[name] for rank, each in entries.items() if name in each}
            sides = differing.get(name, [])
            assert bool(sides) == (len(set(values.values())) > 1)
            assert all(values[rank] == value for value, ranks in sides for rank in ranks)
            sizes = [len(ranks) for _, ranks in sides]
            assert sizes == sorted(sizes, reverse=True)
            assert sum(sizes) in (0, len(values)) or len(sides) == MAX_SIDES


def test_a_result_is_short_where_all_have_the_same():
    _, names = at_once(range(100), lambda names, rank: compared(names, rank, "x" * 100))
    assert len(names.values["round/topic/result"]) < 50


def compared(names, rank, value):
    return round_over(names, rank, range(100)).compare("topic", {"value": value})


def test_an_error_of_very_many_missing_ranks_is_short():
    current = round_over(Names(), 0, range(0, 4000, 2), 0.01)
    with pytest.raises(AgreementError, match=r"ranks 2, 4, .* did not take part") as raised:
        current.compare("topic", {})
    assert len(raised.value.sides[0]) == 1999 and len(raised.value.what) < 500


def test_what_differs_grows_with_the_ranks_by_their_numbers_alone():
    """Also where all have other values, or hold pairs of shards that differ."""
    values = {rank: {"same": "", "two": "x" * (rank % 2), "all": f"{rank}"} for rank in range(4000)}
    assert len(_packed(_sides(values))) < 3 * 4000
    sides = _sides(values)
    assert list(sides) == ["two", "all"] and len(sides["all"]) == MAX_SIDES
    pairs = _sides({rank: {f"{rank // 2}": f"{rank}"} for rank in range(4000)})
    assert len(pairs) == MAX_SIDES and pairs["3"] == [("6", [6]), ("7", [7])]


def test_the_first_rank_that_has_the_program_gives_it():
    assert givers("p", [("p ", (0, 1, 4)), ("p disk", (2, 3))]) == (2, [0, 1, 4], False)
    assert givers("p", [("p ", (0, 1, 2))]) == (0, [1, 2], True)
    assert givers("p", [("p memory", (0, 1)), ("p ", (2, 3))]) == (2, [3], True)
    for holds in ("disk", "memory"):
        assert givers("p", [(f"p {holds}", (0, 1))]) == (-1, [], False)


def test_one_rank_of_each_kind_of_host_gives_its_program():
    sides = [("p ", (0, 2)), ("q ", (1, 3, 4))]
    assert givers("p", sides) == (0, [2], True) and givers("q", sides) == (1, [3, 4], True)


def test_who_announces_itself_is_waited_for():
    def take_part(names, rank):
        current = round_over(names, rank, (0, 1), 0.2)
        if rank:
            current.announce()
            time.sleep(1.5)
        else:
            time.sleep(0.1)
        return current.compare("topic", {"value": "early" if rank == 0 else "late"})

    results, _ = at_once((0, 1), take_part)
    assert results[0] == results[1] == {"value": [["early", [0]], ["late", [1]]]}


def test_chunks_arrive_whole_and_are_freed_by_the_last_receiver(monkeypatch):
    monkeypatch.setattr("stepcache.pods.rounds.CHUNK_BYTES", 10)
    names, data = Names(), bytes(range(256))
    rounds = [round_over(names, rank, range(3)) for rank in range(3)]
    rounds[0].send("program", data, 2)
    assert rounds[1].receive("program", 0) == data
    assert any("/program/" in name for name in names.values)
    assert rounds[2].receive("program", 0) == data
    assert not any("/program/" in name for name in names.values)


def test_what_some_explain_may_be_larger_than_a_message(monkeypatch):
    """As the text of a module. The first rank of each side explains, and all compare."""
    monkeypatch.setattr("stepcache.pods.rounds.CHUNK_BYTES", 10)
    text = "".join(map(chr, range(99)))

    def take_part(names, rank):
        def changes(usual, other):
            return [Change("value", text, usual, other)]

        sides = [[("", (1, 2)), ("", (0,))]]
        with pytest.raises(AgreementError) as raised:
            round_over(names, rank, range(3)).raise_differing(
                "they differ:", sides, f"{text}{rank}", changes, "hint"
            )
        return raised.value

    errors, names = at_once(range(3), take_part)
    for error in errors.values():
        assert error.changes == (Change("value", text, f"{text}1", f"{text}0"),)
        assert error.sides == ((1, 2), (0,))
        assert error.what == f"they differ:\n  {text}: rank 0 {text}0; ranks 1–2 {text}1"
    assert not any("/explained/" in name for name in names.values), "it is freed"


def test_a_loss_is_shown_without_the_call_that_failed_of_it(monkeypatch):
    monkeypatch.setattr("stepcache.pods.hang._latest", None)
    peers = peers_over(Names(), 1, (0, 1))
    with pytest.raises(RankLostError, match="rank 0 of the pod is lost") as raised:
        with peers.round("train"):
            raise Unreachable("a process is lost")
    assert raised.value.__cause__ is None and raised.value.__suppress_context__
    assert raised.value.where == "rank 1, no call of a step"


def test_a_killed_process_is_named_though_it_takes_a_while_to_end(monkeypatch):
    """After a collective has failed: its memory is freed before its parent hears of its end."""
    peers, looks = peers_over(Names(), 1, (0, 1, 2)), iter([False, False, True])
    watch = peers.watch
    del watch.look_for_ended
    watch._closed, watch.neighbours = False, {2: Process.current()}
    monkeypatch.setattr(Process, "has_ended", lambda process: next(looks))

    def append(kind, *, ranks=(), text=""):
        if kind == "lost":
            watch.note_loss(ranks, text)

    watch._append = append
    with pytest.raises(RankLostError, match="rank 2 of the pod is lost: its process has ended"):
        watch.raise_if_lost_by(RuntimeError("gloo: connection closed by peer"))


def test_a_name_has_one_value_unless_it_is_replaced():
    service = Service(Names())
    assert service.put("name", b"1") and not service.put("name", b"2")
    assert service.get("name", 1.0) == b"1" and service.get("nothing", 0.01) is None
    assert service.put("name", b"3", replace=True) and service.get("name", 1.0) == b"3"
    assert service.listed("na") == {"me": b"3"}
