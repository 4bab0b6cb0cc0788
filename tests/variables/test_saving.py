"""`sc.save` and `sc.restore`: several items at once, by path, and what they never destroy."""

import collections
import dataclasses
import logging
import os
import subprocess
import sys
import textwrap
import threading
from pathlib import Path
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint as ocp
import pytest
from orbax.checkpoint._src.path import atomicity

import stepcache as sc
from stepcache import _process_hooks
from stepcache.variables import checkpoint_steps, checkpoints
from tests.variables.comparing import lose
from tests.variables.states import number, tree_of
from tests.variables.test_checkpoints import same

ROOT = Path(__file__).parent.parent.parent
ADAM = sc.Write(mode="apply", optimizer=optax.adam(0.1))


def contents(directory: Path) -> dict[str, bytes | None]:
    return {
        str(path.relative_to(directory)): path.read_bytes() if path.is_file() else None
        for path in sorted(directory.rglob("*"))
    }


# ---- what may be replaced ------------------------------------------------------------------------


def names_in(directory: Path) -> list[str]:
    return sorted(path.name for path in directory.iterdir())


def a_directory_of_results(path):
    (path / "deeper").mkdir(parents=True)
    (path / "deeper" / "results.txt").write_text("results")


def a_checkpoint_of_orbax(path):
    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(path, {"w": np.ones(3)})


@pytest.mark.parametrize("make", [a_directory_of_results, a_checkpoint_of_orbax, Path.touch])
def test_a_save_replaces_nothing_but_its_like(make, tmp_path):
    path = tmp_path / "step_00000003"
    make(path)
    before = contents(tmp_path)
    for item in (sc.Variables(np.zeros(3)), 3):
        with pytest.raises(sc.VariablesError, match="would replace") as raised:
            sc.save(tmp_path, item=item, step=3)
        assert raised.value.where == str(path)
    assert contents(tmp_path) == before


@pytest.mark.parametrize("make", [a_checkpoint_of_orbax, Path.touch])
def test_a_directory_of_its_own(make, tmp_path):
    make(tmp_path / "saves")
    before = contents(tmp_path)
    with pytest.raises(sc.VariablesError, match=r"into another checkpoint|could not be written"):
        sc.save(tmp_path / "saves", step=3)
    assert contents(tmp_path) == before


def test_what_else_a_directory_holds_stays(tmp_path, monkeypatch):
    """Also steps of a `CheckpointManager`, of which orbax's own would remove all but the newest."""
    monkeypatch.chdir(tmp_path)
    with ocp.CheckpointManager(tmp_path) as manager:
        for step in (1, 2):
            manager.save(step, args=ocp.args.StandardSave({"w": np.ones(3)}))
    a_directory_of_results(tmp_path / "step_00000001")
    (tmp_path / "notes.txt").write_text("notes")
    before = contents(tmp_path)
    for step in (7, 8):
        sc.save(".", step=step)
    assert before.items() <= contents(tmp_path).items()
    assert names_in(tmp_path) == ["1", "2", "notes.txt", "step_00000001", "step_00000008"]
    assert sc.restore(".", step=0) == {"step": 8}


def test_saves_without_a_step_are_numbered(tmp_path):
    for rate in (0.5, 0.25):
        sc.save(tmp_path / "saves", rate=rate)
    assert names_in(tmp_path / "saves") == ["step_00000001"]
    sc.save(tmp_path / "saves", rate=0.125, step=-1, keep=2)
    assert names_in(tmp_path / "saves") == ["step_00000001", "step_00000002"]
    assert sc.restore(tmp_path / "saves", rate=0.0, partial=True) == {"rate": 0.125}


def test_a_link_to_a_directory_stays_one(tmp_path):
    (tmp_path / "real").mkdir()
    (tmp_path / "link").symlink_to("real")
    for step in (1, 2):
        sc.save(tmp_path / "link", step=step)
    assert (tmp_path / "link").is_symlink()
    assert sc.restore(tmp_path / "real", step=0) == {"step": 2}
    assert names_in(tmp_path) == ["link", "real"]


def test_the_same_step_again_replaces_it(tmp_path):
    for step in (3, 4, 5):
        sc.save(tmp_path, w=np.zeros(3), step=step, keep=3)
    for weight in (1.0, 2.0):
        sc.save(tmp_path, w=np.full(3, weight), step=5, keep=3)
    assert sc.restore(tmp_path, w=np.zeros(3), step=0)["w"].tolist() == [2.0] * 3
    assert names_in(tmp_path) == ["step_00000003", "step_00000004", "step_00000005"]


def test_three_threads_that_save_at_once_leave_one_whole_checkpoint(tmp_path):
    errors = []

    def run(number):
        for _ in range(5):
            try:
                sc.save(tmp_path / "saved", w=np.full(10000, number), b=np.full(10000, number))
            except sc.VariablesError as error:
                errors.append(error)

    threads = [threading.Thread(target=run, args=(number,)) for number in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    found = sc.restore(tmp_path / "saved", w=np.zeros(10000, int), b=np.zeros(10000, int))
    assert (found["w"] == found["w"][0]).all() and (found["w"] == found["b"]).all()
    assert names_in(tmp_path / "saved") == ["step_00000014"] and not errors


def process(directory, body, **more):
    script = "import os, signal, sys, time\nfrom pathlib import Path\nimport numpy as np\n"
    script += "import stepcache as sc\n" + textwrap.dedent(body)
    environment = os.environ | {"PYTHONPATH": str(ROOT), "JAX_PLATFORMS": "cpu"}
    return subprocess.Popen(
        [sys.executable, "-c", script],
        cwd=directory,
        env=environment | {"STEPCACHE_DIR": "off"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        **more,
    )


@pytest.mark.slow
def test_three_processes_that_save_at_once_leave_one_whole_checkpoint(tmp_path):
    body = """
    for turn in range(8):
        try:
            sc.save("saved", w=np.full(10000, {0}), b=np.full(10000, {0}))
        except sc.VariablesError as error:
            print("typed", error)
    """
    processes = [process(tmp_path, body.format(number)) for number in range(3)]
    for each in processes:
        output = each.communicate(timeout=120)[0]
        assert each.returncode == 0, output
    found = sc.restore(tmp_path / "saved", w=np.zeros(10000, int), b=np.zeros(10000, int))
    assert (found["w"] == found["w"][0]).all() and (found["w"] == found["b"]).all()
    assert len(names_in(tmp_path / "saved")) == 1


KILLED = """
from orbax.checkpoint._src.path import atomicity
sc.save("saved", n=0, step=1, keep=2)
sc.save("saved", n=1, step=2, keep=2)
def die(*_, **__):
    os.kill(os.getpid(), signal.SIGKILL)
if {point!r} == "writing":
    atomicity.AtomicRenameTemporaryPath.finalize = die
elif {point!r} == "removing":
    import shutil
    shutil.rmtree = die
else:
    from stepcache.variables import checkpoint_steps
    cleans = iter([checkpoint_steps._clean, die])
    checkpoint_steps._clean = lambda directory: next(cleans)(directory)
sc.save("saved", n=2, step={step}, keep=2)
"""


@pytest.mark.sample(every=4)
@pytest.mark.parametrize("then", ["restore", "save"])
@pytest.mark.parametrize("step", [2, 3])
@pytest.mark.parametrize("point", ["writing", "whole", "removing"])
def test_a_killed_save_leaves_a_checkpoint_and_does_not_block_the_next(point, step, then, tmp_path):
    """Also where the checkpoint of its own step is replaced."""
    saves = tmp_path / "saved"
    killed = process(tmp_path, KILLED.format(point=point, step=step))
    output = killed.communicate(timeout=60)[0]
    assert killed.returncode == -9, output
    found = sc.restore(saves, n=0, step=0)
    is_new = point != "writing"
    assert found == {"n": 1 + is_new, "step": step if is_new else 2}
    if then == "save":
        sc.save(saves, n=4, step=4)
        assert names_in(saves) == ["step_00000004"]
        assert sc.restore(saves, n=0, step=0) == {"n": 4, "step": 4}


def test_another_process_that_is_saving_is_an_error(tmp_path):
    with checkpoint_steps.writing(tmp_path, 3, 1):
        with pytest.raises(sc.VariablesError, match="another process is writing"):
            sc.save(tmp_path, step=4)
    sc.save(tmp_path, step=4)
    assert names_in(tmp_path) == ["step_00000004"]


# ---- leaves by path ------------------------------------------------------------------------------

Ab = collections.namedtuple("Ab", "a b")
Ba = collections.namedtuple("Ba", "b a")


@jax.tree_util.register_dataclass
@dataclasses.dataclass
class DataAb:
    a: object
    b: object


@jax.tree_util.register_dataclass
@dataclasses.dataclass
class DataBa:
    b: object
    a: object


ORDERS = [
    lambda a, b: {"a": a, "b": b},
    lambda a, b: collections.OrderedDict(a=a, b=b),
    lambda a, b: collections.OrderedDict(b=b, a=a),
    lambda a, b: Ab(a, b),
    lambda a, b: Ba(b, a),
    lambda a, b: DataAb(a, b),
    lambda a, b: DataBa(b, a),
]


@pytest.mark.sample
@pytest.mark.parametrize("before", ORDERS)
@pytest.mark.parametrize("after", ORDERS)
@pytest.mark.parametrize("held", [True, False])
def test_leaves_are_read_by_path(before, after, held, tmp_path):
    ones, twos, zeros = np.ones(3), np.full(3, 2.0), np.zeros(3)
    if not held:
        sc.save(tmp_path / "saved", tree=before(ones, twos))
        found = sc.restore(tmp_path / "saved", tree=after(zeros, zeros))["tree"]
    else:
        sc.save(tmp_path / "saved", value=sc.Variables(before(ones, twos)))
        variables = sc.Variables(after(zeros, zeros))
        sc.restore(tmp_path / "saved", value=variables)
        found = variables.value
    same(
        found,
        after(
            ones.astype(found_dtype := jax.tree.leaves(found)[0].dtype), twos.astype(found_dtype)
        ),
    )


@pytest.mark.parametrize("pack", [False, True])
def test_packed_and_unpacked_variables_read_each_others_checkpoints(pack, tmp_path):
    tree = {"a": np.arange(3.0), "b": np.float32(7), "c": [np.ones((2, 2)), np.zeros(())]}
    saved = sc.Variables(tree, write=ADAM, pack=pack)
    saved.push(jax.tree.map(np.ones_like, tree))
    sc.save(tmp_path / "saved", value=saved)
    restored = sc.Variables(jax.tree.map(np.zeros_like, tree), write=ADAM, pack=not pack)
    sc.restore(tmp_path / "saved", value=restored)
    same(restored.value, saved.value)
    for each in (saved, restored):
        each.push(jax.tree.map(np.ones_like, tree))
    same(restored.value, saved.value)


ODD = [
    {"": 1, "x": 2},
    {"a/b": 1, "a": {"c": 2}},
    {"a.b": 1, "a": {"c": 2}},
    {"%": 1, "%2F": 2, "/": 3},
    collections.OrderedDict([(1, 1), ("2", 2)]),
    {"..": 1, "é\n": 3, "a:b": 4},
    {"l": [1, (2, [3])], "none": None, "empty": {}},
    [],
]


@pytest.mark.sample(every=3)
@pytest.mark.parametrize("tree", ODD, ids=map(str, range(len(ODD))))
def test_odd_keys_come_back(tree, tmp_path):
    tree = jax.tree.map(lambda number: np.full(2, number), tree)
    sc.save(tmp_path / "saved", tree=tree, step=1)
    found = sc.restore(tmp_path / "saved", tree=jax.tree.map(np.zeros_like, tree), step=0)
    same(found["tree"], tree)


SAME_PATHS = [
    {"x": 1, "x/": 2},
    {"": 1, "/": 2},
    {"a/b": 1, "a": {"b": 2}},
    {"a.b": 1, "a": {"b": 2}},
    collections.OrderedDict([(1, 1), ("1", 2)]),
    collections.OrderedDict([("1", {"b": 1}), (1, 2)]),
    collections.OrderedDict([(1, 2), ("1", {"b": 1})]),
]


@pytest.mark.parametrize("tree", SAME_PATHS, ids=map(str, range(len(SAME_PATHS))))
def test_two_leaves_of_one_path_are_refused(tree, tmp_path):
    """Orbax would store one of them."""
    with pytest.raises(sc.VariablesError, match="the same path") as raised:
        sc.save(tmp_path, tree=tree)
    assert raised.value.where.startswith("tree/") and not list(tmp_path.iterdir())


def test_a_checkpoint_of_nothing_is_refused(tmp_path):
    with pytest.raises(sc.VariablesError, match="nothing to save"):
        sc.save(tmp_path, tree=[])
    assert not list(tmp_path.iterdir())


LEAVES = {
    "int": 3,
    "large": 2**40,
    "float": 2.5,
    "bool": True,
    "complex": 1 + 2j,
    "numpy": np.float32(3),
    "float64": np.arange(3.0),
    "int64": np.arange(3),
    "strided": np.arange(6).reshape(2, 3).T,
    "bfloat16": jnp.ones(3, jnp.bfloat16),
    "int4": jnp.ones(3, jnp.int4),
    "empty": np.zeros((0, 3)),
    "empty jax": jnp.zeros((3, 0), jnp.bfloat16),
    "key": jax.random.key(7),
    "no keys": jax.random.split(jax.random.key(7), 3)[:0],
    "keys": jax.random.split(jax.random.key(7, impl="rbg"), 3),
}


@pytest.mark.sample(every=4)
@pytest.mark.parametrize("what", LEAVES)
def test_every_kind_of_leaf_comes_back_as_its_template(what, tmp_path):
    leaf = LEAVES[what]
    sc.save(tmp_path / "saved", leaf=leaf, step=1)
    found = sc.restore(tmp_path / "saved", leaf=leaf, step=0)["leaf"]
    assert type(found) is type(leaf)
    if hasattr(leaf, "dtype"):
        assert found.shape == leaf.shape
        same(found, leaf)
    else:
        assert found == leaf
    if isinstance(leaf, jax.Array):
        assert found.committed == leaf.committed
        struct = jax.ShapeDtypeStruct(leaf.shape, leaf.dtype)
        same(sc.restore(tmp_path / "saved", leaf=struct, step=0)["leaf"], leaf)


@pytest.mark.parametrize("leaf", ["text", 2**70, np.array("text"), object()])
def test_what_is_no_array_is_refused_and_writes_nothing(leaf, tmp_path):
    with pytest.raises(sc.VariablesError, match="tree/0") as raised:
        sc.save(tmp_path / "saved", tree=[leaf])
    assert "not an array" in str(raised.value) and not list(tmp_path.iterdir())


def test_a_template_says_where_arrays_go(mesh, tmp_path):
    sharding = jax.NamedSharding(mesh, jax.P("data"))
    sc.save(tmp_path / "saved", w=np.arange(16, dtype=np.float32))
    for template in (
        jax.ShapeDtypeStruct((16,), np.float32, sharding=sharding),
        jax.device_put(jnp.zeros(16), sharding),
    ):
        found = sc.restore(tmp_path / "saved", w=template)["w"]
        assert found.sharding == sharding
        np.testing.assert_array_equal(found, np.arange(16))


def test_orbax_alone_reads_what_was_saved(tmp_path):
    class State(NamedTuple):
        mu: object
        count: object

    tree = {"layers": [{"w": np.ones((2, 3))}], "state": State(jnp.zeros(2), 4)}
    params = sc.Variables({"w": np.full(3, 2.0)}, write=ADAM)
    params.push({"w": np.ones(3)})
    sc.save(tmp_path / "saved", tree=tree, params=params, step=7)
    with ocp.StandardCheckpointer() as checkpointer:
        found = checkpointer.restore(tmp_path / "saved" / "step_00000007")
    np.testing.assert_array_equal(found["tree"]["layers"]["0"]["w"], tree["layers"][0]["w"])
    assert found["tree"]["state"]["count"] == 4 and found["step"] == 7
    np.testing.assert_array_equal(found["params"]["w"], params.value["w"])
    assert found["params:optimizer"]["0"]["mu"]["w"].shape == (3,)


def test_what_orbax_alone_has_saved_is_read(tmp_path):
    optimizer = optax.adam(0.1)
    tree = {"params": {"l": [jnp.ones(2), np.arange(3.0)]}, "step": 3, "key": jax.random.key(5)}
    tree["state"] = optimizer.init(tree["params"])
    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(tmp_path / "saved", tree)
    template = {**tree, "key": jax.random.key(0), "step": 0}
    template["params"] = jax.tree.map(np.zeros_like, tree["params"])
    same(sc.restore(tmp_path / "saved", **template)["params"]["l"][1], tree["params"]["l"][1])
    found = sc.restore(tmp_path / "saved", **{**template, "params": tree["params"]})
    assert found["step"] == 3
    del found["step"], tree["step"]
    same(found, tree)
    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(tmp_path / "bare", {"w": jnp.full(3, 2.0)})
    variables = sc.Variables({"w": jnp.zeros(3)})
    sc.restore(tmp_path / "bare", params=variables)
    same(variables.value, {"w": jnp.full(3, 2.0)})


def test_what_orbax_s_manager_has_saved_is_read(tmp_path):
    tree = {"w": np.arange(3.0)}
    with ocp.CheckpointManager(tmp_path / "managed") as manager:
        for step in (9, 10):
            manager.save(step, args=ocp.args.StandardSave({"tree": tree, "step": step}))
    for path, step in ((".", 10), ("9", 9), ("9/default", 9)):
        found = sc.restore(tmp_path / "managed" / path, tree={"w": np.zeros(3)}, step=0)
        assert found["step"] == step
        same(found["tree"], tree)
    with ocp.CheckpointManager(tmp_path / "named") as manager:
        manager.save(1, args=ocp.args.Composite(tree=ocp.args.StandardSave(tree)))
    with pytest.raises(sc.VariablesError, match="no checkpoint to restore") as raised:
        sc.restore(tmp_path / "named" / "1", other=tree)
    assert "tree" in raised.value.got
    same(sc.restore(tmp_path / "named" / "1", tree={"w": np.zeros(3)})["tree"], tree)
    same(sc.restore(tmp_path / "named" / "1" / "tree", w=np.zeros(3))["w"], tree["w"])
    items = {"tree": {"w": np.zeros(3)}, "step": 4}
    with pytest.raises(sc.VariablesError, match="do not match the checkpoint") as raised:
        sc.restore(tmp_path / "named", **items)
    assert raised.value.where == "step" and "partial=True" in raised.value.hint
    restored = sc.restore(tmp_path / "named", partial=True, **items)
    same(restored["tree"], tree)
    assert restored["step"] == 4


@pytest.mark.parametrize("placement", [sc.Replicated(), sc.OnHost()])
def test_a_number_in_a_tree_that_orbax_has_saved_is_read(placement, tmp_path):
    def state(step):
        return {"step": step, "rate": 0.5 * step, "w": jnp.full(2, float(step))}

    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(tmp_path / "saved", state(7))  # As numbers of 64 bits.
    variables = sc.Variables(state(0), placement=placement)
    sc.restore(tmp_path / "saved", value=variables)
    assert {name: float(np.max(x)) for name, x in variables.value.items()} == {
        "step": 7,
        "rate": 3.5,
        "w": 7,
    }
    assert variables.value["step"].weak_type and variables.value["step"].dtype == jnp.int32
    with pytest.raises(sc.VariablesError, match="do not match"):
        sc.restore(
            tmp_path / "saved", value=sc.Variables({**state(0), "rate": 1}, placement=placement)
        )


# ---- several at once -----------------------------------------------------------------------------


def test_items_are_saved_and_restored_together(tmp_path):
    params = sc.Variables({"w": np.full(3, 2.0)}, name="params")
    moments = optax.adam(0.1).init(params.value)
    assert sc.save(tmp_path / "saved", params=params, moments=moments, step=5).done
    params.assign({"w": np.zeros(3)})
    found = sc.restore(tmp_path / "saved", params=params, moments=moments, step=0)
    assert found["params"] is params and found["step"] == 5
    np.testing.assert_array_equal(params.value["w"], 2.0)
    same(found["moments"], moments)
    assert params.version == 2


def test_an_item_that_is_not_asked_for_is_named(tmp_path):
    state = {"w": np.ones(3, np.float32)}
    sc.save(tmp_path / "saves", state=state, step=7, keep=2)
    with pytest.raises(sc.VariablesError, match=r"not asked for(?s:.*)name them too \(step=\)"):
        sc.restore(tmp_path / "saves", state=state)
    same(sc.restore(tmp_path / "saves", state=state, partial=True), {"state": state})


def test_a_restore_that_fails_changes_nothing(tmp_path):
    a, b = sc.Variables(np.ones(3)), sc.Variables(np.ones(3), write=ADAM)
    sc.save(tmp_path / "saved", a=a, b=np.ones(4))
    a.assign(np.zeros(3))
    with pytest.raises(sc.VariablesError, match="b"):
        sc.restore(tmp_path / "saved", a=a, b=b)
    assert a.version == 1 and b.version == 0
    other = sc.Variables(np.ones(3), write=ADAM)
    for each in (b, other):
        each.push(np.ones(3))
    same(b.value, other.value)


@pytest.mark.parametrize(
    ("template", "named"),
    [
        ({"w": np.zeros(3), "more": np.zeros(1)}, "tree/more"),
        ({}, "tree/w"),
        ({"w": np.zeros(4)}, "tree/w"),
        ({"w": np.zeros(3, int)}, "tree/w"),
        ({"w": 0.0}, "tree/w"),
    ],
)
def test_errors_name_the_path(template, named, tmp_path):
    sc.save(tmp_path / "saved", tree={"w": np.zeros(3)})
    with pytest.raises(sc.VariablesError, match="do not match") as raised:
        sc.restore(tmp_path / "saved", tree=template)
    assert raised.value.where == named


def test_numbers_are_not_rounded(tmp_path):
    sc.save(tmp_path / "saved", step=2.5)
    with pytest.raises(sc.VariablesError, match="step"):
        sc.restore(tmp_path / "saved", step=0)
    sc.save(tmp_path / "saved", step=2)
    assert sc.restore(tmp_path / "saved", step=0.0) == {"step": 2.0}


def test_partial_takes_what_there_is_and_says_what_there_is_not(tmp_path, caplog):
    params = sc.Variables({"w": np.ones(3), "old": np.ones(2)})
    sc.save(tmp_path / "saved", params=params, step=5)
    other = sc.Variables({"w": np.zeros(3), "new": np.full(2, 7.0)}, write=ADAM)
    ema = sc.Variables(np.zeros(3))
    with caplog.at_level(logging.WARNING, "stepcache"):
        found = sc.restore(tmp_path / "saved", partial=True, params=other, ema=ema, seed=9)
    assert found["seed"] == 9 and ema.version == 0
    for path in ("params/new", "ema", "seed"):
        assert path in caplog.text
    assert "params/w" not in caplog.text
    np.testing.assert_array_equal(other.value["w"], 1.0)
    np.testing.assert_array_equal(other.value["new"], 7.0)
    with pytest.raises(sc.VariablesError, match="params/old"):
        sc.restore(tmp_path / "saved", params=sc.Variables({"w": np.zeros(3)}), step=0)


# ---- optimizers and pending updates --------------------------------------------------------------


@pytest.mark.sample(every=4)
@pytest.mark.parametrize("placement", [sc.Replicated(), sc.OnHost(), sc.OnHost(update="host")])
@pytest.mark.parametrize("reader_is_fresh", [True, False])
def test_a_save_before_the_first_push_is_restored(placement, reader_is_fresh, tmp_path):
    def make():
        return sc.Variables({"w": np.ones(5, np.float32)}, placement=placement, write=ADAM)

    gradient = {"w": np.arange(5, dtype=np.float32)}
    variables, other = make(), make()
    sc.save(tmp_path / "saved", value=variables)
    if not reader_is_fresh:
        other.push(gradient)
    sc.restore(tmp_path / "saved", value=other)
    for _ in range(2):
        variables.push(gradient), other.push(gradient)
    np.testing.assert_array_equal(variables.value["w"], other.value["w"])


def test_updates_that_are_pending_have_to_be_written_before(tmp_path):
    """And what was pending is of the value before a restore."""
    one = {"w": np.ones(3, np.float32)}
    table = sc.Variables(one, write=sc.Write(mode="add", every=3), name="table")
    sc.save(tmp_path / "saved", table=table)
    table.push(one), table.push(one)
    with pytest.raises(sc.VariablesError, match="updates are pending") as raised:
        sc.save(tmp_path / "saved", table=table, step=5)
    assert raised.value.where == "table" and "2 updates" in raised.value.got
    assert "flush()" in raised.value.hint
    sc.restore(tmp_path / "saved", table=table)
    table.flush()
    assert table.version == 1 and table.value["w"].tolist() == [1] * 3
    table.push(one), table.flush()
    sc.save(tmp_path / "saved", table=table)
    sc.restore(tmp_path / "saved", table=table)
    assert table.value["w"].tolist() == [2] * 3


def test_leaves_that_stay_as_they_are_have_to_be_there(tmp_path):
    """And nothing else is restored then."""
    sc.save(tmp_path / "saved", first=tree_of(1), table=tree_of(1))
    first, table = sc.Variables(tree_of(2)), sc.Variables(tree_of(2) | {"more": np.ones(2)})
    lose(table)
    with pytest.raises(sc.VariablesError, match="the value is lost"):
        sc.restore(tmp_path / "saved", partial=True, first=first, table=table)
    assert number(first.value) == 2 and first.version == 0


def test_an_optimizer_can_be_left_out(tmp_path):
    variables = sc.Variables({"w": np.ones(3)}, write=ADAM)
    variables.push({"w": np.ones(3)})
    sc.save(tmp_path / "saved", params=variables)
    plain = sc.Variables({"w": np.zeros(3)})
    with pytest.raises(sc.VariablesError, match="params:optimizer"):
        sc.restore(tmp_path / "saved", params=plain)
    sc.restore(tmp_path / "saved", partial=True, params=plain)
    same(plain.value, variables.value)
    sc.save(tmp_path / "values", params=variables.value)
    with pytest.raises(sc.VariablesError, match="params:optimizer"):
        sc.restore(tmp_path / "values", params=variables)
    sc.restore(tmp_path / "values", partial=True, params=variables)
    other = sc.Variables({"w": np.ones(3)}, write=ADAM)
    other.push({"w": np.ones(3)})
    for each in (variables, other):
        each.push({"w": np.full(3, 5.0)})
    same(variables.value, other.value)


def test_a_wrong_path_says_that_there_is_no_checkpoint(tmp_path):
    for item in (sc.Variables(np.zeros(3)), 0):
        with pytest.raises(sc.VariablesError, match="no checkpoint to restore") as raised:
            sc.restore(tmp_path / "nowhere", item=item)
        assert raised.value.where == str(tmp_path / "nowhere")
    assert not list(tmp_path.iterdir())


def test_where_nothing_whole_was_saved_a_script_starts_from_the_beginning(tmp_path, monkeypatch):
    saves = tmp_path / "saves"
    (saves / "step_00000003.orbax-checkpoint-tmp").mkdir(parents=True)  # The first save was killed.
    for path in (tmp_path / "nowhere", tmp_path, saves):
        with pytest.raises(FileNotFoundError, match="no checkpoint to restore"):
            sc.restore(path, w=np.zeros(3))
    monkeypatch.setattr(ocp.StandardCheckpointer, "save", lambda *_, **__: 1 / 0)
    for path in (tmp_path / "nowhere", saves):
        with pytest.raises(sc.VariablesError, match="division by zero"):
            sc.save(path, w=np.zeros(3))
    for path in (tmp_path / "nowhere", saves):
        assert not list(path.iterdir())


# ---- several steps -------------------------------------------------------------------------------


def test_the_newest_are_kept_and_the_newest_whole_one_is_restored(tmp_path):
    saves = tmp_path / "saves"
    for step in range(8, 13):
        sc.save(saves, step=np.int64(step), w=np.full(3, step), keep=2)
    assert names_in(saves) == ["step_00000011", "step_00000012"]
    assert sc.restore(saves, step=0, w=np.zeros(3, int))["step"] == 12
    assert sc.restore(saves / "step_00000011", step=0, partial=True)["step"] == 11
    (saves / "step_00000012" / "_CHECKPOINT_METADATA").unlink()
    assert sc.restore(saves, step=0, w=np.zeros(3, int))["step"] == 11
    sc.save(saves, step=3, w=np.full(3, 3), keep=1)
    assert (saves / "step_00000003").exists() and not (saves / "step_00000011").exists()


@pytest.mark.parametrize("keep", [0, True, -1])
def test_the_number_to_keep_is_checked(keep, tmp_path):
    with pytest.raises(sc.VariablesError, match="keep"):
        sc.save(tmp_path / "saves", step=1, keep=keep)
    assert not list(tmp_path.iterdir())


# ---- asynchronous --------------------------------------------------------------------------------


def test_an_asynchronous_save_holds_the_values_of_its_moment(tmp_path):
    bump = sc.step(lambda params: jax.tree.map(lambda x: x + 1, params), carry="params")
    params = sc.Variables({"w": np.zeros(100_000, np.float32)})
    plain, numpy = jnp.zeros(100_000), np.zeros(100_000)
    saving = sc.save(tmp_path / "saved", params=params, plain=plain, numpy=numpy, asynchronous=True)
    for _ in range(3):
        params = bump(params)
        plain = jax.jit(lambda x: x + 1, donate_argnums=0)(plain)
        numpy += 1
    saving.wait()
    saving.wait()
    assert saving.done
    found = sc.restore(tmp_path / "saved", params=params, plain=plain, numpy=numpy)
    assert not np.any(params.value["w"]) and not np.any(found["plain"])
    assert not np.any(found["numpy"])


@pytest.mark.parametrize("place", ["wait", "next save"])
def test_errors_of_asynchronous_saves_surface(place, tmp_path, monkeypatch):
    sc.save(tmp_path / "saved", step=1)

    def fail(self):
        raise OSError("the disk is full")

    with monkeypatch.context() as patched:
        patched.setattr(atomicity.AtomicRenameTemporaryPath, "finalize", fail)
        saving = sc.save(tmp_path / "saved", step=2, asynchronous=True)
        with pytest.raises(sc.VariablesError, match="the disk is full"):
            saving.wait() if place == "wait" else sc.save(tmp_path / "other", step=3)
    assert sc.restore(tmp_path / "saved", step=0) == {"step": 1}
    assert names_in(tmp_path / "saved") == ["step_00000001"]
    sc.save(tmp_path / "saved", step=4)


@pytest.mark.sample(every=3)
@pytest.mark.parametrize("ending", ["", "sys.exit(0)", "raise SystemExit"])
def test_a_process_does_not_end_before_it_has_written(ending, tmp_path):
    body = f"""
    saving = sc.save("saved", w=np.ones(4_000_000), step=1, asynchronous=True)
    print("done" if saving.done else "written behind")
    {ending}
    """
    ended = process(tmp_path, body)
    output = ended.communicate(timeout=60)[0]
    expected = "done\n" if _process_hooks.THREADS_END_EARLY else "written behind\n"
    assert ended.returncode == 0 and output == expected, output
    assert sc.restore(tmp_path / "saved", w=np.zeros(4_000_000), step=0)["step"] == 1
    assert names_in(tmp_path / "saved") == ["step_00000001"]


def test_a_failure_to_write_is_typed(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(sc.VariablesError, match="could not be written"):
        sc.save(tmp_path / "file" / "saved", step=1)


@pytest.mark.slow
def test_a_save_that_fails_in_orbax_does_not_hold_up_the_next(tmp_path):
    body = """
    import resource
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    for step in range(3):
        resource.setrlimit(resource.RLIMIT_FSIZE, (100, before[1]) if step < 2 else before)
        try:
            sc.save("saved", w=np.ones(1000), step=step)
        except sc.VariablesError as error:
            is_typed = "could not be written" in str(error)
            sys.stdout.write(f"refused: {is_typed}\\n")  # At once: orbax writes beside it.
    """
    printed = process(tmp_path, body).communicate(timeout=60)[0]
    assert printed.count("refused: True") == 2, printed
    assert sc.restore(tmp_path / "saved", w=np.zeros(1000), step=0)["step"] == 2
    assert names_in(tmp_path / "saved") == ["step_00000002"]


def test_a_save_without_a_thread_of_its_own_is_written_all_the_same(tmp_path, monkeypatch):
    start = threading.Thread.start

    def refuse(self):
        if self.name == "stepcache save":
            raise RuntimeError("can't start new thread")
        start(self)

    with monkeypatch.context() as patched:
        patched.setattr(threading.Thread, "start", refuse)
        saving = sc.save(tmp_path / "saved", step=1, asynchronous=True)
    assert saving.done and sc.restore(tmp_path / "saved", step=0) == {"step": 1}
    sc.save(tmp_path / "saved", step=2)
    assert names_in(tmp_path / "saved") == ["step_00000002"]


def test_a_save_that_is_interrupted_while_it_waits_for_another_leaves_nothing(
    tmp_path, monkeypatch
):
    class Interrupted:
        def __enter__(self):
            raise KeyboardInterrupt

        def __exit__(self, *_):
            raise AssertionError("it was not entered")

    with monkeypatch.context() as patched:
        patched.setattr(checkpoints, "_saving", Interrupted())
        with pytest.raises(KeyboardInterrupt):
            sc.save(tmp_path / "saved", step=1)
    assert not list(tmp_path.iterdir())
    sc.save(tmp_path / "saved", step=2)


FAILING = """
import atexit, sys
import numpy as np, stepcache as sc
from orbax.checkpoint._src.path import atomicity
def full(self):
    raise OSError("no space left")
atomicity.AtomicRenameTemporaryPath.finalize = full
atexit.register(print, "another handler")
saving = sc.save(sys.argv[1], w=np.ones(400), asynchronous=True)
if len(sys.argv) > 2:
    try:
        saving.wait()
    except sc.VariablesError as error:
        print("heard", "no space left" in str(error))
print("the script ends")
"""


@pytest.mark.parametrize("waits", [False, True])
def test_a_failed_save_that_nobody_has_heard_of_is_in_the_exit_code(tmp_path, waits):
    command = [sys.executable, "-c", FAILING, str(tmp_path / "saved"), *["wait"] * waits]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert done.returncode == (0 if waits else 1), done.stderr
    assert "no space left" in done.stderr
    lines = done.stdout.splitlines()
    assert lines == [*["heard True"] * waits, "the script ends", "another handler"]
