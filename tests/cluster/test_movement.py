"""Where a thread is, seen from another one while it runs on."""

import sys
import threading
import time
from pathlib import Path
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import pytest

from stepcache.pods.hang import Movement, stacks


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
        assert f" in {where}: " in movement.where


@pytest.mark.parametrize("file", ["hang.py", jax.__file__])
def test_an_instruction_of_no_line_is_seen_too(monkeypatch, file):
    """Python gives such a frame the line None, for an instant, as before and after a `with`."""
    place = SimpleNamespace(co_filename=file, co_name="work")
    frame = SimpleNamespace(f_code=place, f_lasti=0, f_lineno=None, f_back=None)
    monkeypatch.setattr(sys, "_current_frames", lambda: {threading.get_ident(): frame})
    movement = Movement(threading.get_ident())
    assert movement.look() == 0.0
    assert movement.where == f"{Path(file).name}:0 in work: "
    assert movement.waits_for_device is (file == jax.__file__)


def test_code_without_a_file_is_the_users_and_waits_for_no_device():
    """As that of `python -c`, of which no line says for what it waits."""
    held, given = threading.Lock(), {}
    held.acquire()
    exec("def wait(lock):\n    lock.acquire()", given)
    thread = threading.Thread(target=given["wait"], args=(held,))
    thread.start()
    assert thread.ident is not None
    movement = Movement(thread.ident)
    while "wait" not in movement.where:
        movement.look()
    assert movement.where.startswith("<string>:2 in wait")
    assert not movement.waits_for_device
    held.release()
    thread.join()


def test_a_thread_that_compiles_waits_for_no_device():
    """XLA compiles in threads of its own, for seconds or minutes, while the calling one waits."""

    def model(x):
        for _ in range(100):
            x = jnp.sin(x @ x)
        return x

    def work():
        jax.jit(model).lower(jnp.ones((8, 8))).compile()
        compiled.set()
        over.wait()

    compiled, over, thread = threading.Event(), threading.Event(), threading.Thread(target=work)
    thread.start()
    assert thread.ident is not None
    movement, compiles = Movement(thread.ident), []
    while not compiled.is_set():
        before = sys._current_frames()[thread.ident]
        movement.look()
        is_same = sys._current_frames()[thread.ident] is before
        if is_same and before.f_code.co_name == "backend_compile_and_load":
            compiles.append(movement.waits_for_device)
    over.set()
    thread.join()
    assert compiles and not any(compiles)


def test_a_thread_that_waits_does_not_move_and_one_that_computes_does():
    go, over = threading.Event(), threading.Event()

    def work():
        go.wait()
        while not over.is_set():
            sum(range(1000))

    thread = threading.Thread(target=work, name="working")
    thread.start()
    assert thread.ident is not None
    movement = Movement(thread.ident)
    movement.look()
    time.sleep(0.1)
    assert movement.look() > 0.05
    assert "working:\n" in stacks() and "in work\n    go.wait()" in stacks()
    go.set()
    time.sleep(0.05)
    assert movement.look() == 0.0
    time.sleep(0.1)
    assert movement.look() == 0.0
    over.set()
    thread.join()
