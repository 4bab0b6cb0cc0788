"""Ray actors and their clients that are killed at named points; Ray starts the actors again."""

import time
from contextlib import nullcontext

import pytest

from tests.serving.failpoints import (
    OF_CALLS,
    OF_CLIENTS,
    OF_LOCAL_CLIENTS,
    OF_RAY_CLIENTS,
    OF_RESTARTS,
    OF_SERVERS,
    OF_SOCKETS,
)
from tests.serving.servers import LIMIT_SECONDS, RayCalls, RayServer
from tests.serving.test_failpoints import FAILING, SEEDS, times, wait_until_killed
from tests.serving.test_histories import check, wait_until_known

SERVERS = {RayServer: OF_SERVERS | OF_SOCKETS, RayCalls: OF_SERVERS | OF_CALLS}
RESTARTS = {RayServer: OF_RESTARTS, RayCalls: OF_RESTARTS}
CLIENTS = {
    RayServer: OF_CLIENTS | OF_LOCAL_CLIENTS | OF_RAY_CLIENTS,
    RayCalls: OF_CLIENTS | OF_RAY_CLIENTS,
}


def cases(points):
    """Each point of each kind of server."""
    return [
        pytest.param(kind, point, id=f"{kind.__name__}-{point}")
        for kind in points
        for point in points[kind]
    ]


@pytest.fixture(autouse=True)
def failing(ray_session, monkeypatch):
    """Actors that can be killed at points. Returns `plan`."""
    from stepcache.serving import ray_engine
    from tests.serving import failing_actor

    monkeypatch.setattr(ray_engine, "HostActor", failing_actor.FailingActor)
    return failing_actor


def wait_for_another(server, epoch):
    """Until the actor has been started so often."""
    limit = time.monotonic() + LIMIT_SECONDS
    while (about := server.about()).epoch < epoch:
        assert time.monotonic() < limit, "it has not come to this point"
        time.sleep(0.05)
    server.pid = about.pid


@pytest.mark.slow
@pytest.mark.seeds(SEEDS)
@pytest.mark.sample(every=20)
@pytest.mark.parametrize("kind, point", cases(SERVERS))
def test_an_actor_is_killed(tmp_path, failing, kind, point, seed):
    server = kind(tmp_path / "server", snapshot_seconds=0.1)
    failing.plan(server.directory, point, times(point, seed))
    server.start()
    check(tmp_path, server.address, lambda *_: wait_for_another(server, 2), seed, victim=False)
    server.stop()


@pytest.mark.slow
@pytest.mark.seeds(SEEDS)
@pytest.mark.parametrize("kind, point", cases(RESTARTS))
def test_an_actor_is_killed_while_it_recovers(tmp_path, failing, kind, point, seed):
    server = kind(tmp_path / "server", snapshot_seconds=0.1).start()

    def disturb(moment, recorders, extra):
        wait_until_known(server, 2)
        time.sleep(moment.uniform(0, 0.4))
        failing.plan(server.directory, point, times(point, seed))
        server.kill()
        wait_for_another(server, 3)

    check(tmp_path, server.address, disturb, seed, victim=False)
    assert not failing.is_planned(server.directory)
    server.stop()


@pytest.mark.slow
@pytest.mark.seeds(SEEDS)
@pytest.mark.parametrize("kind, point", cases(CLIENTS))
def test_a_client_of_an_actor_is_killed(tmp_path, kind, point, seed):
    server = kind(tmp_path / "server", snapshot_seconds=0.1).start()
    before = (FAILING, point, times(point, seed))

    def disturb(moment, recorders, extra):
        wait_until_killed(extra.child)

    check(tmp_path, server.address, disturb, seed, victim=before)
    server.stop()


@pytest.mark.slow
@pytest.mark.parametrize("is_broken", [False, True])
def test_the_check_finds_an_actor_that_does_writes_twice(tmp_path, failing, monkeypatch, is_broken):
    from stepcache.serving import ray_engine

    kind = failing.CountlessActor if is_broken else failing.DoublingActor
    monkeypatch.setattr(ray_engine, "HostActor", kind)
    server = RayCalls(tmp_path / "server").start()
    look = pytest.raises(AssertionError, match="done twice") if is_broken else nullcontext()
    with look:
        check(tmp_path, server.address, lambda *_: None, 0, count=20, victim=False)
    server.stop()
