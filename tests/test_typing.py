import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parent.parent


def test_public_api_types():
    """Unneeded `pyright: ignore` comments are errors, so a wrong call that passes is found."""
    cases = Path(__file__).parent / "typing_cases.py"
    command = [sys.executable, "-m", "pyright", "--pythonpath", sys.executable, str(cases)]
    result = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=280)
    assert result.returncode == 0, result.stdout + result.stderr
