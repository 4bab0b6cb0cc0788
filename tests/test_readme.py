"""What the README shows is what happens."""

import contextlib
import io
import json
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text(encoding="utf-8")


def found(pattern: str, text: str) -> tuple:
    match = re.search(pattern, text, re.S)
    assert match, f"nothing matches {pattern}"
    return match.groups()


def test_the_example_prints_what_the_readme_says():
    code, printed = re.search(
        r"```python\n(.*?)```\n\nprints\n\n```\n(.*?)```", README, re.S
    ).groups()
    output = io.StringIO()
    with contextlib.redirect_stdout(output):
        exec(compile(code, "README.md", "exec"), {})
    assert output.getvalue() == printed
    assert len([line for line in code.splitlines() if line.strip()]) <= 16


@pytest.mark.parametrize("result", sorted((ROOT / "benchmarks" / "results").glob("*.json")))
def test_results_are_of_real_runs(result):
    record = json.loads(result.read_text())
    assert record["settings"]["rounds"] >= 20 and record["rows"]


def test_the_figures_are_those_of_a_result():
    """Each ratio in the README's table stands in the result that the table says it is from."""
    version = found(r"Python 3\.11\.\d+, jax (\d+(?:\.\d+)+)", README)[0]
    path = ROOT / "benchmarks" / "results" / f"dispatch-cpu-jax{version}.json"
    rows = json.loads(path.read_text())["rows"]
    measured = {row["case"]: row["ratio"] for row in rows if row["contender"] == "stepcache"}
    table = re.findall(r"^\| (1 leaf|[^|]* leaves[^|]*) \| [\d.,]+ \| ([\d.]+) ×", README, re.M)
    assert dict(table) == {case: f"{ratio:.3f}" for case, ratio in measured.items()}
