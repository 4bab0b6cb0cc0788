"""Training scripts as people write them, in `scripts/`: each runs as it is, on two processes.

A pod runs one after the other, twice over one directory of programs. Both runs print the losses
that the same scripts print with `jax.jit` in one process; the second compiles and traces nothing,
and nothing is said or warned of in either. A few of the scripts run by default, all with `-m slow`.
"""

import functools
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from tests.cluster.pods import ROOT, run_pod, succeeded

SCRIPTS = Path(__file__).parent / "scripts"
PLACES = [str(SCRIPTS), str(ROOT / "tests" / "scripts")]  # Models are shared with those.
NAMES = sorted(path.stem for path in SCRIPTS.glob("*.py"))
SAMPLE = ["loggers"]
SETS = {
    "a sample": ("cache", SAMPLE),
    "the others": ("cache", [name for name in NAMES if name not in SAMPLE]),
    "a directory of each rank": ("cache{rank}", NAMES),
}
"""Of scripts that one pod runs: with which `STEPCACHE_DIR`, and their names."""
RUN = """
import importlib, os, sys, traceback
jax.distributed.initialize = lambda *_, **__: None
sys.path[:0] = {scripts!r}
def run(name, rank):
    print("script", name, flush=True)
    sys.argv = [name + ".py"]
    if name == "command_line":
        sys.argv += ["--process-id", str(rank)]
    try:
        module = importlib.import_module(name)
        if hasattr(module, "main"):
            module.main()
    except BaseException:
        print("failed", name, traceback.format_exc().replace(chr(10), " | "), flush=True)
        raise
    finally:
        print("end", name, flush=True)
"""
POD = """
import json, logging, warnings
from jax.experimental import multihost_utils
from stepcache.events import BuildFailed, Built
warnings.simplefilter("error")
events, alarms = [], []
sc.recorder.subscribe(events.append)
class Alarms(logging.Handler):
    def emit(self, record):
        text = record.getMessage()
        if "takes long" not in text and "waiting for" not in text:  # On a busy machine.
            alarms.append(text)
logging.getLogger("stepcache").addHandler(Alarms(logging.WARNING))
def seen(kind):
    return [event for event in events if isinstance(event, kind)]
for name in {names!r}:
    multihost_utils.sync_global_devices(name)
    events.clear()
    alarms.clear()
    run(name, RANK)
    sc.current_session().cache.flush()
    record = dict(
        built=[f"{{event.step}}: {{event.miss}}" for event in seen(Built)],
        alarms=[*alarms, *map(str, seen(BuildFailed))],
    )
    say("record", name, json.dumps(record))
"""
PLAIN = """
import jax
from tests.cluster import plain_jit
plain_jit.install()
"""


def losses(output: str, name: str) -> list[float]:
    """The numbers that a script has printed behind the word "loss"."""
    _, _, said = output.partition(f"script {name}\n")
    said, _, _ = said.partition(f"end {name}\n")
    return [float(number) for number in re.findall(r"loss (-?\d+\.\d+)", said)]


def record(output: str, name: str) -> dict:
    (found,) = re.findall(rf"^record {name} (.*)$", output, flags=re.MULTILINE)
    return json.loads(found)


def run_plainly(directory: Path, names: list[str]) -> str:
    """What the scripts print with `jax.jit`, in one process."""
    script = PLAIN + RUN.format(scripts=PLACES) + f"\nfor name in {names!r}:\n    run(name, 0)"
    done = subprocess.run(
        [sys.executable, "-c", script],
        env=os.environ | {"JAX_PLATFORMS": "cpu", "PYTHONPATH": str(ROOT)},
        cwd=directory,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    return done.stdout


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """Of a set of scripts: what they print with `jax.jit`, and two runs of a pod."""

    @functools.cache
    def runs(which):
        cache, names = SETS[which]
        directory = tmp_path_factory.mktemp("scripts")
        script = RUN.format(scripts=PLACES) + POD.format(names=names)
        cache = directory / cache
        pods = [succeeded(run_pod(directory, script, cache=cache, limit=180)) for _ in range(2)]
        return run_plainly(directory, names), *pods

    return runs


CASES = [
    pytest.param(each, name, marks=() if each == "a sample" else pytest.mark.slow)
    for each, (_, names) in SETS.items()
    for name in names
]


@pytest.mark.slow
@pytest.mark.parametrize(("which", "name"), CASES)
def test_a_script_on_two_ranks(runs, which, name):
    plain, cold, warm = runs(which)
    expected = losses(plain, name)
    assert len(expected) > 2
    np.testing.assert_allclose(losses(cold[0].output, name), expected, rtol=1e-4, atol=2e-5)
    assert losses(warm[0].output, name) == losses(cold[0].output, name)
    for rank in (*cold, *warm):
        found = record(rank.output, name)
        assert not found["alarms"], found
    assert any(record(rank.output, name)["built"] for rank in cold)
    for rank in warm:
        found = record(rank.output, name)
        assert not found["built"], found["built"]
