"""What the walk notes, and what it says of things that cannot be looked at."""

import dataclasses
import functools
import gc
import itertools
import json
import logging
import os
import random
import subprocess
import sys
import textwrap
import threading
import types
import weakref
from pathlib import Path
from typing import Generic, NamedTuple, TypeVar

import jax
import optax
import pytest
from flax import nnx
from flax.core import freeze

import stepcache
from stepcache.fingerprint import installed_packages
from stepcache.fingerprint.dependencies import differences
from stepcache.fingerprint.visitor import Walk
from stepcache.jaxcompat import inspection

T = TypeVar("T")


def fingerprint(value):
    walk = Walk()
    walk.value("it", value)
    return walk.fingerprint()


MODEL = """
    import json, sys
    import jax, optax
    from flax import nnx
    from stepcache.fingerprint.visitor import Walk

    class Block(nnx.Module):
        def __init__(self, rngs):
            self.norm = nnx.LayerNorm(8, rngs=rngs)
            self.attention = nnx.MultiHeadAttention(2, 8, decode=False, rngs=rngs)
            self.up = nnx.Linear(8, 16, rngs=rngs)
            self.down = nnx.Linear(16, 8, rngs=rngs)

        def __call__(self, x):
            x = x + self.attention(self.norm(x))
            return x + self.down(nnx.gelu(self.up(x)))

    class Model(nnx.Module):
        def __init__(self, rngs):
            self.embed = nnx.Embed(16, 8, rngs=rngs)
            self.blocks = nnx.List([Block(rngs) for _ in range(2)])

        def __call__(self, tokens):
            x = self.embed(tokens)
            for block in self.blocks:
                x = block(x)
            return x

    graph, params = nnx.split(Model(nnx.Rngs(0)))
    optimizer = optax.adamw(1e-3)
    NAMES = {"bias", "scale", "kernel", "embedding"}

    def step(state, tokens):
        def loss_of(params):
            return nnx.merge(graph, params)(tokens).sum() * len(NAMES)
        gradients = jax.grad(loss_of)(state["params"])
        updates, moments = optimizer.update(gradients, state["moments"], state["params"])
        return {"params": optax.apply_updates(state["params"], updates), "moments": moments}

    walk = Walk()
    walk.value("step", step)
    state = {"params": params, "moments": optimizer.init(params)}
    walk.tree("arguments", jax.tree.structure(state))
    found = walk.fingerprint()
    print(json.dumps([found.dependencies, found.untrackable]))
"""


@pytest.mark.slow
def test_a_model_has_the_same_fingerprint_in_every_process(tmp_path):
    found = []
    for seed in ("1", "2"):
        directory = tmp_path / seed
        directory.mkdir()
        (directory / "train.py").write_text(textwrap.dedent(MODEL))
        done = subprocess.run(
            [sys.executable, "train.py"],
            cwd=directory,
            env={
                **os.environ,
                "PYTHONHASHSEED": seed,
                "PYTHONPATH": str(Path(stepcache.__file__).parent.parent),
            },
            capture_output=True,
            text=True,
        )
        assert done.returncode == 0, done.stderr[-2000:]
        found.append(json.loads(done.stdout))
    facts, blames = found[0]
    assert not blames
    assert found[0] == found[1]
    assert any("optax" in path for path in facts)


def test_two_namespaces_of_one_name_are_told_apart():
    spaces = [{"RATE": 1, "__name__": "m"}, {"RATE": 2, "__name__": "m"}]
    for space in spaces:
        exec("def f(x): return x * RATE", space)
    facts = fingerprint([space["f"] for space in spaces]).dependencies
    assert sorted(token for path, token in facts.items() if "RATE" in path) == ["1", "2"]


def test_the_hash_by_which_chex_counts_traces_does_not_count():
    """That of `chex.assert_max_traces`: it is another in each process."""
    made = {}
    source = """
def assert_max_traces(fn, n, fn_hash):
    def fn_wrapped(x): return fn(x), fn_hash, n
    return fn_wrapped
"""
    exec(compile(source, "site-packages/chex/_src/asserts.py", "exec"), made)
    counted = [made["assert_max_traces"](abs, n, number) for n, number in ((1, 5), (1, 6), (2, 6))]
    found = [fingerprint(each).dependencies for each in counted]
    assert found[0] == found[1] != found[2]


def test_the_item_of_which_beartype_checks_the_type_does_not_count(tmp_path):
    made = {"random": random}
    source = """
def checked(x, *, __beartype_getrandbits=random.getrandbits):
    sizes = [1, 2, 3]
    assert isinstance(sizes[__beartype_getrandbits(32) % 3], int)
    return x * sizes[0]
"""
    for name, is_seen in ("<@beartype(__main__.checked) at 0x7f>", False), ("<string>", True):
        exec(compile(source, name, "exec"), made)
        step = stepcache.step(made["checked"])
        with stepcache.Session(cache=stepcache.ProgramCache(tmp_path)):
            step(1.0)
        assert ("random.getrandbits" in str(step.last_miss)) is is_seen


class Failing:
    def __eq__(self, other):
        raise RuntimeError("eq")

    def __hash__(self):
        raise RuntimeError("hash")

    def __repr__(self):
        raise RuntimeError("repr")

    def __getattr__(self, name):
        raise RuntimeError("getattr")

    def __len__(self):
        raise RuntimeError("len")

    def __bool__(self):
        raise RuntimeError("bool")


def test_an_object_that_fails_at_everything_is_looked_at_all_the_same():
    value = Failing()
    value.__dict__["__rate__"] = 1
    found = fingerprint(value)
    assert not found.untrackable
    assert found.dependencies["it.__rate__"] == "1"


def test_what_changes_while_it_is_looked_at_is_looked_at(tmp_path, monkeypatch):
    """Garbage is collected at any time, and then other threads may run and import modules."""
    changing: list = [sys.modules, logging.root.manager.loggerDict, PLACES]

    def collected(phase, info):
        for each in changing if phase == "start" else ():
            if each.pop("one_more", None) is None:
                each["one_more"] = types.ModuleType("one_more")

    @stepcache.step
    def step(x):
        return jax.nn.relu(x) * PLACES["rate"]

    for number in range(3000):  # More than there are free tuples, as Python 3.11 then collects.
        monkeypatch.setitem(sys.modules, f"one_of_many_{number}", types.ModuleType("one_of_many"))
    before = gc.get_threshold()
    gc.callbacks.append(collected)
    gc.set_threshold(1)
    try:
        with stepcache.Session(cache=stepcache.ProgramCache(tmp_path)):
            step(1.0)
    finally:
        gc.set_threshold(*before)
        gc.callbacks.remove(collected)
        for each in changing:
            each.pop("one_more", None)
    assert step.last_miss.untrackable == ()


PLACES = {"rate": 2.0}


def test_a_cycle_ends():
    cycle = [1]
    cycle.append(cycle)
    assert fingerprint(cycle).dependencies["it[1]"] == "see it"


def test_deep_nesting_is_blamed_and_not_raised():
    deep = []
    for _ in range(100_000):
        deep = [deep]
    assert any("nested too deeply" in blame for blame in fingerprint(deep).untrackable)


def test_a_huge_list_of_numbers_is_one_fact():
    numbers = list(range(1_000_000))
    facts = fingerprint(numbers).dependencies
    assert len(facts) == 1
    numbers[-1] = 0
    assert fingerprint(numbers).dependencies != facts


def test_an_immutable_object_of_a_package_is_one_dependency():
    values = [0, False, 0.0, -0.0, "0", (0,), ((0,),), None, int, float, Settings, len]
    values += [freeze({"a": 0}), freeze({"a": False}), freeze({"a": 0, "b": 1})]
    values += [freeze({"b": 1, "a": 0}), nnx.graphlib.NodeRef(0), NodeRef(0), "x" * 99, "x" * 98]
    facts = [fingerprint(nnx.graphlib.Static(each)).dependencies for each in values]
    assert all(one != other for one, other in itertools.combinations(facts, 2))
    assert facts[0] == fingerprint(nnx.graphlib.Static(0)).dependencies
    assert facts[0]["it"] == "flax.nnx.graphlib.Static(0)"
    assert not any(path.startswith("it.") for path in facts[values.index(Settings)])

    graph = nnx.graphdef(nnx.MultiHeadAttention(2, 8, decode=False, rngs=nnx.Rngs(0)))
    paths = [each for each in fingerprint(graph).dependencies if each.startswith("it.")]
    assert len(paths) < 2 * (len(graph.nodes) + len(graph.attributes))


@dataclasses.dataclass(frozen=True)
class NodeRef:
    index: int


def test_of_long_texts_what_differs_is_shown():
    sizes = {f"size_{number}": number for number in range(20)}
    before, after = (
        fingerprint(nnx.graphlib.Static(freeze(sizes | {"size_9": each}))) for each in (9, 10)
    )
    (change,) = differences(before.dependencies, after.dependencies)
    assert "'size_9', 9" in change.before and "'size_9', 10" in change.after
    assert max(len(change.before), len(change.after)) < 110
    (change,) = differences({"it": "x" * 200}, {"it": "x" * 201})
    assert change.before != change.after


def test_a_class_in_an_immutable_object_is_followed():
    holder = nnx.graphlib.Static((Settings, 0))
    facts = fingerprint(holder).dependencies
    Settings.rate = 1.0
    try:
        assert fingerprint(holder).dependencies != facts
    finally:
        del Settings.rate


def test_equal_sets_are_equal_whatever_their_history():
    one, other = {8, 0}, {0, 8}
    assert fingerprint(one) == fingerprint(other)
    assert fingerprint({"a", "b"}) != fingerprint({"a", "c"})


def test_a_set_of_objects_is_blamed():
    assert fingerprint({object()}).untrackable


@pytest.mark.parametrize("make", [threading.Lock, threading.RLock, threading.Event])
def test_locks_are_no_matter(make):
    assert not fingerprint(make()).untrackable


@pytest.mark.parametrize(
    "make",
    [
        lambda: (each for each in ()),
        lambda: Path(__file__).open(),  # noqa: SIM115
        lambda: __import__("itertools").count(),
        lambda: __import__("queue").SimpleQueue(),
        lambda: __import__("hashlib").sha256(),
        lambda: sys._getframe(),
    ],
    ids=["generator", "file", "iterator", "queue", "hash", "frame"],
)
def test_what_cannot_be_looked_into_is_blamed(make):
    assert fingerprint(make()).untrackable


def test_a_class_whose_metaclass_keeps_fields_of_its_own_is_blamed():
    class OfCompiledCode(type):
        __basicsize__ = property(lambda metaclass: type.__basicsize__ + 8)

    meta = OfCompiledCode("Meta", (type,), {})  # As msgspec's: it has the defaults of attributes.
    assert "Meta keeps" in fingerprint(meta("Settings", (), {})).untrackable[0]


def test_an_attribute_that_no_code_names_does_not_count():
    class Config:
        rate, other = 1, 2

    def step(x):
        return x * Config.rate

    before = fingerprint(step)
    Config.other = 3
    assert fingerprint(step) == before
    Config.rate = 3
    assert fingerprint(step) != before


class Settings(dict):
    """A dictionary with attributes of its own."""


class Rates(list):
    """A list likewise."""


class Pair(NamedTuple):
    first: float
    second: float


class Applied(functools.partial):
    """A partial likewise."""


def step_with(rate):
    transform = optax.chain(optax.clip(1.0), optax.adamw(optax.linear_schedule(0.0, rate, 10)))
    settings, rates, pair = Settings(rate=rate), Rates([0.0, rate]), Pair(0.0, rate)
    applied = Applied(max, rate, key=None)

    def train_step(state, gradients, *, scale=rate):
        return transform.update(gradients, state), settings, rates, pair, applied, scale

    return train_step


def test_a_change_is_named_as_a_reader_would_look_for_it():
    before, after = (fingerprint(step_with(rate)).dependencies for rate in (1.0, 2.0))
    label = "test_fingerprint.py:step_with.<locals>.train_step"
    chain = "transform.update, update_fns[1], update_fns[2], tx.update, step_size_fn"
    assert before.keys() == after.keys()
    assert {path for path in before if before[path] != after[path]} == {
        f"{label} (default scale)",
        f"{label}, {chain}, learning_rate, end_value",
        f"{label}, settings['rate']",
        f"{label}, rates[1]",
        f"{label}, pair.second",
        f"{label}, applied.args[0]",
    }


def test_a_change_of_code_is_told_without_digests():
    changes = differences({"f": "code 1", "g": "code 2"}, {"f": "code 3", "h": "code 4"})
    told = ["f: its code changed", "g: gone", "h: not there before"]
    assert list(map(str, changes)) == told


def test_the_attributes_of_an_object_of_another_class_are_not_told():
    before = {"setup": "a run.Adam", "setup.beta": "0.9", "setup.rate": "0.1", "setups": "1"}
    after = {"setup": "a run.Sgd", "setup.rate": "0.2", "setup (order of attributes)": "f3"}
    changes = differences(before, after | {"setups": "2"})
    assert list(map(str, changes)) == ["setup: a run.Adam → a run.Sgd", "setups: 1 → 2"]


def test_methods_that_python_writes_are_told_last():
    before = {"Config.__eq__": "code 1", "Config.__init__": "code 2"}
    after = {"Config.__eq__": "code 3", "Config.__init__": "code 4", "Config.rate": "code 5"}
    paths = [each.path for each in differences(before, after)]
    assert paths == ["Config.rate", "Config.__eq__", "Config.__init__"]


def test_many_devices_are_a_short_text():
    numbers = [*range(1000), 2000, 7, 8]
    text = inspection.devices_text(("tpu" if each < 1000 else "cpu", each) for each in numbers)
    assert text == "tpu:0…999,cpu:2000,tpu:7…8"


def test_names_that_could_be_mistaken_for_one_another_stay_apart():
    """A captured variable and a default of one name, and an attribute beside an item."""

    def make(x):
        def step(y, *, z=x):
            return x, y, z

        step.__kwdefaults__ = {"x": 3.0}
        return step

    assert fingerprint(make(1.0)) != fingerprint(make(2.0))
    one, other = Settings(a=1), Settings(a=1)
    one.a, other.a = 2, 3
    assert fingerprint(one) != fingerprint(other) != fingerprint(Settings(a=1))


def test_another_module_in_the_place_of_one_that_was_looked_at(monkeypatch):
    """As by a reload by hand: what was noted of the first says nothing of the second."""

    def noted():
        walk = Walk()
        installed_packages.note_modules(walk, ["jax._src.nn.functions"], names)
        return walk.dependencies

    module = sys.modules["jax._src.nn.functions"]
    names = {"jax._src.nn.functions": "gelu relu"}
    before = noted()
    assert noted() == before
    other = types.ModuleType(module.__name__)
    other.__dict__.update(vars(module), gelu=len)
    with monkeypatch.context() as patch:
        patch.setitem(sys.modules, module.__name__, other)
        assert noted() != before
    assert noted() == before


@pytest.mark.parametrize("value", [len, types.SimpleNamespace(a=1)], ids=["function", "object"])
def test_what_was_noted_the_same_again_and_again_is_seen_when_it_changes(value, monkeypatch):
    """Steps that use nothing but JAX's code have the same modules and names."""
    modules = ["jax._src.nn.functions"]
    names = {"jax._src.nn.functions": "gelu relu", "jax._src.nn.initializers": "glorot_normal"}

    def noted():
        walk = Walk()
        installed_packages.note_modules(walk, modules, names)
        return walk.dependencies

    before = noted()
    assert [noted() for _ in range(4)] == [before] * 4
    with monkeypatch.context() as patch:
        patch.setattr("jax._src.nn.functions.gelu", value)
        changed = noted()
        assert changed != before and noted() == noted() == changed
    assert [noted() for _ in range(4)] == [before] * 4
    with monkeypatch.context() as patch:
        patch.delitem(sys.modules, "jax._src.nn.initializers")
        found = [noted() for _ in range(3)]
    assert all("names of jax._src.nn.initializers" not in each for each in found)
    assert [noted() for _ in range(4)] == [before] * 4


def test_what_is_to_blame_is_blamed_again_and_again():
    modules, names = ["msgpack"], {"msgpack": "packb"}
    for _ in range(4):
        walk = Walk()
        installed_packages.note_modules(walk, modules, names)
        assert any("compiled code" in why for why in walk.untrackable)


class Box(Generic[T]):
    __slots__ = ("width",)

    def __init__(self, width):
        self.width = width


def test_a_generic_class_is_looked_into_by_its_attributes():
    """`typing.Generic` is written in C since Python 3.12."""
    box = Box(3)
    found = fingerprint(lambda: box.width).dependencies
    assert [found[path] for path in found if path.endswith("box.width")] == ["3"]
    assert not any("taken apart" in token for token in found.values())


def test_a_registry_of_python_s_own_class_means_nothing():
    """`weakref.finalize` keeps all finalizers of a process in a dictionary of its own."""
    modules, names = [], {"weakref": "finalize", "concurrent.futures.thread": "weakref"}

    def noted():
        walk = Walk()
        installed_packages.note_modules(walk, modules, names)
        return walk.fingerprint().dependencies

    before, replaced = noted(), installed_packages.replacements()
    looked = installed_packages._all_held
    finalizer = weakref.finalize(Box, print)
    assert noted() == before
    finalizer.detach()
    assert noted() == before and installed_packages.replacements() == replaced
    assert installed_packages._all_held is looked  # Nothing had to be looked at anew.


def test_an_impure_function_of_a_module_that_is_imported_when_it_is_called(monkeypatch):
    def stopped(x):
        import pdb

        pdb.set_trace()
        return x

    monkeypatch.delitem(sys.modules, "pdb", raising=False)
    assert any("pdb.set_trace" in blame for blame in fingerprint(stopped).untrackable)
