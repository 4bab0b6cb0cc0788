"""Images: what outlives a kill of the host, and which images are none."""

import time

import jax
import numpy as np
import optax
import pytest

from stepcache.serving import durable_host, images
from stepcache.serving.durable_host import DurableHost
from stepcache.serving.host import Host
from stepcache.serving.messages import BlockLayout, JoinRequest, SnapshotRequest, WriteRequest
from stepcache.serving.optimizers import ExportedRule, export_rule
from stepcache.serving.row_optimizers import RowOptimizer
from stepcache.serving.tables import TableType
from tests.serving.network import Block, MemoryTables

LAYOUT = BlockLayout([("w", [3000], "float32"), ("empty", [0, 2], "int8"), ("b", [], "bfloat16")])
pytestmark = pytest.mark.skipif(not images.CAN_IMAGE, reason="needs the number of a start")


def handle(host, *message):
    return host.handle(*(("client",) if isinstance(host, DurableHost) else ()), *message)


def write(host, sequence, name, mode, value=0, **options):
    """Has a client write leaves that are all one number."""
    payload = np.zeros(LAYOUT.size_bytes, np.uint8)
    for view in LAYOUT.views(payload):
        view[...] = value
    if mode == "create table":
        payload = payload[:0]
    if mode == "rows":
        layout = BlockLayout(options["types"])
        payload = np.zeros(layout.size_bytes, np.uint8)
        layout.fill(payload, [[3, 7], np.full((2, 4), value)])
    epoch = getattr(host, "host", host).epoch
    request = WriteRequest("client", sequence, epoch, name, mode, **options)
    reply, _ = handle(host, request, payload)
    assert not hasattr(reply, "why"), reply


def filled(host):
    """Variables, some with an optimizer, and a table."""
    handle(host, JoinRequest("client", "1.1.host", 1), None)
    tree = jax.tree.structure([0, 0, 0])
    leaves = [jax.ShapeDtypeStruct(shape, dtype) for _, shape, dtype in LAYOUT.types]
    rule = export_rule("adam", optax.sgd(0.1, momentum=0.9), tree, leaves)
    table = TableType(10, [4], "float32", 0.5, 3, RowOptimizer("adagrad", 0.1))
    write(host, 1, "plain", "create", 1, types=LAYOUT.types)
    write(host, 2, "plain", "add", 2)
    write(host, 3, "adam", "create", 1, types=LAYOUT.types, rule=rule)
    write(host, 4, "adam", "apply", 1)
    write(host, 5, "table", "create table", rule=table.packed())
    write(host, 6, "table", "rows", 1, types=table.update_layout(2).types)
    return host


def compare(state, expected):
    for name, held in expected.variables.items():
        found = state.variables[name]
        assert np.array_equal(found.value.data, held.value.data)
        assert (found.number, found.token, found.rule) == (held.number, held.token, held.rule)
        if held.state is not None:
            assert np.array_equal(found.state.data, held.state.data)
    for name, table in expected.tables.items():
        found = state.tables[name]
        assert (found.type, found.key, found.number) == (table.type, table.key, table.number)
        assert np.array_equal(found.ids, table.ids) and table.ids.size
        for each, rows in table.arrays.items():
            assert np.array_equal(found.arrays[each], rows)
    rest = ("applied", "moment", "processes")
    assert all(getattr(state, key) == getattr(expected, key) for key in rest)


def test_an_image_has_all_that_a_host_has(tmp_path):
    host = filled(Host(1, Block, ExportedRule, MemoryTables()))
    images.Images(tmp_path).write(host.state())
    compare(images.Images(tmp_path).newest(Block), host.state())


def test_the_newest_image_that_is_whole_counts(tmp_path):
    host, written = (
        filled(Host(1, Block, ExportedRule, MemoryTables())),
        images.Images(tmp_path),
    )
    states = []
    for sequence in range(7, 10):
        write(host, sequence, "plain", "add", sequence)
        states.append(host.state())
        written.write(states[-1])
        compare(images.Images(tmp_path).newest(Block), states[-1])

    class KilledBlock:
        @property
        def data(self):
            raise KeyboardInterrupt

    write(host, 10, "plain", "add", 1)
    state = host.state()
    state.variables["adam"].value = KilledBlock()  # The host is killed in the middle of an image.
    with pytest.raises(KeyboardInterrupt):
        written.write(state)
    compare(images.Images(tmp_path).newest(Block), states[-1])


def begin(directory, **options):
    return DurableHost(directory, Block, recovery_seconds=0.0, has_images=True, **options)


def snapshot(durable):
    """Has a snapshot written, as a client that flushes does."""
    handle(durable, SnapshotRequest(on_disk=True), None)
    until(durable, "snapshots", 1)


def until(durable, name, count):
    while durable.counts[name] < count:
        durable.tend()
        time.sleep(0.001)


def test_images_let_clients_forget(tmp_path, monkeypatch):
    monkeypatch.setattr(durable_host, "_KEPT_BYTES", 4 * LAYOUT.size_bytes)
    monkeypatch.setattr(durable_host, "_LONGEST_RECOVERY_SECONDS", 0.0)  # Its client may live.
    before = begin(tmp_path / "served")
    filled(before)
    snapshot(before)
    for sequence in range(7, 13):
        write(before, sequence, "plain", "add", 1)
    while before.host.saved["client"] < 12:
        before.tend()
    assert before.counts["images"] and before.counts["snapshots"] == 1
    expected = before.host.state(on_disk=False)
    before.close()  # Without `finish`: as a crash.
    after = begin(tmp_path / "served")
    compare(after.host.state(on_disk=False), expected)
    assert after.host.saved["client"] == 12
    snapshot(after)
    assert after.finish()
    after.close()
    assert not list((tmp_path / "served").glob("image*"))


def test_after_a_start_of_the_machine_images_are_none(tmp_path, monkeypatch):
    """They may be torn; and the host goes on to do other writes than they have."""
    monkeypatch.setattr(durable_host, "_KEPT_BYTES", 1)
    before = begin(tmp_path / "served")
    filled(before)
    snapshot(before)
    write(before, 7, "plain", "add", 1)
    until(before, "images", 1)
    before.close()
    boot = tmp_path / "boot"
    boot.write_text("another")
    with monkeypatch.context() as patch:
        patch.setattr(images, "_BOOT_ID", boot)
        after = begin(tmp_path / "served")
        assert after.host.moment == 6
        after.close()
    again = begin(tmp_path / "served")
    assert again.host.moment == 6
    again.close()
