"""`stepcache launch`: real processes, under a time limit, of which none may be left."""

import os
import signal
import sys
import textwrap
import threading
import time
from pathlib import Path

import pytest
from click.testing import CliRunner

from stepcache.cli import main
from stepcache.pods.launch import launch, rank_environment

pytestmark = pytest.mark.timeout(90)

PRELUDE = """\
import os, pathlib, signal, sys, time
RANK = int(os.environ["SLURM_PROCID"])
pathlib.Path(f"{RANK}.part").write_text(str(os.getpid()))
os.rename(f"{RANK}.part", f"{RANK}.pid")
"""
WAIT = "time.sleep(60)"
ADDRESS = "127.0.0.1:1234"


@pytest.fixture(autouse=True)
def place(tmp_path, monkeypatch):
    """A directory of its own. All processes that were noted in it must be gone after the test."""
    monkeypatch.setattr("stepcache.pods.launch.GRACE_SECONDS", 0.3)
    monkeypatch.chdir(tmp_path)
    yield tmp_path
    for path in tmp_path.glob("*.pid"):
        with pytest.raises(ProcessLookupError):
            os.kill(int(path.read_text()), 0)


def script(body: str) -> str:
    Path("script.py").write_text(PRELUDE + textwrap.dedent(body), encoding="utf-8")
    return "script.py"


@pytest.fixture
def asking(place):
    """Sends a signal to the launcher, this process, when all of some ranks are there."""
    threads = []

    def ask(ranks: int, number: int):
        def run():
            while not all((place / f"{rank}.pid").exists() for rank in range(ranks)):
                time.sleep(0.01)
            os.kill(os.getpid(), number)

        threads.append(threading.Thread(target=run, daemon=True))
        threads[-1].start()

    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield ask
    for thread in threads:
        thread.join(10)
    assert signal.signal(signal.SIGINT, before) is signal.default_int_handler


# ---- what ranks are told ------------------------------------------------------------------------


def test_arguments_go_to_the_script_untouched(capfd):
    name = script("print('rank', RANK, 'of', os.environ['SLURM_NTASKS'], sys.argv)")
    arguments = ["-n", "9", "--devices", "x", "--", "-h", "--unknown=1", ""]
    result = CliRunner().invoke(main, ["launch", "-n", "3", name, *arguments])
    assert result.exit_code == 0, result.output
    expected = [f"[{rank}] rank {rank} of 3 {[name, *arguments]}" for rank in range(3)]
    assert sorted(result.output.splitlines()) == expected


def test_modules(place, capfd):
    (place / "kit").mkdir()
    (place / "kit/__main__.py").write_text("import sys; print(__spec__.name, sys.argv[1:])")
    assert launch("kit", ["-m", "x"], ranks=2, module=True) == 0
    lines = sorted(capfd.readouterr().out.splitlines())
    assert lines == [f"[{rank}] kit.__main__ ['-m', 'x']" for rank in range(2)]
    assert launch("kit.nowhere", ranks=1, module=True) == 1
    assert "No module named kit.nowhere" in capfd.readouterr().err


def test_variables_are_those_that_jax_reads():
    assert rank_environment(2, 4, ADDRESS, None, {"HOME": "/home/me"}) == {
        "HOME": "/home/me",
        "SLURM_JOB_ID": "0",
        "SLURM_STEP_NODELIST": "localhost",
        "SLURM_NTASKS": "4",
        "SLURM_PROCID": "2",
        "SLURM_LOCALID": "2",
        "JAX_COORDINATOR_ADDRESS": ADDRESS,
        "JAX_COORDINATOR_BIND_ADDRESS": ADDRESS,
        "JAX_LOCAL_DEVICE_IDS": "2",
        "no_grpc_proxy": "127.0.0.1",
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
    found = rank_environment(1, 2, ADDRESS, devices, around)
    assert found.get("JAX_NUM_CPU_DEVICES") == expected
    assert found["JAX_LOCAL_DEVICE_IDS"] == ("3,4,5" if devices else "1")


def test_an_outer_job_is_not_mistaken_for_this_one():
    slurm = "SLURM_STEP_NODELIST SLURM_NTASKS SLURM_PROCID SLURM_LOCALID".split()
    others = "JAX_COORDINATOR_ADDRESS JAX_LOCAL_DEVICE_IDS OMPI_MCA_orte_hnp_uri".split()
    own = "SLURM_JOB_ID SLURM_JOB_NAME SLURM_TMPDIR JAX_PLATFORMS".split()
    around = dict.fromkeys((*slurm, *others, *own), "outer")
    found = rank_environment(0, 2, ADDRESS, None, around)
    assert {name for name, value in found.items() if value == "outer"} == set(own)


POD = """
import jax, numpy as np
import stepcache as sc
jax.distributed.initialize()
mesh = jax.make_mesh((jax.device_count(),), ("data",))
total = sc.step(lambda batch: batch.sum(), batch="batch")
with sc.Session(mesh):
    assert jax.process_index() == RANK
    print("sum", float(total(np.ones(2, "f4"))), jax.process_count(), jax.local_device_count())
    if len(sys.argv) > 1 and RANK == 1:
        raise KeyError("mine")
    total(np.ones(2, "f4"))
"""


def test_jax_finds_the_pod(capfd, monkeypatch):
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:9")
    monkeypatch.setenv("OMPI_MCA_orte_hnp_uri", "1.0;tcp://10.0.0.1:1")
    assert launch(script(POD), ranks=2, devices=2) == 0
    out, errors = capfd.readouterr()
    sums = [line for line in sorted(out.splitlines()) if "sum" in line]
    assert sums == [f"[{rank}] sum 4.0 2 2" for rank in range(2)], out + errors


@pytest.mark.slow
def test_a_rank_that_raises_ends_the_pod(capfd, monkeypatch):
    started = time.monotonic()
    monkeypatch.setattr("stepcache.pods.launch.GRACE_SECONDS", 20.0)
    assert launch(script(POD), ["fail"], ranks=2) == 1
    assert time.monotonic() - started < 40
    errors = capfd.readouterr().err
    assert "[1] KeyError: 'mine'" in errors and "rank 1 of the pod is lost: ended by" in errors


# ---- failing ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("fails", "code"),
    [
        ("sys.exit(3)", 3),
        ("sys.exit('bad')", 1),
        ("1 / 0", 1),
        ("os.kill(os.getpid(), signal.SIGKILL)", 137),
        ("os.kill(os.getpid(), signal.SIGSEGV)", 139),
    ],
)
def test_one_that_fails_ends_the_others(capfd, fails, code):
    body = f"if RANK == 2:\n    print('why', file=sys.stderr)\n    {fails}\n{WAIT}"
    started = time.monotonic()
    assert launch(script(body), ranks=4) == code
    assert time.monotonic() - started < 30
    errors = capfd.readouterr().err.splitlines()
    ended = f"rank 2 ended with {code if code < 128 else 128 - code}"
    assert f"stepcache launch: {ended}; the others have 0.3 s" in errors and "[2] why" in errors


def test_one_that_ignores_sigterm_is_killed():
    body = "signal.signal(signal.SIGTERM, signal.SIG_IGN)\nif RANK == 1: sys.exit(5)\n" + WAIT
    assert launch(script(body), ranks=2) == 5


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_is_passed_on_once(capfd, asking, number):
    body = f"""\
    def note(number, _):
        print("got", number)
        sys.exit(7)
    signal.signal({int(number)}, note)
    {WAIT}
    """
    asking(2, number)
    assert launch(script("import signal\n" + textwrap.dedent(body)), ranks=2) == 7
    got = sorted(line for line in capfd.readouterr().out.splitlines() if "got" in line)
    assert got == [f"[{rank}] got {int(number)}" for rank in range(2)]


# ---- what ranks write ---------------------------------------------------------------------------


def test_lines_are_whole_and_on_their_own_stream(capfd):
    body = """\
    for number in range(200):
        print("o" * 100, flush=True)
        print("e" * 100, file=sys.stderr, flush=True)
    print("no newline", end="")
    """
    assert launch(script(body), ranks=3) == 0
    out, errors = capfd.readouterr()
    for rank in range(3):
        assert out.splitlines().count(f"[{rank}] {'o' * 100}") == 200
        assert errors.splitlines().count(f"[{rank}] {'e' * 100}") == 200
        assert f"[{rank}] no newline" in out.splitlines()


def test_rank_0_has_the_standard_input(monkeypatch, place, capfd):
    (place / "input").write_text("hello\n")
    with (place / "input").open() as file:
        before = os.dup(0)
        os.dup2(file.fileno(), 0)
        try:
            assert launch(script("print(RANK, repr(sys.stdin.read()))"), ranks=2) == 0
        finally:
            os.dup2(before, 0)
            os.close(before)
    assert sorted(capfd.readouterr().out.splitlines()) == ["[0] 0 'hello\\n'", "[1] 1 ''"]


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["-n", "2", "nothing.py"], "can't open file"),
        (["-n", "0", "script.py"], "0 is not in the range"),
        (["script.py"], "Missing option '-n'"),
    ],
)
def test_what_makes_no_sense_is_said_at_once(arguments, says):
    result = CliRunner().invoke(main, ["launch", *arguments])
    assert result.exit_code == 2 and says in result.output


def test_the_interpreter_is_this_one(capfd):
    assert launch(script("print(sys.executable)"), ranks=1) == 0
    assert capfd.readouterr().out.strip() == f"[0] {sys.executable}"
