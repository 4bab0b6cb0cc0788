"""What the last runs of a script used is loaded before the steps are called; a hint, never a proof."""

import json
import os
import subprocess
import sys
import textwrap
import threading
import time

import jax
import numpy as np
import pytest

import stepcache as sc
from stepcache import jaxcompat
from stepcache.programs import prediction
from stepcache.programs.prediction import Prediction, Predictions, Preloader, prediction_name
from stepcache.storage.disk_store import DiskStore

pytestmark = pytest.mark.skipif(
    not jaxcompat.CAN_STORE, reason="programs are stored through JAX's private API"
)

SCRIPT = """
import json, os, sys, time
import numpy as np
import jax
import stepcache as sc

steps = {{n: sc.step(lambda x, n=n: jax.numpy.sin(x) * n) for n in (1, 2, 3)}}
store = sc.current_session().cache.store()
preloader, loads = store.preloader, []
load = jaxcompat_load = sc.jaxcompat.load_executable

def noted(data, devices):
    loads.append(len(loads))
    return load(data, devices)

sc.jaxcompat.load_executable = noted
{body}
"""


def run(directory, body, *, code=0):
    """Runs a script in a process of its own; what it has printed as JSON."""
    script = directory / "script.py"
    script.write_text(textwrap.dedent(SCRIPT).format(body=textwrap.dedent(body)))
    environment = dict(os.environ, STEPCACHE_DIR=str(directory / "programs"), NPROC="8")
    done = subprocess.run(
        [sys.executable, "-W", "ignore", str(script)],
        env=environment,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert (done.returncode, done.stderr) == (code, ""), done.stderr
    return [json.loads(line) for line in done.stdout.splitlines()]
