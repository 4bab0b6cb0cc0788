"""What is said of an edit: the first line that differs, by operation, and how many more."""

import random

import pytest

from stepcache.programs import module_difference
from stepcache.programs.module_difference import difference

STEP = """\
import jax, jax.numpy as jnp, numpy as np, optax
from jax.sharding import NamedSharding, PartitionSpec as P
TABLE = np.arange(400, dtype=np.float32)
mesh = jax.make_mesh((2, 2), ("data", "model"), axis_types=(jax.sharding.AxisType.Auto,) * 2)
optimizer = optax.sgd(0.1)
@jax.jit
def scaled(x):
    return x * 2.0
def layer(w, x, key):
    x = jnp.tanh(x @ w)
    x = jnp.where(jax.random.bernoulli(key, 0.9, x.shape), x, 0.0)
    return scaled(x)
def loss(params, batch, key):
    x = layer(params["w"], batch["x"], key)
    x, _ = jax.lax.scan(lambda x, _: (jnp.sin(x), None), x, None, length=4)
    x = jax.lax.with_sharding_constraint(x, NamedSharding(mesh, P("data")))
    x = jax.nn.softmax(x, axis=-1)
    return ((x + TABLE) ** 2).mean(), x
def step(params, batch, key):
    (value, x), grads = jax.value_and_grad(loss, has_aux=True)(params, batch, key)
    low = x.min()
    high = x.max()
    updates, _ = optimizer.update(grads, optimizer.init(params))
    return optax.apply_updates(params, updates), {"loss": value, "range": low - 2 * high}
batch = {"x": jnp.ones((8, 400)), "mask": jnp.ones(8)}
args = {"w": jnp.ones((400, 400))}, batch, jax.random.key(0)
lowered = jax.jit(step).lower(*args)
"""


def lowered(source, *edits):
    """The module of a step, as text. It is in `user/model.py`, which need not exist."""
    for old, new in edits:
        assert old in source
        source = source.replace(old, new)
    names = {}
    exec(compile(source, "/user/model.py", "exec"), names)
    return names["lowered"].as_text(debug_info=True)


def said(before, after):
    found = difference(before, after)
    return found and str(found)


@pytest.fixture(scope="module")
def unedited():
    return lowered(STEP)


EDITS = {
    "rate": ("sgd(0.1)", "sgd(0.3)", "model.py:23 in step: multiply by -0.1 → multiply by -0.3"),
    "activation": ("jnp.tanh(x @ w)", "jax.nn.relu(x @ w)", "model.py:10 in layer: tanh → relu"),
    "dropout": (
        "key, 0.9",
        "key, 0.8",
        "model.py:11 in layer: bernoulli with 0.9 → bernoulli with 0.8",
    ),
    "nested": ("x * 2.0", "x * 3.0", "model.py:8 in scaled: multiply by 2.0 → multiply by 3.0"),
    "dtype": (
        "jnp.tanh(x @ w)",
        "jnp.tanh((x @ w).astype(jnp.bfloat16)).astype(jnp.float32)",
        "model.py:10 in layer: absent → convert bfloat16[8,400]",
    ),
    "scan": (
        "length=4",
        "length=6",
        "model.py:15 in loss: loop condition compare with 4 → loop condition compare with 6",
    ),
    "body": ("(jnp.sin(x), None)", "(jnp.tanh(x), None)", "model.py:15 in <lambda>: sine → tanh"),
    "constraint": (
        'P("data")))',
        'P(None, "model")))',
        'sharding_constraint P("data", None) → sharding_constraint P(None, "model")',
    ),
    "axis": (
        "axis=-1",
        "axis=0",
        "17 in loss: reduce dimensions = [1], float32[8] → reduce dimensions = [0], float32[400]",
    ),
    "table": (
        "dtype=np.float32)",
        "dtype=np.float32); TABLE[7] = 0.5",
        "18 in loss: add with float32[400] with [7] = 7.0 → add with float32[400] with [7] = 0.5",
    ),
    "table's dtype": (
        "dtype=np.float32)",
        "dtype=np.float16)",
        "add with float32[400] with [0] = 0.0 → add with float16[400] with [0] = 0.0",
    ),
    "mask": (
        "** 2).mean()",
        '** 2 * batch["mask"][:, None]).mean()',
        "argument batch['mask']: absent → float32[8]",
    ),
    "reduction": (
        ".mean(), x",
        ".sum(), x",
        "model.py:18 in loss: divide by 3200.0, float32[] → absent",
    ),
    "precision": (
        "x @ w",
        'jnp.matmul(x, w, precision="highest")',
        "dot_general precision = [DEFAULT, DEFAULT] → dot_general precision = [HIGHEST, HIGHEST]",
    ),
    "metric": (
        '{"loss": value',
        '{"norm": jnp.sqrt(value), "loss": value',
        "absent → sqrt float32[]; output result[1]['norm']: absent → float32[]",
    ),
    "order": (
        "    low = x.min()\n    high = x.max()\n",
        "    high = x.max()\n    low = x.min()\n",
        "reduce with -inf, applies maximum (the same operations in another order)",
    ),
    "operands": (
        "low - 2 * high",
        "high - 2 * low",
        "model.py:24 in step: multiply → multiply of other values",
    ),
    "remat": ("def layer(", "@jax.checkpoint\ndef layer(", "absent → optimization_barrier"),
    "donated": (
        "jax.jit(step)",
        "jax.jit(step, donate_argnums=0)",
        "params['w']: without → donation = true",
    ),
    "mesh": ("(2, 2)", "(4, 1)", 'mesh: ["data"=2, "model"=2] → ["data"=4, "model"=1]'),
    "print": (
        "    low =",
        '    jax.debug.print("{}", x.sum()); low =',
        "_callback",
    ),
    "name": ("def step(", "def train(", "name of the function: step → train"),
}


@pytest.mark.parametrize("edit", EDITS)
def test_an_edit_is_named_by_operation_and_line(unedited, edit):
    old, new, expected = EDITS[edit]
    edits = [(old, new)] + [("jit(step)", "jit(train)")] * (edit == "name")
    assert expected in said(unedited, lowered(STEP, *edits))


def test_names_of_arguments_and_moved_lines_are_no_difference(unedited):
    moved = ("def layer(", "# A comment.\n\ndef layer(")
    assert (
        said(unedited, lowered(STEP, moved, ("batch, key)", "data, key)"), ('batch["', 'data["')))
        is None
    )


def test_places_are_counted_by_line(unedited):
    edits = [("x * 2.0", "x * 3.0"), ("length=4", "length=6"), ("sgd(0.1)", "sgd(1.0)")]
    found = difference(unedited, lowered(STEP, *edits))
    places = ["model.py:15 in loss", "model.py:23 in step", "model.py:8 in scaled"]
    assert [change.path for change in found.changes] == places
    assert found.more == 0
    edits.append(("jit(step)", "jit(step, donate_argnums=0)"))
    assert said(unedited, lowered(STEP, *edits)).endswith("; and 1 more place")


def test_without_a_line_of_the_user_the_innermost_line_names_the_place(unedited, monkeypatch):
    monkeypatch.setattr(module_difference, "is_users_file", lambda file: False)
    found = difference(unedited, lowered(STEP, ("sgd(0.1)", "sgd(0.3)")))
    assert found.changes[0].path.startswith("transform.py:")  # Of optax.


@pytest.mark.parametrize("seed", range(20))
def test_text_of_unknown_form_raises_nothing(unedited, seed):
    chance = random.Random(seed)
    lines = unedited.splitlines()
    for _ in range(30):
        place = chance.randrange(len(lines))
        cut = lines[place][: chance.randrange(len(lines[place]) + 1)]
        lines[place] = chance.choice(
            [cut, "", "}", "%0 =", "#loc9 = loc(callsite(#loc9 at #loc9))"]
        )
    difference(unedited, "\n".join(lines))
    difference("\n".join(lines), "")


def test_what_one_module_does_not_know_comes_before_all_else(unedited):
    edit = ("def layer(", "@jax.checkpoint\ndef layer("), ("sgd(0.1)", "sgd(0.3)")
    body = ("    x = jnp.tanh(x @ w)\n", "    x = jnp.tanh(x @ w) * 5.0 + 1.0\n")
    found = difference(unedited, lowered(STEP, body, *edit))
    assert "optimization_barrier" in found.changes[0].after
