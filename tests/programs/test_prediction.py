"""What the last runs of a script used is loaded before its steps are called: a hint, no proof."""

import gc
import os
import subprocess
import sys
import threading

import jax
import numpy as np
import pytest

import stepcache as sc
from stepcache import jaxcompat
from stepcache.programs import prediction
from stepcache.programs.build import build
from stepcache.programs.prediction import Prediction, Predictions, Preloader, prediction_name
from stepcache.storage.disk_store import DiskStore

pytestmark = pytest.mark.skipif(
    not jaxcompat.CAN_STORE, reason="programs are stored through JAX's private API"
)

LIMIT_SECONDS = 30
PACKAGE = os.path.dirname(sc.__file__) + os.sep


@pytest.fixture
def disk(tmp_path):
    return DiskStore(tmp_path / "programs")


@pytest.fixture
def loads(monkeypatch):
    """What XLA is given to load; it gives that back."""
    seen = []
    monkeypatch.setattr(jaxcompat, "load_executable", lambda data, _: seen.append(data) or data)
    return seen


def row(program, step="step", number=0, **other):
    about = {"platform": "cpu", "devices": [0], "file": "", "file_digest": ""} | other
    call, time = f"call of {program}", float(number)
    fields = (step, call, digest(program), *about.values(), {}, "", "", time)
    return Prediction(*fields)


def digest(program):
    return f"{program.encode().hex():0>64}"


def note(disk, *rows):
    """A run that uses these; the bytes of a program are its name."""
    predictions = Predictions(disk)
    for each in rows:
        predictions.note(each, {})
        disk.publish("program", each.program, {}, each.signature[8:].encode())
    predictions.write()


def preloaded(disk):
    (preloader := Preloader(disk, Predictions(disk))).start()
    preloader.preparing.result(LIMIT_SECONDS)
    for _, load in list(preloader.loads.values()):
        load.result(LIMIT_SECONDS)
    return preloader


def test_of_each_step_what_its_last_run_used_in_the_order_of_use(disk, loads, monkeypatch):
    monkeypatch.setattr(prediction, "_LOADERS", 1)
    note(disk, row("a", number=1), row("b", number=2), row("c", "other", number=3))
    note(disk, row("d", number=9), row("b", number=5))
    preloader = preloaded(disk)
    assert loads == [b"c", b"b", b"d"], "and not what only an earlier run of the step used"
    known = Predictions(disk).find("step", "call of a")
    assert known.program == digest("a"), "it explains misses"
    here = jax.devices("cpu")[:1]
    assert preloader.take(digest("b"), here) == b"b"
    assert preloader.take(digest("b"), here) is None, "it is given once"
    assert preloader.take(digest("d"), jax.devices("cpu")[1:2]) is None


def test_closures_of_one_factory_are_all_predicted(disk, loads, monkeypatch):
    """They have one name and are called alike; each has a program of its own."""
    monkeypatch.setattr(prediction, "_LOADERS", 1)
    same = [
        row(name, number=number)._replace(signature="call") for number, name in enumerate("abc")
    ]
    predictions = Predictions(disk)
    assert not any(predictions.note(each, {}) for each in same)
    for each in same:
        disk.publish("program", each.program, {}, each.program.encode())
    predictions.write()
    preloaded(disk)
    assert loads == [each.program.encode() for each in same]
    later = Predictions(disk)
    assert later.note(same[1], {}), "an earlier run has used it"
    assert not later.note(row("d")._replace(signature="call"), {})
    later.write()
    of_call = [each.program for each in Predictions(disk).of_step("step")]
    assert of_call == [digest("d"), digest("b")], "those of the latest run"


def test_what_is_known_is_bounded(disk, loads, monkeypatch):
    monkeypatch.setattr(prediction, "_ROWS_A_STEP", 16)
    note(disk, *(row(f"{n:03}", number=n) for n in range(40)))
    assert len(Predictions(disk).of_step("step")) == 16
    assert Predictions(disk).of_step("step")[0].signature == "call of 039"
    monkeypatch.setattr(prediction, "_ROWS", 20)
    note(disk, *(row(f"{n:03}", f"step {n}", n) for n in range(30)))
    assert len(Predictions(disk).of_last_run()) == 20
    monkeypatch.setattr(prediction, "_PRELOADED_AT_MOST", 5)
    preloaded(disk)
    assert len(loads) == 5
    monkeypatch.setattr(prediction, "_PRELOADED_BYTES", 3)
    preloaded(disk)
    assert len(loads) == 7, "3 bytes each: it stops once there are more"


def test_devices_of_its_own_platform_that_there_are(disk, loads):
    places = [("cpu", [0]), ("tpu", [0]), ("cpu", [0, 99]), ("cpu", [1, 0])]
    note(disk, *(row(f"{n}", platform=p, devices=d) for n, (p, d) in enumerate(places)))
    preloaded(disk)
    assert sorted(loads) == [b"0", b"3"]


def test_a_step_whose_file_has_changed_is_left_out(disk, loads, tmp_path):
    files = [tmp_path / name for name in ("same.py", "changed.py", "gone.py")]
    for file in files:
        file.write_text("before")
    about = [{"file": str(f), "file_digest": prediction.file_digest(str(f))} for f in files]
    note(disk, *(row(f"{n}", **each) for n, each in enumerate(about)))
    files[1].write_text("afterward")
    files[2].unlink()
    preloaded(disk)
    assert loads == [b"0"]


def test_what_is_used_as_before_but_of_a_changed_file_is_written_again(disk, loads, tmp_path):
    """As after a change of a comment: the module, and so the program, are the same."""
    (file := tmp_path / "train.py").write_text("before")

    def used():
        return row("0", file=str(file), file_digest=prediction.file_digest(str(file)))

    note(disk, used())
    for content, is_new in (("before", False), ("afterward", True)):
        file.write_text(content)
        predictions = Predictions(disk)
        assert predictions.note(used(), {}) and predictions.is_new == is_new
    predictions.write()
    preloaded(disk)
    assert loads == [b"0"]


def test_a_call_waits_for_a_load_under_way(disk, monkeypatch):
    begun, go_on = threading.Event(), threading.Event()

    def load(data, devices):
        begun.set()
        assert go_on.wait(LIMIT_SECONDS)
        return data

    monkeypatch.setattr(jaxcompat, "load_executable", load)
    note(disk, row("a"))
    (preloader := Preloader(disk, Predictions(disk))).start()
    assert begun.wait(LIMIT_SECONDS)
    preloader.preparing.result(LIMIT_SECONDS)
    threading.Timer(0.1, go_on.set).start()
    assert preloader.take(digest("a"), jax.devices()[:1]) == b"a"


@pytest.mark.parametrize("how", ["torn", "malformed"])
def test_an_entry_that_cannot_be_read_predicts_nothing_and_is_replaced(how, disk, loads):
    note(disk, row("a"))
    (path,) = disk.root.rglob("entries/prediction/*")
    if how == "torn":
        path.write_bytes(path.read_bytes()[:-7])
    else:
        disk.publish("prediction", prediction_name(), {}, b"\x93\x01\x02\x03")
    preloaded(disk)
    assert loads == [] and Predictions(disk).of_last_run() == []
    note(disk, row("b"))
    assert [each.program for each in Predictions(disk).of_last_run()] == [digest("b")]


def test_two_processes_that_write_at_once_lose_nothing_of_each_other(disk):
    one, other = Predictions(disk), Predictions(disk)
    assert one.of_last_run() == other.of_last_run() == []
    for each, name in ((one, "a"), (other, "b"), (one, "c")):
        each.note(row(name), {})
        each.write()
    found = {each.signature[8:] for each in Predictions(disk).of_step("step")}
    assert found == {"a", "b", "c"}


def test_a_step_drops_what_it_does_not_use_and_the_next_run_does_without(tmp_path):
    sources = []
    for factor in (2, 3, 3):
        cache = sc.ProgramCache(tmp_path)
        preloader = cache.store().preloader
        preloader.preparing.result(LIMIT_SECONDS)
        foreseen = len(preloader.loads)
        with sc.Session(cache=cache):
            step = sc.step(lambda x, factor=factor: x * factor)
            assert step(np.ones(3))[0] == factor
            cache.flush()
        sources.append((foreseen, len(preloader.loads), step.stats().compiles))
    assert sources == [(0, 0, 1), (1, 0, 1), (1, 0, 0)]


@pytest.mark.parametrize("source", ["preloaded", "memory"])
def test_a_miss_that_compiles_nothing_enters_at_most_twelve_files_below_build(tmp_path, source):
    entered, depth = set(), 0

    def look(frame, event, argument):
        nonlocal depth
        is_build = frame.f_code is build.__code__
        depth += {"call": is_build, "return": -is_build}.get(event, 0)
        if depth and event == "call" and frame.f_code.co_filename.startswith(PACKAGE):
            entered.add(frame.f_code.co_filename.removeprefix(PACKAGE))

    def first_call(cache):
        preloader = cache.store().preloader
        preloader.preparing.result(LIMIT_SECONDS)
        for _, load in list(preloader.loads.values()):
            load.result(LIMIT_SECONDS)
        with sc.Session(cache=cache):
            (step := sc.step(lambda x: x * 2 + 1))(x)
            cache.flush()
        return step

    x, cache = np.ones(3), sc.ProgramCache(tmp_path)
    first = first_call(cache)  # It holds its program in memory.
    assert first.stats().compiles == 1
    gc.collect()
    gc.disable()  # Finalizers may be anywhere.
    sys.setprofile(look)
    try:
        step = first_call(cache if source == "memory" else sc.ProgramCache(tmp_path))
    finally:
        sys.setprofile(None)
        gc.enable()
    words = {"memory": "that this process has", "preloaded": "preloaded from disk"}
    assert words[source] in step.last_miss.remedy
    assert {"programs/build.py", "jaxcompat/stages.py"} <= entered
    assert len(entered) <= 12, sorted(entered)


def test_what_is_stored_at_the_end_of_the_process_is_noted_by_one_write(tmp_path, monkeypatch):
    cache, written, go_on = sc.ProgramCache(tmp_path), [], threading.Event()
    store = cache.store()
    write = store.predictions.write
    monkeypatch.setattr(store.predictions, "write", lambda: written.append(1) or write())
    with sc.Session(cache=cache):
        store.worker.submit(go_on.wait)
        for factor in range(5):
            assert sc.step(lambda x, factor=factor: x * factor)(np.ones(3))[0] == factor
    store.worker._executor.shutdown(wait=False)  # It takes no more jobs, as Python ends.
    go_on.set()
    cache.flush()
    assert len(written) == 1 and len(Predictions(store.disk).of_last_run()) == 5


SCRIPT = """
import os, sys, time
import numpy as np, jax
import stepcache as sc
from jax._src import xla_bridge

step = sc.step(lambda x: x * 2 + 1)
time.sleep(0.3)
assert not xla_bridge.backends_are_initialized(), "preloading starts no backend"
if child := os.fork():
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
jax.config.update("jax_num_cpu_devices", 3)
assert jax.device_count() == 3
preloader = sc.current_session().cache.store().preloader
limit = time.monotonic() + 20
while child and "wait" in sys.argv and not preloader.loads and time.monotonic() < limit:
    time.sleep(0.01)
ahead = len(preloader.loads)
assert step(np.ones(8))[0] == 3
print(ahead, len(preloader.loads), step.stats().compiles, step.stats().loads)
"""


def test_a_script_starts_jax_as_it_likes_and_finds_its_programs_loaded(tmp_path):
    """A child that it forks before has its own devices, and loads what it needs."""
    file = tmp_path / "script.py"
    file.write_text(SCRIPT)
    environment = dict(os.environ, STEPCACHE_DIR=str(tmp_path / "programs"), NPROC="8")
    for word, expected in (("", "0 0 1 0\n0 0 0 1\n"), ("wait", "0 0 0 1\n1 0 0 1\n")):
        command = [sys.executable, "-W", "ignore", str(file), word]
        done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120)
        assert (done.stdout, done.stderr) == (expected, "")
