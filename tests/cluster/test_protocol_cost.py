"""What the processes of a pod ask of the coordination service does not grow with their number."""

import json
import os
import subprocess
import sys

import pytest

from tests.cluster.pods import ROOT

COUNTS = (8, 32)
AGREE_SECONDS, LOST_SECONDS = 7.0, 3.0  # As the benchmark has them.


@pytest.fixture(scope="module")
def costs():
    """Of each case, with few and with more ranks, as the benchmark counts them."""
    environment = dict(os.environ, JAX_PLATFORMS="cpu", STEPCACHE_DIR="off", NPROC="1")
    command = [sys.executable, "-m", "benchmarks.pod_protocol", "--quick", "--pod"]
    pods = [
        subprocess.Popen(
            [*command, str(count)], env=environment, cwd=ROOT, stdout=subprocess.PIPE, text=True
        )
        for count in COUNTS
    ]
    outputs = [pod.communicate(timeout=180)[0] for pod in pods]
    assert not any(pod.returncode for pod in pods), outputs
    few, more = ([json.loads(line) for line in output.splitlines()] for output in outputs)
    return {a["case"]: (a, b) for a, b in zip(few, more, strict=True)}


# Say, count, hear; twice. Who builds it hands out two things of two names; what was lowered once.
@pytest.mark.parametrize(
    ("case", "calls"), [("stored", 6), ("built by one", 10), ("built by one, code differs", 13)]
)
def test_a_new_key_takes_as_many_calls_and_bytes_of_a_rank(costs, case, calls):
    few, more = costs[case]
    assert calls <= more["mean_calls"] < calls + 1
    assert more["mean_bytes"] < 1.1 * few["mean_bytes"] < 5000, (few, more)


def test_a_quiet_pod_makes_no_calls(costs):
    """But for one that looks up the processes of the same machine, after the last meeting."""
    for each in costs["quiet"]:
        assert each["max_calls"] <= 1 and each["unanswered"] == 0


@pytest.mark.parametrize("case", ["late", "never comes", "lost"])
def test_who_waits_asks_once(costs, case):
    few, more = costs[case]
    assert few["unanswered"] == more["unanswered"] == 0
    assert more["mean_calls"] < few["mean_calls"] + 1 and more["mean_calls"] < 12, (few, more)
    assert more["mean_bytes"] < 1.3 * few["mean_bytes"] < 6000, (few, more)


def test_what_goes_wrong_is_known_in_time(costs):
    for each in costs["never comes"]:
        assert AGREE_SECONDS < each["seconds"] < AGREE_SECONDS + 3
    for each in costs["lost"]:
        assert LOST_SECONDS < each["seconds"] < LOST_SECONDS + 6
