"""Tasks that come apart, are stopped, or do not get on: a typed error or a line in the log."""

import contextlib
import logging
import os
import re
import resource
import signal
import subprocess
import sys
import time
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import stepcache as sc
from stepcache.remote import link
from stepcache.remote.link import Link
from tests.remote.conftest import closed
from tests.remote.processes import tasks_of, wait_until

LARGE = np.ones((2, 1 << 16), np.float32)  # Goes through shared memory.


@sc.step(carry="state", batch="batch")
def mean(state, batch):
    return state + batch.mean(), state


@sc.step
def endless(x):
    return jax.lax.while_loop(lambda x: x < 2, lambda x: jnp.sqrt(x) * 1.0, x)


def first_free_file(pid):
    opened = {int(each.name) for each in Path(f"/proc/{pid}/fd").iterdir()}
    return min(set(range(len(opened) + 1)) - opened)


@contextlib.contextmanager
def no_more_files(pid):
    """A process cannot open memory that it has not opened yet."""
    limits = resource.prlimit(pid, resource.RLIMIT_NOFILE)
    resource.prlimit(pid, resource.RLIMIT_NOFILE, (first_free_file(pid), limits[1]))
    yield
    with contextlib.suppress(ProcessLookupError):  # It may have been ended meanwhile.
        resource.prlimit(pid, resource.RLIMIT_NOFILE, limits)


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/fd").is_dir(), reason="looks into /proc")
def test_a_run_that_fails_on_one_task_alone_ends_for_all(running):
    """The other task waits for it in a collective."""
    with running("2x1").session() as session:
        state = sc.Variables(np.float32(0), name="state")
        mean(state, np.ones((2, 4), np.float32))
        mean.warm(state, LARGE)
        _, (_, second) = tasks_of(session)
        lost = pytest.raises(sc.RankLostError, match=r"failed on task . alone: OSError")
        with no_more_files(second), lost as error:
            mean(state, LARGE)
            _ = state.value
        assert len(error.value.ranks) == 1
        state.assign(np.float32(0))
        mean(state, LARGE)
        assert state.value == 1
    session.close()


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/fd").is_dir(), reason="looks into /proc")
def test_a_value_that_one_task_alone_does_not_get_ends_for_all(running):
    """They would go on with different values."""
    with running("2x1").session() as session:
        state = sc.Variables(np.zeros(1 << 16, np.float32), name="state")
        mean(state, np.ones((2, 4), np.float32))
        assert state.value[0] == 1
        with no_more_files(tasks_of(session)[1][1]):
            large = {"a": np.ones(1 << 18, np.float32)}  # In memory that no task has opened.
            with pytest.raises(sc.RankLostError, match=r"failed on task . alone: OSError"):
                found = sc.Variables(large, name="large")
                while True:  # That one task has failed may be known before the other is done.
                    with contextlib.suppress(sc.TaskError):
                        _ = found.value
        state.assign(np.zeros(1 << 16, np.float32))
        mean(state, np.ones((2, 4), np.float32))
        assert state.value[0] == 1
    session.close()


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/fd").is_dir(), reason="looks into /proc")
def test_a_checkpoint_of_what_one_task_cannot_send(running, tmp_path):
    """An error for the client; the tasks go on with what they hold, and the checkpoint is whole."""
    with running("2x1").session() as session:
        state = sc.Variables(np.float32(1), name="state")
        split = sc.Sharded([("large", jax.sharding.PartitionSpec("data"))])
        large = sc.Variables(np.ones((2, 1 << 22), np.float32), name="large", placement=split)
        sc.save(tmp_path, keep=2, state=state, step=1)
        mean(state, np.ones((2, 4), np.float32))
        _, tasks = tasks_of(session)
        for victim in tasks:
            with no_more_files(victim):
                with pytest.raises(sc.TaskError, match="Too many open files"):
                    sc.save(tmp_path, keep=2, state=state, large=large, step=2)
            assert state.value == 2
        assert sc.restore(tmp_path, state=state, step=0)["step"] == 1
        assert state.value == 1
        sc.save(tmp_path, keep=2, state=state, large=large, step=2)
        assert tasks_of(session)[1] == tasks
    session.close()


def test_a_step_that_does_not_end_is_reported(caplog):
    caplog.set_level(logging.WARNING, "stepcache")
    with sc.Session(target="local:1x1", hang_after=0.3) as session:
        state = sc.Variables(np.float32(0), name="state")
        assert state.value == 0  # So run 1 is done, and known to be.
        match = r"no progress for 0.3 s: task 0: run 2 of client \d+ \(2 are started, the"
        # Around the call, too: where that takes long, it is told before the wait begins.
        interrupted = pytest.raises(KeyboardInterrupt)
        # A shell that starts the tests beside others has them ignore it.
        signal.signal(signal.SIGINT, signal.default_int_handler)
        with caplog.filtering(InterruptingWait(match)), interrupted:
            endless(np.float32(1)).block_until_ready()
    closed(session)


class InterruptingWait(logging.Filter):
    """Interrupts the main thread when it logs a message."""

    def __init__(self, pattern):
        super().__init__()
        self.pattern = re.compile(pattern)

    def filter(self, record):
        if self.pattern.search(record.getMessage()):
            signal.raise_signal(signal.SIGINT)
        return True


def interrupted_after(seconds, wait):
    signal.signal(signal.SIGALRM, signal.default_int_handler)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        wait()
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, signal.SIG_DFL)


def test_an_answer_that_was_not_read_in_time_is_not_a_hang(running, monkeypatch, caplog):
    caplog.set_level(logging.WARNING, "stepcache")
    take, read_from = Link._take_arrived, time.monotonic()

    def late(self, channel):
        return time.monotonic() > read_from and take(self, channel)

    monkeypatch.setattr(Link, "_take_arrived", late)
    with running("1x1").session(hang_after=0.3) as session:
        state = sc.Variables(np.float32(1), name="state")
        read_from = time.monotonic() + 1
        assert state.value == 1
    session.close()
    assert not caplog.records


def patiently(look):
    """Looks until no deadline is passed."""
    while True:
        with contextlib.suppress(sc.DeadlineError):
            return look()


def test_a_deadline_ends_the_wait_and_nothing_else(running):
    with running("1x1").session(deadline=0.3) as session:
        state = sc.Variables(np.float32(0), name="state")
        batch = np.ones((2, 4), np.float32)
        mean.warm(state, LARGE)
        _, before = mean(state, batch)
        before.block_until_ready()
        _, (task,) = tasks_of(session)
        os.kill(task, signal.SIGSTOP)
        made = []
        with pytest.raises(
            sc.DeadlineError, match=r"not answered in 0.3 s\n  at: .*after run 2 of"
        ):
            while True:
                made.append(mean(state, batch)[1])
        for look in (lambda: state.value, made[0].block_until_ready, lambda: float(made[-1])):
            with pytest.raises(sc.DeadlineError):
                look()
        with pytest.raises(sc.DeadlineError):  # A call with values of another kind.
            mean(state, LARGE)
        os.kill(task, signal.SIGCONT)
        patiently(lambda: mean(state, LARGE))
        assert patiently(lambda: state.value) == len(made) + 2 == 34
        assert [patiently(each.__float__) for each in made] == [n + 1 for n in range(32)]
    session.close()


def test_a_deadline_ends_a_call_whose_values_nobody_takes(running):
    """They are sent as soon as somebody does."""
    total = sc.step(lambda tree: sum(tree.values()).sum())
    small = {str(n): np.ones(15_000, np.float32) for n in range(100)}  # Not through shared memory.
    with running("1x1").session(deadline=0.5) as session:
        total.warm(small)
        coordinator, _ = tasks_of(session)
        os.kill(coordinator, signal.SIGSTOP)
        made = []
        try:
            with pytest.raises(sc.DeadlineError):
                for _ in range(2):
                    made.append(total(small))
        finally:
            os.kill(coordinator, signal.SIGCONT)
        assert [patiently(each.__float__) for each in made] == [1_500_000]
    session.close()


@pytest.mark.slow
def test_a_task_that_is_stopped_is_lost(running):
    with running("2x1").session(hang_after=0.5) as session:
        state = sc.Variables(np.float32(0), name="state")
        mean(state, np.ones((2, 4), np.float32))
        _, (_, second) = tasks_of(session)
        os.kill(second, signal.SIGSTOP)
        with pytest.raises(sc.RankLostError, match=r"no progress for 0.5 s.* stopped: task"):
            for _ in range(40):  # More than may be under way.
                mean(state, np.ones((2, 4), np.float32))
        state.assign(np.float32(0))
        assert state.value == 0
    session.close()


@pytest.mark.slow
def test_a_coordinator_that_is_stopped(running, caplog, monkeypatch):
    monkeypatch.setattr(link, "_ANSWER_SECONDS", 0.5)
    caplog.set_level(logging.WARNING, "stepcache")
    with running("1x1").session(hang_after=0.3) as session:
        state = sc.Variables(np.float32(1), name="state")
        coordinator, _ = tasks_of(session)
        os.kill(coordinator, signal.SIGSTOP)
        try:
            with pytest.raises(KeyboardInterrupt):
                interrupted_after(3, lambda: state.value)
            assert "has not answered for 0.5 s" in caplog.text
        finally:
            os.kill(coordinator, signal.SIGCONT)
        assert state.value == 1
    session.close()


@pytest.mark.slow
def test_a_client_that_is_stopped_stops_nobody_else(one_task):
    connection = one_task._scope.target.connection
    script = f"""
import os, pathlib, signal
from stepcache.remote.link import Link
link = Link(pathlib.Path({str(connection.where)!r}))
os.kill(os.getpid(), signal.SIGSTOP)
link.ready()
link.close()
"""
    client = subprocess.Popen([sys.executable, "-c", script])
    os.waitpid(client.pid, os.WUNTRACED)
    step = sc.step(lambda x: x + 1)
    for n in range(100):
        assert float(step(np.float32(n))) == n + 1
    client.send_signal(signal.SIGCONT)
    assert client.wait(30) == 0
    wait_until(lambda: len(connection.status()["clients"]) == 1)
