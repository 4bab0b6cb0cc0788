import io
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P
from rich.console import Console

import stepcache as sc
from stepcache import jaxcompat
from stepcache.report.explanation import _abbreviated, readable_bytes


@sc.step(carry="state", batch="batch", static_argnames="train")
def train_step(state, batch, train=True):
    return state, batch["x"].sum()


STATE = {"layers": [{"kernel": np.ones((8, 16), np.float32)} for _ in range(3)], "n": 0}
BATCH = {"x": np.ones((8, 4), np.float32)}


def test_reads_as_a_table(mesh):
    with sc.Session(mesh, rules=[("kernel", P(None, "model"))]):
        text = str(train_step.explain(STATE, BATCH, train=False))
    assert text.splitlines()[0].startswith("train_step: miss.")
    assert "state/layers/0/kernel  × 3  float32[8,16]" in text
    assert "host → P(None, 'model'), carry, rule 'kernel'; moves 6.1 kB" in text
    assert "batch/x" in text and "host → P('data'), batch, split along 'data'; moves" in text
    assert "5 leaves; mesh {'data': 4, 'model': 2}" in text
    assert "static: train=False" in text
    assert all(len(line) <= 100 for line in text.splitlines())


def test_bytes_are_those_that_move(mesh):
    with sc.Session(mesh, rules=[("kernel", P(None, "model"))]):
        rows = {row.path: row for row in train_step.explain(STATE, BATCH).arguments}
    kernel = 8 * 16 * 4
    # Split in two over "model", the same on each of the four places of "data".
    assert rows["state/layers/0/kernel"].moved_bytes == kernel // 2 * 8
    assert rows["state/n"].moved_bytes == 4 * 8
    assert rows["batch/x"].moved_bytes == 8 * 4 * 4 // 4 * 8


def test_a_device_that_has_its_part_needs_no_move(mesh):
    with sc.Session(mesh):
        explanation = train_step.explain({"n": jnp.ones(100)}, BATCH)
    (row,) = [row for row in explanation.arguments if row.path == "state/n"]
    assert row.source == f"{jax.devices()[0].platform}:0"
    assert row.moved_bytes == 400 * 7


def test_a_call_that_jax_serves():
    f = sc.step(lambda x: x + 1)
    for setting in (jax.debug_key_reuse(True), jax.disable_jit()):
        with setting:
            assert "goes to jax.jit" in str(f.explain(np.ones(3)))
    assert f.explain(np.ones(3)).delegated is None
    kept = jax.new_ref(jnp.ones(3))
    g = sc.step(lambda x: x + kept[...])
    g(np.ones(3))
    assert g.stats().delegated == 1 and "captures" in g.explain(np.ones(3)).delegated


def test_a_hit_tells_what_it_saved():
    f = sc.step(lambda x: x)
    f(np.ones(3))
    explanation = f.explain(np.ones(3))
    assert explanation.hit and "hit" in str(explanation) and explanation.miss is None
    assert len(explanation.build_seconds) == 3
    assert explanation.moved_bytes == 12


def test_shapes_are_enough():
    f = sc.step(lambda x: x)
    text = str(f.explain(jax.ShapeDtypeStruct((3,), np.float32)))
    assert "abstract" in text and "float32[3]" in text


def test_what_jax_refuses_is_refused():
    with pytest.raises(TypeError):
        sc.step(lambda x: x).explain("text")


def test_what_goes_to_jit_is_said():
    f = sc.step(lambda ref: ref[...] * 2)
    assert "goes to jax.jit" in str(f.explain(jax.new_ref(jnp.ones(2))))
    said = []
    jax.jit(lambda x: said.append(str(f.explain(x))) or x)(1.0)
    assert "another transformation" in said[0]


def test_rendering_helpers():
    assert [readable_bytes(n) for n in (0, 999, 1500, 2.5e6, 3e9)] == [
        "0 B",
        "999 B",
        "1.5 kB",
        "2.5 MB",
        "3.0 GB",
    ]
    assert _abbreviated("a/b") == "a/b"
    assert _abbreviated("a" * 40 + "/b") == "a" * 40 + "/b"
    long = _abbreviated("state/" + "layer/" * 20 + "kernel")
    assert long == "state/…/layer/layer/layer/kernel"


def test_a_console_wraps_at_its_own_width():
    explanation = sc.step(lambda x: x).explain(np.ones(3))
    for width in (40, 200):
        console = Console(file=io.StringIO(), width=width)
        console.print(explanation)
        lines = console.file.getvalue().splitlines()
        assert (len(lines) > 5) is (width == 40) and max(map(len, lines)) <= width


def test_a_number_stays_with_its_unit():
    state = sc.Variables(np.ones(3, np.float32), placement=sc.OnHost())
    explanation = sc.step(lambda state: state, carry="state").explain(state)
    for width in range(40, 100):
        for line in explanation._lines(width):
            assert not re.search(r"\d\n *(B|kB|s)\b", line), line


def test_leaves_of_variables_are_counted_and_what_wraps_is_indented():
    state = sc.Variables({"w": np.ones((4, 3)), "b": np.ones(3)}, name="a_name_" * 6)
    step = sc.step(lambda state, batch: (state, batch.sum()), carry="state")
    lines = str(step.explain(state, np.ones(5))).splitlines()
    assert lines[-1].startswith("3 leaves, 2 of variables; ")
    first = next(n for n, line in enumerate(lines) if line.startswith("  state: Variables("))
    assert lines[first + 1].startswith("      ") and max(map(len, lines)) <= 100


@pytest.mark.parametrize("pack", [False, True])
def test_paths_of_variables_begin_with_the_argument(pack):
    def variables(name):
        return sc.Variables({"w": np.ones((4, 3)), "b": np.ones(3)}, name=name, pack=pack)

    step = sc.step(lambda state, *rest, x: (state, x.sum()), carry="state")
    one, two, three = map(variables, ("one", "two", "three"))
    explained = step.explain({"of": one, "plain": np.ones(2)}, two, [three, two], x=np.ones(5))
    assert [row.path for row in explained.arguments] == [
        *("state/of/b", "state/of/w", "rest/0/b", "rest/0/w", "rest/1/0/b", "rest/1/0/w"),
        *("state/plain", "x"),
    ]
    names = ["one"] * 2 + ["two"] * 2 + ["three"] * 2 + [""] * 2
    assert [row.variables for row in explained.arguments] == names
    starts = [line.split(": Variables")[0] for line in explained.variables]
    assert starts == ["state/of", "rest/0 and rest/1/1", "rest/1/0"]
    text = str(explained)
    assert "  state/plain" in text and "rest/1/0/b" not in text, "the variables have a line each"
    assert "8 leaves, 6 of variables; " in text


@pytest.mark.skipif(not jaxcompat.CAN_STORE, reason="nothing is stored")
def test_what_the_last_run_used_is_predicted(tmp_path):
    step = sc.step(lambda x: x + 1)
    cache = sc.ProgramCache(tmp_path)
    with sc.Session(cache=cache):
        assert not step.explain(np.ones(3)).predicted
        step(np.ones(3))
        for _ in range(2):  # What is stored first says then what was used.
            cache.flush()
    with sc.Session(cache=sc.ProgramCache(tmp_path)):
        explained = step.explain(np.ones(3))
        assert explained.predicted and not explained.hit and explained.miss
        assert "miss, but predicted. A call would trace and lower it" in str(explained)
        assert not step.explain(np.ones(4)).predicted
