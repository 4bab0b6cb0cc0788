"""`Pad`: batches of any size find a program, and nobody sees the rows that were added."""

import pickle

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import stepcache as sc
from stepcache.errors import OptionError, PaddingError, PlacementError

DATA = np.random.default_rng(0).standard_normal((64, 3)).astype(np.float32)


def loss_of(w, x, y, mask):
    errors = (x @ w - y) ** 2
    return jnp.sum(errors * mask) / jnp.sum(mask), errors


def train_step(state, batch, mask):
    (loss, errors), slope = jax.value_and_grad(loss_of, has_aux=True)(
        state["w"], batch["x"], batch["y"], mask
    )
    return {"w": state["w"] - 0.1 * slope}, {"loss": loss, "errors": errors}


def batches(sizes):
    return [{"x": DATA[:n], "y": np.ones(n, np.float32)} for n in sizes]


def new_state():
    return {"w": np.zeros(3, np.float32)}


def trained(step, state, sizes, **more):
    losses = []
    for batch in batches(sizes):
        state, seen = step(state, batch, **more)
        assert seen["errors"].shape == (len(batch["x"]),)
        losses.append(float(seen["loss"]))
    return losses


def unpadded(sizes):
    state, losses = new_state(), []
    for batch in batches(sizes):
        state, seen = train_step(state, batch, np.ones(len(batch["x"]), bool))
        losses.append(float(seen["loss"]))
    return losses


SIZES = (5, 8, 7, 16, 13, 1, 2, 33)


def test_sizes_share_programs_and_losses_are_those_without_padding():
    step = sc.step(train_step, carry="state", batch="batch", pad=sc.Pad("batch", mask="mask"))
    losses = trained(step, new_state(), SIZES)
    np.testing.assert_allclose(losses, unpadded(SIZES), rtol=1e-5)
    assert step.stats().misses == 5  # 8, 16, 1, 2, 64
    padded = sum(1 << (size - 1).bit_length() for size in SIZES)
    assert step.stats().padding == pytest.approx(1 - sum(SIZES) / padded)
    assert "padding" in str(step.stats()) and not step.last_miss.advice


def test_arrays_of_jax_are_padded_too():
    step = sc.step(train_step, carry="state", pad=sc.Pad("batch", mask="mask"))
    state, committed = new_state(), jax.devices()[1]
    for batch, place in zip(batches((5, 6, 7)), (None, None, committed), strict=True):
        state, seen = step(jax.device_put(state, place), jax.device_put(batch, place))
        assert seen["errors"].shape == (len(batch["x"]),)
        assert place is None or seen["errors"].devices() == {committed}
    assert step.stats().misses == 2


def test_under_a_transformation_a_padded_step_means_the_same():
    @sc.step(pad=sc.Pad(("x", "y"), mask="mask"))
    def loss(w, x, y, mask):
        return loss_of(w, x, y, mask)[0]

    x, y, w = DATA[:5], np.ones(5, np.float32), np.zeros(3, np.float32)
    slope = jax.grad(loss)(w, x, y)
    expected = jax.grad(lambda w: loss_of(w, x, y, np.ones(5))[0])(w)
    np.testing.assert_allclose(slope, expected, rtol=1e-6)
    of_rows = jax.jit(jax.grad(loss, argnums=1))(w, x, y)
    assert of_rows.shape == (5, 3)


def test_under_a_transformation_rows_that_are_split_over_a_mesh_are_padded():
    mesh = jax.make_mesh(
        (4,), ("data",), axis_types=(AxisType.Explicit,), devices=jax.devices()[:4]
    )
    step = sc.step(lambda x: (2 * x, (x**2).sum()), batch="x", pad=sc.Pad("x", sizes=(16,)))
    with sc.Session(mesh), jax.set_mesh(mesh):
        x = jax.device_put(DATA[:12], NamedSharding(mesh, P("data")))
        np.testing.assert_array_equal(jax.jit(lambda x: step(x)[0])(x), 2 * x)
        slope = jax.grad(lambda x: step(x)[0].sum())(x)
        np.testing.assert_array_equal(slope, np.full((12, 3), 2, np.float32))


def test_only_outputs_that_follow_the_size_are_cut():
    @sc.step(pad=sc.Pad("x"), static_argnames="mode")
    def f(x, table, mode="rows"):
        if mode == "rows":
            return x @ table, table, {"both": x @ x.T}
        return table.T

    table = np.ones((3, 8), np.float32)  # As wide as the padded batch.
    rows, same, both = f(DATA[:5], table)
    assert rows.shape == (5, 8) and same.shape == (3, 8) and both["both"].shape == (5, 5)
    assert f(DATA[:5], table, mode="table").shape == (8, 3)
    np.testing.assert_allclose(both["both"], DATA[:5] @ DATA[:5].T, rtol=1e-5)


@pytest.mark.sample(every=4)
@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit])
@pytest.mark.parametrize("is_placed", [False, True])
def test_rows_of_arrays_that_are_split_over_a_mesh(kind, is_placed):
    mesh = jax.make_mesh((4,), ("data",), axis_types=(kind,), devices=jax.devices()[:4])
    step = sc.step(lambda x: (2 * x, x.T), batch="x", pad=sc.Pad("x"))
    with sc.Session(mesh):
        for size in (12, 20) if is_placed else (3, 4, 5, 12):
            x = DATA[:size]
            given = jax.device_put(x, NamedSharding(mesh, P("data"))) if is_placed else x
            double, other = step(given)
            np.testing.assert_array_equal(double, 2 * x)
            np.testing.assert_array_equal(other, x.T)


def test_outputs_are_cut_by_the_shapes_that_variables_hold():
    """Two values of other shapes make the padded axis another one of the outputs."""

    @sc.step(pad=sc.Pad("x"))
    def f(w, x):
        return w @ x.T

    one, eight = (sc.Variables(np.ones((*n, 3), np.float32)) for n in ((), (8,)))
    for w in (one, eight, one):
        np.testing.assert_allclose(f(w, DATA[:5]), w.value @ DATA[:5].T, rtol=1e-5)


@pytest.mark.parametrize(
    "other",
    [
        lambda x: x.reshape(-1),
        lambda x: jnp.concatenate([x, x]),
        lambda x: (x, jnp.diff(x, axis=0)),
        lambda x: (x, x.reshape(-1)),
    ],
)
def test_what_does_not_follow_the_size_row_by_row_is_refused(other):
    step = sc.step(other, pad=sc.Pad(["x"]))
    jax.tree.map(np.testing.assert_array_equal, step(DATA[:8]), other(DATA[:8]))
    with pytest.raises(PaddingError, match="row by row"):
        step(DATA[:5])


@pytest.mark.parametrize("carry", [(np.ones((8, 3), np.float32),) * 2, np.ones((8, 8), np.float32)])
def test_a_carry_is_never_cut(carry):
    @sc.step(carry="state", pad=sc.Pad("x"))
    def alone(state, x):
        return jax.tree.map(lambda leaf: leaf + x.sum(), state)

    @sc.step(carry="state", pad=sc.Pad("x"))
    def first(state, x):
        return jax.tree.map(lambda leaf: leaf + 1, state), x * 2

    copy = jax.tree.map(np.copy, carry)
    assert jax.tree.map(np.shape, alone(copy, DATA[:5])) == jax.tree.map(np.shape, carry)
    state, doubled = first(jax.tree.map(np.copy, carry), DATA[:5])
    assert jax.tree.map(np.shape, state) == jax.tree.map(np.shape, carry)
    np.testing.assert_allclose(doubled, 2 * DATA[:5])


def test_several_axes():
    pads = (
        sc.Pad("batch", mask="rows"),
        sc.Pad("batch/tokens", axis=1, sizes=(4, 16), mask="columns", count="length"),
    )

    @sc.step(pad=pads)
    def f(batch, rows, columns, length):
        seen = batch["tokens"] * columns * rows[:, None]
        return seen.sum(), batch["tokens"] + 1, length, batch["other"]

    for rows, columns in ((3, 2), (4, 3), (4, 16), (5, 7)):
        tokens = np.arange(rows * columns, dtype=np.int32).reshape(rows, columns)
        total, more, length, other = f({"tokens": tokens, "other": np.ones((rows, 9))})
        assert total == tokens.sum() and length == columns and other.shape == (rows, 9)
        np.testing.assert_array_equal(more, tokens + 1)
    assert f.stats().misses == 3


def test_a_session_pads_to_what_its_devices_divide(mesh):
    step = sc.step(train_step, carry="state", batch="batch", pad=sc.Pad("batch", mask="mask"))
    with sc.Session(mesh):
        losses = trained(step, new_state(), (3, 7, 9, 1))
        assert step.stats().misses == 3  # 4, 8, 16
        np.testing.assert_allclose(losses, unpadded((3, 7, 9, 1)), rtol=1e-5)
        assert "moves" in str(step.explain(new_state(), batches((3,))[0]))
        odd = sc.step(train_step, batch="batch", pad=sc.Pad("batch", sizes=(9,), mask="mask"))
        with pytest.raises(PlacementError, match="9"):
            odd(new_state(), batches((3,))[0])


def test_variables_are_carried_beside_a_padded_batch():
    step = sc.step(
        train_step, carry="state", pad=sc.Pad("batch", mask="mask", check=True), batch="batch"
    )
    state = sc.Variables(new_state())
    np.testing.assert_allclose(trained(step, state, SIZES), unpadded(SIZES), rtol=1e-5)
    assert state.version == len(SIZES) and step.stats().misses == 5


def test_what_runs_nothing_sees_the_padded_call():
    step = sc.step(train_step, carry="state", pad=sc.Pad("batch", mask="mask"))
    batch = batches((5,))[0]
    shapes = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype), batch)
    step.warm(new_state(), shapes)
    with sc.no_recompile():
        step(new_state(), batches((7,))[0])
    assert step.eval_shape(new_state(), batch)[1]["errors"].shape == (5,)
    assert "148 B moved" in str(step.explain(new_state(), batch))  # 12 + 8 * (3 * 4 + 4 + 1)
    assert "8x3" in step.lower(new_state(), batch).as_text()


def test_an_empty_batch_is_padded_with_zeros():
    step = sc.step(lambda x, mask: (x * mask[:, None]).sum(), pad=sc.Pad("x", mask="mask"))
    assert step(DATA[:0]) == 0


def test_keys_are_padded():
    step = sc.step(lambda keys: jax.vmap(jax.random.uniform)(keys), pad=sc.Pad("keys"))
    keys = jax.random.split(jax.random.key(0), 5)
    np.testing.assert_array_equal(step(keys), jax.vmap(jax.random.uniform)(keys))


@pytest.mark.sample(every=6)
@pytest.mark.parametrize("kind", [None, AxisType.Auto, AxisType.Explicit])
@pytest.mark.parametrize("rows", [0, 3])
def test_odd_leaves_are_padded_and_cut(kind, rows):
    mesh = kind and jax.make_mesh((4, 2), ("data", "model"), axis_types=(kind,) * 2)
    batch = {
        "keys": jax.random.split(jax.random.key(0), rows),
        "wide keys": jax.random.split(jax.random.key(0, impl="rbg"), (rows, 2)),
        "committed": jax.device_put(jnp.ones((rows, 2), bool), jax.devices()[0]),
        "bfloat16": np.ones((rows, 2), jnp.bfloat16),
        "empty": np.ones((rows, 0), np.float32),
        "float0": np.zeros(rows, jax.dtypes.float0),
        "number": np.float32(2),
    }
    if kind is not None:
        del batch["committed"]  # To a device that is not the mesh.
    step = sc.step(batch="batch", pad=sc.Pad("batch"))(lambda batch: batch)
    with sc.Session(mesh):
        found = step(batch)
    for name, leaf in batch.items():
        assert found[name].shape == leaf.shape and found[name].dtype == leaf.dtype, name
    for name in ("keys", "wide keys"):
        assert (jax.random.key_data(found[name]) == jax.random.key_data(batch[name])).all()
    assert (found["bfloat16"] == 1).all()


def test_masked_arrays_are_left_to_jax():
    step = sc.step(pad=sc.Pad("x"))(lambda x: x)
    with pytest.raises(ValueError, match="masked arrays"):
        step(np.ma.masked_array(np.ones(3, np.float32), [0, 1, 0]))


def test_the_check_names_what_depends_on_the_padding():
    step = sc.step(
        lambda x, mask: {"mean": x.mean(), "sum": (x * mask[:, None]).sum(), "rows": x * 2},
        pad=sc.Pad("x", mask="mask", check=True),
    )
    with pytest.raises(PaddingError, match=r"(?s)output\['mean'\].*mask"):
        step(DATA[:5])
    step(DATA[:8])  # Nothing is added.
    fine = sc.step(
        lambda x, mask: (x * mask[:, None]).sum(), pad=sc.Pad("x", mask="mask", check=True)
    )
    fine(DATA[:5])


def test_rows_are_added_that_are_as_finite_as_the_rest():
    @sc.step(pad=sc.Pad("x", mask="mask"))
    def slope(x, mask):
        return jax.grad(lambda x: jnp.sum(jnp.linalg.norm(x, axis=1) * mask))(x)

    assert np.isfinite(slope(DATA[:5])).all()


@pytest.mark.parametrize(
    ("batch", "more", "message"),
    [
        ({"x": DATA[:5], "y": np.ones(4)}, {}, "5 at batch/x, 4 at batch/y"),
        ({"x": DATA[:33], "y": np.ones(33)}, {}, "at most 32"),
        ({"x": DATA[:5], "y": np.ones(5)}, {"mask": np.ones(5)}, "leave it out"),
    ],
)
def test_calls_that_cannot_be_padded(batch, more, message):
    step = sc.step(train_step, pad=sc.Pad("batch", sizes=(8, 32), mask="mask"))
    with pytest.raises(PaddingError, match=message):
        step(new_state(), batch, **more)


@pytest.mark.parametrize(
    "make",
    [
        lambda: sc.Pad("batch", axis=-1),
        lambda: sc.Pad("batch", sizes=(8, 4)),
        lambda: sc.Pad("batch", sizes=()),
        lambda: sc.Pad("batch", sizes=(0, 4)),
        lambda: sc.step(train_step, pad="batch"),
        lambda: sc.step(train_step, pad=sc.Pad("other")),
        lambda: sc.step(train_step, pad=sc.Pad("batch", mask="weights")),
        lambda: sc.step(train_step, pad=sc.Pad("batch", mask="mask/rows")),
        lambda: sc.step(train_step, carry="state", pad=sc.Pad("state")),
    ],
)
def test_options_that_make_no_sense(make):
    with pytest.raises(OptionError):
        make()


def test_a_miss_says_which_line_to_add():
    step = sc.step(lambda batch: batch["x"].sum())
    for batch in batches((5, 6, 7, 9)):
        step(batch)
    assert any('pad=sc.Pad("batch")' in each for each in step.last_miss.advice)


def test_a_padded_step_is_pickled_and_bound():
    copy = pickle.loads(pickle.dumps(PICKLED))
    assert copy(DATA[:5]).shape == (5, 3)

    class Trainer:
        @sc.step(static_argnums=0, pad=sc.Pad("x"))
        def double(self, x):
            return 2 * x

    trainer = Trainer()
    assert trainer.double(DATA[:5]).shape == trainer.double(x=DATA[:5]).shape == (5, 3)


def _double(x):
    return 2 * x


PICKLED = sc.step(_double, pad=sc.Pad("x"))


def test_padded_steps_are_freed():
    import weakref

    step = sc.step(lambda x: x * 2, pad=sc.Pad("x"))
    step(DATA[:5])
    gone = weakref.ref(step)
    del step
    assert gone() is None


@pytest.mark.parametrize(
    ("rules", "expected"),
    [
        ([], "P('data')"),
        ([("^batch", P())], "P()"),
        ([("^batch/x", P("model"))], "P('model')"),
        ([("^mask", P("model"))], "P('model')"),
    ],
)
def test_a_mask_is_placed_as_the_axis_that_it_masks(mesh, rules, expected):
    """Unless a rule names it."""
    step = sc.step(train_step, carry="state", batch="batch", pad=sc.Pad("batch", mask="mask"))
    with sc.Session(mesh, rules=rules):
        np.testing.assert_allclose(
            trained(step, new_state(), (9, 10)), unpadded((9, 10)), rtol=1e-5
        )
        *_, mask = step.explain(new_state(), batches((9,))[0]).arguments
        assert (mask.name, mask.target) == ("mask", expected)


def test_a_mask_of_an_axis_that_the_user_placed_is_replicated(mesh):
    step = sc.step(lambda x, mask: (x * mask).sum(), batch="x", pad=sc.Pad("x", mask="mask"))
    with sc.Session(mesh):
        x = jax.device_put(np.ones(12, np.float32), NamedSharding(mesh, P("model")))
        assert step(x) == 12
        assert [each.target for each in step.explain(x).arguments] == ["stays", "P()"]
