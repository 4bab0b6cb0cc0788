"""The local engine: real processes, killed with real signals, and messages that are none."""

import json
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import msgpack
import numpy as np
import pytest
import zmq

import stepcache as sc
from stepcache.serving.local_transport import address
from tests.serving.conftest import LIMIT_SECONDS, Server
from tests.serving.workers import PLACES

PROJECT = Path(__file__).parents[2]


def worker(server, name, first, count):
    command = [sys.executable, "-m", "tests.serving.workers", str(server.directory), name]
    return subprocess.Popen(
        [*command, str(first), str(count)],
        cwd=PROJECT,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=os.environ | {"JAX_PLATFORMS": "cpu"},
    )


def started(process):
    assert process.stdout.readline() == "ready\n", process.stderr.read()
    return process


def acknowledged(process):
    """Ends with a process; the numbers that it has printed, and whether it was done."""
    printed, errors = process.communicate(timeout=2 * LIMIT_SECONDS)
    words = printed.split()
    assert process.returncode in (0, -signal.SIGKILL), errors
    return {int(word) for word in words if word.isdigit()}, "done" in words


def counts(server, name):
    with server.connect() as connection:
        tree = {"counts": np.zeros(PLACES, np.float32)}
        return connection.variables(name, tree).value["counts"]


# ---- processes that are killed -------------------------------------------------------------------


@pytest.mark.parametrize("seed", [0, pytest.param(1, marks=pytest.mark.slow)])
def test_each_push_is_done_once_though_the_server_is_killed(tmp_path, seed):
    killed_again_and_again(tmp_path, seed, pushes=100, kills=2)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(100, 150))
def test_each_push_is_done_once_though_the_server_is_killed_often(tmp_path, seed):
    killed_again_and_again(tmp_path, seed, pushes=400, kills=6)


def killed_again_and_again(tmp_path, seed, pushes, kills):
    moment = random.Random(seed)
    server = Server(tmp_path / "server", "--snapshot-every", "0.2s").start()
    workers = [started(worker(server, "params", n * pushes, pushes)) for n in range(2)]
    victim = started(worker(server, "params", 2 * pushes, 10 * pushes))
    for number in range(kills):
        time.sleep(moment.uniform(0.05, 0.6))
        server.kill()
        if number == 1:
            victim.kill()
        time.sleep(moment.uniform(0, 0.3))
        server.start()
    victim.kill()
    results = [acknowledged(each) for each in workers]
    all_of_victim, _ = acknowledged(victim)
    found = counts(server, "params")
    server.stop()
    assert found.max() == 1, "a push was done twice"
    for done, is_done in results:
        assert is_done and all(found[list(done)] == 1), "a push is lost"
    own = set(np.flatnonzero(found[2 * pushes :]) + 2 * pushes)
    # Of one that was killed itself, the last ones before a kill of the server may be gone, and the
    # one that was under way may be done.
    assert own <= all_of_victim | {max(all_of_victim, default=2 * pushes - 1) + 1}


def test_a_killed_client_leaves_nothing(server):
    before = set(Path("/dev/shm").iterdir())
    victims = [started(worker(server, "params", n * 1000, 1000)) for n in range(2)]
    time.sleep(0.5)
    for each in victims:
        each.kill()
        acknowledged(each)
    with server.connect() as connection:
        limit = time.monotonic() + LIMIT_SECONDS
        while connection.status().counts["leases"] and time.monotonic() < limit:
            time.sleep(0.1)
        assert not connection.status().counts["leases"]
    files = list(Path(f"/proc/{server.process.pid}/fd").iterdir())
    server.kill()
    assert len(files) < 100
    assert set(Path("/dev/shm").iterdir()) == before


def test_a_reader_that_is_stopped_holds_nobody_up(server):
    stopped = started(worker(server, "params", 0, 5000))
    time.sleep(0.3)
    stopped.send_signal(signal.SIGSTOP)
    done, is_done = acknowledged(started(worker(server, "params", 5000, 50)))
    stopped.send_signal(signal.SIGCONT)
    stopped.kill()
    acknowledged(stopped)
    assert is_done and len(done) == 50


def test_a_server_that_is_stopped_goes_on_where_it_was(server):
    with server.connect() as connection:
        tree = {"w": np.zeros(3, np.float32)}
        params = connection.variables("params", tree, write=sc.Write(mode="add"))
        for _ in range(3):
            params.push({"w": np.ones(3, np.float32)})
        printed = server.stop()
        assert "4 writes" in printed
        server.start()
        began = time.monotonic()
        assert np.array_equal(params.value["w"], [3, 3, 3])
        assert time.monotonic() - began < 1.4, "it waited for clients, though it was not killed"
        params.push({"w": np.ones(3, np.float32)})
        assert params.version == 4


def test_a_client_that_asks_for_nothing_sends_again_what_is_lost(tmp_path):
    server = Server(tmp_path / "server", "--snapshot-every", "1h").start()
    with server.connect() as quiet, server.connect() as other:
        tree = {"w": np.zeros(1, np.float32)}
        params = quiet.variables("params", tree, write=sc.Write(mode="add"))
        theirs = other.variables("params", tree)
        quiet.flush()
        params.push({"w": np.ones(1, np.float32)})
        server.kill()
        server.start()
        assert theirs.value["w"] == 1
    server.stop()


def test_the_end_of_a_process_waits_for_nothing(server):
    code = f"""
import numpy as np, stepcache as sc
connection = sc.connect("local:{server.directory}")
params = connection.variables("params", {{"w": np.zeros(50_000)}}, write=sc.Write(mode="add"))
params.push(params.value)
print(params.version, flush=True)
"""
    began = time.monotonic()
    command = [sys.executable, "-X", "faulthandler", "-c", code]
    done = subprocess.run(command, capture_output=True, text=True, timeout=LIMIT_SECONDS)
    assert (done.returncode, done.stdout, done.stderr) == (0, "1\n", "")
    assert time.monotonic() - began < 30


# ---- one server a directory, for one user --------------------------------------------------------


def test_a_directory_has_one_server(server):
    command = [sys.executable, "-m", "stepcache.cli", "serve", "--variables", server.directory]
    second = subprocess.run(command, capture_output=True, text=True, timeout=LIMIT_SECONDS)
    assert second.returncode == 1 and "serves these variables already" in second.stderr


def test_a_directory_that_others_can_write_to_is_refused(tmp_path):
    open_to_all = tmp_path / "open"
    open_to_all.mkdir()
    open_to_all.chmod(0o777)
    command = [sys.executable, "-m", "stepcache.cli", "serve", "--variables", open_to_all]
    refused = subprocess.run(command, capture_output=True, text=True, timeout=LIMIT_SECONDS)
    assert refused.returncode == 1 and "Others can write" in refused.stderr


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can be another user")
def test_another_user_cannot_connect(server):
    path = address(server.directory)["address"].removeprefix("ipc://")
    code = f"""
import os, socket
os.setuid(65534)
try:
    socket.socket(socket.AF_UNIX).connect({path!r})
    print("connected")
except PermissionError:
    print("refused")
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.stdout == "refused\n", done.stderr


def test_status(server):
    with server.connect() as connection:
        connection.variables("params", {"w": np.zeros(3, np.float32)})
        connection.flush()
        command = [sys.executable, "-m", "stepcache.cli", "status", "--variables", server.directory]
        shown = subprocess.run([*command, "--json"], capture_output=True, text=True, check=True)
        found = json.loads(shown.stdout)
        assert found["variables"] == [["params", 0, 64, 0, 1]]
        assert found["clients"][0][2:] == [1, 1] and found["snapshot"] == "step_00000001"
        assert found["counts"]["p99 seconds"] > 0
        shown = subprocess.run(command, capture_output=True, text=True, check=True)
        assert "params" in shown.stdout and "p99" in shown.stdout


# ---- messages that are none ----------------------------------------------------------------------


def hostile(rng, server):
    """Frames of a message that is none, or of one that asks for what cannot be."""
    number = rng.randrange(1 << 40)
    noise = rng.randbytes(rng.choice([0, 1, 7, 100, 5000]))
    pid = server.process.pid
    place = rng.choice(
        [
            None,
            [pid, rng.randrange(30), rng.randrange(1 << 30), 0, rng.choice([1, 1 << 50])],
            [os.getpid(), 0, 0, 0, 10],
            [1, 1, 1, -5, 10],
            [pid, 3, 4],
            "place",
        ]
    )
    write = {"client": "me", "sequence": 1, "epoch": 1, "name": "x", "mode": "create"}
    types = rng.choice(
        [
            [["w", [1 << 40, 1 << 40], "float32"]],
            [["w", [-1], "float32"]],
            [["w", [3], "object"]],
            [["w", [3], "O"]],
            [["w"]],
            "types",
            [["w", [1], "float32"]] * 1000,
        ]
    )
    message = rng.choice(
        [
            ["WriteRequest", write | {"types": types}],
            ["WriteRequest", write | {"mode": rng.choice(["eval", "", "add"]), "rule": noise}],
            ["WriteRequest", {"client": "me"}],
            ["ReadRequest", {"names": ["x"] * rng.choice([1, 20_000]), "known": [0]}],
            ["ReadRequest", {"names": [["x"]], "known": ["y"]}],
            [
                "JoinRequest",
                {"client": "me", "process": "x", "first": rng.choice([-1, 0, 1 << 62])},
            ],
            ["JoinRequest", {"client": "m" * 1000, "process": "1.1.x", "first": 1}],
            ["DescribeRequest", {"name": "no such"}],
            ["Joined", {"epoch": 1, "applied": 1, "saved": 1, "lost": 0}],
            ["os.system", {"command": "true"}],
            [],
            None,
            7,
            {"a": 1},
        ]
    )
    envelope = rng.choice(
        [
            [number, "me", [], place, message],
            [number, "me", [1, 2, 3], place, message],
            [number, "m" * 100, [], place, message],
            ["number", "me", [], place, message],
            [number, 5, "released", place, message],
            [number],
            message,
        ]
    )
    header = rng.choice(
        [noise, msgpack.packb(envelope), msgpack.packb(envelope)[: rng.randrange(9)]]
    )
    return rng.choice(
        [[header], [header, noise], [header, noise, noise], [b"", header], [header] * 9]
    )


@pytest.mark.parametrize("count", [1000, pytest.param(10_000, marks=pytest.mark.slow)])
def test_messages_that_are_none_do_no_harm(server, count):
    rng, before_bytes = random.Random(3), 0
    context = zmq.Context()
    with server.connect() as connection:
        params = connection.variables("params", {"w": np.ones(50_000, np.float32)})
        for number in range(count):
            if number % 200 == 0:
                socket = context.socket(zmq.DEALER)
                socket.setsockopt(zmq.LINGER, 10_000)
                socket.connect(address(server.directory)["address"])
                if number == 200:
                    before_bytes = resident_bytes(server)
            socket.send_multipart(hostile(rng, server))
            if number % 100 == 99:
                assert params.value["w"].sum() == 50_000
            if number % 200 == 199:
                socket.close()
        context.term()  # All are sent.
        time.sleep(0.5)
        status = connection.status()
        assert status.counts["malformed messages"] > count / 3
        assert [name for name, *_ in status.variables] == ["params"]
        assert resident_bytes(server) < before_bytes + (64 << 20)


def resident_bytes(server):
    pages = Path(f"/proc/{server.process.pid}/statm").read_text().split()[1]
    return int(pages) * os.sysconf("SC_PAGE_SIZE")


def test_a_frame_that_is_too_large_ends_only_its_connection(server):
    context = zmq.Context()
    socket = context.socket(zmq.DEALER)
    socket.setsockopt(zmq.LINGER, 0)
    socket.connect(address(server.directory)["address"])
    socket.send(bytes(40 << 20))
    with server.connect() as connection:
        assert connection.variables("params", {"w": np.ones(2)}).value["w"].sum() == 2
    socket.close()
    context.term()


@pytest.mark.slow
def test_two_hundred_connections(server):
    connections = [server.connect() for _ in range(200)]
    tree = {"w": np.zeros(30_000, np.float32)}
    held = [each.variables("params", tree, write=sc.Write(mode="add")) for each in connections]
    for each in held:
        each.push({"w": np.ones(30_000, np.float32)})
    assert held[0].value["w"][0] == 200
    for each in connections:
        each.close()


@pytest.mark.slow
def test_a_soak_of_two_minutes(tmp_path):
    moment = random.Random(1)
    server = Server(tmp_path / "server", "--snapshot-every", "1s").start()
    limit, first, results = time.monotonic() + 120, 0, []
    while time.monotonic() < limit and first < PLACES - 3000:
        group = [started(worker(server, "params", first + n * 500, 500)) for n in range(3)]
        first += 1500
        time.sleep(moment.uniform(0, 1))
        server.kill()
        server.start()
        results += [acknowledged(each) for each in group]
    found = counts(server, "params")
    server.stop()
    assert found.max() == 1 and all(is_done for _, is_done in results)
    assert found.sum() == sum(len(done) for done, _ in results)
