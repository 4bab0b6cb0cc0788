"""What a process sees of its own connections."""

import os
import socket
import sys

import pytest

from stepcache.cluster import connections

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="seen in Linux's /proc only")


@pytest.fixture
def pair():
    """A port, and both ends of a connection to it."""
    with socket.create_server(("localhost", 0)) as server:
        port = server.getsockname()[1]
        with socket.create_connection(("localhost", port)) as near:
            far, _ = server.accept()
            with far:
                yield port, near, far


def test_a_connection_is_seen_until_an_end_closes(pair):
    port, near, far = pair
    assert connections.connected_by(port)
    far.close()
    assert not connections.connected_by(port)
    near.close()
    assert not connections.connected_by(port)


def test_one_that_was_seen_is_found_without_a_list(pair, monkeypatch):
    port, near, far = pair
    assert connections.connected_by(port)
    lists = []
    monkeypatch.setattr(connections, "_sockets", lambda: lists.append(1) or [])
    assert connections.connected_by(port) and not lists
    far.close()
    near.close()
    assert not connections.connected_by(port) and lists


def test_another_one_under_its_number_is_another_one(pair):
    port, near, far = pair
    assert connections.connected_by(port)
    with socket.create_server(("localhost", 0)) as server:
        other = server.getsockname()[1]
        with socket.create_connection(("localhost", other)) as following:
            far.close()
            os.dup2(following.fileno(), near.fileno())
            assert connections.connected_by(other)
            assert not connections.connected_by(port)
