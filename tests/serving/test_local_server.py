"""The local engine: what it leaves behind, who may use it, and messages that are none."""

import gc
import os
import random
import subprocess
import sys
import time
import weakref
from pathlib import Path

import msgpack
import numpy as np
import pytest
import zmq

from stepcache.serving.local_transport import address
from tests.serving.servers import LIMIT_SECONDS, LocalServer


@pytest.fixture(scope="module")
def engine():
    return LocalServer


def test_a_killed_client_leaves_nothing(server):
    before = set(Path("/dev/shm").iterdir())
    victims = [server.worker("params", n * 1000, 1000) for n in range(2)]
    time.sleep(0.5)
    for each in victims:
        each.kill()
        each.communicate()
    with server.connect() as connection:
        limit = time.monotonic() + LIMIT_SECONDS
        while connection.status().counts["leases"] and time.monotonic() < limit:
            time.sleep(0.1)
        assert not connection.status().counts["leases"]
    files = list(Path(f"/proc/{server.pid}/fd").iterdir())
    server.kill()
    assert len(files) < 100
    assert set(Path("/dev/shm").iterdir()) == before


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


# ---- messages that are none ----------------------------------------------------------------------


def hostile(rng, server):
    """Frames of a message that is none, or of one that asks for what cannot be."""
    number = rng.randrange(1 << 40)
    noise = rng.randbytes(rng.choice([0, 1, 7, 100, 5000]))
    pid = server.pid
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
    pages = Path(f"/proc/{server.pid}/statm").read_text().split()[1]
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


def test_a_connection_that_the_garbage_collector_frees_holds_nobody_up(server):
    connection = server.connect()
    params = connection.variables("params", {"w": np.ones(2)})
    connection.itself = (connection, params)
    assert params.value["w"].sum() == 2
    freed = weakref.ref(connection)
    del connection, params
    gc.collect()
    assert freed() is None
