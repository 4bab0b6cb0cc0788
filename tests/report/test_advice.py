"""`advise`, `Read(route="auto")` and `Variables(read="auto")` over links of known speeds."""

import json
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
from stepcache.report import trials
from stepcache.serving import measuring
from stepcache.variables import link_measuring, link_times
from stepcache.variables.link_times import OPERATIONS, ROUTES, LinkTimes
from stepcache.variables.masters import InHostMemory
from tests.cluster.pods import run_pod, succeeded
from tests.serving.servers import LocalServer

SIZE, BETWEEN, STEPS = 1 << 16, 8, 48
FAST, SLOW, READ = 1e-3, 8e-3, sc.Read()


@sc.step
def total(value, x):
    return sum(leaf.sum() for leaf in jax.tree.leaves(value)) + x


@sc.step(carry="value")
def decay(value, x):
    return jax.tree.map(lambda leaf: leaf * 0.5, value), x


def mesh_of(devices):
    return jax.make_mesh((devices,), ("data",), (AxisType.Auto,), devices=jax.devices()[:devices])


def times_of(machine, **changed):
    """Every operation takes 1 ms for each 64 KiB, but for those that are changed."""
    per_size = dict.fromkeys(OPERATIONS, FAST) | changed
    seconds = {
        f"{operation} {size}": each * size / SIZE
        for operation, each in per_size.items()
        for size in (SIZE, 2 * SIZE)
    }
    return LinkTimes(machine, "2026-01-02T03:04:05", seconds, {}, 0.5)


@pytest.fixture(autouse=True)
def short_trials(monkeypatch):
    monkeypatch.setattr(trials, "_BLOCK", 2)
    monkeypatch.setattr(trials, "_BLOCKS", 1)


@pytest.fixture
def session():
    """On 8 devices, whose links were measured."""
    with sc.Session(mesh_of(8)) as session:
        know(each=SLOW, fanout=SLOW, program=2e-3)
        yield session


def know(**changed):
    machine = link_times.machine_of(sc.current_session().mesh.devices.flat)
    link_times.kept_times(machine)[:] = [times_of(machine, **changed)]


def held(read=READ, **rest):
    tree = {"w": np.ones((SIZE // 64, 16), np.float32)}
    return sc.Variables(tree, placement=sc.OnHost(), read=read, name="value", **rest)


def by_policy(advice):
    return {str(each): each for each in advice.choices}


# ---- advise -------------------------------------------------------------------------------------


def test_costs_follow_from_links_and_from_how_often_a_value_is_read(session):
    advice = sc.advise(total, held(), 1.0, writes_every=BETWEEN, step_seconds=0.012)
    found = {name: round(each.seconds, 9) for name, each in by_policy(advice).items()}
    assert found["replicated"] == 0.010, "without the read of 2 ms inside the program"
    assert found["Read()"] == 0.012
    assert found["Read(route='each')"] == 0.018
    assert found["Read(cache='device')"] == 0.010125, "one read of 1 ms every 8 steps"
    assert found["Read(cache='device', route='fanout')"] == 0.011
    assert found["Read(cache='device', max_staleness=4)"] == 0.010125
    assert found["Read(cache='device', max_staleness=16)"] == round(0.010 + 1e-3 / 24, 9)
    assert found["Read(prefetch=True)"] == 0.010125, "hidden by the half of a step, but for writes"
    best = advice.best("value")
    assert best.read in (sc.Read(cache="device"), sc.Read(prefetch=True)) and not best.freshness
    lost = {str(each) for each in advice.choices if each.freshness}
    assert len(lost) == 3 and all("staleness" in each for each in lost)
    twice = sc.advise(total, held(), 1.0, writes_every=BETWEEN, step_seconds=0.012, readers=2)
    assert by_policy(twice)["Read(route='each')"].seconds == pytest.approx(0.012 - 0.004 + 0.016)


@pytest.mark.sample(every=2)
@pytest.mark.parametrize("devices", [1, 8])
@pytest.mark.parametrize("step", [total, decay], ids=lambda step: step.__name__)
def test_the_bytes_of_each_policy_are_those_that_move(devices, step):
    """With a write at every 8th step, a copy that may be 16 steps late is fetched every 24th."""
    reader, writer = sc.Session(mesh_of(devices)), sc.Session(mesh_of(devices))
    moved = Counter()
    unsubscribe = sc.recorder.subscribe(
        lambda event: isinstance(event, Moved) and moved.update(dict(event.link_bytes))
    )
    with reader:
        know(each=SLOW, fanout=SLOW)
        base = held()
        advice = sc.advise(step, base, 1.0, writes_every=BETWEEN, step_seconds=1.0)
    assert len(advice.choices) > 3
    for choice in advice.choices:
        with writer:
            value = sc.Variables(
                base.value, placement=choice.placement, read=choice.read, name="value"
            )
        with reader:
            step(value, 1.0)
            moved.clear()
        for number in range(STEPS):
            if step is total and number % BETWEEN == 0:
                with writer:
                    value._master.write(value._master.packed)
            with reader:
                jax.block_until_ready(step(value, 1.0)[1:] if step is decay else step(value, 1.0))
        found = {link: size / STEPS for link, size in moved.items() if size}
        wanted = {link: size for link, size in choice.link_bytes.items() if size}
        assert found == pytest.approx(wanted, rel=1e-9), choice
    unsubscribe()


def test_a_call_is_as_it_was(session):
    value, x = held(), jax.numpy.float32(3)
    advice = sc.advise(decay, value, x)
    assert value.version == 0 and np.all(value.value["w"] == 1) and float(x) == 3
    now = next(each for each in advice.choices if each.is_current)
    assert now.seconds == pytest.approx(advice.seconds) and now.read == sc.Read()
    text = str(advice)
    assert "decay: " in text and " a step now" in text and " best " in text
    assert "its policies were timed just now" in text


def test_what_takes_too_long_to_try_is_predicted(session, monkeypatch):
    monkeypatch.setattr(trials, "_TRIAL_SECONDS", 1e-3)
    assert "measured on 2026-01-02" in str(sc.advise(decay, held(), 1.0))
    with sc.Session(mesh_of(8), max_step_bytes=1 << 30):
        monkeypatch.setattr(trials, "_TRIAL_SECONDS", 20.0)
        assert "measured on 2026-01-02" in str(sc.advise(decay, held(), 1.0))


@pytest.mark.sample(every=2)
@pytest.mark.parametrize("between", [1, 8])
def test_policies_are_tried_with_the_step(session, monkeypatch, between):
    """Here a read of the master copy takes 20 ms, and by one route 40."""

    def take(master, reader, meter):
        fetched = master._copies.fetches
        packed = taken(master, reader, meter)
        if master._copies.fetches > fetched:
            time.sleep(0.04 if master._policy.route == "each" else 0.02)
        return packed

    taken = InHostMemory.take
    monkeypatch.setattr(InHostMemory, "take", take)
    found = by_policy(sc.advise(total, held(), 1.0, writes_every=between))
    least = {name: each.seconds - found["replicated"].seconds for name, each in found.items()}
    for name, fetches in {
        "Read()": 1,
        "Read(route='each')": 2,
        "Read(cache='device')": 1 / between,
        "Read(cache='device', route='each')": 2 / between,
        "Read(cache='device', max_staleness=4)": 1 / (8 if between == 8 else 5),
        "Read(cache='device', max_staleness=16)": 1 / (24 if between == 8 else 17),
    }.items():
        assert least[name] >= 0.01 * fetches, name
    assert least["Read(cache='device', max_staleness=16)"] < least["Read(route='each')"]


def test_calls_that_measure_are_none_of_the_users(session):
    step, value = sc.step(total.__wrapped__), held()
    step(value, np.ones(2))
    before, miss = step.stats(), step.last_miss
    sc.advise(step, value, np.ones(3))
    assert replace(step.stats(), programs=before.programs) == before
    assert step.last_miss == miss
    step(value, np.ones(4))
    assert step.stats().misses == before.misses + 1 == step.last_miss.number


def test_what_was_seen_says_how_often_a_value_is_written(session):
    value = held(sc.Read(cache="device"))
    for number in range(12):
        total(value, 1.0)
        if number % 6 == 5:
            value.assign(value.value)
    assert "is written every 6 steps" in str(sc.advise(total, value, 1.0))
    assert "is written each step" in str(sc.advise(decay, value, 1.0))


def test_resident_variables_are_compared_with_those_on_the_host(session):
    value = sc.Variables({"w": np.ones((SIZE // 64, 16), np.float32)}, name="value")
    advice = sc.advise(decay, value, 1.0)
    assert advice.choices[0].placement == sc.Replicated() == advice.best("value").placement
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
@pytest.mark.parametrize("mode", ["predicted", pytest.param("tried", marks=pytest.mark.slow)])
def test_served_variables_stay_as_they_are(tmp_path, monkeypatch, mode):
    monkeypatch.setattr(measuring, "SIZES", (1 << 10, 1 << 14))
    if mode == "predicted":
        monkeypatch.setattr(trials, "_SENT_BYTES", 0)
    server = LocalServer(tmp_path / "server").start()
    try:
        with sc.connect(server.address) as connection:
            value = connection.variables("value", {"w": np.ones(100)}, write=sc.Write("add"))
            advice = sc.advise(total, value, 1.0, writes_every=4)
            assert value.version == 0 and np.all(value.value["w"] == 1)
            found = {(each.read, each.write.every): each for each in advice.choices}
            size = 400  # float32 on the devices, once x64 is off.
            served = {n: each.link_bytes["server ↔ process"] for n, each in found.items()}
            cached = sc.Read(cache="device")
            assert served[sc.Read(), 1] == 2 * size
            assert served[cached, 1] == size / 4 + size
            assert served[cached, 4] == size / 4 + size / 4
            assert found[cached, 4].freshness == "updates up to 3 steps late"
            assert not advice.best("value").freshness
            rests_on = {"tried": "timed just now", "predicted": "by local, was measured on "}
            assert rests_on[mode] in str(advice)
            assert all(each.seconds > 0 for each in advice.choices)
            copied = connection.variables("value", {"w": np.ones(100)}, read=cached)
            of_decay = sc.advise(decay, copied, 1.0)
            assert copied.version == 0 and rests_on[mode] in str(of_decay)
            assert of_decay.best("value").read in {each.read for each in of_decay.choices}
    finally:
        server.stop()


# ---- "auto" -------------------------------------------------------------------------------------


@pytest.mark.parametrize("route", ROUTES)
def test_the_route_is_the_fastest_one(route):
    with sc.Session(mesh_of(8)):
        know(
            **dict.fromkeys(
                {*ROUTES, "program"} - {route, *["program"] * (route == "gather")}, SLOW
            )
        )
        planned = total.explain(held(), 1.0).plan.transfers[0]
        assert planned.route == route
        assert planned.why.startswith("it takes 1 ms as measured here, ")


def test_where_nothing_was_measured_the_fewest_bytes_cross():
    with sc.Session(mesh_of(8)):
        assert "crosses the host's link once" in total.explain(held(), 1.0).plan.transfers[0].why


@pytest.mark.slow
def test_links_are_measured_once_for_a_machine(tmp_path, monkeypatch):
    monkeypatch.setenv("STEPCACHE_DIR", str(tmp_path / "own"))
    with sc.Session(mesh_of(2)):
        sc.advise(total, held(), 1.0)
        (file,) = (tmp_path / "own").rglob("links/*.json")
        assert file.stat().st_mode & 0o077 == 0
        link_times.kept_times.cache_clear()
        monkeypatch.setattr(link_measuring, "_measured", None)
        assert "as measured here" in total.explain(held(), 1.0).plan.transfers[0].why
        sc.advise(total, held(), 1.0)
    whole = json.loads(file.read_text())
    broken = [
        b"",
        b"{",
        b"[]",
        json.dumps(whole | {"machine": "another"}).encode(),
        json.dumps(whole | {"seconds": {"each 1024": 1.0}}).encode(),
        json.dumps(whole | {"seconds": {"each": 1.0}}).encode(),
        json.dumps(whole | {"seconds": {"each 1024": "1"}}).encode(),
        json.dumps(whole | {"seconds": {"each \u0661": 1.0}}).encode(),
    ]
    for data in broken:
        file.write_bytes(data)
        link_times.kept_times.cache_clear()
        with sc.Session(mesh_of(2)):
            assert "once" in total.explain(held(), 1.0).plan.transfers[0].why, data


@pytest.mark.slow
def test_the_default_device_is_measured_once_too(tmp_path, monkeypatch):
    monkeypatch.setenv("STEPCACHE_DIR", str(tmp_path / "own"))
    sc.advise(total, held(), 1.0)
    link_times.kept_times.cache_clear()
    monkeypatch.setattr(link_measuring, "_measured", None)
    assert sc.advise(total, held(), 1.0).choices


def test_a_directory_that_cannot_be_written_costs_nothing(tmp_path, monkeypatch):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("STEPCACHE_DIR", str(tmp_path / "file"))
    with sc.Session(mesh_of(2)):
        assert sc.advise(total, held(), 1.0).choices


def test_variables_that_choose_how_they_are_read(session, monkeypatch):
    assert held("auto").read == sc.Read(cache="device")
    assert sc.Variables(np.ones(3), read="auto").read == sc.Read(), "they are there already"
    value = held("auto")
    assert float(total(value, 1.0)) == SIZE // 4 + 1
    monkeypatch.setattr(
        type(jax.devices()[0]), "memory_stats", lambda _: {"bytes_limit": 7 * SIZE}, raising=False
    )
    assert held("auto").read == sc.Read(), "a copy would take more than an eighth"


IN_A_POD = """
from stepcache.variables import link_measuring
link_measuring.SIZES = (1 << 10, 1 << 14)
with sc.Session(mesh):
    value, auto = (
        sc.Variables(np.ones((64, 2)), placement=sc.OnHost(), read=read, name="value")
        for read in (sc.Read(), "auto")
    )
    step = sc.step(lambda value, batch: value.sum() + batch.sum(), batch="batch")
    advice = sc.advise(step, value, np.ones(2))
    assert len(advice.choices) > 4
    print(sorted({each.read.route for each in advice.choices}), auto.read)
    assert float(step(auto, np.ones(2))) == 132 and advice.best("value")
"""


@pytest.mark.slow
def test_the_processes_of_a_pod_measure_together(tmp_path):
    for rank in succeeded(run_pod(tmp_path, IN_A_POD)):
        assert "['auto'] Read(cache='device')" in rank.output
