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


# ---- traces of nested functions that several steps share ----------------------------------------

HELPERS = """
import jax.numpy as jnp
from jax import eval_shape as shape_of  # A name that tells nothing.
entered = []
def helper(x):
    entered.append("helper")
    return jnp.cumsum(x) * 2
@jax.jit
def under_jit(x):
    return helper(x)
helper_under_jit = jax.jit(helper)
twice = lambda x: helper(x) + helper_under_jit(x)
remembered = jax.checkpoint(helper)
whole = jnp.vectorize(helper, signature="(n)->(n)")
rolled = lambda x: jax.lax.map(helper, x[None])[0]
apart = lambda x: x + shape_of(under_jit, x).size
def makes_step(function):
    return sc.step(lambda x: function(x) + 1)
"""
NESTED = ["under_jit", "twice", "remembered", "apart"]


@pytest.fixture
def traced():
    """The names of the functions that JAX has traced, in their order."""
    names = []

    def note(event, seconds, **details):
        if event == "/jax/core/compile/jaxpr_trace_duration":
            names.append(details["fun_name"])

    jax.monitoring.register_event_duration_secs_listener(note)
    yield names
    jax.monitoring.unregister_event_duration_listener(note)


@pytest.mark.parametrize("name", ["helper", "whole"])
def test_steps_with_helpers_share_the_traces_of_jax_s_own_functions(name, start, traced):
    module = start(HELPERS)
    for _ in range(3):
        traced.clear()
        step = module.makes_step(vars(module)[name])
        np.testing.assert_array_equal(step(np.ones(3)), [3, 5, 7])
        assert step.stats().traces == 1
    assert "cumsum" not in traced
    assert module.entered == ["helper"] * 3


@pytest.mark.parametrize("name", NESTED)
def test_each_step_enters_the_user_s_code_that_a_nested_trace_ran(name, start):
    """A trace that JAX keeps would hide from the second recording what the user's code uses."""
    module = start(HELPERS)
    counts = []
    for _ in range(3):
        module.entered.clear()
        module.makes_step(vars(module)[name])(np.ones(3))
        counts.append(len(module.entered))
    assert counts[0] == counts[1] == counts[2] > 0


def test_a_step_under_jit_whose_own_function_is_only_entered_there(start):
    module = start(HELPERS)
    steps = [sc.step(jax.vmap(module.under_jit)) for _ in range(2)]
    for step in steps:
        module.entered.clear()
        step(np.ones((2, 3)))
        assert module.entered


def test_steps_with_helpers_share_again_after_one_that_nests(start, traced):
    module = start(HELPERS)
    for name in ("helper", "rolled", "helper", "helper"):
        traced.clear()
        module.makes_step(vars(module)[name])(np.ones(3))
    assert "cumsum" not in traced


def test_a_helper_that_one_step_nests_and_another_one_does_not(start):
    """The second signature of the step that nests is traced with traces of its own."""
    module = start(HELPERS)
    plain, nested = map(module.makes_step, (module.helper, module.under_jit))
    for size in (3, 4):
        for step in (plain, nested, plain):
            module.entered.clear()
            fresh = step.stats().traces
            np.testing.assert_array_equal(step(np.ones(size))[:2], [3, 5])
            assert bool(module.entered) == (step.stats().traces > fresh)
