"""Which copy serves a step: staleness and reads ahead, while two processes write."""

import random
import threading
import time
from concurrent.futures import wait

import numpy as np
import pytest

import stepcache as sc
from stepcache.errors import VariablesError
from stepcache.serving import read_ahead
from tests.serving.servers import SIZE, Child, names_on_one_host, two

AHEAD = sc.Read(cache="device", max_staleness=1)
ADD = sc.Write(mode="add")
ONES = {"w": np.ones(SIZE, np.float32)}


@sc.step
def look(params):
    return params["w"][-1]


@sc.step
def difference(a, b):
    return a["w"][0] - b["w"][0]


def arrived(connection):
    """Waits for what is read ahead."""
    wait(set(read_ahead._reading))


# ---- an oracle -----------------------------------------------------------------------------------


class Oracle:
    """What a reader has to see, by its policy."""

    def __init__(self, policy):
        self.policy, self.value, self.own = policy, 0, 0
        self.kept = None  # Value and number of steps.
        self.ahead = None  # What is read in the background.

    def may_serve(self):
        if self.kept is None or self.own > self.kept[0] or self.policy.cache is None:
            return False
        return self.kept[1] < self.policy.max_staleness

    def step(self):
        if self.ahead is not None and self.ahead >= self.own:
            self.kept = [self.ahead, 0]
        self.ahead = None
        if self.may_serve():
            self.kept[1] += 1
        else:
            self.kept = [self.value, 0]
        if self.policy.max_staleness and not self.may_serve():
            self.ahead = self.value  # For the next step.
        return self.kept[0]


@pytest.mark.seeds(3)
@pytest.mark.parametrize(
    "policy",
    [
        sc.Read(),
        sc.Read(cache="device"),
        sc.Read(cache="device", max_staleness=1),
        sc.Read(cache="device", max_staleness=3),
    ],
    ids=str,
)
def test_a_reader_sees_what_its_policy_says(connection, name, policy, seed):
    dice = random.Random(seed)
    mine, theirs = two(connection, name, 0.0, read=policy, write=ADD)
    oracle = Oracle(policy)
    for _ in range(60):
        match dice.choice(["step", "step", "mine", "theirs"]):
            case "step":
                assert look(mine) == oracle.step()
                arrived(connection)
            case "mine":
                mine.push(ONES)
                oracle.value += 1
                oracle.own = oracle.value
            case "theirs":
                theirs.push(ONES)
                oracle.value += 1
    assert np.array_equal(mine.value["w"], np.full(SIZE, oracle.value, np.float32))


# ---- reads ahead ---------------------------------------------------------------------------------


@pytest.fixture
def readers(connection, monkeypatch):
    """The names of the threads that read."""
    seen, read = [], connection.hosts.read

    def noting(*args, **options):
        seen.append(threading.current_thread().name)
        return read(*args, **options)

    monkeypatch.setattr(connection.hosts, "read", noting)
    return seen


def test_what_was_read_ahead_is_one_step_old_and_nobody_waits_for_it(connection, name, readers):
    mine, theirs = two(connection, name, 0.0, read=AHEAD, write=ADD)
    seen = []
    for _ in range(6):
        seen.append(int(look(mine)))
        arrived(connection)
        theirs.push(ONES)
    assert seen == [0, 0, 1, 2, 3, 4]
    assert readers == ["MainThread"] + 5 * ["stepcache read"]


def test_what_a_read_ahead_moves_is_what_explain_says(connection, name, moved):
    mine, theirs = two(connection, name, 0.0, read=AHEAD, write=ADD)
    whys = []
    for turn in range(8):
        arrived(connection)
        plan = look.explain(mine).plan
        whys += [each.why for each in plan.transfers if each.bytes]
        moved.clear()
        look(mine)
        assert {link: size for link, size in moved.items() if size} == plan.link_bytes
        arrived(connection)
        if turn % 3 == 1:
            theirs.push(ONES)
        if turn % 3 == 2:
            mine.push(ONES)  # What was read ahead is too old now.
    assert any("in the background" in why for why in whys)


def test_a_read_ahead_does_not_hide_what_this_process_wrote(connection, name):
    read = sc.Read(cache="device", max_staleness=50)
    mine, _ = two(connection, name, 0.0, read=read, write=ADD)
    for count in range(1, 6):
        look(mine)
        mine.push(ONES)
        assert look(mine) == count
    ahead = connection.variables(name, ONES, read=AHEAD, write=ADD)
    for count in range(6, 10):
        look(ahead)
        arrived(connection)
        ahead.push(ONES)
        assert look(ahead) == count


def test_values_that_are_read_ahead_are_of_one_moment(connection, name):
    names = names_on_one_host(connection, name)
    pair = [connection.variables(each, ONES, read=AHEAD) for each in names]
    with sc.connect(connection.address) as other:
        theirs = [other.variables(each, ONES, write=ADD) for each in names]
        is_over = threading.Event()

        def write():
            while not is_over.is_set():
                for each in theirs:
                    each.push(ONES)

        thread = threading.Thread(target=write)
        thread.start()
        try:
            seen = {float(difference(*pair)) for _ in range(100)}
        finally:
            is_over.set()
            thread.join()
    assert seen <= {0.0, 1.0} and pair[0].version > 5


def test_what_a_read_ahead_raises_is_raised_by_the_next_call(connection, name, monkeypatch):
    mine, _ = two(connection, name, 0.0, read=AHEAD)
    look(mine)
    read = connection.hosts.read

    def failing(*args, **options):
        if threading.current_thread() is threading.main_thread():
            return read(*args, **options)
        raise VariablesError("the background has failed")

    monkeypatch.setattr(connection.hosts, "read", failing)
    look(mine)
    arrived(connection)
    monkeypatch.undo()
    with pytest.raises(VariablesError, match="background"):
        look(mine)
    assert look(mine) == 0


@pytest.mark.slow
def test_the_end_of_a_process_does_not_wait_for_a_read_ahead(engine, tmp_path):
    server = engine(tmp_path / "server").start()
    script, go = tmp_path / "reader.py", tmp_path / "go"
    script.write_text(f"""
import time
from concurrent.futures import wait
from pathlib import Path
import numpy as np, stepcache as sc
connection = sc.connect("{server.address}")
read = sc.Read(cache="device", max_staleness=1)
params = connection.variables("params", {{"w": np.zeros(5)}}, read=read)
look = sc.step(lambda params: params["w"])
print("ready", flush=True)
while not Path({str(go)!r}).exists():
    time.sleep(0.01)
connection.read_ahead([(params._master, sc.variables.masters.Reader(None))])
time.sleep(0.3)
print(bool(sc.serving.read_ahead._reading), flush=True)
""")
    reader = Child(tmp_path, script)
    reader.wait_until(lambda: reader.printed()[0] == "ready\n")
    server.kill()
    began = time.monotonic()
    go.touch()
    code, printed, errors = reader.end()
    assert (code, printed) == (0, "ready\nTrue\n"), errors
    assert time.monotonic() - began < 20, "it waited for a server that is gone"
    if engine.engine == "ray":  # Ray has started it again.
        server.start()
        server.stop()
