"""Bytes go from process to process in a tree, to those that know the token."""

import os
import socket
import threading
from types import SimpleNamespace

import pytest

from stepcache.distributed.relay import CHILDREN, Relay, own_host, parent_of
from stepcache.jaxcompat import coordination

TOKEN = b"t" * 32
HOST = "127.0.0.1"


def receiver(size):
    return Relay(HOST, TOKEN, bytearray(size))


def test_a_chain_passes_on_while_it_receives():
    data = os.urandom(5_000_000)
    relays = [Relay(HOST, TOKEN, data), *(receiver(len(data)) for _ in range(4))]
    threads = [
        threading.Thread(target=relay.fetch, args=(before.address, lambda: None))
        for before, relay in zip(relays[::-1][1:], relays[::-1], strict=False)
    ]  # The last one begins, while those before it have nothing yet.
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert all(bytes(relay.data) == data for relay in relays)
    for relay in relays:
        relay.close()


def test_who_does_not_know_the_token_gets_nothing():
    relay = Relay(HOST, TOKEN, b"program")
    with socket.create_connection(relay.address, 5) as stranger:
        stranger.sendall(b"x" * 32)
        assert stranger.recv(100) == b""
    relay.close()


def test_what_ends_in_the_middle_is_an_error_down_the_chain():
    source = Relay(HOST, TOKEN, bytearray(1000))  # Of which nothing ever comes.
    middle, last = receiver(1000), receiver(1000)
    errors = []

    def fetch(relay, address):
        try:
            relay.fetch(address, lambda: None)
        except OSError as error:
            errors.append(error)

    threads = [
        threading.Thread(target=fetch, args=(relay, before.address))
        for relay, before in ((middle, source), (last, middle))
    ]
    for thread in threads:
        thread.start()
    source.close()
    for thread in threads:
        thread.join(30)
    assert len(errors) == 2


def test_nobody_serves_more_than_a_few():
    parents = [parent_of(number) for number in range(1, 1024)]
    assert max(parents.count(each) for each in set(parents)) == CHILDREN
    assert all(parent < number for number, parent in enumerate(parents, 1))


@pytest.mark.parametrize("coordinator", ["localhost:1234", "127.0.0.1:1234", "[::1]:1234"])
def test_the_own_host_is_one_that_the_coordinator_reaches(monkeypatch, coordinator):
    state = SimpleNamespace(global_state=SimpleNamespace(coordinator_address=coordinator))
    monkeypatch.setattr(coordination, "distributed", state)
    try:
        host = own_host(coordination.coordinator_address())
    except OSError:
        pytest.skip("this machine has no IPv6")
    assert host in ("127.0.0.1", "::1")
