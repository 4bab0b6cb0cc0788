"""What a step adds to `jax.jit`: carry, warm, reasons, statistics, a life of its own."""

import contextlib
import copy
import dataclasses
import functools
import gc
import operator
import os
import pickle
import signal
import threading
import warnings
import weakref

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import stepcache as sc
from stepcache import jaxcompat
from stepcache.events import BuildFailed, Built, Loaded, StageStarted


@sc.step
def module_level(x, n=2):
    return x * n


# ---- carry -----------------------------------------------------------------------------------


@pytest.mark.parametrize("how", ["first of a tuple", "bare"])
def test_a_carry_is_donated_and_comes_back(how):
    @sc.step(carry="state")
    def f(state, x):
        new = {"w": state["w"] + x, "n": state["n"] + 1}
        return (new, x) if how == "first of a tuple" else new

    old = state = {"w": jnp.zeros(4), "n": jnp.int32(0)}
    for _ in range(3):
        out = f(state, 2.0)
        state = out[0] if how == "first of a tuple" else out
    assert old["w"].is_deleted() and old["n"].is_deleted()
    np.testing.assert_array_equal(state["w"], 6.0)
    assert int(state["n"]) == 3
    assert f.stats().compiles == 1


def test_several_carries_by_keyword_and_position():
    @sc.step(carry=("params", "moments"))
    def f(params, moments, *, batch):
        return params + batch, moments * 2, params.sum()

    params, moments = jnp.ones(2), jnp.ones(3)
    first = f(params, moments=moments, batch=1.0)
    assert params.is_deleted() and moments.is_deleted()
    assert [x.shape for x in first] == [(2,), (3,), ()]


def test_carry_adds_to_other_donations():
    @sc.step(carry="state", donate_argnums=1, static_argnames="n")
    def f(state, scratch, kept, n):
        return state + n, scratch * 2, kept

    arrays = [jnp.ones(4), jnp.ones(4), jnp.ones(4)]
    f(*arrays, n=2)
    assert [x.is_deleted() for x in arrays] == [True, True, False]


@pytest.mark.parametrize("options", [{}, {"donate_argnums": 1}, {"static_argnums": 2}], ids=str)
def test_a_carry_that_goes_by_position_alone(options):
    @sc.step(carry="state", **options)
    def f(state, scratch, n, /, *, more):
        return state + n + more, scratch * 2

    for kept in (jnp.ones(4), sc.Variables(np.ones(4, np.float32))):
        scratch, state = jnp.ones(4), kept
        for _ in range(3):
            state, scratch_after = f(state, scratch, 2, more=1.0)
            scratch_given, scratch = scratch, scratch_after
            assert scratch_given.is_deleted() is ("donate_argnums" in options)
        if state is kept:
            np.testing.assert_array_equal(state.value, 10)
        else:
            np.testing.assert_array_equal(state, 10)
            assert kept.is_deleted()
    with pytest.raises(sc.OptionError, match=r"carry='rest' is not a parameter"):
        sc.step(lambda *rest: rest, carry="rest")
    with pytest.raises(sc.OptionError, match="both carried and static"):
        sc.step(lambda state, /: state, carry="state", static_argnums=0)


def test_a_carry_whose_tree_is_a_tuple_may_be_returned_bare():
    @sc.step(carry="pair")
    def f(pair):
        return pair[0] + 1, pair[1] * 2

    assert [float(x) for x in f((jnp.float32(1), jnp.float32(2)))] == [2.0, 4.0]


@pytest.mark.parametrize(
    ("body", "path", "expected", "got"),
    [
        (lambda s: ({"w": s["w"][:2]}, 0), "state['w']", "float32[4]", "float32[2]"),
        (lambda s: ({"w": s["w"] > 0}, 0), "state['w']", "float32[4]", "bool[4]"),
        (lambda s: ({"v": s["w"]}, 0), "state['w']", "float32[4]", "no such leaf"),
        (lambda s: ({**s, "v": s["w"]}, 0), "state['v']", "no such leaf", "float32[4]"),
        (lambda s: (0, s), "state['w']", "float32[4]", "no such leaf"),
        (lambda s: s["w"], "state", "new state, then other outputs", "one array"),
    ],
)
def test_a_carry_that_does_not_come_back_names_the_path(body, path, expected, got):
    state = {"w": jnp.ones(4)}
    f = sc.step(lambda state: body(state), carry="state")
    with pytest.raises(sc.CarryError) as raised:
        f(state)
    error = raised.value
    assert error.where == path and error.expected == expected and got in error.got
    assert not state["w"].is_deleted(), "a refused call takes nothing"


_BY_THE_PUBLIC_API = pytest.mark.skipif(
    not jaxcompat.PRIVATE_API, reason="jax.stages.Compiled has a parameter of that name"
)


@pytest.mark.parametrize(
    "name", [pytest.param("self", marks=_BY_THE_PUBLIC_API), "engine", "jitted", "args", "form"]
)
def test_an_argument_may_have_any_name(name):
    scope = {}
    exec(f"def add(x, *, {name}): return x + {name}", scope)
    step = sc.step(scope["add"], carry="x")
    variables, value = sc.Variables(np.zeros(3, np.float32)), {name: np.float32(2)}
    step.warm(np.zeros(3, np.float32), **value)
    assert step.explain(variables, **value).step == "add"
    assert float(step(np.zeros(3, np.float32), **value)[0]) == 2
    for _ in range(3):
        step(variables, **value)
    assert float(variables.value[0]) == 6


def test_a_carry_that_is_not_passed():
    f = sc.step(lambda x, state=None: (state, x), carry="state")
    with pytest.raises(sc.CarryError, match="does not pass"):
        f(1)


def test_a_donated_carry_used_again_is_named():
    f = sc.step(lambda state, x: (state, x), carry="state")
    state = {"w": jnp.ones(4), "kept": np.ones(2)}
    f(state, 1)
    f._clear_cache()  # A hit that JAX's dispatcher serves raises JAX's own words, without ours.
    with pytest.raises((RuntimeError, ValueError), match="deleted") as raised:
        f(state, 1)
    assert "state['w'] has been deleted, or donated" in raised.value.__notes__[0]


def test_a_python_number_in_a_carry_compiles_once():
    @sc.step(carry="state")
    def f(state):
        return {"n": state["n"] + 1}

    state = {"n": 0}
    for _ in range(4):
        state = f(state)
    assert int(state["n"]) == 4
    assert f.stats().compiles == 1


@pytest.mark.parametrize(
    ("options", "match"),
    [
        ({"carri": "x"}, "did you mean 'carry'"),
        ({"static_argname": "x"}, "did you mean 'static_argnames'"),
        ({"carry": "y"}, "carry='y' is not a parameter"),
        ({"carry": "x", "static_argnames": "x"}, "both carried and static"),
    ],
)
def test_wrong_options_are_an_error_at_once(options, match):
    with pytest.raises(sc.OptionError, match=match):
        sc.step(lambda x: x, **options)


# ---- warm and explain ------------------------------------------------------------------------


def test_warm_builds_and_runs_nothing():
    ran = []

    @sc.step(carry="x")
    def f(x):
        jax.debug.callback(lambda: ran.append(1))
        return x

    x = jnp.ones(3)
    f.warm(x)
    f.warm(jax.ShapeDtypeStruct((3,), jnp.float32))
    assert f.stats().compiles == 1 and not ran and not x.is_deleted()
    with sc.no_recompile():
        f(x)
    jax.effects_barrier()
    assert ran == [1]


def test_warm_refuses_what_a_call_would_refuse():
    with pytest.raises(TypeError, match=r"not a valid JAX type|abstract array"):
        sc.step(lambda x: x).warm("text")


def test_explain_of_a_call_that_cannot_be_made_is_the_error_of_the_call():
    step = sc.step(lambda state, batch: state + batch, carry="state")
    for args, kwargs in [((1.0,), {}), ((1.0, 2.0, 3.0), {}), ((1.0, 2.0), {"rate": 1.0})]:
        with pytest.raises(TypeError) as called:
            step(*args, **kwargs)
        with pytest.raises(TypeError) as explained:
            step.explain(*args, **kwargs)
        assert str(explained.value).splitlines()[0] == str(called.value).splitlines()[0]
    with pytest.raises(TypeError, match="missing 1 required positional argument: 'batch'"):
        step.explain(sc.Variables(1.0))

    def summed(x):
        return x

    @functools.wraps(summed)
    def outer(x, y):  # Its signature is another one than it says.
        return summed(x) + y

    assert not sc.step(outer).explain(1.0, 2.0).hit


def test_explain_runs_and_traces_nothing():
    traced = []
    f = sc.step(lambda x: traced.append(1) or x)
    assert not f.explain(np.ones(3)).hit
    assert not traced
    f(np.ones(3))
    explanation = f.explain(np.ones(3))
    assert explanation.hit and explanation.miss is None and len(traced) == 1


# ---- reasons ---------------------------------------------------------------------------------


def changes(step, *calls, **last):
    """The changes that the last call's miss names."""
    for call in calls:
        step(*call)
    if last:
        step(**last)
    return [str(change) for change in step.last_miss.changes]


def test_a_miss_names_the_argument_the_shapes_and_the_axis():
    f = sc.step(lambda batch: batch)
    tokens = [{"tokens": np.zeros((rows, 128), np.int32)} for rows in (32, 31)]
    assert changes(f, [tokens[0]], [tokens[1]]) == [
        "batch['tokens']: int32[32,128] → int32[31,128] (axis 0)"
    ]


def test_a_miss_names_each_kind_of_change(mesh):
    placed = jax.device_put(np.ones(8, np.float32), NamedSharding(mesh, P("data")))
    elsewhere = jax.device_put(np.ones(8, np.float32), NamedSharding(mesh, P("model")))
    cases = [
        (np.ones(8, np.float32), np.ones(8, np.int32), "x: float32[8] → int32[8] (dtype)"),
        (np.ones(8, np.float32), np.ones((8, 1), np.float32), "1 → 2 dimensions"),
        (np.float32(1), 1.0, "weak type: the call's comes from a Python scalar"),
        (placed, elsewhere, "x: float32[8] @ P('data') → float32[8] @ P('model') (spec)"),
        (np.ones(8, np.float32), placed, "uncommitted → float32[8] @ P('data') (committed)"),
        (placed, np.ones(8, np.float32), "(no longer committed)"),
        ({"a": 1}, {"a": 1, "b": 2.0}, "x['b']: absent → float32[] (added)"),
        ({"a": 1, "b": 2.0}, {"a": 1}, "x['b']: float32[] → absent (missing)"),
        ([1, 2], (1, 2), "x: <class 'list'> → <class 'tuple'>"),
        ({"a": [1]}, {"a": (1,)}, "x['a']: <class 'list'> → <class 'tuple'>"),
    ]
    for before, after, expected in cases:
        f = sc.step(lambda x: x)
        found = changes(f, [before], [after])
        if "<class" in expected and not jaxcompat.PRIVATE_API:
            expected = "the structures differ"
        assert any(expected in change for change in found), (expected, found)


def test_a_miss_names_statics_settings_and_memory_kinds():
    f = sc.step(lambda x, n=1: x * n, static_argnames="n")
    f(1.0)
    assert changes(f, x=1.0, n=3)[0] == "n: its default → 3 (static)"
    f(1.0, n=3)
    f(1.0, n=True)
    assert "static" in str(f.last_miss.changes[0])
    f = sc.step(lambda x: x)
    f(np.ones(2))
    with jax.enable_x64(True):
        f(np.ones(2))
    assert any("jax_enable_x64: False → True" in str(c) for c in f.last_miss.changes)
    kinds = {memory.kind for memory in jax.devices()[0].addressable_memories()}
    if "pinned_host" in kinds:
        f = sc.step(lambda x: x)
        device = jax.devices()[0]
        for kind in ("device", "pinned_host"):
            f(
                jax.device_put(
                    np.ones(2), jax.sharding.SingleDeviceSharding(device, memory_kind=kind)
                )
            )
        assert "memory kind device → pinned_host" in str(f.last_miss)


def test_a_miss_is_told_against_the_nearest_signature():
    f = sc.step(lambda a, b: a)
    f(np.ones((4, 4)), np.ones(7))
    f(np.ones((9, 9, 9)), np.ones((2, 2)))
    f(np.ones((4, 5)), np.ones(7))
    assert [change.path for change in f.last_miss.changes] == ["a"]
    assert f.last_miss.changes[0].sizes == ((1, 4, 5),)


def test_varying_sizes_are_counted_and_padding_suggested():
    f = sc.step(lambda x: x)
    for rows in (31, 32, 33, 34):
        f(np.ones((rows, 2)))
    (hint,) = f.last_miss.advice
    assert "axis 0 of x has had 4 sizes (31, 32, 33, 34)" in hint and "pad" in hint


def test_a_static_with_many_values_is_pointed_out():
    f = sc.step(lambda x, n: x * n, static_argnums=1)
    for n in range(4):
        f(1.0, n)
    assert "static n has had 4 values" in f.last_miss.advice[0]


class ByIdentity:
    pass


@pytest.mark.parametrize(
    ("make", "advice"),
    [
        (lambda n: lambda x: x, "make each callable once, before the loop"),
        (lambda n: functools.partial(jnp.add, n), "make each callable once, before the loop"),
        (lambda n: ByIdentity(), "an __eq__ and a __hash__ by value"),
        (lambda n: f"mode {n}", "pass fewer distinct values"),
        (lambda n: (n, "same"), "pass fewer distinct values"),
        (lambda n: float(n), "pass it as an array if the code does not branch on it"),
        (lambda n: np.int32(n), "pass it as an array if the code does not branch on it"),
    ],
    ids=["lambda", "partial", "object", "string", "tuple", "float", "numpy"],
)
def test_the_advice_on_a_static_fits_its_kind(make, advice):
    f = sc.step(lambda x, n: x, static_argnums=1)
    values = [make(n) for n in range(4)]
    for value in values:
        f(1.0, value)
    (hint,) = f.last_miss.advice
    assert hint.startswith("static n has had 4 values (") and advice in hint
    assert ("pass it as an array" in hint) == ("branch" in advice)


def test_a_miss_is_whole_sentences():
    f = sc.step(lambda x: x, static_argnums=())
    f(np.ones(2, np.float32))
    f(np.ones(3, np.float32))
    assert str(f.last_miss).splitlines() == [
        "<lambda>, miss 2: no cached program matches; the closest differs in:",
        "  x: float32[2] → float32[3] (axis 0)",
    ]
    loaded = dataclasses.replace(f.last_miss, remedy="loaded from disk, in 0.10 s", omitted=1)
    assert str(loaded).splitlines()[2:] == [
        "  … and 1 more change",
        "  the program was loaded from disk, in 0.10 s",
    ]
    without = dataclasses.replace(f.last_miss, changes=())
    assert str(without) == "<lambda>, miss 2: no cached program matches"


def test_a_large_captured_array_is_named_with_its_size():
    table = jnp.ones((512, 1024))
    f = sc.step(lambda x: x + table.sum())
    f(1.0)
    assert "table, float32[512,1024], is captured by closure: 2.1 MB" in str(f.last_miss)
    assert f.explain(1.0).captured[0].size_bytes == 512 * 1024 * 4


def test_a_captured_array_of_a_nested_function_is_found():
    table = np.ones((512, 1024), np.float32)
    inner = jax.jit(lambda x: (x * table).sum())
    f = sc.step(lambda x: inner(x))
    f(1.0)
    assert f.explain(1.0).captured


def test_reasons_for_programs_that_were_there():
    f = sc.step(lambda x: x)
    cache = sc.ProgramCache(max_memory_programs=1)
    mesh = jax.make_mesh((1,), ("data",))
    with sc.Session(mesh, cache=cache):
        f(np.ones(2))
        f(np.ones(3))
        f(np.ones(2))
        assert f.last_miss.reason == "evicted"
        f.clear_cache()
        f(np.ones(2))
        assert f.last_miss.reason == "cleared"
    assert f.stats().evictions == 2


SETTINGS = [
    ("jax_enable_x64", True),
    ("jax_default_matmul_precision", "float32"),
    ("jax_default_prng_impl", "rbg"),
    ("jax_debug_nans", True),
    ("jax_debug_infs", True),
    ("jax_numpy_rank_promotion", "warn"),
    ("jax_numpy_dtype_promotion", "strict"),
    ("jax_threefry_partitionable", False),
    ("jax_disable_most_optimizations", True),
    ("jax_optimization_level", "O1"),
    ("jax_random_seed_offset", 3),
    ("jax_default_device", "device 1"),
]


@pytest.mark.parametrize(("name", "value"), SETTINGS)
def test_a_setting_of_jax_is_part_of_the_key(name, value):
    """Set for the process, after hits; then back, which is a known program again."""
    value = jax.devices()[1] if value == "device 1" else value
    if not jaxcompat.PRIVATE_API and name in ("jax_debug_nans", "jax_debug_infs"):
        return  # The public API leaves these calls to jax.jit.
    f = sc.step(lambda x: x * 2)
    before = jaxcompat.setting(name)
    for _ in range(3):
        f(np.ones(2, np.float32))
    try:
        jax.config.update(name, value)
        for _ in range(3):
            f(np.ones(2, np.float32))
        assert f.stats().traces == 2
        assert [change.path for change in f.last_miss.changes] == [name]
    finally:
        jax.config.update(name, before)
    f(np.ones(2, np.float32))
    assert f.stats().traces == 2


@pytest.mark.parametrize("make", ["default_prng_impl", "debug_nans", "enable_x64"])
def test_a_setting_for_one_thread_is_part_of_the_key(make):
    f = sc.step(lambda: jax.random.key_data(jax.random.key(0)))
    context = {
        "default_prng_impl": lambda: jax.default_prng_impl("rbg"),
        "debug_nans": lambda: jax.debug_nans(True),
        "enable_x64": lambda: jax.enable_x64(True),
    }[make]
    shapes = []
    for _ in range(2):
        shapes.append(f().shape)
        with context():
            shapes.append(f().shape)
    assert f.stats().traces + f.stats().delegated >= 2
    assert shapes == ([(2,), (4,)] * 2 if make == "default_prng_impl" else [(2,)] * 4)


def test_a_compiler_option_is_another_program():
    def f(x):
        return x * 2

    plain = sc.step(f)
    fast = sc.step(f, compiler_options={"xla_cpu_enable_fast_math": True})
    plain(1.0), fast(1.0)
    assert plain.stats().compiles == fast.stats().compiles == 1
    assert plain._engine.spec.identity == fast._engine.spec.identity


# ---- statistics and events -------------------------------------------------------------------


def test_stats_count_and_time_the_stages():
    f = sc.step(lambda x: jnp.sin(x) @ x.T)
    assert f.stats() == sc.StepStats()
    f(np.ones((3, 3)))
    stats = f.stats()
    assert (stats.misses, stats.traces, stats.lowers, stats.compiles) == (1, 1, 1, 1)
    assert min(stats.trace_seconds, stats.lower_seconds, stats.compile_seconds) > 0
    assert 0 < stats.own_seconds < 1
    assert stats.programs == 1
    jax.grad(lambda x: f(x).sum())(np.ones((3, 3)))
    assert f.stats().delegated == 1


def test_events_reach_the_recorder_and_jax_monitoring():
    heard, seen = [], []
    jax.monitoring.register_event_listener(lambda name, **data: heard.append((name, data)))
    unsubscribe = sc.recorder.subscribe(
        lambda event: seen.append(event) if getattr(event, "step", "") == "announced" else None
    )

    @sc.step
    def announced(x):
        return x

    mesh = jax.make_mesh((1,), ("data",))
    with sc.Session(mesh, cache=sc.ProgramCache(None)):
        announced(1)
        unsubscribe()
        announced(1.0)
    assert ("/stepcache/miss", {}) in heard
    *stages, built = seen
    assert type(built).__name__ == "Built"
    # To compile is a part of having the lowered module loaded.
    assert [event.stage for event in stages] == ["trace", "lower", "load", "compile", "load"]


def test_a_subscriber_that_raises_does_not_disturb_the_step(caplog):
    def broken(event):
        raise RuntimeError("subscriber")

    unsubscribe = sc.recorder.subscribe(broken)
    try:
        assert int(sc.step(lambda x: x + 1)(1)) == 2
    finally:
        unsubscribe()
    assert "subscriber" in caplog.text


def test_a_subscriber_may_name_the_kinds_of_events_that_it_takes():
    stages, others = [], []
    ends = [
        sc.recorder.subscribe(stages.append, StageStarted),
        sc.recorder.subscribe(others.append, Built | Loaded | BuildFailed),
    ]
    sc.step(lambda x: x + 1)(1)
    for end in ends:
        end()
    sc.step(lambda x: x + 1)(1)
    assert [event.stage for event in stages][:2] == ["trace", "lower"]
    assert [type(event) for event in others] in ([Built], [Loaded])


def test_a_listener_of_jax_monitoring_that_raises_does_not_disturb_the_step(caplog):
    def broken(name, **details):
        if name == "/stepcache/miss":
            raise RuntimeError("listener")

    jax.monitoring.register_event_listener(broken)
    try:
        with sc.Session(cache=sc.ProgramCache(None)):
            assert int(sc.step(lambda x: x + 1)(1)) == 2
    finally:
        jax.monitoring.unregister_event_listener(broken)
    assert "listener" in caplog.text


# ---- life ------------------------------------------------------------------------------------


def test_a_step_that_is_collected_frees_its_programs():
    cache = sc.ProgramCache()
    with sc.Session(jax.make_mesh((1,), ("data",)), cache=cache):
        table = np.ones(3)
        f = sc.step(lambda x: x + table)
        f(np.ones(3))
        gone = weakref.ref(f.__wrapped__)
        assert cache.info().programs == 1
        del f
        gc.collect()
        assert cache.info().programs == 0 and gone() is None


@functools.partial(jax.tree_util.register_dataclass, data_fields=["x"], meta_fields=[])
@dataclasses.dataclass
class Validated:
    x: jax.Array

    def __post_init__(self):
        assert isinstance(self.x, jax.Array)


def test_a_step_keeps_no_argument_though_its_class_can_hold_nothing_else(tmp_path):
    f = sc.step(lambda v: v.x * 2)
    argument = jnp.ones(8)
    gone = weakref.ref(argument)
    with sc.Session(cache=sc.ProgramCache(tmp_path / "programs")) as session:
        f(Validated(argument))
        session.cache.flush()
    del argument
    gc.collect()
    assert gone() is None


def test_steps_over_one_function_share_its_programs_and_keep_them():
    def f(x):
        return x * 2

    first, second = sc.step(f), sc.step(f)
    first(1.0), second(1.0)
    assert second.stats().misses == 0
    del first
    gc.collect()
    with sc.no_recompile():
        second(1.0)
    assert second.stats().programs == 1


def test_pickles_copies_and_weak_references():
    assert pickle.loads(pickle.dumps(module_level)) is module_level
    local = sc.step(operator.add, static_argnums=1)
    for again in (pickle.loads(pickle.dumps(local)), copy.copy(local), copy.deepcopy(local)):
        assert again is not local and int(again(3, 4)) == 7
    assert weakref.ref(module_level)() is module_level
    assert {module_level: 1}[module_level] == 1
    assert "module_level" in repr(module_level)


def test_a_failed_build_is_not_cached_and_counts_nothing():
    fail = [True]

    @sc.step
    def f(x):
        if fail:
            raise ValueError("not yet")
        return x

    for _ in range(2):
        with pytest.raises(ValueError, match="not yet"):
            f(1)
    assert f.stats().misses == 0 and f.last_miss is None
    fail.clear()
    f(1)
    assert f.stats().misses == 1


def test_threads_build_a_program_once():
    tracing = []
    barrier = threading.Barrier(8)

    @sc.step
    def f(x):
        tracing.append(1)
        return jnp.sin(x)

    def work():
        barrier.wait()
        f(np.ones(16))

    threads = [threading.Thread(target=work) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert f.stats().compiles == 1 and len(tracing) == 1


def test_what_no_program_can_hold_goes_to_jit_without_a_miss():
    total = jax.new_ref(jnp.zeros(()))

    @sc.step
    def f(x):
        total[...] += x
        return x

    f(1.0)
    with sc.no_recompile():
        f(2.0)
    assert float(total[...]) == 3.0
    assert (f.stats().misses, f.stats().delegated) == (0, 2)
    for each, argument in ((f, 1.0), (sc.step(lambda ref: ref[...]), total)):
        assert each.warm(argument) is None, "there is nothing to build"
    assert float(total[...]) == 3.0


@pytest.mark.parametrize("where", ["no_recompile", "on_miss"])
def test_a_program_that_calls_back_is_not_compiled_where_that_is_forbidden(where):
    step = sc.step(lambda x: (jax.debug.callback(lambda y: None, x), x)[1])
    cache = sc.ProgramCache(None)
    on_miss = {"no_recompile": "compile", "on_miss": "error"}[where]
    forbid = sc.no_recompile if where == "no_recompile" else contextlib.nullcontext
    with sc.Session(cache=cache, on_miss=on_miss), forbid(), pytest.raises(sc.RecompileError):
        step(1.0)
    with sc.Session(cache=cache):
        assert step(1.0) == 1 and step.stats().compiles == 1
    assert step.last_miss.not_stored == "", "there is no directory"
    with sc.Session(cache=cache, on_miss=on_miss), forbid():
        assert step(1.0) == 1


@pytest.mark.parametrize(
    ("option", "said"),
    [
        ({"verify": "off"}, "verify is gone: each program is traced before it runs"),
        ({"check_every": 1}, "check_every is gone: each program is traced"),
        ({"verified": True}, "no option 'verified'"),
    ],
)
def test_options_of_a_cache_that_are_gone_say_what_holds_now(option, said):
    with pytest.raises(sc.OptionError, match=said):
        sc.ProgramCache(None, **option)


def test_a_step_inside_another_step_belongs_to_it():
    inner = sc.step(lambda x: x * 2)
    outer = sc.step(lambda x: inner(x) + inner(x))
    assert float(outer(1.0)) == 4.0
    assert inner.stats().compiles == 0 and inner.stats().delegated == 2
    assert outer.stats().compiles == 1


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork on this platform")
@pytest.mark.parametrize("asked", ["call", "save", "restore"])
def test_a_forked_process_gets_an_error_at_once(asked, tmp_path):
    f = sc.step(lambda x: x * 2)
    for _ in range(3):
        f(np.ones(2))
    kept = sc.Variables(np.ones(2))
    sc.save(tmp_path / "saved", value=kept)
    calls = {
        "call": lambda: f(np.ones(2)),
        "save": lambda: sc.save(tmp_path / "saved", value=kept),
        "restore": lambda: sc.restore(tmp_path / "saved", value=kept),
    }
    read, write = os.pipe()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # JAX warns of the fork itself.
        child = os.fork()
    if child == 0:
        try:
            calls[asked]()
            answer = b"ran"
        except sc.ForkedProcessError as error:
            answer = str(error).encode()
        except BaseException as error:
            answer = repr(error).encode()
        os.write(write, answer)
        os._exit(0)
    os.close(write)
    try:
        with os.fdopen(read, "rb") as pipe:
            answer = pipe.read().decode()
    finally:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
    assert "forked process" in answer and "spawn" in answer
    assert float(f(np.ones(2))[0]) == 2.0, "the parent goes on"


@pytest.mark.skipif(not jaxcompat.PRIVATE_API, reason="it asks for the devices of a backend")
def test_warming_for_devices_that_are_only_described(monkeypatch):
    asked, device = [], jax.devices()[1]
    monkeypatch.setattr(jaxcompat, "live_backend", asked.append)
    sharding = jax.sharding.SingleDeviceSharding(device)
    with pytest.raises(sc.PlacementError, match="devices that do not exist here") as raised:
        sc.step(lambda x: x * 2).warm(jax.ShapeDtypeStruct((8,), np.float32, sharding=sharding))
    assert "step.lower" in str(raised.value) and asked == [{device}]
