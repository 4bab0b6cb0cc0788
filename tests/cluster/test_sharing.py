"""All processes of a pod trace a step; one compiles it, and the others load the executable."""

import json
import os
import shutil
import subprocess
import sys

import pytest

from tests.cluster.pods import run_pod, succeeded

CLI = "from stepcache.cli import main; main()"
SCRIPT = """
import contextlib, logging
from unittest import mock
log = logging.StreamHandler(sys.stdout)
log.setFormatter(logging.Formatter("log %(message)s"))
logging.root.addHandler(log)
logging.root.setLevel(logging.INFO)
patches, how, ending = contextlib.ExitStack(), {{}}, []
def patch(owner, **values):
    for name, value in values.items():
        patches.enter_context(mock.patch.object(owner, name, value))
patches.callback(logging.root.removeHandler, log)
SOURCES = []
def note(event):
    if type(event).__name__ in ("Built", "Loaded"):
        SOURCES.append(getattr(event, "source", "compiled"))
patches.callback(sc.recorder.subscribe(note))
{before}
with patches, sc.Session(mesh, cache=sc.ProgramCache({cache}, **how)) as session:
    @sc.step(carry="state", batch="batch")
    def train(state, batch):
        {inside}
        return state + batch.sum(), batch.mean()
    state, mean = train(np.ones(3, np.float32), np.full(4, float(RANK), np.float32))
    say("result", float(state[0]), float(mean))
    stats = train.stats()
    say("counts", stats.traces, stats.compiles, stats.loads)
    say("seconds", stats.agree_seconds, stats.wait_seconds, stats.give_seconds)
    say("source", SOURCES[-1])
    session.cache.flush()
for end in ending:
    end()
"""


@pytest.fixture
def run(shared_pod):
    """Runs the script in the processes of a shared pod: each time another life of its step.

    It has nothing of those before it but the directories: another function, another cache.
    """

    def run(directory, count, cache, before="", inside="pass"):
        place = None if cache == "off" else str(cache)
        cache = "None" if place is None else f"{place!r}.format(rank=RANK)"
        script = SCRIPT.format(before=before, inside=inside, cache=cache)
        directory.mkdir(exist_ok=True)
        return checked(shared_pod(count).run(directory, script))

    return run


def run_in_processes(directory, count, cache, before="", inside="pass"):
    """The same in processes of its own, with the cache that all steps have by default."""
    directory.mkdir(exist_ok=True)
    script = SCRIPT.format(before=before, inside=inside, cache="None")
    script = script.replace(", cache=sc.ProgramCache(None, **how)", "")
    return checked(run_pod(directory, script, count, cache=cache))


def checked(ranks):
    total = 1.0 + 4 * sum(range(len(ranks)))
    for rank in succeeded(ranks):
        mean = sum(range(len(ranks))) / len(ranks)
        assert rank.said("result") == [f"{total} {mean}"], rank.output
    return ranks


def remove(directory):
    """Removes a cache. The pod's processes live on, and may be writing what they do to it."""
    removed = directory.with_name(f"{directory.name} removed")
    directory.rename(removed)
    shutil.rmtree(removed, ignore_errors=True)


OWN = "its own disk"


def sources(ranks):
    """Where each rank had its executable. Whether it was loaded before it was needed is chance."""
    said = [rank.said("source")[0] for rank in ranks]
    return [OWN if each in ("disk", "preloaded") else each for each in said]


@pytest.mark.parametrize(
    "cache", ["own", *(pytest.param(each, marks=pytest.mark.slow) for each in ("shared", "off"))]
)
def test_one_compiles_and_the_next_run_loads(tmp_path, cache):
    directory = {
        "own": tmp_path / "cache{rank}",
        "shared": tmp_path / "cache",
        "off": "off",
    }[cache]
    first = ["compiled", "rank 0", "rank 0"]
    assert sources(run_in_processes(tmp_path / "a", 3, directory)) == first
    again = sources(run_in_processes(tmp_path / "a", 3, directory))
    assert again == (first if cache == "off" else [OWN] * 3)


def test_who_has_it_gives_it_to_those_who_have_not(run, tmp_path):
    cache = tmp_path / "cache{rank}"
    run(tmp_path / "a", 3, cache)
    remove(tmp_path / "cache0")
    assert sources(run(tmp_path / "a", 3, cache)) == ["rank 1", OWN, OWN]
    assert sources(run(tmp_path / "a", 3, cache)) == [OWN] * 3


def test_what_one_cannot_read_any_more_it_takes_from_another(run, tmp_path):
    cache = tmp_path / "cache{rank}"
    run(tmp_path / "a", 3, cache)
    remove(tmp_path / "cache2")
    (program,) = (tmp_path / "cache0" / "v2" / "entries" / "program").iterdir()
    program.write_bytes(program.read_bytes()[:-100])
    assert sources(run(tmp_path / "a", 3, cache)) == ["rank 1", OWN, "rank 1"]


@pytest.mark.parametrize("inside", ["time.time()", "os.getpid()", "RANK or print()"])
def test_what_a_trace_does_besides_costs_nothing(run, tmp_path, inside):
    cache = tmp_path / "cache{rank}"
    ranks = run(tmp_path / "a", 3, cache, inside=f"import os, time; {inside}")
    assert sources(ranks) == ["compiled", "rank 0", "rank 0"]


def test_what_was_edited_and_lowers_to_another_module_is_compiled_by_one(run, tmp_path):
    cache = tmp_path / "cache{rank}"
    run(tmp_path / "a", 3, cache, inside="unused = 1")
    assert sources(run(tmp_path / "a", 3, cache, inside="unused = 2")) == [OWN] * 3
    ranks = run(tmp_path / "a", 3, cache, inside="batch = batch * 1.0")
    assert sources(ranks) == ["compiled", "rank 0", "rank 0"]


def test_a_rank_that_fails_to_trace_holds_up_nobody(shared_pod, tmp_path):
    script = """
    @sc.step(batch="batch")
    def step(batch):
        if RANK == 1:
            raise ValueError("not here")
        return batch.sum()
    with sc.Session(mesh):
        try:
            step(np.ones(2, np.float32))
        except (ValueError, sc.AgreementError) as error:
            say("raised", type(error).__name__, error)
    """
    ranks = succeeded(shared_pod(3).run(tmp_path, script, limit=40))
    told = [rank.said("raised")[0] for rank in ranks]
    assert told[1].startswith("ValueError not here")
    assert "AgreementError" in told[0] and "rank 1: ValueError: not here" in told[2]


@pytest.mark.parametrize("kind", ["MemoryError", "KeyboardInterrupt"])
def test_a_rank_that_fails_to_compile_holds_up_nobody(shared_pod, tmp_path, kind):
    script = f"""
    from unittest import mock
    from jax._src import compiler
    def fail(*args, **kwargs):
        raise {kind}("no room")
    step = sc.step(lambda batch: batch.sum(), batch="batch")
    with mock.patch.object(compiler, "backend_compile_and_load", fail), sc.Session(mesh):
        try:
            step(np.ones(2, np.float32))
        except ({kind}, sc.AgreementError) as error:
            say("raised", type(error).__name__, error)
    """
    for rank in succeeded(shared_pod(3).run(tmp_path, script, limit=40)):
        assert "no room" in rank.said("raised")[0], rank.output


@pytest.mark.slow
def test_what_cannot_be_shared_is_compiled_by_each(run, tmp_path):
    ranks = run(tmp_path / "a", 2, "off", inside="jax.debug.callback(lambda: None)")
    assert sources(ranks) == ["compiled", "compiled"]


def test_an_executable_that_does_not_load_is_compiled_there(run, tmp_path):
    before = """
import dataclasses
from stepcache.jaxcompat import hooks
make = hooks.Compilation
def refuse(data):
    raise RuntimeError("not for this machine")
if RANK == 1:
    patch(hooks, Compilation=lambda *given: dataclasses.replace(make(*given), load=refuse))
"""
    ranks = run(tmp_path / "a", 3, "off", before)
    assert sources(ranks) == ["compiled", "compiled", "rank 0"]
    assert "it cannot load what rank 0 sent (not for this machine)" in ranks[1].output


def test_one_compiles_for_each_kind_of_host(tmp_path):
    before = """
from stepcache.jaxcompat import hooks
if RANK % 2:
    patch(hooks, cpu_features=lambda: "another")
"""
    for cache in (tmp_path / "cache{rank}", tmp_path / "cache"):
        ranks = run_in_processes(tmp_path / "a", 4, cache, before)
        assert sources(ranks) == ["compiled", "compiled", "rank 0", "rank 1"]
        again = sources(run_in_processes(tmp_path / "a", 4, cache, before))
        assert again == [OWN] * 4


def test_large_programs_travel_in_pieces(run, tmp_path):
    """More of them than the service is given at a time."""
    before = """
from stepcache.pods import rounds
patch(rounds, CHUNK_BYTES=256)
"""
    ranks = run(tmp_path / "a", 3, "off", before)
    assert sources(ranks) == ["compiled", "rank 0", "rank 0"]


@pytest.mark.slow
def test_the_ledger_compares_the_ranks(tmp_path):
    run_in_processes(tmp_path / "a", 3, tmp_path / "cache")
    command = [sys.executable, "-c", CLI, "cache", "why", "--ranks", "--json"]
    environment = os.environ | {"STEPCACHE_DIR": str(tmp_path / "cache")}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    (told,) = json.loads(done.stdout)["runs"]
    ranks = {each["rank"]: each for each in told["ranks"]}
    assert sorted(ranks) == [0, 1, 2]
    assert "compile" in ranks[0]["seconds"] and "compile" not in ranks[1]["seconds"]
    assert told["slowest"]["compile"] == 0 and told["slowest"]["wait"] in (1, 2)


@pytest.mark.slow
def test_a_miss_and_an_explanation_name_the_ranks(shared_pod, tmp_path):
    script = """
    step = sc.step(lambda batch: batch.sum(), batch="batch")
    with sc.Session(mesh):
        batch = np.ones(2, np.float32)
        told = step.explain(batch)
        say("explained", told.rank, told.processes, "agree" in str(told), told.arguments[0].type)
        step(batch)
        say("then", "agree" in str(step.explain(batch)))
        say("miss", str(step.last_miss).replace(chr(10), " "))
        step.warm(jax.ShapeDtypeStruct((3,), np.float32))
        with sc.no_recompile():
            say("warmed", float(step(np.ones(3, np.float32))))
    """
    for number, rank in enumerate(succeeded(shared_pod(2).run(tmp_path, script))):
        assert rank.said("explained")[0].startswith(f"{number} 2 True"), rank.output
        assert rank.said("then") == ["False"] and rank.said("warmed") == ["6.0"]
        assert ("loaded from rank 0" in rank.said("miss")[0]) == (number == 1), rank.output
