"""The directory of stored programs: which one it is, and what is said where there is none."""

import os
import stat
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


def test_off_means_off():
    done = run_script(ONE_STEP + "print(step._engine.scope().cache.store())", "off")
    assert done.stdout.split() == ["2.0", "2.0", "0", "None"] and done.stderr == ""


@pytest.mark.slow
def test_the_directory_is_private_and_each_process_has_its_own_settings(tmp_path):
    """What another user's flags and settings compile is another program of the same directory."""
    directory = tmp_path / "new"
    flags = {"XLA_FLAGS": os.environ.get("XLA_FLAGS", "") + " --xla_cpu_enable_fast_min_max=true"}
    settings = [{}, flags, {"JAX_ENABLE_X64": "1"}, {"JAX_NUM_CPU_DEVICES": "2"}]
    loads = [
        run_script(ONE_STEP, str(directory), **each).stdout.split()[2] for each in settings * 2
    ]
    assert loads[:3] == ["0", "0", "0"] and loads[4:] == ["2"] * 4
    for path in (directory, *directory.rglob("*")):
        assert not stat.S_IMODE(path.stat().st_mode) & 0o077, path


@pytest.mark.slow
def test_jax_own_persistent_cache_goes_on_working(tmp_path):
    code = f"""
    import jax, numpy as np
    jax.config.update("jax_compilation_cache_dir", "{tmp_path / "jax"}")
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0)
    jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)
    import stepcache as sc
    step = sc.step(lambda x: x * 3 + 1)
    step(np.ones(8))
    print(step.stats().compiles)
    jax.jit(lambda x: x * 5)(np.ones(8))
    """
    for compiles in "10":
        assert run_script(code, str(tmp_path / "programs")).stdout.split() == [compiles]
    names = [path.name for path in (tmp_path / "jax").iterdir()]
    assert sum("lambda" in name and name.endswith("-cache") for name in names) == 1, "of plain jit"
