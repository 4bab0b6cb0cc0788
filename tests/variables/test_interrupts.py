"""A call that Ctrl-C interrupts writes what its program returned: what it took is gone by then."""

import gc
import signal
import sys
import threading
import weakref
from concurrent.futures import ThreadPoolExecutor

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import stepcache as sc

INTERRUPTS = 40


@pytest.fixture
def interrupted():
    """Calls a function again and again, until an interrupt comes; and all of that a few times."""

    def interrupt(*_):
        raise KeyboardInterrupt

    def until_interrupted(call, look):
        for number in range(INTERRUPTS):
            with pytest.raises(KeyboardInterrupt):
                signal.setitimer(signal.ITIMER_REAL, 1e-3 + 1e-4 * number)
                while True:
                    call()
            look()

    before = signal.signal(signal.SIGALRM, interrupt)
    yield until_interrupted
    signal.setitimer(signal.ITIMER_REAL, 0)
    signal.signal(signal.SIGALRM, before)


def added(params, x, scale=1):
    return jax.tree.map(lambda leaf: leaf + scale, params), x.sum()


@pytest.mark.parametrize("named", [{}, {"scale": np.float32(1)}])
def test_an_interrupted_call_loses_no_variables(interrupted, named):
    step = sc.step(added, carry="params")
    tree = {"a": np.zeros((64, 64), np.float32), "b": np.zeros(5, np.float32)}
    params, x = sc.Variables(tree, name="params"), np.ones(3, np.float32)

    def look():
        value = params.value
        assert value["a"][0, 0] == value["b"][0] == params.version

    for _ in range(3):
        step(params, x, **named)
    interrupted(lambda: step(params, x, **named), look)


@pytest.mark.parametrize("count", [2, 25])
@pytest.mark.parametrize("is_planned", [False, True])
def test_a_call_that_is_interrupted_while_it_waits_lets_go_of_the_others(
    count, is_planned, interrupted
):
    step = sc.step(lambda several: (several, 0), carry="several")
    several = [sc.Variables(np.zeros(3, np.float32)) for _ in range(count)]
    for _ in range(3 if is_planned else 0):
        step(several)
    versions = [each.version for each in several]
    is_held, may_end, found = threading.Event(), threading.Event(), []

    def hold():
        with several[-1]._lock:
            is_held.set()
            may_end.wait(60)

    holder = threading.Thread(target=hold)
    holder.start()
    is_held.wait(60)
    signal.setitimer(signal.ITIMER_REAL, 0.2)
    with pytest.raises(KeyboardInterrupt):
        step(several)
    may_end.set()
    holder.join(60)

    def look():
        for each in several:
            found.append(each._lock.acquire(timeout=5))
            each._lock.release()

    another = threading.Thread(target=look)
    another.start()
    another.join(60)
    assert found == [True] * count
    step(several)
    assert [each.version for each in several] == [version + 1 for version in versions]


def is_free(variables):
    if is_free := variables._lock.acquire(timeout=5):
        variables._lock.release()
    return is_free


@pytest.mark.parametrize("count", [1, 9])
def test_a_planned_call_that_is_interrupted_anywhere_keeps_the_value(count):
    """Interrupts come after calls of functions: here after each of them in turn."""
    several = [sc.Variables(np.zeros(3, np.float32)) for _ in range(count)]
    step = sc.step(added, carry="params")
    for _ in range(2):
        step(several, jnp.ones(3))
    interrupts = 0
    while True:
        left = interrupts
        batch = jnp.ones(3)
        kept = weakref.ref(batch)

        def interrupt(frame, event, _):
            nonlocal left
            if event == "c_return" and frame.f_code.co_name == "plan":
                left -= 1
                if left < 0:
                    raise KeyboardInterrupt

        sys.setprofile(interrupt)
        try:
            step(several, batch)
            break
        except KeyboardInterrupt:
            interrupts += 1
        finally:
            sys.setprofile(None)
            del batch
        gc.collect()
        assert kept() is None
        for each in several:
            assert each.value[0] == each.version
        with ThreadPoolExecutor(1) as another_thread:
            assert all(another_thread.map(is_free, several))
    assert interrupts
