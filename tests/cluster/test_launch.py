"""`stepcache launch`: real processes, under a time limit, of which none may be left."""

import os
import pty
import signal
import socket
import subprocess
import sys
import textwrap
import threading
import time
from pathlib import Path

import pytest
from click.testing import CliRunner

from stepcache.cli import main
from stepcache.distributed.launch import launch, rank_environment
from stepcache.errors import StepCacheError

pytestmark = pytest.mark.timeout(90)

PRELUDE = """\
import os, pathlib, signal, subprocess, sys, time
RANK = int(os.environ["SLURM_PROCID"])

def note(pid, name):
    pathlib.Path(f"{name}.part").write_text(str(pid))
    os.rename(f"{name}.part", f"{name}.pid")

note(os.getpid(), RANK)
"""
WAIT = "time.sleep(60)"
# Rank 0 waits for rank 1 as a collective does: it learns of its end at once.
PIPE = """\
if RANK == 0:
    try:
        os.mkfifo("pipe.part"); os.rename("pipe.part", "pipe")
        open("pipe").read()
    except FileExistsError:
        pass
else:
    while not os.path.exists("pipe"):
        time.sleep(0.01)
    pipe = open("pipe", "w")
"""


@pytest.fixture(autouse=True)
def place(tmp_path, monkeypatch):
    """A directory of its own. All processes that were noted in it must be gone after the test."""
    monkeypatch.chdir(tmp_path)
    yield tmp_path
    assert_gone(tmp_path, seconds=1)


def assert_gone(place: Path, seconds: float = 10) -> None:
    deadline = time.monotonic() + seconds
    pids = [int(path.read_text()) for path in place.glob("*.pid")]
    while left := [pid for pid in pids if is_there(pid)]:
        assert time.monotonic() < deadline, f"left running: {left} of {pids}"
        time.sleep(0.02)


def is_there(pid: int) -> bool:
    """Whether a process runs. One that has ended may wait for whoever adopted it to notice."""
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    state = subprocess.run(["ps", "-o", "state=", "-p", str(pid)], capture_output=True, text=True)
    return state.stdout.strip()[:1] not in ("", "Z")


def script(body: str) -> str:
    Path("script.py").write_text(PRELUDE + textwrap.dedent(body), encoding="utf-8")
    return "script.py"


def when_there(place: Path, *names: object) -> None:
    """Waits until processes have noted themselves."""
    deadline = time.monotonic() + 60
    while not all((place / f"{name}.pid").exists() for name in names):
        assert time.monotonic() < deadline
        time.sleep(0.01)


@pytest.fixture
def asking(place):
    """Sends signals to the launcher, this process, when ranks are there."""
    threads = []

    def ask(*steps):
        """Steps are names to wait for, or signals."""

        def run():
            for step in steps:
                if isinstance(step, signal.Signals):
                    os.kill(os.getpid(), step)
                else:
                    when_there(place, step)

        threads.append(threading.Thread(target=run, daemon=True))
        threads[-1].start()

    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield ask
    for thread in threads:
        thread.join(10)
    signal.signal(signal.SIGINT, before)


def command(*arguments: object) -> list[str]:
    return [sys.executable, "-m", "stepcache", "launch", *map(str, arguments)]


# ---- what ranks are told ------------------------------------------------------------------------


def test_arguments_go_to_the_script_untouched():
    name = script("print('rank', RANK, 'of', os.environ['SLURM_NTASKS'], sys.argv)")
    arguments = ["-n", "9", "--devices", "x", "--", "-h", "--unknown=1", ""]
    result = CliRunner().invoke(main, ["launch", "-n", "3", name, *arguments])
    assert result.exit_code == 0, result.output
    expected = [f"[{rank}] rank {rank} of 3 {[name, *arguments]}" for rank in range(3)]
    assert sorted(result.output.splitlines()) == expected


def test_a_script_runs_as_python_runs_it(place, capfd):
    """What a script can see of how it was started, but for the variables."""
    (place / "kit").mkdir()
    (place / "kit/beside.py").write_text("NAME = 'beside'")
    body = """\
    from __future__ import annotations
    import beside, multiprocessing, sys
    class Thing: pass
    def work(x): return x + 1
    if __name__ == "__main__":
        names = {name: value for name, value in globals().items() if name != "__loader__"}
        print(sorted(names), __file__, __name__, __spec__, sys.argv, sys.path, Thing)
        print(sys.flags, sys.stdin.readline() if len(sys.argv) > 2 else "")
        with multiprocessing.get_context("spawn").Pool(1) as pool:
            print(pool.map(work, [1]))
        def fail(): raise ValueError("bad")
        fail()
    """
    (place / "kit/script.py").write_text(textwrap.dedent(body))
    arguments = ["kit/script.py", "argument"]
    plain = subprocess.run([sys.executable, "-u", *arguments], capture_output=True, text=True)
    assert launch(arguments[0], arguments[1:], ranks=1) == plain.returncode == 1
    out, errors = capfd.readouterr()
    assert out.replace("[0] ", "") == plain.stdout
    *shown, last = errors.replace("[0] ", "").splitlines()
    assert shown == plain.stderr.splitlines()
    assert last == "stepcache launch: rank 0 failed with exit code 1"


def test_modules(place, capfd):
    (place / "kit").mkdir()
    (place / "kit/__main__.py").write_text("import sys; print(__spec__.name, sys.argv[1:])")
    assert launch("kit", ["-m", "x"], ranks=2, module=True) == 0
    lines = sorted(capfd.readouterr().out.splitlines())
    assert lines == [f"[{rank}] kit.__main__ ['-m', 'x']" for rank in range(2)]
    assert launch("kit.nowhere", ranks=1, module=True) == 1
    assert "No module named kit.nowhere" in capfd.readouterr().err


def test_variables_are_those_that_jax_reads():
    found = rank_environment(2, 4, 1234, None, {"HOME": "/home/me"})
    assert found == {
        "HOME": "/home/me",
        "SLURM_JOB_ID": "0",
        "SLURM_STEP_NODELIST": "localhost",
        "SLURM_NTASKS": "4",
        "SLURM_PROCID": "2",
        "SLURM_LOCALID": "2",
        "JAX_COORDINATOR_ADDRESS": "127.0.0.1:1234",
        "JAX_COORDINATOR_BIND_ADDRESS": "127.0.0.1:1234",
        "JAX_LOCAL_DEVICE_IDS": "2",
        "JAX_NUM_CPU_DEVICES": "1",
    }


@pytest.mark.parametrize(
    ("around", "devices", "expected"),
    [
        ({}, 3, "3"),
        ({"JAX_NUM_CPU_DEVICES": "8"}, None, "8"),
        ({"JAX_NUM_CPU_DEVICES": "8"}, 3, "3"),
        ({"XLA_FLAGS": "--xla_force_host_platform_device_count=8"}, None, None),
        ({"XLA_FLAGS": "--xla_force_host_platform_device_count=8"}, 3, "3"),
    ],
)
def test_the_users_number_of_cpu_devices_wins_unless_asked(around, devices, expected):
    found = rank_environment(1, 2, 1234, devices, around)
    assert found.get("JAX_NUM_CPU_DEVICES") == expected
    assert found["JAX_LOCAL_DEVICE_IDS"] == ("3,4,5" if devices else "1")


def test_an_outer_job_is_not_mistaken_for_this_one():
    outer = (
        "SLURM_STEP_ID SLURM_STEPID SLURM_STEP_NODELIST SLURM_NTASKS_PER_NODE SLURM_NPROCS "
        "SLURM_NODEID SLURM_NNODES SLURM_JOB_NODELIST SLURM_JOB_NUM_NODES SLURM_TASKS_PER_NODE "
        "SLURM_GTIDS SLURM_LAUNCH_NODE_IPADDR SLURM_SRUN_COMM_PORT OMPI_COMM_WORLD_RANK "
        "OMPI_MCA_orte_hnp_uri PMI_RANK PMIX_RANK PRTE_LAUNCHED JAX_COORDINATOR_PORT "
        "JAX_COORDINATOR_ADDRESS JAX_LOCAL_DEVICE_IDS JAX_PARTITION_INDEX"
    ).split()
    own = "SLURM_JOB_ID SLURM_JOB_NAME SLURM_ARRAY_TASK_ID SLURM_TMPDIR JAX_PLATFORMS".split()
    found = rank_environment(0, 2, 1234, None, dict.fromkeys((*outer, *own), "outer"))
    assert {name for name, value in found.items() if value == "outer"} == set(own)


@pytest.mark.parametrize("name", ["no_proxy", "no_grpc_proxy"])
def test_a_proxy_is_not_asked_for_the_coordinator(name):
    around = {"https_proxy": "http://proxy:1", name: "intranet"}
    assert rank_environment(0, 2, 1234, None, around)["no_grpc_proxy"] == "intranet,127.0.0.1"
    assert rank_environment(0, 2, 1234, None, {}).get("no_grpc_proxy") is None


POD = """
import jax, numpy as np
jax.distributed.initialize()
count = jax.device_count()
mesh = jax.make_mesh((count,), ("x",), axis_types=(jax.sharding.AxisType.Auto,))
spec = jax.sharding.PartitionSpec("x")
ones = jax.make_array_from_callback(
    (count,), jax.sharding.NamedSharding(mesh, spec), lambda at: np.ones(count, "float32")[at]
)
psum = jax.jit(jax.shard_map(
    lambda x: jax.lax.psum(x, "x"), mesh=mesh, in_specs=spec, out_specs=jax.sharding.PartitionSpec()
))
assert jax.process_index() == RANK
print("sum", float(psum(ones)[0]), jax.process_count(), jax.local_device_count())
"""


def test_jax_finds_the_pod(capfd, monkeypatch):
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:9")
    monkeypatch.setenv("OMPI_COMM_WORLD_RANK", "7")
    assert launch(script(POD), ranks=2, devices=2) == 0
    out, errors = capfd.readouterr()
    sums = [line for line in sorted(out.splitlines()) if "sum" in line]
    assert sums == [f"[{rank}] sum 4.0 2 2" for rank in range(2)], out + errors


@pytest.mark.slow
def test_a_rank_that_raises_does_not_wait_for_the_others_at_exit(capfd):
    """JAX's own shutdown would keep it, and what waits for it, for five minutes."""
    body = POD + "if RANK == 1: raise KeyError('lost')\nprint(psum(ones))"
    started = time.monotonic()
    assert launch(script(body), ranks=2, grace_seconds=0.7) == 1
    assert time.monotonic() - started < 60
    errors = capfd.readouterr().err.splitlines()
    assert errors[-2:] == [
        "[1] KeyError: 'lost'",
        "stepcache launch: rank 1 failed with exit code 1",
    ]


# ---- failing ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("fails", "code", "last"),
    [
        ("sys.exit(3)", 3, "rank 2 failed with exit code 3"),
        ("os._exit(4)", 4, "rank 2 failed with exit code 4"),
        ("sys.exit('bad')", 1, "rank 2 failed with exit code 1"),
        ("1 / 0", 1, "rank 2 failed with exit code 1"),
        ("os.kill(os.getpid(), signal.SIGKILL)", 137, "rank 2 was killed by SIGKILL"),
        ("os.kill(os.getpid(), signal.SIGSEGV)", 139, "rank 2 was killed by SIGSEGV"),
    ],
)
def test_one_that_fails_ends_the_others(capfd, fails, code, last):
    body = f"if RANK == 2:\n    print('why', file=sys.stderr)\n    {fails}\n{WAIT}"
    started = time.monotonic()
    assert launch(script(body), ranks=4, grace_seconds=0.2) == code
    assert time.monotonic() - started < 30
    errors = capfd.readouterr().err.splitlines()
    assert errors[-1] == f"stepcache launch: {last}"
    tail = errors[errors.index("stepcache launch: the last errors of rank 2:") + 1 : -1]
    assert tail[0] == "[2] why" and all(line.startswith("[2] ") for line in tail)


def test_the_tail_is_short_and_comes_last(capfd):
    body = """\
    if RANK == 1:
        for number in range(100):
            print(f"line {number}", file=sys.stderr)
        sys.exit(9)
    try:
        time.sleep(60)
    finally:
        print("noise", file=sys.stderr)
    """
    name = script("signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))\n" + textwrap.dedent(body))
    assert launch(name, ranks=3, grace_seconds=0.2) == 9
    errors = capfd.readouterr().err.splitlines()
    assert errors[-41:-1] == [f"[1] line {number}" for number in range(60, 100)]
    assert errors[-42:] and "[0] noise" in errors[:-42]


@pytest.mark.parametrize("end", ["os.kill(os.getpid(), 9)", "os._exit(6)"])
def test_the_first_that_fails_is_named_and_others_may_still_speak(capfd, end):
    """Rank 0 fails of what befell rank 1, and says so at once, or a little later."""
    body = f"if RANK == 1:\n    {end}\nraise ConnectionError('rank 1 is lost')"
    code = launch(script(PIPE + body), ranks=2)
    errors = capfd.readouterr().err
    assert "[0] ConnectionError: rank 1 is lost" in errors
    if "kill" in end:  # Where an exit code is as good as the other, the clock decides.
        assert code == 137
        assert errors.splitlines()[-1] == "stepcache launch: rank 1 was killed by SIGKILL"


def test_the_one_that_raised_is_named_though_it_is_slow_to_end(capfd):
    body = """\
    if RANK == 1:
        import atexit
        atexit.register(lambda: (time.sleep(1.0), print("later", file=sys.stderr)))
        pipe.close()
        raise KeyError("mine")
    time.sleep(0.2)
    os._exit(8)
    """
    assert launch(script(PIPE + textwrap.dedent(body)), ranks=2) == 1
    errors = capfd.readouterr().err.splitlines()
    assert "[1] KeyError: 'mine'" in errors
    assert errors[-1] == "stepcache launch: rank 1 failed with exit code 1"


def test_one_that_ignores_sigterm_is_killed(capfd):
    body = "signal.signal(signal.SIGTERM, signal.SIG_IGN)\nnote(os.getpid(), f'deaf{RANK}')\n"
    body += "while not os.path.exists('deaf0.pid'): time.sleep(0.01)\n"
    assert launch(script(f"{body}if RANK: sys.exit(2)\n{WAIT}"), ranks=2, grace_seconds=0.3) == 2
    errors = capfd.readouterr().err
    assert errors.index("did not end: SIGTERM") < errors.index("rank 0 did not end: SIGKILL")


# ---- being asked to end -------------------------------------------------------------------------

COUNTING = """
count = 0
def told(number, _):
    global count
    count += 1
    print("told", number, count)
    note(os.getpid(), f"told{RANK}")
    if number == signal.SIGTERM or not sys.argv[1:]:
        time.sleep(0.2)
        sys.exit(0 if "well" in sys.argv else 1)
signal.signal(signal.SIGINT, told)
signal.signal(signal.SIGTERM, told)
note(os.getpid(), f"ready{RANK}")
while True:
    time.sleep(1)
"""


@pytest.fixture
def hangup():
    """Sets what SIGHUP does, whatever started these tests (`nohup` has it ignored)."""
    before = signal.getsignal(signal.SIGHUP)
    yield lambda handler: signal.signal(signal.SIGHUP, handler)
    signal.signal(signal.SIGHUP, before)


def test_a_signal_that_is_ignored_stays_so(hangup):
    """As `nohup` wants it."""
    hangup(signal.SIG_IGN)
    told = "os.kill(os.getppid(), signal.SIGHUP); time.sleep(0.5)"
    assert launch(script(told), ranks=1) == 0


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_a_signal_is_passed_on_once(capfd, asking, hangup, number):
    hangup(signal.SIG_DFL)
    asking("ready0", "ready1", number)
    assert launch(script(COUNTING), ranks=2) == 128 + number
    out, errors = capfd.readouterr()
    told = signal.SIGTERM if number == signal.SIGHUP else number
    assert sorted(out.splitlines()) == [f"[{rank}] told {told} 1" for rank in range(2)]
    assert errors.splitlines()[-1] == f"stepcache launch: ended by {number.name}"


def test_ranks_that_end_well_when_asked_have_ended_well(asking):
    asking("ready0", "ready1", signal.SIGTERM)
    assert launch(script(COUNTING), ["well"], ranks=2) == 0


def test_a_second_interrupt_kills(asking):
    asking("ready0", "ready1", signal.SIGINT, "told0", "told1", signal.SIGINT)
    started = time.monotonic()
    assert launch(script(COUNTING), ["stay"], ranks=2, grace_seconds=60) == 130
    assert time.monotonic() - started < 30


def test_an_interrupt_that_only_some_follow_ends_all(asking):
    body = "if RANK: signal.signal(signal.SIGINT, signal.SIG_IGN)\n"
    body += "note(os.getpid(), f'ready{RANK}')\n" + WAIT
    asking("ready0", "ready1", signal.SIGINT)
    assert launch(script(body), ranks=2, grace_seconds=0.3) == 130


def test_handlers_are_given_back(asking):
    before = [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)]
    assert launch(script(""), ranks=1) == 0
    after = [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)]
    assert before == after


@pytest.mark.slow
def test_a_launcher_that_is_killed_leaves_nothing(place):
    """Neither ranks nor what they have started, though they ignore what can be ignored."""
    body = """\
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
    note(child.pid, f"child{RANK}")
    time.sleep(60)
    """
    with subprocess.Popen(command("-n", 2, script(body)), stdout=subprocess.DEVNULL) as launcher:
        try:
            when_there(place, 0, 1, "child0", "child1")
        finally:
            launcher.kill()
    assert_gone(place)


def test_what_ranks_leave_behind_ends_with_them(place):
    body = """\
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
    note(child.pid, f"child{RANK}")
    """
    assert launch(script(body), ranks=2) == 0
    assert_gone(place, seconds=0)


@pytest.mark.slow
def test_a_terminal(place):
    """Colours; and Ctrl-C, which the terminal sends to all in the foreground, comes once."""
    leader, follower = pty.openpty()
    launcher = subprocess.Popen(
        [sys.executable, "-c", TERMINAL, *command("-n", 2, script(COUNTING))],
        stdin=follower,
        stdout=follower,
        stderr=follower,
        env={name: value for name, value in os.environ.items() if name != "NO_COLOR"},
        start_new_session=True,
    )
    os.close(follower)
    with launcher:
        try:
            when_there(place, "ready0", "ready1")
            os.write(leader, b"\x03")
            shown = b""
            while b"ended by SIGINT" not in shown:
                shown += os.read(leader, 4096)
            assert launcher.wait(30) == 130
        finally:
            launcher.kill()
    os.close(leader)
    assert b"\x1b[36m[0]\x1b[0m told 2 1" in shown and b"\x1b[33m[1]\x1b[0m told 2 1" in shown
    assert shown.count(b"told") == 2


TERMINAL = """
import fcntl, os, signal, sys, termios
fcntl.ioctl(0, termios.TIOCSCTTY, 0)
signal.signal(signal.SIGINT, signal.SIG_DFL)
os.execv(sys.argv[1], sys.argv[1:])
"""


@pytest.mark.slow
def test_when_nobody_listens_any_more_ranks_end(place):
    body = "while True:\n    print('line')\n    time.sleep(0.01)"
    with subprocess.Popen(command("-n", 2, script(body)), stdout=subprocess.PIPE) as launcher:
        try:
            assert launcher.stdout is not None
            assert launcher.stdout.readline().endswith(b"] line\n")
            launcher.stdout.close()
            assert launcher.wait(30) == 128 + signal.SIGPIPE
        finally:
            launcher.kill()


# ---- what ranks write ---------------------------------------------------------------------------


def test_lines_are_whole_and_on_their_own_stream(capfd):
    body = """\
    for number in range(20):
        for part in (f"a{RANK}.", f"{number}", "\\n"):
            os.write(1 + number % 2, part.encode())
            time.sleep(0.002)
    os.write(1, b"no end")
    """
    assert launch(script(body), ranks=11) == 0
    out, errors = capfd.readouterr()
    for rank in range(11):
        mine = [line[5:] for line in out.splitlines() if line.startswith(f"[{rank:>2}] ")]
        assert mine == [f"a{rank}.{number}" for number in range(0, 20, 2)] + ["no end"]
        mine = [line[5:] for line in errors.splitlines() if line.startswith(f"[{rank:>2}] ")]
        assert mine == [f"a{rank}.{number}" for number in range(1, 20, 2)]
    assert len(out.splitlines()) == 11 * 11


def test_large_output(capfdbinary):
    body = """\
    data = b"".join(b"%d %d %s\\n" % (RANK, number, b"x" * 90) for number in range(20_000))
    for file in (1, 2):
        with open(file, "wb", closefd=False) as stream:
            stream.write(data)
    os.write(1, b"y" * 3_000_000)
    """
    assert launch(script(body), ranks=2) == 0
    out, errors = capfdbinary.readouterr()
    for rank in range(2):
        expected = [b"[%d] %d %d %s" % (rank, rank, number, b"x" * 90) for number in range(20_000)]
        long = b"[%d] %s" % (rank, b"y" * 3_000_000)
        begin = b"[%d] " % rank
        assert [line for line in out.splitlines() if line.startswith(begin)] == [*expected, long]
        assert [line for line in errors.splitlines() if line.startswith(begin)] == expected


def test_output_is_shown_at_once(capfd):
    """A rank goes on only when its line has been seen."""
    body = "print('first')\nwhile not os.path.exists('seen'): time.sleep(0.01)\nprint('second')"
    seen = []

    def look():
        while "first" not in "".join(seen):
            seen.append(capfd.readouterr().out)
            time.sleep(0.01)
        Path("seen").touch()

    thread = threading.Thread(target=look, daemon=True)
    thread.start()
    assert launch(script(body), ranks=1) == 0
    thread.join()
    assert "".join(seen) + capfd.readouterr().out == "[0] first\n[0] second\n"


def test_a_progress_bar_is_shown_in_its_last_state(capfd):
    body = """\
    for number in range(100):
        os.write(1, b"\\r%d%%" % number)
    os.write(1, b"\\r100%\\nnext\\r"); time.sleep(0.1); os.write(1, b"\\nlast\\r\\n")
    """
    assert launch(script(body), ranks=1) == 0
    assert capfd.readouterr().out == "[0] 100%\n[0] next\n[0] last\n"


# ---- used wrongly -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["-n", "2", "nowhere.py"], "nowhere.py"),
        (["-n", "2", "."], "a directory"),
        (["-n", "0", "script.py"], "0 is not in the range"),
        (["script.py"], "Missing option '-n'"),
        (["-n", "2"], "Missing argument 'SCRIPT'"),
        (["-n", "2", "--devices", "0", "script.py"], "0 is not in the range"),
        (["-n", "2", "--device", "1", "script.py"], "No such option"),
    ],
)
def test_what_makes_no_sense_is_said_at_once(arguments, says):
    script("")
    result = CliRunner().invoke(main, ["launch", *arguments])
    assert result.exit_code == 2 and says in result.output, result.output


def test_a_port_that_is_in_use():
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        with pytest.raises(StepCacheError, match=f"Port {port}"):
            launch(script(""), ranks=1, port=port)
    name = script("print(os.environ['JAX_COORDINATOR_ADDRESS'])")
    result = CliRunner().invoke(main, ["launch", "-n", "1", "--port", str(port), name])
    assert result.output == f"[0] 127.0.0.1:{port}\n"
