"""Whether code loops over a set, whose order is another in each process."""

# ruff: noqa: C416, C420, SIM118

import os
import subprocess
import sys
import textwrap

import jax.numpy as jnp
import numpy as np
import pytest

import stepcache as sc
from stepcache.fingerprint import set_order
from stepcache.fingerprint.recorder import Recording
from tests.test_second_life import WITHOUT_A_TRACE, cache_in, levels, life

NAMES = {"a", "b", "c"}
ONE, NUMBERS, TEXTS = {"a"}, {1, 2, (3, 4.0)}, ["a", "b"]


class Config:
    NAMES = frozenset(NAMES)
    numbers = NUMBERS

    def __init__(self):
        self.own = {"a", "b"}
        self.later = None

    @property
    def made(self):
        return {each for each in TEXTS}

    def method(self):
        found = set()
        for each in TEXTS:
            found.add(each)
        return found

    def keep(self):
        self.later = set(TEXTS)
        return [each for each in self.later]

    def of_own(self):
        return [each for each in self.own]

    def of_sorted(self):
        return [each for each in sorted(self.own)]


def given(names):
    return [each for each in names]


def captures():
    names = NAMES | {"d"}

    def inner():
        return [each for each in names]

    return inner


inner = captures()
config = Config()


def union_of_keys(a, b):
    return [each for each in a.keys() | b.keys()]


def added_to():
    names = frozenset()
    for each in TEXTS:
        names |= {each}
    return tuple(names)


def unpacked():
    first, _ = {"a", "b"}
    return first


def only():
    (length,) = {len(each) for each in TEXTS}
    return length


def from_generator():
    yield from set(TEXTS)


def statement():
    found = []
    for each in set(TEXTS):
        found.append(each)
    return found


LOOPS = {
    "for": statement,
    "a global": lambda: [each for each in NAMES],
    "an argument": lambda: given(NAMES),
    "an argument by name": lambda: given(names=set(TEXTS)),
    "a captured variable": inner,
    "an attribute": lambda: config.of_own(),
    "an attribute of a class": lambda: [each for each in Config.NAMES],
    "an inherited attribute": lambda: [each for each in config.NAMES],
    "an attribute set before": lambda: config.keep(),
    "a property": lambda: [each for each in config.made],
    "a method": lambda: [each for each in config.method()],
    "keys": lambda: union_of_keys({"a": 1}, {"b": 2}),
    "a union": lambda: list(set(TEXTS).union(["c"])),
    "a difference": lambda: [each for each in set(TEXTS) - {"a"}],
    "added to": added_to,
    "constants": lambda: [each for each in {"a", "b"}],
    "a comprehension": lambda: [each for each in {text.upper() for text in TEXTS}],
    "a dictionary": lambda: {each: 1 for each in set(TEXTS)},
    "a dictionary of keys": lambda: dict.fromkeys(set(TEXTS)),
    "enumerate": lambda: [*enumerate(set(TEXTS))],
    "zip": lambda: list(zip(TEXTS, set(TEXTS), strict=True)),
    "join": lambda: ",".join(set(TEXTS)),
    "sum": lambda: sum(len(each) / 3 for each in set(TEXTS)),
    "a star": lambda: max(*set(TEXTS), "c"),
    "a star in a list": lambda: [*set(TEXTS), "c"],
    "a star and names": lambda: jnp.stack([1, 2]) if not print(*set(TEXTS), end="") else 0,
    "unpacked": unpacked,
    "yield from": lambda: list(from_generator()),
    "given to an array": lambda: jnp.zeros(2).at[:].set([len(each) for each in set(TEXTS)]),
    "the least of an array": lambda: np.min([len(each) for each in set(TEXTS)]),
}
LOOPS_NOT = {
    "in": lambda: "a" in NAMES and "b" in {"a", "b"},
    "sorted": lambda: [each for each in sorted(set(TEXTS) | NAMES)],
    "sorted by a key": lambda: sorted((each for each in NAMES if each), key=len, reverse=True),
    "a sorted list": lambda: sorted([each for each in set(TEXTS)]),
    "any": lambda: any(each == "a" for each in NAMES),
    "len": lambda: len(set(TEXTS)),
    "another set": lambda: len({each.upper() for each in set(TEXTS)} - {"A"}),
    "compared": lambda: set(TEXTS) == {"a", "b"},
    "one text": lambda: [each for each in ONE],
    "numbers": lambda: [each for each in NUMBERS],
    "numbers of a class": lambda: [each for each in config.numbers],
    "constant numbers": lambda: [each for each in {1, 2, 3}],
    "what is sorted": lambda: config.of_sorted(),
    "keys": lambda: [each for each in {"a": 1, "b": 2}.keys()],
    "a list": lambda: given(TEXTS),
    "arithmetic": lambda: [each for each in range(7 - 4 | 1)],
    "an array that is set": lambda: [each for each in jnp.zeros(2).at[0].set(1)],
    "the only one": only,
}


@pytest.mark.parametrize("name", LOOPS)
def test_a_loop_over_a_set_is_found(name):
    assert reasons(LOOPS[name]), name


@pytest.mark.parametrize("name", LOOPS_NOT)
def test_what_needs_no_order_is_none(name):
    assert not reasons(LOOPS_NOT[name]), name


def reasons(function):
    with Recording() as recording:
        function()
    return set_order.where_looped_over(recording)


STEP = """
    import jax, jax.numpy as jnp, stepcache as sc
    NAMES = {{{names}}}
    WEIGHTS = dict(zip(sorted(NAMES), range(2, 9)))

    @sc.step
    def step(x):
        for name in NAMES:
            x = x * WEIGHTS[name] + 1
        return x
"""


def test_each_process_has_its_own_order(tmp_path):
    source = (
        STEP.format(names='"alpha", "beta", "gamma", "delta"')
        + """
    with sc.Session(cache=sc.ProgramCache(verify="before")):
        assert float(step(1.0)) == float(jax.jit(step.__wrapped__)(1.0))
    print(step.last_miss)
    """
    )
    shown = []
    for seed in ("1", "2"):
        environment = {"PYTHONHASHSEED": seed, "STEPCACHE_DIR": str(tmp_path / "programs")}
        process = subprocess.run(
            [sys.executable, "-c", textwrap.dedent(source)],
            env={**os.environ, **environment},
            capture_output=True,
            text=True,
        )
        assert process.returncode == 0, process.stderr
        shown.append(process.stdout)
    assert "step: it loops over a set, whose order may be another" in shown[1]


@pytest.mark.parametrize("names", ["1, 2, 3", '"alpha"'])
def test_a_set_with_one_order_is_no_hindrance(names, tmp_path):
    for _ in range(2):
        cache = cache_in(tmp_path)
        with sc.Session(cache=cache):
            module = life(textwrap.dedent(STEP.format(names=names)), cache, tmp_path)
            module.step(np.ones(8))
        cache.flush()
    assert levels(module.step.stats()) == WITHOUT_A_TRACE, module.step.last_miss
