"""The ray engine: its actor's life, what lies in the object store, and messages that are none."""

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
from click.testing import CliRunner

import stepcache as sc
from stepcache.cli import main
from stepcache.errors import CacheDirectoryError, VariablesError
from stepcache.link import plain
from stepcache.serving.messages import JoinRequest, ReadRequest, WriteRequest, to_plain
from tests.serving.servers import LIMIT_SECONDS, RayCalls, RayServer, run_python

LARGE = 50_000
SUM = sc.Write(mode="add")


@pytest.fixture(scope="module")
def engine(ray_session):
    return RayServer


@pytest.fixture
def actor(server):
    import ray

    return ray.get_actor(server.name, namespace="stepcache")


# ---- Ray itself ----------------------------------------------------------------------------------


def test_ray_is_imported_only_where_it_is_used(tmp_path):
    run_python(tmp_path, "import sys, stepcache as sc; sc.connect; assert 'ray' not in sys.modules")


def test_without_ray_its_addresses_are_refused(tmp_path):
    code = """
import sys
sys.modules["ray"] = None
import stepcache as sc
try:
    sc.connect("ray:params")
except sc.VariablesError as error:
    print(error)
"""
    printed = run_python(tmp_path, code)
    assert "Ray is not installed" in printed and "stepcache[ray]" in printed


class Unreachable:
    """Ray in a process that finds no cluster."""

    def __init__(self):
        self.addresses = []

    def is_initialized(self):
        return False

    def init(self, address, **options):
        self.addresses.append(address)
        if address == "auto":
            raise ConnectionError("no cluster")


@pytest.mark.parametrize("address", ["", "10.0.0.1:6379"])
def test_ray_is_started_here_only_where_no_cluster_is_meant(engine, monkeypatch, address):
    from stepcache.serving import ray_transport

    fake = Unreachable()
    monkeypatch.setattr(ray_transport, "ray", fake)
    monkeypatch.setenv("RAY_ADDRESS", address)
    if address:
        with pytest.raises(VariablesError, match=r"cannot be reached[^$]*10\.0\.0\.1"):
            ray_transport.initialise()
    else:
        ray_transport.initialise()
    assert fake.addresses == (["auto"] if address else ["auto", "local"])


@pytest.mark.parametrize(
    "command", ["status --ray params", "status --tasks ray:tasks", "stop ray:tasks"]
)
def test_commands_that_look_start_no_ray(engine, monkeypatch, command):
    from stepcache.serving import ray_transport

    fake = Unreachable()
    monkeypatch.setattr(ray_transport, "ray", fake)
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    result = CliRunner().invoke(main, command.split())
    assert result.exit_code == 1 and "no Ray cluster runs" in result.stderr
    assert fake.addresses == ["auto"]


@pytest.mark.slow
def test_a_client_does_not_start_another_ray(server, tmp_path):
    code = f"""
import ray, stepcache as sc
params = sc.connect("{server.address}").variables("params", {{"w": 1.0}})
ray.shutdown()
try:
    params.value
except sc.VariablesError as error:
    print(error, ray.is_initialized())
"""
    printed = run_python(tmp_path, code)
    assert "shut down" in printed and "False" in printed


# ---- the object store ----------------------------------------------------------------------------


@pytest.mark.slow
def test_all_readers_map_one_copy_of_a_version(server, actor):
    import ray

    request = plain.pack(["me", to_plain(ReadRequest(["params"], [0])), None])
    with server.connect() as connection:
        params = connection.variables("params", {"w": np.ones(LARGE, np.float32)}, write=SUM)
        before = [ray.get(actor.serve.remote(request))[1][0] for _ in range(2)]
        params.push({"w": np.ones(LARGE, np.float32)})
        after = ray.get(actor.serve.remote(request))[1][0]
        assert before[0] == before[1] != after
        values = [ray.get(each) for each in (*before, after)]
    assert values[0].ctypes.data == values[1].ctypes.data and not values[0].flags.writeable
    assert [value.view(np.float32)[0] for value in values] == [1, 1, 2]


@pytest.mark.slow
def test_the_store_does_not_fill_up(engine, tmp_path):
    """Pushed are five times as many bytes as the store holds."""
    import ray

    server = RayCalls(tmp_path / "server").start()
    capacity = ray.cluster_resources()["object_store_memory"]
    count, size = 64, int(capacity * 5) // 64 // 4
    update = {"w": np.ones(size, np.float32)}
    with server.connect() as connection:
        params = connection.variables("params", {"w": np.zeros(size, np.float32)}, write=SUM)
        for number in range(1, count + 1):
            params.push(update)
            if number % 8 == 0:
                assert params.value["w"][-1] == number
    server.stop()


# ---- the life of an actor ------------------------------------------------------------------------


def serving(server, *options):
    command = [sys.executable, "-m", "stepcache", "serve", "--ray", server.name, *options]
    process = subprocess.Popen(
        [*command, "--variables", str(server.directory)],
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    )
    return process, process.stdout.readline()


@pytest.mark.slow
def test_the_actor_goes_on_without_the_command_that_began_it(engine, tmp_path):
    server = engine(tmp_path / "server")
    first, printed = serving(server)
    assert "(0 variables" in printed
    with server.connect() as connection:
        params = connection.variables("params", {"w": np.zeros(3, np.float32)}, write=SUM)
        first.kill()
        first.communicate()
        params.push({"w": np.ones(3, np.float32)})
        second, printed = serving(server)
        assert "(1 variables" in printed and params.version == 1
        second.send_signal(signal.SIGTERM)
        printed, _ = second.communicate(timeout=LIMIT_SECONDS)
        assert second.returncode == 0 and "2 writes are in the last snapshot" in printed
        server.start()
        assert np.array_equal(params.value["w"], np.ones(3))
    assert "2 writes" in server.stop()
    assert "no such actor" in server.stop()


@pytest.mark.slow
def test_a_directory_has_one_actor(server, engine, tmp_path):
    class Another(engine):
        name = "another"

    with pytest.raises(VariablesError, match="serves these variables already"):
        Another(server.directory).start()
    Another(tmp_path / "its own").start()
    try:
        with pytest.raises(VariablesError, match="serves another directory"):
            Another(server.directory).start()
    finally:
        Another(tmp_path / "its own").stop()


def test_a_directory_that_others_can_write_to_is_refused(engine, tmp_path):
    open_to_all = tmp_path / "open"
    open_to_all.mkdir()
    open_to_all.chmod(0o777)
    with pytest.raises(CacheDirectoryError, match="Others can write"):
        engine(open_to_all).start()


@pytest.mark.slow
@pytest.mark.parametrize("kind", [RayServer, RayCalls])
def test_an_actor_whose_directory_is_removed_ends(engine, tmp_path, kind):
    server = kind(tmp_path / "server").start()
    with server.connect(timeout=5) as connection:
        params = connection.variables("params", {"w": np.ones(3, np.float32)})
        shutil.rmtree(server.directory)
        wait_until_ended(server.pid)
        with pytest.raises(sc.ServerLostError):
            params.assign({"w": np.zeros(3, np.float32)})
    assert "no such actor" in server.stop() and not server.directory.exists()


def wait_until_ended(pid):
    limit = time.monotonic() + LIMIT_SECONDS
    while Path(f"/proc/{pid}").exists():
        assert time.monotonic() < limit
        time.sleep(0.05)


def test_a_node_without_the_directory_is_named(tmp_path):
    from stepcache.serving.ray_engine import HostActor

    with pytest.raises(VariablesError, match="this node does not have"):
        HostActor(str(tmp_path / "elsewhere"), {})


@pytest.mark.slow
def test_an_actor_whose_last_snapshot_fails_goes_on(server):
    with server.connect() as connection:
        params = connection.variables("params", {"w": np.zeros(3, np.float32)}, write=SUM)
        connection.flush()
        snapshots = server.directory / "snapshots"
        snapshots.rename(server.directory / "aside")
        snapshots.write_bytes(b"")
        params.push({"w": np.ones(3, np.float32)})
        assert "the actor goes on" in server.stop()
        params.push({"w": np.ones(3, np.float32)})
        snapshots.unlink()
        (server.directory / "aside").rename(snapshots)
        assert "3 writes" in server.stop()


@pytest.mark.slow
def test_an_actor_that_was_stopped_is_replaced(server, actor):
    import ray

    with server.connect() as connection:
        params = connection.variables("params", {"w": np.ones(3, np.float32)}, write=SUM)
        stopped = server.pid
        assert ray.get(actor.stop.remote())
        assert ray.get(actor.serve.remote(b"")) is None
        server.start()
        params.push({"w": np.ones(3, np.float32)})
        assert params.value["w"][0] == 2 and server.pid != stopped


# ---- several actors ------------------------------------------------------------------------------


def push_to_both(connection, between=lambda: None):
    tree = {"a": np.zeros(3, np.float32), "b": np.zeros(LARGE, np.float32)}
    params = connection.variables("params", tree, write=SUM)
    table = connection.table("table", 10)
    rows = table.lookup(np.arange(10))
    for number in range(1, 4):
        params.push({"a": np.ones(3, np.float32), "b": np.ones(LARGE, np.float32)})
        table.push(rows, np.ones(16, np.float32))
        assert {leaf[-1] for leaf in params.value.values()} == {number}
        assert set(table.lookup(np.arange(10)).spread()) == {number}
        if number == 2:
            between()
    assert [len(connection.status(host).variables) for host in range(2)] == [2, 2]


def test_two_actors_share_variables(engine, tmp_path):
    from stepcache.serving import ray_engine

    server = engine(tmp_path / "server")
    found = ray_engine.start(server.name, server.directory, hosts=2)
    assert [about.hosts for about in found] == [2, 2] and found[0].pid != found[1].pid
    with server.connect() as connection:
        push_to_both(connection)
    with pytest.raises(VariablesError, match="another number"):
        server.start()
    assert "16 writes" in server.stop()
    with pytest.raises(VariablesError, match="another number of hosts"):
        ray_engine.start(server.name, server.directory, hosts=3)


@pytest.mark.slow
def test_one_of_two_actors_is_killed(engine, tmp_path):
    """Ray starts it again, and the other one goes on."""
    from stepcache.serving import ray_engine

    server = engine(tmp_path / "server")
    process, printed = serving(server, "--hosts=2")
    assert "2 hosts" in printed
    about = ray_engine.start(server.name, server.directory, hosts=2)
    with server.connect() as connection:
        push_to_both(connection, lambda: os.kill(about[1].pid, signal.SIGKILL))
        process.send_signal(signal.SIGTERM)
        printed, _ = process.communicate(timeout=LIMIT_SECONDS)
        assert process.returncode == 0 and "16 writes are in the last snapshot" in printed
    again = ray_engine.start(server.name, server.directory, hosts=2)
    assert [each.epoch for each in again] == [about[0].epoch + 1, about[1].epoch + 2]
    assert sum(each.moment for each in again) == 16 and "16 writes" in server.stop()


@pytest.mark.slow
def test_hosts_are_on_different_nodes_and_one_is_lost(tmp_path):
    environment = {key: value for key, value in os.environ.items() if not key.startswith("RAY_")}
    command = [sys.executable, "-m", "tests.serving.ray_nodes", str(tmp_path / "server")]
    printed = subprocess.check_output(command, env=environment, text=True, timeout=300)
    found = json.loads(printed.splitlines()[-1])
    assert len(set(found["before"])) == 3
    assert found["lost"] in found["before"] and found["lost"] not in found["after"]
    assert found["values"] == found["rows"] == [1.0], "a push is lost, or was done twice"


# ---- messages that are none ----------------------------------------------------------------------


@pytest.mark.parametrize(
    "request_",
    [
        b"",
        b"\xc1noise",
        7,
        plain.pack(["me", ["os.system", {"command": "true"}], None]),
        plain.pack(["me", ["ReadRequest", {"names": [["x"]], "known": ["y"]}], None]),
        plain.pack(["me", ["JoinRequest", {"client": "me", "process": "x", "first": -1}], None]),
        plain.pack([7, ["StatusRequest", {}], None]),
        plain.pack(["me", ["StatusRequest", {}], [1, 2]]),
        plain.pack(["me", ["StatusRequest", {}]]),
    ],
    ids=repr,
)
def test_messages_that_are_none_are_refused(shared_server, request_):
    import ray

    actor = ray.get_actor(shared_server.name, namespace="stepcache")
    (kind, reply), blocks = plain.unpack(ray.get(actor.serve.remote(request_)))
    assert (kind, reply["kind"], blocks) == ("Refused", "malformed", [])


@pytest.mark.parametrize(
    "payload",
    [(), (7,), (np.ones(3),), (np.zeros((8, 8), np.uint8),)],
    ids=["none", "int", "floats", "square"],
)
def test_payloads_that_are_none_are_refused(shared_server, name, payload):
    import ray

    actor = ray.get_actor(shared_server.name, namespace="stepcache")

    def reply(message, *payload):
        request = plain.pack(["me", to_plain(message), None])
        return plain.unpack(ray.get(actor.serve.remote(request, *payload)))[0]

    _, joined = reply(JoinRequest("me", "x", 1))
    types = [("w", [16], "float32")]
    write = WriteRequest("me", 1, joined["epoch"], name, "create", types=types)
    kind, refused = reply(write, *payload)
    assert (kind, refused["kind"]) == ("Refused", "malformed")
    with shared_server.connect() as connection:
        assert name not in [row[0] for row in connection.status().variables]
