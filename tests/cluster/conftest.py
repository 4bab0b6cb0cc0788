"""Pods that the tests of a module share."""

import contextlib
import functools

import pytest

from tests.cluster.pods import Pod


@pytest.fixture(scope="module")
def shared_pod(tmp_path_factory):
    """`shared_pod(count, devices)`: the module's pod of so many processes, of so many devices each."""
    with contextlib.ExitStack() as ending:

        @functools.cache
        def pod(count: int, devices: int = 1) -> Pod:
            made = Pod(tmp_path_factory.mktemp("pod"), count, devices=devices)
            ending.callback(made.close)
            return made

        yield pod
