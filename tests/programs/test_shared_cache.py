"""A cache behind the directory, in an object store: what one machine builds, others load."""

import functools
import json
import os
import signal
import subprocess
import sys
import threading
import types
import uuid
import warnings
import weakref
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import stepcache as sc
from stepcache import jaxcompat
from stepcache.events import Loaded, recorder
from stepcache.storage.disk_store import DiskStore
from stepcache.storage.object_store import ObjectStore, Requests
from stepcache.storage.shared_entries import ROOT, Catalogue, SharedEntries, signed
from stepcache.storage.shared_place import Place
from tests.cluster.pods import run_pod, succeeded
from tests.object_server import BUCKET, ObjectServer

pytestmark = pytest.mark.skipif(not jaxcompat.CAN_STORE, reason="nothing is stored")

SOURCE = """
@sc.step
def first(x):
    return jnp.tanh(x) * 2

@sc.step
def second(x):
    return jnp.sin(x) + 3
"""
BUILT, LOADED = (1, 1, 0), (1, 0, 1)
NAMES = ("first", "second")


@pytest.fixture(scope="module")
def server():
    with ObjectServer() as server:
        yield server


@pytest.fixture(autouse=True)
def environment(server, tmp_path, monkeypatch):
    """The variables that lead to the server, and a key."""
    server.behave()
    for name, value in server.environment.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("STEPCACHE_KEY_FILE", str(key_in(tmp_path)))
    monkeypatch.setenv("STEPCACHE_REMOTE_SECONDS", "60")  # The machine may be busy.


def key_in(directory: Path, content: str = "0123456789abcdef" * 4) -> Path:
    path = directory / "key"
    path.write_text(content + "\n")
    path.chmod(0o600)
    return path


@pytest.fixture
def bucket():
    """A prefix of its own in the bucket."""
    return f"s3://{BUCKET}/{uuid.uuid4().hex}"


@pytest.fixture(params=["s3", "file"])
def url(request, bucket, tmp_path):
    return bucket if request.param == "s3" else f"file://{tmp_path}/shared"


class Machine:
    """One with a directory of its own, and a process in which the steps were never called."""

    def __init__(self, url, tmp_path, source=SOURCE):
        self.directory = tmp_path / uuid.uuid4().hex
        self.cache = sc.ProgramCache(self.directory, remote=url)
        self.store = self.cache.store()
        self.remote = self.store.remote
        path = tmp_path / "life.py"
        path.write_text(source)
        self.life = sys.modules["life"] = types.ModuleType("life")
        self.life.__dict__.update(jax=jax, jnp=jnp, sc=sc, __file__=str(path))
        exec(compile(source, str(path), "exec"), self.life.__dict__)

    def run(self, *names):
        """Calls steps. Returns traces, compiles and loads of each."""
        with sc.Session(cache=self.cache):
            for name in names or NAMES:
                jax.block_until_ready(getattr(self.life, name)(np.ones(8, np.float32)))
        for _ in range(2):  # What is stored first says then what was used.
            self.cache.flush()
        stats = [getattr(self.life, name).stats() for name in names or NAMES]
        return [(each.traces, each.compiles, each.loads) for each in stats]


# ---- the store -----------------------------------------------------------------------------------


def test_the_contract_of_an_object_store(url):
    store = ObjectStore(Place.of(url, "test"))
    assert store.listed("") == []
    for _ in range(2):  # What is not there need not be removed.
        store.delete(["a/one", "a/two"])
    with pytest.raises(FileNotFoundError):
        store.get("a/one")
    big = os.urandom(6 << 20)
    assert store.put("a/one", b"one") and store.put("b", big)
    assert not store.put("a/one", b"other"), "it is there"
    assert store.get("a/one") == b"one" and store.get("b") == big
    (found,) = store.listed("a/")
    assert (found.name, found.size_bytes) == ("a/one", 3)
    store.delete(["a/one"])
    assert store.listed("a/") == []


def digests_in(payload):
    return payload.decode().split()


def entries_in(url, tmp_path, name):
    """What `SharedEntries` is, for a machine with a directory of its own."""
    return SharedEntries(Place.of(url, "test"), DiskStore(tmp_path / name))


def test_programs_and_predictions_travel(url, tmp_path):
    first = entries_in(url, tmp_path, "first")
    first.begin()
    for digest in ("aa", "bb"):
        first.upload("program", digest, {"label": digest}, digest.encode() * 99)
    for payload in (b"aa", b"aa bb dd"):
        first.upload_prediction("cc", payload)
        first.flush()
    second = entries_in(url, tmp_path, "second")
    assert second.fetch("aa") and not second.fetch("dd")
    assert second.fetch_ahead("cc", digests_in).result(20)
    second._reads.wait()
    disk = second._disk
    assert disk.read("prediction", "cc").payload == b"aa bb dd", "the newest"
    assert disk.read("program", "bb").payload == b"bb" * 99
    assert disk.read("program", "aa").header == {"label": "aa"}
    assert second.received.keys() == {"aa", "bb"} and min(second.received.values()) > 100
    assert not second.fetch_ahead("dd", digests_in).result(20), "no such prediction"
    disk.publish("prediction", "ee", {}, b"aa")
    assert second.fetch_ahead("ee", digests_in).result(20), "that of the disk counts"


def test_what_waits_behind_others_is_fetched_first(url, tmp_path, monkeypatch):
    first, number = entries_in(url, tmp_path, "first"), 64
    for each in range(number):
        first.upload("program", f"{each:02x}", {}, b"x")
    first.upload_prediction("cc", " ".join(f"{each:02x}" for each in range(number)).encode())
    first.flush()
    second, original, order = entries_in(url, tmp_path, "second"), ObjectStore.get, []
    gate = threading.Event()

    def get(store, name):
        order.append(name)
        if "prediction" not in name:
            gate.wait(20)
        return original(store, name)

    monkeypatch.setattr(ObjectStore, "get", get)
    assert second.fetch_ahead("cc", digests_in).result(20)
    threading.Timer(0.2, gate.set).start()
    assert second.fetch(f"{number - 1:02x}")
    second._reads.wait()
    assert order.index(f"{ROOT}program/{number - 1:02x}") < number // 2
    assert len(order) == number + 1, "each is fetched once"


def test_what_one_machine_builds_another_loads(url, tmp_path):
    assert Machine(url, tmp_path).run() == [BUILT, BUILT]
    machine = Machine(url, tmp_path)
    assert machine.run() == [LOADED, LOADED]
    stats = machine.life.first.stats()
    assert stats.remote_loads == 1 and stats.remote_bytes > 1000
    (loaded,) = [each for each in recorder.recent(Loaded)[-2:] if each.step == "first"]
    assert loaded.remote_bytes == stats.remote_bytes
    # Else it was fetched ahead, so that the call did not wait.
    assert (loaded.source == "remote") == (stats.remote_seconds > 0)
    # From now on it is on the disk of this machine, signed with the key of its directory.
    machine.cache = sc.ProgramCache(machine.directory, remote="off")
    machine.life.first.clear_cache()
    assert machine.run("first") == [(2, 0, 2)] and machine.cache.store().remote is None


@pytest.mark.sample(every=2)
def test_processes_with_empty_directories(url, tmp_path):
    """As a user has it: by the environment alone, with warnings as errors, and at once."""
    script = tmp_path / "train.py"
    script.write_text(
        "import jax, jax.numpy as jnp, numpy as np, stepcache as sc\n"
        + SOURCE
        + "out = first(np.ones(8)), second(np.ones(8))\n"
        "stats = first.stats(), second.stats()\n"
        "print(*((s.traces, s.compiles, s.loads) for s in stats))\n"
    )
    outputs = []
    for number in range(2):
        variables = {"STEPCACHE_DIR": str(tmp_path / str(number)), "STEPCACHE_REMOTE": url}
        done = subprocess.run(
            [sys.executable, "-W", "error", str(script)],
            env=os.environ | variables,
            capture_output=True,
            text=True,
            timeout=120,
        )
        assert done.returncode == 0, done.stderr
        outputs.append(done.stdout.strip())
        assert not done.stderr
    assert outputs == ["(1, 1, 0) (1, 1, 0)", "(1, 0, 1) (1, 0, 1)"]


def test_what_the_last_run_has_used_is_fetched_ahead(bucket, server, tmp_path):
    Machine(bucket, tmp_path).run()
    server.behave()
    machine = Machine(bucket, tmp_path)
    machine.remote._reads.wait(20)
    requests = server.behave(forbidden=True)
    assert requests == {"GET": 4}, "a listing, a prediction, two programs"
    assert machine.run() == [LOADED, LOADED]


def test_a_listing_answers_for_all_that_is_not_there(bucket, server, tmp_path):
    Machine(bucket, tmp_path).run("first")
    machine = Machine(bucket, tmp_path, source=SOURCE.replace("* 2", "* 5").replace("+ 3", "+ 7"))
    machine.remote._reads.wait(20)
    server.behave()
    assert machine.run() == [BUILT, BUILT]
    requests = server.behave()
    assert "GET" not in requests and requests["PUT"] >= 3, "two programs, and what was used"


def test_two_writers_of_one_program(bucket, server, tmp_path):
    machines = [Machine(bucket, tmp_path) for _ in range(2)]
    for machine in machines:  # Both have seen the empty store before either writes.
        machine.remote._reads.wait(20)
    assert [machine.run() for machine in machines] == [[BUILT, BUILT]] * 2
    prefix = bucket.rpartition("/")[2]
    names = [name.removeprefix(f"{prefix}/{ROOT}") for name in server.objects(prefix)]
    assert sum(name.startswith("program/") for name in names) == 2
    assert Machine(bucket, tmp_path).run() == [LOADED, LOADED]


# ---- a store that fails --------------------------------------------------------------------------


def once_warned(machine, *names, match):
    """Runs steps, where one warning is expected."""
    with pytest.warns(sc.StepCacheWarning, match=match) as caught:
        found = machine.run(*names)
    assert len([each for each in caught if each.category is sc.StepCacheWarning]) == 1
    return found


@pytest.mark.parametrize("fault", [{"unavailable": 2}, {"truncated": 2}])
def test_what_passes_is_tried_again(bucket, server, tmp_path, fault):
    Machine(bucket, tmp_path).run()
    server.behave(**fault)
    assert Machine(bucket, tmp_path).run() == [LOADED, LOADED]


@pytest.mark.parametrize("fault", [{"unavailable": 10_000}, {"forbidden": True}])
def test_a_store_that_fails_is_left_alone(bucket, server, tmp_path, fault):
    Machine(bucket, tmp_path).run()
    server.behave(**fault)
    machine = Machine(bucket, tmp_path)
    assert once_warned(machine, match="is not used from now on") == [BUILT, BUILT]
    asked = server.behave()
    assert Machine(bucket, tmp_path).run() == [BUILT, BUILT], "nor by another cache"
    assert server.behave() == {} and "PUT" not in asked


def test_waiting_ends(bucket, server, tmp_path, monkeypatch):
    monkeypatch.setenv("STEPCACHE_REMOTE_SECONDS", "0.3")
    server.behave(hang=True)
    machine = Machine(bucket, tmp_path)
    assert once_warned(machine, match="STEPCACHE_REMOTE_SECONDS") == [BUILT, BUILT]
    assert 0.3 <= machine.life.first.stats().remote_seconds < 10
    assert machine.life.second.stats().remote_seconds == 0


def test_nobody_answers(bucket, tmp_path, monkeypatch):
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://127.0.0.1:9")
    machine = Machine(bucket, tmp_path)
    assert once_warned(machine, match="is not used from now on") == [BUILT, BUILT]


def test_warnings_as_errors_are_no_matter_of_the_step(bucket, server, tmp_path):
    server.behave(forbidden=True)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert Machine(bucket, tmp_path).run() == [BUILT, BUILT]


def test_a_store_that_takes_nothing_still_gives(bucket, server, tmp_path):
    Machine(bucket, tmp_path).run("first")
    server.behave(read_only=True)
    machine = Machine(bucket, tmp_path)
    assert once_warned(machine, match="STEPCACHE_REMOTE_MODE=read") == [LOADED, BUILT]
    assert 1 <= server.behave()["PUT"] <= 4, "as many as are written at once"


def test_who_only_reads(bucket, server, tmp_path, monkeypatch):
    Machine(bucket, tmp_path).run("first")
    monkeypatch.setenv("STEPCACHE_REMOTE_MODE", "read")
    server.behave()
    assert Machine(bucket, tmp_path).run() == [LOADED, BUILT]
    assert "PUT" not in server.behave()


@pytest.mark.slow
@pytest.mark.parametrize("how", [pytest.param("ends", marks=pytest.mark.slow), "is ended"])
def test_a_process_does_not_wait_for_uploads(bucket, server, tmp_path, how):
    """The store hangs when something is written to it."""
    script = "import numpy as np, stepcache as sc, os, signal\n"
    script += "step = sc.step(lambda x: x + 1)\nstep(np.ones(3))\nprint('ran', flush=True)\n"
    # Whoever runs the tests in the background of a shell has all its children ignore the signal.
    script += "signal.signal(signal.SIGINT, signal.default_int_handler)\n"
    script += "os.kill(os.getpid(), signal.SIGINT)\n" if how == "is ended" else ""
    variables = {"STEPCACHE_DIR": str(tmp_path / "own"), "STEPCACHE_REMOTE": bucket}
    path = tmp_path / "script.py"
    path.write_text(script)
    server.behave(hang_writes=True)
    done = subprocess.run(
        [sys.executable, str(path)], env=os.environ | variables, capture_output=True, text=True,
        timeout=100,
    )  # fmt: skip
    assert done.returncode == (0 if how == "ends" else -signal.SIGINT), done.stderr
    assert done.stdout == "ran\n" and "writes the rest" in done.stderr
    assert server.behave().get("PUT", 0) <= 2, "those that were not answered"


def test_a_forked_child_does_without(bucket, tmp_path):
    machine = Machine(bucket, tmp_path)
    machine.run("first")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # JAX's, of forks.
        child = os.fork()
    if not child:
        os._exit(machine.remote.is_on or machine.remote.fetch("00"))
    assert os.waitpid(child, 0)[1] == 0


# ---- what is not to be trusted -------------------------------------------------------------------


def forge(server, bucket, change):
    """Puts other objects in the place of those there: `change` gives them by name and body."""
    prefix = bucket.rpartition("/")[2]
    found = server.objects(prefix)
    for name, body in change({name: found[name] for name in sorted(found)}).items():
        server.put(name, body)


def exchanged(objects):
    """Each has the body of another one of its kind, all of them signed."""
    changed = {}
    for kind in ("program", "prediction"):
        names = [name for name in objects if f"/{kind}/" in name]
        changed |= dict(zip(names, (objects[each] for each in reversed(names)), strict=True))
    return changed


def of_another_key(objects):
    changed = {}
    for name, body in objects.items():
        kind, digest = name.partition(ROOT)[2].split("/")[:2]
        changed[name] = signed(b"0" * 32, kind, digest, {"label": "life.py:first"}, body)
    return changed


FORGERIES = {
    "torn": lambda objects: {name: body[: len(body) // 2] for name, body in objects.items()},
    "empty": lambda objects: dict.fromkeys(objects, b""),
    "no entry": lambda objects: dict.fromkeys(objects, b"cos\nsystem\n(S'true'\ntR." * 9),
    "bits": lambda objects: {
        name: body[:-3] + bytes([body[-3] ^ 1]) + body[-2:] for name, body in objects.items()
    },
    "exchanged": exchanged,
    "of another key": of_another_key,
}


@pytest.mark.sample(every=3)
@pytest.mark.parametrize("forgery", FORGERIES)
def test_what_is_forged_is_a_miss(bucket, server, tmp_path, forgery):
    Machine(bucket, tmp_path).run("first")
    Machine(bucket, tmp_path).run("second")  # So that there are two predictions.
    forge(server, bucket, FORGERIES[forgery])
    machine = Machine(bucket, tmp_path)
    assert machine.run() == [BUILT, BUILT]
    refused = machine.remote.refused
    kinds = {"program"} if forgery == "exchanged" else {"program", "prediction"}
    assert {each.kind for each in refused} == kinds, "predictions of one script have one name"
    assert list(machine.store.disk.quarantined) == []


def test_who_has_another_key_finds_nothing(bucket, server, tmp_path, monkeypatch):
    Machine(bucket, tmp_path).run()
    other = tmp_path / "other"
    other.mkdir()
    monkeypatch.setenv("STEPCACHE_KEY_FILE", str(key_in(other, "f" * 64)))
    machine = Machine(bucket, tmp_path)
    assert machine.run() == [BUILT, BUILT]
    assert all("was written under another key" in each.reason for each in machine.remote.refused)


def test_what_proved_bad_here_is_not_fetched_again(bucket, server, tmp_path):
    """As an entry that killed its process: it is no better there."""
    Machine(bucket, tmp_path).run("first")
    machine = Machine(bucket, tmp_path)
    machine.remote._reads.wait(20)
    (entry,) = machine.store.disk.entries("program")
    machine.store.disk.discard("program", entry.digest, "process 1 ended while it was loading it")
    server.behave()
    assert not machine.remote.fetch(entry.digest)
    server.behave()
    assert server.fetched == []


# ---- options -------------------------------------------------------------------------------------


def test_places_that_make_no_sense(tmp_path, monkeypatch):
    for url in ("http://host/x", "s3://", "bucket", "file://host/x", "s3://b/x?mode=read"):
        with pytest.raises(sc.OptionError, match=r"s3://BUCKET/PREFIX"):
            sc.ProgramCache(tmp_path / "own", remote=url)
    with pytest.raises(sc.OptionError, match="needs a directory"):
        sc.ProgramCache(None, remote="s3://bucket/x")
    monkeypatch.setenv("STEPCACHE_REMOTE_MODE", "both")
    with pytest.raises(sc.OptionError, match="write or read"):
        sc.ProgramCache(tmp_path / "own", remote="s3://bucket/x")
    assert not (tmp_path / "own").exists()
    with pytest.raises(sc.CacheDirectoryError, match="STEPCACHE_REMOTE=gs://bucket/x"):
        sc.ProgramCache("gs://bucket/x")


def test_keys_that_are_none(tmp_path, monkeypatch):
    def refused(match):
        with pytest.raises(sc.CacheDirectoryError, match=match):
            sc.ProgramCache(tmp_path / "own", remote="s3://bucket/x")

    path = key_in(tmp_path)
    for mode in (0o640, 0o604, 0o620):
        path.chmod(mode)
        refused("can be read by others")
    path.chmod(0o600)
    path.write_text("short\n")
    refused("at least 32 bytes")
    path.unlink()
    refused("cannot be read")
    monkeypatch.delenv("STEPCACHE_KEY_FILE")
    refused("STEPCACHE_KEY_FILE")


def test_a_directory_of_ones_own_needs_no_key(tmp_path, monkeypatch):
    monkeypatch.delenv("STEPCACHE_KEY_FILE")
    url = f"file://{tmp_path}/shared"
    assert Machine(url, tmp_path).run() == [BUILT, BUILT]
    assert Machine(url, tmp_path).run() == [LOADED, LOADED]
    (tmp_path / "shared").chmod(0o777)
    with pytest.raises(
        sc.CacheDirectoryError, match="Others can write to the directory of the shared cache"
    ):
        Machine(url, tmp_path)


def test_a_place_in_the_environment_that_cannot_be_used_is_warned_of(tmp_path, monkeypatch):
    monkeypatch.setenv("STEPCACHE_REMOTE", "s3://bucket/x")
    monkeypatch.delenv("STEPCACHE_KEY_FILE")
    with pytest.warns(sc.StepCacheWarning, match="No shared cache is used.*needs a key"):
        assert sc.ProgramCache(tmp_path / "own").store().remote is None


def test_other_objects_are_passed_over(bucket, server, tmp_path):
    Machine(bucket, tmp_path).run("first")
    prefix = bucket.rpartition("/")[2]
    for name in ("README", "step/zz/x", "program/xx", "prediction/xx/y", "prediction/ab"):
        server.put(f"{prefix}/{ROOT}{name}", b"?")
    assert Machine(bucket, tmp_path).run("first") == [LOADED]
    catalogue = Catalogue.read(ObjectStore(Place.of(bucket, "test")))
    assert len(catalogue.of_kind("program")) == len(catalogue.of_kind("prediction")) == 1


def test_threads_wait_for_the_same_requests(bucket, server, tmp_path):
    Machine(bucket, tmp_path).run()
    server.behave()
    machine = Machine(bucket, tmp_path)
    threads = [threading.Thread(target=machine.run, args=(name,)) for name in NAMES * 2]
    for each in threads:
        each.start()
    for each in threads:
        each.join(60)
    stats = [getattr(machine.life, name).stats() for name in NAMES]
    assert [(each.compiles, each.loads) for each in stats] == [(0, 1), (0, 1)]
    assert 4 <= server.behave()["GET"] < 9, "each object once, but for what is tried again"


# ---- beside other parts --------------------------------------------------------------------------


@pytest.mark.slow
def test_the_first_rank_of_a_pod_asks_for_all(bucket, server, tmp_path):
    script = """
    with sc.Session(mesh) as session:
        @sc.step(carry="state", batch="batch")
        def train(state, batch):
            return state + batch.sum(), batch.mean()
        train(np.ones(3, np.float32), np.full(4, float(RANK), np.float32))
        stats = train.stats()
        say("counts", stats.traces, stats.compiles, stats.loads, stats.remote_loads)
        session.cache.flush()
    """
    variables = {name: os.environ[name] for name in ("STEPCACHE_KEY_FILE", *server.environment)}
    variables |= {"STEPCACHE_REMOTE_SECONDS": "60"}
    variables |= {"STEPCACHE_REMOTE": bucket}
    counts = []
    for life in ("first", "second"):
        server.behave()
        directory = tmp_path / life
        directory.mkdir()
        places = str(directory / "{rank}")
        ranks = succeeded(run_pod(directory, script, 2, variables=variables, cache=places))
        counts.append([rank.said("counts") for rank in ranks])
    assert counts[0][0] == ["1 1 0 0"]
    assert counts[1] == [["1 0 1 1"], ["1 0 1 0"]]
    assert 3 <= server.behave()["GET"] < 9  # A listing, a prediction, a program; at most of both.


@pytest.mark.slow
def test_the_command_line(bucket, server, tmp_path, monkeypatch):
    from click.testing import CliRunner

    from stepcache.cli import main

    def cache(*words, code=0):
        result = CliRunner().invoke(main, ["cache", *map(str, words)])
        assert result.exit_code == code, result.output
        return result.output

    machine = Machine("off", tmp_path)
    machine.run()
    own, other = machine.directory, tmp_path / "other"
    assert "There is no shared cache" in cache("push", "--dir", own, code=2)
    monkeypatch.setenv("STEPCACHE_REMOTE", bucket)
    assert f"2 programs pushed to {bucket}." in cache("push", "--dir", own)
    assert "(2 more were there)" in cache("push", "--dir", own)
    assert Machine(bucket, tmp_path).run() == [LOADED, LOADED]
    listed = json.loads(cache("ls", "--remote", bucket, "--json"))
    assert sorted(each["label"] for each in listed["items"]) == ["life.py:first", "life.py:second"]
    assert "1 program pulled" in cache("pull", "--dir", other, "first")
    with monkeypatch.context() as patch:
        patch.setenv("STEPCACHE_KEY_FILE", str(key_in(other, "f" * 64)))
        output = cache("ls", "--remote")
        assert "another key" in output and "quarantine" not in output
    assert "0 entries removed" in cache("prune", "--remote", "--older-than", "1h")
    server.behave(forbidden=True)
    for words in (["ls", "--remote"], ["push", "--dir", own], ["pull", "--dir", own]):
        assert "The shared cache cannot be used" in cache(*words, code=1)
    server.behave()
    monkeypatch.setenv("STEPCACHE_REMOTE_MODE", "read")
    assert "read only" in cache("push", "--dir", own, code=1)
    assert "read only" in cache("prune", "--remote", "--older-than", "1s", code=1)


def test_a_thread_that_waits_for_requests_holds_none_of_the_last():
    class Payload:
        pass

    requests, payload = Requests("test", 1), Payload()
    reference = weakref.ref(payload)
    future = requests.submit(functools.partial(id, payload))
    assert future.result() and requests.wait() == 0
    del future, payload
    assert reference() is None
    requests.stop()
