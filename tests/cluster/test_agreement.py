"""Processes that are about to run different programs all say so, within seconds, and by name."""

import functools

import pytest

from tests.cluster.pods import run_pod

# A module: the step and its call, and what rank 1 of 2 does otherwise.
MODULE = """
import dataclasses, os, time
import jax, jax.numpy as jnp, numpy as np
import stepcache as sc
from __main__ import RANK, mesh, say
from jax.sharding import AxisType, NamedSharding, PartitionSpec as P
FACTOR, STATIC, SHAPE, DTYPE, TREE, MESH = 2.0, "a", (4, 3), np.float32, {"n": 0}, mesh
SPEC, OTHER, OPTIONS = P(), False, {}
{{before}}
def helper(x):
    return x * FACTOR
if RANK == 1:
{{change}}
@sc.step(carry="state", batch="batch", static_argnames="mode", **OPTIONS)
def train(state, batch, mode):
    return jax.tree.map(lambda x: (helper(x) + batch.sum()).astype(x.dtype), state), batch.mean()
@sc.step(batch="batch", static_argnames="mode")
def evaluate(state, batch, mode):
    return batch.mean()
def spread(x):
    sharding = NamedSharding(MESH, SPEC if np.ndim(x) else P())
    return jax.make_array_from_callback(np.shape(x), sharding, lambda index: np.asarray(x)[index])
started = time.time()
try:
    with sc.Session(MESH, data_axis=MESH.axis_names[0], agree_timeout=3):
        state = jax.tree.map(spread, {"w": np.ones(4, np.float32), **TREE})
        step = evaluate if OTHER else train
        jax.block_until_ready(step(state, np.ones(SHAPE, DTYPE), STATIC))
    say("ran", {{kind}})
except sc.AgreementError as error:
    say("seconds", {{kind}}, time.time() - started)
    say("error", {{kind}}, str(error).replace(chr(10), " | "))
"""

KINDS = {
    "shape": ("    SHAPE = (3, 3)", ["batch", "float32[6,3]", "float32[8,3]"]),
    "dtype": ("    DTYPE = np.int32", ["batch", "int32[", "float32["]),
    "tree": ("    TREE = {'n': 0, 'm': 1}", ["state['m']", "absent"]),
    "static": ("    STATIC = 'b'", ["mode", "'a'", "'b'"]),
    "code": ("    def helper(x): return x * FACTOR + 1", ["in helper", "add with 1.0"]),
    "global": ("    FACTOR = 3.0", ["in helper", "multiply by 2.0", "by 3.0"]),
    "config": (
        "    jax.config.update('jax_default_matmul_precision', 'highest')",
        ["matmul_precision"],
    ),
    "mesh order": (
        "    MESH = jax.sharding.Mesh(mesh.devices[::-1], ('data',), axis_types=mesh.axis_types)",
        ["mesh"],
    ),
    "axis name": (
        "    MESH = jax.sharding.Mesh(mesh.devices, ('batch',), axis_types=mesh.axis_types)",
        ["mesh", "batch"],
    ),
    "sharding": ("    TREE = {'n': np.zeros(2)}; SPEC = P('data')", ["state"]),
    "donation": ("    OPTIONS = {'keep_unused': True}", ["keep_unused"]),
    "another step": ("    OTHER = True", ["different steps", "step: rank 1", "evaluate;", "train"]),
}


def module_of(kind: str) -> str:
    before = "TREE = {'n': np.zeros(2)}" if kind == "sharding" else ""
    change = KINDS[kind][0]
    name = repr(kind.replace(" ", "-"))
    return (
        MODULE.replace("{{before}}", before).replace("{{change}}", change).replace("{{kind}}", name)
    )


@pytest.fixture(scope="module")
def disagreements(shared_pod, tmp_path_factory):
    """The ranks of a pod that has disagreed in every way, one after the other."""
    directory = tmp_path_factory.mktemp("kinds")
    names = []
    for number, kind in enumerate(KINDS):
        names.append(f"kind{number}")
        (directory / f"kind{number}.py").write_text(module_of(kind), encoding="utf-8")
    script = f"""
    import importlib
    sys.path.insert(0, ".")
    for name in {names!r}:
        importlib.import_module(name)
        jax.config.update("jax_default_matmul_precision", None)
    """
    return shared_pod(2).run(directory, script)


@pytest.mark.sample(every=3)
@pytest.mark.parametrize("kind", KINDS)
def test_a_disagreement_is_an_error_on_all_ranks(disagreements, kind):
    errors, name = [], kind.replace(" ", "-") + " "
    for rank in disagreements:
        assert not any(line.startswith(name) for line in rank.said("ran")), rank.output
        told = [
            [line.removeprefix(name) for line in rank.said(word) if line.startswith(name)]
            for word in ("error", "seconds")
        ]
        assert all(told), f"{rank.code}\n{rank.output}"
        (error,), (seconds,) = told
        assert float(seconds) < 5
        assert "rank 0" in error and "rank 1" in error
        for part in KINDS[kind][1]:
            assert part in error, (part, error)
        errors.append(error)
    assert errors[0] == errors[1]


@pytest.mark.slow
def test_an_xla_flag(tmp_path):
    script = """
    try:
        with sc.Session(mesh):
            sc.step(lambda batch: batch.sum(), batch="batch")(np.ones(2, np.float32))
    except sc.AgreementError as error:
        say("error", str(error).replace(chr(10), " | "))
    """
    flags = {1: {"XLA_FLAGS": "--xla_cpu_enable_fast_math=true"}}
    for rank in run_pod(tmp_path, script, of_rank=flags):
        assert "xla_cpu_enable_fast_math" in rank.said("error")[0], rank.output


def test_a_closure_and_an_attribute_that_only_the_trace_reads(shared_pod, tmp_path):
    script = """
    class Config:
        def __init__(self, width): self.width = width
    config = Config(2 + RANK)
    def make(scale):
        @sc.step(batch="batch")
        def step(batch):
            return batch.sum() * getattr(config, "wid" + "th") * scale
        return step
    step = make(1.0)
    for number in range(2):
        try:
            with sc.Session(mesh, agree_timeout=3):
                step(np.ones(2, np.float32))
            say("ran")
        except sc.AgreementError as error:
            say("error", str(error).replace(chr(10), " | "))
        config.width, step = 2, make(1.0 + RANK)
    """
    for rank in shared_pod(2).run(tmp_path, script):
        first, second = rank.said("error")
        assert "pod.py:8 in step" in first and "2.0" in first and "3.0" in first, first
        assert "pod.py:8 in step" in second and "multiply by 2.0" in second, second


NOT_COMING = """
step = sc.step(lambda batch: batch.sum(), batch="batch")
started = time.time()
with sc.Session(mesh, agree_timeout=2):
    if RANK == 1:
        time.sleep(4)
    try:
        step(np.ones(2, np.float32))
    except sc.AgreementError as error:
        say("error", str(error).replace(chr(10), " | "))
        say("seconds", time.time() - started)
"""


def test_a_rank_that_does_not_come_is_named(together):
    ranks = together("not coming")
    for rank in ranks:
        assert "rank 1 did not take part" in rank.said("error")[0], rank.output
    for number in (0, 2):
        assert 1.5 < float(ranks[number].said("seconds")[0]) < 4


def test_what_a_step_computes_depends_on_the_rank(shared_pod, tmp_path):
    """Nothing that can be read says so; the lowered programs differ."""
    script = """
    @sc.step(batch="batch")
    def step(batch):
        return batch.sum() * (1 + jax.process_index())
    try:
        with sc.Session(mesh):
            say("result", float(step(np.ones(2, np.float32))))
    except sc.AgreementError as error:
        say("error", str(error).replace(chr(10), " | "))
    """
    for rank in shared_pod(2).run(tmp_path, script):
        assert not rank.said("result"), rank.output
        assert "different programs" in rank.said("error")[0], rank.output
        assert "rank 1 multiply by 2.0" in rank.said("error")[0], rank.output


LOWERED = """
from unittest import mock
from jax._src import compiler
compiled, compile = [], compiler.backend_compile_and_load
def counting(*args, **kwargs):
    compiled.append(1)
    return compile(*args, **kwargs)
patch = mock.patch.object(compiler, "backend_compile_and_load", counting)
patch.start()
FACTOR = 2.0 + RANK
def helper(x):
    y = x + 1
    return y * FACTOR  # Of the global.
def make():
    if RANK:
        @sc.step(batch="batch")
        def step(batch):
            return jnp.sin(batch).sum()  # Of the code on rank 1.
    else:
        @sc.step(batch="batch")
        def step(batch):
            return (batch * 2).sum()  # Of the code on rank 0.
    return step
steps = {
    "global": sc.step(lambda batch: helper(batch).sum(), batch="batch"), "code": make(),
    "branch": sc.step(lambda b: b.sum() if RANK == 0 else b.sum() + b.max(), batch="b"),  # Branch.
}
for name, step in steps.items():
    compiled.clear()
    try:
        with sc.Session(mesh):
            step(np.ones(2, np.float32))
    except sc.AgreementError as error:
        say("error", name, str(error).replace(chr(10), " | "))
        say("compiled", name, len(compiled), [str(change.part) for change in error.changes])
patch.stop()
"""


def test_a_difference_of_what_was_lowered_names_lines_of_code_before_xla_compiles(
    shared_pod, tmp_path
):
    ranks = shared_pod(2).run(tmp_path, LOWERED)
    lines = (tmp_path / "pod.py").read_text().splitlines()
    place = {
        each: f"pod.py:{1 + next(n for n, line in enumerate(lines) if each in line)}"
        for each in ("Of the global.", "on rank 1.", "on rank 0.", "Branch.")
    }
    expected = {
        "global": [place["Of the global."], "rank 1 multiply by 3.0; rank 0 multiply by 2.0"],
        "code": ["sine"],
        "branch": [place["Branch."], "rank 1 add float32[]; rank 0 absent"],
    }
    for rank in ranks:
        errors = dict(each.split(" ", 1) for each in rank.said("error"))
        assert errors.keys() == expected.keys(), rank.output
        for name, parts in expected.items():
            assert all(part in errors[name] for part in parts), errors[name]
        assert place["on rank 1."] in errors["code"] or place["on rank 0."] in errors["code"]
        assert all(each.split()[1] == "0" for each in rank.said("compiled")), rank.output


SLOWER = """
try:
    with sc.Session(mesh):
        try:
            sc.step(lambda batch: batch.sum(), batch="batch")(np.ones(2 + RANK, np.float32))
        except sc.AgreementError:
            time.sleep(0 if RANK else 5)  # Meanwhile rank 1 ends.
            raise
except sc.StepCacheError as error:
    say("error", type(error).__name__)
    raise
"""


def test_a_disagreement_stays_one_where_others_have_ended_by_it(together):
    ranks = together("slower")
    assert "rank 1 of the pod is lost: ended by AgreementError" in ranks[0].output
    assert [rank.said("error") for rank in ranks] == [["AgreementError"]] * 2, ranks[0].output


CHANGES_LATER = """
import logging
logging.basicConfig(level=logging.WARNING, format="log %(message)s", stream=sys.stdout)
@sc.step(carry="state", batch="batch", static_argnames="train")
def step(state, batch, train=True):
    return state + batch.sum(), batch.mean()
@sc.step(batch="batch")
def evaluate(batch):
    return batch.mean()
def differently(state, batch):
    if {kind!r} == "shape":
        return step(state, np.ones((5, 3), np.float32))
    return step(state, batch, train=False) if {kind!r} == "static" else (state, evaluate(batch))
started = time.monotonic()
try:
    with sc.Session(mesh, agree_timeout=7):
        state, batch = np.zeros((), np.float32), np.ones((4, 3), np.float32)
        for number in range(10):
            call = differently if (RANK, number) == (1, 6) else step
            state, mean = call(state, batch)
            float(mean)
except sc.AgreementError as error:
    say("error", round(time.monotonic() - started, 1), str(error).replace(chr(10), " | "))
    raise
"""


LATER = {
    "shape": "batch: float32[12,3] → float32[15,3] (axis 0)",
    "static": "train: its default → False (static)",
    "step": "first call of evaluate",
}
TOGETHER = {
    "not coming": lambda directory: run_pod(directory, NOT_COMING, 3),
    "slower": lambda directory: run_pod(directory, SLOWER, 2),
    **{
        kind: functools.partial(
            run_pod, body=CHANGES_LATER.replace("{kind!r}", repr(kind)), count=3
        )
        for kind in LATER
    },
}


@pytest.mark.slow
@pytest.mark.parametrize("kind", LATER)
def test_a_rank_whose_calls_change_later_says_how_on_all(together, kind):
    """In the log of the one that waits, after five seconds, and in the error of all."""
    ranks, told = together(kind), LATER[kind]
    for number, rank in enumerate(ranks):
        logged = [line for line in rank.said("log") if "waiting for ranks 0, 2 to agree" in line]
        assert len(logged) == (number == 1)
        assert number != 1 or f"rank 1 needs a new program: {told}" in logged[0]
        # A rank whose collective does not end in time prints the error, and ends.
        error = (rank.said("error") or [rank.output.partition("RankLostError: ")[2]])[0]
        step = "evaluate" if kind == "step" else "step"
        assert f"ranks 0, 2 did not take part in the agreement on {step} within 7 s" in error, (
            rank.output
        )
        assert f"rank 1 needs a new program: {told}" in error and rank.code == 1, error


def test_a_call_that_differs_explains_why_its_trace_fails(shared_pod, tmp_path):
    script = """
    @sc.step(batch="batch")
    def step(batch):
        return batch.reshape(4, 2).sum()
    with sc.Session(mesh):
        try:
            step(np.ones(4 + RANK, np.float32))
        except sc.AgreementError as error:
            say("error", str(error).replace(chr(10), " | "))
    """
    for rank in shared_pod(2).run(tmp_path, script, limit=40):
        assert "batch: rank 1 float32[10]" in rank.said("error")[0], rank.output


def test_after_a_disagreement_the_same_processes_agree(shared_pod, tmp_path):
    script = """
    step = sc.step(lambda batch: batch.sum(), batch="batch")
    with sc.Session(mesh):
        try:
            step(np.ones(2 + RANK, np.float32))
        except sc.AgreementError:
            say("refused")
        say("result", float(step(np.ones(2, np.float32))))
    """
    for rank in shared_pod(2).run(tmp_path, script):
        assert rank.said("result") == ["4.0"] and "refused" in rank.output


def test_an_error_of_the_users_is_the_users_on_all_ranks(shared_pod, tmp_path):
    script = """
    @sc.step(batch="batch")
    def step(batch):
        raise KeyError("mine")
    with sc.Session(mesh):
        try:
            step(np.ones(2, np.float32))
        except KeyError as error:
            say("raised", error)
        other = sc.step(lambda batch: batch.sum(), batch="batch")
        say("result", float(other(np.ones(2, np.float32))))
    """
    for rank in shared_pod(2).run(tmp_path, script):
        assert rank.said("raised") == ["'mine'"] and rank.said("result") == ["4.0"], rank.output
