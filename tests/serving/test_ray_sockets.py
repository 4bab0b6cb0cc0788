"""Processes on the machine of a Ray actor: its socket, and when they use calls of Ray instead."""

import os
import signal
import threading
import time

import numpy as np
import pytest

import stepcache as sc
from tests.serving.servers import RayCalls, RayServer

LARGE = 50_000
SUM = sc.Write(mode="add")


@pytest.fixture(scope="module")
def engine(ray_session):
    return RayServer


@pytest.mark.slow
@pytest.mark.parametrize("kind, is_shared", [(RayServer, True), (RayCalls, False)])
def test_memory_is_shared_with_processes_of_the_machine(engine, tmp_path, kind, is_shared):
    server = kind(tmp_path / "server").start()
    with server.connect() as connection:
        params = connection.variables("params", {"w": np.ones(LARGE, np.float32)}, write=SUM)
        params.push({"w": np.ones(LARGE, np.float32)})
        assert (params.value["w"] == 2).all()
        shared_bytes = connection.status().counts.get("bytes shared", 0)
    assert shared_bytes == (4 * LARGE if is_shared else 0)
    server.stop()


@pytest.mark.slow
def test_a_socket_that_never_answers_is_left_alone(server, monkeypatch):
    from stepcache.serving import ray_transport

    asked = []
    monkeypatch.setattr(ray_transport, "_SILENCE_SECONDS", 0.1)
    monkeypatch.setattr(ray_transport, "_LOOK_SECONDS", 0.0)
    monkeypatch.setattr(
        ray_transport.LocalTransport, "request", lambda *message: asked.append(message)
    )
    with server.connect() as connection:
        params = connection.variables("params", {"w": np.ones(LARGE, np.float32)}, write=SUM)
        for _ in range(3):
            params.push({"w": np.ones(LARGE, np.float32)})
            connection.hosts.clients[0].keep()
        assert (params.value["w"] == 4).all()
        client = connection.hosts.clients[0]
        # Connections of other tests may still look for their servers.
        assert len([message for _, message, *_ in asked if message.client == client.name]) == 1


@pytest.mark.slow
def test_a_socket_that_is_silent_for_a_while_is_used_again(server, monkeypatch):
    from stepcache.serving import ray_transport

    monkeypatch.setattr(ray_transport, "_SILENCE_SECONDS", 0.2)
    with server.connect() as connection:
        params = connection.variables("params", {"w": np.ones(LARGE, np.float32)}, write=SUM)
        transport = connection.hosts.clients[0]._transport
        os.kill(server.pid, signal.SIGSTOP)
        pushing = threading.Thread(target=params.push, args=({"w": np.ones(LARGE, np.float32)},))
        pushing.start()
        while transport._local is not None:
            time.sleep(0.01)
        os.kill(server.pid, signal.SIGCONT)
        pushing.join()
        assert (params.value["w"] == 2).all()
        connection.hosts.clients[0].keep()
        assert transport._local is not None
        params.push({"w": np.ones(LARGE, np.float32)})
        assert (params.value["w"] == 3).all()
