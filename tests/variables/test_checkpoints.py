"""`save` and `restore`: from one mesh and placement to another, and what a directory may be."""

import contextlib
import shutil

import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint as ocp
import pytest
from comparing import arrays_of
from jax.sharding import PartitionSpec as P

import stepcache as sc


def tree(scale: float = 1.0):
    return {
        "w": (scale * np.arange(64 * 96)).reshape(64, 96).astype(np.float32),
        "b": [scale * np.ones(3, np.float32), jnp.asarray(scale, jnp.bfloat16)],
        "a/b": np.arange(4, dtype=np.int32),
        "": np.ones(2, bool),
        "empty": np.zeros((0, 3), np.float32),
        "key": jax.random.key(int(scale)),
    }


def same(a, b):
    def compare(x, y):
        if jnp.issubdtype(x.dtype, jax.dtypes.extended):
            x, y = jax.random.key_data(x), jax.random.key_data(y)
        np.testing.assert_array_equal(np.asarray(x), np.asarray(y))
        assert x.dtype == y.dtype

    jax.tree.map(compare, a, b)


PLACES = {
    "nowhere": (None, sc.Replicated()),
    "one device": ("one_device_mesh", sc.OnHost()),
    "replicated": ("mesh", sc.Replicated()),
    "sharded": ("mesh", sc.Sharded([("/w$", P("data", "model"))])),
    "on the host": ("mesh", sc.OnHost()),
}


@pytest.mark.sample(every=6)
@pytest.mark.parametrize("before", PLACES)
@pytest.mark.parametrize("after", ["nowhere", "sharded", "on the host"])
def test_a_value_moves_to_another_mesh_and_placement(before, after, tmp_path, request):
    def place(name):
        mesh, placement = PLACES[name]
        mesh = request.getfixturevalue(mesh) if mesh else None
        return (sc.Session(mesh) if mesh else contextlib.nullcontext()), placement

    session, placement = place(before)
    with session:
        variables = sc.Variables(tree(), placement=placement)
        variables.assign(tree(2.0))
        sc.save(tmp_path / "saved", value=variables)
    session, placement = place(after)
    with session:
        other = sc.Variables(tree(0.0), placement=placement)
        shardings = [array.sharding for array in arrays_of(other)]
        sc.restore(tmp_path / "saved", value=other)
        same(other.value, tree(2.0))
        assert other.version == 1
        assert [array.sharding for array in arrays_of(other)] == shardings


def test_restoring_is_one_more_write(tmp_path):
    variables = sc.Variables(np.zeros(3))
    for index in range(5):
        variables.assign(np.full(3, float(index)))
    sc.save(tmp_path / "saved", value=variables)
    for _ in range(3):
        variables.assign(np.zeros(3))
    sc.restore(tmp_path / "saved", value=variables)
    assert variables.version == 9
    np.testing.assert_array_equal(variables.value, 4.0)
    young = sc.Variables(np.zeros(3))
    sc.restore(tmp_path / "saved", value=young)
    assert young.version == 1


@pytest.mark.parametrize("placement", [sc.Replicated(), sc.OnHost(), sc.OnHost(update="host")])
def test_an_optimizer_goes_on_where_it_was(placement, tmp_path):
    def make(scale):
        write = sc.Write(mode="apply", optimizer=optax.adam(0.1))
        return sc.Variables({"w": np.full(5, scale, np.float32)}, placement=placement, write=write)

    variables, other = make(1.0), make(0.0)
    gradient = {"w": np.arange(5, dtype=np.float32)}
    for _ in range(3):
        variables.push(gradient)
    sc.save(tmp_path / "saved", value=variables)
    sc.restore(tmp_path / "saved", value=other)
    variables.push(gradient), other.push(gradient)
    np.testing.assert_array_equal(variables.value["w"], other.value["w"])


def test_saving_again_replaces_what_was_there(tmp_path):
    variables = sc.Variables(np.zeros(3))
    sc.save(tmp_path / "saved", value=variables)
    variables.assign(np.ones(3))
    sc.save(tmp_path / "saved", value=variables)
    variables.assign(np.zeros(3))
    sc.restore(tmp_path / "saved", value=variables)
    np.testing.assert_array_equal(variables.value, 1.0)


@pytest.mark.parametrize(
    ("other", "named"),
    [
        ({"w": np.zeros(4)}, "float32[3]"),
        ({"w": np.zeros(3, np.int32)}, "int32[3]"),
        ({"w": np.zeros(3), "more": np.zeros(1)}, "more"),
        ({"v": np.zeros(3)}, "v"),
    ],
)
def test_another_value_is_refused(other, named, tmp_path):
    sc.save(tmp_path / "saved", value=sc.Variables({"w": np.zeros(3)}))
    variables = sc.Variables(other)
    with pytest.raises(sc.VariablesError) as raised:
        sc.restore(tmp_path / "saved", value=variables)
    assert named in str(raised.value) and variables.version == 0


@pytest.mark.parametrize("damage", ["missing", "empty", "file", "torn", "no metadata"])
def test_what_is_no_checkpoint_is_refused(damage, tmp_path):
    directory = tmp_path / "saved"
    variables = sc.Variables({"w": np.arange(20000.0)})
    sc.save(directory, value=variables)
    if damage in ("missing", "empty", "file"):
        shutil.rmtree(directory)
    if damage == "empty":
        directory.mkdir()
    if damage == "file":
        directory.write_text("no directory")
    for path in sorted(directory.rglob("*")) if damage in ("torn", "no metadata") else ():
        is_metadata = path.name.startswith("_")
        if path.is_file() and is_metadata is (damage == "no metadata"):
            path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])
    variables.assign({"w": np.ones(20000)})
    with pytest.raises(sc.VariablesError, match="restore"):
        sc.restore(directory, value=variables)
    assert variables.version == 1
    np.testing.assert_array_equal(variables.value["w"], 1.0)


@pytest.mark.parametrize("url", ["gs://bucket/state", "s3://bucket", "file:///tmp/state"])
def test_a_url_is_refused_and_makes_no_directory(url, tmp_path, monkeypatch):
    empty = tmp_path / "empty"
    empty.mkdir()
    monkeypatch.chdir(empty)
    variables = sc.Variables({"w": np.ones(3)})
    for use in (sc.save, sc.restore):
        with pytest.raises(sc.VariablesError, match="and not a URL") as raised:
            use(url, value=variables)
        assert raised.value.got == url
    assert not list(empty.iterdir())
    assert variables.value["w"][0] == 1


# ---- what differs from what is stored ------------------------------------------------------------


def test_numbers_are_cast_where_that_is_asked_for(tmp_path):
    tree = {"w": np.arange(6, dtype=np.float32).reshape(2, 3), "n": np.arange(3)}
    sc.save(tmp_path / "saved", params=tree)
    half = sc.Variables(jax.tree.map(lambda x: jnp.zeros(x.shape, jnp.bfloat16), tree))
    with pytest.raises(sc.VariablesError, match=r"params/.: expected|cast=True") as raised:
        sc.restore(tmp_path / "saved", params=half)
    assert raised.value.hint == "restore(..., cast=True) converts it" and half.version == 0
    sc.restore(tmp_path / "saved", params=half, cast=True)
    value = half.value
    assert value["w"].dtype == jnp.bfloat16 and np.array_equal(value["w"], tree["w"])
    templates = {
        "w": jax.ShapeDtypeStruct((2, 3), jnp.float16),
        "n": np.zeros(3, np.float64),
    }
    found = sc.restore(tmp_path / "saved", params=templates, cast=True)["params"]
    assert (found["w"].dtype, found["n"].dtype) == (jnp.float16, np.float64)
    assert np.array_equal(found["w"], tree["w"]) and np.array_equal(found["n"], tree["n"])


def test_a_new_head_stays_and_an_encoder_gets_another_name(tmp_path):
    """Fine-tuning, as people write it."""
    old = {"encoder": {"w": np.ones((4, 4), "f4")}, "head": {"w": np.ones((4, 10), "f4")}}
    sc.save(tmp_path / "saved", params=old, step=3)
    new = sc.Variables({"body": {"w": np.zeros((4, 4))}, "head": {"w": np.zeros((4, 2))}}, name="p")
    rename = {"params/encoder/(.*)": r"params/body/\1"}
    with pytest.raises(sc.VariablesError) as raised:
        sc.restore(tmp_path / "saved", params=new, rename=rename, partial=True)
    assert raised.value.where == "params/head/w"
    assert raised.value.hint == "to leave it as it is: partial=True, rename={'params/head/w': None}"
    rename["params/head/w"] = None
    sc.restore(tmp_path / "saved", params=new, rename=rename, partial=True)
    value = new.value
    assert np.all(value["body"]["w"] == 1) and np.all(value["head"]["w"] == 0)


def test_what_a_users_own_checkpoint_manager_has_saved(tmp_path):
    tree = {"w": np.ones(3, np.float32), "layers": [np.zeros(2, "f4"), np.ones(2, "f4")]}
    named, unnamed = tmp_path / "named", tmp_path / "unnamed"
    with ocp.CheckpointManager(named) as manager:
        for step in (7, 8):
            params, more = (
                ocp.args.StandardSave(tree),
                ocp.args.StandardSave({"m": np.ones(step, "f4")}),
            )
            manager.save(step, args=ocp.args.Composite(params=params, moments=more))
    with ocp.CheckpointManager(unnamed) as manager:
        manager.save(3, args=ocp.args.StandardSave(tree))
    state = sc.Variables(jax.tree.map(np.zeros_like, tree))
    moments = sc.Variables({"m": np.zeros(8)})
    sc.restore(named, params=state, moments=moments)
    assert np.all(state.value["w"] == 1) and np.all(moments.value["m"] == 1)
    wrong = sc.Variables({"m": np.zeros(9)})
    state.assign(jax.tree.map(np.zeros_like, tree))
    with pytest.raises(sc.VariablesError, match="do not match"):
        sc.restore(named, params=state, moments=wrong)
    assert np.all(state.value["w"] == 0), "variables change after all has been read"
    sc.restore(named / "7", params=state)
    assert np.all(state.value["w"] == 1)
    state.assign(jax.tree.map(np.zeros_like, tree))
    sc.restore(unnamed, state=state)
    assert np.all(state.value["w"] == 1)
