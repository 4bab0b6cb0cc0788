"""Tables in files: what outlives a crash at each point, what is written, and what it takes."""

import contextlib
import errno
import mmap
import os
import re
import shutil
import signal
import sys
import threading
import time
from pathlib import Path

import numpy as np
import pytest
from orbax.checkpoint._src.path import atomicity

import stepcache as sc
from stepcache.errors import VariablesError
from stepcache.serving import durable_host, snapshots, table_files
from stepcache.serving.durable_host import DurableHost
from stepcache.serving.messages import BlockLayout, JoinRequest, RowsRequest, WriteRequest
from stepcache.serving.row_optimizers import RowOptimizer
from stepcache.serving.table_files import TableFiles
from stepcache.serving.tables import TableType
from tests.serving.network import Block
from tests.serving.servers import Child

ROWS = 300
KIND = TableType(ROWS, [3], "float64", 0.0, 0, RowOptimizer("sgd", 1.0))


class Writer:
    """A client that keeps all that it has written, and sends it again to a host that lacks it."""

    def __init__(self, directory, kind=KIND, seed=0, **options):
        self.directory, self.kind, self.options = directory, kind, options
        self.random, self.writes, self.lost = np.random.default_rng(seed), [], 0
        self.begin()

    def begin(self):
        self.durable = DurableHost(self.directory, Block, recovery_seconds=0.0, **self.options)
        self.durable.tend()
        joined = self.handle(JoinRequest("client", "1.1.host", 1))
        for sequence in range(joined.applied + 1, len(self.writes) + 1):
            self.send(sequence)
        self.handle(JoinRequest("client", "1.1.host", 1, self.durable.host.epoch))
        if not self.writes:
            self.write("create table", [], np.empty((0, *self.kind.shape)))

    def handle(self, message, payload=None):
        reply, blocks = self.durable.handle("client", message, payload)
        assert not hasattr(reply, "why"), reply
        return blocks[0].data if blocks else reply

    def write(self, mode, ids, rows):
        self.writes.append((mode, np.array(ids, np.int64), rows))
        self.send(len(self.writes))

    def send(self, sequence):
        mode, ids, rows = self.writes[sequence - 1]
        types = self.kind.update_layout(ids.size).types if mode == "rows" else []
        payload = np.zeros(BlockLayout(types).size_bytes, np.uint8)
        if types:
            BlockLayout(types).fill(payload, [ids, rows])
        row = ("client", sequence, self.durable.host.epoch, "t", mode, 0, types, self.kind.packed())
        self.handle(WriteRequest(*row, stamp=(1, sequence)), payload)

    def update(self, count=1):
        for _ in range(count):
            ids = self.random.choice(self.kind.rows, 7, replace=False)
            self.write("rows", ids, self.random.integers(0, 9, (7, *self.kind.shape)))
            self.durable.tend()  # It gives memory back.

    def rows(self, ids=None):
        ids = np.arange(self.kind.rows) if ids is None else ids
        data = self.handle(RowsRequest("t"), ids.view(np.uint8))
        return self.kind.layout(ids.size).views(data)[0]

    def expected(self, count=None):
        rows = np.zeros((self.kind.rows, *self.kind.shape))
        for mode, ids, update in self.writes[:count]:
            if mode == "rows":
                rows[ids] -= update
        return rows

    def snapshot(self):
        """Has one written. Returns whether it is whole."""
        is_saved = self.durable.finish()
        (self.directory / "epoch").write_text(f"{self.durable.host.epoch}")  # It goes on.
        return is_saved

    def crash(self):
        self.durable.close()
        self.begin()


def fail(*_, **__):
    raise OSError("a failpoint")


def fail_later(times, function):
    def counted(*row, **options):
        nonlocal times
        times -= 1
        if times < 0:
            fail()
        return function(*row, **options)

    return counted


POINTS = {
    "before the merge": (TableFiles, "merge", 0),
    "at the first row": (table_files, "write_at", 0),
    "in the middle of the rows": (table_files, "write_at", 3),
    "after the merge": (snapshots, "write", 0),
    "before the snapshot is there": (atomicity.AtomicRenameTemporaryPath, "finalize", 0),
    "after the snapshot": (snapshots, "sync", 0),
}


@pytest.mark.sample
@pytest.mark.parametrize("goes_on", [False, True], ids=["crash", "no crash"])
@pytest.mark.parametrize("point", POINTS)
def test_each_update_is_done_once_whatever_fails(tmp_path, monkeypatch, point, goes_on):
    where, name, times = POINTS[point]
    writer = Writer(tmp_path / "served")
    for _ in range(3):
        writer.update(4)
        assert writer.snapshot()
        writer.update(4)
        with monkeypatch.context() as patch:
            patch.setattr(where, name, fail_later(times, getattr(where, name)))
            assert not writer.snapshot()
        writer.update(2)
        if not goes_on:
            writer.crash()
        assert np.array_equal(writer.rows(), writer.expected())
    assert writer.snapshot()
    writer.crash()
    assert np.array_equal(writer.rows(), writer.expected())
    writer.durable.close()


KILLED = """
import os, signal, sys
from pathlib import Path
from stepcache.serving import snapshots, table_files
from tests.serving import test_table_files as here

where, name, times = here.POINTS[sys.argv[2]]
writer = here.Writer(Path(sys.argv[1]))
writer.update(5); writer.snapshot(); writer.update(5)
here.fail = lambda: os.kill(os.getpid(), signal.SIGKILL)
setattr(where, name, here.fail_later(times, getattr(where, name)))
writer.snapshot()
"""


@pytest.mark.parametrize(
    "point",
    [
        each if each == "in the middle of the rows" else pytest.param(each, marks=pytest.mark.slow)
        for each in POINTS
    ],
)
def test_a_host_that_is_killed_there_begins_with_all_that_was_saved(tmp_path, point):
    script = tmp_path / "host.py"
    script.write_text(KILLED)
    code, _, errors = Child(tmp_path, script, tmp_path / "served", point).end()
    assert code == -signal.SIGKILL, errors
    durable = DurableHost(tmp_path / "served", Block, recovery_seconds=0.0)
    durable.close()
    writer = Writer(tmp_path / "again")  # The same writes, by their seed.
    writer.update(10)
    applied = durable.host.state().applied["client"].sequence
    assert applied == (11 if point == "after the snapshot" else 6)
    found = durable.host.tables.held["t"].arrays["rows"]
    assert np.array_equal(found, writer.expected(applied))
    writer.durable.close()


def newest(writer):
    return max((writer.directory / "snapshots").glob("step_*"))


def damage(path, least_bytes=0):
    """Changes a byte in the middle of each large file."""
    for each in path.rglob("d/*"):
        data = bytearray(each.read_bytes())
        if len(data) > least_bytes:
            data[len(data) // 2] ^= 255
            each.write_bytes(data)


def test_a_snapshot_with_other_rows_than_were_written_is_none(tmp_path):
    """orbax does not see a damage of the rows themselves."""
    kind = TableType(10_000, [16], "float32", 0.0, 0, RowOptimizer("sgd", 1.0))
    writer, ids = Writer(tmp_path / "served", kind), np.arange(kind.rows)
    writer.write("rows", ids, np.random.default_rng(0).random((kind.rows, 16)))
    assert writer.snapshot()
    writer.durable.close()
    damage(newest(writer), 1 << 17)
    with pytest.raises(VariablesError, match="an array of a snapshot is damaged"):
        DurableHost(writer.directory, Block)


def test_the_snapshot_before_a_damaged_one_goes_with_the_files(tmp_path):
    writer = Writer(tmp_path / "served")
    for _ in range(4):
        writer.update(4)
        assert writer.snapshot()
    damage(newest(writer))
    writer.durable.close()
    after = DurableHost(writer.directory, Block, recovery_seconds=0.0)
    applied = after.host.state().applied["client"].sequence
    assert applied == len(writer.writes) - 4
    found = after.host.tables.held["t"].arrays["rows"]
    assert np.array_equal(found, writer.expected(applied))
    after.close()
    for _ in range(3):  # It goes on from there, as often as it is started.
        writer.begin()
        writer.update(4)
        assert writer.snapshot()
        assert np.array_equal(writer.rows(), writer.expected())
        writer.durable.close()
    assert [each.name for each in (writer.directory / "snapshots").glob("damaged_*")]


def test_a_snapshot_that_is_older_than_the_files_is_refused(tmp_path, monkeypatch):
    """The files have rows of the newest snapshot, which is damaged: there is no state to go to."""
    writer = Writer(tmp_path / "served")
    for _ in range(3):
        writer.update(4)
        assert writer.snapshot()
    writer.update(4)
    monkeypatch.setattr(snapshots, "write", fail)
    assert not writer.snapshot()
    monkeypatch.undo()
    damage(newest(writer))
    writer.durable.close()
    before = sorted((writer.directory / "snapshots").iterdir())
    for _ in range(2):
        with pytest.raises(VariablesError):
            DurableHost(writer.directory, Block)
    assert sorted((writer.directory / "snapshots").iterdir()) == before


@pytest.mark.parametrize("name", ["rows.npy", "squares.npy"])
def test_a_file_that_is_damaged_is_refused(tmp_path, name):
    kind = TableType(10, [2], "float32", 0.0, 0, RowOptimizer("adagrad", 0.1))
    writer = Writer(tmp_path / "served", kind)
    assert writer.snapshot()
    writer.durable.close()
    (path,) = (tmp_path / "served" / "tables").glob(f"*/{name}")
    os.truncate(path, 100)
    with pytest.raises(VariablesError, match=re.escape(name)):
        DurableHost(tmp_path / "served", Block)


def test_a_host_without_snapshots_begins_anew(tmp_path):
    writer = Writer(tmp_path / "served")
    for _ in range(3):
        writer.update(4)
        assert writer.snapshot()
    writer.durable.close()
    shutil.rmtree(writer.directory / "snapshots")
    writer.writes = []
    for _ in range(3):
        writer.begin()
        writer.update(2)
        assert writer.snapshot()
        assert np.array_equal(writer.rows(), writer.expected())
        writer.durable.close()
    assert len([*(writer.directory / "tables").glob("*/rows.npy")]) == 1


# ---- sizes ---------------------------------------------------------------------------------------

LARGE = TableType(1 << 24, [1024], "float32", 0.0, 0, RowOptimizer("adagrad", 0.1))  # 64 GiB.


def anonymous_bytes():
    status = Path("/proc/self/status").read_text()
    return int(re.search(r"RssAnon:\s+(\d+) kB", status)[1]) << 10


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_a_table_may_be_larger_than_the_memory_and_the_disk(tmp_path):
    memory_bytes = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    before = anonymous_bytes()
    writer = Writer(tmp_path / "served", LARGE)
    ids = np.array([0, 5, (1 << 24) - 1])
    writer.write("rows", ids, np.ones((3, 1024)))
    assert writer.snapshot()
    assert not writer.rows(ids + np.array([7, 7, -7])).any() and (writer.rows(ids) < 0).all()
    writer.crash()
    assert (writer.rows(ids) < 0).all()
    writer.update()
    assert writer.snapshot()
    assert anonymous_bytes() - before < 64 << 20
    files = [*(tmp_path / "served" / "tables").glob("*/*.npy")]
    assert sum(each.stat().st_size for each in files) > min(memory_bytes, 127 << 30)
    assert sum(each.stat().st_blocks for each in files) * 512 < 1 << 20
    writer.durable.close()


def can_copy_pages() -> bool:
    with contextlib.suppress(OSError):
        mmap.mmap(-1, 4096).madvise(table_files._POPULATE_WRITE)
        return True
    return False


@pytest.mark.skipif(not can_copy_pages(), reason="the system copies no pages")
@pytest.mark.parametrize("is_scarce", [False, True])
def test_a_table_is_copied_into_memory_if_it_takes_a_quarter_of_it(
    tmp_path, monkeypatch, is_scarce
):
    kind = TableType(1 << 16, [64], "float32", 1.0, 0, RowOptimizer("adam", 1.0))
    size_bytes = sum(np.prod(shape) * each.itemsize for shape, each in kind.arrays().values())
    available_bytes = 4 * size_bytes - is_scarce
    monkeypatch.setattr(table_files, "_available_bytes", lambda: available_bytes)
    files = TableFiles(tmp_path / "tables")
    files.make("t", kind)
    expected = np.concatenate([*kind.noise()])
    before = anonymous_bytes()
    arrays = files.open("t", kind)
    arrays["rows"][::100] = 7  # While they are copied.
    expected[::100] = 7
    for thread in threading.enumerate():
        if thread.name == "stepcache tables":
            thread.join(30)
    copied_bytes = anonymous_bytes() - before
    assert copied_bytes < size_bytes / 2 if is_scarce else copied_bytes > 0.9 * size_bytes
    assert np.array_equal(arrays["rows"], expected)


def test_files_are_read_where_the_kernel_cannot_copy_pages(tmp_path):
    asked = []

    class OldMap:
        def madvise(self, how, start, count):
            asked.append((start, count))
            raise OSError(errno.EINVAL, "Invalid argument")

    chunk = table_files._AHEAD_BYTES
    (tmp_path / "rows.npy").write_bytes(bytes(2 * chunk + 5))
    table_files._copy_into_memory([tmp_path / "rows.npy"] * 2, [OldMap(), OldMap()])
    assert asked == [(0, chunk), (chunk, chunk), (2 * chunk, 5)] * 2


def test_what_is_available_is_read_from_the_system(tmp_path, monkeypatch):
    monkeypatch.setattr(table_files, "_MEMORY", tmp_path / "meminfo")
    monkeypatch.setattr(table_files, "_GROUPS", tmp_path / "cgroup")
    assert table_files._available_bytes() == 0
    (tmp_path / "meminfo").write_text("MemTotal:  9 kB\nMemAvailable:    3 kB\n")
    assert table_files._available_bytes() == 3072 * hasattr(os, "posix_fadvise")
    table_files._copy_into_memory([tmp_path / "gone"], [mmap.mmap(-1, 4096)])


@pytest.mark.skipif(not hasattr(os, "posix_fadvise"), reason="the system has no control groups")
@pytest.mark.parametrize(
    "controller, line", [("", "0::"), ("memory", "3:cpu:/a\n4:hugetlb,memory:")]
)
@pytest.mark.parametrize(
    "inner, outer, found", [("max", 2048, 2048), (1024, 2048, 1024), (9999, "max", 3072)]
)
def test_a_container_may_have_less_memory(
    tmp_path, monkeypatch, controller, line, inner, outer, found
):
    (tmp_path / "meminfo").write_text("MemAvailable:    3 kB\n")
    (tmp_path / "cgroup").write_text(f"{line}/pod/main\n")
    (tmp_path / "groups" / "pod" / "main").mkdir(parents=True)
    for group, limit in (("pod/main", inner), ("pod", "max"), ("", outer)):
        (tmp_path / "groups" / group / "limit").write_text(f"{limit}\n")
    monkeypatch.setattr(table_files, "_MEMORY", tmp_path / "meminfo")
    monkeypatch.setattr(table_files, "_GROUPS", tmp_path / "cgroup")
    names = ("limit", "taken")
    monkeypatch.setitem(table_files._LIMITS, controller, (tmp_path / "groups", *names))
    assert table_files._available_bytes() == found


@pytest.mark.skipif(not hasattr(os, "posix_fadvise"), reason="the system has no control groups")
@pytest.mark.parametrize(
    "stat, found",
    [
        ("anon 900\ninactive_file 70\nactive_file 30\n", 2048 - 900),
        ("inactive_file 7\ntotal_inactive_file 70\ntotal_active_file 30\n", 2048 - 900),
        ("anon 900\n", 2048 - 1000),
        ("inactive_file 9999\n", 2048),
        ("inactive_file", 2048),
        (None, 2048),
    ],
    ids=["version 2", "version 1", "no files", "more files", "damaged", "none"],
)
def test_what_a_container_has_taken_is_not_available(tmp_path, monkeypatch, stat, found):
    (tmp_path / "meminfo").write_text("MemAvailable:    3 kB\n")
    (tmp_path / "cgroup").write_text("0::/\n")
    (tmp_path / "limit").write_text("2048\n")
    (tmp_path / "taken").write_text("1000\n")
    if stat is not None:
        (tmp_path / "memory.stat").write_text(stat)
    monkeypatch.setattr(table_files, "_MEMORY", tmp_path / "meminfo")
    monkeypatch.setattr(table_files, "_GROUPS", tmp_path / "cgroup")
    monkeypatch.setitem(table_files._LIMITS, "", (tmp_path, "limit", "taken"))
    assert table_files._available_bytes() == found


@pytest.mark.skipif(not hasattr(os, "posix_fadvise"), reason="the system has no control groups")
def test_a_full_container_has_nothing_available(tmp_path):
    (tmp_path / "limit").write_text("2048\n")
    (tmp_path / "taken").write_text("4096\n")
    (tmp_path / "memory.stat").write_text("anon 4096\n")
    assert table_files._left_bytes(tmp_path, "limit", "taken") == 0


@pytest.mark.slow
def test_memory_of_rows_that_nobody_writes_to_is_given_back(tmp_path, monkeypatch):
    monkeypatch.setattr(table_files, "_available_bytes", lambda: 0)
    monkeypatch.setattr(durable_host, "_CHANGED_BYTES", 60 << 20)
    kind = TableType(1 << 22, [16], "float32", 0.0, 0, RowOptimizer("adagrad", 0.1))
    writer = Writer(tmp_path / "served", kind)
    writer.update()
    assert writer.snapshot()
    before = anonymous_bytes()
    ids = np.arange(0, kind.rows, 512)  # 8,192 rows, each on a page of its own.
    writer.write("rows", ids, np.ones((ids.size, 16)))
    assert anonymous_bytes() - before > 60 << 20
    for count in (2, 3):  # They are begun because of that memory.
        while writer.durable.counts["snapshots"] < count:
            writer.durable.tend()
            time.sleep(0.001)
        writer.update()
    for _ in range(100):
        writer.durable.tend()
    assert anonymous_bytes() - before < 30 << 20
    assert (writer.rows(ids) < 0).all()
    writer.durable.close()


def test_tables_that_take_a_quarter_of_the_memory_stay_in_it(tmp_path, monkeypatch):
    monkeypatch.setattr(durable_host, "_CHANGED_BYTES", 1 << 20)
    kind = TableType(1 << 16, [16], "float32", 0.0, 0, RowOptimizer("sgd", 1.0))
    monkeypatch.setattr(table_files, "_available_bytes", lambda: 4 * (4 << 20))
    files = TableFiles(tmp_path / "tables")
    for name in ("first", "second"):  # Together they take more.
        files.make(name, kind)
        files.open(name, kind)
    assert files.is_in_memory("first") and not files.is_in_memory("second")

    writer = Writer(tmp_path / "served", kind)
    writer.update()
    assert writer.snapshot()
    ids = np.arange(0, kind.rows, 64)
    for _ in range(3):
        writer.write("rows", ids, np.ones((ids.size, 16)))
        writer.durable.tend()
        assert writer.durable.counts["snapshots"] == 1  # None is begun because of that memory.
    for _ in range(3):
        writer.write("rows", ids, np.ones((ids.size, 16)))
        assert writer.snapshot()
        assert not writer.durable._to_free
    before = writer.rows(ids)
    writer.crash()
    assert np.array_equal(writer.rows(ids), before)
    writer.durable.close()


def test_a_snapshot_has_the_rows_that_were_updated_since_the_one_before(tmp_path):
    writer = Writer(tmp_path / "served")
    assert writer.snapshot()
    written = list(writer.writes)
    for count in (3, 2, 0, 1):
        writer.update(count)
        if not count:
            writer.write("rows", np.array([5]), np.ones((1, 3)))
        assert writer.snapshot()
        expected = {int(each) for _, ids, _ in writer.writes[len(written) :] for each in ids}
        written = list(writer.writes)
        table = writer.durable.host.tables.held["t"]
        state, _ = snapshots.newest(writer.directory / "snapshots", Block)
        assert set(state.tables["t"].ids.tolist()) == expected
        assert table.stored == table.number
    writer.durable.close()


def test_a_table_is_read_with_numpy(tmp_path):
    writer = Writer(tmp_path / "served")
    for _ in range(3):
        writer.update(4)
        assert writer.snapshot()
    writer.durable.close()
    served = tmp_path / "served"
    rows = np.load(next(served.glob("tables/t-*/rows.npy")), mmap_mode="c")
    assert not np.array_equal(rows, writer.expected())
    newest = max(served.glob("snapshots/step_*"))
    import orbax.checkpoint as ocp  # It takes a second, which other processes need not spend.

    with ocp.StandardCheckpointer() as checkpointer:
        saved = checkpointer.restore(newest)["tables"]["t"]
    rows[saved["ids"]] = saved["rows"]
    assert np.array_equal(rows, writer.expected())
    ids = np.zeros(saved["ids"].shape, int)
    found = sc.restore(served / "snapshots", partial=True, tables={"t": {"ids": ids}})["tables"]
    assert np.array_equal(found["t"]["ids"], saved["ids"])


def test_names_of_tables_lead_nowhere_else(tmp_path):
    files = set(tmp_path.iterdir())
    writer = Writer(tmp_path / "served")
    epoch, names = (
        writer.durable.host.epoch,
        ("../../up", "/tmp/x", "..", ".", "a" * 300, "ü"),
    )
    for number, name in enumerate(names):
        row = ("client", number + 2, epoch, name, "create table", 0, [], KIND.packed())
        writer.handle(WriteRequest(*row), np.empty(0, np.uint8))
    assert len([*(tmp_path / "served" / "tables").glob("*/rows.npy")]) == 7
    assert set(tmp_path.iterdir()) - files == {tmp_path / "served"}
    writer.durable.close()


def test_a_table_without_room_is_refused(tmp_path):
    writer = Writer(tmp_path / "served")
    for kind in (
        TableType(1 << 40, [1 << 10], "float32", 1.0, 0, RowOptimizer()),
        TableType(1 << 40, [1 << 10], "float32", 0.0, 0, RowOptimizer()),
        TableType(1 << 40, [1 << 20], "float32", 0.0, 0, RowOptimizer()),
    ):
        row = (
            "client",
            2,
            writer.durable.host.epoch,
            "large",
            "create table",
            0,
            [],
            kind.packed(),
        )
        reply, _ = writer.durable.handle("client", WriteRequest(*row), np.empty(0, np.uint8))
        assert reply.why, reply
    assert len([*(tmp_path / "served" / "tables").iterdir()]) == 1
    writer.update()
    writer.durable.close()


@pytest.mark.slow
def test_wide_rows_and_rows_across_pages(tmp_path):
    for width in (0, 1, 333, 1500):
        kind = TableType(50, [width], "float64", 0.0, 0, RowOptimizer("sgd", 1.0))
        writer = Writer(tmp_path / f"{width}", kind)
        for _ in range(4):
            writer.update(2)
            assert writer.snapshot()
            writer.update(1)
            assert np.array_equal(writer.rows(), writer.expected())
        writer.crash()
        assert np.array_equal(writer.rows(), writer.expected())
        writer.durable.close()
