"""Hours of reads and writes, with kills: memory, open files and the directory stop growing.

An hour with `-m slow`, or as long as `--soak-seconds` says; some seconds by default.
"""

import os
import signal
import statistics
import time
from pathlib import Path

import numpy as np
import pytest

import stepcache as sc
from tests.serving import servers
from tests.serving.test_engines import acknowledged, counts
from tests.serving.workers import PLACES

SIZE, ROWS, PUSHES = 1 << 20, 1000, 20
SAMPLE_SECONDS, LONG_SECONDS = 3, 3600
SUM = sc.Write(mode="add")
# How much more the last quarter may use than the third one, beside a tenth.
SLACK = {"bytes": 64 << 20, "open files": 16, "files": 8, "stored bytes": 16 << 20}
SHORT_SLACK = SLACK | {"bytes": 256 << 20, "open files": 64}  # The server has just started.


def used_by(pid):
    """Memory and open files of a process."""
    resident = Path(f"/proc/{pid}/statm").read_text().split()[1]
    return {
        "bytes": int(resident) * os.sysconf("SC_PAGE_SIZE"),
        "open files": len(list(Path(f"/proc/{pid}/fd").iterdir())),
    }


def stored_in(directory):
    """Files of a directory, and their bytes. Snapshots come and go meanwhile."""
    sizes = []
    for folder, _, names in os.walk(directory):
        for name in names:
            try:
                sizes.append((Path(folder) / name).stat().st_size)
            except FileNotFoundError:
                continue
    return {"files": len(sizes), "stored bytes": sum(sizes)}


def growing(samples, is_short=False):
    """What has grown, of samples of the second half of a soak, in words."""
    middle, found = len(samples) // 2, []
    for what in samples[0]:
        values = [each[what] for each in samples]
        before, after = map(statistics.median, (values[:middle], values[middle:]))
        slack = (SHORT_SLACK if is_short else SLACK)[what]
        if after > before * 1.1 + slack:
            found.append(f"{what}: {before:.0f} → {after:.0f}")
    return found


@pytest.fixture(
    params=[
        "LocalServer",
        *(pytest.param(name, marks=pytest.mark.slow) for name in ("RayServer", "RayCalls")),
    ]
)
def engine(request):
    """The class of its servers."""
    if request.param.startswith("Ray"):
        request.getfixturevalue("ray_session")
    return getattr(servers, request.param)


@pytest.mark.parametrize("last, expected", [(100, []), (100 << 20, ["bytes: 100 → 104857600"])])
def test_the_check_itself(last, expected):
    assert growing([{"bytes": 100}] * 10 + [{"bytes": last}] * 10) == expected


class Soak:
    """Reads and writes of variables and of a table; clients that come, go, and are killed."""

    def __init__(self, server, connection):
        tree = {"w": np.zeros(SIZE, np.float32)}
        self.server, self.connection = server, connection
        self.large = connection.variables("large", tree, write=SUM)
        self.table = connection.table("table", ROWS, (8,), optimizer=sc.RowOptimizer("add"))
        self.look = sc.step(lambda large: large["w"][:2] + 0)
        self.rounds = self.first = 0
        self.done = set()

    def round(self):
        """Writes, and checks that all writes until now are seen once."""
        self.rounds += 1
        for part in (0.25, 0.75):
            self.large.push({"w": np.full(SIZE, part, np.float32)})
        assert np.asarray(self.look(self.large)).tolist() == [self.rounds] * 2
        rows = self.table.lookup(np.arange(ROWS))
        self.table.push(rows, np.ones(rows.values.shape, np.float32))
        assert (np.asarray(self.table.lookup([3, 5]).spread()) == self.rounds).all()
        with self.server.connect() as other:
            value = other.variables("large", {"w": np.zeros(SIZE, np.float32)}).value["w"]
            assert value[-1] == self.rounds

    def begin_worker(self):
        """Another process that pushes; None if there are no places left for it."""
        if self.first + PUSHES > PLACES:
            return None
        worker = self.server.worker("params", self.first, PUSHES)
        self.first += PUSHES
        return worker

    def end_worker(self, worker, is_killed):
        """Waits for a worker, or kills it. What one has pushed that is killed may be lost."""
        if is_killed:
            worker.kill()
        done, is_done = acknowledged(worker)
        assert is_done or is_killed
        self.done |= done if is_done else set()


@pytest.mark.timeout(2 * LONG_SECONDS)
@pytest.mark.parametrize("is_long", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_a_soak(engine, tmp_path, is_long, request):
    seconds = request.config.getoption("--soak-seconds") or (
        LONG_SECONDS if is_long else SAMPLE_SECONDS
    )
    server = engine(tmp_path / "server", snapshot_seconds=1).start()
    samples = {"server": [], "client": [], "directory": []}
    with server.connect() as connection:
        soak = Soak(server, connection)
        begun, kills, number, part = time.monotonic(), 0, 0, 0.0
        while part < 1 or len(samples["server"]) < 4:
            number, part = number + 1, (time.monotonic() - begun) / seconds
            worker = soak.begin_worker()
            if part > 0.2 * (kills + 1) and kills < 2:
                kills += 1
                server.kill()
                server.start()
            until = time.monotonic() + min(seconds / 8, 2)
            while time.monotonic() < until:
                soak.round()
                if part >= 0.5 and kills == 2:
                    samples["server"].append(used_by(server.pid))
                    samples["client"].append(used_by(os.getpid()))
                    samples["directory"].append(stored_in(server.directory))
            if worker is not None:
                soak.end_worker(worker, is_killed=number % 4 == 0)
        found = counts(server, "params")
        connection.flush()
    os.kill(server.pid, signal.SIGCONT)  # It is still the one that was measured.
    server.stop()
    assert kills == 2 and found.max() == 1 and all(found[sorted(soak.done)] == 1)
    print(f"{server.engine}: {seconds:.0f} s, {soak.rounds} rounds, {number} workers")
    print({who: (rows[0], rows[len(rows) // 2], rows[-1]) for who, rows in samples.items()})
    grown = {who: growing(rows, seconds < 100) for who, rows in samples.items()}
    assert not any(grown.values()), grown
