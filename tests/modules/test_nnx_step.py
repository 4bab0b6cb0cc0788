"""What `nnx.jit` does, done by `stepcache.nnx.step`: each case runs under both, and must agree."""

import functools
import gc
import threading
import time
import weakref

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import errors, nnx
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import stepcache as sc
from stepcache import jaxcompat
from stepcache import nnx as snnx

X = np.linspace(-1, 1, 32, dtype=np.float32).reshape(4, 8)


class Block(nnx.Module):
    def __init__(self, rngs):
        self.linear = nnx.Linear(8, 8, rngs=rngs)
        self.norm = nnx.BatchNorm(8, rngs=rngs)
        self.dropout = nnx.Dropout(0.2, rngs=rngs)

    def __call__(self, x):
        return self.dropout(nnx.gelu(self.norm(self.linear(x))))


class Model(nnx.Module):
    def __init__(self, rngs, shared=False):
        first = Block(rngs)
        self.blocks = nnx.List([first, first if shared else Block(rngs)])
        self.lora = nnx.LoRA(8, 2, 1, rngs=rngs)
        self.calls = nnx.Variable(jnp.zeros((), jnp.int32))

    def __call__(self, x):
        self.calls[...] += 1
        for block in self.blocks:
            x = block(x)
        return self.lora(x)


def loss_fn(model, x):
    return jnp.mean((model(x) - 1) ** 2)


def train_step(model, optimizer, metrics, x):
    loss, grads = nnx.value_and_grad(loss_fn)(model, x)
    optimizer.update(model, grads)
    metrics.update(loss=loss)
    return loss


def lora_step(model, optimizer, metrics, x):
    only = nnx.DiffState(0, nnx.LoRAParam)
    loss, grads = nnx.value_and_grad(loss_fn, argnums=only)(model, x)
    optimizer.update(model, grads)
    metrics.update(loss=loss)
    return loss


def make(shared=False, wrt=nnx.Param, model=None):
    model = model or Model(nnx.Rngs(params=0, dropout=1), shared)
    optimizer = nnx.Optimizer(model, optax.sgd(1e-2, momentum=0.9), wrt=wrt)
    return model, optimizer, nnx.MultiMetric(loss=nnx.metrics.Average("loss"))


def make_small():
    return make(model=nnx.Linear(8, 8, rngs=nnx.Rngs(0)))


def values(*modules):
    leaves = jax.tree.leaves([nnx.state(module) for module in modules])
    return [
        jax.random.key_data(x) if jnp.issubdtype(x.dtype, jax.dtypes.prng_key) else x
        for x in leaves
    ]


def same(ours, theirs):
    assert len(ours) == len(theirs)
    for a, b in zip(ours, theirs, strict=True):
        assert a.dtype == b.dtype and np.array_equal(a, b)


MODES = [{}, {"graph": False}, {"graph": True, "graph_updates": False}]


DONATING = [{"donate_argnums": (0, 1)}, {"donate_argnums": 0, "graph": False}]
LONGER = [pytest.param(options, marks=pytest.mark.slow) for options in (*MODES[1:], *DONATING)]


@pytest.mark.parametrize("options", [MODES[0], *LONGER])
def test_a_training_loop_is_equal_to_the_bit(options):
    objects, others = make(), make()
    ours, theirs = snnx.step(train_step, **options), nnx.jit(train_step, **options)
    for number in range(5):
        x = X + number
        assert ours(*objects, x) == theirs(*others, x)
        same(values(*objects), values(*others))
    assert objects[2].compute() == others[2].compute()


@pytest.mark.slow
def test_shared_modules_and_frozen_parameters():
    objects, others = (make(shared=True, wrt=nnx.LoRAParam) for _ in range(2))
    ours, theirs = snnx.step(lora_step), nnx.jit(lora_step)
    before = values(objects[0].blocks[0].linear)
    for _ in range(3):
        assert ours(*objects, X) == theirs(*others, X)
    same(values(*objects), values(*others))
    same(values(objects[0].blocks[0].linear), before)
    assert objects[0].blocks[0] is objects[0].blocks[1]


def test_each_call_sees_what_was_assigned_between():
    model, other = (nnx.Linear(8, 8, rngs=nnx.Rngs(0)) for _ in range(2))

    def call(model, x):
        model.bias[...] += 1
        return model(x)

    ours, theirs = snnx.step(call), nnx.jit(call)
    for number in range(4):
        for each in (model, other):
            each.kernel[...] = jnp.full((8, 8), float(number))
            each.bias = nnx.Param(jnp.full(8, 2.0 * number))
        assert np.array_equal(ours(model, X), theirs(other, X))
        same(values(model), values(other))


def test_changes_of_attributes_between_calls():
    model = nnx.Sequential(nnx.Dropout(0.2, rngs=nnx.Rngs(0)), nnx.Linear(8, 8, rngs=nnx.Rngs(0)))
    step = snnx.step(lambda model, x: model(x))
    noisy = [step(model, X) for _ in range(2)]
    assert not np.array_equal(*noisy)
    model.eval()
    quiet = [step(model, X) for _ in range(2)]
    assert np.array_equal(*quiet)
    model.layers[0].rate = 0.5
    step(model, X)
    assert step.stats().misses == 3
    model.layers.append(nnx.Linear(8, 8, rngs=nnx.Rngs(0)))
    step(model, X)
    assert step.stats().misses == 4
    model.layers[1].kernel.set_metadata(note="changed")
    step(model, X)
    assert step.stats().misses == 5
    with sc.no_recompile():
        step(model, X)
    model.layers[1].__class__ = type("Other", (nnx.Linear,), {})
    step(model, X)
    assert step.stats().misses == 6


def test_changes_inside_of_more_than_values():
    @snnx.step
    def grow(model, x):
        model.count += 1
        model.blocks.append(nnx.Linear(8, 8, rngs=nnx.Rngs(7)))
        model.seen = nnx.Param(x)
        model.me = model
        del model.gone
        return model.blocks[0]

    model = nnx.Module()
    model.count, model.gone = 0, 1
    model.blocks = nnx.List([nnx.Linear(8, 8, rngs=nnx.Rngs(0))])
    first = model.blocks[0]
    assert grow(model, X) is first
    assert (model.count, len(model.blocks), model.me) == (1, 2, model)
    assert np.array_equal(model.seen[...], X)
    assert not hasattr(model, "gone")
    model.gone = 2
    assert grow(model, X) is first
    assert (model.count, len(model.blocks)) == (2, 3)


def test_an_attribute_may_become_an_equal_value_of_another_type():
    def change(model):
        model.power = 1.0

    for jit in (nnx.jit, snnx.step):
        model = nnx.Linear(8, 8, rngs=nnx.Rngs(0))
        model.power, step = 1, jit(change)
        for _ in range(2):
            step(model)
            assert type(model.power) is float


def test_what_is_returned_keeps_its_identity():
    @snnx.step
    def both(model, other):
        other.blocks[0] = model.blocks[0]
        return {
            "model": model,
            "part": model.blocks[1].linear.kernel,
            "new": nnx.Linear(2, 2, rngs=nnx.Rngs(0)),
        }

    model, other = (Model(nnx.Rngs(0)) for _ in range(2))
    for _ in range(2):
        found = both(model, other)
        assert found["model"] is model
        assert found["part"] is model.blocks[1].linear.kernel
        assert found["new"].kernel.shape == (2, 2)
        assert other.blocks[0] is model.blocks[0]


def test_modules_inside_other_arguments():
    @snnx.step
    def call(pair, *, named):
        pair["a"].kernel[...] += 1
        named[0].kernel[...] += 2
        return pair["x"] + 1

    model = nnx.Linear(8, 8, rngs=nnx.Rngs(0))
    start = np.asarray(model.kernel[...])
    for _ in range(2):
        call({"a": model, "x": X}, named=(model,))
    assert np.allclose(model.kernel[...], start + 6)


def test_variables_and_rngs_alone():
    @snnx.step
    def draw(rngs, counter):
        counter[...] += 1
        return jax.random.uniform(rngs.params())

    rngs, other, counter = nnx.Rngs(params=3), nnx.Rngs(params=3), nnx.Variable(jnp.array(0))
    assert [draw(rngs, counter) for _ in range(3)] == [
        jax.random.uniform(other.params()) for _ in range(3)
    ]
    assert counter[...] == 3


def test_a_module_in_two_places():
    class Holder(nnx.Module):
        def __init__(self, model):
            self.model = model
            self.me = nnx.data(self)

    @snnx.step
    def call(holder, model, again):
        for each in (holder.me.model, model, again):
            each.bias[...] += 1
        return model

    model = nnx.Linear(8, 8, rngs=nnx.Rngs(0))
    holder = Holder(model)
    for number in range(1, 4):
        assert call(holder, model, model) is model
        assert holder.model is model and model.bias[0] == 3 * number


def test_arrays_that_are_attributes():
    class Plain(nnx.Module):
        def __init__(self):
            self.w = nnx.data(jnp.ones(3))
            self.v = nnx.Param(jnp.ones(3))

    @snnx.step
    def call(model):
        model.w = model.w + 1
        model.v[...] += 1

    model = Plain()
    for _ in range(3):
        call(model)
    assert np.array_equal(model.w, np.full(3, 4.0))
    assert np.array_equal(model.v[...], np.full(3, 4.0))


def test_methods_and_static_arguments():
    class Net(nnx.Module):
        def __init__(self, rngs):
            self.linear = nnx.Linear(8, 8, rngs=rngs)

        @snnx.step(static_argnames=("train",), static_argnums=(2,))
        def __call__(self, x, power=1, *, train=False):
            self.linear.bias[...] += train
            return self.linear(x) ** power

    net = Net(nnx.Rngs(0))
    assert np.allclose(net(X, 2), net(X) ** 2)
    net(X, train=True)
    assert np.array_equal(net.linear.bias[...], np.ones(8))
    assert isinstance(Net.__call__, snnx.ModuleStep)
    with pytest.raises(ValueError, match="bound methods"):
        snnx.step(net.linear.__call__)


@pytest.mark.slow
def test_transformations_inside():
    class Layers(nnx.Module):
        def __init__(self, rngs):
            self.stacked = nnx.vmap(lambda rngs: Block(rngs), in_axes=0)(rngs.split(3))

        def __call__(self, x):
            @nnx.scan(in_axes=(0, nnx.Carry), out_axes=nnx.Carry)
            def forward(block, x):
                return nnx.remat(lambda block, x: block(x))(block, x)

            return forward(self.stacked, x)

    def call(model, x):
        loss, grads = nnx.value_and_grad(loss_fn)(model, x)
        nnx.update(model, jax.tree.map(lambda p, g: p - g, nnx.state(model, nnx.Param), grads))
        return loss

    model, other = (Layers(nnx.Rngs(params=0, dropout=1)) for _ in range(2))
    ours, theirs = snnx.step(call), nnx.jit(call)
    for _ in range(3):
        assert ours(model, X) == theirs(other, X)
    same(values(model), values(other))


def test_inside_other_transformations():
    model = nnx.Linear(8, 8, rngs=nnx.Rngs(0))
    step = snnx.step(lambda model, x: model(x).sum())
    step(model, X)
    grads = nnx.grad(lambda model: step(model, X))(model)
    expected = nnx.grad(lambda model: model(X).sum())(model)
    same(jax.tree.leaves(grads), jax.tree.leaves(expected))
    assert np.isclose(nnx.jit(lambda model: step(model, X))(model), step(model, X))


def test_cached_partial_goes_on():
    objects, others = make_small(), make_small()
    cached, theirs = nnx.cached_partial(snnx.step(train_step), *objects), nnx.jit(train_step)
    for _ in range(2):
        assert cached(X) == theirs(*others, X)


def test_an_error_is_the_one_of_flax():
    model, outer = (nnx.Linear(8, 8, rngs=nnx.Rngs(0)) for _ in range(2))

    def mutates_a_captured_module(model):
        outer.kernel[...] += 1

    for jit in (nnx.jit, snnx.step):
        with pytest.raises(errors.TraceContextError):
            jit(mutates_a_captured_module)(model)
        with pytest.raises(ValueError, match="different trace level"):
            jit(lambda model: outer)(model)
        with pytest.raises(ValueError, match="Duplicate"):
            jit(lambda a, b: a, graph=False)(model, model)
        with pytest.raises(ValueError, match="StateSharding"):
            jit(lambda a: a, graph=False, in_shardings=(nnx.StateSharding({...: None}),))
        with pytest.raises(ZeroDivisionError):
            jit(lambda model: 1 / 0)(model)
    assert np.array_equal(snnx.step(lambda m, x: m(x))(model, X), model(X))


def test_an_error_leaves_modules_as_they_were():
    @snnx.step
    def fails(model, x):
        model.kernel[...] = model.kernel * 0
        model.new = 1
        if x.shape[0] == 3:
            raise RuntimeError("no")

    model = nnx.Linear(8, 8, rngs=nnx.Rngs(0))
    before = values(model)
    with pytest.raises(RuntimeError, match="no"):
        fails(model, X[:3])
    same(values(model), before)
    assert not hasattr(model, "new")


@pytest.mark.parametrize(
    "text, options",
    [
        ("donate_argnames frees the memory", {"carry": "model"}),
        ("no keyword 'static'", {"static": 1}),
        (r"sc\.Variables\(tree, pack=True\)", {"pack": True}),
    ],
)
def test_other_keywords_are_refused(text, options):
    with pytest.raises(sc.OptionError, match=text):
        snnx.step(train_step, **options)


@pytest.mark.parametrize("options", [*MODES[1:], {"in_shardings": P()}])
def test_what_nnx_jit_serves_is_cached_too(options, mesh):
    if "in_shardings" in options:
        options = {"in_shardings": NamedSharding(mesh, P())}
    step, objects = snnx.step(train_step, **options), make_small()
    for _ in range(3):
        step(*objects, X)
    assert step.stats().misses == step.stats().traces == 1
    for method in (step.warm, step.explain):
        with pytest.raises(sc.OptionError, match="Rules"):
            method(*objects, X)


@pytest.mark.parametrize("options", [*MODES, {"donate_argnums": (0, 1)}])
def test_a_function_is_entered_as_often_as_under_nnx_jit(options):
    counts = []
    for jit in (nnx.jit, snnx.step):
        entered = []

        def counted(model, optimizer, metrics, x, entered=entered):
            entered.append(1)
            return train_step(model, optimizer, metrics, x)

        step, objects = jit(counted, **options), make_small()
        for _ in range(3):
            step(*objects, X)
        step(*make_small(), X)
        step(*objects, X[:2])
        objects[0].power = 2
        step(*objects, X)
        jit(counted, **options)(*objects, X)
        counts.append(len(entered))
    assert counts[0] == counts[1]


def test_shardings_of_parts_of_modules():
    mesh = jax.make_mesh((len(jax.devices()),), ("data",))
    split, whole = (NamedSharding(mesh, spec) for spec in (P("data"), P()))
    state = nnx.StateSharding({nnx.PathContains("kernel"): split, ...: whole})

    def call(model, x):
        model.kernel[...] += 1
        return model(x)

    for jit in (nnx.jit, snnx.step):
        model = nnx.Linear(8, 8, rngs=nnx.Rngs(0))
        start = np.asarray(model.kernel[...])
        step = jit(call, in_shardings=(state, whole), out_shardings=whole)
        for _ in range(2):
            step(model, X)
        assert np.allclose(model.kernel[...], start + 2)
        assert model.kernel[...].sharding.is_equivalent_to(split, 2)
        assert model.bias[...].sharding.is_equivalent_to(whole, 1)


def test_rules_and_batches_of_a_session():
    auto = (AxisType.Auto,)
    mesh = jax.make_mesh((2,), ("data",), devices=jax.devices()[:2], axis_types=auto)
    rules = sc.Rules([("model/kernel", P(None, "data"))])
    step = snnx.step(train_step, batch="x")
    objects, others = make_small(), make_small()
    with sc.Session(mesh=mesh, rules=rules):
        losses = [step(*objects, X) for _ in range(3)]
    assert objects[0].kernel[...].sharding.spec == P(None, "data")
    theirs = nnx.jit(train_step)
    assert np.allclose(losses, [theirs(*others, X) for _ in range(3)], rtol=1e-5)


@pytest.mark.parametrize("options", MODES)
def test_stages_mean_the_sessions_mesh(mesh, options):
    def split(model, x):
        return jax.lax.with_sharding_constraint(model(x), P("data"))

    step, model = snnx.step(split, **options), nnx.Linear(8, 8, rngs=nnx.Rngs(0))
    x = np.ones((8, 8), np.float32)
    with sc.Session(mesh):
        assert step.eval_shape(model, x).shape == x.shape
        assert "sharding" in step.trace(model, x).lower().as_text()
        assert "sharding" in step.lower(model, x).as_text()
        assert step(model, x).sharding.spec[0] == "data"


def test_short_batches_are_padded():
    @snnx.step(pad=sc.Pad("x", sizes=(4,), mask="mask"))
    def call(model, x, mask=None):
        model.bias[...] += mask.sum()
        return model(x)

    model = nnx.Linear(8, 8, rngs=nnx.Rngs(0))
    assert [call(model, X[:rows]).shape[0] for rows in (3, 4, 2)] == [3, 4, 2]
    assert call.stats().misses == 1
    assert model.bias[0] == 9


def test_a_miss_names_the_attribute():
    step = snnx.step(lambda model, x: model(x))
    step(nnx.Sequential(nnx.Linear(8, 4, rngs=nnx.Rngs(0))), X)
    wider = nnx.Sequential(nnx.Linear(8, 5, rngs=nnx.Rngs(0)))
    assert "model.layers[0].kernel: float32[8,4] → float32[8,5]" in str(step.explain(wider, X))
    step(wider, X)
    assert "model.layers[0].kernel: float32[8,4] → float32[8,5]" in str(step.last_miss)
    wider.layers[0].promote_dtype = lambda xs, dtype: xs
    step(wider, X)
    if jaxcompat.PRIVATE_API:  # Else it is unknown where structures differ.
        assert "model.layers[0].promote_dtype: <function promote_dtype" in str(step.last_miss)


def test_warm_runs_nothing():
    step = snnx.step(train_step)
    objects = make_small()
    before = values(*objects)
    step.warm(*objects, jax.ShapeDtypeStruct(X.shape, X.dtype))
    same(values(*objects), before)
    with sc.no_recompile():
        step(*objects, X)
    step.clear_cache()
    step(*objects, X)
    assert step.stats().misses == 2


def test_the_stages_are_those_of_flax():
    step, model = snnx.step(lambda model, x: model(x)), nnx.Linear(8, 8, rngs=nnx.Rngs(0))
    assert step.eval_shape(model, X).shape == (4, 8)
    assert np.allclose(step.lower(model, X).compile()(model, X), model(X))
    assert "dot_general" in str(step.trace(model, X).traced.jaxpr)


def test_what_another_thread_changes_during_a_call_is_seen_by_the_next():
    model, tracing, changed = nnx.Linear(8, 8, rngs=nnx.Rngs(0)), threading.Event(), []

    def call(model):
        tracing.set()
        while not changed:
            time.sleep(0.01)
        return model.power * model.bias[...]

    def change():
        tracing.wait(60)
        model.power = 3
        changed.append(True)

    model.power, model.bias[...] = 2, jnp.ones(8)
    thread, step = threading.Thread(target=change), snnx.step(call)
    thread.start()
    step(model)
    thread.join()
    assert [step(model)[0] for _ in range(2)] == [3, 3]


def test_a_step_keeps_no_module_alive():
    step, objects = snnx.step(train_step), make_small()
    for _ in range(3):
        step(*objects, X)
    gone = [weakref.ref(objects[0]), weakref.ref(objects[1])]
    del objects
    gc.collect()
    assert [each() for each in gone] == [None, None]


@pytest.mark.parametrize("options", [*MODES, *DONATING])
def test_small_training_loops(options):
    objects, others = make_small(), make_small()
    ours, theirs = snnx.step(train_step, **options), nnx.jit(train_step, **options)
    for number in range(3):
        assert ours(*objects, X + number) == theirs(*others, X + number)
        same(values(*objects), values(*others))


def test_later_calls_do_not_walk_the_modules(monkeypatch):
    step, objects = snnx.step(train_step), make_small()
    step(*objects, X)

    def refuse(*args, **kwargs):
        raise AssertionError("a module was taken apart")

    monkeypatch.setattr(snnx.GraphCall, "__init__", refuse)
    before = values(objects[0])
    step(*objects, X)
    assert not np.array_equal(values(objects[0])[0], before[0])
    with pytest.raises(AssertionError, match="taken apart"):
        objects[0].use_bias = 1
        step(*objects, X)


def test_wrapping():
    step = snnx.step(functools.partial(train_step))
    assert step.stats().misses == 0
    assert snnx.step(train_step).__name__ == "train_step"
