"""Pods that the tests of a module share, and pods that run at the same time."""

import functools
from concurrent.futures import ThreadPoolExecutor

import pytest

from tests.cluster.pods import Pod

AT_A_TIME = 5


@pytest.fixture(scope="module")
def shared_pod(tmp_path_factory):
    """`shared_pod(count, devices)`: the module's pod of so many processes and devices of each."""
    pods: list[Pod] = []

    @functools.cache
    def made(count: int, devices: int) -> Pod:
        pods.append(Pod(tmp_path_factory.mktemp("pod"), count, devices=devices))
        return pods[-1]

    yield lambda count, devices=1: made(count, devices)
    with ThreadPoolExecutor() as pool:  # JAX takes its time to end.
        list(pool.map(Pod.close, pods))


@pytest.fixture(scope="module")
def together(request, tmp_path_factory):
    """`together(name)`: what became of a pod that the module has in its `TOGETHER`.

    These are functions of a directory, by name. They are called a few at a time, when the first of
    them is asked for: their processes spend most of their seconds waiting. Where a single test is
    run, only its own is called.
    """
    items = [each for each in request.session.items if each.module is request.module]
    users = [each for each in items if "together" in each.fixturenames]
    alone = sum(not each.get_closest_marker("skip") for each in users) == 1
    with ThreadPoolExecutor(AT_A_TIME) as pool:

        @functools.cache
        def started(name):
            return pool.submit(request.module.TOGETHER[name], tmp_path_factory.mktemp("pod"))

        if not alone:
            for name in request.module.TOGETHER:
                started(name)
        yield lambda name: started(name).result()
        pool.shutdown(cancel_futures=True)
