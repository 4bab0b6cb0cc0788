"""Hosts in Ray actors: one that is killed at a point of its code, and some that get calls twice."""

import json
from pathlib import Path

from stepcache.serving import durable_host
from stepcache.serving.ray_engine import HostActor
from tests.serving.failpoints import arm
from tests.serving.test_simulation import WithoutNumbers


def plan(directory, point, times):
    """Has the next process that serves a directory killed at a point, the `times`-th time."""
    _path(directory).write_text(json.dumps([point, times]))


def is_planned(directory):
    """Whether no process has begun yet that is going to be killed."""
    return _path(directory).exists()


def _path(directory):
    return Path(f"{directory}.point")


class FailingActor(HostActor):
    def __init__(self, directory, options, shares=True):
        if is_planned(directory):
            planned = json.loads(_path(directory).read_text())
            _path(directory).unlink()
            arm(*planned)
        super().__init__(directory, options, shares)


class DoublingActor(HostActor):
    """Gets each request twice."""

    def serve(self, request, payload=None):
        super().serve(request, payload)
        return super().serve(request, payload)


class CountlessActor(DoublingActor):
    """Does each write as often as it gets it."""

    def __init__(self, *options):
        durable_host.Host = WithoutNumbers
        super().__init__(*options)
