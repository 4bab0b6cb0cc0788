"""`kill -9` of a task, or of a client, at any moment: compile, run, fetch, save."""

import os
import random
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from subprocess import PIPE

import jax.numpy as jnp
import numpy as np
import pytest

import stepcache as sc
from tests.remote.processes import has_ended, tasks_of, wait_until

ROWS = np.ones((2, 1 << 16), np.float32)  # Through shared memory, half of it to each task.
MORE_ROWS = np.ones((2, 1 << 17), np.float32)  # In other memory.
POINTS = ("compile", "run", "fetch", "save")


@sc.step(carry="state", batch="batch")
def add(state, batch):
    return {"sum": state["sum"] + batch.mean(), "rows": state["rows"] + 1}, batch.sum()


def new_step(number):
    """A step that no task has on its disk."""
    return sc.step(lambda x: jnp.sin(x @ x.T + number) @ x)


def made():
    zeros = np.zeros((2, 1 << 16), np.float32)
    return sc.Variables({"sum": np.float32(0), "rows": zeros}, name="state")


def check(state, count):
    """Both leaves have been written by the same runs."""
    value = state.value
    assert float(value["sum"]) == count and set(value["rows"].ravel()) == {count}


def worked(point, state, seed, directory):
    """Does one thing for as long as nothing is lost."""
    for n in range(1_000_000):
        if point == "compile":
            new_step(time.time() % 1e6)(np.ones((n % 7 + 2, 3), np.float32))
        elif point == "run":
            add(state, ROWS)
        elif point == "fetch":
            _ = state.value
        else:
            add(state, ROWS)
            sc.save(directory, keep=2, state=state, step=n + 2)


@pytest.fixture
def pair(running):
    with running("2x1").session() as session:
        yield session
    session.close()


@pytest.mark.sample(every=4)
@pytest.mark.seeds(30, few=1)
@pytest.mark.parametrize("point", POINTS)
def test_a_task_is_killed(pair, point, seed, tmp_path):
    chance = random.Random(f"{point} {seed}")
    state = made()
    state.assign({"sum": np.float32(0), "rows": np.zeros((2, 1 << 16), np.float32)})
    add(state, ROWS)
    check(state, 1)
    sc.save(tmp_path, keep=2, state=state, step=1)
    state.assign({"sum": np.float32(0), "rows": np.zeros((2, 1 << 16), np.float32)})
    _, tasks = tasks_of(pair)
    victim = chance.choice(tasks)
    killer = threading.Timer(chance.uniform(0, 0.5), os.kill, (victim, signal.SIGKILL))
    killer.start()
    started = time.monotonic()
    with pytest.raises(sc.RankLostError, match=r"ended by SIGKILL"):
        worked(point, state, seed, tmp_path)
    assert time.monotonic() < started + 20
    wait_until(lambda: all(map(has_ended, tasks)))
    found = sc.restore(tmp_path, state=state, step=0)
    check(state, found["step"] if point != "save" else max(1, found["step"] - 1))
    before = float(state.value["sum"])
    add(state, ROWS)
    check(state, before + 1)


CLIENT = """
import sys
sys.path.insert(0, {root!r})
import stepcache as sc
from tests.remote import test_kills
with sc.Session(target="local:{directory}", name={name!r}):
    state = test_kills.made()
    test_kills.add(state, test_kills.ROWS)
    print("ready", flush=True)
    test_kills.worked({point!r}, state, 0, {saves!r})
"""


ROOT = str(Path(__file__).parents[2])


def started(text, **options):
    """A client in a process of its own, once it is ready."""
    client = subprocess.Popen([sys.executable, "-c", text], stdout=PIPE, **options)
    assert client.stdout is not None and client.stdout.readline() == b"ready\n"
    return client


@pytest.fixture
def served(running):
    return running("2x1")


@pytest.mark.sample(every=5)
@pytest.mark.seeds(30, few=1)
@pytest.mark.parametrize("name", [None, "killed"])
@pytest.mark.parametrize("point", POINTS)
def test_a_client_is_killed(served, point, name, seed, tmp_path):
    """The tasks go on for another one; what it held is dropped, or kept as a whole."""
    chance = random.Random(f"{point} {seed}")
    text = CLIENT.format(
        root=ROOT, directory=served.directory, name=name, point=point, saves=str(tmp_path)
    )
    with served.session(name="other") as session:
        state = made()
        state.assign({"sum": np.float32(0), "rows": np.zeros((2, 1 << 16), np.float32)})
        client = started(text)
        deadline, count = time.monotonic() + chance.uniform(0, 0.5), 0
        while time.monotonic() < deadline:
            add(state, ROWS)
            count += 1
        client.kill()
        client.wait()
        client.stdout.close()
        add(state, ROWS)
        check(state, count + 1)
        status = session._scope.target.connection.status
        wait_until(lambda: len(status()["clients"]) == 1)
        held = {owner for owner, *_ in status()["variables"]}
        assert held <= {"other", "killed"} and (name is None or name in held)
    session.close()
    if name is not None:
        with served.session(name=name) as again:
            state = made()
            value = state.value
            check(state, float(value["sum"]))
        again.close()


SHARING = """
import os, signal, sys
sys.path.insert(0, {root!r})
import stepcache as sc
from tests.remote import test_kills
with sc.Session(target="local:{directory}", name="shares"):
    state = test_kills.made()
    test_kills.add(state, test_kills.ROWS)
    test_kills.add.warm(state, test_kills.MORE_ROWS)
    print("ready", flush=True)
    sys.stdin.readline()
    for _ in range(3):
        test_kills.add(state, test_kills.MORE_ROWS)
    os.kill(os.getpid(), signal.SIGKILL)
"""


@pytest.mark.slow
def test_a_client_ends_before_its_memory_is_opened(served):
    """The steps that bring this memory are run by no task, and those before it by all."""
    with served.session(name="other") as session:
        state = made()
        coordinator, tasks = tasks_of(session)
        client = started(SHARING.format(root=ROOT, directory=served.directory), stdin=PIPE)
        os.kill(coordinator, signal.SIGSTOP)
        client.communicate(b"\n")
        os.kill(coordinator, signal.SIGCONT)
        add(state, ROWS)
        check(state, float(state.value["sum"]))
    session.close()
    with served.session(name="shares") as again:  # At once: the coordinator has not seen its end.
        check(made(), 1)
        assert tasks_of(again)[1] == tasks
    again.close()
