"""`ProgramCache(trust=KEY)`: a released step runs its export, and a wrong KEY is found."""

import json
import os
import subprocess
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import stepcache as sc
from stepcache.jaxcompat.private import CAN_STORE
from stepcache.programs.opening import place_of
from stepcache.report.doctor import examine
from stepcache.report.inventory import take_inventory
from stepcache.report.shared import pull, push
from tests.programs.trust_child import MODELS

pytestmark = pytest.mark.skipif(not CAN_STORE, reason="nothing is stored")
HERE = Path(__file__).parent
# `filter_jit` returns what is static apart; the other names devices that its arguments do not.
TRACED_AGAIN = {"equinox", "nested"}
SHAPED_AGAIN = {"padded"}  # To know the shapes of its outputs.


# ---- twelve models, in processes of their own --------------------------------------------------


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """What each model gave: without stepcache's disk, then in three starts, the third a proof."""
    directory = tmp_path_factory.mktemp("trust")
    environment = os.environ | {"PYTHONPATH": str(HERE.parents[1])}
    trusting = {"STEPCACHE_TRUST": "commit 1", "STEPCACHE_PROVE_EVERY": "3"}
    trusting["STEPCACHE_DIR"] = str(directory)
    found = []
    for more in ({"STEPCACHE_DIR": "off"}, trusting, trusting, trusting):
        command = [sys.executable, HERE / "trust_child.py"]
        options = {"capture_output": True, "text": True, "timeout": 300}
        done = subprocess.run(command, env=environment | more, **options)
        assert not done.returncode, done.stderr
        rows = map(json.loads, done.stdout.splitlines())
        found.append({name: (seen, counts) for name, seen, counts in rows})
    return found


@pytest.mark.parametrize("model", [make.__name__ for make in MODELS])
def test_each_start_gives_what_a_traced_one_gives_to_the_bit(runs, model):
    (expected, _), (first, counted), (second, trusted), (third, proved) = (
        run[model] for run in runs
    )
    assert first == expected
    assert second == expected
    assert third == expected
    assert counted["trusted"] == 0 and counted["compiles"] == 1
    assert trusted["compiles"] == proved["compiles"] == proved["trusted"] == 0
    assert proved["traced"] == counted["traced"] > 0
    if model in TRACED_AGAIN:
        assert trusted["trusted"] == 0 and trusted["traced"] > 0
    else:
        assert trusted["trusted"] == 1
        assert trusted["traced"] == (model in SHAPED_AGAIN)


# ---- starts within one process: a cache and a step of their own ---------------------------------


class Start:
    """A start of a program under a KEY: its steps, and what they did."""

    def __init__(self, directory, key="k", prove_every=20, **options):
        self.cache = sc.ProgramCache(directory, trust=key, prove_every=prove_every, **options)
        self.traces = 0
        self.calls_back = False

    def step(self, factor=2.0, **options):
        def scale(x):
            self.traces += 1
            if self.calls_back:
                jax.debug.callback(lambda x: None, x)
            return {"scaled": jnp.tanh(x) * factor, "nothing": None}

        return sc.step(scale, **options)

    def call(self, step, *args, **kwargs):
        with sc.Session(cache=self.cache):
            out = step(*args, **kwargs)
        self.cache.flush()
        return out


@pytest.fixture
def directory(tmp_path):
    return tmp_path / "programs"


X = jnp.arange(4.0)


def test_the_second_start_is_not_traced_and_says_so(directory):
    first, second = Start(directory), Start(directory)
    step = first.step()
    expected = first.call(step, X)
    assert (first.traces, step.stats().traces, step.stats().trusted) == (1, 1, 0)
    assert "trusted" not in str(step.last_miss)
    step = second.step()
    with sc.Session(cache=second.cache):
        explained = step.explain(X)
    assert explained.trusted_since is not None and "would run its export" in str(explained)
    out = second.call(step, X)
    assert second.traces == 0
    np.testing.assert_array_equal(out["scaled"], expected["scaled"])
    assert out["nothing"] is None
    stats = step.stats()
    assert (stats.traces, stats.trusted, stats.compiles, stats.loads) == (0, 1, 0, 1)
    assert "(trusted since " in step.last_miss.remedy
    checks = {each.name: each for each in examine(directory, 1 << 30, round_trip=False).checks}
    assert checks["trust"].status == "ok" and "scale: " in checks["trust"].detail
    rows = [row for run in second.cache.store().run_log.runs() for row in run.rows]
    assert any("trusted since" in row.source for row in rows)


def test_another_signature_setting_or_key_is_traced(directory):
    first = Start(directory)
    first.call(first.step(), X)
    other = Start(directory, "another key")
    other.call(other.step(), X)
    second = Start(directory)
    step = second.step()
    second.call(step, X)
    assert (other.traces, second.traces) == (1, 0)
    second.call(step, jnp.arange(5.0))
    second.call(step, X.astype(jnp.bfloat16))
    assert second.traces == 2
    with jax.default_matmul_precision("highest"):
        second.call(step, X)
    assert second.traces == 3


def test_the_first_start_under_a_key_says_what_differs_from_runs_without(directory):
    for key in ("off", "k", "off"):
        start = Start(directory, key)
        step = start.step(2.0 if key == "k" else 3.0)
        start.call(step, X)
        said = {"off": "", "k": "what is traced: the step → its export, for a KEY"}[key]
        assert said in str(step.last_miss) and "call_exported" not in str(step.last_miss)


def test_each_so_many_starts_are_traced(directory):
    traced = []
    for _ in range(7):
        start = Start(directory, prove_every=3)
        start.call(start.step(), X)
        traced.append(start.traces)
    assert traced == [1, 0, 1, 0, 0, 1, 0]  # The first has nothing to run; then each third.


def test_a_wrong_key_is_found_by_the_next_proof_with_its_line(directory):
    first, stale, proof = Start(directory), Start(directory), Start(directory, prove_every=1)
    first.call(first.step(2.0), X)
    out = stale.call(stale.step(3.0), X)  # What a wrong KEY does until then.
    np.testing.assert_array_equal(out["scaled"], jnp.tanh(X) * 2)
    step = proof.step(3.0)
    with pytest.raises(sc.StaleProgramError, match=r"2\.0 → multiply by 3\.0") as caught:
        proof.call(step, X)
    assert "test_trust.py:" in caught.value.where and "another KEY" in caught.value.hint
    # From now on the step is traced, in this process and in later ones, and gives what it says.
    np.testing.assert_array_equal(proof.call(step, X)["scaled"], jnp.tanh(X) * 3)
    later = Start(directory)
    step = later.step(3.0)
    np.testing.assert_array_equal(later.call(step, X)["scaled"], jnp.tanh(X) * 3)
    assert later.traces == 1
    assert "is distrusted for this step" in str(step.last_miss)
    assert "multiply by 2.0 → multiply by 3.0" in str(step.last_miss)
    checks = {each.name: each for each in examine(directory, 1 << 30, round_trip=False).checks}
    assert checks["trust"].status == "warning" and "distrusted" in checks["trust"].detail
    # Until the entry that says so is removed.
    disk = later.cache.store().disk
    for entry in list(disk.entries("export")):
        (disk.root / "entries" / "export" / entry.digest).unlink()
    for traces in (1, 0):
        start = Start(directory)
        start.call(start.step(3.0), X)
        assert start.traces == traces


def test_a_step_that_can_no_longer_be_exported_is_stale(directory):
    first, proof = Start(directory), Start(directory, prove_every=1)
    first.call(first.step(), X)

    proof.calls_back = True
    with pytest.raises(sc.StaleProgramError):
        proof.call(proof.step(), X)


def test_steps_that_look_the_same_and_are_not_are_traced(directory):
    """Two steps of one process, of the same code, that have captured different values."""
    for number in range(3):
        start = Start(directory)
        for factor in (2.0, 3.0):
            step = start.step(factor)
            np.testing.assert_array_equal(start.call(step, X)["scaled"], jnp.tanh(X) * factor)
            if number or factor == 3.0:
                assert "looks the same" in str(step.last_miss)
        assert start.traces == 2


def test_a_step_made_anew_is_traced_and_stays_trusted(directory):
    for number in range(3):
        start = Start(directory)
        for _ in range(2):
            start.call(start.step(2.0), X)
        assert start.traces == (1 if number else 2)


class Pair:
    """A custom tree."""

    def __init__(self, a, b):
        self.a, self.b = a, b


jax.tree_util.register_pytree_node(Pair, lambda p: ((p.a, p.b), None), lambda _, c: Pair(*c))


def _calls_back(x):
    jax.debug.print("{}", x)
    return x + 1


BIG = np.arange(1 << 19, dtype=np.float32)


@pytest.mark.parametrize(
    ("fun", "why"),
    [
        (_calls_back, "side effects"),
        (lambda x: Pair(x, x + 1), "test_trust.Pair, which is no plain container"),
        (lambda x: x.sum() + BIG, "captures 2.1 MB of arrays"),
        (lambda x: jax.pure_callback(np.sin, x, x), "callback"),
    ],
)
def test_what_cannot_be_exported_is_traced_and_says_why(directory, fun, why):
    for _ in range(2):
        start, count = Start(directory), []

        def step(x, fun=fun, count=count):
            count.append(x)
            return fun(x)

        made = sc.step(step)
        start.call(made, X)
        assert len(count) == 1 and made.stats().trusted == 0
        assert why in str(made.last_miss)


def test_trees_of_arguments_come_back_whatever_their_classes(directory):
    for number in range(2):
        start = Start(directory)

        def move(pair, x, start=start):
            start.traces += 1
            return {"pair": Pair(pair.b, pair.a), "more": {3: [pair.a + x, ()]}}

        out = start.call(sc.step(move), Pair(X, X + 1), 2.0)
        assert start.traces == (not number)
        assert type(out["pair"]) is Pair and out["more"][3][1] == ()
        np.testing.assert_array_equal(out["pair"].a, X + 1)
        np.testing.assert_array_equal(out["more"][3][0], X + 2)


def test_functions_of_one_name_on_two_lines(directory):
    for number in range(2):
        start = Start(directory)
        steps = [
            sc.step(lambda x: x + 1),
            sc.step(lambda x: x * 3),
        ]
        for step, expected in zip(steps, (X + 1, X * 3), strict=True):
            np.testing.assert_array_equal(start.call(step, X), expected)
            assert step.stats().trusted == number


def test_what_is_donated_and_not_used_is_left_alone_as_by_jit(directory, recwarn):
    for number in range(2):
        start, spare = Start(directory), jnp.ones(1000)
        step = sc.step(lambda x, spare: x + 1, donate_argnames="spare")
        np.testing.assert_array_equal(start.call(step, X, spare), X + 1)
        assert not spare.is_deleted() and step.stats().trusted == number
    assert not recwarn.list


def test_static_arguments_tell_calls_apart(directory):
    for number in range(2):
        start = Start(directory)

        def power(x, n, kind, start=start):
            start.traces += 1
            return x**n if kind is None else x * n

        step = sc.step(power, static_argnums=1, static_argnames="kind")
        for n, kind, expected in ((2, None, X**2), (3, None, X**3), (3, "times", X * 3)):
            np.testing.assert_array_equal(start.call(step, X, n, kind=kind), expected)
        assert start.traces == (0 if number else 3)


def test_a_weakly_typed_carry_of_another_type(directory):
    for number in range(2):
        start = Start(directory)

        def grow(state, x, start=start):
            start.traces += 1
            return state + x, 2

        step = sc.step(grow, carry="state")
        state = 0.0
        for _ in range(3):
            state, weak = start.call(step, state, X.sum())
        assert (float(state), state.weak_type, weak.weak_type) == (18.0, False, True)
        assert bool(start.traces) == (not number)


@pytest.mark.parametrize("damage", ["torn", "foreign", "malformed"])
def test_an_entry_that_cannot_be_trusted_is_refused(directory, damage, caplog):
    first = Start(directory)
    first.call(first.step(), X)
    disk = first.cache.store().disk
    (entry,) = disk.entries("export")
    path = disk.root / "entries" / "export" / entry.digest
    if damage == "torn":
        path.write_bytes(path.read_bytes()[:-9])
    elif damage == "foreign":
        data = bytearray(path.read_bytes())
        data[-40] ^= 1
        path.write_bytes(data)
    else:
        disk.publish("export", entry.digest, {}, b"\x93\x01\x02\x03")
    second = Start(directory)
    out = second.call(second.step(), X)
    np.testing.assert_array_equal(out["scaled"], jnp.tanh(X) * 2)
    assert second.traces == 1 and second.cache.store().disk.quarantined
    third = Start(directory)
    third.call(third.step(), X)
    assert third.traces == 0


def test_machines_share_exports_and_distrust(tmp_path):
    remote = f"file://{tmp_path}/shared"

    def machine(number, factor=2.0, **options):
        start = Start(tmp_path / f"machine{number}", remote=remote, **options)
        try:
            start.call(start.step(factor), X)
        finally:
            start.cache.flush()
        return start.traces

    assert [machine(1), machine(2)] == [1, 0]
    with pytest.raises(sc.StaleProgramError):
        machine(3, 5.0, prove_every=1)
    assert machine(4, 5.0) == 1
    assert machine(2, 5.0) == 1  # It has the export, and hears that it is distrusted.


def test_exports_are_pushed_and_pulled_with_their_programs(tmp_path, monkeypatch):
    monkeypatch.setenv("STEPCACHE_KEY_FILE", str(tmp_path / "key"))
    (tmp_path / "key").write_bytes(b"k" * 32)
    (tmp_path / "key").chmod(0o600)
    place = place_of(f"file://{tmp_path}/shared", "test")
    first = Start(tmp_path / "one")
    first.call(first.step(), X)
    push(first.cache.store(), place)
    pull(tmp_path / "two", place)
    second = Start(tmp_path / "two")
    step = second.step()
    second.call(step, X)
    assert (second.traces, step.stats().compiles) == (0, 0)
    found = take_inventory(tmp_path / "two")
    assert (found.programs, found.predictions, len(found.items)) == (1, 1, 1)


def test_a_directory_that_counts_no_starts_draws_them(directory, monkeypatch):
    first = Start(directory)
    first.call(first.step(), X)
    counted = first.cache.store().disk.root / "starts"
    for each in counted.iterdir():
        each.unlink()
    counted.rmdir()
    counted.write_text("no directory")
    for drawn, traces in ((0, 1), (1, 0), (19, 0)):
        monkeypatch.setattr("random.randrange", lambda count, drawn=drawn: drawn)
        start = Start(directory)
        start.call(start.step(), X)
        assert start.traces == traces


@pytest.mark.parametrize(
    "options",
    [
        {"trust": 3},
        {"trust": "k", "prove_every": 0},
        {"trust": "k", "prove_every": "often"},
        {"trust": "k", "directory": None},
        {"prove_every": None, "trust": 1},
    ],
)
def test_options_that_cannot_be(tmp_path, options):
    with pytest.raises(sc.OptionError, match=r"trust|prove_every"):
        sc.ProgramCache(**{"directory": tmp_path / "programs"} | options)


def test_not_for_steps_on_tasks(directory):
    with pytest.raises(sc.OptionError, match="on tasks"):
        sc.Session(target="local:2x1", cache=sc.ProgramCache(directory, trust="k"))


def test_not_for_pods(directory):
    start = Start(directory)
    with sc.Session(cache=start.cache) as session:
        session._scope.together = lambda ranks: object()
        with pytest.raises(sc.OptionError, match="not for a pod"):
            start.step()(X)


def test_the_environment_and_the_command_line(tmp_path):
    script = tmp_path / "train.py"
    script.write_text(
        "import jax\n@jax.jit\ndef f(x):\n    print('traced')\n    return x * FACTOR + 1\n"
        "import sys\nFACTOR = float(sys.argv[1])\nprint(f(2.0))\n"
    )
    environment = os.environ | {"STEPCACHE_DIR": str(tmp_path / "programs")}
    environment["PYTHONPATH"] = str(HERE.parents[1])

    def run(*options, factor="2", more=None):
        command = [sys.executable, "-m", "stepcache", "run", *options, str(script), factor]
        done = subprocess.run(
            command, env=environment | (more or {}), capture_output=True, text=True, timeout=120
        )
        return done.stdout.split(), done.stderr

    assert run("--trust", "k")[0] == ["traced", "5.0"]
    assert run("--trust", "k")[0] == ["5.0"]
    assert run(more={"STEPCACHE_TRUST": "k"})[0] == ["5.0"]
    assert run()[0] == ["traced", "5.0"]
    out, error = run("--trust", "k", "--prove", factor="3")
    assert out == ["traced"] and "StaleProgramError" in error and "2.0 → multiply by 3.0" in error
    assert run(more={"STEPCACHE_TRUST": "k", "STEPCACHE_PROVE_EVERY": "x"})[0] == []
