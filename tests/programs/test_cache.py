"""The contract of the program cache, on programs that are not programs."""

import dataclasses
import gc
import inspect
import itertools
import os
import subprocess
import sys
import threading
from types import SimpleNamespace

import pytest

import stepcache as sc
from stepcache import jaxcompat

_numbers = itertools.count(1)


def program(size_bytes=1):
    return SimpleNamespace(size_bytes=size_bytes, settled_key=None, digest="")


def never():
    raise AssertionError("a hit must not build")


class Tenant:
    """An owner that remembers what it lost."""

    def __init__(self):
        self.number = next(_numbers)
        self.gone = []

        self.asked = 0

    def lost(self, program, reason):
        self.gone.append((program, reason))

    def show_use(self):
        self.asked += 1


def fill(cache, tenant, *keys, size_bytes=1):
    made = [program(size_bytes) for _ in keys]
    for key, each in zip(keys, made, strict=True):
        cache.get_or_build(key, tenant, lambda each=each: each)
    return made


def test_a_hit_does_not_build():
    cache, tenant = sc.ProgramCache(), Tenant()
    (made,) = fill(cache, tenant, "k")
    assert cache.get_or_build("k", tenant, never) == (made, False)
    assert cache.get("k", tenant) is made
    assert cache.peek("k") is made and cache.peek("other") is None
    info = cache.info()
    assert (info.programs, info.hits, info.builds, info.evictions) == (1, 2, 1, 0)


def test_bounded_by_count_least_recently_used_first():
    cache, tenant = sc.ProgramCache(max_memory_programs=2), Tenant()
    a, b = fill(cache, tenant, "a", "b")
    cache.get("a", tenant)
    fill(cache, tenant, "c")
    assert tenant.gone == [(b, "evicted")]
    assert cache.peek("a") is a and cache.peek("b") is None


def test_the_oldest_are_asked_to_show_their_use_before_they_go():
    cache, old, new = sc.ProgramCache(max_memory_programs=4), Tenant(), Tenant()
    hot, cold = fill(cache, old, "hot", "cold")
    fill(cache, new, 1)
    assert old.asked == 0, "there is room yet"
    fill(cache, new, 2)
    assert old.asked == 1
    cache.get("hot", old)  # The use that was asked for.
    fill(cache, new, 3)
    assert old.gone == [(cold, "evicted")] and cache.peek("hot") is hot


def test_peeking_leaves_no_trace():
    cache, tenant = sc.ProgramCache(max_memory_programs=2), Tenant()
    a, _ = fill(cache, tenant, "a", "b")
    cache.peek("a")
    fill(cache, tenant, "c")
    assert tenant.gone == [(a, "evicted")]


def test_bounded_by_bytes():
    cache, tenant = sc.ProgramCache(max_bytes=10), Tenant()
    a, b = fill(cache, tenant, "a", "b", size_bytes=4)
    fill(cache, tenant, "c", size_bytes=4)
    assert tenant.gone == [(a, "evicted")]
    fill(cache, tenant, "large", size_bytes=100)
    assert cache.info().programs == 1, "a program larger than the bound is held alone"
    assert [program for program, _ in tenant.gone[:2]] == [a, b]


@pytest.mark.parametrize(
    "options",
    [
        {"max_bytes": 0},
        {"max_memory_programs": 0},
        {"max_bytes": "1GB"},
        {"min_build_seconds": None},
    ],
)
def test_bounds_must_be_positive(options):
    with pytest.raises(sc.OptionError, match=next(iter(options))):
        sc.ProgramCache(**options)


def test_the_bound_on_bytes_holds_for_real_programs():
    import jax
    import numpy as np

    f = sc.step(lambda x: x * 2)
    cache = sc.ProgramCache(max_bytes=1)
    with sc.Session(jax.make_mesh((1,), ("data",)), cache=cache):
        for size in (1, 2, 3):
            f(np.ones(size))
    assert cache.info().programs == 1 and f.stats().evictions == 2


def test_a_failed_build_is_not_cached():
    cache, tenant = sc.ProgramCache(), Tenant()

    def fail():
        raise ValueError("no")

    for _ in range(2):
        with pytest.raises(ValueError):
            cache.get_or_build("k", tenant, fail)
    (made,) = fill(cache, tenant, "k")
    assert cache.peek("k") is made


def test_one_build_however_many_threads_ask():
    cache, tenant = sc.ProgramCache(), Tenant()
    building, go_on, builds, got = threading.Event(), threading.Event(), [], []

    def build():
        builds.append(1)
        building.set()
        assert go_on.wait(30)
        return program()

    def ask():
        got.append(cache.get_or_build("k", tenant, build))

    threads = [threading.Thread(target=ask) for _ in range(16)]
    for thread in threads:
        thread.start()
    assert building.wait(30)
    # Another key is not held up by the build.
    cache.get_or_build("other", tenant, program)
    go_on.set()
    for thread in threads:
        thread.join(30)
    assert len(builds) == 1 and len({id(made) for made, _ in got}) == 1
    assert sum(built for _, built in got) == 1


def interrupted_at(line, work):
    """Calls `work`; Ctrl-C comes as that line of `get_or_build` is about to run."""
    code = sc.ProgramCache.get_or_build.__code__

    def trace(frame, event, argument):
        if event == "line" and frame.f_lineno == line:
            raise KeyboardInterrupt
        return trace if frame.f_code is code else None

    sys.settrace(trace)
    try:
        work()
    except KeyboardInterrupt:
        return True
    finally:
        sys.settrace(None)
    return False


def test_nobody_waits_for_a_build_that_was_interrupted():
    source, first = inspect.getsourcelines(sc.ProgramCache.get_or_build)
    # A call of what is written in C: Python looks for interrupts after it.
    lines = [n for n, text in enumerate(source, first) if text.strip()[:17] != "building.release("]
    interrupted = 0
    for line in lines:
        cache, tenant, got = sc.ProgramCache(None), Tenant(), []
        ask = lambda cache=cache, tenant=tenant: cache.get_or_build("k", tenant, program)  # noqa: E731
        interrupted += interrupted_at(line, ask)
        thread = threading.Thread(target=lambda: got.append(ask()), daemon=True)  # noqa: B023
        thread.start()
        thread.join(30)
        assert got, f"it waits for ever after line {line}"
    assert interrupted > 20


@dataclasses.dataclass
class Settling:
    """A program that serves calls of another key too."""

    settled_key: str
    size_bytes: int = 4
    key: str = "weak"
    digest: str = ""


def test_what_serves_another_key_too_leaves_the_program_that_is_there():
    cache, tenant = sc.ProgramCache(max_bytes=10), Tenant()
    (strong,) = fill(cache, tenant, "strong", size_bytes=4)
    cache.get_or_build("weak", tenant, lambda: Settling("strong"))
    assert cache.peek("strong") is strong
    assert (cache.info().programs, cache.info().evictions) == (2, 0)


def test_what_serves_another_key_too_has_two_of_the_oldest_show_their_use():
    cache, tenants = sc.ProgramCache(max_memory_programs=8), [Tenant() for _ in range(6)]
    for number, tenant in enumerate(tenants):
        fill(cache, tenant, number)
    cache.get_or_build("weak", tenants[-1], lambda: Settling("strong"))
    assert [tenant.asked for tenant in tenants] == [1, 1, 0, 0, 0, 0]


EXIT = """
import numpy as np, stepcache as sc
from stepcache.programs.memory import MemoryPrograms

step = sc.step(lambda x: x)
step(np.ones(2))
MemoryPrograms.release = lambda self, number: print("released")
"""


@pytest.mark.slow
def test_the_end_of_a_process_does_not_drop_its_programs_one_by_one():
    environment = dict(os.environ, STEPCACHE_DIR="off")
    command = [sys.executable, "-c", EXIT]
    done = subprocess.run(
        command, env=environment, capture_output=True, text=True, timeout=200, check=True
    )
    assert done.stdout == ""


def test_whoever_waited_for_a_failed_build_tries_again():
    cache, tenant = sc.ProgramCache(), Tenant()
    building, go_on, outcomes = threading.Event(), threading.Event(), []

    def fail():
        building.set()
        assert go_on.wait(30)
        raise ValueError("first")

    def ask(build):
        try:
            outcomes.append(cache.get_or_build("k", tenant, build)[1])
        except ValueError as error:
            outcomes.append(str(error))

    first = threading.Thread(target=ask, args=(fail,))
    first.start()
    assert building.wait(30)
    second = threading.Thread(target=ask, args=(program,))
    second.start()
    go_on.set()
    first.join(30), second.join(30)
    assert sorted(map(str, outcomes)) == ["True", "first"]


def test_a_build_that_needs_itself_does_not_wait_for_itself():
    cache, tenant = sc.ProgramCache(), Tenant()

    def build():
        inner, _ = cache.get_or_build("k", tenant, program)
        assert inner is not None
        return program()

    assert cache.get_or_build("k", tenant, build)[1]


def test_programs_leave_with_the_function_that_they_are_kept_for():
    cache, one, two, other = sc.ProgramCache(), Tenant(), Tenant(), Tenant()
    two.number = one.number  # Two steps over one function.
    fill(cache, one, "a", "b")
    fill(cache, other, "c")
    assert cache.get("a", two) is not None
    assert list(map(cache.programs_of, (one, two, other))) == [2, 2, 1]
    cache.release(one.number)
    assert cache.peek("a") is None and cache.peek("c") is not None
    cache.release(other.number)
    assert cache.info().programs == 0
    assert not (one.gone or two.gone or other.gone), "leaving is no eviction"


def test_all_steps_over_a_function_are_told_of_an_eviction():
    cache, one, two = sc.ProgramCache(max_memory_programs=1), Tenant(), Tenant()
    two.number = one.number
    (made,) = fill(cache, one, "a")
    cache.get("a", two)
    fill(cache, one, "b")
    assert one.gone == two.gone == [(made, "evicted")]


def test_a_finalizer_may_release_while_the_cache_is_locked():
    cache, tenant = sc.ProgramCache(), Tenant()
    fill(cache, tenant, "k")
    with cache._lock:
        cache.release(tenant.number)  # Must not deadlock.
    assert cache.info().programs == 0


def test_an_owner_that_is_gone_is_not_told():
    cache, tenant = sc.ProgramCache(max_memory_programs=1), Tenant()
    fill(cache, tenant, "a")
    del tenant
    gc.collect()
    fill(cache, Tenant(), "b")
    assert cache.info().evictions == 1


def test_jax_clear_caches_clears():
    import jax

    cache, tenant = sc.ProgramCache(), Tenant()
    fill(cache, tenant, "a")
    jax.clear_caches()
    assert cache.info().programs == int(not jaxcompat.PRIVATE_API)


def test_clearing_tells_the_owners():
    cache, tenant = sc.ProgramCache(), Tenant()
    made = fill(cache, tenant, "a", "b")
    cache.clear()
    assert tenant.gone == [(each, "cleared") for each in made] and cache.info().programs == 0


def test_many_threads_many_keys():
    """Bounds and counts hold whatever the interleaving."""
    cache, tenant = sc.ProgramCache(max_memory_programs=5), Tenant()
    errors = []

    def work(seed):
        try:
            for i in range(200):
                cache.get_or_build((seed + i * 7) % 11, tenant, program)
                assert cache.info().programs <= 5
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    info = cache.info()
    assert not errors and info.builds - info.evictions == info.programs
