"""The directory of stored programs: which one it is, and what is said where there is none."""

import os
import subprocess
import sys
import textwrap
from pathlib import Path

import numpy as np
import pytest

import stepcache as sc
from stepcache import jaxcompat
from stepcache.storage.disk_store import ROOT

pytestmark = pytest.mark.skipif(
    not jaxcompat.CAN_STORE, reason="programs are stored through JAX's private API"
)


def run_script(code: str, directory: str, **environment):
    environment = dict(os.environ, STEPCACHE_DIR=directory) | environment
    return subprocess.run(
        [sys.executable, "-W", "always", "-c", textwrap.dedent(code)],
        env=environment,
        check=True,
        capture_output=True,
        text=True,
        timeout=120,
    )


ONE_STEP = """
import numpy as np, stepcache as sc
step = sc.step(lambda x: x * 2)
print(step(np.ones(8))[0], step(np.ones(4))[0], step.stats().loads)
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("place", "said"),
    [
        ("open", "chmod"),
        ("~nobody-of-this-name/programs", "No such user"),
        ("gs://bucket/programs", "and not a URL"),
        ("file:///tmp/programs", "and not a URL"),
    ],
)
def test_a_directory_that_cannot_be_used_is_said_and_nothing_fails(
    place, said, tmp_path, monkeypatch
):
    empty = tmp_path / "open"
    empty.mkdir()
    empty.chmod(0o777)
    monkeypatch.chdir(empty)
    directory = str(empty) if place == "open" else place
    done = run_script(ONE_STEP, directory, PYTHONPATH=str(Path(sc.__file__).parent.parent))
    assert done.stdout.split() == ["2.0", "2.0", "0"]
    assert done.stderr.count("not kept on disk") == 1 and said in done.stderr, done.stderr
    with pytest.raises(sc.CacheDirectoryError, match=said):
        sc.ProgramCache(directory)
    assert not list(empty.iterdir())


def test_a_user_without_a_home_is_told_so(monkeypatch):
    monkeypatch.delenv("STEPCACHE_DIR")
    monkeypatch.setattr(os.path, "expanduser", lambda path: path)  # As where nobody knows the user.
    with pytest.warns(
        sc.StepCacheWarning, match=r"no home directory(.|\n)*STEPCACHE_DIR"
    ) as warned:
        assert sc.ProgramCache().store() is None
    (said,) = warned
    assert "STEPCACHE_DIR" in str(said.message) and "No such user" not in str(said.message)


def test_a_relative_directory_is_that_of_the_start(tmp_path, monkeypatch):
    """Scripts change their directory, as those that Hydra runs do."""
    start, later = tmp_path / "start", tmp_path / "later"
    start.mkdir()
    later.mkdir()
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("STEPCACHE_DIR", "programs")
    for arguments in ((), ("programs",), ("~/start/programs",)):
        monkeypatch.chdir(start)
        cache = sc.ProgramCache(*arguments)
        assert cache.store() is not None
        monkeypatch.chdir(later)
        with sc.Session(cache=cache):
            sc.step(lambda x: x * 2)(np.ones(3, np.float32))
        cache.flush()
    assert [*start.iterdir()] == [start / "programs"] and not [*later.iterdir()]
    assert [*(start / "programs" / ROOT / "runs").iterdir()]
