"""The example of a pod that goes on without one of its processes, which checks itself, too."""

import os
import re
import subprocess
import sys

import pytest

from tests.cluster.pods import HEARTBEAT_SECONDS, ROOT


@pytest.mark.slow
def test_four_lose_one_and_two_go_on(tmp_path):
    environment = os.environ | {"TMPDIR": str(tmp_path), "PYTHONPATH": str(ROOT), "NPROC": "4"}
    del environment["STEPCACHE_DIR"]
    example = subprocess.run(
        [sys.executable, str(ROOT / "examples/pod.py")],
        env=environment,
        cwd=tmp_path,
        capture_output=True,
        text=True,
        encoding="utf-8",
        timeout=180,
    )
    output = f"{example.stdout}\n{example.stderr}"
    assert example.returncode == 0, output
    lost = re.findall(r"^\[(\d)\] lost ranks \[2\] after (?:29|30) steps", output, re.MULTILINE)
    assert sorted(lost) == ["0", "1", "3"], output
    assert "rank 2 of 4 is killed; 2 processes go on from step 24" in output
    assert "the losses of all 60 steps are those of the undisturbed run" in output
    assert "the restarted processes have compiled nothing" in output
    seconds = re.search(r"^([\d.]+) s from the kill to the error of the last", output, re.MULTILINE)
    assert seconds and float(seconds[1]) < HEARTBEAT_SECONDS / 4, output
    processes = ["ps", "-A", "-ww", "-o", "args="]  # The arguments of each rank name its directory.
    running = subprocess.run(processes, capture_output=True, text=True, check=True).stdout
    assert str(tmp_path) not in running, running
