import os
import time

import pytest

import stepcache as sc
from stepcache.remote.local_tasks import address
from stepcache.storage.load_markers import Process
from tests.serving.conftest import ray_session as ray_session


def closed(session):
    """Closes a session that has started tasks, and waits until their coordinator has ended."""
    if not session._scope.target.connection.shares:
        session.close()
        return
    coordinator = Process.parse(address(session._scope.target.connection.where)["process"])
    session.close()
    deadline = time.monotonic() + 30
    while not coordinator.has_ended():
        assert time.monotonic() < deadline, "the coordinator goes on"
        time.sleep(0.02)


@pytest.fixture(scope="module")
def pool(ray_session):
    """The name of two tasks of one device in a Ray cluster."""
    from stepcache.remote import ray_tasks

    name = f"pool-{os.getpid()}"
    ray_tasks.start(name, 2, 1)
    yield name
    ray_tasks.stop(name)


@pytest.fixture(
    scope="module", params=["local:1x2", "local:2x1", pytest.param("ray", marks=pytest.mark.slow)]
)
def session(request):
    """A session on one task of two devices, and one on two tasks of one, also on Ray."""
    where = request.param if request.param != "ray" else f"ray:{request.getfixturevalue('pool')}"
    with sc.Session(target=where) as made:
        yield made
    closed(made)


@pytest.fixture(scope="module")
def one_task():
    with sc.Session(target="local:1x2") as made:
        yield made
    closed(made)
