"""What a later process finds: the same source made anew stands for that process here.

A step made from a function that was compiled from the same source shares nothing with the first
one but the directory of programs.
"""

import importlib.machinery
import json
import logging
import os
import stat
import subprocess
import sys
import textwrap
import threading
import time
import types
import warnings
from pathlib import Path

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import stepcache as sc
from stepcache import jaxcompat
from stepcache.events import Loaded, Verified, recorder
from stepcache.fingerprint import installed_packages
from stepcache.fingerprint.recorder import Recording
from stepcache.fingerprint.shared_state import disturbs_others
from stepcache.programs import verification

pytestmark = pytest.mark.skipif(
    not jaxcompat.PRIVATE_API, reason="programs are stored through JAX's private API"
)


def life(source: str, cache: sc.ProgramCache, tmp_path: Path, **names):
    """The module that `source` makes in a process of its own, as far as a step can tell."""
    module = types.ModuleType("life")
    path = tmp_path / "life.py"
    path.write_text(textwrap.dedent(source))
    module.__dict__.update(names, jax=jax, jnp=jnp, np=np, sc=sc, __file__=str(path))
    sys.modules["life"] = module
    exec(compile(path.read_text(), str(path), "exec"), module.__dict__)
    return module


def cache_in(tmp_path: Path, **options) -> sc.ProgramCache:
    return sc.ProgramCache(tmp_path / "programs", **{"verify": "off", **options})


def levels(stats: sc.StepStats) -> tuple[int, int, int]:
    """Traces, compiles, loads."""
    return stats.traces, stats.compiles, stats.loads


BUILT, WITHOUT_COMPILING, WITHOUT_A_TRACE = (1, 1, 0), (1, 0, 1), (0, 0, 1)


def twice(source: str, call, tmp_path: Path, *, session=None, **names):
    """Calls `step` in a first and in a second life; the results and steps of both."""
    results, steps = [], []
    for _ in range(2):
        cache = cache_in(tmp_path)
        with sc.Session(session, cache=cache):
            module = life(source, cache, tmp_path, **names)
            results.append(jax.tree.map(np.asarray, call(module.step)))
        cache.flush()
        steps.append(module.step)
    assert levels(steps[0].stats()) == BUILT, steps[0].last_miss
    return results, steps


SOURCES = {
    "carry, donated": (
        """
        @sc.step(carry="state")
        def step(state, batch):
            return {"w": state["w"] + batch.sum(), "n": state["n"] + 1}, state["w"].mean()
        """,
        lambda step: step({"w": jnp.ones(8), "n": jnp.int32(0)}, np.ones((8, 2), np.float32)),
    ),
    "unused arguments": (
        """
        @sc.step(keep_unused=True)
        def step(x, unused):
            return x * 2
        """,
        lambda step: step(np.ones(3, np.float32), np.zeros(5)),
    ),
    "unused arguments, dropped": (
        """
        @sc.step
        def step(unused, x):
            return x * 2
        """,
        lambda step: step(np.ones((8, 3), np.float32), np.arange(8.0)),
    ),
    "control flow": (
        """
        @sc.step
        def step(x, n):
            y = jax.lax.while_loop(lambda c: c[0] < n, lambda c: (c[0] + 1, c[1] * 1.5), (0, x))
            z = jax.lax.cond(n > 2, jnp.sin, jnp.cos, y[1])
            return jax.lax.scan(lambda a, b: (a + b, a * b), 0.0, z)
        """,
        lambda step: step(np.ones(8, np.float32), np.int32(3)),
    ),
    "random keys": (
        """
        @sc.step(carry="key")
        def step(key):
            key, use = jax.random.split(key)
            return key, jax.random.normal(use, (3,))
        """,
        lambda step: jax.random.key_data(step(jax.random.key(3))[0]),
    ),
    "static arguments": (
        """
        @sc.step(static_argnames=("mode", "scale"))
        def step(x, mode="a", scale=(1, 2.0)):
            return x * scale[1] if mode == "a" else x
        """,
        lambda step: step(np.ones(8), mode="a", scale=(3, 4.0)),
    ),
    "nothing, None and zero size": (
        """
        @sc.step
        def step(x, y):
            return {"a": None, "b": (), "c": [x, y[:0]], "d": {}}
        """,
        lambda step: step(np.zeros((0, 3)), np.ones(8)),
    ),
    "a large captured array": (
        """
        TABLE = np.arange(1 << 19, dtype=np.float32)
        @sc.step
        def step(x):
            return x + jnp.asarray(TABLE)[:8]
        """,
        lambda step: step(np.ones(8, np.float32)),
    ),
    "gradients through a custom rule": (
        """
        @jax.custom_vjp
        def double(x):
            return x * 2
        double.defvjp(lambda x: (x * 2, None), lambda _, g: (g * 3,))
        @sc.step
        def step(x):
            return jax.grad(lambda x: double(x).sum())(x)
        """,
        lambda step: step(np.ones(8)),
    ),
    "a dataclass comes out": (
        """
        import dataclasses
        @jax.tree_util.register_dataclass
        @dataclasses.dataclass
        class Metrics:
            loss: jax.Array
            name: str = dataclasses.field(default="m", metadata={"static": True})
        @sc.step
        def step(x):
            return Metrics(x.sum(), "train")
        """,
        lambda step: step(np.ones(8)).loss,
    ),
}


@pytest.mark.parametrize("name", SOURCES)
def test_a_second_life_starts_without_a_trace(name, tmp_path):
    (first, second), (_, step) = twice(*SOURCES[name], tmp_path)
    jax.tree.map(np.testing.assert_array_equal, first, second)
    assert levels(step.stats()) == WITHOUT_A_TRACE, step.last_miss
    assert "the program was loaded from disk, without a trace, in " in str(step.last_miss)


def test_inputs_and_outputs_are_placed_as_before(tmp_path, mesh):
    source = """
    @sc.step(carry="state")
    def step(state, batch):
        return {"w": state["w"] + (batch @ state["w"]).sum()}, batch * 2
    """
    placed = []

    def call(step):
        state, doubled = step({"w": np.ones((4, 8), np.float32)}, np.ones((8, 4), np.float32))
        state, _ = step(state, np.ones((8, 4), np.float32))
        placed.append((state["w"].sharding, doubled.sharding))
        return state["w"], doubled

    (first, second), (_, step) = twice(source, call, tmp_path, session=mesh)
    jax.tree.map(np.testing.assert_array_equal, first, second)
    assert placed[0] == placed[1] and isinstance(placed[0][0], NamedSharding)
    assert levels(step.stats()) == WITHOUT_A_TRACE and step.stats().misses == 1


def test_a_program_serves_other_devices_of_the_same_kind(tmp_path):
    source = """
    @sc.step
    def step(x):
        return x.sum(), x * 2
    """
    outputs = []
    for devices in (jax.devices()[:4], jax.devices()[4:]):
        mesh = jax.make_mesh(
            (4,), ("data",), devices=devices, axis_types=(jax.sharding.AxisType.Auto,)
        )
        cache = cache_in(tmp_path)
        with sc.Session(mesh, cache=cache):
            step = life(source, cache, tmp_path).step
            total, doubled = step(np.arange(8.0))
        cache.flush()
        assert doubled.devices() == set(devices)
        outputs.append((float(total), np.asarray(doubled).tolist()))
    assert outputs[0] == outputs[1]
    assert levels(step.stats()) == WITHOUT_A_TRACE


def test_devices_in_another_order_are_another_program(tmp_path):
    source = """
    @sc.step
    def step(x):
        return x * 2
    """
    for order in (slice(None), slice(None, None, -1)):
        devices = jax.devices()[order]
        mesh = jax.make_mesh(
            (8,), ("data",), devices=devices, axis_types=(jax.sharding.AxisType.Auto,)
        )
        cache = cache_in(tmp_path)
        with sc.Session(mesh, cache=cache):
            step = life(source, cache, tmp_path).step
            doubled = step(np.arange(8.0))
        cache.flush()
        assert doubled.sharding.mesh.devices.tolist() == devices
        assert np.asarray(doubled).tolist() == (np.arange(8.0) * 2).tolist()
    assert levels(step.stats()) == BUILT and "mesh" in str(step.last_miss)


def test_train_state_with_functions_in_its_tree(tmp_path):
    import flax.linen as nn
    import optax
    from flax.training.train_state import TrainState

    source = """
    class Model(nn.Module):
        width: int = 4
        @nn.compact
        def __call__(self, x):
            return nn.Dense(self.width)(x)

    model = Model()
    @sc.step(carry="state")
    def step(state, x):
        def loss(params):
            return state.apply_fn({"params": params}, x).sum()
        return state.apply_gradients(grads=jax.grad(loss)(state.params)), 0
    """

    def call(step):
        model = sys.modules["life"].model
        params = model.init(jax.random.key(0), np.ones((8, 3)))["params"]
        state = TrainState.create(apply_fn=model.apply, params=params, tx=optax.adam(0.1))
        return step(state, np.ones((8, 3)))[0].params

    (first, second), (_, step) = twice(source, call, tmp_path, nn=nn)
    jax.tree.map(np.testing.assert_array_equal, first, second)
    assert levels(step.stats()) == WITHOUT_A_TRACE, step.last_miss


# ---- the levels ------------------------------------------------------------------------------


def test_what_cannot_be_vouched_for_is_named_and_still_not_compiled(tmp_path):
    source = """
    import time
    @sc.step
    def step(x):
        return x + (time.time() > 0)
    """
    _, (first, second) = twice(source, lambda step: step(np.ones(8)), tmp_path)
    assert levels(second.stats()) == WITHOUT_COMPILING
    for step in (first, second):
        assert "life.py" in str(step.last_miss) and "time.time" in str(step.last_miss)
    assert any("time.time" in text for text in second.last_miss.untrackable)


def test_a_step_with_a_breakpoint_is_traced_at_each_start(tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "breakpointhook", sys.__breakpointhook__)  # Not that of pytest.
    monkeypatch.setenv("PYTHONBREAKPOINT", "0")  # Nobody is there to type.
    source = """
    @sc.step
    def step(x):
        breakpoint()
        return x * 2
    """
    _, steps = twice(source, lambda step: step(np.ones(3)), tmp_path)
    assert levels(steps[1].stats()) == WITHOUT_COMPILING
    assert "breakpoint, which depends on a debugger" in str(steps[1].last_miss)


def test_what_a_step_returns_of_what_it_holds_is_what_it_read(tmp_path):
    """An attribute that it does not read may be the same object in one run, and not in the next."""
    source = """
    import flax.struct

    @flax.struct.dataclass
    class Pair:
        x: object
        function: object = flax.struct.field(pytree_node=False)

    class Trainer:
        def __init__(self):
            functions = [lambda x: x, lambda x: -x]
            self.functions, self.latest = tuple(functions), functions[{latest}]
        def run(self, x):
            return Pair(x * 2, self.functions[0])

    trainer = Trainer()
    step = sc.step(trainer.run)
    """
    for latest, expected in ((0, BUILT), (1, WITHOUT_A_TRACE)):
        cache = cache_in(tmp_path)
        with sc.Session(cache=cache):
            module = life(source.format(latest=latest), cache, tmp_path)
            outputs = module.step(np.ones(8))
        cache.flush()
        assert outputs.function is module.trainer.functions[0]
        assert levels(module.step.stats()) == expected, module.step.last_miss


MAKES_FUNCTIONS = """
import flax.struct, optax

RATE, NOTED = {rate}, "first"

@flax.struct.dataclass
class Made:
    x: object
    function: object = flax.struct.field(pytree_node=False)
    tx: object = flax.struct.field(pytree_node=False)
    named: object = flax.struct.field(pytree_node=False)

def scaled_by(factor):
    return lambda x: x * factor

def helper(x):
    return x + {added}

@sc.step
def step(x):
    assert NOTED
    return Made(x * 2, scaled_by(RATE), optax.adamw(1e-3), named=helper)
"""


def test_functions_that_a_step_makes_and_returns(tmp_path, told):
    """Each trace makes others, and so does a start without a trace: they are equal in effect."""
    verified = 0
    for rate, added, expected in (
        *((0.5, 1, BUILT), (0.5, 1, WITHOUT_A_TRACE)),
        *((0.25, 1, WITHOUT_COMPILING), (0.25, 2, WITHOUT_COMPILING), (0.25, 2, WITHOUT_A_TRACE)),
    ):
        cache = cache_in(tmp_path, verify="background")
        with sc.Session(cache=cache):
            module = life(MAKES_FUNCTIONS.format(rate=rate, added=added), cache, tmp_path)
            made = module.step(np.ones(8))
            if expected == WITHOUT_A_TRACE:
                verified += 1
                wait_for_one(told, Verified, count=verified)
                module.step(np.ones(8))
        cache.flush()
        assert levels(module.step.stats()) == expected, module.step.last_miss
        assert made.function(8.0) == 8 * rate and made.named(1) == 1 + added
        assert made.named is module.helper
        made.tx.update(made.x, made.tx.init(made.x), made.x)
    assert all(each.agrees for each in told(Verified))


REGISTRY = """
import dataclasses, flax.struct

ACTIVATIONS = {{"plain": lambda x: x, "scaled": lambda x: x * {factor}}}

@dataclasses.dataclass(frozen=True)
class Config:
    activation: str = "scaled"
    registry: object = None

config = Config(registry={{"of": ACTIVATIONS}})

@flax.struct.dataclass
class Made:
    x: object
    activation: object = flax.struct.field(pytree_node=False)

def choose(registry, name):
    return registry[name]

@sc.step
def step(x):
    return Made(x * 2, {chosen})
"""


@pytest.mark.parametrize(
    "chosen",
    [
        "ACTIVATIONS[config.activation]",
        "ACTIVATIONS.get(config.activation)",
        "choose(ACTIVATIONS, config.activation)",
        'choose(config.registry["of"], config.activation)',
    ],
)
def test_a_function_of_a_registry_is_found_there_again(chosen, tmp_path):
    for factor, expected in ((3, BUILT), (3, WITHOUT_A_TRACE), (5, WITHOUT_COMPILING)):
        cache = cache_in(tmp_path)
        with sc.Session(cache=cache):
            module = life(REGISTRY.format(factor=factor, chosen=chosen), cache, tmp_path)
            made = module.step(np.ones(8))
        cache.flush()
        assert levels(module.step.stats()) == expected, module.step.last_miss
        assert made.activation is module.ACTIVATIONS["scaled"]


def test_programs_of_a_step_answer_for_what_they_alone_entered(tmp_path):
    source = """
    def first(x): return x * 2
    def second(x): return x * 3
    @jax.tree_util.register_pytree_node_class
    class Scheduled:
        def __init__(self, schedule): self.schedule = schedule
        def tree_flatten(self): return (), self.schedule
        @classmethod
        def tree_unflatten(cls, schedule, children): return cls(schedule)
    @sc.step
    def step(given, x): return given.schedule(x)
    """
    for expected in ((2, 2, 0), (0, 0, 2)):
        cache = cache_in(tmp_path)
        with sc.Session(cache=cache):
            module = life(source, cache, tmp_path)
            for schedule in (module.first, module.second):
                module.step(module.Scheduled(schedule), np.ones(8))
        cache.flush()
        assert levels(module.step.stats()) == expected, module.step.last_miss


def test_functions_that_each_trace_makes_are_no_change(tmp_path):
    cache = sc.ProgramCache(None, check_every=1)
    with sc.Session(cache=cache), warnings.catch_warnings():
        warnings.simplefilter("error")
        module = life(MAKES_FUNCTIONS.format(rate=0.5, added=1), cache, tmp_path)
        module.step(np.ones(8))
        module.NOTED = "second"
        module.step(np.ones(8)), module.step(np.ones(16))
        module.RATE = 0.25
        with pytest.raises(sc.StaleProgramError, match=r"RATE: 0\.5 → 0\.25"):
            module.step(np.ones(8))


def test_a_class_that_is_registered_with_its_first_object(tmp_path, caplog):
    """As those of chex are: where there is none yet, the step is traced, and nothing is wrong."""
    source = """
    class Pair:
        registered = False
        def __init__(self, x):
            if not Pair.registered:
                Pair.registered = True
                functions = lambda p: ((p.x,), None), lambda _, children: Pair(*children)
                jax.tree_util.register_pytree_node(Pair, *functions)
            self.x = x
    @sc.step
    def step(x):
        return Pair(x * 2)
    """
    _, (_, second) = twice(source, lambda step: step(np.ones(8)).x, tmp_path)
    assert levels(second.stats()) == WITHOUT_COMPILING
    assert not caplog.records


NAMES_WHAT_IS_HELD = """
@sc.step
def step(x):
    return x * held.{attribute}
"""


@pytest.mark.parametrize(("attribute", "traces"), [("nbytes", 0), ("version", 1)])
def test_variables_within_reach_of_a_step_count_by_what_it_reads_of_them(
    attribute, traces, tmp_path
):
    held = sc.Variables(np.zeros(3, np.float32), name="held")
    source = NAMES_WHAT_IS_HELD.format(attribute=attribute) + "held.assign(np.ones(3, np.float32))"
    _, steps = twice(source, lambda step: step(np.float32(2)), tmp_path, held=held)
    assert steps[1].stats().traces == traces, steps[1].last_miss


def test_a_connection_within_reach_of_a_step_costs_no_trace(tmp_path):
    with sc.connect(f"local:{tmp_path}") as held:
        source = NAMES_WHAT_IS_HELD.format(attribute="address.count('local')")
        _, steps = twice(source, lambda step: step(np.float32(2)), tmp_path, held=held)
    assert levels(steps[1].stats()) == WITHOUT_A_TRACE, steps[1].last_miss


def test_outputs_that_cannot_be_stored_are_named(tmp_path):
    source = """
    def make():
        @jax.tree_util.register_pytree_node_class
        class Pair:
            def __init__(self, x):
                self.x = x
            def tree_flatten(self):
                return (self.x,), None
            @classmethod
            def tree_unflatten(cls, aux, children):
                return cls(*children)
        return Pair
    Pair = make()
    @sc.step
    def step(x):
        return {pair}(x * 2)
    """
    held, made = source.format(pair="Pair"), source.format(pair="make()")
    _, (first, second) = twice(made, lambda step: step(np.ones(8)).x, tmp_path)
    assert levels(second.stats()) == WITHOUT_COMPILING
    for step in (first, second):
        assert any("Pair that cannot be stored" in text for text in step.last_miss.untrackable)
    (other := tmp_path / "held").mkdir()
    _, (_, second) = twice(held, lambda step: step(np.ones(8)).x, other)
    assert levels(second.stats()) == WITHOUT_A_TRACE, second.last_miss


def test_a_changed_function_is_built_and_the_change_named(tmp_path):
    outputs = []
    for rate in (0.1, 0.2):
        source = f"""
        RATE = {rate}
        @sc.step
        def step(x):
            return x * RATE
        """
        cache = cache_in(tmp_path)
        with sc.Session(cache=cache):
            step = life(source, cache, tmp_path).step
            outputs.append(step(np.ones(8))[0].item())
        cache.flush()
    assert outputs == [pytest.approx(0.1), pytest.approx(0.2)]
    assert step.last_miss.reason == "other run"
    assert "life.py:RATE: 0.1 → 0.2" in str(step.last_miss)


def test_verify_before_traces_first(tmp_path):
    source = """
    @sc.step
    def step(x):
        return x * 2
    """
    for expected in (BUILT, WITHOUT_COMPILING):
        cache = cache_in(tmp_path, verify="before")
        with sc.Session(cache=cache):
            step = life(source, cache, tmp_path).step
            step(np.ones(8))
        cache.flush()
        assert levels(step.stats()) == expected


def test_a_quick_build_is_not_kept(tmp_path):
    source = """
    @sc.step
    def step(x):
        return x * 2
    """
    for _ in range(2):
        cache = cache_in(tmp_path, min_build_seconds=1000.0)
        with sc.Session(cache=cache):
            step = life(source, cache, tmp_path).step
            step(np.ones(8))
        cache.flush()
        assert levels(step.stats()) == BUILT
        assert "less than 1000.0 s" in str(step.last_miss)


def test_a_step_with_a_callback_is_not_stored_and_says_so(tmp_path):
    source = """
    @sc.step
    def step(x):
        jax.debug.callback(lambda y: None, x)
        return x * 2
    """
    for _ in range(2):
        cache = cache_in(tmp_path)
        with sc.Session(cache=cache):
            step = life(source, cache, tmp_path).step
            step(np.ones(8))
        cache.flush()
        assert levels(step.stats()) == BUILT
        assert "cannot be stored" in str(step.last_miss) and "calls back" in str(step.last_miss)


def test_loading_is_no_recompile(tmp_path):
    source = """
    @sc.step
    def step(x):
        return x * 2
    """
    cache = cache_in(tmp_path)
    with sc.Session(cache=cache):
        life(source, cache, tmp_path).step(np.ones(8))
    cache.flush()
    with sc.Session(cache=cache_in(tmp_path), on_miss="error"), sc.no_recompile():
        step = life(source, cache, tmp_path).step
        assert step(np.ones(8))[0] == 2
        with pytest.raises(sc.RecompileError):
            step(np.ones(16))


def test_warm_loads(tmp_path):
    source = """
    @sc.step
    def step(x):
        return x * 2
    """
    for expected in (BUILT, WITHOUT_A_TRACE):
        cache = cache_in(tmp_path)
        with sc.Session(cache=cache):
            step = life(source, cache, tmp_path).step
            step.warm(jax.ShapeDtypeStruct((8,), np.float32))
            assert levels(step.stats()) == expected
            step(np.ones(8, np.float32))
        cache.flush()
        assert step.stats().misses == 1


def test_what_is_in_the_directory_is_told_by_explain(tmp_path):
    source = """
    @sc.step
    def step(x):
        return x * 2
    """
    cache = cache_in(tmp_path)
    with sc.Session(cache=cache):
        life(source, cache, tmp_path).step(np.ones(8))
    cache.flush()
    with sc.Session(cache=cache_in(tmp_path)):
        explanation = life(source, cache, tmp_path).step.explain(np.ones(8))
    assert not explanation.hit and "on disk" in str(explanation)


@pytest.mark.slow
def test_jax_own_persistent_cache_goes_on_working(tmp_path, monkeypatch):
    code = """
    import jax, numpy as np, sys
    jax.config.update("jax_compilation_cache_dir", sys.argv[1])
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0)
    jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)
    import stepcache as sc
    step = sc.step(lambda x: x * 3 + 1)
    with sc.Session(cache=sc.ProgramCache(sys.argv[2])) as session:
        print(step(np.ones(8)))
    session.cache.flush()
    print(step.stats().compiles)
    jax.jit(lambda x: x * 5)(np.ones(8))
    """
    file = tmp_path / "script.py"
    file.write_text(textwrap.dedent(code))
    for compiles in "10":
        command = [sys.executable, str(file), str(tmp_path / "jax"), str(tmp_path / "programs")]
        done = subprocess.run(command, check=True, capture_output=True, text=True, timeout=120)
        assert done.stdout.splitlines()[-1] == compiles
    names = [path.name for path in (tmp_path / "jax").iterdir()]
    assert any("lambda" in name for name in names), "the plain jit is kept by JAX"
    assert sum("lambda" in name and name.endswith("-cache") for name in names) == 1


# ---- verification ----------------------------------------------------------------------------


@pytest.fixture
def told():
    """What is told from now on: the recorder itself forgets the oldest."""
    events = []
    unsubscribe = recorder.subscribe(events.append)
    yield lambda kind: [event for event in events if isinstance(event, kind)]
    unsubscribe()


def wait_for_one(told, kind, seconds=60, count=1):
    limit = time.monotonic() + seconds
    while len(told(kind)) < count:
        assert time.monotonic() < limit, f"no {kind.__name__}"
        time.sleep(0.01)


def test_a_program_is_verified_in_the_background(tmp_path, told):
    source = """
    @sc.step
    def step(x):
        return x * 2
    """
    for _ in range(2):
        cache = cache_in(tmp_path, verify="background")
        with sc.Session(cache=cache):
            step = life(source, cache, tmp_path).step
            step(np.ones(8))
        cache.flush()
    wait_for_one(told, Verified)
    assert told(Verified)[0].agrees
    assert levels(step.stats()) == WITHOUT_A_TRACE
    assert step.stats().verifications == 1
    step(np.ones(8))


def test_a_check_that_another_thread_disturbed_decides_nothing(tmp_path, monkeypatch, told):
    """A trace where the step is called does; as where the main thread evaluates for a while."""
    source = """
    @sc.step
    def step(x):
        return x * 2
    """
    retraced, threads = verification.Checks._differences, []

    def disturbed(*arguments):
        threads.append(threading.current_thread())
        found = retraced(*arguments)
        return found if threads[-1] is threading.main_thread() else ("another program",)

    monkeypatch.setattr(verification.Checks, "_differences", disturbed)
    for _ in range(2):
        cache = cache_in(tmp_path, verify="background")
        with sc.Session(cache=cache):
            step = life(source, None, tmp_path).step
            step(np.ones(8))
            cache.flush()
            wait_until_suspected(step)
            step(np.ones(8))
            cache.archive().verifier.flush()
    assert len(threads) == 2 and threads[1] is threading.main_thread()
    assert [each.agrees for each in told(Verified)] == [True]
    assert levels(step.stats()) == WITHOUT_A_TRACE


def wait_until_suspected(step, seconds=3):
    limit = time.monotonic() + seconds
    while step._engine.checks.suspicion is None and time.monotonic() < limit:
        time.sleep(0.01)


FLAGS = {
    "an item": ("FLAGS['train'] = True", "FLAGS['train'] = False", False),
    "an attribute": ("SPACE.train = True", "SPACE.train = False", False),
    "an attribute that is taken away": ("SPACE.train = True", "del SPACE.train", False),
    "a variable": ("global TRAIN; TRAIN = True", "global TRAIN; TRAIN = False", False),
    "a stack": ("STACK.append(1)", "STACK.pop()", False),
    "a list that is emptied": ("STACK.append(1)", "STACK.clear()", False),
    "a stack in an object": ("SPACE.stack.append(1)", "SPACE.stack.pop()", False),
    "an attribute of a trainer": ("self.train = True", "self.train = False", False),
    "an attribute by name": ("setattr(SPACE, 'train', True)", "delattr(SPACE, 'train')", False),
    "a method": ("self.turn(True)", "self.turn(False)", False),
    "a method that sets by name": ("self.turn_by_name(True)", "self.turn_by_name(False)", False),
    "a function": ("turn(SPACE, True)", "turn(SPACE, False)", False),
    "a function over a variable": ("turn_all(True)", "turn_all(False)", False),
    "a method of a layer": ("LAYERS[0].note(True)", "pass", False),
    "layers in a loop": ("for layer in LAYERS: layer.noted = True", "pass", False),
    "a local variable": ("space = SPACE.inner; space.train = True", "pass", False),
    "an attribute that is set once": ("self.losses = []", "pass", False),
    "a count": ("SPACE.count += 1", "pass", False),
    "a count in a dictionary": ("FLAGS['train'] += 1", "pass", False),
    "a count of its own": ("n = {'n': 0}; n['n'] += 1; n['n'] -= 1", "pass", True),
    "a generator that is put back": ("NUMBERS.random()", "NUMBERS.seed(0)", False),
    "an iterator of its own": ("x = next(iter(FLAGS.values()))", "pass", True),
    "a list that grows": ("STACK.append(1)", "pass", False),
    "a list in an object": ("SPACE.stack.append(1)", "pass", False),
    "metrics": ("metrics = {}; metrics['loss'] = 1", "pass", True),
    "an argument's item": ("note({})", "pass", True),
    "a list of its own": ("losses = []; losses.append(1)", "pass", True),
    "an own object": ("own = Space(); own.train = True", "own = Space(); own.train = False", True),
}


def test_a_stack_that_each_thread_has_for_itself_disturbs_no_other():
    class Local(threading.local):
        def __init__(self):
            self.stack = []

    local, stack = Local(), []

    def turn(kept):
        kept.append(1)
        return local.stack.append(1), local.stack.pop()

    with Recording() as recording:
        turn([])
    assert not disturbs_others(recording)

    def own():
        made = types.SimpleNamespace()
        made.train = True
        made.train = False
        return lambda: made

    with Recording() as recording:
        own()
    assert not disturbs_others(recording)

    def shared():
        stack.append(1)
        return stack.pop()

    with Recording() as recording:
        shared()
    assert disturbs_others(recording)


@pytest.mark.parametrize("name", FLAGS)
def test_a_trace_that_would_disturb_other_threads_is_not_made_in_the_background(name, tmp_path):
    """They may look at what it changes for a while: as flags of a module, and numpyro's stack."""
    first, last, is_checked = FLAGS[name]
    source = f"""
    class Space: count = 0
    FLAGS, SPACE, STACK = {{"train": False}}, Space(), []
    SPACE.stack, SPACE.inner, TRAIN = [], Space(), False
    import random; NUMBERS = random.Random(0)

    def note(metrics):
        metrics["loss"] = 1

    class Layer:
        def note(self, value):
            self.noted = value

    LAYERS = Layer(), Layer()

    def turn(of, value):
        of.train = value

    def turn_all(value):
        global TRAIN
        TRAIN = value

    class Trainer:
        train = False

        def enter(self):
            {first}
        def leave(self):
            {last}
        def turn(self, value):
            self.train = value
        def turn_by_name(self, value, name="train"):
            setattr(self, name, value)

        def step(self, x):
            self.enter()
            try:
                return x * 2
            finally:
                self.leave()

    step = sc.step(Trainer().step)
    """
    for _ in range(2):
        cache = cache_in(tmp_path, verify="background")
        with sc.Session(cache=cache):
            step = life(source, cache, tmp_path).step
            step(np.ones(8))
            cache.flush()
            cache.archive().verifier.flush()
    assert levels(step.stats()) == WITHOUT_A_TRACE, step.last_miss
    assert step.stats().verifications == is_checked


DRAWS = {
    "numpy": ("np.random.default_rng(0)", "DRAWN.normal()"),
    "numpy, by a function": ("np.random.default_rng(0)", "draw(DRAWN)"),
    "numpy, its bits": ("np.random.default_rng(0)", "DRAWN.bit_generator.random_raw() % 7"),
    "numpy, the older one": ("np.random.RandomState(0)", "DRAWN.rand()"),
    "random": ("random.Random(0)", "DRAWN.random()"),
    "an iterator": ("iter([1.0, 2.0, 3.0])", "next(DRAWN)"),
    "a loop that ends early": ("iter([1.0, 2.0, 3.0])", "[each for each in DRAWN][0]"),
    "several iterators": ("zip([1.0, 2.0], [3.0, 4.0])", "sum(next(DRAWN))"),
}


@pytest.mark.parametrize("name", DRAWS)
def test_what_is_drawn_after_a_trace_is_the_same_in_each_start(name, tmp_path):
    made, drawn = DRAWS[name]
    source = f"""
    import random
    DRAWN = {made}
    draw = lambda source: source.normal()
    step = sc.step(lambda x: x * ({drawn}))
    other = sc.step(lambda x: x + ({drawn}))
    """
    seen = []
    for start in range(3):
        cache = cache_in(tmp_path)
        with sc.Session(cache=cache):
            found = life(source, cache, tmp_path)
            left = [found.step(1.0)]
            if name != "a loop that ends early":
                left += [found.other(1.0), draw_from(found.DRAWN)]
            seen.append(left)
            cache.flush()
        assert levels(found.step.stats()) == (BUILT if start == 0 else WITHOUT_COMPILING)
    assert seen[0] == seen[1] == seen[2]
    assert "DRAWN: the trace draws from it" in str(found.step.last_miss)


COUNTS = {
    "an attribute": ("class Keys: n = 0", "KEYS.n += 1; n = KEYS.n"),
    "an attribute of the object": (
        "class Keys:\n    def __init__(self): self.n = 0",
        "KEYS.n += 1; n = KEYS.n",
    ),
    "a method": (
        "class Keys:\n    n = 0\n    def next(self): self.n += 1",
        "KEYS.next(); n = KEYS.n",
    ),
    "a variable": ("class Keys: pass", "global N; N += 1; n = N"),
    "by another name": ("class Keys: n = 0", "KEYS.n = KEYS.n + 2; n = getattr(KEYS, 'n')"),
    "a dictionary": ("class Keys: pass", "COUNTS['n'] += 1; n = COUNTS['n']"),
}


@pytest.mark.parametrize("name", COUNTS)
def test_what_is_counted_in_a_trace_is_the_same_in_each_start(name, tmp_path):
    """As a number that is folded into a random key."""
    made, counts = COUNTS[name]
    function = "def {}(x):\n    {}\n    return x * 10 + n\n"
    source = f"N, COUNTS = 0, {{'n': 0}}\n{made}\nKEYS = Keys()\n"
    source += "".join(f"@sc.step\n{function.format(each, counts)}" for each in ("step", "other"))
    seen = []
    for start in range(3):
        cache = cache_in(tmp_path)
        with sc.Session(cache=cache), warnings.catch_warnings():
            warnings.simplefilter("error")
            found = life(source, cache, tmp_path)
            calls = [(each, np.ones(n)) for n in (2, 3) for each in (found.step, found.other)]
            seen.append([float(each(x)[0]) for each, x in calls])
            cache.flush()
        assert start == 0 or found.step.stats().compiles == 0
    assert seen[0] == seen[1] == seen[2]
    assert "the trace changes it from" in str(found.step.last_miss)


@pytest.mark.parametrize(
    "counts",
    [
        *("KEYS.n += 1", "KEYS.n -= 2", "global N; N += 1", "COUNT()"),
        *("TRACED.append(1)", "SEEN.add(x.shape)"),
    ],
)
def test_a_mere_count_of_traces_costs_no_trace_in_later_starts(counts, tmp_path):
    source = f"""
    class Keys: n = 0
    KEYS, N, TRACED, SEEN = Keys(), 0, [], set()

    def counter():
        n = 0
        def count():
            nonlocal n
            n += 1
        return count

    COUNT = counter()

    @sc.step
    def step(x):
        {counts}
        return x * 2
    """
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        _, (_, step) = twice(source, lambda step: step(1.0), tmp_path)
    assert levels(step.stats()) == WITHOUT_A_TRACE, step.last_miss


def test_draws_from_the_generators_of_the_process_are_named_once(tmp_path):
    source = """
    import random
    step = sc.step(lambda x: x * np.random.rand() * random.random())
    """
    cache = cache_in(tmp_path)
    with sc.Session(cache=cache):
        step = life(source, cache, tmp_path).step
        step(1.0)
        cache.flush()
    told = str(step.last_miss)
    assert told.count("it calls numpy.random.rand,") == told.count("it calls random.random,") == 1
    assert "looking at it raised" not in told


def draw_from(source):
    return source.random() if hasattr(source, "random") else list(source)


def test_what_is_not_drawn_from_costs_no_trace(tmp_path):
    source = """
    NUMBERS, ITEMS = np.random.default_rng(0), iter([1, 2, 3])
    step = sc.step(lambda x: x * 2 if ITEMS is not None and NUMBERS is not None else x)
    """
    _, (_, step) = twice(source, lambda step: step(1.0), tmp_path)
    assert levels(step.stats()) == WITHOUT_A_TRACE, step.last_miss


def test_what_the_user_sets_to_what_a_trace_once_left_is_a_change(tmp_path):
    source = """
    FLAG = False

    @sc.step
    def step(x):
        global FLAG
        factor = 3 if FLAG else 2
        FLAG = True
        return x * factor
    """
    cache = cache_in(tmp_path, check_every=1)
    with sc.Session(cache=cache):
        found = life(source, cache, tmp_path)
        assert [float(found.step(1.0)) for _ in range(2)] == [2.0, 2.0]  # The trace has set it.
        for found.FLAG in (False, False):
            assert float(found.step(1.0)) == 2.0
        found.FLAG = True
        with pytest.raises(sc.StaleProgramError, match="FLAG"):
            found.step(1.0)


def test_rules_of_flax_that_hold_for_one_thread(tmp_path):
    """They hold around a loop, and not in the background, where a trace gives another program."""
    source = """
    import flax.linen as nn

    @sc.step
    def step(x):
        return x * (2 if nn.logical_to_mesh_axes(("batch",))[0] == "data" else 3)
    """

    def started(*rules):
        cache = cache_in(tmp_path, verify="background")
        with sc.Session(cache=cache), nn.logical_axis_rules(rules):
            step = life(source, cache, tmp_path).step
            step(np.ones(8))
            cache.flush()
            cache.archive().verifier.flush()
            return int(step(np.ones(8))[0]), levels(step.stats())

    assert started(("batch", "data")) == (2, BUILT)
    assert started(("batch", "data")) == (2, WITHOUT_A_TRACE)
    assert started() == (3, BUILT)
    assert started() == (3, WITHOUT_A_TRACE)


def with_a_hole(monkeypatch) -> str:
    """A step, and a hole in the fingerprint, made on purpose: all numbers are taken for equal."""
    from stepcache.fingerprint import visitor

    atom = visitor.atom
    monkeypatch.setattr(
        visitor, "atom", lambda value: "a number" if type(value) is float else atom(value)
    )
    return """
    RATE = {rate}
    @sc.step
    def step(x):
        return x * RATE
    """


def test_a_wrong_program_is_removed_and_the_next_call_raises(tmp_path, monkeypatch, told):
    template = with_a_hole(monkeypatch)
    cache = cache_in(tmp_path)
    with sc.Session(cache=cache):
        life(template.format(rate=0.5), cache, tmp_path).step(np.ones(8))
    cache.flush()
    cache = cache_in(tmp_path, verify="background")
    with sc.Session(cache=cache):
        step = life(template.format(rate=0.25), cache, tmp_path).step
        assert step(np.ones(8))[0] == 0.5, "the hole"
        limit = time.monotonic() + 30
        with pytest.raises(sc.StaleProgramError, match=r"2\.500000e-01") as raised:
            while time.monotonic() < limit:
                step(np.ones(8))
        assert raised.value.changes
        assert [each.agrees for each in told(Verified)] == [False]
        monkeypatch.undo()
        assert step(np.ones(8))[0] == 0.25
    cache.flush()


def test_what_was_stale_once_though_nothing_had_changed_is_traced_at_each_start(
    tmp_path, monkeypatch
):
    template = with_a_hole(monkeypatch)
    cache = cache_in(tmp_path)
    with sc.Session(cache=cache):
        life(template.format(rate=0.5), cache, tmp_path).step(np.ones(8))
    cache.flush()
    cache = cache_in(tmp_path, verify="background")
    with sc.Session(cache=cache), pytest.raises(sc.StaleProgramError):
        step = life(template.format(rate=0.25), cache, tmp_path).step
        limit = time.monotonic() + 30
        while time.monotonic() < limit:
            step(np.ones(8))
    for rate, expected in ((0.25, BUILT), (0.5, WITHOUT_COMPILING), (0.25, WITHOUT_COMPILING)):
        cache = cache_in(tmp_path, verify="background")
        with sc.Session(cache=cache):
            step = life(template.format(rate=rate), cache, tmp_path).step
            assert step(np.ones(8))[0] == rate
        cache.flush()
        assert levels(step.stats()) == expected
        assert "something matters that is not seen" in str(step.last_miss)


def test_a_change_in_a_running_process_is_found_by_check_every(tmp_path):
    source = """
    RATE = 0.5
    @sc.step
    def step(x):
        return x * RATE
    """
    cache = sc.ProgramCache(None, check_every=3)
    with sc.Session(cache=cache):
        module = life(source, cache, tmp_path)
        for _ in range(4):
            assert module.step(np.ones(8))[0] == 0.5
        module.RATE = 0.25
        with pytest.raises(sc.StaleProgramError, match=r"RATE: 0\.5 → 0\.25"):
            for _ in range(3):
                module.step(np.ones(8))
        assert module.step(np.ones(8))[0] == 0.25


def test_a_change_in_a_running_process_is_found_at_the_next_program(tmp_path):
    source = """
    RATE = 0.5
    @sc.step
    def step(x):
        return x * RATE
    """
    cache = cache_in(tmp_path)
    with sc.Session(cache=cache):
        module = life(source, cache, tmp_path)
        module.step(np.ones(8))
        module.RATE = 0.25
        with pytest.warns(sc.StaleProgramWarning, match="RATE: 0.5 → 0.25"):
            assert module.step(np.ones(16))[0] == 0.25
        assert module.step(np.ones(24))[0] == 0.25, "and it is said once"
    cache.flush()


def test_an_earlier_program_whose_new_trace_raises_is_not_said_to_be_stale(tmp_path):
    source = """
    IS_OPEN = True
    @sc.step
    def step(x):
        if not IS_OPEN and len(x) == 8:
            raise ValueError("closed")
        return x * 0.5
    """
    cache = cache_in(tmp_path)
    with sc.Session(cache=cache), warnings.catch_warnings():
        warnings.simplefilter("error", sc.StaleProgramWarning)
        module = life(source, cache, tmp_path)
        module.step(np.ones(8))
        module.IS_OPEN = False
        assert module.step(np.ones(16))[0] == 0.5
    cache.flush()


def test_a_nested_function_traced_before_is_traced_again_for_the_record(tmp_path):
    """Else a file that it reads would be seen by nobody."""
    source = """
    @jax.jit
    def table(x):
        return x * float(open(FILE).read())
    @sc.step
    def step(x):
        return table(x) + 1
    """
    results = []
    data = tmp_path / "rate.txt"
    for text in ("2.0", "3.0"):
        data.write_text(text)
        cache = cache_in(tmp_path)
        with sc.Session(cache=cache):
            module = life(source, cache, tmp_path, FILE=str(data))
            module.table(jnp.ones(8))
            results.append(module.step(jnp.ones(8))[0].item())
        cache.flush()
    assert results == [3.0, 4.0]
    assert "rate.txt" in str(module.step.last_miss)


# ---- loading beforehand ----------------------------------------------------------------------

SCRIPT = """
import os, sys, time
import jax
jax.config.update("jax_num_cpu_devices", 4)
import numpy as np
import stepcache as sc

@sc.step(carry="state")
def step(state, x):
    return state + x.sum(), x * 2

if "late" in sys.argv:
    from jax._src import xla_bridge
    time.sleep(0.5)
    assert not xla_bridge.backends_are_initialized(), "preloading starts no backend"
jax.devices()
archive = step._engine.scope().cache.archive()
if "wait" in sys.argv:
    archive.preloader.worker.flush()
ahead = len(archive.preloader.preloaded)
started = time.perf_counter()
state, y = step(np.zeros(3), np.ones(8))
jax.block_until_ready(y)
stats = step.stats()
left = len(archive.preloader.preloaded)
print(ahead, left, stats.traces, stats.compiles, stats.loads, float(state[0]))
"""


def test_what_the_last_run_used_is_loaded_beforehand(tmp_path):
    file = tmp_path / "script.py"
    file.write_text(SCRIPT)
    environment = dict(os.environ, STEPCACHE_DIR=str(tmp_path / "programs"), NPROC="8")
    outputs = []
    for words in ([], ["wait", "late"], []):
        command = [sys.executable, str(file), *words]
        done = subprocess.run(
            command, env=environment, check=True, capture_output=True, text=True, timeout=120
        )
        outputs.append([float(each) for each in done.stdout.split()])
    assert outputs[0] == [0, 0, 1, 1, 0, 8]
    assert outputs[1] == [1, 0, 0, 0, 1, 8], "what was loaded beforehand is used"
    assert outputs[2][2:] == [0, 0, 1, 8], "the first call waits for what is not there yet"


LOOKS_AHEAD = """
import os, sys
import numpy as np
import stepcache as sc
from stepcache.fingerprint import installed_packages
from stepcache.programs import opening

opening._ahead.flush()
looked_at, opened = set(installed_packages._states), dict(opening._opened)
if "elsewhere" in sys.argv:
    os.environ["STEPCACHE_DIR"] += "-elsewhere"

@sc.step
def step(x):
    return x * 2

archive = step._engine.scope().cache.archive()
is_adopted = archive in opened.values()
step(np.ones(3)).block_until_ready()
print(len(opened), "jax._src.pjit" in looked_at, is_adopted, step.stats().traces, archive.verify)
"""


@pytest.mark.slow
def test_an_import_looks_at_what_the_last_run_used(tmp_path):
    """Where there was one; and in a directory that the program may not use after all."""
    file = tmp_path / "script.py"
    file.write_text(LOOKS_AHEAD)
    environment = dict(os.environ, STEPCACHE_DIR=str(tmp_path / "programs"))
    other = tmp_path / "other_script.py"
    other.write_text(LOOKS_AHEAD)
    found = []
    starts = (
        ([file], {}),
        ([file], {"STEPCACHE_VERIFY": "off"}),
        ([file, "elsewhere"], {}),
        ([other], {}),
    )
    for words, more in starts:
        command = [sys.executable, *map(str, words)]
        done = subprocess.run(
            command, env=environment | more, check=True, capture_output=True, text=True, timeout=120
        )
        found.append(done.stdout.split() + done.stderr.split())
    assert found[0] == ["0", "False", "False", "1", "background"]
    assert found[1] == ["1", "True", "True", "0", "off"]
    assert found[2] == ["1", "True", "False", "1", "background"]
    assert found[3] == ["0", "False", "False", "1", "background"]


def test_a_module_that_is_being_imported_is_not_looked_at(monkeypatch):
    """Not all of its names are there yet."""
    names = ("half_imported", "whole")
    for name in names:
        module = types.ModuleType(name)
        module.__spec__ = importlib.machinery.ModuleSpec(name, None)
        module.__spec__._initializing = name == "half_imported"
        monkeypatch.setitem(sys.modules, name, module)
    installed_packages.look_at_modules([], dict.fromkeys(names, "scale"))
    assert "half_imported" not in installed_packages._states
    assert installed_packages._states.pop("whole")


# ---- the directory ---------------------------------------------------------------------------


def run_script(code: str, directory: str, *, check=True):
    environment = dict(os.environ, STEPCACHE_DIR=directory)
    return subprocess.run(
        [sys.executable, "-W", "always", "-c", textwrap.dedent(code)],
        env=environment,
        check=check,
        capture_output=True,
        text=True,
        timeout=120,
    )


ONE_STEP = """
import numpy as np, stepcache as sc
step = sc.step(lambda x: x * 2)
print(step(np.ones(8))[0], step(np.ones(4))[0], step.stats().loads)
"""


@pytest.mark.slow
def test_a_directory_that_others_may_write_is_not_used_and_nothing_fails(tmp_path):
    directory = tmp_path / "open"
    directory.mkdir()
    directory.chmod(0o777)
    done = run_script(ONE_STEP, str(directory))
    assert done.stdout.split() == ["2.0", "2.0", "0"]
    assert done.stderr.count("not kept on disk") == 1 and "chmod" in done.stderr
    assert not list(directory.iterdir())
    with pytest.raises(sc.CacheDirectoryError):
        sc.ProgramCache(directory)


@pytest.mark.sample(every=3)
@pytest.mark.parametrize("url", ["gs://bucket/programs", "file:///tmp/programs", "HDFS://a/b"])
def test_a_url_as_the_directory_is_said_and_nothing_fails(url, tmp_path, monkeypatch):
    empty = tmp_path / "empty"
    empty.mkdir()
    monkeypatch.chdir(empty)
    done = run_script(ONE_STEP, url)
    assert done.stdout.split() == ["2.0", "2.0", "0"]
    assert done.stderr.count("not kept on disk") == 1
    assert url in done.stderr and "STEPCACHE_DIR" in done.stderr
    for directory in (url, Path(url)):
        with pytest.raises(sc.CacheDirectoryError, match="and not a URL"):
            sc.ProgramCache(directory)
    assert not list(empty.iterdir())


@pytest.mark.slow
def test_the_home_of_an_unknown_user_is_said_and_nothing_fails():
    done = run_script(ONE_STEP, "~nobody-of-this-name/programs")
    assert done.stdout.split() == ["2.0", "2.0", "0"]
    assert done.stderr.count("not kept on disk: No such user") == 1
    with pytest.raises(sc.CacheDirectoryError, match="No such user"):
        sc.ProgramCache("~nobody-of-this-name/programs")


def test_a_user_without_a_home_is_told_so(monkeypatch):
    monkeypatch.delenv("STEPCACHE_DIR")
    monkeypatch.setattr(os.path, "expanduser", lambda path: path)  # As where nobody knows the user.
    with pytest.warns(
        sc.StepCacheWarning, match=r"no home directory(.|\n)*STEPCACHE_DIR"
    ) as warned:
        assert sc.ProgramCache().archive() is None
    assert len(warned) == 1 and "No such user" not in str(warned[0].message)


def test_a_relative_directory_is_that_of_the_start(tmp_path, monkeypatch):
    """Scripts change their directory, as those that Hydra runs do."""
    start, later = tmp_path / "start", tmp_path / "later"
    start.mkdir()
    later.mkdir()
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("STEPCACHE_DIR", "programs")
    for arguments in ((), ("programs",), ("~/start/programs",)):
        monkeypatch.chdir(start)
        cache = sc.ProgramCache(*arguments)
        assert cache.archive() is not None
        monkeypatch.chdir(later)
        with sc.Session(cache=cache):
            sc.step(lambda x: x * 2)(np.ones(3, np.float32))
        cache.flush()
    assert [*start.iterdir()] == [start / "programs"] and not [*later.iterdir()]
    assert [*(start / "programs/v1/runs").iterdir()]


def test_how_to_verify_is_read_when_the_directory_is_opened(tmp_path, monkeypatch):
    cache = sc.ProgramCache()
    monkeypatch.setenv("STEPCACHE_DIR", str(tmp_path / "programs"))
    monkeypatch.setenv("STEPCACHE_VERIFY", "off")
    archive = cache.archive()
    assert archive is not None and archive.verify == "off"


def test_off_means_off(tmp_path):
    done = run_script(ONE_STEP + "print(step._engine.scope().cache.archive())", "off")
    assert done.stdout.split() == ["2.0", "2.0", "0", "None"]


@pytest.mark.slow
def test_the_directory_is_private(tmp_path):
    directory = tmp_path / "new"
    run_script(ONE_STEP, str(directory))
    for path in (directory, *directory.rglob("*")):
        assert not stat.S_IMODE(path.stat().st_mode) & 0o077, path


@pytest.mark.slow
def test_damaged_programs_are_rebuilt_in_silence(tmp_path, caplog):
    """Whatever is done to the files, the step gives its result."""
    source = """
    @sc.step
    def step(x):
        return x * 2
    """
    cache = cache_in(tmp_path)
    with sc.Session(cache=cache):
        life(source, cache, tmp_path).step(np.ones(8))
    cache.flush()
    entries = [path for path in (tmp_path / "programs").rglob("entries/*/*") if path.is_file()]
    assert len(entries) == 2
    random = np.random.default_rng(0)
    outcomes = set()
    with caplog.at_level(logging.CRITICAL):
        for number in range(30):
            path = entries[number % 2]
            data = bytearray(path.read_bytes())
            if number % 3:
                data[random.integers(len(data))] ^= 1 << random.integers(8)
            else:
                data = data[: random.integers(len(data))]
            path.write_bytes(data)
            cache = cache_in(tmp_path)
            with sc.Session(cache=cache):
                step = life(source, cache, tmp_path).step
                assert step(np.ones(8)).tolist() == [2.0] * 8
            cache.flush()
            outcomes.add(levels(step.stats()))
            assert all(path.is_file() for path in entries), "built and stored anew"
    assert WITHOUT_A_TRACE not in outcomes and WITHOUT_COMPILING in outcomes


def test_a_payload_that_xla_refuses_is_a_miss(tmp_path):
    """Authentic, whole, and still not loadable: as after a change in the format of XLA."""
    source = """
    @sc.step
    def step(x):
        return x * 2
    """
    cache = cache_in(tmp_path)
    with sc.Session(cache=cache):
        life(source, cache, tmp_path).step(np.ones(8))
    cache.flush()
    tier = cache.archive().disk
    (info,) = tier.entries("program")
    assert tier.publish("program", info.digest, {}, b"no executable")
    with sc.Session(cache=cache_in(tmp_path)) as session:
        step = life(source, cache, tmp_path).step
        assert step(np.ones(8))[0] == 2
    session.cache.flush()
    assert levels(step.stats()) == BUILT


def test_what_a_trace_compiles_by_itself_is_no_matter_of_ours(tmp_path):
    """JAX's functions that we replace while we compile are not taken for somebody's patches."""
    source = """
    traced = []
    @sc.step
    def step(x):
        traced.append(1)
        with jax.ensure_compile_time_eval():
            constant = jnp.sin(jnp.arange(SIZE, dtype=jnp.float32)).sum()
        return x * constant
    """
    for expected in (BUILT, WITHOUT_A_TRACE):
        cache = cache_in(tmp_path)
        with sc.Session(cache=cache):
            for size in ("17", "19"):
                module = life(source.replace("SIZE", size), cache, tmp_path)
                module.step(np.ones(8))
                assert levels(module.step.stats()) == expected
                assert len(module.traced) == (expected == BUILT)
        cache.flush()


def test_what_xla_does_not_load_is_discarded_and_built_again(tmp_path, monkeypatch):
    from stepcache.jaxcompat import storing

    def fail(data, devices):
        raise RuntimeError("Function wrapped_abs not found")

    source = """
    @sc.step
    def step(x):
        return x * 2
    """
    for fails, expected in ((False, BUILT), (True, BUILT), (False, WITHOUT_A_TRACE)):
        cache = cache_in(tmp_path)
        with monkeypatch.context() as patch:
            if fails:  # Before the session begins to load ahead for steps that live.
                patch.setattr(storing, "load_executable", fail)
            with sc.Session(cache=cache):
                step = life(source, cache, tmp_path).step
                assert step(np.ones(8))[0] == 2
            cache.flush()
        assert levels(step.stats()) == expected
        assert len(list(cache.archive().disk.entries("program"))) == 1


def test_a_library_patched_between_two_steps_that_share_traces(tmp_path, monkeypatch):
    """The second takes nothing that was traced for the first, and is not stored as if unpatched."""
    from jax._src.numpy import reductions

    def source(factor):
        return f"""
        @sc.step
        def step(x):
            return jnp.var(x) * {factor}
        """

    x, cache = np.arange(6.0, dtype=np.float32), cache_in(tmp_path)
    with sc.Session(cache=cache):
        for factor in (1, 2):
            assert life(source(factor), cache, tmp_path).step(x) == np.var(x) * factor
        mean = reductions.mean
        monkeypatch.setattr(reductions, "mean", lambda *args, **kwargs: mean(*args, **kwargs) + 1)
        patched = np.float32(np.mean((x - x.mean() - 1) ** 2))
        step = life(source(4), cache, tmp_path).step
        assert step(x) == patched * 4
        assert step.stats().traces == 2  # The first shared what was traced before the patch.
        monkeypatch.undo()
    cache.flush()
    cache = cache_in(tmp_path)
    with sc.Session(cache=cache):
        assert life(source(4), cache, tmp_path).step(x) == np.var(x) * 4


def test_one_build_and_one_load_however_many_threads(tmp_path, monkeypatch, told):
    source = """
    @sc.step
    def step(x):
        return x * 2
    """
    cache = cache_in(tmp_path)
    with sc.Session(cache=cache):
        life(source, cache, tmp_path).step(np.ones(8))
    cache.flush()
    cache, results = cache_in(tmp_path), []
    session = sc.Session(cache=cache)
    step = life(source, cache, tmp_path).step

    def call():
        with session:
            results.append(step(np.ones(8))[0].item())

    threads = [threading.Thread(target=call) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert results == [2.0] * 8 and levels(step.stats()) == WITHOUT_A_TRACE
    assert len(told(Loaded)) == 1


def test_warming_for_devices_that_are_only_described():
    topologies = pytest.importorskip("jax.experimental.topologies")
    try:
        topology = topologies.get_topology_desc("v5e:2x2", "tpu")
    except Exception as error:
        pytest.skip(f"this JAX describes no other topology here: {type(error).__name__}")
    mesh = topologies.make_mesh(topology, (4,), ("data",))
    shape = jax.ShapeDtypeStruct((8,), np.float32, sharding=NamedSharding(mesh, P("data")))
    with pytest.raises(sc.PlacementError, match="devices that do not exist here"):
        sc.step(lambda x: x * 2).warm(shape)


def test_devices_that_are_only_described_are_told_apart(monkeypatch):
    """As above, where no other topology can be described: these devices are said to be none."""
    from stepcache.jaxcompat import inspection

    asked = []
    monkeypatch.setattr(inspection, "live_backend", lambda devices: asked.append(devices))
    sharding = jax.sharding.SingleDeviceSharding(jax.devices()[1])
    with pytest.raises(sc.PlacementError, match="devices that do not exist here") as raised:
        sc.step(lambda x: x * 2).warm(jax.ShapeDtypeStruct((8,), np.float32, sharding=sharding))
    assert "step.lower" in str(raised.value) and asked == [{jax.devices()[1]}]


def test_the_run_log_has_a_row_for_each_program(tmp_path):
    source = """
    @sc.step
    def step(x):
        return x * 2
    """
    for _ in range(2):
        cache = cache_in(tmp_path)
        with sc.Session(cache=cache):
            life(source, cache, tmp_path).step(np.ones(8)).block_until_ready()
        cache.flush()
    runs = sorted((tmp_path / "programs" / "v1" / "runs").iterdir())
    rows = [json.loads(line) for path in runs for line in path.read_text().splitlines()]
    assert [row["event"] for row in rows] == ["built", "executed", "loaded", "executed"]
    assert {row["label"] for row in rows} == {"life.py:step"}
    assert rows[0]["program"] == rows[2]["program"] != ""
    assert {"import", "trace", "lower", "compile", "hash"} <= rows[0]["seconds"].keys()
    assert {"import", "read", "load", "hash"} <= rows[2]["seconds"].keys()
    assert rows[1]["seconds"]["execute"] > 0


STRESS = """
import os, sys, time
import jax, numpy as np
import stepcache as sc
from stepcache.programs import background

seconds, seed = float(sys.argv[1]), int(sys.argv[2])
cache = sc.ProgramCache(sys.argv[3], max_bytes=60_000, verify="off")
random = np.random.default_rng(seed)
background._SOON_SECONDS = 0.1  # Else a busy machine may store nothing before the end.
limit, counts = time.monotonic() + seconds, np.zeros(3, int)
with sc.Session(jax.make_mesh((1,), ("data",)), cache=cache):
    # On a busy machine nothing may be stored, and so loaded, within the time: then some more.
    while (now := time.monotonic()) < limit or (now < limit + 60 and not counts.all()):
        factor = int(random.integers(12))
        names = {"jax": jax}
        source = f"def step(x):\\n  return jax.lax.sin(x * {factor}) + {factor}\\n"
        exec(compile(source, "stress.py", "exec"), names)
        step = sc.step(names["step"])
        given = np.linspace(0, 1, 8, dtype=np.float32)
        np.testing.assert_allclose(step(given), np.sin(given * factor) + factor, rtol=1e-5)
        stats = step.stats()
        counts += [stats.compiles, stats.loads, stats.traces]
cache.flush()
tier = cache.archive().disk
print(*counts, len(tier.quarantined), tier.size_bytes())
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("processes", "seconds"), [(3, 2), pytest.param(8, 60, marks=pytest.mark.slow)]
)
def test_processes_that_build_load_and_evict_at_once(tmp_path, processes, seconds):
    file = tmp_path / "stress.py"
    file.write_text(STRESS)
    arguments = [str(tmp_path / "programs")]
    running = [
        subprocess.Popen(
            [sys.executable, str(file), str(seconds), str(seed), *arguments],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for seed in range(processes)
    ]
    totals = np.zeros(3, int)
    for process in running:
        out, errors = process.communicate(timeout=seconds + 200)
        assert process.returncode == 0, errors
        *counts, quarantined, _ = map(int, out.split()[-5:])
        assert quarantined == 0, errors
        totals += counts
    assert totals.min() > 0, "built, loaded and traced"
    left = sc.ProgramCache(tmp_path / "programs", max_bytes=60_000).archive().disk
    assert left.size_bytes() <= 80_000, "the bound, and what was being loaded"
    assert not [info for info in left.entries(whole=True) if info.problem]
    assert not list((tmp_path / "programs" / "v1" / "tmp").iterdir())


OPTIONS = """
    def train(state, batch):
        return state + batch, batch

    step = sc.step(train{options})
"""


@pytest.mark.parametrize(
    ("before", "after", "change"),
    [
        ("", ', carry="state"', "option carry: absent → 'state'"),
        (', carry="state"', "", "option carry: 'state' → absent"),
        ("", ", donate_argnums=0", "option donate_argnums: absent → 0"),
        (
            ", donate_argnums=(0,)",
            ", donate_argnums=1",
            "option donate_argnums: (0,) → 1",
        ),
        ("", ', donate_argnames=["batch"]', "option donate_argnames: absent → ('batch',)"),
    ],
)
def test_an_option_that_is_changed_is_one_change(before, after, change, tmp_path):
    for options in (before, after):
        cache = cache_in(tmp_path)
        with sc.Session(cache=cache):
            step = life(OPTIONS.format(options=options), cache, tmp_path).step
            step(jnp.ones(3), jnp.ones(3))
        cache.flush()
    assert step.last_miss.reason == "other run"
    assert [str(each) for each in step.last_miss.changes] == [change]


def test_what_a_carry_donates_is_part_of_what_is_looked_up(tmp_path):
    """It follows from the signature of the function too, and that may come from anywhere."""
    source = """
        import inspect

        def train(*args):
            return args[0] + args[1], args[1]

        Kind = inspect.Parameter.POSITIONAL_OR_KEYWORD
        names = {names}
        train.__signature__ = inspect.Signature([inspect.Parameter(n, Kind) for n in names])
        step = sc.step(train, carry="a")
    """
    donated = []
    for names in (["a", "b"], ["b", "a"]):
        cache = cache_in(tmp_path)
        with sc.Session(cache=cache):
            step = life(source.format(names=names), cache, tmp_path).step
            given = jnp.ones(3), jnp.ones(3)
            step(*given)
            donated.append([each.is_deleted() for each in given])
        cache.flush()
    assert donated == [[True, False], [False, True]]
