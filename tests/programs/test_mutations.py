"""No stale program, ever: what changes between two runs is seen, and what does not matter is not.

Three processes run one table of small programs. The first stores them; the second has the changed
texts; the third has the first's texts again, in another directory, with other hash seeds and in
another order, and proves that the first would have been found.
"""

import json
import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
from mutations import (
    changes,
    confined,
    fields,
    frameworks,
    harmless,
    hidden,
    keys,
    python_library,
    wrappers,
)

import stepcache

CHANGES = [
    *changes.CODE,
    *changes.VALUES,
    *changes.OBJECTS,
    *changes.OUTSIDE,
    *hidden.BESIDE_VALUES,
    *hidden.IN_CLASSES,
    *hidden.OF_THE_PROCESS,
    *fields.FIELDS,
    *keys.KEYS,
    *confined.CONFINED,
    *wrappers.WRAPPED,
    *python_library.SHOWN_OR_COMPARED,
    *python_library.READ_BY_IT,
    *python_library.KEPT_BY_IT,
    *frameworks.LOWERED,
    *frameworks.TRACED_BEFORE,
    *frameworks.INSTALLED,
    *frameworks.TREES,
    *frameworks.PASSED_AROUND,
    *frameworks.DECLARED,
    *frameworks.SETTINGS,
]
KINDS = {kind.name: kind for kind in (*CHANGES, *harmless.HARMLESS)}
CHILD = Path(__file__).parent / "mutations" / "child.py"
REPOSITORY = Path(stepcache.__file__).parent.parent


def run(directory, label, version, names, *, seed, **environment):
    """Runs one version of the programs in a process of its own."""
    root = directory / label
    for name in names:
        KINDS[name].write(root / name, version)
    (root / "elsewhere").mkdir()
    plan = root / "plan.json"
    output = root / "found.json"
    plan.write_text(
        json.dumps(
            {
                "cache": str(directory / "cache"),
                "root": str(root),
                "steps": names,
                "output": str(output),
            }
        )
    )
    environment = {
        **os.environ,
        "JAX_PLATFORMS": "cpu",
        "JAX_NUM_CPU_DEVICES": "8",
        "NPROC": "32",
        "PYTHONPATH": str(REPOSITORY),
        "PYTHONHASHSEED": str(seed),
        "HOME": str(root),
        **environment,
    }
    command = [sys.executable, str(CHILD), str(plan)]
    done = subprocess.run(
        command, cwd=root / "elsewhere", env=environment, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr[-4000:]
    return json.loads(output.read_text())


@pytest.fixture(scope="module")
def runs(request, tmp_path_factory):
    directory = tmp_path_factory.mktemp("mutations")
    items = [item for item in request.session.items if item.module is request.module]
    names = [item.callspec.params["kind"].name for item in items]
    first = run(directory, "first", 0, names, seed=1)
    with ThreadPoolExecutor(2) as pool:
        changed = pool.submit(run, directory, "changed", 1, names, seed=2)
        again = pool.submit(run, directory, "a/third", 0, names[::-1], seed=3, SC_UNRELATED="1")
        return first, changed.result(), again.result()


def is_close(one, other):
    """Equal but for rounding: a program over eight devices may add up in another order."""
    return all(np.allclose(a, b, rtol=1e-5) for a, b in zip(one, other, strict=True))


def account(found):
    return "\n".join((found["miss"], *found["changes"], *found["untrackable"]))


@pytest.mark.sample(every=26)
@pytest.mark.parametrize("kind", CHANGES, ids=lambda kind: kind.name)
def test_a_change_is_seen_and_named(kind, runs):
    first, changed, again = (each[kind.name] for each in runs)
    for found in (first, changed, again):
        assert "error" not in found
    for found in (changed, again):
        if found["level"] == 1 or not kind.unstable:
            assert is_close(found["result"], found["expected"])
    if not kind.same:
        assert changed["result"] != first["result"]
    assert changed["level"] >= kind.level
    assert kind.named in account(changed)
    assert again["level"] == (1 if kind.vouched else 2), account(again)
    if not kind.vouched:
        assert kind.named in "\n".join(first["untrackable"])


@pytest.mark.sample(every=16)
@pytest.mark.parametrize("kind", harmless.HARMLESS, ids=lambda kind: kind.name)
def test_what_does_not_matter_is_not_seen(kind, runs):
    first, changed, again = (each[kind.name] for each in runs)
    for found in (first, changed, again):
        assert "error" not in found
        assert is_close(found["result"], found["expected"])
    assert changed["level"] == kind.level, account(changed)
    assert again["level"] == 1, account(again)
