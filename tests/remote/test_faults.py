"""Tasks, clients and coordinators that end: errors name them, and nothing is left."""

import os
import signal
import subprocess
import sys
import textwrap
import threading
import time
from pathlib import Path

import numpy as np
import optax
import pytest

import stepcache as sc
from stepcache.link.processes import Process
from stepcache.remote.coordinator import Output
from stepcache.remote.local_tasks import LocalTasks, address
from tests.remote.processes import ServedTasks, directory_of, has_ended, tasks_of, wait_until
from tests.remote.test_hangs import endless

ADD = """
import os, signal, sys, numpy as np, stepcache as sc
@sc.step(carry="state")
def add(state, x):
    return state + x, state.sum()
"""


@sc.step(carry="state")
def add(state, x):
    return state + x, state.sum()


def run(script, *, cache, code=0):
    text = textwrap.dedent(ADD) + textwrap.dedent(script)
    result = subprocess.run(
        [sys.executable, "-c", text],
        capture_output=True,
        text=True,
        timeout=120,
        env={**os.environ, "XDG_CACHE_HOME": str(cache)},
    )
    assert result.returncode == code, result.stderr[-3000:]
    return result.stdout


def stepcache(*arguments, cache=None):
    command = [sys.executable, "-m", "stepcache", *arguments]
    environment = {**os.environ} | ({"XDG_CACHE_HOME": str(cache)} if cache else {})
    return subprocess.run(command, capture_output=True, text=True, timeout=60, env=environment)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("target", "number"),
    [
        ("local:2x1", signal.SIGKILL),
        *(
            pytest.param(target, number, marks=pytest.mark.slow)
            for target in ("local:1x1", "local:2x1")
            for number in (signal.SIGTERM, signal.SIGABRT)
        ),
    ],
)
def test_a_lost_task_is_an_error_that_says_which_and_the_next_ones_work(target, number):
    with sc.Session(target=target) as session:
        state = sc.Variables(np.zeros(3, np.float32), name="state")
        for _ in range(5):
            _, old = add(state, 1.0)
        old.block_until_ready()
        coordinator, tasks = tasks_of(session)
        os.kill(tasks[-1], number)
        with pytest.raises(sc.RankLostError, match=f"task . was ended by {number.name}") as error:
            for _ in range(1000):
                add(state, 1.0)
                time.sleep(0.01)
        assert error.value.ranks
        with pytest.raises(sc.VariablesError, match="the tasks that held it have ended"):
            add(state, 1.0)
        with pytest.raises(sc.VariablesError, match="the tasks that held it have ended"):
            _ = state.value
        state.assign(np.ones(3, np.float32))
        add(state, 1.0)
        np.testing.assert_array_equal(state.value, 2)
        with pytest.raises(sc.TaskError, match="lost with the tasks"):
            old.block_until_ready()
        kept = [add(state, 1.0)[1] for _ in range(10)]
        old.delete()  # Nothing of the new tasks has its number.
        session._scope.target.connection._freed_bytes = 1 << 30
        add(state, 1.0)
        assert [float(each) for each in kept] == [6 + 3 * n for n in range(10)]
    session.close()
    wait_until(lambda: has_ended(coordinator) and all(map(has_ended, tasks)))
    assert not directory_of(session).exists() or address(directory_of(session)) is None


@pytest.mark.slow
@pytest.mark.parametrize("write", [sc.Write(), sc.Write("apply", optimizer=optax.adam(0.1))])
def test_a_checkpoint_brings_back_what_lost_tasks_held(write, tmp_path):
    """What fails before that makes nothing of it, and leaves the checkpoint."""
    with sc.Session(target="local:1x1") as session:
        state = sc.Variables(np.zeros(3, np.float32), name="state", write=write)
        add(state, 1.0)
        sc.save(tmp_path / "saves", state=state)
        _, tasks = tasks_of(session)
        os.kill(tasks[0], signal.SIGKILL)
        with pytest.raises(sc.RankLostError):
            for _ in range(1000):
                add(state, 1.0)
                time.sleep(0.01)
        with pytest.raises(sc.VariablesError, match="value is lost"):
            sc.save(tmp_path / "saves", state=state)
        with pytest.raises(sc.VariablesError, match="do not match"):
            sc.restore(tmp_path / "saves", state=state, other=np.zeros(2))
        with pytest.raises(sc.VariablesError, match="value is lost"):
            _ = state.value
        sc.restore(tmp_path / "saves", state=state)
        np.testing.assert_array_equal(state.value, 1)
        add(state, 1.0)
        np.testing.assert_array_equal(state.value, 2)
    session.close()


def test_the_coordinator_ends_and_everybody_knows(tmp_path):
    session = sc.Session(target="local:1x1")
    with session:
        state = sc.Variables(np.zeros(3, np.float32), name="state")
        add(state, 1.0)
        coordinator, tasks = tasks_of(session)
        endless(np.float32(1))  # So that the task does not notice it by itself.
        session._scope.target.connection.status()  # The coordinator has passed it on.
        os.kill(coordinator, signal.SIGKILL)
        with pytest.raises(sc.RankLostError, match="coordinator"):
            _ = state.value
    wait_until(lambda: all(map(has_ended, tasks)))


@pytest.mark.slow
def test_a_named_client_is_killed_comes_back_and_goes_on(tmp_path):
    script = """
    session = sc.Session(target="local:1x1", name="train")
    with session:
        state = sc.Variables(np.zeros(3, np.float32), name="state")
        print(state.version, float(state.value[0]))
        for _ in range(5):
            _, total = add(state, 1.0)
        print(float(total))
    """
    killed = script + "\n    os.kill(os.getpid(), signal.SIGKILL)"
    assert run(killed, cache=tmp_path, code=-signal.SIGKILL).split() == ["0", "0.0", "12.0"]
    assert run(script, cache=tmp_path).split() == ["5", "5.0", "27.0"]
    directory = tmp_path / "stepcache" / "tasks" / "train"
    watch = f"""
    with sc.Session(target="local:{directory}", watch="train") as session:
        state = sc.Variables(np.zeros(3, np.float32), name="state")
        print(state.version, float(state.value[0]))
        try:
            add(state, 1.0)
        except sc.TaskError as error:
            print("only watches" in str(error))
    """
    assert run(watch, cache=tmp_path).split() == ["10", "10.0", "True"]
    process = Process.parse(address(directory)["process"])
    shown = stepcache("status", "--tasks", str(directory))
    assert shown.returncode == 0 and "1 of 1 tasks" in shown.stdout and "state" in shown.stdout
    assert stepcache("stop", "train", cache=tmp_path).returncode == 0
    assert process.has_ended()
    again = stepcache("stop", "train", cache=tmp_path)
    assert again.returncode == 1 and "no tasks run in" in again.stderr


@pytest.mark.slow
def test_two_clients_of_one_name_are_refused_and_of_two_names_are_not(tmp_path):
    first = ServedTasks(tmp_path)
    with first.session("a"), pytest.raises(sc.TaskError, match="a client named 'a' is connected"):
        first.session("a")
    with first.session("b") as session:
        state = sc.Variables(np.zeros(3, np.float32), name="state")
        add(state, 1.0)
        np.testing.assert_array_equal(state.value, 1)
        assert len(session._scope.target.connection.status()["clients"]) == 2
    first.close()


def test_a_directory_without_tasks_is_said_in_time(tmp_path):
    from stepcache.remote.starting import open_target

    with pytest.raises(sc.TaskError, match="no tasks run in this directory"):
        open_target(f"local:{tmp_path}", None, "data", None, None, timeout=0.2)


@pytest.mark.slow
def test_a_second_coordinator_in_a_directory_is_refused(tmp_path):
    tasks = ServedTasks(tmp_path)
    with pytest.raises(sc.StepCacheError, match="tasks run in this directory already"):
        LocalTasks(tmp_path, 1, 1)
    tasks.close()


def test_tasks_that_cannot_be_started_again_are_no_hang(tmp_path, caplog):
    class Once(LocalTasks):
        def _launched(self):
            if self.coordinator.incarnation > 1:
                raise OSError("no more processes")
            return super()._launched()

    tasks = Once(tmp_path, 1, 1)
    running = threading.Thread(target=tasks.run)
    running.start()
    with sc.Session(target=f"local:{tmp_path}"):
        state = sc.Variables(np.zeros(3, np.float32), name="state")
        tasks.coordinator.from_task = lambda *_: Output(lost=("one has said so", []))
        for reason in ("one has said so", "the coordinator of the tasks has ended"):
            with pytest.raises(sc.RankLostError, match=reason):
                state.assign(np.ones(3, np.float32))
                _ = state.value
    running.join(20)
    assert not running.is_alive() and "cannot be started again: OSError: no more" in caplog.text


@pytest.mark.slow
def test_a_killed_client_leaves_no_directory(tmp_path):
    script = """
    session = sc.Session(target="local:1x1")
    with session:
        assert float(add(np.zeros(3, np.float32), 1.0)[1]) == 0
    print(session._scope.target.connection.where)
    os.kill(os.getpid(), signal.SIGKILL)
    """
    directory = run(script, cache=tmp_path, code=-signal.SIGKILL).strip()
    wait_until(lambda: not Path(directory).exists())
