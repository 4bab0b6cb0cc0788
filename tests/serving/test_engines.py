"""What every engine has to do: real processes, killed with real signals."""

import json
import random
import signal
import subprocess
import sys
import threading
import time

import numpy as np
import pytest

import stepcache as sc
from stepcache.serving import client
from tests.serving.servers import LIMIT_SECONDS, run_command
from tests.serving.workers import PLACES


def acknowledged(worker):
    """Waits for its end. Returns the numbers that it has printed, and whether it was done."""
    code, printed, errors = worker.end()
    words = printed.split()
    assert code in (0, -signal.SIGKILL), errors
    return {int(word) for word in words if word.isdigit()}, "done" in words


def counts(server, name):
    with server.connect() as connection:
        tree = {"counts": np.zeros(PLACES, np.float32)}
        return connection.variables(name, tree).value["counts"]


# ---- processes that are killed -------------------------------------------------------------------


@pytest.mark.parametrize("seed", [0, pytest.param(1, marks=pytest.mark.slow)])
def test_each_push_is_done_once_though_the_server_is_killed(engine, tmp_path, seed):
    killed_again_and_again(engine, tmp_path, seed, pushes=100, kills=2)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(100, 150))
def test_each_push_is_done_once_though_the_server_is_killed_often(engine, tmp_path, seed):
    killed_again_and_again(engine, tmp_path, seed, pushes=400, kills=6)


def killed_again_and_again(engine, tmp_path, seed, pushes, kills):
    moment = random.Random(seed)
    server = engine(tmp_path / "server", snapshot_seconds=0.2).start()
    workers = [server.worker("params", n * pushes, pushes) for n in range(2)]
    victim = server.worker("params", 2 * pushes, 10 * pushes)
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


@pytest.mark.slow
def test_a_reader_that_is_stopped_holds_nobody_up(server):
    stopped = server.worker("params", 0, 5000)
    time.sleep(0.3)
    stopped.send_signal(signal.SIGSTOP)
    done, is_done = acknowledged(server.worker("params", 5000, 50))
    stopped.send_signal(signal.SIGCONT)
    stopped.kill()
    acknowledged(stopped)
    assert is_done and len(done) == 50


@pytest.mark.slow
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


@pytest.mark.slow
def test_a_client_that_asks_for_nothing_sends_again_what_is_lost(engine, tmp_path):
    server = engine(tmp_path / "server", snapshot_seconds=3600).start()
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


@pytest.mark.slow
def test_closing_waits_for_a_server_that_starts_again(engine, tmp_path, monkeypatch, caplog):
    monkeypatch.setattr(client, "_TOLD_SECONDS", 0.2)
    server = engine(tmp_path / "server", snapshot_seconds=3600).start()
    tree = {"w": np.zeros(1, np.float32)}
    with server.connect() as connection:
        params = connection.variables("params", tree, write=sc.Write(mode="add"))
        connection.flush()
        params.push({"w": np.ones(1, np.float32)})
        server.kill()
        starting = threading.Timer(1, server.start)
        starting.start()
    starting.join()
    with server.connect() as connection:
        assert connection.variables("params", tree).value["w"] == 1
    server.stop()
    if server.engine == "local":  # Ray may have started it again before anybody waits.
        assert "are not saved yet: closing waits for the host" in caplog.text


@pytest.mark.slow
def test_the_end_of_a_process_waits_for_nothing(server):
    code = f"""
import numpy as np, stepcache as sc
connection = sc.connect("{server.address}")
params = connection.variables("params", {{"w": np.zeros(50_000)}}, write=sc.Write(mode="add"))
params.push(params.value)
print(params.version, flush=True)
"""
    began = time.monotonic()
    command = [sys.executable, "-X", "faulthandler", "-c", code]
    done = subprocess.run(command, capture_output=True, text=True, timeout=LIMIT_SECONDS)
    assert (done.returncode, done.stdout) == (0, "1\n"), done.stderr
    if server.engine == "local":
        assert done.stderr == ""
    assert "Traceback" not in done.stderr and "Fatal" not in done.stderr
    assert time.monotonic() - began < 30


@pytest.mark.slow
def test_a_process_may_close_its_connection_at_its_very_end(server, tmp_path):
    """When Python starts no thread any more."""
    size = 5 << 20
    with server.connect() as connection:
        tree = {"w": np.zeros(size, np.float32)}
        params = connection.variables("params", tree)
        code = f"""
import atexit, numpy as np, stepcache as sc
connection = sc.connect("{server.address}")
tree = {{"w": np.zeros({size}, np.float32)}}
params = connection.variables("params", tree, write=sc.Write(mode="add", every=2))
params.push({{"w": np.ones({size}, np.float32)}})
atexit.register(connection.close)
"""
        script = tmp_path / "closing.py"
        script.write_text(code)
        command = [sys.executable, script]
        done = subprocess.run(command, capture_output=True, text=True, timeout=LIMIT_SECONDS)
        assert "RuntimeError" not in done.stderr and (params.value["w"] == 1).all()


# ---- the command line ----------------------------------------------------------------------------


@pytest.mark.slow
def test_status(server, tmp_path):
    with server.connect() as connection:
        connection.variables("params", {"w": np.zeros(3, np.float32)})
        connection.flush()
        option = {"local": ["--variables", server.directory], "ray": ["--ray", server.address[4:]]}
        command = (tmp_path, "status", *option[server.engine])
        code, shown, errors = run_command(*command, "--json")
        assert code == 0, errors
        found = json.loads(shown)[server.address]
        assert found["variables"] == [["params", 0, 64, 0, 1]]
        assert found["clients"][0][2:] == [1, 1] and found["snapshot"] == "step_00000001"
        assert found["counts"]["p99 seconds"] > 0
        if server.engine == "local":
            _, shown, _ = run_command(*command)
            assert "params" in shown and "p99" in shown


# ---- many clients --------------------------------------------------------------------------------


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
