"""Pods that the tests of a module share, and pods that run at the same time."""

import functools
from concurrent.futures import ThreadPoolExecutor

import pytest

from tests.cluster.pods import Pod
from tests.sampling import LEFT_OUT

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


def _parameters(item):
    return tuple(item.callspec.params.values()) if hasattr(item, "callspec") else ()


@pytest.fixture(scope="module")
def together(request, tmp_path_factory):
    """`together(name)`: what became of a pod that the module has in its `TOGETHER`.

    These are functions of a directory, by name. They are called a few at a time, when the first of
    them is asked for: their processes spend most of their seconds waiting. Where a single test is
    run, only its own is called; and none of those that are named by the parameters of tests that
    are left out.
    """
    run, left_out = (
        [e for e in items if e.module is request.module and "together" in e.fixturenames]
        for items in (request.session.items, request.config.stash.get(LEFT_OUT, []))
    )
    skipped = {_parameters(each) for each in left_out} - {_parameters(each) for each in run}
    with ThreadPoolExecutor(AT_A_TIME) as pool:

        @functools.cache
        def started(name):
            return pool.submit(request.module.TOGETHER[name], tmp_path_factory.mktemp("pod"))

        for name in request.module.TOGETHER:
            if len(run) > 1 and (name if isinstance(name, tuple) else (name,)) not in skipped:
                started(name)
        yield lambda name: started(name).result()
        pool.shutdown(cancel_futures=True)
