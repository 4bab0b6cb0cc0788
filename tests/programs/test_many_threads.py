"""Many threads at one step, with the disk on: every value right, no exception, nobody stuck.

On one device: XLA on CPU can deadlock when threads launch programs over several at once, under
plain `jax.jit` too.
"""

import faulthandler
import random
import threading
import time
import types

import jax
import numpy as np
import pytest

import stepcache as sc
from stepcache import jaxcompat

pytestmark = pytest.mark.skipif(
    not jaxcompat.PRIVATE_API, reason="programs are stored through JAX's private API"
)

LIMIT_SECONDS = 240
THREADS = 8
SOURCE = """
import jax
import stepcache as sc

def function(x):
    return jax.lax.sin(x) * 2 + x.shape[0]

step = sc.step(function)
"""


class Caller:
    """One thread: calls the step with each size once, in an order of its own, and meddles."""

    def __init__(self, module, cache, sizes, seed):
        self.module, self.cache, self.random = module, cache, random.Random(seed)
        self.sizes = self.random.sample(sizes, len(sizes))
        self.calls = 0

    def __call__(self):
        session = sc.Session(cache=self.cache)
        with session:
            for size in self.sizes:
                self.meddle()
                step = self.module.step
                if self.random.random() < 0.1:
                    step = sc.step(self.module.function)
                given = np.full(size, size / 100, np.float32)
                expected = np.sin(given) * 2 + size
                for _ in range(2):
                    np.testing.assert_allclose(step(given), expected, rtol=1e-5)
                self.calls += 1

    def meddle(self):
        meddling = {
            self.module.step.clear_cache: 0.03,
            self.cache.clear: 0.03,
            jax.clear_caches: 0.02,
            self.cache.flush: 0.03,
            self.module.step.stats: 0.05,
            self.cache.info: 0.05,
        }
        for work, share in meddling.items():
            if self.random.random() < share:
                work()


def run_all(works):
    """Runs functions on threads of their own, all at once; raises what one of them raised."""
    start, errors = threading.Barrier(len(works)), []

    def run(work):
        try:
            start.wait()
            work()
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=run, args=(work,), daemon=True) for work in works]
    for thread in threads:
        thread.start()
    limit = time.monotonic() + LIMIT_SECONDS * max(1, len(works[0].sizes) // 20)
    for thread in threads:
        thread.join(max(0.0, limit - time.monotonic()))
    if any(thread.is_alive() for thread in threads):
        faulthandler.dump_traceback(all_threads=True)
        pytest.fail("threads hang")
    if errors:
        raise errors[0]


@pytest.mark.parametrize(
    ("signatures", "rounds"),
    [
        (12, 2),
        pytest.param(200, 20, marks=[pytest.mark.slow, pytest.mark.timeout(7200)]),
    ],
)
def test_many_threads_build_store_load_and_clear_at_once(signatures, rounds, tmp_path, caplog):
    module = types.ModuleType("many_threads")
    module.__file__ = str(tmp_path / "many_threads.py")
    for number in range(rounds):
        # Each directory serves two rounds: one that builds, and one that loads.
        cache = sc.ProgramCache(tmp_path / f"programs{number // 2}", max_memory_programs=8)
        with sc.Session(cache=cache):
            exec(compile(SOURCE, module.__file__, "exec"), module.__dict__)
        sizes = range(1, signatures + 1)
        callers = [Caller(module, cache, sizes, THREADS * number + n) for n in range(THREADS)]
        run_all(callers)
        cache.flush()
        assert [caller.calls for caller in callers] == [signatures] * THREADS
        stats = module.step.stats()
        assert stats.loads > 0 if number % 2 else stats.compiles > 0
        assert not cache.store().disk.quarantined
    assert "Traceback" not in caplog.text
