"""The notebook: its code cells, in order, in a process of their own, as a kernel runs them."""

import json
import os
import subprocess
import sys
from pathlib import Path

NOTEBOOK = Path(__file__).parent.parent.parent / "examples" / "remote_tasks.ipynb"
RUN = """
import json, sys
for cell in json.load(sys.stdin)["cells"]:
    if cell["cell_type"] == "code":
        exec(compile("".join(cell["source"]), "a cell", "exec"), globals())
"""


def test_the_notebook_runs():
    text = NOTEBOOK.read_text()
    assert not any(cell.get("outputs") for cell in json.loads(text)["cells"])
    result = subprocess.run(
        [sys.executable, "-c", RUN],
        input=text,
        capture_output=True,
        text=True,
        timeout=120,
        env=os.environ,
    )
    assert result.returncode == 0, result.stderr
    assert "train_step" in result.stdout
