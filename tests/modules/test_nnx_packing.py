"""`stepcache.nnx.step(pack=True)`: small variables lie in buffers until somebody looks at them."""

import copy
import gc
import pickle
import threading
import weakref

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import stepcache as sc
from stepcache import jaxcompat
from stepcache import nnx as snnx
from stepcache.modules import nnx_held
from tests.modules.test_nnx_step import X, loss_fn, make, same, train_step, values

pytestmark = pytest.mark.usefixtures("users_emitters")


def variables_of(*modules):
    leaves = jax.tree.leaves(modules, is_leaf=lambda x: isinstance(x, nnx.Variable))
    return [each for each in leaves if isinstance(each, nnx.Variable)]


def empty(*modules):
    return sum(map(nnx_held.is_empty, variables_of(*modules)))


# One of each, so that tests share programs.
TX = optax.sgd(1e-2, momentum=0.9)
OURS, THEIRS = snnx.step(train_step, pack=True), nnx.jit(train_step)


class Small(nnx.Module):
    def __init__(self):
        rngs = nnx.Rngs(params=0, dropout=1)
        self.first, self.second = (nnx.Linear(8, 8, rngs=rngs) for _ in range(2))
        self.norm, self.dropout = nnx.BatchNorm(8, rngs=rngs), nnx.Dropout(0.2, rngs=rngs)

    def __call__(self, x):
        return self.second(self.dropout(self.norm(nnx.relu(self.first(x)))))


def make_small():
    model = Small()
    optimizer = nnx.Optimizer(model, TX, wrt=nnx.Param)
    return model, optimizer, nnx.MultiMetric(loss=nnx.metrics.Average("loss"))


@pytest.fixture
def loop():
    """Objects and a step that packs, which has run twice; and the same under `nnx.jit`."""
    loop = Loop(OURS, make_small()), Loop(THEIRS, make_small())
    for each in loop:
        each.run()
        each.run()
    return loop


class Loop:
    def __init__(self, step, objects):
        self.step, self.objects = step, objects

    def run(self, x=X):
        return self.step(*self.objects, x)


def agree(loop):
    ours, theirs = loop
    assert ours.run() == theirs.run()
    same(values(*ours.objects), values(*theirs.objects))


@pytest.mark.sample(every=2)
@pytest.mark.parametrize("options", [{}, {"donate_argnums": (0, 1)}])
def test_a_training_loop_is_equal_to_the_bit(options):
    objects, others = make_small(), make_small()
    ours, theirs = snnx.step(train_step, pack=True, **options), nnx.jit(train_step)
    for number in range(5):
        assert ours(*objects, X + number) == theirs(*others, X + number)
        assert empty(*objects) > 10
    same(values(*objects), values(*others))
    assert not empty(*objects)
    assert objects[2].compute() == others[2].compute()
    assert ours.stats().misses == 1


@pytest.mark.slow
def test_a_larger_loop():
    objects, others = make(shared=True), make(shared=True)
    ours, theirs = snnx.step(train_step, pack=True), nnx.jit(train_step)
    for number in range(20):
        assert ours(*objects, X + number) == theirs(*others, X + number)
    same(values(*objects), values(*others))


def assign(model, _):
    model.first.bias[...] = jnp.full(8, 3.0)


def assign_unseen(model, _):
    model.first.bias.set_raw_value(jnp.full(8, 3.0, jnp.float32))


def assign_host_array(model, _):
    model.first.bias.set_raw_value(np.full(8, 3.0, np.float32))


def assign_weak(model, _):
    model.first.bias.set_raw_value(jnp.full(8, 3.0))


def assign_one_element(model, _):
    model.first.bias[2] = 5.0


def replace_variable(model, _):
    model.first.bias = nnx.Param(jnp.ones(8, jnp.float32))


def replace_module(model, _):
    model.second = nnx.Linear(8, 8, rngs=nnx.Rngs(5))


def update_all(model, optimizer):
    for each in (model, optimizer):
        doubled = jax.tree.map(lambda x: x + x, nnx.state(each, nnx.Param))
        nnx.update(each, doubled)


def reset_metadata(model, _):
    model.first.kernel.set_metadata(note="changed")


CHANGES = (assign, assign_unseen, assign_host_array, assign_weak, assign_one_element)
CHANGES += (replace_variable, replace_module, update_all, reset_metadata)


@pytest.mark.sample(every=8)
@pytest.mark.parametrize("change", CHANGES)
def test_what_is_changed_between_calls_is_seen(loop, change):
    for each in loop:
        change(*each.objects[:2])
    agree(loop)
    for each in loop:
        change(*each.objects[:2])
    agree(loop)


def test_a_few_values_are_written_without_packing_all_anew(loop, monkeypatch):
    ours, theirs = loop
    monkeypatch.setattr(nnx_held.Held, "fill", lambda *_: pytest.fail("all was packed"))
    for each in loop:
        each.objects[0].first.bias[...] = jnp.full(8, 3.0, jnp.float32)
        each.objects[2].reset()
    assert ours.run() == theirs.run()
    same(values(*ours.objects), values(*theirs.objects))


def test_a_look_is_one_value(loop):
    (model, *_), before = loop[0].objects, empty(loop[0].objects)
    assert model.first.bias.shape == (8,)
    assert empty(loop[0].objects) == before - 1
    assert model.first.bias[...] is model.first.bias[...]
    loop[0].run()
    assert empty(loop[0].objects) == before


LOOKS = {
    "copy": lambda model: copy.deepcopy(model),
    "pickle": lambda model: pickle.loads(pickle.dumps(model.first.kernel)),
    "clone": lambda model: nnx.clone(model),
    "split": lambda model: nnx.merge(*nnx.split(model)),
    "text": repr,
    "leaves": lambda model: jax.tree.map(lambda x: x, model),
    "jit": lambda model: nnx.jit(lambda model: model(X))(model),
    "another step": lambda model: snnx.step(lambda model: model(X))(model),
    "another mode": lambda model: snnx.step(lambda model: model(X), graph=False)(model),
    "partial": lambda model: nnx.jit_partial(lambda m, x: m(x), model, graph=False)(X),
    "grad": lambda model: nnx.grad(lambda model: model(X).sum())(model),
    "inside a trace": lambda model: jax.jit(lambda x: x + model.first.kernel[...])(1.0),
    "inside a gradient": lambda model: jax.grad(lambda x: (model.first.kernel * x).sum())(1.0),
    "inside vmap": lambda model: jax.vmap(lambda x: model.first.kernel[...] + x)(X),
}


@pytest.mark.sample(every=8)
@pytest.mark.parametrize("look", LOOKS)
def test_who_looks_sees_values(loop, look):
    """As often as between any two calls; what is called may also change the module."""
    for _ in range(2):
        for each in loop:
            LOOKS[look](each.objects[0])
        agree(loop)
    kernel = loop[0].objects[0].first.kernel
    assert isinstance(kernel.get_raw_value(), jax.Array)
    assert not isinstance(kernel.get_raw_value(), jax.core.Tracer)


def test_two_steps_that_pack_share_buffers(loop):
    ours, theirs = loop
    evaluate, others = snnx.step(loss_fn, pack=True), nnx.jit(loss_fn)
    for _ in range(3):
        assert evaluate(ours.objects[0], X) == others(theirs.objects[0], X)
        agree(loop)
    ours.run()
    before = empty(ours.objects)
    evaluate(ours.objects[0], X)
    ours.run()
    assert empty(ours.objects) == before


def test_a_module_in_another_one(loop):
    class Outer(nnx.Module):
        def __init__(self, model):
            self.model = model

    ours, theirs = loop
    steps = (
        snnx.step(lambda outer: loss_fn(outer.model, X), pack=True),
        nnx.jit(lambda outer: loss_fn(outer.model, X)),
    )
    outers = Outer(ours.objects[0]), Outer(theirs.objects[0])
    for _ in range(3):
        assert steps[0](outers[0]) == steps[1](outers[1])
        agree(loop)


def test_a_variable_outlives_its_module(loop):
    ours, root = loop[0], weakref.ref(loop[0].objects[0])
    kernel, other = (each.objects[0].first.kernel for each in loop)
    assert nnx_held.is_empty(kernel)
    ours.objects = None
    gc.collect()
    assert root() is None
    assert np.array_equal(kernel[...], other[...])


def test_what_is_held_goes_with_its_modules():
    gc.collect()
    step, before = OURS, len(nnx_held._holders)
    for _ in range(3):
        objects = make_small()
        step(*objects, X)
        step(*objects, X)
        gone = weakref.ref(nnx_held._holders[id(objects[0].first.kernel)].buffers[0])
        del objects
        gc.collect()
    objects = make_small()
    step(*objects, X)
    gc.collect()
    assert gone() is None
    assert len(nnx_held._holders) <= before + len(variables_of(*objects))


def test_an_error_loses_nothing():
    @packing
    def fails(model, x):
        model.first.bias[...] += 1
        if x.shape[0] == 3:
            raise RuntimeError("no")

    model = Small()
    fails(model, X)
    fails(model, X)
    with pytest.raises(RuntimeError, match="no"):
        fails(model, X[:3])
    assert np.array_equal(model.first.bias[...], np.full(8, 2.0))
    fails(model, X)
    assert np.array_equal(model.first.bias[...], np.full(8, 3.0))


class Failing:
    """A step that is given the buffers of a model, and fails while it runs if it is told to."""

    def __init__(self):
        self.fails = False
        self.step = snnx.step(self.run, pack=True, donate_argnums=0)

    def run(self, model):
        one = jax.pure_callback(self.one, jax.ShapeDtypeStruct((), np.float32))
        model.bias[...] += one
        model.kernel[...] += one

    def one(self):
        if self.fails:
            raise RuntimeError("no")
        return np.float32(1)

    def fail(self, model):
        self.fails = True
        with pytest.raises((RuntimeError, ValueError), match="no"):
            self.step(model)
        self.fails = False


def test_a_model_that_was_lost_can_be_restored():
    failing, model = Failing(), nnx.Linear(8, 8, rngs=nnx.Rngs(0))
    saved = jax.tree.map(np.asarray, nnx.state(model))
    for _ in range(2):
        failing.step(model)
    failing.fail(model)
    with pytest.raises(RuntimeError, match="deleted"):
        model.bias[...] + 1
    with pytest.raises(RuntimeError, match="deleted"):
        failing.step(model)
    nnx.update(model, jax.tree.map(jnp.asarray, saved))
    for _ in range(2):
        failing.step(model)
    assert np.array_equal(model.bias[...], np.full(8, 2.0))


def test_a_model_that_was_lost_is_no_matter_of_others():
    failing, lost = Failing(), nnx.Linear(8, 8, rngs=nnx.Rngs(0))
    failing.step(lost)
    failing.fail(lost)
    del lost
    gc.collect()
    model = nnx.Linear(8, 8, rngs=nnx.Rngs(0))
    for _ in range(2):
        failing.step(model)
    assert np.array_equal(model.bias[...], np.full(8, 2.0))


def packing(function):
    return snnx.step(function, pack=True)


def test_values_of_another_type_are_not_packed():
    @packing
    def call(model, x):
        model.first.bias[...] = model.first.bias[...] + 1
        model.first.kernel.set_value(model.first.kernel[...].astype(jnp.bfloat16))

    model = Small()
    for _ in range(3):
        call(model, X)
    assert model.first.kernel.dtype == jnp.bfloat16
    assert np.array_equal(model.first.bias[...], np.full(8, 3.0))


def test_a_function_that_changes_more_than_values_is_not_packed():
    @packing
    def grow(model, x):
        model.first.bias[...] += 1
        model.seen = nnx.Param(x)
        model.count += 1

    model = Small()
    model.count = 0
    with pytest.warns(sc.StepCacheWarning, match="nothing is packed"):
        grow(model, X)
    grow(model, X)
    assert model.count == 2 and np.array_equal(model.first.bias[...], np.full(8, 2.0))
    assert np.array_equal(model.seen[...], X)


def test_modules_that_are_returned():
    step = packing(lambda model, x: (model, model.first))
    model = Small()
    for _ in range(2):
        whole, part = step(model, X)
        assert whole is model and part is model.first


def test_in_a_session_with_a_mesh_nothing_is_packed(loop):
    ours, theirs = loop
    mesh = jax.make_mesh((2,), ("data",), devices=jax.devices()[:2])
    with sc.Session(mesh=mesh):
        ours.run()
        assert not empty(ours.objects)
    theirs.run()
    for one, other in zip(values(*ours.objects), values(*theirs.objects), strict=True):
        assert np.allclose(one, other, atol=1e-5)


def test_a_reader_in_another_thread(loop):
    model, seen, stop = loop[0].objects[0], [], threading.Event()
    count = packing(count_up)

    def read():
        while not stop.is_set():
            seen.append(float(model.first.bias[0]))

    model.first.bias[...] = jnp.zeros(8, jnp.float32)
    reader = threading.Thread(target=read)
    reader.start()
    for _ in range(200):
        count(model)
    stop.set()
    reader.join()
    assert seen and seen == sorted(seen)
    assert np.array_equal(model.first.bias[...], np.full(8, 200.0))


def count_up(model):
    model.first.bias[...] += 1


def test_warm_and_explain_are_of_the_packed_program():
    step, objects = snnx.step(loss_fn, pack=True), make_small()[:1]
    step.warm(*objects, jax.ShapeDtypeStruct(X.shape, X.dtype))
    with sc.no_recompile():
        step(*objects, X)
    explanation = step.explain(*objects, X)
    row = next(each for each in explanation.arguments if "packed float32" in each.path)
    assert row.path.startswith("model/")
    if jaxcompat.PRIVATE_API:  # Else it is unknown where buffers are, and where structures differ.
        assert row.source == "cpu:0" and row.moved_bytes == 0
    wide = nnx.Linear(8, 4, rngs=nnx.Rngs(0)), nnx.Linear(8, 5, rngs=nnx.Rngs(0))
    call = packing(lambda model, x: model(x))
    call(wide[0], X)
    call(wide[1], X)
    if jaxcompat.PRIVATE_API:
        assert "model.kernel: float32[8, 4], packed → float32[8, 5], packed" in str(call.last_miss)


@pytest.mark.parametrize("options", [{"graph": False}, {"graph": True, "graph_updates": False}])
def test_other_modes_refuse(options):
    with pytest.raises(sc.OptionError, match="pack=True"):
        snnx.step(train_step, pack=True, **options)
