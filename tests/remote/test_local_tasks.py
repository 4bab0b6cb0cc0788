"""Coordinators that share a directory: one runs, and each removes only what is its own."""

import functools
import json
import os
import shutil
import subprocess
import threading
from pathlib import Path
from types import SimpleNamespace

import jax
import numpy as np
import pytest
from jax.sharding import AbstractMesh, AxisType

import stepcache as sc
from stepcache.errors import TaskError
from stepcache.link.processes import Process
from stepcache.remote import connection, link, starting
from stepcache.remote.local_tasks import LocalTasks, address
from stepcache.remote.messages import Kind, decode, packed
from stepcache.serving.channel import Channel
from tests.remote.processes import wait_until

REFUSED = "tasks run in this directory already"


class NoTasks(LocalTasks):
    """Starts no processes."""

    def _launched(self):
        return ()


def listens(directory):
    found = address(directory)
    assert found is not None
    Channel.to(found["address"], decode).close()
    return True


def test_of_those_that_start_at_once_one_runs(tmp_path):
    ready, made, refused = threading.Barrier(8), [], []

    def start():
        ready.wait()
        try:
            made.append(NoTasks(tmp_path, 1, 1))
        except sc.StepCacheError as error:
            refused.append(str(error))

    threads = [threading.Thread(target=start) for _ in range(8)]
    for each in threads:
        each.start()
    for each in threads:
        each.join()
    assert len(made) == 1 and len(refused) == 7 and all(REFUSED in each for each in refused)
    with pytest.raises(sc.StepCacheError, match=f"got: process {os.getpid()}"):
        NoTasks(tmp_path, 1, 1)
    assert listens(tmp_path)
    made[0].close()
    assert address(tmp_path) is None
    NoTasks(tmp_path, 1, 1).close()


def test_tasks_that_others_start_at_once_are_not_taken_for_ones_own(tmp_path):
    tasks = NoTasks(tmp_path, 1, 1)
    with pytest.raises(sc.TaskError, match=REFUSED):
        starting._spawn(tmp_path, 2, 1, owner=None)
    assert listens(tmp_path)
    tasks.close()


@pytest.mark.parametrize("size", ["2x1", "1x4"])
def test_tasks_of_a_name_and_another_size(tmp_path, monkeypatch, size):
    tasks = NoTasks(tmp_path, 1, 1)
    monkeypatch.setattr(starting, "named_directory", lambda name: tmp_path)
    with pytest.raises(sc.TaskError, match=f"expected: {size}\n *got: 1x1"):
        sc.Session(target=f"local:{size}", name="train")
    tasks.close()


def test_what_later_tasks_have_written_stays(tmp_path):
    first = NoTasks(tmp_path / "tasks", 1, 1)
    shutil.rmtree(tmp_path / "tasks")
    second = NoTasks(tmp_path / "tasks", 1, 1)
    first.close()
    assert listens(tmp_path / "tasks")
    second.close()
    assert address(tmp_path / "tasks") is None


def test_others_start_while_the_tasks_before_them_end(tmp_path):
    later = []

    class Ending(NoTasks):
        def _end_tasks(self):
            super()._end_tasks()
            later.append(NoTasks(tmp_path, 1, 1))

    Ending(tmp_path, 1, 1).close()
    assert listens(tmp_path)
    later[0].close()


def test_a_relative_directory_is_that_of_the_process(tmp_path, monkeypatch):
    made = []
    for name in ("here", "there"):
        (tmp_path / name).mkdir()
        monkeypatch.chdir(tmp_path / name)
        made.append(NoTasks(Path("tasks"), 1, 1))
    assert listens(tmp_path / "here" / "tasks") and listens(tmp_path / "there" / "tasks")
    sockets = {json.loads((each.directory / "tasks.json").read_text())["address"] for each in made}
    assert len(sockets) == 2
    for each in made:
        each.close()


def test_tasks_that_do_not_start_leave_the_directory_free(tmp_path):
    class Failing(LocalTasks):
        def _launched(self):
            raise OSError("no more processes")

    with pytest.raises(OSError, match="no more processes"):
        Failing(tmp_path, 1, 1)
    NoTasks(tmp_path, 1, 1).close()


@pytest.fixture
def tasks(tmp_path):
    made = NoTasks(tmp_path, 1, 1)
    running = threading.Thread(target=made.run)
    running.start()
    yield made
    made.stop()
    running.join()


AXIS = {"axis_types": (AxisType.Auto,)}


@pytest.mark.parametrize(
    "options, is_ready",
    [
        ({"mesh": AbstractMesh((7,), ("data",), **AXIS)}, True),
        ({"rules": [("w", jax.P("model"))]}, True),
        ({"data_axis": "batch", "mesh": AbstractMesh((1,), ("data",), **AXIS)}, True),
        ({}, False),
    ],
)
def test_a_session_that_is_not_made_holds_no_tasks(tasks, monkeypatch, options, is_ready):
    """The error may be kept for long, as that of a notebook's cell is."""
    if is_ready:
        about = {"devices": 1, "platform": "cpu", "kind": "cpu"}
        tasks.coordinator.joined(0, about)
    monkeypatch.setattr(
        starting, "open_target", functools.partial(starting.open_target, timeout=0.2)
    )
    with pytest.raises((sc.OptionError, sc.PlacementError, sc.TaskError)) as kept:
        sc.Session(target=f"local:{tasks.directory}", **options)
    assert tasks._had_clients
    wait_until(lambda: not tasks.coordinator.clients)
    del kept


def test_tasks_whose_start_is_interrupted_end(tmp_path, monkeypatch):
    started = []

    class Kept(subprocess.Popen):
        def __init__(self, *args, **options):
            started.append(self)
            super().__init__(*args, **options)

    def interrupt(directory):
        raise KeyboardInterrupt

    monkeypatch.setattr(starting.subprocess, "Popen", Kept)
    monkeypatch.setattr(starting, "address", interrupt)
    with pytest.raises(KeyboardInterrupt):
        starting._spawn(tmp_path, 1, 1, owner=str(Process.current()))
    try:
        started[0].wait(20)
    finally:
        started[0].kill()


def test_few_bytes_are_under_way_outside_shared_memory(tasks, monkeypatch):
    """The coordinator holds what tasks have not read yet."""
    monkeypatch.setattr(connection, "IN_FLIGHT_BYTES", 3 << 20)
    tasks.coordinator.joined(0, {})
    made = connection.Connection(tasks.directory, timeout=10, deadline_seconds=0.2)
    made.shares = False

    def put():
        made.make_room(made.incarnation)
        values = made.values()
        rows = [values.add(np.zeros(1 << 20, np.uint8))]
        return made.run(made.incarnation, 0, packed(feeds=rows), values, Kind.PUT)

    assert [put() for _ in range(3)] == [1, 2, 3]
    with pytest.raises(sc.DeadlineError):
        put()
    made._are_done(1)
    assert put() == 4
    made.close()


@pytest.mark.parametrize("task", [None, 0])
def test_who_does_not_read_is_cut_off_unless_it_is_a_task(tmp_path, monkeypatch, task):
    tasks, closed = NoTasks(tmp_path, 1, 1), []
    with monkeypatch.context() as patched:
        patched.setattr(tasks, "_peers", SimpleNamespace(send=lambda *_: None))
        patched.setattr(tasks, "_close", closed.append)
        peer = SimpleNamespace(task=task, unsent_bytes=3 << 30, sent=0)
        tasks._send_to(peer, b"")
    tasks.close()
    assert closed == [peer] * (task is None)


def test_a_fork_closes_its_end_though_another_thread_had_the_lock(tasks):
    tasks.coordinator.joined(0, {})
    made = connection.Connection(tasks.directory, timeout=10)
    made._pid -= 1  # As in a child.
    with made.lock:
        closing = threading.Thread(target=made.close, daemon=True)
        closing.start()
        closing.join(10)
        assert not closing.is_alive()


def test_a_client_logs_once_that_it_waits_for_tasks(tmp_path, monkeypatch, caplog):
    monkeypatch.setattr(link, "_SILENT_SECONDS", 0.05)
    with pytest.raises(TaskError, match="no tasks run in this directory"):
        connection.Connection(tmp_path, timeout=0.3)
    assert caplog.messages == [f"waiting for `stepcache serve --tasks`, at {tmp_path}"]
