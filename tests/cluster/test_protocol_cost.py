"""What the processes of a pod ask of the coordination service does not grow with their number."""

import itertools
import json
import os
from collections import defaultdict

import pytest

from benchmarks.pod_protocol import QUICK
from tests.cluster.pods import ROOT
from tests.forking import start

pytestmark = pytest.mark.slow  # Five pods of some dozen processes.
BENCHMARK = ROOT / "benchmarks" / "pod_protocol.py"
COUNTS = (8, 24)
PODS = (("keys", "quiet", "late"), ("never comes", "lost"))


@pytest.fixture(scope="module")
def costs(tmp_path_factory):
    """Of each case, with few and with more ranks, as the benchmark counts them.

    The pods mostly wait, and run at the same time.
    """
    directory = tmp_path_factory.mktemp("costs")
    environment = dict(os.environ, JAX_PLATFORMS="cpu", STEPCACHE_DIR="off", NPROC="1")
    environment["PYTHONPATH"] = str(ROOT)
    pods = {}
    for cases, count in itertools.product(PODS, COUNTS):
        said, errors = (directory / f"{count}-{cases[0]}.{name}" for name in ("txt", "errors"))
        arguments = ["--quick", "--pod", str(count), "--cases", *cases]
        streams = {"stdout": said, "stderr": errors}
        pods[said] = start(BENCHMARK, arguments, env=environment, cwd=ROOT, **streams), errors
    found = defaultdict(list)
    for said, (pod, errors) in pods.items():
        assert pod.wait() == 0, errors.read_text()
        for line in said.read_text().splitlines():
            cost = json.loads(line)
            found[cost["case"]].append(cost)
    return found


# Come, say, count, hear; who takes the program asks for its size and for a piece, and says so.
@pytest.mark.parametrize(("case", "calls"), [("stored", 4), ("built by one", 7)])
def test_a_new_key_takes_as_many_calls_and_bytes_of_a_rank(costs, case, calls):
    few, more = costs[case]
    assert calls <= more["mean_calls"] < calls + 1
    assert more["mean_bytes"] < 1.1 * few["mean_bytes"] < 5000, (few, more)


def test_a_quiet_pod_makes_next_to_no_calls(costs):
    """Each rank waits for a tick every twenty seconds, which the lowest one makes."""
    for each in costs["quiet"]:
        assert each["max_calls"] <= 3 and each["unanswered"] <= 1


@pytest.mark.parametrize("case", ["late", "never comes", "lost"])
def test_who_waits_asks_once(costs, case):
    few, more = costs[case]
    assert few["unanswered"] == more["unanswered"] == 0
    assert more["mean_calls"] < few["mean_calls"] + 1 and more["mean_calls"] < 12, (few, more)
    assert more["mean_bytes"] < 1.3 * few["mean_bytes"] < 6000, (few, more)


def test_what_goes_wrong_is_known_in_time(costs):
    for each in costs["never comes"]:
        assert QUICK.agree < each["seconds"] < QUICK.agree + 3
    for each in costs["lost"]:
        assert QUICK.lost < each["seconds"] < QUICK.lost + 6
