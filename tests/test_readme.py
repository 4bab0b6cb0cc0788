"""What the README shows is what happens."""

import contextlib
import io
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text(encoding="utf-8")


def test_the_example_prints_what_the_readme_says():
    code, printed = re.search(
        r"```python\n(.*?)```\n\nprints\n\n```\n(.*?)```", README, re.S
    ).groups()
    output = io.StringIO()
    with contextlib.redirect_stdout(output):
        exec(compile(code, "README.md", "exec"), {})
    assert output.getvalue() == printed
    assert len([line for line in code.splitlines() if line.strip()]) <= 16


def test_the_language_model_explains_what_the_readme_says(tmp_path):
    """It is ended as soon as it has: training takes a while."""
    environment = {"JAX_PLATFORMS": "cpu", "STEPCACHE_DIR": str(tmp_path / "programs")}
    with subprocess.Popen(
        [sys.executable, "-u", "examples/char_lm.py"],
        cwd=ROOT,
        env={**os.environ, **environment, "COLUMNS": "140"},
        stdout=subprocess.PIPE,
        text=True,
    ) as process:
        lines = []
        for line in process.stdout:
            lines.append(line)
            if line.endswith(" moved.\n"):
                break
        process.kill()
    assert f"prints before its first step:\n\n```\n{''.join(lines)}```" in README


# Each of these is a dozen fresh processes, and minutes.
ROUNDS = {
    "communication": 5,
    "restart": 5,
    "pod_start": 7,
    "small_steps": 5,
    "pod_protocol": 5,
}
ROUNDS |= {"served": 7, "padding": 5, "remote_cache": 2, "remote": 15}
ROUNDS |= {"accelerator": 3}  # Its starts; few minutes of a GPU have to do.


@pytest.mark.parametrize("result", sorted((ROOT / "benchmarks" / "results").glob("*.json")))
def test_results_are_of_real_runs(result):
    record = json.loads(result.read_text())
    assert record["settings"]["rounds"] >= ROUNDS.get(record["benchmark"], 20)
    assert record["rows"] or record["figures"]
