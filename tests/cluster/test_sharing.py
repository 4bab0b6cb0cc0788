"""One process of a pod builds a program, and the others load it."""

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
    say("level", "3" if stats.compiles else "2" if stats.traces else "1")
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


def levels(ranks):
    return [rank.said("level")[0] for rank in ranks]


@pytest.mark.parametrize(
    "cache", ["own", *(pytest.param(each, marks=pytest.mark.slow) for each in ("shared", "off"))]
)
def test_one_builds_and_the_next_run_loads(tmp_path, cache):
    directory = {
        "own": tmp_path / "cache{rank}",
        "shared": tmp_path / "cache",
        "off": "off",
    }[cache]
    assert levels(run_in_processes(tmp_path / "a", 3, directory)) == ["3", "1", "1"]
    again = levels(run_in_processes(tmp_path / "a", 3, directory))
    assert again == (["1", "1", "1"] if cache != "off" else ["3", "1", "1"])


@pytest.mark.slow
def test_who_has_it_gives_it_to_those_who_have_not(run, tmp_path):
    cache = tmp_path / "cache{rank}"
    run(tmp_path / "a", 3, cache)
    remove(tmp_path / "cache0")
    ranks = run(tmp_path / "a", 3, cache)
    assert levels(ranks) == ["1", "1", "1"]
    assert levels(run(tmp_path / "a", 3, cache)) == ["1", "1", "1"]


def test_who_cannot_read_it_any_more_builds_it_for_those_who_have_not(run, tmp_path):
    cache = tmp_path / "cache{rank}"
    run(tmp_path / "a", 3, cache)
    remove(tmp_path / "cache2")
    (program,) = (tmp_path / "cache0" / "v1" / "entries" / "program").iterdir()
    program.write_bytes(program.read_bytes()[:-100])
    assert levels(run(tmp_path / "a", 3, cache)) == ["3", "1", "1"]


def test_what_is_not_vouched_for_is_traced_by_all_and_compiled_by_one(run, tmp_path):
    inside = "import time; time.time()"
    for cache in ("off", tmp_path / "cache{rank}"):
        assert levels(run(tmp_path / "a", 3, cache, inside=inside)) == ["3", "2", "2"]


@pytest.mark.slow
@pytest.mark.parametrize("held", [(1, 2, 3), (2,)])
@pytest.mark.parametrize("inside", ["time.time()", "time.time() if RANK else None"])
def test_what_is_not_vouched_for_is_compiled_by_none_where_one_has_it(run, tmp_path, held, inside):
    """Also where it has to be traced by all, and the first rank's directory is empty."""
    cache = tmp_path / "cache{rank}"
    first = levels(run(tmp_path / "a", 4, cache, inside=inside))
    assert first == ["3", "2", "2", "2"]
    for rank in set(range(4)) - set(held):
        remove(tmp_path / f"cache{rank}")
    assert levels(run(tmp_path / "a", 4, cache, inside=inside)) == ["2", "2", "2", "2"]
    for rank in held:
        remove(tmp_path / f"cache{rank}")
    assert levels(run(tmp_path / "a", 4, cache, inside=inside)) == ["2", "2", "2", "2"]


@pytest.mark.slow
def test_what_was_edited_but_lowers_the_same_is_compiled_by_none_where_one_has_it(run, tmp_path):
    cache = tmp_path / "cache{rank}"
    run(tmp_path / "a", 4, cache, inside="unused = 1")
    for rank in (0, 1):
        remove(tmp_path / f"cache{rank}")
    assert levels(run(tmp_path / "a", 4, cache, inside="unused = 2")) == ["2", "1", "1", "1"]


def test_another_program_is_compiled_by_one_where_all_have_some(run, tmp_path):
    cache = tmp_path / "cache{rank}"
    run(tmp_path / "a", 3, cache)
    assert levels(run(tmp_path / "a", 3, cache, inside="batch = batch * 1.0")) == ["3", "1", "1"]


@pytest.mark.slow
def test_what_others_hold_but_does_not_load_is_built(run, tmp_path):
    cache = tmp_path / "cache{rank}"
    run(tmp_path / "a", 3, cache, inside="time.time()")
    remove(tmp_path / "cache0")
    before = """
from stepcache.programs.archive import Archive
patch(Archive, executable_bytes=lambda archive, digest: b"no program")
"""
    ranks = run(tmp_path / "a", 3, cache, before, inside="time.time()")
    assert levels(ranks)[0] == "3"
    assert "it cannot load the executable of another rank" in ranks[0].output


def test_a_rank_that_fails_to_trace_what_all_have_to_trace_holds_up_nobody(shared_pod, tmp_path):
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


@pytest.mark.slow
def test_what_cannot_be_shared_is_built_by_each(run, tmp_path):
    inside = "jax.debug.callback(lambda: None)"
    ranks = run(tmp_path / "a", 2, "off", inside=inside)
    assert levels(ranks) == ["3", "3"]
    assert "for itself: it cannot be stored: it calls back into Python" in ranks[1].output


def test_a_binary_that_does_not_load_is_built_there(run, tmp_path):
    before = """
from stepcache.jaxcompat import storing
def load(data, devices):
    raise RuntimeError("not for this machine")
if RANK == 1:
    patch(storing, load_executable=load)
"""
    ranks = run(tmp_path / "a", 3, "off", before)
    assert levels(ranks) == ["3", "3", "1"]
    assert "cannot load the executable of another rank (not for this machine)" in ranks[1].output


@pytest.mark.slow
def test_another_kind_of_host_builds_for_itself(tmp_path):
    before = """
from stepcache.jaxcompat import inspection
if RANK == 1:
    patch(inspection, _cpu_features=lambda: "another")
"""
    ranks = run_in_processes(tmp_path / "a", 3, tmp_path / "cache{rank}", before)
    assert levels(ranks) == ["3", "3", "1"]
    assert "another kind of host" in ranks[1].output


@pytest.mark.slow
@pytest.mark.parametrize("inside", ["pass", "RANK or print()"])
def test_one_builds_for_each_kind_of_host(tmp_path, inside):
    before = """
from stepcache.jaxcompat import inspection
if RANK % 2:
    patch(inspection, _cpu_features=lambda: "another")
"""
    ranks = run_in_processes(tmp_path / "a", 4, tmp_path / "cache{rank}", before, inside)
    assert levels(ranks) == ["3", "3", *(["1", "1"] if inside == "pass" else ["2", "2"])]
    builds = [f"rank {number} also builds" in rank.output for number, rank in enumerate(ranks)]
    assert builds == [False, True, False, False]
    assert (
        levels(run_in_processes(tmp_path / "a", 4, tmp_path / "cache{rank}", before, inside))
        == ["1"] * 4
    )


@pytest.mark.slow
def test_what_is_handed_out_is_taken_by_one_that_fails(tmp_path):
    """Else the one that hands it out would wait for that."""
    script = """
    from stepcache.distributed import broadcast
    broadcast.CHUNK_BYTES = 256
    @sc.step(batch="batch")
    def step(batch):
        time.time()  # So that all have to trace it.
        if jax.process_index() == 1:
            raise ValueError("not here")
        return batch.sum()
    with sc.Session(mesh):
        started = time.monotonic()
        try:
            step(np.ones(2, np.float32))
        except (ValueError, sc.AgreementError) as error:
            say("raised", type(error).__name__, time.monotonic() - started < 20, error)
    """
    ranks = succeeded(run_pod(tmp_path, script, 3))
    told = [rank.said("raised")[0] for rank in ranks]
    assert told[1] == "ValueError True not here"
    for each in (told[0], told[2]):
        assert each.startswith("AgreementError True") and "rank 1: ValueError: not here" in each


def test_large_programs_travel_in_pieces(run, tmp_path):
    """More of them than the service is given at a time."""
    before = """
from stepcache.distributed import broadcast
patch(broadcast, CHUNK_BYTES=256)
"""
    ranks = run(tmp_path / "a", 3, "off", before)
    assert levels(ranks) == ["3", "1", "1"]


@pytest.mark.slow
def test_pieces_are_not_kept_for_those_who_have_the_program(run, tmp_path):
    before = """
from stepcache.distributed import broadcast
patch(broadcast, CHUNK_BYTES=256)
"""
    run(tmp_path / "a", 3, tmp_path / "cache{rank}", before)
    remove(tmp_path / "cache2")
    assert levels(run(tmp_path / "a", 3, tmp_path / "cache{rank}", before)) == ["1", "1", "1"]


RELAYED = """
import re
from stepcache.distributed import broadcast, relay
from stepcache.jaxcompat.coordination import Service
patch(broadcast, RELAYED_BYTES=256)
patch(relay, CHILDREN=1)
served, pieces, serve, get = [], [], relay.Relay._serve, Service.get
def note_serve(self, connection):
    served.append(1)
    serve(self, connection)
def note_get(self, name, *rest):
    found = get(self, name, *rest)
    if found is not None and re.search(r"/(trace|program|executable)/[0-9]+/[0-9]+$", name):
        pieces.append(name)
    return found
patch(relay.Relay, _serve=note_serve)
patch(Service, get=note_get)
ending.append(lambda: say("relayed", len(served), len(pieces)))
"""


def relayed(ranks):
    return [[int(number) for number in rank.said("relayed")[0].split()] for rank in ranks]


@pytest.mark.slow
@pytest.mark.parametrize("inside", ["pass", "time.time()"])
def test_large_programs_go_from_rank_to_rank(run, tmp_path, inside):
    """Each passes them on to one other here, and none are read from the service of rank 0."""
    cache = tmp_path / "cache{rank}"
    ranks = run(tmp_path / "a", 4, cache, RELAYED, inside)
    loaded = "1" if inside == "pass" else "2"
    assert levels(ranks) == ["3", loaded, loaded, loaded]
    served, pieces = zip(*relayed(ranks), strict=True)
    assert max(served) <= 2 and sum(served) == 6 and not any(pieces)  # The trace, and the program.
    for rank in (0, 1, 3):
        remove(tmp_path / f"cache{rank}")
    assert levels(run(tmp_path / "a", 4, cache, RELAYED, inside)) == [loaded] * 4


CUT_OFF = """
if RANK == 2:
    def refuse(receiver, *rest):  # Not all connections: one of them watches the coordinator.
        receiver.close()
        raise ConnectionRefusedError("a firewall")
    patch(relay.Relay, fetch=refuse)
"""
NO_LISTENING = """
if RANK == 0:
    def refuse(*rest, **named):
        raise PermissionError("no listening")
    patch(relay.socket, create_server=refuse)
"""
TAMPERED = """
if RANK == 0:
    relay_of = broadcast.Relay
    patch(broadcast, Relay=lambda host, token, data: relay_of(
        host, token, data[:-1] + bytes([data[-1] ^ 1])))
"""


@pytest.mark.sample(every=3)
@pytest.mark.parametrize("trouble", [CUT_OFF, NO_LISTENING, TAMPERED])
def test_what_cannot_go_from_rank_to_rank_comes_in_pieces(run, tmp_path, trouble):
    ranks = run(tmp_path / "a", 4, "off", RELAYED + trouble)
    assert levels(ranks) == ["3", "1", "1", "1"]
    pieces = [each[1] for each in relayed(ranks)]
    assert pieces[2] == 2
    if trouble is not CUT_OFF:
        assert pieces == [0, 2, 2, 2]


@pytest.mark.slow
def test_all_take_the_trace_where_one_asks_for_it(run, tmp_path):
    cache = tmp_path / "cache{rank}"
    run(tmp_path / "a", 2, cache)
    before = """
if RANK == 1:
    how["verify"] = "before"
"""
    ranks = run(tmp_path / "a", 2, cache, before)
    assert "3" not in levels(ranks)


@pytest.mark.slow
@pytest.mark.parametrize("cache", ["cache{rank}", "cache"])
def test_the_ledger_compares_the_ranks(tmp_path, cache):
    """Where each has a directory of its own, that of rank 0 knows of all."""
    run_in_processes(tmp_path / "a", 3, tmp_path / cache)
    command = [sys.executable, "-c", CLI, "cache", "why", "--ranks", "--json"]
    environment = os.environ | {"STEPCACHE_DIR": str(tmp_path / cache.format(rank=0))}
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
