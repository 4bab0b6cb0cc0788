"""What runs beside the calls: whatever happens to it, the call is right and does not hang."""

import contextlib
import gc
import logging
import os
import subprocess
import sys
import threading
import time
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from stepcache.fingerprint import installed_packages
from stepcache.fingerprint.recorder import Recording
from stepcache.programs.background import LATER, Worker, until_ready
from stepcache.programs.preload import Preloader

import stepcache as sc
from stepcache import jaxcompat
from stepcache._changes import Undoing
from stepcache.programs import background
from stepcache.storage.run_log import Row
from stepcache.weak_objects import WeakObjects

LIMIT_SECONDS = 30
stored = pytest.mark.skipif(
    not jaxcompat.PRIVATE_API, reason="programs are stored through JAX's private API"
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
    worker = Worker("stepcache test", droppable=False)
    yield worker
    within_limit(worker.stop)


@pytest.fixture
def no_threads(monkeypatch):
    """No thread of stepcache can be started."""
    start = threading.Thread.start

    def fail(thread):
        if thread.name.startswith("stepcache"):
            raise RuntimeError("can't start new thread")
        start(thread)

    def fail_too(function, args):
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading.Thread, "start", fail)
    monkeypatch.setattr(background._thread, "start_new_thread", fail_too)


def end_thread(monkeypatch, worker):
    """Has the worker's thread die of what is no job's fault."""
    with monkeypatch.context() as patch:

        def die(worker):
            raise MemoryError("no room for the list of jobs")

        patch.setattr(Worker, "_work", die)
        job = worker.submit(lambda: 3)
        thread = worker._thread
        assert thread is not None
        thread.join(LIMIT_SECONDS)
    return job


# ---- jobs --------------------------------------------------------------------------------------


def test_a_job_that_is_taken_back_before_it_begins_never_runs(worker):
    begun, go_on = threading.Event(), threading.Event()
    worker.submit(lambda: begun.set() or go_on.wait(LIMIT_SECONDS))
    assert begun.wait(LIMIT_SECONDS)
    ran = []
    job = worker.submit(lambda: ran.append(1))
    assert within_limit(lambda: worker.take(job)) is None
    go_on.set()
    worker.flush()
    assert not ran


def test_a_job_that_is_not_due_is_taken_back(worker):
    job = worker.submit(lambda: LATER)
    assert within_limit(lambda: worker.take(job)) is None
    within_limit(worker.flush)


def test_taking_a_job_back_waits_until_it_is_done(worker):
    begun, go_on = threading.Event(), threading.Event()

    def work():
        begun.set()
        assert go_on.wait(LIMIT_SECONDS)
        return 3

    job = worker.submit(work)
    assert begun.wait(LIMIT_SECONDS)
    threading.Timer(0.05, go_on.set).start()
    assert within_limit(lambda: worker.take(job)) == 3


def test_a_job_that_fails_is_logged_and_nothing_waits_for_it(worker, caplog):
    def work():
        raise SystemExit("of a job")

    job, later = worker.submit(work), worker.submit(lambda: 4)
    worker.flush()
    assert (worker.take(job), worker.take(later)) == (None, 4)
    assert "a job failed" in caplog.text and "of a job" in caplog.text


def test_nothing_waits_for_a_thread_that_has_died(worker, monkeypatch, caplog):
    job = end_thread(monkeypatch, worker)
    assert "no room for the list of jobs" in caplog.text
    assert within_limit(lambda: worker.take(job)) is None
    job = end_thread(monkeypatch, worker)
    within_limit(worker.flush)
    assert job.outcome == 3, "another thread runs what is left"


def test_a_thread_that_has_died_while_it_ran_a_job(worker, monkeypatch):
    def die(worker):
        worker._running = worker._jobs[0]
        raise MemoryError

    monkeypatch.setattr(Worker, "_work", die)
    job = worker.submit(lambda: 3)
    assert within_limit(lambda: worker.take(job)) is None


def test_jobs_run_where_no_thread_can_be_started(worker, monkeypatch, no_threads):
    job = worker.submit(lambda: 3)
    within_limit(worker.flush)
    assert job.outcome == 3


def test_jobs_run_where_the_thread_has_died_and_none_can_be_started(worker, monkeypatch):
    job = end_thread(monkeypatch, worker)

    def fail(thread):
        raise RuntimeError("can't start new thread")

    with monkeypatch.context() as patch:
        patch.setattr(background.threading.Thread, "start", _only_ours(fail))
        within_limit(worker.flush)
    assert job.outcome == 3


def _only_ours(fail):
    start = threading.Thread.start
    return lambda t: fail(t) if t.name.startswith("stepcache") else start(t)


def test_an_interruption_outside_a_job_is_not_reported(monkeypatch, capfd):
    begun = threading.Event()

    def spin(worker):
        begun.set()
        while True:
            pass

    monkeypatch.setattr(Worker, "_run", spin)
    monkeypatch.setattr(threading, "excepthook", threading.__excepthook__)
    worker = Worker("stepcache test", droppable=True)
    worker.submit(lambda: None)
    assert begun.wait(LIMIT_SECONDS)
    within_limit(worker.stop)
    assert capfd.readouterr().err == ""
    assert threading.excepthook is threading.__excepthook__


def test_jobs_that_have_to_be_done_do_not_need_an_interrupted_worker(worker, monkeypatch):
    """A thread that is interrupted while it takes a lock may end with it."""
    droppable = Worker("stepcache test droppable", droppable=True)
    begun, interrupted = threading.Event(), threading.Event()

    def run_long():
        begun.set()
        while not interrupted.is_set():
            time.sleep(0.001)

    def end_with_the_lock(thread):
        if not interrupted.is_set():
            taking = threading.Thread(target=droppable._changed.acquire)
            taking.start()
            taking.join()
            interrupted.set()

    monkeypatch.setattr(background, "_interrupt", end_with_the_lock)
    monkeypatch.setattr(background, "_workers", [droppable, worker])
    droppable.submit(run_long)
    assert begun.wait(LIMIT_SECONDS)

    def hand_on():
        interrupted.wait(0.3)
        droppable.submit(lambda: None)
        return 7

    job = worker.submit(hand_on)
    within_limit(lambda: background._stop_all() or True)
    droppable.begin()  # Nobody gets its lock any more.
    assert job.outcome == 7


def test_jobs_that_are_waited_for_do_not_wait_for_a_build(worker, monkeypatch):
    monkeypatch.setattr("stepcache.programs.builds._LONGEST_STAGE_SECONDS", 600.0)
    with Undoing() as undoing:
        background.builds.in_python(undoing)
        job = worker.submit(lambda: 3)
        within_limit(worker.flush)
    assert job.outcome == 3


FORK = """
import os, threading, time
from stepcache.programs.background import Worker

lock, begun = threading.Lock(), threading.Event()

def work():
    with lock:
        begun.set()
        time.sleep(0.1)

worker = Worker("stepcache test", droppable=True)
worker.submit(work)
begun.wait()
child = os.fork()
assert lock.acquire(timeout=30), "a job was running in the parent"
lock.release()
assert worker.submit(lambda: 3) and worker.flush() is None
if child:
    assert os.waitpid(child, 0)[1] == 0
"""


@pytest.mark.slow
@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork on this platform")
@pytest.mark.skipif(not jaxcompat.PRIVATE_API, reason="whether JAX is running is a private name")
def test_a_forked_child_waits_for_no_lock_of_a_job_of_its_parent():
    command = [sys.executable, "-W", "ignore", "-c", FORK]  # Python 3.12 warns of each such fork.
    done = subprocess.run(command, capture_output=True, text=True, timeout=200)
    assert (done.returncode, done.stderr) == (0, "")


# ---- a step where no thread can be started -----------------------------------------------------

SOURCE = """
@sc.step
def step(x):
    return x * 2 + 1
"""


def life(source, tmp_path, **names):
    """The module that `source` makes in a process of its own, as far as a step can tell."""
    module = types.ModuleType("life_of_threads")
    path = tmp_path / "life_of_threads.py"
    path.write_text(source)
    module.__dict__.update(names, jax=jax, jnp=jnp, np=np, sc=sc, __file__=str(path))
    exec(compile(source, str(path), "exec"), module.__dict__)
    return module


def cache_in(tmp_path, **options):
    return sc.ProgramCache(tmp_path / "programs", **{"verify": "off", **options})


@stored
def test_a_program_is_built_stored_and_loaded_without_any_thread(tmp_path, no_threads):
    for loads in (0, 1):
        cache = cache_in(tmp_path, verify="background")
        with sc.Session(cache=cache):
            step = life(SOURCE, tmp_path).step
            assert step(np.ones(8))[0] == 3
        within_limit(cache.flush)
        assert step.stats().loads == loads, step.last_miss


@stored
def test_a_call_needs_nothing_of_a_trace_that_could_not_be_looked_at(tmp_path, monkeypatch, caplog):
    """The thread beside the compilation is ended before it has told anything."""
    from stepcache.programs.levels import Levels

    def fail(*_):
        raise MemoryError("no room")

    monkeypatch.setattr(Levels, "_examine", fail)
    cache = cache_in(tmp_path)
    with sc.Session(cache=cache):
        step = life(SOURCE, tmp_path).step
        assert step(np.ones(8))[0] == 3
    assert "no room" in caplog.text
    assert "MemoryError" in str(step.last_miss)


@stored
def test_a_call_that_interrupts_a_build_waits_for_none_of_its_locks(tmp_path):
    """As where a signal is handled by a step while another one is built."""
    cache = cache_in(tmp_path)
    step = life(SOURCE, tmp_path).step

    def call():
        with Undoing() as undoing, installed_packages._lock, sc.Session(cache=cache):
            background.builds.in_python(undoing)
            return step(np.ones(8))[0]

    assert within_limit(call) == 3


@stored
def test_what_traces_recorded_is_put_together_by_one_thread_at_a_time(tmp_path, monkeypatch):
    put_together, meeting = Recording.with_all_of, threading.Barrier(2)
    met = []

    def meet(recorded, other):
        try:
            meeting.wait(0.5)
            met.append(1)
        except threading.BrokenBarrierError:
            pass
        return put_together(recorded, other)

    monkeypatch.setattr(Recording, "with_all_of", meet)
    cache = cache_in(tmp_path)
    session = sc.Session(cache=cache)
    with session:
        step = life(SOURCE, tmp_path).step

    def call(size):
        with session:
            assert step(np.ones(size))[0] == 3

    threads = [threading.Thread(target=call, args=(size,)) for size in (3, 4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(LIMIT_SECONDS)
    cache.flush()
    assert not met and step.stats().compiles == 2


# ---- outputs that cannot be asked --------------------------------------------------------------

KEYS = {
    "alone": "jax.random.split(key)[0]",
    "last": "(jnp.ones(3), jax.random.split(key)[0])",
    "nested": "{'a': [jnp.ones(3), {'b': (jax.random.split(key, 4),)}], 'c': None}",
}


@stored
@pytest.mark.parametrize("place", KEYS)
def test_a_step_that_returns_a_random_key_is_stored(place, tmp_path, caplog):
    source = f"@sc.step\ndef step(key):\n    return {KEYS[place]}\n"
    outputs = []
    for loads in (0, 1):
        cache = cache_in(tmp_path)
        with sc.Session(cache=cache):
            step = life(source, tmp_path).step
            leaves = jax.tree.leaves(step(jax.random.key(3)))
            outputs.append([np.asarray(jax.random.key_data(leaves[-1]))])
        cache.flush()
        assert step.stats().loads == loads, step.last_miss
    np.testing.assert_array_equal(*outputs)
    assert not [each for each in caplog.records if each.levelno >= logging.WARNING]


class Late:
    """An output that is not there at the first look."""

    def __init__(self, array):
        self.array, self.looks = array, 0

    def is_deleted(self):
        return self.array.is_deleted()

    def is_ready(self):
        self.looks += 1
        return self.looks > 1 and self.array.is_ready()


@pytest.mark.parametrize("deleted", ["deleted", "donated"])
def test_outputs_that_are_gone_cannot_be_timed(deleted):
    output = Late(jnp.arange(8.0) + 1)
    look = until_ready({"a": output}, time.perf_counter())
    if deleted == "donated":
        jax.jit(lambda x: x + 1, donate_argnums=0)(output.array)
    else:
        output.array.delete()
    assert look() is None


def test_outputs_that_are_there_at_once_are_timed_at_once():
    look = until_ready(jax.block_until_ready(jnp.ones(3)), time.perf_counter() - 2)
    assert look() >= 2


# ---- loading ahead -----------------------------------------------------------------------------


@stored
def test_one_job_waits_for_jax_to_load_all_programs(monkeypatch):
    is_running, read = threading.Event(), []
    monkeypatch.setattr(jaxcompat, "backends_are_initialized", is_running.is_set)
    rows = {
        name: [Row("built", 0.0, "", "", "", program=f"{name}{n}", devices=[0]) for n in (1, 2)]
        for name in "ab"
    }
    run_log = types.SimpleNamespace(last_run_of=rows.get)
    preloader = Preloader(
        run_log, lambda lookup: [], lambda digest, load: read.append(digest), None
    )
    for name in rows:
        preloader.preload(name)
    limit = time.monotonic() + LIMIT_SECONDS
    while len(preloader._ahead) < 4 and time.monotonic() < limit:
        time.sleep(0.01)
    time.sleep(0.1)
    assert len(preloader.worker._jobs) == 1
    is_running.set()
    for _ in range(2):  # That job, and those that it submits.
        within_limit(preloader.worker.flush)
    assert sorted(read) == ["a1", "a2", "b1", "b2"]


@stored
def test_a_program_is_loaded_ahead_for_devices_of_its_own_platform():
    """Devices of several platforms have the same numbers."""
    places = {"here": ("cpu", [0]), "elsewhere": ("tpu", [0]), "more": ("cpu", [0, 99])}
    rows = [
        Row("built", 0.0, "", "", "", program=name, platform=platform, devices=numbers)
        for name, (platform, numbers) in places.items()
    ]
    read = []
    preloader = Preloader(
        types.SimpleNamespace(last_run_of=lambda label: rows),
        lambda lookup: [],
        lambda digest, load: read.append((digest, load.keywords["devices"])) or digest,
        None,
    )
    preloader.preload("step")
    for _ in range(3):
        within_limit(preloader.worker.flush)
    assert read == [("here", tuple(jax.devices("cpu")[:1]))]
    assert preloader.take("here", jax.devices("cpu")[:1]) == "here"


# ---- what a check in the background has found --------------------------------------------------


def test_two_calls_at_once_do_not_both_judge_what_a_check_has_found():
    checks = sc.step(lambda x: x)._engine.checks
    checks.suspicion = lambda: pytest.fail("it was judged twice")

    class Taken:
        """The lock, where another thread has come first."""

        def __enter__(self):
            checks.suspicion = None

        def __exit__(self, *_):
            pass

    checks._lock = Taken()
    checks.raise_if_stale()


# ---- weak sets ---------------------------------------------------------------------------------


class Thing:
    pass


def test_weak_objects_can_be_listed_while_others_are_added():
    kept = [Thing() for _ in range(8)]
    objects = WeakObjects()
    for each in kept:
        objects.add(each)
        objects.add(each)
    for each in objects:
        kept.append(Thing())
        objects.add(kept[-1])
        assert each in objects
    del each
    assert len(list(objects)) == 16
    del kept[4:]
    gc.collect()
    assert list(objects) == kept and Thing() not in objects


def test_weak_objects_of_many_threads():
    objects, errors, ended = WeakObjects(), [], threading.Event()
    kept = [Thing() for _ in range(50)]
    for each in kept:
        objects.add(each)

    def add():
        while not ended.is_set():
            for each in [Thing() for _ in range(50)]:
                objects.add(each)

    def look():
        try:
            for _ in range(3000):
                assert len([each for each in objects if each is not None]) >= 50
        except BaseException as error:
            errors.append(error)

    adding = [threading.Thread(target=add, daemon=True) for _ in range(2)]
    looking = [threading.Thread(target=look, daemon=True) for _ in range(2)]
    for thread in (*adding, *looking):
        thread.start()
    for thread in looking:
        thread.join(LIMIT_SECONDS)
    ended.set()
    for thread in adding:
        thread.join(LIMIT_SECONDS)
    assert not errors and not any(thread.is_alive() for thread in (*adding, *looking))


def test_no_weak_set_is_shared_by_threads():
    """`WeakObjects` is used everywhere: a `WeakSet` cannot be listed while others add to it."""
    from pathlib import Path

    package = Path(sc.__file__).parent
    made = ("WeakSet(", "WeakSet[")
    texts = {path: path.read_text() for path in package.rglob("*.py")}
    named = [path for path, text in texts.items() if any(map(text.__contains__, made))]
    assert not named


def test_of_jobs_that_others_wait_for_a_few_wait_and_none_under_flush(monkeypatch):
    monkeypatch.setattr(background.builds, "are_quiet", lambda seconds=0.0: False)
    monkeypatch.setattr(background, "_AT_END_SECONDS", 0.0175)  # For three of 5 ms.
    monkeypatch.setattr(background, "_SOON_SECONDS", 60.0)
    done: list[int] = []

    def compute(seconds=0.005):
        limit = time.thread_time() + seconds
        while time.thread_time() < limit:
            pass

    def job(number):
        calls = []

        def work():
            calls.append(None)
            if len(calls) == 1:
                return background.SOON
            compute()
            return done.append(number)

        return work

    worker = background.Worker("a worker of a test", droppable=False)
    for number in range(8):
        worker.submit(job(number))
    limit = time.monotonic() + 10
    while len(done) < 5 and time.monotonic() < limit:
        time.sleep(0.01)
    time.sleep(10 * background._POLL_SECONDS)
    assert done == [0, 1, 2, 3, 4]
    within_limit(worker.flush)
    assert done == list(range(8))


def test_a_job_that_can_wait_runs_again_once_no_step_is_being_started(monkeypatch):
    quiet, ran, runs = threading.Event(), threading.Event(), []
    monkeypatch.setattr(background.builds, "are_quiet", lambda seconds=0.0: quiet.is_set())

    def work():
        runs.append(quiet.is_set())
        ran.set()
        return background.WHEN_QUIET if len(runs) == 1 else None

    worker = background.Worker("a worker of a test", droppable=False)
    worker.submit(work)
    assert ran.wait(10)
    other = worker.submit(lambda: "done")
    within_limit(lambda: worker.take(other))
    time.sleep(10 * background._POLL_SECONDS)
    assert runs == [False]
    quiet.set()
    within_limit(worker.flush)
    assert runs == [False, True]


@pytest.mark.sample(every=2)
@stored
@pytest.mark.parametrize("ends", [True, False])
def test_a_verification_that_fails_as_the_process_ends_says_nothing(ends, tmp_path, monkeypatch):
    """An interrupted trace may raise whatever JAX makes of that."""
    monkeypatch.setattr("stepcache.programs.resolve._QUIET_SECONDS", 0.0)
    with sc.Session(cache=cache_in(tmp_path)) as session:
        life(SOURCE, tmp_path).step(np.ones(8))
        session.cache.flush()
    jax.clear_caches()
    cache = cache_in(tmp_path, verify="background")
    verifier = cache.archive().verifier

    def interrupted(*_):
        if ends:
            verifier.drop_jobs()
        raise KeyError("what is left of an interrupted trace")

    with sc.Session(cache=cache):
        step = life(SOURCE, tmp_path).step
        monkeypatch.setattr("stepcache.programs.verification.trace", interrupted)
        step(np.ones(8))
        cache.flush()
        verifier.flush()
        while verifier._running is not None:
            time.sleep(0.01)
        assert step.stats().loads == 1
        stale = pytest.raises(sc.StaleProgramError, match="tracing it raised")
        with contextlib.nullcontext() if ends else stale:
            step(np.ones(8))


@stored
@pytest.mark.parametrize("is_long", [True, False])
def test_what_took_long_to_build_waits_for_no_quiet_moment(is_long, tmp_path, monkeypatch):
    monkeypatch.setattr(background, "_QUIET_SECONDS", 60.0)
    monkeypatch.setattr(background, "_SOON_SECONDS", 60.0)
    monkeypatch.setattr("stepcache.programs.resolve._LONG_SECONDS", 0.0 if is_long else 60.0)
    cache = cache_in(tmp_path)
    archive = cache.archive()
    with sc.Session(cache=cache):
        life(SOURCE, tmp_path).step(np.ones(8))
        limit = time.monotonic() + (30 if is_long else 1)
        while not archive.has_programs() and time.monotonic() < limit:
            time.sleep(0.01)
    assert archive.has_programs() == is_long
    cache.flush()
    assert archive.has_programs()
