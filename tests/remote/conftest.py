import time

import pytest

import stepcache as sc
from stepcache.remote.local_tasks import address
from stepcache.storage.load_markers import Process


def closed(session):
    """Closes a session that has started tasks, and waits until their coordinator has ended."""
    coordinator = Process.parse(address(session._scope.target.connection.directory)["process"])
    session.close()
    deadline = time.monotonic() + 30
    while not coordinator.has_ended():
        assert time.monotonic() < deadline, "the coordinator goes on"
        time.sleep(0.02)


@pytest.fixture(scope="module", params=["1x2", "2x1"])
def session(request):
    """A session on one task of two devices, and one on two tasks of one."""
    with sc.Session(target=f"local:{request.param}") as made:
        yield made
    closed(made)


@pytest.fixture(scope="module")
def one_task():
    with sc.Session(target="local:1x2") as made:
        yield made
    closed(made)
