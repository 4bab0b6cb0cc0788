"""What the processes of a pod say to all, over a service that is a dictionary."""

import socket
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stepcache.jaxcompat import coordination
from stepcache.jaxcompat.coordination import Service, Unreachable, asked
from stepcache.programs.pods.stand import OF_ONE, Stand, brief

VOICES = st.dictionaries(st.integers(0, 300), st.sampled_from([b"", b"a", b"b"]))


class Names:
    """What is used of JAX's client."""

    def __init__(self):
        self.values: dict[str, bytes] = {}
        self.counts: dict[str, int] = {}

    def key_value_set_bytes(self, name, value):
        if name in self.values:
            raise RuntimeError(f"ALREADY_EXISTS: {name}")
        self.values[name] = value

    def key_value_increment(self, name, by):
        self.counts[name] = self.counts.get(name, 0) + by
        return self.counts[name]

    def key_value_dir_get_bytes(self, name):
        return [(each, self.values[each]) for each in self.values if each.startswith(name)]


@given(VOICES)
def test_an_outcome_is_what_was_said(voices):
    found = coordination.unpack_outcome(coordination.pack_outcome(voices=voices, why="\udcff"))
    assert found == {"voices": voices, "why": "\udcff"} and list(found["voices"]) == sorted(voices)


def test_an_outcome_is_short_where_all_say_the_same():
    voices = dict.fromkeys(range(10_000), b"x" * 100)
    assert len(coordination.pack_outcome(voices=voices)) < 100


def outcome_of_saying(said, shorten):
    names = Names()
    for turn, rank in enumerate(said):
        assert Service(names).say("place", rank, len(said), said[rank], shorten) == turn + 1
        assert ("place/outcome" in names.values) == (turn + 1 == len(said))
    assert Service(names).said("place") == dict(sorted(said.items()))
    return coordination.unpack_outcome(names.values["place/outcome"])


def test_whoever_comes_last_shortens_it_for_all():
    said = {2: b"one", 0: b"two", 1: b"three"}
    assert outcome_of_saying(said, None) == {"voices": said}
    short = outcome_of_saying(said, lambda voices: {rank: voices[rank][:1] for rank in voices})
    assert short == {"voices": {0: b"t", 1: b"t", 2: b"o"}}


def test_where_that_fails_all_are_told():
    assert "ValueError" in outcome_of_saying({0: b"", 1: b"no stand"}, brief)["failed"]


def test_what_one_process_says_of_itself_alone_is_not_read_by_all():
    def stand(code, directory):
        return Stand(
            "train", "call", code, "host", directory, True, "program", True, "values"
        ).packed()

    # A code that captured the rank; directories that two ranks share.
    said = {rank: stand(f"code {rank}", f"directory {rank // 2}") for rank in range(4)}
    heard = {rank: Stand.unpacked(voice) for rank, voice in brief(said).items()}
    assert {each.code for each in heard.values()} == {OF_ONE}
    assert [heard[rank].directory for rank in range(4)] == [f"directory {n}" for n in (0, 0, 1, 1)]
    said = {rank: stand("code", f"directory {rank}") for rank in range(1000)}
    assert len(set(brief(said).values())) == 1


def test_a_call_may_be_waited_for_again():
    answers = threading.Event()
    call = asked(lambda: answers.wait(60))
    with pytest.raises(TimeoutError):
        call.result(0.01)
    answers.set()
    assert call.result(10)

    def gone():
        raise Unreachable("gone")

    with pytest.raises(Unreachable, match="gone"):
        asked(gone).result(10)


def test_a_coordinator_has_ended_only_where_it_took_connections_before(monkeypatch):
    """Where its port never takes one, JAX may have another way there."""
    state = SimpleNamespace(global_state=SimpleNamespace())
    monkeypatch.setattr(coordination, "distributed", state)
    listener = socket.create_server(("127.0.0.1", 0))
    state.global_state.coordinator_address = f"127.0.0.1:{listener.getsockname()[1]}"
    limit = time.monotonic() + 30
    with ThreadPoolExecutor() as pool:
        waiting = pool.submit(
            coordination.wait_until_coordinator_ends, lambda: time.monotonic() > limit
        )
        connection, _ = listener.accept()
        assert not waiting.done()
        listener.close(), connection.close()
        assert waiting.result(30)
    limit = time.monotonic() + 0.5
    assert not coordination.wait_until_coordinator_ends(lambda: time.monotonic() > limit)
