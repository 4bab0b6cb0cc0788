"""Many processes that start at once over one empty directory: each program is compiled once.

As those of MPI, of xdist, or of a sweep. A process that is killed keeps nobody waiting.
"""

import os
import signal
import subprocess
import sys
import time

import pytest

from stepcache import jaxcompat

pytestmark = pytest.mark.skipif(
    not jaxcompat.CAN_STORE, reason="programs are stored through JAX's private API"
)

SCRIPT = """
import os, sys, time
import jax, numpy as np
import stepcache as sc
from stepcache.jaxcompat import hooks

kind, go = sys.argv[1], sys.argv[2]
compile_it = hooks.compiler.backend_compile_and_load

def slowly(*args, **options):
    print("compiles", flush=True)
    if kind == "killed":
        time.sleep(600)
    time.sleep(0.3)  # So that the others have to wait.
    return compile_it(*args, **options)

names = {f"step_{n}" for n in range(3)}
compile_all = hooks.compiler.compile_or_get_cached
hooks.compiler.backend_compile_and_load = (
    lambda backend, module, *rest, **options: (
        slowly if "step_" in str(module.operation.attributes["sym_name"]) else compile_it
    )(backend, module, *rest, **options)
)

def step_0(x):
    return x * 2
def step_1(x):
    return jax.numpy.sin(x).sum()
def step_2(x):
    return x @ x.T

steps = [sc.step(each) for each in (step_0, step_1, step_2)]
jax.devices()
print("ready", flush=True)
while not os.path.exists(go):
    time.sleep(0.002)
outputs = [np.asarray(step(np.ones((3, 4), np.float32))).sum().item() for step in steps]
counts = [step.stats() for step in steps]
print(*(round(each, 3) for each in outputs))
print(sum(each.compiles for each in counts), sum(each.loads for each in counts), flush=True)
"""


@pytest.fixture
def begin(tmp_path):
    """Begins a process of a kind; all go on once the file `go` is there."""
    script, processes = tmp_path / "script.py", []
    script.write_text(SCRIPT)

    def begin(kind="plain", go="go"):
        # One thread each: fifty processes share few cores.
        flags = "--xla_cpu_multi_thread_eigen=false --xla_backend_optimization_level=0"
        environment = dict(os.environ, STEPCACHE_DIR=str(tmp_path / "programs"), XLA_FLAGS=flags)
        environment |= {"JAX_NUM_CPU_DEVICES": "1", "OPENBLAS_NUM_THREADS": "1", "NPROC": "2"}
        process = subprocess.Popen(
            [sys.executable, str(script), kind, str(tmp_path / go)],
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        processes.append(process)
        return process

    yield begin
    for process in processes:
        process.kill()
        process.wait()


@pytest.mark.parametrize("count", [6, pytest.param(50, marks=pytest.mark.slow)])
def test_each_program_is_compiled_once(count, begin, tmp_path):
    running = [begin() for _ in range(count)]
    assert [process.stdout.readline() for process in running] == ["ready\n"] * count
    (tmp_path / "go").touch()
    outputs = [process.communicate(timeout=280)[0].splitlines() for process in running]
    assert [process.returncode for process in running] == [0] * count, outputs
    assert {tuple(lines[-2].split()) for lines in outputs} == {("24.0", "10.098", "36.0")}
    compiles, loads = zip(*(map(int, lines[-1].split()) for lines in outputs), strict=True)
    assert (sum(compiles), sum(loads)) == (3, 3 * count - 3), outputs
    assert sum(lines.count("compiles") for lines in outputs) == 3


def test_another_takes_over_from_one_that_is_killed_while_it_compiles(begin, tmp_path):
    killed = begin("killed", "at once")
    assert killed.stdout.readline() == "ready\n"
    (tmp_path / "at once").touch()
    assert killed.stdout.readline() == "compiles\n"
    others = [begin() for _ in range(2)]
    assert [process.stdout.readline() for process in others] == ["ready\n"] * 2
    (tmp_path / "go").touch()
    time.sleep(0.5)
    assert [process.poll() for process in others] == [None, None], "they wait for the first"
    killed.send_signal(signal.SIGKILL)
    started = time.monotonic()
    outputs = [process.communicate(timeout=60)[0].splitlines() for process in others]
    assert time.monotonic() - started < 20
    assert [process.returncode for process in others] == [0, 0], outputs
    counts = [tuple(map(int, lines[-1].split())) for lines in outputs]
    assert sum(compiles for compiles, _ in counts) == 3 and sum(loads for _, loads in counts) == 3
