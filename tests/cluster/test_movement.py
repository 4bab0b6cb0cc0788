"""Where a thread is, seen from another one while it runs on."""

import sys
import threading
from dataclasses import asdict
from types import SimpleNamespace

import pytest

from stepcache.distributed.failure_detection import Watch
from stepcache.distributed.hang_report import Movement


def code(x):
    return x


class Frame(SimpleNamespace):
    """One of the standard library, which has returned when its caller is asked for again."""

    f_code = threading.Thread.run.__code__
    f_lasti, f_lineno = 0, 1
    callers: list

    @property
    def f_back(self):
        return self.callers.pop(0) if self.callers else None


def test_a_frame_may_return_while_it_is_looked_at(monkeypatch):
    caller = SimpleNamespace(f_code=code.__code__, f_lasti=0, f_lineno=1, f_back=None)
    thread = threading.get_ident()
    for callers, where in (([caller], "code"), ([], "run")):
        frame = Frame(callers=list(callers))
        monkeypatch.setattr(sys, "_current_frames", lambda frame=frame: {thread: frame})
        movement = Movement(thread)
        movement.look()
        assert movement.where.endswith(f"in {where}")


@pytest.fixture
def switching_at_once():
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    yield
    sys.setswitchinterval(before)


@pytest.mark.slow
def test_the_watching_thread_reads_sessions_while_another_enters_and_leaves(switching_at_once):
    watch, over = object.__new__(Watch), threading.Event()
    watch._sessions, watch._inside, watch._failure = {}, [], ""
    watch._ended, watch.rank, watch._entering = "", 0, threading.Lock()
    watch.enter("mesh", (0, 1), 60.0, "warn")

    def enters_and_leaves():
        number = 0
        while not over.is_set():
            number += 1
            for mesh in ("mesh", f"mesh {number % 100}"):
                watch.enter(mesh, (0, 1), 60.0, "warn")
                watch.leave(mesh, None)

    thread = threading.Thread(target=enters_and_leaves)
    thread.start()
    try:
        for _ in range(3000):
            assert watch._outside({}, of_transport=True) == {}
            assert "mesh" in asdict(watch._row())["sessions"]
    finally:
        over.set()
        thread.join()
