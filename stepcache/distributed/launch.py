"""`stepcache launch`: runs a script as several ranks on this machine, to try a pod.

Each rank is a process, in which `jax.distributed.initialize()` without arguments finds the others.
Their output is shown line by line. When one rank fails, the launcher ends all of them, and nothing
is left running, whatever happens to the launcher.
"""

from __future__ import annotations

import contextlib
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from queue import Empty, SimpleQueue
from typing import Literal, NamedTuple

from stepcache._process_hooks import signals_handled
from stepcache.distributed.output import Output
from stepcache.errors import StepCacheError
from stepcache.units import readable_ranks

GRACE_SECONDS = 5.0
_DRAIN_SECONDS = 2.0
_POLL_SECONDS = 0.01

# Runs in each rank as `python script` would. Before that it writes the rank's process identifier to
# the guard. It reports an error to the launcher at once: JAX's atexit handler would keep a rank
# that raises for minutes, while it waits for the others.
_RANK = """\
def start():
    import importlib.machinery, os, sys

    del globals()["start"]
    guard, reports, rank, is_module = map(int, sys.argv[1:5])
    del sys.argv[:5]
    pid = os.getpid()
    os.write(guard, b"%d\\n" % pid)
    os.close(guard)
    os.set_inheritable(reports, False)
    path = os.path.abspath(sys.argv[0])
    if not sys.flags.safe_path:
        sys.path[0] = os.getcwd() if is_module else os.path.dirname(os.path.realpath(path))
    try:
        if is_module:
            import runpy

            runpy._run_module_as_main(sys.argv[0])
        else:
            loader = importlib.machinery.SourceFileLoader("__main__", path)
            globals().update(__file__=path, __cached__=None, __loader__=loader)
            exec(compile(loader.get_data(path), path, "exec", dont_inherit=True), globals())
    except BaseException as error:
        if os.getpid() != pid:
            raise
        trace, shown = error.__traceback__.tb_next, sys.excepthook

        def tell(code):
            os.write(reports, b"%d %d\\n" % (rank, code))

        def hook(kind, value, _):
            shown(kind, value.with_traceback(trace), trace)
            tell(-2 if isinstance(value, KeyboardInterrupt) else 1)

        if not isinstance(error, SystemExit):
            sys.excepthook = hook
        elif code := error.code:
            tell(code & 255 if isinstance(code, int) else 1)
        raise


start()
"""

# Kills the ranks if the launcher was killed: then its standard input ends without `done`.
_GUARD = """\
import os, signal, sys

groups = sys.stdin.read().split()
if groups[-1:] != ["done"]:
    for group in groups:
        try:
            os.killpg(int(group), signal.SIGKILL)
        except OSError:
            pass
"""


def launch(
    target: str,
    arguments: Sequence[str] = (),
    *,
    ranks: int,
    module: bool = False,
    devices: int | None = None,
    port: int | None = None,
    grace_seconds: float = GRACE_SECONDS,
) -> int:
    """Runs a script as that many ranks on this machine, and waits for them.

    To be called in the main thread, whose handlers of SIGINT, SIGTERM and SIGHUP it replaces while
    ranks run. Rank 0 has this process's standard input, the others have none.

    Args:
        target: the script, or the name of a module.
        arguments: those of the script.
        ranks: how many.
        module: run a module, as `python -m` does.
        devices: of each rank; None is one, or as many CPU devices as the environment says.
        port: of the coordinator, on localhost; None is any that is free.
        grace_seconds: how long ranks have to end by themselves when one has failed, and again after
            SIGTERM, before they are killed.

    Returns:
        An exit code: of the rank that failed first, 128 and the number of the signal if one killed
        it or ended the launch; 0 when all ranks ended with 0.

    Raises:
        StepCacheError: there is no such script, or the port is in use.
    """
    if not module and not Path(target).is_file():
        found = "a directory" if Path(target).is_dir() else "no such file"
        raise StepCacheError("There is no script to launch", where=target, got=found)
    port = _free_port(port)
    environments = [rank_environment(rank, ranks, port, devices) for rank in range(ranks)]
    numbers = signal.SIGINT, signal.SIGTERM, signal.SIGHUP
    run = _Run(grace_seconds)
    with signals_handled(numbers, lambda number, _: run.ask(number)), _guarded() as guard:
        try:
            run.start(guard, environments, [str(int(module)), target, *arguments])
            run.wait()
        finally:
            run.end()
    return run.verdict()


# Variables by which a job around the launcher describes its own ranks and nodes.
_FOREIGN = re.compile(
    r"(OMPI|PMIX?|PRTE|MPI)_|JAX_(COORDINATOR_PORT|PARTITION_INDEX|SLICE_INDEX)$|SLURM_(JOB_)?"
    r"(STEP|NTASKS|TASK|NPROCS|PROCID|LOCALID|GTIDS|NODE|NNODES|NUM_NODES|SRUN_COMM|LAUNCH_NODE)"
)


def rank_environment(
    rank: int, ranks: int, port: int, devices: int | None, around: Mapping[str, str] = os.environ
) -> dict[str, str]:
    """The environment variables of one rank of a launcher that has those `around`.

    They describe a Slurm step, which all versions of JAX read, and no MPI library.
    """
    found = {name: value for name, value in around.items() if not _FOREIGN.match(name)}
    found.setdefault("SLURM_JOB_ID", "0")
    count = devices or 1
    local = range(rank * count, (rank + 1) * count)
    found |= {
        "SLURM_STEP_NODELIST": "localhost",
        "SLURM_NTASKS": str(ranks),
        "SLURM_PROCID": str(rank),
        "SLURM_LOCALID": str(rank),
        "JAX_COORDINATOR_ADDRESS": f"127.0.0.1:{port}",
        "JAX_COORDINATOR_BIND_ADDRESS": f"127.0.0.1:{port}",
        "JAX_LOCAL_DEVICE_IDS": ",".join(map(str, local)),  # Of GPUs; CPU devices are made.
    }
    asked = "xla_force_host_platform_device_count" in found.get("XLA_FLAGS", "")
    if devices is not None or not (asked or "JAX_NUM_CPU_DEVICES" in found):
        found["JAX_NUM_CPU_DEVICES"] = str(count)
    if any(name in found for name in ("grpc_proxy", "https_proxy", "http_proxy")):
        # gRPC would ask the proxy for the coordinator, and hang.
        others = found.get("no_grpc_proxy") or found.get("no_proxy")
        found["no_grpc_proxy"] = f"{others},127.0.0.1" if others else "127.0.0.1"
    return found


def _free_port(asked: int | None) -> int:
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("127.0.0.1", asked or 0))
        except OSError as error:
            what = f"Port {asked} cannot be used for the coordinator: {error.strerror}"
            raise StepCacheError(what, hint="leave --port out, to use any free port") from error
        return probe.getsockname()[1]


class Event(NamedTuple):
    """A rank raised or ended, or a signal (the code) asked the launcher to end."""

    what: Literal["raised", "ended", "asked"]
    rank: int
    code: int

    @property
    def was_killed(self) -> bool:
        """Whether the rank was killed from outside; it may abort because of another rank."""
        return self.code < 0 and -self.code not in (signal.SIGABRT, signal.SIGINT)

    def __str__(self) -> str:
        if self.code >= 0:
            return f"rank {self.rank} failed with exit code {self.code}"
        return f"rank {self.rank} was killed by {_signal_name(-self.code)}"


def _signal_name(number: int) -> str:
    return next((each.name for each in signal.Signals if each == number), f"signal {number}")


@contextlib.contextmanager
def _guarded() -> Iterator[int]:
    """Context manager of a process that outlives this one and then kills the ranks.

    Yields the file descriptor to which ranks write their process identifiers.
    """
    guard = subprocess.Popen(
        [sys.executable, "-I", "-S", "-c", _GUARD],
        stdin=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    )
    assert guard.stdin is not None
    try:
        yield guard.stdin.fileno()
    finally:
        guard.communicate(b"done")


class _Run:
    """The processes of one launch, from start to end."""

    def __init__(self, grace_seconds: float):
        self._events: SimpleQueue[Event] = SimpleQueue()
        self._grace_seconds = grace_seconds
        self._output = Output(lambda: self.ask(signal.SIGPIPE))
        self._processes: list[subprocess.Popen[bytes]] = []
        self._running: set[int] = set()
        self._failures: list[Event] = []
        self._asked = 0  # The first signal that asked the launch to end; 0 for none.
        self._is_ending = False  # The launcher ends the ranks: their exit codes are no failures.
        self._due: deque[tuple[float, signal.Signals]] = deque()  # Signals, and when to send them.

    def ask(self, number: int) -> None:
        """Asks the launch to end, as a signal does."""
        self._events.put(Event("asked", -1, number))

    def start(self, guard: int, environments: Sequence[dict[str, str]], what: list[str]) -> None:
        """Starts a rank for each environment."""
        reading, reports = os.pipe()
        threading.Thread(target=self._read_reports, args=(reading,), daemon=True).start()
        try:
            for rank, environment in enumerate(environments):
                numbers = [str(number) for number in (guard, reports, rank)]
                process = subprocess.Popen(
                    [sys.executable, "-u", "-c", _RANK, *numbers, *what],
                    env=environment,
                    stdin=None if rank == 0 else subprocess.DEVNULL,
                    stdout=subprocess.PIPE,
                    stderr=subprocess.PIPE,
                    start_new_session=True,  # Ctrl-C must not reach it past the launcher.
                    pass_fds=(guard, reports),
                )
                self._processes.append(process)
                self._running.add(rank)
                self._output.add(rank, len(environments), process)
        finally:
            os.close(reports)
        for rank in list(self._running):
            threading.Thread(target=self._wait_for, args=(rank,), daemon=True).start()

    def _read_reports(self, reading: int) -> None:
        with os.fdopen(reading) as reports:
            for line in reports:
                rank, code = line.split()
                self._events.put(Event("raised", int(rank), int(code)))

    def _wait_for(self, rank: int) -> None:
        """Waits for a rank without reaping it: its process group must keep its number."""
        process = self._processes[rank]
        if hasattr(os, "waitid"):
            ended = os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)
            assert ended is not None
            code = ended.si_status if ended.si_code == os.CLD_EXITED else -ended.si_status
        else:
            code = process.wait()
        self._events.put(Event("ended", rank, code))

    def wait(self) -> None:
        """Waits until all ranks have ended, and ends those that do not."""
        while self._running:
            left = max(0.0, self._due[0][0] - time.monotonic()) if self._due else None
            try:
                event = self._events.get(timeout=left)
            except Empty:
                number = self._due.popleft()[1]
                self._output.say(f"{readable_ranks(self._running)} did not end: {number.name}")
                self._signal(number)
                continue
            if event.what == "asked":
                self._obey(event.code)
            else:
                self._note(event)

    def _note(self, event: Event) -> None:
        if event.what == "ended":
            self._running.discard(event.rank)
        if event.code and not self._is_ending:
            self._failures.append(event)
            if len(self._failures) == 1 and (others := self._running - {event.rank}):
                waiting = f"waiting {self._grace_seconds:g} s for {readable_ranks(others)} to end"
                self._output.say(f"{event}; {waiting}")
        if event.code and not self._due:
            self._send_later(signal.SIGTERM, signal.SIGKILL)

    def _obey(self, number: int) -> None:
        if number == signal.SIGINT:
            self._signal(signal.SIGKILL if self._asked else signal.SIGINT)
        else:
            self._signal(signal.SIGTERM)
            self._due.clear()
            self._send_later(signal.SIGKILL)
        self._asked = self._asked or number

    def _send_later(self, *numbers: signal.Signals) -> None:
        for turn, number in enumerate(numbers, 1):
            self._due.append((time.monotonic() + turn * self._grace_seconds, number))

    def _signal(self, number: signal.Signals) -> None:
        self._is_ending = True
        for process in self._processes:
            if process.returncode is None:
                _signal_group(process, number)

    def end(self) -> None:
        """Ends all processes that still run, such as children of ranks; shows their last output."""
        self._signal(signal.SIGTERM)
        left, deadline = self._processes, time.monotonic() + self._grace_seconds
        while (left := [each for each in left if _is_there(each)]) and time.monotonic() < deadline:
            time.sleep(_POLL_SECONDS)
        for process in left:
            _signal_group(process, signal.SIGKILL)
        for process in self._processes:
            process.wait()
        self._output.join(_DRAIN_SECONDS)

    def verdict(self) -> int:
        """Writes which rank failed first, as the last line; returns the exit code of the launch.

        A rank that was killed counts as the first, as others may have reported its loss before.
        """
        if self._failures:
            first = next((each for each in self._failures if each.was_killed), self._failures[0])
            self._output.show_tail(first.rank)
            self._output.say(str(first))
            return first.code if first.code > 0 else 128 - first.code
        if self._asked and any(process.returncode for process in self._processes):
            self._output.say(f"ended by {_signal_name(self._asked)}")
            return 128 + self._asked
        return 0


def _signal_group(process: subprocess.Popen[bytes], number: int) -> None:
    with contextlib.suppress(OSError):
        os.killpg(process.pid, number)


def _is_there(process: subprocess.Popen[bytes]) -> bool:
    """Returns whether a process, or another one of its group, is running."""
    process.poll()
    try:
        os.killpg(process.pid, 0)
    except OSError:
        return False
    return True
