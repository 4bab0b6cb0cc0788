"""Coordinators that share a directory: one runs, and each removes only what is its own."""

import json
import os
import shutil
import threading
from pathlib import Path

import pytest

import stepcache as sc
from stepcache.remote import starting
from stepcache.remote.local_tasks import LocalTasks, address
from stepcache.remote.messages import decode
from stepcache.serving.channel import Channel

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
    assert all(f"process {os.getpid()}" in each for each in refused)
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
