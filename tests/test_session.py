import contextlib
import copy
import threading
import warnings

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import stepcache as sc
from stepcache import jaxcompat
from stepcache.engine import Engine


def make_train_step(**options):
    @sc.step(carry="state", batch="batch", **options)
    def train_step(state, batch):
        loss = batch["x"].sum()
        return jax.tree.map(lambda leaf: leaf + loss, state), {"loss": loss}

    return train_step


def state():
    return {"kernel": np.ones((4, 6), np.float32), "bias": np.ones(6, np.float32)}


def batch(rows=8):
    return {"x": np.ones((rows, 2), np.float32)}


# ---- placement -------------------------------------------------------------------------------


def test_rules_place_state_and_the_data_axis_the_batch(mesh):
    train_step = make_train_step()
    with sc.Session(mesh, rules=[("kernel", P(None, "model"))]):
        new, metrics = train_step(state(), batch())
        rows = {row.path: row for row in train_step.explain(state(), batch()).arguments}
    assert new["kernel"].sharding == NamedSharding(mesh, P(None, "model"))
    assert new["bias"].sharding == NamedSharding(mesh, P())
    assert rows["batch/x"].target == "P('data')"
    np.testing.assert_allclose(new["kernel"], 17.0)
    assert float(metrics["loss"]) == 16.0


def test_the_first_rule_that_matches_wins(mesh):
    with sc.Session(mesh, rules=[("bias", P("model")), ("state", P())]):
        new, _ = make_train_step()(state(), batch())
    assert new["bias"].sharding.spec == P("model")
    assert new["kernel"].sharding.spec == P()


def test_what_came_placed_by_a_session_finds_the_same_program(mesh):
    """No second compilation when uncommitted state comes back committed."""
    train_step = make_train_step()
    with sc.Session(mesh, rules=[("kernel", P(None, "model"))]):
        current = jax.tree.map(jnp.asarray, state())
        for _ in range(4):
            current, _ = train_step(current, batch())
    stats = train_step.stats()
    assert (stats.misses, stats.traces, stats.compiles) == (1, 1, 1)


def test_a_host_batch_is_split_and_not_replicated(mesh):
    @sc.step(batch="x")
    def shards(x):
        return x

    with sc.Session(mesh):
        lowered = shards.lower(np.ones((8, 3), np.float32))
        compiled = lowered.compile()
    (sharding,) = jax.tree.leaves(compiled.input_shardings)
    assert sharding.shard_shape((8, 3)) == (2, 3)


def test_arrays_the_user_placed_are_left_where_they_are(mesh):
    placed = jax.device_put(np.ones((8, 2)), NamedSharding(mesh, P(None, "model")))

    @sc.step
    def same(x):
        return x

    with sc.Session(mesh):
        assert same.explain(placed).arguments[0].target == "stays"
        assert same(placed).sharding.is_equivalent_to(placed.sharding, 2)


def test_a_call_on_other_devices_is_left_to_jax(mesh):
    """As an evaluation on one device is, of values that the user has put there."""
    one = jax.make_mesh((1,), ("data",), axis_types=(AxisType.Auto,), devices=jax.devices()[3:4])
    double = sc.step(lambda x: x * 2)
    with sc.Session(mesh):
        x = jax.device_put(np.ones(3, np.float32), jax.devices()[3])
        assert double(x).devices() == double(x).devices() == {jax.devices()[3]}
        assert double(jax.device_put(x, NamedSharding(one, P()))).devices() == {jax.devices()[3]}
        assert len(double(np.ones(3, np.float32)).devices()) == 8
    assert double.stats().misses == 3


def test_in_shardings_of_the_step_come_before_rules(mesh):
    wanted = NamedSharding(mesh, P("model"))

    @sc.step(in_shardings=({"x": wanted, "y": None},))
    def same(tree):
        return tree

    with sc.Session(mesh, rules=[("x|y", P("data"))]):
        for _ in range(2):
            out = same({"x": np.ones(8), "y": np.ones(8)})
            same(out)
    assert out["x"].sharding.is_equivalent_to(wanted, 1)
    assert out["y"].sharding.is_equivalent_to(NamedSharding(mesh, P("data")), 1)
    assert same.stats().compiles == 1


def test_specs_in_in_shardings_mean_the_sessions_mesh(mesh):
    @sc.step(in_shardings=P("model"), out_shardings=P("data"))
    def same(x):
        return jax.lax.with_sharding_constraint(x * 2, P("model"))

    with sc.Session(mesh):
        assert same(np.ones(8)).sharding == NamedSharding(mesh, P("data"))


def test_constraints_inside_a_step_mean_the_sessions_mesh(mesh):
    @sc.step
    def f(x):
        return jax.lax.with_sharding_constraint(x, P(None, "model"))

    with sc.Session(mesh):
        assert f(np.ones((8, 2))).sharding.spec == P(None, "model")


@pytest.mark.parametrize("pad", [(), sc.Pad("x", sizes=(8, 16))], ids=["", "padded"])
def test_stages_of_a_step_mean_the_sessions_mesh_too(mesh, pad):
    @sc.step(batch="x", pad=pad)
    def f(x):
        return jax.lax.with_sharding_constraint(x * 2, P("data"))

    with sc.Session(mesh):
        x = np.ones(4 if pad else 8)
        assert f.eval_shape(x).shape == x.shape
        assert "sharding_constraint" in str(f.trace(x).jaxpr)
        assert "sharding" in f.lower(x).as_text()
        assert f(x).shape == x.shape


def test_scalars_keys_and_static_arguments(mesh):
    @sc.step(carry="state", static_argnames="n")
    def f(state, rate, key, n):
        return state + rate * n + jax.random.normal(key, state.shape)

    with sc.Session(mesh):
        out = f(np.zeros(3, np.float32), 0.5, jax.random.key(0), n=2)
    np.testing.assert_allclose(out, 1.0 + jax.random.normal(jax.random.key(0), (3,)), rtol=1e-6)


def test_an_explicit_mesh(mesh):
    explicit = jax.make_mesh((4, 2), ("data", "model"), axis_types=(AxisType.Explicit,) * 2)
    train_step = make_train_step()
    with sc.Session(explicit, rules=[("kernel", P(None, "model"))]):
        current, _ = train_step(state(), batch())
        current, _ = train_step(current, batch())
    assert current["kernel"].sharding.spec == P(None, "model")
    assert train_step.stats().compiles == 1


def test_data_axis_of_several_axes_and_none(mesh):
    @sc.step(batch="x")
    def same(x):
        return x

    with sc.Session(mesh, data_axis=("data", "model")):
        assert same(np.ones(8)).sharding.shard_shape((8,)) == (1,)
    with sc.Session(mesh, data_axis=None):
        assert same(np.ones(7)).sharding.is_fully_replicated


def test_without_a_session_a_step_places_nothing():
    step = sc.step(lambda x: x)
    assert sc.current_session().mesh is None
    assert step(np.ones(8)).sharding == jax.jit(lambda x: x)(np.ones(8)).sharding


def test_a_mesh_set_by_the_user_is_not_replaced(mesh):
    other = jax.make_mesh((8,), ("data",), axis_types=(AxisType.Auto,))

    @sc.step
    def f(x):
        return jax.lax.with_sharding_constraint(x, P("data"))

    with sc.Session(other), jax.set_mesh(other):
        assert f(np.ones(8)).sharding.mesh.shape == {"data": 8}


# ---- what cannot be placed -------------------------------------------------------------------


def test_an_axis_that_does_not_divide_is_an_error(mesh):
    with sc.Session(mesh, rules=[("kernel", P("data"))]):
        with pytest.raises(sc.PlacementError) as raised:
            make_train_step()({"kernel": np.ones((6, 3)), "bias": np.ones(2)}, batch())
    text = str(raised.value)
    for part in ("state/kernel", "dimension 0", "'data'", "4", "size 6", "'kernel'"):
        assert part in text


def test_a_batch_that_does_not_divide_is_an_error(mesh):
    with sc.Session(mesh), pytest.raises(sc.PlacementError) as raised:
        make_train_step()(state(), batch(7))
    text = str(raised.value)
    for part in ("batch/x", "dimension 0", "'data'", "a batch is split", "size 7", "pad"):
        assert part in text


def test_a_spec_longer_than_the_leaf_is_an_error(mesh):
    with sc.Session(mesh, rules=[("bias", P(None, "model"))]):
        with pytest.raises(sc.PlacementError, match="more dimensions"):
            make_train_step()(state(), batch())


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"rules": [("kernel", P("expert"))]}, "'expert'"),
        ({"data_axis": "batch"}, "data_axis='batch'"),
        ({"rules": [("x", P(("data", "nowhere")))]}, "'nowhere'"),
    ],
)
def test_a_mesh_without_the_axis_is_an_error_at_once(mesh, options, named):
    with pytest.raises(sc.PlacementError, match=named):
        sc.Session(mesh, **options)


@pytest.mark.parametrize(
    "rules",
    [
        [("kernel",)],
        ["kernel"],
        [("(", P())],
        [("kernel", "model")],
        [(3, P())],
        [("kernel", P(P.UNCONSTRAINED))],
    ],
)
def test_malformed_rules_are_an_error_at_once(rules):
    with pytest.raises(sc.OptionError, match="rule 0"):
        sc.Rules(rules)


@pytest.mark.parametrize(
    "options",
    [{"on_miss": "explode"}, {"mesh": "cpu"}, {"cache": "~/programs"}, {"agree_timeout": "60"}],
)
def test_malformed_sessions(options):
    with pytest.raises(sc.OptionError):
        sc.Session(**options)


@pytest.mark.parametrize("options", [{"rules": [("kernel", P("data"))]}, {"data_axis": None}])
def test_what_speaks_of_a_mesh_needs_one(options):
    (name,) = options
    with pytest.raises(sc.OptionError, match=f"{name} without a mesh") as raised:
        sc.Session(**options)
    assert "jax.make_mesh" in raised.value.hint


@pytest.mark.parametrize("options", [{"name": "me"}, {"watch": "you"}, {"deadline": 5}])
def test_what_is_for_tasks_needs_a_target(options):
    with pytest.raises(sc.OptionError, match=f"{next(iter(options))} without a target"):
        sc.Session(**options)


def test_a_rule_that_matches_nothing_is_warned_of_once(mesh):
    rules = [("kernel", P(None, "model")), ("karnel", P("model")), ("^prompt/", P())]
    train_step = make_train_step()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        with sc.Session(mesh, rules=rules):
            train_step(state(), batch())
            early = list(caught)
            train_step(state(), batch(16))
    (warning,) = early
    assert issubclass(warning.category, sc.UnmatchedRuleWarning)
    assert "karnel" in str(warning.message) and "state/bias" in str(warning.message)
    assert warning.filename == __file__
    # The rule about another step's argument is spoken of when the session is left without one.
    assert ["prompt" in str(w.message) for w in caught[1:]] == [True]


# ---- sessions without a mesh -----------------------------------------------------------------


BARE = {
    "alone": dict,
    "cache": lambda: {"cache": sc.ProgramCache(None)},
    "count_hits": lambda: {"count_hits": True},
    "max_step_bytes": lambda: {"max_step_bytes": 1 << 20},
}


@pytest.mark.sample
@pytest.mark.parametrize("options", BARE.values(), ids=list(BARE))
@pytest.mark.parametrize("roles", [{}, {"batch": "x"}, {"carry": "x"}], ids=str)
def test_a_session_without_a_mesh_places_nothing(options, roles):
    """Values of any shape are, and become, what they would under plain `jax.jit`."""
    placed = jax.device_put(np.ones(7, np.float32), jax.devices()[3])
    step = sc.step(lambda x, y: (x * 2, y), **roles)
    plain = jax.jit(lambda x, y: (x * 2, y))
    session = sc.Session(**options())
    assert session.mesh is None and len(session.rules) == 0
    with session:
        for x in (np.ones(7, np.float32), jnp.ones((3, 5)), 1.0, placed):
            expected, other = plain(x, 2)
            out, y = step(x.copy() if isinstance(x, jax.Array) else x, 2)
            assert out.sharding == expected.sharding and out.committed == expected.committed
            assert y.committed == other.committed
            assert out.weak_type == expected.weak_type
            np.testing.assert_array_equal(out, expected)
        row = step.explain(np.ones(7), 1).arguments[0]
    assert row.target == "as jax.jit" and row.why.endswith("not placed by a session")


@pytest.fixture
def python_calls(monkeypatch):
    """The calls that Python has seen."""
    calls, run = [], Engine.run

    def counted(self, *args, **kwargs):
        calls.append(args)
        return run(self, *args, **kwargs)

    monkeypatch.setattr(Engine, "run", counted)
    return calls


@pytest.mark.parametrize("kind", ["called", "warmed"])
@pytest.mark.parametrize("first", ["outside", "inside"])
def test_what_is_known_outside_hits_inside_and_the_reverse(first, kind, python_calls):
    step = sc.step(lambda state, x: state + x.sum(), carry="state")
    session, outside = sc.Session(on_miss="error"), contextlib.nullcontext()
    before, after = (outside, session) if first == "outside" else (session, outside)
    state, x = jnp.float32(0), np.ones(7, np.float32)
    with before:
        step.warm(state, x)
        state = step(state, x) if kind == "called" else state
    with after, sc.no_recompile():
        for _ in range(5):
            state = step(state, x)
    assert float(state) == (42.0 if kind == "called" else 35.0)
    assert step.stats().compiles == 1
    if jaxcompat.PRIVATE_API:  # The dispatcher serves what it has been told outside.
        assert len(python_calls) == 1
    with session, pytest.raises(sc.RecompileError, match=r"float32\[7\] → float32\[8\]"):
        step(state, np.ones(8, np.float32))


def test_variables_made_outside_hit_inside():
    step = sc.step(lambda state, x: state + x.sum(), carry="state")
    state = step(sc.Variables(np.zeros(7, np.float32)), 1.0)
    with sc.Session(on_miss="error"), sc.no_recompile():
        state = step(state, 1.0)
    np.testing.assert_array_equal(step(state, 1.0).value, np.full(7, 3.0))
    assert step.stats().compiles == 1


def test_sessions_without_a_mesh_share_a_cache_or_do_not():
    step = sc.step(lambda x: x * 2)
    cache = sc.ProgramCache(None)
    for _ in range(2):
        with sc.Session(cache=cache):
            step(np.ones(7))
    assert step.stats().compiles == 1
    step(np.ones(7))
    assert step.stats().compiles == 2 and step.last_miss.reason == "new session"


def test_entering_a_session_without_a_mesh_traces_nothing_anew():
    traced = []
    other = jax.jit(lambda x: traced.append(1) or x)
    other(1.0)
    for options in ({}, {"on_miss": "error"}):
        with sc.Session(**options):
            other(1.0)
    assert len(traced) == 1


def test_hits_are_counted_without_a_mesh():
    step = sc.step(lambda x: x * 2)
    for _ in range(3):
        step(np.ones(7))  # No hit from here on is seen by Python, but in the session all are.
    before = step.stats().hits
    with sc.Session(count_hits=True):
        for _ in range(10):
            step(np.ones(7))
    assert step.stats().hits == before + 10 and step.stats().compiles == 1


def test_a_budget_without_a_mesh():
    step, x = sc.step(lambda x: x * 2), np.ones(7, np.float32)
    step(x)
    with sc.Session(max_step_bytes=27):
        with pytest.raises(sc.TransferBudgetError, match="x: 28 bytes"):
            step(x)
        step(jnp.asarray(x))
    with sc.Session(max_step_bytes=28):
        step(x)
    assert step.stats().compiles == 1


def test_a_closed_session_without_a_mesh_refuses_calls_also_after_hits():
    step = sc.step(lambda x: x * 2)
    session = sc.Session()
    step(np.ones(7))
    with session:
        step(np.ones(7))
        session.close()
        with pytest.raises(sc.SessionClosedError):
            step(np.ones(7))
    step(np.ones(7))


# ---- sessions and programs -------------------------------------------------------------------


def test_one_step_in_two_sessions_runs_two_programs(mesh):
    other = jax.make_mesh((2, 4), ("data", "model"), axis_types=(AxisType.Auto,) * 2)
    step = sc.step(lambda x: x * 2)
    sessions = [sc.Session(mesh), sc.Session(other)]
    for _ in range(3):
        for session in sessions:
            with session:
                assert step(np.ones(8)).sharding.mesh == session.mesh
    assert step.stats().compiles == 2
    assert step.last_miss.changes[0].part == "mesh"


@pytest.mark.parametrize(
    ("other", "note"),
    [
        (lambda d: jax.sharding.Mesh(d[::-1].reshape(4, 2), ("data", "model")), "cpu"),
        (lambda d: jax.sharding.Mesh(d.reshape(4, 2), ("data", "tensor")), "tensor"),
        (lambda d: jax.sharding.Mesh(d.reshape(2, 4), ("data", "model")), "2"),
        (
            lambda d: jax.sharding.Mesh(
                d.reshape(4, 2), ("data", "model"), axis_types=(AxisType.Explicit,) * 2
            ),
            "Explicit",
        ),
    ],
    ids=["device order", "axis name", "axis sizes", "axis types"],
)
def test_another_mesh_is_another_program(other, note):
    devices = np.array(jax.devices())
    mesh = jax.sharding.Mesh(devices.reshape(4, 2), ("data", "model"))
    step = sc.step(lambda x: x * 2)
    for each in (mesh, other(devices)):
        with sc.Session(each):
            step(np.ones(8))
    assert step.stats().compiles == 2
    assert any(c.part == "mesh" and note in c.after for c in step.last_miss.changes)


def test_sessions_of_equal_meshes_share_programs(mesh):
    step = sc.step(lambda x: x * 2)
    for _ in range(2):
        with sc.Session(mesh):
            step(np.ones(8))
    assert step.stats().compiles == 1


def test_a_session_made_anew_compiles_nothing_anew(mesh):
    """Neither steps nor whatever else runs in it."""
    traced = []
    other = jax.jit(lambda x: traced.append(1) or x)
    step = sc.step(lambda x: x * 3)
    for _ in range(3):
        with sc.Session(mesh, rules=[("x", P("data"))]):
            other(1.0)
            step(np.ones(8))
            assert len(traced) == 1
    assert step.stats().compiles == 1
    if jaxcompat.PRIVATE_API:
        assert step.stats().hits == 0, "the dispatcher had to be told again"
    with sc.Session(mesh, rules=[("x", P("model"))]):
        assert step(np.ones(8)).sharding.spec == P("model")


def test_sessions_with_caches_of_their_own_share_nothing(mesh):
    step = sc.step(lambda x: x * 2)
    caches = [sc.ProgramCache(), sc.ProgramCache()]
    for cache in caches:
        with sc.Session(mesh, cache=cache):
            step(np.ones(8))
    assert [cache.info().builds for cache in caches] == [1, 1]
    assert step.last_miss.reason == "new session"


def test_the_innermost_session_counts(mesh):
    outer, inner = sc.Session(mesh), sc.Session(mesh, data_axis=None)
    assert sc.current_session().mesh is None
    with outer:
        assert sc.current_session() is outer
        with inner:
            assert sc.current_session() is inner
            with outer:
                assert sc.current_session() is outer
            assert sc.current_session() is inner
        assert sc.current_session() is outer
    assert sc.current_session().mesh is None


def test_a_step_of_a_session_runs_in_it_wherever_it_is_called(mesh):
    session = sc.Session(mesh)

    @session.step
    def same(x):
        return x

    assert same(np.ones(8)).sharding.mesh == mesh
    with sc.Session():
        assert same(np.ones(8)).sharding.mesh == mesh


@pytest.mark.parametrize("take", [copy.copy, copy.deepcopy], ids=["copy", "deepcopy"])
def test_a_copy_of_a_step_of_a_session_runs_in_it_too(mesh, take):
    step = sc.Session(mesh).step(lambda x: x * 2, batch="x")
    assert take(step)(np.ones(8)).sharding == step(np.ones(8)).sharding


def test_a_session_that_cannot_be_entered_is_not_current(mesh, monkeypatch):
    session = sc.Session(mesh)

    def lost(ranks):
        raise sc.RankLostError("rank 1 is lost", (1,))

    session._scope.together = lost
    with pytest.raises(sc.RankLostError):
        session.__enter__()
    assert sc.current_session() is not session


def test_a_session_is_entered_by_each_thread():
    # One device: XLA on CPU can deadlock when threads launch programs over several at once, under
    # plain jax.jit too.
    mesh = jax.sharding.Mesh(np.array(jax.devices()[1:2]), ("data",))
    session = sc.Session(mesh)
    step = sc.step(lambda x: x * 2)
    results, errors = [], []

    def work():
        try:
            outside = step(np.ones(8)).sharding
            with session:
                for _ in range(20):
                    inside = step(np.ones(8)).sharding
            results.append((outside, inside))
        except Exception as error:
            errors.append(error)

    threads = [threading.Thread(target=work) for _ in range(8)]
    with session:
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert not errors
    assert {str(outside) for outside, _ in results} == {str(jnp.ones(8).sharding)}
    assert all(inside.mesh == mesh for _, inside in results)
    assert step.stats().compiles == 2


def test_counting_hits(mesh):
    step = sc.step(lambda x: x * 2)
    with sc.Session(mesh, count_hits=True):
        for _ in range(10):
            step(np.ones(8))
    assert step.stats().hits == 9
    with sc.Session(mesh):
        for _ in range(10):
            step(np.ones(8))
    if jaxcompat.PRIVATE_API:  # Hits that JAX's dispatcher serves are not seen.
        assert step.stats().hits < 15


# ---- what a miss may do ----------------------------------------------------------------------


def test_on_miss_error_leaves_only_warm_to_build(mesh):
    step = sc.step(lambda x: x * 2)
    with sc.Session(mesh, on_miss="error"):
        with pytest.raises(sc.RecompileError, match="first call") as raised:
            step(np.ones(8))
        assert raised.value.miss.reason == "first call"
        step.warm(jax.ShapeDtypeStruct((8,), np.float32))
        step(np.ones(8))
        with pytest.raises(sc.RecompileError, match=r"x: float32\[8\] → float32\[16\] \(axis 0\)"):
            step(np.ones(16))
    assert step.stats().compiles == 1


def test_on_miss_warn_names_the_reason_but_not_the_first(mesh):
    step = sc.step(lambda x: x * 2)
    with sc.Session(mesh, on_miss="warn"):
        step(np.ones(8))
        with pytest.warns(sc.RecompileWarning, match=r"float32\[8\] → float32\[16\]") as caught:
            step(np.ones(16))
    assert caught[0].filename == __file__


def test_no_recompile_lets_known_programs_run(mesh):
    step = sc.step(lambda x: x * 2)
    step(np.ones(8))
    step._clear_cache()  # The program stays; only the dispatcher has to be told again.
    with sc.no_recompile():
        step(np.ones(8))
        with pytest.raises(sc.RecompileError):
            step(np.ones(9))
        step.warm(np.ones(9))
        step(np.ones(9))
    step(np.ones(10))


# ---- closing ---------------------------------------------------------------------------------


def test_a_closed_session_refuses_calls_also_after_hits(mesh):
    step = sc.step(lambda x: x * 2)
    session = sc.Session(mesh)
    with session:
        for _ in range(3):
            step(np.ones(8))
        session.close()
        with pytest.raises(sc.SessionClosedError, match="<lambda>"):
            step(np.ones(8))
    with pytest.raises(sc.SessionClosedError), session:
        pass
    step(np.ones(8))


def test_the_default_session_cannot_be_closed():
    with pytest.raises(sc.OptionError, match="default session"):
        sc.current_session().close()


def test_closing_while_a_step_builds_raises_once_it_is_built(mesh):
    session, tracing, closed = sc.Session(mesh), threading.Event(), threading.Event()

    @session.step
    def slow(x):
        tracing.set()
        assert closed.wait(60)
        return x

    raised = []

    def work():
        try:
            slow(np.ones(8))
        except sc.SessionClosedError as error:
            raised.append(error)

    worker = threading.Thread(target=work)
    worker.start()
    assert tracing.wait(60)
    session.close()
    closed.set()
    worker.join(60)
    assert len(raised) == 1
