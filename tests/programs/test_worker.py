"""What runs beside the calls: whatever happens to it, the call is right and does not hang."""

import gc
import logging
import os
import subprocess
import sys
import threading
import time
import weakref
from pathlib import Path

import jax
import numpy as np
import pytest

import stepcache as sc
from stepcache import jaxcompat
from stepcache._changes import Undoing
from stepcache.jaxcompat import hooks
from stepcache.programs import worker as workers
from stepcache.programs.worker import Worker, tracing

LIMIT_SECONDS = 30
stored = pytest.mark.skipif(
    not jaxcompat.CAN_STORE, reason="programs are stored through JAX's private API"
)


def within_limit(work):
    """What `work` returns; an error where that takes too long."""
    outcomes = []
    thread = threading.Thread(target=lambda: outcomes.append(work()), daemon=True)
    thread.start()
    thread.join(LIMIT_SECONDS)
    assert not thread.is_alive(), "it waits for ever"
    assert outcomes, "it raised"
    return outcomes[0]


@pytest.fixture
def worker():
    worker = Worker("stepcache test")
    yield worker
    within_limit(worker.flush)


def refuse(thread, start=threading.Thread.start):
    """In the place of `Thread.start`: no thread of stepcache can be started."""
    if thread.name.startswith("stepcache"):
        raise RuntimeError("can't start new thread")
    start(thread)


# ---- jobs ----------------------------------------------------------------------------------------


def test_jobs_run_in_their_order_one_at_a_time_in_another_thread(worker):
    ran, running = [], []

    def job(number):
        running.append(number)
        time.sleep(0.002)
        assert running == [number]
        running.remove(number)
        ran.append((number, threading.current_thread()))

    for number in range(20):
        worker.submit(lambda number=number: job(number))
    within_limit(worker.flush)
    assert [number for number, _ in ran] == list(range(20))
    assert len({thread for _, thread in ran}) == 1 and threading.current_thread() is not ran[0][1]


def test_a_flush_waits_for_what_jobs_submit(worker):
    ran = []

    def job(left):
        ran.append(left)
        time.sleep(0.01)
        if left:
            worker.submit(lambda: job(left - 1))

    worker.submit(lambda: job(3))
    within_limit(worker.flush)
    assert ran == [3, 2, 1, 0]


def test_a_job_that_fails_is_logged_and_nothing_waits_for_it(worker, caplog):
    ran = []

    def fail():
        raise SystemExit("of a job")

    worker.submit(fail)
    worker.submit(lambda: ran.append(1))
    within_limit(worker.flush)
    assert ran == [1] and "a job failed" in caplog.text and "of a job" in caplog.text


def test_jobs_run_once_where_no_thread_can_be_started(worker, monkeypatch):
    ran = []
    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", refuse)
        worker.submit(lambda: ran.append(1))
        assert ran == [1], "here, as nobody else does"
    worker.submit(lambda: ran.append(2))
    within_limit(worker.flush)
    assert ran == [1, 2]


def test_jobs_wait_for_a_trace_but_not_for_long_and_not_in_a_hurry(worker, monkeypatch):
    ran = threading.Event()
    with Undoing() as undoing:
        undoing.use(tracing)
        worker.submit(ran.set)
        assert not ran.wait(0.2)
        within_limit(worker.flush)
        assert ran.is_set()
        monkeypatch.setattr(workers, "_LONGEST_TRACE_SECONDS", 0.1)
        ran.clear()
        worker.submit(ran.set)
        assert ran.wait(LIMIT_SECONDS)
    assert not tracing.begun.is_set()


@pytest.mark.skipif(sys.platform != "linux", reason="threads have no priority of their own")
def test_jobs_yield_to_other_threads_and_nothing_else_does(worker):
    def niceness():
        return os.getpriority(os.PRIO_PROCESS, threading.get_native_id())

    before, found = niceness(), []
    worker.submit(lambda: found.append(niceness()))
    within_limit(worker.flush)
    assert found[0] > before == niceness()


FORK = """
import gc, os, sys, threading, time
from stepcache._process_hooks import rare_collections
from stepcache.programs.worker import Worker, tracing

def settings():
    return gc.get_threshold(), sys.getswitchinterval(), tracing.begun.is_set()

before = settings()
begun, ran = threading.Event(), []

def work():
    begun.set()
    time.sleep(0.3)
    ran.append("parent")

worker = Worker("stepcache test")
tracing.start(worker)
rare_collections.start(worker)
worker.submit(work)
worker.is_urgent.set()
begun.wait()
assert all(now != then for now, then in zip(settings(), before))
child = os.fork()
if not child:
    assert settings() == before
    worker.submit(lambda: ran.append("child"))
    worker.flush()
    os._exit(3 if ran == ["child"] else 4)
assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 3
worker.flush()
assert ran == ["parent"]
"""


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork on this platform")
def test_a_child_forked_beside_a_job_and_a_trace_is_free_of_both():
    command = [sys.executable, "-W", "ignore", "-c", FORK]  # Python 3.12 warns of each such fork.
    done = subprocess.run(command, capture_output=True, text=True, timeout=200)
    assert (done.returncode, done.stderr) == (0, "")


ENDS = """
import threading, time
from stepcache.programs.worker import Worker, tracing

worker = Worker("stepcache test")
worker.submit(lambda: (time.sleep(0.2), print("first", flush=True)))
worker.submit(lambda: worker.submit(lambda: print("last", flush=True)))
tracing.start(worker)  # As a thread that still traces.
{more}
"""


@pytest.mark.parametrize("more", ["", "raise ValueError", "import sys; sys.exit(3)"])
def test_the_end_of_the_process_runs_the_jobs_that_are_left(more):
    command = [sys.executable, "-c", ENDS.format(more=more)]
    started = time.monotonic()
    done = subprocess.run(command, capture_output=True, text=True, timeout=200)
    assert done.stdout == "first\nlast\n", done.stderr
    assert done.returncode == {"": 0, "raise ValueError": 1}.get(more, 3)
    assert time.monotonic() - started < LIMIT_SECONDS


# ---- a step --------------------------------------------------------------------------------------


@stored
def test_a_program_is_built_stored_and_loaded_without_any_thread(tmp_path, monkeypatch, caplog):
    monkeypatch.setattr(threading.Thread, "start", refuse)
    for loads in (0, 1):
        cache = sc.ProgramCache(tmp_path)
        with sc.Session(cache=cache):
            step = sc.step(lambda x: x * 2 + 1)
            assert step(np.ones(8))[0] == 3
        within_limit(cache.flush)
        assert step.stats().loads == loads, step.last_miss
    assert not [each for each in caplog.records if each.levelno >= logging.WARNING]


@stored
@pytest.mark.parametrize(
    "what", ["storage.disk_store.DiskStore.publish", "programs.resolve.describe"]
)
def test_what_fails_in_the_background_is_logged_and_the_step_goes_on(
    what, tmp_path, monkeypatch, caplog
):
    def fail(*_, **__):
        raise MemoryError("no room")

    monkeypatch.setattr(f"stepcache.{what}", fail)
    cache = sc.ProgramCache(tmp_path)
    with sc.Session(cache=cache):
        step = sc.step(lambda x: x * 2 + 1)
        for _ in range(2):
            assert step(np.ones(8))[0] == 3
    within_limit(cache.flush)
    assert "no room" in caplog.text
    assert not list(Path(tmp_path).rglob("building/*")), "others wait for it"


@stored
def test_a_call_that_interrupts_a_build_waits_for_none_of_its_locks(tmp_path, monkeypatch):
    """As where a step handles a signal: it needs the module that its own thread compiles."""
    compile_it, results = hooks.compiler.backend_compile_and_load, []

    def interrupted(*args, **options):
        if not results:
            results.append(None)
            results.append(float(other(2.0)))
        return compile_it(*args, **options)

    monkeypatch.setattr(hooks.compiler, "backend_compile_and_load", interrupted)
    step, other = (sc.step(lambda x: x * 2 + 1) for _ in range(2))

    def call():
        with sc.Session(cache=sc.ProgramCache(tmp_path)) as session:
            results.append(float(step(1.0)))
            session.cache.flush()
        return results

    assert within_limit(call) == [None, 5, 3]


@stored
def test_a_stored_step_is_freed(tmp_path):
    cache = sc.ProgramCache(tmp_path)
    with sc.Session(cache=cache):
        step = sc.step(lambda x: x + 1)
        step(jax.numpy.ones(3))
        gone = weakref.ref(step.__wrapped__)
        within_limit(cache.flush)
        del step
        gc.collect()
    assert gone() is None
