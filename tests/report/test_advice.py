"""`advise`: policies are tried with the step, and what is said of them is what was measured."""

import time
import warnings
from collections import Counter
from dataclasses import replace

import jax
import numpy as np
import pytest
from jax.sharding import AxisType

import stepcache as sc
from stepcache.events import Moved
from stepcache.report import advice as advising
from stepcache.variables import transfer
from tests.serving.servers import LocalServer

SIZE, BETWEEN = 1 << 16, 8


@sc.step
def total(value, x):
    return sum(leaf.sum() for leaf in jax.tree.leaves(value)) + x


@sc.step(carry="value")
def decay(value, x):
    return jax.tree.map(lambda leaf: leaf * 0.5, value), x


def mesh_of(devices):
    return jax.make_mesh((devices,), ("data",), (AxisType.Auto,), devices=jax.devices()[:devices])


@pytest.fixture
def session():
    with sc.Session(mesh_of(8)) as session:
        yield session


READ = sc.Read()


def held(read=READ, **rest):
    tree = {"w": np.ones((SIZE // 64, 16), np.float32)}
    return sc.Variables(tree, placement=sc.OnHost(), read=read, name="value", **rest)


def by_policy(advice):
    return {str(each): each for each in advice.choices}


@pytest.mark.sample(every=2)
@pytest.mark.parametrize("devices", [1, 8])
def test_bytes_are_those_that_move(devices):
    with sc.Session(mesh_of(devices)):
        found = by_policy(sc.advise(total, held(), 1.0, writes_every=BETWEEN))
        once = {"host ↔ device": SIZE, "device ↔ device": (devices - 1) * SIZE}
        once = {link: size for link, size in once.items() if size}
        every = {link: size / BETWEEN for link, size in once.items()}
        assert found["replicated"].link_bytes == {}
        assert found["Read()"].link_bytes == once
        assert found["Read(cache='device')"].link_bytes == pytest.approx(every)
        assert not any("max_staleness" in name for name in found)
        carried = by_policy(sc.advise(decay, held(), 1.0))
        assert carried["Read(cache='device')"].link_bytes == {"host ↔ device": SIZE}
        assert carried["Read()"].link_bytes["host ↔ device"] == 2 * SIZE


def test_what_takes_longer_is_found_out(session, monkeypatch):
    """Here a read of the master copy takes 20 ms more."""
    monkeypatch.setattr(advising, "_MOST_CALLS", 16)

    def read(*args, **options):
        time.sleep(0.02)
        return taken(*args, **options)

    taken = transfer.read
    monkeypatch.setattr("stepcache.variables.transfer.read", read)
    advice = sc.advise(total, held(sc.Read(cache="device")), 1.0, writes_every=BETWEEN)
    found = by_policy(advice)
    least = {name: each.seconds - found["replicated"].seconds for name, each in found.items()}
    assert least["Read(cache='device')"] > 0.8 * 0.02 / BETWEEN
    assert advice.seconds == found["Read(cache='device')"].seconds


def test_of_policies_that_take_as_long_the_one_that_moves_less_is_best():
    def choice(read, seconds, moved, **rest):
        links = {"host ↔ device": moved}
        return advising.Choice("v", sc.OnHost(), read, sc.Write(), seconds, links, 0, **rest)

    cached, none = sc.Read(cache="device"), sc.Read()
    late = sc.Read(cache="device", max_staleness=4)
    choices = [
        choice(none, 1.0, 800.0),
        choice(cached, 1.01, 100.0),
        choice(late, 0.5, 10.0, freshness="up to 4 steps late"),
        choice(replace(cached), 1.5, 50.0, is_current=True),
    ]
    choices.sort(key=lambda each: each.seconds)
    assert advising.Advice("step", 1.5, tuple(choices)).best("v").read == cached
    slower = [replace(each, seconds=2.0) if each.read == none else each for each in choices]
    slower.sort(key=lambda each: each.seconds)
    assert advising.Advice("step", 1.5, tuple(slower)).best("v").seconds == 1.01


def test_a_call_is_as_it_was(session):
    value, x = held(), jax.numpy.float32(3)
    advice = sc.advise(decay, value, x)
    assert value.version == 0 and np.all(value.value["w"] == 1) and float(x) == 3
    now = next(each for each in advice.choices if each.is_current)
    assert now.seconds == pytest.approx(advice.seconds) and now.read == sc.Read()
    text = str(advice)
    assert "decay: " in text and " a step now" in text and " best " in text
    assert "value is written each step" in text


def test_calls_of_the_trial_are_none_of_the_users(session):
    step, value = sc.step(total.__wrapped__), held()
    step(value, np.ones(2))
    before, miss = step.stats(), step.last_miss
    sc.advise(step, value, np.ones(3))
    assert replace(step.stats(), programs=before.programs) == before
    assert step.last_miss == miss
    step(value, np.ones(4))
    assert step.stats().misses == before.misses + 1 == step.last_miss.number


def test_measuring_does_not_change_what_moves_afterwards(session):
    value = held(sc.Read(cache="device"))
    moved = Counter()

    def run():
        moved.clear()
        for _ in range(4):
            total(value, 1.0)
            value.assign(value.value)
        return dict(moved)

    unsubscribe = sc.recorder.subscribe(
        lambda event: (
            isinstance(event, Moved)
            and event.step == "total"
            and moved.update(dict(event.link_bytes))
        )
    )
    before = run()
    sc.advise(total, value, 1.0)
    assert run() == before and before["host ↔ device"] == 4 * SIZE
    unsubscribe()


def test_what_was_seen_says_how_often_a_value_is_written(session):
    value = held(sc.Read(cache="device"))
    for number in range(12):
        total(value, 1.0)
        if number % 6 == 5:
            value.assign(value.value)
    assert "is written every 6 steps" in str(sc.advise(total, value, 1.0))


def test_resident_variables_are_compared_with_those_on_the_host(session):
    value = sc.Variables({"w": np.ones((SIZE // 64, 16), np.float32)}, name="value")
    advice = sc.advise(decay, value, 1.0)
    assert advice.best("value").placement == sc.Replicated()
    held_bytes = {str(each): each.held_bytes for each in advice.choices}
    assert held_bytes["replicated"] == held_bytes["Read(cache='device')"] == SIZE
    assert held_bytes["Read()"] == 0


def test_rules_find_the_paths_of_the_copies_that_are_timed(session):
    """Rules read the name, too."""
    rules = sc.Rules([("^value/w", jax.P("data"))])
    tree = {"w": np.ones((SIZE // 64, 16), np.float32)}
    placement = sc.OnHost(on_device=sc.Sharded(rules))
    value = sc.Variables(tree, placement=placement, name="value")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert sc.advise(total, value, 1.0).best("value").placement == placement


def test_what_cannot_be_advised(session):
    with pytest.raises(sc.OptionError, match="takes a step"):
        sc.advise(jax.jit(lambda x: x), 1.0)
    with pytest.raises(sc.OptionError, match="no Variables"):
        sc.advise(total, {"w": np.ones(3)}, 1.0)


@pytest.mark.slow
def test_served_variables_stay_as_they_are(tmp_path, monkeypatch):
    server = LocalServer(tmp_path / "server").start()
    try:
        with sc.connect(server.address) as connection:
            value = connection.variables("value", {"w": np.ones(100)}, write=sc.Write("add"))
            advice = sc.advise(total, value, 1.0, writes_every=4)
            assert value.version == 0 and np.all(value.value["w"] == 1)
            found = {(each.read, each.write.every): each for each in advice.choices}
            size = 400  # float32 on the devices, once x64 is off.
            served = {n: each.link_bytes["server ↔ process"] for n, each in found.items()}
            cached = sc.Read(cache="device")  # The default of what is served.
            assert served[sc.Read(), 1] == served[cached, 1] == 2 * size
            assert served[cached, 4] == pytest.approx(2 * size / 4)
            assert found[cached, 4].freshness == "updates up to 3 steps late"
            assert not advice.best("value").freshness
            copied = connection.variables("value", {"w": np.ones(100)}, read=cached)
            of_decay = sc.advise(decay, copied, 1.0)
            assert copied.version == 0
            assert of_decay.best("value").read in {each.read for each in of_decay.choices}
            monkeypatch.setattr(advising, "_SENT_BYTES", 1)
            with pytest.raises(sc.OptionError, match="too large to be sent"):
                sc.advise(decay, copied, 1.0)
    finally:
        server.stop()
