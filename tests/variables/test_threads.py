"""Many threads at the same variables: every value whole, no write lost, nobody stuck.

On one device: XLA on CPU can deadlock when threads launch programs over several at once, under
plain `jax.jit` too.
"""

import contextlib
import os
import subprocess
import sys
import threading
import time

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from comparing import assert_same_in_numpy
from jax.sharding import PartitionSpec as P
from states import LARGE

import stepcache as sc
from stepcache.resident import runner
from stepcache.variables.shares import HostLayout
from stepcache.variables.variables import locked

SMALL = (16, 8)
LIMIT_SECONDS = 60


def full(value=0):
    tree = {f"large{n}": np.full(LARGE, value, np.float32) for n in range(3)}
    tree |= {f"small{n}": np.full(SMALL, value, np.float32) for n in range(3)}
    return {**tree, "n": np.int32(value), "m": np.int32(value), "weak": value}


def add_one(state):
    return jax.tree.map(lambda leaf: leaf + 1, state)


def numbers(tree) -> set[float]:
    """The numbers that there are in a tree: one, if it is whole."""
    return {float(each) for leaf in jax.tree.leaves(tree) for each in np.unique(np.asarray(leaf))}


def together(*works) -> None:
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
    limit = time.monotonic() + LIMIT_SECONDS
    for thread in threads:
        thread.join(max(0.0, limit - time.monotonic()))
    assert not any(thread.is_alive() for thread in threads), "stuck"
    if errors:
        raise errors[0]


def test_locks_of_tasks_are_taken_in_one_order():
    """By the number of the tasks, whatever the order of the variables."""
    taken = []

    @contextlib.contextmanager
    def lock(number):
        taken.append(number)
        yield

    targets = [type("Tasks", (), {"number": n, "lock": lock(n)})() for n in range(2)]
    made = [sc.Variables(np.ones(1)) for _ in range(3)]
    for each, target in zip(made, (targets[1], targets[0], targets[1]), strict=True):
        each._master.target = target
    with locked(made):
        assert taken == [0, 1]


@pytest.mark.sample(every=2)
@pytest.mark.parametrize("write", ["step", "assign"])
def test_whoever_reads_sees_whole_versions_in_order(write):
    variables, step, count = sc.Variables(full()), sc.step(add_one, carry="state"), 300
    done, seen = threading.Event(), [[] for _ in range(4)]

    def train():
        try:
            for number in range(count):
                if write == "step":
                    step(variables)
                else:
                    variables.assign(full(number + 1))
                if number % 50 == 0:  # All of it may take less than Python gives one thread.
                    read = list(map(len, seen))
                    while any(len(values) == n for values, n in zip(seen, read, strict=True)):
                        time.sleep(0.001)
        finally:
            done.set()

    def reader(values):
        def read():
            while not done.is_set():
                before = variables.version
                whole = numbers(variables.value)
                assert len(whole) == 1, f"torn: {whole}"
                values.append((before, *whole, variables.version))

        return read

    together(train, *map(reader, seen))
    assert variables.version == count and numbers(variables.value) == {count}
    for values in seen:
        read = [value for _, value, _ in values]
        assert read == sorted(read), "a version went back"
        for before, value, after in values:
            assert before <= value <= after
    assert len({value for values in seen for _, value, _ in values}) > 3, "nobody read meanwhile"


def test_what_was_read_stays_whole():
    """Kept until the end, while later steps wrote over the buffers it was copied from."""
    variables, step = sc.Variables(full()), sc.step(add_one, carry="state")
    kept, done = [], threading.Event()

    def train():
        for _ in range(100):
            step(variables)
        done.set()

    def read():
        while not done.is_set():
            kept.append(variables.value)
            time.sleep(0.002)

    together(train, read)
    assert kept and all(len(numbers(value)) == 1 for value in kept)


def test_steps_of_two_threads_are_all_counted():
    variables, outputs = sc.Variables(full()), []
    step = sc.step(lambda state: (add_one(state), state["n"]), carry="state")

    def train():
        for _ in range(100):
            outputs.append(int(step(variables)[1]))

    together(train, train, train)
    assert variables.version == 300 and numbers(variables.value) == {300}
    assert sorted(outputs) == list(range(300)), "two steps read the same version"
    assert step.stats().compiles == 1


def test_assignments_and_steps_are_all_counted():
    variables, step = sc.Variables(full()), sc.step(add_one, carry="state")

    def train():
        for _ in range(50):
            step(variables)

    def assign():
        for _ in range(50):
            variables.assign(full(1000))

    together(train, assign)
    assert variables.version == 100
    (last,) = numbers(variables.value)
    assert 1000 <= last <= 1050


def test_two_variables_in_opposite_orders():
    @sc.step(carry=("one", "two"))
    def swap(one, two):
        return add_one(two), add_one(one)

    @sc.step(carry="state")
    def add(state, read):
        return jax.tree.map(lambda x, y: x + 0 * y, state, read)

    first, second = sc.Variables(full()), sc.Variables(full())

    def forth():
        for _ in range(100):
            swap(first, second)
            add(first, second)

    def back():
        for _ in range(100):
            swap(second, first)
            add(second, first)

    together(forth, back)
    assert first.version == second.version == 300
    assert numbers(first.value) == numbers(second.value) == {200}


def test_the_first_call_of_many_threads_builds_one_program(monkeypatch):
    make = runner.over_buffers

    def slowly(spec, form):
        time.sleep(0.05)
        return make(spec, form)

    monkeypatch.setattr(runner, "over_buffers", slowly)
    step, many = sc.step(add_one, carry="state"), [sc.Variables(full()) for _ in range(6)]
    together(*(lambda variables=variables: step(variables) for variables in many))
    assert all(numbers(variables.value) == {1} for variables in many)
    assert step.stats().compiles == step.stats().traces == 1


def test_looking_does_not_wait_for_a_program_that_is_being_built():
    tracing, looked = threading.Event(), threading.Event()

    @sc.step(carry="state")
    def slow(state):
        tracing.set()
        assert looked.wait(LIMIT_SECONDS)
        return add_one(state)

    variables = sc.Variables(full())

    def look():
        assert tracing.wait(LIMIT_SECONDS)
        assert numbers(variables.value) == {0} and variables.version == 0
        assert "version 0" in repr(variables)
        looked.set()

    together(lambda: slow(variables), look)
    assert numbers(variables.value) == {1}


def test_variables_of_one_thread_are_used_by_another():
    made, session = [], sc.Session(jax.make_mesh((1,), ("data",)))
    step = session.step(add_one, carry="state")

    def make():
        with session:
            made.append(sc.Variables(full()))

    together(make)
    together(lambda: step(made[0]))
    assert numbers(made[0].value) == {1}


# ---- over several CPU devices -----------------------------------------------------------------

on_cpu = pytest.mark.skipif(
    os.environ["JAX_PLATFORMS"] != "cpu", reason="it is about the threads of CPU devices"
)


@pytest.mark.parametrize("rules", [None, [("large", P("data"))]], ids=["replicated", "split"])
def test_to_look_at_what_the_hosts_hold_takes_no_program_that_gathers(mesh, rules, monkeypatch):
    tree = {**full(3), "odd": np.full((5, 7), 3.0, np.float16), "key": jax.random.key(3)}
    device = sc.Replicated() if rules is None else sc.Sharded(rules)
    with sc.Session(mesh):
        hosted = sc.Variables(tree, placement=sc.OnHost(device))
        expected = sc.Variables(tree, placement=device).value
        with monkeypatch.context() as patched:
            patched.setattr(HostLayout, "read", property(lambda layout: pytest.fail("a program")))
            value = hosted.value
        assert_same_in_numpy(expected, value)
        again = hosted.value
        for leaf in jax.tree.leaves(value):
            leaf.fill(7) if isinstance(leaf, np.ndarray) else leaf.delete()
        assert_same_in_numpy(expected, again)
        assert_same_in_numpy(expected, hosted.value)


def test_a_value_of_a_weak_type_is_looked_at_as_it_is(mesh):
    weak = jnp.broadcast_to(jnp.asarray(2.0), (3, 4))
    assert weak.weak_type
    with sc.Session(mesh):
        value = sc.Variables({"a": weak, "b": 2.0}, placement=sc.OnHost()).value
    assert value["a"].weak_type and value["b"].weak_type
    np.testing.assert_array_equal(value["a"], 2)


LOOKING = """
import os, sys, threading, time

import jax
import numpy as np

import stepcache as sc

jax.config.update("jax_num_cpu_devices", 8)
mesh = jax.make_mesh((8,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
with sc.Session(mesh) as session:
    trees = [{"a": np.full(40_000, n, np.float32), "b": np.zeros(3)} for n in range(3)]
    one, two, three = (sc.Variables(tree, placement=sc.OnHost()) for tree in trees)
    step = session.step(lambda state: jax.tree.map(lambda leaf: leaf + 1, state), carry="state")
    step(three)
end = time.monotonic() + float(sys.argv[1])

def work(act):
    while time.monotonic() < end:
        act()

acts = [lambda: one.value, lambda: two.value] * 2 + [lambda: step(three)]
threads = [threading.Thread(target=work, args=(act,), daemon=True) for act in acts]
for thread in threads:
    thread.start()
for thread in threads:
    thread.join(float(sys.argv[1]) + 60)
os._exit(any(thread.is_alive() for thread in threads))
"""


@pytest.mark.slow
@on_cpu
def test_many_that_look_beside_a_step_do_not_wait_for_ever():
    """With as many threads in XLA's pool as the step needs for itself."""
    environment = {**os.environ, "NPROC": "16", "STEPCACHE_DIR": "off"}
    command = [sys.executable, "-c", LOOKING, "20"]
    assert subprocess.run(command, env=environment, timeout=200).returncode == 0
