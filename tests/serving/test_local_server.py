"""The local engine: what it leaves behind, who may use it, and messages that are none."""

import contextlib
import errno
import gc
import json
import os
import random
import shutil
import signal
import socket
import struct
import subprocess
import sys
import textwrap
import time
import weakref
from pathlib import Path

import msgpack
import numpy as np
import pytest

import stepcache as sc
from stepcache.errors import VariablesError
from stepcache.link.processes import Process
from stepcache.serving import host_directory, local_server, local_transport
from stepcache.serving.channel import Channel, Channels, Listener
from stepcache.serving.local_transport import address, joined, splitter
from stepcache.serving.row_optimizers import RowOptimizer
from stepcache.serving.shared_memory import Opened, Place
from stepcache.serving.tables import TableType
from tests.serving.servers import PROJECT, LocalServer, run_command


def channel_to(server):
    return Channel.to(address(server.directory)["address"], splitter(1 << 30))


def asked(channel, request):
    """The header of the reply to a request."""
    channel.send(joined([msgpack.packb(request)]))
    while (frames := channel.receive()) is None:
        channel.wait()
    return frames[0]


@pytest.fixture(scope="module")
def engine():
    return LocalServer


def test_a_killed_client_leaves_nothing(server):
    before = set(Path("/dev/shm").iterdir())
    victims = [server.worker("params", n * 1000, 1000) for n in range(2)]
    time.sleep(0.5)
    for each in victims:
        each.kill()
        each.end()
    files = list(Path(f"/proc/{server.pid}/fd").iterdir())
    server.kill()
    assert len(files) < 100
    assert set(Path("/dev/shm").iterdir()) == before


def test_blocks_stay_until_the_next_request(server):
    """Also where a message comes twice, or late."""
    tree = {"w": np.ones(50_000, np.float32)}
    with server.connect() as connection:
        params = connection.variables("params", tree)
        channel = channel_to(server)
        seen = []
        for number in (7, 7, 3):
            read = ["ReadRequest", {"names": ["params"], "known": [0], "values": True}]
            _, (place,), _ = msgpack.unpackb(asked(channel, [number, "me", None, read]))
            seen.append(Opened().open(Place(*place)))
            for value in range(2, 8):
                params.assign({"w": np.full(50_000, value, np.float32)})
        for data, value in zip(seen[:2], (1, 7), strict=True):
            assert (data.view(np.float32)[:50_000] == value).all()
        asked(channel, [8, "me", None, ["StatusRequest", {}]])
        for value in range(10, 20):
            params.assign({"w": np.full(50_000, value, np.float32)})
        assert seen[0].view(np.float32)[0] >= 10  # Nobody has locked it: it was used again.
        channel.close()


def test_a_late_request_of_an_old_connection_releases_nothing(server):
    read = ["ReadRequest", {"names": ["params"], "known": [0], "values": True}]
    with server.connect() as connection:
        params = connection.variables("params", {"w": np.ones(50_000, np.float32)})
        old, new = channel_to(server), channel_to(server)
        _, (place,), _ = msgpack.unpackb(asked(new, [8, "me", None, read]))
        seen = Opened().open(Place(*place))
        asked(old, [7, "me", None, read])
        old.close()
        for value in range(2, 30):
            params.assign({"w": np.full(50_000, value, np.float32)})
        assert seen.view(np.float32)[0] == 1
        new.close()


@pytest.mark.slow
def test_closed_connections_leave_no_memory_with_the_server(server):
    tree = {"w": np.zeros(20 << 20, np.uint8)}
    with server.connect() as connection:
        params = connection.variables("params", tree)
        for value in range(8):
            params.assign({"w": np.full(20 << 20, value, np.uint8)})
            with server.connect() as other:
                assert other.variables("params", tree).value["w"][-1] == value
        lines = Path(f"/proc/{server.pid}/maps").read_text().splitlines()
    assert sum("rw-s" in line and "memfd:stepcache" in line for line in lines) < 6


def test_a_cpu_reads_the_memory_of_the_server(server):
    with server.connect() as connection:
        params = connection.variables("params", {"w": np.ones(50_000, np.float32)})
        assert sc.step(lambda params: params["w"].sum())(params) == 50_000
        (buffer,) = params._master._copies.serving(None, 0)[0].value.buffers
    lines = Path("/proc/self/maps").read_text().splitlines()
    mapped = [line.split()[0] for line in lines if "r--s" in line and "memfd:stepcache" in line]
    ranges = [[int(end, 16) for end in row.split("-")] for row in mapped]
    assert any(first <= buffer.unsafe_buffer_pointer() < last for first, last in ranges)


@pytest.mark.slow
def test_clients_forget_what_an_image_has(server):
    with server.connect(max_unsaved_bytes=1 << 20) as connection:
        tree = {"w": np.zeros(50_000, np.float32)}
        params = connection.variables("params", tree, write=sc.Write(mode="add"))
        for count in range(1, 31):
            params.push({"w": np.ones(50_000, np.float32)})
            if count % 10 == 0:
                assert connection.status().counts["images"]
                server.kill()
                server.start()
                assert (params.value["w"] == count).all()


# ---- one server a directory, for one user --------------------------------------------------------


def test_a_directory_has_one_server(server, tmp_path):
    code, _, errors = run_command(tmp_path, "serve", "--variables", server.directory)
    assert code == 1 and "serves these variables already" in errors


@pytest.mark.slow
def test_a_server_whose_directory_is_removed_ends_with_one_error(server):
    with server.connect(timeout=0.5) as connection:
        params = connection.variables("params", {"w": np.ones(3, np.float32)})
        shutil.rmtree(server.directory)
        code, _, errors = server.child.end()
        assert code == 1 and errors.count("Error") == errors.count("was removed or replaced") == 1
        with pytest.raises(sc.ServerLostError):
            params.assign({"w": np.zeros(3, np.float32)})
    assert not server.directory.exists()


@pytest.mark.slow
def test_a_server_of_a_new_directory_outlives_that_of_the_old_one(server, engine):
    shutil.rmtree(server.directory)
    other = engine(server.directory).start()
    assert server.child.end()[0] == 1
    with server.connect() as connection:
        assert connection.variables("params", {"w": np.ones(2)}).value["w"].sum() == 2
    assert "1 writes" in other.stop()
    assert not Path(address(server.directory)["address"]).exists()


@pytest.mark.slow
def test_a_server_says_that_its_last_snapshot_lacks_writes(server):
    with server.connect() as connection:
        params = connection.variables("params", {"w": np.ones(2)})
        connection.flush()
        shutil.rmtree(server.directory / "snapshots")
        (server.directory / "snapshots").write_bytes(b"")
        params.assign({"w": np.zeros(2)})
        connection.hosts.clients[0]._is_closed = True  # It waits for no snapshot.
    server.child.send_signal(signal.SIGTERM)
    code, printed, errors = server.child.end()
    assert code == 1 and "lacks writes" in errors and "writes are in" not in printed


def test_a_request_to_a_server_that_accepts_nobody_ends_in_time(tmp_path):
    """Though as many connections wait as the system lets wait."""
    path = f"{tmp_path}/s"
    listener, waiting = Listener(path), []
    listener.listen(0)
    with contextlib.suppress(BlockingIOError):
        while True:
            waiting.append(socket.socket(socket.AF_UNIX))
            waiting[-1].setblocking(False)
            waiting[-1].connect(path)
    row = {"address": path, "epoch": 1, "process": "1.1.x"}
    (tmp_path / "server.json").write_text(json.dumps(row))
    with sc.connect(f"local:{tmp_path}", timeout=0.3) as connection:
        with pytest.raises(sc.ServerLostError):
            connection.status()
    for each in (*waiting, listener):
        each.close()


def test_a_directory_that_others_can_write_to_is_refused(tmp_path):
    open_to_all = tmp_path / "open"
    open_to_all.mkdir()
    open_to_all.chmod(0o777)
    code, _, errors = run_command(tmp_path, "serve", "--variables", open_to_all)
    assert code == 1 and "Others can write to the directory of served variables" in errors
    assert f"chmod 700 {open_to_all}, or name another directory\n" in errors


@pytest.mark.sample(every=2)
@pytest.mark.parametrize("name", ["under/a/file", "x" * 300], ids=["under a file", "too long"])
def test_a_directory_that_cannot_be_made_is_an_error_without_a_traceback(tmp_path, name):
    (tmp_path / "under").write_text("")
    place = tmp_path / name
    for arguments in (["--variables", place], ["--tasks", "1x1", "--directory", place]):
        code, _, errors = run_command(tmp_path, "serve", *arguments)
        assert code == 1 and f"at: {place}" in errors and "Traceback" not in errors, errors


def test_a_full_disk_at_the_start_is_an_error_that_names_the_directory(tmp_path, monkeypatch):
    def refuse(*_):
        raise OSError(errno.ENOSPC, "No space left on device")

    for module in (host_directory.file_lock, host_directory, local_server):
        name = "lock" if module is host_directory.file_lock else "replace_file"
        with (
            monkeypatch.context() as full,
            pytest.raises(VariablesError, match="No space") as found,
        ):
            full.setattr(module, name, refuse)
            local_server.LocalServer(tmp_path / name)
        assert found.value.where == str(tmp_path / name)


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


def hostile(rng, server, epoch):
    """Frames of a malformed message, or of a well-formed one that the host must refuse."""
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
    write = {"client": "me", "sequence": 1, "epoch": epoch, "name": "x", "mode": "create"}
    write["stamp"] = [0, 0]
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
    rows, stddev = rng.choice([(1 << 60, 0.0), (1 << 40, 1.0), (-1, 0.0)])
    huge = TableType(rows, [1 << 10], "float32", stddev, 0, RowOptimizer()).packed()
    message = rng.choice(
        [
            ["WriteRequest", write | {"types": types}],
            ["WriteRequest", write | {"mode": rng.choice(["eval", "", "add"]), "rule": noise}],
            ["WriteRequest", write | {"mode": "create table", "rule": rng.choice([noise, huge])}],
            ["WriteRequest", write | {"name": "rows", "mode": "rows", "types": types}],
            ["WriteRequest", {"client": "me"}],
            ["ReadRequest", {"names": ["x"] * rng.choice([1, 20_000]), "known": [0]}],
            ["ReadRequest", {"names": [["x"]], "known": ["y"]}],
            [
                "JoinRequest",
                {"client": "you", "process": "x", "first": rng.choice([-1, 0, 1 << 62])},
            ],
            ["JoinRequest", {"client": "m" * 1000, "process": "1.1.x", "first": 1}],
            ["RowsRequest", {"name": "rows", "epoch": rng.choice([-1, 0, 1, 1 << 62])}],
            ["RowsRequest", {"name": "rows", "epoch": rng.choice([1.5, "1", None])}],
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
            *([number, "me", place, message], [number, "me", None, message]) * 3,
            [number, "m" * 100, place, message],
            ["number", "me", place, message],
            [number, 5, place, message],
            [number, "me", [], place, message],
            [number],
            message,
        ]
    )
    packed = msgpack.packb(envelope)
    header = rng.choice([noise, packed, packed, packed[: rng.randrange(9)]])
    frames = [[header], [header, noise], [header, noise, noise], [b"", header], [header] * 9]
    return noise if rng.random() < 0.1 else joined(rng.choice(frames))


@pytest.mark.slow
@pytest.mark.parametrize("count", [1000, pytest.param(10_000, marks=pytest.mark.slow)])
def test_messages_that_are_none_do_no_harm(server, count):
    rng, before_bytes = random.Random(3), 0
    with server.connect() as connection:
        params = connection.variables("params", {"w": np.ones(50_000, np.float32)})
        connection.table("rows", 10, (4,))
        epoch = address(server.directory)["epoch"]
        join = [0, "me", None, ["JoinRequest", {"client": "me", "process": "x", "first": 1}]]
        for number in range(count):
            if number % 200 == 0:
                channel = channel_to(server)
                asked(channel, join)
                if number == 200:
                    before_bytes = resident_bytes(server)
            try:
                channel.send(hostile(rng, server, epoch))
                while not channel.flush():
                    channel.wait()
                channel.wait(0.02)  # For the answer, or the end: nothing is sent in vain.
                while channel.receive() is not None:
                    pass
            except OSError:  # What follows no message cannot be understood: the server ends it.
                channel.close()
                channel = channel_to(server)
            if number % 100 == 99:
                assert params.value["w"].sum() == 50_000
            if number % 200 == 199:
                channel.close()
        time.sleep(0.5)
        status = connection.status()
        assert status.counts["malformed messages"] > count / 3
        # Some were well-formed, and the host refused them. Two writes are those of `connection`.
        assert status.counts["WriteRequest"] > 2 and status.counts["RowsRequest"] > 0
        assert [name for name, *_ in status.variables] == ["params", "rows"]
        assert resident_bytes(server) < before_bytes + (64 << 20)


def resident_bytes(server):
    pages = Path(f"/proc/{server.pid}/statm").read_text().split()[1]
    return int(pages) * os.sysconf("SC_PAGE_SIZE")


@pytest.mark.slow
def test_a_fork_of_a_client_cannot_write_in_its_name(server):
    """Nor does it wait for a thread that held the client when it was forked."""
    script = f"""
        import os, threading
        import numpy as np
        import stepcache as sc
        with sc.connect("local:{server.directory}") as connection:
            params = connection.variables("params", {{"w": np.zeros(2)}}, write=sc.Write("add"))
            params.push({{"w": np.ones(2)}})
            is_held, go_on = threading.Event(), threading.Event()
            def hold():
                with connection.hosts.clients[0]._lock:
                    is_held.set()
                    go_on.wait()
            threading.Thread(target=hold).start()
            is_held.wait()
            if (child := os.fork()) == 0:
                try:
                    params.push({{"w": np.ones(2)}})
                except sc.VariablesError as error:
                    connection.close()
                    os._exit(7 * ("forked" in str(error)))
                os._exit(1)
            go_on.set()
            assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7
            params.push({{"w": np.ones(2)}})
            assert params.value["w"].tolist() == [2, 2] and params.version == 2
    """
    command = [sys.executable, "-W", "ignore", "-c", textwrap.dedent(script)]
    subprocess.run(command, check=True, timeout=60)


@pytest.mark.sample(every=3)
@pytest.mark.parametrize("wrong", [struct.pack("<IQ", 1, 5 << 30), b"\0" * 4, b"\xff" * 12])
def test_what_is_no_message_ends_only_its_connection(server, wrong):
    channel = channel_to(server)
    with server.connect() as connection:
        with pytest.raises(OSError):
            channel.send(wrong)
            until = time.monotonic() + 20
            while time.monotonic() < until:
                channel.flush()
                channel.wait(1)
                channel.receive()
        assert connection.variables("params", {"w": np.ones(2)}).value["w"].sum() == 2
    channel.close()


def test_a_connection_that_the_garbage_collector_frees_holds_nobody_up(server):
    connection = server.connect()
    params = connection.variables("params", {"w": np.ones(2)})
    connection.itself = (connection, params)
    assert params.value["w"].sum() == 2
    freed = weakref.ref(connection)
    del connection, params
    gc.collect()
    assert freed() is None


OWNER = """
from pathlib import Path
from stepcache.errors import VariablesError
from stepcache.serving import host_directory, local_server, local_transport
from stepcache.serving.local_transport import address
from stepcache.serving.measuring import own_server

with own_server("local:any") as found:
    print(address(Path(found.removeprefix("local:")))["process"], flush=True)
    input()
"""


@pytest.mark.slow
def test_a_server_that_a_process_has_started_for_itself_ends_with_it(tmp_path):
    command, pipe = [sys.executable, "-c", OWNER], subprocess.PIPE
    environment = os.environ | {"TMPDIR": str(tmp_path), "PYTHONPATH": str(PROJECT)}
    owner = subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True, env=environment)
    server = Process.parse(owner.stdout.readline().strip())
    assert not server.has_ended()
    owner.kill()
    owner.communicate()
    try:
        limit = time.monotonic() + 20
        while not server.has_ended():
            assert time.monotonic() < limit, "the server goes on"
            time.sleep(0.02)
    finally:
        server.signal(signal.SIGKILL)


@pytest.mark.slow
def test_a_request_of_many_bytes_beside_its_value(server):
    """An optimizer may have captured arrays, for example."""
    with server.connect(timeout=10) as connection:
        assert connection.hosts.clients[0].describe("n" * (17 << 20)) is None


def test_a_request_of_too_many_bytes_is_refused_at_once(server, monkeypatch):
    with server.connect() as connection:
        tree = {"w": np.zeros(3, np.float32)}
        with monkeypatch.context() as patched:
            patched.setattr(local_transport, "MAX_REQUEST_BYTES", 2000)
            for name in ("a" * 2000, "b" * 2000):
                with pytest.raises(sc.VariablesError, match=r"2\.\d kB; at most 2\.0 kB are taken"):
                    connection.variables(name, tree)
            params = connection.variables("params", tree, write=sc.Write(mode="add"))
        params.push({"w": np.ones(3, np.float32)})
        assert params.value["w"].tolist() == [1, 1, 1]


def test_a_process_without_files_waits_until_some_are_closed(tmp_path):
    """Its selector says again and again that a client connects, whom it cannot accept."""
    listener, looks = Listener(str(tmp_path / "socket")), []
    channels = Channels(listener, lambda made: Channel(made, lambda data: None))
    accept = listener.accept

    def refused():
        looks.append(None)
        raise OSError(errno.EMFILE, "Too many open files")

    with socket.socket(socket.AF_UNIX) as client:
        client.connect(str(tmp_path / "socket"))
        listener.accept = refused
        until = time.monotonic() + 0.5
        while time.monotonic() < until:
            assert not list(channels.received(1.0))
        assert 1 <= len(looks) <= 25
        listener.accept = accept
        client.close()
        messages = [message for _ in range(2) for _, message in channels.received(1.0)]
        assert len(messages) == 1 and isinstance(messages[0], OSError)
    channels.close()
