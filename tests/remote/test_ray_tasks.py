"""Tasks as actors of Ray: started, found by name, killed, and started again."""

import contextlib
import os
import signal
import subprocess
import sys
import time

import numpy as np
import pytest

import stepcache as sc
from stepcache.link.processes import Process
from stepcache.remote.messages import Kind, Message, decode, packed
from stepcache.serving.channel import Channel
from tests.remote.test_hangs import endless

LIMIT_SECONDS = 120
ROWS = np.ones((2, 1 << 16), np.float32)


@sc.step(carry="state", batch="batch")
def add(state, batch):
    return state + batch.mean(), batch.sum()


def killed(text):
    os.kill(Process.parse(text).pid, signal.SIGKILL)


def until_lost(state):
    """Runs steps until the tasks are lost."""
    limit = time.monotonic() + LIMIT_SECONDS
    while time.monotonic() < limit:
        _, total = add(state, ROWS)
        total.block_until_ready()


@pytest.mark.slow
def test_actors_run_steps_and_are_found_by_name_and_started_again(pool):
    with sc.Session(target=f"ray:{pool}", name="train") as session:
        state = sc.Variables(np.float32(0), name="state")
        for _ in range(3):
            _, total = add(state, ROWS)
        assert state.value == 3 and float(total) == ROWS.size
        status = session._scope.target.connection.status()
        assert status["joined"] == 2 and len(set(status["processes"])) == 2
    session.close()
    with sc.Session(target=f"ray:{pool}", name="train") as session:
        state = sc.Variables(np.float32(7), name="state")
        assert state.value == 3 and state.version == 3
        killed(status["processes"][1])
        with pytest.raises(sc.RankLostError, match="task 1 has ended"):
            until_lost(state)
        state.assign(np.float32(1))
        add(state, ROWS)
        assert state.value == 2
        again = session._scope.target.connection.status()["processes"]
        assert not set(again) & set(status["processes"])
    session.close()


@pytest.mark.slow
def test_the_coordinator_is_killed(pool):
    """Its clients are told; Ray starts it again, with new tasks."""
    from stepcache.remote import ray_tasks

    with sc.Session(target=f"ray:{pool}", name="other") as session:
        state = sc.Variables(np.float32(0), name="state")
        add(state, ROWS)
        before = ray_tasks.find(pool)["process"]
        endless(np.float32(1))  # So that the tasks do not notice it by themselves.
        tasks = session._scope.target.connection.status()["processes"]
        killed(before)
        with pytest.raises(sc.RankLostError, match="coordinator of the tasks has ended"):
            until_lost(state)
    session.close()
    limit = time.monotonic() + LIMIT_SECONDS
    while (found := ray_tasks.find(pool)) is None or found["process"] == before:
        assert time.monotonic() < limit
        time.sleep(0.1)
    with sc.Session(target=f"ray:{pool}", name="other") as session:
        state = sc.Variables(np.float32(5), name="state")
        add(state, ROWS)
        assert state.value == 6
    session.close()
    while not all(Process.parse(each).has_ended() for each in tasks):
        assert time.monotonic() < limit
        time.sleep(0.1)


@pytest.mark.slow
def test_nobody_connects_without_the_key(pool):
    from stepcache.remote import ray_tasks

    found = ray_tasks.find(pool)
    body = packed(name="", process=str(Process.current()), watch="")
    for key in (b"", b"x" * len(found["key"])):
        stranger = Channel.to(found["address"], decode, key)
        with pytest.raises(OSError):
            stranger.send(Message(Kind.HELLO, body=body).encoded())
            stranger.wait(10)
            while (message := stranger.receive()) is None or message.kind is Kind.REFUSED:
                stranger.wait(10)
        stranger.close()
    with sc.Session(target=f"ray:{pool}") as session:
        assert float(sc.step(lambda x: x + 1)(np.float32(1))) == 2
    session.close()


@pytest.mark.slow
def test_the_command_line(ray_session):
    command = [sys.executable, "-m", "stepcache"]
    name = f"served-{os.getpid()}"
    serving = subprocess.Popen([*command, "serve", "--tasks", "1x2", "--ray", name])
    with sc.Session(target=f"ray:{name}") as session:
        assert float(sc.step(lambda x: x.sum())(np.ones(4, np.float32))) == 4
    session.close()
    shown = subprocess.run(
        [*command, "status", "--tasks", f"ray:{name}", "--timeout", "60"],
        capture_output=True,
        text=True,
    )
    assert "1 of 1 tasks" in shown.stdout, shown.stderr
    serving.terminate()
    assert serving.wait(LIMIT_SECONDS) == 0
    stopped = subprocess.run([*command, "stop", f"ray:{name}"], capture_output=True, text=True)
    assert stopped.returncode == 1 and "no tasks run under this name" in stopped.stderr


@pytest.mark.slow
def test_tasks_that_cannot_start_are_given_up(ray_session):
    from stepcache.remote import ray_tasks

    name, environment = f"failing-{os.getpid()}", {"env_vars": {"JAX_PLATFORMS": "none such"}}
    ray_tasks.start(name, 1, 1, runtime_env=environment)
    with pytest.raises(sc.TaskError, match="the tasks end before they have joined"):
        while True:
            with contextlib.suppress(sc.RankLostError):  # It waited for them.
                sc.Session(target=f"ray:{name}")
    ray_tasks.stop(name)
    with pytest.raises(sc.TaskError, match="no tasks run under this name"):
        ray_tasks.stop(name)
