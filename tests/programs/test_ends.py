"""Processes that end while something is under way: as if there were nothing, and what was built is
stored.
"""

import os
import shutil
import subprocess
import sys

import pytest

from stepcache import jaxcompat

pytestmark = pytest.mark.skipif(
    not jaxcompat.PRIVATE_API, reason="programs are stored through JAX's private API"
)

SCRIPT = """
import os, sys, threading, time
import jax, numpy as np
import stepcache as sc
from stepcache import jaxcompat

when, how = sys.argv[1:]

def busy(seconds):
    limit = time.monotonic() + seconds
    while time.monotonic() < limit:
        pass

if when.startswith("preload"):
    load = jaxcompat.load_executable
    def load_slowly(data, devices):
        begun.set()
        busy(4) if when == "preload" else time.sleep(4)
        return load(data, devices)
    begun, jaxcompat.load_executable = threading.Event(), load_slowly

@sc.step
def step(x):
    for _ in range(20):
        x = jax.numpy.sin(x)
    return x

def work():
    if when.startswith("preload"):
        jax.devices()
        if how != "thread":  # Nothing is begun any more once the main thread has ended.
            assert begun.wait(20), "nothing is under way"
        return
    y = step(np.ones(8))
    if when == "loads":
        print(step.stats().loads, step.stats().compiles)

def end():
    if how == "sys.exit":
        sys.exit(3)
    if how == "exception":
        raise ValueError("the end")

def work_and_end():
    work()
    end()

if how == "thread":
    thread = threading.Thread(target=work)
    thread.start()  # The main thread ends first.
elif how == "sys.exit in a thread":
    thread = threading.Thread(target=lambda: (work(), sys.exit(4)))
    thread.start()
    thread.join()
elif how == "daemon":
    began = threading.Event()
    thread = threading.Thread(target=lambda: (work(), began.set(), busy(60)), daemon=True)
    thread.start()
    began.wait()
else:
    work_and_end()
"""
WHENS = ("first call", "preload", "preload that sleeps")
HOWS = ("end", "sys.exit", "exception", "thread", "sys.exit in a thread", "daemon")
SAMPLE = {("first call", "thread"), ("first call", "daemon"), ("preload", "exception")}


@pytest.fixture(scope="module")
def ended(tmp_path_factory):
    """Runs the script to its end, in a directory that is named."""
    file = tmp_path_factory.mktemp("script") / "script.py"
    file.write_text(SCRIPT)

    def run(directory, when, how):
        environment = dict(os.environ, STEPCACHE_DIR=str(directory), NPROC="8")
        command = [sys.executable, "-X", "dev", "-W", "ignore", str(file), when, how]
        return subprocess.run(
            command, env=environment, capture_output=True, text=True, timeout=100, check=False
        )

    return run


@pytest.fixture(scope="module")
def stored(ended, tmp_path_factory):
    """A directory that has the program of the script."""
    directory = tmp_path_factory.mktemp("stored") / "programs"
    done = ended(directory, "first call", "end")
    assert (done.returncode, done.stderr) == (0, "")
    return directory


CASES = [
    pytest.param(when, how, marks=() if (when, how) in SAMPLE else pytest.mark.slow)
    for when in WHENS
    for how in HOWS
]


@pytest.mark.sample(every=2)
@pytest.mark.parametrize(("when", "how"), CASES)
def test_a_process_ends_as_if_nothing_were_under_way(when, how, ended, stored, tmp_path):
    directory = tmp_path / "programs"
    if when != "first call":
        shutil.copytree(stored, directory)
    done = ended(directory, when, how)
    assert done.returncode == {"sys.exit": 3, "exception": 1}.get(how, 0), done.stderr
    if how == "exception":
        assert done.stderr.startswith("Traceback") and done.stderr.count("Traceback") == 1
        assert done.stderr.endswith("ValueError: the end\n"), done.stderr
    else:
        assert done.stderr == ""
    later = ended(directory, "loads", "end")
    assert (later.stdout, later.stderr) == ("1 0\n", ""), "what was to be stored is stored"
