"""Local ranks of one script, to try a pod on one machine: what `stepcache launch` does.

Each rank is a process of its own, in which `jax.distributed.initialize()` without arguments finds
the others. What ranks write is shown line by line; the first of them that fails ends them all; and
nothing is left running, whatever happens to the launcher.
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
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from queue import Empty, SimpleQueue

from stepcache._process_hooks import signals_handled
from stepcache.distributed.output import LAG_SECONDS, Event, Output, signal_name
from stepcache.errors import StepCacheError
from stepcache.units import readable_ranks

GRACE_SECONDS = 5.0
_DRAIN_SECONDS = 2.0
_POLL_SECONDS = 0.01

# Runs in each rank, in place of `python script`, and does what that does. It tells the guard of the
# rank before anything else, and the launcher of an error at once: JAX's own atexit handler would
# keep a rank that raises for minutes, waiting for others that wait for it.
_RANK = """\
def start():
    import importlib.machinery, os, sys, time

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
        when, trace, shown = time.monotonic(), error.__traceback__.tb_next, sys.excepthook

        def tell(code):
            os.write(reports, b"%d %d %r\\n" % (rank, code, when))

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

# Ends the ranks when the launcher is gone and could not: its standard input ends with the launcher.
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
        found = "is a directory" if Path(target).is_dir() else "there is none"
        raise StepCacheError("There is no script to launch", where=target, got=found)
    port = _free_port(port)
    environments = [rank_environment(rank, ranks, port, devices) for rank in range(ranks)]
    events: SimpleQueue[Event] = SimpleQueue()
    with _signals_told(events), _guarded() as guard:
        run = _Run(events, grace_seconds)
        try:
            run.start(guard, environments, [str(int(module)), target, *arguments])
            run.wait()
        finally:
            run.end()
    return run.verdict()


# ---- what ranks are told ------------------------------------------------------------------------

# What a job around the launcher says of its own ranks and nodes. The rest of it stays.
_FOREIGN = re.compile(
    r"(OMPI|PMIX?|PRTE|MPI)_|JAX_(COORDINATOR_PORT|PARTITION_INDEX|SLICE_INDEX)$|SLURM_(JOB_)?"
    r"(STEP|NTASKS|TASK|NPROCS|PROCID|LOCALID|GTIDS|NODE|NNODES|NUM_NODES|SRUN_COMM|LAUNCH_NODE)"
)


def rank_environment(
    rank: int, ranks: int, port: int, devices: int | None, around: Mapping[str, str] = os.environ
) -> dict[str, str]:
    """The variables of one rank.

    They are those of a Slurm step, as JAX reads them on all its versions. No MPI library takes them
    for its own, as it would take Open MPI's.

    Args:
        rank: its number.
        ranks: how many there are.
        port: of the coordinator.
        devices: of each rank, None if that was not said.
        around: the variables of the launcher.
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
            what = f"Port {asked} cannot be had for the coordinator: {error.strerror}"
            raise StepCacheError(what, hint="leave it out: any free port will do") from error
        return probe.getsockname()[1]


# ---- what happens -------------------------------------------------------------------------------


@contextlib.contextmanager
def _signals_told(events: SimpleQueue[Event]) -> Iterator[None]:
    """Makes events of what asks this process to end. What it was started to ignore, it ignores."""

    def tell(number: int, _: object) -> None:
        events.put(Event("asked", -1, number, time.monotonic()))

    with signals_handled((signal.SIGINT, signal.SIGTERM, signal.SIGHUP), tell):
        yield


@contextlib.contextmanager
def _guarded() -> Iterator[int]:
    """A process that outlives this one. Yields the file to which ranks write their numbers."""
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

    def __init__(self, events: SimpleQueue[Event], grace_seconds: float):
        self._events, self._grace_seconds = events, grace_seconds
        self._output = Output(events)
        self._processes: list[subprocess.Popen[bytes]] = []
        self._running: set[int] = set()
        self._failures: list[Event] = []
        self._asked: Event | None = None
        self._ending_since = float("inf")  # Since then ranks do not fail, but are ended.
        self._due: deque[tuple[float, Callable[[], None]]] = deque()  # What is done, and when.
        self._hurried = False

    def start(self, guard: int, environments: Sequence[dict[str, str]], what: list[str]) -> None:
        """Starts a rank for each environment."""
        reading, reports = os.pipe()
        self._output.add_reports(os.fdopen(reading, "rb", buffering=0))
        try:
            for rank, environment in enumerate(environments):
                told = [str(number) for number in (guard, reports, rank)]
                process = subprocess.Popen(
                    [sys.executable, "-u", "-c", _RANK, *told, *what],
                    env=environment,
                    stdin=None if rank == 0 else subprocess.DEVNULL,
                    stdout=subprocess.PIPE,
                    stderr=subprocess.PIPE,
                    bufsize=0,
                    start_new_session=True,  # Ctrl-C must not reach it past the launcher.
                    pass_fds=(guard, reports),
                )
                self._processes.append(process)
                self._running.add(rank)
                self._output.add(rank, len(environments), process)
        finally:
            os.close(reports)
        self._output.start()
        for rank in self._running:
            threading.Thread(target=self._wait_for, args=(rank,), daemon=True).start()

    def _wait_for(self, rank: int) -> None:
        """Tells when a rank ends. Where it can, it leaves the process unreaped until the end of the
        launch: so the number of its group, which may have other members, stays its own.
        """
        process = self._processes[rank]
        if hasattr(os, "waitid"):
            ended = os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)
            assert ended is not None
            code = ended.si_status if ended.si_code == os.CLD_EXITED else -ended.si_status
        else:
            code = process.wait()
        self._events.put(Event("ended", rank, code, time.monotonic()))

    def wait(self) -> None:
        """Waits until all have ended, and sees to it that they do."""
        while self._running:
            left = max(0.0, self._due[0][0] - time.monotonic()) if self._due else None
            try:
                self._take(self._events.get(timeout=left))
            except Empty:
                self._due.popleft()[1]()

    def _take(self, event: Event) -> None:
        if event.what == "asked":
            return self._obey(event)
        if event.what == "ended":
            self._running.discard(event.rank)
        if event.code and event.seconds < self._ending_since:
            self._failures.append(event)
        if event.code and not self._hurried:
            self._do_after(min(LAG_SECONDS, self._grace_seconds), self._announce)
            self._do_after(self._grace_seconds, lambda: self._press(signal.SIGTERM))
            self._do_after(2 * self._grace_seconds, lambda: self._press(signal.SIGKILL))
            self._hurried = True

    def _obey(self, event: Event) -> None:
        again = self._asked is not None and event.code == signal.SIGINT
        self._asked = self._asked or event
        if again:
            self._signal(signal.SIGKILL)
        elif event.code == signal.SIGINT:
            self._signal(signal.SIGINT)
        else:
            self._signal(signal.SIGTERM)
            self._due.clear()
            self._do_after(self._grace_seconds, lambda: self._press(signal.SIGKILL))
            self._hurried = True

    def _do_after(self, seconds: float, act: Callable[[], None]) -> None:
        self._due.append((time.monotonic() + seconds, act))

    def _first(self) -> Event | None:
        return min(self._failures, key=Event.order, default=None)

    def _announce(self) -> None:
        if first := self._first():
            names = readable_ranks(self._running)
            self._output.say(f"{first}; waiting {self._grace_seconds:g} s for {names} to end")

    def _press(self, number: signal.Signals) -> None:
        self._output.say(f"{readable_ranks(self._running)} did not end: {number.name}")
        self._signal(number)

    def _signal(self, number: signal.Signals) -> None:
        self._ending_since = min(self._ending_since, time.monotonic())
        for process in self._processes:
            if process.returncode is None:
                _signal_group(process, number)

    def end(self) -> None:
        """Ends what is there still, such as processes that ranks have left behind; shows the rest
        of what they wrote.
        """
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
        """Says which rank failed first, last of all. Returns the exit code of the launch."""
        with contextlib.suppress(Empty):
            while True:
                self._take(self._events.get_nowait())
        if first := self._first():
            self._output.show_tail(first.rank)
            self._output.say(str(first))
            return first.code if first.code > 0 else 128 - first.code
        if self._asked is not None and any(process.returncode for process in self._processes):
            self._output.say(f"ended by {signal_name(self._asked.code)}")
            return 128 + self._asked.code
        return 0


def _signal_group(process: subprocess.Popen[bytes], number: int) -> None:
    with contextlib.suppress(OSError):
        os.killpg(process.pid, number)


def _is_there(process: subprocess.Popen[bytes]) -> bool:
    """Whether a process, or one of its group, is running."""
    process.poll()
    try:
        os.killpg(process.pid, 0)
    except OSError:
        return False
    return True
