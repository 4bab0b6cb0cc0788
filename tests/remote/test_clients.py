"""Many clients of the same tasks, threads of one client, and forks of it."""

import contextlib
import os
import signal
import subprocess
import sys
import textwrap
import threading

import numpy as np
import pytest

import stepcache as sc
from stepcache.remote import connection
from tests.remote.processes import ServedTasks, tasks_of, wait_until


@sc.step(carry="state")
def add(state, x):
    return state + x, state.sum()


@pytest.fixture(scope="module")
def served(tmp_path_factory):
    tasks = ServedTasks(tmp_path_factory.mktemp("served"))
    yield tasks
    tasks.close()


@pytest.mark.slow
def test_a_hundred_clients(served):
    """Each has variables of its own, under one name; they run at the same time, and leave."""
    errors = []

    def client(number):
        try:
            with served.session(f"client{number}") as session:
                state = sc.Variables(np.full(3, number, np.float32), name="state")
                for _ in range(10):
                    add(state, 1.0)
                np.testing.assert_array_equal(state.value, number + 10)
            session.close()
        except Exception as error:
            errors.append(error)

    threads = [threading.Thread(target=client, args=(n,)) for n in range(100)]
    for each in threads:
        each.start()
    for each in threads:
        each.join()
    assert not errors
    with served.session() as session:
        status = session._scope.target.connection.status
        wait_until(lambda: len(status()["clients"]) == 1)
        assert {tuple(row[:2]) for row in status()["variables"]} == {
            (f"client{n}", "state") for n in range(100)
        }
        assert len(status()["programs"]) == 1  # The same for all of them.
    session.close()


@pytest.mark.slow
def test_threads_of_one_client_wait_for_their_own(one_task):
    """What one thread receives for another reaches it."""
    errors = []
    step = sc.step(lambda x: x + 1)

    def work(number):
        try:
            with one_task:
                state = sc.Variables(np.zeros(3, np.float32), name=f"of thread {number}")
                for n in range(100):
                    add(state, 1.0)
                    assert float(step(np.float32(n))) == n + 1
                np.testing.assert_array_equal(state.value, 100)
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=work, args=(n,)) for n in range(8)]
    for each in threads:
        each.start()
    for each in threads:
        each.join(60)
    assert not errors and not any(each.is_alive() for each in threads)


def test_what_one_thread_fetches_stays_while_others_fetch(one_task, monkeypatch):
    """A thread may be late to lock the memory of a reply."""
    step = sc.step(lambda x: x + 1)
    with one_task:
        arrays = [step(np.full((1 << 16,), n, np.float32)) for n in range(40)]
        is_reading, may_read = threading.Event(), threading.Event()
        receive = connection.receive_array

        def late(*row):
            if threading.current_thread() is reader:
                is_reading.set()
                may_read.wait(20)
            return receive(*row)

        monkeypatch.setattr(connection, "receive_array", late)
        found = []
        reader = threading.Thread(target=lambda: found.append(np.asarray(arrays[0])))
        reader.start()
        assert is_reading.wait(20)
        for n, each in enumerate(arrays[1:], 1):
            np.testing.assert_array_equal(each, n + 1)
        may_read.set()
        reader.join()
        np.testing.assert_array_equal(found[0], 1)


def test_a_long_run_does_not_keep_other_threads_from_the_tasks(one_task):
    """A thread that waits holds no lock."""
    connection = one_task._scope.target.connection
    step = sc.step(lambda x: x + 1)
    step(1.0).block_until_ready()
    waits = threading.Thread(target=lambda: connection.wait(connection.runs + 1))
    waits.start()
    for _ in range(3):
        with connection.lock:
            pass
    step(1.0).block_until_ready()
    waits.join(10)
    assert not waits.is_alive()


@pytest.mark.slow
@pytest.mark.parametrize("name", ["ask", "wait"])
def test_tasks_that_are_lost_just_before_a_thread_waits(running, name, monkeypatch):
    """Another thread has been told; this one must not wait for the tasks of before."""
    step = sc.step(lambda x: x + 1)
    with running("1x1").session(deadline=20) as session:
        made, method = step(np.float32(1)), getattr(connection.Connection, name)
        of_session = session._scope.target.connection

        def told():
            with contextlib.suppress(sc.RankLostError):
                while True:
                    of_session.ready()

        def lose_first(self, *args, **options):
            monkeypatch.undo()
            os.kill(tasks_of(session)[1][0], signal.SIGKILL)
            other = threading.Thread(target=told)
            other.start()
            other.join()
            return method(self, *args, **options)

        monkeypatch.setattr(connection.Connection, name, lose_first)
        with pytest.raises((sc.RankLostError, sc.TaskError), match="lost"):
            if name == "wait":
                made.block_until_ready()
            float(made)
        assert float(step(np.float32(1))) == 2
    session.close()


@pytest.mark.slow
@pytest.mark.skipif(not hasattr(os, "fork"), reason="forks")
def test_a_fork_of_a_client_cannot_use_its_session_and_does_not_end_it(served):
    script = f"""
    import os, sys, numpy as np, stepcache as sc
    with sc.Session(target="local:{served.directory}", name="forked") as session:
        connection, step = session._scope.target.connection, sc.step(lambda x: x + 1)
        assert float(step(1.0)) == 2
        if not (pid := os.fork()):
            try:
                connection.ready()
            except sc.TaskError as error:
                print("forked" in str(error), flush=True)
            connection.close()  # As at its end.
            os._exit(0)
        assert os.waitpid(pid, 0)[1] == 0
        print(float(step(2.0)))
    """
    result = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", textwrap.dedent(script)],
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert result.stdout.split() == ["True", "3.0"], result.stderr


@pytest.mark.slow
@pytest.mark.skipif(not hasattr(os, "fork"), reason="forks")
def test_a_killed_client_comes_back_at_once(served):
    """Also while a process that it has forked keeps its socket open."""
    script = f"""
    import os, signal, stepcache as sc
    with sc.Session(target="local:{served.directory}", name="back"):
        state = sc.Variables(3.0, name="state")
        add = sc.step(lambda state: (state + 1, state), carry="state")
        add(state)[1].block_until_ready()
        if not (pid := os.fork()):
            print(os.getpid(), flush=True)
            signal.pause()
        os.waitid(os.P_PID, pid, os.WEXITED)
    """
    command = [sys.executable, "-W", "ignore", "-c", textwrap.dedent(script)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as client:
        assert client.stdout is not None
        fork = int(client.stdout.readline())
        client.kill()
        client.wait()
        try:
            with served.session("back") as again:
                assert sc.Variables(0.0, name="state").value == 4
            again.close()
        finally:
            os.kill(fork, signal.SIGKILL)


def interrupted(call, function, number):
    """Makes a call that Ctrl-C interrupts at a line of a function. Returns whether it was there."""
    left = [number]

    def trace(frame, event, _):
        if frame.f_code is not function.__code__:
            return trace if event == "call" else None
        left[0] -= event == "line"
        if left[0] < 0:
            sys.settrace(None)
            raise KeyboardInterrupt
        return trace

    sys.settrace(trace)
    try:
        call()
    except KeyboardInterrupt:
        return True
    finally:
        sys.settrace(None)
    return False


@pytest.mark.slow
def test_ctrl_c_at_any_moment_of_a_wait_leaves_a_session_that_goes_on(served):
    with served.session(deadline=10) as session:
        state = sc.Variables(np.zeros(3, np.float32), name="state")
        add(state, 1.0)
        count, number = 1, 0
        while interrupted(lambda: state.value, connection.Connection._receive, number):
            number += 1
            add(state, 1.0)
            count += 1
            np.testing.assert_array_equal(state.value, count)
        assert number > 10
    session.close()
