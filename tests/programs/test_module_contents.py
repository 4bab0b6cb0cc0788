"""What files of installed modules hold is kept between processes, and not believed too long."""

import json
import os
import shlex
import subprocess
import sys
import time
import types
from pathlib import Path

import pytest

from stepcache.fingerprint import module_contents
from stepcache.storage.content_index import ContentIndex

SOURCE = b"COUNT = 0\ndef add():\n    global COUNT, other\n    COUNT += 1\n"


@pytest.fixture
def new_process(monkeypatch):
    """Forgets what this process knows, as a new one does not know it; then learns these rows."""

    def start(rows=None):
        monkeypatch.setattr(module_contents, "_contents", {})
        monkeypatch.setattr(module_contents, "_rows", {})
        monkeypatch.setattr(module_contents, "_is_new", False)
        module_contents.learn(rows or {})

    start()
    return start


@pytest.fixture
def module(tmp_path, monkeypatch):
    """A loaded module whose file was last written to some time ago."""
    path = tmp_path / "library.py"
    path.write_bytes(SOURCE)
    found = types.ModuleType("library")
    found.__file__ = str(path)
    monkeypatch.setitem(sys.modules, "library", found)
    monkeypatch.setattr(module_contents, "_SETTLED_NS", 0)
    time.sleep(0.02)
    return path


def test_a_later_process_does_not_read_the_file(module, new_process, monkeypatch):
    first = module_contents.content_of("library")
    assert first.varying == {"COUNT", "other"}
    rows = module_contents.found()
    assert module_contents.found() is None  # Nothing was added since.
    new_process(json.loads(json.dumps(rows)))
    monkeypatch.setattr(
        module_contents.Path, "read_bytes", lambda path: pytest.fail(f"read {path}")
    )
    assert module_contents.content_of("library") == first
    assert module_contents.found() is None


def _same_size_and_time(path):
    before = path.stat()
    path.write_bytes(SOURCE.replace(b"+= 1", b"+= 2"))
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))


def _other_file(path):
    before = path.stat()
    new = path.with_suffix(".new")
    new.write_bytes(SOURCE.replace(b"+= 1", b"+= 2"))
    os.utime(new, ns=(before.st_atime_ns, before.st_mtime_ns))
    new.replace(path)


@pytest.mark.parametrize("change", [_same_size_and_time, _other_file])
def test_a_file_that_was_changed_is_read(module, new_process, change):
    first = module_contents.content_of("library")
    rows = module_contents.found()
    change(module)
    new_process(rows)
    assert module_contents.content_of("library").digest != first.digest


def test_a_file_that_was_just_written_to_is_not_kept(module, new_process, monkeypatch):
    monkeypatch.setattr(module_contents, "_SETTLED_NS", 2_000_000_000)
    module.write_bytes(SOURCE)
    module_contents.content_of("library")
    assert module_contents.found() is None


def test_a_file_that_is_gone_is_absent(module, new_process):
    rows = (module_contents.content_of("library"), module_contents.found())[1]
    module.unlink()
    new_process(rows)
    assert module_contents.content_of("library").digest == "absent"


DAMAGED = {
    "torn": b'{"/a.py": [1, 2, 3',
    "no text": b"\xff\xfe",
    "a list": b"[1]",
    "a short row": b'{"/a.py": [1, 2]}',
    "texts for numbers": b'{"/a.py": ["1", 2, 3, 4, "d", []]}',
    "a number for names": b'{"/a.py": [1, 2, 3, 4, "d", 5]}',
    "numbers for names": b'{"/a.py": [1, 2, 3, 4, "d", [5]]}',
    "empty": b"",
}


@pytest.mark.parametrize("name", DAMAGED)
def test_a_damaged_index_is_none(tmp_path, name):
    path = tmp_path / "contents"
    path.write_bytes(DAMAGED[name])
    index = ContentIndex(path)
    assert index.read() == {}
    rows = {"/a.py": [1, 2, 3, 4, "digest", ["COUNT"]]}
    index.write(rows)
    assert index.read() == rows


def test_where_nothing_can_be_written_nothing_is(tmp_path):
    index = ContentIndex(tmp_path / "absent" / "contents")
    index.write({"/a.py": [1, 2, 3, 4, "digest", []]})
    assert index.read() == {}
    assert not (tmp_path / "absent").exists()


@pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="/proc says when a process began")
@pytest.mark.parametrize("clock", ["time_ns", "clock_gettime_ns"])
def test_when_the_process_began_is_known_though_it_is_interrupted(clock, monkeypatch):
    """A file that was written before is else taken for one written since, or the other way."""
    read, interrupted = getattr(time, clock), []

    def interrupted_read(*which):
        value = read(*which)
        if not interrupted:
            interrupted.append(time.sleep(0.2))
        return value

    monkeypatch.setattr(time, clock, interrupted_read)
    assert abs(module_contents._process_began_ns() - module_contents.PROCESS_BEGAN_NS) < 50e6
    assert interrupted


_TRAIN = """
import EARLIER
import logging
import installed_after_bash
import jax.numpy as jnp
import stepcache as sc

step = sc.step(lambda x: installed_after_bash.double(x) + 1)
assert step(jnp.ones(3)).sum() == 9
print("; ".join(step.last_miss.untrackable))
"""


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="/proc says when a process began")
@pytest.mark.parametrize("earlier", ["json", "installed_after_bash"])
def test_a_shell_that_installs_packages_and_becomes_python(earlier, tmp_path):
    """As `bash -c "pip install … && python train.py"` in a container."""
    site = tmp_path / "site-packages"
    site.mkdir()
    code = "def double(x):\n    return 2 * x\n"
    (tmp_path / "train.py").write_text(_TRAIN.replace("EARLIER", earlier))
    install = f"sleep 0.05; echo {shlex.quote(code)} > {site}/installed_after_bash.py; sleep 0.05"
    command = f"{install}; exec {shlex.quote(sys.executable)} {tmp_path}/train.py"
    variables = {"STEPCACHE_DIR": str(tmp_path / "programs"), "PYTHONPATH": f"{site}:{Path.cwd()}"}
    output = subprocess.check_output(["bash", "-c", command], env=os.environ | variables, text=True)
    blamed = "module installed_after_bash: its file was written to since this process began"
    assert output.strip() == ("" if earlier == "json" else blamed)


_FORK = """
import logging
import os
import sys
import time
import installed
time.sleep(0.05)
open(installed.__file__, "a").close()
os.utime(installed.__file__)
time.sleep(0.05)
if child := os.fork():
    sys.exit(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
from stepcache.fingerprint import module_contents
assert module_contents.was_read_after_ns("installed") < os.stat(installed.__file__).st_mtime_ns
"""


@pytest.mark.slow
def test_a_process_that_was_forked_after_its_imports(tmp_path):
    (tmp_path / "installed.py").write_text("")
    variables = {"PYTHONPATH": f"{tmp_path}:{Path.cwd()}"}
    subprocess.run([sys.executable, "-c", _FORK], env=os.environ | variables, check=True)
