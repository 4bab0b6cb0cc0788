"""What changes around a script between two of its runs, rather than in it: flags, settings, places.

Each run is a process of its own. What changes the program must not be served from disk without a
trace, and is named; what does not change it is.
"""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from stepcache import jaxcompat

pytestmark = pytest.mark.skipif(
    not jaxcompat.PRIVATE_API, reason="programs are stored through JAX's private API"
)

SCRIPT = """
import sys
import jax, jax.numpy as jnp, numpy as np
import stepcache as sc

def helper(x):
    return jnp.sin(x) * (2 if __debug__ else 3)

@sc.step
def step(x):
    return helper(x) @ x

given = np.linspace(0, 1, 16).reshape(4, 4)
result = step(given)
expected = jax.jit(step.__wrapped__)(given)
assert result.dtype == expected.dtype and (np.asarray(result) == np.asarray(expected)).all()
stats = step.stats()
level = 3 if stats.compiles else 2 if stats.traces else 1
print(f"level {level}")
print(step.last_miss)
"""

CHANGES = {
    "an XLA flag": ({"XLA_FLAGS": "--xla_cpu_enable_fast_math=true"}, [], "XLA_FLAGS"),
    "x64": ({"JAX_ENABLE_X64": "1"}, [], "jax_enable_x64"),
    "matmul precision": (
        {"JAX_DEFAULT_MATMUL_PRECISION": "highest"},
        [],
        "jax_default_matmul_precision",
    ),
    "the random generator": ({"JAX_DEFAULT_PRNG_IMPL": "rbg"}, [], "jax_default_prng_impl"),
    "threefry": ({"JAX_THREEFRY_PARTITIONABLE": "0"}, [], "jax_threefry_partitionable"),
    "the number of devices": ({"JAX_NUM_CPU_DEVICES": "3"}, [], "devices"),
    "python -O": ({}, ["-O"], "optimize"),
    "a flag on the command line": ({}, [], "argv"),
}
HARMLESS = {
    "nothing": {},
    "another hash seed": {"PYTHONHASHSEED": "7"},
    "another home": {"HOME": "/nowhere"},
    "an unrelated variable": {"UNRELATED": "1"},
    "where XLA dumps": {"XLA_FLAGS": "--xla_dump_to=/tmp/never --xla_dump_hlo_pass_re=none"},
    "JAX's own cache": {"JAX_COMPILATION_CACHE_DIR": "{tmp}/jax"},
    "logging": {"JAX_LOG_COMPILES": "1"},
}


def run(arguments: list[str], directory: Path, *, text: str | None = None, cwd=None, **variables):
    clean = {
        name: value for name, value in os.environ.items() if not name.startswith(("JAX_", "XLA_"))
    }
    environment = clean | {"JAX_PLATFORMS": "cpu", "STEPCACHE_DIR": str(directory), **variables}
    done = subprocess.run(
        [sys.executable, *arguments],
        env=environment,
        cwd=cwd,
        input=text,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    level, _, told = done.stdout.partition("\n")
    return int(level.removeprefix("level ")), told


@pytest.fixture(scope="module")
def built(tmp_path_factory):
    """A script that has been run once, with the directory of its programs."""
    root = tmp_path_factory.mktemp("process")
    script = root / "checkout" / "script.py"
    script.parent.mkdir()
    script.write_text(SCRIPT)
    assert run([str(script)], root / "programs")[0] == 3
    return root, script


@pytest.fixture
def again(built, tmp_path):
    """The same, in a state of its own."""
    root, script = built
    shutil.copytree(root / "programs", tmp_path / "programs")
    return tmp_path / "programs", script


@pytest.mark.slow
@pytest.mark.parametrize("name", CHANGES)
def test_a_change_is_seen_and_named(name, again):
    programs, script = again
    variables, options, named = CHANGES[name]
    arguments = ["--xla_cpu_use_onednn=false"] if "command line" in name else []
    level, told = run([*options, str(script), *arguments], programs, **variables)
    assert level > 1 and named in told, told


@pytest.mark.slow
@pytest.mark.sample(every=5)
@pytest.mark.parametrize("name", HARMLESS)
def test_harmless_surroundings(name, again, tmp_path):
    programs, script = again
    variables = {key: value.format(tmp=tmp_path) for key, value in HARMLESS[name].items()}
    level, told = run([str(script)], programs, **variables)
    assert level == 1, told


@pytest.mark.slow
def test_other_places(again, tmp_path):
    """Another directory to run in, another checkout, a file touched, a module run by its name."""
    programs, script = again
    assert run([str(script)], programs, cwd=tmp_path)[0] == 1
    copy = tmp_path / "elsewhere" / "script.py"
    copy.parent.mkdir()
    copy.write_text(SCRIPT)
    os.utime(copy, (1, 1))
    assert run([str(copy)], programs)[0] == 1
    assert run(["-m", "script"], programs, cwd=copy.parent)[0] == 1


MEANWHILE = """
import logging, sys
from pathlib import Path
import numpy as np
import library
import stepcache as sc

RATE = Path(__file__).with_name("rate.txt")
log = logging.getLogger("mine")

class Change(logging.Handler):  # Which is no part of the trace.
    def emit(self, record):
        path = Path(library.__file__) if record.msg == "begun" else RATE
        if sys.argv[1:] == [record.msg]:
            path.write_text(path.read_text().replace("2.0", "30.0"))

log.addHandler(Change())
log.warning("begun")

@sc.step
def step(x):
    rate = float(RATE.read_text())
    log.warning("read")
    return library.scale(x) * rate

result = float(step(np.float32(1)))
stats = step.stats()
print(f"level {3 if stats.compiles else 2 if stats.traces else 1}")
print(result)
"""


@pytest.mark.parametrize("when", ["read", pytest.param("begun", marks=pytest.mark.slow)])
def test_what_is_changed_while_the_process_runs(when, tmp_path):
    """A package that is upgraded after it was imported; a file that is rewritten once it was read.

    The program is of what was there before, and must not be taken for one of what is there now.
    """
    place = tmp_path / "site-packages"
    for each in (place / "library", place / "library-1.0.dist-info"):
        each.mkdir(parents=True)
    (place / "library" / "__init__.py").write_text("def scale(x):\n    return x * 2.0\n")
    (place / "library-1.0.dist-info" / "METADATA").write_text("Name: library\nVersion: 1.0\n")
    script = tmp_path / "script.py"
    script.write_text(MEANWHILE)
    (tmp_path / "rate.txt").write_text("2.0")
    found = []
    for arguments in ([when], [], []):
        paths = os.pathsep.join([str(place), *sys.path])
        found.append(run([str(script), *arguments], tmp_path / "programs", PYTHONPATH=paths))
    assert found == [(3, "4.0\n"), (3, "60.0\n"), (1, "60.0\n")]


@pytest.mark.slow
def test_code_without_a_file(tmp_path):
    """A program given with -c or on standard input has no file to be known by, and yet is."""
    programs = tmp_path / "programs"
    assert run(["-c", SCRIPT], programs)[0] == 3
    assert run(["-c", SCRIPT], programs)[0] == 1
    changed = SCRIPT.replace("jnp.sin", "jnp.cos")
    level, told = run(["-c", changed], programs)
    assert level > 1 and "its code changed" in told, told
    assert run(["-"], programs, text=SCRIPT)[0] <= 2
