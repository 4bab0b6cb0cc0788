"""What a program is stored with whose step was traced before in the same process.

JAX keeps the traces of nested functions, and does not enter them again.
"""

import sys
import textwrap
import types

import jax
import numpy as np
import pytest

import stepcache as sc
from stepcache import jaxcompat
from stepcache.programs.recorded_trace import RecordedTrace

pytestmark = pytest.mark.skipif(
    not jaxcompat.PRIVATE_API, reason="programs are stored through JAX's private API"
)

READS_A_FILE = """
@jax.jit
def inner(x):
    return x * float(open(FILE).read())
def outer(x):
    return inner(x)
@sc.step
def step(x):
    return outer(x)
"""


@pytest.fixture
def start(tmp_path):
    """Starts a program anew, as another process would: returns its module."""

    def start_anew(source):
        module = types.ModuleType("life")
        path = tmp_path / "life.py"
        path.write_text(textwrap.dedent(source))
        names = {"jax": jax, "sc": sc, "FILE": str(tmp_path / "rate.txt"), "__file__": str(path)}
        module.__dict__.update(names)
        sys.modules["life"] = module
        exec(compile(path.read_text(), str(path), "exec"), module.__dict__)
        return module

    cache = sc.ProgramCache(tmp_path / "programs", verify="off")
    with sc.Session(cache=cache):
        yield start_anew


def interrupted(step, monkeypatch):
    def interrupt(*_):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(RecordedTrace, "is_lowered_by_jax", interrupt)
        step(np.ones(3))


def cleared(step, _):
    step(np.ones(3))
    step.clear_cache()


def cleared_by_another(step, _):
    cleared(sc.step(step.__wrapped__), _)


@pytest.mark.parametrize("before", [interrupted, cleared, cleared_by_another])
def test_a_file_that_a_nested_function_read_in_an_earlier_trace(
    before, start, tmp_path, monkeypatch
):
    """That trace was ended by Ctrl-C while it was lowered, or its program was cleared."""
    (tmp_path / "rate.txt").write_text("2")
    step = start(READS_A_FILE).step
    before(step, monkeypatch)
    assert step(np.ones(3))[0] == 2
    sc.current_session().cache.flush()
    (tmp_path / "rate.txt").write_text("3")
    assert start(READS_A_FILE).step(np.ones(3))[0] == 3


def test_a_function_that_was_replaced_is_no_dependency_of_the_next_program(start):
    source = """
    def outer(x):
        return 2 * x
    @sc.step
    def step(x):
        return outer(x)
    """
    module = start(source)
    module.step(np.ones(3))
    exec("def outer(x):\n    return 3 * x", module.__dict__)
    with pytest.warns(sc.StaleProgramWarning, match="outer: its code changed"):
        assert module.step(np.ones(5))[0] == 3
    assert module.step.last_miss.untrackable == ()
    sc.current_session().cache.flush()

    step = start(source.replace("2", "3")).step
    assert step(np.ones(5))[0] == 3
    assert step.stats().traces == 0, step.last_miss
