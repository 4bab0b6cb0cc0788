"""A host and its directory: whom it waits for after a crash."""

import errno
import os
import shutil
import subprocess
import sys
import weakref

import numpy as np
import pytest

from stepcache.errors import VariablesError
from stepcache.link.processes import Process, _process_of
from stepcache.serving import durable_host, host_directory
from stepcache.serving.durable_host import DurableHost
from stepcache.serving.messages import BlockLayout, JoinRequest, Refused, WriteRequest, Written
from stepcache.serving.row_optimizers import RowOptimizer
from stepcache.serving.tables import TableType

LAYOUT = BlockLayout([("w", [1], "float32")])
ENDED = Process(2**22 + 1, "1", Process.current().host)
ELSEWHERE = Process(2**22 + 1, "1", "another-host")


class Block:
    def __init__(self, size_bytes):
        self.data = np.zeros(size_bytes, np.uint8)


def begin(directory):
    return DurableHost(directory, Block, recovery_seconds=0.0)


def write(durable, client, process):
    """Has a client make variables, and a snapshot."""
    durable.handle(client, JoinRequest(client, str(process), 1), None)
    request = WriteRequest(client, 1, durable.host.epoch, client, "create", types=LAYOUT.types)
    durable.handle(client, request, np.zeros(LAYOUT.size_bytes, np.uint8))
    while durable.host.saved.get(client) != 1:
        durable.tend()


@pytest.mark.parametrize(
    "process, is_waited_for",
    [(Process.current(), True), (ENDED, False), (ELSEWHERE, True)],
    ids=["alive", "ended", "of another node"],
)
def test_it_waits_for_clients_that_may_be_alive(tmp_path, process, is_waited_for):
    before = begin(tmp_path / "served")
    write(before, "client", process)
    before.close()  # Without `finish`: as a crash.
    after = begin(tmp_path / "served")
    after.tend()
    assert after.host.waiting_for == ({"client"} if is_waited_for else set())
    assert after.host.epoch > before.host.epoch
    after.close()


def test_it_does_not_wait_for_a_client_that_has_left(tmp_path):
    host = begin(tmp_path / "served")
    write(host, "client", Process.current())  # The snapshot knows it as one that may be alive.
    host.handle("client", JoinRequest("client", "", 2, host.host.epoch), None)
    for _ in range(3):
        host.close()  # Without `finish`: as a crash.
        host = begin(tmp_path / "served")
        assert not host.host.waiting_for
    host.close()


def test_it_waits_no_longer_once_the_process_of_a_client_has_ended(tmp_path, monkeypatch):
    monkeypatch.setattr(durable_host, "_LOOK_SECONDS", 0.0)
    child = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    before = begin(tmp_path / "served")
    write(before, "client", _process_of(child.pid))
    before.close()
    after = begin(tmp_path / "served")
    after.tend()
    assert after.host.waiting_for == {"client"}
    child.kill()
    child.wait()
    after.tend()
    assert not after.host.waiting_for
    after.close()


def test_it_waits_for_nobody_if_it_was_finished(tmp_path):
    before = begin(tmp_path / "served")
    write(before, "client", Process.current())
    assert before.finish()
    before.close()
    after = begin(tmp_path / "served")
    assert not after.host.waiting_for and after.host.moment == 1
    after.close()


def test_a_write_is_not_confirmed_while_the_disk_is_full(tmp_path, monkeypatch):
    host, client = begin(tmp_path / "served"), "client"
    host.handle(client, JoinRequest(client, str(Process.current()), 1), None)
    request = WriteRequest(client, 1, host.host.epoch, "w", "create", types=LAYOUT.types)
    value = np.zeros(LAYOUT.size_bytes, np.uint8)

    def cut(directory, client, process):
        with (directory / "writers").open("a") as file:
            file.write(client[:3])
        raise OSError(errno.ENOSPC, "the disk is full")

    with monkeypatch.context() as patched:
        patched.setattr(host_directory, "add_writer", cut)
        for _ in range(2):
            reply, _ = host.handle(client, request, value)
            assert isinstance(reply, Refused) and reply.kind == "recovering"
    reply, _ = host.handle(client, request, value)
    assert isinstance(reply, Written) and reply.number == 0
    host.close()  # Without `finish`: as a crash.
    after = begin(tmp_path / "served")
    assert after.host.waiting_for == {client}
    after.close()


def refused(host, sequence, payload, *row, **options):
    """The kind of the refusal of a write."""
    reply, _ = host.handle(
        "me", WriteRequest("me", sequence, host.host.epoch, *row, **options), payload
    )
    return reply.kind


@pytest.mark.parametrize("process", ["9" * 5000 + ".1.x", "1.\ud800.x", "1.2.x\nother 5.5.y"])
def test_a_client_may_call_its_process_anything(tmp_path, process):
    host = begin(tmp_path / "served")
    write(host, "client", process)
    assert (tmp_path / "served" / "writers").read_text().split() == ["client"]
    host.close()
    after = begin(tmp_path / "served")
    assert not after.host.waiting_for
    after.close()


def test_what_no_snapshot_can_hold_is_refused(tmp_path):
    host, value = begin(tmp_path / "served"), np.zeros(LAYOUT.size_bytes, np.uint8)
    host.handle("me", JoinRequest("me", "", 1), None)
    table = TableType(3, [], "int8", 0.0, 0, RowOptimizer()).packed()
    for name, path in (("", "w"), ("\ud800", "w"), ("w", "\ud800")):
        types = [(path, [1], "float32")]
        assert refused(host, 1, value, name, "create", types=types) == "malformed"
    assert refused(host, 1, value[:0], "\ud800", "create table", rule=table) == "malformed"
    write(host, "client", "1.1.x")
    host.close()


def test_a_refused_write_is_not_kept(tmp_path):
    host, value = begin(tmp_path / "served"), np.zeros(LAYOUT.size_bytes, np.uint8)
    write(host, "me", "1.1.x")
    kept = weakref.ref(value)
    assert refused(host, 2, value, "me", "assign", base=5, serial=2) == "conflict"
    del value
    assert kept() is None
    assert refused(host, 2, np.zeros(64, np.uint8), "me", "assign", serial=2) == "conflict"
    host.close()


def test_what_is_recovered_in_part_is_recovered_again(tmp_path):
    before, clients = begin(tmp_path / "served"), ["one", "other"]
    for client in clients:
        write(before, client, Process.current())
    before.close()
    recovering = begin(tmp_path / "served")
    recovering.handle(
        "one", JoinRequest("one", str(Process.current()), 2, recovering.host.epoch), None
    )
    assert recovering.host.waiting_for == {"other"}
    assert not recovering.finish()
    recovering.close()
    after = begin(tmp_path / "served")
    assert after.host.waiting_for == {*clients}
    after.close()


def test_a_directory_has_one_host(tmp_path):
    first = begin(tmp_path / "served")
    with pytest.raises(VariablesError, match=f"process {os.getpid()}"):
        begin(tmp_path / "served")
    first.close()
    begin(tmp_path / "served").close()


def remove(directory):
    shutil.rmtree(directory)


def rename(directory):
    directory.rename(directory.parent / "renamed")


def replace(directory):
    shutil.rmtree(directory)
    directory.mkdir(mode=0o700)
    (directory / "lock").write_text("of another host")


def test_the_end_of_a_host_leaves_another_one_of_its_directory_alone(tmp_path):
    host = begin(tmp_path / "served")
    shutil.rmtree(tmp_path / "served")
    other = begin(tmp_path / "served")
    write(other, "client", Process.current())
    before = (tmp_path / "served" / "epoch").read_text()
    with pytest.raises(VariablesError, match="removed or replaced"):
        host.finish()
    assert (tmp_path / "served" / "epoch").read_text() == before
    host.close()
    other.close()


@pytest.mark.parametrize("change", [remove, rename, replace])
@pytest.mark.parametrize("is_written", [False, True])
def test_it_ends_when_its_directory_is_gone(tmp_path, monkeypatch, change, is_written):
    monkeypatch.setattr(durable_host, "_CHECK_SECONDS", 3600 if is_written else 0)
    host = begin(tmp_path / "served")
    host.tend()
    change(tmp_path / "served")
    with pytest.raises(VariablesError, match="removed or replaced"):
        if is_written:
            write(host, "client", Process.current())
        host.tend()
    assert not (tmp_path / "served" / "snapshots").exists()
    host.close()
