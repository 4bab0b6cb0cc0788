"""Ordinary scripts as people write them, in `scripts/`: each runs as it is, again and again.

Every run is a process of its own, `python script.py`, over a directory of programs that its script
alone uses, and with everything at its default. A later run prints the same losses, says nothing
of stepcache, and compiles nothing, unless the test of the script says what and why. Some run by
default, at least one of each group, in forks of a Python that has imported JAX (later runs in those
of another one, with another seed of hashes); and all with `-m slow`, where each starts Python.
"""

import dataclasses
import json
import os
import re
import shutil
from pathlib import Path

import pytest

from stepcache import jaxcompat
from stepcache.storage.disk_store import ROOT
from tests import forking
from tests.sampling import slow_is_asked_for

pytestmark = pytest.mark.skipif(
    not jaxcompat.PRIVATE_API, reason="programs are stored through JAX's private API"
)

SCRIPTS = Path(__file__).parent / "scripts"


@dataclasses.dataclass(frozen=True)
class Run:
    """One process of a script.

    Attributes:
        output: what it printed.
        errors: what it printed on the standard error.
        programs: of each program that it came by, in order: "step", "how" ("compiled", or where its
            executable was), "reason" and "miss", in words.
    """

    output: str
    errors: str
    programs: list[dict]

    @property
    def how(self) -> list[str]:
        """Of each program: compiled, loaded from disk, or shared with a step of this run."""
        words = {"preloaded": "loaded", "disk": "loaded", "memory": "shared"}
        return [words.get(program["how"], program["how"]) for program in self.programs]


class Script:
    """A script in a directory of its own, with its programs beside it."""

    forks = True

    def __init__(self, name: str, place: Path):
        self.file = Path(shutil.copy(SCRIPTS / f"{name}.py", place))
        for models in SCRIPTS.glob("*models.py"):
            shutil.copy(models, place)
        self.programs = place / "programs"
        self.programs.mkdir(mode=0o700)

    def run(self, *arguments: str, code: int = 0, quiet: bool = True) -> Run:
        """Runs it once more.

        Args:
            arguments: of its command line.
            code: that it has to exit with.
            quiet: it prints nothing at all on the standard error. If not, nothing of stepcache.
                Either way, builds may take long on a busy machine, and that may be said.
        """
        report, *streams = (
            self.file.with_name(n) for n in ("report.json", "out.txt", "errors.txt")
        )
        for each in (report, *streams):
            each.unlink(missing_ok=True)
        environment = {name: os.environ[name] for name in os.environ if "STEPCACHE" not in name}
        environment |= {
            "JAX_NUM_CPU_DEVICES": "8",
            "NPROC": "32",
            "PYTHONPATH": os.pathsep.join(
                [str(SCRIPTS / "reporting"), *filter(None, [os.environ.get("PYTHONPATH")])]
            ),
            "STEPCACHE_DIR": str(self.programs),
            "STEPCACHE_TEST_REPORT": str(report),
        }
        if self.forks:
            environment["PYTHONHASHSEED"] = "2" if any(self.programs.iterdir()) else "1"
        process = forking.start(
            self.file,
            arguments,
            env=environment,
            cwd=self.file.parent,
            stdout=streams[0],
            stderr=streams[1],
            fork=self.forks,
        )
        ended = process.wait()
        output, errors = (each.read_text() for each in streams)
        assert ended == code, errors
        errors = re.sub(r"^building .* takes long: .*\n", "", errors, flags=re.MULTILINE)
        if quiet:
            assert not errors
        for word in ("stepcache", "StepCache", "Warning"):
            assert word not in errors
        assert "loss" in output
        record = json.loads(report.read_text())
        assert not record["failures"], record
        return Run(output, errors, record["programs"])


def shown(run: Run) -> str:
    return "\n".join(f"{each['how']}: {each['miss']}" for each in run.programs)


def built_once_then_loaded(script: Script, *steps: str, runs: int = 2, **settings) -> list[Run]:
    """Runs a script again and again; it comes by a program of each of `steps`, in their order."""
    first = script.run(**settings)
    assert [program["step"] for program in first.programs] == list(steps), shown(first)
    assert first.how == ["compiled"] * len(steps), shown(first)
    later = [script.run(**settings) for _ in range(runs - 1)]
    for run in later:
        assert run.output == first.output
        assert [program["step"] for program in run.programs] == list(steps), shown(run)
        assert run.how == ["loaded"] * len(steps), shown(run)
    return [first, *later]


@pytest.fixture(scope="module", autouse=True)
def whether_scripts_fork(request):
    Script.forks = not slow_is_asked_for(request.config)


# ---- libraries -------------------------------------------------------------------------------


def test_a_short_last_batch_is_a_program_of_its_own(tmp_path):
    script = Script("optax_adam", tmp_path)
    first, second, third = (script.run() for _ in range(3))
    assert [program["reason"] for program in first.programs] == ["first call", "changed"]
    assert first.output == second.output == third.output
    assert first.how == ["compiled"] * 2, shown(first)
    assert second.how == ["loaded"] * 2, shown(second)
    assert third.how == ["loaded"] * 2, shown(third)


@pytest.mark.slow
def test_a_split_module_of_nnx(tmp_path):
    script = Script("nnx_loop", tmp_path)
    built_once_then_loaded(script, "train_step")


@pytest.mark.slow
def test_a_train_state_of_linen(tmp_path):
    script = Script("linen_train_state", tmp_path)
    built_once_then_loaded(script, "train_step", "eval_step")


@pytest.mark.slow
def test_linear_algebra(tmp_path):
    """LAPACK's functions are found when JAX lowers a call of one; preloading comes before that."""
    script = Script("linear_algebra", tmp_path)
    built_once_then_loaded(script, "fit", "spectra")


def test_a_kernel_of_pallas(tmp_path):
    """Its first trace imports modules of JAX that bring settings along."""
    script = Script("pallas_kernel", tmp_path)
    built_once_then_loaded(script, "train_step", "repeated")


@pytest.mark.slow
def test_a_partitioned_module_of_equinox(tmp_path):
    script = Script("equinox_loop", tmp_path)
    pytest.importorskip("equinox")
    built_once_then_loaded(script, "make_step")


@pytest.mark.slow
def test_modules_of_nnx_in_place(tmp_path):
    script = Script("nnx_in_place", tmp_path)
    built_once_then_loaded(script, "train_step", "eval_step")


@pytest.mark.slow
def test_modules_of_equinox_as_they_are(tmp_path):
    script = Script("equinox_filter", tmp_path)
    built_once_then_loaded(script, "make_step")


# ---- where steps are defined -----------------------------------------------------------------


@pytest.mark.slow
def test_a_decorated_method(tmp_path):
    script = Script("trainer_method", tmp_path)
    built_once_then_loaded(script, "update")


@pytest.mark.slow
def test_twenty_closures_of_a_factory(tmp_path):
    script = Script("factory", tmp_path)
    built_once_then_loaded(script, *["train_step"] * 20)


@pytest.mark.slow
def test_steps_made_in_a_loop(tmp_path):
    script = Script("step_in_loop", tmp_path)
    built_once_then_loaded(script, *["<lambda>", "objective"] * 3, "smooth")


def test_cells_of_a_notebook(tmp_path):
    """Edited and run again, a cell makes another step; what it made before is forgotten."""
    script = Script("notebook", tmp_path)
    first, _ = built_once_then_loaded(script, *["train_step"] * 3)
    losses = [line for line in first.output.splitlines() if line.startswith("step 1: loss")]
    assert len(losses) == 4 and len(set(losses)) == 3, first.output


# ---- what steps read -------------------------------------------------------------------------


@pytest.mark.slow
def test_options_of_the_command_line(tmp_path):
    """What decides whether a program is loaded is named; other options do not matter."""
    script = Script("command_line", tmp_path)
    default = script.run()
    assert default.how == ["compiled"] * 2, shown(default)
    renamed = script.run("--run-name", "second try", "--steps", "11")
    assert renamed.how == ["loaded"] * 2, shown(renamed)
    assert renamed.output.startswith(default.output)
    slower = script.run("--lr", "0.01")
    assert slower.how == ["compiled"] * 2, shown(slower)
    assert slower.output != default.output
    assert slower.output.splitlines()[0] == default.output.splitlines()[0], "the first loss"
    latest = max((script.programs / ROOT / "runs").iterdir())
    rows = [json.loads(row) for row in latest.read_text().splitlines()]
    changes = [row["changes"][0] for row in rows if row["event"] == "compiled"]
    assert [path for _, path, _, _ in changes] == ["command_line.py:36 in train_step", "log_scale"]
    assert "0.05" in changes[0][2] and re.search(r"0\.01|0\.0099", changes[0][3]), changes
    again = script.run()
    assert again.how == ["loaded"] * 2 and again.output == default.output, shown(again)


def test_a_logger_in_the_step(tmp_path):
    """What a log record holds, such as the time, does not reach the program."""
    script = Script("logging_step", tmp_path)
    first, second = built_once_then_loaded(script, "train_step", quiet=False)
    assert first.errors.count("tracing train_step") == 1
    assert first.errors.count("done") == second.errors.count("done") == 1


@pytest.mark.slow
def test_scalars_and_keys_as_arguments(tmp_path):
    script = Script("scalars_and_keys", tmp_path)
    first, _ = built_once_then_loaded(
        script,
        *("train_step", "accumulate", "accumulate"),  # The total is a number, and then an array.
        "train_step",  # A raw key.
        *["train_step"] * 4,  # A key of another kind; with a scale; uniform, without and with it.
    )
    assert "total: float32[] weak → float32[]" in first.programs[2]["miss"]
    assert "key: key<fry>[] → uint32[2]" in first.programs[3]["miss"]


# ---- sessions --------------------------------------------------------------------------------


@pytest.mark.slow
def test_a_session_that_only_warns(tmp_path):
    """Nothing is placed: a step that ran before it goes on with its program, on one device."""
    script = Script("session_warn", tmp_path)
    first, _ = built_once_then_loaded(script, "train_step")
    assert "8 devices; the state is on [0]" in first.output
    assert "misses: 1" in first.output


@pytest.mark.slow
def test_a_session_that_only_has_a_cache(tmp_path):
    """Arrays stay where the user has placed them, and the default directory stays empty."""
    script = Script("session_cache", tmp_path)
    first, _ = built_once_then_loaded(script, "train_step", "evaluate", "evaluate")
    assert "the state is on [1]" in first.output
    assert re.search(r"another model .*, on \[0\]", first.output)
    assert list(script.file.with_name("my-programs").rglob("entries/*/*"))
    assert not list(script.programs.rglob("entries/*/*"))


@pytest.mark.slow
def test_eight_devices_and_a_batch(tmp_path):
    script = Script("multi_device", tmp_path)
    first, _ = built_once_then_loaded(script, "train_step")
    assert "the bias is at every device" in first.output
    assert "8 devices, 1 miss" in first.output


# ---- how scripts end -------------------------------------------------------------------------


@pytest.mark.slow
def test_a_script_that_ends_after_its_first_call(tmp_path):
    script = Script("ends_at_once", tmp_path)
    built_once_then_loaded(script, "fit", runs=3)


@pytest.mark.parametrize(
    ("how", "code"), [pytest.param("exits", 3, marks=pytest.mark.slow), ("raises", 1)]
)
def test_a_script_that_exits_or_raises(tmp_path, how, code):
    """What it has built is there for the next run, and the user's error is the only one."""
    script = Script("ends_at_once", tmp_path)
    first, second = (script.run("--how", how, code=code, quiet=False) for _ in range(2))
    assert first.output == second.output
    assert (first.how, second.how) == (["compiled"], ["loaded"]), shown(second)
    for run in (first, second):
        assert run.errors.count("Traceback") == (how == "raises")
        assert run.errors.endswith("the data set ends here\n" if how == "raises" else "")
