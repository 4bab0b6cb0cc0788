"""Servers and clients that are killed at named points: no push is lost, and none counts twice."""

import concurrent.futures
import functools
import importlib
import random
import time

import pytest

from tests.serving.failpoints import (
    OF_CLIENTS,
    OF_IMAGES,
    OF_LOCAL_CLIENTS,
    OF_RESTARTS,
    OF_SERVERS,
    OF_SOCKETS,
    POINTS,
)
from tests.serving.servers import PROJECT, LocalServer
from tests.serving.test_histories import check

FAILING = "tests/serving/failpoints.py"
LIMIT_SECONDS = 30
KILLED = -9
SEEDS = 100


def times(point, seed):
    return random.Random(f"{point} {seed}").randint(1, POINTS[point][2])


def start_failing(server, point, seed):
    """Starts a server that is going to be killed at a point."""
    script, server.script = server.script, (FAILING, point, times(point, seed), *server.script)
    try:
        return server.start()
    finally:
        server.script = script


def wait_until_killed(child):
    limit = time.monotonic() + LIMIT_SECONDS
    while child.is_running():
        assert time.monotonic() < limit, ("it has not come to this point", child.printed())
        time.sleep(0.005)
    assert child.end()[0] == KILLED, child.printed()


@pytest.mark.seeds(SEEDS)
@pytest.mark.sample(every=12)
@pytest.mark.parametrize("point", [*OF_SERVERS, *OF_SOCKETS, *OF_IMAGES])
def test_a_server_is_killed(tmp_path, point, seed):
    server = start_failing(LocalServer(tmp_path / "server", snapshot_seconds=0.1), point, seed)

    def start_again():
        wait_until_killed(server.child)
        server.start()

    with concurrent.futures.ThreadPoolExecutor() as pool:
        started = pool.submit(start_again)  # Clients may wait for it from the first on.
        check(tmp_path, server.address, lambda *_: started.result(), seed, victim=False)
    server.stop()


@pytest.mark.slow
@pytest.mark.seeds(SEEDS)
@pytest.mark.sample(every=4)
@pytest.mark.parametrize("point", OF_RESTARTS)
def test_a_server_is_killed_while_it_recovers(tmp_path, point, seed):
    server = LocalServer(tmp_path / "server", snapshot_seconds=0.1).start()

    def disturb(moment, recorders, extra):
        time.sleep(moment.uniform(0.2, 0.6))
        server.kill()
        server.is_there = lambda: True  # It may be killed before anybody sees it.
        start_failing(server, point, seed)
        wait_until_killed(server.child)
        del server.is_there
        server.start()

    check(tmp_path, server.address, disturb, seed, victim=False)
    server.stop()


@pytest.mark.slow
@pytest.mark.seeds(SEEDS)
@pytest.mark.sample(every=5)
@pytest.mark.parametrize("point", [*OF_CLIENTS, *OF_LOCAL_CLIENTS])
def test_a_client_is_killed(tmp_path, point, seed):
    server = LocalServer(tmp_path / "server", snapshot_seconds=0.1).start()
    before = (FAILING, point, times(point, seed))

    def disturb(moment, recorders, extra):
        wait_until_killed(extra.child)

    check(tmp_path, server.address, disturb, seed, victim=before)
    server.stop()


@pytest.mark.parametrize("point", POINTS)
def test_points_are_in_the_code(point):
    if "ray" in POINTS[point][0]:
        pytest.importorskip("ray", reason="the ray engine needs Ray")
    module, _, path = POINTS[point][0].partition(":")
    assert callable(functools.reduce(getattr, path.split("."), importlib.import_module(module)))
    assert PROJECT.joinpath(FAILING).exists()
