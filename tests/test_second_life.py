"""What a second start over one directory does: it traces and lowers, and compiles nothing.

The same source made anew, with a cache of its own, stands for a later process. Scripts that are run
as users run them are in `test_scripts`.
"""

import json
import shutil
import sys
import textwrap
import threading
import types
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import stepcache as sc
from stepcache import jaxcompat
from stepcache.events import Built, Loaded, recorder
from stepcache.jaxcompat.hooks import binds_callbacks
from stepcache.storage.disk_store import ROOT

pytestmark = pytest.mark.skipif(
    not jaxcompat.PRIVATE_API, reason="programs are stored through JAX's private API"
)

BINDS_CALLBACKS = jaxcompat.CAN_STORE and binds_callbacks(jax.devices()[:1])
BUILT, LOADED = (1, 1, 0), (1, 0, 1)  # Traces, compiles, loads.
X = np.arange(8.0, dtype=np.float32)
DOUBLE = """
@sc.step
def step(x):
    return x * 2
"""


def module_of(source: str, tmp_path: Path, **names):
    """The module that `source` makes in a process of its own, as far as a step can tell."""
    module = types.ModuleType("life")
    path = tmp_path / "life.py"
    path.write_text(textwrap.dedent(source))
    module.__dict__.update(names, jax=jax, jnp=jnp, np=np, sc=sc, __file__=str(path))
    sys.modules["life"] = module
    exec(compile(path.read_text(), str(path), "exec"), module.__dict__)
    return module


def start(source, tmp_path, call=lambda step: step(X), *, session=None, options=None, **names):
    """One start: what `call` returns, with arrays of numpy, and the step."""
    cache = sc.ProgramCache(tmp_path / "programs", **(options or {}))
    with sc.Session(session, cache=cache):
        module = module_of(source, tmp_path, **names)
        result = jax.tree.map(lambda x: np.asarray(x), call(module.step))
    cache.flush()
    return result, module.step


def counts(step) -> tuple[int, int, int]:
    stats = step.stats()
    return stats.traces, stats.compiles, stats.loads


def twice(source, tmp_path, call=lambda step: step(X), programs=1, **options):
    """Calls `step` in two starts, which agree; returns the step of each."""
    (first, built), (second, loaded) = (start(source, tmp_path, call, **options) for _ in range(2))
    assert counts(built) == (programs, programs, 0), built.last_miss
    assert counts(loaded) == (programs, 0, programs), loaded.last_miss
    assert jax.tree.structure(first) == jax.tree.structure(second)
    jax.tree.map(np.testing.assert_array_equal, first, second)
    return built, loaded


@pytest.fixture
def events():
    """What happens from now on: the recorder itself forgets the oldest."""
    seen = []
    unsubscribe = recorder.subscribe(seen.append)
    yield lambda kind: [event for event in seen if isinstance(event, kind)]
    unsubscribe()


SOURCES = {
    "carry": (
        """
        @sc.step(carry="state")
        def step(state, batch):
            return {"w": state["w"] + batch.sum(), "n": state["n"] + 1}, state["w"].mean()
        """,
        lambda step: step({"w": jnp.ones(8), "n": jnp.int32(0)}, np.ones((8, 2), np.float32)),
    ),
    "random keys": (
        """
        @sc.step(carry="key")
        def step(key):
            key, use = jax.random.split(key)
            return key, {"a": [jax.random.normal(use, (3,)), {"b": jax.random.split(use, 4)}]}
        """,
        lambda step: jax.random.key_data(step(jax.random.key(3))[0]),
    ),
    "static arguments": (
        """
        @sc.step(static_argnames=("mode", "scale"))
        def step(x, mode="a", scale=(1, 2.0)):
            return x * scale[1] if mode == "a" else x
        """,
        lambda step: step(X, mode="a", scale=(3, 4.0)),
    ),
    "nothing, None and zero size": (
        "step = sc.step(lambda x, y: {'a': None, 'b': (), 'c': [x, y[:0]], 'd': {}})",
        lambda step: step(np.zeros((0, 3)), X),
    ),
    "an object comes out": (
        """
        import dataclasses
        @jax.tree_util.register_dataclass
        @dataclasses.dataclass
        class Metrics:
            loss: jax.Array
            name: str = dataclasses.field(default="m", metadata={"static": True})
        step = sc.step(lambda x: Metrics(x.sum(), "train"))
        """,
        lambda step: step(X).loss,
    ),
    "a constant that the trace computes": (
        """
        @sc.step
        def step(x):
            with jax.ensure_compile_time_eval():
                constant = jnp.sin(jnp.arange(17.0)).sum()
            return x * constant
        """,
        lambda step: step(X),
    ),
    "a state of flax": (
        """
        import flax.linen as nn, optax
        from flax.training.train_state import TrainState

        model = nn.Dense(4)
        params = model.init(jax.random.key(0), np.ones((8, 3)))["params"]
        state = TrainState.create(apply_fn=model.apply, params=params, tx=optax.adam(0.1))

        @sc.step(carry="state")
        def step(state, x):
            loss = lambda params: state.apply_fn({"params": params}, x).sum()
            return state.apply_gradients(grads=jax.grad(loss)(state.params)), 0
        """,
        lambda step: step(sys.modules["life"].state, np.ones((8, 3)))[0].params,
    ),
    "padding": (
        """
        @sc.step(pad=sc.Pad("batch", mask="mask"))
        def step(batch, mask):
            return (batch.sum(axis=1) * mask).sum()
        """,
        lambda step: step(np.ones((5, 3), np.float32)),
    ),
    "repeated": (
        """
        @sc.step(carry="state", batch="x")
        def one(state, x):
            return state + x.sum(), state
        step = one.repeat(3)
        """,
        lambda step: step(jnp.float32(1), np.ones((3, 2), np.float32)),
    ),
    "variables": (
        """
        @sc.step(carry="state")
        def step(state, x):
            return {"w": state["w"] + x.sum()}, x
        """,
        lambda step: step(sc.Variables({"w": np.ones(3, np.float32)}), X)[0].value,
    ),
}


@pytest.mark.parametrize("name", SOURCES)
def test_a_second_start_compiles_nothing(name, tmp_path, events):
    source, call = SOURCES[name]
    _, loaded = twice(source, tmp_path, call)
    assert [event.source in ("preloaded", "disk") for event in events(Loaded)] == [True]
    assert (
        f"the program was {'preloaded' if events(Loaded)[0].source != 'disk' else 'loaded'} "
        in (str(loaded.last_miss))
    )


def test_many_steps_and_signatures(tmp_path):
    """And each finds its own."""
    source = """
    steps = [sc.step(lambda x, n=n: x * n) for n in range(20)]
    step = sc.step(lambda x: x - 1)
    """

    def call(step):
        steps = sys.modules["life"].steps
        outputs = [each(X) for each in steps] + [step(np.ones(n)) for n in range(1, 6)]
        added = [np.add(*each) for each in zip(counts(step), (0, 0, 0), strict=True)]
        return outputs, np.sum([counts(each) for each in steps], axis=0), added

    (first, *built), _ = start(source, tmp_path, call)
    (second, *loaded), _ = start(source, tmp_path, call)
    jax.tree.map(np.testing.assert_array_equal, first, second)
    assert [[*map(int, each)] for each in built] == [[20, 20, 0], [5, 5, 0]]
    assert [[*map(int, each)] for each in loaded] == [[20, 0, 20], [5, 0, 5]]


def test_inputs_are_donated_and_outputs_placed_as_before(tmp_path, mesh):
    source = """
    @sc.step(carry="state", batch="batch")
    def step(state, batch):
        return {"w": state["w"] + (batch @ state["w"]).sum()}, batch * 2
    """
    placed = []

    def call(step):
        state, doubled = step({"w": np.ones((4, 8), np.float32)}, np.ones((8, 4), np.float32))
        given = state["w"]
        state, _ = step(state, np.ones((8, 4), np.float32))
        assert given.is_deleted()
        placed.append((state["w"].sharding, doubled.sharding))
        return state["w"], doubled

    _, step = twice(source, tmp_path, call, session=mesh)
    assert placed[0] == placed[1] and isinstance(placed[0][0], NamedSharding)
    assert placed[0][1].spec == P("data") and step.stats().misses == 1


@pytest.mark.parametrize("order", [slice(4, None), slice(None, None, -1)], ids=["others", "turned"])
def test_a_mesh_of_other_devices(order, tmp_path):
    """Whether or not the executable serves them, outputs are where they belong."""
    for devices in (jax.devices()[:4], jax.devices()[order][:4]):
        mesh = jax.make_mesh((4,), ("data",), devices=devices, axis_types=(AxisType.Auto,))
        placed = []

        def call(step, placed=placed):
            placed.append(step(X))
            return placed[0]

        result, step = start(DOUBLE, tmp_path, call, session=mesh)
        assert placed[0].sharding.mesh.devices.tolist() == devices
        assert result.tolist() == (X * 2).tolist()
    assert sum(counts(step)[1:]) == 1


def test_a_step_made_anew_runs_what_this_process_holds(tmp_path, events):
    def call(step):
        again = module_of(DOUBLE, tmp_path).step
        assert counts(again) == (0, 0, 0)
        result = step(X), again(X)
        assert counts(again) == LOADED and "of the same module" in str(again.last_miss)
        return result

    start(DOUBLE, tmp_path, call)
    assert [event.source for event in events(Loaded)] == ["memory"] and len(events(Built)) == 1


# ---- what is not stored, and what is compiled again ----------------------------------------------


def test_a_change_is_compiled_and_named(tmp_path):
    source = "RATE = {}\nstep = sc.step(lambda x: x * RATE)"
    for rate in (0.5, 0.25):
        result, step = start(source.format(rate), tmp_path)
        assert result.tolist() == (X * rate).tolist() and counts(step) == BUILT
    miss = step.last_miss
    assert miss.reason == "other run"
    (change,) = miss.changes
    assert "life.py:2" in change.path and "0.5" in change.before and "0.25" in change.after


def test_what_is_gone_from_disk_is_said(tmp_path):
    start(DOUBLE, tmp_path)
    disk = sc.ProgramCache(tmp_path / "programs").store().disk
    (info,) = disk.entries("program")
    disk.discard("program", info.digest, "a test does not want it")
    _, step = start(DOUBLE, tmp_path)
    assert counts(step) == BUILT and step.last_miss.reason == "gone from disk"
    assert counts(start(DOUBLE, tmp_path)[1]) == LOADED


OPTIONS = [
    ("", ', carry="state"', "carry: absent → ('state',)"),
    (', carry="state"', "", "carry: ('state',) → absent"),
    ("", ", donate_argnums=0", "donate_argnums: absent → 0"),
    (", donate_argnums=(0,)", ", donate_argnums=1", "donate_argnums: (0,) → 1"),
    ("", ', donate_argnames=["batch"]', "donate_argnames: absent → ('batch',)"),
]


@pytest.mark.sample(every=2)
@pytest.mark.parametrize(("before", "after", "change"), OPTIONS)
def test_an_option_that_is_changed_is_one_change(before, after, change, tmp_path):
    source = "def train(state, batch):\n    return state + batch, batch\nstep = sc.step(train{})"
    for options in (before, after):
        _, step = start(source.format(options), tmp_path, lambda step: step(X, X + 1))
    assert step.last_miss.reason == "other run"
    assert [str(each) for each in step.last_miss.changes] == [change]


def test_a_sort_is_stored_though_xla_serializes_it_only_before_it_runs(tmp_path):
    source = "step = sc.step(lambda x: jnp.sort(x, descending=True) * 2)"
    for expected in (BUILT, LOADED):
        result, step = start(source, tmp_path)
        assert counts(step) == expected and result.tolist() == (X[::-1] * 2).tolist()
    assert step.last_miss.not_stored == ""


CALLBACK = "step = sc.step(lambda x: (jax.debug.callback(lambda y: None, x), x * 2)[1])"
LARGE = """
table = jnp.ones((1 << 19) + 1)
step = sc.step(lambda x: x * 2 * table[3])
"""


@pytest.mark.parametrize(
    ("source", "options", "why"),
    [
        (DOUBLE, {"min_build_seconds": 1000.0}, "less than 1000.0 s"),
        pytest.param(
            *(CALLBACK, {}, "calls back into Python"),
            marks=pytest.mark.skipif(BINDS_CALLBACKS, reason="it is stored"),
        ),
        (LARGE, {}, "it captures 2.1 MB of arrays by closure"),
    ],
    ids=["quick", "callback", "large"],
)
def test_what_is_not_stored_is_compiled_each_time_and_says_so(
    source, options, why, tmp_path, monkeypatch
):
    monkeypatch.setattr(sys.modules["stepcache.programs.build"], "_STORED_CAPTURE_BYTES", 2 << 20)
    for _ in range(2):
        result, step = start(source, tmp_path, options=options)
        assert counts(step) == BUILT and result.tolist() == (X * 2).tolist()
    assert why in step.last_miss.not_stored and why in str(step.last_miss)
    assert not list((tmp_path / "programs").rglob("entries/program/*"))
    assert why in rows_of(tmp_path)[0]["not_stored"]


def rows_of(tmp_path) -> list[dict]:
    """The rows of the run log, the oldest first."""
    runs = sorted((tmp_path / "programs" / ROOT / "runs").iterdir())
    return [json.loads(line) for path in runs for line in path.read_text().splitlines()]


def test_the_run_log_has_a_row_for_each_program(tmp_path):
    for _ in range(2):
        start(DOUBLE, tmp_path)
    rows = rows_of(tmp_path)
    assert [row["event"] for row in rows] == ["compiled", "loaded"]
    assert {row["label"] for row in rows} == {"life.py:step"}
    assert rows[0]["program"] == rows[1]["program"] != ""
    assert (rows[0]["source"], rows[1]["source"] in ("preloaded", "disk")) == ("compiled", True)
    assert {"trace", "lower", "compile"} <= rows[0]["seconds"].keys()
    assert {"trace", "lower", "load"} <= rows[1]["seconds"].keys()


# ---- before the call -----------------------------------------------------------------------------


def test_loading_is_no_recompile(tmp_path):
    start(DOUBLE, tmp_path)

    def call(step):
        with sc.no_recompile():
            result = step(X)
            with pytest.raises(sc.RecompileError):
                step(np.ones(16))
        return result

    with sc.Session(cache=sc.ProgramCache(tmp_path / "programs"), on_miss="error"):
        step = module_of(DOUBLE, tmp_path).step
        assert call(step)[1] == 2 and counts(step) == LOADED


def test_warm_loads(tmp_path):
    for expected in (BUILT, LOADED):

        def call(step, expected=expected):
            step.warm(jax.ShapeDtypeStruct(X.shape, X.dtype))
            assert counts(step) == expected
            return step(X)

        _, step = start(DOUBLE, tmp_path, call)
        assert counts(step) == expected and step.stats().misses == 1


def test_explain_says_what_the_last_run_used(tmp_path):
    def call(step):
        explained.append(step.explain(X))
        return step(X)

    explained = []
    twice(DOUBLE, tmp_path, call)
    start(DOUBLE.replace("2", "3"), tmp_path, call)
    assert [(each.hit, each.predicted) for each in explained] == [
        *((False, False), (False, True)),
        (False, True),  # It is a prediction: whether it holds is known after the trace.
    ]
    assert "on disk" in str(explained[1])


def test_one_build_and_one_load_however_many_threads(tmp_path, events):
    results = []
    for expected in (BUILT, LOADED):
        session = sc.Session(cache=sc.ProgramCache(tmp_path / "programs"))
        with session:
            step = module_of(DOUBLE, tmp_path).step

        def call(session=session, step=step):
            with session:
                results.append(step(X)[1].item())

        threads = [threading.Thread(target=call) for _ in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(60)
        session.cache.flush()
        assert counts(step) == expected
    assert results == [2.0] * 16 and (len(events(Built)), len(events(Loaded))) == (1, 1)


# ---- the directory -------------------------------------------------------------------------------


@pytest.mark.parametrize("preloads", [True, False])
def test_what_xla_does_not_load_is_discarded_and_built_again(preloads, tmp_path, monkeypatch):
    """Authentic, whole, and still not loadable: as after a change in the format of XLA."""
    start(DOUBLE, tmp_path)
    disk = sc.ProgramCache(tmp_path / "programs").store().disk
    (info,) = disk.entries("program")
    assert disk.publish("program", info.digest, {}, b"no executable")
    if not preloads:
        monkeypatch.setattr("stepcache.programs.prediction.Preloader.start", lambda self: None)
    for expected in (BUILT, LOADED):
        result, step = start(DOUBLE, tmp_path)
        assert result[1] == 2 and counts(step) == expected
    assert len(list(disk.entries("program"))) == 1


def test_a_directory_that_is_removed_meanwhile(tmp_path, caplog):
    def call(step):
        first = step(X)
        sc.current_session().cache.flush()
        shutil.rmtree(tmp_path / "programs")
        return first, step(np.ones(3)), step(np.ones(4))

    _, step = start(DOUBLE, tmp_path, call)
    assert counts(step) == (3, 3, 0)
    assert "Traceback" not in caplog.text
    assert counts(start(DOUBLE, tmp_path)[1])[0] == 1
