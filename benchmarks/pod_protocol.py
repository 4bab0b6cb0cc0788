"""What the processes of a pod ask of JAX's coordination service: calls, bytes, seconds and CPU.

The protocol alone, as stepcache runs it: no devices, no programs. Each rank is a process of its
own with JAX's own client, forked from one that has imported everything; the service is JAX's own,
in the process of rank 0, which gets the CPU before the others, as on a machine of its own. Eight
ranks take each other for processes of one machine.

- a new key: all processes agree on a program that each has stored in a directory of its own;
- a new key that rank 0 builds, and the others take from there;
- a barrier of JAX's, which is not counted as calls: what the least that all do together takes;
- quiet: nothing happens;
- late: one rank comes seconds after the others; or it never comes, and the others give up;
- lost: one rank is killed while the others wait for it to agree.

Bytes are those of names and values, both ways. A get that ends without an answer is counted by
itself, because the service never forgets who asked.

    python -m benchmarks.pod_protocol [--quick] [--ranks 4 64 256 1024]
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import hashlib
import json
import logging
import os
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

RANKS = (4, 64, 256, 1024)
WAYS = ("stored", "built by one")
BARRIER = "a barrier of JAX's"
CASES = ("keys", "quiet", "late", "never comes", "lost")
OF_A_MACHINE = 8
PROGRAM = b"p" * 2000  # What is told of a trace, about, where the program itself is on disk.


@dataclass(frozen=True)
class Waits:
    """Seconds that cases take by themselves. Who waits for longer than 5 s says so in the log."""

    keys: int
    quiet: float
    late: float
    agree: float
    lost: float


WAITS = Waits(keys=5, quiet=30.0, late=8.0, agree=7.0, lost=3.0)
QUICK = Waits(keys=3, quiet=5.0, late=6.0, agree=6.0, lost=2.0)


@dataclass(frozen=True)
class Cost:
    """What one case costs, by its ranks.

    Attributes:
        case: what happens.
        ranks: how many.
        mean_calls, max_calls: of the service, by one rank, a key.
        mean_bytes, max_bytes: sent and received by one rank, a key.
        unanswered: gets of all ranks that ended without an answer.
        seconds: from the first rank's start to the last one's end; the median of keys.
        low_seconds, high_seconds: the quartiles.
        service_cpu_seconds: of the process of rank 0, which runs the service, a key.
        rank_cpu_seconds: of each other one, a key, the mean.
    """

    case: str
    ranks: int
    mean_calls: float
    max_calls: float
    mean_bytes: float
    max_bytes: float
    unanswered: int
    seconds: float
    low_seconds: float
    high_seconds: float
    service_cpu_seconds: float
    rank_cpu_seconds: float


# ---- in the processes of a pod -----------------------------------------------------------------


class Counted:
    """JAX's client; counts what is asked of the service.

    Args:
        client: JAX's.

    Attributes:
        calls, size_bytes, unanswered: so far.
    """

    def __init__(self, client: Any):
        self._client = client
        self.calls = self.size_bytes = self.unanswered = 0

    def __getattr__(self, name: str) -> Any:
        method = getattr(self._client, name)
        if not name.startswith(("key_value", "blocking_key_value")):
            return method

        def call(*arguments):
            self.calls += 1
            self.size_bytes += _size_bytes(arguments)
            try:
                found = method(*arguments)
            except Exception as error:
                self.unanswered += "DEADLINE_EXCEEDED" in str(error)
                raise
            self.size_bytes += _size_bytes(found)
            return found

        return call


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:32]


def _size_bytes(value: Any) -> int:
    if isinstance(value, (list, tuple)):
        return sum(map(_size_bytes, value))
    return len(value) if isinstance(value, (bytes, str)) else 0


class Rank:
    """One process of the pod, from its start to the loss of another one.

    Args:
        rank: its number.
        count: of all.
        address: of the service.
    """

    def __init__(self, rank: int, count: int, address: str):
        import jax
        from jax._src import distributed

        from stepcache import errors
        from stepcache.link import processes
        from stepcache.pods import watch
        from stepcache.pods.rounds import peers_of

        logging.getLogger("stepcache").setLevel(logging.CRITICAL)
        jax.distributed.initialize(
            address,
            count,
            rank,
            cluster_detection_method="deactivate",
            initialization_timeout=600,
            heartbeat_timeout_seconds=600,
        )
        self.rank, self.count, self.is_last = rank, count, rank == count - 1
        self.errors = errors
        self.jax_client: Any = distributed.global_state.client
        self.client: Any = Counted(self.jax_client)
        distributed.global_state.client = self.client
        # There are no devices to ask, and one machine.
        jax.process_index = lambda *_: rank
        watch.pending_ranks = set
        host = f"{processes._host()}-{rank // OF_A_MACHINE}"
        processes._host = lambda: host
        peers = peers_of(range(count))
        assert peers is not None
        self.peers = peers
        self.records: dict[str, Any] = {}
        self._barriers = 0
        self._keys = 0

    def together(self) -> None:
        """Waits for all others; this is not counted."""
        self._barriers += 1
        self.jax_client.wait_at_barrier(f"benchmark {self._barriers}", 600_000)

    def measured(self, case: str, work: Callable[[], Any], times: int = 1) -> None:
        """Notes what some work takes, once or several times."""
        self.together()
        before = (self.client.calls, self.client.size_bytes, self.client.unanswered)
        cpu, started, seconds = time.process_time(), time.monotonic(), []
        for _ in range(times):
            once = time.monotonic()
            work()
            seconds.append(time.monotonic() - once)
        ended = time.monotonic()
        after = (self.client.calls, self.client.size_bytes, self.client.unanswered)
        if case != "lost":
            self.together()
        self.records[case] = {
            "counts": [(b - a) for a, b in zip(before, after, strict=True)],
            "started": started,
            "ended": ended,
            "seconds": seconds,
            "cpu_seconds": time.process_time() - cpu,
            "times": times,
        }

    def agree(self, way: str) -> None:
        """What `programs.together` does about a new program, without the program."""
        from stepcache.programs.together import givers

        self._keys += 1
        key, holds = _digest(f"key {self._keys}")[:16], "disk" if way == "stored" else ""
        entries = {
            "step": "train.py:train",
            "call": _digest(f"call {self._keys}")[:16],
            "error": "",
            "values": _digest(f"values {self._keys}")[:16],
            "module": _digest(f"module {self._keys}")[:16],
            "program": f"{key} {holds}",
            "directory": "" if holds else _digest(f"directory {self.rank}")[:8],
        }
        with self.peers.round("train", "its first call") as current:
            current.announce()
            differing = current.compare("report", entries)
            sides = differing.get("program", [(entries["program"], current.ranks)])
            giver, receivers, _ = givers(key, sides)
            if giver == self.rank:
                current.send("program", ("sent", PROGRAM), len(receivers))
            elif self.rank in receivers:
                current.receive("program", giver)

    def run(self, waits: Waits, cases: Sequence[str], save: Callable[[], None]) -> None:
        """Measures cases, in order; `save` is called before the last one, and after it."""
        self.peers.watch.enter(self.peers.name, self.peers.ranks, 60.0)
        self.agree("stored")  # The first meeting of all.
        if "keys" in cases:
            for way in WAYS:
                self.measured(way, lambda way=way: self.agree(way), waits.keys)
            self.measured(BARRIER, self.together, waits.keys)
        if "quiet" in cases:
            self.measured("quiet", lambda: time.sleep(waits.quiet))
        if "late" in cases:
            self.measured("late", lambda: self.come_late(waits.late))
        if "never comes" in cases:
            self.peers.agree_seconds = waits.agree
            self.measured("never comes", self.never_come)
            if self.is_last:
                self.come_in_vain()
            self.peers.agree_seconds = 10 * waits.agree
        save()
        if "lost" in cases:
            self.measured("lost", lambda: self.lose(waits.lost))
            save()

    def come_late(self, seconds: float) -> None:
        time.sleep(seconds if self.is_last else 0)
        self.come_in_vain()

    def come_in_vain(self) -> None:
        with contextlib.suppress(self.errors.AgreementError):
            self.agree("stored")

    def never_come(self) -> None:
        if not self.is_last:
            with contextlib.suppress(self.errors.AgreementError):
                self.agree("stored")
                raise AssertionError("all have agreed")

    def lose(self, seconds: float) -> None:
        """The last rank is killed; the others wait for it."""
        if self.is_last:
            time.sleep(seconds)
            os.kill(os.getpid(), signal.SIGKILL)
        try:
            self.agree("stored")
        except self.errors.RankLostError:
            return
        raise AssertionError("nothing was lost")


def work(
    rank: int, count: int, address: str, directory: Path, quick: bool, cases: Sequence[str]
) -> None:
    """One process: writes its records to a file."""
    signal.alarm(1500)
    if rank:
        os.nice(5)  # In a pod, the service shares its CPUs with one rank, not with all of them.
    one = Rank(rank, count, address)

    def save() -> None:
        part = directory / f"{rank}.part"
        part.write_text(json.dumps(one.records))
        part.rename(directory / f"{rank}.json")

    one.run(QUICK if quick else WAITS, cases, save)
    (directory / f"{rank}.ended").touch()
    if rank == 0:  # The service ends with this process, and JAX then aborts the others.
        while sum(1 for _ in directory.glob("*.ended")) < count - 1:
            time.sleep(0.1)
        time.sleep(1)


# ---- around them -------------------------------------------------------------------------------


def pod(count: int, quick: bool, cases: Sequence[str]) -> None:
    """Forks a pod, and prints the costs of its cases as JSON, one a line."""
    import jax  # noqa: F401

    import stepcache.programs.together  # noqa: F401

    with socket.socket() as free:
        free.bind(("localhost", 0))
        address = f"localhost:{free.getsockname()[1]}"
    gc.collect()
    gc.freeze()
    processes = []
    with tempfile.TemporaryDirectory() as name:
        directory = Path(name)
        try:
            for rank in range(count):
                process = os.fork()
                if not process:
                    if rank:  # Rank 0, which runs the service, has a machine of its own in a pod.
                        os.nice(10)
                    code = 1
                    try:
                        work(rank, count, address, directory, quick, cases)
                        code = 0
                    except Exception:
                        traceback.print_exc()
                    finally:
                        os._exit(code)
                processes.append(process)
            for process in processes:
                os.waitpid(process, 0)
            records = [json.loads(file.read_text()) for file in directory.glob("*.json")]
            zero = json.loads((directory / "0.json").read_text())
        finally:
            for process in processes:
                with contextlib.suppress(ProcessLookupError, ChildProcessError):
                    if os.waitpid(process, os.WNOHANG)[0] == 0:
                        os.kill(process, signal.SIGKILL)
    for case in zero:
        found = [record[case] for record in records if case in record]
        expected = count - 1 if case == "lost" else count  # One was killed.
        assert len(found) == expected, f"{case}: {len(found)} of {expected} ranks have told"
        print(json.dumps(cost(case, count, found, zero[case])))


def cost(case: str, count: int, ranks: list[dict], zero: dict) -> dict[str, Any]:
    """The cost of one case."""
    times = zero["times"]
    calls, size_bytes, unanswered = zip(*(each["counts"] for each in ranks), strict=True)
    seconds = sorted(zero["seconds"])
    if times == 1:
        seconds = [max(each["ended"] for each in ranks) - min(each["started"] for each in ranks)]
    quarters = statistics.quantiles(seconds, n=4) if times > 1 else 3 * seconds
    others = [each["cpu_seconds"] for each in ranks if each is not zero]
    return {
        "case": case,
        "ranks": count,
        "mean_calls": statistics.mean(calls) / times,
        "max_calls": max(calls) / times,
        "mean_bytes": statistics.mean(size_bytes) / times,
        "max_bytes": max(size_bytes) / times,
        "unanswered": sum(unanswered),
        "seconds": quarters[1],
        "low_seconds": quarters[0],
        "high_seconds": quarters[2],
        "service_cpu_seconds": zero["cpu_seconds"] / times,
        "rank_cpu_seconds": statistics.mean(others) / times,
    }


def costs(count: int, quick: bool) -> list[Cost]:
    """A fresh pod."""
    command = [sys.executable, "-m", "benchmarks.pod_protocol", "--pod", str(count)]
    environment = dict(os.environ, JAX_PLATFORMS="cpu", STEPCACHE_DIR="off", NPROC="1")
    done = subprocess.run(
        command + ["--quick"] * quick,
        env=environment,
        stdout=subprocess.PIPE,
        text=True,
        timeout=1500,
        check=True,
    )
    return [Cost(**json.loads(line)) for line in done.stdout.splitlines() if line.startswith("{")]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="fewer keys, nothing is written")
    parser.add_argument("--ranks", type=int, nargs="+", default=RANKS)
    parser.add_argument("--pod", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--cases", nargs="+", choices=CASES, default=CASES, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.pod:
        return pod(options.pod, options.quick, options.cases)
    from rich.console import Console
    from rich.table import Table

    from benchmarks.harness import write

    rows: list[Cost] = []
    for count in options.ranks:
        rows += costs(count, options.quick)
        table = Table(title=f"{count} ranks", title_justify="left")
        for name in ("case", "calls a rank", "most", "bytes a rank", "most", "unanswered"):
            table.add_column(name)
        for name in ("seconds", "CPU of rank 0, ms", "of others, ms"):
            table.add_column(name, justify="right")
        for row in rows:
            if row.ranks == count:
                table.add_row(
                    row.case,
                    f"{row.mean_calls:.2f}",
                    f"{row.max_calls:.1f}",
                    f"{row.mean_bytes:,.0f}",
                    f"{row.max_bytes:,.0f}",
                    str(row.unanswered),
                    f"{row.seconds:.3f}",
                    f"{row.service_cpu_seconds * 1e3:,.1f}",
                    f"{row.rank_cpu_seconds * 1e3:,.2f}",
                )
        Console(width=118).print(table)
    if not options.quick:
        print(f"written to {write('pod_protocol', rows, {}, rounds=WAITS.keys)}")  # type: ignore[arg-type]


if __name__ == "__main__":
    main()
