"""Functions under `functools.lru_cache` that were called before a trace: it does not enter them."""

import functools
import math
import types
from math import sqrt

import jax.numpy as jnp
import numpy as np
import pytest
from numpy import info

from stepcache.fingerprint import remembered
from stepcache.fingerprint.remembered import holds_what_it_computes
from tests.programs.starts import levels, start

SCALE, SIZES, OBJECT = 2.0, (2, 3), types.SimpleNamespace(scale=2.0)


def doubled(x):
    return x * SCALE


@functools.cache
def inner(n):
    return np.ones(n)


def plain(n):
    return np.arange(n, dtype=np.float32) / n


def of_several(n, *sizes, base=10_000.0):
    return 1.0 / base ** (np.arange(0, n, 2)[: n // 2] / math.sqrt(len(sizes) + 1)), n


def with_names(n):
    shape = tuple(n + each for each in SIZES)
    return doubled(np.full(shape, sqrt(n))).tolist(), str(n), np.linalg.norm(inner(n)) + np.pi


def of_a_type(n, dtype=jnp.bfloat16):
    return np.add.outer(np.zeros(n, dtype), np.ones(n, np.dtype("float32")))


def fib(n):
    return n if n < 2 else fib_remembered(n - 1) + fib_remembered(n - 2)


fib_remembered = functools.cache(fib)


@pytest.mark.parametrize("remember", [functools.cache, functools.lru_cache(2)])
@pytest.mark.parametrize("function", [plain, of_several, with_names, of_a_type, fib])
def test_what_only_computes(function, remember):
    remembering = remember(function)
    assert holds_what_it_computes(remembering)
    for number in (3, 4, 2, 3):
        remembering(number)
    assert holds_what_it_computes(remembering)


def test_arguments_of_all_kinds():
    remembering = functools.lru_cache(of_several)
    remembering(4, (), None, "text", 2.5, np.float32(1), np.int8, base=2.0)
    remembering(4, (1, (2, True)), base=3)
    remembering("8" == 8, *range(3))
    remembering(n=4)
    assert holds_what_it_computes(remembering)
    remembering(4, OBJECT.__class__)
    assert not holds_what_it_computes(remembering)


def test_a_result_that_was_changed_since():
    remembering = functools.lru_cache(plain)
    remembering(3)
    remembering(4)[0] = 1
    assert not holds_what_it_computes(remembering)


def test_a_constant_that_was_changed_since(monkeypatch):
    remembering = functools.lru_cache(doubled)
    remembering(3)
    monkeypatch.setitem(globals(), "SCALE", 3.0)
    assert not holds_what_it_computes(remembering)


def reads_an_object(n):
    return np.ones(n) * OBJECT.scale


def reads_a_file(n):
    return np.fromfile(n)


def is_random(n):
    return np.random.default_rng(n).normal()


def prints(n):
    print(n)


def computes_with_jax(n):
    return jnp.arange(n)


def makes_an_object(n):
    return types.SimpleNamespace(n=n)


def asks_an_object(n):
    return np.ones(getattr(OBJECT, "sc" + "ale"))


def sets_a_global(n):
    global SCALE
    SCALE = 2.0
    return n


def imports(n):
    import secrets

    return secrets.token_bytes(n)


def makes_a_set(n):
    return list({str(n), *"abc"})


def reads_what_was_there(n):
    return np.empty(n)


def made_in(scale):
    return lambda n: n * scale


def with_an_object(n, given=OBJECT):
    return given.scale * n


LIST, ARRAY = [1.0], np.zeros(3)


def changes_a_list(n):
    LIST.append(n)


def changes_an_array(n):
    ARRAY[n] += 1


def changes_a_default(n, given=([],)):
    given[0].append(n)


def counts(n):
    counts.calls = n


def writes_a_file(n):
    np.arange(n).tofile(str(n))


def prints_with_numpy(n):
    info(n)


NOT_ONLY = [
    *(counts, writes_a_file, prints_with_numpy, lambda n: np.load(n), lambda n: np.random.rand(n)),
    *(changes_a_list, changes_an_array, changes_a_default),
    *(reads_an_object, reads_a_file, is_random, prints, computes_with_jax, makes_an_object),
    *(asks_an_object, sets_a_global, imports, makes_a_set, reads_what_was_there, made_in(2)),
    *(with_an_object, lambda n: eval(n), lambda n: functools.partial(n), np.arange),
]


@pytest.mark.parametrize("function", NOT_ONLY, ids=lambda each: each.__name__)
def test_what_does_more_is_not_called(function, monkeypatch):
    monkeypatch.setattr(remembered, "_results", lambda _: pytest.fail("its results are looked at"))
    assert not holds_what_it_computes(functools.cache(function))


TRAINING = """
    import functools

    RATE = 2.0

    @functools.lru_cache
    def rates(n):
        return np.full(n, RATE, np.float32)

    rates(3)

    @sc.step
    def other(x):
        return x + rates(3)

    @sc.step
    def step(x):
        return x * rates(3)

    other(np.ones(3, np.float32))
    other(np.ones((2, 3), np.float32))
    rates(3)
    """


@pytest.mark.parametrize("edit", [("RATE = 2.0", "RATE = 3.0"), ("RATE, ", "RATE + 1, ")])
def test_several_steps_that_call_it_are_loaded_without_a_trace(edit, tmp_path):
    for _ in range(2):
        again = start(TRAINING, "no_package", tmp_path)
    assert levels(again) == (0, 0, 1)
    assert again.other.stats().traces == 0
    with pytest.raises(AssertionError, match=r"\[0.0, 3.0, 6.0\]"):
        start(TRAINING.replace(*edit), "no_package", tmp_path)


@pytest.mark.parametrize("change", ["rates(3)[1] = 3", "RATE = 3.0; rates(3); RATE = 2.0"])
def test_a_cache_that_holds_something_else(change, tmp_path):
    """As `jax.jit` does, each start has what the cache holds."""
    source = TRAINING.replace("    rates(3)\n\n    @sc", f"    {change}\n\n    @sc", 1)
    for _ in range(2):
        with pytest.raises(AssertionError, match=r"\[0.0, 3.0, "):
            start(source, "no_package", tmp_path)
    start(TRAINING, "no_package", tmp_path)
