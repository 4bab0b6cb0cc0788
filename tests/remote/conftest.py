import functools
import os

import pytest

import stepcache as sc
from stepcache.link.processes import Process
from stepcache.remote.local_tasks import address
from tests.remote.processes import RunningTasks, wait_until
from tests.serving.conftest import ray_session as ray_session


def closed(session):
    """Closes a session that has started tasks, and waits until their coordinator has ended."""
    coordinator = Process.parse(address(session._scope.target.connection.where)["process"])
    session.close()
    wait_until(coordinator.has_ended, 30)


@pytest.fixture(scope="session")
def running(tmp_path_factory):
    """`running(size)`: tasks that run for all tests of this process, which start them once."""
    made = []

    @functools.cache
    def of_size(size):
        made.append(RunningTasks(tmp_path_factory.mktemp("tasks"), size))
        return made[-1]

    yield of_size
    for each in made:
        each.close()


@pytest.fixture(scope="module")
def pool(ray_session):
    """The name of two tasks of one device in a Ray cluster."""
    from stepcache.remote import ray_tasks

    name = f"pool-{os.getpid()}"
    ray_tasks.start(name, 2, 1)
    yield name
    ray_tasks.stop(name)


@pytest.fixture(scope="module", params=["1x2", "2x1", pytest.param("ray", marks=pytest.mark.slow)])
def session(request, running):
    """A session on one task of two devices, and one on two tasks of one, also on Ray."""
    if request.param == "ray":
        made = sc.Session(target=f"ray:{request.getfixturevalue('pool')}")
    else:
        made = running(request.param).session()
    with made:
        yield made
    made.close()


@pytest.fixture(scope="module")
def one_task(running):
    with running("1x2").session() as made:
        yield made
    made.close()
