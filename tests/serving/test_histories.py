"""What several processes see of variables has one order, whatever befalls servers and messages."""

import contextlib
import os
import random
import signal
import time

import pytest

from tests.serving.faulty import FaultyNetwork
from tests.serving.histories import Operation, Recorder, violations
from tests.serving.servers import LocalServer


def W(place, *times):
    return Operation(False, frozenset([place]), *times)


def R(places, *times):
    return Operation(True, frozenset(places), *times)


@pytest.mark.parametrize(
    "history, expected",
    [
        ([W(1, 0, 1), R([1], 2, 3)], None),
        ([W(1, 0, 9), R([], 1, 2), R([1], 3, 4)], None),
        ([W(1, 0), R([1], 1, 2), R([1], 3, 4)], None),
        ([W(1, 0, 1), R([], 2, 3)], "has not seen"),
        ([W(1, 0), R([1], 1, 2), R([], 3, 4)], "has not seen"),
        ([W(1, 5, 6), R([1], 1, 2)], "before they were written"),
        ([W(1, 0, 9), W(2, 0, 9), R([1], 1, 8), R([2], 1, 8)], "another order"),
    ],
)
def test_the_check_itself(history, expected):
    found = violations(history)
    assert not found if expected is None else expected in "; ".join(found)


def check(directory, address, disturb, seed, count=100, victim=True, staleness=0):
    """Three processes record what they see while something disturbs them.

    Args:
        directory: of their files.
        address: of the server.
        disturb: does it, given a random generator and the processes.
        seed: of the generator.
        count: how many pushes the first two do.
        victim: whether there is the third, which is killed at last; or the script, with its
            arguments, that runs the third.
        staleness: of their reads.
    """
    paths = [directory / f"history {number}" for number in range(3)]
    recorders = [Recorder(paths[n], address, "set", n * count, count, staleness) for n in range(2)]
    under = victim if isinstance(victim, tuple) else ()
    row = (paths[2], address, "set", 2 * count, 10 * count)
    extra = Recorder(*row, under=under) if victim else None
    disturb(random.Random(seed), recorders, extra)
    histories = [each.history() for each in recorders]
    lost = frozenset()
    if extra is not None:
        extra.kill()
        histories.append(extra.history())
        lost = frozenset(range(2 * count, 12 * count))
    history = [each for of_one in histories for each in of_one]
    assert sum(each.end < float("inf") for each in history if not each.is_read) >= 2 * count
    assert not violations(history, lost)


def wait_until_known(server, count):
    """Until a snapshot knows so many clients: after a crash, the server waits less for others."""
    with server.connect() as connection:
        known = 0
        while known < count:
            rows = [connection.status(host).clients for host in range(server.hosts)]
            known = max(sum(saved > 0 for *_, saved in each) for each in rows)
            time.sleep(0.01)


@pytest.mark.slow
@pytest.mark.seeds(40)
def test_stops_of_the_server_and_of_a_client(server, tmp_path, seed):
    def disturb(moment, recorders, extra):
        for pid in (server.pid, recorders[0].child.pid, server.pid):
            may_have_ended = ProcessLookupError if pid != server.pid else ()
            with contextlib.suppress(may_have_ended):
                os.kill(pid, signal.SIGSTOP)
                time.sleep(moment.uniform(0.05, 0.5))
                os.kill(pid, signal.SIGCONT)
            time.sleep(moment.uniform(0.05, 0.2))

    check(tmp_path, server.address, disturb, seed, victim=False)


@pytest.mark.seeds(40)
def test_kills_of_the_server_and_of_a_client(engine, tmp_path, seed):
    server = engine(tmp_path / "server", snapshot_seconds=0.2).start()

    def disturb(moment, recorders, extra):
        wait_until_known(server, 3)
        for number in range(3):
            time.sleep(moment.uniform(0.05, 0.5))
            server.kill()
            if number == 1:
                extra.kill()
            server.start()

    check(tmp_path, server.address, disturb, seed)
    server.stop()


@pytest.mark.slow
@pytest.mark.seeds(40)
def test_messages_are_lost_doubled_and_overtaken(tmp_path, seed):
    server = LocalServer(tmp_path / "server", snapshot_seconds=0.2).start()

    def disturb(moment, recorders, extra):
        time.sleep(moment.uniform(0.5, 1))
        server.kill()
        server.start()
        network.publish()

    with FaultyNetwork(server, tmp_path / "n", seed) as network:
        check(tmp_path, network.address, disturb, seed, 40, victim=False, staleness=4 * (seed % 2))
    assert network.lost and network.doubled and network.overtaken
    server.stop()
