"""`step(carry=..., batch=...)`: the role of an argument says where a session's mesh places it."""

import warnings

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

import stepcache as sc

ROWS = np.ones((8, 2), np.float32)
MEBIBYTE = np.ones((1 << 10, 1 << 8), np.float32)


def where(step, *args, **kwargs) -> dict[str, tuple[str, str]]:
    """Where each leaf of a call goes, and why."""
    arguments = step.explain(*args, **kwargs).arguments
    return {argument.path: (argument.target, argument.why) for argument in arguments}


SPLIT = ("P('data')", "batch, split along 'data'")


# ---- placement -------------------------------------------------------------------------------


def test_each_role_has_its_place_and_says_so(mesh):
    step = sc.step(lambda state, batch, table: (state, batch, table), carry="state", batch="batch")
    with sc.Session(mesh):
        told = where(step, ROWS, ROWS, ROWS)
        outputs = step(ROWS, ROWS, ROWS)
        text = str(step.explain(ROWS, ROWS, ROWS))
    assert told == {
        "state": ("P()", "carry, replicated"),
        "batch": SPLIT,
        "table": ("P()", "no role: replicated"),
    }
    assert [each.sharding.shard_shape((8, 2)) for each in outputs] == [(8, 2), (2, 2), (8, 2)]
    assert all(f"host → {target}, {why}; moves" in text for target, why in told.values())


def test_without_roles_everything_is_replicated_and_any_shape_will_do(mesh):
    step = sc.step(lambda weights, x: weights @ x)
    with sc.Session(mesh):
        out = step(np.ones((7, 3)), np.ones((3, 5)))
        assert set(where(step, np.ones((7, 3)), np.ones((3, 5))).values()) == {
            ("P()", "no role: replicated")
        }
    assert out.sharding.is_fully_replicated and out.shape == (7, 5)


def test_a_rule_wins_over_any_role(mesh):
    step = sc.step(lambda state, batch, table: (state, batch, table), carry="state", batch="batch")
    rules = [("w", P(None, "model")), ("^batch/y", P())]
    trees = [{"w": ROWS, "y": ROWS}] * 3
    with sc.Session(mesh, rules=rules):
        told = where(step, *trees)
    assert told == {
        "state/w": ("P(None, 'model')", "carry, rule 'w'"),
        "state/y": ("P()", "carry, replicated"),
        "batch/w": ("P(None, 'model')", "batch, rule 'w'"),
        "batch/y": ("P()", "batch, rule '^batch/y'"),
        "table/w": ("P(None, 'model')", "rule 'w'"),
        "table/y": ("P()", "no role: replicated"),
    }


def test_a_batch_may_be_any_tree_and_its_scalars_are_replicated(mesh):
    step = sc.step(lambda batch: batch, batch="batch")
    keys = jax.random.split(jax.random.key(0), 8)
    batch = {"x": [ROWS, (ROWS, None)], "n": 3, "rate": np.float32(1), "keys": keys, "key": keys[0]}
    with sc.Session(mesh):
        told = where(step, batch)
        out = step(batch)
    scalar = ("P()", "batch, scalar: replicated")
    assert told == {
        **dict.fromkeys(("batch/x/0", "batch/x/1/0", "batch/keys"), SPLIT),
        **dict.fromkeys(("batch/n", "batch/rate", "batch/key"), scalar),
    }
    assert out["keys"].sharding.shard_shape((8,)) == (2,)
    assert (jax.random.key_data(out["keys"]) == jax.random.key_data(keys)).all()


def test_batches_by_position_and_by_keyword_and_several(mesh):
    @sc.step(batch=("inputs", "labels", "mask"))
    def step(inputs, weights, labels, *, mask=None):
        return inputs, weights, labels, mask

    replicated = ("P()", "no role: replicated")
    with sc.Session(mesh):
        first = where(step, ROWS, ROWS, labels=ROWS, mask=ROWS)
        second = where(step, weights=ROWS, labels=ROWS, inputs=ROWS)
    assert first == {"inputs": SPLIT, "weights": replicated, "labels": SPLIT, "mask": SPLIT}
    assert second == {"inputs": SPLIT, "weights": replicated, "labels": SPLIT}


def test_a_batch_of_any_number_of_arguments(mesh):
    @sc.step(batch=("parts", "named"))
    def step(state, *parts, scale=1, **named):
        return parts, named

    with sc.Session(mesh):
        told = where(step, ROWS, ROWS, {"x": ROWS}, scale=ROWS, y=ROWS, z=[ROWS])
    replicated = ("P()", "no role: replicated")
    assert told == {
        **dict.fromkeys(("state", "scale"), replicated),
        **dict.fromkeys(("parts/0", "parts/1/x", "y", "z/0"), SPLIT),
    }


def test_arrays_that_the_user_placed_stay_and_uncommitted_ones_are_placed(mesh):
    step = sc.step(lambda state, batch: (state, batch), carry="state", batch="batch")
    placed = jax.device_put(ROWS, jax.sharding.NamedSharding(mesh, P(None, "model")))
    with sc.Session(mesh):
        told = where(step, placed, placed)
        assert where(step, jnp.asarray(ROWS), jnp.asarray(ROWS))["batch"] == SPLIT
    assert told["state"] == ("stays", "carry, already placed")
    assert told["batch"] == ("stays", "batch, already placed")


def test_data_axis_of_several_axes_and_none(mesh):
    step = sc.step(lambda batch: batch, batch="batch")
    with sc.Session(mesh, data_axis=("data", "model")):
        assert where(step, ROWS)["batch"][1] == "batch, split along 'data' × 'model'"
    with sc.Session(mesh, data_axis=None):
        assert where(step, ROWS[:7])["batch"] == ("P()", "batch, data_axis=None: replicated")


def test_variables_as_a_batch_stay_where_they_are(mesh):
    step = sc.step(lambda table, batch: table["w"] + batch.sum(), batch=("table", "batch"))
    with sc.Session(mesh, rules=[("w", P("model"))]):
        table = sc.Variables({"w": np.ones(6, np.float32)})
        np.testing.assert_array_equal(step(table, ROWS), np.full(6, 17.0))
        there = ("P('model')", "batch")
        assert where(step, table, ROWS) == {"table/w": there, "batch": SPLIT}


# ---- what cannot be --------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"batch": "rows"}, "batch='rows' is not a parameter of f"),
        ({"batch": ("y", "rows")}, "batch='rows' is not a parameter of f"),
        ({"carry": "more"}, "carry='more' is not a parameter of f"),
        ({"carry": "named"}, "carry='named' is not a parameter of f"),
        ({"batch": "y", "static_argnames": "y"}, "'y' cannot be both a batch and static"),
        ({"batch": "y", "static_argnums": -1}, "'y' cannot be both a batch and static"),
        ({"batch": "x", "carry": "x"}, "'x' cannot be both carried and a batch"),
        ({"batch": ("y", "x"), "carry": ("x",)}, "'x' cannot be both carried and a batch"),
        ({"batch": 1}, "batch takes the name"),
        ({"batch": ("x", 1)}, "batch takes the name"),
        ({"carry": None}, "carry takes the name"),
        ({"batches": "x"}, "did you mean 'batch'"),
    ],
)
def test_roles_that_make_no_sense_are_an_error_at_once(options, text):
    def f(x, y, *more, z=0, **named):
        return x

    f = f if "static_argnums" not in options else lambda x, y: x
    with pytest.raises(sc.OptionError, match=text):
        sc.step(f, **options)


# ---- the one warning -------------------------------------------------------------------------


@pytest.fixture
def caught():
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        yield caught


def test_a_large_host_array_without_a_role_is_warned_of_once(mesh, caught):
    step = sc.step(
        lambda state, x: (state, {key: leaf.sum() for key, leaf in x.items()}), carry="state"
    )
    with sc.Session(mesh):
        step.explain(MEBIBYTE, {"a": MEBIBYTE})
        assert not caught
        for size in (1, 2):
            step(np.ones(size), {"a": MEBIBYTE, "b": MEBIBYTE})
        step.warm(np.ones(3), {"b": MEBIBYTE})
        step(sc.Variables(np.ones(4)), {"a": MEBIBYTE})
    (warning,) = caught
    assert issubclass(warning.category, sc.StepCacheWarning)
    text = str(warning.message)
    for part in ("x['a']", "float32[1024,256]", "8 devices", "@step(batch='x')", "along 'data'"):
        assert part in text
    assert warning.filename == __file__


@pytest.mark.parametrize(
    ("call", "name"),
    [(lambda step: step(1, MEBIBYTE), "parts"), (lambda step: step(1, y=MEBIBYTE), "named")],
)
def test_what_is_advised_can_be_done(call, name, mesh, caught):
    def fun(state, *parts, **named):
        return state

    with sc.Session(mesh):
        call(sc.step(fun))
        assert f"@step(batch={name!r})" in str(caught[0].message)
        call(sc.step(fun, batch=name))
    assert len(caught) == 1


def test_a_step_that_was_warmed_with_shapes_is_warned_of_its_arrays(mesh, caught):
    step = sc.step(lambda x: x.sum())
    with sc.Session(mesh):
        step.warm(jax.ShapeDtypeStruct(MEBIBYTE.shape, MEBIBYTE.dtype))
        assert not caught
        step(MEBIBYTE)
    assert len(caught) == 1


@pytest.mark.parametrize(
    "case",
    "no mesh, small, committed, on a device, carried, a batch, another is, ruled, one device, "
    "never split".split(", "),
)
def test_nothing_else_is_warned_of(case, mesh, one_device_mesh, caught):
    roles = {"carried": {"carry": "x"}, "a batch": {"batch": "x"}, "another is": {"batch": "y"}}
    values = {
        "small": MEBIBYTE[:-1],
        "committed": jax.device_put(MEBIBYTE, jax.sharding.NamedSharding(mesh, P())),
        "on a device": jnp.asarray(MEBIBYTE),
    }
    options = {"ruled": {"rules": [("x", P())]}, "never split": {"data_axis": None}}
    step = sc.step(lambda x, y: (x + 0, y), **roles.get(case, {}))
    on = {"no mesh": None, "one device": one_device_mesh}.get(case, mesh)
    with sc.Session(on, **options.get(case, {})):
        step(values.get(case, MEBIBYTE), ROWS)
    assert not caught
