"""What `eqx.filter_jit` does, done by `stepcache.equinox.step`: cases run under both, and agree."""

import functools
import gc
import weakref

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import stepcache as sc
from stepcache import equinox as seqx
from stepcache import jaxcompat

BOTH = pytest.mark.parametrize("jit", [eqx.filter_jit, seqx.step])
X = np.linspace(-1, 1, 12, dtype=np.float32).reshape(4, 3)


class Scaled(eqx.Module):
    weight: jax.Array
    bias: jax.Array | None
    activation: object
    power: int
    name: str = eqx.field(static=True, default="scaled")

    def __call__(self, x, *, shift=0):
        return self.activation(self.weight * x**self.power) + shift

    @seqx.step
    def doubled(self, x):
        return 2 * self(x)


def make(power=1, name="scaled"):
    return Scaled(jnp.ones(3), None, jax.nn.relu, power, name)


def counted(jit, function, **options):
    """A function under `jit`, and the list of what it was traced with."""
    traced = []

    @functools.wraps(function)
    def traced_function(*args, **kwargs):
        traced.append(args)
        return function(*args, **kwargs)

    return jit(traced_function, **options), traced


@BOTH
def test_what_is_static(jit):
    step, traced = counted(jit, lambda model, x, flag=None: (model(x), flag, model.name))
    for model, flag in [(make(), 1), (make(), 1), (make(2), 1), (make(2), 2), (make(2, "b"), 2)]:
        out, returned, name = step(model, X, flag)
        assert np.array_equal(out, model(X))
        assert (returned, type(returned), name) == (flag, int, model.name)
    assert len(traced) == 4
    step(make(), jnp.asarray(X), flag=1)
    assert len(traced) == 4


class Counted(eqx.Module):
    """A module that counts in a list how often it is entered."""

    scale: object
    entered: list = eqx.field(static=True)

    def __call__(self, x):
        self.entered.append(1)
        return self.scale * x

    method = __call__


def squared(x):
    ENTERED.append(1)
    return (x**2).sum()


ENTERED: list[int] = []
CALLABLES = {
    "a function": lambda _: squared,
    "a module": lambda _: Counted(2, ENTERED),
    "a module of arrays": lambda epoch: Counted(jnp.ones(3) * epoch, ENTERED),
    "its method": lambda epoch: Counted(jnp.ones(3) * epoch, ENTERED).method,
    "a partial": lambda epoch: eqx.Partial(squared, jnp.ones(3) * epoch),
    "gradients": lambda _: eqx.filter_value_and_grad(squared),
    "a new function": lambda _: lambda x: squared(x),
    "another static value": lambda epoch: Counted(epoch, ENTERED),
}


@pytest.mark.parametrize("make_callable", CALLABLES.values(), ids=CALLABLES)
def test_a_function_is_entered_as_often_as_under_filter_jit(make_callable):
    """Also where the step is made anew in each epoch."""
    counts = []
    for jit in (eqx.filter_jit, seqx.step):
        ENTERED.clear()
        jax.clear_caches()  # Both trace one function of equinox.
        for epoch in range(4):
            step = jit(make_callable(epoch))
            for shape in (3, 3, 1) if "Partial" not in str(step) else ():
                step(jnp.ones(shape))
            if "Partial" in str(step):
                step()
        counts.append(len(ENTERED))
    if jaxcompat.PRIVATE_API:
        assert counts[0] == counts[1] > 0
    else:  # `jax.clear_caches` keeps programs, also those of an equal callable in another test.
        assert counts[0] >= counts[1] > 0


@BOTH
def test_a_step_made_anew_is_the_same_argument(jit):
    train, traced = counted(jit, lambda model, x: model(x))
    for epoch in range(3):
        train(jit(make()), X)
        train(jit(Scaled(jnp.ones(3) * epoch, None, jax.nn.relu, 1)), X)
    assert len(traced) == 1


def test_a_step_is_freed():
    """Its function is not, as under `filter_jit`: the traces of JAX hold it."""
    step = seqx.step(lambda x: x + 1)
    step(X)
    references = [weakref.ref(step), weakref.ref(step._step)]
    del step
    gc.collect()
    assert [each() for each in references] == [None, None]


@BOTH
def test_outputs_that_are_no_arrays(jit):
    step = jit(lambda x: {"a": (x, None, 1.5, "text"), "f": jax.nn.relu, "m": make()})
    out = step(X)
    assert out["a"][1:] == (None, 1.5, "text") and out["f"] is jax.nn.relu
    assert isinstance(out["m"], Scaled) and out["m"].power == 1
    assert jit(lambda: None)() is None


@BOTH
def test_outputs_without_a_hash(jit):
    numbers = {1, 2}
    step, traced = counted(jit, lambda x: (x, numbers, Scaled(x, None, numbers, 1)))
    for _ in range(3):
        _, found, model = step(X)
        assert found is numbers and model.activation is numbers
    assert len(traced) == 1
    with pytest.raises(ValueError, match="Non-hashable static arguments"):
        jit(lambda model: model.weight)(model)


@BOTH
def test_methods_and_modules_that_are_called(jit):
    model = make(2)
    shifted = jit(model.__call__)
    assert np.array_equal(shifted(X, shift=1), model(X) + 1)
    assert np.array_equal(jit(model)(X), model(X))
    assert np.array_equal(jit(eqx.Partial(model, shift=2))(X), model(X) + 2)
    assert np.array_equal(jit(functools.partial(make, 2))().weight, np.ones(3))


def test_a_decorated_method():
    model = make(2)
    assert np.array_equal(model.doubled(X), 2 * model(X))
    assert isinstance(Scaled.doubled, seqx.FilterStep)
    grads = eqx.filter_grad(lambda model: model.doubled(X).sum())(model)
    assert np.allclose(grads.weight, eqx.filter_grad(lambda m: 2 * m(X).sum())(model).weight)


def test_only_calls_that_may_raise_are_waited_for(monkeypatch):
    """A step without callbacks returns at once, unlike `filter_jit`."""
    waited = []
    wait = type(jnp.ones(())).block_until_ready
    monkeypatch.setattr(
        type(jnp.ones(())), "block_until_ready", lambda x: waited.append(x) or wait(x)
    )
    for message, count in (None, 0 if jaxcompat.PRIVATE_API else 1), ("x is negative", 1):

        @seqx.step
        def checked(x, message=message):
            return x if message is None else eqx.error_if(x, x.sum() < 0, message)

        waited.clear()
        checked(jnp.ones(3))
        assert len(waited) == count


@BOTH
@pytest.mark.parametrize(
    "donate, gone",
    [
        ("none", (False, False)),
        ("all", (True, True)),
        ("all-except-first", (False, True)),
        ("warn-except-first", (False, True)),
    ],
)
def test_donation(jit, donate, gone):
    step = jit(lambda x, y, *rest: (x + 1, y + 1), donate=donate)
    x, y = jnp.ones(3), jnp.zeros(3)
    step(x, y)
    assert (x.is_deleted(), y.is_deleted()) == gone


@BOTH
def test_donation_of_what_is_passed_by_name_alone(jit):
    step, x, y = (
        jit(lambda x, *, y: (x + 1, y + 1), donate="all-except-first"),
        jnp.ones(2),
        jnp.ones(3),
    )
    step(x, y=y)
    assert (x.is_deleted(), y.is_deleted()) == (False, True)


@BOTH
def test_an_error_of_a_call_that_donates(jit):
    step = jit(lambda x: eqx.error_if(x, x < 0, "x is negative"), donate="all")
    with pytest.raises(eqx.EquinoxRuntimeError, match="x is negative"):
        step(-jnp.ones(()))


@pytest.mark.filterwarnings("error")
@BOTH
def test_warnings_of_donation(jit):
    jit(lambda x: x[:2], donate="all")(jnp.ones(3))
    with pytest.warns(UserWarning, match="donated buffers were not usable"):
        jit(lambda x: x[:2], donate="warn")(jnp.ones(3))


@BOTH
def test_errors(jit):
    @jit
    def positive(x):
        return eqx.error_if(x, x < 0, "x is negative")

    assert positive(jnp.ones(())) == 1
    for _ in range(2):
        with pytest.raises(eqx.EquinoxRuntimeError, match="x is negative"):
            positive(-jnp.ones(()))
    with pytest.raises(ValueError, match="Non-hashable static arguments"):
        jit(lambda x: x)({1, 2})
    with pytest.raises(ValueError, match="static_argnums"):
        jit(lambda x: x, static_argnums=0)
    with pytest.raises(ValueError, match="donate"):
        jit(lambda x: x, donate="some")
    with pytest.raises(TypeError):
        jit(lambda x: x)(1, 2)
    with pytest.raises(TypeError):
        jit(lambda x: x)(y=1)


@pytest.mark.parametrize("donate", ["none", "all"])
def test_a_step_that_may_raise_is_traced_once(donate, caplog):
    traces = []

    @seqx.step(donate=donate)
    def positive(x):
        traces.append(x)
        return eqx.error_if(x, x < 0, f"x is negative, donate={donate}") + 1

    for _ in range(3):
        assert positive(jnp.zeros(())) == 1
    with pytest.raises(eqx.EquinoxRuntimeError, match="x is negative") as error:
        positive(-jnp.ones(()))
    assert "in positive" in str(error.value)
    assert len(traces) == 1
    assert positive(jnp.ones((2,))).tolist() == [2, 2]
    with pytest.raises(eqx.EquinoxRuntimeError, match="x is negative"):
        positive(-jnp.ones((2,)))
    assert positive(jnp.zeros(())) == 1
    traced_before = eqx.filter_jit(lambda x: eqx.error_if(x, x < 0, "x is negative"))
    traced_before(jnp.ones(()))
    with pytest.raises(eqx.EquinoxRuntimeError, match="x is negative"):
        seqx.step(lambda x: traced_before(x))(-jnp.ones(()))
    assert not [each for each in caplog.records if each.name.startswith("jax")]


@BOTH
def test_under_other_transformations(jit):
    step = jit(lambda model, x: model(x).sum())
    model = make(2)
    expected = eqx.filter_grad(lambda model: model(X).sum())(model)
    assert np.allclose(eqx.filter_grad(lambda m: step(m, X))(model).weight, expected.weight)
    summed = eqx.filter_vmap(step, in_axes=(None, 0))(model, jnp.asarray(X))
    assert np.allclose(summed.sum(), step(model, X))


@BOTH
def test_the_state_of_layers(jit):
    norm, state = eqx.nn.make_with_state(eqx.nn.BatchNorm)(3, "batch", mode="ema")

    @jit
    def call(norm, state, x):
        return jax.vmap(norm, axis_name="batch", in_axes=(0, None), out_axes=(0, None))(x, state)

    first, new = call(norm, state, X)
    second, _ = call(norm, new, X + 1)
    assert not np.array_equal(first, second)


@BOTH
def test_losses_are_equal_to_the_bit(jit):
    @jit
    def descend(model, x):
        loss, grads = eqx.filter_value_and_grad(lambda m: ((jax.vmap(m)(x) - 1) ** 2).mean())(model)
        return eqx.apply_updates(model, jax.tree.map(lambda g: -0.1 * g, grads)), loss

    model, losses = eqx.nn.MLP(3, 3, 8, 2, key=jax.random.key(0)), []
    for _ in range(5):
        model, loss = descend(model, X)
        losses.append(float(loss))
    assert losses == sorted(losses, reverse=True)
    _LOSSES.setdefault("first", losses)
    assert losses == _LOSSES["first"]


_LOSSES: dict[str, list[float]] = {}


def test_numpy_arrays_are_traced():
    step = seqx.step(lambda x: x + 1)
    for number in range(3):
        assert step(np.full(2, number))[0] == number + 1
    assert step.stats().misses == 1


def test_a_miss_names_the_attribute():
    step = seqx.step(lambda model, x: jax.vmap(model)(x))
    model, wider = (eqx.nn.MLP(3, 3, width, 1, key=jax.random.key(0)) for width in (4, 5))
    step(model, X)
    text = "model.layers[0].weight: float32[4,3] → float32[5,3]"
    assert text in str(step.explain(wider, X))
    step(wider, X)
    assert text in str(step.last_miss)
    step(eqx.tree_at(lambda m: m.activation, wider, jnp.sin), X)
    assert "model.activation: <" in str(step.last_miss)


class Static(eqx.Module):
    weight: jax.Array
    activation: object = eqx.field(static=True)


@pytest.mark.parametrize(
    "make_module",
    [
        lambda: Static(jnp.ones(3), lambda x: x),
        lambda: Scaled(jnp.ones(3), None, jax.jit(jnp.cos.__wrapped__), 1),
        lambda: [{"model": Static(jnp.ones(3), lambda x: x)}],
    ],
    ids=["a static field", "functions that print alike", "in containers"],
)
def test_a_miss_names_what_is_static(make_module):
    step = seqx.step(lambda model, x: x)
    for _ in range(2):
        step(make_module(), X)
    (change,) = step.last_miss.changes
    assert change.path in ("model.activation", "model[0]['model'].activation")
    assert change.before != change.after


def test_paths_in_containers_are_those_of_jax():
    step = seqx.step(lambda *batches, flag: batches)
    step.warm(0, {"x": [X]}, flag=1)
    text = str(step.explain(0, {"x": [X[:2]]}, flag=2))
    assert "batches[1]['x'][0]: float32[4,3] → float32[2,3]" in text
    assert "flag: 1 → 2" in text and "static: batches[0]=0, flag=2" in text


def test_a_step_over_a_module_is_a_tree_of_its_arrays():
    model = eqx.nn.MLP(3, 3, 4, 1, key=jax.random.key(0))
    step, theirs = seqx.step(model), eqx.filter_jit(model)
    assert jax.tree.leaves(step) == jax.tree.leaves(theirs)
    x = X[0]
    made = [step(x)]
    doubled = jax.tree.map(lambda leaf: 2 * leaf if eqx.is_array(leaf) else leaf, step)
    for each in (doubled, eqx.combine(*eqx.partition(doubled, eqx.is_array))):
        made.append(each(x))
    assert step.stats().traces == 1 and (made[0] == theirs(x)).all()
    assert (made[1] == made[2]).all() and (made[1] != made[0]).any()

    @seqx.step
    def train(model, x):
        loss, grads = eqx.filter_value_and_grad(lambda model, x: jnp.sum(model(x)))(model, x)
        return eqx.apply_updates(model, grads), loss

    losses = []
    for each in (step, theirs):
        for _ in range(3):
            each, loss = train(each, x)
            losses.append(loss)
    assert type(train(step, x)[0]) is type(step) and losses[:3] == losses[3:]


@pytest.mark.parametrize("made", [lambda x: x, seqx.step], ids=["module", "step over a module"])
def test_warm_takes_shapes(made):
    def shapes(tree):
        kind = jax.ShapeDtypeStruct
        return jax.tree.map(lambda x: kind(x.shape, x.dtype) if eqx.is_array(x) else x, tree)

    step = seqx.step(lambda model, x, *, key: (jax.vmap(model)(x), key))
    given = made(eqx.nn.MLP(3, 3, 4, 1, key=jax.random.key(0))), X
    key = jax.random.key(1)
    step.warm(*shapes(given), key=shapes(key))
    assert "hit" in str(step.explain(*shapes(given), key=shapes(key)))
    with sc.no_recompile():
        step(*given, key=key)


def test_warm_and_clear():
    step = seqx.step(lambda model, x: jax.vmap(model)(x))
    model = eqx.nn.MLP(3, 3, 4, 1, key=jax.random.key(0))
    step.warm(model, X)
    with sc.no_recompile():
        step(model, X)
    step.clear_cache()
    with pytest.raises(sc.RecompileError), sc.no_recompile():
        step(model, X)
    assert "dot" in step.lower(model, X).as_text()


def test_stages_and_calls_that_equinox_serves_mean_the_sessions_mesh(mesh):
    @seqx.step(donate="all")
    def split(x):
        x = eqx.error_if(x, x[0, 0] > 5, "large")
        return jax.lax.with_sharding_constraint(x, jax.P("data"))

    with sc.Session(mesh):
        assert "sharding" in split.lower(np.ones((8, 8))).as_text()
        for _ in range(2):  # The second call is equinox's.
            assert split(np.ones((8, 8))).sharding.spec[0] == "data"


def test_rules_of_a_session(mesh):
    rules = sc.Rules([("model/layers/0/weight", jax.P("model"))])
    step = seqx.step(lambda model, x: (model, x, jax.vmap(model)(x)), batch="x")
    model = eqx.nn.MLP(3, 3, 8, 1, key=jax.random.key(0))
    with sc.Session(mesh=mesh, rules=rules):
        placed, x, out = step(model, X)
        assert "model/layers/0/weight" in str(step.explain(model, X))
    assert placed.layers[0].weight.sharding.spec == jax.P("model")
    assert x.sharding.spec == jax.P("data")
    assert np.allclose(out, jax.vmap(model)(X), atol=1e-6)


def test_padding_of_what_modules_are_given():
    model = Scaled(jnp.ones(3), None, jax.nn.relu, 1)

    def masked(model, x, label, mask):
        return jnp.sum(model(x) * mask[:, None]), model(x), label

    step = seqx.step(masked, pad=sc.Pad("x", mask="mask", check=True))
    for size in (3, 4):
        total, rows, label = step(model, X[:1].repeat(size, 0) + 2, "a label")
        assert rows.shape == (size, 3) and label == "a label"
        assert np.allclose(total, rows.sum())
    step.warm(model, jax.ShapeDtypeStruct((3, 3), np.float32), "a label")
    assert step.stats().misses == 1 and step.stats().padding == 1 / 8

    padded = seqx.step(model, pad=sc.Pad("x"))
    doubled = jax.tree.map(lambda leaf: 2 * leaf if eqx.is_array(leaf) else leaf, padded)
    assert np.array_equal(doubled(X[:3]), 2 * padded(X[:3])) and padded(X[:3]).shape == (3, 3)


def test_static_values_decide_which_outputs_are_cut():
    @seqx.step(pad=sc.Pad("x"))
    def call(x, table, kind):
        return x @ x.T if kind in ("rows", 1) else table

    table = np.ones((8, 8), np.float32)  # As large as an output with a row for each padded one.
    shapes = [call(X[:1].repeat(5, 0), table, kind).shape for kind in ("rows", "table", 1, 2)]
    assert shapes == [(5, 5), (8, 8), (5, 5), (8, 8)]


def test_rules_match_paths_inside_of_filter_jit_itself(mesh):
    rules = sc.Rules([("model/layers/0/weight", jax.P("model"))])
    sc.install()
    try:
        first = eqx.filter_jit(lambda model: model.layers[0].weight)
        with sc.Session(mesh=mesh, rules=rules):
            weight = first(eqx.nn.MLP(3, 3, 8, 1, key=jax.random.key(0)))
    finally:
        sc.uninstall()
    assert weight.sharding.spec == jax.P("model")
