"""A stored executable runs only after this process has lowered the step to the very module.

The scripts of `proof_cases.txt` run in fresh processes: under plain `jax.jit`, and in three starts
over one directory, changed between the first and the second. Whatever a script does, each start
must do what `jax.jit` does: values, types, shardings, prints, warnings, numbers of traces.
"""

import contextlib
import json
import os
import re
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import stepcache as sc
from stepcache.jaxcompat.hooks import binds_callbacks
from stepcache.jaxcompat.private import CAN_STORE
from stepcache.programs.worker import Worker

pytestmark = pytest.mark.skipif(not CAN_STORE, reason="nothing is stored")
HERE = Path(__file__).parent
BINDS_CALLBACKS = CAN_STORE and binds_callbacks(jax.devices()[:1])
X = np.linspace(1, 2, 3, dtype=np.float32)
IN_MEMORY = "executable that this process has"
_CHOICE = re.compile("«(.*?)¦(.*?)»", re.DOTALL)


@dataclass(frozen=True)
class Case:
    """A script in both versions; the head of `proof_cases.txt` explains its form."""

    name: str
    kind: str
    words: list[str]
    text: str

    def write(self, directory, version):
        text = _CHOICE.sub(lambda found: found[version + 1], self.text)
        main, *others = re.split(r"^# --- ", text, flags=re.MULTILINE)
        if not re.search(r"\bstep\b", main):
            main += "out = step(f)(x)\n"
        for file in (f"{self.name}.py\n{main}", *others):
            name, _, content = file.partition("\n")
            (directory / name).write_text(content)


def _cases():
    for block in (HERE / "proof_cases.txt").read_text().split("\n=== ")[1:]:
        header, _, text = block.partition("\n")
        name, kind, *words = header.split()
        yield Case(name, kind, words, text + "\n")


CASES = list(_cases())
every_case = pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)


@pytest.fixture(scope="module")
def starts(tmp_path_factory):
    """What each script did: under `jax.jit` in both versions, and in three starts."""
    place = tmp_path_factory.mktemp("proof")
    scripts = place / "scripts"
    scripts.mkdir()
    (scripts / "names").write_text("\n".join(case.name for case in CASES))
    environment = os.environ | {
        "STEPCACHE_DIR": str(place / "programs"),
        "PYTHONPATH": str(HERE.parents[1]),
        "PYTHONDONTWRITEBYTECODE": "1",  # A change within a second would not be seen.
    }

    def run_all(name, version, **more):
        for case in CASES:
            case.write(scripts, version)
        command = [sys.executable, HERE / "proof_child.py", scripts, place / name]
        subprocess.run(command, env=environment | more, check=True, timeout=240)
        return json.loads((place / name).read_text())

    plain = [run_all(f"plain {version}", version, REFERENCE="1") for version in (0, 1)]
    return plain, [run_all(f"start {n}", min(n, 1)) for n in range(3)]


@every_case
def test_each_start_does_what_jax_does(starts, case):
    plain, (first, second, third) = starts
    before, after = (each[case.name]["observed"] for each in plain)
    assert not before["raised"] and not after["raised"]
    assert case.kind != "run" or before == after
    assert first[case.name]["observed"] == before
    assert second[case.name]["observed"] == after
    assert third[case.name]["observed"] == after


@every_case
def test_what_is_unchanged_is_not_compiled_again(starts, case):
    first, second, third = (each[case.name] for each in starts[1])
    if case.kind in ("changed", "same"):  # Not only as the steps count.
        for start in (first, second, third):
            assert start["compiled"].count("jit_f") == start["compiles"]
    if case.kind == "calls":
        for number, start in enumerate((first, second, third)):
            if BINDS_CALLBACKS:  # What it calls is bound when it is loaded, so not before.
                assert start["compiles"] + start["loads"] == len(start["misses"])
                assert not number or all("loaded from disk" in miss for miss in start["misses"])
            else:
                assert start["compiles"] == len(start["misses"])
                assert all("it calls back into Python" in miss for miss in start["misses"])
        return
    programs = first["compiles"] + first["loads"]
    assert first["compiles"] or "references" in case.name
    changed = 1 if case.kind == "changed" else 0
    assert (second["compiles"], second["loads"]) == (changed, programs - changed), second
    assert (third["compiles"], third["loads"]) == (0, programs), third


@pytest.mark.parametrize("case", [c for c in CASES if c.words], ids=lambda case: case.name)
def test_the_miss_names_what_has_changed(starts, case):
    (miss,) = starts[1][1][case.name]["misses"]
    assert "since the run of" in miss
    assert [word for word in case.words if word not in miss] == [], miss


def test_two_steps_of_one_module_share_its_executable(starts):
    first, *later = (each["pair_of_unused_arguments"] for each in starts[1])
    assert (first["compiles"], first["loads"]) == (1, 1)
    assert IN_MEMORY in first["misses"][1]
    assert all((each["compiles"], each["loads"]) == (0, 2) for each in later)


# In one process


@pytest.mark.parametrize("calls_back", [False, True])
def test_a_step_made_anew_is_traced_and_runs_the_executable_of_its_module(calls_back):
    traces, seen = [], []

    def made(number):
        def f(x):
            traces.append(number)
            if calls_back:
                jax.debug.callback(lambda x: seen.append(number), x)
            return jnp.sin(x) * 3

        return sc.step(f)

    steps = [made(number) for number in range(3)]
    outs = [step(X).tolist() for step in steps]
    jax.effects_barrier()
    assert outs == [(jnp.sin(X) * 3).tolist()] * 3
    assert traces == [0, 1, 2]
    assert seen == (traces if calls_back else [])
    assert [step.stats().compiles for step in steps] == ([1, 1, 1] if calls_back else [1, 0, 0])
    assert all((IN_MEMORY in str(step.last_miss)) != calls_back for step in steps[1:])


def test_the_captured_number_that_differs_is_named():
    def made(rate):
        optimizer = optax.adam(rate)

        @sc.step
        def update(x):
            return optimizer.update(x, optimizer.init(x))[0]

        return update

    misses = []
    for rate in (0.1, 0.2, 0.2):
        update = made(rate)
        update(X)
        misses.append("\n".join(update.last_miss.advice))
    assert "-0.1 → -0.2" in misses[1] and "optax.inject_hyperparams(optax.adam)(" in misses[1]
    assert "captured another number" not in misses[0] + misses[2]


def start(place, rate, **options):
    """Runs a script in a session over a directory, as a new process would; returns its step."""
    source = f"import jax.numpy as jnp\ndef f(x, y):\n    return jnp.cos(x) * {rate} + y\n"
    space = {"__name__": "model"}
    exec(compile(source, place / "model.py", "exec"), space)
    size = options.pop("size", 3)
    with sc.Session(cache=sc.ProgramCache(place / "programs"), **options) as session:
        step = sc.step(space["f"])
        assert step(X, X[:size]).tolist() == (jnp.cos(X) * rate + X[:size]).tolist()
        session.cache.flush()
    return step


def test_a_flush_waits_for_the_jobs_that_jobs_submit():
    worker, done = Worker("test"), []

    def noted():
        time.sleep(0.05)
        done.append(True)

    worker.submit(lambda: worker.submit(noted))
    worker.flush()
    assert done


def counts(step):
    return step.stats().compiles, step.stats().loads


def test_a_changed_argument_is_named(tmp_path):
    start(tmp_path, 2.0)
    step = start(tmp_path, 2.0, size=1)
    assert counts(step) == (1, 0)
    assert "y: float32[3] uncommitted → float32[1] uncommitted" in str(step.last_miss)


def test_a_changed_flag_is_named(tmp_path, monkeypatch):
    start(tmp_path, 2.0)
    flag = "--xla_cpu_enable_fast_min_max=true"
    monkeypatch.setenv("XLA_FLAGS", f"{os.environ['XLA_FLAGS']} {flag}")
    step = start(tmp_path, 2.0)
    assert counts(step) == (1, 0)
    assert "XLA_FLAGS" in str(step.last_miss) and flag in str(step.last_miss)


def test_a_program_that_is_gone_is_said_to_be(tmp_path):
    start(tmp_path, 2.0)
    for file in tmp_path.glob("programs/v*/entries/program/*"):
        file.unlink()
    step = start(tmp_path, 2.0)
    assert counts(step) == (1, 0)
    assert "an earlier run compiled this program, and it is no longer on disk" in str(
        step.last_miss
    )


@pytest.mark.parametrize("by_session", [True, False])
def test_compilations_are_forbidden_and_loads_are_not(tmp_path, by_session):
    options = {"on_miss": "error"} if by_session else {}
    forbidden = contextlib.nullcontext() if by_session else sc.no_recompile()
    start(tmp_path, 2.0)
    with forbidden:
        assert counts(start(tmp_path, 2.0, **options)) == (0, 1)
        with pytest.raises(sc.RecompileError) as raised:
            start(tmp_path, 3.0, **options)
    miss = str(raised.value.miss)
    assert miss in str(raised.value)
    assert [word for word in ("model.py:3", "2.0", "3.0") if word not in miss] == [], miss
    assert counts(start(tmp_path, 2.0, **options)) == (0, 1)  # Nothing was stored for the other.
    assert counts(start(tmp_path, 3.0)) == (1, 0)
