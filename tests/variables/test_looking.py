"""Arrays that go in and come out: nobody's memory is anybody else's."""

import contextlib
import copy
import gc
import pickle

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from comparing import assert_same, raw
from flax import nnx
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P
from states import LARGE

import stepcache as sc

SMALL = (3, 5)


def add_one(tree):
    return {
        name: jax.random.fold_in(leaf, 1) if name == "key" else leaf + 1
        for name, leaf in tree.items()
    }


def aligned(shape) -> np.ndarray:
    """Ones where XLA on CPU may take the memory as it is."""
    size = 4 * int(np.prod(shape))
    memory = np.empty(size + 64, np.uint8)
    start = -memory.ctypes.data % 64
    array = memory[start : start + size].view(np.float32).reshape(shape)
    array[:] = 1
    return array


def only(array) -> float:
    """The one number that all copies of an array are full of."""
    (value,) = {float(each) for shard in array.addressable_shards for each in np.unique(shard.data)}
    return value


@pytest.fixture(params=[None, 8])
def session(request):
    if request.param is None:
        return contextlib.nullcontext()
    mesh = jax.make_mesh((request.param,), ("data",), axis_types=(AxisType.Auto,))
    return sc.Session(mesh)


def test_what_was_looked_at_stays_as_it_was(session):
    step = sc.step(lambda state: add_one(state), carry="state")
    with session:
        tree = {"large": np.zeros(LARGE, np.float32), "a": np.zeros(SMALL, np.float32)}
        tree |= {"b": np.zeros(SMALL, np.float32), "n": 0, "key": jax.random.key(0)}
        variables, seen = sc.Variables(tree), []
        for _ in range(5):
            seen.append(variables.value)
            seen.append(variables.value)
            step(variables)
    keys = [raw(each["key"]).tolist() for each in seen]
    assert len({str(key) for key in keys}) == 5
    for index, each in enumerate(seen):
        assert {only(each[name]) for name in ("large", "a", "b", "n")} == {index // 2}


VIEWS = {
    "numpy": lambda x: np.asarray(x),
    "shard": lambda x: x.addressable_shards[0].data,
    "same device": lambda x: jax.device_put(x, jax.devices()[0]),
    "mesh of one": lambda x: jax.device_put(x, NamedSharding(jax.make_mesh((1,), ("x",)), P())),
    "mesh of eight": lambda x: jax.device_put(x, NamedSharding(jax.make_mesh((8,), ("x",)), P())),
    "dlpack": lambda x: jax.dlpack.from_dlpack(x.addressable_data(0)),
    "identity": lambda x: jax.jit(lambda y: y)(x),
}


@pytest.mark.sample
@pytest.mark.parametrize("view", VIEWS)
def test_what_was_made_of_it_stays_as_it_was(view, session):
    step = sc.step(lambda state: add_one(state), carry="state")
    with session:
        variables = sc.Variables({"large": np.zeros(LARGE, np.float32)})
        step(variables)
        kept = VIEWS[view](variables.value["large"])
        gc.collect()
        step(variables)
        step(variables)
    assert np.unique(np.asarray(kept)).tolist() == [1]


def test_what_was_looked_at_may_be_donated(session):
    step = sc.step(lambda state: add_one(state), carry="state")
    plain = sc.step(lambda state: add_one(state), carry="state")
    with session:
        tree = {"large": np.zeros(LARGE, np.float32), "key": jax.random.key(0)}
        tree |= {"a": np.zeros(SMALL, np.float32), "b": np.zeros(SMALL, np.float32)}
        variables = sc.Variables(tree)
        value = variables.value
        for _ in range(3):
            value = plain(value)
        assert [only(value[name]) for name in ("large", "a", "b")] == [3, 3, 3]
        assert raw(variables.value["key"]).tobytes() == raw(tree["key"]).tobytes()
        step(variables)
        assert [only(variables.value[name]) for name in ("large", "a", "b")] == [1, 1, 1]


# ---- what variables are made of --------------------------------------------------------------


def sources():
    whole = NamedSharding(jax.make_mesh((8,), ("data",), axis_types=(AxisType.Auto,)), P())
    return {
        "uncommitted": lambda x: jnp.asarray(x) + 0,
        "on the first device": lambda x: jax.device_put(x, jax.devices()[0]) + 0,
        "on another device": lambda x: jax.device_put(x, jax.devices()[3]) + 0,
        "on eight devices": lambda x: jax.device_put(x, whole) + 0,
    }


@pytest.mark.sample
@pytest.mark.parametrize("source", list(sources()))
@pytest.mark.parametrize("assigned", [False, True])
def test_the_users_arrays_stay_as_they_were(source, assigned, session):
    put = sources()[source]
    tree = {"large": put(np.ones(LARGE, np.float32)), "alone": put(np.ones(SMALL, np.float32))}
    tree["key"] = jax.device_put(jax.random.key(7), tree["large"].sharding)
    step = sc.step(lambda state: add_one(state), carry="state")
    with session:
        if assigned:
            variables = sc.Variables(jax.tree.map(lambda x: x, tree))
            variables.assign(tree)
        else:
            variables = sc.Variables(tree)
        for _ in range(3):
            step(variables)
        assert only(variables.value["large"]) == 4
    assert only(tree["large"]) == only(tree["alone"]) == 1
    assert raw(tree["key"]).tobytes() == raw(jax.random.key(7)).tobytes()


def test_a_plain_carry_is_used_up():
    """What the tests above could not tell from a copy, if it were not so."""
    tree = {"large": jnp.ones(LARGE)}
    sc.step(lambda state: add_one(state), carry="state")(tree)
    assert tree["large"].is_deleted()


@pytest.mark.parametrize("shape", [LARGE, SMALL])
@pytest.mark.parametrize("assigned", [False, True])
def test_a_numpy_array_may_be_changed_afterwards(shape, assigned, session):
    source, other = aligned(shape), aligned(shape)
    step = sc.step(lambda state: add_one(state), carry="state")
    with session:
        if assigned:
            variables = sc.Variables({"a": np.zeros(shape, np.float32), "b": other})
            variables.assign({"a": source, "b": other})
        else:
            variables = sc.Variables({"a": source, "b": other})
        source[:] = 7
        assert only(variables.value["a"]) == 1
        step(variables)
        source[:] = 8
        assert only(variables.value["a"]) == 2
    assert np.unique(source).tolist() == [8] and np.unique(other).tolist() == [1]


@pytest.mark.skipif(jax.default_backend() != "cpu", reason="memory is shared on CPU")
def test_jax_itself_takes_such_memory_as_it_is():
    """What the test above could not tell from a copy, if it were not so."""
    source = aligned(LARGE)
    array = jax.device_put(source)
    source[:] = 7
    assert only(array) == 7


# ---- assigning -------------------------------------------------------------------------------


def test_assigning_is_a_write():
    variables = sc.Variables({"a": np.zeros(3, np.float32), "n": 0})
    variables.assign({"a": np.ones(3, np.float32), "n": 4})
    assert variables.version == 1
    assert only(variables.value["a"]) == 1 and int(variables.value["n"]) == 4
    other = sc.Variables(variables.value)
    assert_same(variables.value, other.value)
    assert other.version == 0


W, B = np.zeros((2, 3), np.float32), np.zeros(3, np.float32)
TREE = {"layer": {"w": W, "b": [B]}, "n": 0}


@pytest.mark.parametrize(
    ("change", "parts"),
    [
        ({"n": np.zeros(2, np.int32)}, ["table/n", "int32[]", "int32[2]"]),
        ({"n": 0.5}, ["table/n", "int32[]", "float32[]"]),
        ({"n": "zero"}, ["table/n", "int32[]", "str"]),
        ({"n": 2**40}, ["table/n", "int32[]", "int"]),
        ({"n": jax.ShapeDtypeStruct((), np.int32)}, ["table/n", "int32[]", "ShapeDtypeStruct"]),
        ({"layer": {"w": W.T, "b": [B]}}, ["table/layer/w", "float32[2, 3]", "float32[3, 2]"]),
        ({"layer": {"w": W.astype(jnp.bfloat16), "b": [B]}}, ["table/layer/w", "bfloat16[2, 3]"]),
        ({"layer": {"w": W, "b": []}}, ["table/layer/b/0", "a leaf 'layer/b/0'", "none"]),
        ({"layer": {"w": W, "b": [B, B]}}, ["table/layer/b/1", "a leaf 'layer/b/1'"]),
        ({"layer": {"w": W, "b": (B,)}}, ["table", "structure", "PyTreeDef"]),
        ({"more": B}, ["table/more", "a leaf 'more'"]),
    ],
)
def test_what_cannot_be_assigned_is_named_and_changes_nothing(change, parts):
    variables = sc.Variables(TREE, name="table")
    before = variables.value
    with pytest.raises(sc.VariablesError) as raised:
        variables.assign({**TREE, **change})
    for part in parts:
        assert part in str(raised.value), str(raised.value)
    assert variables.version == 0
    assert_same(before, variables.value)


def test_assigning_inside_a_transformation_is_an_error():
    variables = sc.Variables({"large": np.zeros(LARGE, np.float32), "n": 0})

    def assign(x):
        variables.assign({"large": x, "n": 0})
        return x.sum()

    def assign_known(x):
        variables.assign({"large": np.ones(LARGE, np.float32), "n": 1})
        return x.sum()

    for fun in (assign, assign_known):
        for transformed in (jax.jit(fun), jax.grad(fun), sc.step(fun)):
            with pytest.raises(sc.VariablesError, match="inside a transformation"):
                transformed(np.ones(LARGE, np.float32))
    assert variables.version == 0 and only(variables.value["large"]) == 0


# ---- what cannot be held ---------------------------------------------------------------------


@pytest.mark.parametrize(
    "leaf",
    [
        *("text", b"bytes", object(), len, 2**40, np.array(["text"]), np.array([None])),
        *(np.zeros(2, "datetime64[s]"), np.zeros(2, [("x", "f4")]), np.zeros(2, ">i4")),
        jax.ShapeDtypeStruct((2,), np.float32),
    ],
    ids=lambda leaf: f"{type(leaf).__name__} {getattr(leaf, 'dtype', '')}",
)
def test_a_leaf_that_is_no_array_is_named(leaf):
    with pytest.raises(sc.VariablesError, match="a leaf is not an array") as raised:
        sc.Variables({"w": np.ones(2), "more": [leaf]}, name="table")
    assert raised.value.where == "table/more/0"
    assert raised.value.got.startswith(type(leaf).__name__)
    assert f"{getattr(leaf, 'dtype', '')}" in raised.value.got


def test_variables_are_not_made_inside_a_transformation():
    def make(x):
        return sc.Variables({"w": np.ones(2, np.float32)} if x is None else {"w": x}).value["w"]

    for transformed in (jax.jit(make), jax.grad(lambda x: make(x).sum()), jax.vmap(make)):
        with pytest.raises(sc.VariablesError, match="inside a transformation"):
            transformed(np.ones((2, 2), np.float32))


@pytest.mark.parametrize("take", [pickle.dumps, copy.copy, copy.deepcopy], ids=lambda f: f.__name__)
def test_variables_are_neither_pickled_nor_copied(take):
    variables = sc.Variables({"w": np.ones(2)}, name="table")
    with pytest.raises(sc.VariablesError, match=r"table(.|\n)*\.value"):
        take(variables)
    again = sc.Variables(pickle.loads(pickle.dumps(variables.value)))
    assert_same(variables.value, again.value)


def test_sharded_needs_a_mesh():
    with pytest.raises(sc.VariablesError, match="there is none") as raised:
        sc.Variables({"w": np.ones(2)}, placement=sc.Sharded([("w", P("data"))]))
    assert "Session(mesh)" in raised.value.hint


def test_what_does_not_divide_or_has_no_axis_is_named(mesh):
    with sc.Session(mesh):
        with pytest.raises(sc.PlacementError, match="table/w"):
            sc.Variables({"w": np.ones(3)}, placement=sc.Sharded([("w", P("data"))]), name="table")
        with pytest.raises(sc.PlacementError, match="expert"):
            sc.Variables({"w": np.ones(3)}, placement=sc.Sharded([("w", P("expert"))]))


# ---- other sessions --------------------------------------------------------------------------


def test_variables_of_another_mesh_are_refused(mesh):
    step = sc.step(lambda state: add_one(state), carry="state")
    outside = sc.Variables({"w": np.zeros(8, np.float32)}, name="outside")
    with sc.Session(mesh):
        inside = sc.Variables({"w": np.zeros(8, np.float32)}, name="inside")
        with pytest.raises(sc.VariablesError, match="outside") as raised:
            step(outside)
        assert raised.value.expected == "no mesh" and "4" in raised.value.got
        for look in (step.explain, step.warm, step.trace):
            with pytest.raises(sc.VariablesError, match="outside"):
                look(outside)
    with pytest.raises(sc.VariablesError, match="inside"):
        step(inside)
    other = jax.make_mesh((2, 4), ("data", "model"), axis_types=(AxisType.Auto,) * 2)
    with sc.Session(other), pytest.raises(sc.VariablesError, match="inside"):
        step(inside)
    assert (outside.version, inside.version) == (0, 0)
    step(outside)
    with sc.Session(jax.make_mesh((4, 2), ("data", "model"), axis_types=(AxisType.Auto,) * 2)):
        step(inside)
        outside_now = outside.value
        inside.assign(outside_now)
    assert only(inside.value["w"]) == 1 and inside.version == 2


def test_the_session_of_a_step_counts_for_its_calls(mesh):
    session = sc.Session(mesh)
    step = session.step(lambda state: add_one(state), carry="state")
    with session:
        variables = sc.Variables({"w": np.zeros(8, np.float32)})
    step(variables)
    assert only(variables.value["w"]) == 1


# ---- how they are passed ---------------------------------------------------------------------


def test_carried_twice_is_an_error():
    variables = sc.Variables({"w": np.ones(3, np.float32)}, name="table")
    step = sc.step(lambda a, b: (a, b), carry=("a", "b"))
    for call in (
        lambda: step(variables, variables),
        lambda: step({"x": variables, "y": variables}, {}),
        lambda: step.explain(variables, variables),
    ):
        with pytest.raises(sc.VariablesError, match="carried twice") as raised:
            call()
        assert "table" in raised.value.got
    assert variables.version == 0
    step(variables, {})
    assert variables.version == 1


@pytest.mark.parametrize(
    "options", [{"donate_argnums": 0}, {"donate_argnums": (-2,)}, {"donate_argnames": ("state",)}]
)
def test_donated_and_not_carried_is_an_error(options):
    variables = sc.Variables({"w": np.ones(LARGE, np.float32)}, name="table")
    step = sc.step(lambda state, x: add_one(state), **options)
    for call in (lambda: step(variables, 1), lambda: step(state=[variables], x=1)):
        with pytest.raises(sc.VariablesError, match="donated but not carried") as raised:
            call()
        assert "argument state" in raised.value.where and "carry='state'" in raised.value.hint
    assert only(variables.value["w"]) == 1
    step({"w": jnp.ones(3)}, variables)


def test_static_is_an_error():
    variables = sc.Variables({"w": np.ones(3, np.float32)}, name="table")
    step = sc.step(lambda x, scale=None: x * 2, static_argnames="scale")
    for call in (lambda: step(1.0, variables), lambda: step(1.0, scale=(variables,))):
        with pytest.raises(sc.VariablesError, match="static") as raised:
            call()
        assert "argument scale" in raised.value.where and "table" in raised.value.got


@pytest.mark.parametrize("option", ["in_shardings", "out_shardings"])
def test_an_option_that_places_leaf_by_leaf_is_an_error(option, mesh):
    whole, split = NamedSharding(mesh, P()), NamedSharding(mesh, P("data"))
    by_leaf = ({"w": whole, "b": split}, None)

    def train_step(state, x):
        return {name: leaf + 1 for name, leaf in state.items()}, x * 2

    with sc.Session(mesh):
        variables = sc.Variables({"w": np.zeros(3, np.float32), "b": np.zeros(8, np.float32)})
        step = sc.step(train_step, carry="state", **{option: by_leaf})
        with pytest.raises(sc.VariablesError, match=f"{option} cannot place variables") as raised:
            step(variables, np.ones(8, np.float32))
        assert "argument state" in raised.value.where and "placement=" in raised.value.hint
        step(jax.tree.map(jnp.asarray, {"w": np.zeros(3), "b": np.zeros(8)}), np.ones(8))
        for entry in (None, whole):
            step = sc.step(train_step, carry="state", **{option: (entry, split)})
            _, doubled = step(variables, np.ones(8, np.float32))
            assert doubled.sharding.is_equivalent_to(split, 1)
    assert only(variables.value["w"]) == variables.version == 2


def test_under_disable_jit():
    kept = []

    @sc.step(carry="state")
    def step(state, scale):
        if not isinstance(state["large"], jax.core.Tracer):
            kept.append(state["large"])
        return {**state, "a": state["a"] + scale}, state["large"]

    variables = sc.Variables({"large": np.ones(LARGE, np.float32), "a": np.zeros(3, np.float32)})
    with jax.disable_jit():
        state, large = step(variables, 2.0)
        assert state is variables and variables.version == 1
        kept.append(large)
    for _ in range(2):
        step(variables, 1.0)
    assert only(variables.value["a"]) == 4
    assert [only(each) for each in kept] == [1, 1]


def test_a_closed_session_refuses_and_changes_nothing(mesh):
    step = sc.step(lambda state: add_one(state), carry="state")
    session = sc.Session(mesh)
    with session:
        variables = sc.Variables({"w": np.zeros(8, np.float32)})
        step(variables)
        session.close()
        with pytest.raises(sc.SessionClosedError):
            step(variables)
        assert only(variables.value["w"]) == variables.version == 1
    with sc.Session(mesh):
        step(variables)
    assert only(variables.value["w"]) == variables.version == 2


def test_only_the_names_that_users_need_are_public():
    names = "assign block_until_ready copy flush name nbytes placement push read"
    variables = sc.Variables({"w": np.ones(2)})
    public = [name for name in dir(variables) if not name.startswith("_")]
    assert public == [*names.split(), "value", "version", "write"]


@pytest.mark.parametrize("name", ["save", "restore"])
def test_a_method_that_is_gone_says_what_to_write(name):
    with pytest.raises(AttributeError, match=rf"stepcache\.{name}\(directory, value=\.\.\.\)"):
        getattr(sc.Variables({"w": np.ones(2)}), name)


MISUSES = {
    "v['w']": lambda v: v["w"],
    "v['w'] = 1": lambda v: v.__setitem__("w", 1),
    "iteration": list,
    "in": lambda v: "w" in v,
    "len": len,
    "v + 1": lambda v: v + 1,
    "1 - v": lambda v: 1 - v,
    "-v": lambda v: -v,
    "v @ array": lambda v: v @ np.ones((2, 2)),
    "array * v": lambda v: np.ones(2) * v,
    "v < 1": lambda v: v < 1,
    "jax.tree.map": lambda v: jax.tree.map(lambda x: 2 * x, v),
    "np.asarray": np.asarray,
    "np.add": lambda v: np.add(v, 1),
}


@pytest.mark.parametrize("misuse", MISUSES)
def test_what_only_the_tree_can_do_names_value(misuse):
    variables = sc.Variables({"w": np.ones(2, np.float32)}, name="table")
    with pytest.raises(sc.VariablesError, match=r"at: table(.|\n)*\.value") as raised:
        MISUSES[misuse](variables)
    assert isinstance(raised.value, TypeError)  # As of any object that cannot do this.
    assert variables  # Though it has no length.


@pytest.mark.parametrize(
    "transform", [jax.jit, jax.vmap, jax.grad, jax.eval_shape, nnx.jit, nnx.grad]
)
def test_transformations_name_value(transform):
    variables = sc.Variables({"w": np.ones(2, np.float32)}, name="table")

    def function(tree):
        return tree["w"].sum()

    with pytest.raises(sc.VariablesError, match=r"at: table(.|\n)*\.value"):
        if transform is jax.eval_shape:
            transform(function, variables)
        transform(function)(variables)


def test_attributes_of_the_tree_name_value_and_are_not_there():
    variables = sc.Variables({"w": np.ones(2, np.float32)}, name="table")
    assert not hasattr(variables, "w") and getattr(variables, "shape", None) is None
    with pytest.raises(AttributeError, match=r"'w'(.|\n)*at: table(.|\n)*\.value") as raised:
        _ = variables.w
    assert isinstance(raised.value, sc.VariablesError)


@pytest.mark.parametrize("name", ["w", "value", "version", "name", "placement", "read", "write"])
def test_attributes_that_would_be_lost_cannot_be_set(name):
    variables = sc.Variables({"w": np.ones(2, np.float32)}, name="params")
    expected = rf"'{name}' of variables cannot be set(.|\n)*\.assign"
    with pytest.raises(AttributeError, match=expected):
        setattr(variables, name, {"w": np.zeros(2, np.float32)})
    assert variables.version == 0 and variables.value["w"].sum() == 2
